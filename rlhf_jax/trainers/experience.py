"""From scored samples to advantages, and what a step's metrics need."""

from collections.abc import Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import masked
from rlhf_jax import metrics
from rlhf_jax import types
from rlhf_jax.algorithms import advantages as advantages_lib
from rlhf_jax.algorithms import filtration
from rlhf_jax.algorithms import groups
from rlhf_jax.algorithms import value_losses
from rlhf_jax.models import config as model_config
from rlhf_jax.models import flops
from rlhf_jax.sharding import multihost

# Called once a step: compiled, since their loops would be traced anew.
_GROUP_STATISTICS = jax.jit(groups.group_statistics)
_GROUP_METRICS = jax.jit(advantages_lib.group_metrics)
_EXPLAINED_VARIANCE = jax.jit(value_losses.explained_variance)


def rejected(
  rollout: types.Rollout,
  scores: np.ndarray,
  *,
  truncated: bool,
  uniform_groups: bool,
) -> np.ndarray:
  """Which sequences take no part in the update: [N] bool.

  Args:
    rollout: numpy, N sequences.
    scores: [N]; one that is not finite is always rejected.
    truncated: reject sequences that the length limit cut (DAPO's overlong
      filtering).
    uniform_groups: reject groups whose scores are all equal: advantages from
      comparing the samples of a prompt are 0 there.
  """
  result = ~np.isfinite(scores)
  if truncated:
    result |= rollout.truncated
  if uniform_groups:
    result |= uniform(scores, rollout.group, ~result)
  return result


def uniform(
  scores: np.ndarray, group: np.ndarray, valid: np.ndarray
) -> np.ndarray:
  """Sequences in whose group all valid scores are equal: [N] bool."""
  return np.asarray(_GROUP_STATISTICS(scores, group, valid).std) == 0


def estimate(
  rollout: types.Rollout,
  rewards: np.ndarray,
  scores: np.ndarray,
  old_logprobs: np.ndarray,
  reference_logprobs: np.ndarray,
  values: np.ndarray,
  bootstrap_values: np.ndarray,
  *,
  islands: multihost.Islands,
  estimator: str,
  settings: dict[str, float],
  whiten: bool = False,
  kl: np.ndarray | None = None,
  kl_coef: float = 0.0,
  reward_weights: Sequence[float] | None = None,
  baseline: np.ndarray | None = None,
  sum_squares: np.ndarray | None = None,
  importance: np.ndarray | None = None,
) -> types.Experience:
  """Token rewards, then advantages and returns of a step.

  Args:
    rollout: its mask is final: rejected sequences have none.
    rewards: [N, K] float32 by name, NaN where one does not apply.
    scores: [N] float32, their weighted sum.
    old_logprobs: [N, T].
    reference_logprobs: [N, T].
    values: [N, T], zeros without a critic.
    bootstrap_values: [N], zeros where a sequence ended by itself.
    islands: of the job; what is computed over the step is over all of them.
    estimator: name in `advantages.ESTIMATORS`.
    settings: its keywords, see `algorithm.estimator_settings`.
    whiten: whether advantages get mean 0 and deviation 1 over the step.
    kl: [N, T] nats per token for the penalty in the reward, or None.
    kl_coef: its coefficient.
    reward_weights: K numbers (gdpo).
    baseline: [N] scores of the greedy responses (remax).
    sum_squares: [N, T] sum_v pi_old(v)^2 (optimal_token_baseline).
    importance: [N, T] sampler to trainer, or None.
  """
  inputs = dict(
    mask=rollout.mask,
    group=_global_group(rollout.group, islands),
    scores=scores,
    values=values,
    bootstrap_values=bootstrap_values,
    kl=kl,
    rewards=rewards,
    baseline=baseline,
    logprobs=old_logprobs,
    sum_squares=sum_squares,
    importance=importance,
  )
  inputs = multihost.rows(islands, inputs) | dict(
    kl_coef=np.float32(kl_coef),
    reward_weights=reward_weights and np.asarray(reward_weights, np.float32),
  )
  token_rewards, advantages, returns = multihost.own_rows(
    islands,
    _estimate(inputs, estimator, tuple(sorted(settings.items())), whiten),
  )
  return types.Experience(
    rollout=rollout,
    rewards=rewards,
    scores=scores,
    old_logprobs=old_logprobs,
    reference_logprobs=reference_logprobs,
    values=values,
    bootstrap_values=bootstrap_values,
    token_rewards=token_rewards,
    advantages=advantages,
    returns=returns,
    importance=importance,
  )


