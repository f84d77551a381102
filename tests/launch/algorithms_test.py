"""Every algorithm of the config, through the launch script's `train`.

Two steps each of a model from scratch; what differs is the section `algorithm`.
"""

import itertools

from ml_collections import ConfigDict
import numpy as np
import pytest

from configs import base
from launch import train as launch
from rlhf_jax.algorithms import advantages
from rlhf_jax.algorithms import aggregation
from rlhf_jax.algorithms import kl
from rlhf_jax.algorithms import policy_losses
from rlhf_jax.monitor import writers
from rlhf_jax.trainers import algorithm

ESTIMATORS = sorted(advantages.ESTIMATORS)
LOSSES = sorted(policy_losses.LOSSES)
ON_POLICY = {'training.sequences_per_minibatch': 8}


def _config(**changes) -> ConfigDict:
  """8 sequences a step in two mini-batches, rewards between 0 and 1."""
  config = base.get_config()
  config.tokenizer = 'bytes'
  config.model.architecture = ConfigDict(
    dict(
      family='llama',
      vocab_size=259,
      d_model=8,
      d_mlp=8,
      num_layers=1,
      num_heads=2,
      num_kv_heads=1,
      head_dim=4,
      max_positions=16,
      tied_embeddings=True,
      init_std=0.3,
    )
  )
  source = dict(source='arithmetic')
  config.data.train = ConfigDict(source | dict(args=dict(size=64)))
  config.data.validation = ConfigDict(
    source | dict(args=dict(split='validation', size=4))
  )
  for name, characters in (('low', range(128)), ('even', range(0, 256, 2))):
    text = ''.join(map(chr, characters))
    config.rewards[name] = ConfigDict(
      dict(rule='character_share', weight=0.5, args=dict(characters=text))
    )
  config.update_from_flattened_dict(
    {
      'mesh.devices': 1,
      'steps': 2,
      'data.max_prompt_tokens': 8,
      'rollout.prompts_per_step': 2,
      'rollout.samples_per_prompt': 4,
      'rollout.max_new_tokens': 6,
      'rollout.slots': 8,
      'training.sequences_per_minibatch': 4,
      'training.tokens_per_row': 16,
      'training.tokens_per_microbatch': 64,
      'actor.optimizer.learning_rate': 1e-2,
      'evaluation.before_train': False,
      'export': False,
    }
    | changes
  )
  config.lock()
  return config


def _run(tmp_path, **changes) -> list[dict]:
  """The metrics of both steps of a run that ends well."""
  config = _config(**changes)
  before = config.to_json()
  assert launch.train(config, str(tmp_path / 'run')) == 0
  assert config.to_json() == before
  lines = writers.read(tmp_path / 'run' / writers.METRICS)
  lines = [line for line in lines if 'critic/score/mean' in line]
  assert [line['step'] for line in lines] == [1, 2]
  for line in lines:
    for name in ('actor/pg_loss', 'actor/grad_norm', 'actor/entropy'):
      assert np.isfinite(line[name]), (name, line[name])
    assert line['actor/grad_norm'] > 0
    assert line['actor/skipped_updates'] == 0
  return lines


def _some(names, quick):
  """The cases that run by default; the others are slow: run by hand."""
  assert set(quick) <= set(names)
  slow = pytest.mark.slow
  return [x if x in quick else pytest.param(x, marks=slow) for x in names]


@pytest.mark.parametrize(
  'name', _some(ESTIMATORS, ['gae', 'gdpo', 'optimal_token_baseline', 'remax'])
)
def test_estimators_with_the_ppo_loss(name, tmp_path):
  lines = _run(tmp_path, **{'algorithm.advantages': name})
  # Only with a critic is one trained.
  assert ('critic/vf_loss' in lines[0]) == (
    name in advantages.CRITIC_ESTIMATORS
  )


@pytest.mark.parametrize('name', _some(LOSSES, ['clip_cov', 'gpg', 'gspo']))
def test_losses_with_grpo(name, tmp_path):
  changes = {'algorithm.advantages': 'grpo', 'algorithm.policy_loss': name}
  if name in algorithm.NO_RATIO:
    changes |= ON_POLICY
  if name in policy_losses.SELECTIONS:
    changes[f'algorithm.{name}.share'] = 0.3
  if name == 'clip_cov':
    changes |= {'algorithm.clip_cov.low': -9.0, 'algorithm.clip_cov.high': 9.0}
  lines = _run(tmp_path, **changes)
  # The first update of a step is at ratio 1, the second is not.
  assert lines[0]['actor/ratio_max'] > 1 or name in algorithm.NO_RATIO
  if name in policy_losses.SELECTIONS:
    assert 0 < lines[0]['actor/pg_covfrac'] <= 0.3


