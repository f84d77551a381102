"""Tests of policy losses."""

import math

import jax
from jax import test_util
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import metrics
from rlhf_jax.algorithms import aggregation
from rlhf_jax.algorithms import policy_losses

MODES = ('token-mean', 'seq-mean-token-mean', 'seq-mean-token-sum')
LOSSES = sorted(policy_losses.LOSSES)


def _one(ratio, advantage, **options):
  """Loss, slope with respect to log pi, and metrics, of a single token."""
  old = jnp.full((1, 1), -1.0)
  mask = jnp.ones((1, 1), bool)

  def loss(logprobs):
    value, statistics = policy_losses.ppo(
      logprobs, old, jnp.full((1, 1), advantage), mask, **options
    )
    return value[0, 0], statistics

  (value, statistics), slope = jax.value_and_grad(loss, has_aux=True)(
    old + jnp.log(ratio)
  )
  return float(value), float(slope[0, 0]), metrics.compute(statistics)


# Per case: ratio, advantage, loss, slope, clipped, clipped by the second clip.
# Clip 0.2 below and 0.3 above, dual clip 3. Free slopes are -A ratio.
CASES = [
  (1.0, 2.0, -2.0, -2.0, 0, 0),
  (1.2, 2.0, -2.4, -2.4, 0, 0),
  (1.5, 2.0, -2.6, 0.0, 1, 0),  # too likely already: 1.3 A
  (0.5, 2.0, -1.0, -1.0, 0, 0),  # good and unlikely: always pulled up
  (1.0, -2.0, 2.0, 2.0, 0, 0),
  (0.5, -2.0, 1.6, 0.0, 1, 0),  # unlikely enough already: 0.8 |A|
  (1.5, -2.0, 3.0, 3.0, 0, 0),  # bad and likely: always pushed down,
  (4.0, -2.0, 6.0, 0.0, 0, 1),  # up to 3 |A|
  (9.0, 0.0, 0.0, 0.0, 0, 0),
]


@pytest.mark.parametrize('case', CASES)
def test_ppo_by_hand(case):
  ratio, advantage, *expected = case
  value, slope, statistics = _one(
    ratio, advantage, clip_low=0.2, clip_high=0.3, dual_clip=3.0
  )
  got = [
    value,
    slope,
    statistics['actor/pg_clipfrac'],
    statistics['actor/pg_clipfrac_lower'],
  ]
  np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
  assert statistics['actor/ppo_kl'] == pytest.approx(-math.log(ratio), abs=1e-6)
  assert statistics['actor/ratio_mean'] == pytest.approx(ratio, rel=1e-6)


def test_without_dual_clip():
  value, slope, _ = _one(4.0, -2.0)
  np.testing.assert_allclose([value, slope], [8, 8], rtol=1e-6)


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('weighted', [True, False])
def test_ppo_against_verl(oracle, mode, weighted):
  inputs, config = oracle['inputs'], oracle['policy_loss']['config']
  mask = inputs['mask']
  expected = oracle['policy_loss']['cases'][f'vanilla|{mode}|is{weighted}']
  weights = aggregation.token_weights(mask, mode)
  correction = inputs['is_weights'] if weighted else np.ones_like(weights)

  @jax.jit
  def loss(logprobs):
    per_token, statistics = policy_losses.ppo(
      logprobs,
      inputs['old'],
      inputs['adv'],
      mask,
      clip_low=config['clip_ratio_low'],
      clip_high=config['clip_ratio_high'],
      dual_clip=config['clip_ratio_c'],
    )
    return aggregation.total(per_token * correction, weights, mask), statistics

  (value, statistics), gradient = jax.value_and_grad(loss, has_aux=True)(
    inputs['new']
  )
  tolerance = {'rtol': 1e-5, 'atol': 1e-6}
  np.testing.assert_allclose(value, expected['loss'], **tolerance)
  np.testing.assert_allclose(gradient, expected['grad'], **tolerance)
  statistics = metrics.compute(statistics)
  for name, number in expected['metrics'].items():
    assert statistics[name] == pytest.approx(number, rel=1e-5, abs=1e-6)


