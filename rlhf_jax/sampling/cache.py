"""The key/value cache of the sampler."""

from flax import struct
import jax
import jax.numpy as jnp

from rlhf_jax import types
from rlhf_jax.models import config as model_config


@struct.dataclass
class Cache:
  """Keys and values of all layers; slot c of a row holds its position c."""

  keys: types.Array  # [G, N, C, H, E]
  values: types.Array  # [G, N, C, H, E]


def zeros(
  config: model_config.ModelConfig, rows: int, slots: int, dtype: jnp.dtype
) -> Cache:
  """An empty cache for `rows` sequences of up to `slots` tokens."""
  shape = (config.num_layers, rows, slots, config.num_kv_heads, config.head_dim)
  return Cache(keys=jnp.zeros(shape, dtype), values=jnp.zeros(shape, dtype))


def nbytes(
  config: model_config.ModelConfig, rows: int, slots: int, dtype: jnp.dtype
) -> int:
  """Bytes of `zeros` with the same arguments, without allocating them."""
  shapes = jax.eval_shape(lambda: zeros(config, rows, slots, dtype))
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def repeat(cache: Cache, samples: int) -> Cache:
  """[G, B, ...] -> [G, B * samples, ...]: each prompt's cache, n times."""
  return jax.tree.map(lambda x: jnp.repeat(x, samples, axis=1), cache)
