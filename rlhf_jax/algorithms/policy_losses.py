"""Policy losses: one number per token, to be weighted and summed.

One signature for all,

  loss(logprobs, old_logprobs, advantages, mask, *, segment_ids=None, ...)
    -> per-token loss, statistics

in either layout: `[N, T]` with one sequence per row, or packed rows `[R, L]`
whose `segment_ids` tell the sequences apart (a loss that looks at single tokens
has no use for them).  The aggregation, and a correction for the sampler (see
`importance`), are factors on the loss of a token and never known here.  The
statistics are metrics over the tokens of the call; `metrics.merge` makes them
those of a mini-batch.

Throughout, ratio = pi / pi_old of the sampled token and A is its advantage;
`sg` is `stop_gradient`.  Losses of single tokens are here, those of whole
sequences in `sequence_losses`, those that treat tokens by covariance in
`covariance_losses`; `LOSSES` at the end names them all.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from rlhf_jax import masked
from rlhf_jax import metrics
from rlhf_jax import types
from rlhf_jax.algorithms import covariance_losses
from rlhf_jax.algorithms import sequence_losses
from rlhf_jax.algorithms import surrogate

Array = types.Array


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
  del segment_ids
  surrogate.check_ratio_clips(clip_low, clip_high)
  surrogate.check(
    'dual_clip', dual_clip, more_than=1.0, hint=', or None for no second clip'
  )
  log_ratio, advantages, mask = surrogate.prepare(
    logprobs, old_logprobs, advantages, mask
  )
  ratio = surrogate.ratio(log_ratio)
  free = -advantages * ratio
  held = -advantages * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
  loss = jnp.maximum(free, held)
  beyond = jnp.zeros(mask.shape, bool)
  if dual_clip is not None:
    ceiling = -advantages * dual_clip
    beyond = (advantages < 0) & (loss > ceiling)
    loss = jnp.where(beyond, ceiling, loss)
  statistics = surrogate.statistics(log_ratio, ratio, mask, held > free)
  statistics['actor/pg_clipfrac_lower'] = metrics.mean(beyond, mask)
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
  several updates per step use `ppo`.  GPG (Chu et al. 2025) is this loss too;
  what it adds is its advantage.

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
  del segment_ids
  log_ratio, advantages, mask = surrogate.prepare(
    logprobs, old_logprobs, advantages, mask
  )
  loss = -advantages * masked.fill(logprobs, mask)
  ratio = surrogate.ratio(log_ratio)
  return loss, surrogate.statistics(log_ratio, ratio, mask)


def cispo(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  segment_ids: Array | None = None,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
) -> tuple[Array, metrics.Metrics]:
  """`-sg(clip(ratio, 1 - clip_low, 1 + clip_high)) A log pi`.

  CISPO, MiniMax-M1 (2025): the importance weight is clipped, not the update,
  so every token keeps a gradient.  The paper has no lower clip: `clip_low` 1.

  Args:
    logprobs: see `ppo`, as the next four.
    old_logprobs: see `ppo`.
    advantages: see `ppo`.
    mask: see `ppo`.
    segment_ids: not used by this loss.
    clip_low: distance of the weight below 1.
    clip_high: distance of the weight above 1.

  Returns:
    As `ppo`; `actor/pg_clipfrac` is the share of clipped weights.

  Raises:
    ValueError: a clip is out of range.
  """
  del segment_ids
  surrogate.check_ratio_clips(clip_low, clip_high)
  log_ratio, advantages, mask = surrogate.prepare(
    logprobs, old_logprobs, advantages, mask
  )
  ratio = surrogate.ratio(log_ratio)
  weight = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
  loss = -jax.lax.stop_gradient(weight) * advantages
  loss *= masked.fill(logprobs, mask)
  return loss, surrogate.statistics(log_ratio, ratio, mask, ratio != weight)


def sapo(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  segment_ids: Array | None = None,
  tau_positive: float = 1.0,
  tau_negative: float = 1.05,
) -> tuple[Array, metrics.Metrics]:
  """`-A sigmoid(tau (ratio - 1)) 4 / tau`, Gao et al. (2025).

  A soft gate instead of a clip: at ratio 1 the slope is that of `-A ratio`, and
  it fades on both sides, the faster the larger tau.

  Args:
    logprobs: see `ppo`, as the next four.
    old_logprobs: see `ppo`.
    advantages: see `ppo`.
    mask: see `ppo`.
    segment_ids: not used by this loss.
    tau_positive: where A > 0.
    tau_negative: elsewhere; larger in the paper, as pushing a token down
      spreads its probability over the whole vocabulary.

  Returns:
    As `ppo`, without clip fractions.

  Raises:
    ValueError: a tau is not positive.
  """
  del segment_ids
  surrogate.check('tau_positive', tau_positive, more_than=0.0)
  surrogate.check('tau_negative', tau_negative, more_than=0.0)
  log_ratio, advantages, mask = surrogate.prepare(
    logprobs, old_logprobs, advantages, mask
  )
  ratio = surrogate.ratio(log_ratio)
  tau = jnp.where(advantages > 0, tau_positive, tau_negative)
  loss = -advantages * jax.nn.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
  return loss, surrogate.statistics(log_ratio, ratio, mask)


def dppo_tv(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  segment_ids: Array | None = None,
  clip_low: float = 0.15,
  clip_high: float = 0.15,
  max_ratio: float = 20.0,
) -> tuple[Array, metrics.Metrics]:
  """`-sg(min(ratio, max_ratio) 1[inside]) A log pi`, DPPO, Qi et al. (2026).

  The trust region is the total variation of the sampled token against all
  others, |pi - pi_old|, not its ratio.  A token is outside if it has moved in
  the direction of its advantage beyond the region:

    A > 0:  pi - pi_old > clip_high      else:  pi - pi_old < -clip_low

  Args:
    logprobs: see `ppo`, as the next four.
    old_logprobs: see `ppo`.
    advantages: see `ppo`.
    mask: see `ppo`.
    segment_ids: not used by this loss.
    clip_low: probability, 0 to 1.
    clip_high: probability, 0 to 1.
    max_ratio: truncation of the importance weight, positive.

  Returns:
    As `ppo`; `actor/pg_clipfrac` is the share of tokens outside,
    `actor/pg_clipfrac_lower` of those inside with a truncated weight.

  Raises:
    ValueError: a setting is out of range.
  """
  del segment_ids
  surrogate.check('clip_low', clip_low, at_least=0.0, at_most=1.0)
  surrogate.check('clip_high', clip_high, at_least=0.0, at_most=1.0)
  return _dppo(
    logprobs, old_logprobs, advantages, mask, max_ratio, clip_low, clip_high,
    divergence=lambda new, old: jnp.abs(jnp.exp(new) - jnp.exp(old)),
  )  # fmt: skip


def dppo_kl(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  segment_ids: Array | None = None,
  clip_low: float = 0.05,
  clip_high: float = 0.05,
  max_ratio: float = 20.0,
) -> tuple[Array, metrics.Metrics]:
  """`dppo_tv` with the KL of the sampled token against all others.

    KL = pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi))

  A token is outside if KL exceeds `clip_high` where A > 0 and pi > pi_old, or
  `clip_low` elsewhere where pi < pi_old.

  Args:
    logprobs: see `ppo`, as the next four.
    old_logprobs: see `ppo`.
    advantages: see `ppo`.
    mask: see `ppo`.
    segment_ids: not used by this loss.
    clip_low: nats.
    clip_high: nats.
    max_ratio: truncation of the importance weight, positive.

  Returns:
    As `dppo_tv`.

  Raises:
    ValueError: a setting is out of range.
  """
  del segment_ids
  surrogate.check('clip_low', clip_low, at_least=0.0)
  surrogate.check('clip_high', clip_high, at_least=0.0)
  return _dppo(
    logprobs, old_logprobs, advantages, mask, max_ratio, clip_low, clip_high,
    divergence=_binary_kl,
  )  # fmt: skip


def _dppo(
  logprobs, old_logprobs, advantages, mask, max_ratio, clip_low, clip_high, *,
  divergence,
):  # fmt: skip
  surrogate.check('max_ratio', max_ratio, more_than=0.0)
  log_ratio, advantages, mask = surrogate.prepare(
    logprobs, old_logprobs, advantages, mask
  )
  logprobs = masked.fill(logprobs, mask)
  distance = divergence(logprobs, masked.fill(old_logprobs, mask))
  outside = jnp.where(
    advantages > 0,
    (log_ratio > 0) & (distance > clip_high),
    (log_ratio < 0) & (distance > clip_low),
  )
  ratio = surrogate.ratio(log_ratio)
  weight = jnp.where(outside, 0.0, jnp.minimum(ratio, max_ratio))
  loss = -jax.lax.stop_gradient(weight) * advantages * logprobs
  statistics = surrogate.statistics(log_ratio, ratio, mask, outside)
  statistics['actor/pg_clipfrac_lower'] = metrics.mean(
    ~outside & (ratio > max_ratio), mask
  )
  return loss, statistics


def _binary_kl(logprobs, old_logprobs):
  """KL(old, new) of "this token or another", nats; `[...]`."""
  # 1 - p by expm1: float32 has no probability between 1 - 6e-8 and 1.
  rest = lambda x: jnp.maximum(-jnp.expm1(x), 1e-8)
  old = jnp.exp(old_logprobs)
  others = rest(old_logprobs)
  return old * (old_logprobs - logprobs) + others * (
    jnp.log(others) - jnp.log(rest(logprobs))
  )


def dro(
  logprobs: Array,
  old_logprobs: Array,
  advantages: Array,
  mask: Array,
  *,
  segment_ids: Array | None = None,
  beta: float = 0.1,
) -> tuple[Array, metrics.Metrics]:
  """`-(A log pi - beta (log pi - log pi_old)^2 / 2)`.

  The policy's half of DRO, Richemond et al. (2024): its slope, `beta log(pi /
  pi_old) - A`, vanishes where the log-ratio is A / beta, and a squared distance
  takes the place of clip and importance weight.

  Args:
    logprobs: see `ppo`, as the next four.
    old_logprobs: see `ppo`.
    advantages: see `ppo`.
    mask: see `ppo`.
    segment_ids: not used by this loss.
    beta: advantage per nat, at least 0; 0 is `reinforce`.

  Returns:
    As `ppo`, without clip fractions.

  Raises:
    ValueError: beta is negative.
  """
  del segment_ids
  surrogate.check('beta', beta, at_least=0.0)
  log_ratio, advantages, mask = surrogate.prepare(
    logprobs, old_logprobs, advantages, mask
  )
  # The distance is not bounded: a bound would end its pull where it is largest.
  penalty = 0.5 * beta * jnp.square(log_ratio)
  loss = -(advantages * masked.fill(logprobs, mask) - penalty)
  ratio = surrogate.ratio(log_ratio)
  return loss, surrogate.statistics(log_ratio, ratio, mask)


def loss(name: str) -> Callable[..., tuple[Array, metrics.Metrics]]:
  """The loss of that name.

  Raises:
    ValueError: there is none; the message lists the names.
  """
  if name not in LOSSES:
    raise ValueError(
      f"unknown policy loss '{name}': choose one of {sorted(LOSSES)}"
    )
  return LOSSES[name]


LOSSES = {
  'ppo': ppo,
  'reinforce': reinforce,
  'gpg': reinforce,
  'cispo': cispo,
  'sapo': sapo,
  'dppo_tv': dppo_tv,
  'dppo_kl': dppo_kl,
  'dro': dro,
  'gspo': sequence_losses.gspo,
  'geo_mean': sequence_losses.geo_mean,
  'clip_cov': covariance_losses.clip_cov,
  'kl_cov': covariance_losses.kl_cov,
}

# Losses that need `selected`, and what selects over the whole mini-batch.
SELECTIONS = {
  'clip_cov': covariance_losses.clip_cov_selection,
  'kl_cov': covariance_losses.kl_cov_selection,
}

# Papers that fix the aggregation: the mean over sequences of their mean.
PAPER_AGGREGATION = {
  'gspo': 'seq-mean-token-mean',
  'geo_mean': 'seq-mean-token-mean',
  'sapo': 'seq-mean-token-mean',
}
