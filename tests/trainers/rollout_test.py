"""Dynamic sampling: groups that teach nothing are replaced, whole."""

import contextlib
import types as python_types

import numpy as np
import pytest

from configs import base
from rlhf_jax import metrics
from rlhf_jax import types
from rlhf_jax.data import pipeline
from rlhf_jax.data import sources
from rlhf_jax.data import tokenizer as tokenizer_lib
from rlhf_jax.sharding import multihost
from rlhf_jax.trainers import rollout as rollout_lib


class _Stream:
  """Prompt i of the stream is the number i; remembers what was read."""

  def __init__(self):
    self.read = []

  def at(self, places):
    self.read.append((int(places[0]), len(places)))
    return [
      pipeline.Prompt(
        ids=np.array([48 + i], np.int32),
        example=sources.Example(str(i), '', 'numbers'),
        index=i,
      )
      for i in map(int, places)
    ]


def _generate(policy, ids, key, *, policy_version=0, **asked):
  """Two responses of one byte: for even prompts 'a' and 'b', else two 'a'."""
  del policy, key
  samples = asked.get('samples', 2)
  count = len(ids) * samples
  number = np.repeat([int(row[0]) - 48 for row in ids], samples)
  tokens = np.zeros((count, 3), np.int32)
  tokens[:, 0] = 48 + number
  tokens[:, 1] = ord('a')
  if samples == 2:
    tokens[1::2, 1] += number[1::2] % 2 == 0
  return types.Rollout(
    tokens=tokens,
    lengths=np.full(count, 2, np.int32),
    prompt_lengths=np.ones(count, np.int32),
    mask=np.tile([False, True, False], (count, 1)),
    logprobs=np.zeros((count, 3), np.float32),
    temperature=np.ones(count, np.float32),
    truncated=number % 3 == 0,
    group=np.repeat(np.arange(len(ids), dtype=np.int32), samples),
    policy_version=np.full(count, policy_version, np.int32),
  )


@pytest.fixture
def sample(monkeypatch):
  """Runs `rollout.sample` for 4 prompts with 2 responses each."""
  monkeypatch.setattr(rollout_lib.engine, 'generate', _generate)

  def run(rounds, cursor=0, **changes):
    config = base.get_config()
    config.update_from_flattened_dict(
      {
        'rollout.prompts_per_step': 4,
        'rollout.samples_per_prompt': 2,
        'algorithm.dynamic_sampling.rounds': rounds,
      }
      | changes
    )
    stream = _Stream()
    is_b = lambda responses, examples: [float(r == 'b') for r in responses]
    setup = python_types.SimpleNamespace(
      config=config,
      train=stream,
      tokenizer=tokenizer_lib.load('bytes'),
      rewards={'is_b': is_b},
      reward_weights={'is_b': 1.0},
      sampler=lambda samples: dict(samples=samples),
      islands=multihost.alone(),
    )
    result = rollout_lib.sample(
      setup,
      None,
      step=0,
      cursor=cursor,
      own=np.arange(4),
      policy_version=7,
      greedy_baseline=changes.get('algorithm.advantages') == 'remax',
      timings=lambda name: contextlib.nullcontext(),
    )
    return result, stream.read

  return run


def _numbers(result):
  return [int(prompt.example.prompt) for prompt in result.prompts]


def test_without_rounds_nothing_is_replaced(sample):
  result, read = sample(0)
  assert _numbers(result) == [0, 1, 2, 3]
  assert read == [(0, 4)] and result.prompts_read == 4
  assert not result.metrics


def test_uniform_groups_are_replaced_by_new_prompts(sample):
  # 1 and 3 are uniform. New: 4 (not uniform) and 5 (uniform): 4 takes the
  # place of 1.  Second round, for 3 alone: 6.
  result, read = sample(1)
  assert _numbers(result) == [0, 4, 2, 3]
  assert read == [(0, 4), (4, 2)] and result.prompts_read == 6
  result, read = sample(5)
  assert _numbers(result) == [0, 4, 2, 6]
  # No round is made without need.
  assert read == [(0, 4), (4, 2), (6, 1)] and result.prompts_read == 7
  assert metrics.compute(result.metrics) == {
    'training/groups_replaced': 2,
    'training/prompts_sampled': 7,
  }
  # Each group moved whole: tokens, scores and prompts belong together.
  assert result.rollout.tokens[:, 0].tolist() == [
    48, 48, 52, 52, 50, 50, 54, 54,
  ]  # fmt: skip
  assert result.rollout.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
  assert result.rewards.scores.tolist() == [0, 1] * 4
  assert (result.rollout.policy_version == 7).all()


def test_the_limit_leaves_uniform_groups(sample):
  # Of the prompts from 1 on, every second one is uniform.
  result, read = sample(1, cursor=1)
  assert _numbers(result) == [6, 2, 3, 4]
  assert read == [(1, 4), (5, 2)]


def test_truncated_penalty_and_greedy_baseline(sample):
  result, _ = sample(
    0,
    **{'algorithm.truncated_penalty': 0.25, 'algorithm.advantages': 'remax'},
  )
  # Prompts 0 and 3 are cut.
  assert result.rewards.scores.tolist() == [
    -0.25, 0.75, 0, 0, 0, 1, -0.25, -0.25,
  ]  # fmt: skip
  np.testing.assert_array_equal(result.baseline, np.zeros(8))
