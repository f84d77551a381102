"""What every sequence of a rollout asks for: checked, as arrays."""

from collections.abc import Mapping
import functools
from typing import Any

import numpy as np

from rlhf_jax.sampling import pick


def make(
  count: int,
  shape: Any,
  *,
  stop_ids=(),
  temperature=1.0,
  top_k=0,
  top_p=1.0,
  min_p=0.0,
  min_new_tokens=0,
  max_new_tokens=None,
  bias=(),
  seeds=None,
) -> pick.Request:
  """What `count` sequences ask for; keywords and errors as of `stream`."""
  if max_new_tokens is None:
    max_new_tokens = shape.max_new_tokens
  whole = functools.partial(spread, count=count, dtype=np.int32)
  real = functools.partial(spread, count=count, dtype=np.float32)
  ids, numbers = _biases(bias, count, shape.max_biases)
  request = pick.Request(
    address=whole('seeds', np.arange(count) if seeds is None else seeds),
    temperature=real('temperature', temperature),
    top_k=whole('top_k', top_k),
    top_p=real('top_p', top_p),
    min_p=real('min_p', min_p),
    min_new_tokens=whole('min_new_tokens', min_new_tokens),
    max_new_tokens=whole('max_new_tokens', max_new_tokens),
    stop_ids=_stop_sets(stop_ids, count, shape.max_stop_ids),
    bias_ids=ids,
    bias=numbers,
  )
  limit = shape.max_new_tokens
  for ok, what in (
    ((request.temperature >= 0).all(), 'temperature must be 0 or more'),
    ((request.top_k >= 0).all(), 'top_k must be 0 (off) or more'),
    (
      ((request.top_p > 0) & (request.top_p <= 1)).all(),
      'top_p must lie in (0, 1]',
    ),
    (
      ((request.min_p >= 0) & (request.min_p <= 1)).all(),
      'min_p must lie in [0, 1], 0 is off',
    ),
    ((request.min_new_tokens >= 0).all(), 'min_new_tokens must be 0 or more'),
    (
      (request.max_new_tokens >= 1).all()
      and (request.max_new_tokens <= limit).all(),
      f'max_new_tokens must lie in 1..{limit}',
    ),
    (
      (request.min_new_tokens <= request.max_new_tokens).all(),
      'min_new_tokens must not be more than max_new_tokens',
    ),
  ):
    if not ok:
      raise ValueError(f'{what}, got {temperature=} {top_k=} {top_p=} {min_p=}'
                       f' {min_new_tokens=} {max_new_tokens=}')  # fmt: skip
  return request


def spread(name, value, count, dtype) -> np.ndarray:
  """A number, or one for each sequence, as [count]."""
  value = np.asarray(value, dtype)
  if value.ndim and value.shape != (count,):
    raise ValueError(
      f'{name} has shape {value.shape}, expected a number or one for each of'
      f' the {count} sequences'
    )
  return np.broadcast_to(value, count).copy()


def _stop_sets(stop_ids, count, size) -> np.ndarray:
  """[count, size] int32, padded with -1."""
  each = list(stop_ids)
  if not each or np.ndim(each[0]) == 0:
    each = [each] * count
  if len(each) != count:
    raise ValueError(
      f'stop_ids has {len(each)} sets, expected one set of ids, or one for'
      f' each of the {count} sequences'
    )
  out = np.full((count, size), -1, np.int32)
  for row, ids in zip(out, each):
    ids = sorted({int(i) for i in ids})
    if len(ids) > size:
      raise ValueError(
        f'{len(ids)} stop ids for one sequence, the sampler was made for'
        f' max_stop_ids={size}: raise that'
      )
    row[: len(ids)] = ids
  return out


def _biases(bias, count, size) -> tuple[np.ndarray, np.ndarray]:
  """Ids [count, size] int32, padded with -1, and numbers [count, size]."""
  each = [bias] * count if isinstance(bias, Mapping) else list(bias)
  ids = np.full((count, size), -1, np.int32)
  numbers = np.zeros((count, size), np.float32)
  if not each:
    return ids, numbers
  if len(each) != count:
    raise ValueError(
      f'bias has {len(each)} entries, expected one mapping, or one for each of'
      f' the {count} sequences'
    )
  for n, mapping in enumerate(each):
    if len(mapping) > size:
      raise ValueError(
        f'{len(mapping)} biases for one sequence, the sampler was made for'
        f' max_biases={size}: raise that'
      )
    for k, (token, number) in enumerate(sorted(mapping.items())):
      if token < 0 or np.isnan(number) or number == np.inf:
        raise ValueError(
          f'bias {{{token}: {number}}}: expected a token id of 0 or more and a'
          ' number, or -inf for a ban'
        )
      ids[n, k], numbers[n, k] = token, number
  return ids, numbers
