"""Tests of the correction between sampler and trainer."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import metrics
from rlhf_jax.algorithms import importance

CASES = [
  {'rollout_is': 'token', 'rollout_is_threshold': 2.0},
  {'rollout_is': 'sequence', 'rollout_is_threshold': 2.0},
  {'rollout_is': 'token', 'rollout_is_threshold': '0.8_1.25'},
  {
    'rollout_is': 'token',
    'rollout_is_threshold': 2.0,
    'rollout_is_batch_normalize': True,
  },
]
GAP = (
  'kl', 'k3_kl', 'chi2_token', 'chi2_seq', 'training_ppl', 'training_log_ppl',
  'rollout_ppl', 'rollout_log_ppl', 'log_ppl_diff', 'log_ppl_abs_diff',
  'log_ppl_diff_max', 'log_ppl_diff_min', 'ppl_ratio',
)  # fmt: skip


def _inputs(oracle, dtype=np.float32):
  inputs = oracle['inputs']
  trainer, sampler = (inputs[name].astype(dtype) for name in ('old', 'rollout'))
  return trainer, sampler, inputs['mask']


def _bounds(threshold):
  """verl's '0.8_1.25' is lower and upper; a number is upper."""
  numbers = [float(x) for x in str(threshold).split('_')]
  return numbers if len(numbers) == 2 else [None, *numbers]


def _compute(group):
  return {
    name.removeprefix(importance.PREFIX): value
    for name, value in metrics.compute(group).items()
  }


def _close(actual, expected):
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def _expected(case, name):
  return case['metrics'][f'rollout_corr/{name}']


def test_every_case_is_tested(oracle):
  settings = [json.loads(name) for name in oracle['rollout_correction']]
  assert len(settings) == 16
  rejections = [x for x in settings if 'rollout_rs' in x]
  assert [x for x in settings if x not in rejections] == CASES
  assert len(rejections) == 12


@pytest.mark.parametrize('wide', [False, True])
def test_weights_against_verl(oracle, wide):
  for settings in CASES:
    case = oracle['rollout_correction'][json.dumps(settings)]
    lower, upper = _bounds(settings['rollout_is_threshold'])
    options = {
      'level': settings['rollout_is'],
      'lower': lower,
      'upper': upper,
    }
    with jax.enable_x64(wide):
      inputs = _inputs(oracle, np.float64 if wide else np.float32)
      normalize = settings.get('rollout_is_batch_normalize', False)
      weights = importance.weights(*inputs, **options, normalize=normalize)
      assert weights.dtype == inputs[0].dtype
      statistics = _compute(importance.weight_metrics(*inputs, **options))
    _close(weights, case['w'])
    for name, number in statistics.items():
      if settings['rollout_is'] == 'sequence' and name == 'rollout_is_max':
        # On purpose: verl reports the largest weight before truncation for
        # sequences, after it for tokens; here it is always after.
        assert _expected(case, name) == pytest.approx(3.194458)
        assert number == 2.0
      else:
        _close(number, _expected(case, name))
    assert len(statistics) == 6
    if normalize:
      mean = _expected(case, 'rollout_is_batch_norm_factor')
      _close(statistics['rollout_is_mean'], mean)


@pytest.mark.parametrize('wide', [False, True])
def test_rejection_against_verl(oracle, wide):
  for name, case in oracle['rollout_correction'].items():
    settings = json.loads(name)
    if 'rollout_rs' not in settings:
      continue
    with jax.enable_x64(wide):
      inputs = _inputs(oracle, np.float64 if wide else np.float32)
      mask = kept = inputs[-1]
      names = settings['rollout_rs'].split(',')
      thresholds = str(settings['rollout_rs_threshold']).split(',')
      for name, threshold in zip(names, thresholds):
        level, statistic = name.replace('seq', 'sequence').rsplit('_', 1)
        low, high = _bounds(threshold)
        kept = kept & importance.keep(
          *inputs, statistic=statistic, level=level, low=low, high=high
        )
      statistics = _compute(importance.keep_metrics(mask, kept))
    np.testing.assert_array_equal(kept, case['mask'])
    assert len(statistics) == 2
    for name, number in statistics.items():
      _close(number, _expected(case, name))


@pytest.mark.parametrize('wide', [False, True])
def test_mismatch_against_verl(oracle, wide):
  case = next(iter(oracle['rollout_correction'].values()))
  with jax.enable_x64(wide):
    inputs = _inputs(oracle, np.float64 if wide else np.float32)
    statistics = _compute(importance.mismatch(*inputs))
  assert set(statistics) == set(GAP)
  for name, number in statistics.items():
    _close(number, _expected(case, name))


# Two sequences: token ratios 2, 1/2, 4 and 1/2; the last place is masked.
LN2 = math.log(2)
TRAINER = np.float32([[-LN2, -2 * LN2, -LN2], [-2 * LN2, np.nan, np.inf]])
SAMPLER = np.float32([[-2 * LN2, -LN2, -3 * LN2], [-LN2, -np.inf, np.nan]])
MASK = np.array([[True, True, True], [True, False, False]])
NONE = np.zeros_like(MASK)


