"""Small functions on pytrees of arrays, or of `jax.ShapeDtypeStruct`s."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import types

Array = types.Array
PyTree = types.PyTree


def global_norm(tree: PyTree) -> Array:
  """`sqrt(sum of squares of all entries)`, accumulated in at least float32.

  Args:
    tree: floating arrays of any shapes.

  Returns:
    `[]` float32, or float64 if a leaf is; 0 for an empty tree, with gradient 0
    at 0.
  """
  leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
  total = jnp.zeros((), jnp.float32)
  for leaf in leaves:
    leaf = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    total = total + jnp.sum(jnp.square(leaf))
  positive = total != 0  # so that NaN stays NaN
  return jnp.where(positive, jnp.sqrt(jnp.where(positive, total, 1.0)), 0.0)


def all_finite(tree: PyTree) -> Array:
  """Whether no leaf holds NaN or infinity; `[]` bool, True if empty."""
  checks = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
  return jnp.all(jnp.stack(checks)) if checks else jnp.asarray(True)


def size(tree: PyTree) -> int:
  """How many numbers all leaves hold together, as an exact Python int."""
  return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))


def nbytes(tree: PyTree) -> int:
  """How many bytes all leaves hold together, before any sharding."""
  return sum(
    int(np.prod(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )


def cast(tree: PyTree, dtype: Any) -> PyTree:
  """The same tree with its floating leaves in `dtype`; others are untouched."""

  def convert(leaf):
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
      return leaf.update(dtype=jnp.dtype(dtype))
    return leaf.astype(dtype)

  return jax.tree.map(convert, tree)


def name(path: tuple) -> str:
  """The name of a leaf from its key path: `layers/attention/q`."""
  return jax.tree_util.keystr(path, simple=True, separator='/')


def flatten(tree: PyTree) -> dict[str, Any]:
  """All leaves by name, in the order of `jax.tree.leaves`."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {name(path): leaf for path, leaf in leaves}


def names(tree: PyTree) -> list[str]:
  """The names of all leaves, in the order of `jax.tree.leaves`."""
  return list(flatten(tree))


def zeros_like(tree: PyTree, dtype: Any = None) -> PyTree:
  """Zeros in the shapes of a tree, in its own dtypes unless one is given."""
  return jax.tree.map(
    lambda leaf: jnp.zeros(leaf.shape, dtype or leaf.dtype), tree
  )


def add(a: PyTree, b: PyTree) -> PyTree:
  """`a + b`, leaf by leaf, in the dtypes of `a` (an accumulator keeps its own).

  The sum is rounded once: it is computed in the wider of the two dtypes.

  Raises:
    AssertionError: the trees differ in structure or shapes.
  """
  chex.assert_trees_all_equal_shapes(a, b)
  return jax.tree.map(lambda x, y: (x + y).astype(x.dtype), a, b)
