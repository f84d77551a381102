"""The forward passes of a step: what every role says of the rollout."""

from collections.abc import Callable, Sequence
import dataclasses

import numpy as np

from rlhf_jax import types
from rlhf_jax.sharding import multihost
from rlhf_jax.trainers import algorithm as algorithm_lib
from rlhf_jax.trainers import packed
from rlhf_jax.trainers import roles as roles_lib
from rlhf_jax.trainers import update


@dataclasses.dataclass(frozen=True)
class Measured:
  """Numpy arrays of a step, in the sequence layout unless said otherwise."""

  old_logprobs: np.ndarray  # [N, T]: the sampler's where no pass was needed
  reference_logprobs: np.ndarray  # [N, T], 0 without a reference
  values: np.ndarray  # [N, T], 0 without a critic
  values_after: np.ndarray  # [N]: the critic at the last token
  sum_squares: np.ndarray | None  # [N, T]
  divergence: np.ndarray | None  # [N, T]: exact KL, old policy to reference
  # [R, L, D] per mini-batch, as packed; only where an exact KL needs them
  reference_states: Sequence[np.ndarray] | None


def programs(
  plan: algorithm_lib.Plan, learners: dict[str, roles_lib.Learner]
) -> dict[str, Callable]:
  """The jitted forward passes, by role."""
  actor = learners['actor'].score
  result = {
    'actor': update.score_program(actor, sum_squares=plan.sum_squares),
    'reference': update.score_program(actor, keep_states=plan.reference_states),
  }
  if plan.critic:
    result['critic'] = update.score_program(learners['critic'].score)
  return result


def measure(
  plan: algorithm_lib.Plan,
  passes: dict[str, Callable],
  stage: roles_lib.Roles,
  batches: Sequence[packed.MiniBatch],
  rollout: types.Rollout,
  *,
  rows_per_microbatch: int,
  islands: multihost.Islands,
  timings: Callable,
) -> Measured:
  """Runs the passes that the plan asks for, each over all mini-batches.

  Args:
    plan: of the stage.
    passes: see `programs`.
    stage: the roles' parameters.
    batches: of the step.
    rollout: the same sequences.
    rows_per_microbatch: rows of one call.
    islands: of the job.
    timings: `with timings(name)` measures.
  """
  nothing = np.zeros(rollout.tokens.shape, np.float32)

  def run(role, params, **reference):
    return packed.run_score(
        passes[role], params, batches, rollout, islands=islands,
        rows_per_microbatch=rows_per_microbatch, **reference,
    )  # fmt: skip

  reference = actor = types.Scores()
  if plan.reference:
    with timings('ref'):
      reference, _ = run('reference', stage.params('reference'))
  if plan.old_pass:
    exact = {}
    if plan.divergence:
      exact['reference'] = (stage.reference_head, reference.states)
    with timings('old_log_prob'):
      actor, _ = run('actor', stage.actor, **exact)
  values, after = nothing, np.zeros(len(nothing), np.float32)
  if plan.critic:
    with timings('values'):
      scores, after = run('critic', stage.params('critic'))
      values = scores.values
  old = actor.logprobs
  if plan.reuse or plan.on_policy:
    old = rollout.logprobs
  return Measured(
    old_logprobs=old,
    reference_logprobs=reference.logprobs if plan.reference else nothing,
    values=values,
    values_after=after,
    sum_squares=actor.sum_squares,
    divergence=actor.divergence,
    reference_states=reference.states,
  )
