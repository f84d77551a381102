"""Rewards of responses, and greedy evaluation on held-out prompts."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlhf_jax import keys
from rlhf_jax import metrics
from rlhf_jax import types
from rlhf_jax.data import pipeline
from rlhf_jax.data import tokenizer as tokenizer_lib
from rlhf_jax.rewards import base
from rlhf_jax.sampling import engine
from rlhf_jax.sharding import multihost


def responses(
  rollout: types.Rollout, tokenizer, stop_strings: Sequence[str] = ()
) -> list[str]:
  """The text of every response, as rewards and people read it.

  Special tokens (EOS) are left out, and so is a stop string that ended it; the
  token ids have both.
  """
  return [
    tokenizer_lib.text(
      tokenizer, row[start:end], () if truncated else stop_strings
    )
    for row, start, end, truncated in zip(
      rollout.tokens,
      rollout.prompt_lengths,
      rollout.lengths,
      rollout.truncated,
    )
  ]


def prompts_of(
  rollout: types.Rollout, prompts: Sequence[pipeline.Prompt]
) -> list[pipeline.Prompt]:
  """The prompt of every sequence, matched by group and not by position."""
  return [prompts[group] for group in rollout.group]


def sample_rows(
  stage: str,
  step: int,
  texts: Sequence[str],
  rewards: base.RewardResult,
  names: Sequence[str],
  rollout: types.Rollout,
  prompts: Sequence[pipeline.Prompt],
  tokenizer,
  *,
  advantages: np.ndarray | None = None,
  limit: int,
  kind: str = 'train',
) -> list[dict[str, Any]]:
  """Lines for `samples.jsonl`: `limit` sequences spread over the prompts."""
  rows = []
  limit = min(limit, len(texts))
  for n in np.linspace(0, len(texts) - 1, limit).astype(int):
    mask = rollout.mask[n]
    mean = None
    if advantages is not None and mask.any():
      mean = float(advantages[n][mask].mean())
    rows.append(
      dict(
        stage=stage,
        step=step,
        kind=kind,
        prompt=tokenizer_lib.decode(
          tokenizer, prompts[rollout.group[n]].ids, skip_special=False
        ),
        response=texts[n],
        answer=prompts[rollout.group[n]].example.answer,
        score=float(rewards.scores[n]),
        rewards={
          name: float(rewards.values[n, k]) for k, name in enumerate(names)
        },
        advantage=mean,
        finish_reason='length' if rollout.truncated[n] else 'stop',
      )
    )
  return rows


def evaluate(
  params: types.PyTree,
  prompts: Sequence[pipeline.Prompt],
  tokenizer,
  rewards: dict[str, Callable],
  weights: dict[str, float],
  *,
  islands: multihost.Islands,
  seed: int,
  stage: str,
  step: int,
  stop_strings: Sequence[str] = (),
  samples: int = 4,
  timeout_s: float | None = None,
  default: float | None = None,
  **generation: Any,
) -> tuple[dict[str, float], list[dict[str, Any]], list[dict[str, Any]]]:
  """One greedy response to every held-out prompt.

  Args:
    params: of the policy, in the rollout layout.
    prompts: all are used, whatever the batch size; each island takes its share.
    tokenizer: turns responses into text.
    rewards: name -> reward.
    weights: name -> weight.
    islands: of the job.
    seed: of the run.
    stage: for the samples.
    step: for the samples.
    stop_strings: those that `find_stop` of `generation` looks for.
    samples: responses to show.
    timeout_s: see `rewards.base.evaluate`.
    default: see `rewards.base.evaluate`.
    **generation: for `engine.generate`.

  Returns:
    `val/<source>/<metric>` numbers (each reward's mean, the mean score and
    response length, the share of cut responses), rows for `samples.jsonl`, and
    events of the rewards.
  """
  prompts = prompts[islands.index :: islands.count]
  values, rows, events = {}, [], []
  if prompts:
    rollout = engine.generate(
      params,
      [prompt.ids for prompt in prompts],
      keys.key(seed, 'evaluate', step),
      temperature=0.0,
      **generation,
    )
    texts = responses(rollout, tokenizer, stop_strings)
    examples = [prompt.example for prompt in prompts_of(rollout, prompts)]
    result = multihost.from_leader(
      islands,
      lambda: base.evaluate(
        rewards, weights, texts, examples, timeout_s=timeout_s, default=default
      ),
    )
    sources = [example.source for example in examples]
    values = _by_source(sources, rollout, result, list(rewards))
    rows = sample_rows(
        stage, step, texts, result, list(rewards), rollout, prompts, tokenizer,
        limit=samples, kind='validation',
    )  # fmt: skip
    events = result.events
  every = multihost.gather(islands, (values, rows, events))
  values, rows, events = zip(*every)
  return (
    metrics.compute(metrics.merge(*values)),
    sum(rows, [])[:samples],
    sum(events, []),
  )


def _by_source(sources, rollout, result, names) -> metrics.Metrics:
  """Means of rewards, scores and lengths of each source."""
  lengths = rollout.lengths - rollout.prompt_lengths
  columns = {name: result.values[:, k] for k, name in enumerate(names)}
  columns |= {
    'score': result.scores,
    'response_length': lengths,
    'clip_ratio': rollout.truncated,
  }
  of_source, values = np.array(sources), {}
  for source in sorted(set(sources)):
    here = of_source == source
    for name, column in columns.items():
      column = np.asarray(column, np.float64)
      values[f'val/{source}/{name}'] = metrics.mean(
        column, here & np.isfinite(column)
      )
  return values
