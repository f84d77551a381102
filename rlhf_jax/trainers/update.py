"""Losses of whole roles, and the two programs that apply them.

A mini-batch is one update.  It is cut into micro-batches of one shape:

  grads = 0;  for each micro-batch: grads = accumulate(params, grads, batch)
  state = apply(state, grads)

Every loss is `sum(loss * weights)` with weights made from the whole mini-batch,
so the gradient does not depend on how it was cut.
"""

from collections.abc import Callable, Iterable
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlhf_jax import masked
from rlhf_jax import metrics
from rlhf_jax import tree
from rlhf_jax import types
from rlhf_jax.algorithms import aggregation
from rlhf_jax.algorithms import kl
from rlhf_jax.algorithms import value_losses
from rlhf_jax.sharding import rules
from rlhf_jax.trainers import state as state_lib


def actor_loss(
  params: types.PyTree,
  batch: types.TokenBatch,
  coefs: dict[str, types.PyTree],
  *,
  score: Callable[..., types.Scores],
  policy_loss: Callable[..., tuple[types.Array, metrics.Metrics]],
  kl_estimator: Callable[..., types.Array] | None,
  on_policy: bool,
  with_entropy_gradient: bool,
  with_reference: bool,
  reuse: bool = False,
  importance: Callable[..., types.Array] | None = None,
) -> tuple[types.Array, metrics.Metrics]:
  """`sum w (rho L_policy - c_H H + c_KL KL)`, rho = 1 without importance.

  Args:
    params: of the actor.
    batch: token layout.
    coefs: 'entropy' and 'kl', float32 scalars; 'reference_head', see
      `heads.head_params`, for the exact KL.
    score: `heads.score` with its keywords bound.
    policy_loss: see `policy_losses`.
    kl_estimator: see `kl`; None is the exact KL, from `reference_states`.
    on_policy: the step makes this one update, so the old log-probs are the new
      ones without their gradient; `batch.old_logprobs` holds the sampler's, to
      measure the gap.
    with_entropy_gradient: False where the coefficient is 0: entropy is still
      reported, but its gradient would cost two passes over the logits.
    with_reference: whether `batch.reference_logprobs` holds anything.
    reuse: `batch.old_logprobs` are the sampler's; the gap that is measured
      grows by what the updates of the step have moved.
    importance: `importance(logprobs, old_logprobs, mask)`, for losses without a
      ratio of their own whose old log-probs are the sampler's; by default
      `batch.importance` where there is one.

  Returns:
    The loss and its statistics.
  """
  rows = batch.rows
  mask = rows.mask
  exact = with_reference and kl_estimator is None
  wanted = dict(entropy=True)
  if exact:
    wanted['reference'] = (coefs['reference_head'], batch.reference_states)
  scores = score(params, rows=rows, **wanted)
  old = scores.logprobs if on_policy else batch.old_logprobs
  old = jax.lax.stop_gradient(old)
  extra = {} if batch.selected is None else dict(selected=batch.selected)
  losses, statistics = policy_loss(
    scores.logprobs,
    old,
    batch.advantages,
    mask,
    segment_ids=rows.segment_ids,
    **extra,
  )
  if importance is not None:
    losses *= importance(scores.logprobs, old, mask)
  elif batch.importance is not None:
    losses *= batch.importance
  if on_policy or reuse:
    statistics |= sampler_gap(scores.logprobs, batch.old_logprobs, mask)
  policy = aggregation.total(losses, batch.weights, mask)
  loss = policy
  if with_entropy_gradient:
    entropy = aggregation.total(scores.entropy, batch.weights, mask)
    loss -= coefs['entropy'] * entropy
  statistics |= {
    'actor/pg_loss': metrics.sum(policy),
    'actor/entropy': metrics.mean(scores.entropy, mask),
  }
  if with_reference:
    reference = batch.reference_logprobs
    divergence = scores.divergence
    if not exact:
      divergence = kl_estimator(scores.logprobs, reference, mask=mask)
    penalty = aggregation.total(divergence, batch.weights, mask)
    loss += coefs['kl'] * penalty
    # What is reported is exact where that is known, else the best estimate.
    reported = divergence
    if not exact:
      reported = kl.k3(scores.logprobs, reference, mask=mask)
    statistics |= {
      'actor/kl_loss': metrics.sum(penalty),
      'kl/reference': metrics.mean(reported, mask),
      'kl/k1': metrics.mean(kl.k1(scores.logprobs, reference, mask=mask), mask),
      'kl/beyond_bound': kl.beyond_bound(scores.logprobs, reference, mask),
    }
  return loss, statistics | {'actor/loss': metrics.sum(loss)}


