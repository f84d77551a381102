"""Log-probs, entropy and values of rows; the chunked head."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import testing
from rlhf_jax import types
from rlhf_jax.models import decoder
from rlhf_jax.models import heads
from rlhf_jax.models import spec
from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.sharding import rules


def _inputs(mask, dtype=jnp.float32, seed=0):
  """States, head, targets, mask, temperature of `mask`'s shape; D 5, V 11."""
  mask = np.asarray(mask, bool)
  rng = np.random.default_rng(seed)
  states = rng.normal(size=(*mask.shape, 5))
  head = rng.normal(size=(5, 11))
  targets = rng.integers(0, 11, mask.shape)
  # masked places may hold anything
  temperature = np.where(mask, rng.uniform(0.5, 1.5, mask.shape), 0.0)
  return (
    jnp.asarray(states, dtype),
    jnp.asarray(head, dtype),
    jnp.asarray(targets, jnp.int32),
    jnp.asarray(mask),
    jnp.asarray(temperature, dtype),
  )


def _logprobs(*args, **kwargs):
  scores = heads.token_scores(*args, **kwargs)
  return scores.logprobs, scores.entropy


# three actions in row 0, none in row 1, all in row 2
_MASK = [[0, 0, 1, 0, 1, 1, 0], [0] * 7, [1] * 7]


def _plain(states, head, targets, mask, temperature):
  temperature = jnp.where(mask, temperature, 1.0)
  logprobs = jax.nn.log_softmax(states @ head / temperature[..., None])
  at = jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]
  entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
  return jnp.where(mask, at, 0.0), jnp.where(mask, entropy, 0.0)


@pytest.mark.parametrize('head_chunk', [6, 1000])
def test_divergence_and_sum_of_squares(head_chunk):
  """Exact, with the exact gradient, whatever the chunks."""
  with jax.enable_x64(True):
    states, head, targets, mask, temperature = _inputs(_MASK, jnp.float64)
    other_states, other_head, *_ = _inputs(_MASK, jnp.float64, seed=1)
    # what stands at masked places does not matter
    other_states = jnp.where(mask[..., None], other_states, jnp.nan)
    way = jax.random.normal(jax.random.key(0), mask.shape, jnp.float64)

    def chunked(states, head):
      scores = heads.token_scores(
        states, (head, 0), targets, mask, temperature, sum_squares=True,
        reference=(other_states, (other_head.T, 1)), head_chunk=head_chunk,
      )  # fmt: skip
      return jnp.sum(way * scores.divergence), scores

    def plain(states, head):
      heat = jnp.where(mask, temperature, 1.0)[..., None]
      of = lambda s, h: jax.nn.log_softmax(
        jnp.where(mask[..., None], s, 0.0) @ h / heat
      )
      p, q = of(states, head), of(other_states, other_head)
      divergence = jnp.where(mask, jnp.sum(jnp.exp(p) * (p - q), -1), 0.0)
      squares = jnp.where(mask, jnp.sum(jnp.exp(2 * p), -1), 0.0)
      return jnp.sum(way * divergence), (divergence, squares)

    grad = functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    (_, got), slope = jax.jit(grad(chunked))(states, head)
    (_, (divergence, squares)), expected = jax.jit(grad(plain))(states, head)
    close = functools.partial(
      np.testing.assert_allclose, rtol=1e-10, atol=1e-13
    )
    close(got.divergence, divergence)
    close(got.sum_squares, squares)
    jax.tree.map(close, slope, expected)


@pytest.mark.parametrize('axis', [0, 1])
@pytest.mark.parametrize('head_chunk', [1, 6, 12, 1000])
def test_equals_plain_log_softmax(head_chunk, axis):
  with jax.enable_x64(True):
    states, head, *rest = _inputs(_MASK, jnp.float64)
    way = jax.random.normal(jax.random.key(0), (2, 3, 7), jnp.float64)

    def loss(f):
      def total(states, head):
        logprobs, entropy = f(states, head)
        return jnp.sum(way[0] * logprobs + way[1] * entropy), (
          logprobs,
          entropy,
        )

      return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))

    plain = loss(lambda s, h: _plain(s, h, *rest))(states, head)
    chunked = loss(
      lambda s, h: _logprobs(
        s,
        (h.T if axis else h, axis),
        *rest,
        entropy=True,
        head_chunk=head_chunk,
      )
    )(states, head)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-13),
      chunked,
      plain,
    )


