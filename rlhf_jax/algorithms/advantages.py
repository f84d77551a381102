"""Advantages: how much better an action was than expected.

All functions are in the sequence layout `[N, T]` of `types.py`: the entry of a
token speaks of that token as an action.  Places outside the mask are skipped on
the way in, whatever stands there, and are 0 on the way out.  Whitening is a
step of its own (`masked.whiten`), because it looks at all sequences of a step.
"""

import chex
from flax import struct
import jax
import jax.numpy as jnp

from rlhf_jax import masked
from rlhf_jax import metrics
from rlhf_jax import types

Array = types.Array

# Sequences whose group statistics are computed at once.
BLOCK = 256


def token_rewards(
  scores: Array,
  mask: Array,
  *,
  kl: Array | None = None,
  kl_coef: float | Array = 0.0,
) -> Array:
  """`r_t = score 1[t is the last action] - kl_coef kl_t`.

  Args:
    scores: `[N]` float, one per sequence; one that is not finite counts as 0.
    mask: `[N, T]` bool, the actions.
    kl: `[N, T]` float, nats per token (see `kl.py`).
    kl_coef: reward per nat.

  Returns:
    `[N, T]`, at least float32; a row sums to its score less its
    penalty, and to 0 for a row without an action.
  """
  chex.assert_rank([scores, mask], [1, 2])
  chex.assert_equal_shape_prefix([scores, mask], 1)
  mask = jnp.asarray(mask, bool)
  scores = masked.fill(scores, jnp.isfinite(scores))
  width = mask.shape[1]
  place = jnp.arange(width)[None, :]  # 1 T
  last = jnp.max(jnp.where(mask, place, -1), axis=1, keepdims=True)  # N 1
  rewards = jnp.where(place == last, scores[:, None], 0.0)  # N T
  if kl is None:
    return rewards
  chex.assert_equal_shape([kl, mask])
  return rewards - kl_coef * masked.fill(kl, mask)


def gae(
  rewards: Array,
  values: Array,
  mask: Array,
  *,
  gamma: float,
  lam: float,
  bootstrap_values: Array | None = None,
) -> tuple[Array, Array]:
  """Generalised advantage estimation, Schulman et al. (2016).

  Over the actions t of a sequence, with t' the next action:

    delta_t = r_t + gamma V_t' - V_t
    A_t     = delta_t + gamma lam A_t'
    R_t     = A_t + V_t

  Behind the last action V is `bootstrap_values` and A is 0.  Places between two
  actions (a tool's output) are skipped, not discounted: credit passes over them
  unchanged.  A reward outside the mask is not seen.

  Args:
    rewards: `[N, T]` float.
    values: `[N, T]` float, the critic before the action.
    mask: `[N, T]` bool.
    gamma: discount per action.
    lam: 0 trusts the critic, 1 the rewards.
    bootstrap_values: `[N]` float, the critic behind the last action of a
      sequence that was cut; 0 where one ended, and by default.

  Returns:
    Advantages and returns, `[N, T]`, at least float32.
  """
  chex.assert_rank([rewards, values, mask], 2)
  chex.assert_equal_shape([rewards, values, mask])
  mask = jnp.asarray(mask, bool)
  rewards = masked.fill(rewards, mask)  # N T
  values = masked.fill(values, mask)  # N T
  dtype = jnp.promote_types(rewards.dtype, values.dtype)
  num_sequences = mask.shape[0]
  if bootstrap_values is None:
    bootstrap_values = jnp.zeros(num_sequences, dtype)
  chex.assert_shape(bootstrap_values, (num_sequences,))

  def step(carry, inputs):
    next_value, next_advantage = carry  # N, N
    reward, value, is_action = inputs
    delta = reward + gamma * next_value - value
    advantage = delta + gamma * lam * next_advantage
    next_value = jnp.where(is_action, value, next_value)
    next_advantage = jnp.where(is_action, advantage, next_advantage)
    return (next_value, next_advantage), next_advantage

  behind = (bootstrap_values.astype(dtype), jnp.zeros(num_sequences, dtype))
  columns = (rewards.astype(dtype).T, values.astype(dtype).T, mask.T)  # T N
  _, advantages = jax.lax.scan(step, behind, columns, reverse=True)
  advantages = advantages.T  # N T
  returns = jnp.where(mask, advantages + values, 0.0)
  return jnp.where(mask, advantages, 0.0), returns


@struct.dataclass
class GroupStatistics:
  """Of each sequence, the statistics of the group that it belongs to."""

  valid: Array  # [N] bool: the sequence counts in its group
  count: Array  # [N] int32: valid sequences of its group
  mean: Array  # [N] float32
  std: Array  # [N] float32, Bessel-corrected; 0 for fewer than two
  centred: Array  # [N] float32: score - mean; 0 where not valid


