"""Tests of policy losses."""

import functools
import itertools
import math

import jax
from jax import test_util
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import masked
from rlhf_jax import metrics
from rlhf_jax import testing
from rlhf_jax import types
from rlhf_jax.algorithms import aggregation
from rlhf_jax.algorithms import policy_losses
from rlhf_jax.data import packing

MODES = ('token-mean', 'seq-mean-token-mean', 'seq-mean-token-sum')
LOSSES = sorted(policy_losses.LOSSES)
VERL = {name: name for name in LOSSES} | {'ppo': 'vanilla', 'reinforce': 'gpg'}

# verl's metrics that mean something else here; see the tests beside them.
RENAMED = {('kl_cov', 'actor/ppo_kl'): 'actor/ppo_kl_abs'}
ELSEWHERE = {
  ('geo_mean', 'actor/pg_clipfrac'),
  ('geo_mean', 'actor/pg_clipfrac_lower'),
}


def _settings(config):
  """The settings with which verl's numbers were made, by our names."""
  clips = {
    'clip_low': config['clip_ratio_low'],
    'clip_high': config['clip_ratio_high'],
  }
  dppo = clips | {'max_ratio': config['clip_ratio_c']}
  return {
    'ppo': clips | {'dual_clip': config['clip_ratio_c']},
    'cispo': clips,
    'gspo': clips,
    'geo_mean': clips,
    'dppo_tv': dppo,
    'dppo_kl': dppo,
    'sapo': {
      'tau_positive': config['tau_pos'],
      'tau_negative': config['tau_neg'],
    },
    'dro': {'beta': config['dro_beta']},
    'kl_cov': {'coef': config['ppo_kl_coef']},
  }


def _loss(name, **options):
  """The loss of that name; without a selection nothing is selected."""

  def loss(logprobs, old, advantages, mask, *, selected=None, **more):
    if name in policy_losses.SELECTIONS:
      nothing = np.zeros(np.shape(mask), bool)
      more['selected'] = nothing if selected is None else selected
    return policy_losses.loss(name)(
      logprobs, old, advantages, mask, **options, **more
    )

  return loss


def _arrays(oracle, dtype=np.float32):
  arrays = [oracle['inputs'][key] for key in ('new', 'old', 'adv')]
  return [x.astype(dtype) for x in arrays] + [oracle['inputs']['mask']]


def _selected(name, arrays):
  """What a covariance loss selects of the oracle's inputs; else None."""
  if name == 'kl_cov':
    return policy_losses.SELECTIONS[name](*arrays, share=0.1)
  if name == 'clip_cov':
    return policy_losses.SELECTIONS[name](
      jax.random.key(0), *arrays, share=0.1, low=0.01
    )
  return None


def _total(loss, arrays, weights, factor=1.0, **more):
  """The aggregated loss, its gradient, the loss per token, the metrics."""
  logprobs, *others = arrays
  mask = others[-1]

  def total(logprobs):
    value, statistics = loss(logprobs, *others, **more)
    return aggregation.total(value * factor, weights, mask), (value, statistics)

  (number, (value, statistics)), gradient = jax.value_and_grad(
    total, has_aux=True
  )(logprobs)
  return number, gradient, value, metrics.compute(statistics)


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


@pytest.mark.parametrize('wide', [False, True])
@pytest.mark.parametrize('name', sorted(set(LOSSES) - {'clip_cov'}))
def test_against_verl(oracle, name, wide):
  """All of verl's cases but clip_cov, which is random there."""
  options = _settings(oracle['policy_loss']['config']).get(name, {})
  cases = oracle['policy_loss']['cases']
  with jax.enable_x64(wide):
    arrays = _arrays(oracle, np.float64 if wide else np.float32)
    logprobs, *others = arrays
    selected = _selected(name, arrays)
    value, pull, statistics = jax.vjp(
      lambda x: _loss(name, **options)(x, *others, selected=selected),
      logprobs,
      has_aux=True,
    )
    assert value.dtype == logprobs.dtype
    statistics = metrics.compute(statistics)
    for mode, weighted in itertools.product(MODES, (False, True)):
      if name == 'geo_mean' and weighted:
        continue  # see test_geo_mean_takes_weights_as_they_are
      expected = cases[f'{VERL[name]}|{mode}|is{weighted}']
      if name in ('sapo', 'geo_mean'):
        # verl ignores the mode for these two: six equal numbers.
        mode = policy_losses.PAPER_AGGREGATION[name]
      weights = aggregation.token_weights(arrays[-1], mode)
      weights = weights.astype(value.dtype)
      if weighted:
        weights *= oracle['inputs']['is_weights']
      number = aggregation.total(value, weights, arrays[-1])
      np.testing.assert_allclose(number, expected['loss'], 1e-5, 1e-6)
      np.testing.assert_allclose(pull(weights)[0], expected['grad'], 1e-5, 1e-6)
      for key, metric in expected['metrics'].items():
        if (name, key) not in ELSEWHERE:
          ours = statistics.get(RENAMED.get((name, key), key), 0.0)
          assert ours == pytest.approx(metric, rel=1e-5, abs=1e-6), key


