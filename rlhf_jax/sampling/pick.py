"""Floor one of the sampler: choose a token from logits."""

import chex
from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import types

# Rows that a CPU looks at together, whose arrays [., V] stay in its cache.
_BLOCK = 16


@struct.dataclass
class Request:
  """What each sequence asks for; any of it may change without recompiling.

  Banned tokens are a bias of -inf.  `address` takes the place of a seed: a
  sequence draws with (key of the rollout, address, position).
  """

  address: types.Array  # [N] int32: index of the sample in the step, or a seed
  temperature: types.Array  # [N] float32, 0 is greedy
  top_k: types.Array  # [N] int32, 0 is off
  top_p: types.Array  # [N] float32, 1 is off
  min_p: types.Array  # [N] float32, 0 is off
  min_new_tokens: types.Array  # [N] int32: no stop id before so many
  max_new_tokens: types.Array  # [N] int32, at least 1
  stop_ids: types.Array  # [N, M] int32, padded with -1
  bias_ids: types.Array  # [N, K] int32, padded with -1
  bias: types.Array  # [N, K] float32, added to the logits of those tokens


def noise_keys(
  key: types.Array, addresses: types.Array, positions: types.Array
) -> types.Array:
  """One key per row: `fold_in(fold_in(key, address), position)`.

  Args:
    key: of the rollout, already addressed by seed, purpose and step.
    addresses: [N] int32, see `Request`.
    positions: [N] int32, position that the token will have.

  Returns:
    [N] keys.
  """
  fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, addresses)
  return jax.vmap(jax.random.fold_in)(fold, positions)


def noise(keys: types.Array, vocab: int) -> types.Array:
  """Standard Gumbel noise for every token, [N, V] float32.

    -log(-log u),  u = hash(key, token) in 2^-24 .. 1 - 2^-24

  The key of a row is threefry's; a token's bits are two rounds of a mixing
  function over its number and the key's two words.  Threefry for each of the
  tokens costs ten times as much, which a decode step of a few rows would feel.

  Args:
    keys: [N] threefry keys.
    vocab: V.

  Source of the mixing constants: https://github.com/skeeto/hash-prospector
  """
  words = jax.random.key_data(keys)  # N 2

  def mix(x):
    x ^= x >> 16
    x *= jnp.uint32(0x21F0AAAD)
    x ^= x >> 15
    x *= jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)

  token = jnp.arange(vocab, dtype=jnp.uint32)[None] * jnp.uint32(0x9E3779B9)
  bits = mix(mix(token ^ words[:, :1]) + words[:, 1:])
  uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * np.float32(2.0**-23)
  return -jnp.log(-jnp.log(uniform))


def truncate(
  logits: types.Array,
  top_k: types.Array,
  top_p: types.Array,
  min_p: types.Array,
) -> types.Array:
  """Keeps the `top_k` likeliest tokens, the nucleus of mass `top_p`, and
  tokens of at least `min_p` times the probability of the likeliest.

  The nucleus is the smallest set of likeliest tokens whose probabilities reach
  `top_p` (the token that crosses it is kept); it is taken of the distribution
  that `top_k` left.  Tokens that tie with the last one kept are kept as well.

  Args:
    logits: [N, V] float32, already divided by the temperature.
    top_k: [N] int32, 0 keeps all.
    top_p: [N] float32 in (0, 1], 1 keeps all.
    min_p: [N] float32 in [0, 1], 0 keeps all.

  Returns:
    [N, V] float32, -inf at the tokens that were dropped.

  Sources: Holtzman et al. 2020 (https://arxiv.org/abs/1904.09751), Nguyen et
  al. 2024 (min-p, https://arxiv.org/abs/2407.01082).
  """
  chex.assert_rank([logits, top_k, top_p, min_p], [2, 1, 1, 1])
  vocab = logits.shape[-1]
  ordered = -jnp.sort(-logits, axis=-1)  # N V, descending
  k = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)[:, None]
  ordered = jnp.where(jnp.arange(vocab)[None] < k, ordered, -jnp.inf)
  probabilities = jax.nn.softmax(ordered, axis=-1)
  before = jnp.cumsum(probabilities, axis=-1) - probabilities
  # The first token always stays; top_p = 1 must not lose tokens to rounding.
  kept = (before < top_p[:, None]) | (top_p[:, None] >= 1.0)
  kept = kept.at[:, 0].set(True) & jnp.isfinite(ordered)
  least = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
  likely = jnp.where(min_p > 0, jnp.log(jnp.maximum(min_p, 1e-38)), -jnp.inf)
  least = jnp.maximum(least, ordered[:, :1] + likely[:, None])
  return jnp.where(logits >= least, logits, -jnp.inf)


def adjust(
  logits: types.Array, request: Request, counts: types.Array
) -> types.Array:
  """Adds the biases, and bans stop ids before `min_new_tokens`.

  Args:
    logits: [N, V] float32.
    request: of the N sequences.
    counts: [N] int32: tokens that each has drawn so far.
  """
  rows = jnp.arange(logits.shape[0])[:, None]  # N 1
  vocab = logits.shape[1]
  inside = lambda ids: jnp.where(ids < 0, vocab, ids)  # -1 would be the last
  logits = logits.at[rows, inside(request.bias_ids)].add(
    request.bias, mode='drop'
  )
  early = counts < request.min_new_tokens
  banned = jnp.where(early[:, None], inside(request.stop_ids), vocab)
  return logits.at[rows, banned].set(-jnp.inf, mode='drop')


