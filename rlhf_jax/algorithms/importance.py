"""The gap between the sampler and the trainer: measured, weighted, rejected.

The program that samples and the program that trains compute slightly other
probabilities for the same weights (precision, kernels, stale weights), so the
data is off-policy before the first update.  All functions look at

  l = log pi_trainer - log pi_sampler

per token, in the sequence layout `[N, T]` and before the loss:

  weights    factors on the loss of a token (Yao et al. 2025; IcePop, 2025)
  keep       the mask without tokens or sequences that are too far off
  *metrics   what both did, and `mismatch`, how large the gap is

The formulas and their statistics follow verl's rollout correction.
"""

import math

import chex
import jax
import jax.numpy as jnp

from rlhf_jax import masked
from rlhf_jax import metrics
from rlhf_jax import types
from rlhf_jax.algorithms import kl
from rlhf_jax.algorithms import surrogate

Array = types.Array

PREFIX = 'training/rollout_corr/'


def weights(
  trainer_logprobs: Array,
  sampler_logprobs: Array,
  mask: Array,
  *,
  level: str = 'token',
  upper: float,
  lower: float | None = None,
  normalize: bool = False,
) -> Array:
  """`pi_trainer / pi_sampler`, of tokens or sequences, kept within bounds.

    token     w_t = exp(l_t)             biased, little variance
    sequence  w_t = exp(sum_t l_t)       unbiased, much variance

  with the exponent between -20 and 20.  `upper` alone truncates, min(w, upper)
  (truncated importance sampling, Yao et al. 2025); with `lower` a weight
  outside [lower, upper] becomes 0 (IcePop, Ling Team 2025).

  Args:
    trainer_logprobs: `[N, T]` float, of the policy before the update.
    sampler_logprobs: `[N, T]` float, as the rollout recorded them.
    mask: `[N, T]` bool.
    level: one of `WEIGHT_LEVELS`.
    upper: largest weight, positive; infinity is no bound.
    lower: at least 0 and less than `upper`, or None to truncate.
    normalize: divide by the mean over all tokens ('token') or over all
      sequences ('sequence') of the call, after the bounds.

  Returns:
    `[N, T]`, at least float32, without gradient, 0 at masked places.

  Raises:
    ValueError: unknown level, or a bound out of range.
  """
  raw = _ratio(trainer_logprobs, sampler_logprobs, mask, level)
  _check_bounds(upper, lower)
  mask = jnp.asarray(mask, bool)
  bounded = _bounded(raw, upper, lower)
  if normalize:
    mean = masked.mean(bounded, mask)
    if level == 'sequence':
      mean = masked.mean(masked.mean(bounded, mask, axis=1), _present(mask))
    bounded = bounded / jnp.where(mean > 0, mean, 1.0)
  return jax.lax.stop_gradient(jnp.where(mask, bounded, 0.0))


def keep(
  trainer_logprobs: Array,
  sampler_logprobs: Array,
  mask: Array,
  *,
  statistic: str = 'k1',
  level: str = 'token',
  low: float | None = None,
  high: float,
) -> Array:
  """The mask without what is too far off.

  The statistics are the estimators of KL(sampler, trainer) of `kl`,

    k1 = -l        k2 = l^2 / 2        k3 = exp(l) - 1 - l

  and a place stays if `log(low) <= k1 <= log(high)`, or `k2 <= high`, or
  `k3 <= high`.  So for k1 the bounds are ratios pi_sampler / pi_trainer: of a
  token, of a sequence (sum), or their geometric mean (mean).  Levels of a
  sequence remove the whole sequence.

  Args:
    trainer_logprobs: `[N, T]` float, of the policy before the update.
    sampler_logprobs: `[N, T]` float, as the rollout recorded them.
    mask: `[N, T]` bool.
    statistic: one of `STATISTICS`.
    level: one of `KEEP_LEVELS`; 'sequence_max' is for k2 and k3.
    low: for k1 only, a ratio in (0, 1]; None is `1 / high`.
    high: for k1 a ratio, at least 1; for k2 and k3 nats, at least 0.

  Returns:
    `[N, T]` bool, a part of `mask`.  It replaces the mask before sequences and
    tokens are counted.

  Raises:
    ValueError: unknown names, or bounds that do not fit the statistic.
  """
  low = _checked_low(statistic, level, low, high)
  chex.assert_rank(mask, 2)
  mask = jnp.asarray(mask, bool)
  value = STATISTICS[statistic](sampler_logprobs, trainer_logprobs, mask=mask)
  value = KEEP_LEVELS[level](value, mask)
  if statistic == 'k1':
    inside = (value >= math.log(low)) & (value <= math.log(high))
  else:
    inside = value <= high
  return mask & jnp.broadcast_to(inside, mask.shape)