def _call(name, logprobs, old, advantages, mask):
  weights = aggregation.token_weights(mask, 'token-mean')

  def loss(logprobs):
    value, statistics = policy_losses.loss(name)(
      logprobs, old, advantages, mask
    )
    return aggregation.total(value, weights, mask), (value, statistics)

  (total, (value, statistics)), gradient = jax.value_and_grad(
    loss, has_aux=True
  )(logprobs)
  return total, value, gradient, metrics.compute(statistics)


@pytest.mark.parametrize('name', LOSSES)
def test_first_update(oracle, name):
  """Before any step: ratio 1, no divergence, no clip, gradient -A weight."""
  inputs = oracle['inputs']
  mask = inputs['mask']
  _, _, gradient, statistics = _call(
    name, inputs['old'], inputs['old'], inputs['adv'], mask
  )
  expected = np.where(mask, -inputs['adv'] / mask.sum(), 0)
  np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)
  assert statistics['actor/ppo_kl'] == 0
  assert statistics['actor/ratio_max'] == statistics['actor/ratio_mean'] == 1
  assert statistics.get('actor/pg_clipfrac', 0) == 0


@pytest.mark.parametrize('name', LOSSES)
def test_own_logprobs_as_old(name):
  """`old = logprobs` needs no stop_gradient by the caller."""
  x = jnp.full((1, 2), -1.0)
  mask = jnp.ones((1, 2), bool)
  loss = policy_losses.loss(name)
  gradient = jax.grad(lambda x: jnp.sum(loss(x, x, x, mask)[0]))(x)
  np.testing.assert_allclose(gradient, [[1, 1]], rtol=1e-6)


@pytest.mark.parametrize('name', LOSSES)
def test_masked_places_have_no_effect(oracle, name):
  arrays = [oracle['inputs'][key] for key in ('new', 'old', 'adv')]
  mask = oracle['inputs']['mask']
  plain = _call(name, *arrays, mask)
  for bad in (np.nan, np.inf, -np.inf):
    spoilt = _call(name, *(np.where(mask, x, bad) for x in arrays), mask)
    jax.tree.map(np.testing.assert_array_equal, plain, spoilt)
  np.testing.assert_array_equal(np.where(mask, 0, plain[1]), np.zeros((8, 7)))
  np.testing.assert_array_equal(np.where(mask, 0, plain[2]), np.zeros((8, 7)))


@pytest.mark.parametrize('name', LOSSES)
def test_everything_masked(name):
  x = jnp.full((2, 3), jnp.nan)
  total, _, gradient, statistics = _call(name, x, x, x, jnp.zeros((2, 3), bool))
  assert total == 0
  np.testing.assert_array_equal(gradient, np.zeros((2, 3)))
  assert statistics == {}


@pytest.mark.parametrize('name', LOSSES)
def test_packing_and_micro_batches_do_not_matter(oracle, name):
  """Tokens in one row, in another order, padded, or a row at a time."""
  mask = oracle['inputs']['mask']
  weights = aggregation.token_weights(mask, 'seq-mean-token-mean')
  order = np.random.default_rng(0).permutation(mask.size)
  move = lambda x: np.pad(np.ravel(x)[order], (0, 5))[None, :]  # 1 61

  def loss(logprobs, old, advantages, mask, weights):
    value, _ = policy_losses.loss(name)(logprobs, old, advantages, mask)
    return aggregation.total(value, weights, mask)

  with jax.enable_x64(True):
    step = jax.jit(jax.value_and_grad(loss))
    arrays = [
      np.asarray(oracle['inputs'][key], np.float64)
      for key in ('new', 'old', 'adv')
    ] + [mask, np.asarray(weights)]
    value, gradient = step(*arrays)
    packed, packed_gradient = step(*map(move, arrays))
    parts = [step(*(x[n : n + 1] for x in arrays)) for n in range(8)]
  value, gradient, packed, packed_gradient, parts = jax.tree.map(
    np.asarray, (value, gradient, packed, packed_gradient, parts)
  )
  norm = np.linalg.norm(gradient)
  assert abs(value - packed) < 1e-10
  assert np.linalg.norm(move(gradient) - packed_gradient) < 1e-10 * norm
  assert abs(value - sum(value for value, _ in parts)) < 1e-10
  split_gradient = np.concatenate([gradient for _, gradient in parts])
  assert np.linalg.norm(gradient - split_gradient) < 1e-10 * norm


