"""Which job a process belongs to, over the environments of launchers."""

import pytest

from rlhf_jax.sharding import jobs

SLURM = {
  'SLURM_JOB_ID': '4097',
  'SLURM_STEP_NODELIST': 'node[001-002],other',
  'SLURM_STEP_NUM_TASKS': '2',
  'SLURM_NTASKS': '2',
  'SLURM_STEP_NUM_NODES': '2',
  'SLURM_STEP_TASKS_PER_NODE': '1(x2)',
  'SLURM_NODEID': '1',
  'SLURM_PROCID': '1',
  'SLURM_LOCALID': '0',
}
OPENMPI = {
  'OMPI_MCA_orte_hnp_uri': '1531576320.0;tcp://10.96.0.1,10.148.0.1:34911',
  'OMPI_COMM_WORLD_SIZE': '4',
  'OMPI_COMM_WORLD_RANK': '3',
  'OMPI_COMM_WORLD_LOCAL_RANK': '1',
  'OMPI_COMM_WORLD_LOCAL_SIZE': '2',
}
KUBERNETES = {
  'KUBERNETES_SERVICE_HOST': '10.0.0.1',
  'JOB_COMPLETION_INDEX': '0',
  'JAX_COORDINATOR_ADDRESS': 'rlhf-0.rlhf:1234',
  'JAX_NUM_PROCESSES': '2',
}
ENVIRONMENT = {
  'JAX_COORDINATOR_ADDRESS': 'a:1',
  'JAX_PROCESS_ID': '1',
  'JAX_NUM_PROCESSES': '2',
}


@pytest.mark.parametrize(
  'environ, expected',
  [
    # 61440 + 4097 mod 4096. One process per node takes all GPUs.
    (SLURM, jobs.Job('slurm', 'node001:61441', 1, 2)),
    # 61440 + (1531576320 / 4096) mod 4096; the GPU of its local rank.
    (
      OPENMPI,
      jobs.Job('openmpi', f'10.96.0.1:{61440 + 373920 % 4096}', 3, 4, (1,)),
    ),
    (KUBERNETES, jobs.Job('kubernetes', 'rlhf-0.rlhf:1234', 0, 2)),
    (ENVIRONMENT, jobs.Job('environment', 'a:1', 1, 2)),
    ({'TPU_WORKER_HOSTNAMES': 'a,b', 'TPU_WORKER_ID': '0'}, jobs.Job('tpu')),
    ({'MEGASCALE_NUM_SLICES': '2'}, jobs.Job('tpu')),
    ({'TPU_WORKER_HOSTNAMES': 'localhost'}, None),
    ({}, None),
    # mpirun inside an allocation: the inner one starts the processes.
    (
      SLURM | {'SLURM_STEP_NODELIST': ''} | OPENMPI,
      jobs.Job('openmpi', f'10.96.0.1:{61440 + 373920 % 4096}', 3, 4, (1,)),
    ),
    # What is said in so many words goes before the launcher.
    (SLURM | OPENMPI | ENVIRONMENT, jobs.Job('environment', 'a:1', 1, 2)),
    (
      SLURM | {'JAX_COORDINATOR_ADDRESS': 'b:2'},
      jobs.Job('slurm', 'b:2', 1, 2),
    ),
    # One task is no job.
    ({'SLURM_JOB_ID': '1', 'SLURM_NTASKS': '1'}, None),
    (KUBERNETES | {'JAX_NUM_PROCESSES': '1'}, None),
  ],
)
def test_launchers(environ, expected):
  assert jobs.detect(environ) == expected


@pytest.mark.parametrize(
  'nodes, first',
  [
    ('node7', 'node7'),
    ('a-1,b', 'a-1'),
    ('n[001-003,7],m', 'n001'),
    ('n[5]', 'n5'),
    ('gpu-[08,11].site,x', 'gpu-08.site'),
  ],
)
def test_first_node(nodes, first):
  job = jobs.detect(SLURM | {'SLURM_STEP_NODELIST': nodes})
  assert job.coordinator == f'{first}:61441'


