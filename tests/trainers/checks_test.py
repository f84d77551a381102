"""Contradictions, ignored settings and misspelt keys are refused."""

import dataclasses
import json

from ml_collections import ConfigDict
import pytest

from configs import base
from rlhf_jax import testing
from rlhf_jax.models import config as model_config
from rlhf_jax.trainers import algorithm
from rlhf_jax.trainers import arithmetic
from rlhf_jax.trainers import checks

_MODEL = testing.tiny_config()
_REWARDS = {'constant': testing.constant_reward()}


def _config(**changes):
  config = base.get_config()
  config.update_from_flattened_dict(changes)
  return config


def test_the_defaults_are_accepted():
  algorithm.check(_config(), _MODEL, _REWARDS)


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'rollout.temperature': 0.0}, 'temperature=0.0 is greedy.*set it above 0'),
    (
      {'algorithm.advantages': 'gea'},
      "unknown advantage estimator 'gea': choose one of .*'gae'",
    ),
    (
      {'algorithm.policy_loss': 'pqo'},
      "unknown policy loss 'pqo': choose one of .*'ppo'",
    ),
    (
      {'algorithm.kl_reward.estimator': 'k4'},
      "unknown KL estimator 'k4': choose one of .*'k3'",
    ),
    # Its gradient has zero mean: not a loss.
    ({'algorithm.kl_loss.estimator': 'k1'}, "'k1' cannot be a loss.*use 'k2'"),
    (
      {'algorithm.kl_loss.controller': 'adaptiv'},
      r"controller='adaptiv' is not one of \['adaptive', 'fixed'\]",
    ),
    ({'algorithm.kl_reward.coef': -0.1}, 'KL coef is -0.1: it must be'),
    # From 0 an adaptive coefficient never moves.
    ({'algorithm.kl_loss.controller': 'adaptive'}, 'KL coef is 0.0: it must'),
    (
      {'algorithm.advantages': 'grpo', 'rollout.samples_per_prompt': 1},
      'compares the samples of a prompt: set .*samples_per_prompt to 2',
    ),
    # With a critic or a KL in the reward equal scores have an advantage.
    (
      {'algorithm.drop_uniform_groups': True},
      'with gae or a KL in the reward equal scores may have one: set it to',
    ),
    (
      {
        'algorithm.drop_uniform_groups': True,
        'algorithm.advantages': 'rloo',
        'algorithm.whiten': False,
        'algorithm.kl_reward.coef': 0.1,
      },
      'with rloo or a KL in the reward equal scores may have one',
    ),
    (
      {'rollout.slots': 2},
      'slots=2 sequences cannot hold .*samples_per_prompt=4 .*: raise slots',
    ),
    # What the loss itself refuses is refused before anything is compiled.
    (
      {'algorithm.clip_low': 1.5},
      'clip_low is 1.5: it must be at least 0 and at',
    ),
    ({'algorithm.dual_clip': 0.5}, 'dual_clip is 0.5: it must be more than 1'),
    (
      {'algorithm.advantages': 'rloo', 'algorithm.whiten': True},
      "whiten=True would be ignored by .*'rloo' and .* set it to None",
    ),
    (
      {'algorithm.advantages': 'grpo', 'algorithm.lam': 0.9},
      "lam=0.9 would be ignored by .*'grpo' and .* set it to 1.0",
    ),
    (
      {'algorithm.advantages': 'rloo', 'algorithm.gamma': 0.9},
      'gamma=0.9 would be ignored',
    ),
    (
      {
        'algorithm.advantages': 'rloo',
        'algorithm.bootstrap_truncated': True,
      },
      'bootstrap_truncated=True would be ignored.*set it to False',
    ),
    (
      {
        'algorithm.advantages': 'rloo',
        'algorithm.whiten': False,
        'critic.warmup_steps': 1,
      },
      "'rloo' has no critic: .*critic.warmup_steps 0",
    ),
    (
      {
        'algorithm.bootstrap_truncated': True,
        'algorithm.mask_truncated': True,
      },
      'bootstrap_truncated and algorithm.mask_truncated exclude each other',
    ),
    (
      {'algorithm.policy_loss': 'reinforce', 'training.epochs_per_step': 2},
      'reinforce is on-policy, a step of 2 updates is not: use ppo or one',
    ),
  ],
)
def test_ppo_refuses(changes, message):
  with pytest.raises(ValueError, match=message):
    algorithm.check(_config(**changes), _MODEL, _REWARDS)


