"""Policy filtration: train on the answers whose reward is most reliable.

PF-PPO, Shen and Zhang (2024).  A reward model is surest of what it finds very
good or very bad, so a step's trajectories are drawn again, with replacement and
with probabilities that depend on their scores:

  probabilities = filtration.weights(scores, valid, method='pow')
  indices = filtration.resample(key, probabilities, count)
  experience = filtration.take(experience, indices)

A trajectory moves whole, with its own advantage: filter after advantages are
computed, so that group statistics are those of all answers.
"""

import chex
import jax
import jax.numpy as jnp

from rlhf_jax import masked
from rlhf_jax import types

Array = types.Array
PyTree = types.PyTree

# Draws made at once; each needs noise for all N sequences.
BLOCK = 256


def weights(
  scores: Array, valid: Array, *, method: str, power: float = 2.0
) -> Array:
  """The probability of each sequence to be drawn.

  Before they are divided by their sum, weights are

    pow         |score|^power
    max_min     1 for the best and the worst of the step, 0 for others
    max_random  0.4 for the best, 0.1 for others

  All that share the best (worst) score count as such.  verl adds 1e-8 to each
  weight; here a weight of 0 is one that is never drawn, and if all scores are 0
  `pow` gives every valid sequence the same.

  Args:
    scores: `[N]` float; a sequence of which it is not finite gets 0.
    valid: `[N]` bool; a sequence of which it is not set gets 0.
    method: name in `METHODS`.
    power: of `pow`, positive; more prefers the extremes more.

  Returns:
    `[N]`, at least float32, of sum 1; all 0 if nothing is valid.

  Raises:
    ValueError: unknown method, or a power that is not positive and finite.
  """
  chex.assert_rank([scores, valid], 1)
  chex.assert_equal_shape([scores, valid])
  if method not in METHODS:
    raise ValueError(
      f"unknown filtration method '{method}': choose one of {sorted(METHODS)}"
    )
  if not 0 < power < float('inf'):
    raise ValueError(
      f'the power of filtration is {power}: it must be positive and finite'
    )
  valid = jnp.asarray(valid, bool) & jnp.isfinite(scores)
  scores = masked.fill(scores, valid)
  raw = jnp.where(valid, METHODS[method](scores, valid, power), 0.0)
  total = jnp.sum(raw)
  return raw / jnp.where(total > 0, total, 1.0)


def resample(key: Array, weights: Array, count: int) -> Array:
  """Draws sequences with replacement, with probabilities `weights / sum`.

  Draw i is the argmax of `log weights + Gumbel noise` with the noise of
  `fold_in(key, i)`: it does not depend on how many are drawn.

  Args:
    key: of this use, see `keys.key`.
    weights: `[N]` float; one that is not positive is never drawn, unless none
      is positive: then all are alike.
    count: how many to draw, at least 1.

  Returns:
    `[count]` int32, indices into the N sequences.

  Raises:
    ValueError: the count is less than 1, or there is no sequence.
  """
  chex.assert_rank(weights, 1)
  if count < 1:
    raise ValueError(f'cannot draw {count} sequences: ask for at least 1')
  if weights.shape[0] < 1:
    raise ValueError(f'cannot draw {count} of 0 sequences: give at least 1')
  weights = jnp.asarray(weights, jnp.float32)
  positive = weights > 0
  logits = jnp.log(jnp.where(positive, weights, 1.0))
  logits = jnp.where(positive, logits, -jnp.inf)
  logits = jnp.where(jnp.any(positive), logits, 0.0)

  def draw(i):
    noise = jax.random.gumbel(
      jax.random.fold_in(key, i), logits.shape, logits.dtype
    )
    return jnp.argmax(logits + noise).astype(jnp.int32)

  numbers = jnp.arange(count, dtype=jnp.int32)
  return jax.lax.map(draw, numbers, batch_size=BLOCK)


def take(tree: PyTree, indices: Array) -> PyTree:
  """Moves sequences whole: every leaf of `tree` at the same indices.

  Args:
    tree: leaves `[N, ...]`, like an `Experience`; those of NumPy stay so.
    indices: `[M]` int, as from `resample`.

  Returns:
    The same tree with leaves `[M, ...]`.
  """
  chex.assert_rank(indices, 1)
  chex.assert_equal_shape_prefix(jax.tree.leaves(tree), 1)

  return jax.tree.map(lambda leaf: leaf[indices], tree)


def _power(scores, valid, power):
  # Relative to the largest, which nothing depends on: no power overflows.
  size = jnp.abs(scores)
  largest = masked.max(size, valid)
  relative = size / jnp.where(largest > 0, largest, 1.0)
  return jnp.where(largest > 0, relative**power, 1.0)


def _max_min(scores, valid, power):
  del power
  best, worst = masked.max(scores, valid), masked.min(scores, valid)
  extreme = (scores == best) | (scores == worst)
  return jnp.where(extreme, 1.0, 0.0).astype(scores.dtype)


def _max_random(scores, valid, power):
  del power
  best = masked.max(scores, valid)
  return jnp.where(scores == best, 0.4, 0.1).astype(scores.dtype)


METHODS = {'pow': _power, 'max_min': _max_min, 'max_random': _max_random}
