"""Attention in plain XLA: every platform, and the reference of the kernels.

Shapes: queries [R, H, M, L, E], where M query heads share a key/value head,
already divided by sqrt(E); keys and values [R, H, C, E].  Heads stand before
places: every product is then a plain matrix product per (row, key/value head),
without a transposed copy of the scores.  The log of the total weight of a
query, log sum_c exp(score_c), is [R, H, M, L, 1].

A `Span` is what a sliding window adds to the rule of `segment_mask`; None is no
window.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from rlhf_jax import types

Array = jax.Array

# A row is gone through in pairs of a block of queries and one of keys: an
# eighth of the row each, but within these bounds.  Pairs above the diagonal are
# left out, so that of 8 x 8 blocks 9/16 are computed.  A block of scores this
# small stays in the cache of a CPU, and memory is linear in the length.
_BLOCKS, _LEAST_BLOCK, _LARGEST_BLOCK = 8, 64, 256
# Places of a shared prefix that are looked at together.
SHARED_BLOCK = 128


class Span(NamedTuple):
  """A query sees keys less than `window` positions before it."""

  positions: Array  # [R, L] int32, in the sequence: a prefix is before all
  window: Array  # [] int32, tokens


def segment_mask(segment_ids: Array, span: Span | None = None) -> Array:
  """Which key each place of a packed row may look at.

  Query l sees key c where c <= l, and c is of the same sequence or of the
  row's shared prefix, and l is not padding.  Positions inside a sequence grow
  with the place in the row, so the order of places is the causal order.

    segment_ids  [-1, 1, 1, 2, 0]  (prefix, two sequences, padding)
    query 3 sees [ 1, 0, 0, 1, 0]
    query 4 sees [ 0, 0, 0, 0, 0]

  [R, L] int32 -> [R, L, L] bool.
  """
  chex.assert_rank(segment_ids, 2)
  return _mask(segment_ids, span, 0, 0, *segment_ids.shape[1:] * 2)


def softmax_product(
  q: Array, k: Array, v: Array, mask: Array, *, turned: bool = False
) -> tuple[Array, Array]:
  """softmax(q k^T, where mask [R, L, C]) v, and the log of the total weight.

  Keys are [R, H, E, C] if `turned`.
  Both in at least float32.  A query that sees nothing gets zeros and about the
  lowest number, so that nothing is added where its output is joined to other.
  """
  scores = _scores(q, k, mask, turned)
  top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
  weights = jnp.exp(scores - top)
  total = jnp.sum(weights, axis=-1, keepdims=True)  # R H M L 1
  # Divided after the product: [L, E] numbers instead of [L, C].
  out = _product(_merge(weights).astype(v.dtype), v, 3, 2).reshape(q.shape)
  # Its scores are all the lowest number, so its weights would be 1.
  seen = jnp.any(mask, axis=-1)[:, None, None, :, None]
  return jnp.where(seen, out / total, 0.0), top + jnp.log(total)


def rows(
  q: Array, k: Array, v: Array, segment_ids: Array, span: Span | None = None
) -> tuple[Array, Array]:
  """Packed rows under `segment_mask`: output as q, log of the total weight."""
  length = q.shape[3]
  size, pairs = _pairs(length)
  q, k, v = (padded(x, -2, size) for x in (q, k, v))
  segment_ids, span = _padded_rows(segment_ids, span, size)
  wide = jnp.promote_types(q.dtype, jnp.float32)

  def body(carry, pair):
    i, j = pair * size
    mask = _mask(segment_ids, span, i, j, size, size)
    part = softmax_product(
      _cut(q, i, size, 3), _cut(k, j, size, 2), _cut(v, j, size, 2), mask
    )
    joined = _join(*(_cut(x, i, size, 3) for x in carry), *part)
    return tuple(_put(*x, i, 3) for x in zip(carry, joined))

  nothing = jnp.full((*q.shape[:4], 1), jnp.finfo(wide).min, wide)
  start = jnp.zeros(q.shape, wide), nothing
  out, log_total = _over_pairs(body, start, pairs, size, segment_ids, span)
  return out[:, :, :, :length].astype(q.dtype), log_total[:, :, :, :length]


def rows_gradient(
  q: Array,
  k: Array,
  v: Array,
  segment_ids: Array,
  out: Array,
  log_total: Array,
  outer: Array,
  span: Span | None = None,
) -> tuple[Array, Array, Array]:
  """Gradients of `rows` by q, k and v, for the gradient `outer` of its output.

  The weights are computed again from the log of their total, as
  FlashAttention does (https://arxiv.org/abs/2205.14135): no [L, L] is kept.
  """
  length = q.shape[3]
  size, pairs = _pairs(length)
  inner = _inner(out, outer, log_total.dtype)
  of_queries = [padded(x, 3, size) for x in (q, log_total, outer, inner)]
  k, v = (padded(x, 2, size) for x in (k, v))
  segment_ids, span = _padded_rows(segment_ids, span, size)

  def body(carry, pair):
    i, j = pair * size
    mask = _mask(segment_ids, span, i, j, size, size)
    parts = _block_gradient(
      _cut(k, j, size, 2),
      _cut(v, j, size, 2),
      mask,
      *(_cut(x, i, size, 3) for x in of_queries),
    )
    return tuple(
      _put(x, _cut(x, at, size, 3) + part, at, 3)
      for x, part, at in zip(carry, parts, (i, j, j))
    )

  start = _no_gradients(of_queries, k, v)
  dq, dk, dv = _over_pairs(body, start, pairs, size, segment_ids, span)
  cut = lambda x, like: x[..., :length, :].astype(like.dtype)
  return cut(dq, q), cut(_turn(dk), k), cut(_turn(dv), v)


def add_shared(
  q: Array,
  k: Array,
  v: Array,
  segment_ids: Array,
  out: Array,
  log_total: Array,
) -> tuple[Array, Array]:
  """Makes attention within segments into attention under `segment_mask`.

  `out` and `log_total` are of the keys of a query's own segment, which is all
  that a kernel can express.  A loop over blocks of places, up to the last one
  that is SHARED, joins to them what the prefix adds.  The length is a multiple
  of SHARED_BLOCK.
  """

  def body(i, carry):
    at = i * SHARED_BLOCK
    part = softmax_product(q, *_shared(segment_ids, k, v, at))
    return _join(*carry, *part)

  start = out.astype(log_total.dtype), log_total
  joined = jax.lax.fori_loop(0, _shared_blocks(segment_ids), body, start)
  return joined[0].astype(out.dtype), joined[1]


def shared_gradient(
  q: Array,
  k: Array,
  v: Array,
  segment_ids: Array,
  out: Array,
  log_total: Array,
  outer: Array,
) -> tuple[Array, Array, Array]:
  """What `add_shared` adds to the gradients by q, k and v, in float32.

  `out` and `log_total` are its results: a weight is exp(score - log_total)
  wherever its key is, so the parts of a sum over keys just add up.
  """
  of_queries = q, log_total, outer, _inner(out, outer, log_total.dtype)

  def body(i, carry):
    at = i * SHARED_BLOCK
    dq, *parts = _block_gradient(*_shared(segment_ids, k, v, at), *of_queries)
    return carry[0] + dq, *(
      _put(x, _cut(x, at, SHARED_BLOCK, 3) + part, at, 3)
      for x, part in zip(carry[1:], parts)
    )

  dq, dk, dv = jax.lax.fori_loop(
    0, _shared_blocks(segment_ids), body, _no_gradients(of_queries, k, v)
  )
  return dq, _turn(dk), _turn(dv)


def add_prefix(
  q: Array,
  out: Array,
  log_total: Array,
  prefix: tuple[Array, Array],
  seen: Array | None = None,
) -> Array:
  """Joins keys and values [H, P, E] before all rows to a query's own places.

  A query sees all of them, or the last `seen` [R, L] int32, 0 or less is none.
  They are read once for all rows.  What a query saw of its own places is like
  one more key, with the score `log_total` and the value `out`.
  """
  keys, values = prefix
  batch, kv_heads, shared, length, width = q.shape
  flat = lambda x: jnp.moveaxis(x, 1, 0).reshape(kv_heads, -1, x.shape[-1])
  dims = lambda axis: (((2,), (axis,)), ((0,), (0,)))
  wide = log_total.dtype
  early = jax.lax.dot_general(
    flat(q), keys, dims(2), preferred_element_type=wide
  )  # H BMS P
  if seen is not None:
    place = jnp.arange(keys.shape[1])[None]
    first = jnp.broadcast_to(
      keys.shape[1] - seen[:, None], (batch, shared, length)
    )
    early = jnp.where(
      (place >= first.reshape(-1, 1))[None], early, jnp.finfo(wide).min
    )
  own = flat(log_total)  # H BMS 1
  top = jnp.maximum(jnp.max(early, axis=-1, keepdims=True), own)
  early, own = jnp.exp(early - top), jnp.exp(own - top)
  total = jnp.sum(early, axis=-1, keepdims=True) + own
  joined = own * flat(out.astype(wide)) + jax.lax.dot_general(
    early.astype(values.dtype), values, dims(1), preferred_element_type=wide
  )
  joined = (joined / total).reshape(kv_heads, batch, shared, length, width)
  return jnp.moveaxis(joined, 0, 1)


def padded(x: Array, axis: int, size: int) -> Array:
  """With zeros to a multiple of `size` along an axis."""
  widths = [(0, 0)] * x.ndim
  widths[axis] = 0, -x.shape[axis] % size
  return jnp.pad(x, widths)


def _join(out, log_total, part, log_part):
  """The softmax over two sets of keys together, from that over each."""
  top = jnp.maximum(log_total, log_part)
  both = jnp.exp(log_total - top), jnp.exp(log_part - top)
  total = both[0] + both[1]
  joined = (both[0] * out + both[1] * part) / total
  return joined, top + jnp.log(total)


def _inner(out, outer, wide) -> Array:
  """sum_c weights d weights: the inner product of output and gradient."""
  return jnp.sum(out.astype(wide) * outer.astype(wide), axis=-1, keepdims=True)


def _block_gradient(k, v, mask, q, log_total, outer, inner):
  """Part of the gradients of q, and of k and v as [R, H, E, C], for one block.

  d scores = weights (d weights - sum_c weights d weights).
  """
  weights = jnp.exp(_scores(q, k, mask) - log_total)
  # where: a query that sees nothing has no weights that sum to one.
  weights = jnp.where(mask[:, None, None], weights, 0.0)
  d_weights = _product(_merge(outer), v, 3, 3).reshape(weights.shape)
  d_scores = weights * (d_weights - inner)
  weights, d_scores = (_merge(x).astype(q.dtype) for x in (weights, d_scores))
  dq = _product(d_scores, k, 3, 2).reshape(q.shape)
  # [E, C] and not [C, E]: the large operand is then read along its rows.
  dk = _product(_merge(q), d_scores, 2, 2)
  dv = _product(_merge(outer), weights, 2, 2)
  return dq, dk, dv


def _no_gradients(of_queries, k, v):
  """Zeros for what `_block_gradient` returns, over all blocks."""
  q, log_total, *_ = of_queries
  shapes = q.shape, *((*x.shape[:2], x.shape[3], x.shape[2]) for x in (k, v))
  return tuple(jnp.zeros(shape, log_total.dtype) for shape in shapes)


def _scores(q: Array, k: Array, mask: Array, turned: bool = False) -> Array:
  """[R, H, M, L, C], the lowest number where masked."""
  scores = _product(_merge(q), k, 3, 2 if turned else 3)
  scores = scores.reshape(*q.shape[:-1], mask.shape[-1])
  return jnp.where(mask[:, None, None], scores, jnp.finfo(scores.dtype).min)


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


def _turn(x: Array) -> Array:
  """[R, H, E, C] -> [R, H, C, E]."""
  return jnp.swapaxes(x, 2, 3)


def _mask(segment_ids, span, i, j, queries: int, keys: int) -> Array:
  """`segment_mask` of so many queries from place i on, and keys from j on."""
  query = _cut(segment_ids, i, queries, 1)[:, :, None]
  key = _cut(segment_ids, j, keys, 1)[:, None]
  ahead = (
    j + jnp.arange(keys)[None, None] > i + jnp.arange(queries)[None, :, None]
  )
  related = (query == key) | (key == types.SHARED)
  if span is not None:
    query_at = _cut(span.positions, i, queries, 1)[:, :, None]
    key_at = _cut(span.positions, j, keys, 1)[:, None]
    related &= query_at - key_at < span.window
  return ~ahead & related & (query != types.PADDING)


def _shared(segment_ids, k, v, at):
  """A block of keys and values, and what queries of sequences see of it."""
  length = segment_ids.shape[1]
  mask = _mask(segment_ids, None, 0, at, length, SHARED_BLOCK)
  key = _cut(segment_ids, at, SHARED_BLOCK, 1)[:, None]
  other = segment_ids[:, :, None] != key
  return *(_cut(x, at, SHARED_BLOCK, 2) for x in (k, v)), mask & other


def _shared_blocks(segment_ids) -> Array:
  """How many blocks of places there are up to the last one that is SHARED."""
  place = jnp.arange(segment_ids.shape[1])[None]
  ends = jnp.where(segment_ids == types.SHARED, place + 1, 0)
  return (jnp.max(ends) + SHARED_BLOCK - 1) // SHARED_BLOCK


def _pairs(length: int) -> tuple[int, Array]:
  """Size of a block, and the pairs (queries, keys) of numbers of blocks."""
  count = min(-(-length // _LEAST_BLOCK), _BLOCKS)
  count = max(count, -(-length // _LARGEST_BLOCK))
  size = -(-length // count)
  pairs = [(i, j) for i in range(count) for j in range(i + 1)]
  return size, jnp.array(pairs, jnp.int32)


def _padded_rows(segment_ids, span, size: int):
  if span is not None:
    span = span._replace(positions=padded(span.positions, 1, size))
  return padded(segment_ids, 1, size), span


def _over_pairs(body, start, pairs: Array, size: int, segment_ids, span):
  """carry = body(carry, pair) over pairs of blocks in which something is seen.

  Without a window that is all of them.  With one, those whose places are too
  far apart are left out, unless the keys may be of a shared prefix: there the
  places say nothing about the positions.
  """
  if span is None:
    step = lambda carry, pair: (body(carry, pair), None)
    return jax.lax.scan(step, start, pairs)[0]
  blocks = segment_ids.reshape(segment_ids.shape[0], -1, size)
  shared = jnp.any(blocks == types.SHARED, axis=(0, 2))  # of a block of keys
  nearest = (pairs[:, 0] - pairs[:, 1] - 1) * size + 1  # places between
  needed = (nearest < span.window) | shared[pairs[:, 1]]
  first = jnp.argsort(~needed, stable=True)
  step = lambda n, carry: body(carry, pairs[first[n]])
  return jax.lax.fori_loop(0, jnp.sum(needed), step, start)


def _cut(x: Array, at, size: int, axis: int) -> Array:
  return jax.lax.dynamic_slice_in_dim(x, at, size, axis)


def _put(x: Array, part: Array, at, axis: int) -> Array:
  return jax.lax.dynamic_update_slice_in_dim(x, part, at, axis)
