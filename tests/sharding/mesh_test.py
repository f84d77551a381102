"""The mesh: sizes that fit, and refusals that name the sizes that would."""

from typing import NamedTuple

import jax
import numpy as np
import pytest

from rlhf_jax.sharding import mesh as mesh_lib


@pytest.mark.parametrize(
  'sizes, shape',
  [
    (dict(), (1, 8, 1, 1, 1)),  # ZeRO-3 over all devices is the default
    (dict(fsdp=2, data=-1), (4, 2, 1, 1, 1)),
    (dict(tensor=2), (1, 4, 2, 1, 1)),
    (dict(data=2, fsdp=2, tensor=2), (2, 2, 2, 1, 1)),
    (dict(data=8, fsdp=1), (8, 1, 1, 1, 1)),
  ],
)
def test_make(sizes, shape):
  mesh = mesh_lib.make(**sizes)
  assert mesh.axis_names == ('data', 'fsdp', 'tensor', 'context', 'expert')
  assert mesh.devices.shape == shape
  assert set(mesh.devices.flat) == set(jax.devices())
  assert mesh_lib.data_groups(mesh) == shape[0] * shape[1]
  # JAX's default, Explicit, would put the burden on every function.
  assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_make_on_some_devices():
  devices = jax.devices()[2:5]
  mesh = mesh_lib.make(devices=devices)
  assert mesh.shape['fsdp'] == 3 and list(mesh.devices.flat) == devices


@pytest.mark.parametrize(
  'sizes, message',
  [
    # log2(8 / 3) = log2(4 / 3) + 1: the one with one changed axis is first.
    (
      dict(fsdp=3),
      'data=1 fsdp=3 .* 8 devices: .* multiply to 3; nearest: data=1 fsdp=8'
      ' tensor=1 context=1, or data=2 fsdp=4 tensor=1 context=1, or ',
    ),
    (dict(fsdp=4), 'multiply to 4; nearest: data=1 fsdp=8'),  # four would idle
    # 2 and 4 are as far from 3 on a scale of ratios as 0.58 and 0.42.
    (
      dict(fsdp=-1, tensor=3),
      'nearest: data=1 fsdp=2 tensor=4 context=1, or data=1 fsdp=4 tensor=2',
    ),
    (
      dict(data=2, fsdp=8),
      'multiply to 16; nearest: data=1 fsdp=8 .*, or data=2 fsdp=4',
    ),
    (dict(data=-1, fsdp=-1), r"at most one .* \['data', 'fsdp'\]"),
    (dict(fsdp=0), 'fsdp=0 .*nearest: data=1 fsdp=8'),
    (dict(data=-2, fsdp=-4), 'nearest: data=1 fsdp=8'),
    (dict(fsdp=3, context=2), 'nearest: data=1 fsdp=4 tensor=1 context=2'),
    (dict(expert=2), 'mesh.expert=2: there are no models with experts'),
    (dict(expert=-1), 'mesh.expert=-1: .*set it to 1'),
  ],
)
def test_refusals(sizes, message):
  with pytest.raises(ValueError, match=message):
    mesh_lib.make(**sizes)


def test_rollout_splits_its_batch_over_context_as_well():
  mesh = mesh_lib.make(data=2, fsdp=2, context=2)
  assert mesh.devices.shape == (2, 2, 1, 2, 1)
  assert mesh_lib.data_groups(mesh) == 4
  assert mesh_lib.rollout_groups(mesh) == 8


# ---- Hosts and slices --------------------------------------------------------


class _Device(NamedTuple):
  """What `arrange` reads of a device."""

  id: int
  process_index: int
  slice_index: int | None = None
  platform: str = 'gpu'


def _sizes(**sizes):
  return dict.fromkeys(mesh_lib.AXES, 1) | sizes


