"""Adapters: by hand, against the merged model, and against its gradient."""

import jax
from jax.extend import core as jax_core
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import testing
from rlhf_jax import tree
from rlhf_jax import types
from rlhf_jax.models import decoder
from rlhf_jax.models import heads
from rlhf_jax.models import lora
from rlhf_jax.models import spec
from rlhf_jax.sampling import decode
from rlhf_jax.sampling import engine
from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.sharding import rules

_CONFIG = testing.tiny_config(family='qwen2', init_std=0.4, attention_bias=True)
_TABLE = decoder.specs(_CONFIG)
_RANK, _SCALE = 3, 0.75
_MODULES = ['q_proj', 'k_proj', 'v_proj', 'o_proj']
_MODULES += ['gate_proj', 'up_proj', 'down_proj']


@pytest.fixture(scope='module')
def base():
  rng = np.random.default_rng(1)
  normal = lambda s: rng.normal(size=s.shape, scale=0.4).astype(np.float32)
  params = jax.tree.map(
    lambda s: np.ones(s.shape, np.float32) if s.init == 'ones' else normal(s),
    _TABLE,
  )
  return params | {lora.SCALE: np.float32(_SCALE)}


@pytest.fixture(scope='module')
def adapters():
  """Of all targets, neither factor zero."""
  rng = np.random.default_rng(2)
  return jax.tree.map(
    lambda s: rng.normal(size=s.shape, scale=0.3).astype(np.float32),
    lora.specs(_TABLE, _RANK, ('all-linear',)),
  )


@pytest.fixture(scope='module')
def rows():
  rng = np.random.default_rng(0)
  shape = 2, 12
  return types.Rows(
    tokens=rng.integers(0, 37, shape).astype(np.int32),
    positions=np.tile(np.arange(12, dtype=np.int32), (2, 1)),
    segment_ids=np.ones(shape, np.int32),
    targets=rng.integers(0, 37, shape).astype(np.int32),
    mask=np.ones(shape, bool),
    temperature=np.full(shape, 0.8, np.float32),
  )


@jax.jit
def _logprobs(params, rows):
  return heads.score(
    params, _CONFIG, rows, dtype=params['embed'].dtype
  ).logprobs


def _only(adapters, module):
  """The same tree, in which B of all other modules is 0."""
  table = lora.specs(_TABLE, _RANK, ('all-linear',))
  return jax.tree.map(
    lambda w, s: (
      w if f'.{module}.' in s.hf_name or 'lora_A' in s.hf_name else 0 * w
    ),
    adapters,
    table,
  )


# ---- What is added ----------------------------------------------------------


def test_merge_by_hand():
  # A B = [1, 2]^T [3, 5] = [[3, 5], [6, 10]]; twice that is added to W.
  params = {
    'lora_scale': jnp.float32(2.0),
    'norm': jnp.ones(2),
    'layers': {
      'q': jnp.array([[[1.0, 2.0], [3.0, 4.0]]]),
      'q_lora_a': jnp.array([[[1.0], [2.0]]]),
      'q_lora_b': jnp.array([[[3.0, 5.0]]]),
    },
  }
  merged = lora.merge(params)
  assert sorted(merged) == ['layers', 'norm']
  assert list(merged['layers']) == ['q']
  np.testing.assert_array_equal(
    merged['layers']['q'], [[[7.0, 12.0], [15.0, 24.0]]]
  )


@pytest.mark.parametrize('module', [*_MODULES, 'all-linear'])
def test_merged_forward_is_adapter_forward(base, adapters, rows, module):
  chosen = adapters
  if module != 'all-linear':
    chosen = _only(adapters, module)
  params = lora.combine(base, chosen)
  out = _logprobs(params, rows)
  testing.assert_close(
    out, _logprobs(lora.merge(params), rows), 'layout_float32'
  )
  # It is not nothing that is added.
  assert np.abs(out - _logprobs(lora.merge(base), rows)).max() > 1e-2


def test_the_start_is_the_model_itself(base, rows):
  specs = lora.specs(_TABLE, _RANK, ('all-linear',))
  fresh = jax.jit(lambda key: spec.init(specs, key))(jax.random.key(2))
  for name, value in tree.flatten(fresh).items():
    assert bool(jnp.any(value)) == name.endswith('_lora_a'), name
  params = lora.combine(base, fresh)
  # Also as a reference: the scale, and nothing that it counts for.
  np.testing.assert_array_equal(
    _logprobs(base, rows), _logprobs(lora.merge(base), rows)
  )
  np.testing.assert_array_equal(
    _logprobs(params, rows), _logprobs(lora.merge(base), rows)
  )
  jax.tree.map(
    np.testing.assert_array_equal, lora.merge(params), lora.merge(base)
  )
  # Of PEFT's deviation: 1 / sqrt(3 * 16 inputs) = 0.144.
  first = specs['layers']['mlp']['gate_lora_a']
  assert first.std == pytest.approx(0.1443, abs=1e-4)


