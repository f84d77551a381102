"""Tests of advantage estimators."""

import inspect

import jax
from jax import test_util
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import masked
from rlhf_jax import metrics
from rlhf_jax.algorithms import advantages
from rlhf_jax.algorithms import groups

TOLERANCE = {'rtol': 1e-5, 'atol': 1e-6}

both_dtypes = pytest.mark.parametrize(
  'x64', [False, True], ids=['float32', 'float64']
)


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


@both_dtypes
@pytest.mark.parametrize('gamma, lam', [(1.0, 1.0), (1.0, 0.95), (0.99, 0.95)])
def test_gae_against_verl(oracle, gamma, lam, x64):
  expected = oracle['advantages'][f'gae_g{gamma}_l{lam}']
  with jax.enable_x64(x64):
    inputs = _inputs(oracle)
    mask = inputs['mask']
    gae = jax.jit(lambda *x: advantages.gae(*x, gamma=gamma, lam=lam))
    got, returns = gae(inputs['rewards'], inputs['values'], mask)
    # verl whitens inside, and leaves numbers at masked places (here 0).
    white = masked.whiten(got, mask)
    assert white.dtype == returns.dtype == _float(x64)
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


def _float(x64):
  return jnp.float64 if x64 else jnp.float32


def _inputs(oracle):
  """The oracle's inputs in the widest float that is enabled, and more."""
  x = dict(oracle['inputs'])
  x['scores'] = x['rewards'].sum(axis=1)
  # Two rewards per sequence, and the groups in which verl ran pass@k.
  x['components'] = np.stack([x['scores'], x['values'][:, 0]], axis=1)
  x['weights'] = np.array([1.0, 0.5], np.float32)
  x['pass_group'] = np.array([0, 0, 0, 1, 1, 3, 3, 3])
  dtype = _float(jax.config.jax_enable_x64)
  return {
    name: value.astype(dtype) if value.dtype == np.float32 else value
    for name, value in x.items()
  }


def _of_scores(function, group='group', **options):
  return jax.jit(
    lambda x: function(x['scores'], x[group], x['mask'], **options)
  )


def _of_tokens(function, importance=None):
  names = ('rewards', 'group', 'mask', 'old', 'sum_pi_sq')
  return jax.jit(
    lambda x: function(
      *(x[name] for name in names), importance=x.get(importance)
    )
  )


# Case of the oracle -> the same here, as a function of `_inputs`.
CASES = {
  'grpo_stdTrue': _of_scores(advantages.grpo),
  'grpo_stdFalse': _of_scores(advantages.grpo, normalize_std=False),
  'rloo': _of_scores(advantages.rloo),
  'opo': _of_scores(advantages.opo),
  'gpg': _of_scores(advantages.gpg),
  'grpo_passk_uid_aaabbddd': _of_scores(advantages.grpo_passk, 'pass_group'),
  'reinforce_plus_plus_baseline': _of_scores(
    advantages.reinforce_plus_plus_baseline
  ),
  'gdpo_single_reward': jax.jit(
    lambda x: advantages.gdpo(
      x['scores'][:, None], jnp.ones(1), x['group'], x['mask']
    )
  ),
  'reinforce_plus_plus_g0.99': jax.jit(
    lambda x: advantages.reinforce_plus_plus(
      x['rewards'], x['mask'], gamma=0.99
    )
  ),
  'remax': jax.jit(
    lambda x: advantages.remax(x['rewards'], x['reward_baselines'], x['mask'])
  ),
  'optimal_token_baseline': _of_tokens(advantages.optimal_token_baseline),
  'optimal_token_baseline_is': _of_tokens(
    advantages.optimal_token_baseline, 'is_weights'
  ),
  'tir_optimal_token_baseline': _of_tokens(
    advantages.multi_turn_optimal_token_baseline
  ),
  'tir_optimal_token_baseline_is': _of_tokens(
    advantages.multi_turn_optimal_token_baseline, 'is_weights'
  ),
}
# verl computes these in two ways.
CASES['grpo_vectorized_stdTrue'] = CASES['grpo_stdTrue']
CASES['grpo_vectorized_stdFalse'] = CASES['grpo_stdFalse']
CASES['rloo_vectorized'] = CASES['rloo']

