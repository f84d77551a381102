"""Attention kernels of accelerators, under one signature for each task.

`attention` chooses between them and plain XLA.  They are those that come with
JAX, except for decoding on a TPU: there the only kernel of JAX has its cache in
pages.

Queries come divided by sqrt(E).  M = Q / H query heads share a key/value head.
Imports of a platform's code are inside functions: other platforms never load
it.  `interpret` runs a kernel on the CPU, slowly, for tests.
"""

import contextlib
import math

import chex
import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

Array = jax.Array

# The length of rows is a multiple of it, and so is that of a cache on a TPU.
BLOCK = 128
# The length of a cache on a GPU is a multiple of it.
DECODE_BLOCK_GPU = 64
_LOWEST = float(jnp.finfo(jnp.float32).min)


def rows_gpu(
  q: Array, k: Array, v: Array, segment_ids: Array, *, interpret: bool = False
) -> tuple[Array, Array]:
  """Causal attention within segments, on an NVIDIA GPU.

  Query l sees the keys c <= l with the same segment id, padding included.
  `pallas.ops.gpu.attention` of JAX; the softmax is in float32.

  Args:
    q: [R, Q, L, E], L a multiple of BLOCK.
    k: [R, H, L, E].
    v: [R, H, L, E].
    segment_ids: [R, L] int32.
    interpret: see above.

  Returns:
    [R, Q, L, E] as q, log of the total weight [R, Q, L] float32.
  """
  from jax.experimental.pallas.ops.gpu import attention as library

  _assert_rows(q, k, v, segment_ids)
  out, log2_total = library.mha(
    *_for_gpu(q, k, v),
    segment_ids,
    causal=True,
    interpret=interpret,
    return_residuals=True,
  )
  return jnp.swapaxes(out, 1, 2), log2_total * math.log(2)


def rows_gpu_gradient(
  q: Array,
  k: Array,
  v: Array,
  segment_ids: Array,
  out: Array,
  log_total: Array,
  outer: Array,
  *,
  interpret: bool = False,
) -> tuple[Array, Array, Array]:
  """Gradients of `rows_gpu` by q, k and v, where its output has `outer`.

  `out` and `log_total` may be of more keys than these, joined to them.
  """
  from jax.experimental.pallas.ops.gpu import attention as library

  _assert_rows(q, k, v, segment_ids)
  saved = (
    *_for_gpu(q, k, v),
    segment_ids,
    jnp.swapaxes(out, 1, 2),
    log_total / math.log(2),
  )
  # The backward half alone: `jax.vjp` would run the forward kernel again, and
  # could not be told of other keys.
  dq, dk, dv, _ = library.mha.bwd(
    sm_scale=1.0,
    causal=True,
    block_sizes=library.BlockSizes.get_default(),
    backward_pass_impl='triton',
    num_warps=None,
    num_stages=2,
    grid=None,
    interpret=interpret,
    debug=False,
    return_residuals=False,
    res=saved,
    do=jnp.swapaxes(outer, 1, 2),
  )
  dq, dk, dv = (jnp.swapaxes(x, 1, 2) for x in (dq, dk, dv))
  return dq, _sum_group(dk, k), _sum_group(dv, v)


def rows_tpu(
  q: Array, k: Array, v: Array, segment_ids: Array, *, interpret: bool = False
) -> tuple[Array, Array]:
  """As `rows_gpu`, on a TPU: `pallas.ops.tpu.flash_attention` of JAX."""
  from jax.experimental.pallas.ops.tpu import flash_attention as library

  _assert_rows(q, k, v, segment_ids)
  with _interpreted_tpu(interpret):
    # Below the public function, which has no log of the total.
    out, (*_, total, top) = library._flash_attention.fwd(
      q,
      *_repeat(q, k, v),
      None,
      library.SegmentIds(segment_ids, segment_ids),
      save_residuals=False,
      causal=True,
      sm_scale=1.0,
      block_sizes=_tpu_blocks(library, q),
      debug=False,
    )
  return out, top + jnp.log(total)


