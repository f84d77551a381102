"""Tests of KL estimators and of the coefficient's controller."""

import dataclasses
import json
import math

import jax
from jax import test_util
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import metrics
from rlhf_jax.algorithms import kl

NAMES = sorted(kl.ESTIMATORS)


def _slope(function, d):
  """The derivative with respect to log pi at log pi_ref - log pi = d."""
  reference = jnp.asarray(d)
  zero = jnp.zeros_like(reference)
  return jax.grad(lambda x: jnp.sum(function(x, reference)))(zero)


def test_hand_derived_numbers():
  # pi = 1/4, pi_ref = 1/2: d = ln 2.
  new, reference = jnp.log(jnp.array([0.25])), jnp.log(jnp.array([0.5]))
  ln2 = math.log(2)
  np.testing.assert_allclose(kl.k1(new, reference), [-ln2], rtol=1e-6)
  np.testing.assert_allclose(kl.k2(new, reference), [ln2**2 / 2], rtol=1e-6)
  np.testing.assert_allclose(kl.k3(new, reference), [1 - ln2], rtol=1e-6)
  # Slopes with respect to log pi: 1, -d and 1 - exp(d).
  np.testing.assert_allclose(_slope(kl.k1, [ln2]), [1], rtol=1e-6)
  np.testing.assert_allclose(_slope(kl.k2, [ln2]), [-ln2], rtol=1e-6)
  np.testing.assert_allclose(_slope(kl.k3, [ln2]), [-1], rtol=1e-6)


