"""The prompt stream: one counter addresses everything."""

import os

import numpy as np
import pytest

from rlhf_jax import testing
from rlhf_jax.data import packing
from rlhf_jax.data import pipeline
from rlhf_jax.data import sources
from rlhf_jax.data import tokenizer as tokenizer_lib


@pytest.fixture(scope='module', name='tokenizer')
def _tokenizer():
  return tokenizer_lib.load('bytes')


def _stream(tokenizer, prompts, **keywords):
  examples = sources.load('prompts', prompts=prompts, answers=prompts)
  keywords = {'max_prompt_length': 8} | keywords
  return pipeline.PromptStream(examples, tokenizer, **keywords)


def _indices(prompts):
  return [prompt.index for prompt in prompts]


_TEN = [f'p{i}' for i in range(10)]


def test_the_cursor_is_the_whole_state(tokenizer):
  stream = _stream(tokenizer, _TEN, seed=1)
  whole = [stream.batch(i, 1)[0].index for i in range(40)]
  for size in (3, 7, 10):
    parts = [_indices(stream.batch(c, size)) for c in range(0, 30, size)]
    assert sum(parts, []) == whole[: len(sum(parts, []))]
  # Another process that resumes in the middle.
  again = _stream(tokenizer, _TEN, seed=1)
  assert _indices(again.batch(17, 10)) == whole[17:27]
  for prompt in again.batch(17, 10):
    assert bytes(prompt.ids.tolist()).decode() == f'p{prompt.index}'
    assert prompt.ids.dtype == np.int32


def test_every_epoch_sees_every_prompt_once_in_another_order(tokenizer):
  stream = _stream(tokenizer, _TEN)
  epochs = [_indices(stream.batch(10 * e, 10)) for e in range(4)]
  assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs}) == 4
  # Neighbouring seeds do not share epochs.
  other = _stream(tokenizer, _TEN, seed=1)
  theirs = [_indices(other.batch(10 * e, 10)) for e in range(4)]
  assert not {tuple(e) for e in epochs} & {tuple(e) for e in theirs}
  assert stream.epoch(25) == 2.5


def test_without_shuffle_the_order_is_the_sources(tokenizer):
  stream = _stream(tokenizer, _TEN, shuffle=False)
  assert _indices(stream.batch(0, 10)) == list(range(10))
  assert _indices(stream.batch(8, 4)) == [8, 9, 0, 1]


def test_generated_sets_are_not_read_through(tokenizer):
  examples = sources.load('arithmetic')
  stream = pipeline.PromptStream(examples, tokenizer, max_prompt_length=8)
  assert len(stream) == 2**31
  assert stream.report['scanned'] <= 1001
  far = stream.batch(3 * 2**31 + 5, 4)
  assert far[2].example == examples[far[2].index]


_MIXED = ['ab', 'abcdef', 'abc', 'abcdefgh', 'a']


def test_overlong_is_an_error(tokenizer):
  with pytest.raises(ValueError, match='2 of 5 .*longest: 8.*example 1'):
    _stream(tokenizer, _MIXED, max_prompt_length=4)
  # Exactly at the limit is not overlong.
  assert _stream(tokenizer, _MIXED, max_prompt_length=8).report['longest'] == 8


def test_overlong_is_dropped_and_counted(tokenizer):
  stream = _stream(tokenizer, _MIXED, max_prompt_length=4, overlong='drop')
  assert len(stream) == 3
  assert sorted(_indices(stream.batch(0, 3))) == [0, 2, 4]
  assert stream.report == {
    'examples': 5,
    'scanned': 5,
    'longest': 8,
    'overlong': 2,
    'dropped': 2,
    'truncated': 0,
  }
  with pytest.raises(ValueError, match='all 5 prompts'):
    _stream(tokenizer, ['abc'] * 5, max_prompt_length=2, overlong='drop')
  with pytest.raises(ValueError, match='set a size'):
    pipeline.PromptStream(
      sources.load('arithmetic'),
      tokenizer,
      max_prompt_length=3,
      overlong='drop',
    )


def test_overlong_is_cut_on_the_left_but_specials_stay(tokenizer):
  stream = _stream(
    tokenizer,
    _MIXED,
    max_prompt_length=4,
    overlong='truncate_left',
    shuffle=False,
    prompt_format='<bos>{prompt}',
  )
  ids = [prompt.ids.tolist() for prompt in stream.batch(0, 5)]
  assert ids[1] == [257, *b'def'] and ids[3] == [257, *b'fgh']
  assert ids[0] == [257, *b'ab'] and ids[2] == [257, *b'abc']
  assert stream.report['truncated'] == 2 and stream.report['dropped'] == 0


def test_an_overlong_prompt_that_the_scan_missed_is_an_error(tokenizer):
  class Rare(list):
    def __len__(self):
      return 10**6

    def __getitem__(self, index):
      text = 'much too long' if index == 123_457 else 'ok'
      return sources.Example(text, '', 'rare')

  stream = pipeline.PromptStream(
    Rare(), tokenizer, max_prompt_length=5, shuffle=False
  )
  with pytest.raises(ValueError, match='example 123457'):
    stream.batch(123_457, 1)


