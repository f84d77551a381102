"""What is refused before anything is compiled or written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import quickstart
from rlhf_jax.trainers import setup as setup_lib

_TRAINERS = ('ppo', 'sft')


def _config(**changes):
  config = quickstart.get_config('tiny')
  stages = changes.pop('stages', None)
  config.update_from_flattened_dict({'mesh.devices': 1} | changes)
  if stages is not None:
    with config.unlocked():
      config.stages = stages
  return config


def test_stages_follow_each_other():
  first, second = setup_lib.stages(_config(steps=3), _TRAINERS)
  assert (first.name, first.trainer, first.first_step) == ('warmup', 'sft', 0)
  assert (second.name, second.trainer, second.first_step) == ('ppo', 'ppo', 2)
  assert (first.numbers.steps, second.numbers.steps) == (2, 3)
  assert len(first.validation) == 8
  # Held-out problems are in no training set.
  held_out = {prompt.example.prompt for prompt in second.validation}
  train = second.train.batch(0, len(second.train))
  assert not held_out & {prompt.example.prompt for prompt in train}
  lines = setup_lib.describe(second)
  assert lines[0] == 'stage ppo (ppo): steps 3 to 5'
  for part in ('sequences per step     16', '= 4 rows x 32', '(2 mini-batches'):
    assert any(part in line for line in lines), part


_PPO = (('ppo', 'ppo', {}),)


@pytest.mark.parametrize(
  'changes, message',
  [
    (dict(stages=()), 'config.stages is empty: name at least one'),
    (
      dict(stages=_PPO + _PPO),
      r"stages must have different names, got \['ppo', 'ppo'\]",
    ),
    (
      dict(stages=(('a', 'dpo', {}),)),
      r"stage 'a' asks for the trainer 'dpo': choose one of \['ppo', 'sft'\]",
    ),
    (
      dict(stages=(('a', 'ppo', {'rollout.promts_per_step': 2}),)),
      "stage 'a': .*did you mean 'rollout.prompts_per_step'",
    ),
    # The stage is named with every error in it.
    (
      {'training.sequences_per_minibatch': 7},
      "stage 'ppo': .*sequences_per_minibatch=7 must be a multiple",
    ),
    ({'mesh.devices': 99}, 'mesh.devices=99, but there are 8'),
    ({'mesh.devices': -1}, 'mesh.devices=-1, but there are 8'),
    ({'mesh.data': 3}, 'does not fit 1 devices.*nearest: data=1 fsdp=1'),
    ({'mesh.expert': 2}, 'mesh.expert=2: there are no models with experts'),
    (
      {'mesh.devices': 8, 'mesh.fsdp': 1, 'mesh.tensor': 8},
      "stage 'warmup': mesh .*tensor=8.* cannot split the model: model"
      ' num_heads=4 is not a multiple of tensor x context = 8; model'
      ' vocab_size=259 is not a multiple of tensor = 8; nearest: data=1 fsdp=8',
    ),
    (
      {
        'mesh.devices': 8,
        'mesh.context': 2,
        'training.tokens_per_row': 33,
        'training.tokens_per_microbatch': 33,
      },
      'training.tokens_per_row=33 is not a multiple of context = 2; nearest:',
    ),
    (
      {'model.path': 'some/folder'},
      'model.path and model.architecture are both set',
    ),
    (
      {'model.architecture.vocab_size': 100},
      '259.*100|100.*259',
    ),
    ({'model.architecture.num_heads': 3}, 'num_heads=3 is not a multiple'),
    ({'data.train.source': ''}, "train.source is empty: choose .*'arithmetic'"),
    (
      {'data.train.source': 'arithmetics'},
      "no source 'arithmetics'; the choices are .*'arithmetic'",
    ),
    ({'data.train.args.size': 0}, 'size must be at least 1, got 0'),
    (
      {'data.train.args.size': 4},
      'a step takes 8 prompts, the training set has',
    ),
    (
      {'data.max_prompt_tokens': 2},
      'longer than max_prompt_length 2 .*raise max_prompt_length',
    ),
    ({'data.overlong': 'cut'}, "overlong must be one of .*'drop'"),
    ({'rollout.stop': ('ab',)}, 'ab'),
    (
      {'evaluation.only': True, 'data.validation.source': ''},
      'evaluation.only needs data.validation.source',
    ),
    (
      {'rewards.exact_match.rule': 'exact'},
      "no reward 'exact'; the choices are .*'exact_match'",
    ),
    ({'rollout.max_new_tokens': 60}, 'the model has 64 positions'),
    (
      {'tokenizer': '/no/such/folder'},
      "no folder '/no/such/folder'; give an existing local folder",
    ),
  ],
)
def test_stages_refuse(changes, message):
  with pytest.raises(ValueError, match=message):
    setup_lib.stages(_config(**changes), _TRAINERS)


def test_no_model():
  config = _config()
  with config.unlocked():
    config.model.architecture = type(config)()
  with pytest.raises(ValueError, match='no model: set model.path to'):
    setup_lib.stages(config, _TRAINERS)


def test_dtype():
  assert setup_lib.dtype('auto') == jnp.float32  # on a CPU
  assert setup_lib.dtype('bfloat16') == jnp.bfloat16
  with pytest.raises(ValueError, match="dtype 'float16' is not 'float32'"):
    setup_lib.dtype('float16')


def test_prefix_is_what_all_prompts_share():
  config = _config(
    **{'data.prompt_format': 'sum: {prompt}', 'data.max_prompt_tokens': 16}
  )
  for setup in setup_lib.stages(config, _TRAINERS):
    assert bytes(setup.prefix.tolist()) == b'sum: '
    shape = setup.sampler(3)['shape']
    assert (shape.width, shape.samples_per_prompt) == (22, 3)
  config.rollout.share_prefix = False
  (_, ppo) = setup_lib.stages(config, _TRAINERS)
  assert not len(ppo.prefix)
  assert np.prod(ppo.mesh.devices.shape) == 1
  assert jax.device_count() == 8
