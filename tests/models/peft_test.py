"""Adapter folders: the layout of PEFT, by its own formula, and refusals."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from rlhf_jax import testing
from rlhf_jax.models import decoder
from rlhf_jax.models import hf
from rlhf_jax.models import lora
from rlhf_jax.models import peft

_CONFIG = testing.tiny_config()
_TABLE = decoder.specs(_CONFIG)
_SPECS = lora.specs(_TABLE, 3, ('q_proj', 'o_proj', 'down_proj'))
_SAME = dict(rank=3, alpha=6.0)


def _random(specs, seed):
  rng = np.random.default_rng(seed)
  draw = lambda s: rng.normal(size=s.shape).astype(np.float32)
  return jax.tree.map(draw, specs)


@pytest.fixture
def written(tmp_path):
  adapters = _random(_SPECS, 0)
  folder = tmp_path / 'adapter'
  peft.export(folder, adapters, _SPECS, base='owner/model', **_SAME)
  return folder, adapters


def test_the_layout_is_that_of_peft(written, tmp_path):
  folder, adapters = written
  assert sorted(p.name for p in folder.iterdir()) == [
    'adapter_config.json', 'adapter_model.safetensors'
  ]  # fmt: skip
  config = json.loads((folder / 'adapter_config.json').read_text())
  assert (config['peft_type'], config['r'], config['lora_alpha']) == (
    'LORA', 3, 6.0
  )  # fmt: skip
  assert config['target_modules'] == ['down_proj', 'o_proj', 'q_proj']
  assert config['base_model_name_or_path'] == 'owner/model'
  # W + alpha / r * B A, on the matrices of the checkpoint: what PEFT does.
  model = _random(_TABLE, 1)
  scaled = model | {lora.SCALE: np.float32(2.0)}
  params = lora.combine(scaled, adapters)
  for name, tree in (('base', model), ('merged', lora.merge(params))):
    hf.export(tmp_path / name, tree, _CONFIG)
  load = lambda path: safetensors.numpy.load_file(path)
  base, merged = (
    load(tmp_path / name / 'model.safetensors') for name in ('base', 'merged')
  )
  parts = load(folder / 'adapter_model.safetensors')
  for name in [n for n in parts if n.endswith('lora_A.weight')]:
    a, b = parts.pop(name), parts.pop(name.replace('lora_A', 'lora_B'))
    weight = name.removeprefix('base_model.model.').replace('lora_A.', '')
    base[weight] = base[weight] + 2.0 * (b @ a)
  assert not parts
  for name, value in base.items():
    testing.assert_close(merged[name], value, 'layout_float32')


def test_what_was_written_is_read(written):
  folder, adapters = written
  peft.check(folder, _SPECS, **_SAME)
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  read = peft.load(folder, _SPECS, jax.tree.map(lambda _: here, _SPECS))
  jax.tree.map(np.testing.assert_array_equal, read, adapters)


def test_alpha_is_the_rank_by_default(tmp_path):
  folder = tmp_path / 'adapter'
  same = dict(rank=3, alpha=None)
  peft.export(folder, _random(_SPECS, 0), _SPECS, base='', **same)
  peft.check(folder, _SPECS, **same)
  peft.check(folder, _SPECS, rank=3, alpha=3.0)


@pytest.mark.parametrize(
  'stored, message',
  [
    ({'r': 4}, r'has rank and alpha \(4, 6.0\), not \(3, 6.0\)'),
    ({'lora_alpha': 3}, r'\(3, 3\), not \(3, 6.0\)'),
    ({'use_dora': True}, 'use_dora=True; only plain LoRA can be read'),
    ({'use_rslora': True}, 'use_rslora=True; only plain'),
    ({'peft_type': 'IA3'}, "peft_type='IA3'; only plain LoRA"),
    ({'bias': 'all'}, "bias='all'; only plain"),
    ({'rank_pattern': {'q_proj': 8}}, 'rank_pattern=.*only plain'),
    ({'layers_to_transform': [0]}, r'layers_to_transform=\[0\]; only plain'),
  ],
)
def test_other_adapters_are_refused(written, stored, message):
  file = written[0] / 'adapter_config.json'
  file.write_text(json.dumps(json.loads(file.read_text()) | stored))
  with pytest.raises(ValueError, match=message):
    peft.check(written[0], _SPECS, **_SAME)


def test_keys_of_other_versions_are_no_difference(written):
  file = written[0] / 'adapter_config.json'
  config = json.loads(file.read_text())
  config |= {'rank_pattern': None, 'fan_in_fan_out': None, 'layers_pattern': []}
  del config['use_dora']
  file.write_text(json.dumps(config))
  peft.check(written[0], _SPECS, **_SAME)


def test_other_modules_shapes_and_files_are_refused(written, tmp_path):
  folder, _ = written
  fewer = lora.specs(_TABLE, 3, ('q_proj',))
  with pytest.raises(ValueError, match="of .*'down_proj', 'o_proj', 'q_proj'"):
    peft.check(folder, fewer, **_SAME)
  wider = lora.specs(
    decoder.specs(testing.tiny_config(d_model=20)),
    3,
    ('q_proj', 'o_proj', 'down_proj'),
  )
  with pytest.raises(ValueError, match=r'for example .*\(3, 24\)|\(16, 3\)'):
    peft.check(folder, wider, **_SAME)
  with pytest.raises(FileNotFoundError, match='adapter_config.json is missing'):
    peft.check(tmp_path, _SPECS, **_SAME)
