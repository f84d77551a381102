"""config.json to ModelConfig and back."""

import json

import pytest

from rlhf_jax import testing
from rlhf_jax.models import config as config_lib

_LLAMA = dict(
  model_type='llama',
  vocab_size=32,
  hidden_size=16,
  intermediate_size=24,
  num_hidden_layers=2,
  num_attention_heads=4,
)
_QWEN = _LLAMA | dict(model_type='qwen2')
_MISTRAL = _LLAMA | dict(model_type='mistral', num_key_value_heads=2)
_LLAMA3 = dict(
  factor=8.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=8192,
)


def test_defaults_of_a_sparse_file():
  config = config_lib.from_hf(_LLAMA)
  assert config.num_kv_heads == 4  # as many as query heads
  assert config.head_dim == 4  # 16 / 4
  assert config.rope_theta == 10000.0
  assert config.norm_eps == 1e-6
  assert not config.tied_embeddings
  assert not config.attention_bias
  assert config.max_positions == 2048


def test_biases_by_family():
  qwen = config_lib.from_hf(_QWEN)
  assert (qwen.attention_bias, qwen.output_bias, qwen.mlp_bias) == (1, 0, 0)
  llama = config_lib.from_hf(_LLAMA | dict(attention_bias=True, mlp_bias=True))
  assert (llama.attention_bias, llama.output_bias, llama.mlp_bias) == (1, 1, 1)


def test_both_spellings_of_rope_agree():
  old = _LLAMA | dict(
    rope_theta=5e5, rope_scaling=_LLAMA3 | dict(type='llama3')
  )
  new = _LLAMA | dict(
    rope_parameters=_LLAMA3 | dict(rope_type='llama3', rope_theta=5e5)
  )
  assert config_lib.from_hf(old) == config_lib.from_hf(new)
  scaling = config_lib.from_hf(new).rope_scaling
  assert scaling.original_max_positions == 8192
  assert scaling.factor == 8.0
  default = _LLAMA | dict(
    rope_parameters=dict(rope_type='default', rope_theta=7.0)
  )
  assert config_lib.from_hf(default).rope_theta == 7.0
  assert config_lib.from_hf(default).rope_scaling is None


@pytest.mark.parametrize(
  'hf',
  [
    _LLAMA,
    _QWEN | dict(tie_word_embeddings=True),
    _LLAMA | dict(rope_scaling=dict(rope_type='linear', factor=2.0)),
    _LLAMA | dict(rope_scaling=_LLAMA3 | dict(rope_type='llama3')),
    _LLAMA | dict(rope_scaling=dict(type='yarn', factor=4.0, truncate=False)),
  ],
)
def test_round_trip(hf):
  config = config_lib.from_hf(hf)
  assert hash(config) == hash(config_lib.from_hf(hf))
  file = json.loads(json.dumps(config_lib.to_hf(config)))
  assert config_lib.from_hf(file) == config


_WINDOW = dict(use_sliding_window=True, sliding_window=64)
_TYPES = ['sliding_attention', 'full_attention']


@pytest.mark.parametrize(
  'hf, expected',
  [
    (_QWEN | _WINDOW | dict(use_sliding_window=False), (0, 0)),
    (_QWEN | _WINDOW | dict(sliding_window=None), (0, 0)),
    (_QWEN | _WINDOW, (0, 0)),  # from layer 28 on
    (_QWEN | _WINDOW | dict(max_window_layers=1), (0, 64)),
    (_QWEN | _WINDOW | dict(layer_types=_TYPES), (64, 0)),
    (_QWEN | _WINDOW | dict(layer_types=_TYPES[1:] * 2), (0, 0)),
    (_QWEN | dict(use_sliding_window=True, max_window_layers=0), (4096, 4096)),
    (_MISTRAL, (4096, 4096)),  # transformers' default
    (_MISTRAL | dict(sliding_window=None), (0, 0)),
    (_MISTRAL | dict(sliding_window=8), (8, 8)),
  ],
)
def test_windows(hf, expected):
  config = config_lib.from_hf(hf)
  assert config.windows == expected
  again = config_lib.from_hf(json.loads(json.dumps(config_lib.to_hf(config))))
  assert again == config and again.windows == expected


