"""From a rollout to advantages: mini-batches, scores, token rewards.

A step's sequences are divided into mini-batches once, and each is packed once;
old log-probs, reference, values and every epoch of updates read the same rows.
The big arrays stay on the host between the programs: only tokens and numbers
per token travel.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import keys
from rlhf_jax import masked
from rlhf_jax import metrics
from rlhf_jax import types
from rlhf_jax.algorithms import advantages as advantages_lib
from rlhf_jax.algorithms import aggregation
from rlhf_jax.algorithms import value_losses
from rlhf_jax.data import packing
from rlhf_jax.models import config as model_config
from rlhf_jax.models import flops
from rlhf_jax.sharding import rules

# Called once a step: compiled, since their loops would be traced anew.
_GROUP_STATISTICS = jax.jit(advantages_lib.group_statistics)
_GROUP_METRICS = jax.jit(advantages_lib.group_metrics)
_EXPLAINED_VARIANCE = jax.jit(value_losses.explained_variance)


@dataclasses.dataclass(frozen=True)
class MiniBatch:
  """The sequences of one update and where they lie in packed rows."""

  members: np.ndarray  # [n] int: sequences of the step
  pack_map: packing.PackMap
  rows: types.Rows  # numpy, [R, L]


def rejected(
  rollout: types.Rollout,
  scores: np.ndarray,
  *,
  truncated: bool,
  uniform_groups: bool,
) -> np.ndarray:
  """Which sequences take no part in the update: [N] bool.

  Args:
    rollout: numpy, N sequences.
    scores: [N]; one that is not finite is always rejected.
    truncated: reject sequences that the length limit cut (DAPO's overlong
      filtering).
    uniform_groups: reject groups whose scores are all equal: advantages from
      comparing the samples of a prompt are 0 there.
  """
  result = ~np.isfinite(scores)
  if truncated:
    result |= rollout.truncated
  if uniform_groups:
    statistics_ = _GROUP_STATISTICS(scores, rollout.group, ~result)
    result |= np.asarray(statistics_.std) == 0
  return result


def split(
  rollout: types.Rollout,
  count: int,
  *,
  seed: int,
  step: int,
  tokens_per_row: int,
  rows_per_microbatch: int,
  share_prefix: bool,
) -> list[MiniBatch]:
  """Divides the prompts of a step into `count` mini-batches and packs each.

  Prompts are permuted by an addressed key; the i-th goes to mini-batch i mod
  count.  All samples of a prompt stay together.

  Args:
    rollout: numpy, N sequences.
    count: mini-batches; divides the prompts.
    seed: of the run.
    step: global step.
    tokens_per_row: L.
    rows_per_microbatch: the rows of a mini-batch are a multiple of it.
    share_prefix: rows hold what all prompts have in common once.

  Returns:
    Up to `count` mini-batches: sequences without an action are in none, and a
    mini-batch of which nothing is left is left out.
  """
  prompts = int(rollout.group.max()) + 1
  order = np.asarray(
    jax.random.permutation(keys.key(seed, 'minibatch', step), prompts)
  )
  home = np.empty(prompts, np.int64)  # prompt -> mini-batch
  home[order] = np.arange(prompts) % count
  prefix = (
    packing.common_prefix(rollout.tokens, rollout.prompt_lengths)
    if share_prefix
    else 0
  )
  used = rollout.mask.any(axis=1)
  batches = []
  for index in range(count):
    members = np.flatnonzero((home[rollout.group] == index) & used)
    if not len(members):
      continue
    part = jax.tree.map(lambda x, m=members: x[m], rollout)
    pack_map = packing.plan(
      part.lengths,
      part.tokens.shape[1],
      tokens_per_row,
      rows_multiple=rows_per_microbatch,
      prefix_length=prefix,
    )
    batches.append(MiniBatch(members, pack_map, packing.rows(part, pack_map)))
  return batches


def slices(
  batch: types.PyTree, rows: int, mesh: jax.sharding.Mesh
) -> Iterator[types.PyTree]:
  """Cuts `[R, ...]` arrays into micro-batches and puts them on the mesh."""
  total = jax.tree.leaves(batch)[0].shape[0]
  for start in range(0, total, rows):
    yield rules.rows(
      mesh, jax.tree.map(lambda x, s=start: x[s : s + rows], batch)
    )


def run_score(
  program: Callable[..., types.Scores],
  params: types.PyTree,
  batches: Sequence[MiniBatch],
  rollout: types.Rollout,
  *,
  rows_per_microbatch: int,
  mesh: jax.sharding.Mesh,
) -> tuple[np.ndarray, np.ndarray]:
  """Log-probs or values of all sequences, back in the sequence layout.

  Args:
    program: see `update.score_program`; the parameters decide what it gives.
    params: of the role.
    batches: of the step.
    rollout: the same sequences.
    rows_per_microbatch: rows of one call.
    mesh: of the role.

  Returns:
    [N, T] float32, and [N] float32: the same at the last token of each
    sequence (a critic's bootstrap value).
  """
  out = np.zeros(rollout.tokens.shape, np.float32)
  last = np.zeros(len(rollout.lengths), np.float32)
  for batch in batches:
    parts = []
    for rows in slices(batch.rows, rows_per_microbatch, mesh):
      scores = program(params, rows=rows)
      parts.append(scores.logprobs if scores.values is None else scores.values)
    whole = np.concatenate([np.asarray(part) for part in parts])  # R L
    out[batch.members] = packing.unpack(whole, batch.pack_map)
    last[batch.members] = packing.last(whole, batch.pack_map)
  return np.where(rollout.mask, out, 0.0), last


def token_batch(
    experience: types.Experience, batch: MiniBatch, aggregation_mode: str,
    *, scale: float | None,
) -> types.TokenBatch:  # fmt: skip
  """The rows of a mini-batch with everything that its update reads.

  Args:
    experience: of the step.
    batch: whose sequences are taken.
    aggregation_mode: decides the token weights, from the final mask.
    scale: see `aggregation.token_weights`.
  """
  mask = experience.rollout.mask[batch.members]
  weights = aggregation.token_weights(mask, aggregation_mode, scale=scale)
  pack = lambda x: packing.pack(np.asarray(x), batch.pack_map)
  of_step = lambda x: pack(np.asarray(x)[batch.members])
  return types.TokenBatch(
    # The mask may have lost sequences since the rows were packed.
    rows=batch.rows.replace(
      mask=packing.pack(mask, batch.pack_map, fill=False)
    ),
    old_logprobs=of_step(experience.old_logprobs),
    reference_logprobs=of_step(experience.reference_logprobs),
    advantages=of_step(experience.advantages),
    old_values=of_step(experience.values),
    returns=of_step(experience.returns),
    weights=pack(weights),
  )


def estimate(
  rollout: types.Rollout,
  rewards: np.ndarray,
  scores: np.ndarray,
  old_logprobs: np.ndarray,
  reference_logprobs: np.ndarray,
  values: np.ndarray,
  bootstrap_values: np.ndarray,
  *,
  estimator: str,
  gamma: float,
  lam: float,
  whiten: bool,
  kl: np.ndarray | None,
  kl_coef: float,
) -> types.Experience:
  """Token rewards, then advantages and returns of a step.

  Args:
    rollout: its mask is final: rejected sequences have none.
    rewards: [N, K] float32 by name, NaN where one does not apply.
    scores: [N] float32, their weighted sum.
    old_logprobs: [N, T].
    reference_logprobs: [N, T].
    values: [N, T], zeros without a critic.
    bootstrap_values: [N], zeros where a sequence ended by itself.
    estimator: name in `advantages.ESTIMATORS`.
    gamma: discount per token (gae).
    lam: of gae.
    whiten: whether advantages get mean 0 and deviation 1 over the step.
    kl: [N, T] nats per token for the penalty in the reward, or None.
    kl_coef: its coefficient.
  """
  token_rewards, advantages, returns = _estimate(
    rollout.mask,
    scores,
    values,
    bootstrap_values,
    rollout.group,
    np.zeros_like(values) if kl is None else kl,
    np.float32(kl_coef),
    estimator=estimator,
    gamma=gamma,
    lam=lam,
    whiten=whiten,
  )
  return types.Experience(
    rollout=rollout,
    rewards=rewards,
    scores=scores,
    old_logprobs=old_logprobs,
    reference_logprobs=reference_logprobs,
    values=values,
    bootstrap_values=bootstrap_values,
    token_rewards=np.asarray(token_rewards),
    advantages=np.asarray(advantages),
    returns=np.asarray(returns),
  )


@functools.partial(
  jax.jit, static_argnames=('estimator', 'gamma', 'lam', 'whiten')
)
def _estimate(
    mask, scores, values, bootstrap_values, group, kl, kl_coef, *, estimator,
    gamma, lam, whiten,
):  # fmt: skip
  """The array part of `estimate`."""
  token_rewards = advantages_lib.token_rewards(
    scores, mask, kl=kl, kl_coef=kl_coef
  )
  function = advantages_lib.estimator(estimator)
  if estimator in advantages_lib.CRITIC_ESTIMATORS:
    advantages, returns = function(
      token_rewards,
      values,
      mask,
      gamma=gamma,
      lam=lam,
      bootstrap_values=bootstrap_values,
    )
  else:
    # A score that does not apply must stay NaN, to leave its group.
    totals = jnp.where(jnp.isfinite(scores), token_rewards.sum(1), jnp.nan)
    advantages, returns = function(totals, group, mask)
  if whiten:
    advantages = masked.whiten(advantages, mask)
  return token_rewards, advantages, returns


def statistics(
  experience: types.Experience,
  names: Sequence[str],
  *,
  with_critic: bool,
) -> metrics.Metrics:
  """The metrics of a step that need no gradient."""
  rollout, mask = experience.rollout, experience.rollout.mask
  used = mask.any(axis=1)
  lengths = rollout.lengths - rollout.prompt_lengths
  result = {
    'critic/score/mean': metrics.mean(
      experience.scores, np.isfinite(experience.scores)
    ),
    'critic/rewards/mean': metrics.mean(
      experience.token_rewards.sum(axis=1), used
    ),
    'critic/advantages/mean': metrics.mean(experience.advantages, mask),
    'response_length/mean': metrics.mean(lengths),
    'response_length/max': metrics.max(lengths),
    'response_length/min': metrics.min(lengths),
    'response_length/clip_ratio': metrics.mean(rollout.truncated),
    'prompt_length/mean': metrics.mean(rollout.prompt_lengths),
    'training/sequences_used': metrics.mean(used),
  }
  # Of all groups, also those that were rejected for being uniform.
  result |= _GROUP_METRICS(experience.scores, rollout.group, np.ones_like(mask))
  for k, name in enumerate(names):
    column = experience.rewards[:, k]
    result[f'reward/{name}/mean'] = metrics.mean(column, np.isfinite(column))
  if with_critic:
    explained = _EXPLAINED_VARIANCE(
        experience.values, experience.returns, mask
    )  # fmt: skip
    result |= {
      'critic/returns/mean': metrics.mean(experience.returns, mask),
      'critic/values/mean': metrics.mean(experience.values, mask),
      'critic/vf_explained_var': metrics.mean(explained),
    }
  return result


def update_order(count: int, epochs: int, *, seed: int, step: int) -> list[int]:
  """Mini-batches in the order of their updates, shuffled in every epoch."""
  order = []
  for epoch in range(epochs):
    key = keys.key(seed, 'epoch', step, epoch)
    order += np.asarray(jax.random.permutation(key, count)).tolist()
  return order


def padding(batches: Sequence[MiniBatch]) -> float:
  """The share of the places of a step's rows that hold no token."""
  places = [batch.rows.tokens.size for batch in batches]
  real = [
    packing.efficiency(batch.pack_map) * size
    for batch, size in zip(batches, places)
  ]
  return 1.0 - sum(real) / sum(places) if batches else 0.0


def throughput(
  rollout: types.Rollout,
  model: model_config.ModelConfig,
  seconds: float,
  devices: Sequence[jax.Device],
  *,
  passes: float,
) -> dict[str, float]:
  """Tokens per second, and the share of the devices' peak that the model used.

  Model FLOPs count every sequence in full, also where a shared prefix was
  computed once: once for the rollout, and `passes` times for what takes part
  in the update (a backward pass counts as two).

  Args:
    rollout: numpy; its mask is final.
    model: of all roles.
    seconds: of the step.
    devices: that took part.
    passes: forward passes over the sequences that have actions.

  Returns:
    `perf/` metrics; `perf/mfu` only where the peak of a device is known.
  """
  lengths = rollout.lengths.astype(np.float64)
  actions = rollout.mask.sum(axis=1)
  used = actions > 0
  of = lambda rows, heads: flops.forward(
    model, lengths[rows].sum(), heads, (lengths[rows] ** 2).sum() / 2
  )
  everyone = np.ones(len(lengths), bool)
  sampled = (rollout.lengths - rollout.prompt_lengths).sum()
  total = of(everyone, sampled) + passes * of(used, actions.sum())
  rate = total / seconds / len(devices)
  result = {
    'perf/tokens_per_second_per_device': (
      lengths.sum() / seconds / len(devices)
    ),
    'perf/tflops_per_second_per_device': rate / 1e12,
  }
  peak = flops.peak(devices[0])
  return result | ({'perf/mfu': rate / peak} if peak else {})
