"""Packing: goldens by hand, and pack -> unpack on random sequences."""

import json
import pathlib

import numpy as np
import pytest

from rlhf_jax import testing
from rlhf_jax import types
from rlhf_jax.data import packing

_ORACLE = pathlib.Path(__file__).parents[1] / 'fixtures' / 'verl_core.json'


def _rollout(tokens, lengths, prompt_lengths, temperature=1.0):
  tokens = np.asarray(tokens, np.int32)
  lengths = np.asarray(lengths, np.int32)
  prompt_lengths = np.asarray(prompt_lengths, np.int32)
  position = np.arange(tokens.shape[1])
  num = len(lengths)
  return types.Rollout(
    tokens=tokens,
    lengths=lengths,
    prompt_lengths=prompt_lengths,
    mask=(position >= prompt_lengths[:, None]) & (position < lengths[:, None]),
    logprobs=np.zeros(tokens.shape, np.float32),
    temperature=np.full(num, temperature, np.float32),
    truncated=np.zeros(num, bool),
    group=np.zeros(num, np.int32),
    policy_version=np.zeros(num, np.int32),
  )


def _random(seed, prefix=0):
  """Lengths, prompt lengths and a rollout of 12 sequences, width 20."""
  rng = np.random.default_rng(seed)
  prompt_lengths = rng.integers(prefix + 1, prefix + 5, 12)
  lengths = prompt_lengths + rng.integers(0, 9, 12)
  tokens = rng.integers(1, 100, (12, 20))
  tokens[:, :prefix] = tokens[0, :prefix]
  tokens[np.arange(20) >= lengths[:, None]] = 0
  return _rollout(tokens, lengths, prompt_lengths, temperature=0.5)


def test_golden_of_the_module_docstring():
  # a0 a1 a2 a3 = 10 .. 13 with prompt a0 a1; b0 b1 = 20 21 with prompt b0.
  rollout = _rollout([[10, 11, 12, 13], [20, 21, 0, 0]], [4, 2], [2, 1], 0.5)
  plan = packing.plan(rollout.lengths, 4, 7)
  rows = packing.rows(rollout, plan)
  np.testing.assert_array_equal(rows.tokens, [[10, 11, 12, 13, 20, 21, 0]])
  np.testing.assert_array_equal(rows.segment_ids, [[1, 1, 1, 1, 2, 2, 0]])
  np.testing.assert_array_equal(rows.positions, [[0, 1, 2, 3, 0, 1, 0]])
  np.testing.assert_array_equal(rows.targets, [[11, 12, 13, 0, 21, 0, 0]])
  np.testing.assert_array_equal(rows.mask, [[0, 1, 1, 0, 1, 0, 0]])
  np.testing.assert_array_equal(rows.temperature, [[0.5] * 6 + [1.0]])
  assert rows.mask.dtype == bool and rows.tokens.dtype == np.int32
  # Unpacked, the number at a1 (place 1) speaks of the action a2 (entry 2).
  places = np.arange(7.0)[None]
  np.testing.assert_array_equal(
    packing.unpack(places, plan, fill=-1),
    [[-1, 0, 1, 2], [-1, 4, -1, -1]],
  )
  # The last tokens, a3 and b1, are at places 3 and 5.
  np.testing.assert_array_equal(packing.last(places, plan), [3, 5])
  assert packing.efficiency(plan) == 6 / 7


def test_golden_with_a_shared_prefix():
  # Both start with 7 8; the sequences go on 1 2 and 3.
  rollout = _rollout([[7, 8, 1, 2], [7, 8, 3, 0]], [4, 3], [3, 2])
  prefix = packing.common_prefix(rollout.tokens, rollout.prompt_lengths)
  assert prefix == 1  # the shortest prompt is 7 8: its last token is its own
  plan = packing.plan(rollout.lengths, 4, 6, prefix_length=prefix)
  rows = packing.rows(rollout, plan)
  np.testing.assert_array_equal(rows.tokens, [[7, 8, 1, 2, 8, 3]])
  np.testing.assert_array_equal(
    rows.segment_ids, [[types.SHARED, 1, 1, 1, 2, 2]]
  )
  np.testing.assert_array_equal(rows.positions, [[0, 1, 2, 3, 1, 2]])
  np.testing.assert_array_equal(rows.targets, [[0, 1, 2, 0, 3, 0]])
  np.testing.assert_array_equal(rows.mask, [[0, 0, 1, 0, 1, 0]])
  np.testing.assert_array_equal(plan.slot, [[0, 1, 2, 3], [0, 4, 5, -1]])


