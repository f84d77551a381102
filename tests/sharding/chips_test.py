"""Targets, and what the compiler is told of chips that are not there."""

import types

import jax
import pytest

from rlhf_jax.sharding import chips


def test_targets():
  one, many, torus = map(chips.parse, ('h100:8', 'h100:128x8', 'v5p:8x16x8'))
  assert (one.count, many.count, torus.count) == (8, 1024, 1024)
  assert (str(one), str(torus)) == ('h100:8', 'v5p:8x16x8')
  assert many.chip is chips.CHIPS['h100']


@pytest.mark.parametrize(
  'text, message',
  [
    ('b200:8', "no chip 'b200', choose one of .*'h100'"),
    ('h100', "sizes like h100:128x8, got ''"),
    ('h100:2x2x2', "got '2x2x2'"),
    ('h100:0', "got '0'"),
    ('v5p:4x4', 'sizes like v5p:8x16x8'),
    ('v5e:4x4x4', 'sizes like v5e:4x4'),
    ('cpu:eight', "got 'eight'"),
  ],
)
def test_refuses(text, message):
  with pytest.raises(ValueError, match=message):
    chips.parse(text)


def test_every_chip_has_what_a_roofline_needs():
  for chip in chips.CHIPS.values():
    numbers = chip.flops, chip.memory_bytes, chip.memory_rate, chip.link_rate
    assert all(numbers) or chip.platform == 'cpu', chip
    assert (chip.network_rate is not None) == (chip.platform == 'cuda')
    assert chips.parse(f'{chip.name}:{chip.example}').chip is chip


def test_kinds_of_devices():
  of = lambda kind: chips.of_device(types.SimpleNamespace(device_kind=kind))
  assert of('NVIDIA H100 80GB HBM3').name == 'h100'
  assert of('NVIDIA A100-SXM4-80GB').name == 'a100'
  # 'TPU v5' is a v5p, and begins the name of a v5e.
  assert (of('TPU v5').name, of('TPU v5 lite').name) == ('v5p', 'v5e')
  assert of('an abacus') is None
  assert chips.of_device(jax.devices()[0]).name == 'cpu'


def test_devices_of_this_machine():
  target = chips.parse('cpu:4')
  assert chips.devices(target) == jax.devices()[:4]
  flag = '--xla_force_host_platform_device_count=16'
  with pytest.raises(ValueError, match=f'8 CPU devices, expected 16.*{flag}'):
    chips.devices(chips.parse('cpu:16'))


def test_what_the_compiler_is_told():
  text = chips.target_config(chips.CHIPS['a100'])
  for part in (
    'core_count: 108',
    'cuda_compute_capability { major: 8 }',
    'memory_bandwidth: 2039000000000',
    'device_memory_size: 85899345920',
  ):
    assert part in text
  cuda = chips.environment(chips.parse('h100:8'))
  assert '--xla_gpu_autotune_level=0' in cuda['XLA_FLAGS']
  assert cuda['JAX_PLATFORMS'] == 'cpu'
  tpu = chips.environment(chips.parse('v5e:4x4'))
  assert 'XLA_FLAGS' not in tpu and tpu['TPU_SKIP_MDS_QUERY'] == '1'


@pytest.mark.parametrize('text', ['h100:2x8', 'v5e:4x4'])
def test_devices_that_are_not_there(text):
  target = chips.parse(text)
  if missing := chips.extra(target):
    pytest.skip(f'needs the extra {missing}')
  found = chips.devices(target)
  assert len(found) == 16
  assert chips.of_device(found[0]) is target.chip
  assert len({device.process_index for device in found}) > 1
