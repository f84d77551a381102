"""What the policy losses share: the ratio, its statistics, settings checked."""

import math

import chex
import jax
import jax.numpy as jnp

from rlhf_jax import masked
from rlhf_jax import metrics
from rlhf_jax import types

Array = types.Array

# exp(20) = 4.9e8 is a finite float32 whose product with an advantage still is.
MAX_LOG_RATIO = 20.0


def prepare(
  logprobs: Array, old_logprobs: Array, advantages: Array, mask: Array
) -> tuple[Array, Array, Array]:
  """What every policy loss starts from.

  Args:
    logprobs: `[N, T]` or `[R, L]` float; the only one with a gradient.
    old_logprobs: same shape.
    advantages: same shape.
    mask: same shape, bool.

  Returns:
    `log pi - log pi_old` (not bounded) and the advantages, both at least
    float32 and 0 at masked places, and the mask as bool.
  """
  chex.assert_equal_shape([logprobs, old_logprobs, advantages, mask])
  chex.assert_rank(mask, 2)
  mask = jnp.asarray(mask, bool)
  old_logprobs = jax.lax.stop_gradient(masked.fill(old_logprobs, mask))
  advantages = jax.lax.stop_gradient(masked.fill(advantages, mask))
  return masked.fill(logprobs, mask) - old_logprobs, advantages, mask


def ratio(log_ratio: Array) -> Array:
  """`exp(log_ratio)`, at most e^20 and at least e^-20; `[...]`."""
  return jnp.exp(bounded(log_ratio))


def bounded(log_ratio: Array) -> Array:
  """`log_ratio` between -20 and 20, without a gradient beyond; `[...]`."""
  return jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def statistics(
  log_ratio: Array,
  ratio_: Array,
  mask: Array,
  stopped: Array | None = None,
) -> metrics.Metrics:
  """The `actor/` metrics of all losses, over the tokens of the call.

  Args:
    log_ratio: `[...]`, of single tokens.
    ratio_: same shape, the ratio that the loss uses.
    mask: same shape, bool.
    stopped: same shape, bool: the clip of the loss holds the token; None for
      a loss without one.

  Returns:
    `ppo_kl` = mean(log pi_old - log pi), mean and largest ratio, and
    `pg_clipfrac`, the share of tokens that the clip stops.
  """
  result = {
    'actor/ppo_kl': metrics.mean(-bounded(log_ratio), mask),
    'actor/ratio_mean': metrics.mean(ratio_, mask),
    'actor/ratio_max': metrics.max(ratio_, mask),
  }
  if stopped is not None:
    result['actor/pg_clipfrac'] = metrics.mean(stopped, mask)
  return result


def check(
  name: str,
  value: float | Array,
  *,
  at_least: float = -math.inf,
  more_than: float = -math.inf,
  at_most: float = math.inf,
  hint: str = '',
) -> None:
  """Refuses a setting out of its range; traced values cannot be looked at.

  Raises:
    ValueError: name, value and range; NaN is in no range.
  """
  if not isinstance(value, (int, float)):
    return
  if value >= at_least and value > more_than and value <= at_most:
    return
  bounds = (
    ('at least', at_least),
    ('more than', more_than),
    ('at most', at_most),
  )
  wanted = ' and '.join(
    f'{words} {bound:g}' for words, bound in bounds if math.isfinite(bound)
  )
  raise ValueError(f'{name} is {value}: it must be {wanted}{hint}')


def check_ratio_clips(
  clip_low: float | Array, clip_high: float | Array
) -> None:
  """Refuses distances of a ratio from 1 that make no interval.

  Raises:
    ValueError: `clip_low` is not in [0, 1], or `clip_high` negative.
  """
  check('clip_low', clip_low, at_least=0.0, at_most=1.0)
  check('clip_high', clip_high, at_least=0.0)
