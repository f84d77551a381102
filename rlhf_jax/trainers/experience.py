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
from rlhf_jax.algorithms import filtration
from rlhf_jax.algorithms import groups
from rlhf_jax.algorithms import value_losses
from rlhf_jax.data import packing
from rlhf_jax.models import config as model_config
from rlhf_jax.models import flops
from rlhf_jax.sharding import rules

# Called once a step: compiled, since their loops would be traced anew.
_GROUP_STATISTICS = jax.jit(groups.group_statistics)
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
    result |= uniform(scores, rollout.group, ~result)
  return result


def uniform(
  scores: np.ndarray, group: np.ndarray, valid: np.ndarray
) -> np.ndarray:
  """Sequences in whose group all valid scores are equal: [N] bool."""
  return np.asarray(_GROUP_STATISTICS(scores, group, valid).std) == 0


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
  batch: types.PyTree, rows_per_microbatch: int, mesh: jax.sharding.Mesh
) -> Iterator[types.PyTree]:
  """Cuts `[R, ...]` arrays into micro-batches and puts them on the mesh."""
  total = jax.tree.leaves(batch)[0].shape[0]
  for start in range(0, total, rows_per_microbatch):
    end = start + rows_per_microbatch
    yield rules.rows(
      mesh, jax.tree.map(lambda x, s=start, e=end: x[s:e], batch)
    )


def run_score(
  program: Callable[..., types.Scores],
  params: types.PyTree,
  batches: Sequence[MiniBatch],
  rollout: types.Rollout,
  *,
  rows_per_microbatch: int,
  mesh: jax.sharding.Mesh,
  reference: tuple[types.PyTree, Sequence[np.ndarray]] | None = None,
) -> tuple[types.Scores, np.ndarray]:
  """What a role says of all sequences, back in the sequence layout.

  Args:
    program: see `update.score_program`; the parameters decide what it gives.
    params: of the role.
    batches: of the step.
    rollout: the same sequences.
    rows_per_microbatch: rows of one call.
    mesh: of the role.
    reference: head and hidden states (one array per mini-batch) of the
      reference, for the exact divergence.

  Returns:
    `Scores` of numpy [N, T], 0 where there is no action; `states` stay packed,
    a list of [R, L, D], one per mini-batch.  And [N] float32: the values at
    the last token of each sequence (bootstrap values; 0 without a critic).
  """
  out: dict[str, np.ndarray] = {}
  states = []
  last = np.zeros(len(rollout.lengths), np.float32)
  for index, batch in enumerate(batches):
    parts = []
    inputs = dict(rows=batch.rows)
    if reference is not None:
      inputs['states'] = reference[1][index]
    for part in slices(inputs, rows_per_microbatch, mesh):
      other = part.pop('states', None)
      if other is not None:
        part['reference'] = (reference[0], other)
      parts.append(jax.device_get(program(params, **part)))
    whole = jax.tree.map(lambda *x: np.concatenate(x), *parts)  # R L
    if whole.states is not None:
      states.append(whole.states)
    if whole.values is not None:
      last[batch.members] = packing.last(whole.values, batch.pack_map)
    for name in SCORES:
      rows = getattr(whole, name)
      if rows is not None:
        out.setdefault(name, np.zeros(rollout.tokens.shape, np.float32))
        out[name][batch.members] = packing.unpack(rows, batch.pack_map)
  out = {name: np.where(rollout.mask, x, 0.0) for name, x in out.items()}
  return types.Scores(**out, states=states or None), last


