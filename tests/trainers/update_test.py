"""Losses of roles, accumulation, devices: one gradient however it is cut."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import metrics
from rlhf_jax import optim
from rlhf_jax import testing
from rlhf_jax import types
from rlhf_jax.algorithms import kl
from rlhf_jax.algorithms import policy_losses
from rlhf_jax.models import decoder
from rlhf_jax.models import heads
from rlhf_jax.models import spec
from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.sharding import multihost
from rlhf_jax.sharding import rules
from rlhf_jax.trainers import packed
from rlhf_jax.trainers import state as state_lib
from rlhf_jax.trainers import update

_CONFIG = testing.tiny_config()
# Exact in float32, which the coefficients are cast to.
_COEFS = dict(entropy=0.25, kl=0.5)


def _rollout(width: int = 14) -> types.Rollout:
  """Eight sequences, two of each prompt; all begin with the same 3 tokens."""
  rng = np.random.default_rng(0)
  prompt_lengths = np.array([4, 4, 6, 6, 5, 5, 4, 4], np.int32)
  lengths = np.array([9, 12, 7, 13, 6, 10, 5, 11], np.int32)
  tokens = rng.integers(1, 37, (8, 14)).astype(np.int32)
  tokens[:, :3] = [7, 8, 9]
  tokens = np.pad(tokens, [(0, 0), (0, width - 14)])
  at = np.arange(width)[None]
  tokens = np.where(at < lengths[:, None], tokens, 0)
  return types.Rollout(
    tokens=tokens,
    lengths=lengths,
    prompt_lengths=prompt_lengths,
    mask=(at >= prompt_lengths[:, None]) & (at < lengths[:, None]),
    logprobs=np.zeros(tokens.shape, np.float32),
    temperature=np.array([0.5, 1.0] * 4, np.float32),
    truncated=np.zeros(8, bool),
    group=np.repeat(np.arange(4, dtype=np.int32), 2),
    policy_version=np.zeros(8, np.int32),
  )


def _experience(rollout, logprobs, values, dtype) -> types.Experience:
  """An experience near the policy; at masked places NaN, in random rows."""
  rng = np.random.default_rng(1)
  draw = lambda scale: np.pad(
    scale * rng.normal(size=(8, 14)),
    [(0, 0), (0, rollout.tokens.shape[1] - 14)],
  )
  only = lambda x: np.where(rollout.mask, x, np.nan).astype(dtype)
  return types.Experience(
    rollout=rollout,
    rewards=np.zeros((8, 1), np.float32),
    scores=np.zeros(8, np.float32),
    # Ratios on both sides of both clips.
    old_logprobs=only(logprobs + draw(0.3)),
    reference_logprobs=only(logprobs + draw(0.3)),
    values=only(values + draw(0.3)),
    bootstrap_values=np.zeros(8, np.float32),
    token_rewards=np.zeros(rollout.tokens.shape, np.float32),
    advantages=only(draw(1.0)),
    returns=only(draw(1.0)),
  )


def _batch(
  experience, *, tokens_per_row=16, rows_multiple=8, share_prefix=False
) -> types.TokenBatch:
  (minibatch,) = packed.split(
    experience.rollout,
    np.zeros(len(experience.scores), int),
    1,
    islands=multihost.alone(),
    tokens_per_row=tokens_per_row,
    rows_per_microbatch=rows_multiple,
    share_prefix=share_prefix,
  )
  return packed.token_batch(experience, minibatch, 'token-mean', scale=None)


def _losses(dtype):
  score = functools.partial(heads.score, config=_CONFIG, dtype=dtype)
  return {
    'actor': functools.partial(
      update.actor_loss,
      score=score,
      policy_loss=policy_losses.ppo,
      kl_estimator=kl.k3,
      on_policy=False,
      with_entropy_gradient=True,
      with_reference=True,
    ),
    'critic': functools.partial(update.critic_loss, score=score, clip=0.2),
  }


def _optimizer(learning_rate=lambda updates: 1e-2):
  # eps as large as the noise of float32 gradients: see `three_updates`.
  return optim.adamw(
    learning_rate,
    b1=0.9,
    b2=0.99,
    eps=1e-5,
    weight_decay=0.01,
    max_grad_norm=1.0,
  )


def _programs(role, mesh, params, dtype=jnp.float32):
  return update.programs(
    _losses(dtype)[role],
    _optimizer(),
    lambda updates: jnp.float32(1e-2),
    params=params,
    specs=state_lib.specs_of(_CONFIG, role),
    mesh=mesh,
    max_grad_norm=1.0,
  )


def _params(role, dtype=jnp.float32):
  params = spec.init(
    state_lib.specs_of(_CONFIG, role), jax.random.key(3), dtype
  )
  if role == 'critic':  # zeros would hide the body from the gradient
    head = 0.3 * np.random.default_rng(4).normal(size=(16, 1))
    params['value_head'] = jnp.asarray(head, dtype)
  return params


def _gradient(programs, params, batch, rows, mesh):
  """The gradient of a mini-batch over micro-batches of `rows` rows."""
  grads = programs['zeros'](params)
  coefs = {name: np.float32(value) for name, value in _COEFS.items()}
  statistics = {}
  for part in packed.slices(batch, rows, multihost.islands(mesh)):
    grads, new = programs['accumulate'](params, grads, part, coefs)
    statistics = metrics.merge(statistics, new)
  return jax.device_get(grads), metrics.compute(statistics)


# ---- Hand-derived: the loss of a role, with a made-up forward pass ----------


def _one_row(**fields):
  """A batch of one row: two actions of weight 1/2 and a masked place."""
  mask = np.array([[True, True, False]])
  nothing = np.zeros((1, 3), np.float32)
  values = dict(
    rows=types.Rows(
      tokens=nothing,
      targets=nothing,
      positions=nothing,
      segment_ids=np.ones((1, 3), np.int32),
      mask=mask,
      temperature=nothing,
    ),
    old_logprobs=nothing,
    reference_logprobs=nothing,
    advantages=nothing,
    old_values=nothing,
    returns=nothing,
    weights=np.array([[0.5, 0.5, np.nan]], np.float32),
  )
  row = lambda x: np.array([x], np.float32)
  return types.TokenBatch(**(values | {k: row(v) for k, v in fields.items()}))


def test_actor_loss_by_hand():
  # logprobs (-1, -2); old (-1, -2 - ln 2): ratios 1 and 2.
  # Advantages (3, 1): losses -3 * 1 and -1 * min(2, 1.2) = -1.2.
  #   policy  = (-3 - 1.2) / 2 = -2.1
  # Reference: d = (ln 2, 0): k3 = 2 - ln 2 - 1 = 0.306853 and 0.
  #   kl      = 0.153426
  # Entropies (1, 3): mean 2.
  #   loss    = -2.1 - 0.25 * 2 + 0.5 * 0.153426 = -2.523287
  # d loss / d logprob: first  -3 * 1 / 2 + 0.5 * (1 - 2) / 2 = -1.75
  #                     second clipped: 0, and d = 0: 0
  batch = _one_row(
    old_logprobs=[-1, -2 - np.log(2), np.nan],
    reference_logprobs=[-1 + np.log(2), -2, np.nan],
    advantages=[3, 1, np.nan],
  )
  score = lambda logprobs, *, rows, entropy: types.Scores(
    logprobs=logprobs, entropy=jnp.array([[1.0, 3.0, 7.0]])
  )
  options = dict(
    score=score,
    policy_loss=policy_losses.ppo,
    kl_estimator=kl.k3,
    on_policy=False,
    with_entropy_gradient=True,
    with_reference=True,
  )
  loss = functools.partial(update.actor_loss, **options)
  logprobs = jnp.array([[-1.0, -2.0, -5.0]])
  (value, statistics), gradient = jax.value_and_grad(loss, has_aux=True)(
    logprobs, batch, _COEFS
  )
  np.testing.assert_allclose(value, -2.523287, rtol=1e-6)
  np.testing.assert_allclose(gradient, [[-1.75, 0.0, 0.0]], atol=1e-6)
  values = metrics.compute(statistics)
  expected = {
    'actor/loss': -2.523287,
    'actor/pg_loss': -2.1,
    'actor/kl_loss': 0.153426,
    'kl/reference': 0.153426,
    'actor/entropy': 2.0,
    'actor/pg_clipfrac': 0.5,
    'actor/ppo_kl': -np.log(2) / 2,  # mean of old - new: (0 - ln 2) / 2
    'actor/ratio_max': 2.0,
    'kl/beyond_bound': 0.0,
  }
  for name, want in expected.items():
    np.testing.assert_allclose(values[name], want, rtol=1e-5, err_msg=name)
  # Without a gradient the entropy is reported all the same, and not added:
  # -2.1 + 0.5 * 0.153426 = -2.023287.
  value, statistics = update.actor_loss(
    logprobs, batch, _COEFS, **(options | dict(with_entropy_gradient=False))
  )
  np.testing.assert_allclose(value, -2.023287, rtol=1e-6)
  assert metrics.compute(statistics)['actor/entropy'] == 2.0


def test_importance_selection_and_exact_kl_by_hand():
  # As above: losses -3 and -1.2, weights 1/2.  Importance (2, 1/2):
  #   (-3 * 2 - 1.2 * 0.5) / 2 = -3.3
  # Selected tokens of a loss that makes theirs 0, the second: -3 * 2 / 2 = -3.
  # Exact divergences (0.4, 0.8): mean 0.6, times 0.5: + 0.3.
  # Weights inside the loss, exp(new - old) = (1, 2) without a bound:
  #   (-3 * 1 - 1.2 * 2) / 2 = -2.7
  batch = _one_row(
    old_logprobs=[-1, -2 - np.log(2), np.nan],
    reference_logprobs=[-1, -2, np.nan],
    advantages=[3, 1, np.nan],
  )
  logprobs = jnp.array([[-1.0, -2.0, -5.0]])
  asked = []

  def score(logprobs, *, rows, **wanted):
    asked.append(wanted)
    return types.Scores(
      logprobs=logprobs,
      entropy=jnp.zeros((1, 3)),
      divergence=jnp.array([[0.4, 0.8, 7.0]]),
    )

  def stopped(*args, selected, **kwargs):
    losses, statistics = policy_losses.ppo(*args, **kwargs)
    return jnp.where(selected, 0.0, losses), statistics

  def value(batch, coefs=_COEFS, **changes):
    options = dict(
      score=score,
      policy_loss=policy_losses.ppo,
      kl_estimator=kl.k3,
      on_policy=False,
      with_entropy_gradient=False,
      with_reference=False,
    )
    return update.actor_loss(logprobs, batch, coefs, **(options | changes))[0]

  weighted = batch.replace(importance=np.array([[2, 0.5, 9]], np.float32))
  np.testing.assert_allclose(value(weighted), -3.3, rtol=1e-6)
  picked = weighted.replace(selected=np.array([[False, True, False]]))
  np.testing.assert_allclose(value(picked, policy_loss=stopped), -3, rtol=1e-6)
  exact = weighted.replace(reference_states=np.zeros((1, 3, 2), np.float32))
  total = value(
    exact, _COEFS | {'reference_head': 'head'}, with_reference=True,
    kl_estimator=None,
  )  # fmt: skip
  np.testing.assert_allclose(total, -3.3 + 0.3, rtol=1e-6)
  head, states = asked[-1]['reference']
  assert head == 'head' and states is exact.reference_states
  inside = lambda new, old, mask: jnp.where(mask, jnp.exp(new - old), 0.0)
  total = value(batch, importance=inside)
  np.testing.assert_allclose(total, -2.7, rtol=1e-6)


def test_actor_loss_on_policy_by_hand():
  # The old log-probs are the new ones: ratios 1, losses -A: (-3 - 1) / 2 = -2,
  # gradient -A w = (-1.5, -0.5).  Those of the batch are the sampler's; the
  # probabilities differ by |e^-1 - e^-1| and |e^-2 - e^-2 / 2|.
  batch = _one_row(
    old_logprobs=[-1, -2 - np.log(2), np.nan], advantages=[3, 1, np.nan]
  )
  loss = functools.partial(
    update.actor_loss,
    score=lambda logprobs, *, rows, entropy: types.Scores(
      logprobs=logprobs, entropy=jnp.zeros((1, 3))
    ),
    policy_loss=policy_losses.ppo,
    kl_estimator=kl.k3,
    on_policy=True,
    with_entropy_gradient=False,
    with_reference=False,
  )
  (value, statistics), gradient = jax.value_and_grad(loss, has_aux=True)(
    jnp.array([[-1.0, -2.0, -5.0]]), batch, _COEFS
  )
  np.testing.assert_allclose(value, -2.0)
  np.testing.assert_allclose(gradient, [[-1.5, -0.5, 0.0]])
  values = metrics.compute(statistics)
  gap = np.exp(-2) / 2
  np.testing.assert_allclose(
    values['training/rollout_probs_diff_max'], gap, rtol=1e-5
  )
  np.testing.assert_allclose(
    values['training/rollout_probs_diff_mean'], gap / 2, rtol=1e-5
  )
  assert values['actor/ppo_kl'] == 0
  assert 'kl/reference' not in values  # nothing to measure it against


def test_critic_loss_by_hand():
  # values (1, 0.5), old (0, 0.4), clip 0.2: held values 0.2 and 0.5.
  # returns (2, 0): free (1, 0.25), held (3.24, 0.25); max (3.24, 0.25)
  #   loss = (3.24 + 0.25) / 2 / 2 = 0.8725; the first is clipped: gradient 0,
  #   the second 0.5 * 2 * 0.5 * 0.5 = 0.25
  batch = _one_row(old_values=[0, 0.4, np.nan], returns=[2, 0, np.nan])
  loss = functools.partial(
    update.critic_loss,
    score=lambda values, *, rows: types.Scores(values=values),
    clip=0.2,
  )
  (value, statistics), gradient = jax.value_and_grad(loss, has_aux=True)(
    jnp.array([[1.0, 0.5, 9.0]]), batch, {}
  )
  np.testing.assert_allclose(value, 0.8725, rtol=1e-6)
  np.testing.assert_allclose(gradient, [[0.0, 0.25, 0.0]], atol=1e-6)
  values = metrics.compute(statistics)
  np.testing.assert_allclose(values['critic/vf_loss'], 0.8725, rtol=1e-6)
  assert values['critic/vf_clipfrac'] == 0.5


def test_supervised_loss_by_hand():
  # -(-1 - 3) / 2 = 2 nats per token
  loss = functools.partial(
    update.supervised_loss,
    score=lambda logprobs, *, rows: types.Scores(logprobs=logprobs),
  )
  (value, statistics), gradient = jax.value_and_grad(loss, has_aux=True)(
    jnp.array([[-1.0, -3.0, -jnp.inf]]), _one_row(), {}
  )
  assert value == 2
  np.testing.assert_array_equal(gradient, [[-0.5, -0.5, 0.0]])
  assert metrics.compute(statistics) == {'sft/loss': 2.0, 'sft/token_nll': 2.0}


# ---- One gradient, however the mini-batch is cut (float64) ------------------


def _plain_scores(params, rollout):
  """Log-probs and entropy [N, T - 1] of one sequence per row, no packing."""
  tokens = jnp.asarray(rollout.tokens)
  at = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
  hidden = decoder.hidden(
    params,
    _CONFIG,
    tokens,
    at,
    (at < rollout.lengths[:, None]).astype(jnp.int32),
    dtype=params['embed'].dtype,
  )
  if 'value_head' in params:
    return (hidden @ params['value_head'])[:, :-1, 0], None
  logits = hidden @ params['embed'].T / rollout.temperature[:, None, None]
  every = jax.nn.log_softmax(logits[:, :-1])  # N T-1 V
  chosen = jnp.take_along_axis(every, tokens[:, 1:, None], axis=-1)[..., 0]
  return chosen, -jnp.sum(jnp.exp(every) * every, axis=-1)


def _plain_loss(params, experience):
  """The losses of both roles from their formulas, on [N, T - 1]."""
  mask = experience.rollout.mask[:, 1:]
  known = lambda x: jnp.where(mask, x[:, 1:], 0.0)
  new, entropy = _plain_scores(params, experience.rollout)
  if 'value_head' in params:
    old, returns = known(experience.values), known(experience.returns)
    held = old + jnp.clip(new - old, -0.2, 0.2)
    losses = 0.5 * jnp.maximum((new - returns) ** 2, (held - returns) ** 2)
  else:
    ratio = jnp.exp(new - known(experience.old_logprobs))
    advantages = known(experience.advantages)
    d = known(experience.reference_logprobs) - new
    surrogate = jnp.minimum(
      ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages
    )
    losses = -surrogate - 0.25 * entropy + 0.5 * (jnp.exp(d) - d - 1)
  # The weights are float32: 1 / n is rounded to it.
  weight = jnp.float32(1) / mask.sum(dtype=jnp.float32)
  return jnp.sum(jnp.where(mask, losses, 0.0)) * weight


@pytest.fixture(scope='module')
def one_device():
  return mesh_lib.make(devices=jax.devices()[:1])


@functools.cache
def _cuts(role):
  """Cuts one mini-batch in many ways, and differentiates it by the formulas."""
  mesh = mesh_lib.make(devices=jax.devices()[:1])
  with jax.enable_x64(True):
    params = _params(role, jnp.float64)
    current = np.asarray(jax.jit(_plain_scores)(params, _rollout())[0])

    def experience(width=14):
      now = np.pad(current, [(0, 0), (1, width - 14)])
      return _experience(_rollout(width), now, now, np.float64)

    programs = _programs(role, mesh, params, jnp.float64)

    def gradient(experience, rows, **packing):
      with jax.enable_x64(True):
        batch = _batch(experience, **packing)
        return _gradient(programs, params, batch, rows, mesh)

    plain = jax.jit(jax.value_and_grad(_plain_loss))(params, experience())
    return experience, gradient, jax.device_get(plain)


@pytest.mark.parametrize(
  'role, rows, packing, width, order',
  [
    # Shapes that were seen before need no new compilation.
    pytest.param('actor', 8, {}, 14, None, id='whole'),
    pytest.param('actor', 4, {}, 14, None, id='two micro-batches'),
    pytest.param('actor', 2, {}, 14, None, id='four micro-batches'),
    pytest.param('actor', 4, dict(tokens_per_row=32), 14, None, id='long rows'),
    pytest.param('actor', 4, dict(share_prefix=True), 14, None, id='prefix'),
    pytest.param('actor', 4, dict(rows_multiple=16), 14, None, id='empty rows'),
    pytest.param('actor', 4, {}, 21, None, id='wider padding'),
    pytest.param('actor', 4, {}, 14, [5, 2, 7, 0, 3, 6, 1, 4], id='order'),
    pytest.param('critic', 8, {}, 14, None, id='critic, whole'),
    pytest.param('critic', 4, dict(share_prefix=True), 14, None, id='critic'),
  ],
)
def test_gradient_does_not_depend_on_the_cut(role, rows, packing, width, order):
  make, gradient, (loss, expected) = _cuts(role)
  experience = make(width)
  if order is not None:
    experience = jax.tree.map(lambda x: x[order], experience)
  grads, values = gradient(experience, rows, **packing)
  testing.assert_norm_close(grads, expected, 'gradient_invariance_float64')
  name = {'actor': 'actor/loss', 'critic': 'critic/vf_loss'}[role]
  testing.assert_close(values[name], loss, 'oracle_float64')
  clipped = {'actor': 'actor/pg_clipfrac', 'critic': 'critic/vf_clipfrac'}[role]
  assert 0 < values[clipped] < 1  # both branches are in it


def test_metrics_do_not_depend_on_the_cut():
  make, gradient, _ = _cuts('actor')
  _, whole = gradient(make(), 8)
  _, parts = gradient(make(), 2)
  assert whole.keys() == parts.keys()
  for name, value in whole.items():
    testing.assert_close(parts[name], value, 'oracle_float64')


# ---- Float32: first update, masked batches, updates that are skipped --------


@pytest.fixture(scope='module')
def single(one_device):
  """The actor's programs on one device, and the log-probs of the rollout."""
  params = _params('actor')
  programs = _programs('actor', one_device, params)
  score = update.score_program(functools.partial(heads.score, config=_CONFIG))
  return params, programs, score