def test_ppo_without_rewards():
  with pytest.raises(
    ValueError, match="no rewards: add one of .*'exact_match'"
  ):
    algorithm.check(_config(), _MODEL, {})


@pytest.mark.parametrize(
  'fields, message',
  [
    (dict(vocab_size=41), 'vocabulary of 41, the policy one of 37'),
    (dict(max_positions=5), 'has 5 positions, sequences have up to 320 tokens'),
  ],
)
def test_critic_of_another_kind(tmp_path, fields, message):
  other = dataclasses.replace(_MODEL, **(dict(max_positions=320) | fields))
  text = json.dumps(model_config.to_hf(other))
  (tmp_path / 'config.json').write_text(text)
  with pytest.raises(ValueError, match=message):
    algorithm.check(_config(**{'critic.path': str(tmp_path)}), _MODEL, _REWARDS)


# ---- Values that any stage would fail on ------------------------------------


@pytest.mark.parametrize(
  'trainer, changes, message',
  [
    ('sft', {'model.head_chunk': 0}, 'head_chunk=0 must be 1 or more tokens'),
    ('sft', {'memory_limit_bytes': -1}, 'memory_limit_bytes=-1 must be 0 '),
    (
      'sft',
      {'model.remat': 'full'},
      "model.remat='full' is not one of .'block', 'none', 'offload'.",
    ),
    (
      'ppo',
      {'training.gradient_dtype': 'float16'},
      "gradient_dtype='float16' is not one of .'bfloat16', 'float32'.",
    ),
    ('sft', {'checkpoint.keep': 0}, 'checkpoint.keep=0 must be 1 or more'),
    ('sft', {'checkpoint.every': -1}, 'checkpoint.every=-1 must be 0'),
    ('ppo', {'rollout.top_k': -1}, 'top_k=-1 must be 0 .off. or more tokens'),
    ('ppo', {'rollout.top_p': 0.0}, r'top_p=0.0 must be in \(0, 1\], 1 is off'),
    ('ppo', {'critic.clip': -0.1}, 'critic.clip=-0.1 must be 0 .off. or more'),
    ('ppo', {'critic.warmup_steps': -1}, 'warmup_steps=-1 must be 0 or more'),
    ('ppo', {'algorithm.gamma': 1.1}, r'gamma=1.1 must be in \[0, 1\]'),
    ('ppo', {'algorithm.lam': -0.1}, r'lam=-0.1 must be in \[0, 1\]'),
    ('ppo', {'algorithm.entropy_coef': -1.0}, 'entropy_coef=-1.0 must be 0'),
    ('sft', {'evaluation.every': -1}, 'evaluation.every=-1 must be 0'),
    ('sft', {'dump_every': -1}, 'dump_every=-1 must be 0'),
    (
      'sft',
      {'algorithm.aggregation': 'mean'},
      "aggregation='mean' is not one of .*token-mean",
    ),
    (
      'sft',
      {'training.epochs_per_step': 2},
      'epochs_per_step=2: the sft trainer reads a batch once; use steps or',
    ),
    (
      'ppo',
      {'evaluation.best_metric': 'val/a/exact'},
      "best_metric='val/a/exact' is not measured; one of .*'val/a/constant'",
    ),
  ],
)
def test_common_refuses(trainer, changes, message):
  with pytest.raises(ValueError, match=message):
    checks.common(_config(**changes), trainer, _REWARDS, {'a'})


def test_common_accepts():
  for name in ('', 'val/a/constant', 'val/a/score'):
    config = _config(**{'evaluation.best_metric': name})
    checks.common(config, 'ppo', _REWARDS, {'a'})


@pytest.mark.parametrize(
  'name, value, message',
  [
    ('exact', dict(rule='x', weight=1.0), r"rewards.exact lacks \['args'\]"),
    ('exact', dict(), r"lacks \['rule', 'weight', 'args'\]: a reward is"),
    (
      'score',
      dict(rule='x', weight=1.0, args={}),
      "cannot be called 'score', .* choose another name",
    ),
    (
      'exact',
      dict(rule='x', weight=float('nan'), args={}),
      'rewards.exact.weight=nan is not finite',
    ),
  ],
)
def test_rewards_section(name, value, message):
  config = base.get_config()
  config.rewards[name] = ConfigDict(value)
  with pytest.raises(ValueError, match=message):
    checks.rewards(config)


# ---- Stage overrides --------------------------------------------------------


