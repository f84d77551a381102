"""Sources: generated problems are right and held out, bad files are named."""

import itertools
import json
import re

import pytest

from rlhf_jax import testing
from rlhf_jax.data import sources


def _value(prompt):
  """An independent reading of a generated sum."""
  assert re.fullmatch(r'\d+([+-]\d+)+=', prompt)
  return str(sum(map(int, re.findall(r'[+-]?\d+', prompt))))


@pytest.mark.parametrize('operators', ['+', '-', '+-'])
def test_arithmetic_answers(operators):
  examples = sources.load(
    'arithmetic', digits=3, operands=3, operators=operators, seed=1
  )
  for i in itertools.chain(range(50), (2**31 - 1,)):
    assert examples[i].answer == _value(examples[i].prompt)
    signs = set(re.findall('[+-]', examples[i].prompt))
    assert signs <= set(operators)
    assert examples[i].source == 'arithmetic'


def test_arithmetic_has_random_access():
  first = sources.load('arithmetic', seed=3)
  assert first[7] == sources.load('arithmetic', seed=3, size=8)[7]
  assert first[7] != first[8]
  assert first[7] != sources.load('arithmetic', seed=4)[7]
  assert len(first) == 2**31
  with pytest.raises(IndexError):
    first[2**31]


def test_arithmetic_never_trains_on_held_out_problems():
  validation = sources.load('arithmetic', split='validation', size=300, seed=1)
  held_out = {example.prompt for example in validation}
  assert len(held_out) == len(validation) == 300
  # 10 000 problems, of which 30 000 draws see nearly all; neither the seed nor
  # the order of the operands lets a held-out problem through.
  for seed in (0, 1):
    train = sources.load('arithmetic', seed=seed, size=15_000)
    for example in train:
      a, b = example.prompt[:-1].split('+')
      assert f'{a}+{b}=' not in held_out and f'{b}+{a}=' not in held_out


def test_arithmetic_refuses():
  for arguments, message in (
    (dict(split='test'), 'split'),
    (dict(operators='*'), 'operators'),
    (dict(digits=0), 'digits'),
    (dict(size=0), 'size'),
    (dict(split='validation', digits=1, size=60), 'distinct held-out'),
  ):
    with pytest.raises(ValueError, match=message):
      sources.load('arithmetic', **arguments)


def test_load_lists_the_choices():
  with pytest.raises(ValueError, match="'arithmetic', 'jsonl'"):
    sources.load('aritmetic')
  with pytest.raises(ValueError, match="digit'.*'digits'"):
    sources.load('arithmetic', digit=2)


def test_jsonl(tmp_path):
  path = tmp_path / 'set.jsonl'
  messages = [{'role': 'user', 'content': 'hi'}]
  lines = [{'prompt': 'a', 'answer': 1.5}, {'prompt': messages, 'answer': 'b'}]
  path.write_text('\n\n'.join(map(json.dumps, lines)))
  examples = sources.load('jsonl', path=str(path))
  assert [e.answer for e in examples] == ['1.5', 'b']
  assert examples[0].source == 'set' and examples[0].metadata == lines[0]
  assert examples[1].prompt == tuple(messages)
  unanswered = sources.load('jsonl', path=str(path), answer_key=None)
  assert unanswered[0].answer == ''


@pytest.mark.parametrize(
  'content, message',
  [
    ('', 'is empty'),
    ('\n\n', 'is empty'),
    ('{"prompt": "a", "answer": "b"}\n{oops', 'set.jsonl:2: not JSON'),
    ('\n[1]', 'set.jsonl:2: expected an object'),
    ('{"question": "a", "answer": "b"}', r"no key 'prompt'.*'question'"),
    ('{"prompt": "a"}', "no key 'answer'"),
    ('{"prompt": 3, "answer": "b"}', 'text or a list of messages'),
    ('{"prompt": "a", "answer": null}', 'text or a number'),
  ],
)
def test_jsonl_refuses(tmp_path, content, message):
  path = tmp_path / 'set.jsonl'
  path.write_text(content)
  with pytest.raises(ValueError, match=message):
    sources.load('jsonl', path=str(path))


