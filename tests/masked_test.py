"""Tests of masked statistics."""

import json
import pathlib

import jax
from jax import test_util
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import masked

FIXTURE = pathlib.Path(__file__).parent / 'fixtures' / 'verl_core.json'

X = jnp.array([[1.0, 2.0, jnp.nan], [jnp.inf, 6.0, -jnp.inf]])
MASK = jnp.array([[True, True, False], [False, True, False]])
EMPTY = jnp.zeros((2, 3), bool)

STATISTICS = (
  masked.sum,
  masked.mean,
  masked.max,
  masked.min,
  masked.var,
  masked.std,
)


def test_hand_derived_numbers():
  # Selected: 1, 2, 6.  Mean 3; squared distances 4 + 1 + 9 = 14.
  assert masked.count(MASK) == 3
  assert masked.sum(X, MASK) == 9
  assert masked.mean(X, MASK) == 3
  assert masked.max(X, MASK) == 6
  assert masked.min(X, MASK) == 1
  np.testing.assert_allclose(masked.var(X, MASK), 14 / 3, rtol=1e-6)
  np.testing.assert_allclose(masked.var(X, MASK, ddof=1), 7, rtol=1e-6)
  np.testing.assert_allclose(masked.std(X, MASK, ddof=1), 7**0.5, rtol=1e-6)


def test_axis():
  np.testing.assert_array_equal(masked.mean(X, MASK, axis=1), [1.5, 6])
  np.testing.assert_array_equal(masked.max(X, MASK, axis=0), [1, 6, 0])
  np.testing.assert_array_equal(
    masked.sum(X, MASK, axis=1, keepdims=True), [[3], [6]]
  )
  np.testing.assert_array_equal(masked.var(X, MASK, axis=1), [0.25, 0])


@pytest.mark.parametrize('function', STATISTICS)
def test_masked_places_have_no_effect(function):
  """NaN and infinity there change neither the value nor the gradient."""
  finite = jnp.where(MASK, X, 7.0)
  value, gradient = jax.value_and_grad(function)(X, MASK)
  expected, expected_gradient = jax.value_and_grad(function)(finite, MASK)
  assert value == expected
  np.testing.assert_array_equal(gradient, expected_gradient)
  assert np.all(np.isfinite(gradient))
  assert not np.any(np.where(MASK, 0, gradient))


@pytest.mark.parametrize('function', STATISTICS)
def test_empty_is_zero(function):
  value, gradient = jax.value_and_grad(function)(X, EMPTY)
  assert value == 0
  np.testing.assert_array_equal(gradient, np.zeros((2, 3)))


@pytest.mark.parametrize('number', [0.35, 1e8, -3.3e-30])
@pytest.mark.parametrize('size', [1, 2, 7])
def test_equal_values_have_no_deviation(number, size):
  """Whitening and deviation are exactly 0, not rounding over epsilon."""
  x = jnp.full(size, number)
  mask = jnp.ones(size, bool)
  assert masked.std(x, mask, ddof=1) == 0
  np.testing.assert_array_equal(masked.whiten(x, mask), np.zeros(size))
  np.testing.assert_array_equal(
    jax.grad(lambda x: masked.std(x, mask))(x), np.zeros(size)
  )


def test_equal_up_to_rounding():
  # Neighbours in float32, 3.0e-8 apart, as 0.1 + 0.2 and 0.3 can be.
  x = jnp.array([0.3, np.nextafter(np.float32(0.3), np.float32(1))])
  assert x[0] != x[1]
  mask = jnp.ones(2, bool)
  np.testing.assert_array_equal(masked.whiten(x, mask, epsilon=0.0), [0, 0])
  # A real difference stays: +-1 / sqrt(2) with Bessel's correction.
  x = jnp.array([0.3, 0.3001])
  np.testing.assert_allclose(
    masked.whiten(x, mask, epsilon=0.0), [-(0.5**0.5), 0.5**0.5], rtol=1e-5
  )


def test_whiten_against_verl():
  numbers = json.loads(FIXTURE.read_text())
  x = jnp.asarray(numbers['inputs']['adv'])
  mask = jnp.asarray(numbers['inputs']['mask']) > 0
  # On purpose: verl leaves numbers at masked places, here they are 0.
  for shift_mean, name in ((True, 'whiten'), (False, 'whiten_noshift')):
    expected = np.where(mask, np.asarray(numbers[name]), 0)
    np.testing.assert_allclose(
      masked.whiten(x, mask, shift_mean=shift_mean),
      expected,
      rtol=1e-5,
      atol=1e-6,
    )


def test_whiten_is_standard_and_masked():
  white = masked.whiten(X, MASK)
  # Mean 3, Bessel-corrected variance 7.
  expected = np.array([[-2, -1, 0], [0, 3, 0]]) / 7**0.5
  np.testing.assert_allclose(white, expected, rtol=1e-6)
  np.testing.assert_array_equal(masked.whiten(X, EMPTY), np.zeros((2, 3)))


def test_large_offset_keeps_its_variance():
  # E[x^2] - E[x]^2 in float32 would give 0 or worse: 1e8 has a step of 8.
  x = jnp.array([4096.0, 4097.0, 4098.0]) * 1024.0
  np.testing.assert_allclose(
    masked.var(x, jnp.ones(3, bool)), 2 / 3 * 1024.0**2, rtol=1e-6
  )