def test_overrides_stay_in_their_stage():
  config = _config(**{'rollout.prompts_per_step': 64})
  first = checks.stage_config(
    config, {'rollout.prompts_per_step': 8, 'actor.optimizer.eps': 1e-3}
  )
  second = checks.stage_config(config, {'steps': 7})
  assert first.rollout.prompts_per_step == 8
  assert first.actor.optimizer.eps == 1e-3
  for other in (second, config):
    assert other.rollout.prompts_per_step == 64
    assert other.actor.optimizer.eps == 1e-8
  assert (first.steps, second.steps, config.steps) == (0, 7, 0)
  # Two sections that were made by one function are not one section.
  assert first.critic.optimizer.eps == 1e-8


@pytest.mark.parametrize(
  'name, nearest',
  [
    ('training.sequence_per_minibatch', 'training.sequences_per_minibatch'),
    ('actor.optimiser.learning_rate', 'actor.optimizer.learning_rate'),
    ('stepz', 'steps'),
  ],
)
def test_unknown_override_names_the_nearest_key(name, nearest):
  message = f"'{name}' is not a config key; did you mean '{nearest}'"
  with pytest.raises(ValueError, match=message):
    checks.stage_config(_config(), {name: 1})


def test_unknown_override_without_a_near_key():
  with pytest.raises(ValueError, match="'zzzzzzzzzz' is not a config key$"):
    checks.stage_config(_config(), {'zzzzzzzzzz': 1})


def test_flags_that_no_stage_would_read():
  config = _config()
  config.stages = (
    ('warmup', 'sft', {'steps': 3, 'training.tokens_per_row': 64}),
    ('ppo', 'ppo', {'steps': 4}),
  )
  with pytest.raises(
    ValueError,
    match=r'--config.steps would change nothing: every stage \(warmup, ppo\)',
  ):
    checks.check_overrides(config, {'steps', 'seed'})
  notes = checks.check_overrides(config, {'training.tokens_per_row', 'seed'})
  assert notes == [
    '--config.training.tokens_per_row: stage warmup keeps its own value'
  ]
  assert checks.check_overrides(config, {'seed'}) == []


def test_controller():
  config = _config(
    **{'algorithm.kl_loss.coef': 0.5, 'algorithm.kl_reward.coef': 0.1}
  )
  section = config.algorithm.kl_reward
  section.update(controller='adaptive', target=0.2, horizon=50)
  made = algorithm.controller(section)
  assert (made.kind, made.coef, made.target) == ('adaptive', 0.1, 0.2)
  assert made.horizon == 50
  fixed = algorithm.controller(config.algorithm.kl_loss)
  assert (fixed.kind, fixed.coef) == ('fixed', 0.5)


# 3 steps of 2 updates: 6 updates of the critic, fewer of a warmed-up actor.
_NUMBERS = arithmetic.Numbers(
  steps=3,
  sequences_per_step=8,
  minibatches_per_step=2,
  updates_per_step=2,
  longest_sequence=16,
  rows_per_microbatch=4,
  tokens_per_microbatch=64,
)


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'critic.warmup_steps': 3}, 'warmup_steps=3 of 3 steps: the actor would'),
    ({'critic.optimizer.decay': 'cosin'}, "critic: .*'cosin' is not one of"),
    ({'actor.optimizer.max_grad_norm': -1.0}, 'max_grad_norm=-1.0 must be 0'),
    ({'actor.optimizer.warmup_updates': -1}, 'warmup_updates=-1 must be 0 or'),
    ({'critic.optimizer.b1': 1.5}, r'critic.optimizer.b1=1.5 must be in \[0'),
    (
      {'critic.optimizer.moments_dtype': 'int8'},
      "critic.optimizer.moments_dtype='int8' is not one of .'bfloat16'",
    ),
    ({'actor.optimizer.eps': 0.0}, 'actor.optimizer.eps=0.0 must be more'),
    (
      {
        'critic.warmup_steps': 1,
        'actor.optimizer.decay': 'linear',
        'actor.optimizer.warmup_updates': 4,
      },
      'warmup_updates=4 must be less than the 4 updates',
    ),
  ],
)
def test_optimisers_are_checked_before_the_first_stage(changes, message):
  with pytest.raises(ValueError, match=message):
    checks.optimizers(_config(**changes), 'ppo', _NUMBERS)


def test_what_belongs_to_the_run_is_no_stage_override():
  for key in ('mesh.fsdp', 'model.path', 'tokenizer', 'evaluation.only'):
    with pytest.raises(ValueError, match='belong to the whole run'):
      checks.stage_config(_config(), {key: 1})
