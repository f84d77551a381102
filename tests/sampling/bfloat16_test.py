"""A rollout in bfloat16 against the policy in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import keys as keys_lib
from rlhf_jax import testing
from rlhf_jax.models import decoder
from rlhf_jax.models import spec
from rlhf_jax.sampling import engine
from rlhf_jax.sharding import mesh as mesh_lib

_CONFIG = testing.tiny_config(init_std=0.3)
_SHAPE = engine.Shape(
  max_prompt_tokens=6, max_new_tokens=20, slots=8, samples_per_prompt=1
)
# Prompts for each of the 8 slots and the next ones.
_PROMPTS = [
  np.random.default_rng(n).integers(0, 37, 1 + n % 6) for n in range(13)
]


@pytest.fixture(scope='module')
def params():
  return spec.init(decoder.specs(_CONFIG), jax.random.key(0))


@pytest.fixture(scope='module')
def generate(params):
  mesh = mesh_lib.make(devices=jax.devices()[:1])
  relayout = engine.relayout_program(mesh, decoder.specs(_CONFIG), jnp.bfloat16)
  laid_out = relayout(params)
  assert {x.dtype for x in jax.tree.leaves(laid_out)} == {jnp.dtype('bfloat16')}

  def run(order, **kwargs):
    return engine.generate(
      laid_out, [_PROMPTS[n] for n in order], keys_lib.key(0, 'rollout', 0),
      config=_CONFIG, mesh=mesh, shape=_SHAPE, dtype=jnp.bfloat16,
      seeds=np.asarray(order), **kwargs,
    )  # fmt: skip

  return run


@pytest.fixture(scope='module')
def rollout(generate):
  return generate(range(13))


@jax.jit
def _logits(params, tokens, lengths):
  """[N, T, V] in float32: entry t is what the full pass says of token t."""
  at = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
  ids = (at < lengths[:, None]).astype(jnp.int32)
  states = decoder.hidden(params, _CONFIG, tokens, at, ids)
  return jnp.roll(decoder.logits(params, _CONFIG, states), 1, axis=1)


def test_log_probs_are_near_those_of_float32(params, rollout):
  logits = _logits(params, rollout.tokens, rollout.lengths)
  expected = np.take_along_axis(
    np.asarray(jax.nn.log_softmax(logits)), rollout.tokens[..., None], axis=2
  )[..., 0]
  mask = rollout.mask
  assert rollout.logprobs.dtype == np.float32 and mask.sum() == 13 * 20
  assert np.isfinite(rollout.logprobs).all()
  testing.assert_close(
    rollout.logprobs[mask], expected[mask], 'teacher_forced_bfloat16'
  )
  gap = (rollout.logprobs - expected)[mask]
  # Rounding, and not another temperature, position or token: no bias.
  assert 1e-4 < np.abs(gap).mean() and abs(gap.mean()) < 0.01


def test_greedy_tokens_are_near_the_best(params, generate):
  greedy = generate(range(13), temperature=0.0)
  logits = np.asarray(_logits(params, greedy.tokens, greedy.lengths))
  chosen = np.take_along_axis(logits, greedy.tokens[..., None], 2)[..., 0]
  short = (logits.max(-1) - chosen)[greedy.mask]
  testing.assert_close(short, np.zeros_like(short), 'teacher_forced_bfloat16')


def test_slots_order_and_neighbours_change_no_bit(generate, rollout):
  order = np.random.default_rng(0).permutation(13)
  other = generate(order)
  for name in ('tokens', 'logprobs', 'drawn_logprobs', 'lengths'):
    np.testing.assert_array_equal(
      getattr(other, name), getattr(rollout, name)[order], err_msg=name
    )
