"""Where prompts come from: generated problems, files, literal lists.

A source is a function that returns a `Sequence[Example]` with random access.
Generated sets make an item when it is asked for, so their size costs nothing.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import inspect
import json
import operator
from typing import Any

import numpy as np

# Sets up to this size may be walked through once at start.
WALK_LIMIT = 1_000_000


@dataclasses.dataclass(frozen=True)
class Example:
  """A prompt, and what is needed to judge a response to it."""

  prompt: str | tuple[Mapping[str, str], ...]  # a text, or chat messages
  answer: str  # the reference answer; '' where there is none
  source: str  # names the data set in metrics: val/<source>/...
  metadata: Mapping[str, Any] = dataclasses.field(
    default_factory=dict, hash=False
  )


class _Lazy(Sequence):
  """`size` examples made by `make(index)` when asked for."""

  def __init__(self, size, make, seeds=None):
    self._size = size
    self._make = make
    self.seeds = seeds  # (generator name, range of item seeds), or None

  def __len__(self):
    return self._size

  def __getitem__(self, index):
    index = operator.index(index)
    if not 0 <= index < self._size:
      raise IndexError(f'example {index} of {self._size}')
    return self._make(index)


def arithmetic(
  *,
  split: str = 'train',
  size: int | None = None,
  seed: int = 0,
  digits: int = 2,
  operands: int = 2,
  operators: str = '+',
  held_out_share: float = 0.1,
  part: tuple[float, float] = (0.0, 1.0),
  largest: int | None = None,
) -> Sequence[Example]:
  """Sums such as '47+385=' with the answer '432', generated.

  Whether a problem is held out is a property of the problem (a hash of its
  signed terms, so that 3+5 goes with 5+3), not of the seed: no training set
  contains a validation problem, whatever the seeds and sizes.

  Args:
    split: 'train' or 'validation'.
    size: problems; by default 2**31 for training and 256 for validation.
      Validation problems are distinct, training problems may recur.
    seed: of the draw.
    digits: operands are uniform on 0 .. 10**digits - 1.
    operands: terms of a problem, at least 2.
    operators: those to draw from, '+', '-' or '+-'.
    held_out_share: share of all problems kept for validation.
    part: keeps the problems from the first to the second fraction of the split;
      training sets of (0, 0.3) and (0.3, 1) share no problem.
    largest: operands are uniform on 0 .. largest instead.

  Raises:
    ValueError: an argument out of range, or too few distinct problems.
  """
  if split not in ('train', 'validation'):
    raise ValueError(f"split must be 'train' or 'validation', got {split!r}")
  if digits < 1 or operands < 2 or not 0 < held_out_share < 1:
    raise ValueError(
      'expected digits >= 1, operands >= 2 and 0 < held_out_share < 1, got'
      f' {digits}, {operands}, {held_out_share}'
    )
  if not operators or set(operators) - set('+-'):
    raise ValueError(f"operators must be '+', '-' or '+-', got {operators!r}")
  limit = 10**digits if largest is None else largest + 1
  if limit < 2:
    raise ValueError(f'largest must be at least 1, got {largest}')
  low, high = part
  if not 0 <= low < high <= 1:
    raise ValueError(
      f'part must be (low, high) with 0 <= low < high <= 1, got {part}'
    )
  validation = split == 'validation'
  if size is None:
    size = 256 if validation else 2**31
  if size < 1:
    raise ValueError(f'size must be at least 1, got {size}')

  def draw(index):
    """The first draw of this index that belongs to the split, or None."""
    generator = np.random.default_rng((seed, index))
    for _ in range(10_000):
      terms = generator.integers(0, limit, operands).tolist()
      picks = generator.integers(0, len(operators), operands - 1)
      signs = ['+', *(operators[i] for i in picks)]
      place = _place(signs, terms)
      if (place < held_out_share) != validation:
        continue
      # Where it lies in its split, from 0 to 1.
      if validation:
        inside = place / held_out_share
      else:
        inside = (place - held_out_share) / (1 - held_out_share)
      if low <= inside < high:
        return signs, terms
    return None

  def make(index):
    problem = draw(index)
    if problem is None:
      raise ValueError(f'there is no {split} problem: raise digits')
    return _sum_example(*problem)

  if not validation:
    make(0)
    return _Lazy(size, make)
  distinct: dict[str, Example] = {}
  for index in range(20 * size):
    example = make(index)
    distinct.setdefault(example.prompt, example)
    if len(distinct) == size:
      return tuple(distinct.values())
  raise ValueError(
    f'found only {len(distinct)} of {size} distinct held-out problems of'
    f' {operands} operands with {digits} digits: ask for a smaller size, or'
    ' raise digits or held_out_share'
  )


def _place(signs, terms) -> float:
  """A number in [0, 1) that depends on the problem alone."""
  key = ' '.join(sorted(f'{sign}{term}' for sign, term in zip(signs, terms)))
  digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
  return int.from_bytes(digest, 'big') / 2**64


def _sum_example(signs, terms) -> Example:
  expression = ''.join(f'{s}{t}' for s, t in zip(signs, terms))[1:]
  answer = sum(t if s == '+' else -t for s, t in zip(signs, terms))
  return Example(f'{expression}=', str(answer), 'arithmetic')


def reasoning_gym(
  *, task: str, size: int = 10_000, seed: int = 0, **parameters
) -> Sequence[Example]:
  """Problems of a task of the package reasoning-gym, made when asked for.

  The package makes item i from seed + i alone: two sets whose seeds are
  closer than their sizes share items (see `check_disjoint`), and small
  problems recur under any seed (see `exclude`).

  Args:
    task: the name of a data set of the package, e.g. 'chain_sum'.
    size: problems.
    seed: of the first item.
    **parameters: of the task, e.g. min_terms=2, max_terms=2.

  Raises:
    ImportError: the package is not installed.
    ValueError: unknown task, or parameters that it does not take.
  """
  package = import_reasoning_gym()
  try:
    data = package.create_dataset(task, size=size, seed=seed, **parameters)
  except (AssertionError, TypeError, ValueError) as error:
    raise ValueError(
      f'reasoning-gym refuses the task {task!r} with {parameters}: {error}'
    ) from error

  def make(index):
    entry = data[index]
    return Example(
      entry['question'], str(entry['answer']), task, {'entry': entry}
    )

  return _Lazy(size, make, (task, range(seed, seed + size)))


def import_reasoning_gym():
  """The package, or an ImportError that says how to install it."""
  try:
    # Optional and slow to import, hence not at the top.
    import reasoning_gym as package  # pylint: disable=g-import-not-at-top
  except ImportError as error:
    raise ImportError(
      'this needs the package reasoning-gym: pip install reasoning-gym'
    ) from error
  return package


def jsonl(
  *,
  path: str,
  prompt_key: str = 'prompt',
  answer_key: str | None = 'answer',
  source: str | None = None,
) -> Sequence[Example]:
  """Reads a file of JSON objects, one a line.

  Args:
    path: of the file, UTF-8; blank lines are left out.
    prompt_key: key of the prompt: a text, or a list of chat messages.
    answer_key: key of the reference answer; None if there is none.
    source: the name in metrics; by default the file's name without '.jsonl'.

  Returns:
    The examples; their metadata is the whole object.

  Raises:
    ValueError: no such file, an empty one, or a bad line, given as file:line.
  """
  if source is None:
    source = path.replace('\\', '/').split('/')[-1].removesuffix('.jsonl')
  examples = []
  try:
    with open(path, encoding='utf-8') as lines:
      for number, line in enumerate(lines, start=1):
        if line.strip():
          where = f'{path}:{number}'
          keys = (prompt_key, answer_key)
          examples.append(_parse_line(line, where, source, *keys))
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f'cannot read {path!r}: {error}') from error
  if not examples:
    raise ValueError(f'{path} is empty: expected one JSON object a line')
  return tuple(examples)


def _parse_line(line, where, source, prompt_key, answer_key) -> Example:
  try:
    record = json.loads(line)
  except json.JSONDecodeError as error:
    raise ValueError(f'{where}: not JSON: {error}') from error
  if not isinstance(record, dict):
    raise ValueError(f'{where}: expected an object, got {line.strip()[:60]!r}')
  for key in (prompt_key, answer_key):
    if key is not None and key not in record:
      raise ValueError(
        f'{where}: no key {key!r}, the object has {sorted(record)}; set'
        ' prompt_key and answer_key'
      )
  prompt = record[prompt_key]
  if isinstance(prompt, list) and all(isinstance(m, dict) for m in prompt):
    prompt = tuple(prompt)
  elif not isinstance(prompt, str):
    raise ValueError(
      f'{where}: {prompt_key!r} must be a text or a list of messages, got'
      f' {type(prompt).__name__}'
    )
  answer = '' if answer_key is None else record[answer_key]
  if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
    raise ValueError(
      f'{where}: {answer_key!r} must be a text or a number, got {answer!r}'
    )
  return Example(prompt, str(answer), source, record)


def prompts(
  *,
  prompts: Sequence[str],
  answers: Sequence[str] | None = None,
  source: str = 'prompts',
) -> Sequence[Example]:
  """A literal list of prompts, with answers or without."""
  if isinstance(prompts, str):
    raise ValueError(f'prompts must be a list of texts, got {prompts!r}')
  if answers is None:
    answers = [''] * len(prompts)
  if len(answers) != len(prompts):
    raise ValueError(f'got {len(prompts)} prompts but {len(answers)} answers')
  return tuple(
    Example(p if isinstance(p, str) else tuple(p), str(a), source)
    for p, a in zip(prompts, answers)
  )


def exclude(
  examples: Sequence[Example], held_out: Sequence[Example]
) -> Sequence[Example]:
  """`examples` without those whose prompt occurs in `held_out`.

  Walks through `examples` once and keeps indices, not examples.

  Raises:
    ValueError: more than `WALK_LIMIT` examples, or none is left.
  """
  if len(examples) > WALK_LIMIT:
    raise ValueError(
      f'exclude walks through all examples, got {len(examples)}: set a size of'
      f' at most {WALK_LIMIT}'
    )
  prompts_out = {_identity(example) for example in held_out}
  kept = [
    i for i in range(len(examples)) if _identity(examples[i]) not in prompts_out
  ]
  if not kept:
    raise ValueError(
      f'all {len(examples)} examples occur in the held-out set: make the'
      ' problems harder, or the held-out set smaller'
    )
  indices = np.asarray(kept)
  seeds = getattr(examples, 'seeds', None)
  return _Lazy(len(kept), lambda i: examples[int(indices[i])], seeds)


def check_disjoint(
  train: Sequence[Example], validation: Sequence[Example]
) -> int | None:
  """Checks that validation is not training data.

  Returns:
    How many validation prompts occur in `train`; None if `train` has more
    than 20 000 examples and the question would take long.

  Raises:
    ValueError: both are generated from overlapping seeds.
  """
  ours = getattr(train, 'seeds', None)
  theirs = getattr(validation, 'seeds', None)
  if ours and theirs and ours[0] == theirs[0]:
    (task, a), (_, b) = ours, theirs
    if max(a.start, b.start) < min(a.stop, b.stop):
      raise ValueError(
        f'training and validation of {task!r} share items: an item is made'
        f' from its own seed, and these are {a.start} to {a.stop - 1} and'
        f' {b.start} to {b.stop - 1}.  Set the seed of one to {a.stop} or more'
        ' above the other'
      )
  if len(train) > 20_000:
    return None
  known = {_identity(train[i]) for i in range(len(train))}
  return sum(_identity(validation[i]) in known for i in range(len(validation)))


def _identity(example: Example) -> str:
  return json.dumps(example.prompt, sort_keys=True, default=dict)


def load(name: str, **arguments) -> Sequence[Example]:
  """The source of this name with its arguments.

  Raises:
    ValueError: unknown name or arguments; lists the choices.
  """
  if name not in SOURCES:
    raise ValueError(f'no source {name!r}; the choices are {sorted(SOURCES)}')
  signature = inspect.signature(SOURCES[name])
  try:
    signature.bind(**arguments)
  except TypeError as error:
    raise ValueError(
      f'source {name!r}: {error}; its arguments are'
      f' {list(signature.parameters)}'
    ) from error
  return SOURCES[name](**arguments)


SOURCES = {
  'arithmetic': arithmetic,
  'reasoning_gym': reasoning_gym,
  'jsonl': jsonl,
  'prompts': prompts,
}
