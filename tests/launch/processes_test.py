"""Two processes with two devices each are one process with four.

They are real processes on loopback, started by the launch command: rollout,
rewards, checkpoints, the loss of a process, and the restart.
"""

import json
import pathlib
import sys

import numpy as np
import pytest

from launch import train as launch
from rlhf_jax.models import hf
from rlhf_jax.monitor import writers
from tests import processes
from tests.launch import job_config

_SECONDS = 400  # on a machine that does other things too
_LOST_S = 60  # within which the others must have ended


@pytest.fixture(scope='module')
def one_process(tmp_path_factory):
  """The same run in this process, on four of its devices."""
  config = job_config.get_config()
  config.mesh.devices = 4
  workdir = tmp_path_factory.mktemp('runs') / 'one'
  assert launch.train(config, str(workdir)) == 0
  return workdir


def _command(workdir):
  return [
    sys.executable,
    'launch/train.py',
    '--config=tests/launch/job_config.py',
    # Which the other run has set too, and the config must be the same.
    '--config.mesh.devices=4',
    f'--workdir={workdir}',
  ]


def _metrics(workdir):
  lines = writers.read(workdir / writers.METRICS)
  return writers.last_of_each_step(lines)


def test_a_lost_process_ends_the_job_and_a_restart_goes_on(
  one_process, program_folder, tmp_path
):
  workdir = tmp_path / 'two'
  env = {
    'JAX_COMPILATION_CACHE_DIR': program_folder,
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
  }
  # ---- The second process is killed in the middle of the run --------------
  with processes.started(_command(workdir), 2, 2, env=env) as job:
    job.wait_for(0, '[ppo 1/3]', _SECONDS)
    checkpoints = workdir / 'checkpoints'
    job.kill(1)
    survivor, lost = job.results(_LOST_S)
  assert lost.returncode < 0
  assert survivor.returncode not in (0, None)
  assert 'process 1' in survivor.output
  assert survivor.seconds - lost.seconds < _LOST_S
  assert not (workdir / 'export').exists()

  # ---- The same command again ----------------------------------------------
  results = processes.run_processes(
    _command(workdir), 2, 2, timeout_s=_SECONDS, env=env
  )
  for result in results:
    assert result.returncode == 0, result.output[-4000:]
  events = writers.read(workdir / writers.EVENTS)
  begun_again = [e for e in events if e['kind'] in ('resume', 'restart')]
  assert len(begun_again) == 1 and checkpoints.exists()

  # ---- The same numbers as one process ---------------------------------------
  mine, theirs = _metrics(workdir), _metrics(one_process)
  assert [step['step'] for step in mine] == [0, 1, 2, 3]
  compared = 0
  for one, other in zip(mine, theirs, strict=True):
    assert one.keys() == other.keys()
    for name in one.keys() - {'time', 'stage'}:
      if not name.startswith(('timing_s/', 'perf/t', 'perf/mfu')):
        np.testing.assert_allclose(
          one[name], other[name], rtol=2e-4, atol=1e-5, err_msg=name
        )
        compared += 1
  assert compared > 150
  assert theirs[-1]['critic/score/mean'] > 0.2
  assert len(writers.read(workdir / writers.SAMPLES)) > 0
  summary = json.loads((workdir / writers.SUMMARY).read_text())
  assert summary['exit_reason'] == 'finished'
  weights = []
  for folder in (workdir / 'export', one_process / 'export'):
    weights.append(hf.load(folder, hf.load_config(folder)))
  _assert_same_way(*weights)


def _assert_same_way(one, other):
  import jax  # after the conftest has set its flags

  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.slow
def test_processes_that_share_a_data_group_agree(program_folder, tmp_path):
  """One device each, tensor=2: both hold all data, and each half of a layer."""
  command = [
    *_command(tmp_path / 'run'),
    '--config.mesh.devices=2',
    '--config.mesh.data=1',
    '--config.mesh.fsdp=1',
    '--config.mesh.tensor=2',
    '--config.model.architecture.vocab_size=260',
    '--config.steps=1',
  ]
  env = {'JAX_COMPILATION_CACHE_DIR': program_folder}
  results = processes.run_processes(command, 2, 1, timeout_s=_SECONDS, env=env)
  for result in results:
    assert result.returncode == 0, result.output[-4000:]
  (before, step) = _metrics(pathlib.Path(tmp_path / 'run'))
  assert step['actor/grad_norm'] > 0
  assert 'val/arithmetic/score' in before