def pick(
  logits: types.Array,
  keys: types.Array,
  request: Request,
  counts: types.Array,
) -> tuple[types.Array, types.Array, types.Array]:
  """Draws one token a row by the Gumbel-argmax rule.

    token = argmax(truncate(adjust(logits) / temperature) + noise(key))

  Under rounding of the logits only a near-tie can flip the choice.

  Args:
    logits: [N, V] float32.
    keys: [N] keys, see `noise_keys`.
    request: of the N sequences; greedy takes the first of equals.
    counts: [N] int32: tokens that each has drawn so far.

  Returns:
    tokens [N] int32; their log-probs [N] float32 under the policy at this
    temperature, before biases and truncation (greedy rows report temperature
    1); and their log-probs under the distribution they were drawn from (0 for
    greedy rows, which had no choice).
  """
  chex.assert_rank([logits, keys, counts], [2, 1, 1])
  args = logits, keys, request, counts
  rows, block = len(logits), _block(logits)
  if block == rows:
    return _pick(*args)
  cut = lambda x: x.reshape(rows // block, block, *x.shape[1:])
  parts = jax.tree.map(cut, args)
  picked = jax.lax.map(lambda part: _pick(*part), parts)
  return tuple(x.reshape(-1) for x in picked)


def _block(logits: types.Array) -> int:
  """How many rows are looked at together: they do not know of each other."""
  rows, mesh = len(logits), jax.typeof(logits).sharding.mesh
  # On several devices each would wait for all.
  if jax.default_backend() != 'cpu' or (not mesh.empty and mesh.size > 1):
    return rows
  # Without a block that divides them well they go together.
  blocks = range(_BLOCK // 2, _BLOCK + 1)
  return max((n for n in blocks if rows % n == 0), default=rows)


def _pick(logits, keys, request, counts):
  """`pick` of rows that fit together."""
  logits = logits.astype(jnp.float32)
  greedy = request.temperature <= 0.0
  changed = jnp.any(request.bias_ids >= 0, axis=1)
  changed |= (counts < request.min_new_tokens) & jnp.any(
    request.stop_ids >= 0, axis=1
  )
  cut = (request.top_k > 0) | (request.top_p < 1.0) | (request.min_p > 0.0)
  cut &= ~greedy
  heat = jnp.where(greedy, 1.0, request.temperature)[:, None]
  loud = jnp.where(greedy, 0.0, 1.0)[:, None]  # greedy rows have no noise
  # The largest becomes exactly 0 before the division: at a low temperature the
  # log-probs would be differences of large, rounded numbers otherwise.
  temper = lambda x: (x - jnp.max(x, axis=-1, keepdims=True)) / heat

  tempered = temper(logits)
  noisy = loud * noise(keys, logits.shape[1])

  def plain():
    tokens = _first_largest(tempered + noisy)
    logprobs = _log_softmax_at(tempered, tokens)
    return tokens, logprobs, jnp.where(greedy, 0.0, logprobs)

  def anything():
    candidates = temper(adjust(logits, request, counts))
    candidates = jnp.where(changed[:, None], candidates, tempered)
    settings = request.top_k, request.top_p, request.min_p
    candidates = jnp.where(
      cut[:, None], truncate(candidates, *settings), candidates
    )
    tokens = _first_largest(candidates + noisy)
    logprobs = _log_softmax_at(tempered, tokens)
    drawn = _log_softmax_at(candidates, tokens)
    drawn = jnp.where(changed | cut, drawn, logprobs)
    return tokens, logprobs, jnp.where(greedy, 0.0, drawn)

  # The requests decide at run time: changing them does not recompile, and what
  # no row asks for (sorting 49k logits) costs nothing.  The plain choice is
  # outside, as XLA on the CPU runs a branch on one core.
  usual = plain()
  return jax.lax.cond(jnp.any(changed | cut), anything, lambda: usual)


def _first_largest(x: types.Array) -> types.Array:
  """`argmax` over the last axis, [N, V] -> [N] int32.

  As two plain reductions: XLA on the CPU makes `argmax` a loop over pairs that
  takes five times as long, and would compute the noise once more inside.
  """
  x = jax.lax.optimization_barrier(x)
  largest = jnp.max(x, axis=-1, keepdims=True)
  place = jnp.arange(x.shape[-1], dtype=jnp.int32)[None]
  found = jnp.min(jnp.where(x == largest, place, x.shape[-1]), axis=-1)
  # A row of NaN has no largest: any token, rather than one past the end.
  return jnp.minimum(found, x.shape[-1] - 1)


def _log_softmax_at(logits, tokens):
  """Of logits [N, V] whose largest is 0, at tokens [N]."""
  chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
  return chosen - jnp.log(jnp.sum(jnp.exp(logits), axis=-1))