def _state(params, mesh, role='actor'):
  copy = jax.tree.map(jnp.copy, params)  # the programs donate
  specs = state_lib.specs_of(_CONFIG, role)
  copy = jax.device_put(copy, rules.params(mesh, specs))
  return state_lib.create(copy, _optimizer(), mesh, specs)


def _scored(score, params, rollout, mesh):
  """What the trainer's forward pass says of a rollout, [N, T]."""
  minibatches = packed.split(
    rollout,
    np.zeros(len(rollout.lengths), int),
    1,
    islands=multihost.islands(mesh),
    tokens_per_row=16,
    rows_per_microbatch=8,
    share_prefix=False,
  )
  scores, _ = packed.run_score(
    score,
    params,
    minibatches,
    rollout,
    rows_per_microbatch=8,
    islands=multihost.islands(mesh),
  )
  return scores.logprobs if scores.values is None else scores.values


def _at_first(score, params, mesh):
  """The experience of a policy that has not moved from its reference."""
  rollout = _rollout()
  logprobs = _scored(score, params, rollout, mesh)
  nothing = np.zeros_like(logprobs)
  return _experience(rollout, nothing, nothing, np.float32).replace(
    old_logprobs=logprobs, reference_logprobs=logprobs
  )


def test_first_update_is_on_policy(single, one_device):
  # Half of the sequences have temperature 0.5: KL(pi, pi) is 0 there as well.
  params, programs, score = single
  experience = _at_first(score, params, one_device)
  plain = np.asarray(jax.jit(_plain_scores)(params, experience.rollout)[0])
  mask = experience.rollout.mask[:, 1:]
  testing.assert_close(
    np.where(mask, experience.old_logprobs[:, 1:], 0),
    np.where(mask, plain, 0),
    'layout_float32',
  )
  state, statistics = update.update(
    _state(params, one_device),
    packed.slices(_batch(experience), 4, multihost.islands(one_device)),
    _COEFS,
    programs=programs,
    prefix='actor',
  )
  values = metrics.compute(statistics)
  testing.assert_close(values['actor/ratio_max'], 1.0, 'first_ratio')
  testing.assert_close(values['actor/ratio_mean'], 1.0, 'first_ratio')
  testing.assert_close(values['actor/ppo_kl'], 0.0, 'kl_of_itself')
  testing.assert_close(values['kl/reference'], 0.0, 'kl_of_itself')
  assert values['actor/pg_clipfrac'] == 0
  # One optimiser step, which is reported.
  assert int(state.updates) == 1
  assert values['actor/skipped_updates'] == 0
  assert values['actor/grad_norm'] > 0
  assert values['actor/grad_norm_clipped'] <= 1
  np.testing.assert_allclose(values['actor/lr'], 1e-2)


