"""Tests of advantage estimators."""

import jax
from jax import test_util
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import masked
from rlhf_jax import metrics
from rlhf_jax.algorithms import advantages

TOLERANCE = {'rtol': 1e-5, 'atol': 1e-6}


def _gae_by_hand(rewards, values, mask, gamma, lam, bootstrap):
  """The textbook recursion, sequence by sequence, actions only."""
  result = np.zeros(mask.shape)
  for n in range(len(mask)):
    next_value, next_advantage = bootstrap[n], 0.0
    for t in reversed(np.flatnonzero(mask[n])):
      delta = rewards[n, t] + gamma * next_value - values[n, t]
      next_advantage = delta + gamma * lam * next_advantage
      next_value = values[n, t]
      result[n, t] = next_advantage
  return result


def test_gae_by_hand():
  # One prompt token, actions at 1, 2, 4 with a tool's token between.
  # gamma 1/2, lambda 1/2, bootstrap 4:
  #   delta_4 = 1 + 4/2 - 2 = 1      A_4 = 1          R_4 = 3
  #   delta_2 = 0 + 2/2 - 4 = -3     A_2 = -3 + 1/4   R_2 = 1.25
  #   delta_1 = 3 + 4/2 - 1 = 4      A_1 = 4 - 2.75/4 R_1 = 4.3125
  nan = np.nan
  got, returns = advantages.gae(
    jnp.array([[nan, 3.0, 0.0, nan, 1.0, nan]]),
    jnp.array([[nan, 1.0, 4.0, nan, 2.0, nan]]),
    jnp.array([[0, 1, 1, 0, 1, 0]], bool),
    gamma=0.5,
    lam=0.5,
    bootstrap_values=jnp.array([4.0]),
  )
  np.testing.assert_array_equal(got, [[0, 3.3125, -2.75, 0, 1, 0]])
  np.testing.assert_array_equal(returns, [[0, 4.3125, 1.25, 0, 3, 0]])


@pytest.mark.parametrize('gamma, lam', [(1.0, 1.0), (1.0, 0.95), (0.99, 0.95)])
def test_gae_against_verl(oracle, gamma, lam):
  inputs = oracle['inputs']
  expected = oracle['advantages'][f'gae_g{gamma}_l{lam}']
  mask = inputs['mask']
  got, returns = advantages.gae(
    inputs['rewards'], inputs['values'], mask, gamma=gamma, lam=lam
  )
  # verl whitens inside, and leaves numbers at masked places (here 0).
  white = masked.whiten(got, mask)
  np.testing.assert_allclose(
    white, np.where(mask, expected['adv'], 0), **TOLERANCE
  )
  np.testing.assert_allclose(
    returns, np.where(mask, expected['ret'], 0), **TOLERANCE
  )


def test_gae_against_the_textbook():
  generator = np.random.default_rng(0)
  rewards, values = generator.normal(size=(2, 5, 9))
  mask = generator.random((5, 9)) < 0.6
  mask[3] = False
  bootstrap = generator.normal(size=5)
  with jax.enable_x64(True):
    got, returns = advantages.gae(
      jnp.asarray(rewards),
      jnp.asarray(values),
      mask,
      gamma=0.9,
      lam=0.8,
      bootstrap_values=jnp.asarray(bootstrap),
    )
    assert got.dtype == returns.dtype == jnp.float64
  expected = _gae_by_hand(rewards, values, mask, 0.9, 0.8, bootstrap)
  np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)
  np.testing.assert_allclose(
    returns, np.where(mask, expected + values, 0), rtol=1e-12, atol=1e-12
  )