# On purpose: the sequence that answers its prompt alone has nothing to be
# compared with and gets 0.  verl gives it these, from its score of 0.3.
ALONE = 5
VERL_ALONE = {
  'grpo_stdTrue': 0.3 / (1 + 1e-6),
  'grpo_stdFalse': 0.3,
  'grpo_vectorized_stdTrue': 0.3,
  'grpo_vectorized_stdFalse': 0.3,
  'rloo': 0.3,
  'rloo_vectorized': 0.0,
  'opo': 0.3,
  'gpg': 0.3 * 8 / 7,
  'optimal_token_baseline': 0.3,
  'optimal_token_baseline_is': 0.3,
  'tir_optimal_token_baseline': 0.3,
  'tir_optimal_token_baseline_is': 0.3,
}
# Whitening spreads that over all numbers: a test of their own below.
WHITENED = ('reinforce_plus_plus_baseline', 'gdpo_single_reward')


@both_dtypes
@pytest.mark.parametrize('case', sorted(set(CASES) - set(WHITENED)))
def test_against_verl(oracle, case, x64):
  with jax.enable_x64(x64):
    x = _inputs(oracle)
    got, returns = CASES[case](x)
    assert got.dtype == returns.dtype == _float(x64)
  # verl leaves the rewards to go at masked places (here 0) in some of them.
  expected = {
    name: np.where(x['mask'], value, 0)
    for name, value in oracle['advantages'][case].items()
  }
  if case in VERL_ALONE:
    verl = expected['adv'][ALONE, 0]
    assert verl == pytest.approx(VERL_ALONE[case], rel=1e-6)
    expected['adv'][ALONE] = 0
  np.testing.assert_allclose(got, expected['adv'], **TOLERANCE)
  np.testing.assert_allclose(
    returns, expected.get('ret', expected['adv']), **TOLERANCE
  )


def test_every_case_of_the_oracle_is_compared(oracle):
  gae = {name for name in oracle['advantages'] if name.startswith('gae_')}
  assert set(oracle['advantages']) == set(CASES) | gae and len(gae) == 3


# Ours of the sequence that is alone is -mean / std of the 32 actions:
#   5 x 1/2, 5 x -1/2, 4 x -3/2, 2 x 3/2, and 0: mean -3/32, square sum 16
#   5 x 1, 5 x -1, 4 x -1/sqrt 2, 2 x 1/sqrt 2, and 0: -sqrt 2 / 32, 13
@both_dtypes
@pytest.mark.parametrize(
  'case, before, verl_alone, alone',
  [
    (
      'reinforce_plus_plus_baseline',
      'grpo_stdFalse',
      0.537347,
      3 / 32 / ((16 - 9 / 32) / 31) ** 0.5,
    ),
    (
      'gdpo_single_reward',
      'grpo_stdTrue',
      0.51602,
      2**0.5 / 32 / ((13 - 2 / 32) / 31) ** 0.5,
    ),
  ],
)
def test_whitened_against_verl(oracle, case, before, verl_alone, alone, x64):
  """Before whitening, the sequence that is alone has 0.3 in verl and 0 here."""
  with jax.enable_x64(x64):
    x = _inputs(oracle)
    mask = x['mask']
    got, returns = CASES[case](x)
    assert got.dtype == _float(x64)
    raw, _ = CASES[before](x)
    np.testing.assert_allclose(got, masked.whiten(raw, mask), **TOLERANCE)
    np.testing.assert_array_equal(returns, got)
    raw = raw.at[ALONE, 0].set(0.3)
    got, verl = jax.device_get((got, masked.whiten(raw, mask)))
  np.testing.assert_allclose(
    verl, oracle['advantages'][case]['adv'], **TOLERANCE
  )
  np.testing.assert_allclose(verl[ALONE, 0], verl_alone, rtol=1e-5)
  np.testing.assert_allclose(got[ALONE, 0], alone, rtol=1e-5)


# One case of each estimator, and of each way through it.
EVERY = (
  'gae',
  'gdpo',
  'grpo_stdTrue',
  'rloo',
  'opo',
  'gpg',
  'grpo_passk_uid_aaabbddd',
  'reinforce_plus_plus_baseline',
  'reinforce_plus_plus_g0.99',
  'remax',
  'optimal_token_baseline_is',
  'tir_optimal_token_baseline_is',
)
RUN = CASES | {
  'gae': jax.jit(
    lambda x: advantages.gae(
      x['rewards'], x['values'], x['mask'], gamma=0.9, lam=0.8
    )
  ),
  'gdpo': jax.jit(
    lambda x: advantages.gdpo(
      x['components'], x['weights'], x['group'], x['mask']
    )
  ),
}


