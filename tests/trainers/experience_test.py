"""From a rollout to advantages: membership, rejection, scores, estimates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import keys
from rlhf_jax import metrics
from rlhf_jax import testing
from rlhf_jax import types
from rlhf_jax.algorithms import advantages
from rlhf_jax.data import packing
from rlhf_jax.models import decoder
from rlhf_jax.models import heads
from rlhf_jax.models import spec
from rlhf_jax.sharding import multihost
from rlhf_jax.trainers import experience as experience_lib
from rlhf_jax.trainers import packed
from rlhf_jax.trainers import state as state_lib
from rlhf_jax.trainers import update

_CONFIG = testing.tiny_config()


def _rollout(prompts: int = 6, samples: int = 2) -> types.Rollout:
  """Prompts of 3 or 4 tokens that begin with two equal ones, T = 10."""
  rng = np.random.default_rng(prompts)
  count = prompts * samples
  prompt_lengths = np.repeat(3 + np.arange(prompts) % 2, samples)
  lengths = prompt_lengths + rng.integers(1, 7, count)
  at = np.arange(10)[None]
  tokens = rng.integers(1, 37, (count, 10))
  tokens[:, :2] = [5, 6]
  return types.Rollout(
    tokens=np.where(at < lengths[:, None], tokens, 0).astype(np.int32),
    lengths=lengths.astype(np.int32),
    prompt_lengths=prompt_lengths.astype(np.int32),
    mask=(at >= prompt_lengths[:, None]) & (at < lengths[:, None]),
    logprobs=np.zeros((count, 10), np.float32),
    temperature=np.linspace(0.5, 1.5, count).astype(np.float32),
    truncated=np.zeros(count, bool),
    group=np.repeat(np.arange(prompts, dtype=np.int32), samples),
    policy_version=np.zeros(count, np.int32),
  )


def _take(tree, index):
  return jax.tree.map(lambda x: x[index], tree)


def _split(rollout, count=3, *, seed=1, step=0, **changes):
  options = dict(
    islands=multihost.alone(),
    tokens_per_row=12,
    rows_per_microbatch=2,
    share_prefix=False,
  )
  prompts = int(rollout.group.max()) + 1
  home, _ = packed.assign(prompts, count, 1, seed=seed, step=step)
  return packed.split(rollout, home, count, **(options | changes))


# ---- Which sequences form a mini-batch --------------------------------------


def test_split_membership_is_addressed():
  rollout = _rollout()
  batches = _split(rollout)
  # The i-th prompt of the permutation goes to mini-batch i mod 3.
  order = np.asarray(jax.random.permutation(keys.key(1, 'minibatch', 0), 6))
  for index, batch in enumerate(batches):
    # All samples of a prompt stay together: two prompts, four sequences.
    assert set(rollout.group[batch.members]) == set(order[index::3].tolist())
    assert len(batch.members) == 4
  everyone = np.concatenate([batch.members for batch in batches])
  np.testing.assert_array_equal(np.sort(everyone), np.arange(12))
  # The same address gives the same division, another step another one.
  members = lambda batches: [batch.members.tolist() for batch in batches]
  assert members(_split(rollout)) == members(batches)
  assert members(_split(rollout, step=1)) != members(batches)
  assert members(_split(rollout, seed=2)) != members(batches)


def test_split_does_not_depend_on_the_order_of_sequences():
  rollout = _rollout()
  shuffled = _take(rollout, np.random.default_rng(0).permutation(12))
  for one, other in zip(_split(rollout), _split(shuffled)):
    names = lambda r, b: sorted(map(bytes, r.tokens[b.members]))
    assert names(rollout, one) == names(shuffled, other)
    groups = lambda r, b: sorted(r.group[b.members].tolist())
    assert groups(rollout, one) == groups(shuffled, other)


def test_split_packs_whole_micro_batches():
  for share in (False, True):
    for batch in _split(_rollout(), share_prefix=share):
      assert batch.rows.tokens.shape[0] % 2 == 0
      assert batch.rows.tokens.shape[1] == 12
      assert batch.pack_map.prefix_length == (2 if share else 0)
      # No action is lost on the way.
      assert batch.rows.mask.sum() == _rollout().mask[batch.members].sum()


def test_rejected_sequences_are_in_no_mini_batch():
  rollout = _rollout()
  batches = _split(rollout)
  lost = batches[1].members
  mask = rollout.mask.copy()
  mask[lost] = False  # all of one mini-batch
  mask[batches[0].members[0]] = False  # one of another
  left = _split(rollout.replace(mask=mask))
  assert len(left) == 2  # the empty one is left out
  np.testing.assert_array_equal(left[0].members, batches[0].members[1:])
  np.testing.assert_array_equal(left[1].members, batches[2].members)
  assert _split(rollout.replace(mask=np.zeros_like(mask))) == []


def test_order_of_updates_is_shuffled_in_every_epoch():
  order = packed.update_order(8, 3, seed=0, step=7)
  epochs = [order[:8], order[8:16], order[16:]]
  assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs}) == 3
  assert order == packed.update_order(8, 3, seed=0, step=7)
  assert order != packed.update_order(8, 3, seed=0, step=8)
  assert packed.update_order(0, 2, seed=0, step=0) == []


@pytest.mark.parametrize(
  'truncated, uniform_groups, expected',
  [
    # Scores that are not finite go in any case.
    (False, False, [0, 0, 0, 1, 1, 0, 0, 0]),
    (True, False, [0, 1, 0, 1, 1, 0, 0, 0]),
    # Group 1 has one score left and group 3 equal ones: both teach nothing.
    # So does group 2, of which one score was lost.
    (False, True, [0, 0, 1, 1, 1, 1, 1, 1]),
    # Without its cut sequence group 0 is down to one score as well.
    (True, True, [1, 1, 1, 1, 1, 1, 1, 1]),
  ],
)
def test_rejected(truncated, uniform_groups, expected):
  rollout = _rollout(prompts=4)
  rollout = rollout.replace(truncated=np.arange(8) == 1)
  nan, inf = np.nan, np.inf
  scores = np.array([0, 1, 1, nan, inf, 0, 0.35, 0.35], np.float32)
  before = rollout.truncated.copy()
  result = experience_lib.rejected(
    rollout, scores, truncated=truncated, uniform_groups=uniform_groups
  )
  np.testing.assert_array_equal(result, np.array(expected, bool))
  np.testing.assert_array_equal(rollout.truncated, before)


# ---- Scores of packed rows = scores of single sequences ---------------------


@pytest.fixture(scope='module')
def scored():
  """A function that scores a rollout with a role, packed."""
  program = update.score_program(functools.partial(heads.score, config=_CONFIG))

  def run(role, rollout, **changes):
    params = spec.init(state_lib.specs_of(_CONFIG, role), jax.random.key(0))
    if role == 'critic':
      params['value_head'] = jnp.linspace(-1, 1, 16)[:, None]
    return params, packed.run_score(
      program,
      params,
      _split(rollout, **changes),
      rollout,
      rows_per_microbatch=2,
      islands=multihost.alone(),
    )

  return run


@functools.partial(jax.jit, static_argnames='width')
def _hidden(params, tokens, *, width):
  at = jnp.arange(width)[None]
  return decoder.hidden(params, _CONFIG, tokens, at, jnp.ones_like(tokens))


def _states(params, rollout, n):
  """[T, D] of one sequence alone; causal, so padding changes nothing."""
  return _hidden(params, rollout.tokens[n : n + 1], width=10)[0]


@pytest.mark.parametrize('share_prefix', [False, True])
def test_log_probs_of_packed_rows(scored, share_prefix):
  rollout = _rollout()
  params, (scores, _) = scored('actor', rollout, share_prefix=share_prefix)
  logprobs = scores.logprobs
  expected = np.zeros((12, 10), np.float32)
  for n in range(12):
    logits = _states(params, rollout, n) @ params['embed'].T
    every = np.asarray(jax.nn.log_softmax(logits / rollout.temperature[n]))
    for t in range(rollout.prompt_lengths[n], rollout.lengths[n]):
      expected[n, t] = every[t - 1, rollout.tokens[n, t]]
  testing.assert_close(logprobs, expected, 'layout_float32')


def test_values_and_bootstrap_of_packed_rows(scored):
  rollout = _rollout()
  mask = rollout.mask.copy()
  mask[4] = False  # rejected: no value is asked of it
  rollout = rollout.replace(mask=mask)
  params, (scores, after) = scored('critic', rollout)
  values = scores.values
  expected = np.zeros((12, 10), np.float32)
  expected_after = np.zeros(12, np.float32)
  for n in set(range(12)) - {4}:
    own = np.asarray(_states(params, rollout, n) @ params['value_head'])[:, 0]
    start, end = rollout.prompt_lengths[n], rollout.lengths[n]
    expected[n, start:end] = own[start - 1 : end - 1]  # before the action
    expected_after[n] = own[end - 1]  # at the last token
  testing.assert_close(values, expected, 'layout_float32')
  testing.assert_close(after, expected_after, 'layout_float32')


# ---- Token rewards, advantages ----------------------------------------------


def _two_sequences(truncated=(False, True)):
  """Actions 2, 3, 4 with EOS at 4; actions 3, 4, cut by the length limit."""
  mask = np.zeros((2, 6), bool)
  mask[0, 2:5] = True
  mask[1, 3:5] = True
  return types.Rollout(
    tokens=np.array([[1, 2, 3, 4, 9, 0], [1, 2, 3, 4, 5, 0]], np.int32),
    lengths=np.array([5, 5], np.int32),
    prompt_lengths=np.array([2, 3], np.int32),
    mask=mask,
    logprobs=np.zeros((2, 6), np.float32),
    temperature=np.ones(2, np.float32),
    truncated=np.array(truncated),
    group=np.zeros(2, np.int32),
    policy_version=np.zeros(2, np.int32),
  )


_NAN = np.nan
# What stands at places that are no action must not matter.
_VALUES = np.array(
  [[_NAN, _NAN, 0.2, 0.3, 0.4, _NAN], [_NAN, _NAN, _NAN, 0.5, 0.1, _NAN]],
  np.float32,
)
_KL = np.array(
  [[_NAN, _NAN, 0.1, 0.2, 0.3, _NAN], [_NAN, _NAN, _NAN, 0.0, 0.4, _NAN]],
  np.float32,
)


def _estimate(scores, **changes):
  options = dict(
    rollout=_two_sequences(),
    rewards=np.zeros((2, 1), np.float32),
    old_logprobs=np.zeros((2, 6), np.float32),
    reference_logprobs=np.zeros((2, 6), np.float32),
    values=_VALUES,
    bootstrap_values=np.array([0, 0.6], np.float32),
    islands=multihost.alone(),
    estimator='gae',
    settings=dict(gamma=0.9, lam=0.5),
  )
  return experience_lib.estimate(
    scores=np.array(scores, np.float32), **(options | changes)
  )


def _close(actual, expected):
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_gae_with_kl_in_the_reward_by_hand():
  # Sequence 0, score 0.7 on EOS, KL coefficient 0.5:
  #   rewards -0.05, -0.1, 0.7 - 0.15 = 0.55
  #   delta_4 = 0.55 - 0.4              = 0.15    A_4 = 0.15
  #   delta_3 = -0.1 + 0.9 * 0.4 - 0.3  = -0.04   A_3 = -0.04 + 0.45 * 0.15
  #   delta_2 = -0.05 + 0.9 * 0.3 - 0.2 = 0.02    A_2 = 0.02 + 0.45 * 0.0275
  # Sequence 1, cut, score 0.2, value 0.6 behind its last token:
  #   rewards 0, 0.2 - 0.2 = 0
  #   delta_4 = 0 + 0.9 * 0.6 - 0.1     = 0.44    A_4 = 0.44
  #   delta_3 = 0 + 0.9 * 0.1 - 0.5     = -0.41   A_3 = -0.41 + 0.45 * 0.44
  result = _estimate([0.7, 0.2], kl=_KL, kl_coef=0.5)
  _close(
    result.token_rewards,
    [[0, 0, -0.05, -0.1, 0.55, 0], [0, 0, 0, 0, 0, 0]],
  )
  advantages = [
    [0, 0, 0.032375, 0.0275, 0.15, 0],
    [0, 0, 0, -0.212, 0.44, 0],
  ]
  _close(result.advantages, advantages)
  _close(
    result.returns,
    [[0, 0, 0.232375, 0.3275, 0.55, 0], [0, 0, 0, 0.288, 0.54, 0]],
  )


def test_fractional_score_arrives_whole():
  # Without KL the score stands on the last action and nowhere else.
  result = _estimate([0.7, 0.2])
  expected = np.zeros((2, 6), np.float32)
  expected[:, 4] = [0.7, 0.2]
  np.testing.assert_array_equal(result.token_rewards, expected)
  # gamma = lam = 1, no critic, no bootstrap: every return is the score.
  plain = dict(
    values=np.zeros((2, 6), np.float32),
    bootstrap_values=np.zeros(2, np.float32),
    settings=dict(gamma=1.0, lam=1.0),
  )
  result = _estimate([0.7, 0.2], **plain)
  mask = _two_sequences().mask
  _close(result.returns, np.where(mask, [[0.7], [0.2]], 0))


def test_group_baselines_see_the_penalty():
  # Scores less 0.5 KL: 0.7 - 0.3 = 0.4 and 0.2 - 0.2 = 0.0.
  # rloo: each less the other, +0.4 and -0.4.
  # grpo: mean 0.2, deviation sqrt(2 * 0.04 / 1) = 0.282843: +-0.707107.
  mask = _two_sequences().mask
  result = _estimate(
    [0.7, 0.2], kl=_KL, kl_coef=0.5, estimator='rloo', settings={}
  )
  _close(result.advantages, np.where(mask, [[0.4], [-0.4]], 0))
  result = _estimate(
    [0.7, 0.2], kl=_KL, kl_coef=0.5, estimator='grpo', settings={}
  )
  root = 0.5**0.5
  np.testing.assert_allclose(
    result.advantages, np.where(mask, [[root], [-root]], 0), rtol=1e-4
  )


def test_score_that_does_not_apply_leaves_its_group():
  # The mask is kept on purpose: NaN alone must do it.
  result = _estimate([0.7, np.nan], estimator='rloo', settings={})
  np.testing.assert_array_equal(result.advantages, np.zeros((2, 6)))
  np.testing.assert_array_equal(result.token_rewards[1], np.zeros(6))


def test_whitening_is_over_the_step():
  result = _estimate([0.7, 0.2], whiten=True)
  plain = _estimate([0.7, 0.2])
  mask = _two_sequences().mask
  values = plain.advantages[mask]
  expected = (values - values.mean()) / values.std(ddof=1)
  np.testing.assert_allclose(result.advantages[mask], expected, rtol=1e-4)
  assert not result.advantages[~mask].any()
  # The critic's targets are not whitened.
  np.testing.assert_array_equal(result.returns, plain.returns)


def test_a_step_of_rejected_sequences_is_all_zero():
  rollout = _two_sequences()
  rollout = rollout.replace(mask=np.zeros_like(rollout.mask))
  for estimator in advantages.ESTIMATORS:
    settings = (
      dict(gamma=0.9) if estimator in ('gae', 'reinforce_plus_plus') else {}
    )
    if estimator == 'gae':
      settings['lam'] = 0.5
    result = _estimate(
      [np.nan, np.nan],
      rollout=rollout,
      estimator=estimator,
      settings=settings,
      whiten=True,
      reward_weights=[1.0],
      baseline=np.full(2, np.nan, np.float32),
      sum_squares=np.full((2, 6), np.nan, np.float32),
      kl=_KL,
      kl_coef=0.5,
    )
    for array in (result.token_rewards, result.advantages, result.returns):
      np.testing.assert_array_equal(array, np.zeros((2, 6)))
    values = metrics.compute(
      experience_lib.statistics(
        result, ['rule'], islands=multihost.alone(), with_critic=True
      )
    )
    assert np.isfinite(list(values.values())).all()
    assert values['training/sequences_used'] == 0
  assert metrics.compute({'padding': packed.padding([])}) == {}


# ---- The rows of an update --------------------------------------------------


def _experience(rollout):
  numbers = np.arange(rollout.tokens.size, dtype=np.float32)
  numbers = numbers.reshape(rollout.tokens.shape)
  count = len(rollout.lengths)
  return types.Experience(
    rollout=rollout,
    rewards=np.zeros((count, 1), np.float32),
    scores=np.zeros(count, np.float32),
    old_logprobs=numbers + 0.1,
    reference_logprobs=numbers + 0.2,
    values=numbers + 0.3,
    bootstrap_values=np.zeros(count, np.float32),
    token_rewards=numbers,
    advantages=numbers + 0.4,
    returns=numbers + 0.5,
  )


def test_token_batch_weights_come_from_the_final_mask():
  rollout = _rollout()
  batch = _split(rollout)[0]
  # After packing a sequence is lost, and one token of another.
  mask = rollout.mask.copy()
  gone, other = batch.members[:2]
  mask[gone] = False
  mask[other, rollout.prompt_lengths[other]] = False
  experience = _experience(rollout.replace(mask=mask))
  left = mask[batch.members]
  for mode, total in (
    ('token-mean', 1.0),
    ('seq-mean-token-mean', 1.0),
    ('token-sum', left.sum()),
  ):
    result = packed.token_batch(experience, batch, mode, scale=None)
    np.testing.assert_allclose(result.weights.sum(), total, rtol=1e-6)
    np.testing.assert_array_equal(result.weights > 0, result.rows.mask)
  assert result.rows.mask.sum() == left.sum() < batch.rows.mask.sum()
  # seq-mean-token-mean: 1 / (n_i s) with the sequences that have a token.
  result = packed.token_batch(
    experience, batch, 'seq-mean-token-mean', scale=None
  )
  weights = packing.unpack(result.weights, batch.pack_map)
  counts, sequences = left.sum(1), (left.sum(1) > 0).sum()
  for own, kept, n in zip(weights, left, counts):
    np.testing.assert_allclose(own[kept], 1 / (max(n, 1) * sequences))
    assert not own[~kept].any()


@pytest.mark.parametrize('share_prefix', [False, True])
def test_token_batch_puts_every_number_at_its_action(share_prefix):
  rollout = _rollout()
  experience = _experience(rollout)
  batch = _split(rollout, share_prefix=share_prefix)[2]
  result = packed.token_batch(experience, batch, 'token-mean', scale=None)
  mask = rollout.mask[batch.members]
  for name, source in (
    ('old_logprobs', experience.old_logprobs),
    ('reference_logprobs', experience.reference_logprobs),
    ('advantages', experience.advantages),
    ('old_values', experience.values),
    ('returns', experience.returns),
  ):
    back = packing.unpack(getattr(result, name), batch.pack_map)
    np.testing.assert_array_equal(
      back[mask], source[batch.members][mask], err_msg=name
    )


def test_slices_are_micro_batches_of_the_whole():
  batch = _split(_rollout())[0]
  parts = list(packed.slices(batch.rows, 2, multihost.alone()))
  assert len(parts) == batch.rows.tokens.shape[0] // 2 > 1
  np.testing.assert_array_equal(
    np.concatenate([part.tokens for part in parts]), batch.rows.tokens
  )


def test_statistics_by_hand():
  # Scores 0.7 and NaN; rewards of two rules, one of which applies once.
  rollout = _two_sequences()
  mask = rollout.mask.copy()
  mask[1] = False
  result = _estimate([0.7, np.nan], rollout=rollout.replace(mask=mask))
  nan = np.nan
  result = result.replace(
    rewards=np.array([[0.7, nan], [nan, nan]], np.float32)
  )
  values = metrics.compute(
    experience_lib.statistics(
      result, ['exact', 'other'], islands=multihost.alone(), with_critic=True
    )
  )
  expected = {
    'critic/score/mean': 0.7,
    'critic/rewards/mean': 0.7,
    'reward/exact/mean': 0.7,
    'response_length/mean': 2.5,  # 5 - 2 and 5 - 3, rejected or not
    'response_length/max': 3,
    'response_length/min': 2,
    'response_length/clip_ratio': 0.5,
    'prompt_length/mean': 2.5,
    'training/sequences_used': 0.5,
    'critic/values/mean': 0.3,
  }
  for name, want in expected.items():
    np.testing.assert_allclose(values[name], want, rtol=1e-6, err_msg=name)
  assert 'reward/other/mean' not in values


# ---- The exact divergence, and sequences that are drawn anew ----------------


def test_exact_divergence_of_packed_rows(scored):
  """From hidden states that a pass of the reference left, row by row."""
  rollout = _rollout()
  of = lambda seed: spec.init(
    state_lib.specs_of(_CONFIG, 'actor'), jax.random.key(seed)
  )
  policy, reference = of(0), of(1)
  run = functools.partial(
    packed.run_score,
    batches=_split(rollout),
    rollout=rollout,
    rows_per_microbatch=2,
    islands=multihost.alone(),
  )
  score = functools.partial(heads.score, config=_CONFIG)
  kept, _ = run(update.score_program(score, keep_states=True), reference)
  got, _ = run(
    update.score_program(score, sum_squares=True),
    policy,
    reference=(heads.head_params(reference), kept.states),
  )
  expected = np.zeros((12, 10), np.float32)
  squares = np.zeros((12, 10), np.float32)
  for n in range(12):
    heat = rollout.temperature[n]
    log_softmax = lambda params, n=n, heat=heat: np.asarray(
      jax.nn.log_softmax(
        _states(params, rollout, n) @ params['embed'].T / heat
      ),
      np.float64,
    )
    p, q = log_softmax(policy), log_softmax(reference)
    for t in range(rollout.prompt_lengths[n], rollout.lengths[n]):
      expected[n, t] = np.sum(np.exp(p[t - 1]) * (p[t - 1] - q[t - 1]))
      squares[n, t] = np.sum(np.exp(2 * p[t - 1]))
  assert expected.max() > 0.1
  testing.assert_close(got.divergence, expected, 'layout_float32')
  testing.assert_close(got.sum_squares, squares, 'layout_float32')
  # A policy has no divergence from itself.
  itself, _ = run(
    update.score_program(score),
    reference,
    reference=(heads.head_params(reference), kept.states),
  )
  testing.assert_close(
    itself.divergence, np.zeros((12, 10), np.float32), 'kl_of_itself'
  )


def test_filtration_moves_each_sequence_whole():
  # Only the best and the worst are drawn; the third has no action.
  rollout = _two_sequences()
  rollout = jax.tree.map(
    lambda x: np.concatenate([x, x]), rollout
  )  # 4 sequences
  mask = rollout.mask.copy()
  mask[3] = False
  rollout = rollout.replace(mask=mask, tokens=rollout.tokens + [[0]] * 4)
  rollout.tokens[:, 0] = [10, 11, 12, 13]  # tells them apart
  double = lambda x: np.concatenate([x, x])
  experience = _estimate(
    [0.3, 0.9, -0.2, 5.0],
    rollout=rollout,
    rewards=np.zeros((4, 1), np.float32),
    old_logprobs=np.zeros((4, 6), np.float32),
    reference_logprobs=np.zeros((4, 6), np.float32),
    values=double(_VALUES),
    bootstrap_values=np.zeros(4, np.float32),
  )
  moved, measured = experience_lib.filtrate(
    experience,
    jax.random.key(0),
    islands=multihost.alone(),
    method='max_min',
    power=2.0,
  )
  source = moved.rollout.tokens[:, 0] - 10
  assert set(source) == {1, 2}
  for name in ('scores', 'advantages', 'returns', 'token_rewards'):
    np.testing.assert_array_equal(
      getattr(moved, name), getattr(experience, name)[source]
    )
  np.testing.assert_array_equal(moved.rollout.mask, mask[source])
  # Each copy is a prompt of its own.
  np.testing.assert_array_equal(moved.rollout.group, np.arange(4))
  assert metrics.compute(measured) == {'training/filtration_distinct': 0.5}
