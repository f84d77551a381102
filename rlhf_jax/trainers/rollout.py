"""The rollout of a step: responses, their rewards, and who takes part.

With dynamic sampling (DAPO, Yu et al. 2025) groups whose scores are all equal
teach nothing: they are replaced by new prompts, a few rounds long.
"""

import collections
from collections.abc import Callable, Sequence
from concurrent import futures
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from rlhf_jax import keys
from rlhf_jax import metrics
from rlhf_jax import tree
from rlhf_jax import types
from rlhf_jax.data import pipeline
from rlhf_jax.rewards import base as rewards_lib
from rlhf_jax.sampling import engine
from rlhf_jax.sharding import multihost
from rlhf_jax.trainers import evaluate
from rlhf_jax.trainers import experience as experience_lib
from rlhf_jax.trainers import packed
from rlhf_jax.trainers import run as run_lib
from rlhf_jax.trainers import setup as setup_lib


@dataclasses.dataclass(frozen=True)
class Sampled:
  """N scored responses, in the order of their prompts."""

  rollout: types.Rollout
  prompts: list[pipeline.Prompt]  # of this step, `rollout.group` counts them
  rewards: rewards_lib.RewardResult
  baseline: np.ndarray | None  # [N] scores of the greedy responses (remax)
  prompts_read: int  # of the stream, replaced ones too
  metrics: metrics.Metrics
  home: np.ndarray | None = None  # mini-batch of each prompt
  timings: dict[str, float] = dataclasses.field(default_factory=dict)


class Sampler:
  """The rollouts of consecutive steps, each at most `staleness` steps old.

  With `rollout.staleness` 0 a step is sampled when it is asked for.  With K it
  was begun K steps earlier, on devices of its own and with the policy of then:
  the weights go there whenever a step begins.  A run that resumes begins K
  steps anew, with the policy of the checkpoint.  A class because it owns the
  thread in which all that runs.
  """

  def __init__(
    self,
    setup: setup_lib.Setup,
    relayout: Callable[[types.PyTree], types.PyTree],
    *,
    steps: range,
    cursor: int,
    greedy_baseline: bool,
  ):
    """Nothing is sampled yet.

    Args:
      setup: of the stage.
      relayout: see `roles.relayout`.
      steps: global steps of the stage that are left.
      cursor: prompts of the stream that earlier steps have read.
      greedy_baseline: also score a greedy response to every prompt.
    """
    self._setup, self._relayout, self._steps = setup, relayout, steps
    self._greedy_baseline = greedy_baseline
    self._cursor, self._next = cursor, steps.start
    self._ahead = setup.config.rollout.staleness
    # (step in which it began, function that returns a `Sampled`)
    self._begun = collections.deque()
    self._thread = None
    if self._ahead:
      self._thread = futures.ThreadPoolExecutor(1, 'rollout')

  def __enter__(self) -> 'Sampler':
    return self

  def __exit__(self, *unused_exception) -> None:
    if self._thread is not None:
      self._thread.shutdown(cancel_futures=True)

  def take(
    self, params: types.PyTree, *, step: int, policy_version: int
  ) -> Sampled:
    """The rollout of a step; begins those that may run ahead.

    Args:
      params: of the actor now, in the training layout.
      step: the next one.
      policy_version: updates that the actor has seen.
    """
    timings = run_lib.Timings()
    last = min(step + self._ahead, self._steps[-1])
    if self._next <= last:
      with timings('relayout'):
        policy = jax.block_until_ready(self._relayout(params))
      timings['perf/relayout_bytes'] = tree.nbytes(policy)
      for later in range(self._next, last + 1):
        work = functools.partial(self._sample, policy, later, policy_version)
        if self._thread is not None:
          work = self._thread.submit(work).result
        self._begun.append((step, work))
      self._next = last + 1
      del policy, work  # as large as the weights: freed before the update
    begun_at, work = self._begun.popleft()
    with timings('rollout'):
      sampled = work()
    timings['training/staleness'] = step - begun_at
    return dataclasses.replace(sampled, timings=sampled.timings | timings)

  def _sample(self, policy, step, policy_version) -> Sampled:
    config, islands = self._setup.config, self._setup.islands
    home, island = packed.assign(
      config.rollout.prompts_per_step,
      self._setup.numbers.minibatches_per_step,
      islands.count,
      seed=config.seed,
      step=step,
    )
    own = np.flatnonzero(island == islands.index)
    timings = run_lib.Timings()
    sampled = sample(
      self._setup,
      policy,
      step=step,
      cursor=self._cursor,
      own=own,
      policy_version=policy_version,
      greedy_baseline=self._greedy_baseline,
      timings=timings,
    )
    self._cursor += sampled.prompts_read
    return dataclasses.replace(sampled, home=home[own], timings=timings)


