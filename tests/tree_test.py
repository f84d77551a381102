"""Tests of functions on pytrees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import tree

PARAMS = {
  'embed': jnp.array([3.0, 0.0], jnp.bfloat16),
  'layers': {'q': jnp.array([[4.0], [0.0], [12.0]])},
  'step': jnp.array(7, jnp.int32),
}
FLOATS = {'embed': PARAMS['embed'], 'layers': PARAMS['layers']}


def test_global_norm():
  # sqrt(3^2 + 4^2 + 12^2) = 13
  assert tree.global_norm(FLOATS) == 13
  assert tree.global_norm({}) == 0
  # 70000 ones: a bfloat16 sum would stop growing at 256.
  ones = jnp.ones(70_000, jnp.bfloat16)
  norm = tree.global_norm([ones])
  assert norm.dtype == jnp.float32
  np.testing.assert_allclose(norm, 70_000**0.5, rtol=1e-6)
  np.testing.assert_array_equal(
    jax.grad(tree.global_norm)(jnp.zeros(2)), [0, 0]
  )
  with jax.enable_x64(True):
    assert tree.global_norm(jnp.ones(2, jnp.float64)).dtype == jnp.float64


@pytest.mark.parametrize('bad', [jnp.nan, jnp.inf, -jnp.inf])
def test_all_finite(bad):
  assert tree.all_finite(PARAMS)
  assert tree.all_finite({})
  layers = {'q': PARAMS['layers']['q'].at[2, 0].set(bad)}
  assert not jax.jit(tree.all_finite)(PARAMS | {'layers': layers})


def test_size_and_bytes():
  # 2 bfloat16, 3 float32, 1 int32
  abstract = jax.eval_shape(lambda: PARAMS)
  for params in (PARAMS, abstract):
    assert tree.size(params) == 6
    assert tree.nbytes(params) == 2 * 2 + 3 * 4 + 4
  # Counts are Python integers: this one passes 2^31.
  large = jax.ShapeDtypeStruct((70_000, 70_000), jnp.float32)
  assert tree.nbytes([large]) == 4 * 70_000**2


def test_cast_changes_floating_leaves_only():
  cast = tree.cast(PARAMS, jnp.bfloat16)
  assert cast['layers']['q'].dtype == jnp.bfloat16
  assert cast['step'].dtype == jnp.int32
  abstract = tree.cast(jax.eval_shape(lambda: PARAMS), jnp.bfloat16)
  assert abstract == jax.eval_shape(lambda: cast)


def test_names():
  assert tree.names(PARAMS) == ['embed', 'layers/q', 'step']
  assert tree.names({'a': [1, {'b': 2}]}) == ['a/0', 'a/1/b']
  flat = tree.flatten(PARAMS)
  for leaf, expected in zip(flat.values(), jax.tree.leaves(PARAMS)):
    assert leaf is expected


def test_zeros_and_add():
  zeros = tree.zeros_like(PARAMS)
  assert jax.tree.map(lambda x: x.dtype, zeros) == jax.tree.map(
    lambda x: x.dtype, PARAMS
  )
  # A float32 accumulator takes bfloat16 gradients and stays float32.
  accumulator = tree.zeros_like(FLOATS, jnp.float32)
  total = tree.add(tree.add(accumulator, FLOATS), FLOATS)
  assert total['embed'].dtype == jnp.float32
  np.testing.assert_array_equal(total['layers']['q'], [[8], [0], [24]])
  with pytest.raises(AssertionError):
    tree.add(FLOATS, {'embed': FLOATS['embed']})