def test_a_model_in_bfloat16_is_merged_in_float32(base, adapters):
  narrow = tree.cast(base, jnp.bfloat16) | {lora.SCALE: base[lora.SCALE]}
  merged = lora.merge(lora.combine(narrow, adapters))
  wide = tree.cast(narrow, jnp.float32) | {lora.SCALE: base[lora.SCALE]}
  expected = lora.merge(lora.combine(wide, adapters))
  got, want = (p['layers']['attention']['q'] for p in (merged, expected))
  assert got.dtype == jnp.float32
  np.testing.assert_array_equal(got, want)
  assert merged['embed'].dtype == jnp.bfloat16


# ---- What trains ------------------------------------------------------------


def _loss(params, rows):
  return jnp.sum(jnp.sin(_logprobs(params, rows)))


def test_gradient_by_the_chain_rule(base, adapters, rows):
  """dA = scale dW B^T and dB = scale A^T dW, dW of the merged model."""
  with jax.enable_x64(True):
    wide = lambda x: tree.cast(x, jnp.float64)
    base, adapters = wide(base), wide(adapters)
    of_adapters = lambda adapters: _loss(lora.combine(base, adapters), rows)
    grads = jax.grad(of_adapters)(adapters)
    full = jax.grad(_loss)(lora.merge(lora.combine(base, adapters)), rows)
    table = lora.specs(_TABLE, _RANK, ('all-linear',))
    flat = tree.flatten(adapters)
    for name, weight in tree.flatten(full['layers']).items():
      if f'layers/{name}_lora_a' not in flat:
        continue
      a, b = (flat[f'layers/{name}_lora_{x}'] for x in 'ab')
      block, leaf = name.split('/')
      inputs = table['layers'][block][f'{leaf}_lora_a'].inputs
      count = int(np.prod(weight.shape[1 : 1 + inputs]))
      by_matrix = lambda x, *shape: np.asarray(x).reshape(2, *shape)
      d_weight = by_matrix(weight, count, -1)
      a, b = by_matrix(a, count, -1), by_matrix(b, _RANK, -1)
      got = [grads['layers'][block][f'{leaf}_lora_{x}'] for x in 'ab']
      testing.assert_norm_close(
        [by_matrix(got[0], count, -1), by_matrix(got[1], _RANK, -1)],
        [
          _SCALE * np.einsum('gio,gro->gir', d_weight, b),
          _SCALE * np.einsum('gir,gio->gro', a, d_weight),
        ],
        'gradient_invariance_float64',
      )
      assert np.abs(got[1]).max() > 1e-3, name


