"""Joins the processes of a job, compares what they are, and parts again.

    with distributed.member(jobs.detect(os.environ)):
      distributed.agree('program', {'seed': '0'})
      ...

A process that leaves the block by an exception or a non-zero exit code takes
all others with it, at once and with the same exit code; so does one that is
killed. Nothing here starts JAX's backend.
"""

from collections.abc import Iterator, Mapping
import contextlib
import hashlib
import json
import pathlib
import secrets
import socket
import sys
import threading
import time
import traceback
from typing import Any

import jax
from jax._src import distributed as jax_distributed

from rlhf_jax.sharding import jobs
from rlhf_jax.sharding import watch

# A process that hangs as a whole is given up after this many seconds, by JAX.
HEARTBEAT_S = 40
# Machines of a job do not start together; a restarted pod waits its back-off.
JOIN_S = 900
# Nobody is waited for that is gone, so the slowest may take its time: reading
# the data, or writing the export while the others are at the exit.
_PATIENCE_S = 24 * 3600
# An exception that follows from the loss of another process comes up in the
# same moment as the loss: the message should name the loss.
_GRACE_S = 2.0
_PREFIX = 'rlhf_jax'


class Disagreement(ValueError):
  """The processes of a job are not the same; the message says in what."""


@contextlib.contextmanager
def member(
  job: jobs.Job | None,
  *,
  heartbeat_s: int = HEARTBEAT_S,
  join_s: int = JOIN_S,
) -> Iterator[None]:
  """Makes this process a member of its job inside the block.

  Args:
    job: from `jobs.detect`; None does nothing.
    heartbeat_s: seconds without a heartbeat after which JAX ends the job.
    join_s: seconds within which all processes must have come; after them
      this one ends with exit code `watch.LOST` and a message.

  Raises:
    RuntimeError: JAX has computed something already.
  """
  if job is None:
    yield
    return
  connection = _join(job, heartbeat_s, join_s)
  try:
    yield
  except SystemExit as error:
    if error.code:
      _give_up(connection, error)
    _part(connection)
    raise
  except BaseException as error:
    _give_up(connection, error)
  _part(connection)


def _join(job: jobs.Job, heartbeat_s: int, join_s: int) -> watch.Member:
  """Joins JAX's job, and connects the processes for `watch`."""
  until = time.monotonic() + join_s
  _initialize(job, heartbeat_s, join_s)
  return _connect(max(until - time.monotonic(), 1.0))


def _initialize(job: jobs.Job, heartbeat_s: int, join_s: int) -> None:
  if job.kind == 'tpu':
    who, job_text = 'a host', 'the hosts of this TPU slice'
  else:
    who = f'process {job.process_id}'
    job_text = f'the {job.num_processes} processes at {job.coordinator}'
  # JAX would abort with a message that names neither the place nor the count.
  timer = threading.Timer(
    join_s,
    watch.end,
    (
      f'{who} ({socket.gethostname()})',
      f'could not join {job_text} within {join_s} s: start all of them, each'
      ' with an id of its own, where they reach that host and port',
      watch.LOST,
    ),
  )
  timer.daemon = True
  timer.start()
  if job.coordinator:
    _wait_for_name(job.coordinator.rpartition(':')[0])
  try:
    jax.distributed.initialize(
      coordinator_address=job.coordinator,
      num_processes=job.num_processes,
      process_id=job.process_id,
      local_device_ids=job.local_device_ids,
      # What the launcher says has been read, better for hosts with several
      # GPUs and one process.
      cluster_detection_method=None if job.kind == 'tpu' else 'deactivate',
      initialization_timeout=join_s + 60,
      heartbeat_timeout_seconds=heartbeat_s,
      shutdown_timeout_seconds=_PATIENCE_S,
    )
  finally:
    timer.cancel()


def _connect(timeout_s: float) -> watch.Member:
  state = jax_distributed.global_state
  process_id, count = state.process_id, state.num_processes
  name = f'process {process_id} ({socket.gethostname()})'
  hub = None
  if process_id == 0:
    hub = watch.Hub(name, count, secrets.token_hex(16))
    _put('hub', {'port': hub.port, 'name': name, 'token': hub.token})
  said = _get('hub', timeout_s)
  host = state.coordinator_address.rpartition(':')[0].strip('[]')
  try:
    connection = watch.Member(
      process_id,
      name,
      said['name'],
      ('localhost' if hub else host, said['port']),
      said['token'],
      timeout_s,
    )
  except OSError as error:
    watch.end(
      name,
      f'does not reach {said["name"]} at {host}:{said["port"]} ({error}): the'
      ' processes of a job need all ports of each other',
      1,
    )
  if hub:
    if not hub.complete.wait(timeout_s):
      watch.end(
        name,
        f'processes {hub.missing()} joined, but did not connect to'
        f' {host}:{hub.port} within {timeout_s:.0f} s: see what they wrote',
        1,
      )
    names = hub.names()
    sys.stderr.write(
      f'{len(names)} processes: {", ".join(names[:16])}'
      + (', ...\n' if len(names) > 16 else '\n')
    )
  return connection


