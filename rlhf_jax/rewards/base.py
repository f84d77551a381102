"""Calls reward functions and checks what comes back.

A reward is a function of a batch,

  reward(responses: Sequence[str], examples: Sequence[Example])
      -> Sequence[float | None]

one number per response, None where it does not apply.  It may be written by
anybody, so nothing is taken on trust: `evaluate` says which function did what
wrong with which sample, and keeps one bad number from spoiling a batch.
"""

from collections.abc import Callable, Mapping, Sequence
import ctypes
import dataclasses
import threading
import time
from typing import Any

import numpy as np

from rlhf_jax.data import sources
from rlhf_jax.rewards import combine

Reward = Callable[
  [Sequence[str], Sequence[sources.Example]], Sequence[float | None]
]


@dataclasses.dataclass(frozen=True)
class RewardResult:
  """The rewards of N responses."""

  names: tuple[str, ...]  # of the K rewards
  values: np.ndarray  # [N, K] float32, NaN: not applicable or not a number
  scores: np.ndarray  # [N] float32: the weighted sum, NaN where dropped
  # [N] bool: a reward was NaN or infinite, or none applied.  Such a row takes
  # no part in the update nor in the statistics of its group.
  dropped: np.ndarray
  # What happened, for events.jsonl: {'kind', 'reward', 'count', 'samples',
  # 'message'}; `samples` are indices into the batch.
  events: list[dict[str, Any]]


def evaluate(
  rewards: Mapping[str, Reward],
  weights: Mapping[str, float] | None,
  responses: Sequence[str],
  examples: Sequence[sources.Example],
  *,
  timeout_s: float | None = None,
  default: float | None = None,
) -> RewardResult:
  """Scores responses by every reward and adds them up.

  Args:
    rewards: functions by name.
    weights: by the same names; None means 1 each.
    responses: N texts.
    examples: the N examples that they answer.
    timeout_s: seconds that a call may take.  A batch that takes longer is
      asked again sample by sample, all at once, with as many seconds; those
      that hang again get `default`.  None waits for ever.
    default: reward of a sample whose evaluation hangs; None is an error.

  Raises:
    ValueError: no reward, weights for other names, or lengths that differ.
    TypeError: a reward returned something that is not numbers or None.
    RuntimeError: a reward raised, naming it and the sample.
    TimeoutError: a reward hung and there is no default.
  """
  if not rewards:
    raise ValueError('there is no reward: name at least one')
  if len(responses) != len(examples) or not responses:
    raise ValueError(
      f'got {len(responses)} responses and {len(examples)} examples, expected'
      ' as many of both and at least 1'
    )
  names = tuple(rewards)
  vector = combine.weight_vector(names, weights)
  events: list[dict[str, Any]] = []
  values = np.full((len(responses), len(names)), np.nan, np.float32)  # N K
  broken = np.zeros(len(responses), bool)  # N
  for k, name in enumerate(names):
    raw, hung = _ask(
      name, rewards[name], responses, examples, timeout_s, default
    )
    if hung:
      what = f'did not return within {timeout_s} s and got {default}'
      events.append(_event('reward_timeout', name, hung, what, responses))
    bad = []
    for n, entry in enumerate(raw):
      if entry is not None:
        if np.isfinite(entry):
          values[n, k] = entry
        else:
          bad.append(n)
    if bad:
      what = 'were not finite and are left out'
      if vector[k]:
        broken[bad] = True
        what = 'were not finite; the samples are dropped'
      events.append(_event('reward_not_finite', name, bad, what, responses))
  scores = combine.weighted_sum(values, vector)
  scores = np.where(broken, np.float32(np.nan), scores)
  return RewardResult(names, values, scores, np.isnan(scores), events)


def _event(kind, name, samples, what, responses) -> dict[str, Any]:
  return {
    'kind': kind,
    'reward': name,
    'count': len(samples),
    'samples': list(samples),
    'message': f'reward {name!r}: {len(samples)} of {len(responses)} values'
    f' {what}; first: sample {samples[0]}, {responses[samples[0]][:60]!r}',
  }


