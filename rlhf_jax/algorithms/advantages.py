"""Advantages: how much better an action was than expected.

All functions are in the sequence layout `[N, T]` of `types.py`: the entry of a
token speaks of that token as an action.  Places outside the mask are skipped on
the way in, whatever stands there, and are 0 on the way out.

An estimator returns advantages and returns, `[N, T]`, of all sequences of a
step at once.  Whitening over the step is a further step (`masked.whiten`); only
those whiten themselves that are defined by it.
"""

import chex
import jax
import jax.numpy as jnp

from rlhf_jax import masked
from rlhf_jax import metrics
from rlhf_jax import types
from rlhf_jax.algorithms import groups

Array = types.Array


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


def reinforce_plus_plus(
  rewards: Array, mask: Array, *, gamma: float
) -> tuple[Array, Array]:
  """Discounted rewards to go, whitened over the step: REINFORCE++, Hu (2025).

  With t' the next action of the sequence,

    G_t = r_t + gamma G_t'
    A_t = (G_t - mean G) / std G     over all actions of all sequences

  A sequence with a reward that is not finite is left out and gets 0, as it is
  in the estimators that compare the answers to a prompt.

  Args:
    rewards: `[N, T]` float; in the paper the score less the KL penalty.
    mask: `[N, T]` bool; places between two actions are skipped.
    gamma: discount per action.

  Returns:
    Advantages A and returns G, `[N, T]`, at least float32.
  """
  chex.assert_rank([rewards, mask], 2)
  mask = _usable(rewards, mask)
  returns = _rewards_to_go(rewards, mask, gamma)
  return masked.whiten(returns, mask), returns


def remax(rewards: Array, baseline: Array, mask: Array) -> tuple[Array, Array]:
  """`sum_{s >= t} r_s - baseline`: ReMax, Li et al. (2023).

  Args:
    rewards: `[N, T]` float.
    baseline: `[N]` float, the score of the greedy answer to the same prompt.
      A sequence is left out and gets 0 if its baseline or one of its rewards
      is not finite.
    mask: `[N, T]` bool.

  Returns:
    Advantages and, as returns, the rewards to go, `[N, T]`, at least float32.
  """
  chex.assert_rank([rewards, baseline, mask], [2, 1, 2])
  chex.assert_equal_shape_prefix([rewards, baseline, mask], 1)
  known = jnp.isfinite(baseline)  # N
  mask = _usable(rewards, mask) & known[:, None]
  returns = _rewards_to_go(rewards, mask)
  baseline = masked.fill(baseline, known)
  return jnp.where(mask, returns - baseline[:, None], 0.0), returns


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
    advantages = _over_std(advantages, statistics.std, epsilon)
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


def reinforce_plus_plus_baseline(
  scores: Array, group: Array, mask: Array
) -> tuple[Array, Array]:
  """`score - mean_group`, whitened over all actions of the step, Hu (2025).

  Arguments and results are those of `grpo`.  So are special cases, before
  whitening: a group of one (in verl its raw score) or of equal scores enters
  with 0 and leaves with the same small number as all others that did; without
  any deviation in the step, that is 0.
  """
  chex.assert_rank([scores, group, mask], [1, 1, 2])
  statistics = _statistics_of_sequences(scores, group, mask)
  return _whitened(statistics.centred, statistics.valid, mask)


def opo(scores: Array, group: Array, mask: Array) -> tuple[Array, Array]:
  """`score - sum_group length score / sum_group length`, Hao et al. (2025).

  The baseline of least variance if the squared gradient norm of a sequence
  grows with its length, the number of its actions.  Special cases, arguments
  and results are those of `grpo`: a group of one gives 0 (in verl its score).
  """
  chex.assert_rank([scores, group, mask], [1, 1, 2])
  statistics = _statistics_of_sequences(scores, group, mask)
  centred = statistics.centred
  length = masked.count(mask, axis=1).astype(centred.dtype)
  # Of centred scores, so that equal ones have a baseline of exactly 0.
  pair = jnp.stack([length * centred, length], axis=1)  # N 2
  weighted, total = groups.sums(pair, group, statistics.valid).T
  baseline = weighted / jnp.maximum(total, 1.0)
  advantages = jnp.where(statistics.valid, centred - baseline, 0.0)
  return _per_token(advantages, mask)


