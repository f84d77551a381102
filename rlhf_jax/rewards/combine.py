"""Adds several rewards up to one score per response."""

import numpy as np


def weighted_sum(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
  """Sum over the rewards that apply to a row.

  score_n = sum over k with a number in values_nk of weights_k * values_nk

  A reward of weight 0 is only reported: it does not make a row apply.

  Args:
    values: [N, K] float32, NaN where a reward does not apply.
    weights: [K] float.

  Returns:
    [N] float32; NaN where no reward applies.

  Raises:
    ValueError: the shapes do not agree.
  """
  values, weights = np.asarray(values), np.asarray(weights, np.float64)
  if values.ndim != 2 or weights.shape != values.shape[1:]:
    raise ValueError(
      'expected values [N, K] and weights [K], got shapes'
      f' {values.shape} and {weights.shape}'
    )
  applies = ~np.isnan(values) & (weights != 0)  # N K
  terms = np.where(applies, values, 0) * weights
  scores = np.where(applies.any(axis=1), terms.sum(axis=1), np.nan)
  return scores.astype(np.float32)


def weight_vector(names, weights) -> np.ndarray:
  """The weights of `names` in order, 1 where `weights` is None: [K].

  Raises:
    ValueError: a weight is missing, belongs to no reward, or is not finite.
  """
  if weights is None:
    return np.ones(len(names))
  if set(weights) != set(names):
    raise ValueError(
      f'rewards are {sorted(names)}, but weights are for {sorted(weights)}:'
      ' give each reward one weight'
    )
  vector = np.asarray([float(weights[name]) for name in names])
  if not vector.any():
    raise ValueError(
      f'all weights of the rewards {sorted(names)} are 0: give one that counts'
    )
  if not np.isfinite(vector).all():
    raise ValueError(f'weights must be finite, got {dict(weights)}')
  return vector
