"""Reads and writes Hugging Face folders: config.json, safetensors, tokenizer.

`transformers` is not needed for either; its models read what `export` writes.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import json
import os
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from rlhf_jax.models import config as config_lib
from rlhf_jax.models import decoder
from rlhf_jax.models import spec as spec_lib
from rlhf_jax.sharding import multihost
from rlhf_jax.sharding import rules

PyTree = Any
_INDEX = 'model.safetensors.index.json'
_SINGLE = 'model.safetensors'


def folder(path: str | os.PathLike) -> pathlib.Path:
  """The local folder of a model: `path` itself, or a hub id's download.

  Raises:
    FileNotFoundError: neither a folder nor a model that can be downloaded.
  """
  local = pathlib.Path(path).expanduser()
  if local.is_dir():
    return local
  name = os.fspath(path)
  if name.startswith(('.', '/', '~')) or name.count('/') != 1:
    raise FileNotFoundError(
      f'{name} is not a folder. Give a folder with config.json and'
      ' safetensors files, or a hub id such as owner/model.'
    )
  # Imported here: a local folder needs no network code.
  import huggingface_hub

  patterns = ['*.json', '*.safetensors', 'tokenizer*', '*.jinja', 'merges.txt']
  try:
    return pathlib.Path(
      huggingface_hub.snapshot_download(name, allow_patterns=patterns)
    )
  except Exception as error:  # many kinds: network, access, unknown id
    raise FileNotFoundError(
      f'{name} is not a folder here, and downloading it from the hub failed:'
      f' {error}. Check the name and the network, or download it elsewhere'
      ' and give the folder.'
    ) from error


def load_config(path: str | os.PathLike) -> config_lib.ModelConfig:
  """The config of a folder or hub id; errors as `config.from_hf` has them."""
  file = folder(path) / 'config.json'
  if not file.is_file():
    raise FileNotFoundError(f'{file} is missing; is this a model folder?')
  return config_lib.from_hf(json.loads(file.read_text()))


def load(
  path: str | os.PathLike,
  config: config_lib.ModelConfig,
  *,
  head: str = 'policy',
  dtype: Any = jnp.float32,
  shardings: PyTree | None = None,
) -> PyTree:
  """The weights of a folder or hub id as parameters of `decoder.specs`.

  With head='value' the body is read and the head is the stored one if the
  folder is an exported critic, zeros otherwise; an output head is left out.

  Args:
    path: folder or hub id.
    config: as `load_config` gives it.
    head: 'policy' or 'value'.
    dtype: of the parameters.
    shardings: of the parameters; each weight goes to its devices as it is read.
      None puts everything on the first device.

  Raises:
    FileNotFoundError: no folder or no safetensors in it.
    ValueError: weights that are missing, unexpected or of another shape.
  """
  specs = decoder.specs(config, head)
  if shardings is None:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: here, specs)
  with _Reader(folder(path)) as reader:
    _check_names(reader, specs, config, head)

    def one(spec: spec_lib.Spec, sharding) -> jax.Array:
      out = np.zeros(spec.shape, dtype)
      if spec.hf_name == _VALUE_HEAD and _VALUE_HEAD not in reader.shapes:
        return rules.put(out, sharding)
      parts = out if spec.stacked else out[None]
      for part, name in zip(parts, spec.hf_names(), strict=True):
        part[...] = spec.from_hf(reader.read(name))
      return rules.put(out, sharding)

    return jax.tree.map(one, specs, shardings)


def stop_ids(path: str | os.PathLike) -> frozenset[int]:
  """The end-of-sequence ids of generation_config.json; none without one.

  Chat models often have more of them than their tokenizer names.
  """
  file = folder(path) / 'generation_config.json'
  if not file.is_file():
    return frozenset()
  ids = json.loads(file.read_text()).get('eos_token_id')
  if ids is None:
    return frozenset()
  return frozenset([ids] if isinstance(ids, int) else ids)


def export(
  path: str | os.PathLike,
  params: PyTree,
  config: config_lib.ModelConfig,
  tokenizer: Any = None,
  *,
  dtype: Any = None,
  max_shard_bytes: int = 5_000_000_000,
) -> None:
  """Writes a folder that `transformers` and `load` read.

  config.json, the weights (several files and an index above
  `max_shard_bytes`), and with a `transformers` tokenizer its files and
  generation_config.json.  Everything is written beside `path` and renamed at
  the end, so a folder of that name is complete; an older one is replaced.
  All processes of a job call it, the first one writes.

  Args:
    path: the folder.
    params: an actor's or a critic's parameters.
    config: their architecture.
    tokenizer: of `transformers`, or None to write no tokenizer files.
    dtype: of the file; None keeps that of the parameters.
    max_shard_bytes: largest size of one weight file.
  """
  path = pathlib.Path(path).expanduser()
  head = 'value' if 'value_head' in params else 'policy'
  specs = decoder.specs(config, head)
  if not multihost.is_primary():
    # Its part of weights that are spread over processes is needed all the same.
    for *_, read in _tensors(specs, params, np.dtype('float32')):
      read()
    return
  dtype = np.dtype(dtype or params['embed'].dtype)
  with new_folder(path) as temporary:
    write_json(
      temporary / 'config.json', _hf_config(config, head, tokenizer, dtype)
    )
    _write_weights(temporary, specs, params, dtype, max_shard_bytes)
    if tokenizer is not None:
      tokenizer.save_pretrained(temporary)
      write_json(temporary / 'generation_config.json', _special_ids(tokenizer))


@contextlib.contextmanager
def new_folder(path: str | os.PathLike) -> Iterator[pathlib.Path]:
  """A folder to write in, which gets the name `path` when all is written."""
  path = pathlib.Path(path).expanduser()
  temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
  shutil.rmtree(temporary, ignore_errors=True)
  temporary.mkdir(parents=True)
  try:
    yield temporary
    _replace(path, temporary)
  finally:
    shutil.rmtree(temporary, ignore_errors=True)


def write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
  """Writes JSON as Hugging Face's libraries lay it out."""
  path.write_text(json.dumps(content, indent=2, sort_keys=True) + '\n')


