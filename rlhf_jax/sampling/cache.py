"""The key/value cache of the sampler."""

from flax import struct
import jax
import jax.numpy as jnp

from rlhf_jax import types
from rlhf_jax.models import config as model_config


@struct.dataclass
class Cache:
  """Keys and values of all layers; place c of a row holds its position c.

  Heads come before places: attention then reads each head's places in order.
  """

  keys: types.Array  # [G, N, H, C, E]
  values: types.Array  # [G, N, H, C, E]

  @property
  def places(self) -> int:
    return self.keys.shape[3]


def zeros(
  config: model_config.ModelConfig, rows: int, places: int, dtype: jnp.dtype
) -> Cache:
  """An empty cache for `rows` sequences of up to `places` tokens."""
  heads, width = config.num_kv_heads, config.head_dim
  shape = (config.num_layers, rows, heads, places, width)
  return Cache(keys=jnp.zeros(shape, dtype), values=jnp.zeros(shape, dtype))


def nbytes(
  config: model_config.ModelConfig, rows: int, places: int, dtype: jnp.dtype
) -> int:
  """Bytes of `zeros` with the same arguments, without allocating them."""
  shapes = jax.eval_shape(lambda: zeros(config, rows, places, dtype))
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def grow(cache: Cache, places: int) -> Cache:
  """The same cache with room for more tokens a row."""
  more = [(0, 0)] * 3 + [(0, places - cache.places), (0, 0)]
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
      layers, _, heads, places, width = source.shape
      piece = jax.lax.dynamic_slice(
        source, (0, rows[i], 0, 0, 0), (layers, 1, heads, places, width)
      )
      return jax.lax.dynamic_update_slice(target, piece, (0, slots[i], 0, 0, 0))

    return jax.tree.map(one, target, source)

  return jax.lax.fori_loop(0, count, copy, target)
