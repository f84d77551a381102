"""The critic's loss per token, to be weighted and summed, and its quality."""

import chex
import jax
import jax.numpy as jnp

from rlhf_jax import masked
from rlhf_jax import metrics
from rlhf_jax import types

Array = types.Array


def clipped(
  values: Array,
  old_values: Array,
  returns: Array,
  mask: Array,
  *,
  clip: float | None,
) -> tuple[Array, metrics.Metrics]:
  """`max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2`.

  The value loss of the PPO reference implementation: a value that has moved
  away from the old one by more than `clip` stops learning in that direction.

  Args:
    values: `[N, T]` or `[R, L]` float; gradients go here only.
    old_values: same shape, of the critic before the step.
    returns: same shape, the targets.
    mask: same shape, bool.
    clip: in units of the return; None is the plain squared error.

  Returns:
    The loss per token, at least float32, 0 at masked places;
    `critic/vf_clipfrac`, the share of tokens that the clip stops.

  Raises:
    ValueError: `clip` is not positive.
  """
  chex.assert_equal_shape([values, old_values, returns, mask])
  if clip is not None and not clip > 0.0:
    raise ValueError(
      f'the value clip is {clip}: it must be positive, or None for no clip'
    )
  mask = jnp.asarray(mask, bool)
  values = masked.fill(values, mask)
  returns = jax.lax.stop_gradient(masked.fill(returns, mask))
  free = jnp.square(values - returns)
  held = free
  if clip is not None:
    old_values = jax.lax.stop_gradient(masked.fill(old_values, mask))
    near = jnp.clip(values, old_values - clip, old_values + clip)
    held = jnp.square(near - returns)
  statistics = {'critic/vf_clipfrac': metrics.mean(held > free, mask)}
  return 0.5 * jnp.maximum(free, held), statistics


def explained_variance(values: Array, returns: Array, mask: Array) -> Array:
  """`1 - var(R - V) / var(R)`: 1 is perfect, 0 no better than a constant.

  Args:
    values: `[...]` float.
    returns: same shape.
    mask: same shape, bool; all tokens of a step.

  Returns:
    `[]`, at least float32; 0 if the returns are all equal or there are none.
  """
  chex.assert_equal_shape([values, returns, mask])
  returns = masked.fill(returns, mask)
  error = returns - masked.fill(values, mask)
  total = masked.var(returns, mask)
  varies = total > 0
  share = masked.var(error, mask) / jnp.where(varies, total, 1.0)
  return jnp.where(varies, 1.0 - share, 0.0)
