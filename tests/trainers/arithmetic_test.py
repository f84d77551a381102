"""Batch arithmetic: derived numbers, and what cannot be divided."""

import pytest

from configs import base
from rlhf_jax.trainers import arithmetic


def _config(**changes):
  """8 prompts x 4 samples in mini-batches of 16, rows of 32 tokens."""
  config = base.get_config()
  values = {
    'steps': 5,
    'data.max_prompt_tokens': 20,
    'rollout.max_new_tokens': 12,
    'rollout.prompts_per_step': 8,
    'rollout.samples_per_prompt': 4,
    'training.sequences_per_minibatch': 16,
    'training.epochs_per_step': 3,
    'training.tokens_per_row': 32,
    'training.tokens_per_microbatch': 128,
  }
  config.update_from_flattened_dict(values | changes)
  return config


def _derive(config, trainer='ppo', **changes):
  options = dict(
    max_positions=64, data_groups=2, islands=1, prompts_in_data=100
  )
  return arithmetic.derive(config, trainer, **(options | changes))


def test_numbers_of_ppo():
  # 8 prompts x 4 samples = 32 sequences = 2 mini-batches, x 3 epochs = 6.
  # 128 / 32 = 4 rows in each of 2 data groups.
  assert _derive(_config()) == arithmetic.Numbers(
    steps=5,
    sequences_per_step=32,
    minibatches_per_step=2,
    updates_per_step=6,
    longest_sequence=32,
    rows_per_microbatch=8,
    tokens_per_microbatch=256,
  )


def test_numbers_of_sft():
  # A step is one mini-batch; prompts, samples and epochs play no part.
  numbers = _derive(_config(**{'rollout.samples_per_prompt': 7}), 'sft')
  assert numbers.sequences_per_step == 16
  assert (numbers.minibatches_per_step, numbers.updates_per_step) == (1, 1)


@pytest.mark.parametrize(
  'trainer, epochs, steps',
  [
    ('ppo', 1.0, 12),  # 100 prompts, 8 a step: 12.5
    ('ppo', 2.0, 25),
    ('ppo', 0.08, 1),
    ('sft', 1.0, 6),  # 16 a step: 6.25
  ],
)
def test_length_in_epochs(trainer, epochs, steps):
  config = _config(steps=0, epochs=epochs)
  assert _derive(config, trainer).steps == steps


@pytest.mark.parametrize(
  'changes, options, message',
  [
    ({'rollout.prompts_per_step': 0}, {}, r'prompts_per_step=0 must be 1'),
    ({'rollout.samples_per_prompt': -1}, {}, 'samples_per_prompt=-1 must be 1'),
    ({'rollout.max_new_tokens': 0}, {}, 'max_new_tokens=0 must be 1'),
    ({'data.max_prompt_tokens': 0}, {}, 'max_prompt_tokens=0 must be 1'),
    (
      {'training.sequences_per_minibatch': 0},
      {},
      'sequences_per_minibatch=0 must be 1',
    ),
    ({'training.epochs_per_step': 0}, {}, 'epochs_per_step=0 must be 1'),
    ({'training.tokens_per_row': 0}, {}, 'tokens_per_row=0 must be 1'),
    (
      {'training.tokens_per_microbatch': 0},
      {},
      'tokens_per_microbatch=0 must be 1',
    ),
    (
      {},
      dict(max_positions=31),
      'max_prompt_tokens=20 and rollout.max_new_tokens=12 make sequences of 32'
      ' tokens, the model has 31 positions',
    ),
    (
      {'training.tokens_per_row': 31},
      {},
      'tokens_per_row=31 cannot hold the longest sequence of 32 tokens.*raise',
    ),
    (
      {'training.tokens_per_microbatch': 100},
      {},
      'tokens_per_microbatch=100 must be a multiple of.*tokens_per_row=32',
    ),
    (
      {'training.sequences_per_minibatch': 6},
      {},
      'sequences_per_minibatch=6 must be a multiple of.*'
      'samples_per_prompt=4: the samples of a prompt stay in one',
    ),
    (
      {'training.sequences_per_minibatch': 24},
      {},
      '8 prompts x 4 samples = 32 sequences per step cannot be divided into'
      '.*sequences_per_minibatch=24',
    ),
    (
      {},
      dict(prompts_in_data=7),
      'a step takes 8 prompts, the training set has 7: lower the batch or add',
    ),
    ({'steps': 0}, {}, r'set the length of the stage by one of steps=0 and'),
    ({'epochs': 1.0}, {}, r'by one of steps=5 and epochs=1.0'),
    (
      {'steps': 0, 'epochs': 0.05},
      {},
      'epochs=0.05 of 100 prompts are less than one step of 8 prompts',
    ),
  ],
)
def test_errors_have_the_numbers(changes, options, message):
  with pytest.raises(ValueError, match=message):
    _derive(_config(**changes), **options)


def test_sft_batch_larger_than_the_data():
  with pytest.raises(ValueError, match='a step takes 16 prompts.* has 15'):
    _derive(_config(), 'sft', prompts_in_data=15)
