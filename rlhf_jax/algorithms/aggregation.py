"""From losses per token to one loss: normalisation is a weight per token.

The weights come from the final mask of the whole mini-batch, once; the loss is
`sum(loss * weights)`, whatever the micro-batches, the packing, the padding, the
order of the rows or the number of devices.
"""

import chex
import jax.numpy as jnp

from rlhf_jax import masked
from rlhf_jax import types

Array = types.Array


def token_weights(
  mask: Array,
  mode: str,
  *,
  scale: float | Array | None = None,
  totals: tuple[float, float] | None = None,
) -> Array:
  """The weight of every token in the loss of its mini-batch.

  With n tokens in all, n_i in sequence i, and s sequences that have any:

    token-mean               1 / n
    token-sum                1
    seq-mean-token-sum       1 / s
    seq-mean-token-mean      1 / (n_i s)
    seq-mean-token-sum-norm  1 / (scale s)

  Args:
    mask: `[N, T]` bool, of the mini-batch, after every rejection.
    mode: one of the names above.
    scale: tokens, the constant divisor of the last mode; usually the longest
      allowed response.
    totals: n and s of the whole mini-batch, where the mask is a part of it.

  Returns:
    `[N, T]` float32, 0 at masked places, all 0 if the mask is empty.

  Raises:
    ValueError: unknown mode; a scale where the mode has none, or the reverse.
  """
  chex.assert_rank(mask, 2)
  if mode not in MODES:
    raise ValueError(
      f"unknown aggregation mode '{mode}': choose one of {list(MODES)}"
    )
  if (scale is None) == (mode == 'seq-mean-token-sum-norm'):
    raise ValueError(
      f"aggregation mode '{mode}' with scale {scale}: only"
      " 'seq-mean-token-sum-norm' takes a scale, and it needs one, such as the"
      ' longest allowed response in tokens'
    )
  if isinstance(scale, (int, float)) and not scale > 0:
    raise ValueError(f'the scale is {scale} tokens: it must be positive')
  mask = jnp.asarray(mask, bool)
  lengths = masked.count(mask, axis=1)  # N
  # As floats: length times sequences can pass 2^31.
  num_tokens = jnp.sum(lengths).astype(jnp.float32)
  num_sequences = masked.count(lengths > 0).astype(jnp.float32)
  if totals is not None:
    num_tokens, num_sequences = (jnp.asarray(n, jnp.float32) for n in totals)
  per_sequence = lengths.astype(jnp.float32)
  divisor = MODES[mode](num_tokens, num_sequences, per_sequence, scale)
  divisor = jnp.broadcast_to(divisor, lengths.shape).astype(jnp.float32)  # N
  # Rows without a token may have divisor 0; nothing reads their weight.
  inverse = 1.0 / jnp.where(lengths > 0, divisor, 1.0)
  return jnp.where(mask, inverse[:, None], 0.0)  # N T


def total(loss: Array, weights: Array, mask: Array) -> Array:
  """`sum(loss * weights)` over the places where the mask is set.

  Args:
    loss: `[...]` float, per token.
    weights: same shape, from `token_weights`, in the same layout.
    mask: same shape, bool.

  Returns:
    `[]`, at least float32; 0, with gradient 0, if the mask is empty.
  """
  chex.assert_equal_shape([loss, weights, mask])
  return jnp.sum(masked.fill(loss, mask) * masked.fill(weights, mask))


MODES = {
  'token-mean': lambda tokens, sequences, lengths, scale: tokens,
  'token-sum': lambda tokens, sequences, lengths, scale: jnp.ones_like(tokens),
  'seq-mean-token-sum': lambda tokens, sequences, lengths, scale: sequences,
  'seq-mean-token-mean': (
    lambda tokens, sequences, lengths, scale: lengths * sequences
  ),
  'seq-mean-token-sum-norm': (
    lambda tokens, sequences, lengths, scale: scale * sequences
  ),
}
