"""All that can be known, and refused, before anything is compiled."""

from collections.abc import Callable, Sequence
import dataclasses

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from rlhf_jax import types
from rlhf_jax.data import packing
from rlhf_jax.data import pipeline
from rlhf_jax.data import sources
from rlhf_jax.data import tokenizer as tokenizer_lib
from rlhf_jax.models import config as model_config
from rlhf_jax.models import decoder
from rlhf_jax.models import hf
from rlhf_jax.models import lora
from rlhf_jax.models import spec
from rlhf_jax.rewards import rules as reward_rules
from rlhf_jax.sampling import engine
from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.sharding import multihost
from rlhf_jax.sharding import rules
from rlhf_jax.trainers import algorithm
from rlhf_jax.trainers import arithmetic
from rlhf_jax.trainers import checks

# Prompts that are compared to find what all of them have in common.
_PREFIX_PROMPTS = 256


@dataclasses.dataclass(frozen=True)
class Setup:
  """One stage, ready to run."""

  name: str
  trainer: str
  config: ConfigDict  # with the overrides of the stage
  first_step: int  # global step before its first
  numbers: arithmetic.Numbers
  mesh: jax.sharding.Mesh  # of training
  islands: multihost.Islands  # of that mesh
  model: model_config.ModelConfig
  tokenizer: object
  stop_ids: tuple[int, ...]
  train: pipeline.PromptStream
  excluded: int  # training prompts left out: they are validation prompts
  validation: list[pipeline.Prompt]
  prefix: np.ndarray  # tokens that every prompt begins with
  rewards: dict[str, Callable]
  reward_weights: dict[str, float]

  def offloads(self, name: str) -> bool:
    """Whether what `config.offload` names lives in host memory here."""
    return self.config.offload[name] and rules.has_host_memory(self.mesh)

  @property
  def adapts(self) -> bool:
    """Whether adapters of the actor train, and not its own weights."""
    return self.config.model.lora.rank > 0

  def adapters(self, table: types.PyTree) -> types.PyTree:
    """The weight table of the adapters of a model with this table."""
    section = self.config.model.lora
    return lora.specs(table, section.rank, section.targets)

  @property
  def remat(self) -> str:
    """`model.remat`, 'none' where there is no host memory to offload to."""
    remat = self.config.model.remat
    if remat == 'offload' and not rules.has_host_memory(self.mesh):
      return 'none'
    return remat

  def sampler(self, samples_per_prompt: int) -> dict:
    """Keywords of `engine.generate` that stay the same all stage."""
    config = self.config
    strings = tuple(config.rollout.stop_strings)
    shape = engine.Shape(
      max_prompt_tokens=config.data.max_prompt_tokens,
      max_new_tokens=config.rollout.max_new_tokens,
      slots=config.rollout.slots,
      samples_per_prompt=samples_per_prompt,
      # A stop string is found when the host looks; what was drawn behind it
      # by then is thrown away.
      chunk=16 if strings else 64,
    )
    find_stop = None
    if strings:
      find_stop = tokenizer_lib.stop_finder(
        self.tokenizer,
        strings,
        min_tokens=config.rollout.min_new_tokens,
        fresh=shape.chunk + 1,
      )
    return dict(
      config=self.model,
      mesh=self.islands.rollout,
      shape=shape,
      stop_ids=self.stop_ids,
      find_stop=find_stop,
      prefix=self.prefix,
      dtype=dtype(config.rollout.dtype),
    )


def dtype(name: str, mesh: jax.sharding.Mesh | None = None) -> jnp.dtype:
  """'auto' is bfloat16 on accelerators and float32 on CPUs."""
  if name == 'auto':
    platform = mesh.devices.flat[0].platform if mesh else jax.default_backend()
    name = 'float32' if platform == 'cpu' else 'bfloat16'
  if name not in ('float32', 'bfloat16'):
    raise ValueError(f"dtype {name!r} is not 'float32', 'bfloat16' or 'auto'")
  return jnp.dtype(name)


