"""Statistics over the places where a mask is set.

What stands at a masked place never matters, not even NaN or infinity: it is
replaced before any arithmetic, so neither values nor gradients see it.  An
empty selection gives 0.  Everything is computed in at least float32.
"""

import chex
import jax
import jax.numpy as jnp

from rlhf_jax import types

Array = types.Array

# Values that differ by no more than this many units in the last place of the
# largest are one value: what separates them is rounding, not information.
ROUNDING_ULPS = 8


def fill(x: Array, mask: Array, value: float = 0.0) -> Array:
  """`x` in at least float32 where the mask is set, `value` elsewhere.

  Args:
    x: `[...]`, any real dtype.
    mask: `[...]` bool, same shape.
    value: what to put at masked places.

  Returns:
    `[...]`, `promote_types(x.dtype, float32)`.
  """
  chex.assert_equal_shape([x, mask])
  x = jnp.asarray(x)
  x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  return jnp.where(jnp.asarray(mask, bool), x, value)


def count(mask: Array, axis=None, keepdims: bool = False) -> Array:
  """How many places are set, as an exact int32."""
  mask = jnp.asarray(mask, bool)
  return jnp.sum(mask, axis=axis, keepdims=keepdims, dtype=jnp.int32)


def sum(x: Array, mask: Array, axis=None, keepdims: bool = False) -> Array:
  """`sum_i m_i x_i`; `x` and `mask` `[...]`, 0 if the mask is empty."""
  chex.assert_equal_shape([x, mask])
  return jnp.sum(fill(x, mask), axis=axis, keepdims=keepdims)


def mean(x: Array, mask: Array, axis=None, keepdims: bool = False) -> Array:
  """`sum_i m_i x_i / sum_i m_i`; `[...]`, 0 if the mask is empty."""
  chex.assert_equal_shape([x, mask])
  total = sum(x, mask, axis=axis, keepdims=keepdims)
  n = count(mask, axis=axis, keepdims=keepdims)
  return total / jnp.maximum(n, 1).astype(total.dtype)


def max(x: Array, mask: Array, axis=None, keepdims: bool = False) -> Array:
  """The largest selected value; `[...]`, 0 if the mask is empty."""
  chex.assert_equal_shape([x, mask])
  largest = jnp.max(fill(x, mask, -jnp.inf), axis=axis, keepdims=keepdims)
  return jnp.where(count(mask, axis, keepdims) > 0, largest, 0.0)


def min(x: Array, mask: Array, axis=None, keepdims: bool = False) -> Array:
  """The smallest selected value; `[...]`, 0 if the mask is empty."""
  chex.assert_equal_shape([x, mask])
  smallest = jnp.min(fill(x, mask, jnp.inf), axis=axis, keepdims=keepdims)
  return jnp.where(count(mask, axis, keepdims) > 0, smallest, 0.0)


def segment_sum(
  x: Array, mask: Array, segment_ids: Array | None = None
) -> Array:
  """For every place the sum over its own sequence, in either layout.

    x            1  2  4  8  16      one row, everything selected
    segment_ids  1  1  2  2   0
    result       3  3 12 12   0

  Args:
    x: `[N, T]` or `[R, L]`, any real dtype.
    mask: same shape, bool.
    segment_ids: same shape, int32, see `types.Rows`: places with the same
      number from 1 to L are one sequence, in any order; PADDING and SHARED
      places are in none.  None is one sequence per row.

  Returns:
    Same shape, at least float32; 0 in no sequence, and in a sequence of which
    no place is selected.
  """
  return _over_segments(_segment_sum, sum, x, mask, segment_ids)


def segment_mean(
  x: Array, mask: Array, segment_ids: Array | None = None
) -> Array:
  """For every place the mean over its own sequence, as `segment_sum`."""
  total = segment_sum(x, mask, segment_ids)
  n = segment_sum(jnp.ones_like(total), mask, segment_ids)
  return total / jnp.maximum(n, 1.0)


def segment_max(
  x: Array, mask: Array, segment_ids: Array | None = None
) -> Array:
  """For every place the largest of its own sequence, as `segment_sum`."""
  return _over_segments(_segment_max, max, x, mask, segment_ids)


def _over_segments(by_id, by_row, x, mask, segment_ids):
  """Reduces within each row, or within each segment, and broadcasts back."""
  chex.assert_rank([x, mask], 2)
  chex.assert_equal_shape([x, mask])
  if segment_ids is None:
    return jnp.broadcast_to(by_row(x, mask, axis=1, keepdims=True), x.shape)
  chex.assert_equal_shape([x, segment_ids])
  # Bucket 0 collects the places of no sequence; none of them is selected.
  ids = jnp.clip(jnp.asarray(segment_ids), 0, x.shape[1])
  mask = jnp.asarray(mask, bool) & (ids > 0)
  buckets = x.shape[1] + 1

  def row(x, mask, ids):  # L
    return by_id(x, mask, ids, buckets)[ids]

  return jax.vmap(row)(jnp.asarray(x), mask, ids)


