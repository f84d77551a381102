"""Causal attention over packed rows and over a cache."""

import math

import chex
import jax
from jax import ad_checkpoint
import jax.numpy as jnp

from rlhf_jax import types

Array = jax.Array

# `attend_rows` goes through a row in at most so many blocks of queries, of at
# least so many places.  8 blocks compute 9/16 of the scores of a square.
_MAX_BLOCKS = 8
_MIN_BLOCK = 64


def segment_mask(segment_ids: Array, first: int = 0, end: int | None = None):
  """Which key each place of a packed row may look at.

  Query l sees key c where c <= l, and c is of the same sequence or of the
  row's shared prefix, and l is not padding.  Positions inside a sequence grow
  with the place in the row, so the order of places is the causal order.

    segment_ids  [-1, 1, 1, 2, 0]  (prefix, two sequences, padding)
    query 3 sees [ 1, 0, 0, 1, 0]
    query 4 sees [ 0, 0, 0, 0, 0]

  Args:
    segment_ids: [R, L] int32.
    first: the first query.
    end: one past the last query and the last key; L by default.

  Returns:
    [R, end - first, end] bool.
  """
  chex.assert_rank(segment_ids, 2)
  segment_ids = segment_ids[:, :end]
  query, key = segment_ids[:, first:, None], segment_ids[:, None, :]
  length = segment_ids.shape[1]
  causal = jnp.tri(length - first, length, first, dtype=bool)[None]  # 1 L L
  related = (query == key) | (key == types.SHARED)
  return causal & related & (query != types.PADDING)  # R L L


def attend_rows(q: Array, k: Array, v: Array, segment_ids: Array) -> Array:
  """Attention of packed rows to themselves, under `segment_mask`.

  softmax(q k^T / sqrt(E), where mask) v, with grouped key/value heads: query
  head i uses key/value head i // (Q / H).  Scores and softmax are in at least
  float32.  Padding gets zeros.

  Blocks of queries meet only the keys up to their end, and the backward pass
  computes their weights again from the log of their total, as
  FlashAttention does (https://arxiv.org/abs/2205.14135): no [L, L] is kept.

  Args:
    q: [R, L, Q, E].
    k: [R, L, H, E].
    v: [R, L, H, E].
    segment_ids: [R, L] int32.

  Returns:
    [R, L, Q, E] in the dtype of q.
  """
  chex.assert_rank([q, k, v, segment_ids], [4, 4, 4, 2])
  chex.assert_equal_shape([k, v])
  rows, length, heads, width = q.shape
  # Heads to the front once: every product below is then a plain matrix product
  # per (row, key/value head), without a transposed copy of the scores.
  out = _attend(_grouped(q, k.shape[2]), _front(k), _front(v), segment_ids)
  return jnp.moveaxis(out, 3, 1).reshape(rows, length, heads, width)


def attend(
  q: Array,
  k: Array,
  v: Array,
  mask: Array,
  *,
  prefix: tuple[Array, Array] | None = None,
) -> Array:
  """Attention of queries to a cache, under any mask.

  As `attend_rows`; a query that may see nothing gets zeros.

  Args:
    q: [B, S, Q, E].
    k: [B, H, C, E], heads before places as in the cache.
    v: [B, H, C, E].
    mask: [B, S, C] bool.
    prefix: further keys and values [H, P, E] that every query of every row
      sees; they are read once for all rows.

  Returns:
    [B, S, Q, E] in the dtype of q.
  """
  chex.assert_rank([q, k, v, mask], [4, 4, 4, 3])
  chex.assert_equal_shape([k, v])
  batch, length, heads, width = q.shape
  q = _grouped(q, k.shape[1])  # B H M S E
  if prefix is None:
    out, _ = _softmax_product(q, k, v, mask)
  else:
    out = _with_prefix(q, k, v, mask, *prefix)
  return jnp.moveaxis(out, 3, 1).reshape(batch, length, heads, width)


def _with_prefix(q, k, v, mask, prefix_k, prefix_v):
  """Softmax over the prefix and the row's own places together."""
  batch, kv_heads, shared, length, width = q.shape
  rows = jnp.moveaxis(q, 1, 0).reshape(kv_heads, -1, width)  # H BMS E
  product = lambda x, y, y_axis: jax.lax.dot_general(
    x,
    y,
    (((2,), (y_axis,)), ((0,), (0,))),
    preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
  )
  back = lambda x: jnp.moveaxis(
    x.reshape(kv_heads, batch, shared, length, x.shape[-1]), 0, 1
  )
  early = product(rows, prefix_k, 2)  # H BMS P
  own = _scores(q, k, mask)  # B H M S C
  top = jnp.maximum(
    back(jnp.max(early, axis=-1, keepdims=True)),
    jnp.max(own, axis=-1, keepdims=True),
  )  # B H M S 1
  early = jnp.exp(
    early - jnp.moveaxis(top, 1, 0).reshape(kv_heads, -1, 1)
  )  # H BMS P
  own = jnp.exp(own - top)
  total = back(jnp.sum(early, axis=-1, keepdims=True))
  total += jnp.sum(own, axis=-1, keepdims=True)
  out = back(product(early.astype(prefix_v.dtype), prefix_v, 1))
  out += _product(_merge(own).astype(v.dtype), v, 3, 2).reshape(q.shape)
  return (out / total).astype(q.dtype)


