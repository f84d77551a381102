"""Rollouts on the devices of training, or ahead on devices of their own."""

import importlib

from ml_collections import ConfigDict
import numpy as np
import pytest

from launch import train as launch
from rlhf_jax.monitor import writers
from rlhf_jax.trainers import workdir as workdir_lib


def _config(**changes) -> ConfigDict:
  """A reward that random bytes get some of: the share of printable ASCII."""
  config = importlib.import_module('configs.quickstart').get_config('tiny')
  with config.unlocked():
    config.stages = (('ppo', 'ppo', {}),)
    config.rewards = ConfigDict()
    config.rewards.printable = ConfigDict(
      dict(
        rule='character_share',
        weight=1.0,
        args=dict(characters=''.join(map(chr, range(32, 127)))),
      )
    )
    config.data.validation = ConfigDict(dict(source='', args=ConfigDict()))
  values = {
    'steps': 10,
    'mesh.devices': 4,
    'rollout.prompts_per_step': 8,
    'rollout.samples_per_prompt': 8,
    'training.sequences_per_minibatch': 32,
    'algorithm.advantages': 'grpo',
    'algorithm.kl_loss.coef': 0.0,
    'algorithm.importance.level': 'token',
    'actor.optimizer.learning_rate': 1e-2,
    'evaluation.best_metric': '',
    'export': False,
  }
  config.update_from_flattened_dict(values | changes)
  return config


def _run(workdir, **changes):
  assert launch.train(_config(**changes), str(workdir)) == 0
  return writers.read(workdir / writers.METRICS)


@pytest.mark.slow
def test_on_policy_and_a_step_ahead_reach_the_same_reward(tmp_path):
  scores = {}
  for ahead in (0, 1):
    steps = _run(
      tmp_path / str(ahead),
      **{'rollout.staleness': ahead, 'rollout.devices': 2 * ahead},
    )
    scores[ahead] = [step['critic/score/mean'] for step in steps]
    # How old the samples are: the first step has nothing to wait for.
    old = [step['training/staleness'] for step in steps]
    assert old == [0.0] + [float(ahead)] * 9
  # The same first rollout: its draws do not depend on the devices.
  assert scores[0][0] == scores[1][0]
  for curve in scores.values():
    assert curve[0] < 0.45 and np.mean(curve[-2:]) > 0.75
  assert abs(scores[0][-1] - scores[1][-1]) < 0.15


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'rollout.staleness': 1}, 'needs devices of its own'),
    ({'rollout.devices': 2}, 'stand idle'),
    ({'rollout.staleness': -1}, 'must be 0 or more'),
    (
      {
        'rollout.staleness': 1,
        'rollout.devices': 2,
        'algorithm.importance.level': 'off',
      },
      'trains on samples of an older policy',
    ),
    ({'rollout.staleness': 1, 'rollout.devices': 4}, 'has 4 devices'),
  ],
)
def test_placements_that_cannot_work_are_refused(tmp_path, changes, message):
  with pytest.raises(workdir_lib.Refused, match=message):
    launch.train(_config(**changes), str(tmp_path / 'run'))