def gpg(scores: Array, group: Array, mask: Array) -> tuple[Array, Array]:
  """`B / max(1, #{score != 0}) (score - mean_group)`, Chu et al. (2025).

  B counts the valid sequences of the step, and the factor, in the form that
  verl has, makes up for those that failed.  Special cases, arguments and
  results are those of `grpo`: a group of one gives 0 (in verl its score).
  """
  chex.assert_rank([scores, group, mask], [1, 1, 2])
  statistics = _statistics_of_sequences(scores, group, mask)
  valid, centred = statistics.valid, statistics.centred
  scored = valid & (jnp.asarray(scores) != 0)
  factor = masked.count(valid) / jnp.maximum(masked.count(scored), 1)
  return _per_token(centred * factor.astype(centred.dtype), mask)


def grpo_passk(
  scores: Array,
  group: Array,
  mask: Array,
  *,
  normalize_std: bool = True,
  epsilon: float = 1e-6,
) -> tuple[Array, Array]:
  """`(best - second best) / (std_group + epsilon)` for the best, 0 for others.

  What pass@k, the score of the best of the group, owes to each sequence: Tang
  et al. (2025), k the size of the group.  Two that are best owe each other
  nothing: exactly 0, also where only rounding separates them.  Other special
  cases, arguments and results are those of `grpo`: a group of one gives 0 (verl
  refuses it).
  """
  chex.assert_rank([scores, group, mask], [1, 1, 2])
  statistics = _statistics_of_sequences(scores, group, mask)
  valid = statistics.valid
  scores = masked.fill(scores, valid)
  second = groups.largest_other(scores, group, valid)
  leads = valid & (statistics.count > 1) & (scores > second)
  leads = leads & ~masked.is_rounding(second, scores)
  advantages = jnp.where(leads, scores - second, 0.0)
  if normalize_std:
    advantages = _over_std(advantages, statistics.std, epsilon)
  return _per_token(advantages, mask)


def gdpo(
  rewards: Array,
  weights: Array,
  group: Array,
  mask: Array,
  *,
  epsilon: float = 1e-6,
) -> tuple[Array, Array]:
  """`whiten(sum_k weight_k grpo(reward_k))`: GDPO, Liu et al. (2026).

  Each reward is normalised by its own group statistics, so that none drowns the
  others; whitening is over all actions of the step.  A reward that is not
  finite leaves its own statistics and adds 0 to its sequence; a sequence of
  which no reward is finite is left out of the whitening too, and gets 0.

  Args:
    rewards: `[N, K]` float; NaN where a reward does not apply.
    weights: `[K]` float.
    group: `[N]` int, the prompt that the sequence answers, any numbers.
    mask: `[N, T]` bool.
    epsilon: in units of the rewards.

  Returns:
    Advantages `[N, T]`, and the same as returns.  Before whitening, special
    cases are those of `grpo`.
  """
  chex.assert_rank([rewards, weights, group, mask], [2, 1, 1, 2])
  chex.assert_equal(rewards.shape[1], weights.shape[0])

  def normalized(scores):
    statistics = _statistics_of_sequences(scores, group, mask)
    return _over_std(statistics.centred, statistics.std, epsilon)

  parts = jax.vmap(normalized, in_axes=1, out_axes=1)(rewards)  # N K
  weights = jnp.asarray(weights).astype(parts.dtype)
  total = jnp.sum(parts * weights[None, :], axis=1)
  return _whitened(total, jnp.any(jnp.isfinite(rewards), axis=1), mask)