def test_gae_ignores_padding_and_gaps(oracle):
  """Wider padding, prompt tokens and a gap change no advantage."""
  inputs = oracle['inputs']
  arrays = [inputs['rewards'], inputs['values'], inputs['mask']]
  gae = jax.jit(lambda *x: advantages.gae(*x, gamma=0.9, lam=0.9)[0])
  plain = gae(*arrays)
  # New columns at 0, between 2 and 3, and at the end, with NaN inside.
  places = [0, 3, 7, 7]
  wide = gae(
    *(
      np.insert(x, places, False if x.dtype == bool else np.nan, axis=1)
      for x in arrays
    )
  )
  np.testing.assert_array_equal(np.insert(plain, places, 0, axis=1), wide)


def test_gae_limits(oracle):
  inputs = oracle['inputs']
  rewards, mask = inputs['rewards'], inputs['mask']
  # lambda = gamma = 1: returns are the rewards to go, whatever the critic says.
  _, returns = advantages.gae(rewards, inputs['values'], mask, gamma=1, lam=1)
  to_go = np.cumsum(np.where(mask, rewards, 0)[:, ::-1], axis=1)[:, ::-1]
  np.testing.assert_allclose(returns, np.where(mask, to_go, 0), **TOLERANCE)
  # The value of a cut sequence is credited to all its actions.
  _, cut = advantages.gae(
    rewards,
    inputs['values'],
    mask,
    gamma=1,
    lam=1,
    bootstrap_values=jnp.full(8, 0.5),
  )
  np.testing.assert_allclose(cut, np.where(mask, to_go + 0.5, 0), **TOLERANCE)


def _scores(oracle):
  return jnp.sum(jnp.asarray(oracle['inputs']['rewards']), axis=1)


def _check_group_estimator(got, expected, oracle, verl_singleton):
  mask, group = oracle['inputs']['mask'], oracle['inputs']['group']
  advantage, returns = got
  alone = group == 2  # prompt c has a single answer, of score 0.3
  np.testing.assert_allclose(
    advantage[~alone], np.asarray(expected['adv'])[~alone], **TOLERANCE
  )
  np.testing.assert_array_equal(advantage, returns)
  np.testing.assert_array_equal(np.where(mask, 0, advantage), np.zeros((8, 7)))
  # On purpose: a group of one gives 0 here, its raw score in verl.
  np.testing.assert_array_equal(advantage[alone], np.zeros((1, 7)))
  assert expected['adv'][5][0] == pytest.approx(verl_singleton)


@pytest.mark.parametrize('normalize', [True, False])
def test_grpo_against_verl(oracle, normalize):
  got = advantages.grpo(
    _scores(oracle),
    oracle['inputs']['group'],
    oracle['inputs']['mask'],
    normalize_std=normalize,
  )
  expected = oracle['advantages'][f'grpo_std{normalize}']
  _check_group_estimator(got, expected, oracle, verl_singleton=0.3)


def test_rloo_against_verl(oracle):
  got = advantages.rloo(
    _scores(oracle), oracle['inputs']['group'], oracle['inputs']['mask']
  )
  expected = oracle['advantages']['rloo']
  _check_group_estimator(got, expected, oracle, verl_singleton=0.3)


OPTIONS = ('normalize_std', 'epsilon')
GRPO = jax.jit(advantages.grpo, static_argnames=OPTIONS)
RLOO = jax.jit(advantages.rloo)
BOTH = (GRPO, RLOO)


def _per_sequence(estimator, scores, group, mask=None, **options):
  mask = np.ones((len(scores), 2), bool) if mask is None else mask
  got, _ = estimator(
    jnp.asarray(scores, jnp.float32), jnp.asarray(group), mask, **options
  )
  np.testing.assert_array_equal(got[:, 0], got[:, 1])
  return np.asarray(got[:, 0])