def mismatch(
  trainer_logprobs: Array, sampler_logprobs: Array, mask: Array
) -> metrics.Metrics:
  """How far the sampler is from the trainer, under verl's names.

  Over tokens: `kl` (k1) and `k3_kl` of KL(sampler, trainer), and `chi2_token`
  = E[w^2] - 1 of the token weights.  Over sequences with a token: perplexities
  exp(-mean log pi) and their logarithms of both sides, mean, mean size, largest
  and smallest difference of the logarithms, `ppl_ratio`, and `chi2_seq` of the
  sequence weights.

  Args:
    trainer_logprobs: `[N, T]` float.
    sampler_logprobs: `[N, T]` float.
    mask: `[N, T]` bool.
  """
  mask = jnp.asarray(mask, bool)
  weight = _ratio(trainer_logprobs, sampler_logprobs, mask, 'token')
  sequence_weight = _ratio(trainer_logprobs, sampler_logprobs, mask, 'sequence')
  present = _present(mask)  # N
  trainer = -masked.mean(trainer_logprobs, mask, axis=1)  # N, nats per token
  sampler = -masked.mean(sampler_logprobs, mask, axis=1)
  gap = trainer - sampler
  k1, k3 = (
    STATISTICS[name](sampler_logprobs, trainer_logprobs, mask=mask)
    for name in ('k1', 'k3')
  )
  return _named({
    'kl': metrics.mean(k1, mask),
    'k3_kl': metrics.mean(k3, mask),
    'chi2_token': metrics.mean(jnp.square(weight) - 1.0, mask),
    'chi2_seq': metrics.mean(
      jnp.square(sequence_weight[:, 0]) - 1.0, present
    ),
    'training_ppl': metrics.mean(jnp.exp(trainer), present),
    'training_log_ppl': metrics.mean(trainer, present),
    'rollout_ppl': metrics.mean(jnp.exp(sampler), present),
    'rollout_log_ppl': metrics.mean(sampler, present),
    'log_ppl_diff': metrics.mean(gap, present),
    'log_ppl_abs_diff': metrics.mean(jnp.abs(gap), present),
    'log_ppl_diff_max': metrics.max(gap, present),
    'log_ppl_diff_min': metrics.min(gap, present),
    'ppl_ratio': metrics.mean(jnp.exp(gap), present),
  })  # fmt: skip


def weight_metrics(
  trainer_logprobs: Array,
  sampler_logprobs: Array,
  mask: Array,
  *,
  level: str = 'token',
  upper: float,
  lower: float | None = None,
) -> metrics.Metrics:
  """What `weights` of the same settings did, before normalisation.

  Args:
    trainer_logprobs: `[N, T]` float.
    sampler_logprobs: `[N, T]` float.
    mask: `[N, T]` bool.
    level: as in `weights`.
    upper: as in `weights`.
    lower: as in `weights`.

  Returns:
    Over tokens, of the weights within bounds: mean, largest, smallest, and the
    effective sample size (sum w)^2 / (n sum w^2), 1 where all are equal.  Of
    the weights before, the share (of tokens or sequences, as the level) above
    `upper` and below `lower` (1 / upper by default).

  Raises:
    ValueError: as `weights`.
  """
  raw = _ratio(trainer_logprobs, sampler_logprobs, mask, level)
  _check_bounds(upper, lower)
  mask = jnp.asarray(mask, bool)
  bounded = _bounded(raw, upper, lower)
  square = masked.mean(jnp.square(bounded), mask)
  size = jnp.square(masked.mean(bounded, mask))
  size = size / jnp.where(square > 0, square, 1.0)
  floor = 1.0 / upper if lower is None else lower
  counted, units = raw, mask
  if level == 'sequence':
    counted, units = raw[:, 0], _present(mask)
  return _named({
    'rollout_is_mean': metrics.mean(bounded, mask),
    'rollout_is_max': metrics.max(bounded, mask),
    'rollout_is_min': metrics.min(bounded, mask),
    'rollout_is_eff_sample_size': metrics.mean(size, jnp.any(mask)),
    'rollout_is_ratio_fraction_high': metrics.mean(counted > upper, units),
    'rollout_is_ratio_fraction_low': metrics.mean(counted < floor, units),
  })  # fmt: skip


