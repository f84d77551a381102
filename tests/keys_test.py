"""Addressed randomness: what a key is, and that it stays so."""

import itertools

import jax
import numpy as np
import pytest

from rlhf_jax import keys


def _data(key):
  return np.asarray(jax.random.key_data(key)).tolist()


def test_purposes_are_pinned():
  # The place of a purpose is part of the randomness of every run: append only.
  assert keys.PURPOSES[:6] == (
    'init', 'critic_init', 'rollout', 'minibatch', 'epoch', 'evaluate',
  )  # fmt: skip
  assert len(set(keys.PURPOSES)) == len(keys.PURPOSES)


def test_golden_values():
  # Any change of these bits changes every run that was ever made.
  # They agree with Threefry-2x32 of 20 rounds (Salmon et al. 2011), written
  # down on its own: key (0, seed), then each fold encrypts (0, number).
  assert _data(keys.key(0, 'init')) == [1797259609, 2579123966]
  assert _data(keys.key(17, 'rollout', 5)) == [2959604137, 3212513013]


def test_key_is_a_chain_of_folds():
  by_hand = jax.random.key(17, impl='threefry2x32')
  for number in (2, 5, 9):
    by_hand = jax.random.fold_in(by_hand, number)
  assert _data(keys.key(17, 'rollout', 5, 9)) == _data(by_hand)
  assert str(jax.random.key_impl(by_hand)).find('threefry') >= 0


def test_address_decides_and_nothing_else():
  # A key does not depend on those that were made before it, nor on whether
  # its address is a Python or a traced number.
  first = _data(keys.key(1, 'minibatch', 3))
  keys.key(1, 'minibatch', 4)
  assert _data(keys.key(1, 'minibatch', 3)) == first
  traced = jax.jit(lambda step: keys.key(1, 'minibatch', step))
  assert _data(traced(3)) == first


def test_addresses_do_not_collide():
  addresses = [
    (seed, purpose, *rest)
    for seed in (0, 1)
    for purpose in keys.PURPOSES
    for length in range(3)
    for rest in itertools.product(range(3), repeat=length)
  ]
  data = {tuple(_data(keys.key(*address))) for address in addresses}
  assert len(data) == len(addresses) == 2 * len(keys.PURPOSES) * 13


def test_unknown_purpose():
  with pytest.raises(ValueError, match='not in'):
    keys.key(0, 'dropout')