def _call(name, arrays):
  selected = np.arange(arrays[-1].size).reshape(arrays[-1].shape) % 5 == 0
  weights = aggregation.token_weights(arrays[-1], 'token-mean')
  return _total(_loss(name), arrays, weights, selected=selected)


@pytest.mark.parametrize('name', LOSSES)
def test_first_update(oracle, name):
  """Before any step: ratio 1, no divergence, no clip, gradient -A weight."""
  _, old, advantages, mask = _arrays(oracle)
  weights = aggregation.token_weights(mask, 'token-mean')
  _, gradient, _, statistics = _total(
    _loss(name), (old, old, advantages, mask), weights
  )
  if name == 'geo_mean':  # one advantage per sequence: the mean
    advantages = masked.segment_mean(advantages, mask)
  np.testing.assert_allclose(
    gradient, np.where(mask, -advantages * weights, 0), rtol=1e-5, atol=1e-7
  )
  assert statistics['actor/ppo_kl'] == 0
  assert statistics['actor/ratio_max'] == statistics['actor/ratio_mean'] == 1
  assert statistics.get('actor/pg_clipfrac', 0) == 0


@pytest.mark.parametrize('name', LOSSES)
def test_own_logprobs_as_old(name):
  """`old = logprobs` needs no stop_gradient by the caller."""
  x = jnp.full((8, 7), -1.0)
  mask = np.ones((8, 7), bool)
  gradient = jax.grad(lambda x: jnp.sum(_loss(name)(x, x, x, mask)[0]))(x)
  np.testing.assert_allclose(gradient, np.ones((8, 7)), rtol=1e-6)


@pytest.mark.parametrize('name', LOSSES)
def test_masked_places_have_no_effect(oracle, name):
  *arrays, mask = _arrays(oracle)
  plain = _call(name, (*arrays, mask))
  for bad in (np.nan, np.inf, -np.inf):
    spoilt = _call(name, (*(np.where(mask, x, bad) for x in arrays), mask))
    jax.tree.map(np.testing.assert_array_equal, plain, spoilt)
  _, gradient, value, _ = plain
  np.testing.assert_array_equal(np.where(mask, 0, value), np.zeros((8, 7)))
  np.testing.assert_array_equal(np.where(mask, 0, gradient), np.zeros((8, 7)))


@pytest.mark.parametrize('name', LOSSES)
def test_everything_masked(name):
  x = np.full((8, 7), np.nan, np.float32)
  total, gradient, value, statistics = _call(name, (x, x, x, x > 0))
  assert total == 0
  np.testing.assert_array_equal(gradient, np.zeros((8, 7)))
  np.testing.assert_array_equal(value, np.zeros((8, 7)))
  assert statistics == {}


@pytest.mark.parametrize('name', LOSSES)
def test_packing_and_micro_batches_do_not_matter(oracle, name):
  """Packed behind a shared prefix, shuffled within rows, a row at a time."""
  # Two columns of prompt, so that no action is first or in the prefix.
  pad = lambda x: np.pad(x, ((0, 0), (2, 0)))
  with jax.enable_x64(True):
    arrays = [pad(x) for x in _arrays(oracle, np.float64)]
    mask = arrays[-1]
    weights = aggregation.token_weights(mask, 'seq-mean-token-mean')
    weights = np.asarray(weights)
    selected = np.asarray(_selected(name, arrays) if 'cov' in name else mask)
    everything = [*arrays, weights, selected]

    def step(arrays, segment_ids=None):
      *arrays, weights, selected = arrays
      more = {'selected': selected, 'segment_ids': segment_ids}
      number, gradient, *_ = _total(_loss(name), arrays, weights, **more)
      return np.asarray(number), np.asarray(gradient)

    number, gradient = step(everything)
    lengths = mask.shape[1] - np.argmax(mask[:, ::-1], axis=1)
    plan = packing.plan(lengths, mask.shape[1], 15, prefix_length=1)
    assert plan.segment_ids.min() == types.SHARED
    assert plan.segment_ids.max() > 1
    rows = [packing.pack(x, plan) for x in everything]
    packed, packed_gradient = step(rows, plan.segment_ids)
    order = np.random.default_rng(0).permutation(15)
    shuffled, shuffled_gradient = step(
      [x[:, order] for x in rows], plan.segment_ids[:, order]
    )
    parts = []
    for row in range(len(rows[0])):
      part = rows.copy()
      part[3] = rows[3] & (np.arange(len(rows[0])) == row)[:, None]
      parts.append(step(part, plan.segment_ids))
  close = functools.partial(
    testing.assert_norm_close, name='gradient_invariance_float64'
  )
  numbers = [packed, shuffled, sum(number for number, _ in parts)]
  np.testing.assert_allclose(numbers, float(number), rtol=1e-10)
  close(packing.unpack(packed_gradient, plan), gradient)
  close(shuffled_gradient, packed_gradient[:, order])
  close(sum(gradient for _, gradient in parts), packed_gradient)


