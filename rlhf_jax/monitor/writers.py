"""The files of a run: append-only JSON lines that a viewer can read meanwhile.

  config.json     the resolved config
  metrics.jsonl   one object per step: stage, step, time, then the metrics
  samples.jsonl   one object per dumped sample
  events.jsonl    warnings, skips, rollbacks, resumes, checkpoints
  summary.json    last and best metrics, wall time, exit reason

Only process 0 writes. A resumed run appends, so steps that ran again after the
last checkpoint stand there twice: `last_of_each_step` keeps the later ones.
Strict JSON has no NaN or infinity; they are written as null.

Writing must not end a training run: a full disk or a dashboard that is down is
logged once, and the run goes on.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import json
import math
import os
import pathlib
import time
from typing import Any
import uuid

from absl import logging
import numpy as np

METRICS = 'metrics.jsonl'
SAMPLES = 'samples.jsonl'
EVENTS = 'events.jsonl'
CONFIG = 'config.json'
SUMMARY = 'summary.json'


class RunWriter:
  """Writes the files of a run into its workdir.

  A class because it owns open files; use it as a context manager or call
  `close`.
  """

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    *,
    primary: bool = True,
    tensorboard: bool = False,
    wandb: Mapping[str, Any] | None = None,
  ):
    """Opens the files, or nothing where `primary` is False.

    Args:
      workdir: folder of the run, made if it does not exist.
      primary: whether this is process 0, the only one that writes.
      tensorboard: also write TensorBoard events into `workdir/tensorboard`.
      wandb: also log to Weights & Biases; arguments of `wandb.init`, like
        `{'project': 'align'}`.

    Raises:
      ImportError: if an optional writer is asked for and not installed.
    """
    self.workdir = pathlib.Path(workdir)
    self._primary = primary
    self._files: dict[str, Any] = {}
    self._broken: set[str] = set()
    self._tensorboard = self._wandb = None
    if not primary:
      return
    self.workdir.mkdir(parents=True, exist_ok=True)
    if tensorboard:
      self._tensorboard = _tensorboard(self.workdir)
    if wandb is not None:
      self._wandb = _wandb(self.workdir, wandb)

  def __enter__(self) -> 'RunWriter':
    return self

  def __exit__(self, *unused_exception: Any) -> None:
    self.close()

  def metrics(self, stage: str, step: int, values: Mapping[str, Any]) -> None:
    """Writes the metrics of a step.

    Args:
      stage: name of the stage.
      step: global step, monotone over stages.
      values: numbers by name: Python, numpy, or scalar device arrays.

    Raises:
      ValueError: if a metric is called 'stage', 'step' or 'time'.
    """
    _refuse_reserved(values, ('stage', 'step', 'time'))
    values = {name: plain(value) for name, value in values.items()}
    self._append(
      METRICS, dict(stage=stage, step=int(step), time=_now()) | values
    )
    finite = {k: v for k, v in values.items() if isinstance(v, (int, float))}
    if self._tensorboard is not None:
      self._try('TensorBoard', self._write_tensorboard, int(step), finite)
    if self._wandb is not None:
      self._try(
        'Weights & Biases',
        self._wandb.log,
        finite | {'stage': stage},
        step=int(step),
      )

  def samples(self, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes samples, one line each.

    Args:
      rows: objects with stage, step, prompt, response, rewards (by name),
        advantage, finish_reason; further keys are kept.
    """
    for row in rows:
      self._append(SAMPLES, plain(row))

  def event(self, kind: str, message: str, **fields: Any) -> None:
    """Writes what happened: a warning, skip, rollback, resume, checkpoint.

    Args:
      kind: one word to filter by, like 'checkpoint'.
      message: a sentence for a person.
      **fields: details, like `step=3`.

    Raises:
      ValueError: if a field is called 'time'.
    """
    _refuse_reserved(fields, ('time',))
    line = dict(time=_now(), kind=kind, message=message) | plain(fields)
    self._append(EVENTS, line)

  def config(self, values: Any) -> None:
    """Writes the resolved config (a dict or a ConfigDict), atomically."""
    self._replace(CONFIG, plain(values))
    if self._wandb is not None:
      self._try(
        'Weights & Biases',
        self._wandb.config.update,
        plain(values),
        allow_val_change=True,
      )

  def summary(self, values: Mapping[str, Any]) -> None:
    """Writes the summary of the run, atomically: all of it or the old one."""
    self._replace(SUMMARY, plain(values))
    if self._wandb is not None:
      self._try('Weights & Biases', self._wandb.summary.update, plain(values))

  def close(self) -> None:
    """Closes files and dashboards; closing twice is harmless."""
    for file in self._files.values():
      file.close()
    self._files.clear()
    if self._tensorboard is not None:
      self._try('TensorBoard', self._tensorboard.close)
    if self._wandb is not None:
      self._try('Weights & Biases', self._wandb.finish)
    self._tensorboard = self._wandb = None

  def _append(self, name: str, line: Mapping[str, Any]) -> None:
    if self._primary:
      self._try(name, self._write_line, name, line)

  def _replace(self, name: str, value: Any) -> None:
    if self._primary:
      self._try(name, _write_atomically, self.workdir / name, value)

  def _write_line(self, name: str, line: Mapping[str, Any]) -> None:
    if name not in self._files:
      path = self.workdir / name
      _drop_torn_line(path)
      # Unbuffered: one write per line, so a reader sees whole lines and a
      # killed run loses none.
      self._files[name] = path.open('ab', buffering=0)
    text = json.dumps(line, ensure_ascii=False, allow_nan=False)
    # A lone surrogate (half of a character that a model produced) is no UTF-8.
    self._files[name].write(text.encode('utf-8', 'replace') + b'\n')

  def _write_tensorboard(self, step: int, values: Mapping[str, float]) -> None:
    for name, value in values.items():
      self._tensorboard.add_scalar(name, value, step)

  def _try(self, what: str, function: Any, *args: Any, **kwargs: Any) -> None:
    """Calls the function; on failure logs once per sink and goes on."""
    try:
      function(*args, **kwargs)
    except Exception as error:  # Any sink, any failure: training goes on.
      if what not in self._broken:
        self._broken.add(what)
        logging.error(
          'Writing to %s in %s failed (%s: %s); the run goes on, and further '
          'failures of it are not logged.',
          what,
          self.workdir,
          type(error).__name__,
          error,
        )


