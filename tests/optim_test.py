"""Schedules and one AdamW update, by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlhf_jax import optim
from rlhf_jax import testing
from rlhf_jax import tree
from rlhf_jax.models import decoder
from rlhf_jax.models import spec
from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.sharding import rules


def _schedule(decay, **kwargs):
  kwargs = dict(warmup_updates=4, total_updates=12, end_fraction=0.1) | kwargs
  return optim.schedule(2.0, decay=decay, **kwargs)


@pytest.mark.parametrize(
  'decay, expected',
  [
    # Updates 0, 1, 3 of the warm-up are 1/4, 2/4, 4/4 of 2.  Then 4, 6, 8, 10
    # are 0, 1/4, 1/2, 3/4 of the way to update 12, and it stays there.
    ('constant', [0.5, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]),
    # 2 (0.1 + 0.9 (1 - progress))
    ('linear', [0.5, 1.0, 2.0, 2.0, 1.55, 1.1, 0.65, 0.2, 0.2]),
    # 2 (0.1 + 0.9 (1 + cos(pi progress)) / 2), cos(pi / 4) = 0.70710678
    ('cosine',
     [0.5, 1.0, 2.0, 2.0, 1.73639610, 1.1, 0.46360390, 0.2, 0.2]),
  ],
)  # fmt: skip
def test_schedule_golden(decay, expected):
  values = jax.vmap(_schedule(decay))(
    jnp.array([0, 1, 3, 4, 6, 8, 10, 12, 500])
  )
  np.testing.assert_allclose(values, expected, rtol=1e-6)


def test_schedule_without_warm_up_begins_at_the_top():
  for decay in ('constant', 'linear', 'cosine'):
    assert float(_schedule(decay, warmup_updates=0)(0)) == 2.0
  # The first update of a warm-up is not wasted on a rate of 0.
  assert float(_schedule('linear', warmup_updates=1)(0)) == 2.0
  # Down to 0 if that is asked for.
  end = _schedule('cosine', end_fraction=0.0)(12)
  assert abs(float(end)) < 1e-6


def test_schedule_errors():
  with pytest.raises(
    ValueError, match=r"'cos' is not one of \['constant', 'co"
  ):
    _schedule('cos')
  with pytest.raises(
    ValueError, match='warmup_updates=12 must be less.* 12 up'
  ):
    _schedule('linear', warmup_updates=12)
  # A constant rate has no end to reach: a long warm-up is only long.
  assert float(_schedule('constant', warmup_updates=40)(19)) == 1.0


def _adamw(**kwargs):
  kwargs = (
    dict(b1=0.9, b2=0.99, eps=1e-5, weight_decay=0.0, max_grad_norm=1e9)
    | kwargs
  )
  return optim.adamw(lambda count: 0.1, **kwargs)


def test_weights_decay_and_vectors_do_not():
  # With gradients of 0 the update is -lr * weight_decay * weight.
  config = testing.tiny_config(
    attention_bias=True, output_bias=True, mlp_bias=True, tied_embeddings=False
  )
  decayed = set()
  optimizer = _adamw(weight_decay=0.5)
  update = jax.jit(
    lambda params: optimizer.update(
      tree.zeros_like(params), optimizer.init(params), params
    )[0]
  )
  for head in ('policy', 'value'):
    params = jax.tree.map(
      lambda x: np.ones(x.shape, np.float32),
      spec.abstract(decoder.specs(config, head)),
    )
    updates = update(params)
    for name, found in tree.flatten(updates).items():
      found = np.asarray(found)
      value = found.flat[0]
      assert (found == value).all()
      if value != 0:
        assert value == pytest.approx(-0.05)
        decayed.add(name)
  assert decayed == {
    'embed',
    'head',
    'value_head',
    'layers/attention/q',
    'layers/attention/k',
    'layers/attention/v',
    'layers/attention/o',
    'layers/mlp/gate',
    'layers/mlp/up',
    'layers/mlp/down',
  }  # No norm, no bias: also not q_bias [G, Q, E], which has three axes.


def test_update_golden():
  # The first moments are m = 0.1 g and v = 0.01 g^2, corrected to g and g^2,
  # so the update is -lr (g / (|g| + eps) + weight_decay w).
  params = {'w': jnp.array([[2.0, -4.0]]), 'final_norm': jnp.array([2.0])}
  gradients = {'w': jnp.array([[0.3, -1e-5]]), 'final_norm': jnp.array([-0.5])}
  optimizer = _adamw(weight_decay=0.5)
  updates, _ = optimizer.update(gradients, optimizer.init(params), params)
  np.testing.assert_allclose(
    updates['w'],
    [[-0.1 * (0.3 / 0.30001 + 1.0), -0.1 * (-0.5 - 2.0)]],
    rtol=1e-5,
  )
  np.testing.assert_allclose(updates['final_norm'], [0.1], rtol=1e-4)


@pytest.mark.parametrize('scale', [1e-3, 0.9, 1.0, 5.0, 1e6])
def test_norm_after_clipping(scale):
  # The first moment after one update is 0.1 times the clipped gradient.
  rng = np.random.default_rng(0)
  direction = rng.normal(size=(50, 4))
  direction /= np.linalg.norm(direction)
  split = {'a': direction[:20], 'b': {'c': direction[20:]}}
  gradients = jax.tree.map(lambda x: jnp.float32(scale * x), split)
  optimizer = _adamw(max_grad_norm=0.8)
  _, state = optimizer.update(gradients, optimizer.init(gradients), gradients)
  clipped = {
    name.split('mu/')[1]: np.asarray(x, np.float64) / 0.1
    for name, x in tree.flatten(state).items()
    if 'mu/' in name
  }
  norm = np.sqrt(sum((x**2).sum() for x in clipped.values()))
  assert norm <= 0.8 * (1 + 1e-6)
  # Scaled as a whole: the direction is kept, and small gradients untouched.
  expected = direction * min(scale, 0.8)
  np.testing.assert_allclose(clipped['a'], expected[:20], rtol=1e-5)
  np.testing.assert_allclose(clipped['b/c'], expected[20:], rtol=1e-5)


def test_clipping_off_and_negative():
  # AdamW cancels the scale, so the first moment is looked at.
  gradients = {'w': jnp.full((2, 2), 1e4)}
  optimizer = _adamw(max_grad_norm=0.0)
  _, state = optimizer.update(gradients, optimizer.init(gradients), gradients)
  moment = next(x for n, x in tree.flatten(state).items() if 'mu/' in n)
  np.testing.assert_allclose(moment, np.full((2, 2), 1e3), rtol=1e-6)
  with pytest.raises(ValueError, match='max_grad_norm=-1.* or 0 for off'):
    _adamw(max_grad_norm=-1.0)


def test_learning_rate_follows_the_updates_made():
  # Gradients of one sign and size: every update is -lr(count), to eps.
  optimizer = optim.adamw(
    optim.schedule(
      1.0, warmup_updates=2, decay='linear', total_updates=4, end_fraction=0.0
    ),
    b1=0.9,
    b2=0.99,
    eps=0.0,
    weight_decay=0.0,
    max_grad_norm=1e9,
  )
  params = {'w': jnp.zeros((1, 1))}
  state, sizes = optimizer.init(params), []
  for _ in range(5):
    updates, state = optimizer.update({'w': jnp.ones((1, 1))}, state, params)
    sizes.append(-float(updates['w'][0, 0]))
  np.testing.assert_allclose(sizes, [0.5, 1.0, 1.0, 0.5, 0.0], atol=1e-5)


# ---- Moments in bfloat16 ----------------------------------------------------


def _bits(x):
  return np.asarray(x, np.float32).view(np.uint32)


def test_rounding_at_random_by_hand():
  # bfloat16 near 1 has the spacing 2^-7.  1 + 2^-9 is a quarter of the way, so
  # a quarter of the entries goes up; the deviation of that share over 65,536
  # draws is sqrt(1/4 * 3/4 / 65536) = 0.0017.
  round_ = jax.jit(optim.round_at_random)
  x = jnp.full((256, 256), 1 + 2**-9)
  rounded = round_(x, jnp.uint32(1))
  assert rounded.dtype == jnp.bfloat16
  assert set(np.unique(rounded).tolist()) == {1.0, 1 + 2**-7}
  up = np.asarray(rounded) > 1
  assert abs(up.mean() - 0.25) < 5 * 0.0017
  # Every row and every column too: 256 draws, deviation 0.027.
  for axis in (0, 1):
    assert np.abs(up.mean(axis) - 0.25).max() < 5 * 0.027
  # Away from 0 with the same probability on both sides.
  np.testing.assert_array_equal(round_(-x, jnp.uint32(1)), -rounded)
  # Other draws with another seed, unrelated ones.
  other = np.asarray(round_(x, jnp.uint32(2))) > 1
  assert abs((up & other).mean() - 0.25**2) < 0.005
  # What bfloat16 can hold stays as it is, whatever the seed.
  exact = jnp.float32([0.0, -0.0, 1.0, -3.5, 2.0**-120, 255.0])
  for seed in range(8):
    np.testing.assert_array_equal(
      _bits(round_(exact, jnp.uint32(seed))), _bits(exact)
    )
  assert np.isnan(round_(jnp.float32([np.nan]), jnp.uint32(0)))[0]


def test_rounding_is_the_same_over_devices():
  mesh = mesh_lib.make(fsdp=4, tensor=2)
  x = jax.random.normal(jax.random.key(0), (8, 3, 16))
  seed = jnp.uint32(7)
  sharding = rules.sharding(mesh, ('embed', None, 'mlp'), x.shape)
  split = jax.jit(optim.round_at_random)(jax.device_put(x, sharding), seed)
  whole = jax.jit(optim.round_at_random)(x, seed)
  np.testing.assert_array_equal(_bits(split), _bits(whole))


def test_the_second_moment_does_not_stall():
  # Without gradients it falls by 0.1 % an update: to 0.999^700 = 0.4964.
  # Rounded to the nearest it would stay at 1 for ever.
  optimizer = _adamw(b2=0.999, moments_dtype='bfloat16')
  params = {'w': jnp.ones((64, 64))}
  state = optimizer.init(params)
  adam = state[1][0]
  state = (state[0], (adam._replace(nu=params | {}), *state[1][1:]))
  state = tree.cast(state, jnp.bfloat16)
  nothing = tree.zeros_like(params)

  @jax.jit
  def run(state):
    step = lambda s, _: (optimizer.update(nothing, s, params)[1], None)
    return jax.lax.scan(step, state, length=700)[0]

  nu = run(state)[1][0].nu['w']
  assert nu.dtype == jnp.bfloat16
  # One entry wanders by about 4 %; the mean over 4,096 does not.
  assert abs(float(nu.astype(jnp.float32).mean()) - 0.4964) < 0.005
  assert float(nu.astype(jnp.float32).std()) < 0.1 * 0.4964
  stuck = jnp.bfloat16(1)
  for _ in range(3):
    stuck = (stuck.astype(jnp.float32) * 0.999).astype(jnp.bfloat16)
  assert float(stuck) == 1


def test_bfloat16_moments_learn_as_float32_ones():
  rng = np.random.default_rng(0)
  params = {'w': jnp.asarray(rng.normal(size=(32, 32)), jnp.float32)}
  gradients = jnp.asarray(
    0.3 + rng.normal(size=(40, 32, 32)), jnp.float32
  )  # a drift of 12 in 40 updates, with noise

  @functools.partial(jax.jit, static_argnums=0)
  def moved(dtype):
    optimizer = _adamw(b2=0.999, moments_dtype=dtype)

    def step(carry, gradient):
      p, state = carry
      updates, state = optimizer.update({'w': gradient}, state, p)
      return (optax.apply_updates(p, updates), state), None

    (p, state), _ = jax.lax.scan(
      step, (params, optimizer.init(params)), gradients
    )
    return p['w'] - params['w'], state

  wide, _ = moved('float32')
  narrow, state = moved('bfloat16')
  adam = state[1][0]
  assert adam.mu['w'].dtype == adam.nu['w'].dtype == jnp.bfloat16
  assert adam.count.dtype == jnp.int32 and int(adam.count) == 40
  error = np.linalg.norm(narrow - wide) / np.linalg.norm(wide)
  assert 1e-5 < error < 0.01, error
  # Half the bytes, and the names that a checkpoint has.
  wide_state = jax.eval_shape(_adamw().init, params)
  assert tree.names(state) == tree.names(wide_state)
  assert tree.nbytes(state) < 0.51 * tree.nbytes(wide_state)


def test_unknown_moments():
  with pytest.raises(ValueError, match="moments_dtype='int8' is not one of"):
    _adamw(moments_dtype='int8')
