"""What rewards read of a response."""

import types as python_types

import numpy as np
import pytest

from rlhf_jax.data import tokenizer as tokenizer_lib
from rlhf_jax.rewards import base as rewards_lib
from rlhf_jax.sampling import text as text_lib
from rlhf_jax.sharding import multihost
from rlhf_jax.trainers import evaluate
from rlhf_jax.trainers import rollout as rollout_lib

_STOP = ('##', 'end')
# Ended by a stop string; by an id, behind one that came too early to count; cut
# by the limit right behind one.
_RESPONSES = [('7 end', False), ('a##b', False), ('7##', True)]
_TEXTS = ['7 ', 'a##b', '7##']


@pytest.fixture(scope='module')
def tokenizer():
  return tokenizer_lib.load('bytes')


@pytest.fixture
def rollout(tokenizer):
  tokens = np.zeros((3, 9), np.int32)
  for row, (text, _) in zip(tokens, _RESPONSES):
    row[1 : 1 + len(text)] = tokenizer_lib.continuation(tokenizer, text)
  return python_types.SimpleNamespace(
    tokens=tokens,
    prompt_lengths=np.ones(3, np.int32),
    lengths=np.array([1 + len(text) for text, _ in _RESPONSES]),
    truncated=np.array([cut for _, cut in _RESPONSES]),
    group=np.zeros(3, np.int32),
  )


def test_a_stop_string_is_in_the_ids_and_not_in_the_text(tokenizer, rollout):
  assert evaluate.responses(rollout, tokenizer, _STOP) == _TEXTS
  assert evaluate.responses(rollout, tokenizer)[0] == '7 end'
  # launch/sample.py shows the same.
  sampler = python_types.SimpleNamespace(
    stop=_STOP, policy=python_types.SimpleNamespace(tokenizer=tokenizer)
  )
  for row, (text, cut) in enumerate(_RESPONSES):
    answer = text_lib.Answer(
      ids=rollout.tokens[row, 1 : 1 + len(text)].tolist(),
      finish='length' if cut else 'stop',
    )
    assert text_lib.Sampler.text(sampler, answer) == _TEXTS[row]


def test_rewards_of_a_step_read_that_text(tokenizer, rollout, monkeypatch):
  read = []
  monkeypatch.setattr(
    rewards_lib,
    'evaluate',
    lambda rewards, weights, texts, *a, **k: read.extend(texts),
  )
  config = python_types.SimpleNamespace(
    rollout=python_types.SimpleNamespace(stop_strings=_STOP),
    reward_timeout_s=None,
    reward_on_timeout=None,
  )
  setup = python_types.SimpleNamespace(
    config=config, tokenizer=tokenizer, rewards={}, reward_weights={}
  )
  prompt = python_types.SimpleNamespace(example=None)
  rollout_lib._rewards(setup, rollout, [prompt])
  assert read == _TEXTS


def test_so_do_those_of_an_evaluation(tokenizer, rollout, monkeypatch):
  monkeypatch.setattr(
    evaluate.engine, 'generate', lambda *args, **kwargs: rollout
  )
  read = []

  def reward(responses, examples):
    read.extend(responses)
    return [1.0] * len(examples)

  prompt = python_types.SimpleNamespace(
    ids=np.zeros(1, np.int32),
    example=python_types.SimpleNamespace(source='here', answer=None),
  )
  rollout.mask = np.ones_like(rollout.tokens, bool)
  _, rows, _ = evaluate.evaluate(
    None, [prompt], tokenizer, {'some': reward}, {'some': 1.0},
    islands=multihost.alone(), seed=0, stage='one', step=0,
    stop_strings=_STOP,
  )  # fmt: skip
  assert read == _TEXTS
  assert [row['response'] for row in rows] == _TEXTS
