"""Launch files of clusters, and the launcher in two processes."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
import yaml

from rlhf_jax.sharding import jobs
from rlhf_jax.sharding import watch
from tests import processes

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SBATCH = _ROOT / 'launch' / 'slurm.sbatch'
_K8S = _ROOT / 'launch' / 'k8s.yaml'

# Starts the command behind its options twice, with what SLURM tells a task, and
# returns the highest exit code, a signal as 128 and its number.
_SRUN = """#!{python}
import os, subprocess, sys
command = sys.argv[1:]
while command[0].startswith('--'):
  print('OPTION', command.pop(0), flush=True)
tasks = [
  subprocess.Popen(command, env=os.environ | {{
    'SLURM_JOB_ID': {job!r}, 'SLURM_STEP_NODELIST': 'localhost',
    'SLURM_STEP_NUM_TASKS': '2', 'SLURM_STEP_TASKS_PER_NODE': '2',
    'SLURM_NODEID': '0', 'SLURM_PROCID': str(i), 'SLURM_LOCALID': str(i)}})
  for i in range(2)
]
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""

# In place of the interpreter: says what it should run, and joins the job.
_PYTHON = """#!{python}
import os, pathlib, signal, sys
attempts = pathlib.Path({folder!r}, os.environ['SLURM_PROCID'])
attempt = int(attempts.read_text()) if attempts.exists() else 0
attempts.write_text(str(attempt + 1))
# In one piece: both tasks write to one file.
os.write(1, f'RUN {{sys.argv[1:]}}\\n'.encode())
what = {plan!r}[attempt]
if isinstance(what, int) and what not in (0, -9):
  sys.exit(what)
from rlhf_jax.sharding import distributed, jobs
with distributed.member(jobs.detect(os.environ)):
  distributed.agree('x', {{}})
  if what == -9 and os.environ['SLURM_PROCID'] == '1':
    os.kill(os.getpid(), signal.SIGKILL)
  distributed.agree('y', {{}})
os.write(1, b'TRAINED\\n')
"""


def _submit(tmp_path, plan, **env):
  """Runs the sbatch file where tasks end as the plan says, by attempt."""
  job = str(os.getpid())  # gives the port
  for name, text in (('srun', _SRUN), ('python', _PYTHON)):
    path = tmp_path / name
    path.write_text(
      text.format(
        python=sys.executable, folder=str(tmp_path), plan=plan, job=job
      )
    )
    path.chmod(0o755)
  inherited = {
    key: value
    for key, value in os.environ.items()
    if not key.startswith(('SLURM_', 'JAX_')) and 'proxy' not in key.lower()
  }
  return subprocess.run(
    ['bash', str(_SBATCH), '--config=configs/some.py', '--workdir=/a b'],
    env=inherited
    | {
      'PATH': f'{tmp_path}:{os.environ["PATH"]}',
      'PYTHON': str(tmp_path / 'python'),
      'PYTHONPATH': str(_ROOT),
      'XLA_FLAGS': '',
      'JAX_PLATFORMS': 'cpu',
      'SLURM_SUBMIT_DIR': str(_ROOT),
      'SLURM_CPUS_ON_NODE': '16',
      'SLURM_NTASKS_PER_NODE': '2',
      'RESTART_WAIT_S': '0',
    }
    | env,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=120,
    check=False,
  )


def test_slurm_restarts_until_the_run_is_finished(tmp_path):
  done = _submit(tmp_path, [75, -9, 0])
  assert done.returncode == 0, done.stdout
  run = "RUN ['-u', 'launch/train.py', '--config=configs/some.py', '--work"
  assert done.stdout.count(run + "dir=/a b']") == 6
  assert done.stdout.count('TRAINED') == 2
  assert 'OPTION --cpus-per-task=8' in done.stdout
  assert 'process 1 (' in done.stdout and 'was lost' in done.stdout
  assert 'exit code 75: restart 1 of 20' in done.stdout
  # The killed one has the highest code: 128 + 9.
  assert 'exit code 137: restart 2 of 20' in done.stdout


def test_slurm_does_not_repeat_an_error(tmp_path):
  done = _submit(tmp_path, [1, 0])
  assert done.returncode == 1
  assert done.stdout.count('RUN') == 2


def test_slurm_gives_up(tmp_path):
  done = _submit(tmp_path, [76, 76, 76, 0], RESTARTS='2')
  assert done.returncode == 76
  assert done.stdout.count('RUN') == 6
  assert 'giving up' in done.stdout


def test_slurm_file_asks_for_what_it_uses():
  text = _SBATCH.read_text()
  assert subprocess.run(['bash', '-n', str(_SBATCH)]).returncode == 0
  options = re.findall(r'^#SBATCH (--[\w-]+)', text, re.M)
  assert {'--nodes', '--ntasks-per-node', '--gpus-per-node'} <= set(options)
  # sbatch stops reading options at the first command.
  assert text.index('\nset -euo') > text.rindex('\n#SBATCH')


