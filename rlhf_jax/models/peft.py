"""Reads and writes adapters in the format of the library PEFT.

A folder with adapter_config.json and adapter_model.safetensors, in which one
layer's A is [rank, inputs] and its B [outputs, rank].  PEFT is not needed.

Source: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import json
import os
import pathlib
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from rlhf_jax.models import hf
from rlhf_jax.sharding import multihost
from rlhf_jax.sharding import rules

PyTree = Any
_CONFIG = 'adapter_config.json'
_WEIGHTS = 'adapter_model.safetensors'

# What other adapters do that ours do not: the value without it.
_PLAIN = {
  'peft_type': 'LORA',
  'bias': 'none',
  'fan_in_fan_out': False,
  'lora_bias': False,
  'use_dora': False,
  'use_rslora': False,
  'rank_pattern': {},
  'alpha_pattern': {},
  'layers_to_transform': None,
  'layer_replication': None,
  'modules_to_save': None,
}


def check(
  path: str | os.PathLike, specs: PyTree, *, rank: int, alpha: float | None
) -> None:
  """Refuses a folder whose adapters are not those of a weight table.

  Args:
    path: local folder.
    specs: see `lora.specs`.
    rank: of them.
    alpha: see `lora.scale`.

  Raises:
    FileNotFoundError: a file is missing.
    ValueError: says what the folder has, and what was expected.
  """
  folder = pathlib.Path(path).expanduser()
  for name in (_CONFIG, _WEIGHTS):
    if not (folder / name).is_file():
      raise FileNotFoundError(f'{folder / name} is missing; is it an adapter?')
  stored = json.loads((folder / _CONFIG).read_text())
  for key, value in _PLAIN.items():
    # Older versions know fewer keys, newer ones write empty ones as null.
    if (stored.get(key) or value or None) != (value or None):
      raise ValueError(
        f'{folder} has {key}={stored[key]!r}; only plain LoRA can be read,'
        f' {key}={value!r}'
      )
  expected = rank, _alpha(alpha, rank)
  found = stored['r'], stored['lora_alpha']
  if found != expected:
    raise ValueError(
      f'{folder} has rank and alpha {found}, not {expected}: use those of the'
      ' adapter'
    )
  shapes = {
    name: spec.hf_shape
    for spec in jax.tree.leaves(specs)
    for name in spec.hf_names()
  }
  with safetensors.safe_open(folder / _WEIGHTS, 'numpy') as file:
    there = {k: tuple(file.get_slice(k).get_shape()) for k in file.keys()}
  if there != shapes:
    modules = sorted({name.split('.')[-3] for name in there})
    differ = sorted(there.items() ^ shapes.items())
    raise ValueError(
      f'{folder} has adapters of {modules}, which are not those that train, in'
      f' the shapes of this model: for example {differ[0]}'
    )


def load(path: str | os.PathLike, specs: PyTree, shardings: PyTree) -> PyTree:
  """The adapters of a folder that `check` has passed, float32."""
  folder = pathlib.Path(path).expanduser()
  with safetensors.safe_open(folder / _WEIGHTS, 'numpy') as file:

    def one(spec, sharding):
      layers = [spec.from_hf(file.get_tensor(x)) for x in spec.hf_names()]
      return rules.put(np.stack(layers).astype(np.float32), sharding)

    return jax.tree.map(one, specs, shardings)


def export(
  path: str | os.PathLike,
  adapters: PyTree,
  specs: PyTree,
  *,
  rank: int,
  alpha: float | None,
  base: str,
) -> None:
  """Writes a folder that `peft` and `load` read; all processes call it.

  Args:
    path: the folder; an older one is replaced.
    adapters: float32.
    specs: their weight table, see `lora.specs`.
    rank: of them.
    alpha: see `lora.scale`.
    base: path or hub id of the model that they belong to.
  """
  tensors = {}
  for spec, weight in zip(
    jax.tree.leaves(specs), jax.tree.leaves(adapters), strict=True
  ):
    layers = np.asarray(multihost.fetch(weight))
    for name, layer in zip(spec.hf_names(), layers, strict=True):
      tensors[name] = np.ascontiguousarray(spec.to_hf(layer))
  if not multihost.is_primary():
    return
  config = _PLAIN | dict(
    base_model_name_or_path=base,
    inference_mode=True,
    init_lora_weights=True,
    lora_alpha=_alpha(alpha, rank),
    lora_dropout=0.0,
    r=rank,
    target_modules=sorted({name.split('.')[-3] for name in tensors}),
    task_type='CAUSAL_LM',
  )
  with hf.new_folder(path) as folder:
    hf.write_json(folder / _CONFIG, config)
    safetensors.numpy.save_file(
      tensors, folder / _WEIGHTS, metadata={'format': 'pt'}
    )


def _alpha(alpha: float | None, rank: int) -> float:
  return rank if alpha is None else alpha
