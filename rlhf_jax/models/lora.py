"""Low-rank adapters (LoRA): y = x W + scale (x A) B, where only A and B train.

The adapters of a weight `q` stand beside it in its block, as `q_lora_a` and
`q_lora_b`; the scale, alpha / rank, is one number at the top of the tree.  So
a policy with adapters is one tree, which says all about itself: the forward
pass reads it as it is (`layers.dense`), the sampler and the exporter read
`merge` of it, and the trainer takes it apart with `split`.

Source: https://arxiv.org/abs/2106.09685
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.models import spec as spec_lib

Array = jax.Array
PyTree = Any
Spec = spec_lib.Spec

A, B, SCALE = '_lora_a', '_lora_b', 'lora_scale'
ALL_LINEAR = 'all-linear'  # every linear map of the blocks

# What the library PEFT puts before the name of a module, and after it.
_PREFIX = 'base_model.model.'
_SUFFIX = {A: 'lora_A.weight', B: 'lora_B.weight'}


def specs(table: PyTree, rank: int, targets: Sequence[str]) -> PyTree:
  """The weight table of the adapters of a model.

  For a linear map W [layers, inputs.., outputs..]: A [layers, inputs.., rank]
  and B [layers, rank, outputs..], split over devices as W is; the rank is
  whole.  A starts with the deviation of PEFT's, 1 / sqrt(3 inputs), B at zero,
  so that the first policy is the model itself.

  Args:
    table: of the model, see `decoder.specs`.
    rank: 1 or more.
    targets: modules by their names in the checkpoint ('q_proj'), or ALL_LINEAR.

  Raises:
    ValueError: the rank is no rank, or a target is unknown; lists the names.
  """
  if rank < 1:
    raise ValueError(f'the rank of LoRA is {rank}: expected 1 or more')
  chosen = set(modules(table, targets))

  def of(name, spec):
    if _module(spec) not in chosen:
      return {}
    return {name + A: _a(spec, rank), name + B: _b(spec, rank)}

  return _map(of, table)


def modules(table: PyTree, targets: Sequence[str]) -> list[str]:
  """The names of the target modules, each once, in the order of the model.

  Raises:
    ValueError: there are none, or a name is unknown or twice.
  """
  leaves = jax.tree.leaves(table)
  known = list(dict.fromkeys(filter(None, map(_module, leaves))))
  unknown = [name for name in targets if name not in (*known, ALL_LINEAR)]
  if unknown:
    raise ValueError(
      f'LoRA targets {unknown} are no linear maps of a block: choose among'
      f' {sorted(known)}, or {ALL_LINEAR!r}'
    )
  if not targets or len(set(targets)) != len(targets):
    raise ValueError(
      f'LoRA targets {list(targets)}: expected one or more names, each once,'
      f' of {sorted(known)}, or {ALL_LINEAR!r}'
    )
  if ALL_LINEAR in targets:
    if len(targets) > 1:
      raise ValueError(
        f'LoRA targets {list(targets)}: {ALL_LINEAR!r} has the others in it;'
        ' name it alone'
      )
    return known
  return [name for name in known if name in targets]


def scale(alpha: float | None, rank: int) -> float:
  """alpha / rank; 1 where alpha is unset."""
  return 1.0 if alpha is None else alpha / rank


def extend(table: PyTree, params: PyTree) -> PyTree:
  """The weight table with those adapters that the parameters have.

  Args:
    table: of the model.
    params: of the same model; of their adapters only the names and the rank
      are read.
  """

  def walk(specs, weights):
    out = {}
    for name, spec in specs.items():
      if isinstance(spec, dict):
        out[name] = walk(spec, weights[name]) if name in weights else spec
        continue
      out[name] = spec
      if name + A in weights:
        rank = weights[name + A].shape[-1]
        out |= {name + A: _a(spec, rank), name + B: _b(spec, rank)}
    return out

  return walk(table, params)


def combine(frozen: PyTree, trained: PyTree) -> PyTree:
  """One tree of both, for the forward pass; nothing is copied or computed.

  Args:
    frozen: a model with `lora_scale`, or {} where everything trains.
    trained: its adapters, or the whole model.
  """
  if not frozen:
    return trained
  out = dict(frozen)
  for name, value in trained.items():
    if isinstance(value, dict):
      value = combine(frozen.get(name, {}), value)
    out[name] = value
  return out


def split(params: PyTree) -> tuple[PyTree, PyTree]:
  """What stays as it is and what trains; undoes `combine`.

  Of parameters without adapters all train: ({}, params).
  """
  if not present(params):
    return {}, params
  keep = lambda wanted: _map(
    lambda name, w: {name: w} if _is_adapter(name) == wanted else {}, params
  )
  return keep(False), keep(True)


def present(params: PyTree) -> bool:
  """Whether the parameters have adapters."""
  return SCALE in params


def merge(params: PyTree) -> PyTree:
  """The same policy without adapters: W + scale A B in place of each W.

  In at least float32, which the targets are then in; other weights are left
  as they are.  Parameters without adapters are returned unchanged.
  """
  if not present(params):
    return params

  def walk(node):
    out = {}
    for name, weight in node.items():
      if isinstance(weight, dict):
        out[name] = walk(weight)
      elif name + A in node:
        factors = node[name + A], node[name + B], params[SCALE]
        out[name] = _merged(weight, *factors)
      elif not _is_adapter(name) and name != SCALE:
        out[name] = weight
    return out

  return walk(params)


def scaled(params: PyTree) -> PyTree:
  """Parameters for the forward pass, in which each B is scale times itself."""
  if not present(params):
    return params
  by_scale = lambda name, w: {
    name: w * params[SCALE] if name.endswith(B) else w
  }
  return _map(by_scale, {k: w for k, w in params.items() if k != SCALE})


def _merged(weight, a, b, factor):
  """One weight, all layers; the product in full float32 on every platform."""
  wide = jnp.promote_types(weight.dtype, jnp.float32)
  product = jax.vmap(
    lambda a, b: jnp.tensordot(
      a.astype(wide), b.astype(wide), 1, precision=jax.lax.Precision.HIGHEST
    )
  )(a, b)
  return weight.astype(wide) + factor.astype(wide) * product


def _map(f, node: dict) -> dict:
  """`f(name, leaf) -> {name: leaf}` on all leaves; empty dicts disappear."""
  out = {}
  for name, value in node.items():
    if isinstance(value, dict):
      value = _map(f, value)
      out |= {name: value} if value else {}
    else:
      out |= f(name, value)
  return out


def _is_adapter(name: str) -> bool:
  return name.endswith((A, B))


def _module(spec: Spec) -> str | None:
  """'q_proj' of `model.layers.{layer}.self_attn.q_proj.weight`.

  None of what is no linear map of a block.
  """
  if not (spec.stacked and spec.inputs):
    return None
  return spec.hf_name.split('.')[-2]


def _a(spec: Spec, rank: int) -> Spec:
  count = 1 + spec.inputs  # the layers and the inputs
  return dataclasses.replace(
    spec,
    shape=(*spec.shape[:count], rank),
    axes=(*spec.axes[:count], None),
    init='normal',
    std=1 / math.sqrt(3 * math.prod(spec.shape[1:count])),
    hf_name=_peft_name(spec, A),
  )


def _b(spec: Spec, rank: int) -> Spec:
  count = 1 + spec.inputs
  return dataclasses.replace(
    spec,
    shape=(spec.shape[0], rank, *spec.shape[count:]),
    axes=('layers', None, *spec.axes[count:]),
    init='zeros',
    std=0.0,
    hf_name=_peft_name(spec, B),
    inputs=1,
  )


def _peft_name(spec: Spec, kind: str) -> str:
  module = spec.hf_name.removesuffix('weight')
  return f'{_PREFIX}{module}{_SUFFIX[kind]}'
