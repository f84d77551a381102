"""Starts several processes of one job on this machine, for tests.

A process finds its place in the environment (`JAX_COORDINATOR_ADDRESS`,
`JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`), which `distributed.detect` reads; so the
command is the same for all of them, like that of a launcher.
"""

from collections.abc import Iterator, Sequence
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import time
from typing import NamedTuple

_ROOT = pathlib.Path(__file__).resolve().parents[1]
# Of a launcher around the tests, which would be taken for that of the job.
_LAUNCHERS = ('SLURM_', 'OMPI_', 'JOB_COMPLETION_', 'KUBERNETES_', 'TPU_')


class Result(NamedTuple):
  """How one process ended."""

  returncode: int  # negative: the signal that killed it
  output: str  # standard output and error together
  seconds: float  # from the start of the job to the end of this process


class Job:
  """The running processes of a job; made by `started`."""

  def __init__(self, processes, logs, began):
    self._processes: list[subprocess.Popen] = processes
    self._logs: list[pathlib.Path] = logs
    self._began: float = began
    self._ended: dict[int, float] = {}

  def output(self, index: int) -> str:
    """What a process has printed by now."""
    return self._logs[index].read_text(errors='replace')

  def wait_for(self, index: int, text: str, timeout_s: float) -> None:
    """Waits until a process has printed `text`.

    Raises:
      AssertionError: it ended or the time was up before that.
    """
    deadline = time.monotonic() + timeout_s
    while text not in self.output(index):
      ended = self._processes[index].poll() is not None
      # Once more: it may have printed it between the two looks.
      if (ended or time.monotonic() > deadline) and text not in self.output(
        index
      ):
        raise AssertionError(
          f'process {index} {"ended" if ended else "went on"} without'
          f' {text!r}; its output:\n{self.output(index)[-6000:]}'
        )
      time.sleep(0.05)

  def kill(self, index: int, number: int = signal.SIGKILL) -> None:
    """Sends a process a signal."""
    self._processes[index].send_signal(number)

  def results(self, timeout_s: float) -> list[Result]:
    """Waits until all processes have ended.

    Raises:
      AssertionError: one is still running after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while len(self._ended) < len(self._processes):
      for index, process in enumerate(self._processes):
        if index not in self._ended and process.poll() is not None:
          self._ended[index] = time.monotonic() - self._began
      if time.monotonic() > deadline:
        running = sorted(set(range(len(self._processes))) - set(self._ended))
        raise AssertionError(
          f'processes {running} still run after {timeout_s} s:\n'
          + '\n'.join(f'[{i}] {self.output(i)[-3000:]}' for i in running)
        )
      time.sleep(0.02)
    return [
      Result(process.returncode, self.output(index), self._ended[index])
      for index, process in enumerate(self._processes)
    ]


@contextlib.contextmanager
def started(
  command: Sequence[str],
  count: int,
  devices: int,
  *,
  env: dict[str, str] | None = None,
  own_env: Sequence[dict[str, str]] | None = None,
) -> Iterator[Job]:
  """A job of `count` processes, all gone when the block is left.

  Args:
    command: of every process; its working folder is the repository.
    count: processes.
    devices: simulated CPU devices of each.
    env: added to the environment of every process.
    own_env: added to that of each, one dict per process.
  """
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    port = probe.getsockname()[1]
  inherited = {
    key: value
    for key, value in os.environ.items()
    if not key.startswith(_LAUNCHERS)
  }
  common = inherited | {
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
    'PYTHONPATH': os.pathsep.join(
      filter(None, [str(_ROOT), os.environ.get('PYTHONPATH')])
    ),
    'PYTHONUNBUFFERED': '1',
    'JAX_COORDINATOR_ADDRESS': f'127.0.0.1:{port}',
    'JAX_NUM_PROCESSES': str(count),
  }
  processes, logs = [], []
  began = time.monotonic()
  with tempfile.TemporaryDirectory() as folder:
    try:
      for index in range(count):
        logs.append(pathlib.Path(folder) / f'{index}.log')
        own = {'JAX_PROCESS_ID': str(index)} | (
          own_env[index] if own_env else {}
        )
        with logs[-1].open('w') as log:
          processes.append(
            subprocess.Popen(
              list(command),
              cwd=_ROOT,
              env=common | (env or {}) | own,
              stdin=subprocess.DEVNULL,
              stdout=log,
              stderr=subprocess.STDOUT,
            )
          )
      yield Job(processes, logs, began)
    finally:
      for process in processes:
        process.kill()
      for process in processes:
        process.wait()


def run_processes(
  command: Sequence[str],
  count: int,
  devices: int,
  *,
  timeout_s: float,
  env: dict[str, str] | None = None,
  own_env: Sequence[dict[str, str]] | None = None,
) -> list[Result]:
  """Runs `count` processes with `devices` CPU devices each to their end.

  Args:
    command: as `started`.
    count: as `started`.
    devices: as `started`.
    timeout_s: when all must have ended.
    env: as `started`.
    own_env: as `started`.

  Raises:
    AssertionError: one is still running after `timeout_s`; the message has the
      end of its output.
  """
  with started(command, count, devices, env=env, own_env=own_env) as job:
    return job.results(timeout_s)