def optimal_token_baseline(
  rewards: Array,
  group: Array,
  mask: Array,
  logprobs: Array,
  sum_squares: Array,
  *,
  importance: Array | None = None,
) -> tuple[Array, Array]:
  """Rewards to go less the baseline of least variance, Li et al. (2026).

  The squared norm of the score function of token t, with respect to the logits,
  is w_t; the baseline weighs the sequences of the group by its sum so far:

    w_t = 1 - 2 pi_t + sum_v pi(v)^2        W_t = sum_{s <= t} w_s
    b_t = sum_group G_t W_t / sum_group W_t        A_t = G_t - b_t

  over the sequences that have an action at t.  The actions that the longest
  sequence has more than any other, which nothing can be compared with, have
  baseline 0, as in verl, and so their raw return even if all scores are equal.
  Elsewhere equal scores give exactly 0: sums are taken of the distance to the
  mean score, and `W + 1e-8` divides, so that b is the mean where W vanishes.

  Sequences are compared at the same place t.  Where tools speak for different
  lengths, use `multi_turn_optimal_token_baseline`.  A group of one gives 0
  (in verl its return); a sequence without an action, or with a reward that is
  not finite, leaves its group and gets 0.

  Args:
    rewards: `[N, T]` float.
    group: `[N]` int, the prompt that the sequence answers, any numbers.
    mask: `[N, T]` bool.
    logprobs: `[N, T]` float, of the actions.
    sum_squares: `[N, T]` float, the squared probabilities of the vocabulary at
      the place of the action, summed.
    importance: `[N, T]` float, weights of `importance.py`; their squares weigh
      w_t.

  Returns:
    Advantages A and returns G, `[N, T]`, at least float32.
  """
  chex.assert_rank([rewards, group], [2, 1])
  chex.assert_equal_shape([rewards, mask, logprobs, sum_squares])
  chex.assert_equal_shape_prefix([rewards, group], 1)
  if importance is not None:
    chex.assert_equal_shape([importance, mask])
  mask = _usable(rewards, mask)
  returns = _rewards_to_go(rewards, mask)  # N T
  scores = masked.sum(rewards, mask, axis=1)
  statistics = _statistics_of_sequences(scores, group, mask)
  weight = _squared_score_norm(mask, logprobs, sum_squares, importance)  # N T

  distance = jnp.where(mask, returns - statistics.mean[:, None], 0.0)  # N T
  total = groups.sums(distance * weight, group, statistics.valid)
  baseline = total / (groups.sums(weight, group, statistics.valid) + 1e-8)

  # No action number reaches the length of the longest other, except in a
  # sequence that is longer than all others.
  number = jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1  # N T
  lengths = masked.count(mask, axis=1)
  others = groups.largest_other(lengths, group, statistics.valid)
  alone = number >= others[:, None]  # N T
  advantages = jnp.where(alone, returns, distance - baseline)
  compared = mask & (statistics.count > 1)[:, None]
  return jnp.where(compared, advantages, 0.0), returns


def multi_turn_optimal_token_baseline(
  rewards: Array,
  group: Array,
  mask: Array,
  logprobs: Array,
  sum_squares: Array,
  *,
  importance: Array | None = None,
) -> tuple[Array, Array]:
  """`optimal_token_baseline` that compares the n-th action with the n-th.

  Places without an action are taken out, and the results put back; so it does
  not matter when, or for how long, tools and users speak.  Known in verl as
  `tir_optimal_token_baseline`.  Arguments, special cases and results are those
  of `optimal_token_baseline`.
  """
  mask = jnp.asarray(mask, bool)
  order = jnp.argsort(~mask, axis=1, stable=True)  # N T, actions first
  back = jnp.argsort(order, axis=1)  # N T

  def compact(x):
    chex.assert_equal_shape([x, mask])
    return jnp.take_along_axis(jnp.asarray(x), order, axis=1)

  results = optimal_token_baseline(
    compact(rewards),
    group,
    compact(mask),
    compact(logprobs),
    compact(sum_squares),
    importance=None if importance is None else compact(importance),
  )
  advantages, returns = (jnp.take_along_axis(x, back, axis=1) for x in results)
  return advantages, returns


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