def rows_tpu_gradient(
  q: Array,
  k: Array,
  v: Array,
  segment_ids: Array,
  out: Array,
  log_total: Array,
  outer: Array,
  *,
  interpret: bool = False,
) -> tuple[Array, Array, Array]:
  """As `rows_gpu_gradient`, on a TPU."""
  from jax.experimental.pallas.ops.tpu import flash_attention as library

  _assert_rows(q, k, v, segment_ids)
  ids = library.SegmentIds(segment_ids, segment_ids)
  # The kernel's weights are exp(score - top) / total.
  top, total = log_total, jnp.ones_like(log_total)
  with _interpreted_tpu(interpret):
    dq, dk, dv, *_ = library._flash_attention.bwd(
      save_residuals=False,
      causal=True,
      sm_scale=1.0,
      block_sizes=_tpu_blocks(library, q),
      debug=False,
      residuals=(q, *_repeat(q, k, v), None, ids, out, total, top),
      do=outer,
    )
  return dq, _sum_group(dk, k), _sum_group(dv, v)


def decode_gpu(
  q: Array,
  k: Array,
  v: Array,
  lengths: Array,
  *,
  interpret: bool = False,
) -> tuple[Array, Array]:
  """One query of each row to the first places of its cache, on an NVIDIA GPU.

  `pallas.ops.gpu.decode_attention` of JAX: up to 16 programs share the places
  of a row and key/value head, and do not read those from the row's length on
  (https://crfm.stanford.edu/2023/10/12/flashdecoding.html).

  Args:
    q: [B, Q, E], E a power of two from 16 on.
    k: [B, H, C, E], C a multiple of DECODE_BLOCK_GPU.
    v: [B, H, C, E].
    lengths: [B] int32: row b sees the places before lengths[b].
    interpret: see above.

  Returns:
    [B, Q, E] as q, zeros where a row sees nothing; log of the total weight
    [B, Q] float32, about the lowest number there.
  """
  from jax.experimental.pallas.ops.gpu import decode_attention as library

  _assert_cache(q, k, v, lengths, DECODE_BLOCK_GPU)
  out, (total, top) = library.gqa(
    q,
    # It turns them around again, so that nothing is copied.
    jnp.swapaxes(k, 1, 2),
    jnp.swapaxes(v, 1, 2),
    kv_seq_len=lengths,
    sm_scale=1.0,
    block_k=DECODE_BLOCK_GPU,
    k_splits=math.gcd(16, k.shape[2] // DECODE_BLOCK_GPU),
    interpret=interpret,
    return_residuals=True,
  )
  return out, top + jnp.log(jnp.where(total > 0, total, 1.0))


def decode_tpu(
  q: Array,
  k: Array,
  v: Array,
  lengths: Array,
  *,
  interpret: bool = False,
) -> tuple[Array, Array]:
  """As `decode_gpu`, on a TPU; C is a multiple of BLOCK, E of 128.

  A step looks at a block of places of one row, with all its heads, for all the
  query heads that share them.  Blocks from the row's length on are neither
  fetched nor looked at.
  """
  from jax.experimental.pallas import tpu

  _assert_cache(q, k, v, lengths, BLOCK)
  batch, kv_heads, places, width = k.shape
  # Up to 1 MiB of keys a block, which is enough to hide what a step costs.
  most = 2**20 // (kv_heads * width * k.dtype.itemsize)
  block = next(
    (n for n in (1024, 512, 256) if n <= most and places % n == 0), BLOCK
  )
  heads = q.shape[1] // kv_heads
  padded = -heads % 16  # the rows of a tile in bfloat16
  queries = q.reshape(batch, kv_heads, heads, width)
  queries = jnp.pad(queries, ((0, 0), (0, 0), (0, padded), (0, 0)))

  def cache_block(b, i, lengths):
    # What is fetched once more would be the same block, so it is not.
    last = jnp.maximum(pl.cdiv(lengths[b], block) - 1, 0)
    return b, 0, jnp.minimum(i, last), 0

  cache = pl.BlockSpec((None, kv_heads, block, width), cache_block)
  of_row = lambda n: pl.BlockSpec(
    (None, kv_heads, heads + padded, n), lambda b, i, lengths: (b, 0, 0, 0)
  )
  shape = lambda n: (kv_heads, heads + padded, n)
  out, log_total = pl.pallas_call(
    _decode_tpu_kernel,
    grid_spec=tpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(batch, places // block),
      in_specs=[of_row(width), cache, cache],
      out_specs=[of_row(width), of_row(1)],
      scratch_shapes=[tpu.VMEM(shape(n), jnp.float32) for n in (width, 1, 1)],
    ),
    out_shape=[
      jax.ShapeDtypeStruct((batch, *shape(n)), dtype)
      for n, dtype in ((width, q.dtype), (1, jnp.float32))
    ],
    compiler_params=tpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary')
    ),
    interpret=tpu.InterpretParams() if interpret else False,
    name='decode_attention',
  )(lengths, queries, k, v)
  out, log_total = out[:, :, :heads], log_total[:, :, :heads]
  return out.reshape(q.shape), log_total.reshape(q.shape[:2])


