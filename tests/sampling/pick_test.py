"""Choosing a token: truncation, log-probs, frequencies, addresses."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import keys as keys_lib
from rlhf_jax import testing
from rlhf_jax.sampling import pick
from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.sharding import rules

_KEY = keys_lib.key(0, 'rollout', 3)
_pick = jax.jit(pick.pick)
_truncate = jax.jit(pick.truncate)


def _logits(rows, vocab=23, scale=2.0, seed=0):
  rng = np.random.default_rng(seed)
  return rng.normal(0, scale, (rows, vocab)).astype(np.float32)


def _run(logits, *, samples=None, positions=None, key=_KEY, counts=0,
         all_=False, **asked):  # fmt: skip
  """`pick` with numbers or arrays for the requests; numpy out.

  Tokens and log-probs, with `all_` also those of the drawn distribution.
  """
  count = len(logits)
  spread = lambda x, dtype: jnp.asarray(
    np.broadcast_to(np.asarray(x, dtype), count)
  )
  address = spread(np.arange(count) if samples is None else samples, np.int32)
  ids = lambda name: jnp.asarray(
    np.broadcast_to(np.asarray(asked.get(name, [-1, -1]), np.int32), (count, 2))
  )
  request = pick.Request(
    address=address,
    temperature=spread(asked.get('temperature', 1.0), np.float32),
    top_k=spread(asked.get('top_k', 0), np.int32),
    top_p=spread(asked.get('top_p', 1.0), np.float32),
    min_p=spread(asked.get('min_p', 0.0), np.float32),
    min_new_tokens=spread(asked.get('min_new_tokens', 0), np.int32),
    max_new_tokens=spread(9, np.int32),
    stop_ids=ids('stop_ids'),
    bias_ids=ids('bias_ids'),
    bias=jnp.asarray(
      np.broadcast_to(
        np.asarray(asked.get('bias', [0.0, 0.0]), np.float32), (count, 2)
      )
    ),
  )
  keys = pick.noise_keys(
    key, address, spread(0 if positions is None else positions, np.int32)
  )
  out = _pick(jnp.asarray(logits), keys, request, spread(counts, np.int32))
  return tuple(np.asarray(x) for x in out)[: 3 if all_ else 2]


def _kept_reference(logits, k, p):
  """The documented set of tokens, by a loop over float64 numbers."""
  logits = [float(x) for x in logits]
  order = sorted(range(len(logits)), key=lambda i: -logits[i])
  order = order[: k or len(order)]
  weights = [math.exp(logits[i] - logits[order[0]]) for i in order]
  mass, last = 0.0, order[-1]
  for i, weight in zip(order, weights):
    mass += weight / sum(weights)
    if p < 1 and mass >= p:
      last = i
      break
  return [x >= logits[last] for x in logits]


def _log_softmax(x):
  x = np.asarray(x, np.float64)
  x = x - x.max(-1, keepdims=True)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_truncate_equals_a_loop():
  requests = [
    (k, p)
    for k in (0, 1, 2, 7, 22, 23, 99)
    for p in (1.0, 0.999, 0.7, 0.3, 1e-6)
  ]
  logits = _logits(len(requests))
  k, p = (np.array(x) for x in zip(*requests))
  out = np.asarray(
    _truncate(
      logits,
      k.astype(np.int32),
      p.astype(np.float32),
      np.zeros(len(k), np.float32),
    )
  )
  kept = np.array([_kept_reference(*row) for row in zip(logits, k, p)])
  # All sorts of sets occur, otherwise this test says little.
  assert kept.sum(1).min() == 1 and kept.sum(1).max() == 23
  np.testing.assert_array_equal(np.isfinite(out), kept)
  np.testing.assert_array_equal(out[kept], logits[kept])
  assert (out[~kept] == -np.inf).all()


@pytest.mark.parametrize(
  'probabilities, k, p, kept',
  [
    # The smallest set that reaches p: .5 reaches .45; .5 + .3 reach .55.
    ([0.5, 0.3, 0.2], 0, 0.45, [1, 0, 0]),
    ([0.5, 0.3, 0.2], 0, 0.55, [1, 1, 0]),
    ([0.5, 0.3, 0.2], 0, 0.85, [1, 1, 1]),
    # The nucleus is of what top-k left: .5 / .8 = .625 reaches .6.
    ([0.5, 0.3, 0.2], 2, 0.6, [1, 0, 0]),
    ([0.5, 0.3, 0.2], 0, 0.6, [1, 1, 0]),
    # The order of the vocabulary does not matter.
    ([0.2, 0.5, 0.3], 2, 1.0, [0, 1, 1]),
    # Tokens that tie with the last one kept are kept.
    ([0.4, 0.2, 0.2, 0.2], 2, 1.0, [1, 1, 1, 1]),
    ([0.25, 0.25, 0.25, 0.25], 1, 1.0, [1, 1, 1, 1]),
    ([0.3, 0.3, 0.2, 0.2], 0, 0.4, [1, 1, 0, 0]),
    ([0.3, 0.3, 0.2, 0.2], 0, 0.7, [1, 1, 1, 1]),
    # A forbidden token never comes back.
    ([0.6, 0.4, 0.0], 0, 1.0, [1, 1, 0]),
    ([0.6, 0.4, 0.0], 3, 0.99, [1, 1, 0]),
  ],
)
def test_truncate_by_hand(probabilities, k, p, kept):
  with np.errstate(divide='ignore'):
    logits = np.log(np.array([probabilities], np.float32))
  out = pick.truncate(
    jnp.asarray(logits),
    jnp.array([k]),
    jnp.array([p], jnp.float32),
    jnp.zeros(1),
  )
  assert np.isfinite(out)[0].tolist() == [bool(x) for x in kept]


def test_greedy_takes_the_first_of_equals_at_temperature_one():
  logits = _logits(6)
  logits[0, :] = 1.0
  logits[1, [4, 9]] = 50.0
  # The truncation of greedy rows is ignored.
  tokens, logprobs = _run(
    logits, temperature=0.0, top_k=[0, 0, 3, 0, 1, 0], top_p=0.5
  )
  assert tokens[:2].tolist() == [0, 4]
  np.testing.assert_array_equal(tokens, logits.argmax(-1))
  expected = _log_softmax(logits)[np.arange(6), tokens]
  testing.assert_close(logprobs, expected.astype(np.float32), 'oracle_float32')


def test_log_probs_are_tempered_and_not_truncated():
  logits = _logits(64)
  # At 0.003 the tempered logits reach 2000, whose float32 steps are 1e-4.
  temperature = np.repeat([0.003, 0.7, 1.0, 2.5], 16).astype(np.float32)
  tokens, logprobs = _run(
    logits,
    temperature=temperature,
    top_k=np.tile([0, 3], 32),
    top_p=np.tile([1.0, 1.0, 0.8, 0.8], 16),
  )
  expected = _log_softmax(logits.astype(np.float64) / temperature[:, None])
  expected = expected[np.arange(64), tokens].astype(np.float32)
  testing.assert_close(logprobs, expected, 'oracle_float32')


def test_a_choice_is_gumbel_argmax_over_the_kept_tokens():
  logits = _logits(40)
  k, p = np.tile([0, 2, 5, 0], 10), np.tile([1.0, 1.0, 0.6, 0.4], 10)
  tokens, _ = _run(logits, temperature=0.7, top_k=k, top_p=p, positions=5)
  for row in range(40):
    key = jax.random.fold_in(jax.random.fold_in(_KEY, row), 5)
    noise = np.asarray(pick.noise(key[None], 23)[0])
    tempered = (logits[row] - logits[row].max()) / np.float32(0.7)
    kept = _kept_reference(tempered, k[row], p[row])
    assert tokens[row] == np.where(kept, tempered + noise, -np.inf).argmax()


@pytest.mark.parametrize(
  'temperature, top_k, top_p',
  [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.5, 4, 1.0), (1.0, 0, 0.8)],
)
def test_frequencies_match_the_distribution(temperature, top_k, top_p):
  rows, vocab = 20_000, 8
  logits = _logits(1, vocab, scale=1.0, seed=1)
  tempered = logits[0] / temperature
  kept = np.array(_kept_reference(tempered, top_k, top_p))
  p = np.where(kept, np.exp(tempered), 0.0)
  p = p / p.sum()
  # Addresses on both axes, as in a rollout.
  tokens, _ = _run(
    np.repeat(logits, rows, 0),
    samples=np.arange(rows) // 100,
    positions=np.arange(rows) % 100,
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
  )
  observed = np.bincount(tokens, minlength=vocab)
  assert observed[~kept].sum() == 0
  expected = (rows * p)[kept]
  statistic = ((observed[kept] - expected) ** 2 / expected).sum()
  # The 0.999 quantile of chi-square with 7 degrees of freedom; fewer have
  # smaller quantiles.  The draw is fixed, so this cannot flicker.
  assert statistic < 24.3, f'chi-square {statistic:.1f}'


def test_choice_is_the_same_whatever_slot_order_and_batch():
  logits = _logits(12)
  samples = np.arange(100, 112)
  positions = np.arange(12) * 3
  asked = dict(
    temperature=np.tile([0.0, 0.7, 1.0], 4),
    top_k=np.tile([0, 4], 6),
    top_p=np.tile([1.0, 0.9, 0.5, 1.0], 3),
  )
  addresses = dict(samples=samples, positions=positions)
  tokens, logprobs = _run(logits, **addresses, **asked)
  take = lambda order: {
    name: x[order] for name, x in (asked | addresses).items()
  }
  order = np.random.default_rng(0).permutation(12)
  permuted = _run(logits[order], **take(order))
  np.testing.assert_array_equal(permuted[0], tokens[order])
  np.testing.assert_array_equal(permuted[1], logprobs[order])
  # Another batch is another program: the choices are the same all the same,
  # also where no neighbour is greedy, or none is truncated.
  for chosen in ([0], [1, 2, 4]):
    part = _run(logits[chosen], **take(chosen))
    np.testing.assert_array_equal(part[0], tokens[chosen])
    testing.assert_close(part[1], logprobs[chosen], 'oracle_float32')


def test_other_samples_positions_and_steps_draw_other_noise():
  samples, positions = (
    x.reshape(-1).astype(np.int32)
    for x in np.meshgrid(np.arange(20), np.arange(20))
  )
  data = [
    np.asarray(
      jax.random.key_data(
        pick.noise_keys(keys_lib.key(0, 'rollout', step), samples, positions)
      )
    )
    for step in range(3)
  ]
  assert len(np.unique(np.concatenate(data), axis=0)) == 3 * 400
  # (1, 2) and (2, 1) are two addresses; so draws do not repeat by symmetry.
  uniform = np.zeros((400, 5000), np.float32)
  tokens, _ = _run(uniform, samples=samples, positions=positions)
  # 400 draws of 5000: about 400^2 / 2 / 5000 = 16 pairs agree by chance.
  assert len(np.unique(tokens)) > 370


def test_extreme_logits_give_numbers():
  logits = _logits(6)
  logits[0] = 1e30
  logits[1, 3] = 1e4
  logits[2] = -1e4
  logits[3, 1:] = -np.inf
  logits[4, ::2] = -np.inf
  for temperature in (0.0, 1e-4, 1.0, 100.0):
    for top_k, top_p in ((0, 1.0), (2, 1e-9), (99, 0.5)):
      tokens, logprobs = _run(
        logits, temperature=temperature, top_k=top_k, top_p=top_p
      )
      assert np.isfinite(logprobs).all() and (logprobs <= 0).all()
      assert ((tokens >= 0) & (tokens < 23)).all()
      assert tokens[3] == 0 and tokens[4] % 2 == 1


# ---- Biases, bans, min-p, minimum length -------------------------------------


def test_blocks_of_rows_draw_the_same_bits(monkeypatch):
  """Also where some blocks have rows that are truncated, and some do not."""
  logits = _logits(48, vocab=1000)
  asked = dict(
    temperature=np.linspace(0, 2, 48),
    top_k=np.where(np.arange(48) < 5, 3, 0),
    top_p=np.where(np.arange(48) == 40, 0.5, 1.0),
    all_=True,
  )
  assert pick._block(jnp.asarray(logits)) == 16
  in_blocks = _run(logits, **asked)
  monkeypatch.setattr(pick, '_block', len)
  _pick.clear_cache()
  for actual, expected in zip(in_blocks, _run(logits, **asked), strict=True):
    np.testing.assert_array_equal(actual, expected)
  _pick.clear_cache()


def test_size_of_a_block():
  sizes = [pick._block(jnp.zeros((n, 3))) for n in (1, 7, 16, 32, 40, 31, 100)]
  assert sizes == [1, 7, 16, 16, 10, 31, 10]
  # A loop over blocks would gather rows that are split over devices.
  mesh = mesh_lib.make(data=4, tensor=2)
  seen = []
  split = rules.sharding(mesh, ('rows', None), (32, 3), rules.ROLLOUT)
  split = jax.device_put(jnp.zeros((32, 3)), split)
  jax.jit(lambda x: seen.append(pick._block(jnp.sin(x) + 1)))(split)
  assert seen == [32]


def test_min_p_by_hand():
  # Probabilities 0.5, 0.3, 0.15, 0.05: at 0.3 of the largest, 0.15 stays, at
  # 0.31 it goes; of what the nucleus left, the stricter of both holds.
  logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
  kept = lambda p, q: np.isfinite(
    _truncate(logits, jnp.array([0]), jnp.array([p]), jnp.array([q]))
  )[0].tolist()
  assert kept(1.0, 0.299) == [True, True, True, False]
  assert kept(1.0, 0.301) == [True, True, False, False]
  assert kept(0.4, 0.299) == [True, False, False, False]
  assert kept(1.0, 0.0) == [True] * 4
  assert kept(1.0, 1.0) == [True, False, False, False]


def test_biases_change_the_draw_and_not_the_policy():
  logits = _logits(500, vocab=5, scale=0.5)
  plain, logprobs = _run(logits)
  # Token 3 banned, token 1 made likelier by ln 4, in half of the rows.
  bias = np.zeros((500, 2), np.float32)
  bias[::2] = [-np.inf, np.log(4)]
  tokens, got, drawn = _run(
    logits, bias_ids=[3, 1], bias=bias, all_=True, temperature=0.5
  )
  assert not (tokens[::2] == 3).any() and (tokens[1::2] == 3).any()
  assert (tokens[::2] == 1).mean() > (tokens[1::2] == 1).mean() + 0.2
  # Log-probs are those of the policy; what was drawn from has its own.
  rows = np.arange(500)
  np.testing.assert_allclose(
    got, _log_softmax(logits / 0.5)[rows, tokens], atol=1e-5
  )
  changed = logits.copy()
  changed[::2, 3] = -np.inf
  changed[::2, 1] += np.log(4)
  with np.errstate(invalid='ignore'):
    expected = _log_softmax(changed / 0.5)[rows, tokens]
  np.testing.assert_allclose(drawn, expected, atol=1e-5)
  # Rows without a bias are untouched by their neighbours' ones.
  again, _ = _run(logits, temperature=0.5)
  np.testing.assert_array_equal(tokens[1::2], again[1::2])
  assert plain.shape == logprobs.shape


def test_no_stop_id_before_the_minimum():
  logits = np.zeros((6, 3), np.float32)
  logits[:, 2] = 9.0  # the stop id
  tokens, _ = _run(
    logits,
    stop_ids=[2, -1],
    temperature=0.0,
    min_new_tokens=[0, 1, 1, 2, 2, 2],
    counts=[0, 0, 1, 0, 1, 2],
  )
  assert tokens.tolist() == [2, 0, 2, 0, 0, 2]


def test_drawn_log_probs_of_a_nucleus():
  # 0.5, 0.3, 0.15, 0.05 with top_p 0.7: 0.5 and 0.3, of 0.8.
  logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]] * 40, np.float32))
  tokens, logprobs, drawn = _run(logits, top_p=0.7, all_=True)
  assert set(tokens) == {0, 1}
  np.testing.assert_allclose(
    drawn, np.log(np.where(tokens == 0, 0.5, 0.3) / 0.8), atol=1e-5
  )
  np.testing.assert_allclose(
    logprobs, np.log(np.where(tokens == 0, 0.5, 0.3)), atol=1e-5
  )
  # Nothing truncated: the same number. Greedy: there was no choice.
  _, logprobs, drawn = _run(logits, all_=True)
  np.testing.assert_array_equal(logprobs, drawn)
  _, _, drawn = _run(logits, temperature=0.0, all_=True)
  np.testing.assert_array_equal(drawn, np.zeros(40))


# ---- The noise --------------------------------------------------------------


def _noise(addresses, positions, vocab):
  keys = pick.noise_keys(
    _KEY, jnp.asarray(addresses, jnp.int32), jnp.asarray(positions, jnp.int32)
  )
  return np.asarray(pick.noise(keys, vocab), np.float64)


def test_noise_is_standard_gumbel():
  x = _noise(np.arange(64), np.zeros(64), 4096)
  assert np.isfinite(x).all()
  count = x.size
  # Mean 0.57722 and variance pi^2 / 6; 5 standard errors of each.
  assert abs(x.mean() - 0.5772157) < 5 * (np.pi**2 / 6 / count) ** 0.5
  assert abs(x.var() - np.pi**2 / 6) < 5 * (4.4 * np.pi**4 / 36 / count) ** 0.5
  # exp(-exp(-x)) is uniform: 64 bins of 4096, chi-square within 5 deviations.
  uniform = np.exp(-np.exp(-x))
  counts, _ = np.histogram(uniform, 64, (0, 1))
  square = ((counts - count / 64) ** 2 / (count / 64)).sum()
  assert abs(square - 63) < 5 * (2 * 63) ** 0.5, square


@pytest.mark.parametrize(
  'shift',
  [(0, 0, 1), (0, 0, 2), (1, 0, 0), (0, 1, 0), (1, 0, 1), (1, 1, 1)],
)
def test_noise_of_neighbours_is_independent(shift):
  """Next token, next address, next position: no correlation."""
  address, position, token = shift
  a = _noise(np.arange(256), np.arange(256) % 7, 1024)
  b = _noise(np.arange(256) + address, np.arange(256) % 7 + position, 1024)
  a, b = a[:, : 1024 - token], b[:, token:]
  for f in (lambda x: x, np.square, lambda x: x > 2):
    r = np.corrcoef(f(a).ravel(), f(b).ravel())[0, 1]
    assert abs(r) < 5 / a.size**0.5, (shift, r)
