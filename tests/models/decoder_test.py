"""The decoder against itself: packing, caching, rematerialisation."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import testing
from rlhf_jax.models import decoder
from rlhf_jax.models import spec

_CONFIG = testing.tiny_config(attention_bias=True, output_bias=True)
_hidden = jax.jit(
  decoder.hidden, static_argnums=1, static_argnames=('remat', 'dtype')
)
_cached = jax.jit(decoder.hidden_cached, static_argnums=1)


def _params(config=_CONFIG, head='policy', seed=0):
  params = spec.init(decoder.specs(config, head), jax.random.key(seed))
  # Biases and norms start at 0 and 1; away from there a mistake shows.
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
  noisy = [
    w + 0.1 * jax.random.normal(k, w.shape) for w, k in zip(leaves, keys)
  ]
  return jax.tree.unflatten(tree, noisy)


def _tokens(*shape, seed=0):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.integers(0, 37, shape), jnp.int32)


def _places(*lengths):
  """Positions of sequences one after the other: 0..a, 0..b."""
  return jnp.concatenate([jnp.arange(n) for n in lengths])[None]


def _ids(*pairs):
  """Segment ids as (id, number of places) pairs, one row."""
  return jnp.concatenate([jnp.full(n, i, jnp.int32) for i, n in pairs])[None]


def _alone(params, tokens):
  """Hidden states [L, D] of one sequence in a row of its own."""
  length = len(tokens)
  return _hidden(
    params, _CONFIG, tokens[None], _places(length), _ids((1, length))
  )[0]


def test_packed_equals_separate():
  params, a, b = _params(), _tokens(5), _tokens(4, seed=1)
  padding = jnp.zeros(3, jnp.int32)
  packed = _hidden(
    params,
    _CONFIG,
    jnp.concatenate([a, b, padding])[None],
    _places(5, 4, 3),
    _ids((1, 5), (2, 4), (0, 3)),
  )[0]
  testing.assert_close(packed[:5], _alone(params, a), 'layout_float32')
  testing.assert_close(packed[5:9], _alone(params, b), 'layout_float32')
  assert jnp.isfinite(packed).all()


def test_shared_prefix_equals_separate():
  params, prefix = _params(), _tokens(3)
  a, b = _tokens(2, seed=1), _tokens(4, seed=2)
  packed = _hidden(
    params,
    _CONFIG,
    jnp.concatenate([prefix, a, b])[None],
    jnp.array([[0, 1, 2, 3, 4, 3, 4, 5, 6]]),
    _ids((-1, 3), (1, 2), (2, 4)),
  )[0]
  alone = [_alone(params, jnp.concatenate([prefix, x])) for x in (a, b)]
  testing.assert_close(packed[:5], alone[0], 'layout_float32')
  testing.assert_close(packed[5:], alone[1][3:], 'layout_float32')


def test_padding_and_neighbours_have_no_effect():
  params, a = _params(), _tokens(4)
  rows = [jnp.concatenate([a, _tokens(4, seed=s)])[None] for s in (1, 2)]
  ids = _ids((1, 4), (0, 4)), _ids((1, 4), (2, 4))
  out = [
    _hidden(params, _CONFIG, r, _places(4, 4), i)[0, :4]
    for r in rows
    for i in ids
  ]
  for other in out[1:]:
    np.testing.assert_array_equal(out[0], other)


def test_relative_positions_only():
  # rope: the same offset everywhere changes nothing
  params, tokens = _params(), _tokens(1, 6)
  run = lambda start: _hidden(
    params, _CONFIG, tokens, start + _places(6), _ids((1, 6))
  )
  testing.assert_close(run(0), run(11), 'layout_float32')


def test_remat_changes_no_value_and_no_parameter_name():
  params, tokens = _params(), _tokens(2, 7)
  places = jnp.broadcast_to(jnp.arange(7), (2, 7))
  ids = jnp.ones((2, 7), jnp.int32)

  @functools.partial(jax.jit, static_argnums=1)
  def gradient(params, remat):
    return jax.value_and_grad(
      lambda p: jnp.sum(
        decoder.hidden(p, _CONFIG, tokens, places, ids, remat=remat) ** 2
      )
    )(params)

  plain = gradient(params, 'none')
  for remat in ('block', 'offload'):
    testing.assert_norm_close(gradient(params, remat), plain, 'remat')


def test_what_is_kept_for_the_backward_pass():
  params, tokens = _params(), _tokens(2, 7)
  places = jnp.broadcast_to(jnp.arange(7), (2, 7))
  ids = jnp.ones((2, 7), jnp.int32)

  def kept(remat):
    """(shape, in host memory) of what the scan over 2 layers stacks."""
    forward = lambda p: jax.vjp(
      lambda p: decoder.hidden(p, _CONFIG, tokens, places, ids, remat=remat), p
    )
    equations = _scans(jax.make_jaxpr(forward)(params).jaxpr)
    (scan,) = [e for e in equations if e.params['length'] == 2]
    outs = scan.outvars[scan.params['num_carry'] :]
    host = lambda out: out.aval.memory_space == jax.memory.Space.Host
    return collections.Counter((out.aval.shape, host(out)) for out in outs)

  assert kept('block') == {((2, 2, 7, 16), False): 1}  # a block's input
  # Also the middle and two products of the MLP, and of attention with 2 x 2
  # heads: queries and outputs, keys and values, sums.
  none = kept('none')
  assert none[(2, 2, 7, 16), False] == none[(2, 2, 7, 24), False] == 2
  assert sum(none.values()) >= 8
  # The same in the host's memory, and nothing on the device.
  assert kept('offload') == {(shape, True): n for (shape, _), n in none.items()}


def _scans(jaxpr):
  """The scans of a program that are not inside of another scan."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'scan':
      yield equation
    elif 'jaxpr' in equation.params:
      yield from _scans(equation.params['jaxpr'].jaxpr)