@pytest.mark.parametrize('name', LOSSES)
def test_metrics_merge_over_micro_batches(oracle, name):
  *arrays, mask = _arrays(oracle)
  whole = _loss(name)(*arrays, mask)[1]
  micro_batch = np.array([0, 1, 1, 1, 1, 1, 2, 2])[:, None]
  parts = [
    _loss(name)(*arrays, mask & (micro_batch == number))[1]
    for number in range(3)
  ]
  assert metrics.compute(metrics.merge(*parts)) == pytest.approx(
    metrics.compute(whole), rel=1e-5, abs=1e-7
  )


@pytest.mark.parametrize('name', LOSSES)
@pytest.mark.parametrize('advantage', [-3.0, 3.0])
def test_extreme_ratios_are_finite(name, advantage):
  logprobs, old = jnp.array([[0.0, -300.0]]), jnp.array([[-300.0, 0.0]])
  mask = jnp.ones((1, 2), bool)
  arrays = logprobs, old, jnp.full((1, 2), advantage), mask
  number, gradient, _, statistics = _total(
    _loss(name), arrays, mask, selected=mask
  )
  finite = jax.tree.map(np.isfinite, (number, gradient, statistics))
  assert jax.tree.all(jax.tree.map(np.all, finite))


def test_far_tokens_are_still_pulled():
  """The bound of the ratio does not end a pull that does not need it."""
  old = np.zeros((1, 2), np.float32)
  new, mask = np.float32([[-30.0, 0.0]]), np.ones((1, 2), bool)
  arrays = new, old, np.ones((1, 2), np.float32), mask
  slope = lambda name, **more: _total(
    _loss(name, **more), arrays, np.float32([[0.5, 0.5]])
  )[1][0]
  # -(A - beta d) / 2 with d = -30: back up, 30 times as hard as A.
  np.testing.assert_allclose(slope('dro', beta=1.0), [-15.5, -0.5], rtol=1e-6)
  # Both tokens share the slope -e^(-30 / 2) / 2 of their mean.
  expected = [-0.5 * math.exp(-15)] * 2
  np.testing.assert_allclose(slope('geo_mean'), expected, rtol=1e-5)


def test_kl_cov_pulls_nothing_at_distance_zero():
  """Before the first update all tokens are there: the slope is -A alone."""
  x, mask = np.full((1, 2), -1.0, np.float32), np.ones((1, 2), bool)
  _, gradient, *_ = _total(
    _loss('kl_cov', coef=3.0), (x, x, x, mask), mask * 1.0, selected=mask
  )
  np.testing.assert_array_equal(gradient, [[1, 1]])


def test_reinforce_by_hand():
  loss, _ = policy_losses.reinforce(
    jnp.array([[-0.5, -2.0]]),
    jnp.array([[-0.5, -1.0]]),
    jnp.array([[3.0, -1.0]]),
    jnp.ones((1, 2), bool),
  )
  np.testing.assert_allclose(loss, [[1.5, -2.0]], rtol=1e-6)


CHOSEN = np.array([[True]])

