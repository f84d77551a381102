"""What each process of a job holds, and how processes exchange it.

A *data group* is one coordinate on the mesh axes (data, fsdp), with all its
tensor x context devices.  An *island* is one or more whole data groups, as a
rule the devices of one process: it samples by itself, without waiting for
others token by token, and the sequences that it made stay there.  Processes
that share a data group are one island, and hold the same.

Every process runs the same loop.  What is per island are numpy arrays of its
own sequences and rows; `rows` makes global arrays of them for the programs of
the whole mesh, `own_rows` takes the island's part out again.  Small things
(numbers, events) travel as objects, by `gather`.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import pickle
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from rlhf_jax import types
from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.sharding import rules


@dataclasses.dataclass(frozen=True)
class Islands:
  """How a mesh is divided, seen from this process."""

  mesh: Mesh  # of training: all islands
  rollout: Mesh  # of this island's sampler
  index: int  # of this island
  count: int
  # The process that speaks for each island.
  leaders: tuple[int, ...]

  @property
  def shared(self) -> bool:
    """Whether an island has several processes, which must act alike."""
    processes = {d.process_index for d in self.mesh.devices.flat}
    return len(self.leaders) < len(processes)


def set_aside(
  devices: Sequence[jax.Device], count: int
) -> tuple[list[jax.Device], list[jax.Device]]:
  """Devices for training, and the last `count` of each process for rollouts.

  Raises:
    ValueError: a process has no more than `count` devices.
  """
  training, rollout = [], []
  for process in sorted({d.process_index for d in devices}):
    own = [d for d in devices if d.process_index == process]
    if not 0 <= count < len(own):
      raise ValueError(
        f'rollout.devices={count} of each process, but process {process} has'
        f' {len(own)} devices and must keep one for training'
      )
    training += own[: len(own) - count]
    rollout += own[len(own) - count :]
  return training, rollout


def islands(
  mesh: Mesh, *, whole: bool = False, rollout: Sequence[jax.Device] = ()
) -> Islands:
  """Divides a mesh into islands of whole data groups.

  Args:
    mesh: of training, over devices of all processes.
    whole: the whole job is one island: a model that one process cannot hold
      samples on all devices together.
    rollout: devices of all processes on which nothing but the rollout runs, as
      `set_aside` returns them; none: it runs on those of training.

  Raises:
    ValueError: processes cannot be told apart into islands of equal size; the
      message says which processes hold which data group.
  """
  here = _islands(mesh, whole)
  if not rollout:
    return here
  if whole or len(here.leaders) != len({d.process_index for d in rollout}):
    raise ValueError(
      'rollout.devices needs islands of one process each: set'
      ' rollout.whole_mesh to False, and mesh.tensor x mesh.context so that a'
      ' process has whole data groups'
    )
  own = [d for d in rollout if d.process_index == jax.process_index()]
  tensor = mesh.shape['tensor']
  if len(own) % tensor:
    raise ValueError(
      f'rollout.devices={len(own)} must be a multiple of mesh.tensor={tensor}'
    )
  return dataclasses.replace(
    here, rollout=mesh_lib.make(len(own) // tensor, 1, tensor, devices=own)
  )


def _islands(mesh: Mesh, whole: bool) -> Islands:
  groups = mesh.devices.reshape(mesh_lib.data_groups(mesh), -1)
  processes = [tuple(sorted({d.process_index for d in row})) for row in groups]
  if whole or len(set(processes)) == 1:
    return Islands(mesh, mesh, 0, 1, (groups[0, 0].process_index,))
  kinds = sorted(set(processes), key=processes.index)
  counts = [processes.count(kind) for kind in kinds]
  members = [process for kind in kinds for process in kind]
  together = all(
    processes[i * counts[0] : (i + 1) * counts[0]] == [kind] * counts[0]
    for i, kind in enumerate(kinds)
  )
  if len(set(members)) != len(members) or len(set(counts)) > 1 or not together:
    raise ValueError(
      'every process must hold whole data groups (coordinates on data and'
      ' fsdp), as many as the others, or share its data groups with the same'
      f' other processes; got {dict(mesh.shape)} with data groups on the'
      f' processes {processes}: choose mesh.tensor and mesh.context so that'
      ' they divide the devices of a process, or are a multiple of them'
    )
  me = jax.process_index()
  index = next(i for i, kind in enumerate(kinds) if me in kind)
  own = groups[index * counts[0] : (index + 1) * counts[0]]
  shape = counts[0], 1, *mesh.devices.shape[2:]
  local = Mesh(own.reshape(shape), mesh.axis_names, axis_types=mesh.axis_types)
  return Islands(mesh, local, index, len(kinds), tuple(k[0] for k in kinds))


def alone() -> Islands:
  """One device of this process, and nobody else."""
  return islands(mesh_lib.make(devices=jax.local_devices()[:1]))


def is_primary() -> bool:
  """Whether this process writes the files of the run."""
  return jax.process_index() == 0


def rows(here: Islands, tree: types.PyTree) -> types.PyTree:
  """Global arrays `[R, ...]` from each island's numpy `[R / islands, ...]`.

  Raises:
    ValueError: with several islands, the rows do not divide evenly over the
      data groups.
  """
  if here.count == 1 and _is_local(here.mesh):
    return rules.rows(here.mesh, tree)

  def put(x):
    x = np.asarray(x)
    shape = len(x) * here.count, *x.shape[1:]
    sharding = rules.rows_sharding(here.mesh, shape)
    first = here.index * len(x)
    if here.count > 1 and shape[0] % mesh_lib.data_groups(here.mesh):
      raise ValueError(
        f'{shape[0]} rows of {here.count} islands do not divide evenly over'
        f' {mesh_lib.data_groups(here.mesh)} data groups'
      )

    def part(index):
      start, stop, _ = index[0].indices(shape[0])
      return x[(slice(start - first, stop - first), *index[1:])]

    return jax.make_array_from_callback(shape, sharding, part)

  return jax.tree.map(put, tree)


def own_rows(here: Islands, tree: types.PyTree) -> types.PyTree:
  """This island's part of global arrays `[R, ...]`, numpy; undoes `rows`."""
  if here.count == 1:
    return fetch(tree)

  def take(x):
    count = x.shape[0] // here.count
    first = here.index * count
    out = np.empty((count, *x.shape[1:]), x.dtype)
    for shard in x.addressable_shards:
      start, stop, _ = shard.index[0].indices(x.shape[0])
      low, high = max(start, first), min(stop, first + count)
      if low < high:
        place = (slice(low - first, high - first), *shard.index[1:])
        out[place] = np.asarray(shard.data)[low - start : high - start]
    return out

  return jax.tree.map(take, tree)


