"""The flax.linen facade holds the same parameters and computes the same."""

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import testing
from rlhf_jax.models import decoder
from rlhf_jax.models import flax_module
from rlhf_jax.models import spec


def test_same_parameters_and_same_logits():
  config = testing.tiny_config(tied_embeddings=False)
  module = flax_module.DecoderModule(config)
  tokens = jax.random.randint(jax.random.key(1), (2, 6), 0, 37)
  variables = jax.jit(module.init)(jax.random.key(0), tokens)
  assert jax.tree.map(jnp.shape, variables['params']) == jax.tree.map(
    lambda s: s.shape, decoder.specs(config)
  )
  # Weights from elsewhere go into `apply`, and its own go elsewhere.
  params = spec.init(decoder.specs(config), jax.random.key(5))
  logits = jax.jit(module.apply)({'params': params}, tokens)
  states = decoder.hidden(
    params,
    config,
    tokens,
    jnp.broadcast_to(jnp.arange(6), (2, 6)),
    jnp.ones((2, 6), jnp.int32),
  )
  testing.assert_close(
    logits, decoder.logits(params, config, states), 'layout_float32'
  )


def test_value_head():
  module = flax_module.DecoderModule(testing.tiny_config(), head='value')
  tokens = jnp.zeros((2, 3), jnp.int32)
  values, _ = module.init_with_output(jax.random.key(0), tokens)
  np.testing.assert_array_equal(values, jnp.zeros((2, 3)))