# Per case: loss, settings, pi_old, pi, A, per-token loss, slope in log pi,
# clipped.
TOKEN_CASES = [
  # The weight is clipped, the gradient stays: -1.2 A log pi.
  ('cispo', {}, 0.2, 0.3, 2.0, -2.4 * math.log(0.3), -2.4, 1),
  ('cispo', {}, 0.4, 0.2, -1.0, 0.8 * math.log(0.2), 0.8, 1),
  ('cispo', {'clip_low': 1.0}, 0.4, 0.2, -1.0, 0.5 * math.log(0.2), 0.5, 0),
  # Ratio 1: sigmoid(0) 4 / tau = 2 / tau, and the slope is -A for any tau.
  ('sapo', {}, 0.2, 0.2, 2.0, -4.0, -2.0, 0),
  ('sapo', {}, 0.2, 0.2, -1.0, 2 / 1.05, 1.0, 0),
  # Ratio 2: sigmoid(1) = 0.731059, its derivative 0.196612, times 4 times 2.
  ('sapo', {}, 0.2, 0.4, 1.0, -4 * 0.7310586, -8 * 0.1966119, 0),
  # 0.1 of probability is inside 0.15, 0.2 is not, unless A pulls it back.
  ('dppo_tv', {}, 0.2, 0.3, 1.0, -1.5 * math.log(0.3), -1.5, 0),
  ('dppo_tv', {}, 0.2, 0.4, 1.0, 0.0, 0.0, 1),
  ('dppo_tv', {}, 0.2, 0.4, -1.0, 2 * math.log(0.4), 2.0, 0),
  ('dppo_tv', {}, 0.4, 0.2, 1.0, -0.5 * math.log(0.2), -0.5, 0),
  ('dppo_tv', {}, 0.4, 0.2, -1.0, 0.0, 0.0, 1),
  # A rare token may become ten times likelier, where PPO stops at 1.2.
  ('dppo_tv', {}, 1e-4, 1e-3, 1.0, -10 * math.log(1e-3), -10.0, 0),
  ('dppo_tv', {'max_ratio': 3}, 1e-4, 1e-3, 1.0, -3 * math.log(1e-3), -3.0, 0),
  # 0.5 (ln(5/6) + ln(5/4)) = 0.0204 nats are inside 0.05;
  # 0.5 (ln(5/8) + ln(5/2)) = 0.2231 are not.
  ('dppo_kl', {}, 0.5, 0.6, 1.0, -1.2 * math.log(0.6), -1.2, 0),
  ('dppo_kl', {}, 0.5, 0.8, 1.0, 0.0, 0.0, 1),
  ('dppo_kl', {'clip_high': 0.2232}, 0.5, 0.8, 1.0,
   -1.6 * math.log(0.8), -1.6, 0),
  ('dppo_kl', {}, 0.5, 0.8, -1.0, 1.6 * math.log(0.8), 1.6, 0),
  ('dppo_kl', {}, 0.5, 0.2, 1.0, -0.4 * math.log(0.2), -0.4, 0),
  ('dppo_kl', {}, 0.5, 0.2, -1.0, 0.0, 0.0, 1),
  # log-ratio ln 2; -(2 ln 0.4 - 0.25 ln(2)^2); slope -(2 - 0.5 ln 2).
  ('dro', {'beta': 0.5}, 0.2, 0.4, 2.0,
   -2 * math.log(0.4) + 0.25 * math.log(2) ** 2, -2 + 0.5 * math.log(2), 0),
  ('clip_cov', {}, 0.2, 0.3, 1.0, -1.2, 0.0, 1),
  ('clip_cov', {'selected': CHOSEN}, 0.2, 0.22, 1.0, 0.0, 0.0, 0),
  ('kl_cov', {}, 0.2, 0.4, 1.0, -2.0, -2.0, 0),
  # Distance ln 2, whose slope is 1 here and -1 on the other side.
  ('kl_cov', {'selected': CHOSEN}, 0.2, 0.4, 1.0, -2 + math.log(2), -1.0, 0),
  ('kl_cov', {'selected': CHOSEN, 'coef': 3.0}, 0.4, 0.2, 1.0,
   -0.5 + 3 * math.log(2), -3.5, 0),
]  # fmt: skip


@pytest.mark.parametrize('case', TOKEN_CASES)
def test_token_losses_by_hand(case):
  name, options, old, new, advantage, *expected = case
  one = np.ones((1, 1), bool)
  arrays = (*np.log(np.float32([[[new]], [[old]]])), one * advantage, one)
  number, gradient, _, statistics = _total(
    _loss(name), arrays, one.astype(np.float32), **options
  )
  got = [number, gradient[0, 0], statistics.get('actor/pg_clipfrac', 0.0)]
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
  assert statistics['actor/ratio_mean'] == pytest.approx(new / old, rel=1e-5)


def _sequence(name, differences, advantages, **options):
  """Losses and slopes of one sequence, seq-mean-token-mean, and metrics."""
  old = np.full((1, len(differences)), -3.0, np.float32)
  mask = np.ones(old.shape, bool)
  arrays = old + differences, old, np.float32([advantages]), mask
  weights = aggregation.token_weights(mask, 'seq-mean-token-mean')
  _, gradient, value, statistics = _total(
    _loss(name, **options), arrays, weights
  )
  return value[0], gradient[0], statistics


