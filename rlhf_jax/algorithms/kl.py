"""Divergence from a reference policy: estimators, and what it costs.

The estimators see only the tokens that were sampled from the policy.  With
d = log pi_ref - log pi, "Approximating KL divergence" (Schulman 2020) names

  k1 = -d                  unbiased, high variance, may be negative
  k2 = d^2 / 2             biased, its gradient is that of KL(pi, pi_ref)
  k3 = exp(d) - d - 1      unbiased, never negative

A name with a `+` has the value of its estimator and the gradient of k2.  `full`
is no estimator: it sums over the vocabulary.
"""

from collections.abc import Callable
import functools
import math

import chex
from flax import struct
import jax
import jax.numpy as jnp

from rlhf_jax import masked
from rlhf_jax import metrics
from rlhf_jax import types

Array = types.Array

# exp(5) = 148: a token 148 times likelier under the reference pulls as hard as
# any; up to there k3 is exact.
BOUND = 5.0

# Ziegler et al. (2019), section 2.2: a step moves the coefficient by 20 % at
# most, in proportion to the sequences seen per horizon.
MAX_ERROR = 0.2


def _log_ratio(logprobs, reference_logprobs, mask):
  """d = log pi_ref - log pi, 0 at masked places whatever stands there."""
  chex.assert_equal_shape([logprobs, reference_logprobs])
  if mask is None:
    mask = jnp.ones(logprobs.shape, bool)
  return masked.fill(reference_logprobs, mask) - masked.fill(logprobs, mask)


def k1(
  logprobs: Array, reference_logprobs: Array, *, mask: Array | None = None
) -> Array:
  """`log pi - log pi_ref` per token, in nats.

  For rewards and reports only: as a loss its gradient is the score function,
  whose mean is zero (see `loss_estimator`).

  Args:
    logprobs: `[...]` float, of the policy.
    reference_logprobs: `[...]` float.
    mask: `[...]` bool; the result and gradients are 0 where it is not set.

  Returns:
    `[...]`, at least float32.
  """
  return -_log_ratio(logprobs, reference_logprobs, mask)


def k2(
  logprobs: Array, reference_logprobs: Array, *, mask: Array | None = None
) -> Array:
  """`(log pi - log pi_ref)^2 / 2` per token; arguments as in `k1`."""
  return 0.5 * jnp.square(_log_ratio(logprobs, reference_logprobs, mask))


def k3(
  logprobs: Array,
  reference_logprobs: Array,
  *,
  mask: Array | None = None,
  bound: float = BOUND,
) -> Array:
  """`exp(d) - d - 1` up to `|d| = bound`, then on along the tangent.

  With c = clip(d, -bound, bound) the value is
  `exp(c) - 1 - c + (d - c) (exp(c) - 1)`: finite for every d, and its gradient
  with respect to `logprobs`, `1 - exp(c)`, vanishes only where the policies
  agree.

  Args:
    logprobs: `[...]` float, of the policy.
    reference_logprobs: `[...]` float.
    mask: `[...]` bool; the result and gradients are 0 where it is not set.
    bound: in nats, positive.

  Returns:
    `[...]`, at least float32, never negative beyond rounding.
  """
  d = _log_ratio(logprobs, reference_logprobs, mask)
  c = jnp.clip(d, -bound, bound)
  # Whatever derivative clip has at the bound itself, the two terms that hold
  # it cancel: the slope there is exp(c) - 1 from both sides.
  return (jnp.expm1(c) - c) + (d - c) * jnp.expm1(c)


def low_var_kl_verl(
  logprobs: Array, reference_logprobs: Array, *, mask: Array | None = None
) -> Array:
  """verl's k3: `clip(exp(d) - d - 1, -10, 10)` with d clipped to +-20.

  Its gradient is exactly 0 for d > 2.61 and d < -11.0, where the policies
  differ most; kept for comparison with its runs.
  """
  d = jnp.clip(_log_ratio(logprobs, reference_logprobs, mask), -20.0, 20.0)
  return jnp.clip(jnp.expm1(d) - d, -10.0, 10.0)


def absolute(
  logprobs: Array, reference_logprobs: Array, *, mask: Array | None = None
) -> Array:
  """`|log pi - log pi_ref|` per token; arguments as in `k1`."""
  return jnp.abs(_log_ratio(logprobs, reference_logprobs, mask))


def straight_through(function: Callable[..., Array]) -> Callable[..., Array]:
  """The same values with the gradient of `k2`, that of KL(pi, pi_ref).

    k2 + stop_gradient(value - k2)

  The mean over samples of that gradient, -d grad log pi, is the gradient of
  the divergence itself, whatever the estimator that is reported.
  """

  @functools.wraps(function)
  def estimator_(logprobs, reference_logprobs, *, mask=None):
    value = function(logprobs, reference_logprobs, mask=mask)
    slope = k2(logprobs, reference_logprobs, mask=mask)
    return slope + jax.lax.stop_gradient(value - slope)

  return estimator_


