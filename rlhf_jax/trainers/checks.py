"""Settings that contradict each other, or that nothing would read."""

import difflib
import math

import jax
from ml_collections import ConfigDict

from rlhf_jax import optim
from rlhf_jax.algorithms import aggregation
from rlhf_jax.models import config as model_config
from rlhf_jax.models import decoder
from rlhf_jax.models import lora as lora_lib
from rlhf_jax.models import peft
from rlhf_jax.sharding import multihost
from rlhf_jax.sharding import rules
from rlhf_jax.trainers import arithmetic
from rlhf_jax.trainers import workdir


def stage_config(config: ConfigDict, overrides: dict) -> ConfigDict:
  """A copy of the config with the overrides of one stage.

  Raises:
    ValueError: an override names no key; suggests the nearest one.
  """
  of_run = [name for name in overrides if name.startswith(OF_RUN)]
  if of_run:
    raise ValueError(
      f'stage overrides {of_run} belong to the whole run: set them in the'
      ' config itself'
    )
  copy = config.copy_and_resolve_references()  # nested parts too
  copy.lock()
  known = workdir.flatten(config)
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


def rewards(config: ConfigDict) -> ConfigDict:
  """`config.rewards`, each with rule, weight and args and a name of its own.

  Raises:
    ValueError: says which reward lacks what.
  """
  for name, value in config.rewards.items():
    missing = [key for key in ('rule', 'weight', 'args') if key not in value]
    if missing:
      raise ValueError(
        f'rewards.{name} lacks {missing}: a reward is'
        " {'rule': NAME, 'weight': NUMBER, 'args': {...}}"
      )
    if name in RESERVED:
      raise ValueError(
        f'a reward cannot be called {name!r}, an evaluation reports that'
        f' itself ({sorted(RESERVED)}): choose another name'
      )
    if not math.isfinite(value.weight):
      raise ValueError(f'rewards.{name}.weight={value.weight} is not finite')
  return config.rewards


def placement(config: ConfigDict, islands: multihost.Islands) -> None:
  """Refuses a rollout that has no place to run, or that nothing corrects.

  Args:
    config: of the stage.
    islands: of the job.

  Raises:
    ValueError: says which keys do not go together.
  """
  rollout, algorithm = config.rollout, config.algorithm
  ahead = rollout.staleness > 0
  corrected = algorithm.importance.level != 'off' or rollout.logprobs == 'reuse'
  dynamic = algorithm.dynamic_sampling.rounds > 0
  several = islands.count > 1
  for wrong, message in (
    (
      rollout.staleness < 0,
      f'rollout.staleness={rollout.staleness} must be 0 or more steps',
    ),
    (
      ahead != (rollout.devices > 0),
      f'rollout.staleness={rollout.staleness} with'
      f' rollout.devices={rollout.devices}: a rollout that runs ahead needs'
      ' devices of its own, and devices of its own stand idle unless it does;'
      ' set both, or both to 0',
    ),
    (
      ahead and not corrected,
      f'rollout.staleness={rollout.staleness} trains on samples of an older'
      " policy: set algorithm.importance.level to 'token' or 'sequence', or"
      " rollout.logprobs to 'reuse'",
    ),
    (
      dynamic and several and (ahead or islands.shared),
      'algorithm.dynamic_sampling makes processes agree in the middle of a'
      ' rollout, which they cannot do here: set rounds to 0, or staleness to 0'
      ' with one process per island',
    ),
  ):
    if wrong:
      raise ValueError(message)


