"""Which mesh axis splits which logical axis: one table for each use."""

from collections.abc import Callable
import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from rlhf_jax import types
from rlhf_jax.sharding import mesh as mesh_lib

Rules = dict[str, tuple[str, ...]]

# Logical axes that a table does not name are not split.
TRAINING: Rules = {
  'rows': ('data', 'fsdp'),
  'places': ('context',),  # L of packed rows
  'row_parts': ('context', 'data', 'fsdp'),  # [R, L] as [n R, L / n]
  'embed': ('fsdp',),
  'heads': ('tensor',),  # of the weights
  'kv_heads': ('tensor',),
  'attended_heads': ('tensor', 'context'),  # inside attention, see `context`
  'mlp': ('tensor',),
  'vocab': ('tensor',),
}
# Decoding reads all weights for every token: gathering them over `fsdp` each
# time would cost more than holding them.  A single token has no places to
# split: `context` splits the batch.
ROLLOUT: Rules = TRAINING | {
  'rows': ('data', 'fsdp', 'context'),
  'places': (),
  'embed': (),
  'attended_heads': ('tensor',),
}

# Memory kinds of JAX: where an array lives on its device's machine.
DEVICE = 'device'
HOST = 'pinned_host'


def sharding(
  mesh: Mesh,
  axes: tuple[str | None, ...],
  shape: tuple[int, ...],
  rules: Rules = TRAINING,
) -> NamedSharding:
  """The sharding of one array.

  A dimension that its mesh axes do not divide is replicated: 3 key/value heads
  stay whole on `tensor=2`.

  Args:
    mesh: see `mesh.make`.
    axes: logical name of each dimension, None for one that is never split.
    shape: sizes of the dimensions.
    rules: `TRAINING` or `ROLLOUT`.
  """
  parts = []
  for name, size in zip(axes, shape, strict=True):
    names = rules.get(name, ())
    whole = math.prod(mesh.shape[axis] for axis in names)
    parts.append(names if names and size % whole == 0 else None)
  return NamedSharding(mesh, PartitionSpec(*parts))


def parts(mesh: Mesh | None, name: str, rules: Rules = TRAINING) -> int:
  """Over how many devices a logical axis is split; 1 without a mesh."""
  if mesh is None:
    return 1
  return math.prod(mesh.shape[axis] for axis in rules.get(name, ()))


def mesh_of(*arrays: types.Array) -> jax.sharding.AbstractMesh | None:
  """The mesh of arrays while a function is traced, None if it does not matter.

  That is one device, a mesh with other axes than ours, or a part of a
  `shard_map`.
  """
  for array in arrays:
    mesh = jax.typeof(array).sharding.mesh
    if not mesh.empty:
      ours = mesh.axis_names == mesh_lib.AXES
      auto = set(mesh.axis_types) == {AxisType.Auto}
      return mesh if ours and auto and mesh.size > 1 else None
  return None


def constrain(
  x: types.Array,
  axes: tuple[str | None, ...],
  mesh: jax.sharding.AbstractMesh | None,
  rules: Rules = TRAINING,
) -> types.Array:
  """Splits an array in the middle of a jitted function, see `sharding`.

  Its gradient is split in the same way.

  Args:
    x: array.
    axes: logical name of each dimension.
    mesh: see `mesh_of`; None leaves x as it is.
    rules: `TRAINING` or `ROLLOUT`.
  """
  if mesh is None:
    return x
  return jax.lax.with_sharding_constraint(
    x, sharding(mesh, axes, x.shape, rules)
  )


def gather(
  x: types.Array,
  axes: tuple[str | None, ...],
  mesh: jax.sharding.AbstractMesh | None,
) -> types.Array:
  """A weight as a product needs it: whole over `fsdp`, see `ROLLOUT`.

  Its gradient goes back to the devices as the weight is stored.  Left to XLA,
  a product may instead move the activations, which are larger.

  Args:
    x: weight.
    axes: logical name of each dimension.
    mesh: see `mesh_of`; None leaves x as it is.
  """
  if mesh is None:
    return x
  whole = jax.custom_vjp(lambda x: constrain(x, axes, mesh, ROLLOUT))
  whole.defvjp(
    lambda x: (whole(x), None), lambda _, g: (constrain(g, axes, mesh),)
  )
  return whole(x)