def _global_group(group: np.ndarray, islands: multihost.Islands) -> np.ndarray:
  """Numbers of prompts that no two islands share."""
  # There are no more groups than sequences.
  return (group + islands.index * len(group)).astype(np.int32)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _estimate(inputs, estimator, settings, whiten):
  """The array part of `estimate`."""
  scores, mask = inputs['scores'], inputs['mask']
  token_rewards = advantages_lib.token_rewards(
    scores, mask, kl=inputs['kl'], kl_coef=inputs['kl_coef']
  )
  # A score that does not apply must stay NaN, to leave its group.
  totals = jnp.where(jnp.isfinite(scores), token_rewards.sum(1), jnp.nan)
  inputs = inputs | dict(token_rewards=token_rewards, totals=totals)
  function = advantages_lib.estimator(estimator)
  arguments, keywords = ESTIMATOR_INPUTS.get(estimator, GROUP_INPUTS)
  advantages, returns = function(
    *(inputs[name] for name in arguments),
    **{name: inputs[name] for name in keywords},
    **dict(settings),
  )
  if whiten:
    advantages = masked.whiten(advantages, mask)
  return token_rewards, advantages, returns


def filtrate(
  experience: types.Experience,
  key: types.Array,
  *,
  islands: multihost.Islands,
  method: str,
  power: float,
) -> tuple[types.Experience, metrics.Metrics]:
  """PF-PPO: resamples the sequences of a step by their scores.

  Each sequence moves whole, with its advantages, and every copy counts as a
  prompt of its own, so that mini-batches stay equally large.  Sequences may
  move to another island: every one then sees the whole step for a moment.

  Args:
    experience: of the step, this island's N sequences.
    key: of the draw.
    islands: of the job.
    method: see `filtration`.
    power: see `filtration`.

  Returns:
    N sequences, and the share of the step's that are among them all.
  """
  number = len(experience.scores)
  whole = multihost.gather(islands, experience)
  whole = jax.tree.map(lambda *x: np.concatenate(x), *whole)
  count = len(whole.scores)
  weights = filtration.weights(
    whole.scores,
    whole.rollout.mask.any(axis=1),
    method=method,
    power=power,
  )
  chosen = np.asarray(filtration.resample(key, weights, count))
  own = chosen[islands.index * number :][:number]
  moved = jax.tree.map(np.asarray, filtration.take(whole, own))
  group = np.arange(number, dtype=np.int32)
  moved = moved.replace(rollout=moved.rollout.replace(group=group))
  distinct = np.isin(np.arange(count), chosen)
  return moved, {'training/filtration_distinct': metrics.mean(distinct)}


def statistics(
  experience: types.Experience,
  names: Sequence[str],
  *,
  islands: multihost.Islands,
  with_critic: bool,
) -> metrics.Metrics:
  """The metrics of a step that need no gradient, of this island's part."""
  rollout, mask = experience.rollout, experience.rollout.mask
  used = mask.any(axis=1)
  lengths = rollout.lengths - rollout.prompt_lengths
  result = {
    'critic/score/mean': metrics.mean(
      experience.scores, np.isfinite(experience.scores)
    ),
    'critic/rewards/mean': metrics.mean(
      experience.token_rewards.sum(axis=1), used
    ),
    'critic/advantages/mean': metrics.mean(experience.advantages, mask),
    'response_length/mean': metrics.mean(lengths),
    'response_length/max': metrics.max(lengths),
    'response_length/min': metrics.min(lengths),
    'response_length/clip_ratio': metrics.mean(rollout.truncated),
    'prompt_length/mean': metrics.mean(rollout.prompt_lengths),
    'training/sequences_used': metrics.mean(used),
  }
  # Of all groups, also those that were rejected for being uniform.
  result |= _GROUP_METRICS(experience.scores, rollout.group, np.ones_like(mask))
  for k, name in enumerate(names):
    column = experience.rewards[:, k]
    result[f'reward/{name}/mean'] = metrics.mean(column, np.isfinite(column))
  if with_critic:
    # Of the whole step: it is no mean over sequences.
    arrays = experience.values, experience.returns, mask
    explained = multihost.fetch(
      _EXPLAINED_VARIANCE(*multihost.rows(islands, arrays))
    )
    result |= {
      'critic/returns/mean': metrics.mean(experience.returns, mask),
      'critic/values/mean': metrics.mean(experience.values, mask),
      'critic/vf_explained_var': metrics.mean(explained),
    }
  return result


