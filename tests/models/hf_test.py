"""Hugging Face folders: against transformers, round trips, errors."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from rlhf_jax import testing
from rlhf_jax.models import config as config_lib
from rlhf_jax.models import decoder
from rlhf_jax.models import hf
from rlhf_jax.models import spec

_hidden = jax.jit(decoder.hidden, static_argnums=1)


def _logits(params, config, tokens):
  places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  states = _hidden(params, config, tokens, places, jnp.ones_like(tokens))
  return decoder.logits(params, config, states)


def _transformers():
  """torch and transformers, or skips; warnings of theirs are not ours."""
  torch = pytest.importorskip(
    'torch', reason='parity with transformers needs the extra parity (torch)'
  )
  import transformers

  transformers.logging.set_verbosity_error()
  transformers.logging.disable_progress_bar()
  return torch, transformers


def _noisy(specs, seed=0):
  """Random weights whose biases and norms are not 0 and 1."""
  params = spec.init(specs, jax.random.key(seed))
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
  return jax.tree.unflatten(
    tree,
    [w + 0.1 * jax.random.normal(k, w.shape) for w, k in zip(leaves, keys)],
  )


def _tokens(vocab_size, length=40):
  rng = np.random.default_rng(0)
  return jnp.asarray(rng.integers(0, vocab_size, (2, length)), jnp.int32)


def _check_against_transformers(path, config, params):
  torch, transformers = _transformers()
  model = transformers.AutoModelForCausalLM.from_pretrained(
    path, dtype=torch.float32, attn_implementation='eager'
  )
  tokens = _tokens(config.vocab_size)
  with torch.no_grad():
    expected = model(torch.tensor(np.asarray(tokens)).long()).logits.numpy()
  largest = np.abs(expected).max()
  testing.assert_close(
    _logits(params, config, tokens) / largest,
    expected / largest,
    'logits_of_largest',
  )


def _scaling(kind, **fields):
  return config_lib.RopeScaling(kind=kind, **fields)


_CONFIGS = {
  'llama': dict(),
  'llama-untied': dict(tied_embeddings=False),
  'llama-biases': dict(attention_bias=True, output_bias=True, mlp_bias=True),
  'llama-linear': dict(rope_scaling=_scaling('linear', factor=4.0)),
  'llama-llama3': dict(
    # wave lengths of 2 pi .. 2 pi 10000^(2/3): short, blended and long ones
    rope_scaling=_scaling(
      'llama3',
      factor=8.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_positions=256,
    ),
  ),
  'llama-yarn': dict(
    rope_scaling=_scaling('yarn', factor=4.0, original_max_positions=32)
  ),
  'qwen2': dict(family='qwen2', attention_bias=True, tied_embeddings=False),
  # 40 tokens
  'qwen2-sliding': dict(
    family='qwen2',
    attention_bias=True,
    num_layers=3,
    sliding_window=9,
    sliding_layers=(0, 2),
  ),
  'mistral': dict(family='mistral', sliding_window=5, sliding_layers=(0, 1)),
  'qwen2-tied': dict(family='qwen2', attention_bias=True, rope_theta=1e6),
}


@pytest.mark.parametrize('name', _CONFIGS)
def test_export_then_transformers_gives_the_same_logits(name, tmp_path):
  _transformers()
  # transformers wants heads that divide the width: 4 heads of 4 or 8
  config = testing.tiny_config(head_dim=8, **_CONFIGS[name])
  params = _noisy(decoder.specs(config))
  hf.export(tmp_path / 'model', params, config)
  _check_against_transformers(tmp_path / 'model', config, params)


def test_stories260k():
  path = testing.shared_path('data/stories260k')
  config = hf.load_config(path)
  _check_against_transformers(path, config, hf.load(path, config))


def test_smollm2():
  path = os.environ.get('RLHF_JAX_SMOLLM2')
  if not path:
    pytest.skip('set RLHF_JAX_SMOLLM2 to a folder of SmolLM2-135M-Instruct')
  config = hf.load_config(path)
  _check_against_transformers(path, config, hf.load(path, config))


def test_transformers_save_is_read_and_exported_again(tmp_path):
  torch, transformers = _transformers()
  theirs = transformers.LlamaConfig(
    vocab_size=37,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    rope_parameters=dict(rope_type='default', rope_theta=500.0),
  )
  torch.manual_seed(0)
  transformers.LlamaForCausalLM(theirs).save_pretrained(tmp_path)
  config = hf.load_config(tmp_path)
  assert config.rope_theta == 500.0
  _check_against_transformers(tmp_path, config, hf.load(tmp_path, config))


def test_critic_is_read_by_transformers(tmp_path):
  torch, transformers = _transformers()
  config = testing.tiny_config(head_dim=4)
  params = _noisy(decoder.specs(config, 'value'))
  hf.export(tmp_path / 'critic', params, config)
  model = transformers.AutoModelForSequenceClassification.from_pretrained(
    tmp_path / 'critic', dtype=torch.float32, pad_token_id=0
  )
  tokens = jnp.maximum(_tokens(37), 1)
  with torch.no_grad():
    scores = model(torch.tensor(np.asarray(tokens)).long()).logits[:, 0]
  places = jnp.broadcast_to(jnp.arange(40), tokens.shape)
  states = _hidden(params, config, tokens, places, jnp.ones_like(tokens))
  values = decoder.values(params, states)[:, -1]
  np.testing.assert_allclose(values, scores.numpy(), atol=1e-4)
  again = hf.load(tmp_path / 'critic', config, head='value')
  jax.tree.map(np.testing.assert_array_equal, again, params)


@pytest.mark.parametrize('max_shard_bytes', [5_000_000_000, 2000])
@pytest.mark.parametrize('tied', [True, False])
def test_round_trip_is_bitwise(tied, max_shard_bytes, tmp_path):
  config = testing.tiny_config(tied_embeddings=tied)
  params = _noisy(decoder.specs(config))
  path = tmp_path / 'model'
  hf.export(path, params, config, max_shard_bytes=max_shard_bytes)
  files = sorted(p.name for p in path.iterdir())
  if max_shard_bytes > 10**6:
    assert files == ['config.json', 'model.safetensors']
  else:
    assert len(files) > 4
    assert all(
      p.stat().st_size < 5000 for p in path.glob('model-*.safetensors')
    )
  assert hf.load_config(path) == config
  jax.tree.map(np.testing.assert_array_equal, hf.load(path, config), params)
  names = set(hf.load(path, config))
  assert ('head' in names) == (not tied)


def test_bfloat16_file(tmp_path):
  config = testing.tiny_config()
  params = _noisy(decoder.specs(config))
  hf.export(tmp_path / 'model', params, config, dtype=jnp.bfloat16)
  written = json.loads((tmp_path / 'model/config.json').read_text())
  assert written['torch_dtype'] == 'bfloat16'
  rounded = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
  for dtype in (jnp.bfloat16, jnp.float32):
    loaded = hf.load(tmp_path / 'model', config, dtype=dtype)
    jax.tree.map(
      lambda a, b, dtype=dtype: np.testing.assert_array_equal(
        a, b.astype(dtype)
      ),
      loaded,
      rounded,
    )


def test_tokenizer_goes_along(tmp_path):
  import transformers

  path = testing.shared_path('data/stories260k')
  tokenizer = transformers.AutoTokenizer.from_pretrained(path)
  config = testing.tiny_config()
  params = spec.init(decoder.specs(config), jax.random.key(0))
  hf.export(tmp_path / 'model', params, config, tokenizer)
  again = transformers.AutoTokenizer.from_pretrained(tmp_path / 'model')
  text = 'Once upon a time'
  assert again(text)['input_ids'] == tokenizer(text)['input_ids']
  for name in ('config.json', 'generation_config.json'):
    written = json.loads((tmp_path / 'model' / name).read_text())
    assert written['eos_token_id'] == tokenizer.eos_token_id


def test_export_replaces_an_older_folder_and_leaves_nothing_beside(tmp_path):
  config = testing.tiny_config()
  path = tmp_path / 'model'
  path.mkdir()
  (path / 'old').write_text('')
  params = _noisy(decoder.specs(config))
  hf.export(path, params, config)
  assert sorted(p.name for p in path.iterdir()) == [
    'config.json',
    'model.safetensors',
  ]
  with pytest.raises(ValueError, match='not those of the config'):
    hf.export(path, params | {'head': params['embed']}, config)
  with pytest.raises(ValueError, match=r'shape \(37, 16\).*\(38, 16\)'):
    hf.export(path, params, testing.tiny_config(vocab_size=38))
  assert [p.name for p in tmp_path.iterdir()] == ['model']
  hf.load(path, config)  # a failed export leaves the old folder whole


def test_a_critic_starts_from_an_actor(tmp_path):
  config = testing.tiny_config(tied_embeddings=False)
  params = _noisy(decoder.specs(config))
  hf.export(tmp_path / 'actor', params, config)
  critic = hf.load(tmp_path / 'actor', config, head='value')
  assert not critic.pop('value_head').any()
  params.pop('head')
  jax.tree.map(np.testing.assert_array_equal, critic, params)


def _edit(path, change):
  file = path / 'model.safetensors'
  tensors = safetensors.numpy.load_file(file)
  change(tensors)
  safetensors.numpy.save_file(tensors, file, metadata={'format': 'pt'})


@pytest.fixture
def exported(tmp_path):
  config = testing.tiny_config()
  hf.export(tmp_path / 'm', _noisy(decoder.specs(config)), config)
  return tmp_path / 'm', config


def test_stored_copy_of_a_tied_head(exported):
  path, config = exported
  embed = 'model.embed_tokens.weight'
  _edit(path, lambda t: t.update({'lm_head.weight': t[embed].copy()}))
  assert 'head' not in hf.load(path, config)
  _edit(path, lambda t: t.update({'lm_head.weight': t[embed] + 1}))
  with pytest.raises(ValueError, match='lm_head.weight differs'):
    hf.load(path, config)


def test_every_wrong_weight_is_named(exported):
  path, config = exported

  def change(tensors):
    del tensors['model.layers.1.mlp.up_proj.weight']
    tensors['extra'] = np.zeros(2, np.float32)
    tensors['model.norm.weight'] = np.zeros(3, np.float32)
    tensors['model.layers.0.self_attn.rotary_emb.inv_freq'] = np.zeros(
      3, np.float32
    )

  _edit(path, change)
  with pytest.raises(ValueError) as error:
    hf.load(path, config)
  message = str(error.value)
  assert 'missing: model.layers.1.mlp.up_proj.weight' in message
  assert 'unexpected: extra;' in message
  assert 'model.norm.weight: shape (3,), expected (16,)' in message


def test_missing_files(tmp_path):
  config = testing.tiny_config()
  with pytest.raises(FileNotFoundError, match='not a folder. Give a folder'):
    hf.load_config(tmp_path / 'none')
  with pytest.raises(FileNotFoundError, match='downloading it from the hub'):
    hf.load_config('owner/not-a-model-that-exists')
  with pytest.raises(FileNotFoundError, match='config.json is missing'):
    hf.load_config(tmp_path)
  with pytest.raises(FileNotFoundError, match='neither model.safetensors'):
    hf.load(tmp_path, config)
  params = spec.init(decoder.specs(config), jax.random.key(0))
  hf.export(tmp_path / 'm', params, config, max_shard_bytes=3000)
  next((tmp_path / 'm').glob('model-*')).unlink()
  with pytest.raises(FileNotFoundError, match='download is incomplete'):
    hf.load(tmp_path / 'm', config)
