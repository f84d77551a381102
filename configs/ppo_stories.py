"""PPO on real weights in under a minute: stories with more of a letter.

A Llama of 260 thousand parameters that writes children's stories is trained to
use the letter `o` more, by PPO with a critic.  It is the smallest run on a real
checkpoint, for a first look and for the tests.

  python launch/train.py --config=configs/ppo_stories.py \
    --config.model.path=FOLDER --workdir=runs/stories

FOLDER is a Hugging Face folder of the model, `data/stories260k` of the folder
that RLHF_JAX_SHARED names by default.  `:tiny` takes two steps.
"""

import os

from ml_collections import ConfigDict

from configs import base

SHARED = os.environ.get('RLHF_JAX_SHARED', '../shared')
HEROES = ('Tom', 'Lily', 'a dog', 'a cat', 'Ben', 'Mia', 'a bird', 'Sam')
BEGINNINGS = (
  'Once upon a time there was {hero}',
  'One day {hero}',
  'It was a sunny day and {hero}',
  '{hero} was very',
)


def get_config(arg: str = '') -> ConfigDict:
  """`arg` is '' or 'tiny'."""
  config = base.get_config()
  config.name = 'ppo_stories'
  config.model.path = os.path.join(SHARED, 'data', 'stories260k')
  config.steps = 16
  prompts = tuple(
    start.format(hero=hero) for start in BEGINNINGS for hero in HEROES
  )
  config.data.train = ConfigDict(
    dict(source='prompts', args=dict(prompts=prompts))
  )
  config.data.max_prompt_tokens = 24
  config.rewards.letters = ConfigDict(
    dict(rule='character_share', weight=1.0, args=dict(characters='o'))
  )
  config.rollout.prompts_per_step = 32
  config.rollout.samples_per_prompt = 4
  config.rollout.max_new_tokens = 24
  config.algorithm.lam = 0.95
  config.algorithm.kl_reward.coef = 0.01
  config.training.sequences_per_minibatch = 64
  config.training.tokens_per_row = 96
  config.training.tokens_per_microbatch = 2304
  config.actor.optimizer.learning_rate = 1e-3
  config.actor.optimizer.warmup_updates = 4
  config.critic.optimizer.learning_rate = 1e-3
  config.export = False
  if arg == 'tiny':
    config.steps = 2
    config.rollout.prompts_per_step = 4
    config.rollout.samples_per_prompt = 2
    config.training.sequences_per_minibatch = 4
    config.training.tokens_per_microbatch = 96
  elif arg:
    raise ValueError(f"unknown variant {arg!r} of this config: 'tiny'")
  config.lock()
  return config
