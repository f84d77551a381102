"""Tests of statistics over the sequences that answer the same prompt."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.algorithms import groups


def test_group_statistics():
  statistics = groups.group_statistics(
    jnp.array([1.0, 4.0, np.nan, 3.0]),
    jnp.array([0, 1, 0, 0]),
    jnp.ones(4, bool),
  )
  np.testing.assert_array_equal(statistics.valid, [True, True, False, True])
  np.testing.assert_array_equal(statistics.count, [2, 1, 2, 2])
  np.testing.assert_array_equal(statistics.mean, [2, 4, 2, 2])
  np.testing.assert_allclose(statistics.std, np.sqrt([2, 0, 2, 2]), rtol=1e-6)
  np.testing.assert_array_equal(statistics.centred, [-1, 0, 0, 1])


def test_sums():
  nan = np.nan
  got = groups.sums(
    jnp.array([[1.0, 2.0], [3.0, 4.0], [nan, nan], [5.0, 6.0]]),
    jnp.array([9, -1, 9, 9]),
    jnp.array([True, True, False, True]),
  )
  np.testing.assert_array_equal(got, [[6, 8], [3, 4], [6, 8], [6, 8]])


def test_largest_other():
  # Groups (1, 7, 7), (3), (-4, -2); the last of the first does not count.
  got = groups.largest_other(
    jnp.array([1.0, 7.0, 7.0, 3.0, -4.0, -2.0, 99.0]),
    jnp.array([0, 0, 0, 1, 2, 2, 0]),
    jnp.array([True] * 6 + [False]),
  )
  np.testing.assert_array_equal(got, [7, 7, 7, 0, -2, -4, 7])
  # Lengths are whole numbers.
  lengths = groups.largest_other(
    jnp.array([3, 5]), jnp.zeros(2, jnp.int32), jnp.ones(2, bool)
  )
  np.testing.assert_array_equal(lengths, [5, 3])


@pytest.mark.parametrize('x64', [False, True], ids=['float32', 'float64'])
def test_more_sequences_than_a_block(x64):
  """Against loops, with groups that are spread over all blocks."""
  num = groups.BLOCK + 3
  generator = np.random.default_rng(0)
  dtype = np.float64 if x64 else np.float32
  scores = generator.normal(size=num).astype(dtype)
  group = generator.integers(0, 40, size=num)
  valid = generator.random(num) < 0.9
  with jax.enable_x64(x64):
    statistics = groups.group_statistics(scores, group, valid)
    sums = groups.sums(scores[:, None], group, valid)
    others = groups.largest_other(scores, group, valid)
    for got in (statistics.mean, statistics.std, sums, others):
      assert got.dtype == dtype
    statistics, sums, others = jax.device_get((statistics, sums, others))
  for n in range(num):
    members = valid & (group == group[n])
    expected = scores[members].astype(np.float64)
    assert statistics.count[n] == len(expected)
    np.testing.assert_allclose(
      [statistics.mean[n], sums[n, 0]],
      [expected.mean(), expected.sum()],
      rtol=1e-5,
      atol=1e-6,
    )
    np.testing.assert_allclose(
      statistics.std[n], expected.std(ddof=1), rtol=1e-5
    )
    members[n] = False
    assert others[n] == scores[members].max()


def test_shapes():
  with pytest.raises(AssertionError):
    groups.group_statistics(jnp.ones(3), jnp.ones(2), jnp.ones(3))
  with pytest.raises(AssertionError):
    groups.sums(jnp.ones((3, 2)), jnp.ones(2), jnp.ones(3))
  with pytest.raises(AssertionError):
    groups.largest_other(jnp.ones((3, 1)), jnp.ones(3), jnp.ones(3))