def stages(
  config: ConfigDict,
  trainers: tuple[str, ...],
  devices: Sequence[jax.Device] | None = None,
) -> list[Setup]:
  """Prepares every stage of a run.

  Args:
    config: of the run.
    trainers: that there are, by name.
    devices: of the job, by default all that JAX has; others than those can
      only be compiled for.

  Raises:
    ValueError: anything that the run could not do; says what to change.
  """
  if not config.stages:
    raise ValueError('config.stages is empty: name at least one stage')
  names = [name for name, _, _ in config.stages]
  if len(set(names)) != len(names):
    raise ValueError(f'stages must have different names, got {names}')
  devices = jax.devices() if devices is None else devices
  training, rollout_devices = multihost.set_aside(
    _devices(config, devices), config.rollout.devices
  )
  mesh = _mesh(config, training)
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
        name,
        trainer,
        checks.stage_config(config, dict(overrides)),
        first,
        mesh,
        rollout_devices,
        model,
        tokenizer,
      )
    except (ValueError, TypeError, FileNotFoundError) as error:
      raise ValueError(f'stage {name!r}: {error}') from error
    result.append(setup)
    first += setup.numbers.steps
  return result


def _devices(config, devices) -> list[jax.Device]:
  if not 0 <= config.mesh.devices <= len(devices):
    raise ValueError(
      f'mesh.devices={config.mesh.devices}, but there are {len(devices)}'
    )
  return devices[: config.mesh.devices or len(devices)]


