"""All that can be known, and refused, before anything is compiled."""

from collections.abc import Callable
import dataclasses
import difflib
import math

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from rlhf_jax.algorithms import advantages
from rlhf_jax.algorithms import aggregation
from rlhf_jax.algorithms import kl
from rlhf_jax.algorithms import policy_losses
from rlhf_jax.data import packing
from rlhf_jax.data import pipeline
from rlhf_jax.data import sources
from rlhf_jax.data import tokenizer as tokenizer_lib
from rlhf_jax.models import config as model_config
from rlhf_jax.models import hf
from rlhf_jax.rewards import rules as reward_rules
from rlhf_jax.sampling import engine
from rlhf_jax.sharding import mesh as mesh_lib

# Prompts that are compared to find what all of them have in common.
_PREFIX_PROMPTS = 256


@dataclasses.dataclass(frozen=True)
class Numbers:
  """The batch arithmetic of a stage, in stated units."""

  steps: int  # of this stage
  sequences_per_step: int
  minibatches_per_step: int
  updates_per_step: int
  longest_sequence: int  # tokens
  rows_per_microbatch: int  # over all data groups
  tokens_per_microbatch: int  # over all data groups


@dataclasses.dataclass(frozen=True)
class Setup:
  """One stage, ready to run."""

  name: str
  trainer: str
  config: ConfigDict  # with the overrides of the stage
  first_step: int  # global step before its first
  numbers: Numbers
  mesh: jax.sharding.Mesh
  model: model_config.ModelConfig
  tokenizer: object
  stop_ids: tuple[int, ...]
  train: pipeline.PromptStream
  validation: list[pipeline.Prompt]
  prefix: np.ndarray  # tokens that every prompt begins with
  rewards: dict[str, Callable]
  reward_weights: dict[str, float]

  def sampler(self, samples_per_prompt: int) -> dict:
    """Keywords of `engine.generate` that stay the same all stage."""
    config = self.config
    return dict(
      config=self.model,
      mesh=self.mesh,
      shape=engine.Shape(
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_new_tokens=config.rollout.max_new_tokens,
        slots=config.rollout.slots,
        samples_per_prompt=samples_per_prompt,
      ),
      stop_ids=self.stop_ids,
      prefix=self.prefix,
      dtype=dtype(config.rollout.dtype),
    )


def dtype(name: str) -> jnp.dtype:
  """'auto' is bfloat16 on accelerators and float32 on CPUs."""
  if name == 'auto':
    name = 'float32' if jax.default_backend() == 'cpu' else 'bfloat16'
  if name not in ('float32', 'bfloat16'):
    raise ValueError(f"dtype {name!r} is not 'float32', 'bfloat16' or 'auto'")
  return jnp.dtype(name)


def keys_of(config: ConfigDict, prefix: str = '') -> dict[str, object]:
  """{'dotted.key': value} of every leaf."""
  flat = {}
  for name, value in config.items():
    if isinstance(value, ConfigDict):
      flat |= keys_of(value, f'{prefix}{name}.')
    else:
      flat[prefix + name] = value
  return flat


def stage_config(config: ConfigDict, overrides: dict) -> ConfigDict:
  """A copy of the config with the overrides of one stage.

  Raises:
    ValueError: an override names no key; suggests the nearest one.
  """
  copy = config.copy_and_resolve_references()  # nested parts too
  copy.lock()
  known = keys_of(config)
  for name, value in overrides.items():
    if name not in known:
      near = difflib.get_close_matches(name, known, 1)
      raise ValueError(
        f'stage override {name!r} is not a config key'
        + (f'; did you mean {near[0]!r}?' if near else '')
      )
    *parents, leaf = name.split('.')
    at = copy
    for parent in parents:
      at = at[parent]
    at[leaf] = value
  return copy


def check_overrides(config: ConfigDict, from_flags: set[str]) -> list[str]:
  """Refuses command-line values that no stage would read.

  Args:
    config: the whole config.
    from_flags: dotted keys set on the command line.

  Returns:
    Notes on keys that only some stages override.
  """
  notes = []
  for key in sorted(from_flags):
    own = [name for name, _, overrides in config.stages if key in overrides]
    if own and len(own) == len(config.stages):
      raise ValueError(
        f'--config.{key} would change nothing: every stage ({", ".join(own)})'
        ' sets it for itself; change it in the config file'
      )
    if own:
      notes.append(
        f'--config.{key}: stage {", ".join(own)} keeps its own value'
      )
  return notes


