"""Rules: goldens by hand."""

import decimal

import pytest

from rlhf_jax.data import sources
from rlhf_jax.rewards import rules


def _score(reward, response, answer='', metadata=()):
  example = sources.Example('q', answer, 'test', dict(metadata))
  return reward([response], [example])[0]


@pytest.mark.parametrize(
  'text, number',
  [
    ('3+4=7', '7'),
    ('7-3', '3'),  # a term, not a sign
    ('= -3', '-3'),
    ('x=-3.', '-3'),
    ('(4)-2', '2'),
    ('It is $1,000.50.', '1000.50'),
    ('1,2,3', '3'),  # a list, not thousands
    ('12,3456', '3456'),
    ('.5 of it', '0.5'),
    ('48/2 = <<48/2=24>>24\n#### 72', '72'),
    ('in 2024, 5 apples', '5'),
    ('none', None),
    ('', None),
  ],
)
def test_last_number(text, number):
  expected = None if number is None else decimal.Decimal(number)
  assert rules.last_number(text) == expected


def test_last_number_is_fast_on_long_texts():
  assert rules.last_number('1' * 100_000 + ',' * 100_000 + '7') == 7
  assert rules.last_number('1,' * 100_000 + 'x-5') == 5


def test_exact_match():
  reward = rules.load('exact_match')
  assert _score(reward, ' 432\n', '432') == 1.0
  assert _score(reward, '4321', '432') == 0.0
  assert _score(reward, '', '432') == 0.0
  first = rules.load('exact_match', extract='first_line')
  assert _score(first, '\n432 \n1+1=2', '432') == 1.0
  tag = rules.load('exact_match', extract='answer_tag')
  assert _score(tag, '<answer>1</answer> <answer>\n2 </answer>', '2') == 1.0
  assert _score(tag, '2', '2') == 0.0
  number = rules.load('exact_match', extract='last_number')
  assert _score(number, 'It is 1,432.', '1432') == 1.0


def test_numeric():
  reward = rules.load('numeric')
  assert _score(reward, 'so it is $72.00.', 'x\n#### 72') == 1.0
  assert _score(reward, '71', '72') == 0.0
  assert _score(reward, 'no idea', '72') == 0.0
  assert _score(reward, '72', 'unknown') is None
  # As decimals, not as floats: these differ in the 20th digit.
  assert _score(reward, '0.10000000000000000001', '0.1') == 0.0


def test_length_penalty():
  reward = rules.load('length_penalty', start=4, stop=8)
  lengths = {0: 0.0, 4: 0.0, 5: -0.25, 6: -0.5, 8: -1.0, 100: -1.0}
  for length, expected in lengths.items():
    assert _score(reward, 'x' * length) == expected
  with pytest.raises(ValueError, match='start < stop'):
    rules.load('length_penalty', start=8, stop=8)


def test_character_share():
  reward = rules.load('character_share', characters='ab')
  assert _score(reward, 'abcd') == 0.5
  assert _score(reward, '') == 0.0
  with pytest.raises(ValueError, match='at least one'):
    rules.load('character_share', characters='')


def test_reasoning_gym():
  pytest.importorskip('reasoning_gym')
  example = sources.load('reasoning_gym', task='chain_sum', size=3)[1]
  plain = rules.load('reasoning_gym')
  answer = example.answer
  assert plain([f' {answer}\n', 'no'], [example] * 2) == [1.0, 0.0]
  first = rules.load('reasoning_gym', extract='first_line')
  assert first([f'{answer}\nmore text'], [example]) == [1.0]
  assert _score(plain, '1', '1') is None  # an example of another source


def test_reasoning_gym_scorer_that_fails(monkeypatch):
  package = pytest.importorskip('reasoning_gym')

  def fails_on_words(answer, entry):
    return float(int(answer) == int(entry['answer']))

  monkeypatch.setattr(
    package, 'get_score_answer_fn', lambda name: fails_on_words
  )
  entry = {'answer': '5', 'metadata': {'source_dataset': 'any'}}
  reward = rules.load('reasoning_gym')
  assert _score(reward, '5', metadata={'entry': entry}) == 1.0
  assert _score(reward, 'five', metadata={'entry': entry}) == 0.0
  # Not the response's fault: the reference answer fails as well.
  entry['answer'] = 'five'
  with pytest.raises(ValueError, match='five'):
    _score(reward, '5', metadata={'entry': entry})


def test_load_lists_the_choices():
  with pytest.raises(ValueError, match="'exact_match', 'length_penalty'"):
    rules.load('exact')
  with pytest.raises(ValueError, match=r"'start', 'stop'"):
    rules.load('length_penalty', begin=3)
  with pytest.raises(ValueError, match="'first_line'"):
    rules.load('exact_match', extract='line')