def test_jsonl_absent_or_not_text(tmp_path):
  with pytest.raises(ValueError, match='cannot read'):
    sources.load('jsonl', path=str(tmp_path / 'none.jsonl'))
  (tmp_path / 'set.jsonl').write_bytes(b'\xff\xfe')
  with pytest.raises(ValueError, match='cannot read'):
    sources.load('jsonl', path=str(tmp_path / 'set.jsonl'))


def test_jsonl_of_real_problems():
  path = testing.shared_path('data/gsm8k/test.jsonl')
  examples = sources.load('jsonl', path=str(path), prompt_key='question')
  assert len(examples) == 1319
  assert examples[0].answer.endswith('#### 18')


def test_prompts():
  examples = sources.load('prompts', prompts=['a', 'b'], answers=['1', 2])
  assert [e.answer for e in examples] == ['1', '2']
  assert sources.load('prompts', prompts=['a'])[0].answer == ''
  with pytest.raises(ValueError, match='2 prompts but 1'):
    sources.load('prompts', prompts=['a', 'b'], answers=['1'])
  with pytest.raises(ValueError, match='list of texts'):
    sources.load('prompts', prompts='ab')


_TASK = dict(task='chain_sum', min_terms=2, max_terms=2, max_digits=2)


def test_reasoning_gym():
  pytest.importorskip('reasoning_gym')
  examples = sources.load('reasoning_gym', size=2**40, seed=5, **_TASK)
  assert examples[3].source == 'chain_sum'
  assert examples[3].answer == examples[3].metadata['entry']['answer']
  # The trap: item 3 of seed 5 is item 0 of seed 8.
  shifted = sources.load('reasoning_gym', size=4, seed=8, **_TASK)
  assert examples[3].prompt == shifted[0].prompt
  with pytest.raises(ValueError, match='chain_summ'):
    sources.load('reasoning_gym', task='chain_summ')
  with pytest.raises(ValueError, match='min_termss'):
    sources.load('reasoning_gym', task='chain_sum', min_termss=2)


def test_neighbouring_seeds_are_refused():
  pytest.importorskip('reasoning_gym')

  def load(size, seed, **other):
    return sources.load('reasoning_gym', size=size, seed=seed, **_TASK | other)

  train = load(1000, 0)
  with pytest.raises(ValueError, match='seed of one to 1000 or more'):
    sources.check_disjoint(train, load(100, 999))
  with pytest.raises(ValueError, match='share items'):
    sources.check_disjoint(sources.exclude(train, ()), load(100, 0))
  # Spaced seeds are accepted, but small problems recur: they are counted,
  # and `exclude` takes them out.
  validation = load(100, 10_000)
  assert sources.check_disjoint(train, validation) > 0
  rest = sources.exclude(train, validation)
  assert 0 < len(rest) < 1000
  assert sources.check_disjoint(rest, validation) == 0
  assert sources.check_disjoint(load(30_000, 10_100), validation) is None


def test_exclude_refuses_what_it_cannot_do():
  few = sources.load('prompts', prompts=['a', 'b'])
  with pytest.raises(ValueError, match='all 2 examples'):
    sources.exclude(few, few)
  with pytest.raises(ValueError, match='walks through'):
    sources.exclude(sources.load('arithmetic'), few)


def test_parts_of_the_arithmetic_problems_are_disjoint():
  make = lambda **kwargs: {
    example.prompt
    for example in sources.arithmetic(size=600, digits=1, **kwargs)
  }
  first, second = make(part=(0.0, 0.3)), make(part=(0.3, 1.0), seed=1)
  assert first and second and not first & second
  assert len(first) < len(second)  # 0.3 against 0.7
  held_out = {
    example.prompt
    for example in sources.arithmetic(split='validation', size=4, digits=1)
  }
  assert not held_out & (first | second)
  with pytest.raises(ValueError, match='low < high'):
    sources.arithmetic(part=(0.5, 0.5))