def stages(config: ConfigDict, trainers: tuple[str, ...]) -> list[Setup]:
  """Prepares every stage of a run.

  Raises:
    ValueError: anything that the run could not do; says what to change.
  """
  if not config.stages:
    raise ValueError('config.stages is empty: name at least one stage')
  names = [name for name, _, _ in config.stages]
  if len(set(names)) != len(names):
    raise ValueError(f'stages must have different names, got {names}')
  mesh = _mesh(config)
  tokenizer = tokenizer_lib.load(config.tokenizer or config.model.path)
  model = _model(config)
  tokenizer_lib.check_against_model(tokenizer, model.vocab_size)
  result, first = [], 0
  for name, trainer, overrides in config.stages:
    if trainer not in trainers:
      raise ValueError(
        f'stage {name!r} asks for the trainer {trainer!r}: choose one of'
        f' {sorted(trainers)}'
      )
    try:
      setup = _stage(
          name, trainer, stage_config(config, dict(overrides)), first, mesh,
          model, tokenizer,
      )  # fmt: skip
    except ValueError as error:
      raise ValueError(f'stage {name!r}: {error}') from error
    result.append(setup)
    first += setup.numbers.steps
  return result


def _mesh(config) -> jax.sharding.Mesh:
  if jax.process_count() > 1:
    raise ValueError(
      f'{jax.process_count()} processes: runs of several processes are not'
      ' supported yet, start one process with all its devices'
    )
  devices = jax.devices()
  if not 0 <= config.mesh.devices <= len(devices):
    raise ValueError(
      f'mesh.devices={config.mesh.devices}, but there are {len(devices)}'
    )
  return mesh_lib.make(
    config.mesh.data,
    config.mesh.fsdp,
    config.mesh.tensor,
    devices=devices[: config.mesh.devices or len(devices)],
  )


def _model(config) -> model_config.ModelConfig:
  architecture = config.model.architecture.to_dict()
  if config.model.path and architecture:
    raise ValueError(
      'model.path and model.architecture are both set: a model comes from a'
      ' folder or from scratch'
    )
  if config.model.path:
    return hf.load_config(config.model.path)
  if not architecture:
    raise ValueError(
      'no model: set model.path to a Hugging Face folder or hub id, or'
      ' model.architecture for one from scratch'
    )
  return model_config.ModelConfig(**architecture)


def _stage(name, trainer, config, first, mesh, model, tokenizer) -> Setup:
  """Loads the data of a stage and checks everything about it."""
  stop = tuple(sorted(tokenizer_lib.stop_ids(tokenizer, config.rollout.stop)))
  if not config.data.train.source:
    raise ValueError(
      f'data.train.source is empty: choose one of {sorted(sources.SOURCES)}'
    )
  train = sources.load(
    config.data.train.source, **config.data.train.args.to_dict()
  )
  held_out = []
  if config.data.validation.source:
    held_out = sources.load(
      config.data.validation.source, **config.data.validation.args.to_dict()
    )
    sources.check_disjoint(train, held_out)
    train = sources.exclude(train, held_out)
  render = dict(
    max_prompt_length=config.data.max_prompt_tokens,
    overlong=config.data.overlong,
    chat=config.data.chat,
    prompt_format=config.data.prompt_format,
    system=config.data.system,
  )
  stream = pipeline.PromptStream(train, tokenizer, seed=config.seed, **render)
  validation = []
  if held_out:
    fixed = pipeline.PromptStream(held_out, tokenizer, shuffle=False, **render)
    count = min(config.evaluation.max_prompts or len(fixed), len(fixed))
    validation = fixed.batch(0, count)
  elif config.evaluation.only:
    raise ValueError('evaluation.only needs data.validation.source')
  rewards = {
    key: reward_rules.load(value.rule, **value.args.to_dict())
    for key, value in config.rewards.items()
  }
  if trainer == 'ppo':
    _check_ppo(config, model, rewards)
  numbers = _numbers(config, trainer, mesh, model, len(stream))
  probe = stream.batch(0, min(_PREFIX_PROMPTS, len(stream))) + validation
  return Setup(
    name=name,
    trainer=trainer,
    config=config,
    first_step=first,
    numbers=numbers,
    mesh=mesh,
    model=model,
    tokenizer=tokenizer,
    stop_ids=stop,
    train=stream,
    validation=validation,
    prefix=_prefix(probe) if config.rollout.share_prefix else np.zeros(0, int),
    rewards=rewards,
    reward_weights={
      key: float(value.weight) for key, value in config.rewards.items()
    },
  )