def test_gspo_by_hand():
  # Token ratios 2 and 1: their geometric mean is sqrt 2, for both.
  ln2, root = math.log(2), math.sqrt(2)
  value, slope, statistics = _sequence(
    'gspo', [ln2, 0.0], [1.0, 1.0], clip_high=0.5
  )
  np.testing.assert_allclose(value, [-root, -root], rtol=1e-6)
  np.testing.assert_allclose(slope, [-root / 2, -root / 2], rtol=1e-6)
  assert statistics['actor/ratio_max'] == pytest.approx(root, rel=1e-6)
  assert statistics['actor/pg_clipfrac'] == 0
  value, slope, statistics = _sequence(
    'gspo', [ln2, 0.0], [1.0, 1.0], clip_high=0.2
  )
  np.testing.assert_allclose(value, [-1.2, -1.2], rtol=1e-6)
  np.testing.assert_array_equal(slope, [0, 0])
  assert statistics['actor/pg_clipfrac'] == 1
  # A broken sequence: e^10 and no gradient.
  value, slope, _ = _sequence('gspo', [15.0, 15.0], [-1.0, -1.0])
  np.testing.assert_allclose(value, [math.exp(10)] * 2, rtol=1e-6)
  np.testing.assert_array_equal(slope, [0, 0])


def test_geo_mean_by_hand():
  # Token ratios 4 (held at 2) and 1, mean advantage 2: -2 sqrt 2 at both, and
  # half of that as the slope of the token that is not held.
  ln2, root = math.log(2), math.sqrt(2)
  value, slope, statistics = _sequence(
    'geo_mean', [2 * ln2, 0.0], [1.0, 3.0], clip_high=ln2
  )
  np.testing.assert_allclose(value, [-2 * root, -2 * root], rtol=1e-6)
  np.testing.assert_allclose(slope, [0, -root], rtol=1e-6)
  assert statistics['actor/pg_clipfrac'] == 0.5
  assert statistics['actor/ratio_max'] == pytest.approx(root, rel=1e-6)
  # The same for a bad sequence: ratios 1/4 (held at 1/2) and 1.
  value, slope, statistics = _sequence(
    'geo_mean', [-2 * ln2, 0.0], [-2.0, -2.0], clip_low=ln2
  )
  np.testing.assert_allclose(value, [root, root], rtol=1e-6)
  np.testing.assert_allclose(slope, [0, root / 2], rtol=1e-6)
  assert statistics['actor/pg_clipfrac'] == 0.5
  # Moved against their advantage: never held.
  _, slope, statistics = _sequence('geo_mean', [-2 * ln2, 0.0], [2.0, 2.0])
  np.testing.assert_allclose(slope, [-0.5, -0.5], rtol=1e-6)
  assert statistics['actor/pg_clipfrac'] == 0


def test_geo_mean_takes_weights_as_they_are(oracle):
  """On purpose: verl takes the geometric mean of a sequence's weights.

  Here a weight is a factor on the loss of its token, for every loss: the
  arithmetic mean.  The two agree where a sequence has one weight.
  """
  arrays = _arrays(oracle)
  mask = arrays[-1]
  clips = _settings(oracle['policy_loss']['config'])['geo_mean']
  expected = oracle['policy_loss']['cases']['geo_mean|token-mean|isTrue']
  weights = aggregation.token_weights(mask, 'seq-mean-token-mean')
  correction = oracle['inputs']['is_weights']
  log = np.log(np.where(mask, correction, 1.0))
  geometric = np.exp(masked.segment_mean(log, mask))
  loss = _loss('geo_mean', **clips)
  number, gradient, *_ = _total(loss, arrays, weights, geometric)
  np.testing.assert_allclose(number, expected['loss'], 1e-5, 1e-6)
  np.testing.assert_allclose(gradient, expected['grad'], 1e-5, 1e-6)
  assert expected['loss'] == pytest.approx(-0.062312, abs=1e-6)
  number, *_ = _total(loss, arrays, weights, correction)
  assert number == pytest.approx(-0.066231, abs=1e-6)