def on_places(
  function: Callable,
  mesh: jax.sharding.AbstractMesh,
  shape: tuple[int, int],
  *,
  in_specs: types.PyTree,
  out_specs: types.PyTree,
) -> Callable:
  """`function` on every device, for its own places of arrays [R, L, ...].

  Only `tensor` stays with XLA.

  Args:
    function: of parts of arrays.
    mesh: see `mesh_of`.
    shape: (R, L), divisible by the mesh.
    in_specs: of each argument; None is split over rows and places, a weight
      has what `manual` says.
    out_specs: the same for the result.
  """
  of_places = sharding(mesh, ('rows', 'places'), shape).spec
  fill = lambda tree: jax.tree.map(
    lambda x: of_places if x is None else x,
    tree,
    is_leaf=lambda x: x is None or isinstance(x, PartitionSpec),
  )
  return jax.shard_map(
    function,
    mesh=mesh,
    in_specs=fill(in_specs),
    out_specs=fill(out_specs),
    axis_names={*TRAINING['rows'], *TRAINING['places']},
    check_vma=False,
  )


def manual(
  mesh: jax.sharding.AbstractMesh, axes: dict[int, str], shape: tuple[int, ...]
) -> PartitionSpec:
  """How a weight is stored, as `on_places` takes it: over `fsdp` or not.

  Args:
    mesh: see `mesh_of`.
    axes: logical names of some dimensions, by place.
    shape: of the weight.
  """
  names = tuple(axes.get(place) for place in range(len(shape)))
  return sharding(mesh, names, shape).spec


def every_part() -> PartitionSpec:
  """Of arrays with a part for each part of rows and places, see `copies`."""
  return PartitionSpec((*TRAINING['rows'], *TRAINING['places']))


def copies(
  x: types.Array,
  axes: tuple[str | None, ...],
  mesh: jax.sharding.AbstractMesh,
  dtype: jnp.dtype,
) -> types.Array:
  """A weight whole over `fsdp`, one for each part of rows and places: [n, ..].

  Every device has one, for `on_places`.  It travels in `dtype`; its gradients
  are summed in that of x, once, and each device gets what it stores.

  Args:
    x: weight.
    axes: logical name of each dimension.
    mesh: see `mesh_of`.
    dtype: at most as wide as that of x.
  """
  stored = sharding(mesh, axes, x.shape).spec
  gathered = [
    (place, names)
    for place, (name, names) in enumerate(zip(axes, stored))
    if name == 'embed' and names
  ]

  @jax.custom_vjp
  def whole(x):
    y = x.astype(dtype)
    for place, names in gathered:
      y = jax.lax.all_gather(y, names, axis=place, tiled=True)
    return y.astype(x.dtype)[None]

  def backward(_, gradient):
    gradient = gradient[0]
    for place, names in gathered:
      gradient = jax.lax.psum_scatter(
        gradient, names, scatter_dimension=place, tiled=True
      )
    return (gradient,)

  whole.defvjp(lambda x: (whole(x), None), backward)
  kept = [None if name == 'embed' else n for name, n in zip(axes, stored)]
  # All axes by hand: XLA would gather over `tensor` too, and scatter that.
  return jax.shard_map(
    whole,
    mesh=mesh,
    in_specs=stored,
    out_specs=PartitionSpec(*every_part(), *kept),
    check_vma=False,
  )(x)


