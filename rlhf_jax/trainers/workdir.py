"""Whether a run may use a workdir: nothing is lost, nothing is mixed up."""

import json
import os
import pathlib
from typing import Any

from rlhf_jax.monitor import writers

# The micro-batch that fits, by stage; only where memory ran out.
MICROBATCH = 'microbatch.json'

RESUME = ('auto', 'must', 'never')
# A resumed run may change these: they touch no number of the training.
HARMLESS = (
    'checkpoint.', 'dump_every', 'dump_sequences', 'evaluation.', 'export',
    'memory_limit_bytes', 'offload.', 'tensorboard', 'wandb',
)  # fmt: skip


class Refused(ValueError):
  """A run that cannot be done as configured; the message says what to do."""


def check_workdir(
  workdir: pathlib.Path, config: dict[str, Any], resume: str
) -> None:
  """Refuses a workdir that holds something else.

  Raises:
    ValueError: says what is there and what to do; the rules are in README.
  """
  if resume not in RESUME:
    raise ValueError(f'--resume={resume} is not one of {list(RESUME)}')
  if workdir.exists() and not workdir.is_dir():
    raise ValueError(f'--workdir={workdir} is a file, expected a folder')
  content = (
    sorted(p.name for p in workdir.iterdir()) if workdir.exists() else []
  )
  if resume == 'never' and content:
    raise ValueError(
      f'--resume=never, but {workdir} is not empty: {content[:5]}; name'
      ' another workdir or use --resume=auto'
    )
  if resume == 'must' and not _has_checkpoint(workdir):
    raise ValueError(
      f'--resume=must, but {workdir} holds no checkpoint; use --resume=auto'
      ' to start'
    )
  if not content:
    return
  path = workdir / writers.CONFIG
  if not path.exists():
    raise ValueError(
      f'{workdir} is not empty and not the workdir of a run (no'
      f' {writers.CONFIG}): {content[:5]}; name another workdir'
    )
  # A first attempt that failed before its first step holds nothing to lose.
  metrics = workdir / writers.METRICS
  begun = _has_checkpoint(workdir) or (
    metrics.exists() and metrics.stat().st_size
  )
  lines = difference(json.loads(path.read_text()), config)
  if lines and begun:
    raise ValueError(
      f'{workdir} holds another run; its config differs:\n  '
      + '\n  '.join(lines)
      + '\nname another workdir, or run with the old config to resume'
    )


def allowed_microbatch(
  workdir: pathlib.Path, stage: str
) -> dict[str, Any] | None:
  """What `allow_microbatch` wrote for a stage, None where nothing."""
  path = workdir / MICROBATCH
  return json.loads(path.read_text()).get(stage) if path.exists() else None


def allow_microbatch(
  workdir: pathlib.Path, stage: str, tokens: int, message: str
) -> None:
  """Notes that larger micro-batches did not fit, for processes to come.

  Any process may write it, not only the first: the one that ran out of memory
  may be the only one that knows.

  Args:
    workdir: of the run.
    stage: in which memory ran out.
    tokens: per data group that may fit.
    message: what happened.
  """
  path = workdir / MICROBATCH
  known = json.loads(path.read_text()) if path.exists() else {}
  known[stage] = dict(tokens_per_microbatch=tokens, message=message)
  new = path.with_suffix(f'.{os.getpid()}')
  new.write_text(json.dumps(known, indent=2))
  new.replace(path)  # whole, or not at all


def difference(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
  """`key: old -> new` of every value that differs and is not harmless."""
  old, new = flatten(old), flatten(new)
  return [
    f'{key}: {old.get(key, "(absent)")} -> {new.get(key, "(absent)")}'
    for key in sorted(old.keys() | new.keys())
    if not key.startswith(HARMLESS)
    and old.get(key, '(absent)') != new.get(key, '(absent)')
  ]


def flatten(values: Any, prefix: str = '') -> dict[str, Any]:
  """{'dotted.key': value} of a nested dict."""
  flat = {}
  for key, value in values.items():
    if hasattr(value, 'items'):  # a dict or a ConfigDict
      flat |= flatten(value, f'{prefix}{key}.')
    else:
      flat[prefix + key] = value
  return flat


def _has_checkpoint(workdir: pathlib.Path) -> bool:
  folder = workdir / 'checkpoints'
  return folder.exists() and any(p.name.isdigit() for p in folder.iterdir())
