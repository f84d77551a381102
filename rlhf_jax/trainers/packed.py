"""The sequences of a step as packed rows: mini-batches, micro-batches, scores.

A step's sequences are divided into mini-batches once, and each is packed once;
old log-probs, reference, values and every epoch of updates read the same rows.
The big arrays stay on the host between the programs: only tokens and numbers
per token travel.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses

import jax
import numpy as np

from rlhf_jax import keys
from rlhf_jax import metrics
from rlhf_jax import types
from rlhf_jax.algorithms import aggregation
from rlhf_jax.data import packing
from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.sharding import multihost


@dataclasses.dataclass(frozen=True)
class MiniBatch:
  """The sequences of one update and where they lie in packed rows."""

  members: np.ndarray  # [n] int: sequences of the step
  pack_map: packing.PackMap
  rows: types.Rows  # numpy, [R, L]


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


def update_order(count: int, epochs: int, *, seed: int, step: int) -> list[int]:
  """Mini-batches in the order of their updates, shuffled in every epoch."""
  order = []
  for epoch in range(epochs):
    key = keys.key(seed, 'epoch', step, epoch)
    order += np.asarray(jax.random.permutation(key, count)).tolist()
  return order


def padding(batches: Sequence[MiniBatch]) -> metrics.Mean:
  """The share of the places of a step's rows that hold no token."""
  places = sum(batch.rows.tokens.size for batch in batches)
  real = sum(int((batch.pack_map.source >= 0).sum()) for batch in batches)
  return metrics.Mean(np.float64(places - real), np.float64(places))


# Fields of `Scores` that speak of actions.
SCORES = ('logprobs', 'entropy', 'values', 'sum_squares', 'divergence')
