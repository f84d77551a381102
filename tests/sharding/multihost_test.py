"""Islands: which process holds what, without any process but this one.

Several real processes run in `tests/launch/processes_test.py`.
"""

import dataclasses
import types as python_types

import jax
import numpy as np
import pytest

from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.sharding import multihost


class _Device:
  """As much of a device as tells whose it is."""

  platform, device_kind = 'cpu', 'fake'

  def __init__(self, number, process_index):
    self.id, self.process_index = number, process_index

  def __repr__(self):
    return f'{self.process_index}/{self.id}'


def _mesh(processes, shape):
  """A mesh [data, fsdp, tensor, context, expert] of such devices, in order."""
  devices = np.empty(len(processes), object)
  devices[:] = [_Device(i, process) for i, process in enumerate(processes)]
  devices = devices.reshape(shape)
  return python_types.SimpleNamespace(
    devices=devices,
    shape=dict(zip(mesh_lib.AXES, shape)),
    axis_names=mesh_lib.AXES,
    axis_types=None,
  )


@pytest.fixture
def divide(monkeypatch):
  """`divide(processes, shape, me)`: the islands that process `me` sees."""
  made = lambda devices, names, axis_types: python_types.SimpleNamespace(
    devices=devices
  )
  monkeypatch.setattr(multihost, 'Mesh', made)

  def run(processes, shape, me=0, **options):
    monkeypatch.setattr(jax, 'process_index', lambda: me)
    return multihost.islands(_mesh(processes, shape), **options)

  return run


def _ids(islands):
  return [device.id for device in islands.rollout.devices.flat]


def test_a_process_is_an_island(divide):
  # Two processes of four devices, tensor=2: two data groups each.
  for me in (0, 1):
    here = divide([0] * 4 + [1] * 4, (2, 2, 2, 1, 1), me)
    assert (here.index, here.count, here.leaders) == (me, 2, (0, 1))
    assert _ids(here) == list(range(4 * me, 4 * me + 4))
    assert here.rollout.devices.shape == (2, 1, 2, 1, 1)
    assert not here.shared


def test_processes_that_share_data_groups_are_one_island(divide):
  # One device per process, tensor=2: two processes hold a group together.
  here = divide([0, 1, 2, 3], (2, 1, 2, 1, 1), me=3)
  assert (here.index, here.count, here.leaders) == (1, 2, (0, 2))
  assert _ids(here) == [2, 3] and here.shared


def test_one_process_or_the_whole_mesh(divide):
  here = divide([0] * 8, (2, 4, 1, 1, 1))
  assert here.count == 1 and here.rollout is here.mesh and not here.shared
  here = divide([0] * 4 + [1] * 4, (2, 4, 1, 1, 1), me=1, whole=True)
  assert here.count == 1 and here.rollout is here.mesh and here.shared
  assert here.leaders == (0,)


@pytest.mark.parametrize(
  'processes, shape',
  [
    # Three devices each: the second group is half of either.
    ([0] * 3 + [1] * 3, (3, 1, 2, 1, 1)),
    # Groups of unequal number.
    ([0] * 2 + [1] * 4, (3, 1, 2, 1, 1)),
    # The groups of a process are apart.
    ([0, 1, 0, 1], (4, 1, 1, 1, 1)),
  ],
)
def test_other_divisions_are_refused(divide, processes, shape):
  with pytest.raises(ValueError, match='must hold whole data groups'):
    divide(processes, shape)


def test_devices_set_aside_are_the_last_of_each_process():
  devices = [_Device(i, i // 4) for i in range(8)]
  training, rollout = multihost.set_aside(devices, 1)
  assert [d.id for d in training] == [0, 1, 2, 4, 5, 6]
  assert [d.id for d in rollout] == [3, 7]
  assert multihost.set_aside(devices, 0) == (devices, [])
  with pytest.raises(ValueError, match='process 0 has 4 devices'):
    multihost.set_aside(devices, 4)


def test_rows_come_back():
  here = multihost.islands(mesh_lib.make(2, 4))
  tree = {'a': np.arange(48).reshape(16, 3), 'b': np.arange(16.0)}
  placed = multihost.rows(here, tree)
  assert len(placed['a'].sharding.device_set) == 8
  assert placed['a'].addressable_shards[0].data.shape == (2, 3)
  back = multihost.own_rows(here, placed)
  for name, x in tree.items():
    np.testing.assert_array_equal(back[name], x)


def test_each_island_takes_its_own_rows_out():
  """Both halves of an array that is split over rows, and over places too."""
  one = multihost.islands(mesh_lib.make(2, 2, context=2))
  whole = np.arange(64.0).reshape(8, 8)
  placed = multihost.rows(one, {'x': whole})
  for index in (0, 1):
    here = dataclasses.replace(one, count=2, index=index)
    own = multihost.own_rows(here, placed)['x']
    np.testing.assert_array_equal(own, whole[4 * index : 4 * index + 4])


def test_weights_move_to_devices_of_their_own():
  training, rollout = multihost.set_aside(jax.devices(), 2)
  mesh = mesh_lib.make(devices=training)
  here = multihost.islands(mesh, rollout=rollout)
  assert list(here.rollout.devices.flat) == rollout
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  moved = multihost.to_rollout(here, jax.device_put(np.arange(5), everywhere))
  assert moved.sharding.device_set == set(rollout)
  np.testing.assert_array_equal(moved, np.arange(5))
  with pytest.raises(ValueError, match='islands of one process each'):
    multihost.islands(mesh, rollout=rollout, whole=True)


def test_alone_nothing_is_exchanged():
  here = multihost.alone()
  assert multihost.gather(here, {'x': 1}) == [{'x': 1}]
  assert multihost.join(here, [1, 2]) == [1, 2]
  assert multihost.from_leader(here, lambda: 7) == 7
  assert multihost.total(here, [1, 2]).tolist() == [1, 2]
  assert multihost.largest(here, [3]).tolist() == [3]
