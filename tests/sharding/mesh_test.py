"""The mesh: sizes that fit, and refusals that name the sizes that would."""

import jax
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
    (dict(fsdp=3), r'multiply to 3; divisors of 8 are \[1, 2, 4, 8\]'),
    (dict(fsdp=4), 'multiply to 4'),  # four devices would idle
    (dict(fsdp=-1, tensor=3), r'tensor.*3.*divisors of 8 are \[1, 2, 4, 8\]'),
    (dict(data=2, fsdp=8), 'multiply to 16'),
    (dict(data=-1, fsdp=-1), r"at most one .* \['data', 'fsdp'\]"),
    (dict(fsdp=0), 'divisors of 8'),
    (dict(data=-2, fsdp=-4), 'divisors of 8'),
    (dict(context=2), 'mesh.context=2.*not supported, set it to 1'),
    (dict(expert=-1), 'mesh.expert=-1.*not supported, set it to 1'),
  ],
)
def test_refusals(sizes, message):
  with pytest.raises(ValueError, match=message):
    mesh_lib.make(**sizes)
