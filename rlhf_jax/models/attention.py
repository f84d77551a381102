"""Causal attention over packed rows and over a cache."""

import math

import chex
import jax
import jax.numpy as jnp

from rlhf_jax import types

Array = jax.Array


def segment_mask(segment_ids: Array) -> Array:
  """Which key each place of a packed row may look at: [R, L] -> [R, L, L] bool.

  Query l sees key c where c <= l, and c is of the same sequence or of the
  row's shared prefix, and l is not padding.  Positions inside a sequence grow
  with the place in the row, so the order of places is the causal order.

    segment_ids  [-1, 1, 1, 2, 0]  (prefix, two sequences, padding)
    query 3 sees [ 1, 0, 0, 1, 0]
    query 4 sees [ 0, 0, 0, 0, 0]
  """
  chex.assert_rank(segment_ids, 2)
  length = segment_ids.shape[1]
  query, key = segment_ids[:, :, None], segment_ids[:, None, :]
  causal = jnp.tri(length, dtype=bool)[None]  # 1 L L
  related = (query == key) | (key == types.SHARED)
  return causal & related & (query != types.PADDING)  # R L L


def attend(q: Array, k: Array, v: Array, mask: Array) -> Array:
  """softmax(q k^T / sqrt(E), where mask) v, with grouped key/value heads.

  Query head i uses key/value head i // (Q / H).  Scores and softmax are in at
  least float32.  A query that may see nothing gets zeros.

  Args:
    q: [R, L, Q, E].
    k: [R, C, H, E].
    v: [R, C, H, E].
    mask: [R, L, C] bool.

  Returns:
    [R, L, Q, E] in the dtype of q.
  """
  chex.assert_rank([q, k, v, mask], [4, 4, 4, 3])
  chex.assert_equal_shape([k, v])
  rows, length, heads, width = q.shape
  kv_heads = k.shape[2]
  wide = jnp.promote_types(q.dtype, jnp.float32)
  grouped = q.reshape(rows, length, kv_heads, heads // kv_heads, width)
  scores = jnp.einsum(
    'rlhme,rche->rhmlc',
    grouped * jnp.asarray(1 / math.sqrt(width), q.dtype),
    k,
    preferred_element_type=wide,
  )
  allowed = mask[:, None, None]  # R 1 1 L C
  scores = jnp.where(allowed, scores, jnp.finfo(wide).min)
  top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
  weights = jnp.where(allowed, jnp.exp(scores - top), 0.0)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  # Only a query that sees nothing has a total of 0.  Not maximum(total, 1):
  # the total of a query that sees one key is 1, a tie that halves gradients.
  weights = (weights / jnp.where(total > 0, total, 1.0)).astype(v.dtype)
  out = jnp.einsum('rhmlc,rche->rlhme', weights, v)
  return out.reshape(rows, length, heads, width)
