"""A short run on four devices, for `processes_test`."""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
  config = quickstart.get_config('tiny')
  with config.unlocked():
    config.stages = (('ppo', 'ppo', {}),)
    config.rewards = ConfigDict(
      dict(
        printable=dict(  # random bytes get some of it
          rule='character_share',
          weight=1.0,
          args=dict(characters=''.join(map(chr, range(32, 127)))),
        )
      )
    )
  config.update_from_flattened_dict(
    {
      'steps': 3,
      'mesh.data': 2,
      'mesh.fsdp': 2,
      'rollout.samples_per_prompt': 4,
      'training.sequences_per_minibatch': 16,
      # Means over the step, which no process can compute alone.
      'algorithm.advantages': 'reinforce_plus_plus_baseline',
      'algorithm.importance.level': 'token',
      'algorithm.importance.normalize': True,
      'actor.optimizer.learning_rate': 1e-3,
      'actor.optimizer.eps': 1e-5,
      'evaluation.every': 1,
      'evaluation.best_metric': '',
      'checkpoint.every': 1,
    }
  )
  return config