def _decode_tpu_kernel(
  lengths_ref,  # [B]
  q_ref,  # [H, M', E], M' is M padded
  k_ref,  # [H, block, E]
  v_ref,  # [H, block, E]
  out_ref,  # [H, M', E]
  log_ref,  # [H, M', 1]
  sum_ref,  # [H, M', E] float32, as the next two over the steps of a row
  top_ref,  # [H, M', 1]
  total_ref,  # [H, M', 1]
):
  step, block = pl.program_id(1), k_ref.shape[1]
  left = lengths_ref[pl.program_id(0)] - step * block
  product = lambda x, y, axis: jax.lax.dot_general(
    x,
    y,
    (((2,), (axis,)), ((0,), (0,))),
    preferred_element_type=jnp.float32,
  )

  @pl.when(step == 0)
  def _():
    sum_ref[...] = jnp.zeros_like(sum_ref)
    top_ref[...] = jnp.full_like(top_ref, _LOWEST)
    total_ref[...] = jnp.zeros_like(total_ref)

  @pl.when(left > 0)
  def _():
    scores = product(q_ref[...], k_ref[...], 2)  # H M' block
    place = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
    scores = jnp.where(place < left, scores, _LOWEST)
    top = jnp.maximum(top_ref[...], jnp.max(scores, axis=2, keepdims=True))
    weights = jnp.exp(scores - top)
    scale = jnp.exp(top_ref[...] - top)
    part = product(weights.astype(v_ref.dtype), v_ref[...], 1)
    sum_ref[...] = sum_ref[...] * scale + part
    total = jnp.sum(weights, axis=2, keepdims=True)
    total_ref[...] = total_ref[...] * scale + total
    top_ref[...] = top

  @pl.when(step == pl.num_programs(1) - 1)
  def _():
    some = jnp.where(total_ref[...] > 0, total_ref[...], 1.0)
    out_ref[...] = (sum_ref[...] / some).astype(out_ref.dtype)
    log_ref[...] = top_ref[...] + jnp.log(some)


def _assert_rows(q, k, v, segment_ids):
  chex.assert_rank([q, k, v, segment_ids], [4, 4, 4, 2])
  chex.assert_equal_shape([k, v])
  if q.shape[2] % BLOCK:
    raise ValueError(
      f'rows of {q.shape[2]} places; expected a multiple of {BLOCK}: pad them'
    )


def _assert_cache(q, k, v, lengths, multiple):
  chex.assert_rank([q, k, v, lengths], [3, 4, 4, 1])
  chex.assert_equal_shape([k, v])
  if k.shape[2] % multiple:
    raise ValueError(
      f'a cache of {k.shape[2]} places; expected a multiple of {multiple}'
    )


def _repeat(q, k, v):
  """Keys and values once for each query head: [R, H, C, E] -> [R, Q, C, E]."""
  return (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))


def _for_gpu(q, k, v):
  """As the kernel takes them: [R, L, Q, E] each."""
  return (jnp.swapaxes(x, 1, 2) for x in (q, *_repeat(q, k, v)))


def _sum_group(gradient, like):
  """[R, Q, C, E] -> [R, H, C, E]: the sum over the heads that share one."""
  rows, kv_heads, places, width = like.shape
  gradient = gradient.reshape(rows, kv_heads, -1, places, width)
  return jnp.sum(gradient.astype(jnp.float32), axis=2).astype(like.dtype)


def _tpu_blocks(library, q):
  length, width = q.shape[2:]
  size = next(n for n in (512, 256, BLOCK) if length % n == 0)
  if width > 128:
    size = min(size, 256)
  return library.BlockSizes(
    block_q=size,
    block_k_major=size,
    block_k=size,
    block_b=1,
    block_q_major_dkv=size,
    block_k_major_dkv=size,
    block_k_dkv=size,
    block_q_dkv=size,
    block_k_major_dq=size,
    block_k_dq=size,
    block_q_dq=size,
  )


@contextlib.contextmanager
def _interpreted_tpu(interpret):
  if not interpret:
    yield
    return
  from jax.experimental.pallas import tpu

  with tpu.force_tpu_interpret_mode():
    yield