def test_geo_mean_does_not_count_empty_rows(oracle):
  """On purpose: verl's plain mean over the rows of a micro-batch counts them.

  With one of the 8 rows empty it is 7/8 of the mean; and two micro-batches of 6
  and 2 rows weigh a row of the second three times as much.
  """
  clips = _settings(oracle['policy_loss']['config'])['geo_mean']
  *arrays, mask = _arrays(oracle)
  loss = _loss('geo_mean', **clips)
  rows = loss(*arrays, mask)[0][:, 0]  # every first token is an action
  assert np.mean(rows) == pytest.approx(-0.024839, abs=1e-6)
  halves = (np.mean(rows[:6]) + np.mean(rows[6:])) / 2
  assert halves == pytest.approx(-0.088926, abs=1e-6)
  mask = mask & (np.arange(8) != 5)[:, None]
  weights = aggregation.token_weights(mask, 'seq-mean-token-mean')
  number, _, value, _ = _total(loss, (*arrays, mask), weights)
  assert np.mean(value[:, 0]) == pytest.approx(-0.063890 * 7 / 8, abs=1e-6)
  assert number == pytest.approx(-0.063890, abs=1e-6)


def test_geo_mean_counts_what_the_clip_stops(oracle):
  """On purpose: verl's two clip fractions count all ratios out of range.

  Also those that moved against their advantage and are not held.
  """
  clips = _settings(oracle['policy_loss']['config'])['geo_mean']
  new, old, advantages, mask = _arrays(oracle)
  _, statistics = policy_losses.loss('geo_mean')(
    new, old, advantages, mask, **clips
  )
  d = new - old
  above, below = d > clips['clip_high'], d < -clips['clip_low']
  share = lambda x: np.mean(x[mask])
  verl = oracle['policy_loss']['cases']['geo_mean|token-mean|isFalse']
  assert share((above | below) & (advantages > 0)) == 0.125
  assert share((above | below) & (advantages < 0)) == 0.25
  assert verl['metrics']['actor/pg_clipfrac'] == 0.125
  assert verl['metrics']['actor/pg_clipfrac_lower'] == 0.25
  held = share((above & (advantages > 0)) | (below & (advantages < 0)))
  assert metrics.compute(statistics)['actor/pg_clipfrac'] == held == 0.34375


def test_kl_cov_selection_by_hand():
  # A - 3 = -2 -1 0 3, log pi + 2 = -2 1 0 1: cov = 4 -1 0 3.
  advantages = np.float32([[1, 2], [3, 6]])
  logprobs = np.float32([[-4, -1], [-2, -1]])
  select = lambda share, mask: np.asarray(
    policy_losses.SELECTIONS['kl_cov'](
      logprobs, logprobs, advantages, mask, share=share
    )
  )
  every = np.ones((2, 2), bool)
  np.testing.assert_array_equal(select(0.25, every), [[1, 0], [0, 0]])
  np.testing.assert_array_equal(select(0.74, every), [[1, 0], [0, 1]])
  np.testing.assert_array_equal(select(1.0, every), every)
  # At least one; of equal ones the first; a masked token is never taken.
  np.testing.assert_array_equal(select(1e-9, every), [[1, 0], [0, 0]])
  advantages[:] = 1.0
  np.testing.assert_array_equal(select(0.5, every), [[1, 1], [0, 0]])
  mask = np.array([[False, True], [False, True]])
  np.testing.assert_array_equal(select(0.5, mask), [[0, 1], [0, 0]])
  np.testing.assert_array_equal(select(0.5, ~every), ~every)


def test_kl_cov_selects_over_the_whole_mini_batch(oracle):
  """On purpose: verl selects in every micro-batch, so the cut matters.

  0.1 of 32 tokens are 3; of 18 and 14 in two halves they are 1 and 1.
  """
  select = functools.partial(policy_losses.SELECTIONS['kl_cov'], share=0.1)
  arrays = _arrays(oracle)
  assert np.sum(select(*arrays)) == 3
  halves = [
    select(*(x[rows] for x in arrays)) for rows in (slice(4), slice(4, 8))
  ]
  assert [int(np.sum(half)) for half in halves] == [1, 1]


def test_clip_cov_selection_takes_the_eligible():
  select = functools.partial(
    policy_losses.SELECTIONS['clip_cov'], jax.random.key(3)
  )
  # Covariances 4 -1 0 3, as above.
  advantages = np.float32([[1, 2], [3, 6]])
  logprobs = np.float32([[-4, -1], [-2, -1]])
  every = np.ones((2, 2), bool)
  arrays = logprobs, logprobs, advantages, every
  got = select(*arrays, share=1.0, low=2.0, high=5.0)
  np.testing.assert_array_equal(got, [[1, 0], [0, 1]])
  # The bounds are exclusive; fewer than the share asks for is all of them.
  got = select(*arrays, share=1.0, low=3.0, high=4.0)
  np.testing.assert_array_equal(got, ~every)
  # The last token has ratio e, which the PPO clip stops.
  old = logprobs - np.float32([[0, 0], [0, 1]])
  got = select(logprobs, old, advantages, every, share=1.0, low=2.0, high=5.0)
  np.testing.assert_array_equal(got, [[1, 0], [0, 0]])
  got = select(logprobs, old, advantages, ~every, share=1.0, low=-9.0)
  np.testing.assert_array_equal(got, ~every)