def sampler_gap(
  logprobs: types.Array, sampler_logprobs: types.Array, mask: types.Array
) -> metrics.Metrics:
  """How far the sampler's probabilities are from the trainer's."""
  probability = lambda x: jnp.exp(masked.fill(x, mask))
  gap = jnp.abs(probability(logprobs) - probability(sampler_logprobs))
  return {
    'training/rollout_probs_diff_mean': metrics.mean(gap, mask),
    'training/rollout_probs_diff_max': metrics.max(gap, mask),
  }


def critic_loss(
  params: types.PyTree,
  batch: types.TokenBatch,
  coefs: dict[str, types.Array],
  *,
  score: Callable[..., types.Scores],
  clip: float | None,
) -> tuple[types.Array, metrics.Metrics]:
  """`sum w L_value`, see `value_losses.clipped`."""
  del coefs
  mask = batch.rows.mask
  values = score(params, rows=batch.rows).values
  losses, statistics = value_losses.clipped(
    values, batch.old_values, batch.returns, mask, clip=clip
  )
  loss = aggregation.total(losses, batch.weights, mask)
  return loss, statistics | {'critic/vf_loss': metrics.sum(loss)}


def supervised_loss(
  params: types.PyTree,
  batch: types.TokenBatch,
  coefs: dict[str, types.Array],
  *,
  score: Callable[..., types.Scores],
) -> tuple[types.Array, metrics.Metrics]:
  """`-sum w log pi`: cross-entropy of the response tokens, nats."""
  del coefs
  mask = batch.rows.mask
  logprobs = score(params, rows=batch.rows).logprobs
  loss = -aggregation.total(logprobs, batch.weights, mask)
  return loss, {
    'sft/loss': metrics.sum(loss),
    'sft/token_nll': metrics.mean(-logprobs, mask),
  }


def accumulate_program(loss: Callable[..., tuple], param_shardings) -> Callable:
  """`accumulate(params, grads, batch, coefs) -> grads, statistics`, jitted.

  Gradients are added in the dtype of `grads`, see `zeros_program`.

  Args:
    loss: `loss(params, batch, coefs) -> loss, statistics`.
    param_shardings: of the parameters; gradients have the same.
  """

  def accumulate(params, grads, batch, coefs):
    (_, statistics), new = jax.value_and_grad(loss, has_aux=True)(
      params, batch, coefs
    )
    return tree.add(grads, new), statistics

  return jax.jit(
    accumulate, donate_argnums=1, out_shardings=(param_shardings, None)
  )


def apply_program(
  optimizer: optax.GradientTransformation,
  learning_rate: Callable[[types.Array], types.Array],
  state_shardings: state_lib.TrainState,
  max_grad_norm: float,
) -> Callable:
  """`apply(state, grads) -> state, statistics`, jitted.

  An update whose gradient is not finite leaves parameters and optimiser as
  they are and is counted.

  Args:
    optimizer: see `optim.adamw`.
    learning_rate: its schedule, for the statistics.
    state_shardings: of the train state, in device memory.
    max_grad_norm: what the optimiser clips to, for the statistics.
  """

  def apply(state, grads):
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
    norm = tree.global_norm(grads)
    finite = jnp.isfinite(norm)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    # Not `cond`: across its border every cast copy is written to memory.
    new = jax.tree.map(
      lambda new, old: jnp.where(finite, new, old),
      state.replace(
        params=params, opt_state=opt_state, updates=state.updates + 1
      ),
      state.replace(skipped=state.skipped + 1),
    )
    statistics = {
      'grad_norm': metrics.mean(norm, finite),
      'grad_norm_clipped': metrics.mean(
        jnp.minimum(norm, max_grad_norm or jnp.inf), finite
      ),
      'lr': metrics.mean(learning_rate(state.updates)),
      'skipped': metrics.sum(~finite),
    }
    return new, statistics

  return jax.jit(apply, donate_argnums=0, out_shardings=(state_shardings, None))


def zeros_program(param_shardings, dtype: jnp.dtype | None = None) -> Callable:
  """`zeros(params)`: a gradient of zeros in the shards of the parameters.

  Args:
    param_shardings: of the parameters.
    dtype: in which gradients are added; None is that of each parameter.
  """
  return jax.jit(
    functools.partial(tree.zeros_like, dtype=dtype),
    out_shardings=param_shardings,
  )