def _front(x: Array) -> Array:
  """[R, C, H, E] -> [R, H, C, E]."""
  return jnp.moveaxis(x, 1, 2)


def _grouped(q: Array, kv_heads: int) -> Array:
  """[R, L, Q, E] -> [R, H, M, L, E], scaled; M query heads share a key head."""
  rows, length, heads, width = q.shape
  q = q * jnp.asarray(1 / math.sqrt(width), q.dtype)
  q = q.reshape(rows, length, kv_heads, heads // kv_heads, width)
  return jnp.moveaxis(q, 1, 3)


def _product(x: Array, y: Array, x_axis: int, y_axis: int) -> Array:
  """Product over the given axes per (row, head), in at least float32."""
  return jax.lax.dot_general(
    x,
    y,
    (((x_axis,), (y_axis,)), ((0, 1), (0, 1))),
    preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
  )


def _merge(x: Array) -> Array:
  """[R, H, M, L, n] -> [R, H, M L, n]."""
  return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _scores(q: Array, k: Array, mask: Array) -> Array:
  """[R, H, M, L, C], the lowest number where masked."""
  scores = _product(_merge(q), k, 3, 3).reshape(*q.shape[:-1], k.shape[2])
  return jnp.where(mask[:, None, None], scores, jnp.finfo(scores.dtype).min)


def _softmax_product(q, k, v, mask) -> tuple[Array, Array]:
  """Output [R, H, M, L, E] and log of the total weight [R, H, M, L, 1]."""
  scores = _scores(q, k, mask)
  top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
  weights = jnp.exp(scores - top)
  total = jnp.sum(weights, axis=-1, keepdims=True)  # R H M L 1
  # Divided after the product: [L, E] numbers instead of [L, C].
  out = _product(_merge(weights).astype(v.dtype), v, 3, 2).reshape(q.shape)
  # A query that sees nothing has the lowest number everywhere, so weights of 1.
  seen = jnp.any(mask, axis=-1)[:, None, None, :, None]
  out = jnp.where(seen, out / total, 0.0)
  return out.astype(q.dtype), top + jnp.log(total)


def _blocks(length: int) -> list[tuple[int, int]]:
  """First and end of each block of queries."""
  size = max(_MIN_BLOCK, -(-length // _MAX_BLOCKS))
  return [(i, min(i + size, length)) for i in range(0, length, size)]


@jax.custom_vjp
def _attend(q: Array, k: Array, v: Array, segment_ids: Array) -> Array:
  return _attend_forward(q, k, v, segment_ids)[0]


def _attend_forward(q, k, v, segment_ids):
  outs, logs = [], []
  for first, end in _blocks(k.shape[2]):
    mask = segment_mask(segment_ids, first, end)
    out, log_total = _softmax_product(
      q[:, :, :, first:end], k[:, :, :end], v[:, :, :end], mask
    )
    outs.append(out)
    logs.append(log_total)
  out, log_total = (jnp.concatenate(x, axis=3) for x in (outs, logs))
  # Named for `decoder.hidden`, which keeps them for the backward pass.
  q, k, v, out, log_total = (
    ad_checkpoint.checkpoint_name(a, 'attention')
    for a in (q, k, v, out, log_total)
  )
  return out, (q, k, v, segment_ids, out, log_total)


def _attend_backward(saved, gradient):
  """d scores = weights (d weights - sum_c weights d weights).

  The sum is the inner product of the output with its gradient.
  """
  q, k, v, segment_ids, out, log_total = saved
  wide = log_total.dtype
  inner = jnp.sum(
    out.astype(wide) * gradient.astype(wide), axis=-1, keepdims=True
  )  # R H M L 1
  dq = []
  dk, dv = (
    jnp.zeros((*x.shape[:2], x.shape[3], x.shape[2]), wide) for x in (k, v)
  )  # R H E C
  for first, end in _blocks(k.shape[2]):
    mask = segment_mask(segment_ids, first, end)
    queries, outer = (x[:, :, :, first:end] for x in (q, gradient))
    keys, stored = k[:, :, :end], v[:, :, :end]
    weights = jnp.exp(
      _scores(queries, keys, mask) - log_total[:, :, :, first:end]
    )
    # where: a query that sees nothing has no weights that sum to one.
    weights = jnp.where(mask[:, None, None], weights, 0.0)
    d_weights = _product(_merge(outer), stored, 3, 3).reshape(weights.shape)
    d_scores = weights * (d_weights - inner[:, :, :, first:end])
    weights, d_scores = (_merge(x).astype(q.dtype) for x in (weights, d_scores))
    dq.append(_product(d_scores, keys, 3, 2).reshape(queries.shape))
    # [E, C] and not [C, E]: the large operand is then read along its rows.
    dk = dk.at[..., :end].add(_product(_merge(queries), d_scores, 2, 2))
    dv = dv.at[..., :end].add(_product(_merge(outer), weights, 2, 2))
  dq = jnp.concatenate(dq, axis=3)
  dk, dv = (jnp.swapaxes(x, 2, 3) for x in (dk, dv))
  return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend.defvjp(_attend_forward, _attend_backward)
