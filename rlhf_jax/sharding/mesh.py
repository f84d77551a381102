"""One device mesh with named axes for the whole run."""

from collections.abc import Sequence
import math

import jax
from jax.sharding import AxisType
from jax.sharding import Mesh

AXES = ('data', 'fsdp', 'tensor', 'context', 'expert')


def make(
  data: int = 1,
  fsdp: int = -1,
  tensor: int = 1,
  context: int = 1,
  expert: int = 1,
  *,
  devices: Sequence[jax.Device] | None = None,
) -> Mesh:
  """The mesh `[data, fsdp, tensor, context, expert]`.

  Args:
    data: replicas of the parameters.
    fsdp: shards of parameters, gradients and optimiser state (ZeRO-3); the
      batch is split over `data * fsdp`.
    tensor: shards of heads, MLP and vocabulary.
    context: must be 1, sequences are not split over devices.
    expert: must be 1, there are no mixture-of-experts models.
    devices: all devices of the job if None.

  Returns:
    A mesh over exactly these devices.  One size may be -1: it takes what the
    others leave.

  Raises:
    ValueError: the sizes do not multiply to the number of devices.
  """
  devices = list(jax.devices() if devices is None else devices)
  sizes = dict(
    data=data, fsdp=fsdp, tensor=tensor, context=context, expert=expert
  )
  for name in ('context', 'expert'):
    if sizes[name] != 1:
      raise ValueError(
        f'mesh.{name}={sizes[name]}: splitting over `{name}` is not'
        ' supported, set it to 1'
      )
  free = [name for name, size in sizes.items() if size == -1]
  if len(free) > 1:
    raise ValueError(f'at most one mesh axis may be -1, got {free}')
  fixed = math.prod(size for size in sizes.values() if size != -1)
  bad = any(size < 1 and size != -1 for size in sizes.values())
  if bad or len(devices) % fixed or (not free and fixed != len(devices)):
    raise ValueError(
      f'mesh {sizes} does not fit {len(devices)} devices: the sizes multiply'
      f' to {fixed}; divisors of {len(devices)} are'
      f' {[n for n in range(1, len(devices) + 1) if len(devices) % n == 0]}'
      ' (-1 lets one axis take the rest; mesh.devices limits their number)'
    )
  if free:
    sizes[free[0]] = len(devices) // fixed
  return jax.make_mesh(
    tuple(sizes[name] for name in AXES),
    AXES,
    axis_types=(AxisType.Auto,) * len(AXES),
    devices=devices,
  )


def data_groups(mesh: Mesh) -> int:
  """Number of coordinates on (data, fsdp), over which rows are split."""
  return mesh.shape['data'] * mesh.shape['fsdp']