def _per_place(x):
  """Names of what has one number per token."""
  return [name for name in x if x[name].shape[1:] == x['mask'].shape[1:]]


@pytest.mark.parametrize('case', EVERY)
def test_masked_places_do_not_matter(oracle, case):
  x = _inputs(oracle)
  plain = RUN[case](x)
  poison = np.where(np.arange(7) % 3, np.nan, np.inf)[None, :]
  dirty = x | {
    name: np.where(x['mask'], x[name], poison).astype(x[name].dtype)
    for name in _per_place(x)
    if name != 'mask'
  }
  for got, expected in zip(RUN[case](dirty), plain):
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.where(x['mask'], 0, got), np.zeros((8, 7)))


@pytest.mark.parametrize('case', EVERY)
def test_without_actions_all_is_zero(oracle, case):
  x = _inputs(oracle)
  for got in RUN[case](x | {'mask': np.zeros((8, 7), bool)}):
    np.testing.assert_array_equal(got, np.zeros((8, 7)))


def _insert(array, places):
  """New columns before `places`, with what must not be looked at."""
  fill = False if array.dtype == bool else np.nan
  return np.insert(array, places, fill, axis=1)


@pytest.mark.parametrize('case', EVERY)
def test_prompts_gaps_and_padding_are_skipped(oracle, case):
  x = _inputs(oracle)
  places = [0, 3, 7, 7]
  wide = x | {name: _insert(x[name], places) for name in _per_place(x)}
  for got, expected in zip(RUN[case](wide), RUN[case](x)):
    np.testing.assert_allclose(
      got, np.insert(expected, places, 0, axis=1), **TOLERANCE
    )


# That one compares sequences place by place.
@pytest.mark.parametrize(
  'case', sorted(set(EVERY) - {'optimal_token_baseline_is'})
)
def test_gaps_need_not_be_at_the_same_place(oracle, case):
  """A tool speaks elsewhere, and longer, in every other sequence."""
  x = _inputs(oracle)
  places = [[0, 0, 0, 0], [1, 3, 3, 7], [2, 4, 5, 5], [7, 7, 7, 7]] * 2

  def insert(array):
    return np.concatenate(
      [_insert(row[None], where) for row, where in zip(array, places)]
    )

  wide = x | {name: insert(x[name]) for name in _per_place(x)}
  for got, expected in zip(RUN[case](wide), RUN[case](x)):
    np.testing.assert_allclose(
      np.asarray(got)[wide['mask']], expected[x['mask']], **TOLERANCE
    )


@pytest.mark.parametrize('case', EVERY)
def test_order_of_sequences_and_names_of_groups_do_not_matter(oracle, case):
  x = _inputs(oracle)
  order = np.random.default_rng(1).permutation(8)
  mixed = {
    name: value if name == 'weights' else value[order]
    for name, value in x.items()
  }
  for name in ('group', 'pass_group'):
    mixed[name] = 41 - mixed[name]
  for got, expected in zip(RUN[case](mixed), RUN[case](x)):
    np.testing.assert_allclose(got, expected[order], **TOLERANCE)


@pytest.mark.parametrize('case', sorted(set(EVERY) - {'gae'}))
def test_a_sequence_that_does_not_count_is_as_if_absent(oracle, case):
  """Rejected, or scored by something that is not finite: 0 for it alone."""
  x = _inputs(oracle)
  row, others = 1, [0, 2, 3, 4, 5, 6, 7]
  absent = RUN[case](
    {name: v if name == 'weights' else v[others] for name, v in x.items()}
  )

  def replaced(**values):
    result = x | {name: x[name].copy() for name in values}
    for name, value in values.items():
      result[name][row] = value
    return result

  nan, inf = np.nan, np.inf
  rejected = replaced(mask=False, scores=99.0, components=99.0, rewards=99.0)
  unknown = replaced(scores=nan, components=nan, rewards=nan)
  infinite = replaced(scores=-inf, components=inf, rewards=inf)
  for inputs in (rejected, unknown, infinite):
    for got, expected in zip(RUN[case](inputs), absent):
      np.testing.assert_allclose(np.asarray(got)[others], expected, **TOLERANCE)
      np.testing.assert_array_equal(got[row], np.zeros(7))


