"""Prefill against the full forward pass; `append` without a model."""

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import keys as keys_lib
from rlhf_jax import testing
from rlhf_jax.models import decoder
from rlhf_jax.models import spec
from rlhf_jax.sampling import cache as cache_lib
from rlhf_jax.sampling import decode

_CONFIG = testing.tiny_config(init_std=0.4)
_KEY = keys_lib.key(0, 'rollout', 0)


def _state(lengths, limits, width=8):
  count = len(lengths)
  return decode.State(
    cache=None,
    tokens=jnp.full((count, width), 7, jnp.int32),
    logprobs=jnp.zeros((count, width)),
    lengths=jnp.array(lengths, jnp.int32),
    limits=jnp.array(limits, jnp.int32),
    done=jnp.zeros(count, bool),
    stopped=jnp.zeros(count, bool),
  )


def _greedy(count, stop_ids):
  return decode.Request(
    samples=jnp.arange(count, dtype=jnp.int32),
    temperature=jnp.zeros(count),
    top_k=jnp.zeros(count, jnp.int32),
    top_p=jnp.ones(count),
    max_new_tokens=jnp.full(count, 9, jnp.int32),
    stop_ids=jnp.array(stop_ids, jnp.int32),
  )


def _towards(tokens):
  """Logits of which each row is likeliest at the given token."""
  return 5.0 * jax.nn.one_hot(jnp.array(tokens), 6)


def test_append_ends_at_stop_ids_and_limits():
  request = _greedy(4, [2, 5, -1, -1])
  state = _state(lengths=[3, 3, 3, 4], limits=[8, 4, 4, 8])
  # Row 0 stops at once; row 1 runs into its limit; row 2 stops with its last
  # allowed token, so it is not cut; row 3 goes on.
  state = decode.append(state, _towards([2, 1, 5, 0]), request, _KEY)
  assert state.lengths.tolist() == [4, 4, 4, 5]
  assert state.done.tolist() == [True, True, True, False]
  assert state.stopped.tolist() == [True, False, True, False]
  np.testing.assert_array_equal(
    state.tokens,
    [
      [7, 7, 7, 2, 7, 7, 7, 7],
      [7, 7, 7, 1, 7, 7, 7, 7],
      [7, 7, 7, 5, 7, 7, 7, 7],
      [7, 7, 7, 7, 0, 7, 7, 7],
    ],
  )
  # log softmax of (5, 0, 0, 0, 0, 0): 5 - log(e^5 + 5) = -0.033135.
  expected = np.zeros((4, 8))
  expected[[0, 1, 2, 3], [3, 3, 3, 4]] = -0.033135
  np.testing.assert_allclose(state.logprobs, expected, atol=1e-6)
  # Rows that are done change no more, whatever is drawn; a stop id then does
  # not turn a cut sequence into a stopped one.
  after = decode.append(state, _towards([3, 2, 3, 5]), request, _KEY)
  assert after.lengths.tolist() == [4, 4, 4, 6]
  assert after.stopped.tolist() == [True, False, True, True]
  np.testing.assert_array_equal(after.tokens[:3], state.tokens[:3])
  np.testing.assert_array_equal(after.logprobs[:3], state.logprobs[:3])
  assert after.tokens[3].tolist() == [7, 7, 7, 7, 0, 5, 7, 7]


def test_append_draws_with_the_position_of_the_token():
  request = _greedy(2, [-1]).replace(temperature=jnp.ones(2))
  logits = jnp.zeros((2, 500))
  a = decode.append(_state([2, 3], [8, 8]), logits, request, _KEY)
  for row, at in ((0, 2), (1, 3)):
    key = jax.random.fold_in(jax.random.fold_in(_KEY, row), at)
    noise = jax.random.gumbel(key, (500,), jnp.float32)
    assert int(a.tokens[row, at]) == int(jnp.argmax(noise))


def test_prefill_equals_the_full_forward_pass():
  params = spec.init(decoder.specs(_CONFIG), jax.random.key(0))
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 37, (3, 7)).astype(np.int32)
  tokens[:, :2] = tokens[0, :2]
  lengths = np.array([3, 7, 5], np.int32)
  states = decoder.hidden(
    params,
    _CONFIG,
    jnp.asarray(tokens),
    jnp.broadcast_to(jnp.arange(7), (3, 7)),
    jnp.ones((3, 7), jnp.int32),
  )
  last = jnp.take_along_axis(states, lengths[:, None, None] - 1, axis=1)[:, 0]
  expected = decoder.logits(params, _CONFIG, last)
  prefill = jax.jit(decode.prefill, static_argnums=(1, 5, 6))
  caches = []
  for begin in (0, 2):
    logits, cache = prefill(
        params, _CONFIG, tokens[0, :begin], tokens[:, begin:], lengths, 10,
        jnp.float32,
    )  # fmt: skip
    testing.assert_close(logits, expected, 'teacher_forced')
    assert cache.keys.shape == (2, 3, 10, 2, 6)
    # Slots of padding stay empty; those of tokens do not.
    real = np.arange(10)[None] < lengths[:, None]
    filled = np.abs(np.asarray(cache.keys)).max((0, 3, 4)) > 0
    np.testing.assert_array_equal(filled, real)
    caches.append(cache)
  for a, b in zip(jax.tree.leaves(caches[0]), jax.tree.leaves(caches[1])):
    testing.assert_close(a, b, 'layout_float32')


def test_cache_repeats_each_prompt_and_knows_its_bytes():
  cache = cache_lib.zeros(_CONFIG, 3, 4, jnp.bfloat16)
  # 2 (keys, values) * 2 layers * 3 rows * 4 slots * 2 heads * 6 * 2 bytes.
  assert sum(x.nbytes for x in jax.tree.leaves(cache)) == 1152
  assert cache_lib.nbytes(_CONFIG, 3, 4, jnp.bfloat16) == 1152
  numbered = jax.tree.map(
    lambda x: x + jnp.arange(3).reshape(1, 3, 1, 1, 1).astype(x.dtype), cache
  )
  repeated = cache_lib.repeat(numbered, 2)
  assert repeated.values[0, :, 0, 0, 0].tolist() == [0, 0, 1, 1, 2, 2]