def test_refusals(tokenizer):
  with pytest.raises(ValueError, match='empty'):
    pipeline.PromptStream((), tokenizer, max_prompt_length=8)
  with pytest.raises(ValueError, match="'drop'"):
    _stream(tokenizer, _TEN, overlong='trunc')
  with pytest.raises(ValueError, match='at least 1'):
    _stream(tokenizer, _TEN, max_prompt_length=0)
  with pytest.raises(ValueError, match="example 1 of 'prompts'.*no token"):
    _stream(tokenizer, ['a', ''])
  with pytest.raises(ValueError, match='batch of 11 .* data set of 10'):
    _stream(tokenizer, _TEN).batch(0, 11)
  with pytest.raises(ValueError, match='negative'):
    _stream(tokenizer, _TEN).batch(-1, 1)


def test_supervised(tokenizer):
  examples = sources.load('prompts', prompts=['1+2=', 'ab'], answers=['3', 'c'])
  stream = pipeline.PromptStream(
    examples, tokenizer, max_prompt_length=8, shuffle=False
  )
  rollout = pipeline.supervised(stream.batch(0, 2), tokenizer, width=7)
  np.testing.assert_array_equal(
    rollout.tokens,
    [[*b'1+2=', *b'3', 258, 0], [*b'ab', *b'c', 258, 0, 0, 0]],
  )
  np.testing.assert_array_equal(rollout.lengths, [6, 4])
  np.testing.assert_array_equal(rollout.prompt_lengths, [4, 2])
  # The answer and EOS are actions; the prompt and the padding are not.
  np.testing.assert_array_equal(
    rollout.mask, [[0, 0, 0, 0, 1, 1, 0], [0, 0, 1, 1, 0, 0, 0]]
  )
  assert not rollout.truncated.any()
  plan = packing.plan(rollout.lengths, 7, 10)
  assert packing.rows(rollout, plan).mask.sum() == 4


def test_supervised_overlong_and_empty(tokenizer):
  stream = _stream(tokenizer, ['abcd'])
  with pytest.raises(ValueError, match='are 9 tokens, 6 fit'):
    pipeline.supervised(stream.batch(0, 1), tokenizer, width=6)
  cut = pipeline.supervised(
    stream.batch(0, 1), tokenizer, width=6, overlong='truncate'
  )
  assert cut.tokens.tolist() == [[*b'abcd', *b'ab']]
  assert cut.truncated.all() and cut.mask.sum() == 2
  with pytest.raises(ValueError, match='prompt'):
    pipeline.supervised(
      stream.batch(0, 1), tokenizer, width=4, overlong='truncate'
    )
  unanswered = pipeline.PromptStream(
    sources.load('prompts', prompts=['a']), tokenizer, max_prompt_length=8
  )
  with pytest.raises(ValueError, match='no answer'):
    pipeline.supervised(unanswered.batch(0, 1), tokenizer, width=6)
  with pytest.raises(ValueError, match="'truncate'"):
    pipeline.supervised([], tokenizer, width=6, overlong='cut')


def test_pad_that_is_eos_keeps_eos_in_the_loss():
  stories = tokenizer_lib.load(str(testing.shared_path('data/stories260k')))
  assert stories.pad_token_id == stories.eos_token_id
  stream = pipeline.PromptStream(
    sources.load('prompts', prompts=['Once'], answers=[' upon']),
    stories,
    max_prompt_length=8,
  )
  rollout = pipeline.supervised(stream.batch(0, 1), stories, width=12)
  length = int(rollout.lengths[0])
  assert rollout.tokens[0, length - 1] == stories.eos_token_id
  assert rollout.mask[0, length - 1] and not rollout.mask[0, length:].any()
  assert stories.decode(rollout.tokens[0, 1 : length - 1]) == 'Once upon'


def test_few_shot_prompts_share_a_prefix_under_the_real_tokenizer():
  folder = os.environ.get('RLHF_JAX_SMOLLM2')
  if not folder:
    pytest.skip('RLHF_JAX_SMOLLM2 names no folder with the real tokenizer')
  pytest.importorskip('reasoning_gym')
  tokenizer = tokenizer_lib.load(folder)
  examples = sources.load(
    'reasoning_gym', task='chain_sum', size=100, min_terms=2, max_terms=2
  )
  shots = 'State the final answer: 12 + 7 = 19\n' * 3
  stream = pipeline.PromptStream(
    examples,
    tokenizer,
    max_prompt_length=120,
    prompt_format=shots + '{prompt}',
  )
  prompts = stream.batch(0, 8)
  width = max(len(prompt.ids) for prompt in prompts)
  tokens = np.zeros((8, width), np.int32)
  for row, prompt in zip(tokens, prompts):
    row[: len(prompt.ids)] = prompt.ids
  prefix = packing.common_prefix(tokens, [len(p.ids) for p in prompts])
  text = tokenizer_lib.decode(tokenizer, tokens[0, :prefix])
  assert text.startswith(shots) and text.rstrip().endswith('problem:')


def test_a_fingerprint_sees_prompts_answers_order_and_size(tokenizer):
  def of(prompts, answers=None, **keywords):
    examples = sources.load(
      'prompts', prompts=prompts, answers=answers or prompts
    )
    stream = pipeline.PromptStream(
      examples, tokenizer, max_prompt_length=8, **keywords
    )
    return pipeline.fingerprint(stream.batch(0, 2), len(stream))

  same = of(_TEN)
  assert same == of(list(_TEN))
  assert same.startswith('10 prompts, first 2: ')
  assert same != of(_TEN, seed=1)
  assert same != of([*_TEN, 'p10'])
  assert same != of(_TEN, [f'{x}!' for x in _TEN])
  # The same bytes, cut elsewhere.
  assert of(['ab', 'c'], ['x', 'x'], shuffle=False) != of(
    ['a', 'bc'], ['x', 'x'], shuffle=False
  )