OPTIONS = ('normalize_std', 'epsilon')
GRPO = jax.jit(advantages.grpo, static_argnames=OPTIONS)
RLOO = jax.jit(advantages.rloo)
BASELINE = jax.jit(advantages.reinforce_plus_plus_baseline)
OPO = jax.jit(advantages.opo)
GPG = jax.jit(advantages.gpg)
PASSK = jax.jit(advantages.grpo_passk, static_argnames=OPTIONS)
GDPO = jax.jit(
  lambda scores, group, mask: advantages.gdpo(
    scores[:, None], jnp.ones(1), group, mask
  )
)
PER_SEQUENCE = {
  'grpo': GRPO,
  'rloo': RLOO,
  'reinforce_plus_plus_baseline': BASELINE,
  'opo': OPO,
  'gpg': GPG,
  'grpo_passk': PASSK,
  'gdpo': GDPO,
}
per_sequence = pytest.mark.parametrize(
  'estimator', PER_SEQUENCE.values(), ids=PER_SEQUENCE
)


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
  # Five sequences, four of which have a score: 5/4 of the distance.
  gpg = _per_sequence(GPG, scores, group)
  np.testing.assert_allclose(gpg, [-2.5, -1.25, -1.25, 1.25, 3.75], rtol=1e-6)
  # The distances sum to 0 and their squares to 16: deviation 2, but for the
  # second action of each sequence, which makes it sqrt(32 / 9).
  baseline = _per_sequence(BASELINE, scores, group)
  np.testing.assert_allclose(
    baseline, np.array([-2, -1, -1, 1, 3]) / (32 / 9) ** 0.5, rtol=1e-6
  )


def test_reinforce_plus_plus_by_hand():
  # gamma 1/2: G = 2 + 2/2, 0 + 4/2, 4 = 3, 2, 4; mean 3, variance 2/2 = 1.
  got, returns = advantages.reinforce_plus_plus(
    jnp.array([[9.0, 2.0, 0.0, 9.0, 4.0, 9.0]]),
    np.array([[0, 1, 1, 0, 1, 0]], bool),
    gamma=0.5,
  )
  np.testing.assert_array_equal(returns, [[0, 3, 2, 0, 4, 0]])
  np.testing.assert_allclose(got, [[0, 0, -1, 0, 1, 0]], rtol=1e-6)


def test_remax_by_hand():
  # Rewards to go 3, 2, 2, less what the greedy answer got.
  got, returns = advantages.remax(
    jnp.array([[9.0, 1.0, 0.0, 9.0, 2.0], [3.0, 0.0, 0.0, 0.0, 0.0]]),
    jnp.array([0.5, np.nan]),
    np.array([[0, 1, 1, 0, 1], [1, 1, 0, 0, 0]], bool),
  )
  np.testing.assert_array_equal(returns, [[0, 3, 2, 0, 2], [0] * 5])
  np.testing.assert_array_equal(got, [[0, 2.5, 1.5, 0, 1.5], [0] * 5])


def test_opo_by_hand():
  # Scores 0, 1, 5 of lengths 1, 2, 3: baseline 17/6.
  # Scores 2, 4 of lengths 3, 1: baseline 10/4.
  lengths = np.array([1, 3, 2, 1, 3])
  mask = np.arange(3)[None, :] < lengths[:, None]
  got, _ = OPO(
    jnp.array([0.0, 2.0, 1.0, 4.0, 5.0]), jnp.array([7, -3, 7, -3, 7]), mask
  )
  expected = np.array([-17 / 6, -0.5, -11 / 6, 1.5, 13 / 6])
  np.testing.assert_allclose(got, mask * expected[:, None], rtol=1e-6)


def test_grpo_passk_by_hand():
  # Groups (0, 1, 5), (2, 4), (3, 3): the best has 4, 2, 0 more than the next.
  scores = [0.0, 2.0, 1.0, 4.0, 5.0, 3.0, 3.0]
  group = [7, -3, 7, -3, 7, 0, 0]
  got = _per_sequence(PASSK, scores, group, normalize_std=False)
  np.testing.assert_array_equal(got, [0, 0, 0, 2, 4, 0, 0])
  # Variances 7 and 2, as above.
  got = _per_sequence(PASSK, scores, group, epsilon=0.0)
  np.testing.assert_allclose(got[[4, 3]], [4 / 7**0.5, 2**0.5], rtol=1e-6)
  # The best of negative scores, and two that share the best.
  got = _per_sequence(PASSK, [-5, -2, -9, 1, 1, 0, -9], [0, 0, 0, 1, 1, 1, 2])
  assert got[1] > 0
  np.testing.assert_array_equal(np.delete(got, 1), np.zeros(6))


