"""Which job this process belongs to, from flags or from its launcher."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import re

_HOW = (
  'give --coordinator=HOST:PORT --process_id=I --num_processes=N, start with'
  ' srun, mpirun or an Indexed Job, or run alone with --num_processes=1'
)


@dataclasses.dataclass(frozen=True)
class Job:
  """The place of a process in its job.

  For kind 'tpu' all is None: JAX reads it from the metadata of the slice.
  """

  kind: str  # 'flags', 'environment', 'openmpi', 'kubernetes', 'slurm', 'tpu'
  coordinator: str | None = None  # HOST:PORT on which process 0 listens
  process_id: int | None = None
  num_processes: int | None = None
  # Devices of this host for this process; None: all that it sees.
  local_device_ids: tuple[int, ...] | None = None


def detect(
  environ: Mapping[str, str],
  *,
  coordinator: str | None = None,
  process_id: int | None = None,
  num_processes: int | None = None,
  local_device_ids: Sequence[int] | None = None,
  tpu_pod: bool = False,
) -> Job | None:
  """The job of this process, None where it runs alone.

  The first of these that says something is believed: the flags;
  `JAX_PROCESS_ID`; Open MPI; a Kubernetes Indexed Job; SLURM; TPU metadata.
  A coordinator that is given replaces that of the launcher.

  Args:
    environ: `os.environ`.
    coordinator: --coordinator, or else `JAX_COORDINATOR_ADDRESS`.
    process_id: --process_id.
    num_processes: --num_processes; 1 means alone, whatever the launcher says.
    local_device_ids: --local_device_ids, or else `JAX_LOCAL_DEVICE_IDS`.
    tpu_pod: --tpu_pod, for Cloud TPU hosts whose environment says nothing.

  Raises:
    ValueError: only half of a place is given; says what lacks.
  """
  if num_processes == 1 and not process_id:
    return None
  if tpu_pod:
    return Job('tpu')
  coordinator = coordinator or environ.get('JAX_COORDINATOR_ADDRESS') or None
  if process_id is not None or num_processes is not None:
    job = Job('flags', None, process_id, num_processes)
  else:
    found = (find(environ) for find in LAUNCHERS.values())
    job = next((job for job in found if job is not None), None)
  if job is None:
    if coordinator:
      raise ValueError(
        f'a coordinator is given ({coordinator}), but nothing says which'
        f' process this is: {_HOW}'
      )
    return None
  if job.kind == 'tpu' or job.num_processes == 1:
    return job if job.kind == 'tpu' else None
  ids = local_device_ids
  if ids is None and environ.get('JAX_LOCAL_DEVICE_IDS'):
    ids = environ['JAX_LOCAL_DEVICE_IDS'].split(',')
  job = dataclasses.replace(
    job,
    coordinator=coordinator or job.coordinator,
    local_device_ids=job.local_device_ids
    if ids is None
    else tuple(int(index) for index in ids),
  )
  _check(job)
  return job


def _check(job: Job) -> None:
  names = ('coordinator', 'process_id', 'num_processes')
  missing = [name for name in names if getattr(job, name) is None]
  if missing:
    raise ValueError(
      f'a job of several processes ({job.kind}) lacks {missing}:'
      f' {_LACKS.get(job.kind, _HOW)}'
    )
  if not 0 <= job.process_id < job.num_processes:
    raise ValueError(
      f'process_id={job.process_id} ({job.kind}) must be in 0 ..'
      f' {job.num_processes - 1}, there are {job.num_processes} processes'
    )
  host, _, port = job.coordinator.rpartition(':')
  if not host or not port.isdigit() or not 0 < int(port) < 65536:
    raise ValueError(
      f'coordinator={job.coordinator!r} is not HOST:PORT: name the host of'
      ' process 0 and a free port there'
    )


def _number(environ: Mapping[str, str], name: str) -> int | None:
  value = environ.get(name)
  if not value:
    return None
  if not value.isdigit():
    raise ValueError(f'{name}={value!r} in the environment is not a number')
  return int(value)


def _environment(environ: Mapping[str, str]) -> Job | None:
  process_id = _number(environ, 'JAX_PROCESS_ID')
  if process_id is None:
    return None
  count = _number(environ, 'JAX_NUM_PROCESSES')
  return Job('environment', None, process_id, count)


def _openmpi(environ: Mapping[str, str]) -> Job | None:
  """`mpirun`; version 5 does not tell where it runs: name a coordinator."""
  process_id = _number(environ, 'OMPI_COMM_WORLD_RANK')
  if process_id is None:
    return None
  uri = environ.get('OMPI_MCA_orte_hnp_uri', '')
  coordinator = None
  # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911
  at = re.search(r'tcp://(.+?)[,:]|tcp6://\[(.+?)[,\]]', uri)
  if at:
    host = at[1] or f'[{at[2]}]'
    # The number of the job is a multiple of 2^12.
    coordinator = f'{host}:{_port(int(uri.split(".")[0]) // 2**12)}'
  return Job(
    'openmpi',
    coordinator,
    process_id,
    _number(environ, 'OMPI_COMM_WORLD_SIZE'),
    _share(
      environ,
      _number(environ, 'OMPI_COMM_WORLD_LOCAL_RANK'),
      _number(environ, 'OMPI_COMM_WORLD_LOCAL_SIZE'),
    ),
  )


def _kubernetes(environ: Mapping[str, str]) -> Job | None:
  process_id = _number(environ, 'JOB_COMPLETION_INDEX')
  if process_id is None:
    return None
  count = _number(environ, 'JAX_NUM_PROCESSES')
  return Job('kubernetes', None, process_id, count)


def _slurm(environ: Mapping[str, str]) -> Job | None:
  """`srun`; a shell inside an allocation is not a process of a job."""
  count = _number(environ, 'SLURM_STEP_NUM_TASKS') or _number(
    environ, 'SLURM_NTASKS'
  )
  if 'SLURM_JOB_ID' not in environ or count in (None, 1):
    return None
  nodes = environ.get('SLURM_STEP_NODELIST')
  process_id = _number(environ, 'SLURM_PROCID')
  if not nodes or process_id is None:
    raise ValueError(
      f'in a SLURM allocation of {count} tasks, but not started by srun:'
      ' write srun in front of the command, or run alone with'
      ' --num_processes=1'
    )
  return Job(
    'slurm',
    f'{_first_node(nodes)}:{_port(int(environ["SLURM_JOB_ID"]))}',
    process_id,
    count,
    _share(
      environ,
      _number(environ, 'SLURM_LOCALID'),
      _tasks_here(environ, count),
    ),
  )


def _tpu(environ: Mapping[str, str]) -> Job | None:
  hosts = environ.get('TPU_PROCESS_ADDRESSES') or environ.get(
    'TPU_WORKER_HOSTNAMES', ''
  )
  slices = _number(environ, 'MEGASCALE_NUM_SLICES') or 1
  return Job('tpu') if ',' in hosts or slices > 1 else None


def _port(job_number: int) -> int:
  """Of the last 2^12 ports, as JAX: jobs on one host rarely share it."""
  return 65535 - 2**12 + 1 + job_number % 2**12


def _first_node(nodes: str) -> str:
  """The first of 'node[001-003,7],other', 'a-1,b', 'node7'."""
  match = re.match(r'([^,\[]+)(?:\[([^,\-\]]+)[^\]]*\]([^,]*))?', nodes)
  if not match:
    raise ValueError(f'SLURM_STEP_NODELIST={nodes!r} names no node')
  return match[1] + (match[2] or '') + (match[3] or '')


def _tasks_here(environ: Mapping[str, str], count: int) -> int:
  """Tasks of the step on this node, of '2(x3),1'."""
  tasks = []
  for part in environ.get('SLURM_STEP_TASKS_PER_NODE', '').split(','):
    match = re.fullmatch(r'(\d+)(?:\(x(\d+)\))?', part)
    if match:
      tasks += [int(match[1])] * int(match[2] or 1)
  node = _number(environ, 'SLURM_NODEID') or 0
  if node < len(tasks):
    return tasks[node]
  return count // (_number(environ, 'SLURM_STEP_NUM_NODES') or count)


def _share(
  environ: Mapping[str, str], index: int | None, tasks: int | None
) -> tuple[int, ...] | None:
  """GPUs of this process where several on a host see the same ones.

  One process on a host takes all of them. (JAX would give it the first only.)

  Args:
    environ: `CUDA_VISIBLE_DEVICES` in it says what all of them see.
    index: of the process on its host.
    tasks: processes on this host.
  """
  if index is None or not tasks or tasks == 1:
    return None
  if environ.get('SLURM_GPUS_PER_TASK'):
    return None  # each sees its own only
  visible = environ.get('CUDA_VISIBLE_DEVICES', '')
  count = len(visible.split(',')) if visible else tasks
  if count < tasks:
    return None  # the launcher gave each its own
  if count % tasks:
    raise ValueError(
      f'{tasks} processes on this host cannot share {count} GPUs'
      f' (CUDA_VISIBLE_DEVICES={visible}): start a number of processes that'
      ' divides it, or give --local_device_ids'
    )
  each = count // tasks
  return tuple(range(index * each, (index + 1) * each))


_LACKS = {
  'openmpi': 'add -x JAX_COORDINATOR_ADDRESS=HOST:PORT to mpirun, with the'
  ' host of rank 0',
  'kubernetes': 'set JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES in the pod'
  ' (launch/k8s.yaml does), or JAX_NUM_PROCESSES=1 where every index runs'
  ' alone',
  'environment': 'set JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID and'
  ' JAX_NUM_PROCESSES, all three',
}

LAUNCHERS: dict[str, Callable[[Mapping[str, str]], Job | None]] = {
  'environment': _environment,
  'openmpi': _openmpi,
  'kubernetes': _kubernetes,
  'slurm': _slurm,
  'tpu': _tpu,
}
