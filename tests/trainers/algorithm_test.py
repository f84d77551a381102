"""What the section `algorithm` asks for, and what it may not ask for."""

import dataclasses

import numpy as np
import pytest

from configs import base
from rlhf_jax import metrics
from rlhf_jax import testing
from rlhf_jax import types
from rlhf_jax.sharding import multihost
from rlhf_jax.trainers import algorithm

_REWARDS = {'constant': testing.constant_reward()}
_GRPO = {'algorithm.advantages': 'grpo'}
_FULL = {'algorithm.kl_loss.coef': 0.1, 'algorithm.kl_loss.estimator': 'full'}
_REUSE = {'rollout.logprobs': 'reuse'}
_ISLANDS = multihost.alone()
_TOKEN = {'algorithm.importance.level': 'token'}


def _config(**changes):
  config = base.get_config()
  config.update_from_flattened_dict(changes)
  return config


@pytest.mark.parametrize(
  'changes, message',
  [
    # Nothing is accepted and ignored.
    ({'algorithm.sapo.tau_positive': 2.0}, 'tau_positive=2.0 would be ignored'),
    (
      {'algorithm.policy_loss': 'sapo', 'algorithm.clip_low': 0.1},
      "clip_low=0.1 would be ignored by .*'sapo': set it to None",
    ),
    ({'algorithm.normalize_std': False}, "by algorithm.advantages='gae'"),
    (
      {'algorithm.importance.upper': 5.0},
      "by algorithm.importance.level='off'",
    ),
    ({'algorithm.rejection.high': 3.0}, "algorithm.rejection.statistic='off'"),
    (
      {
        'algorithm.rejection.statistic': 'k2',
        'algorithm.rejection.low': 0.1,
      },
      "rejection.low=0.1 would be ignored by .*statistic='k2'",
    ),
    (
      {
        'algorithm.filtration.method': 'max_min',
        'algorithm.filtration.power': 3.0,
      },
      "power=3.0 would be ignored by .*method='max_min'",
    ),
    ({'algorithm.kl_loss.target': 0.3}, "kl_loss.controller='fixed'"),
    # Unknown names, with the choices.
    ({'rollout.logprobs': 'keep'}, "'keep' is not one of .*'recompute'"),
    ({'algorithm.importance.level': 'row'}, "one of .*'off', 'sequence'"),
    ({'algorithm.rejection.statistic': 'k4'}, "one of .*'k1', 'k2'"),
    ({'algorithm.filtration.method': 'best'}, "one of .*'max_min'"),
    ({'algorithm.aggregation': 'mean'}, "one of .*'seq-mean-token-mean'"),
    # What a function itself refuses.
    (_TOKEN | {'algorithm.importance.upper': -1.0}, 'upper'),
    (
      {'algorithm.rejection.statistic': 'k1', 'algorithm.rejection.low': 3.0},
      'low',
    ),
    (
      {
        'algorithm.filtration.method': 'pow',
        'algorithm.filtration.power': -1.0,
      },
      'power of filtration is -1.0',
    ),
    (
      {'algorithm.policy_loss': 'kl_cov', 'algorithm.kl_cov.share': 2.0},
      'share',
    ),
    # Pairs that contradict each other.
    (
      {'algorithm.advantages': 'gdpo', 'algorithm.kl_reward.coef': 0.1},
      'no place for a KL in the reward: use algorithm.kl_loss',
    ),
    (
      _GRPO | _REUSE | {'algorithm.rejection.statistic': 'k1'},
      "no trainer's log-probs to compare with",
    ),
    (_GRPO | _REUSE | _TOKEN, 'makes the ratio of ppo the importance weight'),
    (
      _GRPO
      | _REUSE
      | {
        'algorithm.policy_loss': 'gpg',
        'algorithm.importance.level': 'sequence',
      },
      "set algorithm.importance.level to 'token'",
    ),
    (
      _GRPO | _FULL | {'algorithm.filtration.method': 'pow'},
      "needs them in the same rows; use 'k3'",
    ),
    (
      _GRPO
      | {
        'algorithm.filtration.method': 'pow',
        'algorithm.mask_truncated': True,
      },
      'chooses sequences by score',
    ),
    (
      {
        'algorithm.advantages': 'gpg',
        'algorithm.drop_uniform_groups': True,
      },
      'equal scores may have one',
    ),
  ],
)
def test_refusals(changes, message):
  with pytest.raises(ValueError, match=message):
    algorithm.check(_config(**changes), testing.tiny_config(), _REWARDS)


