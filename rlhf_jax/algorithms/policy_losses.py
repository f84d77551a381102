"""Policy losses: one number per token, to be weighted and summed.

One signature for all,

  loss(logprobs, old_logprobs, advantages, mask, *, segment_ids=None, ...)
    -> per-token loss, statistics

in either layout: `[N, T]` with one sequence per row, or packed rows `[R, L]`
whose `segment_ids` tell the sequences apart (a loss that looks at single tokens
has no use for them).  The statistics are metrics over the tokens of the call;
`metrics.merge` makes them those of a mini-batch.
"""

import chex
import jax
import jax.numpy as jnp

from rlhf_jax import masked
from rlhf_jax import metrics
from rlhf_jax import types

Array = types.Array

# exp(20) = 4.9e8 is a finite float32 whose product with an advantage still is.
MAX_LOG_RATIO = 20.0


def ppo(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  segment_ids: Array | None = None,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  dual_clip: float | None = None,
) -> tuple[Array, metrics.Metrics]:
  """The clipped surrogate, Schulman et al. (2017).

  With ratio = exp(log pi - log pi_old), at most e^+-20,

    L = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high))

  and, with `dual_clip` c (Ye et al. 2020), `min(L, -A c)` where A < 0, which
  bounds what a single token of large ratio can do.

  Args:
    logprobs: `[N, T]` or `[R, L]` float, of the policy; gradients go here only.
    old_logprobs: same shape, of the policy that the data is attributed to.
    advantages: same shape.
    mask: same shape, bool.
    segment_ids: same shape, not used by this loss.
    clip_low: distance of the ratio below 1.
    clip_high: distance of the ratio above 1.
    dual_clip: more than 1, or None for no second clip.

  Returns:
    The loss per token, at least float32, 0 at masked places; `actor/` metrics:
    the share of tokens that either clip stops, `ppo_kl` = mean(log pi_old -
    log pi), mean and largest ratio.

  Raises:
    ValueError: a clip is out of range.
  """
  chex.assert_equal_shape([logprobs, old_logprobs, advantages, mask])
  del segment_ids
  _check_clips(clip_low, clip_high, dual_clip)
  log_ratio, advantages, mask = _prepare(
    logprobs, old_logprobs, advantages, mask
  )
  ratio = jnp.exp(log_ratio)
  free = -advantages * ratio
  held = -advantages * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
  loss = jnp.maximum(free, held)
  beyond = jnp.zeros(mask.shape, bool)
  if dual_clip is not None:
    ceiling = -advantages * dual_clip
    beyond = (advantages < 0) & (loss > ceiling)
    loss = jnp.where(beyond, ceiling, loss)
  statistics = {
    'actor/pg_clipfrac': metrics.mean(held > free, mask),
    'actor/pg_clipfrac_lower': metrics.mean(beyond, mask),
    'actor/ppo_kl': metrics.mean(-log_ratio, mask),
    'actor/ratio_mean': metrics.mean(ratio, mask),
    'actor/ratio_max': metrics.max(ratio, mask),
  }
  return loss, statistics


def reinforce(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  segment_ids: Array | None = None,
) -> tuple[Array, metrics.Metrics]:
  """`-A log pi`: the score function, for one update per rollout.

  Williams (1992).  Nothing holds the policy near the one that sampled: with
  several updates per step use `ppo`.

  Args:
    logprobs: `[N, T]` or `[R, L]` float, of the policy; gradients go here only.
    old_logprobs: same shape, for the statistics only.
    advantages: same shape.
    mask: same shape, bool.
    segment_ids: same shape, not used by this loss.

  Returns:
    The loss per token, at least float32, 0 at masked places; `actor/ppo_kl`,
    mean and largest ratio.
  """
  chex.assert_equal_shape([logprobs, old_logprobs, advantages, mask])
  del segment_ids
  log_ratio, advantages, mask = _prepare(
    logprobs, old_logprobs, advantages, mask
  )
  loss = -advantages * masked.fill(logprobs, mask)
  ratio = jnp.exp(log_ratio)
  statistics = {
    'actor/ppo_kl': metrics.mean(-log_ratio, mask),
    'actor/ratio_mean': metrics.mean(ratio, mask),
    'actor/ratio_max': metrics.max(ratio, mask),
  }
  return loss, statistics


def loss(name: str):
  """The loss of that name.

  Raises:
    ValueError: there is none; the message lists the names.
  """
  if name not in LOSSES:
    raise ValueError(
      f"unknown policy loss '{name}': choose one of {sorted(LOSSES)}"
    )
  return LOSSES[name]


def _prepare(logprobs, old_logprobs, advantages, mask):
  """The bounded log-ratio and the advantages, 0 at masked places."""
  mask = jnp.asarray(mask, bool)
  old_logprobs = jax.lax.stop_gradient(masked.fill(old_logprobs, mask))
  advantages = jax.lax.stop_gradient(masked.fill(advantages, mask))
  log_ratio = masked.fill(logprobs, mask) - old_logprobs
  log_ratio = jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  return log_ratio, advantages, mask


def _check_clips(clip_low, clip_high, dual_clip):
  # Traced values (a schedule) cannot be looked at.
  low, high, dual = map(_host_number, (clip_low, clip_high, dual_clip))
  if low is not None and not 0.0 <= low <= 1.0:
    raise ValueError(f'clip_low is {clip_low}: it must be between 0 and 1')
  if high is not None and not high >= 0.0:
    raise ValueError(f'clip_high is {clip_high}: it must be at least 0')
  if dual is not None and not dual > 1.0:
    raise ValueError(
      f'dual_clip is {dual_clip}: it must be more than 1, or None for no second'
      ' clip'
    )


def _host_number(value):
  return value if isinstance(value, (int, float)) else None


LOSSES = {'ppo': ppo, 'reinforce': reinforce}