def test_masked_micro_batch_is_nothing(single, one_device):
  params, programs, score = single
  batch = _batch(_at_first(score, params, one_device))
  rows = batch.rows.replace(mask=np.zeros_like(batch.rows.mask))
  hole = np.full(rows.mask.shape, np.nan, np.float32)
  batch = batch.replace(
    rows=rows, advantages=hole, old_logprobs=hole, weights=hole
  )
  grads, values = _gradient(programs, params, batch, 4, one_device)
  assert not any(leaf.any() for leaf in jax.tree.leaves(grads))
  for name in ('actor/loss', 'actor/pg_loss', 'actor/kl_loss'):
    assert values[name] == 0
  # A mean over nothing has no value; nothing is NaN.
  assert 'actor/ppo_kl' not in values
  assert np.isfinite(list(values.values())).all()


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_update_without_finite_gradient_is_skipped(single, one_device, bad):
  params, programs, score = single
  batch = _batch(_at_first(score, params, one_device))
  first = np.argwhere(batch.rows.mask)[0]
  advantages = batch.advantages.copy()
  advantages[tuple(first)] = bad
  state = _state(params, one_device)
  before = jax.device_get((state.params, state.opt_state))
  state, statistics = update.update(
    state,
    packed.slices(
      batch.replace(advantages=advantages), 4, multihost.islands(one_device)
    ),
    _COEFS,
    programs=programs,
    prefix='actor',
  )
  jax.tree.map(
    np.testing.assert_array_equal,
    jax.device_get((state.params, state.opt_state)),
    before,
  )
  assert (int(state.updates), int(state.skipped)) == (0, 1)
  values = metrics.compute(statistics)
  assert values['actor/skipped_updates'] == 1
  assert 'actor/grad_norm' not in values  # of a skipped update there is none
  # Over the mini-batches of a step skips add up, losses are averaged.
  loss = {'actor/loss': metrics.mean(1.0)}
  twice = metrics.merge(statistics | loss, statistics | loss)
  assert metrics.compute(twice)['actor/skipped_updates'] == 2
  assert metrics.compute(twice)['actor/loss'] == 1