def group_statistics(
  scores: Array, group: Array, valid: Array
) -> GroupStatistics:
  """Statistics of scores over the sequences that answer the same prompt.

  Scores that differ by rounding only are equal: their deviation is exactly 0,
  however small the number that it is later divided by.

  Args:
    scores: `[N]` float; one that is not finite is left out.
    group: `[N]` int, any numbers.
    valid: `[N]` bool, False leaves a sequence out of its group.

  Returns:
    Arrays `[N]`, at least float32.
  """
  chex.assert_rank([scores, group, valid], 1)
  chex.assert_equal_shape([scores, group, valid])
  valid = jnp.asarray(valid, bool) & jnp.isfinite(scores)
  scores = masked.fill(scores, valid)
  group = jnp.asarray(group)

  def of_sequence(score, number):
    """What a sequence learns from a pass over all N scores."""
    member = valid & (group == number)  # N
    low = masked.min(scores, member)
    high = masked.max(scores, member)
    # Distances to the lowest have a mean of exactly 0 where scores are equal.
    distance = scores - low  # N
    offset = masked.mean(distance, member)
    scale = jnp.where(masked.is_rounding(low, high), 0.0, 1.0)
    count = masked.count(member)
    total = masked.sum(jnp.square(distance - offset), member) * scale
    std = jnp.sqrt(total / jnp.maximum(count - 1, 1).astype(total.dtype))
    return count, low + offset, std, (score - low - offset) * scale

  # Comparing ids makes do with any numbers and gives the same bits in every
  # run, which a scatter-add on a GPU does not promise; in blocks of sequences,
  # so that nothing of size N x N is stored.
  count, mean, std, centred = jax.lax.map(
    lambda inputs: of_sequence(*inputs), (scores, group), batch_size=BLOCK
  )
  centred = jnp.where(valid, centred, 0.0)
  return GroupStatistics(
    valid=valid, count=count, mean=mean, std=std, centred=centred
  )


def grpo(
  scores: Array,
  group: Array,
  mask: Array,
  *,
  normalize_std: bool = True,
  epsilon: float = 1e-6,
) -> tuple[Array, Array]:
  """`(score - mean_group) / (std_group + epsilon)`, the same for every action.

  DeepSeekMath (Shao et al. 2024); without the division, Dr. GRPO (Liu et al.
  2025).  0 for equal scores, for a score that is not finite, and for a group of
  one, which has nothing to be compared with.  A sequence without an action is
  left out of its group; one of whose actions some are masked is not.

  Args:
    scores: `[N]` float; NaN where the reward does not apply.
    group: `[N]` int, the prompt that the sequence answers, any numbers.
    mask: `[N, T]` bool.
    normalize_std: whether to divide; the deviation is Bessel-corrected.
    epsilon: in units of the score.

  Returns:
    Advantages `[N, T]`, and the same as returns (no critic learns from them).
  """
  chex.assert_rank([scores, group, mask], [1, 1, 2])
  statistics = _statistics_of_sequences(scores, group, mask)
  advantages = statistics.centred
  if normalize_std:
    std = statistics.std
    advantages = advantages / jnp.where(std > 0, std + epsilon, 1.0)
  return _per_token(advantages, mask)


def rloo(scores: Array, group: Array, mask: Array) -> tuple[Array, Array]:
  """`score - mean of the others of its group`, the same for every action.

  Equal to `(score - mean_group) n / (n - 1)`; REINFORCE leave-one-out (Kool et
  al. 2019, Ahmadian et al. 2024).  Special cases, arguments and results are
  those of `grpo`: a group of one gives 0.
  """
  chex.assert_rank([scores, group, mask], [1, 1, 2])
  statistics = _statistics_of_sequences(scores, group, mask)
  others = jnp.maximum(statistics.count - 1, 1)
  factor = statistics.count / others
  return _per_token(
    statistics.centred * factor.astype(statistics.centred.dtype), mask
  )


def group_metrics(scores: Array, group: Array, mask: Array) -> metrics.Metrics:
  """`training/frac_reward_zero_std`: the share of groups that teach nothing.

  Every group of two or more counts once; in a group of one there is no
  deviation to speak of.
  """
  chex.assert_rank([scores, group, mask], [1, 1, 2])
  statistics = _statistics_of_sequences(scores, group, mask)
  counts = statistics.valid & (statistics.count > 1)
  weight = 1.0 / jnp.maximum(statistics.count, 1)
  share = metrics.weighted_mean(statistics.std == 0, weight, counts)
  return {'training/frac_reward_zero_std': share}


def estimator(name: str):
  """The estimator of that name.

  Raises:
    ValueError: there is none; the message lists the names.
  """
  if name not in ESTIMATORS:
    raise ValueError(
      f"unknown advantage estimator '{name}': choose one of"
      f' {sorted(ESTIMATORS)}'
    )
  return ESTIMATORS[name]


def _statistics_of_sequences(scores, group, mask):
  has_action = jnp.any(jnp.asarray(mask, bool), axis=1)
  return group_statistics(scores, group, has_action)


def _per_token(advantages, mask):
  mask = jnp.asarray(mask, bool)
  advantages = jnp.where(mask, advantages[:, None], 0.0)  # N T
  return advantages, advantages


# `gae` takes token rewards and values; the others take scores and groups.
ESTIMATORS = {'gae': gae, 'grpo': grpo, 'rloo': rloo}

CRITIC_ESTIMATORS = frozenset({'gae'})
