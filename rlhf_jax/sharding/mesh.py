"""One device mesh with named axes for the whole run.

The axes are ordered by how much crosses them: replicas (`data`) are far apart,
the parts of one product (`tensor`, `context`) are next to each other.
"""

from collections.abc import Callable, Sequence
import math

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType
from jax.sharding import Mesh
import numpy as np

AXES = ('data', 'fsdp', 'tensor', 'context', 'expert')

Sizes = dict[str, int]  # of every axis of AXES, in that order


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
    context: shards of the places of a row (Ulysses: attention changes to heads
      and back); in the rollout, of the batch.
    expert: must be 1, there are no mixture-of-experts models.
    devices: all devices of the job if None.

  Returns:
    A mesh over exactly these devices, see `arrange`.  One size may be -1: it
    takes what the others leave.

  Raises:
    ValueError: the sizes do not multiply to the number of devices; it names
      the nearest that do.
  """
  devices = list(jax.devices() if devices is None else devices)
  asked = dict(zip(AXES, (data, fsdp, tensor, context, expert)))
  sizes = resolve(asked, len(devices))
  return Mesh(
    arrange(sizes, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES)
  )


def resolve(asked: Sizes, devices: int) -> Sizes:
  """The sizes with -1 replaced by what the others leave.

  Raises:
    ValueError: they do not multiply to `devices`.
  """
  if asked['expert'] != 1:
    raise ValueError(
      f'mesh.expert={asked["expert"]}: there are no models with experts to'
      ' split, set it to 1'
    )
  free = [name for name, size in asked.items() if size == -1]
  if len(free) > 1:
    raise ValueError(f'at most one mesh axis may be -1, got {free}')
  fixed = math.prod(size for size in asked.values() if size != -1)
  bad = any(size < 1 and size != -1 for size in asked.values())
  if bad or devices % fixed or (not free and fixed != devices):
    raise ValueError(
      f'mesh {describe(asked)} does not fit {devices} devices: the sizes'
      f' multiply to {fixed}; nearest: {nearest(asked, devices)} (-1 lets one'
      ' axis take the rest; mesh.devices limits their number)'
    )
  return asked | {name: devices // fixed for name in free}


def describe(sizes: Sizes) -> str:
  """'data=1 fsdp=8 tensor=1 context=1'; `expert` only where it is not 1."""
  return ' '.join(
    f'{name}={size}'
    for name, size in sizes.items()
    if name != 'expert' or size != 1
  )


def nearest(
  asked: Sizes,
  devices: int,
  fits: Callable[[Sizes], bool] = lambda sizes: True,
  count: int = 3,
) -> str:
  """The possible sizes that are nearest to those asked for, in words.

  The distance is the sum of |log2 (size / asked)|, of which an axis of -1 has
  none; of equal distances, fewer changed axes come first, then larger `fsdp`.

  Args:
    asked: sizes; one of -1 is free.
    devices: what they must multiply to.
    fits: whether sizes suit the model.
    count: at most so many.
  """

  def distance(sizes):
    changes = [
      0.0 if asked[name] < 1 else abs(math.log2(size / asked[name]))
      for name, size in sizes.items()
    ]
    simple = [sizes[name] for name in ('context', 'tensor', 'data')]
    # Rounded: 1 + log2(4 / 3) is log2(8 / 3).
    return round(sum(changes), 6), sum(map(bool, changes)), simple

  possible = sorted(filter(fits, _factorisations(devices)), key=distance)
  return ', or '.join(map(describe, possible[:count])) or 'none'


def _factorisations(devices: int) -> list[Sizes]:
  """All sizes that multiply to `devices`, without experts."""
  divisors = [n for n in range(1, devices + 1) if devices % n == 0]
  found = []
  for data in divisors:
    for fsdp in divisors:
      for tensor in divisors:
        context, rest = divmod(devices, data * fsdp * tensor)
        if not rest and context:
          found.append(dict(zip(AXES, (data, fsdp, tensor, context, 1))))
  return found


def arrange(sizes: Sizes, devices: Sequence[jax.Device]) -> np.ndarray:
  """Which device stands at which coordinate, an array of shape `sizes`.

  Devices that share a fast network (a TPU slice, a host with its GPUs) are a
  block of the innermost axes, see `within`.  In such a block a TPU's devices
  stand as its torus wants it, others in order; but always so that those of one
  process are next to each other on (data, fsdp).

  Raises:
    ValueError: the blocks are of different sizes or cut the axes unevenly.
  """
  blocks: dict[tuple, list] = {}
  for device in sorted(devices, key=lambda x: (x.process_index, x.id)):
    blocks.setdefault(_block(device), []).append(device)
  counts = sorted({len(block) for block in blocks.values()})
  if len(counts) > 1:
    raise ValueError(
      f'the {len(blocks)} hosts or slices have {counts} devices: a mesh needs'
      ' the same number on each'
    )
  shape = tuple(sizes.values())
  try:
    inner = tuple(within(sizes, counts[0]).values())
  except ValueError as error:
    fits = lambda other: _nests(other, counts[0])
    raise ValueError(
      f'{error}; nearest: {nearest(sizes, len(devices), fits)}'
    ) from error
  outer = tuple(n // m for n, m in zip(shape, inner))
  grid = np.stack([_in_block(inner, block) for block in blocks.values()])
  grid = grid.reshape(*outer, *inner)
  pairs = [axis for i in range(len(shape)) for axis in (i, i + len(shape))]
  return grid.transpose(pairs).reshape(shape)


def within(sizes: Sizes, block: int) -> Sizes:
  """The part of each axis that lies in one block of devices.

  A block takes the fast axes whole, from the innermost on, and a part of the
  first that is too large; what is left of each axis goes across blocks:

    data=4 fsdp=8 tensor=2, blocks of 8   ->  data=1 fsdp=4 tensor=2 within,
                                              data=4 fsdp=2 tensor=1 across

  Raises:
    ValueError: a block is not a part of that axis, or none is left.
  """
  part, left = dict.fromkeys(sizes, 1), block
  for name in reversed(AXES):
    size = sizes[name]
    if left % size and size % left:
      raise ValueError(
        f'mesh {describe(sizes)}: {name}={size} does not divide into hosts or'
        f' slices of {block} devices'
      )
    part[name] = min(size, left)
    left //= part[name]
  return part


def _nests(sizes: Sizes, block: int) -> bool:
  try:
    within(sizes, block)
  except ValueError:
    return False
  return True


def _block(device: jax.Device) -> tuple:
  """What devices with a fast network between them have in common."""
  index = getattr(device, 'slice_index', None)
  return ('process', device.process_index) if index is None else (index,)


def _in_block(shape: tuple[int, ...], devices: list) -> np.ndarray:
  """The devices of one block, in order of processes."""
  plain = np.empty(len(devices), object)
  plain[:] = devices
  plain = plain.reshape(shape)
  if devices[0].platform != 'tpu':
    return plain
  torus = mesh_utils.create_device_mesh(
    shape, devices, allow_split_physical_axes=True
  )
  # The sampler and the data need whole ranges of rows on each process.
  return torus if _in_ranges(torus) else plain


def _in_ranges(grid: np.ndarray) -> bool:
  """Whether each process has one range of coordinates on (data, fsdp)."""
  found: dict[int, list] = {}
  for group, devices in enumerate(
    grid.reshape(grid.shape[0] * grid.shape[1], -1)
  ):
    for device in devices:
      found.setdefault(device.process_index, []).append(group)
  return all(
    set(groups) == set(range(min(groups), max(groups) + 1))
    for groups in found.values()
  )


def data_groups(mesh: Mesh) -> int:
  """Number of coordinates on (data, fsdp), over which rows are split."""
  return mesh.shape['data'] * mesh.shape['fsdp']


def rollout_groups(mesh: Mesh) -> int:
  """Over how many groups of devices the sampler splits its batch.

  A row of one token cannot be split over `context`, so there it is a further
  axis of the batch.
  """
  return data_groups(mesh) * mesh.shape['context']