@pytest.mark.parametrize(
  'sizes, block, part',
  [
    # The example of the docstring.
    (dict(data=4, fsdp=8, tensor=2), 8, dict(fsdp=4, tensor=2)),
    # 128 hosts of 8: replicas on 16 hosts each, tensor inside a host.
    (dict(data=8, fsdp=16, tensor=8), 8, dict(tensor=8)),
    (dict(data=128, fsdp=8), 8, dict(fsdp=8)),
    (dict(fsdp=1024), 8, dict(fsdp=8)),
    (dict(data=2, fsdp=2, context=4), 8, dict(fsdp=2, context=4)),
    # More than a host has: it goes over two, which no other axis then does.
    (dict(data=2, tensor=16), 8, dict(tensor=8)),
    (dict(data=4, fsdp=2), 8, dict(data=4, fsdp=2)),
    (dict(data=2, fsdp=4), 1, {}),  # one device a process
  ],
)
def test_fast_axes_stay_in_a_block(sizes, block, part):
  assert mesh_lib.within(_sizes(**sizes), block) == _sizes(**part)


def test_devices_of_hosts_with_one_and_with_several_processes():
  sizes = _sizes(data=2, fsdp=4, tensor=2)  # two hosts of 8
  whole = [_Device(i, i // 8) for i in range(16)]
  single = [_Device(i, i, slice_index=i // 8) for i in range(16)]
  rng = np.random.default_rng(0)
  for devices in (whole, single):
    shuffled = [devices[i] for i in rng.permutation(16)]
    grid = mesh_lib.arrange(sizes, shuffled)
    assert grid.shape == (2, 4, 2, 1, 1)
    ids = np.vectorize(lambda x: x.id)(grid)
    # A replica on each host, the two of a tensor pair are neighbours.
    np.testing.assert_array_equal(ids.ravel(), np.arange(16))


def test_slices_are_blocks_and_processes_have_ranges():
  """Processes are numbered across slices; the slice decides."""
  devices = [
    _Device(i, process_index=i // 2, slice_index=i // 2 % 2) for i in range(16)
  ]
  grid = mesh_lib.arrange(_sizes(data=2, fsdp=8), devices)
  slices = np.vectorize(lambda x: x.slice_index)(grid)[:, :, 0, 0, 0]
  assert (slices == [[0] * 8, [1] * 8]).all()
  processes = np.vectorize(lambda x: x.process_index)(grid)[:, :, 0, 0, 0]
  assert processes.ravel().tolist() == [
    *[0, 0, 2, 2, 4, 4, 6, 6],
    *[1, 1, 3, 3, 5, 5, 7, 7],
  ]


def test_a_torus_is_used_where_it_leaves_ranges_to_processes(monkeypatch):
  devices = [_Device(i, i // 4, 0, 'tpu') for i in range(8)]
  for order, kept in (
    ([3, 2, 1, 0, 4, 5, 7, 6], True),
    ([0, 4, 1, 5, 2, 6, 3, 7], False),  # hosts alternate
  ):
    torus = lambda shape, devices, order=order, **_: np.fromiter(
      (devices[i] for i in order), object, 8
    ).reshape(shape)
    monkeypatch.setattr(mesh_lib.mesh_utils, 'create_device_mesh', torus)
    grid = mesh_lib.arrange(_sizes(fsdp=8), devices)
    ids = [device.id for device in grid.ravel()]
    assert ids == (order if kept else list(range(8)))


@pytest.mark.parametrize(
  'hosts, sizes, message',
  [
    ([8, 4], dict(fsdp=12), r'have \[4, 8\] devices: .*same number on each'),
    # A group of 4 would lie on one and a half hosts.
    (
      [6, 6],
      dict(data=3, fsdp=4),
      'fsdp=4 does not divide into hosts or slices of 6 devices; nearest:'
      ' data=4 fsdp=3',
    ),
  ],
)
def test_uneven_blocks_are_refused(hosts, sizes, message):
  owner = np.repeat(np.arange(len(hosts)), hosts)
  devices = [_Device(i, int(process)) for i, process in enumerate(owner)]
  with pytest.raises(ValueError, match=message):
    mesh_lib.arrange(_sizes(**sizes), devices)
