"""Floor one of the sampler: choose a token from logits."""

import chex
import jax
import jax.numpy as jnp

from rlhf_jax import types


def noise_keys(
  key: types.Array, samples: types.Array, positions: types.Array
) -> types.Array:
  """One key per row: `fold_in(fold_in(key, sample), position)`.

  Args:
    key: of the rollout, already addressed by seed, purpose and step.
    samples: [N] int32, global index of the sample within the step.
    positions: [N] int32, position that the token will have.

  Returns:
    [N] keys.
  """
  fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, samples)
  return jax.vmap(jax.random.fold_in)(fold, positions)


def truncate(
  logits: types.Array, top_k: types.Array, top_p: types.Array
) -> types.Array:
  """Keeps the `top_k` likeliest tokens and the nucleus of mass `top_p`.

  The nucleus is the smallest set of likeliest tokens whose probabilities reach
  `top_p` (the token that crosses it is kept); it is taken of the distribution
  that `top_k` left.  Tokens that tie with the last one kept are kept as well.

  Args:
    logits: [N, V] float32, already divided by the temperature.
    top_k: [N] int32, 0 keeps all.
    top_p: [N] float32 in (0, 1], 1 keeps all.

  Returns:
    [N, V] float32, -inf at the tokens that were dropped.

  Source: Holtzman et al. 2020, https://arxiv.org/abs/1904.09751.
  """
  chex.assert_rank([logits, top_k, top_p], [2, 1, 1])
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
  return jnp.where(logits >= least, logits, -jnp.inf)


def pick(
  logits: types.Array,
  keys: types.Array,
  temperature: types.Array,
  top_k: types.Array,
  top_p: types.Array,
) -> tuple[types.Array, types.Array]:
  """Draws one token a row by the Gumbel-argmax rule.

    token = argmax(truncate(logits / temperature) + gumbel(key))

  Under rounding of the logits only a near-tie can flip the choice.

  Args:
    logits: [N, V] float32.
    keys: [N] keys, see `noise_keys`.
    temperature: [N] float32; 0 is greedy (argmax, the first of equals).
    top_k: [N] int32, 0 is off.
    top_p: [N] float32, 1 is off.

  Returns:
    tokens [N] int32, and their log-probs [N] float32 under the policy at this
    temperature *before* truncation; greedy rows report temperature 1.
  """
  chex.assert_rank([logits, keys, temperature], [2, 1, 1])
  logits = logits.astype(jnp.float32)
  greedy = temperature <= 0.0
  # The largest becomes exactly 0 before the division: at a low temperature the
  # log-probs would be differences of large, rounded numbers otherwise.
  shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
  tempered = shifted / jnp.where(greedy, 1.0, temperature)[:, None]
  # Both branches are decided at run time by the requests: changing them does
  # not recompile, and sorting 49k logits is paid only where it is asked for.
  wanted = ~greedy & ((top_k > 0) | (top_p < 1.0))
  candidates = jax.lax.cond(
    jnp.any(wanted), truncate, lambda x, k, p: x, tempered, top_k, top_p
  )
  candidates = jnp.where(wanted[:, None], candidates, tempered)

  def add_noise(x):
    draw = lambda key: jax.random.gumbel(key, x.shape[1:], jnp.float32)
    return jnp.where(greedy[:, None], x, x + jax.vmap(draw)(keys))

  candidates = jax.lax.cond(jnp.all(greedy), lambda x: x, add_noise, candidates)
  tokens = jnp.argmax(candidates, axis=-1).astype(jnp.int32)  # N
  chosen = jnp.take_along_axis(tempered, tokens[:, None], axis=-1)[:, 0]
  return tokens, chosen - jnp.log(jnp.sum(jnp.exp(tempered), axis=-1))
