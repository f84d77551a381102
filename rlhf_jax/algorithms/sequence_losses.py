"""Policy losses whose ratio is that of a whole sequence.

Same signature as in `policy_losses`.  Every token of a sequence carries the
loss of its sequence, so the aggregation 'seq-mean-token-mean' gives the papers'
mean over sequences.
"""

import jax
import jax.numpy as jnp

from rlhf_jax import masked
from rlhf_jax import metrics
from rlhf_jax import types
from rlhf_jax.algorithms import surrogate

Array = types.Array

# exp(10) = 22026: a mean over tokens so far from 0 is a broken sequence.
MAX_SEQUENCE_LOG_RATIO = 10.0


def gspo(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  segment_ids: Array | None = None,
  clip_low: float = 3e-4,
  clip_high: float = 4e-4,
) -> tuple[Array, metrics.Metrics]:
  """The clipped surrogate of sequences, Zheng et al. (2025).

  The ratio of a sequence i of n_i tokens is their geometric mean, at most e^10,

    s_i = exp(sum_t (log pi_it - log pi_old_it) / n_i)
    L_it = max(-A_it s_it, -A_it clip(s_it, 1 - clip_low, 1 + clip_high))

  with s_it = sg(s_i) pi_it / sg(pi_it): the value of s_i, but the gradient of
  one token (GSPO-token).  Where all tokens of a sequence have one advantage,
  sum_t L_it / n_i and its gradient are those of GSPO.

  Args:
    logprobs: `[N, T]` or `[R, L]` float, of the policy; gradients go here only.
    old_logprobs: same shape.
    advantages: same shape.
    mask: same shape, bool.
    segment_ids: same shape, the sequences of a packed row.
    clip_low: distance of s below 1; a mean over tokens moves far less than a
      token, and the default is the paper's.
    clip_high: distance of s above 1.

  Returns:
    The loss per token, at least float32, 0 at masked places; `actor/` metrics:
    the share of tokens whose sequence is clipped, `ppo_kl` of tokens, mean and
    largest ratio of sequences.

  Raises:
    ValueError: a clip is out of range.
  """
  surrogate.check_ratio_clips(clip_low, clip_high)
  log_ratio, advantages, mask = surrogate.prepare(
    logprobs, old_logprobs, advantages, mask
  )
  mean = masked.segment_mean(log_ratio, mask, segment_ids)
  own = log_ratio - jax.lax.stop_gradient(log_ratio)  # 0, with a gradient
  log_s = jax.lax.stop_gradient(mean) + own
  s = jnp.exp(jnp.minimum(log_s, MAX_SEQUENCE_LOG_RATIO))
  free = -advantages * s
  held = -advantages * jnp.clip(s, 1.0 - clip_low, 1.0 + clip_high)
  loss = jnp.maximum(free, held)
  return loss, surrogate.statistics(log_ratio, s, mask, held > free)


def geo_mean(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  segment_ids: Array | None = None,
  clip_low: float = 0.4,
  clip_high: float = 0.4,
) -> tuple[Array, metrics.Metrics]:
  """`-mean_t(A) exp(mean_t(held log-ratio))`, GMPO, Zhao et al. (2025).

  The log-ratio d = log pi - log pi_old of every token is clipped before the
  mean over its sequence, in the direction of its advantage:

    held = min(d, clip_high) where A > 0, max(d, -clip_low) where A < 0, else 0

  Args:
    logprobs: `[N, T]` or `[R, L]` float, of the policy; gradients go here only.
    old_logprobs: same shape.
    advantages: same shape; the paper has one per sequence, here it is the mean
      over the tokens.
    mask: same shape, bool.
    segment_ids: same shape, the sequences of a packed row.
    clip_low: of the log-ratio, in nats: the paper's 0.4 is a ratio of 0.67.
    clip_high: of the log-ratio, in nats: 0.4 is a ratio of 1.49.

  Returns:
    At every token the loss of its sequence, at least float32, 0 at masked
    places; `actor/` metrics: the share of tokens that the clip stops, `ppo_kl`
    of tokens, mean and largest ratio of sequences.

  Raises:
    ValueError: a clip is negative.
  """
  surrogate.check('clip_low', clip_low, at_least=0.0)
  surrogate.check('clip_high', clip_high, at_least=0.0)
  log_ratio, advantages, mask = surrogate.prepare(
    logprobs, old_logprobs, advantages, mask
  )
  good, bad = advantages > 0, advantages < 0
  stopped = (good & (log_ratio > clip_high)) | (bad & (log_ratio < -clip_low))
  bound = jnp.where(good, clip_high, -clip_low)
  held = jnp.where(stopped, bound, jnp.where(good | bad, log_ratio, 0.0))
  # Bounded after the mean: one token of many may be far off and still learn.
  mean = masked.segment_mean(held, mask, segment_ids)
  ratio = jnp.exp(jnp.minimum(mean, surrogate.MAX_LOG_RATIO))
  advantage = masked.segment_mean(advantages, mask, segment_ids)
  loss = jnp.where(mask, -advantage * ratio, 0.0)
  return loss, surrogate.statistics(log_ratio, ratio, mask, stopped)