@pytest.mark.parametrize(
  'hf, message',
  [
    (
      _QWEN | dict(layer_types=_TYPES),
      r'sliding layers \(0,\), but .* no window',
    ),
    (_LLAMA | dict(layer_types=_TYPES), r'no window \(llama'),
    (_QWEN | _WINDOW | dict(layer_types=_TYPES * 2), 'each of 2 layers'),
    (_QWEN | _WINDOW | dict(layer_types=['chunked'] * 2), 'expected full_att'),
    (_MISTRAL | dict(layer_types=_TYPES), 'does not compute it either'),
    (_LLAMA | dict(model_type='mistral'), "lacks .'num_key_value_heads'"),
  ],
)
def test_refused_windows(hf, message):
  with pytest.raises(ValueError, match=message):
    config_lib.from_hf(hf)


def test_windows_that_cannot_be():
  make = testing.tiny_config
  with pytest.raises(ValueError, match='sliding_window=5 with .*=\\(\\)'):
    make(sliding_window=5)
  with pytest.raises(ValueError, match='expected different layers of 0..1'):
    make(sliding_window=5, sliding_layers=(1, 2))
  with pytest.raises(ValueError, match='llama has no sliding windows'):
    make(sliding_window=5, sliding_layers=(1,))
  with pytest.raises(ValueError, match='in all layers or in none'):
    make(family='mistral', sliding_window=5, sliding_layers=(1,))
  with pytest.raises(ValueError, match='mistral has no biases'):
    make(family='mistral', attention_bias=True)
  # From a JSON file: a list.
  whole = make(family='mistral', sliding_window=5, sliding_layers=[0, 1])
  assert hash(whole) and whole.windows == (5, 5)


@pytest.mark.parametrize(
  'change, message',
  [
    (dict(model_type='gpt2'), "'gpt2' is not supported; one of.*llama.*qwen2"),
    (dict(hidden_act='gelu'), "'gelu'.*only silu"),
    (dict(rope_scaling=dict(type='dynamic', factor=2.0)), "'dynamic'.*yarn"),
    (dict(rope_scaling=dict(type='linear')), "needs 'factor'"),
    (
      dict(rope_scaling=dict(type='linear', factor=2.0, extra=1)),
      "unknown settings {'extra': 1}",
    ),
    (dict(partial=1, rope_parameters=dict(partial_rotary_factor=0.5)), 'part'),
    (dict(num_attention_heads=3), 'hidden_size=16 is not a multiple'),
    (dict(num_key_value_heads=3), 'not a multiple of num_kv_heads=3'),
    (dict(head_dim=5), 'head_dim=5 is odd'),
    (dict(num_hidden_layers=0), 'num_layers is 0'),
    (dict(quantization_config=dict(bits=4)), 'quantised'),
  ],
)
def test_refused(change, message):
  with pytest.raises(ValueError, match=message):
    config_lib.from_hf(_LLAMA | change)


def test_missing_keys_are_named():
  with pytest.raises(ValueError, match="lacks .'vocab_size'"):
    config_lib.from_hf({k: v for k, v in _LLAMA.items() if k != 'vocab_size'})


def test_biases_that_a_family_does_not_have():
  with pytest.raises(ValueError, match='qwen2 has biases on q, k and v'):
    testing.tiny_config(family='qwen2')
  with pytest.raises(ValueError, match='llama has attention biases'):
    testing.tiny_config(attention_bias=True)
  with pytest.raises(ValueError, match="unknown model family 'gpt2'"):
    testing.tiny_config(family='gpt2')
