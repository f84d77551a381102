"""The decoder as a `flax.linen` module, for people who want one.

  module = DecoderModule(config)
  variables = module.init(key, tokens)
  logits = module.apply(variables, tokens)

`variables['params']` is the nested dict of `decoder.specs`, so it goes into
every function of this project, and loaded weights go into `apply`.
"""

from typing import Any

import chex
from flax import linen as nn
import jax
import jax.numpy as jnp

from rlhf_jax.models import config as config_lib
from rlhf_jax.models import decoder
from rlhf_jax.models import spec as spec_lib

Array = jax.Array


class DecoderModule(nn.Module):
  """Logits of sequences, [N, T] -> [N, T, V], or with a value head [N, T]."""

  config: config_lib.ModelConfig
  head: str = 'policy'
  remat: str = 'none'
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self,
    tokens: Array,
    positions: Array | None = None,
    segment_ids: Array | None = None,
  ) -> Array:
    """Runs the decoder.

    Args:
      tokens: [N, T] int32.
      positions: [N, T] int32; by default 0, 1, ... in each row.
      segment_ids: [N, T] int32; by default one sequence per row.  Padding on
        the right needs none: no earlier token sees it.

    Returns:
      Logits [N, T, V] (at t of the token t + 1), or values [N, T].
    """
    chex.assert_rank(tokens, 2)
    params = {
      name: self.param(name, _initialiser(name, table))
      for name, table in decoder.specs(self.config, self.head).items()
    }
    if positions is None:
      positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    if segment_ids is None:
      segment_ids = jnp.ones_like(tokens)
    states = decoder.hidden(
      params,
      self.config,
      tokens,
      positions,
      segment_ids,
      remat=self.remat,
      dtype=self.dtype,
    )
    if self.head == 'value':
      return decoder.values(params, states)
    return decoder.logits(params, self.config, states)


def _initialiser(name, table):
  return lambda key: spec_lib.init({name: table}, key)[name]