def test_unknown_remat():
  with pytest.raises(ValueError, match='remat=True is not one of ..block'):
    _hidden(
      _params(), _CONFIG, _tokens(1, 3), _places(3), _ids((1, 3)), remat=True
    )


def _causal(slots, cache):
  """Token with slot s sees the slots up to s."""
  return jnp.arange(cache)[None, None] <= slots[:, :, None]


@pytest.mark.parametrize('fused', [False, True])
def test_cached_equals_full(fused):
  config = testing.tiny_config(
    attention_bias=True, output_bias=True, mlp_bias=True
  )
  params, tokens = _params(config), _tokens(2, 7)
  places = jnp.broadcast_to(jnp.arange(7), (2, 7))
  full = _hidden(params, config, tokens, places, jnp.ones((2, 7), jnp.int32))
  expected = decoder.logits(params, config, full)
  # B H C E of both layers: garbage that none sees
  cache = (jnp.full((2, 2, 9, 6), 1e6),) * 2
  used = decoder.fuse(params) if fused else params

  def run(keys, values, first, last):
    slots = places[:, first:last]
    out, keys, values = _cached(
      used,
      config,
      tokens[:, first:last],
      slots,
      keys,
      values,
      slots,
      _causal(slots, 9),
    )
    return decoder.logits(used, config, out), keys, values

  out, keys, values = run(cache, cache, 0, 4)
  parts = [out]
  for t in range(4, 7):
    out, keys, values = run(keys, values, t, t + 1)
    parts.append(out)
  testing.assert_close(
    jnp.concatenate(parts, axis=1), expected, 'teacher_forced'
  )
  assert all((k[:, :, 7:] == 1e6).all() for k in keys)


def test_cached_drops_tokens_without_a_slot():
  # The prompt of row 1 is a token shorter: its last place is padding and its
  # next token takes the same slot.
  params, tokens = _params(), _tokens(2, 4)
  places = jnp.broadcast_to(jnp.arange(3), (2, 3))
  slots = jnp.array([[0, 1, 2], [0, 1, 6]])
  cache = (jnp.zeros((2, 2, 6, 6)),) * 2
  _, keys, values = _cached(
    params,
    _CONFIG,
    tokens[:, :3],
    places,
    cache,
    cache,
    slots,
    _causal(slots, 6),
  )
  assert all((k[1, :, 2:] == 0).all() for k in keys)
  assert all((k[0, :, 2] != 0).any() for k in keys)
  now = jnp.array([[3], [2]])
  out, _, _ = _cached(
    params, _CONFIG, tokens[:, 3:], now, keys, values, now, _causal(now, 6)
  )
  long = _alone(params, tokens[0])[-1]
  short = _alone(params, tokens[1, jnp.array([0, 1, 3])])[-1]
  testing.assert_close(out[:, 0], jnp.stack([long, short]), 'layout_float32')


def test_bfloat16_computes_in_bfloat16_and_reports_float32():
  params, tokens = _params(), _tokens(1, 6)
  args = params, _CONFIG, tokens, _places(6), _ids((1, 6))
  half = _hidden(*args, dtype=jnp.bfloat16)
  assert half.dtype == jnp.bfloat16
  assert decoder.logits(params, _CONFIG, half).dtype == jnp.float32
  full = _hidden(*args)
  # 8 bits of mantissa through two layers
  error = jnp.linalg.norm(half.astype(jnp.float32) - full)
  assert 1e-4 < error / jnp.linalg.norm(full) < 2e-2


def test_the_critic_starts_at_zero():
  specs = decoder.specs(_CONFIG, 'value')
  params = spec.init(specs, jax.random.key(0))
  states = _hidden(params, _CONFIG, _tokens(1, 4), _places(4), _ids((1, 4)))
  values = decoder.values(params, states)
  assert values.shape == (1, 4)
  assert (values == 0).all()
  with pytest.raises(ValueError, match='no output head'):
    decoder.logits(params, _CONFIG, states)
