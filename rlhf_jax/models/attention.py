"""Causal attention over packed rows and over a cache.

`attention_xla` runs everywhere and is the reference.  Where `implementation`
says so, a kernel of `kernels` takes its place, on each device for its own rows
and heads.
"""

from collections.abc import Callable, Iterator
import contextlib
import contextvars
import functools
import math
from typing import Any, NamedTuple

import chex
import jax
from jax import ad_checkpoint
import jax.numpy as jnp
from jax.sharding import AxisType

from rlhf_jax import types
from rlhf_jax.models import attention_xla
from rlhf_jax.models import kernels
from rlhf_jax.sharding import rules

Array = jax.Array
segment_mask = attention_xla.segment_mask


def implementation(
  task: str,
  platform: str,
  dtype: Any,
  width: int,
  places: int,
  sliding: bool = False,
) -> str:
  """Which code does a task; a name of IMPLEMENTATIONS.

    task    platform  head width E        places             code
    rows    gpu       16 to 128, by 8     128 or more        pallas_gpu
    rows    tpu       64, 128, 256        128 or more        pallas_tpu
    decode  gpu       16, 32, 64 .. 256   a multiple of 64   pallas_gpu
    decode  tpu       128, 256            a multiple of 128  pallas_tpu
    all others, and any dtype but bfloat16                   xla
    rows of a layer with a sliding window                    xla

  float32 is for exactness, and a kernel's products would be rounded to fewer
  bits by the matrix units of both platforms.  On a TPU a cache with heads of
  64 has its places along the lanes; for a kernel it would be turned around, or
  padded to twice the size.  No kernel for rows knows windows; decoding needs to
  know none, as the cache of such a layer has the places in the window only.

  Args:
    task: 'rows', packed rows or a prompt to themselves; or 'decode', one query
      of each row to the first places of a cache.
    platform: 'gpu' (NVIDIA, Ampere or newer), 'tpu', or any other.
    dtype: of queries, keys and values.
    width: E.
    places: L or C.
    sliding: whether there is a window in it.
  """
  if jnp.dtype(dtype) != jnp.bfloat16 or (task == 'rows' and sliding):
    return 'xla'
  fits = {
    ('rows', 'gpu'): width in range(16, 129, 8) and places >= kernels.BLOCK,
    ('rows', 'tpu'): width in (64, 128, 256) and places >= kernels.BLOCK,
    ('decode', 'gpu'): (
      width in (16, 32, 64, 128, 256) and places % kernels.DECODE_BLOCK_GPU == 0
    ),
    ('decode', 'tpu'): width in (128, 256) and places % kernels.BLOCK == 0,
  }
  return f'pallas_{platform}' if fits.get((task, platform), False) else 'xla'


@contextlib.contextmanager
def force(name: str, *, interpret: bool = False) -> Iterator[None]:
  """Uses one of IMPLEMENTATIONS whatever `implementation` says.

  For tests and benchmarks.  It acts while a function is traced: what was
  compiled before stays as it is.  `interpret` runs a kernel on any platform,
  slowly; without it a kernel gives way to XLA elsewhere than at home.
  """
  if name not in IMPLEMENTATIONS:
    raise ValueError(
      f'unknown implementation {name!r}; one of {sorted(IMPLEMENTATIONS)}'
    )
  token = _FORCED.set((name, interpret))
  try:
    yield
  finally:
    _FORCED.reset(token)


def attend_rows(
  q: Array,
  k: Array,
  v: Array,
  segment_ids: Array,
  positions: Array | None = None,
  window: Array | None = None,
) -> Array:
  """Attention of packed rows to themselves, under `segment_mask`.

  softmax(q k^T / sqrt(E), where mask) v, with grouped key/value heads: query
  head i uses key/value head i // (Q / H).  Scores and softmax are in at least
  float32.  Padding gets zeros.  The memory is linear in L, also for gradients.

  Args:
    q: [R, L, Q, E].
    k: [R, L, H, E].
    v: [R, L, H, E].
    segment_ids: [R, L] int32.
    positions: [R, L] int32, in the sequence; only a window needs them.
    window: [] int32: a query sees the keys less than so many positions before
      it, in its sequence and in the prefix; None is no window.

  Returns:
    [R, L, Q, E] in the dtype of q.
  """
  chex.assert_rank([q, k, v, segment_ids], [4, 4, 4, 2])
  chex.assert_equal_shape([k, v])
  span = None
  if window is not None:
    chex.assert_equal_shape([positions, segment_ids])
    span = attention_xla.Span(positions, jnp.asarray(window, jnp.int32))
  how = _choose(
    'rows', q, k, k.shape[2], k.shape[1], window is not None, 'training'
  )
  front = lambda x: jnp.moveaxis(x, 1, 2)
  out = _attend(
    how, _grouped(q, k.shape[2]), front(k), front(v), segment_ids, span
  )
  return _ungrouped(out)


