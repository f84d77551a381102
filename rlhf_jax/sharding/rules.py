"""Which mesh axis splits which logical axis: one table for each use."""

import math

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

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


def rows_sharding(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
  """Of an array `[R, ...]` that is split over its rows."""
  return sharding(mesh, ('rows',) + (None,) * (len(shape) - 1), shape)


def rows(mesh: Mesh, tree: types.PyTree) -> types.PyTree:
  """Puts a tree of host arrays `[R, ...]` on the mesh, split over its rows."""
  return jax.tree.map(lambda x: put(x, rows_sharding(mesh, x.shape)), tree)


def put(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
  """An array of a host value that all processes have alike."""
  if sharding.is_fully_addressable:
    return jax.device_put(x, sharding)
  # `device_put` would send the whole value around to compare it.
  return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])