def plain(value: Any) -> Any:
  """Returns the value as strict JSON: dicts, lists, str, int, float, None.

  NaN and infinities become None; arrays become numbers or lists; a ConfigDict,
  a dataclass or a named tuple becomes a dict; a set becomes a sorted list;
  what has no JSON form becomes its `str`.
  """
  if value is None or isinstance(value, (bool, int, str)):
    return value
  if isinstance(value, float):
    return float(value) if math.isfinite(value) else None
  if isinstance(value, Mapping):
    return {str(k): plain(v) for k, v in value.items()}
  if hasattr(value, 'to_dict'):  # ml_collections.ConfigDict
    return plain(value.to_dict())
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    fields = dataclasses.fields(value)
    return {f.name: plain(getattr(value, f.name)) for f in fields}
  if hasattr(value, '_asdict'):
    return plain(value._asdict())
  if isinstance(value, (list, tuple)):
    return [plain(x) for x in value]
  if isinstance(value, (set, frozenset)):
    return sorted((plain(x) for x in value), key=str)
  if hasattr(value, '__array__') and hasattr(value, 'dtype'):
    array = np.asarray(value)
    if array.dtype.kind not in 'biu':
      # bfloat16 is no Python number; every float type fits float64.
      try:
        array = array.astype(np.float64)
      except (TypeError, ValueError):
        return str(value)
    return plain(array.tolist())
  return str(value)


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Reads JSON lines; an absent file is empty, a broken line is skipped.

  A viewer may come while the run writes, and a run may have been killed in the
  middle of a line: neither is an error.
  """
  path = pathlib.Path(path)
  if not path.exists():
    return []
  lines = []
  for text in path.read_text(encoding='utf-8', errors='replace').split('\n'):
    try:
      line = json.loads(text)
    except ValueError:
      continue
    if isinstance(line, dict):
      lines.append(line)
  return lines


def last_of_each_step(
  lines: Iterable[Mapping[str, Any]],
) -> list[dict[str, Any]]:
  """Returns the metrics in the order of steps, each step as written last.

  After a resume, steps that lay beyond the checkpoint ran again: 1 2 3, resume
  from 1, 2 3 4 gives 1 2 3 4 with the second 2 and 3.  Lines of one step that
  were not followed back (a step and its evaluation) are merged.
  """
  by_step: dict[int, dict[str, Any]] = {}
  previous = None
  for line in lines:
    step = line.get('step')
    if not isinstance(step, int):
      continue
    if previous is not None and step < previous:
      # A resume: what was beyond it belongs to the abandoned attempt.
      by_step = {s: v for s, v in by_step.items() if s < step}
    by_step[step] = by_step.get(step, {}) | dict(line)
    previous = step
  return [by_step[step] for step in sorted(by_step)]


def _refuse_reserved(
  values: Mapping[str, Any], reserved: tuple[str, ...]
) -> None:
  taken = [name for name in reserved if name in values]
  if taken:
    raise ValueError(
      f'got a value called {taken[0]!r}, which every line has already '
      f'(reserved: {", ".join(reserved)}); rename it'
    )


def _now() -> float:
  return round(time.time(), 3)  # seconds since 1970


def _drop_torn_line(path: pathlib.Path) -> None:
  """Cuts a file after its last newline: a killed run may leave half a line."""
  if not path.exists():
    return
  with path.open('rb+') as file:
    end = file.seek(0, os.SEEK_END)
    position = end
    while position > 0:
      start = max(0, position - 4096)
      file.seek(start)
      newline = file.read(position - start).rfind(b'\n')
      if newline >= 0:
        position = start + newline + 1
        break
      position = start
    if position < end:
      file.truncate(position)


def _write_atomically(path: pathlib.Path, value: Any) -> None:
  temporary = path.with_name(f'.{path.name}.{os.getpid()}')
  text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
  temporary.write_bytes(text.encode('utf-8', 'replace') + b'\n')
  os.replace(temporary, path)


def _tensorboard(workdir: pathlib.Path) -> Any:
  try:
    import tensorboardX
  except ImportError as error:
    raise ImportError(
      'the TensorBoard writer is on and tensorboardX is not installed; '
      "run: pip install 'rlhf_jax[tensorboard]', or turn it off"
    ) from error
  return tensorboardX.SummaryWriter(str(workdir / 'tensorboard'))


def _wandb(workdir: pathlib.Path, arguments: Mapping[str, Any]) -> Any:
  try:
    import wandb
  except ImportError as error:
    raise ImportError(
      'the Weights & Biases writer is on and wandb is not installed; '
      "run: pip install 'rlhf_jax[wandb]', or turn it off"
    ) from error
  # The id lies beside the files, so that a resumed run continues its curves.
  path = workdir / 'wandb_id'
  if not path.exists():
    path.write_text(uuid.uuid4().hex)
  defaults = dict(dir=str(workdir), id=path.read_text(), resume='allow')
  return wandb.init(**(defaults | dict(arguments)))