def common(
  config: ConfigDict, trainer: str, named: dict, val_sources: set[str]
) -> None:
  """Refuses values that would fail later, in any stage.

  Args:
    config: of the stage.
    trainer: 'ppo' or 'sft'.
    named: the rewards by name.
    val_sources: names of the validation sources.

  Raises:
    ValueError: says which key, and what it may be.
  """
  rollout = config.rollout
  for key, ok, wanted in (
    ('reward_timeout_s', config.reward_timeout_s > 0, 'more than 0 seconds'),
    ('model.head_chunk', config.model.head_chunk >= 1, '1 or more tokens'),
    (
      'memory_limit_bytes',
      config.memory_limit_bytes >= 0,
      '0 (what the device says) or more bytes',
    ),
    ('checkpoint.keep', config.checkpoint.keep >= 1, '1 or more checkpoints'),
    ('rollout.top_k', rollout.top_k >= 0, '0 (off) or more tokens'),
    ('rollout.top_p', 0 < rollout.top_p <= 1, 'in (0, 1], 1 is off'),
    ('rollout.min_p', 0 <= rollout.min_p <= 1, 'in [0, 1], 0 is off'),
    (
      'rollout.min_new_tokens',
      0 <= rollout.min_new_tokens <= rollout.max_new_tokens,
      'from 0 to rollout.max_new_tokens',
    ),
    (
      'algorithm.truncated_penalty',
      config.algorithm.truncated_penalty >= 0,
      '0 or more',
    ),
    (
      'algorithm.dynamic_sampling.rounds',
      config.algorithm.dynamic_sampling.rounds >= 0,
      '0 (off) or more',
    ),
    ('critic.clip', config.critic.clip >= 0, '0 (off) or more'),
    ('critic.warmup_steps', config.critic.warmup_steps >= 0, '0 or more steps'),
    ('algorithm.gamma', 0 <= config.algorithm.gamma <= 1, 'in [0, 1]'),
    ('algorithm.lam', 0 <= config.algorithm.lam <= 1, 'in [0, 1]'),
    ('algorithm.entropy_coef', config.algorithm.entropy_coef >= 0, '0 or more'),
    (
      'evaluation.every',
      config.evaluation.every >= 0,
      '0 (at the end) or more',
    ),
    (
      'checkpoint.every',
      config.checkpoint.every >= 0,
      '0 (at the end) or more',
    ),
    ('dump_every', config.dump_every >= 0, '0 (at the end) or more steps'),
  ):
    if not ok:
      value = workdir.flatten(config)[key]
      raise ValueError(f'{key}={value} must be {wanted}')
  for key, value, choices in (
    ('model.remat', config.model.remat, decoder.REMAT),
    (
      'training.gradient_dtype',
      config.training.gradient_dtype,
      ('float32', 'bfloat16'),
    ),
  ):
    if value not in choices:
      raise ValueError(f'{key}={value!r} is not one of {sorted(choices)}')
  if config.algorithm.aggregation not in aggregation.MODES:
    raise ValueError(
      f'algorithm.aggregation={config.algorithm.aggregation!r} is not one of'
      f' {sorted(aggregation.MODES)}'
    )
  if trainer == 'sft' and config.training.epochs_per_step != 1:
    raise ValueError(
      f'training.epochs_per_step={config.training.epochs_per_step}: the sft'
      ' trainer reads a batch once; use steps or epochs for its length'
    )
  best = config.evaluation.best_metric
  known = {
    f'val/{source}/{name}'
    for source in val_sources
    for name in (*named, *RESERVED)
  }
  if best and best not in known:
    raise ValueError(
      f'evaluation.best_metric={best!r} is not measured; one of {sorted(known)}'
    )


def lora(config: ConfigDict, model: model_config.ModelConfig) -> None:
  """Refuses adapters that could not train, or settings that nothing reads.

  Args:
    config: of the stage.
    model: its architecture.

  Raises:
    ValueError: says which key, and what it may be.
  """
  section = config.model.lora
  if section.rank == 0:
    for key, default in LORA_DEFAULTS.items():
      if section[key] != default:
        raise ValueError(
          f'model.lora.{key}={section[key]!r} would change nothing with'
          ' model.lora.rank=0: set a rank, or leave it at its default'
          f' {default!r}'
        )
    return
  for wrong, message in (
    (
      section.rank < 0,
      f'model.lora.rank={section.rank} must be 0 (off: all parameters'
      ' train) or more',
    ),
    (
      section.alpha is not None
      and not (section.alpha > 0 and math.isfinite(section.alpha)),
      f'model.lora.alpha={section.alpha} must be more than 0, or unset for the'
      ' rank',
    ),
    (
      not config.model.path,
      f'model.lora.rank={section.rank} without model.path: adapters change a'
      ' trained model, and here is none; set model.path, or rank to 0',
    ),
    (
      config.offload.reference,
      'offload.reference with model.lora.rank: the reference is the model under'
      ' the adapters, which the actor needs on the devices; set it to False',
    ),
  ):
    if wrong:
      raise ValueError(message)
  try:
    table = lora_lib.specs(decoder.specs(model), section.rank, section.targets)
  except ValueError as error:
    raise ValueError(f'model.lora.targets: {error}') from error
  if section.path:
    try:
      peft.check(section.path, table, rank=section.rank, alpha=section.alpha)
    except ValueError as error:
      raise ValueError(f'model.lora: {error}') from error