def test_uniform_by_hand():
  # equal logits over 11 tokens: log-prob -ln 11, entropy ln 11, at any
  # temperature
  states, head, *rest = _inputs(_MASK)
  logprobs, entropy = _logprobs(states, (0 * head, 0), *rest, entropy=True)
  expected = np.where(np.asarray(_MASK), np.log(11), 0)
  np.testing.assert_allclose(logprobs, -expected, rtol=1e-6)
  np.testing.assert_allclose(entropy, expected, rtol=1e-6)


def test_tokens_of_no_probability_leave_the_entropy_finite():
  # two tokens left, equal: entropy ln 2
  states, _, targets, mask, temperature = _inputs([[1]])
  head = jnp.where(jnp.arange(11)[None] < 2, 0.0, -1e30)
  head = jnp.broadcast_to(head, (5, 11))
  _, entropy = _logprobs(
    jnp.abs(states), (head, 0), targets, mask, temperature, entropy=True
  )
  np.testing.assert_allclose(entropy, np.log(2), rtol=1e-6)


@pytest.mark.parametrize('head_chunk', [6, 1000])
def test_nothing_leaks_from_masked_places(head_chunk):
  states, head, targets, mask, temperature = _inputs(_MASK)

  def run(states, targets, temperature):
    loss = lambda s, h: jnp.sum(
      _logprobs(s, (h, 0), targets, mask, temperature, head_chunk=head_chunk)[0]
    )
    return jax.value_and_grad(loss, argnums=(0, 1))(states, head)

  clean = run(states, targets, temperature)
  dirty = run(
    jnp.where(mask[..., None], states, 1e3),
    jnp.where(mask, targets, 10**6),
    jnp.where(mask, temperature, -jnp.inf),
  )
  jax.tree.map(np.testing.assert_array_equal, clean, dirty)
  assert not clean[1][0][1].any()  # row 1 has no action


def test_all_masked_is_zero_with_zero_gradient():
  states, head, *rest = _inputs(np.zeros((2, 4)))
  loss = lambda s: jnp.sum(_logprobs(s, (head, 0), *rest, head_chunk=4)[0])
  value, gradient = jax.value_and_grad(loss)(states)
  assert value == 0
  assert not gradient.any()


def test_never_more_than_a_chunk_of_logits():
  # 2 x 64 places with V = 11 in chunks of 16: no array of 2 * 64 * 11 entries,
  # forward or backward
  states, head, *rest = _inputs(np.ones((2, 64)))
  loss = lambda s, h: jnp.sum(_logprobs(s, (h, 0), *rest, head_chunk=16)[0])
  text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(states, head))
  assert '[2,8,11]' in text
  assert '[2,64,11]' not in text
  # Nor for the exact divergence, which chunks both heads together.
  exact = lambda s, h: jnp.sum(
    heads.token_scores(
      s, (h, 0), *rest, reference=(states + 1, (head, 0)), head_chunk=16
    ).divergence
  )
  text = str(jax.make_jaxpr(jax.grad(exact, argnums=(0, 1)))(states, head))
  assert '[2,8,11]' in text
  assert '[2,64,11]' not in text
  assert '[8,2,8,11]' not in text


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_split_over_devices(dtype):
  """Rows, places and vocabulary; each device sorts its own places."""
  mask = np.random.default_rng(1).random((4, 8)) < 0.4
  states, _, targets, mask, temperature = _inputs(mask)
  rng = np.random.default_rng(2)
  head, other = rng.normal(size=(2, 12, 5)).astype('f')
  way = jnp.asarray(rng.normal(size=mask.shape), jnp.float32)

  def value(states, head, other, *rest):
    scores = heads.token_scores(
      states.astype(dtype), (head.astype(dtype), 1), *rest, entropy=True,
      sum_squares=True, reference=(states[:, ::-1].astype(dtype),
      (other.astype(dtype), 1)), head_chunk=8,
    )  # fmt: skip
    total = scores.logprobs + 2 * scores.entropy + 3 * scores.divergence
    return jnp.sum(way * total), (total, scores.sum_squares)

  gradient = jax.jit(jax.value_and_grad(value, argnums=(0, 1), has_aux=True))
  args = states, head, other, targets, mask, temperature
  (_, expected), expected_grads = gradient(*args)
  mesh = mesh_lib.make(fsdp=2, tensor=2, context=2)
  put = lambda x, *names: jax.device_put(
    x, rules.sharding(mesh, names, x.shape)
  )
  (_, scores), grads = gradient(
    put(states, 'rows', 'places', None),
    put(head, 'vocab', 'embed'),
    put(other, 'vocab', 'embed'),
    *(put(x, 'rows', 'places') for x in (targets, mask, temperature)),
  )
  assert grads[1].dtype == jnp.float32
  if dtype == jnp.float32:
    jax.tree.map(
      lambda a, b: testing.assert_close(a, b, 'layout_float32'),
      scores,
      expected,
    )
    testing.assert_norm_close(grads, expected_grads, 'gradient_layout_float32')
  else:  # that XLA takes it on the CPU; half a digit is all one can expect
    assert np.isfinite(np.concatenate([g.ravel() for g in grads])).all()


