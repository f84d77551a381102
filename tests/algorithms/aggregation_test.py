"""Tests of token weights and of the weighted sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.algorithms import aggregation

# Three tokens, none, one with a gap before it.
MASK = np.array([[1, 1, 1, 0], [0, 0, 0, 0], [0, 0, 1, 0]], bool)
LOSS = jnp.array([[1.0, 2.0, 6.0, 100.0], [7.0, 8.0, 9.0, 1.0], [5, 5, 3.0, 5]])

# Sums per sequence: 9 and 3; sequences with a token: 2; tokens: 4.
EXPECTED = {
  'token-mean': 12 / 4,
  'token-sum': 12,
  'seq-mean-token-sum': (9 + 3) / 2,
  'seq-mean-token-mean': (9 / 3 + 3 / 1) / 2,
  'seq-mean-token-sum-norm': (9 + 3) / 2 / 8,
}
MODES = sorted(EXPECTED)


def _scale(mode, scale=8):
  return scale if mode == 'seq-mean-token-sum-norm' else None


@pytest.mark.parametrize('mode', MODES)
def test_by_hand(mode):
  weights = aggregation.token_weights(MASK, mode, scale=_scale(mode))
  assert weights.dtype == jnp.float32
  np.testing.assert_array_equal(np.where(MASK, 0, weights), np.zeros((3, 4)))
  total = aggregation.total(LOSS, weights, MASK)
  np.testing.assert_allclose(total, EXPECTED[mode], rtol=1e-6)


@pytest.mark.parametrize('mode', MODES)
def test_against_verl(oracle, mode):
  inputs, mask = oracle['inputs'], oracle['inputs']['mask']
  # verl's default divisor of the last mode is the padded width, here 7.
  weights = aggregation.token_weights(mask, mode, scale=_scale(mode, 7))
  np.testing.assert_allclose(
    aggregation.total(inputs['adv'], weights, mask),
    oracle['agg'][mode]['default'],
    rtol=1e-5,
    atol=1e-6,
  )


@pytest.mark.parametrize('mode', MODES)
def test_micro_batches_padding_and_order_do_not_matter(mode):
  """Weights of the whole mini-batch make any split add up to the same."""
  generator = np.random.default_rng(0)
  mask = generator.random((6, 5)) < 0.5
  loss = generator.normal(size=(6, 5))
  weights = aggregation.token_weights(mask, mode, scale=_scale(mode))
  with jax.enable_x64(True):
    whole = aggregation.total(jnp.asarray(loss), weights, mask)
    parts = [
      aggregation.total(jnp.asarray(loss[rows]), weights[rows], mask[rows])
      for rows in (slice(0, 1), slice(1, 5), slice(5, 6))
    ]
  np.testing.assert_allclose(whole, np.sum(parts), rtol=1e-12)
  wide = np.pad(mask, ((2, 1), (0, 3)))
  np.testing.assert_array_equal(
    aggregation.token_weights(wide, mode, scale=_scale(mode)),
    np.pad(weights, ((2, 1), (0, 3))),
  )
  order = generator.permutation(6)
  np.testing.assert_array_equal(
    aggregation.token_weights(mask[order], mode, scale=_scale(mode)),
    weights[order],
  )


@pytest.mark.parametrize('mode', MODES)
def test_everything_masked(mode):
  mask = np.zeros((2, 3), bool)
  weights = aggregation.token_weights(mask, mode, scale=_scale(mode))
  np.testing.assert_array_equal(weights, np.zeros((2, 3)))
  nan = jnp.full((2, 3), jnp.nan)
  value, gradient = jax.value_and_grad(aggregation.total)(nan, weights, mask)
  assert value == 0
  np.testing.assert_array_equal(gradient, np.zeros((2, 3)))


def test_masked_places_have_no_effect():
  weights = aggregation.token_weights(MASK, 'token-mean')
  spoilt = jnp.where(MASK, LOSS, jnp.nan)
  value, gradient = jax.value_and_grad(aggregation.total)(spoilt, weights, MASK)
  assert value == 3
  np.testing.assert_array_equal(gradient, weights)


def test_errors():
  with pytest.raises(ValueError, match="'token_mean'.*'token-mean'"):
    aggregation.token_weights(MASK, 'token_mean')
  with pytest.raises(ValueError, match='needs one'):
    aggregation.token_weights(MASK, 'seq-mean-token-sum-norm')
  with pytest.raises(ValueError, match='only'):
    aggregation.token_weights(MASK, 'token-mean', scale=3)
  with pytest.raises(ValueError, match='positive'):
    aggregation.token_weights(MASK, 'seq-mean-token-sum-norm', scale=0)
  with pytest.raises(AssertionError):
    aggregation.token_weights(MASK[0], 'token-mean')
  with pytest.raises(AssertionError):
    aggregation.total(LOSS, LOSS[:1], MASK)