GRPO = {'algorithm.advantages': 'grpo'}
OTHERS = {
  'exact KL in the loss': {
    'algorithm.kl_loss.coef': 0.5,
    'algorithm.kl_loss.estimator': 'full',
  },
  'exact KL in both, k3+ later': {
    'algorithm.kl_reward.coef': 0.1,
    'algorithm.kl_reward.estimator': 'full',
    'algorithm.kl_loss.coef': 0.5,
    'algorithm.kl_loss.estimator': 'full',
  },
  'exact KL in the reward': {
    'algorithm.kl_reward.coef': 0.1,
    'algorithm.kl_reward.estimator': 'full',
    'algorithm.kl_reward.controller': 'adaptive',
  },
  'straight-through, adaptive in the loss': {
    'algorithm.kl_loss.coef': 0.5,
    'algorithm.kl_loss.estimator': 'low_var_kl_verl+',
    'algorithm.kl_loss.controller': 'adaptive',
    'algorithm.kl_loss.horizon': 80,
  },
  'truncated importance': {
    'algorithm.importance.level': 'token',
    'algorithm.importance.normalize': True,
  },
  'IcePop of sequences, rejection': {
    'algorithm.importance.level': 'sequence',
    'algorithm.importance.lower': 0.5,
    'algorithm.rejection.statistic': 'k3',
    'algorithm.rejection.level': 'sequence_max',
    'algorithm.rejection.high': 0.1,
  },
  'reused log-probs': {'rollout.logprobs': 'reuse'},
  'reused log-probs, weights in the loss': {
    'rollout.logprobs': 'reuse',
    'algorithm.policy_loss': 'gpg',
    'algorithm.importance.level': 'token',
  },
  'pow': {'algorithm.filtration.method': 'pow'},
  'max_min': {'algorithm.filtration.method': 'max_min'},
  'max_random': {'algorithm.filtration.method': 'max_random'},
  'entropy': {'algorithm.entropy_coef': 0.1},
  'one update': ON_POLICY,
  'dynamic sampling': {'algorithm.dynamic_sampling.rounds': 2},
  'stop strings, min-p': {
    'rollout.stop_strings': ('\x01\x02', 'a'),
    'rollout.min_p': 0.001,
    'rollout.min_new_tokens': 2,
    'algorithm.truncated_penalty': 0.1,
  },
}


@pytest.mark.parametrize('name', OTHERS)
def test_other_parts_with_grpo(name, tmp_path):
  changes = GRPO | OTHERS[name]
  lines = _run(tmp_path, **changes)
  first, second = lines
  # The gap between sampler and trainer is reported in every mode.
  assert 0 <= first['training/rollout_probs_diff_max'] < 1e-4 or (
    'reuse' in changes.values()
  )
  if 'KL in' in name or 'straight' in name:
    # The policy is its reference at the first update of the first step only.
    assert second['kl/reference'] > 0
  if changes.get('algorithm.kl_reward.coef'):
    assert first['kl/reward'] == pytest.approx(0, abs=1e-6)
    assert second['kl/reward'] > 0
  if 'adaptive in the loss' in name:
    # Far from the target: 2 steps of 20 % times 8 / 80 sequences, up or down.
    assert second['actor/kl_coef'] != 0.5
  if 'filtration' in str(changes):
    assert 0 < first['training/filtration_distinct'] < 1
  if name == 'truncated importance':
    mean = first['training/rollout_corr/rollout_is_mean']
    assert mean == pytest.approx(1, abs=1e-4)
  if 'dynamic' in name:
    assert first['training/prompts_sampled'] >= 2
  if 'stop strings' in name:
    assert first['response_length/min'] >= 2
  if 'rejection' in name:
    share = first['training/rollout_corr/rollout_rs_masked_fraction']
    assert share == 0


@pytest.mark.parametrize(
  'mode', _some(sorted(aggregation.MODES), ['seq-mean-token-sum-norm'])
)
def test_aggregation_modes(mode, tmp_path):
  _run(tmp_path, **GRPO, **{'algorithm.aggregation': mode})


def test_all_pairs_pass_or_are_refused():
  """Which estimators go with which losses is written down here."""
  for estimator, loss in itertools.product(ESTIMATORS, LOSSES):
    config = _config(
      **{'algorithm.advantages': estimator, 'algorithm.policy_loss': loss},
      **(ON_POLICY if loss in algorithm.NO_RATIO else {}),
    )
    algorithm.check(config, None, {'some': len})
    off_policy = _config(
      **{'algorithm.advantages': estimator, 'algorithm.policy_loss': loss}
    )
    if loss in algorithm.NO_RATIO:
      with pytest.raises(ValueError, match='is on-policy, a step of 2'):
        algorithm.check(off_policy, None, {'some': len})


def test_all_pairs_of_kl_and_place():
  for name, place in itertools.product(
    sorted([*kl.ESTIMATORS, 'full']), ('kl_reward', 'kl_loss')
  ):
    config = _config(
      **GRPO,
      **{
        f'algorithm.{place}.coef': 0.1,
        f'algorithm.{place}.estimator': name,
      },
    )
    if place == 'kl_loss' and name in kl.NOT_LOSSES:
      with pytest.raises(ValueError, match='cannot be a loss'):
        algorithm.check(config, None, {'some': len})
    else:
      algorithm.check(config, None, {'some': len})


def test_defaults_are_those_of_the_config():
  """What an unread key must be is what it is by default."""
  values = launch.workdir_lib.flatten(base.get_config().algorithm)
  for key, default in algorithm.DEFAULTS.items():
    assert values[key] == default, key
  # Every key of every choice has a default to fall back to.
  read = {
    *itertools.chain(*algorithm.ESTIMATOR_KEYS.values()),
    *itertools.chain(*(x.values() for x in algorithm.LOSS_KEYS.values())),
    *itertools.chain(*(x.values() for x in algorithm.SELECTION_KEYS.values())),
  }
  assert read <= set(algorithm.DEFAULTS)
  # Every name has an entry, and no entry is left over.
  assert set(algorithm.ESTIMATOR_KEYS) == set(advantages.ESTIMATORS)
  assert set(algorithm.LOSS_KEYS) == set(policy_losses.LOSSES)
  assert set(algorithm.SELECTION_KEYS) == set(policy_losses.SELECTIONS)