@pytest.mark.parametrize(
  'changes, ids',
  [
    # Four tasks see the same eight GPUs: two each.
    ({'CUDA_VISIBLE_DEVICES': '0,1,2,3,4,5,6,7'}, (2, 3)),
    ({'CUDA_VISIBLE_DEVICES': '0,1,2,3'}, (1,)),
    # The launcher gave each its own.
    ({'CUDA_VISIBLE_DEVICES': '1'}, None),
    ({'CUDA_VISIBLE_DEVICES': '0,1,2,3', 'SLURM_GPUS_PER_TASK': '4'}, None),
    ({}, (1,)),
    ({'SLURM_STEP_TASKS_PER_NODE': '4,1(x4)'}, None),
    ({'JAX_LOCAL_DEVICE_IDS': '6,7'}, (6, 7)),
  ],
)
def test_gpus_of_a_process(changes, ids):
  several = SLURM | {
    'SLURM_STEP_NUM_TASKS': '8',
    'SLURM_STEP_TASKS_PER_NODE': '4(x2)',
    'SLURM_LOCALID': '1',
    'SLURM_PROCID': '5',
  }
  assert jobs.detect(several | changes).local_device_ids == ids


def test_flags():
  whole = dict(coordinator='h:1', process_id=0, num_processes=2)
  assert jobs.detect(SLURM, **whole) == jobs.Job('flags', 'h:1', 0, 2)
  assert jobs.detect({}, **whole, local_device_ids=['0', '1']) == jobs.Job(
    'flags', 'h:1', 0, 2, (0, 1)
  )
  assert jobs.detect(SLURM, num_processes=1) is None
  assert jobs.detect({}, tpu_pod=True) == jobs.Job('tpu')


def _without(environ, *names):
  return {key: value for key, value in environ.items() if key not in names}


@pytest.mark.parametrize(
  'environ, flags, message',
  [
    # A shell in an allocation, where nobody would answer.
    (_without(SLURM, 'SLURM_STEP_NODELIST'), {}, 'srun'),
    (_without(OPENMPI, 'OMPI_MCA_orte_hnp_uri'), {}, '-x JAX_COORDINATOR'),
    (_without(OPENMPI, 'OMPI_COMM_WORLD_SIZE'), {}, 'num_processes'),
    (_without(KUBERNETES, 'JAX_NUM_PROCESSES'), {}, 'JAX_NUM_PROCESSES=1'),
    (_without(KUBERNETES, 'JAX_COORDINATOR_ADDRESS'), {}, 'k8s.yaml'),
    (_without(ENVIRONMENT, 'JAX_NUM_PROCESSES'), {}, 'all three'),
    ({'JAX_COORDINATOR_ADDRESS': 'a:1'}, {}, 'which process this is'),
    ({}, {'coordinator': 'a:1'}, 'which process this is'),
    ({}, {'process_id': 1}, "'coordinator', 'num_processes'"),
    ({}, {'num_processes': 2}, "'coordinator', 'process_id'"),
    (ENVIRONMENT | {'JAX_PROCESS_ID': '2'}, {}, 'must be in 0 .. 1'),
    (ENVIRONMENT | {'JAX_PROCESS_ID': 'x'}, {}, "'x'"),
    (ENVIRONMENT | {'JAX_COORDINATOR_ADDRESS': 'a'}, {}, 'HOST:PORT'),
    (ENVIRONMENT | {'JAX_COORDINATOR_ADDRESS': 'a:99999'}, {}, 'HOST:PORT'),
    (
      SLURM
      | {
        'SLURM_STEP_TASKS_PER_NODE': '2,2',
        'CUDA_VISIBLE_DEVICES': '0,1,2',
      },
      {},
      'cannot share 3 GPUs',
    ),
  ],
)
def test_half_a_place_is_refused(environ, flags, message):
  with pytest.raises(ValueError, match=message):
    jobs.detect(environ, **flags)