def check(mesh: Mesh, sizes: dict[str, tuple[str, int]]) -> None:
  """Refuses a mesh that does not divide what it has to split.

  Args:
    mesh: of the run.
    sizes: name for the message -> (logical axis of TRAINING, size).

  Raises:
    ValueError: names all that cannot be split, and the nearest meshes that
      can split everything.
  """

  def wrong(shape):
    found = []
    for name, (axis, size) in sizes.items():
      whole = math.prod(shape[mesh_axis] for mesh_axis in TRAINING[axis])
      if size % whole:
        product = ' x '.join(TRAINING[axis])
        found.append(f'{name}={size} is not a multiple of {product} = {whole}')
    return found

  shape = dict(mesh.shape)
  if errors := wrong(shape):
    near = mesh_lib.nearest(shape, mesh.size, lambda other: not wrong(other))
    raise ValueError(
      f'mesh {mesh_lib.describe(shape)} cannot split the model:'
      f' {"; ".join(errors)}; nearest: {near}'
    )


def params(mesh: Mesh, specs: types.PyTree, rules=TRAINING) -> types.PyTree:
  """Shardings of a tree of `models.spec.Spec`."""
  return jax.tree.map(
    lambda spec: sharding(mesh, spec.axes, spec.shape, rules),
    specs,
    is_leaf=lambda x: hasattr(x, 'axes'),
  )


def like_params(mesh: Mesh, tree, param_shardings) -> types.PyTree:
  """Shardings of a tree that holds copies of the parameters (Adam's moments).

  A leaf whose path ends with the path of a parameter gets its sharding, any
  other (a step counter) is replicated.
  """
  known = {
    jax.tree_util.keystr(path): value
    for path, value in jax.tree_util.tree_leaves_with_path(param_shardings)
  }
  replicated = NamedSharding(mesh, PartitionSpec())

  def find(path, _):
    for start in range(len(path)):
      if (name := jax.tree_util.keystr(path[start:])) in known:
        return known[name]
    return replicated

  return jax.tree_util.tree_map_with_path(find, tree)


def has_host_memory(mesh: Mesh) -> bool:
  """Whether the devices of a mesh can keep arrays in pinned host memory.

  True on CPUs too, where it is the same memory and nothing is saved, and for
  devices that one only compiles for: those list no memories.
  """
  listed = [device.addressable_memories() for device in mesh.devices.flat]
  return all(
    HOST in {memory.kind for memory in memories}
    for memories in listed
    if memories
  )


def in_host(tree: types.PyTree) -> types.PyTree:
  """The same shardings in pinned host memory; those of scalars are kept.

  Args:
    tree: of `jax.ShapeDtypeStruct`s with shardings, or of arrays.

  Returns:
    A tree of shardings.
  """
  # XLA cannot place a replicated scalar on the host, and it saves nothing.
  return jax.tree.map(
    lambda x: x.sharding.with_memory_kind(HOST) if x.ndim else x.sharding, tree
  )


def on_device(tree: types.PyTree) -> types.PyTree:
  """The arrays in device memory; those that are there are not copied."""
  shardings = jax.tree.map(lambda x: x.sharding, tree)
  if {s.memory_kind for s in jax.tree.leaves(shardings)} <= {DEVICE}:
    return tree
  there = jax.tree.map(lambda s: s.with_memory_kind(DEVICE), shardings)
  return jax.device_put(tree, there)


def rows_sharding(
  mesh: Mesh, shape: tuple[int, ...], rules: Rules = TRAINING
) -> NamedSharding:
  """Of an array [R], [R, L, ...] that is split into parts of rows."""
  axes = ('rows', 'places')[: len(shape)] + (None,) * (len(shape) - 2)
  return sharding(mesh, axes, shape, rules)


def rows(
  mesh: Mesh, tree: types.PyTree, rules: Rules = TRAINING
) -> types.PyTree:
  """Puts a tree of host arrays [R], [R, L, ...] on the mesh, in parts."""
  return jax.tree.map(
    lambda x: put(x, rows_sharding(mesh, x.shape, rules)), tree
  )


def put(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
  """An array of a host value that all processes have alike."""
  if sharding.is_fully_addressable:
    return jax.device_put(x, sharding)
  # `device_put` would send the whole value around to compare it.
  return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])