def _segment_sum(x, mask, ids, buckets):
  return jax.ops.segment_sum(fill(x, mask), ids, num_segments=buckets)


def _segment_max(x, mask, ids, buckets):
  some = jax.ops.segment_max(mask.astype(jnp.int32), ids, num_segments=buckets)
  filled = fill(x, mask, -jnp.inf)
  largest = jax.ops.segment_max(filled, ids, num_segments=buckets)
  return jnp.where(some > 0, largest, 0.0)


def centre(x: Array, mask: Array, axis=None) -> tuple[Array, Array]:
  """`x - mean(x)` and the mean, exactly 0 where all values are one value.

  The mean is taken of the distance to the smallest value: seven times 0.35 has
  the mean 0.35 in float32 only up to rounding, and a later division by a tiny
  standard deviation would turn that rounding into a signal.

  Args:
    x: `[...]`.
    mask: `[...]` bool.
    axis: over which to take the mean; None is all.

  Returns:
    The centred values `[...]`, 0 at masked places, and the mean with `axis`
    kept at size 1.
  """
  chex.assert_equal_shape([x, mask])
  x = fill(x, mask)
  low = min(x, mask, axis=axis, keepdims=True)
  high = max(x, mask, axis=axis, keepdims=True)
  # The centred values do not depend on what was subtracted first.
  shifted = x - jax.lax.stop_gradient(low)
  offset = mean(shifted, mask, axis=axis, keepdims=True)
  one_value = is_rounding(low, high)
  keep = jnp.asarray(mask, bool) & ~one_value
  centred = jnp.where(keep, shifted - offset, 0.0)
  return centred, jax.lax.stop_gradient(low) + offset


def is_rounding(low: Array, high: Array) -> Array:
  """Whether all that separates two values is rounding; `[...]` bool."""
  chex.assert_equal_shape([low, high])
  largest = jnp.maximum(jnp.abs(low), jnp.abs(high))
  ulp = jnp.finfo(largest.dtype).eps * largest
  return high - low <= ROUNDING_ULPS * ulp


def var(
  x: Array, mask: Array, axis=None, keepdims: bool = False, ddof: int = 0
) -> Array:
  """`sum_i m_i (x_i - mean)^2 / (n - ddof)`, in two passes.

  Args:
    x: `[...]`.
    mask: `[...]` bool.
    axis: over which to reduce; None is all.
    keepdims: keep reduced axes at size 1.
    ddof: 1 is Bessel's correction.

  Returns:
    0 if there are `ddof` values or fewer, or if they are all equal.
  """
  chex.assert_equal_shape([x, mask])
  centred, _ = centre(x, mask, axis=axis)
  total = jnp.sum(jnp.square(centred), axis=axis, keepdims=keepdims)
  n = count(mask, axis=axis, keepdims=keepdims) - ddof
  return total / jnp.maximum(n, 1).astype(total.dtype)


def std(
  x: Array, mask: Array, axis=None, keepdims: bool = False, ddof: int = 0
) -> Array:
  """The square root of `var`, with gradient 0 (not NaN) where that is 0."""
  chex.assert_equal_shape([x, mask])
  variance = var(x, mask, axis=axis, keepdims=keepdims, ddof=ddof)
  positive = variance > 0
  root = jnp.sqrt(jnp.where(positive, variance, 1.0))
  return jnp.where(positive, root, 0.0)


def whiten(
  x: Array, mask: Array, *, shift_mean: bool = True, epsilon: float = 1e-8
) -> Array:
  """`(x - mean) / sqrt(var + epsilon)` over all selected places.

  The variance has Bessel's correction, as in verl; unlike there, masked places
  become 0, and one value, or several equal ones, are defined: 0.

  Args:
    x: `[...]`.
    mask: `[...]` bool.
    shift_mean: False adds the mean again after the division.
    epsilon: added to the variance, in squared units of `x`.

  Returns:
    `[...]`, at least float32.
  """
  chex.assert_equal_shape([x, mask])
  centred, average = centre(x, mask)
  n = jnp.maximum(count(mask) - 1, 1).astype(centred.dtype)
  variance = jnp.sum(jnp.square(centred)) / n
  white = centred / jnp.sqrt(jnp.where(variance > 0, variance + epsilon, 1.0))
  if not shift_mean:
    white = white + average
  return jnp.where(jnp.asarray(mask, bool), white, 0.0)