def fetch(tree: types.PyTree) -> types.PyTree:
  """Numpy arrays of global ones, whole on every process of their devices."""

  def take(x):
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
      return x
    if not x.is_fully_replicated:
      x = _replicated(x.sharding.mesh)(x)
    return np.asarray(x.addressable_data(0))

  return jax.device_get(jax.tree.map(take, tree))


@functools.lru_cache
def _replicated(mesh: Mesh):
  everywhere = NamedSharding(mesh, PartitionSpec())
  return jax.jit(lambda x: x, out_shardings=everywhere)


def to_rollout(here: Islands, tree: types.PyTree) -> types.PyTree:
  """Arrays of the training mesh as arrays of the island's sampler.

  They must be whole in every data group (see `rules.ROLLOUT`).  Where the
  sampler runs on devices of the training mesh nothing is copied.
  """
  if here.rollout == here.mesh:
    return tree
  inside = set(here.rollout.devices.flat) <= set(here.mesh.devices.flat)

  def move(x):
    target = NamedSharding(here.rollout, x.sharding.spec)
    if inside:
      parts = {shard.device: shard.data for shard in x.addressable_shards}
      mine = [d for d in here.rollout.devices.flat if d in parts]
      return jax.make_array_from_single_device_arrays(
        x.shape, target, [parts[d] for d in mine]
      )
    if x.is_fully_addressable:
      return jax.device_put(x, target)
    # Devices of its own in each process: from the copy that is here.
    out = np.empty(x.shape, x.dtype)
    for shard in x.addressable_shards:
      out[shard.index] = np.asarray(shard.data)
    return jax.make_array_from_callback(x.shape, target, lambda i: out[i])

  return jax.tree.map(move, tree)


def gather(here: Islands, value: Any) -> list[Any]:
  """What each island has under this name, in order of islands, everywhere.

  For small objects; all processes must call it at the same point.
  """
  if _is_local(here.mesh):
    return [value]
  every = _allgather(value)
  return [every[leader] for leader in here.leaders]


def from_leader(here: Islands, make: Callable[[], Any]) -> Any:
  """`make()` of the island's first process, for all its processes.

  What is not a function of the island's data alone (a reward that calls a
  service, a time limit) then cannot set its processes apart.
  """
  if not here.shared:
    return make()
  leads = jax.process_index() == here.leaders[here.index]
  return gather(here, make() if leads else None)[here.index]


def join(here: Islands, items: list[Any]) -> list[Any]:
  """The lists of all islands behind each other."""
  return [item for part in gather(here, items) for item in part]


def total(here: Islands, values: Any) -> np.ndarray:
  """The sum of small numpy arrays of one shape over all islands."""
  return sum(gather(here, np.asarray(values)))


def largest(here: Islands, values: Any) -> np.ndarray:
  """The element-wise maximum over all islands."""
  return functools.reduce(np.maximum, gather(here, np.asarray(values)))


def _allgather(value: Any) -> list[Any]:
  """Objects of all processes; pickled, for they are our own."""
  data = np.frombuffer(pickle.dumps(value), np.uint8)
  if len(data) >= 2**31:
    raise ValueError(
      f'{len(data):,} bytes to send to all processes at once, 2 GiB is the'
      ' limit: use fewer sequences per step, or an algorithm that does not look'
      ' at the whole step (filtration, clip_cov and kl_cov do)'
    )
  sizes = multihost_utils.process_allgather(np.array([len(data)], np.int32))
  most = int(sizes.max())
  padded = np.pad(data, (0, most - len(data)))
  every = np.asarray(multihost_utils.process_allgather(padded))
  sizes = np.asarray(sizes).reshape(-1)
  every = every.reshape(len(sizes), most)
  return [pickle.loads(row[:n].tobytes()) for row, n in zip(every, sizes)]


def _is_local(mesh: Mesh) -> bool:
  """Whether this process has all devices of a mesh."""
  return all(d.process_index == jax.process_index() for d in mesh.devices.flat)