def token_batch(
    experience: types.Experience, batch: MiniBatch, aggregation_mode: str,
    *, scale: float | None, reference_states: np.ndarray | None = None,
) -> types.TokenBatch:  # fmt: skip
  """The rows of a mini-batch with everything that its update reads.

  Args:
    experience: of the step.
    batch: whose sequences are taken.
    aggregation_mode: decides the token weights, from the final mask.
    scale: see `aggregation.token_weights`.
    reference_states: [R, L, D] of the same rows, for the exact KL.
  """
  mask = experience.rollout.mask[batch.members]
  weights = aggregation.token_weights(mask, aggregation_mode, scale=scale)
  pack = lambda x: packing.pack(np.asarray(x), batch.pack_map)
  of_step = lambda x: pack(np.asarray(x)[batch.members])
  importance = experience.importance
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
    importance=None if importance is None else of_step(importance),
    reference_states=reference_states,
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
  settings: dict[str, float],
  whiten: bool = False,
  kl: np.ndarray | None = None,
  kl_coef: float = 0.0,
  reward_weights: Sequence[float] | None = None,
  baseline: np.ndarray | None = None,
  sum_squares: np.ndarray | None = None,
  importance: np.ndarray | None = None,
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
    settings: its keywords, see `algorithm.estimator_settings`.
    whiten: whether advantages get mean 0 and deviation 1 over the step.
    kl: [N, T] nats per token for the penalty in the reward, or None.
    kl_coef: its coefficient.
    reward_weights: K numbers (gdpo).
    baseline: [N] scores of the greedy responses (remax).
    sum_squares: [N, T] sum_v pi_old(v)^2 (optimal_token_baseline).
    importance: [N, T] sampler to trainer, or None.
  """
  inputs = dict(
    mask=rollout.mask,
    group=rollout.group,
    scores=scores,
    values=values,
    bootstrap_values=bootstrap_values,
    kl=kl,
    kl_coef=np.float32(kl_coef),
    rewards=rewards,
    reward_weights=reward_weights and np.asarray(reward_weights, np.float32),
    baseline=baseline,
    logprobs=old_logprobs,
    sum_squares=sum_squares,
    importance=importance,
  )
  token_rewards, advantages, returns = _estimate(
    inputs, estimator, tuple(sorted(settings.items())), whiten
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
    importance=importance,
  )


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _estimate(inputs, estimator, settings, whiten):
  """The array part of `estimate`."""
  scores, mask = inputs['scores'], inputs['mask']
  token_rewards = advantages_lib.token_rewards(
    scores, mask, kl=inputs['kl'], kl_coef=inputs['kl_coef']
  )
  # A score that does not apply must stay NaN, to leave its group.
  totals = jnp.where(jnp.isfinite(scores), token_rewards.sum(1), jnp.nan)
  inputs = inputs | dict(token_rewards=token_rewards, totals=totals)
  function = advantages_lib.estimator(estimator)
  arguments, keywords = ESTIMATOR_INPUTS.get(estimator, GROUP_INPUTS)
  advantages, returns = function(
    *(inputs[name] for name in arguments),
    **{name: inputs[name] for name in keywords},
    **dict(settings),
  )
  if whiten:
    advantages = masked.whiten(advantages, mask)
  return token_rewards, advantages, returns


def filtrate(
  experience: types.Experience, key: types.Array, *, method: str, power: float
) -> tuple[types.Experience, metrics.Metrics]:
  """PF-PPO: resamples the sequences of a step by their scores.

  Each sequence moves whole, with its advantages, and every copy counts as a
  prompt of its own, so that mini-batches stay equally large.

  Args:
    experience: of the step, N sequences.
    key: of the draw.
    method: see `filtration`.
    power: see `filtration`.

  Returns:
    N sequences, and the share of the step's that are among them.
  """
  count = len(experience.scores)
  weights = filtration.weights(
    experience.scores,
    experience.rollout.mask.any(axis=1),
    method=method,
    power=power,
  )
  chosen = np.asarray(filtration.resample(key, weights, count))
  moved = jax.tree.map(np.asarray, filtration.take(experience, chosen))
  group = np.arange(count, dtype=np.int32)
  moved = moved.replace(rollout=moved.rollout.replace(group=group))
  distinct = np.isin(np.arange(count), chosen)
  return moved, {'training/filtration_distinct': metrics.mean(distinct)}


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


# Fields of `Scores` that speak of actions.
SCORES = ('logprobs', 'entropy', 'values', 'sum_squares', 'divergence')

# What an estimator reads: positional arguments and keywords, by name.  Those
# that are not here compare the total rewards of a group.
GROUP_INPUTS = (('totals', 'group', 'mask'), ())
_TOKEN_BASELINE = (
  ('token_rewards', 'group', 'mask', 'logprobs', 'sum_squares'),
  ('importance',),
)
ESTIMATOR_INPUTS = {
  'gae': (('token_rewards', 'values', 'mask'), ('bootstrap_values',)),
  'gdpo': (('rewards', 'reward_weights', 'group', 'mask'), ()),
  'multi_turn_optimal_token_baseline': _TOKEN_BASELINE,
  'optimal_token_baseline': _TOKEN_BASELINE,
  'reinforce_plus_plus': (('token_rewards', 'mask'), ()),
  'remax': (('token_rewards', 'baseline', 'mask'), ()),
}
