"""Tests of the critic's loss."""

import jax
from jax import test_util
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import metrics
from rlhf_jax.algorithms import aggregation
from rlhf_jax.algorithms import value_losses

# Per case: value, old value, return, loss, slope, clipped; the clip is 0.5.
CASES = [
  (1.0, 1.0, 3.0, 2.0, -2.0, 0),
  (1.4, 1.0, 3.0, 1.28, -1.6, 0),
  (2.0, 1.0, 3.0, 1.125, 0.0, 1),  # moved enough: (1.5 - 3)^2 / 2
  (0.0, 1.0, 3.0, 4.5, -3.0, 0),  # moved away: the free error is larger
  (3.5, 1.0, 3.0, 1.125, 0.0, 1),  # past the target: still the held error
  (3.0, 3.0, 3.0, 0.0, 0.0, 0),
]


@pytest.mark.parametrize('case', CASES)
def test_clipped_by_hand(case):
  value, old, target, *expected = case
  one = jnp.ones((1, 1))

  def loss(x):
    per_token, statistics = value_losses.clipped(
      x, old * one, target * one, one, clip=0.5
    )
    return per_token[0, 0], statistics

  (got, statistics), slope = jax.value_and_grad(loss, has_aux=True)(value * one)
  clipfrac = metrics.compute(statistics)['critic/vf_clipfrac']
  np.testing.assert_allclose(
    [got, slope[0, 0], clipfrac], expected, rtol=1e-5, atol=1e-6
  )


def test_plain():
  values = jnp.array([[1.0, 5.0]])
  ones = jnp.ones((1, 2))
  loss, statistics = value_losses.clipped(
    values, -9 * ones, 3 * ones, ones, clip=None
  )
  np.testing.assert_array_equal(loss, [[2, 2]])
  assert metrics.compute(statistics) == {'critic/vf_clipfrac': 0}


@pytest.mark.parametrize(
  'mode', ['token-mean', 'seq-mean-token-mean', 'seq-mean-token-sum']
)
def test_against_verl(oracle, mode):
  inputs = oracle['inputs']
  mask = inputs['mask']
  returns = np.asarray(oracle['advantages']['gae_g1.0_l0.95']['ret'])
  expected = oracle['value_loss_cliprange0.5'][mode]
  weights = aggregation.token_weights(mask, mode)

  @jax.jit
  def loss(values):
    per_token, statistics = value_losses.clipped(
      values, inputs['values'], returns, mask, clip=0.5
    )
    return aggregation.total(per_token, weights, mask), statistics

  (value, statistics), gradient = jax.value_and_grad(loss, has_aux=True)(
    inputs['vpreds']
  )
  tolerance = {'rtol': 1e-5, 'atol': 1e-6}
  np.testing.assert_allclose(value, expected['loss'], **tolerance)
  np.testing.assert_allclose(gradient, expected['grad'], **tolerance)
  assert metrics.compute(statistics)['critic/vf_clipfrac'] == pytest.approx(
    expected['clipfrac']
  )


def test_masked_places_have_no_effect(oracle):
  inputs = oracle['inputs']
  mask = inputs['mask']
  arrays = [inputs['vpreds'], inputs['values'], inputs['rewards']]

  def loss(values, old, returns, mask):
    per_token, _ = value_losses.clipped(values, old, returns, mask, clip=0.1)
    return jnp.sum(per_token)

  plain = jax.value_and_grad(loss)(*arrays, mask)
  spoilt = jax.value_and_grad(loss)(
    *(np.where(mask, x, np.nan) for x in arrays), mask
  )
  jax.tree.map(np.testing.assert_array_equal, plain, spoilt)
  # Nothing selected: 0 with gradient 0.
  value, gradient = jax.value_and_grad(loss)(
    *(np.full((8, 7), np.nan) for _ in arrays), np.zeros((8, 7), bool)
  )
  assert value == 0
  np.testing.assert_array_equal(gradient, np.zeros((8, 7)))


def test_explained_variance():
  returns = jnp.array([[1.0, 2.0, 3.0, jnp.nan]])
  mask = jnp.array([[True, True, True, False]])
  explain = lambda values: float(
    value_losses.explained_variance(jnp.array([values]), returns, mask)
  )
  assert explain([1.0, 2.0, 3.0, jnp.inf]) == 1
  # A constant explains nothing; an offset alone costs nothing.
  assert explain([7.0, 7.0, 7.0, 0.0]) == 0
  assert explain([11.0, 12.0, 13.0, 0.0]) == 1
  # Errors 2, 0, -2: variance four times that of the returns.
  assert explain([-1.0, 2.0, 5.0, 0.0]) == pytest.approx(1 - 4)
  equal = jnp.full((1, 4), 0.35)
  assert value_losses.explained_variance(returns, equal, mask) == 0
  assert value_losses.explained_variance(equal, equal, 0 * mask) == 0


def test_gradients_against_finite_differences():
  with jax.enable_x64(True):
    values, old, returns = (
      jnp.array([[case[i] for case in CASES[:4]]], jnp.float64)
      for i in range(3)
    )
    mask = jnp.ones((1, 4), bool)
    for clip in (0.3, None):
      test_util.check_grads(
        lambda x: value_losses.clipped(x, old, returns, mask, clip=clip)[0],  # noqa: B023
        (values,),
        order=1,
        modes=['rev'],
        eps=1e-6,
        rtol=1e-7,
        atol=1e-7,
      )


def test_errors():
  one = jnp.ones((1, 1))
  with pytest.raises(ValueError, match='clip is 0.0'):
    value_losses.clipped(one, one, one, one, clip=0.0)
  with pytest.raises(AssertionError):
    value_losses.clipped(one, one, jnp.ones(1), one, clip=None)
