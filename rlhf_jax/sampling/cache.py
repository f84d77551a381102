"""The key/value cache of the sampler."""

from flax import struct
import jax
import jax.numpy as jnp

from rlhf_jax import types
from rlhf_jax.models import config as model_config


@struct.dataclass
class Cache:
  """Keys and values of G layers; place c of a row holds its position c.

  An array per layer, and not one of all: see `decoder.hidden_cached`.  Heads
  come before places: attention then reads each head's places in order.  A layer
  with a window of W has min(C, W) places, a ring: position c is in c mod W, and
  it holds the newest W positions.
  """

  keys: tuple[types.Array, ...]  # G times [N, H, C, E], [N, H, E, C] if turned
  values: tuple[types.Array, ...]  # G times [N, H, C, E]
  places: int = struct.field(pytree_node=False)  # C
  windows: tuple[int, ...] = struct.field(pytree_node=False)  # G W; 0 is none
  turned: bool = struct.field(pytree_node=False)


def turned(mesh: jax.sharding.Mesh) -> bool:
  """Whether slots keep their keys as [E, C]: the one place that decides it.

  On the CPU, where XLA then takes 2/3 of the time for their product with one
  query a row.  The kernels of other platforms want [C, E].
  """
  return mesh.devices.flat[0].platform == 'cpu'


def zeros(
  config: model_config.ModelConfig,
  rows: int,
  places: int,
  dtype: jnp.dtype,
  *,
  turned: bool = False,
) -> Cache:
  """An empty cache for `rows` sequences of up to `places` tokens."""
  windows, width = config.windows, config.head_dim

  def layers(turned):
    lengths = [_ring(window, places) for window in windows]
    shapes = [(n, width)[:: -1 if turned else 1] for n in lengths]
    many = rows, config.num_kv_heads
    return tuple(jnp.zeros((*many, *shape), dtype) for shape in shapes)

  return Cache(layers(turned), layers(False), places, windows, turned)


def nbytes(
  config: model_config.ModelConfig, rows: int, places: int, dtype: jnp.dtype
) -> int:
  """Bytes of `zeros` with the same arguments, without allocating them."""
  shapes = jax.eval_shape(lambda: zeros(config, rows, places, dtype))
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def from_prompts(
  keys: tuple[types.Array, ...],
  values: tuple[types.Array, ...],
  lengths: types.Array,
  windows: tuple[int, ...],
) -> Cache:
  """The cache of prompts, of which each layer has computed all places.

  Args:
    keys: G times [N, H, C, E].
    values: G times [N, H, C, E].
    lengths: [N] int32, tokens of each prompt, 1 or more; the rest is padding.
    windows: of the layers, see `Cache`.
  """
  places = keys[0].shape[2]

  def newest(x, window):
    size = _ring(window, places)
    if size == places:
      return x
    # Of the positions that share a place, the last one of the prompt.
    place = jnp.arange(size)[None]
    turns = jnp.maximum(lengths[:, None] - 1 - place, 0) // size
    position = place + turns * size  # N size
    return jnp.take_along_axis(x, position[:, None, :, None], axis=2)

  ring = lambda layers: tuple(map(newest, layers, windows))
  return Cache(ring(keys), ring(values), places, windows, turned=False)


def grow(cache: Cache, places: int) -> Cache:
  """The same cache with room for more tokens a row."""

  def longer(x, window, axis):
    # A ring that is smaller than its window has not been filled once.
    widths = [(0, 0)] * 4
    widths[axis] = 0, _ring(window, places) - x.shape[axis]
    return jnp.pad(x, widths)

  layers = lambda xs, axis: tuple(
    longer(x, window, axis) for x, window in zip(xs, cache.windows)
  )
  return cache.replace(
    keys=layers(cache.keys, 3 if cache.turned else 2),
    values=layers(cache.values, 2),
    places=places,
  )


def copy_rows(
  target: Cache,
  source: Cache,
  slots: types.Array,
  rows: types.Array,
  count: types.Array,
) -> Cache:
  """Writes rows of one cache over the first places of rows of another.

  A loop of in-place writes: a gather and select would pass over all of
  `target`, which is as large as the rollout.

  Args:
    target: N rows of C places.
    source: rows of C' <= C places, not turned.
    slots: [M] int32, rows of `target`.
    rows: [M] int32, rows of `source`.
    count: [] int32: only the first so many pairs are copied.
  """

  def copy(i, target):
    def one(target, source, turn):
      piece = jax.lax.dynamic_slice_in_dim(source, rows[i], 1)
      piece = jnp.swapaxes(piece, 2, 3) if turn else piece
      return jax.lax.dynamic_update_slice(target, piece, (slots[i], 0, 0, 0))

    return target.replace(
      keys=tuple(
        one(*pair, target.turned) for pair in zip(target.keys, source.keys)
      ),
      values=tuple(
        one(*pair, False) for pair in zip(target.values, source.values)
      ),
    )

  return jax.lax.fori_loop(0, count, copy, target)


def _ring(window: int, places: int) -> int:
  return min(window, places) if window else places
