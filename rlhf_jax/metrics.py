"""Metrics that carry their reduction.

A metric is a small struct of sums, not a finished number, so that merging the
metrics of micro-batches, mini-batches or processes is exact whatever their
sizes: `merge` adds the sums, and `compute` does the one division at the end.

  a = {'loss': metrics.mean(loss, mask)}            # inside jit
  b = {'loss': metrics.mean(loss_2, mask_2)}
  metrics.compute(metrics.merge(a, b))              # {'loss': 0.25}

Metrics of device arrays are made inside jit; metrics of Python numbers and
NumPy arrays stay on the host, in float64.
"""

from collections.abc import Mapping
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np


@struct.dataclass
class Mean:
  """A weighted average: `total / count`."""

  total: Any  # [] float: sum of weight * value
  count: Any  # [] float: sum of weights

  def merge(self, other: 'Mean') -> 'Mean':
    return Mean(self.total + other.total, self.count + other.count)

  def compute(self) -> float | None:
    return float(self.total) / float(self.count) if self.count else None


@struct.dataclass
class Sum:
  """A total, such as a loss whose weights already hold the division."""

  total: Any  # [] float

  def merge(self, other: 'Sum') -> 'Sum':
    return Sum(self.total + other.total)

  def compute(self) -> float | None:
    return float(self.total)


@struct.dataclass
class Max:
  """The largest value; the count tells nothing seen from all `-inf`."""

  value: Any  # [] float: -inf if nothing was seen
  count: Any  # [] float

  def merge(self, other: 'Max') -> 'Max':
    value = _namespace(self.value, other.value).maximum(self.value, other.value)
    return Max(value, self.count + other.count)

  def compute(self) -> float | None:
    return float(self.value) if self.count else None


@struct.dataclass
class Min:
  """The smallest value; the count tells nothing seen from all `inf`."""

  value: Any  # [] float: inf if nothing was seen
  count: Any  # [] float

  def merge(self, other: 'Min') -> 'Min':
    value = _namespace(self.value, other.value).minimum(self.value, other.value)
    return Min(value, self.count + other.count)

  def compute(self) -> float | None:
    return float(self.value) if self.count else None


Metric = Mean | Sum | Max | Min
Metrics = dict[str, Metric]


def mean(x: Any, where: Any = None) -> Mean:
  """The mean of `x` `[...]` over the places where `where` `[...]` is set."""
  x, where, xp = _prepare(x, where)
  return Mean(xp.sum(xp.where(where, x, 0.0)), _count(where, x, xp))


def weighted_mean(x: Any, weights: Any, where: Any = None) -> Mean:
  """`sum w x / sum w`; places that `where` masks may hold anything."""
  weights, _, _ = _prepare(weights, where)
  x, where, xp = _prepare(x, where)
  if weights.shape != x.shape:
    raise ValueError(
      f'the weights have shape {weights.shape}, the values {x.shape}: they'
      ' must be equal'
    )
  weights = xp.where(where, weights, 0.0)
  return Mean(xp.sum(xp.where(where, x, 0.0) * weights), xp.sum(weights))


def sum(x: Any, where: Any = None) -> Sum:
  """The sum of `x` `[...]` over the places where `where` `[...]` is set."""
  x, where, xp = _prepare(x, where)
  return Sum(xp.sum(xp.where(where, x, 0.0)))


def max(x: Any, where: Any = None) -> Max:
  """The largest of `x` `[...]` where `where` `[...]` is set."""
  x, where, xp = _prepare(x, where)
  value = xp.max(xp.where(where, x, -xp.inf), initial=-xp.inf)
  return Max(value, _count(where, x, xp))


def min(x: Any, where: Any = None) -> Min:
  """The smallest of `x` `[...]` where `where` `[...]` is set."""
  x, where, xp = _prepare(x, where)
  value = xp.min(xp.where(where, x, xp.inf), initial=xp.inf)
  return Min(value, _count(where, x, xp))


def merge(*groups: Mapping[str, Metric]) -> Metrics:
  """All names of all groups; a name that several have is merged exactly.

  Raises:
    TypeError: one name stands for two kinds of metric.
  """
  merged = {}
  for group in groups:
    for name, metric in group.items():
      if name not in merged:
        merged[name] = metric
      elif type(merged[name]) is type(metric):
        merged[name] = merged[name].merge(metric)
      else:
        raise TypeError(
          f"cannot merge metric '{name}': it is a {type(merged[name]).__name__}"
          f' in one group and a {type(metric).__name__} in another; make it the'
          ' same kind in both'
        )
  return merged


def close_sums(group: Mapping[str, Metric]) -> Metrics:
  """Turns every `Sum` into a `Mean` over one observation.

  The loss of a mini-batch is the sum over its micro-batches, but the loss of a
  step is the mean over its mini-batches: close the sums in between.
  """

  def close(metric):
    if not isinstance(metric, Sum):
      return metric
    one = _namespace(metric.total).ones_like(metric.total)
    return Mean(metric.total, one)

  return {name: close(metric) for name, metric in group.items()}


def compute(group: Mapping[str, Metric]) -> dict[str, float]:
  """The finished numbers, fetched from the device in one transfer.

  A mean, maximum or minimum of nothing has no value: its name is left out, and
  a curve shows a gap where a made-up 0 would mislead.
  """
  group = jax.device_get(dict(group))
  values = {name: metric.compute() for name, metric in group.items()}
  return {name: value for name, value in values.items() if value is not None}


def _namespace(*arrays):
  """jax.numpy if any of them lives on a device, else numpy."""
  on_device = any(isinstance(array, jax.Array) for array in arrays)
  return jnp if on_device else np


def _prepare(x, where):
  """`x` in at least float32, the mask as bool of the same shape, and numpy."""
  xp = _namespace(x, where)
  x = xp.asarray(x)
  least = jnp.float32 if xp is jnp else np.float64
  x = x.astype(jnp.promote_types(x.dtype, least) if xp is jnp else least)
  where = xp.ones(x.shape, bool) if where is None else xp.asarray(where, bool)
  if where.shape != x.shape:
    raise ValueError(
      f'the mask has shape {where.shape}, the values {x.shape}: they must be'
      ' equal'
    )
  return x, where, xp


def _count(where, x, xp):
  return xp.sum(where, dtype=x.dtype)