def test_dtypes():
  ones = jnp.ones(4, bool)
  for dtype in (jnp.bfloat16, jnp.int32, jnp.bool_, jnp.float32):
    assert masked.mean(jnp.ones(4, dtype), ones).dtype == jnp.float32
  # bfloat16 cannot hold 257; the sum of 257 ones can.
  many = jnp.ones(257, jnp.bfloat16)
  assert masked.sum(many, jnp.ones(257, bool)) == 257
  with jax.enable_x64(True):
    x = jnp.arange(4, dtype=jnp.float64)
    assert masked.whiten(x, jnp.ones(4, bool)).dtype == jnp.float64


def test_shapes_are_checked():
  with pytest.raises(AssertionError):
    masked.mean(jnp.ones((2, 3)), jnp.ones(3, bool))


def test_gradients_against_finite_differences():
  mask = np.array([True, False, True, True])

  def smooth(x):
    return (
      masked.var(x, mask)
      + masked.std(x, mask, ddof=1)
      + masked.mean(x, mask)
      + masked.sum(masked.whiten(x, mask, shift_mean=False) ** 3, mask)
    )

  with jax.enable_x64(True):
    x = jnp.array([0.3, 9.0, -1.2, 0.7], jnp.float64)
    # rtol: central differences with a step of 1e-6 are exact to about 1e-9.
    test_util.check_grads(
      smooth, (x,), order=1, modes=['rev'], eps=1e-6, rtol=1e-7, atol=1e-7
    )


SEGMENT_STATISTICS = (
  masked.segment_sum,
  masked.segment_mean,
  masked.segment_max,
)
# 0 is padding, -1 a shared prefix; the fourth place of a row is masked.
SEGMENTS = np.array([[-1, 1, 1, 2, 2, 0], [3, 1, 3, 1, 1, 1]])
SEGMENT_MASK = np.array([[1, 1, 1, 0, 1, 1], [1, 1, 1, 0, 1, 1]], bool)
VALUES = jnp.array([[9.0, 1, 2, jnp.nan, 8, 9], [4, -5, 6, jnp.inf, -1, -3]])


def test_segments_by_hand():
  call = lambda f: np.asarray(f(VALUES, SEGMENT_MASK, SEGMENTS))
  np.testing.assert_array_equal(
    call(masked.segment_sum),
    [[0, 3, 3, 8, 8, 0], [10, -9, 10, -9, -9, -9]],
  )
  np.testing.assert_array_equal(
    call(masked.segment_mean),
    [[0, 1.5, 1.5, 8, 8, 0], [5, -3, 5, -3, -3, -3]],
  )
  np.testing.assert_array_equal(
    call(masked.segment_max),
    [[0, 2, 2, 8, 8, 0], [6, -1, 6, -1, -1, -1]],
  )


@pytest.mark.parametrize('function', SEGMENT_STATISTICS)
def test_one_segment_per_row(function):
  """None is the sequence layout, and the same as a number per row."""
  ids = np.array([[1] * 6, [4] * 6])
  np.testing.assert_array_equal(
    function(VALUES, SEGMENT_MASK), function(VALUES, SEGMENT_MASK, ids)
  )
  by_row = {
    masked.segment_sum: masked.sum,
    masked.segment_mean: masked.mean,
    masked.segment_max: masked.max,
  }[function]
  np.testing.assert_array_equal(
    function(VALUES, SEGMENT_MASK)[:, 0], by_row(VALUES, SEGMENT_MASK, axis=1)
  )


@pytest.mark.parametrize('function', SEGMENT_STATISTICS)
def test_segments_ignore_masked_places(function):
  """NaN and infinity there change neither the value nor the gradient."""
  weight = jnp.arange(12.0).reshape(2, 6)
  total = lambda x, mask: jnp.sum(weight * function(x, mask, SEGMENTS))
  finite = jnp.where(SEGMENT_MASK, VALUES, 7.0)
  value, gradient = jax.value_and_grad(total)(VALUES, SEGMENT_MASK)
  expected, expected_gradient = jax.value_and_grad(total)(finite, SEGMENT_MASK)
  assert value == expected
  np.testing.assert_array_equal(gradient, expected_gradient)
  none = np.zeros_like(SEGMENT_MASK)
  value, gradient = jax.value_and_grad(total)(VALUES, none)
  assert value == 0
  np.testing.assert_array_equal(gradient, np.zeros((2, 6)))


def test_segment_gradients_against_finite_differences():
  weight = np.linspace(-1.0, 2.0, 12).reshape(2, 6)
  with jax.enable_x64(True):
    x = jnp.where(SEGMENT_MASK, VALUES, 7.0).astype(jnp.float64)
    for function in SEGMENT_STATISTICS:
      test_util.check_grads(
        lambda x: jnp.sum(weight * function(x, SEGMENT_MASK, SEGMENTS) ** 2),  # noqa: B023
        (x,), order=1, modes=['rev'], eps=1e-6, rtol=1e-7, atol=1e-7,
      )  # fmt: skip


def test_segment_types_and_shapes():
  ids = np.ones((2, 3), np.int32)
  for function in SEGMENT_STATISTICS:
    got = function(jnp.ones((2, 3), jnp.bfloat16), MASK, ids)
    assert got.dtype == jnp.float32
    with pytest.raises(AssertionError):
      function(jnp.ones((2, 3)), MASK, ids[:1])