def _wait_for_name(host: str) -> None:
  """Waits until the host has an address: that of a new pod comes late."""
  while True:
    try:
      socket.getaddrinfo(host.strip('[]'), None)
      return
    except socket.gaierror:
      time.sleep(1)


def _part(connection: watch.Member) -> None:
  connection.leave()
  jax.distributed.shutdown()


def _give_up(connection: watch.Member, error: BaseException) -> None:
  """Ends this process and, by its message, all others."""
  code, reason = 1, f'{type(error).__name__}: {error}'
  if isinstance(error, SystemExit):
    if isinstance(error.code, int):
      code, reason = error.code, f'exit code {error.code}'
    else:
      reason = str(error.code)
      sys.stderr.write(f'{reason}\n')
  elif isinstance(error, KeyboardInterrupt):
    code, reason = 130, 'interrupted'
  else:
    traceback.print_exception(error)
    sys.stderr.flush()
    time.sleep(_GRACE_S)
  connection.give_up(code, reason)


# ---- What must be the same everywhere ---------------------------------------


def agree(name: str, facts: Mapping[str, str]) -> None:
  """Returns when all processes have come here with the same facts.

  Args:
    name: of the comparison; once per job.
    facts: what must be the same, by name.

  Raises:
    Disagreement: in every process, with each fact that differs, its values,
      and which process has which.
    ValueError: several hosts of a TPU slice were started, but not joined.
  """
  state = jax_distributed.global_state
  if state.client is None:
    if jax.process_count() > 1:
      raise ValueError(
        f'this is one of {jax.process_count()} hosts of a TPU slice: add'
        ' --tpu_pod, so that they work together'
      )
    return
  facts = dict(facts)
  own = f'process {state.process_id} ({socket.gethostname()})'
  # Only process 0 sends all it has: the others send what differs from that.
  if state.process_id == 0:
    _put(f'{name}/facts', facts)
  first = _get(f'{name}/facts', _PATIENCE_S)
  differs = {
    key: facts.get(key)
    for key in sorted(first.keys() | facts.keys())
    if first.get(key) != facts.get(key)
  }
  _put(f'{name}/differs/{state.process_id}', [own, differs])
  if state.process_id == 0:
    reports = [
      _get(f'{name}/differs/{index}', _PATIENCE_S)
      for index in range(state.num_processes)
    ]
    _put(f'{name}/verdict', differences(first, reports))
  verdict = _get(f'{name}/verdict', _PATIENCE_S)
  if verdict:
    raise Disagreement(verdict)


def differences(
  first: Mapping[str, str],
  reports: list[tuple[str, Mapping[str, str | None]]],
) -> str:
  """The message about what processes have in another way than process 0.

  Args:
    first: facts of process 0.
    reports: name and differing facts of each process, process 0 first; None
      is a fact that is absent.

  Returns:
    One line per fact; '' where there is no difference.
  """
  keys = sorted({key for _, differs in reports for key in differs})
  if not keys:
    return ''
  lines = [f'the {len(reports)} processes of this job are not the same:']
  for key in keys:
    holders: dict[str | None, list[str]] = {}
    for name, differs in reports:
      value = differs[key] if key in differs else first.get(key)
      holders.setdefault(value, []).append(name)
    lines.append(
      f'  {key}: '
      + '; '.join(
        f'{_short(value)} in {", ".join(names[:4])}'
        + (f' and {len(names) - 4} more' if len(names) > 4 else '')
        for value, names in holders.items()
      )
    )
  if len(lines) > 21:
    lines[21:] = [f'  and {len(lines) - 21} more']
  lines.append('start all of them with the same command, code and data')
  return '\n'.join(lines)


def source(folder: pathlib.Path, name: str) -> dict[str, str]:
  """A fact for each Python file below a folder: the hash of its content.

  Args:
    folder: where to look.
    name: of the folder in the facts.
  """
  return {
    f'source {name}/{path.relative_to(folder).as_posix()}': hashlib.sha256(
      path.read_bytes()
    ).hexdigest()[:12]
    for path in sorted(folder.rglob('*.py'))
  }


def _short(value: str | None) -> str:
  if value is None:
    return '(absent)'
  return value if len(value) <= 120 else f'{value[:120]}...'


# JAX's store of the job has no public access; Orbax reaches it the same way.


def _put(key: str, value: Any) -> None:
  jax_distributed.global_state.client.key_value_set(
    f'{_PREFIX}/{key}', json.dumps(value)
  )


def _get(key: str, timeout_s: float) -> Any:
  return json.loads(
    jax_distributed.global_state.client.blocking_key_value_get(
      f'{_PREFIX}/{key}', int(timeout_s * 1000)
    )
  )