def attend(
  q: Array,
  k: Array,
  v: Array,
  mask: Array | None,
  *,
  prefix: tuple[Array, Array] | None = None,
  prefix_seen: Array | None = None,
  window: int = 0,
  turned: bool = False,
) -> Array:
  """Attention of queries to a cache; not for gradients through a kernel.

  As `attend_rows`; a query that may see nothing gets zeros.

  Args:
    q: [B, S, Q, E].
    k: [B, H, C, E], heads before places as in the cache.
    v: [B, H, C, E].
    mask: which places a query sees: any [B, S, C] bool; or how many of the
      first, [B, S] int32; or None, where the queries are the places, in order,
      and see those up to their own.  Kernels take the last two.
    prefix: further keys and values [H, P, E] that every query of every row
      sees; they are read once for all rows.
    prefix_seen: [B, S] int32: a query sees only so many of the last of them.
    window: where `mask` is None, a query sees so many places up to its own; 0
      is all.  Any other mask says it by itself.
    turned: k is [B, H, E, C]; XLA only.

  Returns:
    [B, S, Q, E] in the dtype of q.
  """
  chex.assert_rank([q, k, v], 4)
  (batch, length), (kv_heads, places) = q.shape[:2], v.shape[1:3]
  as_values = (*k.shape[:2], k.shape[3], k.shape[2]) if turned else k.shape
  chex.assert_equal(as_values, v.shape)
  queries = _grouped(q, kv_heads)  # B H M S E
  if mask is None:
    chex.assert_equal((length, turned), (places, False))
    how = _choose('rows', q, k, kv_heads, places, window > 0)
    ids = jnp.ones((batch, places), jnp.int32)  # a row that is one sequence
    span = None
    if window:
      positions = jnp.broadcast_to(jnp.arange(places)[None], ids.shape)
      span = attention_xla.Span(positions, jnp.int32(window))
    out, log_total = _rows(how, queries, k, v, ids, span)
  elif mask.ndim == 2:
    chex.assert_shape(mask, (batch, length))
    how = _How('xla')
    if length == 1 and not turned:
      how = _choose('decode', q, k, kv_heads, places)
    out, log_total = _first(how, queries, k, v, mask, turned)
  else:
    chex.assert_shape(mask, (batch, length, places))
    out, log_total = attention_xla.softmax_product(
      queries, k, v, mask, turned=turned
    )
  if prefix is not None:
    out = attention_xla.add_prefix(queries, out, log_total, prefix, prefix_seen)
  return _ungrouped(out.astype(q.dtype))