@dataclasses.dataclass(frozen=True)
class Report:
  """What a step's metrics need of all islands; N sequences of the job."""

  metrics: metrics.Metrics
  scores: np.ndarray  # [N]
  dropped: np.ndarray  # [N] bool
  lengths: np.ndarray  # [N]
  prompt_lengths: np.ndarray  # [N]
  actions: np.ndarray  # [N] tokens that train


def report(
  islands: multihost.Islands,
  measured: metrics.Metrics,
  rollout: types.Rollout,
  scores: np.ndarray,
  dropped: np.ndarray,
) -> Report:
  """Puts together what the islands saw of a step."""
  own = Report(
    metrics=jax.device_get(measured),
    scores=scores,
    dropped=dropped,
    lengths=rollout.lengths,
    prompt_lengths=rollout.prompt_lengths,
    actions=rollout.mask.sum(axis=1),
  )
  every = multihost.gather(islands, own)
  return Report(
    metrics=metrics.merge(*(one.metrics for one in every)),
    **{
      name: np.concatenate([getattr(one, name) for one in every])
      for name in ('scores', 'dropped', 'lengths', 'prompt_lengths', 'actions')
    },
  )


def throughput(
  lengths: np.ndarray,
  prompt_lengths: np.ndarray,
  actions: np.ndarray,
  model: model_config.ModelConfig,
  seconds: float,
  devices: Sequence[jax.Device],
  *,
  passes: float,
) -> dict[str, float]:
  """Tokens per second, and the share of the devices' peak that the model used.

  Model FLOPs count every sequence in full, also where a shared prefix was
  computed once: once for the rollout, and `passes` times for what takes part
  in the update (a backward pass counts as two).

  Args:
    lengths: [N] tokens of every sequence of the step.
    prompt_lengths: [N].
    actions: [N] tokens that take part in the update.
    model: of all roles.
    seconds: of the step.
    devices: that took part.
    passes: forward passes over the sequences that have actions.

  Returns:
    `perf/` metrics; `perf/mfu` only where the peak of a device is known.
  """
  responses = (lengths - prompt_lengths).sum()
  lengths = lengths.astype(np.float64)
  used = actions > 0
  of = lambda rows, heads: flops.forward(
    model, lengths[rows].sum(), heads, (lengths[rows] ** 2).sum() / 2
  )
  everyone = np.ones(len(lengths), bool)
  total = of(everyone, responses) + passes * of(used, actions.sum())
  rate = total / seconds / len(devices)
  result = {
    'perf/tokens_per_second_per_device': (
      lengths.sum() / seconds / len(devices)
    ),
    'perf/tflops_per_second_per_device': rate / 1e12,
  }
  peak = flops.peak(devices[0])
  return result | ({'perf/mfu': rate / peak} if peak else {})


# What an estimator reads: positional arguments and keywords, by name.  Those
# that are not here compare the total rewards of a group.
GROUP_INPUTS = (('totals', 'group', 'mask'), ())
_TOKEN_BASELINE = (
  ('token_rewards', 'group', 'mask', 'logprobs', 'sum_squares'),
  ('importance',),
)
ESTIMATOR_INPUTS = {
  'gae': (('token_rewards', 'values', 'mask'), ('bootstrap_values',)),
  'gdpo': (('rewards', 'reward_weights', 'group', 'mask'), ()),
  'multi_turn_optimal_token_baseline': _TOKEN_BASELINE,
  'optimal_token_baseline': _TOKEN_BASELINE,
  'reinforce_plus_plus': (('token_rewards', 'mask'), ()),
  'remax': (('token_rewards', 'baseline', 'mask'), ()),
}
