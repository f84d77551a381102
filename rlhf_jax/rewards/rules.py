"""Rewards that a rule decides: exact answers, numbers, lengths, characters.

Each function here makes a reward (see `base`) from its settings.
"""

from collections.abc import Callable, Mapping
import decimal
import inspect
import re

from rlhf_jax.data import sources
from rlhf_jax.rewards import base

# 1,234.5 or 1234.5 or .5; the sign is the number's own only where it does not
# follow another term: '7-3' ends in 3, '= -3' in -3.
_NUMBER = re.compile(
  r'(?:(?<![\w)\]])[-+])?'
  r'(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)',
  re.ASCII,
)
_TAG = re.compile(r'<answer>(.*?)</answer>', re.DOTALL)


def last_number(text: str) -> decimal.Decimal | None:
  """The last number in a text: '3 + 4 = 1,007.50.' -> 1007.5; or None."""
  found = _NUMBER.findall(text)
  return decimal.Decimal(found[-1].replace(',', '')) if found else None


def _first_line(text: str) -> str:
  return text.strip().partition('\n')[0].strip()


def _number_text(text: str) -> str:
  number = last_number(text)
  return '' if number is None else str(number)


def _answer_tag(text: str) -> str:
  tags = _TAG.findall(text)
  return tags[-1].strip() if tags else ''


# What of a response is the answer.
EXTRACTORS = {
  'text': str.strip,
  'first_line': _first_line,
  'last_number': _number_text,
  'answer_tag': _answer_tag,
}


def _extractor(name: str) -> Callable[[str], str]:
  if name not in EXTRACTORS:
    raise ValueError(
      f'no extractor {name!r}; the choices are {sorted(EXTRACTORS)}'
    )
  return EXTRACTORS[name]


def exact_match(*, extract: str = 'text') -> base.Reward:
  """1 where the response is the reference answer, else 0.

  Args:
    extract: what of the response counts: 'text' (all of it, without blanks
      around), 'first_line', 'last_number', or 'answer_tag' (in the last
      <answer>...</answer>).
  """
  extractor = _extractor(extract)

  def reward(responses, examples):
    return [
      float(extractor(response) == example.answer.strip())
      for response, example in zip(responses, examples)
    ]

  return reward


def numeric() -> base.Reward:
  """1 where the last number of the response equals that of the answer.

  As numbers: 72, 72.0 and +72 are equal, and so are 1,000 and 1000.  Does not
  apply (None) to examples whose answer has no number.
  """

  def one(response, example):
    answer = last_number(example.answer)
    return None if answer is None else float(last_number(response) == answer)

  def reward(responses, examples):
    return [one(*pair) for pair in zip(responses, examples)]

  return reward


def length_penalty(*, start: int, stop: int) -> base.Reward:
  """0 up to `start` characters, then linearly to -1 at `stop` and beyond."""
  if not 0 <= start < stop:
    raise ValueError(f'expected 0 <= start < stop, got {start} and {stop}')

  def reward(responses, examples):
    del examples
    excess = [(len(r) - start) / (stop - start) for r in responses]
    return [-min(1.0, max(0.0, e)) for e in excess]

  return reward


def character_share(*, characters: str) -> base.Reward:
  """Share of the response's characters that are in a set; 0 if it is empty.

  Dense and easy to learn from: made for tests and demonstrations.
  """
  if not characters:
    raise ValueError('characters must name at least one character')
  wanted = frozenset(characters)

  def reward(responses, examples):
    del examples
    return [
      sum(c in wanted for c in r) / len(r) if r else 0.0 for r in responses
    ]

  return reward


def reasoning_gym(*, extract: str = 'text') -> base.Reward:
  """The score that a task of the package reasoning-gym gives, 0 to 1.

  Applies to examples of the source of that name, else None.  A response that
  the task's scorer cannot parse gets 0, but where the scorer fails on the
  reference answer too, its error stands.

  Args:
    extract: as `exact_match`.
  """
  extractor = _extractor(extract)
  package = sources.import_reasoning_gym()
  scorers: dict[str, Callable] = {}

  def one(response, example):
    entry = example.metadata.get('entry')
    if not isinstance(entry, Mapping):
      return None
    task = entry['metadata']['source_dataset']
    if task not in scorers:
      scorers[task] = package.get_score_answer_fn(task)
    try:
      return float(scorers[task](extractor(response), entry))
    # A scorer may fail on any text that a policy writes: that is worth 0,
    # unless it fails on the right answer too; then its error is raised here.
    except Exception:  # pylint: disable=broad-exception-caught
      scorers[task](entry['answer'], entry)
      return 0.0

  def reward(responses, examples):
    return [one(*pair) for pair in zip(responses, examples)]

  return reward


def load(name: str, **settings) -> base.Reward:
  """The reward of this name with its settings.

  Raises:
    ValueError: unknown name or settings; lists the choices.
  """
  if name not in RULES:
    raise ValueError(f'no reward {name!r}; the choices are {sorted(RULES)}')
  signature = inspect.signature(RULES[name])
  try:
    signature.bind(**settings)
  except TypeError as error:
    raise ValueError(
      f'reward {name!r}: {error}; its settings are {list(signature.parameters)}'
    ) from error
  return RULES[name](**settings)


RULES = {
  'exact_match': exact_match,
  'numeric': numeric,
  'length_penalty': length_penalty,
  'character_share': character_share,
  'reasoning_gym': reasoning_gym,
}