class _Reader:
  """The tensors of a folder by name, read one at a time."""

  def __init__(self, path: pathlib.Path):
    index = path / _INDEX
    if index.is_file():
      files = sorted(set(json.loads(index.read_text())['weight_map'].values()))
    elif (path / _SINGLE).is_file():
      files = [_SINGLE]
    else:
      raise FileNotFoundError(
        f'{path} has neither {_SINGLE} nor {_INDEX}. Weights in other formats'
        ' (pytorch_model.bin, gguf) must be converted to safetensors first.'
      )
    lost = [name for name in files if not (path / name).is_file()]
    if lost:
      raise FileNotFoundError(
        f'{path}: the index names {lost}, which are not there; the download is'
        ' incomplete.'
      )
    self._path, self._names = path, files
    self.shapes: dict[str, tuple[int, ...]] = {}

  def __enter__(self) -> '_Reader':
    self._stack = contextlib.ExitStack()
    self._file_of = {}
    for name in self._names:
      file = self._stack.enter_context(
        safetensors.safe_open(self._path / name, 'numpy')
      )
      for key in file.keys():
        self._file_of[key] = file
        self.shapes[key] = tuple(file.get_slice(key).get_shape())
    return self

  def __exit__(self, *error):
    self._stack.close()

  def read(self, name: str) -> np.ndarray:
    return self._file_of[name].get_tensor(name)


def _check_names(reader: _Reader, specs, config, head) -> None:
  """Raises if the files and the weight table disagree, naming every weight."""
  expected = {
    name: spec.hf_shape
    for spec in jax.tree.leaves(specs)
    for name in spec.hf_names()
  }
  stored = {
    name: shape
    for name, shape in reader.shapes.items()
    # Old Llama files hold the rotary frequencies; they follow from the config.
    if not name.endswith('rotary_emb.inv_freq')
  }
  if head == 'value':
    stored.pop(_OUTPUT_HEAD, None)
    stored.setdefault(_VALUE_HEAD, expected[_VALUE_HEAD])
  elif config.tied_embeddings and _OUTPUT_HEAD in stored:
    stored.pop(_OUTPUT_HEAD)
    if not np.array_equal(reader.read(_OUTPUT_HEAD), reader.read(_EMBED)):
      raise ValueError(
        f'config.json says tie_word_embeddings, but {_OUTPUT_HEAD} differs from'
        f' {_EMBED}. Set tie_word_embeddings to false in config.json to use'
        f' both, or delete {_OUTPUT_HEAD}.'
      )
  problems = []
  if missing := sorted(expected.keys() - stored.keys()):
    problems.append(f'missing: {_some(missing)}')
  if unexpected := sorted(stored.keys() - expected.keys()):
    problems.append(f'unexpected: {_some(unexpected)}')
  problems += [
    f'{name}: shape {stored[name]}, expected {shape}'
    for name, shape in expected.items()
    if name in stored and stored[name] != shape
  ]
  if problems:
    raise ValueError(
      f'the weights do not fit a {config.family} with a {head} head.'
      f' {_some(problems, "; ")}. Is config.json that of these weights?'
    )