_CONFIG = testing.tiny_config()


def _rows(tokens, mask, temperature=0.7):
  shape = tokens.shape
  return types.Rows(
    tokens=tokens,
    targets=jnp.roll(tokens, -1, axis=1),
    positions=jnp.broadcast_to(jnp.arange(shape[1]), shape),
    segment_ids=jnp.ones(shape, jnp.int32),
    mask=jnp.broadcast_to(mask, shape),
    temperature=jnp.full(shape, temperature),
  )


_score = jax.jit(
  heads.score,
  static_argnums=1,
  static_argnames=('entropy', 'head_chunk', 'remat', 'dtype'),
)


def test_score_uses_model_temperature_and_chunks():
  params = spec.init(decoder.specs(_CONFIG), jax.random.key(0))
  tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, 37)
  rows = _rows(tokens, jnp.arange(8)[None] > 3)
  states = decoder.hidden(
    params, _CONFIG, rows.tokens, rows.positions, rows.segment_ids
  )
  expected = _plain(
    states, params['embed'].T, rows.targets, rows.mask, rows.temperature
  )
  for chunk in (4, 2048):
    out = _score(params, _CONFIG, rows, entropy=True, head_chunk=chunk)
    testing.assert_close(out.logprobs, expected[0], 'layout_float32')
    testing.assert_close(out.entropy, expected[1], 'layout_float32')
    assert out.values is None
  assert _score(params, _CONFIG, rows).entropy is None


def test_score_of_a_critic():
  params = spec.init(decoder.specs(_CONFIG, 'value'), jax.random.key(0))
  params['value_head'] = jnp.full((16, 1), 0.5)
  rows = _rows(jnp.arange(8)[None], jnp.ones((1, 1), bool))
  states = decoder.hidden(
    params, _CONFIG, rows.tokens, rows.positions, rows.segment_ids
  )
  out = _score(params, _CONFIG, rows)
  testing.assert_close(out.values, 0.5 * states.sum(-1), 'layout_float32')
  assert out.logprobs is None
  with pytest.raises(ValueError, match='a critic has no entropy'):
    heads.score(params, _CONFIG, rows, entropy=True)


def test_gradients_agree_over_chunks_and_remat():
  params = spec.init(decoder.specs(_CONFIG), jax.random.key(0))
  tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, 37)
  rows = _rows(tokens, jnp.arange(8)[None] > 3)

  @functools.partial(jax.jit, static_argnums=(0, 1))
  def gradient(head_chunk, remat):
    loss = lambda p: jnp.sum(
      heads.score(p, _CONFIG, rows, head_chunk=head_chunk, remat=remat).logprobs
    )
    return jax.grad(loss)(params)

  testing.assert_norm_close(
    gradient(6, 'block'), gradient(2048, 'none'), 'gradient_layout_float32'
  )


def test_bad_chunk():
  with pytest.raises(ValueError, match='head_chunk=0'):
    states, head, *rest = _inputs(_MASK)
    _logprobs(states, (head, 0), *rest, head_chunk=0)