def test_clip_cov_selection_is_addressed():
  """Exactly the share, other tokens for other keys, whatever the layout."""
  rng = np.random.default_rng(0)
  new, advantages = rng.normal(size=(2, 30, 10)).astype(np.float32)
  mask = np.ones(new.shape, bool)
  select = jax.jit(
    functools.partial(
      policy_losses.SELECTIONS['clip_cov'], share=0.1, low=0.0, high=1e9
    )
  )
  key = jax.random.key(1)
  got = select(key, new, new, advantages, mask)
  assert got.sum() == 30
  cov = (advantages - advantages.mean()) * (new - new.mean())
  assert np.all(cov[got] > 0)
  assert (
    np.sum(got != select(jax.random.key(2), new, new, advantages, mask)) > 20
  )
  # Padded by a row and two columns, and rows in another order.
  order = rng.permutation(30)
  move = lambda x: np.pad(x[order], ((0, 1), (0, 2)))
  moved = select(
    key, move(new), move(new), move(advantages), move(mask),
    index=np.append(order, 99),
  )  # fmt: skip
  np.testing.assert_array_equal(moved, move(np.asarray(got)))


def test_share_is_a_floor():
  """0.1 of 30 is 3 and 0.7 of 10 is 7, although float32 has neither share."""
  select = policy_losses.SELECTIONS['kl_cov']
  x = np.arange(300, dtype=np.float32)[None, :]
  cases = [
    (0.1, 9, 1),
    (0.1, 29, 2),
    (0.1, 30, 3),
    (0.7, 10, 7),
    (0.3, 300, 90),
  ]
  for share, n, wanted in cases:
    got = select(x, x, x, x < n, share=share)
    assert np.sum(got) == wanted, (share, n)


def test_gradients_against_finite_differences():
  """Where the gradient is that of the value, which it need not be."""
  # Ratios: held, free, held, free, beyond the dual clip, free; none at a kink.
  ratios = [1.5, 1.1, 0.5, 0.5, 4.0, 1.5]
  advantages = [1.0, -1.0, -1.0, 1.0, -2.0, -1.0]
  segment_ids = np.array([[1, 1, 2, 1, 2, 2]])
  options = {
    'ppo': {'dual_clip': 3.0},
    'reinforce': {},
    'sapo': {},
    'dro': {},
    'geo_mean': {'segment_ids': segment_ids},
    'clip_cov': {'selected': np.arange(6)[None, :] == 1},
    'kl_cov': {'selected': np.arange(6)[None, :] > 2},
  }
  with jax.enable_x64(True):
    new = jnp.log(jnp.array([ratios], jnp.float64))
    advantages = jnp.array([advantages], jnp.float64)
    old = jnp.zeros_like(new)
    mask = jnp.ones(new.shape, bool)
    for name, more in options.items():
      test_util.check_grads(
        lambda x: _loss(name)(x, old, advantages, mask, **more)[0],  # noqa: B023
        (new,),
        order=1,
        modes=['rev'],
        eps=1e-6,
        rtol=1e-7,
        atol=1e-7,
      )


@pytest.mark.parametrize('name', ['cispo', 'dppo_tv', 'dppo_kl'])
def test_gradients_of_stopped_weights(oracle, name):
  """The gradient is that of `-w A log pi` with w as it is at this point."""
  with jax.enable_x64(True):
    new, old, advantages, mask = _arrays(oracle, np.float64)
    new = np.minimum(new, -0.01)
    value, pull = jax.vjp(
      lambda x: _loss(name)(x, old, advantages, mask)[0], new
    )
    (gradient,) = pull(jnp.ones_like(value))
    np.testing.assert_allclose(
      gradient, np.where(mask, value / new, 0), rtol=1e-12, atol=1e-12
    )
  assert np.count_nonzero(gradient) > 10


