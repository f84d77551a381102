"""The weight table: counts, layouts, initialisation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import testing
from rlhf_jax.models import config as config_lib
from rlhf_jax.models import decoder
from rlhf_jax.models import spec

Spec = spec.Spec


def test_count_by_hand():
  # vocabulary 37, D 16, F 24, 2 layers, 4 and 2 heads of width 6:
  # embed 37*16 = 592; q 16*24, k and v 16*12, o 24*16 = 1152 a layer;
  # mlp 3*16*24 = 1152 a layer; norms 2*16 a layer and 16
  config = testing.tiny_config()
  assert spec.count(decoder.specs(config)) == 592 + 2 * (1152 + 1152 + 32) + 16
  untied = testing.tiny_config(tied_embeddings=False)
  assert spec.count(decoder.specs(untied)) == 5280 + 592
  assert spec.count(decoder.specs(untied, 'value')) == 5280 + 16


def test_smollm2_has_135_million():
  config = config_lib.ModelConfig(
    vocab_size=49152,
    d_model=576,
    d_mlp=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
  )
  assert spec.count(decoder.specs(config)) == 134_515_008


def test_layout_of_a_linear_map_with_two_input_axes():
  # y = sum_ab x[a, b] w[a, b, :], so the file's matrix [out, in] has
  # in = 2 a + b
  one = Spec((2, 2, 3), ('heads', 'head_dim', 'embed'), 'zeros', 'o', inputs=2)
  assert one.hf_shape == (3, 4)
  file = np.arange(12.0).reshape(3, 4)
  ours = one.from_hf(file)
  assert ours[1, 0, 2] == file[2, 2]
  np.testing.assert_array_equal(one.to_hf(ours), file)


@pytest.mark.parametrize('head', ['policy', 'value'])
def test_every_weight_survives_the_way_to_the_file_and_back(head):
  config = testing.tiny_config(
    attention_bias=True, output_bias=True, mlp_bias=True, tied_embeddings=False
  )
  rng = np.random.default_rng(0)
  for one in jax.tree.leaves(decoder.specs(config, head)):
    weight = rng.normal(size=one.layer_shape)
    file = one.to_hf(weight)
    assert file.shape == one.hf_shape
    np.testing.assert_array_equal(one.from_hf(file), weight)


def test_init_follows_the_table():
  specs = decoder.specs(testing.tiny_config(d_mlp=400, num_layers=3))
  params = spec.init(specs, jax.random.key(0))
  assert jax.tree.map(jnp.shape, params) == jax.tree.map(
    lambda s: s.shape, specs
  )
  gate, down = params['layers']['mlp']['gate'], params['layers']['mlp']['down']
  np.testing.assert_allclose(jnp.std(gate), 0.1, rtol=0.03)
  np.testing.assert_allclose(jnp.std(down), 0.1 / np.sqrt(6), rtol=0.03)
  assert (params['final_norm'] == 1).all()
  half = spec.init(specs, jax.random.key(0), jnp.bfloat16)
  np.testing.assert_array_equal(
    half['embed'], params['embed'].astype(jnp.bfloat16)
  )


def test_a_new_weight_changes_no_other():
  key = jax.random.key(3)
  tied = spec.init(decoder.specs(testing.tiny_config()), key)
  more = spec.init(
    decoder.specs(testing.tiny_config(tied_embeddings=False)), key
  )
  more.pop('head')
  jax.tree.map(np.testing.assert_array_equal, tied, more)
  q, k = (tied['layers']['attention'][name] for name in 'qk')
  assert not np.array_equal(q[:, :, :2], k)  # a key of its own each


def test_abstract_equals_real_shapes():
  specs = decoder.specs(testing.tiny_config())
  real = jax.eval_shape(lambda key: spec.init(specs, key), jax.random.key(0))
  assert spec.abstract(specs) == real


def test_errors():
  with pytest.raises(ValueError, match='2 axes in shape'):
    Spec((2, 3), ('embed',), 'zeros', 'w')
  with pytest.raises(ValueError, match="unknown init 'one'.*ones"):
    Spec((2,), ('embed',), 'one', 'w')
  with pytest.raises(ValueError, match='layer'):
    Spec((2,), ('layers',), 'ones', 'w')
  with pytest.raises(ValueError, match="unknown head 'q'.*policy.*value"):
    decoder.specs(testing.tiny_config(), 'q')
