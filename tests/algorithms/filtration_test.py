"""Tests of policy filtration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import keys
from rlhf_jax.algorithms import filtration

SCORES = [0.0, 1.0, -1.0, 0.5, 1.0]
KEY = keys.key(0, 'minibatch', 7)
RESAMPLE = jax.jit(filtration.resample, static_argnames='count')


def _weights(scores, method, valid=None, **options):
  valid = np.ones(len(scores), bool) if valid is None else np.array(valid)
  got = filtration.weights(
    jnp.asarray(scores, jnp.float32), valid, method=method, **options
  )
  return np.asarray(got)


@pytest.mark.parametrize('x64', [False, True], ids=['float32', 'float64'])
@pytest.mark.parametrize('method', filtration.METHODS)
def test_weights_against_verl(oracle, method, x64):
  expected = oracle['pf_ppo_prob_scores_0_1_-1_.5_1']
  expected = np.asarray(expected[{'pow': 'pow2'}.get(method, method)])
  with jax.enable_x64(x64):
    dtype = jnp.float64 if x64 else jnp.float32
    weights = jax.jit(filtration.weights, static_argnames='method')
    got = weights(jnp.asarray(SCORES, dtype), np.ones(5, bool), method=method)
    assert got.dtype == dtype
  got = np.asarray(got)
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
  # On purpose: verl adds 1e-8 to each weight, and so draws now and then what
  # has none.
  if method != 'max_random':
    assert got[0] == 0 and 0 < expected[0] < 1e-8


def test_weights_by_hand():
  # Squares 0, 1, 1, 1/4, 1 sum to 13/4; cubes 0, 1, 1, 1/8, 1 to 25/8.
  np.testing.assert_allclose(
    _weights(SCORES, 'pow'), np.array([0, 4, 4, 1, 4]) / 13, rtol=1e-6
  )
  np.testing.assert_allclose(
    _weights(SCORES, 'pow', power=3.0),
    np.array([0, 8, 8, 1, 8]) / 25,
    rtol=1e-6,
  )
  np.testing.assert_allclose(
    _weights(SCORES, 'max_min'), np.array([0, 1, 1, 0, 1]) / 3, rtol=1e-6
  )
  np.testing.assert_allclose(
    _weights(SCORES, 'max_random'), np.array([1, 4, 1, 1, 4]) / 11, rtol=1e-6
  )


@pytest.mark.parametrize('method', filtration.METHODS)
def test_what_does_not_count_gets_nothing(method):
  scores = [-0.5, np.nan, 9.0, 0.25, np.inf, -np.inf]
  valid = [True, True, False, True, True, True]
  got = _weights(scores, method, valid)
  expected = _weights([-0.5, 0.25], method)
  np.testing.assert_allclose(
    got, [expected[0], 0, 0, expected[1], 0, 0], rtol=1e-6
  )
  # Nothing counts.
  got = _weights(scores, method, [False] * 6)
  np.testing.assert_array_equal(got, np.zeros(6))


@pytest.mark.parametrize('method', filtration.METHODS)
@pytest.mark.parametrize('score', [0.0, 0.7, -1e30, 1e-30])
def test_equal_scores_have_equal_weights(method, score):
  got = _weights([score] * 3 + [5.0], method, [True] * 3 + [False])
  np.testing.assert_allclose(got, [1 / 3, 1 / 3, 1 / 3, 0], rtol=1e-6)


def test_large_scores_do_not_overflow():
  # 1e30 squared is no float32.
  got = _weights([1e30, 5e29, 0.0], 'pow')
  np.testing.assert_allclose(got, [0.8, 0.2, 0], rtol=1e-6)


def test_resample_frequencies():
  probabilities = np.array([0.0, 0.5, 0.125, 0.375], np.float32)
  count = 4096
  got = RESAMPLE(KEY, 3 * probabilities, count=count)
  assert got.dtype == jnp.int32 and got.shape == (count,)
  share = np.bincount(got, minlength=4) / count
  assert share[0] == 0
  # Five deviations of a share p: 5 sqrt(p (1 - p) / count) < 0.04.
  np.testing.assert_allclose(share, probabilities, atol=0.04)


def test_resample_is_addressed():
  weights = jnp.arange(1.0, 9.0)
  many = RESAMPLE(KEY, weights, count=filtration.BLOCK + 9)
  again = RESAMPLE(KEY, weights, count=filtration.BLOCK + 9)
  np.testing.assert_array_equal(many, again)
  # A draw does not depend on how many there are.
  few = RESAMPLE(KEY, weights, count=5)
  np.testing.assert_array_equal(few, many[:5])
  other = RESAMPLE(keys.key(0, 'minibatch', 8), weights, count=many.size)
  assert (np.asarray(other) != many).any()
  with jax.enable_x64(True):
    wide = filtration.resample(KEY, np.arange(1.0, 9.0), 5)
    assert wide.dtype == jnp.int32
  np.testing.assert_array_equal(wide, few)


def test_resample_never_draws_what_has_no_weight():
  weights = jnp.array([0.0, np.nan, 1e-30, -1.0, 0.0])
  got = RESAMPLE(KEY, weights, count=64)
  np.testing.assert_array_equal(got, np.full(64, 2))
  # Unless nothing has: then all are alike.
  got = RESAMPLE(KEY, jnp.zeros(5), count=64)
  assert set(np.asarray(got).tolist()) == set(range(5))


def test_take_moves_trajectories_whole():
  number = np.arange(5)
  tree = {
    'advantages': jnp.asarray(number[:, None] + np.zeros((5, 3))),
    'rollout': (number, {'tokens': np.stack([number, number], axis=1)}),
  }
  indices = jnp.array([4, 1, 1, 0])
  got = filtration.take(tree, indices)
  np.testing.assert_array_equal(
    got['advantages'], np.array([[4.0] * 3, [1.0] * 3, [1.0] * 3, [0.0] * 3])
  )
  np.testing.assert_array_equal(got['rollout'][0], [4, 1, 1, 0])
  tokens = got['rollout'][1]['tokens']
  np.testing.assert_array_equal(tokens, [[4, 4], [1, 1], [1, 1], [0, 0]])
  # What lives on the host stays there; under jit all is on the device.
  assert isinstance(tokens, np.ndarray)
  jitted = jax.jit(filtration.take)(tree, indices)
  np.testing.assert_array_equal(jitted['advantages'], got['advantages'])


def test_errors():
  ones = jnp.ones(3)
  with pytest.raises(ValueError, match=r"'max'.*'max_min'.*'pow'"):
    filtration.weights(ones, ones, method='max')
  for power in (0.0, -1.0, np.nan, np.inf):
    with pytest.raises(ValueError, match='power of filtration'):
      filtration.weights(ones, ones, method='pow', power=power)
  with pytest.raises(AssertionError):
    filtration.weights(ones, jnp.ones(2), method='pow')
  with pytest.raises(ValueError, match='cannot draw 0'):
    filtration.resample(KEY, ones, 0)
  with pytest.raises(ValueError, match='of 0 sequences'):
    filtration.resample(KEY, jnp.ones(0), 2)
  with pytest.raises(AssertionError):
    filtration.take({'a': ones, 'b': jnp.ones(4)}, jnp.array([0]))