def _mesh(config, devices) -> jax.sharding.Mesh:
  return mesh_lib.make(
    config.mesh.data,
    config.mesh.fsdp,
    config.mesh.tensor,
    config.mesh.context,
    config.mesh.expert,
    devices=devices,
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
  try:
    return model_config.ModelConfig(**architecture)
  except TypeError as error:
    fields = [
      field.name for field in dataclasses.fields(model_config.ModelConfig)
    ]
    raise ValueError(
      f'model.architecture: {error}; its fields are {fields}'
    ) from error


def _stage(
  name, trainer, config, first, mesh, rollout_devices, model, tokenizer
) -> Setup:
  """Loads the data of a stage and checks everything about it."""
  stop = tokenizer_lib.stop_ids(tokenizer, config.rollout.stop)
  if config.model.path:
    stop |= hf.stop_ids(config.model.path)
  if config.rollout.stop_strings:  # refuses empty ones
    tokenizer_lib.stop_finder(tokenizer, tuple(config.rollout.stop_strings))
  if not config.data.train.source:
    raise ValueError(
      f'data.train.source is empty: choose one of {sorted(sources.SOURCES)}'
    )
  train = sources.load(
    config.data.train.source, **config.data.train.args.to_dict()
  )
  held_out, excluded = [], 0
  if config.data.validation.source:
    held_out = sources.load(
      config.data.validation.source, **config.data.validation.args.to_dict()
    )
    sources.check_disjoint(train, held_out)
    before = len(train)
    train = sources.exclude(train, held_out)
    excluded = before - len(train)
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
  if config.evaluation.only and not (held_out and len(config.rewards)):
    raise ValueError(
      'evaluation.only needs data.validation.source and at least one reward'
    )
  rewards = {
    key: reward_rules.load(value.rule, **value.args.to_dict())
    for key, value in checks.rewards(config).items()
  }
  checks.common(config, trainer, rewards, {x.source for x in held_out})
  checks.lora(config, model)
  if trainer == 'ppo':
    algorithm.check(config, model, rewards)
  islands = multihost.islands(
    mesh, whole=config.rollout.whole_mesh, rollout=rollout_devices
  )
  if trainer == 'ppo':
    checks.placement(config, islands)
  numbers = arithmetic.derive(
    config,
    trainer,
    max_positions=model.max_positions,
    data_groups=mesh_lib.data_groups(mesh),
    islands=islands.count,
    prompts_in_data=len(stream),
  )
  _check_mesh(config, mesh, model)
  for section, key in (
    (config.model, 'dtype'),
    (config.rollout, 'dtype'),
    (config.model.lora, 'base_dtype'),
  ):
    # Where it is 'auto', the platform of the mesh decides.
    section[key] = dtype(section[key], mesh).name
  checks.optimizers(config, trainer, numbers)
  probe = stream.batch(0, min(_PREFIX_PROMPTS, len(stream))) + validation
  return Setup(
    name=name,
    trainer=trainer,
    config=config,
    first_step=first,
    numbers=numbers,
    mesh=mesh,
    islands=islands,
    model=model,
    tokenizer=tokenizer,
    stop_ids=tuple(sorted(stop)),
    train=stream,
    excluded=excluded,
    validation=validation,
    prefix=_prefix(probe) if config.rollout.share_prefix else np.zeros(0, int),
    rewards=rewards,
    reward_weights={
      key: float(value.weight) for key, value in config.rewards.items()
    },
  )


def _check_mesh(config, mesh, model: model_config.ModelConfig) -> None:
  """Refuses a mesh that cannot split the models or their rows evenly."""
  models = {'model': model}
  if config.critic.path:
    models['critic'] = hf.load_config(config.critic.path)
  length = config.training.tokens_per_row
  rules.check(
    mesh,
    {'training.tokens_per_row': ('places', length)}
    | {
      f'{role} {field}': (axis, getattr(one, field))
      for role, one in models.items()
      for field, axis in _SPLIT.items()
    },
  )


# Sizes of a model that a mesh must divide, and their logical axes.  Key/value
# heads are repeated where they are too few.
_SPLIT = {
  'd_model': 'embed',
  'num_heads': 'attended_heads',
  'd_mlp': 'mlp',
  'vocab_size': 'vocab',
}


def _prefix(prompts) -> np.ndarray:
  """The tokens with which all of some prompts begin."""
  lengths = np.array([len(prompt.ids) for prompt in prompts], np.int32)
  tokens = np.zeros((len(prompts), lengths.max()), np.int32)
  for row, prompt in zip(tokens, prompts):
    row[: len(prompt.ids)] = prompt.ids
  return tokens[0, : packing.common_prefix(tokens, lengths)]


def describe(setup: Setup) -> list[str]:
  """The derived numbers of a stage, one line each."""
  numbers, report = setup.numbers, setup.train.report
  lines = [
    f'stage {setup.name} ({setup.trainer}): steps {setup.first_step + 1} to'
    f' {setup.first_step + numbers.steps}',
    f'  training prompts       {len(setup.train)} (longest of'
    f' {report["scanned"]} looked at: {report["longest"]} tokens;'
    f' {report["dropped"]} dropped, {report["truncated"]} truncated,'
    f' {setup.excluded} excluded as validation prompts)',
    f'  validation prompts     {len(setup.validation)}',
    f'  shared prefix          {len(setup.prefix)} tokens',
    f'  sequences per step     {numbers.sequences_per_step}',
    f'  updates per step       {numbers.updates_per_step}'
    f' ({numbers.minibatches_per_step} mini-batches x'
    f' {numbers.updates_per_step // numbers.minibatches_per_step} epochs)',
    _trained(setup),
    f'  longest sequence       {numbers.longest_sequence} tokens',
    _microbatch(setup),
    f'  epochs over the data   '
    f'{numbers.steps * _prompts(setup) / len(setup.train):.2f}',
  ]
  lines += [
    f'  note: {note}' for note in checks.memory_notes(setup.config, setup.mesh)
  ]
  if setup.trainer == 'ppo':
    sampler = setup.sampler(setup.config.rollout.samples_per_prompt)
    cache = engine.memory(
      setup.model,
      sampler['shape'],
      len(setup.prefix),
      sampler['dtype'],
      mesh_lib.rollout_groups(setup.islands.rollout),
    )
    lines.append(
      f'  rollout cache          {cache:,} bytes at most, over the'
      f' {setup.islands.rollout.size} devices of an island'
    )
    lines += [f'  note: {note}' for note in algorithm.notes(setup.config)]
  return lines


def _trained(setup: Setup) -> str:
  """How much of the actor trains, and what its optimiser needs for it."""
  table = decoder.specs(setup.model)
  total = trained = spec.count(table)
  how = ''
  if setup.adapts:
    trained = spec.count(setup.adapters(table))
    section = setup.config.model.lora
    scale = lora.scale(section.alpha, section.rank)
    names = ', '.join(lora.modules(table, section.targets))
    how = (
      f' (LoRA of rank {section.rank}, scale {scale:g}, on {names};'
      f' the model is {dtype(section.base_dtype).name} and frozen)'
    )
  return f'  actor trains           {trained:,} of {total:,} parameters{how}'


def _microbatch(setup: Setup) -> str:
  training, numbers = setup.config.training, setup.numbers
  if training.tokens_per_microbatch == arithmetic.AUTO:
    return '  micro-batch            the largest that fits'
  return (
    f'  micro-batch            {numbers.tokens_per_microbatch} tokens ='
    f' {numbers.rows_per_microbatch} rows x {training.tokens_per_row}'
  )


def _prompts(setup: Setup) -> int:
  if setup.trainer == 'ppo':
    return setup.config.rollout.prompts_per_step
  return setup.numbers.sequences_per_step