def keep_metrics(mask: Array, kept: Array) -> metrics.Metrics:
  """What `keep` removed.

  Args:
    mask: `[N, T]` bool, before.
    kept: `[N, T]` bool, after; several are joined by `&`.

  Returns:
    The shares of tokens, and of sequences with a removed token.
  """
  chex.assert_equal_shape([mask, kept])
  mask = jnp.asarray(mask, bool)
  removed = mask & ~jnp.asarray(kept, bool)
  return _named({
    'rollout_rs_masked_fraction': metrics.mean(removed, mask),
    'rollout_rs_seq_masked_fraction': metrics.mean(
      jnp.any(removed, axis=1), _present(mask)
    ),
  })  # fmt: skip


def _ratio(trainer_logprobs, sampler_logprobs, mask, level):
  """`exp(l)`, or `exp(sum l)` at every place of a sequence; `[N, T]`."""
  if level not in WEIGHT_LEVELS:
    raise ValueError(
      f"unknown level '{level}' of importance weights: choose one of"
      f' {list(WEIGHT_LEVELS)}'
    )
  chex.assert_rank(mask, 2)
  chex.assert_equal_shape([trainer_logprobs, sampler_logprobs, mask])
  log_ratio = masked.fill(trainer_logprobs, mask)
  log_ratio -= masked.fill(sampler_logprobs, mask)
  if level == 'sequence':
    log_ratio = masked.segment_sum(log_ratio, mask)
  return surrogate.ratio(log_ratio)


def _bounded(raw, upper, lower):
  if lower is None:
    return jnp.minimum(raw, upper)
  return jnp.where((raw >= lower) & (raw <= upper), raw, 0.0)


def _present(mask):
  """Which sequences have a token; `[N]`."""
  return jnp.any(mask, axis=1)


def _named(group):
  return {PREFIX + name: metric for name, metric in group.items()}


def _check_bounds(upper, lower):
  surrogate.check('upper', upper, more_than=0.0)
  if lower is None:
    return
  surrogate.check('lower', lower, at_least=0.0)
  if lower >= upper:
    raise ValueError(
      f'lower is {lower} and upper {upper}: no weight lies between them; lower'
      ' must be less than upper'
    )


def _checked_low(statistic, level, low, high):
  """The lower bound of `keep`, None if it has none."""
  if statistic not in STATISTICS:
    raise ValueError(
      f"unknown statistic '{statistic}': choose one of {list(STATISTICS)}"
    )
  if level not in KEEP_LEVELS:
    raise ValueError(
      f"unknown level '{level}' of rejection: choose one of {list(KEEP_LEVELS)}"
    )
  if statistic != 'k1':
    if low is not None:
      raise ValueError(
        f"low is {low}, but '{statistic}' has no lower bound: it is 0 where the"
        ' sampler agrees with the trainer; leave low out'
      )
    surrogate.check('high', high, at_least=0.0)
    return None
  if level == 'sequence_max':
    raise ValueError(
      "'sequence_max' of 'k1' would let tokens pass that the trainer finds far"
      " likelier: use 'k2' or 'k3', which grow on both sides"
    )
  surrogate.check(
    'high', high, at_least=1.0, hint=': for k1 it bounds a ratio, 1 if equal'
  )
  low = 1.0 / high if low is None else low
  surrogate.check('low', low, more_than=0.0, at_most=1.0)
  return low


def _k3(logprobs, reference_logprobs, *, mask):
  return kl.k3(
    logprobs, reference_logprobs, mask=mask, bound=surrogate.MAX_LOG_RATIO
  )


WEIGHT_LEVELS = ('token', 'sequence')

# The samples are the sampler's, so it stands for the policy, the trainer for
# the reference.
STATISTICS = {'k1': kl.k1, 'k2': kl.k2, 'k3': _k3}

# To `[N, T]` or `[N, 1]`.
KEEP_LEVELS = {
  'token': lambda x, mask: x,
  'sequence_sum': lambda x, mask: masked.sum(x, mask, axis=1, keepdims=True),
  'sequence_mean': lambda x, mask: masked.mean(x, mask, axis=1, keepdims=True),
  'sequence_max': lambda x, mask: masked.max(x, mask, axis=1, keepdims=True),
}