def test_gdpo_by_hand():
  # Two rewards of weights 3 and 1.  In the first group (0, 2) and (5, 3), in
  # the second (1, 1), which is no deviation, and (0, 4).  Normalised by their
  # groups, in units of 1 / sqrt 2, and summed:
  #   -3 + 1 = -2,   3 - 1 = 2,   0 - 1 = -1,   0 + 1 = 1
  # Mean 0, variance (4 + 4 + 1 + 1) / 2 / 3 = 5/3: divided by its root,
  #   2 / sqrt 2 / sqrt(5/3) = sqrt(6/5), and half of it.
  got, _ = jax.jit(advantages.gdpo, static_argnames='epsilon')(
    jnp.array([[0.0, 5.0], [2.0, 3.0], [1.0, 0.0], [1.0, 4.0]]),
    jnp.array([3.0, 1.0]),
    jnp.array([0, 0, 1, 1]),
    np.ones((4, 1), bool),
    epsilon=0.0,
  )
  expected = np.sqrt(6 / 5) * np.array([-1, 1, -0.5, 0.5])
  np.testing.assert_allclose(got[:, 0], expected, rtol=1e-6)


def test_gdpo_reward_that_does_not_apply():
  # Reward 0 is unknown for sequence 2: its group is (0, 2), as without it, and
  # sequence 2 has reward 1 only.  For sequence 3 neither is known.
  nan = np.nan
  rewards = jnp.array([[0.0, 1.0], [2.0, 1.0], [nan, 4.0], [nan, nan]])
  mask = np.ones((4, 1), bool)
  got, _ = jax.jit(advantages.gdpo, static_argnames='epsilon')(
    rewards, jnp.ones(2), jnp.zeros(4, jnp.int32), mask, epsilon=0.0
  )
  # (-1, 1, 0) / sqrt 2 and (-1, -1, 2) / sqrt 3; the sum is whitened.
  total = np.array([-1, 1, 0]) / 2**0.5 + np.array([-1, -1, 2]) / 3**0.5
  expected = (total - total.mean()) / total.std(ddof=1)
  np.testing.assert_allclose(got[:, 0], [*expected, 0], rtol=1e-5)


def _token_baseline_case():
  """Two answers, of two and three actions, behind a prompt of one token."""
  half, quarter = np.log(0.5), np.log(0.25)
  nan = np.nan
  return {
    'rewards': np.array([[nan, 0, 3, nan], [nan, 0, 0, 6]], np.float32),
    'group': np.array([4, 4]),
    'mask': np.array([[0, 1, 1, 0], [0, 1, 1, 1]], bool),
    'old': np.array(
      [[nan, half, half, nan], [nan, quarter, quarter, quarter]], np.float32
    ),
    'sum_pi_sq': np.full((2, 4), 0.5, np.float32),
    'is_weights': np.array([[nan, 2, 1, nan], [nan, 1, 1, 1]], np.float32),
  }


def test_optimal_token_baseline_by_hand():
  # w = 1 - 2/2 + 1/2 = 1/2, so W = 1/2, 1; and 1 - 2/4 + 1/2 = 1: W = 1, 2, 3.
  #   b_1 = (3/2 + 6 1) / (3/2) = 5    b_2 = (3 1 + 6 2) / 3 = 5    b_3 = 0
  x = _token_baseline_case()
  got, returns = RUN['optimal_token_baseline'](x)
  np.testing.assert_allclose(got, [[0, -2, -2, 0], [0, 1, 1, 6]], rtol=1e-6)
  np.testing.assert_array_equal(returns, [[0, 3, 3, 0], [0, 6, 6, 6]])
  # Importance 2, 1 makes w = 2, 1/2 of the first sequence, and W = 2, 5/2:
  #   b_1 = (3 2 + 6 1) / 3 = 4    b_2 = (3 5/2 + 6 2) / (9/2) = 13/3
  got, _ = RUN['optimal_token_baseline_is'](x)
  np.testing.assert_allclose(
    got, [[0, -1, -4 / 3, 0], [0, 2, 5 / 3, 6]], rtol=1e-6
  )