def _grouped(q: Array, kv_heads: int) -> Array:
  """[R, L, Q, E] -> [R, H, M, L, E], scaled; M query heads share a key head."""
  rows, length, heads, width = q.shape
  q = q * jnp.asarray(1 / math.sqrt(width), q.dtype)
  q = q.reshape(rows, length, kv_heads, heads // kv_heads, width)
  return jnp.moveaxis(q, 1, 3)


def _ungrouped(out: Array) -> Array:
  """[R, H, M, L, E] -> [R, L, Q, E]."""
  out = jnp.moveaxis(out, 3, 1)
  return out.reshape(*out.shape[:2], -1, out.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
  how: '_How',
  q: Array,
  k: Array,
  v: Array,
  segment_ids: Array,
  span: attention_xla.Span | None,
) -> Array:
  return _attend_forward(how, q, k, v, segment_ids, span)[0]


def _attend_forward(how, q, k, v, segment_ids, span):
  out, log_total = _rows(how, q, k, v, segment_ids, span)
  # Named for `decoder.hidden`, which keeps them for the backward pass.
  q, k, v, out, log_total = (
    ad_checkpoint.checkpoint_name(a, 'attention')
    for a in (q, k, v, out, log_total)
  )
  return out, (span, q, k, v, segment_ids, out, log_total)


def _attend_backward(how, saved, outer):
  span, *saved = saved
  run = _dispatch(
    how,
    functools.partial(attention_xla.rows_gradient, span=span),
    functools.partial(_kernel_rows_gradient, how),
    (*_ROWS, _QUERY, _QUERY, _QUERY),
    _ROWS[:3],
  )
  return *run(*saved, outer), None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _rows(how, q, k, v, segment_ids, span) -> tuple[Array, Array]:
  """Output [R, H, M, L, E] as q, and log of the total weight."""
  xla = functools.partial(attention_xla.rows, span=span)
  kernel = functools.partial(_kernel_rows, how)
  run = _dispatch(how, xla, kernel, _ROWS, (_QUERY, _QUERY))
  return run(q, k, v, segment_ids)


def _kernel_rows(how, q, k, v, segment_ids):
  """A kernel for what is within segments, XLA for the shared prefix."""
  kernel = IMPLEMENTATIONS[how.name].rows
  length = q.shape[3]
  q, k, v = (attention_xla.padded(x, -2, kernels.BLOCK) for x in (q, k, v))
  segment_ids = attention_xla.padded(segment_ids, 1, kernels.BLOCK)
  within = kernel(_flat(q), k, v, segment_ids, interpret=how.interpret)
  within = (x.reshape(*q.shape[:4], -1) for x in within)
  out, log_total = attention_xla.add_shared(q, k, v, segment_ids, *within)
  # The kernel lets padding see padding.
  out = jnp.where(_real(segment_ids), out, jnp.zeros_like(out))
  return tuple(x[:, :, :, :length] for x in (out, log_total))


def _kernel_rows_gradient(how, q, k, v, segment_ids, out, log_total, outer):
  """As `attention_xla.rows_gradient`, in the same two parts."""
  kernel = IMPLEMENTATIONS[how.name].rows_gradient
  length = q.shape[3]
  q, k, v, out, log_total, outer = (
    attention_xla.padded(x, -2, kernels.BLOCK)
    for x in (q, k, v, out, log_total, outer)
  )
  segment_ids = attention_xla.padded(segment_ids, 1, kernels.BLOCK)
  outer = jnp.where(_real(segment_ids), outer, jnp.zeros_like(outer))
  within = kernel(
    _flat(q),
    k,
    v,
    segment_ids,
    _flat(out),
    jnp.squeeze(_flat(log_total), -1),
    _flat(outer),
    interpret=how.interpret,
  )
  shared = attention_xla.shared_gradient(
    q, k, v, segment_ids, out, log_total, outer
  )
  both = lambda x, y: (x.reshape(y.shape).astype(y.dtype) + y).astype(x.dtype)
  return tuple(both(*x)[..., :length, :] for x in zip(within, shared))


def _first(how, q, k, v, counts, turned) -> tuple[Array, Array]:
  """Output [B, H, M, S, E] of the first places of a cache, and log of total."""

  def xla(q, k, v, counts):
    mask = jnp.arange(v.shape[2])[None, None] < counts[..., None]  # B S C
    return attention_xla.softmax_product(q, k, v, mask, turned=turned)

  def kernel(q, k, v, counts):
    out, log_total = IMPLEMENTATIONS[how.name].decode(
      jnp.squeeze(_flat(q), 2),
      k,
      v,
      jnp.squeeze(counts, 1),
      interpret=how.interpret,
    )
    log_total = log_total.reshape(*q.shape[:-1], 1)
    return out.reshape(q.shape).astype(log_total.dtype), log_total

  axes = *_ROWS[:3], ('rows', None)
  run = _dispatch(how, xla, kernel, axes, (_QUERY, _QUERY))
  return run(q, k, v, counts)


def _real(segment_ids: Array) -> Array:
  return (segment_ids != types.PADDING)[:, None, None, :, None]


def _flat(x: Array) -> Array:
  """[R, H, M, L, n] -> [R, Q, L, n]."""
  return x.reshape(x.shape[0], -1, *x.shape[3:])


class _How(NamedTuple):
  """A choice, made while a function is traced."""

  name: str
  interpret: bool = False
  mesh: jax.sharding.AbstractMesh | None = None  # the work is split over it
  table: str = 'rollout'  # of RULES: how it is split


def _choose(
  task: str,
  q: Array,
  k: Array,
  kv_heads: int,
  places: int,
  sliding: bool = False,
  table: str = 'rollout',
) -> _How:
  """How to do a task, from shapes, platform and mesh of its arrays."""
  meshes = [jax.typeof(x).sharding.mesh for x in (q, k)]
  mesh = next((x for x in meshes if not x.empty), None)
  sizes = q.shape[-1], places, sliding
  name, interpret = _FORCED.get() or (
    implementation(task, _platform(mesh), q.dtype, *sizes),
    False,
  )
  if task == 'rows' and sliding:  # whatever is forced
    name = 'xla'
  # On several devices XLA would gather everything for a kernel on each of them,
  # so each runs it on its own part.  Inside a shard_map that is so already.
  if mesh is not None and mesh.size > 1:
    kinds = set(mesh.axis_types)
    if kinds == {AxisType.Manual}:
      mesh = None
    elif kinds != {AxisType.Auto} or not _divides(
      mesh, q.shape[0], kv_heads, table
    ):
      name = 'xla'
  else:
    mesh = None
  return _How('xla') if name == 'xla' else _How(name, interpret, mesh, table)


def _platform(mesh) -> str:
  """'gpu', 'tpu', 'cpu', or another name for what no kernel is made for."""
  device = None if mesh is None else mesh.abstract_device
  here = jax.default_backend()
  platform = here if device is None else device.platform
  if platform == here == 'gpu':
    # '9.0'; AMD has names like 'gfx90a'.
    capability = jax.devices()[0].compute_capability
    if not capability[:1].isdigit() or float(capability) < 8:
      return 'other gpu'
  return platform


def _divides(mesh, rows: int, kv_heads: int, table: str) -> bool:
  sizes = []
  for name in ('rows', 'attended_heads'):
    axes = RULES[table][name]
    if not set(axes) <= set(mesh.axis_names):
      return False
    sizes.append(math.prod(mesh.shape[axis] for axis in axes))
  return rows % sizes[0] == 0 and kv_heads % sizes[1] == 0


def _dispatch(
  how: _How,
  xla: Callable,
  kernel: Callable,
  axes: tuple[tuple[str | None, ...], ...],
  out_axes: tuple[tuple[str | None, ...], ...],
) -> Callable:
  """`kernel` on its platform, on each device for its part; or else `xla`.

  `axes` and `out_axes` are the logical axes of arguments and results.
  """
  if how.name == 'xla':
    return xla
  run = kernel
  if not how.interpret:
    home = IMPLEMENTATIONS[how.name].platform
    # Known for certain only when it is compiled: on a machine with a GPU, a
    # computation may still be put on the CPU.
    run = lambda *args: jax.lax.platform_dependent(
      *args, **{home: kernel}, default=xla
    )
  if how.mesh is None:
    return run
  table = RULES[how.table]
  specs = lambda many: tuple(
    jax.sharding.PartitionSpec(*(table.get(name) for name in one))
    for one in many
  )
  return jax.shard_map(
    run,
    mesh=how.mesh,
    in_specs=specs(axes),
    out_specs=specs(out_axes),
    check_vma=False,
  )


class _Kernels(NamedTuple):
  platform: str  # as `lax.platform_dependent` calls it
  rows: Callable
  rows_gradient: Callable
  decode: Callable


IMPLEMENTATIONS = {
  'xla': None,
  'pallas_gpu': _Kernels(
    'cuda', kernels.rows_gpu, kernels.rows_gpu_gradient, kernels.decode_gpu
  ),
  'pallas_tpu': _Kernels(
    'tpu', kernels.rows_tpu, kernels.rows_tpu_gradient, kernels.decode_tpu
  ),
}

RULES = {'training': rules.TRAINING, 'rollout': rules.ROLLOUT}

# Logical axes, as in `sharding.rules`: of [R, H, M, L, E], [R, H, L, E], [R, L]
_QUERY = ('rows', 'attended_heads', None, None, None)
_ROWS = (_QUERY, _QUERY[:-1], _QUERY[:-1], ('rows', None))

_FORCED: contextvars.ContextVar = contextvars.ContextVar('forced', default=None)