def full(logits: Array, reference_logits: Array) -> Array:
  """`sum_v pi(v) (log pi(v) - log pi_ref(v))`: the divergence itself, nats.

  Exact value and gradient, `d / d logit_v = pi(v) (log pi(v) - log pi_ref(v) -
  KL)`; a token that the policy never chooses adds nothing.  Training goes
  through `heads.score`, which calls this on chunks and never holds the logits
  of a batch.

  Args:
    logits: `[..., V]` float, of the policy, over the temperature.
    reference_logits: `[..., V]` float, likewise.

  Returns:
    `[...]`, at least float32.
  """
  chex.assert_equal_shape([logits, reference_logits])
  wide = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))
  logprobs = jax.nn.log_softmax(wide(logits))
  reference_logprobs = jax.nn.log_softmax(wide(reference_logits))
  probs = jnp.exp(logprobs)
  gap = jnp.where(probs > 0, logprobs - reference_logprobs, 0.0)
  return jnp.sum(probs * gap, axis=-1)


def beyond_bound(
  logprobs: Array,
  reference_logprobs: Array,
  mask: Array,
  *,
  bound: float = BOUND,
) -> metrics.Mean:
  """The share of tokens whose |d| exceeds the bound, where `k3` is linear."""
  chex.assert_equal_shape([logprobs, reference_logprobs, mask])
  d = _log_ratio(logprobs, reference_logprobs, mask)
  return metrics.mean(jnp.abs(d) > bound, mask)


def estimator(name: str) -> Callable[..., Array]:
  """The estimator of that name, for KL in the reward and for reports.

  Raises:
    ValueError: there is none; the message lists the names.
  """
  if name not in ESTIMATORS:
    raise ValueError(
      f"unknown KL estimator '{name}': choose one of"
      f" {sorted([*ESTIMATORS, 'full'])} ('full' needs logits, see `full`)"
    )
  return ESTIMATORS[name]


def check(name: str, *, loss: bool) -> None:
  """Refuses a name that is none, or that cannot be a loss.

  Args:
    name: of an estimator, or 'full'.
    loss: it acts in the loss and not in the reward.

  Raises:
    ValueError: says why, and what to use.
  """
  if name == 'full':
    return
  estimator(name)
  if loss and name in NOT_LOSSES:
    raise ValueError(
      f"KL estimator '{name}' cannot be a loss: the mean of its gradient is not"
      " that of a divergence; use 'k2', 'k3' or 'full', or"
      f" '{name}+', which has the value of '{name}' and the gradient of 'k2'"
    )


@struct.dataclass
class Controller:
  """The KL coefficient and how it moves; host numbers, saved as JSON."""

  coef: float  # nats of reward, or of loss, per nat of divergence
  # Wanted divergence in nats per token, and in how many sequences to get there.
  target: float = 0.1
  horizon: float = 10_000.0
  kind: str = struct.field(pytree_node=False, default='fixed')


def fixed(coef: float) -> Controller:
  """A coefficient that stays as it is.

  Raises:
    ValueError: the coefficient is negative or not finite.
  """
  return Controller(coef=_checked('coef', coef, 0.0), kind='fixed')


def adaptive(coef: float, *, target: float, horizon: float) -> Controller:
  """A coefficient that steers the measured divergence to a target.

  Args:
    coef: the first coefficient, positive: from 0 no factor leads away.
    target: nats per token, in the units of the measured divergence; positive.
    horizon: sequences, positive.

  Raises:
    ValueError: a number is not positive and finite.
  """
  tiny = math.ulp(0.0)
  return Controller(
    coef=_checked('coef', coef, tiny),
    target=_checked('target', target, tiny),
    horizon=_checked('horizon', horizon, tiny),
    kind='adaptive',
  )


def update(
  controller: Controller, measured_kl: float, num_sequences: int
) -> Controller:
  """`coef (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon)`, Ziegler 2019.

  More sequences than the horizon count as the horizon (verl's coefficient turns
  negative from five horizons on), and a divergence that is not finite changes
  nothing: one bad step must not poison the coefficient of a run.

  Args:
    controller: as it was during the step.
    measured_kl: mean divergence of the step, nats per token.
    num_sequences: sequences of the step.

  Returns:
    The controller of the next step; the same if it is fixed.
  """
  measured_kl = float(measured_kl)
  if controller.kind == 'fixed' or not math.isfinite(measured_kl):
    return controller
  error = measured_kl / controller.target - 1.0
  error = min(max(error, -MAX_ERROR), MAX_ERROR)
  share = min(num_sequences / controller.horizon, 1.0)
  return controller.replace(coef=controller.coef * (1.0 + error * share))


def _checked(name, value, least):
  if not (math.isfinite(value) and value >= least):
    wanted = 'positive' if least else 'at least 0'
    raise ValueError(f'KL {name} is {value}: it must be finite and {wanted}')
  return float(value)


_PLAIN = {
  'k1': k1,
  'k2': k2,
  'k3': k3,
  # verl's names.
  'kl': k1,
  'abs': absolute,
  'mse': k2,
  'low_var_kl': k3,
  'low_var_kl_verl': low_var_kl_verl,
}

ESTIMATORS = _PLAIN | {
  f'{name}+': straight_through(function) for name, function in _PLAIN.items()
}

NOT_LOSSES = frozenset({'k1', 'kl', 'abs'})