def test_group_estimators_by_hand():
  # Groups (0, 1, 5) and (2, 4): means 2 and 3.
  scores, group = [0.0, 2.0, 1.0, 4.0, 5.0], [7, -3, 7, -3, 7]
  grpo = _per_sequence(GRPO, scores, group, normalize_std=False)
  np.testing.assert_allclose(grpo, [-2, -1, -1, 1, 3], rtol=1e-6)
  # Variances (4 + 1 + 9) / 2 = 7 and (1 + 1) / 1 = 2.
  grpo = _per_sequence(GRPO, scores, group, epsilon=0.0)
  expected = np.array([-2, -1, -1, 1, 3]) / np.sqrt([7, 2, 7, 2, 7])
  np.testing.assert_allclose(grpo, expected, rtol=1e-6)
  # Means of the others: 3, 4, 5/2, 2, 1/2.
  rloo = _per_sequence(RLOO, scores, group)
  np.testing.assert_allclose(rloo, [-3, -2, -1.5, 2, 4.5], rtol=1e-6)


@pytest.mark.parametrize('estimator', BOTH, ids=['grpo', 'rloo'])
@pytest.mark.parametrize('score', [0.35, 0.1, 1e7, -2.3])
def test_equal_scores_are_exactly_zero(estimator, score):
  got = _per_sequence(estimator, [score] * 7, [0] * 7)
  np.testing.assert_array_equal(got, np.zeros(7))
  # So are scores that differ by rounding only, not +-1.
  other = np.nextafter(np.float32(score), np.float32(np.inf))
  got = _per_sequence(estimator, [score, other], [0, 0])
  np.testing.assert_array_equal(got, np.zeros(2))


def test_tiny_deviation_is_not_amplified():
  # The outlier of n values is (n - 1) / sqrt(n) deviations away: 2.4749.
  got = _per_sequence(GRPO, [0.35] * 7 + [0.36], [0] * 8)
  np.testing.assert_allclose(got[-1], 7 / 8**0.5, rtol=1e-3)
  np.testing.assert_allclose(got[:-1], np.full(7, -1 / 8**0.5), rtol=1e-3)


@pytest.mark.parametrize('estimator', BOTH, ids=['grpo', 'rloo'])
def test_rejected_and_inapplicable_sequences_leave_their_group(estimator):
  scores = [0.0, 1.0, 3.0, 100.0, np.nan, np.inf]
  mask = np.ones((6, 2), bool)
  mask[3] = False
  got = _per_sequence(estimator, scores, [0] * 6, mask)
  expected = _per_sequence(estimator, scores[:3], [0] * 3)
  np.testing.assert_allclose(got, [*expected, 0, 0, 0], rtol=1e-6)


@pytest.mark.parametrize('estimator', BOTH, ids=['grpo', 'rloo'])
def test_rejected_token_leaves_its_group_intact(estimator):
  mask = np.array([[1, 1, 1], [1, 0, 1], [0, 0, 0]], bool)
  scores = jnp.array([0.0, 1.0, 5.0])
  got, _ = estimator(scores, jnp.zeros(3, jnp.int32), mask)
  value = estimator(scores[:2], jnp.zeros(2, jnp.int32), mask[:2])[0][0, 0]
  np.testing.assert_allclose(got, mask * [[value], [-value], [0]], rtol=1e-6)


@pytest.mark.parametrize('estimator', BOTH, ids=['grpo', 'rloo'])
def test_everything_masked(estimator):
  got = _per_sequence(estimator, [1.0, 2.0], [0, 0], np.zeros((2, 2), bool))
  np.testing.assert_array_equal(got, np.zeros(2))


@pytest.mark.parametrize('estimator', BOTH, ids=['grpo', 'rloo'])
def test_order_of_sequences_does_not_matter(oracle, estimator):
  scores, group = np.asarray(_scores(oracle)), oracle['inputs']['group']
  order = np.random.default_rng(1).permutation(8)
  plain = _per_sequence(estimator, scores, group)
  mixed = _per_sequence(estimator, scores[order], 41 - group[order])
  np.testing.assert_allclose(plain[order], mixed, rtol=1e-6)