def update(
  state: state_lib.TrainState,
  batches: Iterable[types.TokenBatch],
  coefs: dict[str, types.PyTree],
  *,
  programs: dict[str, Callable],
  prefix: str,
) -> tuple[state_lib.TrainState, metrics.Metrics]:
  """One mini-batch: all its micro-batches, then one optimiser step.

  Moments that live in host memory are on the devices for that step only.

  Args:
    state: is donated; its parameters are on the devices.
    batches: micro-batches of one shape, on the mesh.
    coefs: what else the loss reads: numbers that may change from step to step,
      and parameters that it does not train.
    programs: 'zeros', 'accumulate' and 'apply'.
    prefix: 'actor' or 'critic', for the optimiser's statistics.

  Raises:
    jax.errors.JaxRuntimeError: `out_of_memory` in a micro-batch; the state is
      whole, and smaller micro-batches give the same update.
    StateLost: out of memory later.
  """
  # What is on the devices stays there: it would ask for another program.
  coefs = jax.tree.map(
    lambda x: x if isinstance(x, jax.Array) else np.float32(x), coefs
  )
  grads = programs['zeros'](state.params)
  statistics = {}
  for batch in batches:
    grads, new = programs['accumulate'](state.params, grads, batch, coefs)
    statistics = metrics.merge(statistics, new)
  # Programs run behind: what did not fit shows here at the latest, as long as
  # the state is whole.
  jax.block_until_ready(grads)
  state, new = _apply(programs['apply'], state, grads)
  new = {f'{prefix}/{name}': value for name, value in new.items()}
  skipped = new.pop(f'{prefix}/skipped')
  statistics = metrics.close_sums(metrics.merge(statistics, new))
  # Stays a sum over the mini-batches of a step.
  return state, statistics | {f'{prefix}/skipped_updates': skipped}


def _apply(program, state, grads):
  """Runs 'apply' on moments wherever they live, and waits for it."""
  home = jax.tree.map(lambda x: x.sharding, state.opt_state)
  try:
    state = state.replace(opt_state=rules.on_device(state.opt_state))
    state, statistics = program(state, grads)
    state = state.replace(opt_state=jax.device_put(state.opt_state, home))
    return jax.block_until_ready((state, statistics))
  except jax.errors.JaxRuntimeError as error:
    if out_of_memory(error):
      raise StateLost(str(error)) from error
    raise


def out_of_memory(error: Exception) -> bool:
  """Whether a program failed because something did not fit a device."""
  marks = 'RESOURCE_EXHAUSTED', 'CUDA_ERROR_OUT_OF_MEMORY'
  return isinstance(error, jax.errors.JaxRuntimeError) and any(
    mark in str(error) for mark in marks
  )


class StateLost(RuntimeError):
  """Memory ran out in the optimiser step, to which the state was donated."""


def programs(
  loss: Callable[..., tuple],
  optimizer: optax.GradientTransformation,
  learning_rate: Callable[[types.Array], types.Array],
  *,
  params: types.PyTree,
  specs: types.PyTree,
  mesh: jax.sharding.Mesh,
  max_grad_norm: float,
  gradient_dtype: jnp.dtype | None = None,
) -> dict[str, Callable]:
  """The three programs of one role, by name.

  Args:
    loss: `loss(params, batch, coefs) -> loss, statistics`.
    optimizer: see `optim.adamw`.
    learning_rate: its schedule.
    params: of the role, or their shapes and dtypes.
    specs: its weight table.
    mesh: of the role.
    max_grad_norm: what the optimiser clips to.
    gradient_dtype: see `zeros_program`.
  """
  of_params = rules.params(mesh, specs)
  of_state = state_lib.shardings(params, optimizer, mesh, specs)
  return {
    'zeros': zeros_program(of_params, gradient_dtype),
    'accumulate': accumulate_program(loss, of_params),
    'apply': apply_program(optimizer, learning_rate, of_state, max_grad_norm),
  }


def score_program(score: Callable[..., types.Scores], **asked) -> Callable:
  """`score(params, rows, **arrays) -> Scores`, jitted.

  Args:
    score: `heads.score` with its keywords bound.
    **asked: what else it shall return, for example `sum_squares=True`.
  """
  return jax.jit(functools.partial(score, entropy=False, **asked))