def sample(
  setup: setup_lib.Setup,
  policy: types.PyTree,
  *,
  step: int,
  cursor: int,
  own: np.ndarray,
  policy_version: int,
  greedy_baseline: bool,
  timings: Callable[..., Any],
) -> Sampled:
  """Samples, scores, and replaces groups that teach nothing.

  Args:
    setup: of the stage.
    policy: in the rollout layout.
    step: global step; all draws are addressed by it.
    cursor: prompts of the stream that earlier steps have read.
    own: prompts of the step that this island answers, ascending.
    policy_version: written to the rollout.
    greedy_baseline: also score a greedy response to every prompt.
    timings: `with timings(name)` measures.

  Returns:
    The island's part of the step.
  """
  config, islands = setup.config, setup.islands
  rounds = config.algorithm.dynamic_sampling.rounds
  read = config.rollout.prompts_per_step
  one_round = functools.partial(
    _round, setup, policy, policy_version=policy_version,
    greedy_baseline=greedy_baseline, timings=timings,
  )  # fmt: skip
  # The address of the first round has no number: it is that of a run without.
  result = one_round(cursor + own, own, keys.key(config.seed, 'rollout', step))
  replaced = 0
  for round_ in range(rounds):
    uniform = _uniform_groups(result)
    counts = np.array(multihost.gather(islands, len(uniform)))
    if not counts.sum():
      break
    first = int(counts[: islands.index].sum())
    fresh = first + np.arange(len(uniform))
    key = keys.key(config.seed, 'rollout', step, round_)
    if len(uniform):
      new = one_round(cursor + read + fresh, fresh, key)
      better = np.setdiff1d(np.arange(len(fresh)), _uniform_groups(new))
      replaced += len(better)
      result = _replace(result, uniform[: len(better)], new, better)
    read += int(counts.sum())
  measured = {}
  if rounds:
    measured = {
      'training/groups_replaced': metrics.sum(replaced),
      # Every island says the same.
      'training/prompts_sampled': metrics.mean(read),
    }
  return dataclasses.replace(result, prompts_read=read, metrics=measured)


def _round(
    setup, policy, places, numbers, key, *, policy_version, greedy_baseline,
    timings,
) -> Sampled:  # fmt: skip
  """Responses to some prompts, with their rewards.

  `places` [B] are those of the prompts in the stream, `numbers` [B] what
  addresses the draws of each.
  """
  config, islands = setup.config, setup.islands
  samples = config.rollout.samples_per_prompt
  prompts = setup.train.at(places)
  ids = [prompt.ids for prompt in prompts]
  seeds = numbers[:, None] * samples + np.arange(samples)
  greedy = None
  with timings('gen'):
    rollout = engine.generate(
      policy,
      ids,
      key,
      policy_version=policy_version,
      temperature=config.rollout.temperature,
      top_k=config.rollout.top_k,
      top_p=config.rollout.top_p,
      min_p=config.rollout.min_p,
      min_new_tokens=config.rollout.min_new_tokens,
      seeds=seeds.reshape(-1),
      **setup.sampler(samples),
    )
    if greedy_baseline:
      greedy = engine.generate(
        policy, ids, key, temperature=0.0, **setup.sampler(1)
      )
  with timings('reward'):
    rewards = multihost.from_leader(
      islands, lambda: _rewards(setup, rollout, prompts)
    )
    penalty = config.algorithm.truncated_penalty
    rewards = dataclasses.replace(
      rewards, scores=rewards.scores - np.float32(penalty) * rollout.truncated
    )
    baseline = None
    if greedy is not None:
      of_prompts = multihost.from_leader(
        islands, lambda: _rewards(setup, greedy, prompts)
      )
      baseline = of_prompts.scores[rollout.group]
      events = [*rewards.events, *of_prompts.events]
      rewards = dataclasses.replace(rewards, events=events)
  return Sampled(rollout, list(prompts), rewards, baseline, len(prompts), {})


def _rewards(setup, rollout, prompts) -> rewards_lib.RewardResult:
  """Runs all rewards on the responses of a rollout."""
  asked = evaluate.prompts_of(rollout, prompts)
  return rewards_lib.evaluate(
    setup.rewards,
    setup.reward_weights,
    evaluate.responses(
      rollout, setup.tokenizer, setup.config.rollout.stop_strings
    ),
    [prompt.example for prompt in asked],
    timeout_s=setup.config.reward_timeout_s,
    default=setup.config.reward_on_timeout,
  )


def _uniform_groups(sampled: Sampled) -> np.ndarray:
  """Groups in which all scores are equal, ascending."""
  scores, group = sampled.rewards.scores, sampled.rollout.group
  return np.unique(
    group[experience_lib.uniform(scores, group, np.isfinite(scores))]
  )


def _replace(
  old: Sampled, places: Sequence[int], new: Sampled, chosen: Sequence[int]
) -> Sampled:
  """Puts the chosen groups of `new` into places of `old`, sample by sample."""
  if not len(places):
    events = [*old.rewards.events, *new.rewards.events]
    rewards = dataclasses.replace(old.rewards, events=events)
    return dataclasses.replace(old, rewards=rewards)
  rows = np.concatenate(
    [np.flatnonzero(old.rollout.group == i) for i in places]
  )
  source = np.concatenate(
    [np.flatnonzero(new.rollout.group == i) for i in chosen]
  )

  def put(a, b):
    out = np.array(a)
    out[rows] = np.asarray(b)[source]
    return out

  rollout = jax.tree.map(put, old.rollout, new.rollout)
  rollout = rollout.replace(group=old.rollout.group)
  prompts = list(old.prompts)
  for place, index in zip(places, chosen):
    prompts[place] = new.prompts[index]
  rewards = dataclasses.replace(
    old.rewards,
    values=put(old.rewards.values, new.rewards.values),
    scores=put(old.rewards.scores, new.rewards.scores),
    dropped=put(old.rewards.dropped, new.rewards.dropped),
    events=[*old.rewards.events, *new.rewards.events],
  )
  baseline = old.baseline
  if baseline is not None:
    baseline = put(baseline, new.baseline)
  return dataclasses.replace(
    old, rollout=rollout, prompts=prompts, rewards=rewards, baseline=baseline
  )
