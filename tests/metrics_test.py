"""Tests of metrics that carry their reduction."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import metrics


def _all_kinds(x, where):
  return {
    'mean': metrics.mean(x, where),
    'weighted': metrics.weighted_mean(x, 2.0 * x, where),
    'sum': metrics.sum(x, where),
    'max': metrics.max(x, where),
    'min': metrics.min(x, where),
  }


# Selected: 1, 2, 6.  The weighted mean is 2 (1 + 4 + 36) / (2 (1 + 2 + 6)).
X = np.array([1.0, 2.0, np.nan, 6.0])
WHERE = np.array([True, True, False, True])
EXPECTED = {'mean': 3, 'weighted': 41 / 9, 'sum': 9, 'max': 6, 'min': 1}


def test_host_and_device_agree():
  on_host = _all_kinds(X, WHERE)
  assert not any(
    isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(on_host)
  )
  assert metrics.compute(on_host) == pytest.approx(EXPECTED)
  on_device = jax.jit(_all_kinds)(jnp.asarray(X), jnp.asarray(WHERE))
  assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(on_device))
  assert metrics.compute(on_device) == pytest.approx(EXPECTED)


@pytest.mark.parametrize('borders', [(4,), (1, 4), (3, 4), (1, 2, 3, 4)])
def test_merging_is_exact_over_uneven_parts(borders):
  """Parts of any size, some with nothing selected, give the whole."""
  start, parts = 0, []
  for end in borders:
    parts.append(_all_kinds(X[start:end], WHERE[start:end]))
    start = end
  assert metrics.compute(metrics.merge(*parts)) == pytest.approx(EXPECTED)


def test_merge_inside_jit():
  halves = jnp.asarray(X).reshape(2, 2), jnp.asarray(WHERE).reshape(2, 2)

  @jax.jit
  def accumulate(x, where):
    first = _all_kinds(x[0], where[0])
    merge = lambda total, part: (metrics.merge(total, _all_kinds(*part)), None)
    return jax.lax.scan(merge, first, (x[1:], where[1:]))[0]

  assert metrics.compute(accumulate(*halves)) == pytest.approx(EXPECTED)


def test_metric_of_nothing_is_left_out():
  nothing = np.zeros(4, bool)
  assert metrics.compute(_all_kinds(X, nothing)) == {'sum': 0}
  # An infinity that was really seen is something else.
  assert metrics.compute({'x': metrics.max(-np.inf)}) == {'x': -np.inf}
  assert metrics.compute({}) == {}


def test_nan_in_the_data_is_reported():
  values = metrics.compute({'a': metrics.mean(X), 'b': metrics.max(X)})
  assert np.isnan(values['a']) and np.isnan(values['b'])


def test_scalars():
  group = {'lr': metrics.mean(1e-5), 'flag': metrics.mean(True)}
  values = metrics.compute(metrics.merge(group, {'n': metrics.sum(3)}))
  assert values == {'lr': 1e-5, 'flag': 1.0, 'n': 3.0}
  assert all(type(value) is float for value in values.values())


def test_close_sums():
  """Micro-batches add up; mini-batches are averaged."""
  first = metrics.merge({'loss': metrics.sum(1.0)}, {'loss': metrics.sum(2.0)})
  second = {'loss': metrics.sum(5.0), 'share': metrics.mean([0.0, 1.0])}
  step = metrics.merge(metrics.close_sums(first), metrics.close_sums(second))
  assert metrics.compute(step) == {'loss': 4.0, 'share': 0.5}


def test_low_precision_is_summed_in_float32():
  ones = jnp.ones(257, jnp.bfloat16)
  assert metrics.mean(ones).total == 257
  assert metrics.mean(ones).total.dtype == jnp.float32


def test_errors():
  with pytest.raises(TypeError, match="'x'.*Mean.*Max"):
    metrics.merge({'x': metrics.mean(1.0)}, {'x': metrics.max(1.0)})
  with pytest.raises(ValueError, match='mask has shape'):
    metrics.mean(np.ones((2, 1)), np.ones(2, bool))
  with pytest.raises(ValueError, match='weights have shape'):
    metrics.weighted_mean(np.ones(2), np.ones(3))
