"""Weighted sums that leave out what does not apply."""

import numpy as np
import pytest

from rlhf_jax.rewards import combine


def test_weighted_sum():
  values = np.asarray(
    [[0.7, 2.0], [np.nan, 2.0], [0.7, np.nan], [np.nan, np.nan]], np.float32
  )
  # 0.7 + 0.5 * 2, 0.5 * 2, 0.7, none.
  scores = combine.weighted_sum(values, [1.0, 0.5])
  assert scores.dtype == np.float32
  np.testing.assert_array_equal(
    scores, np.asarray([1.7, 1.0, 0.7, np.nan], np.float32)
  )


def test_weighted_sum_checks_shapes():
  for values, weights in ((np.zeros((2, 3)), [1.0]), (np.zeros(3), [1.0] * 3)):
    with pytest.raises(ValueError, match='shapes'):
      combine.weighted_sum(values, weights)


def test_weight_vector():
  np.testing.assert_array_equal(combine.weight_vector(['a', 'b'], None), [1, 1])
  weights = {'b': 2, 'a': -1}
  np.testing.assert_array_equal(
    combine.weight_vector(['a', 'b'], weights), [-1, 2]
  )
  for wrong in ({'a': 1}, {'a': 1, 'b': 1, 'c': 1}):
    with pytest.raises(ValueError, match='one weight'):
      combine.weight_vector(['a', 'b'], wrong)
  with pytest.raises(ValueError, match='finite'):
    combine.weight_vector(['a'], {'a': float('nan')})