# ---- Kubernetes -------------------------------------------------------------


@pytest.fixture(scope='module')
def manifests():
  return list(yaml.safe_load_all(_K8S.read_text()))


def test_kubernetes_fields_are_known(manifests):
  """Against the fields of the API that a misspelling would silently miss."""
  service, job = manifests
  assert (service['apiVersion'], service['kind']) == ('v1', 'Service')
  assert (job['apiVersion'], job['kind']) == ('batch/v1', 'Job')
  pod = job['spec']['template']['spec']
  (container,) = pod['containers']
  for part, known in (
    (service['spec'], 'clusterIP publishNotReadyAddresses selector ports'),
    (
      job['spec'],
      'completionMode completions parallelism backoffLimit podFailurePolicy'
      ' template',
    ),
    (
      pod,
      'subdomain restartPolicy terminationGracePeriodSeconds containers'
      ' volumes',
    ),
    (
      container,
      'name image workingDir command args env ports resources volumeMounts',
    ),
  ):
    assert part.keys() == set(known.split())
  for entry in container['env']:
    assert isinstance(entry['value'], str), entry  # the API refuses numbers
  for rule in job['spec']['podFailurePolicy']['rules']:
    assert rule['action'] in ('FailJob', 'Ignore', 'Count', 'FailIndex')


def test_kubernetes_names_fit_together(manifests):
  service, job = manifests
  spec = job['spec']
  pod = spec['template']['spec']
  (container,) = pod['containers']
  env = {entry['name']: entry['value'] for entry in container['env']}
  assert spec['completionMode'] == 'Indexed'
  assert spec['completions'] == spec['parallelism']
  assert env['JAX_NUM_PROCESSES'] == str(spec['completions'])
  assert spec['backoffLimit'] == 20 * spec['completions']
  # The name that an Indexed Job gives its first pod, in the Service's domain.
  assert service['spec']['selector'] == {'job-name': job['metadata']['name']}
  assert service['spec']['clusterIP'] == 'None'
  assert pod['subdomain'] == service['metadata']['name']
  host = f'{job["metadata"]["name"]}-0.{pod["subdomain"]}'
  port = container['ports'][0]['containerPort']
  assert env['JAX_COORDINATOR_ADDRESS'] == f'{host}:{port}'
  assert service['spec']['ports'][0]['port'] == port
  mounted = {mount['name'] for mount in container['volumeMounts']}
  assert mounted == {volume['name'] for volume in pod['volumes']}
  assert pod['restartPolicy'] == 'Never'
  (stops,) = [
    rule['onExitCodes']
    for rule in spec['podFailurePolicy']['rules']
    if 'onExitCodes' in rule
  ]
  assert stops['containerName'] == container['name']
  assert stops['operator'] == 'In'
  assert not {75, watch.LOST} & set(stops['values'])
  # What a pod of this Job sees is a job to the launcher.
  assert jobs.detect(env | {'JOB_COMPLETION_INDEX': '1'}) == jobs.Job(
    'kubernetes', f'{host}:{port}', 1, 2
  )


def test_both_files_set_the_same_and_xla_knows_it(manifests):
  text = _SBATCH.read_text()
  (container,) = manifests[1]['spec']['template']['spec']['containers']
  env = {entry['name']: entry['value'] for entry in container['env']}
  flags = re.search(r'export XLA_FLAGS="\S+ ([^"]+)"', text)[1]
  assert env['XLA_FLAGS'] == flags
  for name in ('XLA_PYTHON_CLIENT_MEM_FRACTION', 'NCCL_DEBUG'):
    assert f'export {name}="${{{name}:-{env[name]}}}"' in text
  # XLA aborts where it does not know a flag.
  done = subprocess.run(
    [sys.executable, '-c', 'import jax; jax.devices()'],
    env=os.environ | {'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr


# ---- The launcher -----------------------------------------------------------


def test_processes_with_another_config_are_refused(tmp_path):
  workdir = tmp_path / 'run'
  command = (
    f'exec {sys.executable} launch/train.py'
    f' --config=configs/quickstart.py:tiny --workdir={workdir}'
    ' --config.seed=$JAX_PROCESS_ID'
  )
  results = processes.run_processes(
    ['bash', '-c', command], count=2, devices=1, timeout_s=120
  )
  assert [result.returncode for result in results] == [1, 1]
  assert 'config.seed: 0 in process 0' in results[0].output
  assert '1 in process 1' in results[0].output
  assert 'config.steps' not in results[0].output
  assert not workdir.exists()


def test_half_a_place_is_refused(tmp_path):
  done = subprocess.run(
    [
      sys.executable, 'launch/train.py', '--process_id=1',
      '--config=configs/quickstart.py:tiny', f'--workdir={tmp_path}',
    ],
    cwd=_ROOT, capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert done.returncode == 1
  assert done.stderr.startswith('error: ')
  assert "['coordinator', 'num_processes']" in done.stderr
