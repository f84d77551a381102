"""Policy losses that treat the tokens of highest covariance apart.

"The Entropy Mechanism of Reinforcement Learning", Cui et al. (2025): entropy
falls with the covariance of log-prob and advantage, and few tokens carry most
of it,

  cov = (A - mean A) (log pi - mean log pi).

Which tokens those are depends on all tokens of the mini-batch under the current
policy.  So the selection is a function of its own, over the sequence layout of
the whole mini-batch, and the losses, with the signature of `policy_losses`,
take the tokens it `selected`: they do not depend on how a mini-batch is cut.
"""

import chex
import jax
import jax.numpy as jnp

from rlhf_jax import masked
from rlhf_jax import metrics
from rlhf_jax import types
from rlhf_jax.algorithms import surrogate

Array = types.Array


def clip_cov(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  selected: Array,
  segment_ids: Array | None = None,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
) -> tuple[Array, metrics.Metrics]:
  """The loss of `policy_losses.ppo`, 0 at the selected tokens (Clip-Cov).

  Args:
    logprobs: `[N, T]` or `[R, L]` float, of the policy; gradients go here only.
    old_logprobs: same shape.
    advantages: same shape.
    mask: same shape, bool.
    selected: same shape, bool, from `clip_cov_selection`.
    segment_ids: same shape, not used by this loss.
    clip_low: distance of the ratio below 1.
    clip_high: distance of the ratio above 1.

  Returns:
    The loss per token, at least float32, 0 at masked places; `actor/` metrics
    as `policy_losses.ppo`, and `actor/pg_covfrac`, the share of selected
    tokens.

  Raises:
    ValueError: a clip is out of range.
  """
  del segment_ids
  chex.assert_equal_shape([logprobs, selected])
  log_ratio, advantages, mask = surrogate.prepare(
    logprobs, old_logprobs, advantages, mask
  )
  loss, stopped = _clipped(log_ratio, advantages, clip_low, clip_high)
  selected = jnp.asarray(selected, bool) & mask
  ratio = surrogate.ratio(log_ratio)
  statistics = surrogate.statistics(log_ratio, ratio, mask, stopped)
  statistics['actor/pg_covfrac'] = metrics.mean(selected, mask)
  return jnp.where(selected, 0.0, loss), statistics


def kl_cov(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  selected: Array,
  segment_ids: Array | None = None,
  coef: float = 1.0,
) -> tuple[Array, metrics.Metrics]:
  """`-A ratio`, plus `coef |log pi - log pi_old|` where selected (KL-Cov).

  Args:
    logprobs: `[N, T]` or `[R, L]` float, of the policy; gradients go here only.
    old_logprobs: same shape.
    advantages: same shape.
    mask: same shape, bool.
    selected: same shape, bool, from `kl_cov_selection`.
    segment_ids: same shape, not used by this loss.
    coef: loss per nat, at least 0.

  Returns:
    The loss per token, at least float32, 0 at masked places; `actor/` metrics:
    `ppo_kl` as everywhere, `ppo_kl_abs` = mean |log pi - log pi_old| (verl
    calls that `ppo_kl` for this loss), mean and largest ratio, and
    `pg_covfrac`, the share of selected tokens.

  Raises:
    ValueError: the coefficient is negative.
  """
  del segment_ids
  chex.assert_equal_shape([logprobs, selected])
  surrogate.check('coef', coef, at_least=0.0)
  log_ratio, advantages, mask = surrogate.prepare(
    logprobs, old_logprobs, advantages, mask
  )
  ratio = surrogate.ratio(log_ratio)
  selected = jnp.asarray(selected, bool) & mask
  # `jnp.abs` has slope 1 at 0, where every token stands before the first
  # update: nothing is to be pulled there.
  distance = log_ratio * jax.lax.stop_gradient(jnp.sign(log_ratio))
  loss = -advantages * ratio + jnp.where(selected, coef * distance, 0.0)
  statistics = surrogate.statistics(log_ratio, ratio, mask)
  statistics['actor/ppo_kl_abs'] = metrics.mean(distance, mask)
  statistics['actor/pg_covfrac'] = metrics.mean(selected, mask)
  return loss, statistics


