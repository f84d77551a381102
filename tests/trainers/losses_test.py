"""Every policy loss and aggregation mode: one gradient, however it is cut.

A mini-batch of eight sequences is packed, padded, cut into micro-batches,
permuted and spread over devices; the gradient in the parameters of a tiny model
stays the same to the rounding of float64.  A micro-batch is filled up with
empty rows to one shape, so that a loss is compiled once per number of devices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import keys
from rlhf_jax import testing
from rlhf_jax import types
from rlhf_jax.algorithms import aggregation
from rlhf_jax.algorithms import kl
from rlhf_jax.algorithms import policy_losses
from rlhf_jax.data import packing
from rlhf_jax.models import heads
from rlhf_jax.models import spec
from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.sharding import multihost
from rlhf_jax.sharding import rules
from rlhf_jax.trainers import packed
from rlhf_jax.trainers import state as state_lib
from rlhf_jax.trainers import update

_MODEL = testing.tiny_config(num_layers=1)
_SPECS = state_lib.specs_of(_MODEL, 'actor')
_WIDTH, _ROWS, _LENGTH = 14, 8, 16
_COEFS = dict(entropy=np.float64(0.25), kl=np.float64(0.5))
_KEY = keys.key(0, 'select')

# Settings that make both branches of every loss appear, see `test_branches`.
SETTINGS = {
  'gspo': dict(clip_low=0.1, clip_high=0.1),
  'dppo_tv': dict(clip_low=0.003, clip_high=0.003, max_ratio=1.5),
  'dppo_kl': dict(clip_low=1e-3, clip_high=1e-3, max_ratio=1.5),
}
SELECT = {
  'clip_cov': dict(share=0.2, low=-9.0, high=9.0),
  'kl_cov': dict(share=0.2),
}
CASES = [*policy_losses.LOSSES, 'ppo with the exact KL', 'ppo with importance']

_ON_MESHES = ('ppo', 'gspo', 'clip_cov', 'ppo with the exact KL')


def _rollout(width=_WIDTH) -> types.Rollout:
  rng = np.random.default_rng(0)
  prompts = np.array([4, 4, 6, 6, 5, 5, 4, 4], np.int32)
  lengths = np.array([9, 12, 7, 13, 6, 10, 5, 11], np.int32)
  tokens = np.zeros((8, width), np.int32)
  tokens[:, :_WIDTH] = rng.integers(1, 37, (8, _WIDTH))
  tokens[:, :3] = [7, 8, 9]
  at = np.arange(width)[None]
  mask = (at >= prompts[:, None]) & (at < lengths[:, None])
  mask[3, 8] = False  # a rejected token
  mask[6] = False  # a rejected sequence
  return types.Rollout(
    tokens=np.where(at < lengths[:, None], tokens, 0),
    lengths=lengths,
    prompt_lengths=prompts,
    mask=mask,
    logprobs=np.zeros(tokens.shape, np.float32),
    temperature=np.array([0.5, 1.0] * 4, np.float32),
    truncated=np.zeros(8, bool),
    group=np.repeat(np.arange(4, dtype=np.int32), 2),
    policy_version=np.zeros(8, np.int32),
  )


@functools.cache
def _params(seed=0):
  with jax.enable_x64(True):
    return spec.init(_SPECS, jax.random.key(seed), jnp.float64)


_score = functools.partial(heads.score, config=_MODEL, dtype=jnp.float64)


@jax.jit
def _states(rows):
  """Of the reference: its own weights."""
  return _score(_params(1), rows=rows, keep_states=True).states


def _minibatch(rollout, *, alone=False, shared=False):
  """Packed into 8 rows of 16; `alone`, one sequence per row."""
  if not alone:
    (minibatch,) = packed.split(
        rollout, np.zeros(len(rollout.lengths), int), 1,
        islands=multihost.islands(_mesh(1)), tokens_per_row=_LENGTH,
        rows_per_microbatch=_ROWS, share_prefix=shared,
    )  # fmt: skip
    return minibatch
  # Sequences too long to share a row, then as long as they are.
  longer = np.maximum(rollout.lengths, 9)
  plan = packing.plan(
    longer, rollout.tokens.shape[1], _LENGTH, rows_multiple=_ROWS
  )
  assert (plan.segment_ids.max(axis=1) <= 1).all()
  place = np.arange(rollout.tokens.shape[1])[None] < rollout.lengths[:, None]
  source = plan.source
  sequence, at = np.divmod(np.maximum(source, 0), rollout.tokens.shape[1])
  real = (source >= 0) & (at < rollout.lengths[sequence])
  plan = packing.PackMap(
    source=np.where(real, source, -1),
    slot=np.where(place, plan.slot, -1),
    segment_ids=np.where(real, plan.segment_ids, types.PADDING),
    lengths=rollout.lengths,
    prefix_length=0,
  )
  members = np.arange(8)
  return packed.MiniBatch(members, plan, packing.rows(rollout, plan))


@functools.cache
def _case(case):
  """(experience(width), loss) of a case: a policy some way from the old one."""
  name = case.split()[0]
  settings = SETTINGS.get(name, {})
  if name == 'ppo':
    settings = dict(dual_clip=1.1)
  function = functools.partial(policy_losses.loss(name), **settings)
  exact = 'exact' in case
  loss = functools.partial(
    update.actor_loss,
    score=_score,
    policy_loss=function,
    kl_estimator=None if exact else kl.k3,
    on_policy=False,
    with_entropy_gradient=True,
    with_reference=True,
  )

  def experience(width=_WIDTH):
    rng = np.random.default_rng(1)
    rollout = _rollout(width)
    draw = lambda scale: np.pad(
      scale * rng.normal(size=(8, _WIDTH)), [(0, 0), (0, width - _WIDTH)]
    )
    with jax.enable_x64(True):
      alone = _minibatch(rollout, alone=True)
      now, _ = packed.run_score(
          jax.jit(_score), _params(), [alone], rollout,
          rows_per_microbatch=_ROWS, islands=multihost.islands(_mesh(1)),
      )  # fmt: skip
    only = lambda x: np.where(rollout.mask, x, np.nan)
    return types.Experience(
      rollout=rollout,
      rewards=np.zeros((8, 1)),
      scores=np.zeros(8),
      old_logprobs=only(now.logprobs + draw(0.3)),
      reference_logprobs=only(now.logprobs + draw(0.3)),
      values=draw(0.0),
      bootstrap_values=np.zeros(8),
      token_rewards=draw(0.0),
      advantages=only(draw(1.0)),
      returns=draw(0.0),
      importance=(only(np.exp(draw(0.3))) if 'importance' in case else None),
    ), now.logprobs

  return experience, loss


@functools.cache
def _mesh(devices):
  return mesh_lib.make(devices=jax.devices()[:devices], fsdp=devices)


def _batch(case, mode, width=_WIDTH, **layout) -> types.TokenBatch:
  experience, logprobs = _case(case)[0](width)
  minibatch = _minibatch(experience.rollout, **layout)
  scale = 6.0 if mode == 'seq-mean-token-sum-norm' else None
  batch = packed.token_batch(experience, minibatch, mode, scale=scale)
  name = case.split()[0]
  if name in policy_losses.SELECTIONS:
    key = [_KEY] if name == 'clip_cov' else []
    chosen = policy_losses.SELECTIONS[name](
      *key, logprobs, experience.old_logprobs, experience.advantages,
      experience.rollout.mask, **SELECT[name],
    )  # fmt: skip
    assert 0 < np.sum(chosen) < np.sum(experience.rollout.mask)
    batch = batch.replace(
      selected=packing.pack(
        np.asarray(chosen)[minibatch.members], minibatch.pack_map, False
      )
    )
  if 'exact' in case:
    states = np.asarray(_states(batch.rows))
    batch = batch.replace(reference_states=states)
  return batch


@functools.cache
def _program(case, devices):
  """`gradient(batch)` of the loss over 8 rows, on so many devices."""
  mesh = _mesh(devices)
  params = jax.device_put(_params(), rules.params(mesh, _SPECS))
  coefs = dict(_COEFS, reference_head=heads.head_params(_params(1)))

  @jax.jit
  def gradient(params, batch):
    loss = _case(case)[1]
    return jax.value_and_grad(loss, has_aux=True)(params, batch, coefs)

  def run(batch):
    (value, statistics), grads = gradient(params, rules.rows(mesh, batch))
    return jax.device_get((value, grads)), statistics

  return run


def _gradient(case, batch, parts=1, devices=1):
  """Loss and gradient, summed over `parts` micro-batches."""
  total = None
  size = _ROWS // parts
  for start in range(0, _ROWS, size):
    part = jax.tree.map(
      lambda x, s=start: np.pad(
        x[s : s + size], [(0, _ROWS - size)] + [(0, 0)] * (x.ndim - 1)
      ),
      batch,
    )
    new, _ = _program(case, devices)(part)
    total = new if total is None else jax.tree.map(np.add, total, new)
  return total


def _same(actual, expected):
  testing.assert_close(actual[0], expected[0], 'oracle_float64')
  testing.assert_norm_close(
    actual[1], expected[1], 'gradient_invariance_float64'
  )


@pytest.mark.parametrize('case', CASES)
def test_gradient_does_not_depend_on_the_cut(case):
  with jax.enable_x64(True):
    for mode in aggregation.MODES:
      batch = _batch(case, mode)
      # Several sequences in a row, or there would be nothing to mix up.
      assert batch.rows.segment_ids.max() > 1
      expected = _gradient(case, batch)
      assert np.abs(expected[1]['embed']).max() > 1e-3
      for parts in (2, 4):
        _same(_gradient(case, batch, parts), expected)
      order = np.array([3, 6, 0, 7, 2, 5, 1, 4])
      permuted = jax.tree.map(lambda x, o=order: x[o], batch)
      _same(_gradient(case, permuted, 2), expected)
      for layout in (dict(alone=True), dict(shared=True), dict(width=19)):
        _same(_gradient(case, _batch(case, mode, **layout), 2), expected)


@pytest.mark.parametrize(
  'case',
  [
    # The others are sums over tokens as these are: run by hand.
    x if x in _ON_MESHES else pytest.param(x, marks=pytest.mark.slow)
    for x in CASES
  ],
)
def test_eight_devices_are_one(case):
  with jax.enable_x64(True):
    batch = _batch(case, 'token-mean', alone=True)  # a row for every device
    expected = _gradient(case, batch)
    _same(_gradient(case, batch, devices=8), expected)


@pytest.mark.parametrize('case', CASES)
def test_branches(case):
  """The inputs reach what a loss does differently for some tokens."""
  with jax.enable_x64(True):
    _, statistics = _program(case, 1)(_batch(case, 'token-mean'))
  for name in ('actor/pg_clipfrac', 'actor/pg_clipfrac_lower'):
    if name in statistics:
      share = float(statistics[name].total) / float(statistics[name].count)
      assert 0 < share < 1, (name, share)


@pytest.mark.parametrize('case', CASES)
def test_nothing_to_learn_from(case):
  """All masked: loss 0 and gradient 0, whatever the numbers are."""
  with jax.enable_x64(True):
    batch = _batch(case, 'token-mean')
    bad = lambda x: np.full_like(x, np.nan)
    batch = batch.replace(
      rows=batch.rows.replace(mask=np.zeros_like(batch.rows.mask)),
      old_logprobs=bad(batch.old_logprobs),
      reference_logprobs=bad(batch.reference_logprobs),
      advantages=bad(batch.advantages),
      weights=bad(batch.weights),
    )
    value, grads = _gradient(case, batch)
  assert value == 0
  assert not any(leaf.any() for leaf in jax.tree.leaves(grads))