@pytest.mark.parametrize(
  'changes, updates, expected',
  [
    ({}, 2, dict(critic=True, old_pass=True)),
    # One update, and nothing reads old log-probs before it.
    ({}, 1, dict(critic=True, on_policy=True)),
    (_GRPO, 1, dict(on_policy=True)),
    (_GRPO | _REUSE, 2, dict(reuse=True)),
    (_GRPO | _FULL, 1, dict(reference=True, exact_loss=True, on_policy=True)),
    (
      _GRPO | {'algorithm.kl_reward.coef': 0.1},
      1,
      dict(reference=True, old_pass=True),
    ),
    (_GRPO | _TOKEN, 1, dict(correction=True, old_pass=True)),
    (
      {'algorithm.advantages': 'optimal_token_baseline'},
      1,
      dict(sum_squares=True, old_pass=True),
    ),
    (
      {'algorithm.advantages': 'remax'},
      1,
      dict(greedy_baseline=True, on_policy=True),
    ),
    (
      _GRPO | {'algorithm.policy_loss': 'kl_cov'},
      1,
      dict(selection=True, old_pass=True),
    ),
    # An exact KL that is off asks for nothing.
    (_GRPO | {'algorithm.kl_loss.estimator': 'full'}, 1, dict(on_policy=True)),
  ],
)
def test_plan(changes, updates, expected):
  plan = algorithm.plan(_config(**changes), updates)
  found = dataclasses.asdict(plan) | dict(old_pass=plan.old_pass)
  assert {name for name, on in found.items() if on} == set(expected)


def _rollout(gap) -> types.Rollout:
  """Three sequences of two actions; the sampler is `gap` [3, 2] nats off."""
  mask = np.array([[0, 1, 1]] * 3, bool)
  logprobs = np.zeros((3, 3), np.float32)
  logprobs[:, 1:] = -1 - np.asarray(gap)
  zeros = np.zeros(3, np.int32)
  return types.Rollout(
    tokens=np.zeros((3, 3), np.int32),
    lengths=zeros + 3,
    prompt_lengths=zeros + 1,
    mask=mask,
    logprobs=logprobs,
    temperature=np.ones(3, np.float32),
    truncated=zeros > 0,
    group=zeros,
    policy_version=zeros,
  )


def test_correct_rejects_first_and_weighs_what_is_left():
  # log pi_trainer - log pi_sampler: (0, 0), (ln 1.5, 0), (0, ln 4).
  # k1 of tokens within [1/2, 2] rejects the last token of the last sequence;
  # of what is left, weights are 1, 1, 1.5, 1, 1, -, truncated at 1.2.
  config = _config(
    **_GRPO,
    **{
      'algorithm.rejection.statistic': 'k1',
      'algorithm.importance.level': 'token',
      'algorithm.importance.upper': 1.2,
    },
  )
  rollout = _rollout([[0, 0], [np.log(1.5), 0], [0, np.log(4)]])
  old = np.where(rollout.mask, np.float32(-1), 0)
  left, weights, measured = algorithm.correct(
    config.algorithm, rollout, old, _ISLANDS
  )
  np.testing.assert_array_equal(
    left.mask, [[False, True, True]] * 2 + [[False, True, False]]
  )
  np.testing.assert_allclose(
    weights, [[0, 1, 1], [0, 1.2, 1], [0, 1, 0]], rtol=1e-6
  )
  values = metrics.compute(measured)
  prefix = 'training/rollout_corr/'
  rejected = values[f'{prefix}rollout_rs_masked_fraction']
  assert rejected == pytest.approx(1 / 6)
  assert values[f'{prefix}rollout_is_mean'] == pytest.approx(5.2 / 5)
  np.testing.assert_array_equal(rollout.mask.sum(), 6)  # not in place


def test_correct_does_nothing_when_it_is_off():
  rollout = _rollout([[0, 0], [1, 0], [0, 3]])
  left, weights, measured = algorithm.correct(
    _config().algorithm, rollout, rollout.logprobs, _ISLANDS
  )
  assert left is rollout and weights is None and not measured


def test_notes_name_the_aggregation_of_the_paper():
  note = "'token-mean': the paper of 'sapo' has 'seq-mean-token-mean'"
  (line,) = algorithm.notes(_config(**{'algorithm.policy_loss': 'sapo'}))
  assert note in line
  assert not algorithm.notes(_config())