def _ask(
  name, reward, responses, examples, timeout_s, default
) -> tuple[list[np.float32 | None], list[int]]:
  """One reward of a batch, and the indices of the samples that hung."""
  call = _start(reward, responses, examples, timeout_s)
  returned, error = _finish([call], timeout_s)[0]
  if error is None:
    return _check(name, returned, responses), []

  if timeout_s is None:  # find the culprit one after the other
    for n, (response, example) in enumerate(zip(responses, examples)):
      single = _start(reward, [response], [example], None)
      if single.error is not None:
        raise _raised(name, single.error, n, response) from single.error
    raise _raised(name, error, None, responses) from error

  singles = [
    _start(reward, [response], [example], timeout_s)
    for response, example in zip(responses, examples)
  ]
  values, hung = [], []
  for n, (returned, failure) in enumerate(_finish(singles, timeout_s)):
    if isinstance(failure, _Hung):
      hung.append(n)
      values.append(default)
    elif failure is not None:
      raise _raised(name, failure, n, responses[n]) from failure
    else:
      values += _check(name, returned, responses[n : n + 1], first=n)
  if not hung and not isinstance(error, _Hung):
    raise _raised(name, error, None, responses) from error
  if hung and default is None:
    raise TimeoutError(
      f'reward {name!r} did not return within {timeout_s} s for {len(hung)} of'
      f' {len(responses)} samples; first: sample {hung[0]},'
      f' {responses[hung[0]][:60]!r}.  Raise timeout_s, or set a default reward'
    )
  return values, hung


def _raised(name, error, n, response) -> RuntimeError:
  if n is None:
    where = f'a batch of {len(response)}, but for none of its samples alone'
  else:
    where = f'sample {n}, {response[:60]!r}'
  return RuntimeError(
    f'reward {name!r} raised {type(error).__name__}: {error}, for {where}'
  )


class _Hung(Exception):
  """Stands in for the result of a call that has not returned in time."""


@dataclasses.dataclass
class _Call:
  thread: threading.Thread | None = None
  returned: Any = None
  error: BaseException | None = None


def _start(reward, responses, examples, timeout_s) -> _Call:
  """Calls in a thread of its own, or at once without a time limit."""
  call = _Call()

  def run():
    try:
      call.returned = reward(responses, examples)
    # SystemExit: a reward that leaves must not end the run without a word.
    except (Exception, SystemExit) as error:
      call.error = error

  if timeout_s is None:
    run()
  else:
    # A daemon: one that hangs must not keep the program from ending.
    call.thread = threading.Thread(target=run, daemon=True)
    call.thread.start()
  return call


def _finish(calls, timeout_s) -> list[tuple[Any, BaseException | None]]:
  """Waits for calls until a common deadline."""
  results = []
  deadline = time.monotonic() + (timeout_s or 0)
  for call in calls:
    if call.thread is not None:
      call.thread.join(max(0.0, deadline - time.monotonic()))
      if call.thread.is_alive():
        # Ends a thread that runs Python code; one that waits in C goes on.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
          ctypes.c_ulong(call.thread.ident), ctypes.py_object(SystemExit)
        )
        results.append((None, _Hung()))
        continue
    results.append((call.returned, call.error))
  return results


def _check(name, returned, responses, first=0) -> list[np.float32 | None]:
  """Turns what a reward returned into float32 or None, or says what is wrong.

  0.7 arrives as the float32 next to 0.7; integers and truth values are
  numbers; texts are not, even where they could be parsed.
  """
  try:
    if isinstance(returned, (str, bytes, Mapping)):
      raise TypeError
    entries = list(returned)
  except TypeError:
    raise TypeError(
      f'reward {name!r} returned {str(returned)[:60]!r} of type'
      f' {type(returned).__name__}; expected a sequence of'
      f' {len(responses)} numbers or None, one per response'
    ) from None
  if len(entries) != len(responses):
    raise TypeError(
      f'reward {name!r} returned {len(entries)} values for'
      f' {len(responses)} responses; expected one each (None where it does not'
      ' apply)'
    )
  values: list[np.float32 | None] = []
  for n, entry in enumerate(entries):
    if entry is None:
      values.append(None)
      continue
    array = None if isinstance(entry, (str, bytes)) else np.asarray(entry)
    if array is None or array.ndim or array.dtype.kind not in 'biuf':
      raise TypeError(
        f'reward {name!r} returned {str(entry)[:60]!r} of type'
        f' {type(entry).__name__} for sample {first + n},'
        f' {responses[n][:60]!r}; expected a number or None'
      )
    with np.errstate(over='ignore'):  # becomes infinite, and is dropped
      values.append(np.float32(array))
  return values