def _some(names: list[str], separator: str = ', ') -> str:
  """The names, shortened where there are many."""
  more = f' and {len(names) - 8} more' if len(names) > 8 else ''
  return separator.join(names[:8]) + more


def _hf_config(config, head, tokenizer, dtype) -> dict[str, Any]:
  hf = config_lib.to_hf(config) | {'torch_dtype': dtype.name}
  if head == 'value':
    # One label: transformers then reads a scalar at the last token.
    hf['architectures'] = [config_lib.FAMILIES[config.family]['value']]
    hf |= {'id2label': {'0': 'value'}, 'label2id': {'value': 0}}
  return hf | (_special_ids(tokenizer) if tokenizer is not None else {})


def _special_ids(tokenizer: Any) -> dict[str, int]:
  ids = {
    name: getattr(tokenizer, name)
    for name in ('bos_token_id', 'eos_token_id', 'pad_token_id')
  }
  return {name: i for name, i in ids.items() if i is not None}


def _tensors(
  specs: PyTree, params: PyTree, dtype: np.dtype
) -> Iterator[tuple[str, tuple[int, ...], Callable[[], np.ndarray]]]:
  """Name, shape and a reader of every tensor, in order of layers."""
  plan = []
  for spec, weight in zip(
    jax.tree.leaves(specs), jax.tree.leaves(params), strict=True
  ):
    if tuple(weight.shape) != spec.shape:
      raise ValueError(
        f'{spec.hf_name}: the parameter has shape {tuple(weight.shape)}, the'
        f' config says {spec.shape}. Export with the config of the parameters.'
      )
    for layer, name in enumerate(spec.hf_names()):

      def read(spec=spec, weight=weight, layer=layer):
        part = weight[layer] if spec.stacked else weight
        part = spec.to_hf(np.asarray(multihost.fetch(part)))
        return np.ascontiguousarray(part.astype(dtype))

      plan.append((layer if spec.stacked else -1, name, spec.hf_shape, read))
  plan.sort(key=lambda entry: entry[0])
  for _, name, shape, read in plan:
    yield name, shape, read


def _write_weights(path, specs, params, dtype, max_shard_bytes) -> None:
  if jax.tree.structure(specs) != jax.tree.structure(params):
    raise ValueError(
      f'the parameters are not those of the config: got'
      f' {jax.tree.structure(params)}, expected {jax.tree.structure(specs)}.'
    )
  shards, size, total = [[]], 0, 0
  for name, shape, read in _tensors(specs, params, dtype):
    nbytes = int(np.prod(shape)) * dtype.itemsize
    if shards[-1] and size + nbytes > max_shard_bytes:
      shards.append([])
      size = 0
    shards[-1].append((name, read))
    size, total = size + nbytes, total + nbytes
  files = [_SINGLE]
  if len(shards) > 1:
    files = [
      f'model-{i + 1:05}-of-{len(shards):05}.safetensors'
      for i in range(len(shards))
    ]
  for file, shard in zip(files, shards, strict=True):
    # 'pt' is what transformers asks for before it reads the file.
    safetensors.numpy.save_file(
      {name: read() for name, read in shard},
      path / file,
      metadata={'format': 'pt'},
    )
  if len(shards) > 1:
    names = {
      name: file
      for file, shard in zip(files, shards, strict=True)
      for name, _ in shard
    }
    write_json(
      path / _INDEX, {'metadata': {'total_size': total}, 'weight_map': names}
    )


def _replace(path: pathlib.Path, new: pathlib.Path) -> None:
  """Puts the folder `new` at `path`; what was there is removed afterwards."""
  if not path.exists():
    new.rename(path)
    return
  old = path.with_name(f'.{path.name}.{os.getpid()}.old')
  path.rename(old)
  new.rename(path)
  shutil.rmtree(old)


_EMBED = 'model.embed_tokens.weight'
_OUTPUT_HEAD = 'lm_head.weight'
_VALUE_HEAD = 'score.weight'
