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
from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.sharding import multihost

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


def assign(
  prompts: int, minibatches: int, islands: int, *, seed: int, step: int
) -> tuple[np.ndarray, np.ndarray]:
  """Mini-batch and island of every prompt of a step.

  The prompts are permuted by an addressed key; the i-th goes to mini-batch
  i mod M and to island (i div M) mod I, so that the mini-batches do not depend
  on the islands.

  Args:
    prompts: of the step, over all islands.
    minibatches: M.
    islands: I.
    seed: of the run.
    step: global step.

  Returns:
    Two [prompts] int arrays.
  """
  key = keys.key(seed, 'minibatch', step)
  place = np.empty(prompts, np.int64)
  place[np.asarray(jax.random.permutation(key, prompts))] = np.arange(prompts)
  return place % minibatches, place // minibatches % islands


def split(
  rollout: types.Rollout,
  home: np.ndarray,
  count: int,
  *,
  islands: multihost.Islands,
  tokens_per_row: int,
  rows_per_microbatch: int,
  share_prefix: bool,
  cost: Callable[[np.ndarray], np.ndarray] = lambda tokens: tokens,
) -> list[MiniBatch]:
  """Divides the sequences of a step into mini-batches and packs each.

  All samples of a prompt stay together.  Every island has equally many rows
  of a mini-batch; they are dealt to its micro-batches and data groups so that
  none has more work than the others, the heaviest first.

  Args:
    rollout: numpy, the N sequences of this island.
    home: mini-batch of each of its prompts, see `assign`.
    count: mini-batches.
    islands: of the job.
    tokens_per_row: L.
    rows_per_microbatch: of all islands; the rows of a mini-batch are a
      multiple of it.
    share_prefix: rows hold what all prompts have in common once.
    cost: of sequences of [n] tokens, for the balance.

  Returns:
    Up to `count` mini-batches: sequences without an action are in none, and a
    mini-batch of which nothing is left on any island is left out.
  """
  prefix = (
    packing.common_prefix(rollout.tokens, rollout.prompt_lengths)
    if share_prefix
    else 0
  )
  width = rollout.tokens.shape[1]
  used = rollout.mask.any(axis=1)
  members = [
    np.flatnonzero((home[rollout.group] == index) & used)
    for index in range(count)
  ]
  maps = [
    packing.plan(
      rollout.lengths[some], width, tokens_per_row, prefix_length=prefix
    )
    if len(some)
    else packing.nothing(width, 0, tokens_per_row)
    for some in members
  ]
  most = multihost.largest(islands, [len(pack.source) for pack in maps])
  groups = mesh_lib.data_groups(islands.mesh) // islands.count
  own = rows_per_microbatch // islands.count
  batches = []
  for some, pack_map, rows in zip(members, maps, most):
    if not rows:
      continue
    # With fewer rows than data groups in all, some groups have an empty one.
    bins, capacity = -(-int(rows) // own), own
    if own % groups == 0:
      bins, capacity = bins * groups, own // groups
    order = packing.balance(packing.work(pack_map, cost), bins, capacity)
    # Bins of one micro-batch are of similar work.
    pack_map = packing.with_rows(pack_map, order)
    part = jax.tree.map(lambda x, m=some: x[m], rollout)
    batches.append(MiniBatch(some, pack_map, packing.rows(part, pack_map)))
  return batches


def slices(
  batch: types.PyTree, rows_per_microbatch: int, islands: multihost.Islands
) -> Iterator[types.PyTree]:
  """Cuts `[R, ...]` arrays into micro-batches and puts them on the mesh.

  Args:
    batch: numpy, this island's rows.
    rows_per_microbatch: of all islands.
    islands: of the job.
  """
  own = rows_per_microbatch // islands.count
  total = jax.tree.leaves(batch)[0].shape[0]
  for start in range(0, total, own):
    part = jax.tree.map(lambda x, s=start: x[s : s + own], batch)
    yield multihost.rows(islands, part)


def run_score(
  program: Callable[..., types.Scores],
  params: types.PyTree,
  batches: Sequence[MiniBatch],
  rollout: types.Rollout,
  *,
  rows_per_microbatch: int,
  islands: multihost.Islands,
  reference: tuple[types.PyTree, Sequence[np.ndarray]] | None = None,
) -> tuple[types.Scores, np.ndarray]:
  """What a role says of all sequences, back in the sequence layout.

  Args:
    program: see `update.score_program`; the parameters decide what it gives.
    params: of the role.
    batches: of the step.
    rollout: the same sequences.
    rows_per_microbatch: rows of one call.
    islands: of the job.
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
    for part in slices(inputs, rows_per_microbatch, islands):
      other = part.pop('states', None)
      if other is not None:
        part['reference'] = (reference[0], other)
      parts.append(multihost.own_rows(islands, program(params, **part)))
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
    *, scale: float | None, totals: Sequence[float] | None = None,
    reference_states: np.ndarray | None = None,
) -> types.TokenBatch:  # fmt: skip
  """The rows of a mini-batch with everything that its update reads.

  Args:
    experience: of the step.
    batch: whose sequences are taken.
    aggregation_mode: decides the token weights, from the final mask.
    scale: see `aggregation.token_weights`, and so for the next.
    totals: tokens and sequences of the mini-batch on all islands.
    reference_states: [R, L, D] of the same rows, for the exact KL.
  """
  mask = experience.rollout.mask[batch.members]
  weights = aggregation.token_weights(
    mask, aggregation_mode, scale=scale, totals=totals
  )
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
  islands: multihost.Islands,
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
    islands: of the job; what is computed over the step is over all of them.
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
    group=_global_group(rollout.group, islands),
    scores=scores,
    values=values,
    bootstrap_values=bootstrap_values,
    kl=kl,
    rewards=rewards,
    baseline=baseline,
    logprobs=old_logprobs,
    sum_squares=sum_squares,
    importance=importance,
  )
  inputs = multihost.rows(islands, inputs) | dict(
    kl_coef=np.float32(kl_coef),
    reward_weights=reward_weights and np.asarray(reward_weights, np.float32),
  )
  token_rewards, advantages, returns = multihost.own_rows(
    islands,
    _estimate(inputs, estimator, tuple(sorted(settings.items())), whiten),
  )
  return types.Experience(
    rollout=rollout,
    rewards=rewards,
    scores=scores,
    old_logprobs=old_logprobs,
    reference_logprobs=reference_logprobs,
    values=values,
    bootstrap_values=bootstrap_values,
    token_rewards=token_rewards,
    advantages=advantages,
    returns=returns,
    importance=importance,
  )


def _global_group(group: np.ndarray, islands: multihost.Islands) -> np.ndarray:
  """Numbers of prompts that no two islands share."""
  # There are no more groups than sequences.
  return (group + islands.index * len(group)).astype(np.int32)


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
  experience: types.Experience,
  key: types.Array,
  *,
  islands: multihost.Islands,
  method: str,
  power: float,
) -> tuple[types.Experience, metrics.Metrics]:
  """PF-PPO: resamples the sequences of a step by their scores.

  Each sequence moves whole, with its advantages, and every copy counts as a
  prompt of its own, so that mini-batches stay equally large.  Sequences may
  move to another island: every one then sees the whole step for a moment.

  Args:
    experience: of the step, this island's N sequences.
    key: of the draw.
    islands: of the job.
    method: see `filtration`.
    power: see `filtration`.

  Returns:
    N sequences, and the share of the step's that are among them all.
  """
  number = len(experience.scores)
  whole = multihost.gather(islands, experience)
  whole = jax.tree.map(lambda *x: np.concatenate(x), *whole)
  count = len(whole.scores)
  weights = filtration.weights(
    whole.scores,
    whole.rollout.mask.any(axis=1),
    method=method,
    power=power,
  )
  chosen = np.asarray(filtration.resample(key, weights, count))
  own = chosen[islands.index * number :][:number]
  moved = jax.tree.map(np.asarray, filtration.take(whole, own))
  group = np.arange(number, dtype=np.int32)
  moved = moved.replace(rollout=moved.rollout.replace(group=group))
  distinct = np.isin(np.arange(count), chosen)
  return moved, {'training/filtration_distinct': metrics.mean(distinct)}


def statistics(
  experience: types.Experience,
  names: Sequence[str],
  *,
  islands: multihost.Islands,
  with_critic: bool,
) -> metrics.Metrics:
  """The metrics of a step that need no gradient, of this island's part."""
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
    # Of the whole step: it is no mean over sequences.
    arrays = experience.values, experience.returns, mask
    explained = multihost.fetch(
      _EXPLAINED_VARIANCE(*multihost.rows(islands, arrays))
    )
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


def totals(
  experience: types.Experience,
  batches: Sequence[MiniBatch],
  islands: multihost.Islands,
) -> np.ndarray:
  """Tokens and sequences that train in each mini-batch, [M, 2] over the job."""
  counts = np.zeros((len(batches), 2), np.int64)
  for count, batch in zip(counts, batches):
    lengths = experience.rollout.mask[batch.members].sum(axis=1)
    count[:] = lengths.sum(), (lengths > 0).sum()
  return multihost.total(islands, counts)


@dataclasses.dataclass(frozen=True)
class Report:
  """What a step's metrics need of all islands; N sequences of the job."""

  metrics: metrics.Metrics
  scores: np.ndarray  # [N]
  dropped: np.ndarray  # [N] bool
  lengths: np.ndarray  # [N]
  prompt_lengths: np.ndarray  # [N]
  actions: np.ndarray  # [N] tokens that train


def report(
  islands: multihost.Islands,
  measured: metrics.Metrics,
  rollout: types.Rollout,
  scores: np.ndarray,
  dropped: np.ndarray,
) -> Report:
  """Puts together what the islands saw of a step."""
  own = Report(
    metrics=jax.device_get(measured),
    scores=scores,
    dropped=dropped,
    lengths=rollout.lengths,
    prompt_lengths=rollout.prompt_lengths,
    actions=rollout.mask.sum(axis=1),
  )
  every = multihost.gather(islands, own)
  return Report(
    metrics=metrics.merge(*(one.metrics for one in every)),
    **{
      name: np.concatenate([getattr(one, name) for one in every])
      for name in ('scores', 'dropped', 'lengths', 'prompt_lengths', 'actions')
    },
  )


def padding(batches: Sequence[MiniBatch]) -> metrics.Mean:
  """The share of the places of a step's rows that hold no token."""
  places = sum(batch.rows.tokens.size for batch in batches)
  real = sum(int((batch.pack_map.source >= 0).sum()) for batch in batches)
  return metrics.Mean(np.float64(places - real), np.float64(places))


def throughput(
  lengths: np.ndarray,
  prompt_lengths: np.ndarray,
  actions: np.ndarray,
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
    lengths: [N] tokens of every sequence of the step.
    prompt_lengths: [N].
    actions: [N] tokens that take part in the update.
    model: of all roles.
    seconds: of the step.
    devices: that took part.
    passes: forward passes over the sequences that have actions.

  Returns:
    `perf/` metrics; `perf/mfu` only where the peak of a device is known.
  """
  responses = (lengths - prompt_lengths).sum()
  lengths = lengths.astype(np.float64)
  used = actions > 0
  of = lambda rows, heads: flops.forward(
    model, lengths[rows].sum(), heads, (lengths[rows] ** 2).sum() / 2
  )
  everyone = np.ones(len(lengths), bool)
  total = of(everyone, responses) + passes * of(used, actions.sum())
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