def _usable(rewards, mask):
  """The mask without sequences that have a reward that is not finite."""
  mask = jnp.asarray(mask, bool)
  chex.assert_equal_shape([rewards, mask])
  finite = jnp.all(jnp.isfinite(rewards) | ~mask, axis=1)  # N
  return mask & finite[:, None]


def _rewards_to_go(rewards, mask, gamma=1.0):
  """`G_t = r_t + gamma G_t'` over actions, 0 elsewhere: gae without critic."""
  no_critic = jnp.zeros_like(rewards)
  _, returns = gae(rewards, no_critic, mask, gamma=gamma, lam=1.0)
  return returns


def _squared_score_norm(mask, logprobs, sum_squares, importance):
  """`W_t = sum_{s <= t} (1 - 2 pi_s + sum_v pi^2) importance_s^2`, masked."""
  probability = jnp.exp(masked.fill(logprobs, mask))
  norm = 1.0 - 2.0 * probability + masked.fill(sum_squares, mask)  # N T
  # (1 - pi)^2 + the squares of all others: negative by rounding only.
  norm = jnp.maximum(norm, 0.0)
  if importance is not None:
    norm = norm * jnp.square(masked.fill(importance, mask))
  norm = jnp.where(mask, norm, 0.0)
  return jnp.where(mask, jnp.cumsum(norm, axis=1), 0.0)


def _statistics_of_sequences(scores, group, mask):
  has_action = jnp.any(jnp.asarray(mask, bool), axis=1)
  return groups.group_statistics(scores, group, has_action)


def _over_std(advantages, std, epsilon):
  return advantages / jnp.where(std > 0, std + epsilon, 1.0)


def _per_token(advantages, mask):
  mask = jnp.asarray(mask, bool)
  advantages = jnp.where(mask, advantages[:, None], 0.0)  # N T
  return advantages, advantages


def _whitened(advantages, valid, mask):
  """Per token, with the deviation of the actions of valid sequences."""
  mask = jnp.asarray(mask, bool) & valid[:, None]
  advantages, _ = _per_token(advantages, mask)
  white = masked.whiten(advantages, mask)
  return white, white


ESTIMATORS = {
  'gae': gae,
  'grpo': grpo,
  'rloo': rloo,
  'reinforce_plus_plus': reinforce_plus_plus,
  'reinforce_plus_plus_baseline': reinforce_plus_plus_baseline,
  'remax': remax,
  'opo': opo,
  'gpg': gpg,
  'grpo_passk': grpo_passk,
  'gdpo': gdpo,
  'optimal_token_baseline': optimal_token_baseline,
  'multi_turn_optimal_token_baseline': multi_turn_optimal_token_baseline,
}

# Need the values of a critic.
CRITIC_ESTIMATORS = frozenset({'gae'})

# Take rewards per token; the others take scores, `gdpo` those of each reward.
TOKEN_REWARD_ESTIMATORS = frozenset(
  {
    'gae',
    'reinforce_plus_plus',
    'remax',
    'optimal_token_baseline',
    'multi_turn_optimal_token_baseline',
  }
)

# Compare the answers to a prompt: a prompt needs two or more.
GROUP_ESTIMATORS = frozenset(
  {
    'grpo',
    'rloo',
    'reinforce_plus_plus_baseline',
    'opo',
    'gpg',
    'grpo_passk',
    'gdpo',
    'optimal_token_baseline',
    'multi_turn_optimal_token_baseline',
  }
)

# Need the sum of squared probabilities from the forward pass.
SUM_SQUARES_ESTIMATORS = frozenset(
  {
    'optimal_token_baseline',
    'multi_turn_optimal_token_baseline',
  }
)