def test_metrics_merge_over_micro_batches(oracle):
  arrays = [oracle['inputs'][key] for key in ('new', 'old', 'adv', 'mask')]
  whole = policy_losses.ppo(*arrays)[1]
  parts = [
    policy_losses.ppo(*(x[rows] for x in arrays))[1]
    for rows in (slice(0, 1), slice(1, 6), slice(6, 8))
  ]
  assert metrics.compute(metrics.merge(*parts)) == pytest.approx(
    metrics.compute(whole), rel=1e-5
  )


def test_extreme_ratios_are_finite():
  logprobs, old = jnp.array([[0.0, -300.0]]), jnp.array([[-300.0, 0.0]])
  mask = jnp.ones((1, 2), bool)
  for advantage in (-3.0, 3.0):
    adv = jnp.full((1, 2), advantage)
    loss = lambda x: jnp.sum(policy_losses.ppo(x, old, adv, mask)[0])  # noqa: B023
    value, gradient = jax.value_and_grad(loss)(logprobs)
    assert np.isfinite(value) and np.all(np.isfinite(gradient))


def test_reinforce_by_hand():
  loss, _ = policy_losses.reinforce(
    jnp.array([[-0.5, -2.0]]),
    jnp.array([[-0.5, -1.0]]),
    jnp.array([[3.0, -1.0]]),
    jnp.ones((1, 2), bool),
  )
  np.testing.assert_allclose(loss, [[1.5, -2.0]], rtol=1e-6)


def test_gradients_against_finite_differences():
  # Ratios: held, free, held, free, beyond the dual clip, free; none at a kink.
  ratios = [1.5, 1.1, 0.5, 0.5, 4.0, 1.5]
  advantages = [1.0, -1.0, -1.0, 1.0, -2.0, -1.0]
  with jax.enable_x64(True):
    new = jnp.log(jnp.array([ratios], jnp.float64))
    advantages = jnp.array([advantages], jnp.float64)
    old = jnp.zeros_like(new)
    mask = jnp.ones(new.shape, bool)
    for name, options in (('ppo', {'dual_clip': 3.0}), ('reinforce', {})):
      loss = policy_losses.loss(name)
      test_util.check_grads(
        lambda x: loss(x, old, advantages, mask, **options)[0],  # noqa: B023
        (new,),
        order=1,
        modes=['rev'],
        eps=1e-6,
        rtol=1e-7,
        atol=1e-7,
      )


def test_clips_may_be_traced():
  one = jnp.ones((1, 1))
  loss = jax.jit(
    lambda clip: policy_losses.ppo(one, 0 * one, one, one, clip_high=clip)[0]
  )
  np.testing.assert_allclose(loss(0.2), [[-1.2]], rtol=1e-6)
  np.testing.assert_allclose(loss(0.5), [[-1.5]], rtol=1e-6)


def test_errors():
  one = jnp.ones((1, 1))
  with pytest.raises(ValueError, match="'pppo'.*'ppo'"):
    policy_losses.loss('pppo')
  for options in (
    {'clip_low': -0.1},
    {'clip_low': 1.1},
    {'clip_high': -0.1},
    {'dual_clip': 1.0},
  ):
    with pytest.raises(ValueError, match='it must be'):
      policy_losses.ppo(one, one, one, one, **options)
  with pytest.raises(TypeError):
    policy_losses.reinforce(one, one, one, one, clip_low=0.2)
  with pytest.raises(AssertionError):
    policy_losses.ppo(one, one, jnp.ones(1), one)