def clip_cov_selection(
  key: Array,
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  share: float = 2e-4,
  low: float = 1.0,
  high: float = 5.0,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  index: Array | None = None,
) -> Array:
  """Random tokens among those with low < cov < high that PPO does not clip.

  max(1, floor(share n)) of the n tokens of the mini-batch, or all that are
  eligible if they are fewer.  The draw of a token is addressed by its sequence
  and position, so padding, packing and order do not change it.

  Args:
    key: addressed by the update.
    logprobs: `[N, T]` float, of the policy before the update.
    old_logprobs: `[N, T]` float.
    advantages: `[N, T]` float.
    mask: `[N, T]` bool.
    share: of all tokens, more than 0 and at most 1.
    low: least covariance, exclusive.
    high: largest covariance, exclusive.
    clip_low: as in `clip_cov`.
    clip_high: as in `clip_cov`.
    index: `[N]` int32, the number that addresses a sequence; by default its
      row.

  Returns:
    `[N, T]` bool.

  Raises:
    ValueError: a setting is out of range.
  """
  _check_share(share)
  surrogate.check('low', low, at_most=high, hint=' (high)')
  log_ratio, advantages, mask = surrogate.prepare(
    logprobs, old_logprobs, advantages, mask
  )
  _, stopped = _clipped(log_ratio, advantages, clip_low, clip_high)
  cov = _covariance(logprobs, advantages, mask)
  eligible = mask & ~stopped & (low < cov) & (cov < high)
  if index is None:
    index = jnp.arange(mask.shape[0])
  chex.assert_shape(index, mask.shape[:1])
  noise = _noise(key, jnp.asarray(index), mask.shape[1])
  return _largest(noise, eligible, _number(share, mask))


def kl_cov_selection(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  share: float = 2e-4,
) -> Array:
  """The max(1, floor(share n)) of the n tokens with the largest covariance.

  Args:
    logprobs: `[N, T]` float, of the policy before the update.
    old_logprobs: `[N, T]` float, not used: the same arguments as the losses.
    advantages: `[N, T]` float.
    mask: `[N, T]` bool.
    share: of all tokens, more than 0 and at most 1.

  Returns:
    `[N, T]` bool; of equal covariances the first in the layout.

  Raises:
    ValueError: the share is out of range.
  """
  _check_share(share)
  _, advantages, mask = surrogate.prepare(
    logprobs, old_logprobs, advantages, mask
  )
  cov = _covariance(logprobs, advantages, mask)
  return _largest(cov, mask, _number(share, mask))


def _clipped(log_ratio, advantages, clip_low, clip_high):
  """PPO's loss per token, and where the clip stops it."""
  surrogate.check_ratio_clips(clip_low, clip_high)
  ratio = surrogate.ratio(log_ratio)
  free = -advantages * ratio
  held = -advantages * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
  return jnp.maximum(free, held), held > free


def _covariance(logprobs, advantages, mask):
  """Per token, `(A - mean A) (log pi - mean log pi)`; 0 at masked places."""
  logprobs = jax.lax.stop_gradient(masked.fill(logprobs, mask))
  advantages, _ = masked.centre(advantages, mask)
  logprobs, _ = masked.centre(logprobs, mask)
  return advantages * logprobs


def _noise(key, index, width):
  """Uniform numbers `[N, T]`, addressed by sequence and position."""

  def draw(n, t):
    place = jax.random.fold_in(jax.random.fold_in(key, n), t)
    # One dtype, so that it is one draw: float64 takes other bits.
    return jax.random.uniform(place, dtype=jnp.float32)

  positions = jnp.arange(width)
  return jax.vmap(jax.vmap(draw, (None, 0)), (0, None))(index, positions)


def _number(share, mask):
  """`max(1, floor(share n))`, int32 `[]`."""
  n = masked.count(mask).astype(jnp.float32)
  return jnp.maximum(jnp.floor(share * n).astype(jnp.int32), 1)


def _largest(values, eligible, number):
  """The `number` eligible places of the largest values, the first of equals."""
  flat = jnp.where(eligible, values, -jnp.inf).ravel()
  order = jnp.argsort(flat, descending=True, stable=True)
  places = jnp.arange(flat.size, dtype=order.dtype)
  rank = jnp.zeros_like(order).at[order].set(places, unique_indices=True)
  return eligible & (rank < number).reshape(eligible.shape)


def _check_share(share):
  surrogate.check('share', share, more_than=0.0, at_most=1.0)