def test_gspo_is_the_gradient_of_sequences(oracle):
  """With one advantage per sequence: central differences of the paper's loss.

  mean_i max(-A_i s_i, -A_i clip(s_i, 1 - low, 1 + high))
  """
  low, high = 0.05, 0.1

  def paper(new, old, advantages, mask):
    mean = np.sum(np.where(mask, new - old, 0), axis=1) / mask.sum(axis=1)
    s = np.exp(mean)
    a = advantages[:, 0]
    return np.mean(np.maximum(-a * s, -a * np.clip(s, 1 - low, 1 + high)))

  with jax.enable_x64(True):
    new, old, advantages, mask = _arrays(oracle, np.float64)
    advantages = np.broadcast_to(advantages[:, :1], new.shape)
    weights = aggregation.token_weights(mask, 'seq-mean-token-mean')
    weights = np.asarray(weights, np.float64)
    arrays = new, old, advantages, mask
    number, gradient, _, statistics = _total(
      _loss('gspo', clip_low=low, clip_high=high), arrays, weights
    )
    # The weights are float32, so 1e-7 is what can be asked.
    np.testing.assert_allclose(number, paper(*arrays), rtol=1e-6)
    slopes = np.zeros_like(new)
    for place in np.argwhere(mask):
      step = np.zeros_like(new)
      step[tuple(place)] = 1e-5
      ends = [paper(new + x, old, advantages, mask) for x in (step, -step)]
      slopes[tuple(place)] = (ends[0] - ends[1]) / 2e-5
  assert 0 < statistics['actor/pg_clipfrac'] < 1
  np.testing.assert_allclose(gradient, slopes, rtol=1e-6, atol=1e-8)


def test_clips_may_be_traced():
  one = jnp.ones((1, 1))
  loss = jax.jit(
    lambda clip: policy_losses.ppo(one, 0 * one, one, one, clip_high=clip)[0]
  )
  np.testing.assert_allclose(loss(0.2), [[-1.2]], rtol=1e-6)
  np.testing.assert_allclose(loss(0.5), [[-1.5]], rtol=1e-6)


def test_bfloat16_is_widened():
  one = jnp.ones((1, 2), jnp.bfloat16)
  for name in LOSSES:
    assert _loss(name)(one, one, one, one > 0)[0].dtype == jnp.float32


BAD_SETTINGS = [
  ('ppo', {'clip_low': -0.1}),
  ('ppo', {'clip_low': 1.1}),
  ('ppo', {'clip_high': -0.1}),
  ('ppo', {'clip_high': math.nan}),
  ('ppo', {'dual_clip': 1.0}),
  ('cispo', {'clip_low': 1.1}),
  ('sapo', {'tau_positive': 0.0}),
  ('sapo', {'tau_negative': -1.0}),
  ('dppo_tv', {'clip_low': 1.1}),
  ('dppo_tv', {'clip_high': -0.1}),
  ('dppo_kl', {'clip_high': -0.1}),
  ('dppo_kl', {'max_ratio': 0.0}),
  ('dro', {'beta': -1.0}),
  ('gspo', {'clip_low': 1.1}),
  ('geo_mean', {'clip_low': -0.1}),
  ('clip_cov', {'clip_low': -0.1}),
  ('kl_cov', {'coef': -1.0}),
]


@pytest.mark.parametrize('name, options', BAD_SETTINGS)
def test_settings_out_of_range(name, options):
  one = jnp.ones((1, 1))
  (setting,) = options
  with pytest.raises(ValueError, match=f'{setting} is .*it must be'):
    _loss(name, **options)(one, one, one, one)


def test_errors():
  one = jnp.ones((1, 1))
  with pytest.raises(ValueError, match="'pppo'.*'ppo'"):
    policy_losses.loss('pppo')
  with pytest.raises(TypeError):
    policy_losses.reinforce(one, one, one, one, clip_low=0.2)
  for name in policy_losses.SELECTIONS:
    with pytest.raises(TypeError, match='selected'):
      policy_losses.loss(name)(one, one, one, one)
  with pytest.raises(AssertionError):
    policy_losses.ppo(one, one, jnp.ones(1), one)
  select = policy_losses.SELECTIONS['kl_cov']
  for share in (0.0, 1.1):
    with pytest.raises(ValueError, match='share'):
      select(one, one, one, one, share=share)
  select = policy_losses.SELECTIONS['clip_cov']
  with pytest.raises(ValueError, match='low is 5.0: it must be at most 1'):
    select(jax.random.key(0), one, one, one, one, low=5.0, high=1.0)


def test_tables():
  assert set(policy_losses.SELECTIONS) <= set(LOSSES)
  assert set(policy_losses.PAPER_AGGREGATION) <= set(LOSSES)
  assert set(policy_losses.PAPER_AGGREGATION.values()) <= set(aggregation.MODES)
