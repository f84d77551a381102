"""Sliding windows: their ring cache against the full forward pass."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import keys as keys_lib
from rlhf_jax import testing
from rlhf_jax.models import decoder
from rlhf_jax.models import spec
from rlhf_jax.sampling import cache as cache_lib
from rlhf_jax.sampling import engine
from rlhf_jax.sharding import mesh as mesh_lib

_WINDOW = 5
# A layer that slides before and behind one that does not.
_CONFIG = testing.tiny_config(
  family='qwen2',
  attention_bias=True,
  num_layers=3,
  init_std=0.4,
  sliding_window=_WINDOW,
  sliding_layers=(0, 2),
)
_FULL = dataclasses.replace(_CONFIG, sliding_window=0, sliding_layers=())
_MISTRAL = testing.tiny_config(
  family='mistral',
  init_std=0.4,
  sliding_window=_WINDOW,
  sliding_layers=(0, 1),
)
_SHAPE = engine.Shape(
  max_prompt_tokens=24, max_new_tokens=17, slots=3, samples_per_prompt=2,
  chunk=4,
)  # fmt: skip


@functools.cache
def _params(config):
  return spec.init(decoder.specs(config), jax.random.key(0))


def _generate(config, prompts, axes, **kwargs):
  size = max(np.prod([*axes.values()], dtype=int), 1)
  mesh = mesh_lib.make(devices=jax.devices()[:size], **axes)
  relayout = engine.relayout_program(mesh, decoder.specs(config), jnp.float32)
  return engine.generate(
    relayout(_params(config)), prompts, keys_lib.key(0, 'rollout', 0),
    config=config, mesh=mesh, shape=_SHAPE, **kwargs,
  )  # fmt: skip


def _prompts(begin=0):
  """Shorter than the window, one less, as long, and several times longer."""
  rng = np.random.default_rng(1)
  prefix = rng.integers(0, 37, begin)
  return prefix, [
    np.concatenate([prefix, rng.integers(0, 37, n)]) for n in (1, 4, 5, 6, 16)
  ]


@functools.partial(jax.jit, static_argnums=0)
def _full_logprobs(config, params, tokens, lengths):
  """[N, T] by `decoder.hidden`: entry t is of token t."""
  count, width = tokens.shape
  at = jnp.broadcast_to(jnp.arange(width)[None], tokens.shape)
  states = decoder.hidden(
    params, config, tokens, at,
    (at < lengths[:, None]).astype(jnp.int32),
  )  # fmt: skip
  logits = decoder.logits(params, config, states)[:, :-1]
  logprobs = jax.nn.log_softmax(logits)
  chosen = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)
  return jnp.pad(chosen[..., 0], ((0, 0), (1, 0)))


@pytest.mark.parametrize(
  'config, begin, mesh',
  [
    (_CONFIG, 0, {}),
    (_CONFIG, 8, {}),
    (_CONFIG, 3, dict(data=2, tensor=2)),  # a prefix within the window
    (_MISTRAL, 0, {}),
  ],
)
def test_rollouts_equal_the_full_forward_pass(config, begin, mesh, monkeypatch):
  """Prompts up to 3 windows, and 17 new tokens: the ring wraps often."""
  if config == _CONFIG and not begin:
    # A cache that is smaller than the window, and grows with sequences in it.
    small = lambda largest, *, least, count: (4, largest)
    monkeypatch.setattr(engine.schedule, '_doubling', small)
  if begin == 8:  # as for kernels
    monkeypatch.setattr(cache_lib, 'turned', lambda mesh: False)
  prefix, prompts = _prompts(begin)
  rollout = _generate(config, prompts, mesh, prefix=prefix)
  assert (rollout.lengths - rollout.prompt_lengths == 17).all()
  params = _params(config)
  expected = _full_logprobs(config, params, rollout.tokens, rollout.lengths)
  testing.assert_close(
    rollout.logprobs[rollout.mask], expected[rollout.mask], 'teacher_forced'
  )
  if not begin:  # else the above would not see a window that is ignored
    full = dataclasses.replace(config, sliding_window=0, sliding_layers=())
    other = _full_logprobs(full, params, rollout.tokens, rollout.lengths)
    assert np.abs(rollout.logprobs - other)[rollout.mask].max() > 0.1


def test_ring_of_prompts_by_hand():
  x = jnp.arange(7.0).reshape(1, 1, 7, 1) + jnp.array([0, 10]).reshape(
    2, 1, 1, 1
  )
  cache = cache_lib.from_prompts((x, x), (x, x), jnp.array([7, 2]), (3, 0))
  # Position 6 is in place 6 mod 3, and the two before it beside it; of the
  # second prompt position 2 is padding.
  assert cache.keys[0][:, 0, :, 0].tolist() == [[6, 4, 5], [10, 11, 12]]
  np.testing.assert_array_equal(cache.keys[1], x)
  assert (cache.places, cache.windows) == (7, (3, 0))


def test_a_ring_grows_up_to_its_window():
  cache = cache_lib.zeros(_CONFIG, 2, 4, jnp.float32)
  places = lambda cache: [x.shape[2] for x in (*cache.keys, *cache.values)]
  assert places(cache) == [4, 4, 4] * 2
  assert places(cache_lib.grow(cache, 9)) == [5, 9, 5] * 2
  assert cache_lib.grow(cache, 9).places == 9
  assert places(cache_lib.zeros(_CONFIG, 2, 9, jnp.float32)) == [5, 9, 5] * 2


def test_bytes_count_the_rings():
  # 2 (keys, values) * 3 rows * 2 heads * 6 * 4 bytes a place of a layer.
  place = 2 * 3 * 2 * 6 * 4
  count = lambda config: cache_lib.nbytes(config, 3, 100, jnp.float32)
  assert count(_CONFIG) == place * (5 + 100 + 5)
  assert count(_FULL) == place * 300
  cache = cache_lib.zeros(_CONFIG, 3, 100, jnp.float32)
  assert sum(x.nbytes for x in jax.tree.leaves(cache)) == count(_CONFIG)
  ours, full = (
    engine.memory(config, _SHAPE, 4, jnp.float32) for config in (_CONFIG, _FULL)
  )
  assert ours < 0.6 * full


def test_one_token_at_a_time_behind_a_ring():
  cache = cache_lib.zeros(_CONFIG, 1, 9, jnp.float32)
  two = jnp.zeros((1, 2), jnp.int32)
  with pytest.raises(ValueError, match='2 tokens a row and a mask of rank 2'):
    decoder.hidden_cached(
      _params(_CONFIG), _CONFIG, two, two, cache.keys, cache.values, two, two
    )


def test_warm_up_compiles_what_windows_need(monkeypatch):
  """A cache that has grown is of the same kind as a new one."""
  small = lambda largest, *, least, count: (4, largest)
  monkeypatch.setattr(engine.schedule, '_doubling', small)
  mesh = mesh_lib.make(devices=jax.devices()[:1])
  options = dict(
    config=_CONFIG, mesh=mesh, shape=engine.Shape(4, 6, 2, 1, chunk=3)
  )
  relayout = engine.relayout_program(mesh, decoder.specs(_CONFIG), jnp.float32)
  params = relayout(_params(_CONFIG))
  engine.warm_up(params, **options)
  before = engine.programs()
  prompts = [np.ones(n, np.int32) for n in (4, 1, 2)]
  engine.generate(params, prompts, keys_lib.key(0, 'rollout', 0), **options)
  assert engine.programs() == before