def test_optimal_token_baseline_across_turns():
  # A tool speaks after the first action of the first answer, so that its second
  # has the place of the other's third.  Compared place by place:
  #   b_1 = 5    b_2 = 6, of one alone    b_3: 0 for the longer, which has no
  #   equal to its third action, and (3 1 + 6 3) / 4 = 21/4 for the shorter
  x = _token_baseline_case()
  order = [0, 1, 3, 2]
  moved = x | {name: x[name].copy() for name in _per_place(x)}
  for name in _per_place(x):
    moved[name][0] = x[name][0, order]
  got, _ = RUN['optimal_token_baseline'](moved)
  np.testing.assert_allclose(
    got, [[0, -2, 0, -2.25], [0, 1, 0, 6]], rtol=1e-6, atol=1e-6
  )
  # Compared action by action, the gap changes nothing.
  got, returns = RUN['tir_optimal_token_baseline'](moved)
  np.testing.assert_allclose(got, [[0, -2, 0, -2], [0, 1, 1, 6]], rtol=1e-6)
  np.testing.assert_array_equal(returns, [[0, 3, 0, 3], [0, 6, 6, 6]])


TOKEN_BASELINES = ('optimal_token_baseline', 'tir_optimal_token_baseline')


@pytest.mark.parametrize('case', TOKEN_BASELINES)
def test_optimal_token_baseline_of_equal_scores(oracle, case):
  x = _inputs(oracle)
  x['mask'] = np.tile(np.array([1, 1, 0, 1, 1, 0, 0], bool), (8, 1))
  for score in (0.35, 0.1, 1e7, -2.3):
    x['rewards'] = np.zeros((8, 7), np.float32)
    x['rewards'][:, 4] = score
    got, _ = RUN[case](x)
    np.testing.assert_array_equal(got, np.zeros((8, 7)))


@pytest.mark.parametrize('case', TOKEN_BASELINES)
def test_optimal_token_baseline_of_a_certain_policy(oracle, case):
  x = _inputs(oracle)
  x['mask'] = np.tile(np.array([1, 1, 0, 1, 1, 0, 0], bool), (8, 1))
  x['old'] = np.zeros((8, 7), np.float32)
  x['group'] = np.arange(8) // 2
  x['rewards'] = np.zeros((8, 7), np.float32)
  x['rewards'][::2, 4] = 1.0
  # All W vanish: the baseline is the mean.
  x['sum_pi_sq'] = np.ones((8, 7), np.float32)
  got, _ = RUN[case](x)
  expected = np.where(np.arange(8) % 2, -0.5, 0.5)[:, None] * x['mask']
  np.testing.assert_allclose(got, expected, rtol=1e-6)
  # Rounding makes them about 1e-7 and -1e-7: no division by their sum.
  rounding = np.float32(1e-7) * np.where(np.arange(8) % 2, 1, -1)
  x['sum_pi_sq'] = x['sum_pi_sq'] + rounding.astype(np.float32)[:, None]
  got, _ = RUN[case](x)
  assert np.abs(got).max() <= 1.0


@per_sequence
@pytest.mark.parametrize('score', [0.35, 0.1, 1e7, -2.3])
def test_equal_scores_are_exactly_zero(estimator, score):
  got = _per_sequence(estimator, [score] * 7, [0] * 7)
  np.testing.assert_array_equal(got, np.zeros(7))
  # So are scores that differ by rounding only, not +-1.
  other = np.nextafter(np.float32(score), np.float32(np.inf))
  got = _per_sequence(estimator, [score, other], [0, 0])
  np.testing.assert_array_equal(got, np.zeros(2))


@per_sequence
def test_groups_of_one_are_zero(estimator):
  got = _per_sequence(estimator, [1.0, 2.0, -3.0, 0.0], [3, 5, 0, 1])
  np.testing.assert_array_equal(got, np.zeros(4))


@per_sequence
def test_tiny_deviation_is_not_amplified(estimator):
  # At most 0.01 sqrt 8 / 0.01, the distance to the others in deviations.
  got = _per_sequence(estimator, [0.35] * 7 + [0.36], [0] * 8)
  assert np.abs(got).max() < 8**0.5 + 1e-3
  if estimator is GRPO:
    # The outlier of n values is (n - 1) / sqrt(n) deviations away: 2.4749.
    np.testing.assert_allclose(got[-1], 7 / 8**0.5, rtol=1e-3)
    np.testing.assert_allclose(got[:-1], np.full(7, -1 / 8**0.5), rtol=1e-3)


