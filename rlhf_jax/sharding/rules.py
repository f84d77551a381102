"""Which mesh axis splits which logical axis: one table for each use."""

import math

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from rlhf_jax import types

# Logical axes that a table does not name are not split.
TRAINING = {
  'rows': ('data', 'fsdp'),
  'embed': ('fsdp',),
  'heads': ('tensor',),
  'kv_heads': ('tensor',),
  'mlp': ('tensor',),
  'vocab': ('tensor',),
}
# Decoding reads all weights for every token: gathering them over `fsdp` each
# time would cost more than holding them.
ROLLOUT = TRAINING | {'embed': ()}

# Memory kinds of JAX: where an array lives on its device's machine.
DEVICE = 'device'
HOST = 'pinned_host'


def sharding(
  mesh: Mesh,
  axes: tuple[str | None, ...],
  shape: tuple[int, ...],
  rules: dict[str, tuple[str, ...]] = TRAINING,
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


def rows(mesh: Mesh, tree: types.PyTree) -> types.PyTree:
  """Puts a tree of host arrays `[R, ...]` on the mesh, split over its rows."""
  return jax.tree.map(
    lambda x: jax.device_put(
      x, sharding(mesh, ('rows',) + (None,) * (x.ndim - 1), x.shape)
    ),
    tree,
  )