def test_group_statistics():
  statistics = advantages.group_statistics(
    jnp.array([1.0, 4.0, np.nan, 3.0]),
    jnp.array([0, 1, 0, 0]),
    jnp.ones(4, bool),
  )
  np.testing.assert_array_equal(statistics.valid, [True, True, False, True])
  np.testing.assert_array_equal(statistics.count, [2, 1, 2, 2])
  np.testing.assert_array_equal(statistics.mean, [2, 4, 2, 2])
  np.testing.assert_allclose(statistics.std, np.sqrt([2, 0, 2, 2]), rtol=1e-6)
  np.testing.assert_array_equal(statistics.centred, [-1, 0, 0, 1])


def test_share_of_groups_without_deviation():
  # Groups: equal; different; alone (does not count); equal but for a NaN.
  scores = jnp.array([1.0, 1.0, 1.0, 0.0, 2.0, 5.0, 3.0, 3.0, np.nan])
  group = jnp.array([0, 0, 0, 1, 1, 2, 3, 3, 3])
  values = metrics.compute(
    advantages.group_metrics(scores, group, np.ones((9, 1), bool))
  )
  assert values == {'training/frac_reward_zero_std': pytest.approx(2 / 3)}
  alone = advantages.group_metrics(scores, jnp.arange(9), np.ones((9, 1), bool))
  assert metrics.compute(alone) == {}


def test_token_rewards():
  mask = np.array(
    [[0, 1, 1, 0, 1, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]], bool
  )
  scores = jnp.array([0.7, np.nan, 5.0])
  # The score sits on the last action, 0.7 arrives as 0.7.
  expected = np.zeros((3, 6), np.float32)
  expected[0, 4] = 0.7
  np.testing.assert_array_equal(
    advantages.token_rewards(scores, mask), expected
  )
  kl = jnp.where(mask, jnp.arange(6.0)[None, :], jnp.nan)
  expected -= 0.5 * np.where(mask, np.arange(6.0)[None, :], 0)
  np.testing.assert_allclose(
    advantages.token_rewards(scores, mask, kl=kl, kl_coef=0.5),
    expected,
    rtol=1e-6,
  )


def test_integer_scores_stay_fractions():
  got = _per_sequence(RLOO, [1, 0, 0], [0, 0, 0])
  np.testing.assert_allclose(got, [1, -0.5, -0.5], rtol=1e-6)
  got, _ = advantages.rloo(
    jnp.array([1, 0, 0]), jnp.zeros(3, jnp.int32), np.ones((3, 1), bool)
  )
  np.testing.assert_allclose(got[:, 0], [1, -0.5, -0.5], rtol=1e-6)


def test_gae_gradients_against_finite_differences():
  mask = np.array([[0, 1, 0, 1], [1, 1, 0, 0]], bool)
  with jax.enable_x64(True):
    rewards = jnp.arange(8.0, dtype=jnp.float64).reshape(2, 4) / 3
    values = jnp.cos(rewards)
    test_util.check_grads(
      lambda r, v: advantages.gae(r, v, mask, gamma=0.9, lam=0.8),
      (rewards, values),
      order=1,
      modes=['rev'],
      eps=1e-6,
      rtol=1e-7,
      atol=1e-7,
    )


def test_names_and_shapes():
  with pytest.raises(ValueError, match="'gea'.*'gae'"):
    advantages.estimator('gea')
  for name, function in advantages.ESTIMATORS.items():
    assert advantages.estimator(name) is function
  assert advantages.CRITIC_ESTIMATORS <= set(advantages.ESTIMATORS)
  ones = jnp.ones((2, 3))
  with pytest.raises(AssertionError):
    advantages.gae(ones, ones[:, :2], ones, gamma=1, lam=1)
  with pytest.raises(AssertionError):
    advantages.gae(
      ones, ones, ones, gamma=1, lam=1, bootstrap_values=jnp.ones(3)
    )
  with pytest.raises(AssertionError):
    advantages.grpo(ones, jnp.ones(2), ones)
  with pytest.raises(AssertionError):
    advantages.token_rewards(jnp.ones(3), ones)