@per_sequence
def test_rejected_and_inapplicable_sequences_leave_their_group(estimator):
  scores = [0.0, 1.0, 3.0, 100.0, np.nan, np.inf]
  mask = np.ones((6, 2), bool)
  mask[3] = False
  got = _per_sequence(estimator, scores, [0] * 6, mask)
  expected = _per_sequence(estimator, scores[:3], [0] * 3)
  np.testing.assert_allclose(got, [*expected, 0, 0, 0], rtol=1e-6)


@pytest.mark.parametrize(
  'estimator', [GRPO, RLOO, GPG], ids=['grpo', 'rloo', 'gpg']
)
def test_rejected_token_leaves_its_group_intact(estimator):
  mask = np.array([[1, 1, 1], [1, 0, 1], [0, 0, 0]], bool)
  scores = jnp.array([0.0, 1.0, 5.0])
  got, _ = estimator(scores, jnp.zeros(3, jnp.int32), mask)
  value = estimator(scores[:2], jnp.zeros(2, jnp.int32), mask[:2])[0][0, 0]
  np.testing.assert_allclose(got, mask * [[value], [-value], [0]], rtol=1e-6)


def _random_step():
  """Groups of 5, 3, 2 and 2 sequences; of the last, one is rejected."""
  generator = np.random.default_rng(3)
  group = np.array([3, 0, 3, 1, 0, 3, 7, 1, 0, 3, 3, 7])
  mask = generator.random((12, 6)) < 0.7
  mask[11] = False
  old = -3 * generator.random((12, 6))
  x = {
    'group': group,
    'mask': mask,
    'scores': np.round(generator.normal(size=12), 2),
    'components': np.round(generator.normal(size=(12, 3)), 2),
    'weights': np.array([1.0, 0.5, -2.0]),
    'rewards': generator.normal(size=(12, 6)),
    'old': old,
    'sum_pi_sq': np.exp(2 * old) + 0.3 * generator.random((12, 6)),
    'is_weights': 2 * generator.random((12, 6)),
  }
  x['scores'][4] = np.nan
  x['components'][[0, 5], [1, 2]] = np.nan
  x['rewards'][4] = np.nan
  return x


def _members(group, valid):
  for number in np.unique(group):
    yield [n for n in range(len(group)) if group[n] == number and valid[n]]


def _opo_by_hand(x):
  length = x['mask'].sum(axis=1)
  result = np.zeros(12)
  for members in _members(x['group'], (length > 0) & np.isfinite(x['scores'])):
    if len(members) > 1:
      total = sum(length[n] for n in members)
      baseline = sum(length[n] * x['scores'][n] for n in members) / total
      for n in members:
        result[n] = x['scores'][n] - baseline
  return x['mask'] * result[:, None]


def _passk_by_hand(x):
  result = np.zeros(12)
  valid = x['mask'].any(axis=1) & np.isfinite(x['scores'])
  for members in _members(x['group'], valid):
    if len(members) > 1:
      scores = x['scores'][members]
      *_, second, best = np.argsort(scores)
      gap = scores[best] - scores[second]
      result[members[best]] = gap / (np.std(scores, ddof=1) + 1e-6)
  return x['mask'] * result[:, None]