def _prefix(prompts) -> np.ndarray:
  """The tokens with which all of some prompts begin."""
  lengths = np.array([len(prompt.ids) for prompt in prompts], np.int32)
  tokens = np.zeros((len(prompts), lengths.max()), np.int32)
  for row, prompt in zip(tokens, prompts):
    row[: len(prompt.ids)] = prompt.ids
  return tokens[0, : packing.common_prefix(tokens, lengths)]


def _numbers(config, trainer, mesh, model, prompts_in_data) -> Numbers:
  """The batch arithmetic; every division must be exact."""
  rollout, training = config.rollout, config.training
  for key, value in {
    'rollout.prompts_per_step': rollout.prompts_per_step,
    'rollout.samples_per_prompt': rollout.samples_per_prompt,
    'rollout.max_new_tokens': rollout.max_new_tokens,
    'data.max_prompt_tokens': config.data.max_prompt_tokens,
    'training.sequences_per_minibatch': training.sequences_per_minibatch,
    'training.epochs_per_step': training.epochs_per_step,
    'training.tokens_per_row': training.tokens_per_row,
    'training.tokens_per_microbatch': training.tokens_per_microbatch,
  }.items():
    if value < 1:
      raise ValueError(f'{key}={value} must be 1 or more')
  longest = config.data.max_prompt_tokens + rollout.max_new_tokens
  if longest > model.max_positions:
    raise ValueError(
      f'data.max_prompt_tokens={config.data.max_prompt_tokens} and'
      f' rollout.max_new_tokens={rollout.max_new_tokens} make sequences of'
      f' {longest} tokens, the model has {model.max_positions} positions'
    )
  if longest > training.tokens_per_row:
    raise ValueError(
      f'training.tokens_per_row={training.tokens_per_row} cannot hold the longest'
      f' sequence of {longest} tokens (max_prompt_tokens + max_new_tokens):'
      ' raise tokens_per_row'
    )
  if training.tokens_per_microbatch % training.tokens_per_row:
    raise ValueError(
      f'training.tokens_per_microbatch={training.tokens_per_microbatch} must be a'
      f' multiple of training.tokens_per_row={training.tokens_per_row}'
    )
  if trainer == 'ppo':
    prompts = rollout.prompts_per_step
    sequences = prompts * rollout.samples_per_prompt
    if training.sequences_per_minibatch % rollout.samples_per_prompt:
      raise ValueError(
        'training.sequences_per_minibatch='
        f'{training.sequences_per_minibatch} must be a multiple of'
        f' rollout.samples_per_prompt={rollout.samples_per_prompt}: the'
        ' samples of a prompt stay in one mini-batch'
      )
    if sequences % training.sequences_per_minibatch:
      raise ValueError(
        f'{prompts} prompts x {rollout.samples_per_prompt} samples ='
        f' {sequences} sequences per step cannot be divided into mini-batches'
        f' of training.sequences_per_minibatch={training.sequences_per_minibatch}'
      )
    minibatches = sequences // training.sequences_per_minibatch
    updates = minibatches * training.epochs_per_step
  else:
    prompts = sequences = training.sequences_per_minibatch
    minibatches = updates = 1
  if prompts > prompts_in_data:
    raise ValueError(
      f'a step takes {prompts} prompts, the training set has'
      f' {prompts_in_data}: lower the batch or add data'
    )
  if (config.steps > 0) == (config.epochs > 0):
    raise ValueError(
      f'set the length of the stage by one of steps={config.steps} and'
      f' epochs={config.epochs}'
    )
  steps = config.steps or math.floor(config.epochs * prompts_in_data / prompts)
  if steps < 1:
    raise ValueError(
      f'epochs={config.epochs} of {prompts_in_data} prompts are less than one'
      f' step of {prompts} prompts'
    )
  groups = mesh_lib.data_groups(mesh)
  return Numbers(
    steps=steps,
    sequences_per_step=sequences,
    minibatches_per_step=minibatches,
    updates_per_step=updates,
    longest_sequence=longest,
    rows_per_microbatch=(
      training.tokens_per_microbatch // training.tokens_per_row * groups
    ),
    tokens_per_microbatch=training.tokens_per_microbatch * groups,
  )


