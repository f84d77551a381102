"""PPO on a small real checkpoint, through the launch script's `train`."""

import importlib.util
import json
import pathlib
import sys

from rlhf_jax import testing

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _load(name: str, path: pathlib.Path):
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  spec.loader.exec_module(module)
  return module


def _run(config, workdir) -> list[dict]:
  # Flags are global: the script is loaded once per process.
  script = sys.modules.get('launch_train_script')
  if script is None:
    script = _load('launch_train_script', ROOT / 'launch' / 'train.py')
  assert script.train(config, str(workdir)) == 0
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines]


def test_the_mean_reward_rises_on_real_weights(tmp_path):
  folder = testing.shared_path('data/stories260k')
  configs = _load('ppo_stories', ROOT / 'configs' / 'ppo_stories.py')
  config = configs.get_config()
  config.model.path = str(folder)
  config.mesh.devices = 1
  config.steps = 12
  lines = _run(config, tmp_path / 'run')
  scores = [line['critic/score/mean'] for line in lines]
  # 0.046 at first; ten runs of other seeds would have to agree by luck for the
  # mean of three steps of 128 sequences to double without learning.
  assert sum(scores[-3:]) / 3 > 2 * scores[0], scores
  # The critic learns to tell good stories from bad ones.
  assert lines[-1]['critic/vf_explained_var'] > 0.1, lines[-1]
  # Sampler and trainer agree on the probabilities of the same tokens.
  assert max(line['training/rollout_probs_diff_max'] for line in lines) < 1e-4
  # The penalty is in the reward: returns are below the scores once it acts.
  assert lines[-1]['kl/reward'] > 0
  assert lines[-1]['critic/rewards/mean'] < lines[-1]['critic/score/mean']
