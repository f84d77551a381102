"""One declaration per weight, and what can be computed from a tree of them.

A model is a nested dict of `Spec`s.  Abstract shapes, initialisation,
shardings, the checkpoint loader and the exporter all read the same tree, so
they cannot disagree.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any
import zlib

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
PyTree = Any


@dataclasses.dataclass(frozen=True)
class Spec:
  """A weight: its shape, the meaning of its axes, its start, its file name.

  A weight whose first axis is 'layers' is stacked: the checkpoint holds one
  tensor per layer, and `hf_name` contains `{layer}`.

  `inputs` says how a checkpoint stores one layer of the weight.  0: in our
  order of axes, flattened where the checkpoint has fewer of them.  n > 0: the
  weight is a linear map whose first n axes are its inputs, and the checkpoint
  stores [outputs, inputs].  So the output projection [Q, E, D] has inputs=2
  and is a [D, Q * E] matrix in the file.
  """

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]  # one logical name per axis, for sharding
  init: str  # a name in INITS
  hf_name: str
  inputs: int = 0
  std: float = 0.0  # of init='normal'

  def __post_init__(self):
    if len(self.axes) != len(self.shape):
      raise ValueError(
        f'{self.hf_name}: {len(self.shape)} axes in shape {self.shape} but'
        f' {len(self.axes)} names {self.axes}; give one name (or None) each.'
      )
    if self.init not in INITS:
      raise ValueError(
        f'{self.hf_name}: unknown init {self.init!r}; one of {sorted(INITS)}.'
      )
    if self.stacked != ('{layer}' in self.hf_name):
      raise ValueError(
        f"{self.hf_name}: a name has '{{layer}}' exactly when the first axis"
        f" is 'layers'; got axes {self.axes}."
      )

  @property
  def stacked(self) -> bool:
    return bool(self.axes) and self.axes[0] == 'layers'

  @property
  def layer_shape(self) -> tuple[int, ...]:
    """Shape of one layer's part, or of the weight if it is not stacked."""
    return self.shape[1:] if self.stacked else self.shape

  @property
  def hf_shape(self) -> tuple[int, ...]:
    """Shape of one tensor in the checkpoint."""
    shape = self.layer_shape
    if self.inputs:
      return math.prod(shape[self.inputs :]), math.prod(shape[: self.inputs])
    if self.axes[-1] == 'head_dim':  # biases of heads are flat in the file
      return (math.prod(shape),)
    return shape

  def hf_names(self) -> list[str]:
    """Names of the tensors in the checkpoint, in order of layers."""
    if not self.stacked:
      return [self.hf_name]
    return [self.hf_name.format(layer=i) for i in range(self.shape[0])]

  def from_hf(self, tensor: np.ndarray) -> np.ndarray:
    """One tensor of the checkpoint in our layout, `layer_shape`."""
    return (tensor.T if self.inputs else tensor).reshape(self.layer_shape)

  def to_hf(self, weight: np.ndarray) -> np.ndarray:
    """One layer of the weight as the checkpoint stores it, `hf_shape`."""
    if not self.inputs:
      return weight.reshape(self.hf_shape)
    return weight.reshape(self.hf_shape[::-1]).T


def abstract(specs: PyTree, dtype: Any = jnp.float32) -> PyTree:
  """The tree of `jax.ShapeDtypeStruct`s of a tree of specs."""
  return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, dtype), specs)


def init(specs: PyTree, key: Array, dtype: Any = jnp.float32) -> PyTree:
  """Initial weights; a pure function of `key`, so it can run under `jit`.

  Each weight's key is `fold_in(key, crc32(path))`: adding or removing a
  weight does not change the others.
  """

  def one(path, spec):
    name = '/'.join(str(p.key) for p in path)
    path_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
    return INITS[spec.init](path_key, spec, dtype)

  return jax.tree_util.tree_map_with_path(one, specs)


def count(specs: PyTree) -> int:
  """Number of parameters."""
  return sum(math.prod(s.shape) for s in jax.tree.leaves(specs))


def _normal(key: Array, spec: Spec, dtype: Any) -> Array:
  # Drawn in float32 whatever the dtype, so that a model in bfloat16 starts at
  # the rounding of the same weights.
  return (spec.std * jax.random.normal(key, spec.shape)).astype(dtype)


def _zeros(key: Array, spec: Spec, dtype: Any) -> Array:
  del key
  return jnp.zeros(spec.shape, dtype)


def _ones(key: Array, spec: Spec, dtype: Any) -> Array:
  del key
  return jnp.ones(spec.shape, dtype)


INITS: dict[str, Callable[[Array, Spec, Any], Array]] = {
  'normal': _normal,
  'zeros': _zeros,
  'ones': _ones,
}