def optimizers(
  config: ConfigDict, trainer: str, numbers: arithmetic.Numbers
) -> None:
  """Refuses optimiser settings that cannot work, before the first stage runs.

  Args:
    config: of the stage.
    trainer: 'ppo' or 'sft'.
    numbers: of the stage.

  Raises:
    ValueError: says which key of which role.
  """
  updates = (
    actor_updates(config, numbers) if trainer == 'ppo' else (numbers.steps)
  )
  for role, total in (
    ('actor', updates),
    ('critic', numbers.steps * numbers.updates_per_step),
  ):
    optimizer = config[role].optimizer
    for key, ok, wanted in (
      ('learning_rate', optimizer.learning_rate >= 0, '0 or more'),
      ('warmup_updates', optimizer.warmup_updates >= 0, '0 or more updates'),
      ('end_fraction', 0 <= optimizer.end_fraction <= 1, 'in [0, 1]'),
      ('b1', 0 <= optimizer.b1 < 1, 'in [0, 1)'),
      ('b2', 0 <= optimizer.b2 < 1, 'in [0, 1)'),
      ('eps', optimizer.eps > 0, 'more than 0'),
      ('weight_decay', optimizer.weight_decay >= 0, '0 or more'),
      ('max_grad_norm', optimizer.max_grad_norm >= 0, '0 (off) or more'),
    ):
      if not ok:
        raise ValueError(
          f'{role}.optimizer.{key}={optimizer[key]} must be {wanted}'
        )
    if optimizer.moments_dtype not in optim.MOMENTS:
      raise ValueError(
        f'{role}.optimizer.moments_dtype={optimizer.moments_dtype!r} is not one'
        f' of {sorted(optim.MOMENTS)}'
      )
    try:
      optim.schedule(
        optimizer.learning_rate,
        warmup_updates=optimizer.warmup_updates,
        decay=optimizer.decay,
        total_updates=total,
        end_fraction=optimizer.end_fraction,
      )
    except ValueError as error:
      raise ValueError(f'{role}: {error}') from error


def memory_notes(config: ConfigDict, mesh: jax.sharding.Mesh) -> list[str]:
  """What becomes of `config.offload` and of `model.remat` on these devices."""
  asked = [f'offload.{name}' for name, on in config.offload.items() if on]
  if config.model.remat == 'offload':
    asked.append("model.remat='offload'")
  if not asked:
    return []
  names, platform = ', '.join(asked), mesh.devices.flat[0].platform
  if not rules.has_host_memory(mesh):
    return [
      f'{names}: {platform} devices have no {rules.HOST} memory here;'
      ' everything stays on the devices'
    ]
  if platform == 'cpu':
    return [f'{names}: on CPUs host memory is the same memory; saves nothing']
  return []


def actor_updates(config: ConfigDict, numbers: arithmetic.Numbers) -> int:
  """Updates of the actor in a PPO stage, which begin after the warm-up.

  Raises:
    ValueError: there are none.
  """
  steps = numbers.steps - config.critic.warmup_steps
  if steps < 1:
    raise ValueError(
      f'critic.warmup_steps={config.critic.warmup_steps} of {numbers.steps}'
      ' steps: the actor would never learn'
    )
  return steps * numbers.updates_per_step


# Keys that a stage cannot have for itself (all that begin so).
OF_RUN = (
  'checkpoint.keep',
  'evaluation.only',
  'export',
  'mesh.',
  'model.architecture',
  'model.lora.',
  'model.path',
  'name',
  'rollout.devices',
  'rollout.whole_mesh',
  'seed',
  'stages',
  'tensorboard',
  'tokenizer',
  'wandb',
)

# Of `config.model.lora`, with rank 0.
LORA_DEFAULTS = dict(
  path='', alpha=None, targets=(lora_lib.ALL_LINEAR,), base_dtype='auto'
)

# Names that an evaluation reports beside the rewards.
RESERVED = ('clip_ratio', 'response_length', 'score')