def test_critic_is_the_actor_with_values_of_zero(single, one_device):
  params, _, score = single
  critic = state_lib.critic_from_actor(_CONFIG, params, one_device)
  assert not critic['value_head'].any()
  for name in ('embed', 'layers', 'final_norm'):
    jax.tree.map(np.testing.assert_array_equal, critic[name], params[name])
  # A copy: the actor's buffers are donated by its own updates.
  where = critic['embed'].unsafe_buffer_pointer()
  assert where != params['embed'].unsafe_buffer_pointer()
  values = _scored(score, critic, _rollout(), one_device)
  np.testing.assert_array_equal(values, np.zeros((8, 14)))


# ---- Eight devices are one device -------------------------------------------


def _three_updates(role, mesh, experience, score):
  """Log-probs, gradient, loss and the way of three updates on a mesh."""
  params = _params(role)
  state = _state(params, mesh, role)
  start = jax.device_get(state.params)
  programs = _programs(role, mesh, state.params)
  scores = _scored(score, state.params, experience.rollout, mesh)
  batch = _batch(experience)
  grads, values = _gradient(programs, state.params, batch, 8, mesh)
  for _ in range(3):
    state, _ = update.update(
      state,
      packed.slices(batch, 8, multihost.islands(mesh)),
      _COEFS,
      programs=programs,
      prefix=role,
    )
  end = jax.device_get(state.params)
  way = jax.tree.map(lambda a, b: a - b, end, start)
  return scores, grads, values, way, state


