"""Reward functions that misbehave, one after the other."""

import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.data import sources
from rlhf_jax.rewards import base


def _evaluate(reward, num=3, weights=None, **keywords):
  responses = [f'r{i}' for i in range(num)]
  examples = sources.load('prompts', prompts=[f'p{i}' for i in range(num)])
  rewards = reward if isinstance(reward, dict) else {'mine': reward}
  return base.evaluate(rewards, weights, responses, examples, **keywords)


def test_a_fraction_arrives_as_it_is():
  result = _evaluate(lambda responses, examples: [0.7, 1, True])
  np.testing.assert_array_equal(result.scores, np.float32([0.7, 1, 1]))
  np.testing.assert_array_equal(result.values[:, 0], result.scores)
  assert result.values.dtype == result.scores.dtype == np.float32
  assert not result.dropped.any() and not result.events


@pytest.mark.parametrize(
  'returned',
  [
    np.asarray([0.5, 1, 0]),
    jnp.asarray([0.5, 1, 0]),
    (np.float32(0.5), np.int64(1), jnp.asarray(0.0)),
  ],
)
def test_arrays_are_numbers_too(returned):
  result = _evaluate(lambda responses, examples: returned)
  np.testing.assert_array_equal(result.scores, np.float32([0.5, 1, 0]))


def test_several_rewards_with_weights():
  rewards = {
    'a': lambda responses, examples: [1.0, 2.0, 3.0],
    'b': lambda responses, examples: [10.0, None, 30.0],
  }
  result = _evaluate(rewards, weights={'b': 0.5, 'a': 2.0})
  assert result.names == ('a', 'b')
  np.testing.assert_array_equal(result.scores, np.float32([7, 4, 21]))
  assert np.isnan(result.values[1, 1]) and not result.events


def test_none_leaves_the_row_out():
  result = _evaluate(lambda responses, examples: [1.0, None, 0.0])
  np.testing.assert_array_equal(result.dropped, [False, True, False])
  assert np.isnan(result.scores[1]) and np.isnan(result.values[1, 0])
  assert not result.events  # nothing is wrong


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf, 1e300])
def test_not_finite_drops_the_row_and_names_it(bad):
  rewards = {
    'fine': lambda responses, examples: [1.0, 1.0, 1.0],
    'mine': lambda responses, examples: [0.5, bad, 0.5],
  }
  result = _evaluate(rewards)
  np.testing.assert_array_equal(result.dropped, [False, True, False])
  np.testing.assert_array_equal(result.scores[[0, 2]], np.float32([1.5, 1.5]))
  assert np.isnan(result.scores[1])
  (event,) = result.events
  assert event['kind'] == 'reward_not_finite' and event['reward'] == 'mine'
  assert event['count'] == 1 and event['samples'] == [1]
  assert "'r1'" in event['message']


@pytest.mark.parametrize(
  'returned, message',
  [
    ([1.0, 2.0], '2 values for 3'),
    ([1.0] * 4, '4 values for 3'),
    ('111', "'111' of type str"),
    (1.0, 'type float'),
    (None, 'type NoneType'),
    ({'a': 1}, 'type dict'),
    ([1.0, '2', 3.0], "'2' of type str for sample 1, 'r1'"),
    ([1.0, [2.0], 3.0], 'type list for sample 1'),
    ([1.0, 2j, 3.0], 'type complex for sample 1'),
  ],
)
@pytest.mark.parametrize('timeout_s', [None, 5.0])
def test_wrong_returns_name_the_function(returned, message, timeout_s):
  with pytest.raises(TypeError, match=f"reward 'mine'.*{message}"):
    _evaluate(lambda responses, examples: returned, timeout_s=timeout_s)


@pytest.mark.parametrize('timeout_s', [None, 5.0])
def test_an_exception_names_function_and_sample(timeout_s):
  def reward(responses, examples):
    return [{'r0': 1.0, 'r1': 2.0}[response] for response in responses]

  message = "reward 'mine' raised KeyError: 'r2', for sample 2, 'r2'"
  with pytest.raises(RuntimeError, match=message) as caught:
    _evaluate(reward, timeout_s=timeout_s)
  assert isinstance(caught.value.__cause__, KeyError)

  def only_in_batches(responses, examples):
    if len(responses) > 1:
      raise ValueError('too many')
    return [1.0]

  with pytest.raises(RuntimeError, match='batch of 3, but for none'):
    _evaluate(only_in_batches, timeout_s=timeout_s)

  def leaves(responses, examples):
    raise SystemExit(3)

  with pytest.raises(RuntimeError, match='SystemExit'):
    _evaluate(leaves, timeout_s=timeout_s)


def _hangs_on(response):
  release = threading.Event()

  def reward(responses, examples):
    if response in responses:
      release.wait(30)
    return [1.0] * len(responses)

  return reward, release


def test_one_that_hangs_gets_the_default_and_the_others_their_own():
  reward, release = _hangs_on('r1')
  start = time.monotonic()
  result = _evaluate(reward, timeout_s=0.2, default=-1.0)
  release.set()
  assert time.monotonic() - start < 5
  np.testing.assert_array_equal(result.scores, np.float32([1, -1, 1]))
  (event,) = result.events
  assert event['kind'] == 'reward_timeout' and event['samples'] == [1]
  assert not result.dropped.any()


def test_one_that_hangs_without_a_default_is_an_error():
  reward, release = _hangs_on('r2')
  with pytest.raises(TimeoutError, match="'mine'.*0.1 s for 1 of 3.*'r2'"):
    _evaluate(reward, timeout_s=0.1)
  release.set()


def test_an_endless_loop_is_ended():
  threads = []

  def reward(responses, examples):
    threads.append(threading.current_thread())
    while True:
      time.sleep(0.001)

  result = _evaluate(reward, num=1, timeout_s=0.1, default=0.0)
  assert result.scores.tolist() == [0.0]
  for thread in threads:
    thread.join(5)
    assert not thread.is_alive()


def test_arguments_are_checked():
  def ones(responses, examples):
    return [1.0] * len(responses)

  with pytest.raises(ValueError, match='no reward'):
    _evaluate({})
  with pytest.raises(ValueError, match='at least 1'):
    _evaluate(ones, num=0)
  with pytest.raises(ValueError, match='one weight'):
    _evaluate(ones, weights={'other': 1.0})
  with pytest.raises(ValueError, match='1 responses and 0 examples'):
    base.evaluate({'a': ones}, None, ['r'], [])