def _gdpo_by_hand(x):
  result = np.zeros(12)
  for k, weight in enumerate(x['weights']):
    scores = x['components'][:, k]
    valid = x['mask'].any(axis=1) & np.isfinite(scores)
    for members in _members(x['group'], valid):
      if len(members) > 1:
        mean, std = scores[members].mean(), scores[members].std(ddof=1)
        result[members] += weight * (scores[members] - mean) / (std + 1e-6)
  tokens = np.array([result[n] for n, _ in zip(*np.nonzero(x['mask']))])
  white = (result - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
  return x['mask'] * white[:, None]


def _token_baseline_by_hand(x, importance, by_action):
  """The paper's sums, group by group and place by place."""
  mask = x['mask'] & np.isfinite(x['rewards'])
  places = [list(np.flatnonzero(row)) for row in mask]
  result = np.zeros((12, 6))
  for members in _members(x['group'], mask.any(axis=1)):
    if len(members) < 2:
      continue
    to_go, energy = {}, {}
    for n in members:
      total = 0.0
      for t in places[n]:
        w = 1 - 2 * np.exp(x['old'][n, t]) + x['sum_pi_sq'][n, t]
        total += w * (x['is_weights'][n, t] ** 2 if importance else 1)
        energy[n, t] = total
        to_go[n, t] = sum(x['rewards'][n, s] for s in places[n] if s >= t)
    for n in members:
      longest_other = max(len(places[o]) for o in members if o != n)
      for i, t in enumerate(places[n]):
        peers = [
          (o, places[o][i] if by_action else t)
          for o in members
          if (i < len(places[o]) if by_action else t in places[o])
        ]
        above = sum(to_go[peer] * energy[peer] for peer in peers)
        baseline = above / sum(energy[peer] for peer in peers)
        if i >= longest_other:
          baseline = 0.0
        result[n, t] = to_go[n, t] - baseline
  return result


REFERENCES = {
  'opo': _opo_by_hand,
  'grpo_passk': _passk_by_hand,
  'gdpo': _gdpo_by_hand,
  'optimal_token_baseline': lambda x: _token_baseline_by_hand(x, False, False),
  'optimal_token_baseline_is': lambda x: _token_baseline_by_hand(
    x, True, False
  ),
  'tir_optimal_token_baseline': lambda x: _token_baseline_by_hand(
    x, False, True
  ),
  'tir_optimal_token_baseline_is': lambda x: _token_baseline_by_hand(
    x, True, True
  ),
}


@pytest.mark.parametrize('case', REFERENCES)
def test_against_loops(monkeypatch, case):
  """In float64, and in blocks of which the last is not full."""
  monkeypatch.setattr(groups, 'BLOCK', 5)
  run = RUN | {'grpo_passk': _of_scores(advantages.grpo_passk)}
  with jax.enable_x64(True):
    x = _random_step()
    got, _ = run[case](x)
    assert got.dtype == jnp.float64
  # 1e-8 is added to the sum of W, which is of order 1.
  np.testing.assert_allclose(got, REFERENCES[case](x), rtol=1e-7, atol=1e-7)


def test_share_of_groups_without_deviation():
  # Groups: equal; different; alone (does not count); equal but for a NaN.
  scores = jnp.array([1.0, 1.0, 1.0, 0.0, 2.0, 5.0, 3.0, 3.0, np.nan])
  group = jnp.array([0, 0, 0, 1, 1, 2, 3, 3, 3])
  group_metrics = jax.jit(advantages.group_metrics)
  values = metrics.compute(group_metrics(scores, group, np.ones((9, 1), bool)))
  assert values == {'training/frac_reward_zero_std': pytest.approx(2 / 3)}
  alone = group_metrics(scores, jnp.arange(9), np.ones((9, 1), bool))
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
  got, _ = RLOO(
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
  # The sets say what the arguments say.
  takes = {
    name: set(inspect.signature(function).parameters)
    for name, function in advantages.ESTIMATORS.items()
  }
  for argument, names in (
    ('values', advantages.CRITIC_ESTIMATORS),
    ('rewards', advantages.TOKEN_REWARD_ESTIMATORS | {'gdpo'}),
    ('group', advantages.GROUP_ESTIMATORS),
    ('sum_squares', advantages.SUM_SQUARES_ESTIMATORS),
  ):
    assert names == {name for name in takes if argument in takes[name]}
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
  with pytest.raises(AssertionError):
    advantages.reinforce_plus_plus(ones, ones[:, :2], gamma=1)
  with pytest.raises(AssertionError):
    advantages.remax(ones, jnp.ones(3), ones)
  with pytest.raises(AssertionError):
    advantages.gdpo(ones, jnp.ones(2), jnp.ones(2), ones)
  with pytest.raises(AssertionError):
    advantages.opo(jnp.ones(2), jnp.ones(2), jnp.ones((3, 3)))
  for function in (
    advantages.optimal_token_baseline,
    advantages.multi_turn_optimal_token_baseline,
  ):
    with pytest.raises(AssertionError):
      function(ones, jnp.ones(2), ones, ones, ones[:, :2])
    with pytest.raises(AssertionError):
      function(ones, jnp.ones(2), ones, ones, ones, importance=ones[:1])
