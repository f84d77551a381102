"""Settings that contradict each other, or that nothing would read."""

import difflib

from ml_collections import ConfigDict

from rlhf_jax.algorithms import advantages
from rlhf_jax.algorithms import aggregation
from rlhf_jax.algorithms import kl
from rlhf_jax.algorithms import policy_losses
from rlhf_jax.models import config as model_config
from rlhf_jax.models import hf
from rlhf_jax.rewards import rules as reward_rules


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


def ppo(
  config: ConfigDict, model: model_config.ModelConfig, rewards: dict
) -> None:
  """Refuses PPO settings that would be ignored or make no sense together.

  Raises:
    ValueError: says which, and what to do.
  """
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