def test_first_fit_decreasing():
  # By size 5 4 3 2 in rows of 7: 5 opens row 0, 4 opens row 1, 3 fills row 1,
  # 2 fills row 0.
  plan = packing.plan([3, 5, 2, 4], 5, 7, rows_multiple=3)
  np.testing.assert_array_equal(
    plan.segment_ids,
    [[1, 1, 1, 1, 1, 2, 2], [1, 1, 1, 1, 2, 2, 2], [0] * 7],
  )
  np.testing.assert_array_equal(plan.source[:2, 0] // 5, [1, 3])
  np.testing.assert_array_equal(plan.source[:2, -1] // 5, [2, 0])
  # 2 would fit into either row, and takes the first.
  plan = packing.plan([4, 5, 2], 5, 7)
  np.testing.assert_array_equal(plan.source[:, 5], [2 * 5, -1])


@pytest.mark.parametrize('prefix', [0, 3])
@pytest.mark.parametrize('seed', range(5))
def test_unpack_inverts_pack_at_actions(seed, prefix):
  rollout = _random(seed, prefix)
  plan = packing.plan(
    rollout.lengths, 20, 24, rows_multiple=2, prefix_length=prefix
  )
  assert plan.source.shape[0] % 2 == 0
  rng = np.random.default_rng(seed)
  numbers = rng.normal(size=(12, 20)).astype(np.float32)
  numbers[~rollout.mask] = np.nan  # masked places must not matter
  there = packing.pack(numbers, plan)
  back = packing.unpack(there, plan)
  assert back.dtype == np.float32
  np.testing.assert_array_equal(back[rollout.mask], numbers[rollout.mask])
  # An independent reading: walk over the tokens one at a time.
  rows = packing.rows(rollout, plan)
  actions = 0
  for n in range(12):
    for t in range(prefix, rollout.lengths[n]):
      row, place = divmod(int(plan.slot[n, t]), 24)
      assert rows.tokens[row, place] == rollout.tokens[n, t]
      assert rows.positions[row, place] == t
      assert rows.segment_ids[row, place] > 0
      assert rows.temperature[row, place] == np.float32(0.5)
      is_action = t + 1 < rollout.lengths[n] and rollout.mask[n, t + 1]
      assert rows.mask[row, place] == is_action
      if is_action:
        assert rows.targets[row, place] == rollout.tokens[n, t + 1]
        assert there[row, place] == numbers[n, t + 1]
        actions += 1
  assert actions == rollout.mask.sum() == rows.mask.sum()
  # Every used row starts with one copy of the prefix, and holds nothing else
  # twice.
  used = (plan.source >= 0).any(axis=1)
  assert (plan.segment_ids[used, :prefix] == types.SHARED).all()
  own = plan.source[plan.segment_ids > 0]
  assert len(np.unique(own)) == len(own) == (rollout.lengths - prefix).sum()
  np.testing.assert_array_equal(
    packing.last(rows.tokens, plan),
    rollout.tokens[np.arange(12), rollout.lengths - 1],
  )


def test_segments_of_a_row_are_contiguous_and_numbered_from_one():
  plan = packing.plan(_random(0).lengths, 20, 24)
  for ids in plan.segment_ids:
    seen = ids[ids != types.PADDING]
    assert seen[0] == 1 and set(np.diff(seen)) <= {0, 1}
    assert (ids[len(seen) :] == types.PADDING).all()


def test_plan_is_deterministic_and_wastes_little():
  lengths = np.random.default_rng(0).integers(20, 200, 400)
  first, second = (packing.plan(lengths, 200, 512) for _ in range(2))
  np.testing.assert_array_equal(first.source, second.source)
  assert packing.efficiency(first) > 0.95


def test_common_prefix():
  tokens = np.asarray([[1, 2, 3, 4], [1, 2, 9, 4]])
  assert packing.common_prefix(tokens, [4, 4]) == 2
  assert packing.common_prefix(tokens, [4, 2]) == 1
  assert packing.common_prefix(tokens, [1, 4]) == 0
  assert packing.common_prefix(tokens[:1], [4]) == 3
  assert packing.common_prefix(np.asarray([[1, 2], [3, 2]]), [2, 2]) == 0


@pytest.mark.parametrize(
  'arguments, message',
  [
    (dict(lengths=[], width=4, tokens_per_row=4), 'nothing to pack'),
    (dict(lengths=[2, 6], width=6, tokens_per_row=5), 'sequence 1 has 6'),
    (dict(lengths=[2, 6], width=5, tokens_per_row=8), 'only 5 wide'),
    (dict(lengths=[2, 0], width=5, tokens_per_row=8), 'sequence 1 has 0'),
    (
      dict(lengths=[4, 2], width=5, tokens_per_row=8, prefix_length=2),
      'more than the 2',
    ),
    (
      dict(lengths=[4], width=5, tokens_per_row=8, rows_multiple=0),
      'rows_multiple',
    ),
  ],
)
def test_plan_refuses(arguments, message):
  with pytest.raises(ValueError, match=message):
    packing.plan(**arguments)


def test_rows_refuse_an_action_that_would_be_lost():
  rollout = _rollout([[7, 8, 1, 2]], [4], [3])
  plan = packing.plan(rollout.lengths, 4, 6)
  for t, lengths in ((0, [4]), (3, [3])):
    mask = np.arange(4)[None] == t
    short = packing.plan(lengths, 4, 6)
    bad = rollout.replace(mask=mask, lengths=np.asarray(lengths))
    with pytest.raises(ValueError, match=f'action at position {t}'):
      packing.rows(bad, short)
  with pytest.raises(ValueError, match='other lengths'):
    packing.rows(rollout.replace(lengths=np.asarray([3])), plan)
  shared = packing.plan(rollout.lengths, 4, 6, prefix_length=3)
  with pytest.raises(ValueError, match='shared prefix: 3'):
    packing.rows(rollout, shared)


def test_balance_by_hand():
  # Heaviest first, to the lightest bin with room: 9 and 7 open the bins, 6
  # joins 7, 5 joins 9, and 4 goes to 13 since 14 + 4 is more.
  order = packing.balance(np.array([4.0, 9, 5, 7, 6]), bins=2, capacity=3)
  np.testing.assert_array_equal(order, [3, 4, 0, 1, 2, -1])
  # No room is no choice, however light the bin.
  order = packing.balance(np.array([9.0, 1, 1, 1]), bins=2, capacity=2)
  np.testing.assert_array_equal(order, [0, 3, 1, 2])


def test_balance_against_the_oracle():
  """No heavier than the partition of the oracle (largest differencing)."""
  case = json.loads(_ORACLE.read_text())['balance']
  work, bins = np.array(case['workload'], float), case['k']
  size = len(work) // bins
  order = packing.balance(work, bins, size).reshape(bins, size)
  assert sorted(order.reshape(-1)) == list(range(len(work)))
  ours = work[order].sum(axis=1).max()
  theirs = max(work[part].sum() for part in case['equal'])
  assert ours <= 1.05 * theirs


def test_rows_in_another_order_hold_the_same():
  rollout = _random(4, prefix=2)
  plan = packing.plan(rollout.lengths, 20, 24, prefix_length=2)
  count = len(plan.source)
  order = np.array([-1, *range(count)[::-1], -1])
  moved = packing.with_rows(plan, order)
  numbers = np.arange(240.0).reshape(12, 20)
  for one, other in (
    (packing.pack(numbers, plan), packing.pack(numbers, moved)),
    (packing.rows(rollout, plan).tokens, packing.rows(rollout, moved).tokens),
  ):
    np.testing.assert_array_equal(other[1:-1], one[::-1])
    assert not other[[0, -1]].any()
  places = np.arange(moved.source.size).reshape(moved.source.shape)
  np.testing.assert_array_equal(
    packing.pack(packing.unpack(places, moved), moved, fill=-1)[1:-1],
    packing.pack(packing.unpack(places[1:-1][::-1], plan), plan, fill=-1)[::-1],
  )
  np.testing.assert_array_equal(
    packing.last(places, moved), packing.last(places[1:-1][::-1], plan)
  )


def test_work_of_rows():
  # Rows of 8: 5 and 3; 4.  Cost n + n^2: 30 + 12 and 20.
  plan = packing.plan(np.array([5, 4, 3]), 6, 8, rows_multiple=3)
  work = packing.work(plan, lambda n: n + n * n)
  np.testing.assert_array_equal(work, [42, 20, 0])


def test_no_sequences_are_empty_rows():
  plan = packing.nothing(20, 2, 8)
  none = _rollout(np.zeros((0, 20)), [], [])
  rows = packing.rows(none, plan)
  assert rows.tokens.shape == (2, 8) and not rows.mask.any()
  assert packing.pack(np.zeros((0, 20)), plan).shape == (2, 8)
  assert packing.unpack(np.ones((2, 8)), plan).shape == (0, 20)
  assert packing.last(np.ones((2, 8)), plan).shape == (0,)
  assert packing.work(plan, lambda n: n).tolist() == [0, 0]


def test_rows_of_gsm8k_are_nine_tenths_full():
  """Problem and answer in bytes, packed into rows of the longest: >= 0.9."""
  path = testing.shared_path('data/gsm8k/test.jsonl')
  examples = [json.loads(line) for line in path.read_text().splitlines()]
  lengths = np.array([len(e['question'] + e['answer']) for e in examples])
  longest = int(lengths.max())
  step = np.random.default_rng(0).choice(lengths, 512)
  plan = packing.plan(step, longest, longest, rows_multiple=8)
  assert packing.efficiency(plan) >= 0.9
  # One sequence a row would leave more than half of the places empty.
  assert step.mean() / longest < 0.5


def test_shapes_are_checked():
  plan = packing.plan([3, 2], 4, 6)
  with pytest.raises(ValueError, match=r'\(2, 5\)'):
    packing.pack(np.zeros((2, 5)), plan)
  with pytest.raises(ValueError, match=r'\(2, 4\)'):
    packing.unpack(np.zeros((2, 4)), plan)
