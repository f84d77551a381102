"""Floor three of the sampler: which prompts run together, in which sizes.

Everything that is compiled has one of a few sizes, so that a whole run compiles
each program once: buckets of prompt widths, cache places and slots.
"""

import collections
from collections.abc import Sequence
import dataclasses

import numpy as np

# Tokens of prompts that go through the model in one call: enough for large
# products, few enough that a free slot does not wait long.
PREFILL_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class Buckets:
  """The sizes that programs are compiled for, ascending."""

  widths: tuple[int, ...]  # tokens of prompts behind the common prefix
  places: tuple[int, ...]  # cache places per slot behind the common prefix
  slots: tuple[int, ...]  # sequences that decode at the same time


def buckets(
  widest: int,
  max_new_tokens: int,
  slots: int,
  data_groups: int,
  prompt_sizes: int = 3,
) -> Buckets:
  """Sizes for prompts of up to `widest` tokens.

  Args:
    widest: tokens of the longest prompt behind the common prefix.
    max_new_tokens: tokens of the longest response.
    slots: the most sequences that decode at the same time.
    data_groups: rows of every program are a multiple of it.
    prompt_sizes: how many widths there are at most.
  """
  most = -(-slots // data_groups) * data_groups
  halves = [most]
  # Below 32 rows a product reads its weights for hardly more than one row, and
  # fewer rows would save nothing.
  while len(halves) < 3 and halves[0] >= 64 and not halves[0] % 2:
    if halves[0] // 2 % data_groups:
      break
    halves.insert(0, halves[0] // 2)
  return Buckets(
    widths=_doubling(widest, least=32, count=prompt_sizes),
    places=tuple(
      # Kernels take whole blocks.
      size if size < 256 else -(-size // 128) * 128
      for size in _doubling(widest + max_new_tokens, least=256, count=4)
    ),
    slots=tuple(halves),
  )


def _doubling(largest: int, *, least: int, count: int) -> tuple[int, ...]:
  """Up to `count` sizes, each half of the next, none below `least`."""
  sizes = [largest]
  while len(sizes) < count and sizes[0] >= 2 * least:
    sizes.insert(0, -(-sizes[0] // 2))
  return tuple(sizes)


def fitting(size: int, sizes: Sequence[int]) -> int:
  """The smallest of `sizes` that is not below `size`; the largest if none."""
  return next((x for x in sizes if x >= size), sizes[-1])


def prefill_rows(width: int, slots: int, data_groups: int) -> int:
  """Prompts of a bucket that go through the model in one call."""
  rows = max(min(PREFILL_TOKENS // width, slots), 1)
  rows = 1 << (rows.bit_length() - 1)  # a power of two, rounded down
  return -(-rows // data_groups) * data_groups


def prefills(
  lengths: np.ndarray, sizes: Buckets, data_groups: int
) -> collections.deque[tuple[int, np.ndarray]]:
  """The calls of prefill: (width, prompts), prompts of -1 are fill-ups.

  Longest prompts first: those of a call share a bucket.

  Args:
    lengths: [B] tokens of each prompt behind the common prefix.
    sizes: see `buckets`.
    data_groups: rows of a call are a multiple of it.
  """
  order = np.argsort(-np.asarray(lengths), kind='stable')
  width_of = [fitting(lengths[prompt], sizes.widths) for prompt in order]
  calls = collections.deque()
  for width in sorted(set(width_of), reverse=True):
    prompts = order[np.equal(width_of, width)]
    rows = prefill_rows(width, sizes.slots[-1], data_groups)
    for start in range(0, len(prompts), rows):
      part = prompts[start : start + rows]
      calls.append(
        (width, np.pad(part, (0, rows - len(part)), constant_values=-1))
      )
  return calls


def wanted_done(
  slots: int, empty: int, waiting: bool, smaller: int | None
) -> int:
  """How many slots must be done (or empty) before the host looks again.

  While sequences wait, an eighth of the slots is refilled at a time: fewer
  would mean more calls, more would leave slots idle.  At the end of a rollout
  the slots shrink to the next bucket as soon as all sequences fit.

  Args:
    slots: S.
    empty: slots without a sequence.
    waiting: whether a sequence waits for a slot.
    smaller: the next smaller bucket of slots, or None.
  """
  if waiting:
    return min(empty + max(slots // 8, 1), slots)
  if smaller is not None:
    return max(slots - smaller, empty + 1)
  return slots
