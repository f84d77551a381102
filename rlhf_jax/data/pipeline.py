"""Prompts as token ids, addressed by one counter.

Sample c of a stream is a function of the stream and of c alone, so the cursor
is all that a checkpoint keeps, and a change of the batch size on resume
neither repeats nor skips a prompt.
"""

from collections.abc import Sequence
import dataclasses
import hashlib

import grain
import numpy as np

from rlhf_jax import types
from rlhf_jax.data import chat as chat_lib
from rlhf_jax.data import sources
from rlhf_jax.data import tokenizer as tokenizer_lib

# Larger (generated) sets are sampled at start, not read through.
SCAN_LIMIT = 20_000
OVERLONG = ('error', 'drop', 'truncate_left')


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A tokenised prompt."""

  ids: np.ndarray  # [P] int32
  example: sources.Example
  index: int  # of the example in its source


class PromptStream:
  """An endless stream of prompts, shuffled anew in every epoch.

  Attributes:
    report: counts over the prompts looked at when the stream was made:
      `examples` in the source, `scanned`, `longest` (tokens), `overlong`,
      `dropped`, `truncated` (what the policy does to them).
  """

  def __init__(
    self,
    examples: Sequence[sources.Example],
    tokenizer,
    *,
    max_prompt_length: int,
    overlong: str = 'error',
    chat: bool = False,
    prompt_format: str = chat_lib.SLOT,
    system: str = '',
    seed: int = 0,
    shuffle: bool = True,
  ):
    """Reads through the set once (or samples it, if it is large).

    Args:
      examples: from `sources.load`.
      tokenizer: from `tokenizer.load`.
      max_prompt_length: tokens, special ones and the template included.
      overlong: for longer prompts: 'error', 'drop', or 'truncate_left', which
        cuts the oldest tokens but keeps special ones in front.
      chat: as `chat.render`.
      prompt_format: as `chat.render`.
      system: as `chat.render`.
      seed: of the shuffle.
      shuffle: False gives the order of the source.

    Raises:
      ValueError: no examples, an overlong prompt under 'error', or a prompt
        that cannot be rendered; names the example.
    """
    if overlong not in OVERLONG:
      raise ValueError(f'overlong must be one of {OVERLONG}, got {overlong!r}')
    if max_prompt_length < 1:
      raise ValueError(
        f'max_prompt_length must be at least 1 token, got {max_prompt_length}'
      )
    if not len(examples):
      raise ValueError('the data set is empty: there is no prompt to train on')
    self._examples = examples
    self._tokenizer = tokenizer
    self._max_prompt_length = max_prompt_length
    self._overlong = overlong
    self._render = {
      'chat': chat,
      'prompt_format': prompt_format,
      'system': system,
    }
    self.report, kept = self._scan()
    # An index array is kept only where something was dropped.
    self._kept = None if len(kept) == len(examples) else np.asarray(kept)
    indices = grain.MapDataset.range(len(kept))
    if shuffle:
      # Grain seeds epoch e with seed + e: neighbouring seeds would share
      # epochs, hence the hash.
      hashed = np.random.SeedSequence(seed).generate_state(1)[0]
      indices = indices.shuffle(seed=int(hashed))
    self._order = indices.repeat()
    self._num_kept = len(kept)

  def __len__(self) -> int:
    """Prompts in an epoch, after dropping."""
    return self._num_kept

  def batch(self, cursor: int, count: int) -> list[Prompt]:
    """The prompts of samples `cursor` to `cursor + count - 1`.

    Raises:
      ValueError: `count` is not in 1 .. len(self). (A batch across the border
        of two epochs may still hold a prompt twice.)
    """
    if cursor < 0:
      raise ValueError(f'the cursor must not be negative, got {cursor}')
    if not 1 <= count <= len(self):
      raise ValueError(
        f'a batch of {count} prompts from a data set of {len(self)}: ask for'
        f' 1 to {len(self)}, or add data'
      )
    return self.at(range(cursor, cursor + count))

  def at(self, samples: Sequence[int]) -> list[Prompt]:
    """The prompts of these samples of the stream."""
    positions = [int(self._order[int(i)]) for i in samples]
    if self._kept is not None:
      positions = [int(self._kept[p]) for p in positions]
    return [self._prompt(index) for index in positions]

  def epoch(self, cursor: int) -> float:
    """Epochs completed when `cursor` samples have been drawn."""
    return cursor / len(self)

  def _encode(self, index: int) -> tuple[list[int], sources.Example]:
    example = self._examples[index]
    try:
      ids = chat_lib.render(example.prompt, self._tokenizer, **self._render)
    except ValueError as error:
      raise ValueError(
        f'example {index} of {example.source!r}: {error}'
      ) from error
    return ids, example

  def _prompt(self, index: int) -> Prompt:
    ids, example = self._encode(index)
    limit = self._max_prompt_length
    if len(ids) > limit:
      if self._overlong != 'truncate_left':
        raise ValueError(_overlong_message(1, 1, len(ids), index, limit))
      ids = self._truncate(ids)
    return Prompt(np.asarray(ids, np.int32), example, index)

  def _truncate(self, ids: list[int]) -> list[int]:
    """Cuts tokens after the leading special ones (BOS must stay)."""
    special = set(self._tokenizer.all_special_ids)
    lead = 0
    while lead < len(ids) and ids[lead] in special:
      lead += 1
    lead = min(lead, self._max_prompt_length - 1)
    tail = self._max_prompt_length - lead
    return ids[:lead] + ids[len(ids) - tail :]

  def _scan(self) -> tuple[dict[str, int], Sequence[int]]:
    """Measures the prompts; returns the report and the indices to keep."""
    total, limit = len(self._examples), self._max_prompt_length
    if total <= SCAN_LIMIT or self._overlong == 'drop':
      if total > sources.WALK_LIMIT:
        raise ValueError(
          f"overlong='drop' reads through the whole set, got {total} examples:"
          f' set a size of at most {sources.WALK_LIMIT}, or overlong to'
          " 'error' or 'truncate_left'"
        )
      scanned = range(total)
    else:
      scanned = range(0, total, total // 1000)
    lengths = [len(self._encode(i)[0]) for i in scanned]
    overlong = [i for i, n in zip(scanned, lengths) if n > limit]
    if overlong and self._overlong == 'error':
      raise ValueError(
        _overlong_message(
          len(overlong), len(scanned), max(lengths), overlong[0], limit
        )
      )
    dropped = len(overlong) if self._overlong == 'drop' else 0
    if dropped == total:
      raise ValueError(
        f'all {total} prompts are longer than max_prompt_length {limit} and'
        ' were dropped: raise it'
      )
    report = {
      'examples': total,
      'scanned': len(scanned),
      'longest': max(lengths),
      'overlong': len(overlong),
      'dropped': dropped,
      'truncated': len(overlong) - dropped,
    }
    if not dropped:
      return report, range(total)
    gone = set(overlong)
    return report, [i for i in range(total) if i not in gone]


def _overlong_message(count, scanned, longest, index, limit) -> str:
  return (
    f'{count} of {scanned} prompts are longer than max_prompt_length {limit}'
    f' (longest: {longest} tokens, first: example {index}): raise'
    " max_prompt_length, or set overlong to 'drop' or 'truncate_left'"
  )


def fingerprint(prompts: Sequence[Prompt], total: int) -> str:
  """Names a data set by its size and its first prompts and answers.

  Args:
    prompts: the first of a stream.
    total: prompts in the whole set.
  """
  digest = hashlib.sha256()
  for prompt in prompts:
    ids = np.asarray(prompt.ids, '<i4')
    digest.update(f'{prompt.index} {len(ids)} '.encode())
    digest.update(ids.tobytes())
    digest.update(repr(prompt.example.answer).encode())
  return f'{total} prompts, first {len(prompts)}: {digest.hexdigest()[:12]}'


def supervised(
  prompts: Sequence[Prompt],
  tokenizer,
  *,
  width: int,
  stop_id: int | None = None,
  overlong: str = 'error',
) -> types.Rollout:
  """Prompts with their reference answers, in the sequence layout.

  Args:
    prompts: from `PromptStream.batch`.
    tokenizer: from `tokenizer.load`.
    width: T.
    stop_id: put after the answer; the tokenizer's EOS by default.
    overlong: for prompt + answer + stop beyond `width`: 'error', or
      'truncate', which cuts the answer and leaves out the stop.

  Returns:
    A Rollout of numpy arrays whose actions are the answers: log-probs 0,
    temperature 1, `truncated` where the answer was cut.

  Raises:
    ValueError: an answer that is empty or does not fit, or no stop token.
  """
  if overlong not in ('error', 'truncate'):
    raise ValueError(
      f"overlong must be 'error' or 'truncate', got {overlong!r}"
    )
  if stop_id is None:
    stop_id = tokenizer.eos_token_id
  if stop_id is None:
    raise ValueError('the tokenizer has no EOS token: give stop_id')
  shape = (len(prompts), width)
  tokens = np.zeros(shape, np.int32)  # N T
  lengths = np.zeros(len(prompts), np.int32)  # N
  prompt_lengths = np.asarray([len(p.ids) for p in prompts], np.int32)  # N
  truncated = np.zeros(len(prompts), bool)  # N
  for n, prompt in enumerate(prompts):
    where = f'example {prompt.index} of {prompt.example.source!r}'
    if not prompt.example.answer:
      raise ValueError(f'{where} has no answer to learn from')
    answer = tokenizer_lib.continuation(tokenizer, prompt.example.answer)
    ids = [*prompt.ids.tolist(), *answer, stop_id]
    if len(prompt.ids) >= width or (len(ids) > width and overlong == 'error'):
      raise ValueError(
        f'{where}: prompt and answer are {len(ids)} tokens, {width} fit: raise'
        " the length, or set overlong to 'truncate' (which leaves the prompt"
        f' whole, here {len(prompt.ids)} tokens)'
      )
    truncated[n] = len(ids) > width
    ids = ids[:width]
    tokens[n, : len(ids)] = ids
    lengths[n] = len(ids)
  position = np.arange(width)
  mask = (position >= prompt_lengths[:, None]) & (position < lengths[:, None])
  return types.Rollout(
    tokens=tokens,
    lengths=lengths,
    prompt_lengths=prompt_lengths,
    mask=mask,
    logprobs=np.zeros(shape, np.float32),
    temperature=np.ones(len(prompts), np.float32),
    truncated=truncated,
    group=np.arange(len(prompts), dtype=np.int32),
    policy_version=np.zeros(len(prompts), np.int32),
  )
