"""PPO on a small real checkpoint, through the launch script's `train`."""

import importlib
import json

from configs import ppo_stories
from rlhf_jax import testing


def _run(config, workdir) -> list[dict]:
  script = importlib.import_module('launch.train')
  assert script.train(config, str(workdir)) == 0
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines]


def test_the_mean_reward_rises_on_real_weights(tmp_path):
  folder = testing.shared_path('data/stories260k')
  config = ppo_stories.get_config()
  config.model.path = str(folder)
  config.mesh.devices = 1
  config.steps = 12
  lines = _run(config, tmp_path / 'run')
  scores = [line['critic/score/mean'] for line in lines]
  # From 0.046 to about 0.13; without learning, means over three steps of 128
  # sequences stay within 0.01 of the first.
  assert sum(scores[-3:]) / 3 > 2 * scores[0], scores
  # The critic learns to tell good stories from bad ones.
  assert lines[-1]['critic/vf_explained_var'] > 0.1, lines[-1]
  # Sampler and trainer agree on the probabilities of the same tokens.
  assert max(line['training/rollout_probs_diff_max'] for line in lines) < 1e-4
  # The penalty is in the reward: returns are below the scores once it acts.
  assert lines[-1]['kl/reward'] > 0
  assert lines[-1]['critic/rewards/mean'] < lines[-1]['critic/score/mean']
