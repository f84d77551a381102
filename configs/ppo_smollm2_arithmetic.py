"""A real model learns to add: PPO with a group baseline.

SmolLM2-135M-Instruct reads three worked lines and a sum of two numbers of up
to three digits, and answers with a number.  Problems and scorer come from the
package reasoning-gym (`pip install 'rlhf_jax[reasoning]'`).

  python launch/train.py --config=configs/ppo_smollm2_arithmetic.py \
    --config.model.path=FOLDER --workdir=runs/smollm2

FOLDER is a local Hugging Face folder; the default is the model's hub id.  All
135M parameters are trained, in float32: on 2 CPU cores the exact match of
greedy answers goes from 0.34 to 0.62 in 47 minutes (benchmarks/README.md).
`:tiny` takes two steps.
"""

from ml_collections import ConfigDict

from configs import base

QUESTION = 'State the final answer to the following arithmetic problem: '
# With a negative result among them, so that the model tries such answers.
WORKED = ('83 - 27 = 56', '2 - 9 = -7', '358 + 64 = 422')


def get_config(arg: str = '') -> ConfigDict:
  """`arg` is '' or 'tiny'."""
  config = base.get_config()
  config.name = 'ppo_smollm2_arithmetic'
  config.model.path = 'HuggingFaceTB/SmolLM2-135M-Instruct'
  config.steps = 130

  # The generator makes item i from seed + i: the two sets must be far apart.
  task = dict(task='chain_sum', min_terms=2, max_terms=2, max_digits=3)
  config.data.train = ConfigDict(
    dict(source='reasoning_gym', args=dict(size=20_000, seed=1_000_000, **task))
  )
  config.data.validation = ConfigDict(
    dict(source='reasoning_gym', args=dict(size=128, seed=0, **task))
  )
  config.data.prompt_format = (
    ''.join(f'{QUESTION}{line}\n' for line in WORKED) + '{prompt}'
  )
  config.data.max_prompt_tokens = 88  # the 76 that all share are computed once
  # The package's scorer is the reward; it gives part of the point for an answer
  # with something around it, so what counts is reported beside it.
  config.rewards.chain_sum = ConfigDict(
    dict(rule='reasoning_gym', weight=1.0, args=ConfigDict())
  )
  config.rewards.exact_match = ConfigDict(
    dict(rule='exact_match', weight=0.0, args=ConfigDict())
  )

  config.rollout.prompts_per_step = 128
  config.rollout.samples_per_prompt = 4
  config.rollout.max_new_tokens = 8
  config.rollout.stop = ('\n',)
  config.rollout.slots = 512

  config.algorithm.advantages = 'grpo'
  config.algorithm.kl_loss.coef = 0.002
  # Most groups are unanimous, above all at first: they are not run.
  config.algorithm.drop_uniform_groups = True
  config.training.sequences_per_minibatch = 512  # one update a step
  config.training.tokens_per_row = 512
  config.training.tokens_per_microbatch = 2048
  config.model.head_chunk = 1024
  config.actor.optimizer.learning_rate = 1e-5
  config.actor.optimizer.decay = 'linear'
  config.actor.optimizer.end_fraction = 0.2
  config.actor.optimizer.warmup_updates = 3

  config.evaluation.every = 10
  config.evaluation.best_metric = 'val/chain_sum/exact_match'
  config.checkpoint.every = 20
  config.checkpoint.keep = 1
  config.dump_every = 10
  if arg == 'tiny':
    config.steps = 2
    config.data.train.args.size = 64
    config.data.validation.args.size = 8
    config.rollout.prompts_per_step = 4
    config.rollout.samples_per_prompt = 2
    config.training.sequences_per_minibatch = 8
    config.evaluation.every = 0
    config.checkpoint.every = 0
    config.export = False
  elif arg:
    raise ValueError(f"unknown variant {arg!r} of this config: 'tiny'")
  config.lock()
  return config
