"""The rollout of a step: responses, their rewards, and who takes part.

With dynamic sampling (DAPO, Yu et al. 2025) groups whose scores are all equal
teach nothing: they are replaced by new prompts, a few rounds long.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
import numpy as np

from rlhf_jax import keys
from rlhf_jax import metrics
from rlhf_jax import types
from rlhf_jax.data import pipeline
from rlhf_jax.rewards import base as rewards_lib
from rlhf_jax.sampling import engine
from rlhf_jax.trainers import evaluate
from rlhf_jax.trainers import experience as experience_lib
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


def sample(
  setup: setup_lib.Setup,
  policy: types.PyTree,
  *,
  step: int,
  cursor: int,
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
    policy_version: written to the rollout.
    greedy_baseline: also score a greedy response to every prompt.
    timings: `with timings(name)` measures.
  """
  config = setup.config
  rounds = config.algorithm.dynamic_sampling.rounds
  count = config.rollout.prompts_per_step
  one_round = lambda prompts, round_: _round(
    setup, policy, prompts, keys.key(config.seed, 'rollout', step, round_),
    policy_version, greedy_baseline, timings,
  )  # fmt: skip
  prompts = setup.train.batch(cursor, count)
  # The address of the first round has no number: it is that of a run without.
  result = _round(
    setup, policy, prompts, keys.key(config.seed, 'rollout', step),
    policy_version, greedy_baseline, timings,
  )  # fmt: skip
  read, replaced = count, 0
  for round_ in range(rounds):
    uniform = _uniform_groups(result)
    if not len(uniform):
      break
    fresh = setup.train.batch(cursor + read, len(uniform))
    read += len(fresh)
    new = one_round(fresh, round_)
    better = np.setdiff1d(np.arange(len(fresh)), _uniform_groups(new))
    replaced += len(better)
    result = _replace(result, uniform[: len(better)], new, better)
  measured = {}
  if rounds:
    measured = {
      'training/groups_replaced': metrics.mean(replaced),
      'training/prompts_sampled': metrics.mean(read),
    }
  return dataclasses.replace(result, prompts_read=read, metrics=measured)


def _round(
  setup, policy, prompts, key, policy_version, greedy_baseline, timings
) -> Sampled:
  """Responses to these prompts, with their rewards."""
  config = setup.config
  ids = [prompt.ids for prompt in prompts]
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
      **setup.sampler(config.rollout.samples_per_prompt),
    )
    if greedy_baseline:
      greedy = engine.generate(
        policy, ids, key, temperature=0.0, **setup.sampler(1)
      )
  with timings('reward'):
    rewards = _rewards(setup, rollout, prompts)
    penalty = config.algorithm.truncated_penalty
    rewards = dataclasses.replace(
      rewards, scores=rewards.scores - np.float32(penalty) * rollout.truncated
    )
    baseline = None
    if greedy is not None:
      of_prompts = _rewards(setup, greedy, prompts)
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