def _weights(**options):
  return np.asarray(importance.weights(TRAINER, SAMPLER, MASK, **options))


def test_weights_by_hand():
  _close(_weights(upper=math.inf), [[2, 0.5, 4], [0.5, 0, 0]])
  _close(_weights(upper=3.0), [[2, 0.5, 3], [0.5, 0, 0]])
  _close(_weights(upper=3.0, lower=0.6), [[2, 0, 0], [0, 0, 0]])
  # Products 4 and 1/2.
  _close(_weights(upper=9.0, level='sequence'), [[4, 4, 4], [0.5, 0, 0]])
  _close(_weights(upper=3.0, level='sequence'), [[3, 3, 3], [0.5, 0, 0]])
  # Means: (2 + 0.5 + 3 + 0.5) / 4 = 1.5, and over sequences (3 + 0.5) / 2.
  _close(
    _weights(upper=3.0, normalize=True),
    np.array([[2, 0.5, 3], [0.5, 0, 0]]) / 1.5,
  )
  _close(
    _weights(upper=3.0, level='sequence', normalize=True),
    np.array([[3, 3, 3], [0.5, 0, 0]]) / 1.75,
  )
  # All zeroed: nothing to normalise by.
  _close(_weights(upper=1.1, lower=0.9, normalize=True), np.zeros((2, 3)))


def test_weights_of_equal_policies_are_one():
  for level in importance.WEIGHT_LEVELS:
    weights = importance.weights(
      TRAINER, TRAINER, MASK, level=level, upper=2.0, normalize=True
    )
    np.testing.assert_array_equal(weights, MASK)


def test_weights_have_no_gradient_and_are_finite():
  for level in importance.WEIGHT_LEVELS:
    total = lambda x: jnp.sum(
      importance.weights(x, SAMPLER, MASK, level=level, upper=9.0)  # noqa: B023
    )
    np.testing.assert_array_equal(jax.grad(total)(TRAINER), np.zeros((2, 3)))
  far = np.float32([[300.0, -300.0]])
  raw = importance.weights(far, 0 * far, far != 0, upper=math.inf)
  _close(raw, [[math.exp(20), math.exp(-20)]])


# Ratios of sampler to trainer: 1/2, 2, 1/4 and 2. k2 = 0.2402, 0.2402, 0.9609
# and 0.2402; k3 = 0.3069, 0.1931, 1.6137 and 0.1931.
KEEP_CASES = [
  ('k1', 'token', 0.4, 3.0, [[1, 1, 0], [1, 0, 0]]),
  ('k1', 'token', None, 3.0, [[1, 1, 0], [1, 0, 0]]),
  ('k1', 'token', 0.2, 1.9, [[1, 0, 1], [0, 0, 0]]),
  ('k1', 'sequence_sum', 0.3, 3.0, [[0, 0, 0], [1, 0, 0]]),  # 1/4, 2
  ('k1', 'sequence_mean', 0.6, 1.9, [[1, 1, 1], [0, 0, 0]]),  # 4^(-1/3), 2
  ('k2', 'token', None, 0.25, [[1, 1, 0], [1, 0, 0]]),
  ('k2', 'sequence_sum', None, 1.0, [[0, 0, 0], [1, 0, 0]]),
  ('k2', 'sequence_mean', None, 0.5, [[1, 1, 1], [1, 0, 0]]),  # 1.4413 / 3
  ('k2', 'sequence_max', None, 0.9, [[0, 0, 0], [1, 0, 0]]),
  ('k3', 'token', None, 0.2, [[0, 1, 0], [1, 0, 0]]),
  ('k3', 'sequence_mean', None, 0.71, [[1, 1, 1], [1, 0, 0]]),  # 2.1137 / 3
  ('k3', 'sequence_mean', None, 0.70, [[0, 0, 0], [1, 0, 0]]),
  ('k3', 'sequence_max', None, 1.6, [[0, 0, 0], [1, 0, 0]]),
]


@pytest.mark.parametrize('case', KEEP_CASES)
def test_keep_by_hand(case):
  statistic, level, low, high, expected = case
  kept = importance.keep(
    TRAINER, SAMPLER, MASK,
    statistic=statistic, level=level, low=low, high=high,
  )  # fmt: skip
  assert kept.dtype == bool
  np.testing.assert_array_equal(kept, expected)


def test_equal_policies_are_kept():
  for statistic in importance.STATISTICS:
    high = 1.0 if statistic == 'k1' else 0.0
    kept = importance.keep(
      TRAINER, TRAINER, MASK, statistic=statistic, high=high
    )
    np.testing.assert_array_equal(kept, MASK)