def _product_shapes(jaxpr):
  """Shapes of all results of matrix products, inside of everything."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == 'dot_general':
      yield eqn.outvars[0].aval.shape
    for inner in jax_core.jaxprs_in_params(eqn.params):
      yield from _product_shapes(inner)


def test_no_gradient_of_the_model_is_computed(base, adapters, rows):
  # 30 places a row: a size that no weight has.
  longer = jax.tree.map(lambda x: np.concatenate([x, x, x[:, :6]], 1), rows)

  def shapes(trained, frozen):
    of = lambda trained, frozen: _loss(lora.combine(frozen, trained), longer)
    return set(
      _product_shapes(jax.make_jaxpr(jax.grad(of))(trained, frozen).jaxpr)
    )

  everything = shapes(lora.merge(base), {})
  ours = shapes(adapters, base)
  # Of gate, up and q, of down and o, of k and v, and of the tied embedding.
  of_weights = {(24, 16), (16, 24), (12, 16), (37, 16)}
  assert of_weights <= everything
  assert not of_weights & ours


# ---- The weight table -------------------------------------------------------


def test_specs():
  specs = lora.specs(_TABLE, _RANK, ('o_proj', 'q_proj'))
  assert tree.names(specs) == [
    f'layers/attention/{name}' for name in
    ('o_lora_a', 'o_lora_b', 'q_lora_a', 'q_lora_b')
  ]  # fmt: skip
  o_a, o_b, q_a, q_b = jax.tree.leaves(specs)
  assert (q_a.shape, q_b.shape) == ((2, 16, 3), (2, 3, 4, 6))
  assert (o_a.shape, o_b.shape) == ((2, 4, 6, 3), (2, 3, 16))
  assert q_a.axes == ('layers', 'embed', None)
  assert q_b.axes == ('layers', None, 'heads', 'head_dim')
  assert o_a.axes == ('layers', 'heads', 'head_dim', None)
  assert o_b.axes == ('layers', None, 'embed')
  # PEFT stores [rank, inputs] and [outputs, rank].
  before = 'base_model.model.model.layers.1.self_attn'
  assert q_a.hf_names()[1] == f'{before}.q_proj.lora_A.weight'
  assert o_b.hf_names()[1] == f'{before}.o_proj.lora_B.weight'
  assert (q_a.hf_shape, q_b.hf_shape) == ((3, 16), (24, 3))
  assert (o_a.hf_shape, o_b.hf_shape) == ((3, 24), (16, 3))
  assert spec.count(specs) == 2 * 3 * (2 * 16 + 2 * 24)


def test_combine_and_split(base, adapters):
  params = lora.combine(base, adapters)
  frozen, trained = lora.split(params)
  for got, want in ((frozen, base), (trained, adapters)):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert all(map(lambda a, b: a is b, *map(jax.tree.leaves, (got, want))))
  plain = lora.merge(base)
  assert lora.split(plain) == ({}, plain) and lora.combine({}, plain) is plain
  assert not lora.present(plain) and lora.merge(plain) is plain


@pytest.mark.parametrize(
  'rank, targets, message',
  [
    (0, ('all-linear',), 'rank of LoRA is 0: expected 1 or more'),
    (-2, ('all-linear',), 'rank of LoRA is -2'),
    (1, (), r'LoRA targets \[\]: expected one or more'),
    (1, ('q_proj', 'q_proj'), 'each once'),
    (1, ('q_proj', 'all-linear'), "'all-linear' has the others in it"),
    (
      1,
      ('qproj', 'lm_head'),
      r"\['qproj', 'lm_head'\] are no linear maps of a block: choose among"
      r" \['down_proj', 'gate_proj', 'k_proj', 'o_proj', 'q_proj', 'up_proj',"
      r" 'v_proj'\], or 'all-linear'",
    ),
  ],
)
def test_refusals(rank, targets, message):
  with pytest.raises(ValueError, match=message):
    lora.specs(_TABLE, rank, targets)


# ---- The sampler ------------------------------------------------------------


@pytest.mark.parametrize('tensor', [1, 2])
def test_the_sampler_has_the_adapters(base, adapters, rows, tensor):
  mesh = mesh_lib.make(tensor=tensor, devices=jax.devices()[:tensor])
  relayout = engine.relayout_program(mesh, _TABLE, jnp.float32)
  lengths = jnp.full(2, 12)

  def last(params):  # log-probs of all tokens after the last one
    policy = relayout(params)
    logits = decode.prefill(
      policy, None, jnp.asarray(rows.tokens), lengths,
      config=_CONFIG, dtype=jnp.float32,
    ).logits  # fmt: skip
    return jax.nn.log_softmax(logits)

  @jax.jit
  def expected(params):
    states = decoder.hidden(
      params, _CONFIG, rows.tokens, rows.positions, rows.segment_ids
    )
    logits = decoder.logits(params, _CONFIG, states)
    return jax.nn.log_softmax(logits[:, -1])

  seen = []
  for factor in np.float32([0, 1, 2]):
    params = lora.combine(base, jax.tree.map(factor.__mul__, adapters))
    testing.assert_close(last(params), expected(params), 'teacher_forced')
    seen.append(last(params))
  assert all(np.abs(a - b).max() > 0.1 for a, b in zip(seen, seen[1:]))


# ---- A mesh -----------------------------------------------------------------


def test_gradient_on_a_mesh(base, adapters, rows):
  specs = lora.specs(_TABLE, _RANK, ('all-linear',))

  def gradient(mesh):
    def loss(trained, frozen, rows):
      scores = heads.score(lora.combine(frozen, trained), _CONFIG, rows)
      return jnp.sum(jnp.sin(scores.logprobs))

    of_base = rules.params(mesh, _TABLE) | {
      lora.SCALE: rules.sharding(mesh, (), ())
    }
    shardings = rules.params(mesh, specs)
    program = jax.jit(jax.grad(loss), out_shardings=shardings)
    grads = program(
      jax.device_put(adapters, shardings),
      jax.device_put(base, of_base),
      rules.rows(mesh, rows),
    )
    jax.tree.map(
      lambda g, s: np.testing.assert_(g.sharding.is_equivalent_to(s, g.ndim)),
      grads,
      shardings,
    )
    return jax.device_get(grads)

  one = gradient(mesh_lib.make(devices=jax.devices()[:1]))
  many = gradient(mesh_lib.make(fsdp=2, tensor=2, context=2))
  testing.assert_norm_close(many, one, 'gradient_layout_float32')
