"""Prefill against the full forward pass; slots without a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import keys as keys_lib
from rlhf_jax import testing
from rlhf_jax.models import decoder
from rlhf_jax.models import spec
from rlhf_jax.sampling import cache as cache_lib
from rlhf_jax.sampling import decode
from rlhf_jax.sampling import pick

_CONFIG = testing.tiny_config(init_std=0.4)
_KEY = keys_lib.key(0, 'rollout', 0)


def _state(counts, limits, stop_ids=(2, 5), width=5) -> decode.State:
  """Greedy slots that have drawn so many tokens, all 7."""
  slots = len(counts)
  state = decode.empty(_CONFIG, slots, 4, width, (4, 0), jnp.float32)
  ids = np.full((slots, 4), -1, np.int32)
  ids[:, : len(stop_ids)] = stop_ids
  return state.replace(
    request=state.request.replace(
      address=jnp.arange(slots),
      max_new_tokens=jnp.array(limits, jnp.int32),
      stop_ids=jnp.asarray(ids),
    ),
    prompt_lengths=jnp.full(slots, 3, jnp.int32),
    counts=jnp.array(counts, jnp.int32),
    tokens=jnp.full((slots, width), 7, jnp.int32),
    done=jnp.zeros(slots, bool),
  )


def _towards(tokens):
  """Logits of which each row is likeliest at the given token."""
  return 5.0 * jax.nn.one_hot(jnp.array(tokens), 6)


def test_append_ends_at_stop_ids_and_limits():
  state = _state(counts=[1, 1, 1, 2], limits=[5, 2, 2, 5])
  # Row 0 stops at once; row 1 runs into its limit; row 2 stops with its last
  # allowed token, so it is not cut; row 3 goes on.
  state = decode.append(state, _towards([2, 1, 5, 0]), _KEY)
  assert state.counts.tolist() == [2, 2, 2, 3]
  assert state.done.tolist() == [True, True, True, False]
  assert state.stopped.tolist() == [True, False, True, False]
  np.testing.assert_array_equal(
    state.tokens,
    [[7, 2, 7, 7, 7], [7, 1, 7, 7, 7], [7, 5, 7, 7, 7], [7, 7, 0, 7, 7]],
  )
  # log softmax of (5, 0, 0, 0, 0, 0): 5 - log(e^5 + 5) = -0.033135.
  expected = np.zeros((4, 5))
  expected[[0, 1, 2, 3], [1, 1, 1, 2]] = -0.033135
  np.testing.assert_allclose(state.logprobs, expected, atol=1e-6)
  # Rows that are done change no more, whatever is drawn; a stop id then does
  # not turn a cut sequence into a stopped one.
  after = decode.append(state, _towards([3, 2, 3, 5]), _KEY)
  assert after.counts.tolist() == [2, 2, 2, 4]
  assert after.stopped.tolist() == [True, False, True, True]
  np.testing.assert_array_equal(after.tokens[:3], state.tokens[:3])
  np.testing.assert_array_equal(after.logprobs[:3], state.logprobs[:3])
  assert after.tokens[3].tolist() == [7, 7, 0, 5, 7]
  assert after.newest.tolist() == [2, 1, 5, 5]


def test_append_draws_with_the_position_of_the_token():
  state = _state([1, 2], [5, 5], stop_ids=())
  state = state.replace(request=state.request.replace(temperature=jnp.ones(2)))
  after = decode.append(state, jnp.zeros((2, 500)), _KEY)
  for row, at in ((0, 4), (1, 5)):  # prompts of 3, and what was drawn
    key = jax.random.fold_in(jax.random.fold_in(_KEY, row), at)
    noise = pick.noise(key[None], 500)[0]
    assert int(after.tokens[row, at - 3]) == int(jnp.argmax(noise))


@pytest.fixture(scope='module')
def params():
  return spec.init(decoder.specs(_CONFIG), jax.random.key(0))


def _prompts():
  """Three prompts of 3, 7 and 5 tokens; all begin with the same two."""
  tokens = np.random.default_rng(0).integers(0, 37, (3, 7)).astype(np.int32)
  tokens[:, :2] = tokens[0, :2]
  return tokens, np.array([3, 7, 5], np.int32)


def _prefill(params, begin):
  tokens, lengths = _prompts()
  options = dict(config=_CONFIG, dtype=jnp.float32)
  prefix = None
  if begin:
    prefix = decode.prefix_cache(params, tokens[0, :begin], **options)
  return prefix, decode.prefill(
    params, prefix, tokens[:, begin:], lengths - begin, **options
  )


def test_prefill_equals_the_full_forward_pass(params):
  tokens, lengths = _prompts()
  states = decoder.hidden(
    params,
    _CONFIG,
    jnp.asarray(tokens),
    jnp.broadcast_to(jnp.arange(7), (3, 7)),
    jnp.ones((3, 7), jnp.int32),
  )
  last = jnp.take_along_axis(states, lengths[:, None, None] - 1, axis=1)[:, 0]
  expected = decoder.logits(params, _CONFIG, last)
  _, whole = _prefill(params, 0)
  prefix, behind = _prefill(params, 2)
  for prefilled in (whole, behind):
    testing.assert_close(prefilled.logits, expected, 'teacher_forced')
  assert whole.cache.keys[0].shape == (3, 2, 7, 6)  # B H W E
  assert not whole.cache.turned
  # The cache behind the prefix, and the prefix itself, are parts of the whole.
  real = np.arange(7)[None] < lengths[:, None]
  for layer in range(2):
    for part, name in enumerate(('keys', 'values')):
      a, b = (
        np.moveaxis(np.asarray(getattr(x.cache, name)[layer]), 2, 1)
        for x in (whole, behind)
      )  # B W H E
      later = real[:, 2:]
      testing.assert_close(b[later], a[:, 2:][later], 'layout_float32')
      early = np.moveaxis(np.asarray(prefix[layer][part]), 1, 0)  # P H E
      testing.assert_close(
        np.broadcast_to(early, a[:, :2].shape), a[:, :2], 'layout_float32'
      )


def test_insert_fills_slots_and_leaves_the_others(params):
  _, prefilled = _prefill(params, 0)
  state = decode.empty(_CONFIG, 4, 9, 5, (4, 0), jnp.float32)
  marked = tuple(x.at[:, :, 8].set(3.0) for x in state.cache.keys)
  state = state.replace(cache=state.cache.replace(keys=marked))
  # Prompt 2 into slot 3, prompt 0 into slot 1; the third place is none.
  request = jax.tree.map(lambda x: x[:3], state.request)
  request = request.replace(
    max_new_tokens=jnp.array([1, 4, 4], jnp.int32),
    address=jnp.arange(3),
  )
  after = decode.insert(
    state,
    prefilled,
    np.array([2, 0, 1], np.int32),
    np.array([3, 1, 4], np.int32),
    request,
    np.array([5, 3, 7], np.int32),
    _KEY,
    np.int32(2),
  )
  assert after.prompt_lengths.tolist() == [1, 3, 1, 5]
  assert after.counts.tolist() == [0, 1, 0, 1]
  assert after.done.tolist() == [True, False, True, True]  # a limit of one
  assert not after.stopped.any()
  best = np.asarray(prefilled.logits).argmax(-1)
  assert after.newest.tolist() == [0, best[0], 0, best[2]]
  for new, source in zip(after.cache.keys, prefilled.cache.keys):
    new, source = np.asarray(new), np.asarray(source)
    np.testing.assert_array_equal(new[3, :, :7], source[2])
    np.testing.assert_array_equal(new[1, :, :7], source[0])
    assert not new[[0, 2], :, :7].any() and (new[:, :, 8] == 3).all()


def test_keep_and_grow():
  state = _state([1, 2, 3], [5, 5, 5])
  numbered = jax.tree.map(
    lambda x: x + jnp.arange(3.0).reshape(3, 1, 1, 1), state.cache
  )
  kept = decode.keep(state.replace(cache=numbered), np.array([2, 0], np.int32))
  assert kept.counts.tolist() == [3, 1]
  assert kept.request.address.tolist() == [2, 0]
  assert kept.cache.keys[0][:, 0, 0, 0].tolist() == [2, 0]
  grown = decode.grow(kept, 6)
  assert grown.cache.keys[0].shape == (2, 2, 6, 6)
  assert grown.cache.keys[0][0, 0, :, 0].tolist() == [2, 2, 2, 2, 0, 0]
  ended = decode.release(grown, np.array([False, True]))
  assert ended.done.tolist() == [False, True]


def test_turned_slots_hold_the_same(params):
  _, prefilled = _prefill(params, 0)
  rows, slots = jnp.array([2, 0, 1]), jnp.array([3, 1, 4])
  caches = [
    cache_lib.grow(
      cache_lib.copy_rows(
        cache_lib.zeros(_CONFIG, 4, 9, jnp.float32, turned=turned),
        prefilled.cache, slots, rows, np.int32(2),
      ),
      11,
    )
    for turned in (False, True)
  ]  # fmt: skip
  assert caches[1].keys[0].shape == (4, 2, 6, 11)  # N H E C
  for plain, turned in zip(caches[0].keys, caches[1].keys):
    assert np.asarray(plain[3]).any()
    np.testing.assert_array_equal(np.swapaxes(turned, 2, 3), plain)
  for plain, turned in zip(caches[0].values, caches[1].values):
    np.testing.assert_array_equal(turned, plain)


def test_bytes_of_a_cache():
  cache = cache_lib.zeros(_CONFIG, 3, 4, jnp.bfloat16)
  # 2 (keys, values) * 2 layers * 3 rows * 2 heads * 4 places * 6 * 2 bytes.
  assert sum(x.nbytes for x in jax.tree.leaves(cache)) == 1152
  assert cache_lib.nbytes(_CONFIG, 3, 4, jnp.bfloat16) == 1152