def test_eight_devices_are_one(single, one_device):
  """Of the critic; for the actor see `sharding_test`.

  Two key/value heads on tensor x context = 4 devices become four.
  """
  role = 'critic'
  params, _, score = single
  logprobs = _scored(score, params, _rollout(), one_device)
  # The same recorded rollout for all.
  experience = _experience(
    _rollout(), logprobs, np.zeros_like(logprobs), np.float32
  )
  one = _three_updates(role, one_device, experience, score)
  mesh = mesh_lib.make(fsdp=2, tensor=2, context=2)
  many = _three_updates(role, mesh, experience, score)
  testing.assert_close(many[0], one[0], 'layout_float32')
  testing.assert_norm_close(many[1], one[1], 'gradient_layout_float32')
  assert many[2].keys() == one[2].keys()
  testing.assert_close(
    many[2]['critic/vf_loss'], one[2]['critic/vf_loss'], 'layout_float32'
  )
  testing.assert_norm_close(many[3], one[3], 'three_updates')
  # They are split, and stay split after an update, moments too.
  expected = rules.params(mesh, state_lib.specs_of(_CONFIG, role))
  moments = [
    leaf for leaf in jax.tree.leaves(many[4].opt_state) if leaf.ndim == 2
  ]
  assert not any(leaf.sharding.is_fully_replicated for leaf in moments[:1])
  jax.tree.map(
    lambda leaf, sharding: np.testing.assert_(
      leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    ),
    many[4].params,
    expected,
  )