@pytest.mark.parametrize(
  'ours, verl',
  [
    ('kl', 'kl'),
    ('k1', 'kl'),
    ('abs', 'abs'),
    ('k2', 'mse'),
    ('mse', 'mse'),
    ('k3', 'low_var_kl'),
    ('low_var_kl', 'low_var_kl'),
    ('low_var_kl_verl', 'low_var_kl'),
    ('k1+', 'k1+'),
    ('abs+', 'abs+'),
    ('k2+', 'k2+'),
    ('k3+', 'k3+'),
    ('low_var_kl+', 'k3+'),
  ],
)
def test_against_verl(oracle, ours, verl):
  # The largest |d| of the inputs is 1.74, where no form of k3 is clamped.
  new, reference = oracle['inputs']['new'], oracle['inputs']['ref']
  expected = oracle['kl'][verl]
  estimator = kl.estimator(ours)
  value, pull = jax.vjp(lambda x: estimator(x, reference), new)
  (gradient,) = pull(jnp.ones_like(value))
  np.testing.assert_allclose(value, expected['val'], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(gradient, expected['grad'], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('name', NAMES)
def test_equal_policies_are_zero(name):
  logprobs = jnp.array([-0.1, -3.0, -40.0])
  estimator = kl.estimator(name)
  np.testing.assert_array_equal(estimator(logprobs, logprobs), np.zeros(3))


@pytest.mark.parametrize('name', NAMES)
def test_masked_places_have_no_effect(name):
  logprobs = jnp.array([-1.0, jnp.nan, -jnp.inf, -2.0])
  reference = jnp.array([-1.5, -1.0, jnp.nan, jnp.inf])
  mask = jnp.array([True, False, False, False])
  estimator = kl.estimator(name)
  value, pull = jax.vjp(lambda x: estimator(x, reference, mask=mask), logprobs)
  (gradient,) = pull(jnp.ones(4))
  expected = estimator(logprobs[:1], reference[:1])
  np.testing.assert_allclose(value, [*expected, 0, 0, 0], rtol=1e-6)
  np.testing.assert_array_equal(gradient[1:], np.zeros(3))
  assert np.isfinite(gradient[0]) and gradient[0] != 0


def test_k3_pulls_everywhere():
  """From |d| = 5 on the value goes on along the tangent."""
  d = jnp.array([-200.0, -20.0, -5.0, 5.0, 20.0, 200.0])
  e5, e_5 = math.exp(5), math.exp(-5)
  # exp(c) - 1 - c + (d - c) (exp(c) - 1) at c = -5 and 5.
  expected = [
    e_5 + 4 - 195 * (e_5 - 1),
    e_5 + 4 - 15 * (e_5 - 1),
    e_5 + 4,
    e5 - 6,
    e5 - 6 + 15 * (e5 - 1),
    e5 - 6 + 195 * (e5 - 1),
  ]
  zero = jnp.zeros(6)
  np.testing.assert_allclose(kl.k3(zero, d), expected, rtol=1e-6)
  np.testing.assert_allclose(
    _slope(kl.k3, d), [1 - e_5] * 3 + [1 - e5] * 3, rtol=1e-6
  )
  # On purpose: verl's form is clamped to 10 and flat there, slopes 0.
  np.testing.assert_allclose(
    kl.low_var_kl_verl(zero, d), [10, 10, e_5 + 4, 10, 10, 10], rtol=1e-6
  )
  np.testing.assert_allclose(
    _slope(kl.low_var_kl_verl, d), [0, 0, 1 - e_5, 0, 0, 0], rtol=1e-6
  )


def test_k3_is_accurate_for_close_policies():
  # exp(d) - 1 - d = d^2 / 2 + d^3 / 6 + ...: 5.0e-9 for 1e-4, lost entirely by
  # computing exp first (the step of float32 at 1 is 1.2e-7).
  d = jnp.array([1e-4, -1e-4])
  np.testing.assert_allclose(
    kl.k3(jnp.zeros(2), d), [5.0002e-9, 4.9998e-9], rtol=2e-3
  )


def test_gradients_against_finite_differences():
  with jax.enable_x64(True):
    logprobs = jnp.array([-0.2, -9.0, -1.0, -0.5], jnp.float64)
    reference = jnp.array([-0.7, -0.5, -1.1, -7.0], jnp.float64)
    for name in ('k1', 'k2', 'k3', 'abs'):
      estimator = kl.estimator(name)
      assert estimator(logprobs, reference).dtype == jnp.float64
      test_util.check_grads(
        lambda x: estimator(x, reference),  # noqa: B023
        (logprobs,),
        order=1,
        modes=['rev'],
        eps=1e-6,
        rtol=1e-7,
        atol=1e-7,
      )


def test_estimates_agree_with_the_exact_divergence():
  """Weighted by pi, k1 and k3 sum to KL(pi, pi_ref), k2 slopes to its slope.

  The gradient through the probabilities is left out of a sampled estimate: only
  that of k2, sum pi d log pi (log pi - log pi_ref), is the gradient of the KL.
  """
  logits = jnp.array([0.3, -0.2, 1.1])
  reference = jax.nn.log_softmax(jnp.array([0.0, 0.5, 0.2]))
  pi = jax.nn.softmax(logits)

  def exact(logits):
    logprobs = jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(logprobs) * (logprobs - reference))

  def estimate(logits, name):
    value = kl.estimator(name)(jax.nn.log_softmax(logits), reference)
    return jnp.sum(pi * value)

  for name in ('k1', 'k3', 'k1+', 'k3+'):
    np.testing.assert_allclose(estimate(logits, name), exact(logits), rtol=1e-5)
  np.testing.assert_allclose(
    kl.full(logits, reference), exact(logits), rtol=1e-5
  )
  for name in ('k2', 'k1+', 'k3+'):
    np.testing.assert_allclose(
      jax.grad(estimate)(logits, name), jax.grad(exact)(logits), atol=1e-6
    )
  # Why k1 is refused as a loss.
  np.testing.assert_allclose(
    jax.grad(estimate)(logits, 'k1'), np.zeros(3), atol=1e-6
  )


def test_beyond_bound():
  logprobs = jnp.array([0.0, -6.0, -4.9, 0.0, -6.0])
  reference = jnp.array([-6.0, 0.0, 0.0, jnp.nan, 0.0])
  mask = jnp.array([True, True, True, False, False])
  share = kl.beyond_bound(logprobs, reference, mask)
  assert metrics.compute({'x': share})['x'] == pytest.approx(2 / 3)


def test_names():
  with pytest.raises(ValueError, match="'k4'.*'k3'"):
    kl.estimator('k4')
  with pytest.raises(ValueError, match="'k5'.*'full'.*'k3'"):
    kl.check('k5', loss=True)
  for name in ('k1', 'kl', 'abs'):
    with pytest.raises(ValueError, match=rf"cannot be a loss.*k2.*'{name}\+'"):
      kl.check(name, loss=True)
    kl.check(name, loss=False)
  for name in {*NAMES, 'full'} - kl.NOT_LOSSES:
    kl.check(name, loss=True)


@pytest.mark.parametrize('name', [n for n in NAMES if n.endswith('+')])
def test_straight_through(name):
  """The value of its estimator, the gradient of k2."""
  reference = jnp.array([-0.5, -3.0, -9.0])
  zero = jnp.zeros(3)
  value, pull = jax.vjp(lambda x: kl.estimator(name)(x, reference), zero)
  plain = kl.estimator(name.removesuffix('+'))(zero, reference)
  np.testing.assert_allclose(value, plain, rtol=1e-6)
  np.testing.assert_allclose(pull(jnp.ones(3))[0], -reference, rtol=1e-6)


def test_full_by_hand():
  # pi = (3/4, 1/4), pi_ref = (1/4, 3/4): 3/4 ln 3 - 1/4 ln 3 = ln 3 / 2, and
  # d / d logit_0 = 3/4 (ln 3 - ln 3 / 2) = 3/8 ln 3, minus that for logit_1:
  # 1/4 (-ln 3 - ln 3 / 2).
  ln3 = math.log(3)
  logits = jnp.array([ln3, 0.0])
  value, slope = jax.value_and_grad(kl.full)(logits, -logits)
  assert value == pytest.approx(ln3 / 2, rel=1e-6)
  np.testing.assert_allclose(slope, [3 / 8 * ln3, -3 / 8 * ln3], rtol=1e-6)
  # Shifts of all logits are no change; the same policy has no divergence.
  np.testing.assert_allclose(kl.full(logits + 7, logits), 0, atol=1e-6)


def test_full_of_tokens_without_probability():
  # -inf logits are bans: pi = (1/2, 1/2, 0), pi_ref = (1/4, 1/4, 1/2).
  logits = jnp.array([0.0, 0.0, -jnp.inf])
  reference = jnp.log(jnp.array([0.25, 0.25, 0.5]))
  np.testing.assert_allclose(kl.full(logits, reference), math.log(2), atol=1e-6)


def test_full_against_finite_differences():
  with jax.enable_x64(True):
    logits, reference = np.random.default_rng(0).normal(size=(2, 3, 7)) * 2
    test_util.check_grads(
      lambda x: kl.full(x, reference),
      (logits,),
      order=1,
      modes=['rev'],
      eps=1e-6,
      rtol=1e-7,
      atol=1e-7,
    )


def test_adaptive_controller_against_verl(oracle):
  controller = kl.adaptive(0.001, target=0.1, horizon=10_000)
  for measured, expected in oracle['adaptive_kl_init.001_t.1_h10000_n256']:
    controller = kl.update(controller, measured, 256)
    assert controller.coef == pytest.approx(expected, rel=1e-12)


def test_adaptive_controller_by_hand():
  controller = kl.adaptive(2.0, target=0.1, horizon=1000)
  # 10 % above the target, a tenth of the horizon: +1 %.
  assert kl.update(controller, 0.11, 100).coef == pytest.approx(2.02)
  # Far above and below: the error stops at 20 %.
  assert kl.update(controller, 5.0, 100).coef == pytest.approx(2.04)
  assert kl.update(controller, -5.0, 100).coef == pytest.approx(1.96)
  # On purpose: verl multiplies by 1 - 0.2 * 10 = -1 here, a reward for KL.
  assert kl.update(controller, 0.0, 10_000).coef == pytest.approx(1.6)
  for broken in (math.nan, math.inf):
    assert kl.update(controller, broken, 100) == controller


def test_fixed_controller():
  controller = kl.fixed(0.05)
  assert kl.update(controller, 9.0, 256) == controller
  assert kl.fixed(0.0).coef == 0


def test_controller_survives_json():
  controller = kl.update(kl.adaptive(0.3, target=0.1, horizon=50), 0.12, 7)
  text = json.dumps(dataclasses.asdict(controller))
  assert kl.Controller(**json.loads(text)) == controller


@pytest.mark.parametrize(
  'make',
  [
    lambda: kl.fixed(-0.1),
    lambda: kl.fixed(math.nan),
    lambda: kl.adaptive(0.0, target=0.1, horizon=1),
    lambda: kl.adaptive(0.1, target=0.0, horizon=1),
    lambda: kl.adaptive(0.1, target=0.1, horizon=-1),
  ],
)
def test_controller_errors(make):
  with pytest.raises(ValueError, match='must be finite and'):
    make()
