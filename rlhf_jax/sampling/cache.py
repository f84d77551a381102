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
  come before places: attention then reads each head's places in order.
  """

  keys: tuple[types.Array, ...]  # G times [N, H, C, E]
  values: tuple[types.Array, ...]  # G times [N, H, C, E]

  @property
  def places(self) -> int:
    return self.keys[0].shape[2]


def zeros(
  config: model_config.ModelConfig, rows: int, places: int, dtype: jnp.dtype
) -> Cache:
  """An empty cache for `rows` sequences of up to `places` tokens."""
  shape = (rows, config.num_kv_heads, places, config.head_dim)
  layers = lambda: tuple(
    jnp.zeros(shape, dtype) for _ in range(config.num_layers)
  )
  return Cache(keys=layers(), values=layers())


def nbytes(
  config: model_config.ModelConfig, rows: int, places: int, dtype: jnp.dtype
) -> int:
  """Bytes of `zeros` with the same arguments, without allocating them."""
  shapes = jax.eval_shape(lambda: zeros(config, rows, places, dtype))
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def grow(cache: Cache, places: int) -> Cache:
  """The same cache with room for more tokens a row."""
  more = [(0, 0), (0, 0), (0, places - cache.places), (0, 0)]
  return jax.tree.map(lambda x: jnp.pad(x, more), cache)


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
    source: rows of C' <= C places.
    slots: [M] int32, rows of `target`.
    rows: [M] int32, rows of `source`.
    count: [] int32: only the first so many pairs are copied.
  """

  def copy(i, target):
    def one(target, source):
      piece = jax.lax.dynamic_slice_in_dim(source, rows[i], 1)
      return jax.lax.dynamic_update_slice(target, piece, (slots[i], 0, 0, 0))

    return jax.tree.map(one, target, source)

  return jax.lax.fori_loop(0, count, copy, target)