def test_metrics_by_hand():
  mismatch = _compute(importance.mismatch(TRAINER, SAMPLER, MASK))
  # k1 = -l: (-1 + 1 - 2 + 1) ln 2 / 4; squares of the weights 4 1/4 16 1/4.
  _close(mismatch['kl'], -LN2 / 4)
  _close(mismatch['chi2_token'], 20.5 / 4 - 1)
  _close(mismatch['chi2_seq'], (16 + 0.25) / 2 - 1)
  # Mean nats 4/3 ln 2 and 2 ln 2 of the trainer, 2 ln 2 and ln 2.
  _close(mismatch['training_log_ppl'], 5 / 3 * LN2)
  _close(mismatch['rollout_ppl'], (4 + 2) / 2)
  _close(mismatch['log_ppl_diff_max'], LN2)
  _close(mismatch['log_ppl_diff_min'], -2 / 3 * LN2)
  weights = _compute(
    importance.weight_metrics(TRAINER, SAMPLER, MASK, upper=3.0)
  )
  # 2 1/2 3 1/2: 36 / (4 (4 + 1/4 + 9 + 1/4)) = 36 / 54.
  _close(weights['rollout_is_eff_sample_size'], 2 / 3)
  _close(weights['rollout_is_ratio_fraction_high'], 1 / 4)
  # Below 1/3 by default: none.
  _close(weights['rollout_is_ratio_fraction_low'], 0)
  both = importance.weight_metrics(TRAINER, SAMPLER, MASK, upper=3.0, lower=0.6)
  _close(_compute(both)['rollout_is_ratio_fraction_low'], 1 / 2)
  _close([weights['rollout_is_min'], weights['rollout_is_max']], [0.5, 3])
  kept = np.array([[True, False, True], [True, False, False]])
  kept = _compute(importance.keep_metrics(MASK, kept))
  _close(kept['rollout_rs_masked_fraction'], 1 / 4)
  _close(kept['rollout_rs_seq_masked_fraction'], 1 / 2)


def test_rows_without_a_token_do_not_count():
  pad = lambda x: np.pad(x, ((0, 2), (0, 1)))
  inputs = TRAINER, SAMPLER, MASK
  padded = [pad(x) for x in inputs]
  for level in importance.WEIGHT_LEVELS:
    options = {'level': level, 'upper': 3.0}
    _close(
      importance.weights(*padded, normalize=True, **options),
      pad(_weights(normalize=True, **options)),
    )
    assert metrics.compute(
      importance.weight_metrics(*padded, **options)
    ) == pytest.approx(
      metrics.compute(importance.weight_metrics(*inputs, **options))
    )
  assert metrics.compute(importance.mismatch(*padded)) == pytest.approx(
    metrics.compute(importance.mismatch(*inputs))
  )


def test_everything_masked():
  for level in importance.WEIGHT_LEVELS:
    options = {'level': level, 'upper': 2.0}
    weights = importance.weights(
      TRAINER, SAMPLER, NONE, normalize=True, **options
    )
    np.testing.assert_array_equal(weights, np.zeros((2, 3)))
    statistics = importance.weight_metrics(TRAINER, SAMPLER, NONE, **options)
    assert metrics.compute(statistics) == {}
  for level in importance.KEEP_LEVELS:
    kept = importance.keep(
      TRAINER, SAMPLER, NONE, statistic='k2', level=level, high=1.0
    )
    np.testing.assert_array_equal(kept, NONE)
  assert metrics.compute(importance.mismatch(TRAINER, SAMPLER, NONE)) == {}
  assert metrics.compute(importance.keep_metrics(NONE, NONE)) == {}


def test_errors():
  inputs = TRAINER, SAMPLER, MASK
  for options, message in (
    ({'level': 'seq', 'upper': 2.0}, "'seq'.*'token', 'sequence'"),
    ({'upper': 0.0}, 'upper is 0.0: it must be more than 0'),
    ({'upper': 2.0, 'lower': -0.1}, 'lower is -0.1: it must be at least 0'),
    ({'upper': 0.5, 'lower': 0.5}, 'no weight lies between'),
  ):
    for function in (importance.weights, importance.weight_metrics):
      with pytest.raises(ValueError, match=message):
        function(*inputs, **options)
  for options, message in (
    ({'statistic': 'k4', 'high': 2.0}, "'k4'.*'k1', 'k2', 'k3'"),
    ({'level': 'sequence', 'high': 2.0}, "'sequence'.*'sequence_sum'"),
    ({'high': 0.9}, 'high is 0.9: it must be at least 1'),
    ({'high': 2.0, 'low': 1.1}, 'low is 1.1: it must be more than 0 and at'),
    ({'high': 2.0, 'low': 0.0}, 'low is 0.0'),
    ({'statistic': 'k2', 'high': -1.0}, 'high is -1.0: it must be at least 0'),
    ({'statistic': 'k3', 'high': 1.0, 'low': 0.5}, 'leave low out'),
    ({'level': 'sequence_max', 'high': 2.0}, "use 'k2' or 'k3'"),
  ):
    with pytest.raises(ValueError, match=message):
      importance.keep(*inputs, **options)
  with pytest.raises(AssertionError):
    importance.weights(TRAINER, SAMPLER[:1], MASK, upper=2.0)