def _check_ppo(config, model, rewards) -> None:
  """Refuses settings that would be ignored or make no sense together."""
  algorithm = config.algorithm
  if not rewards:
    raise ValueError(
      f'no rewards: add one of {sorted(reward_rules.RULES)} to config.rewards'
    )
  if config.rollout.temperature <= 0:
    raise ValueError(
      f'rollout.temperature={config.rollout.temperature} is greedy: it has no'
      ' log-probs to train on; set it above 0'
    )
  advantages.estimator(algorithm.advantages)
  policy_losses.loss(algorithm.policy_loss)
  if algorithm.aggregation not in aggregation.MODES:
    raise ValueError(
      f'algorithm.aggregation={algorithm.aggregation!r} is not one of'
      f' {sorted(aggregation.MODES)}'
    )
  kl.estimator(algorithm.kl_reward.estimator)
  kl.loss_estimator(algorithm.kl_loss.estimator)
  for name in ('kl_reward', 'kl_loss'):
    controller(algorithm[name])
  with_critic = algorithm.advantages in advantages.CRITIC_ESTIMATORS
  if config.rollout.samples_per_prompt < 2 and not with_critic:
    raise ValueError(
      f'algorithm.advantages={algorithm.advantages!r} compares the samples of'
      ' a prompt: set rollout.samples_per_prompt to 2 or more'
    )
  if algorithm.drop_uniform_groups and config.rollout.samples_per_prompt < 2:
    raise ValueError(
      'algorithm.drop_uniform_groups with rollout.samples_per_prompt=1 would'
      ' drop every sequence: sample each prompt 2 times or more'
    )
  if not with_critic:
    for key, unset in (
        ('gamma', 1.0), ('lam', 1.0), ('bootstrap_truncated', False)
    ):  # fmt: skip
      if algorithm[key] != unset:
        raise ValueError(
          f'algorithm.{key}={algorithm[key]} would be ignored by'
          f' algorithm.advantages={algorithm.advantages!r}: set it to {unset}'
        )
    if config.critic.path or config.critic.warmup_steps:
      raise ValueError(
        f'algorithm.advantages={algorithm.advantages!r} has no critic:'
        " critic.path must be '' and critic.warmup_steps 0"
      )
  if config.critic.path:
    critic = hf.load_config(config.critic.path)
    if critic.vocab_size != model.vocab_size:
      raise ValueError(
        f'the critic of {config.critic.path} has a vocabulary of'
        f' {critic.vocab_size}, the policy one of {model.vocab_size}'
      )
  if algorithm.bootstrap_truncated and algorithm.mask_truncated:
    raise ValueError(
      'algorithm.bootstrap_truncated and algorithm.mask_truncated exclude'
      ' each other'
    )
  if algorithm.policy_loss == 'reinforce':
    updates = (
      config.rollout.prompts_per_step
      * config.rollout.samples_per_prompt
      // config.training.sequences_per_minibatch
      * config.training.epochs_per_step
    )
    if updates > 1:
      raise ValueError(
        f'algorithm.policy_loss=reinforce is on-policy, a step of {updates}'
        ' updates is not: use ppo or one mini-batch and one epoch'
      )


def controller(config: ConfigDict) -> kl.Controller:
  """The KL controller that a config section asks for."""
  if config.controller == 'fixed':
    return kl.fixed(config.coef)
  if config.controller == 'adaptive':
    return kl.adaptive(
      config.coef, target=config.target, horizon=config.horizon
    )
  raise ValueError(
    f"controller={config.controller!r} is not one of ['adaptive', 'fixed']"
  )


def describe(setup: Setup) -> list[str]:
  """The derived numbers of a stage, one line each."""
  numbers, report = setup.numbers, setup.train.report
  lines = [
    f'stage {setup.name} ({setup.trainer}): steps {setup.first_step + 1} to'
    f' {setup.first_step + numbers.steps}',
    f'  training prompts       {len(setup.train)} (longest of'
    f' {report["scanned"]} looked at: {report["longest"]} tokens;'
    f' {report["dropped"]} dropped, {report["truncated"]} truncated)',
    f'  validation prompts     {len(setup.validation)}',
    f'  shared prefix          {len(setup.prefix)} tokens',
    f'  sequences per step     {numbers.sequences_per_step}',
    f'  updates per step       {numbers.updates_per_step}'
    f' ({numbers.minibatches_per_step} mini-batches x'
    f' {numbers.updates_per_step // numbers.minibatches_per_step} epochs)',
    f'  longest sequence       {numbers.longest_sequence} tokens',
    f'  micro-batch            {numbers.tokens_per_microbatch} tokens ='
    f' {numbers.rows_per_microbatch} rows x'
    f' {setup.config.training.tokens_per_row}',
    f'  epochs over the data   '
    f'{numbers.steps * _prompts(setup) / len(setup.train):.2f}',
  ]
  return lines


def _prompts(setup: Setup) -> int:
  if setup.trainer == 'ppo':
    return setup.config.rollout.prompts_per_step
  return setup.numbers.sequences_per_step
