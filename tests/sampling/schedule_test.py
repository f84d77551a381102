"""Waves: every prompt once, equal sizes, similar lengths together."""

import numpy as np
import pytest

from rlhf_jax.sampling import schedule


@pytest.mark.parametrize(
  'count, samples, slots, size',
  [
    (1, 1, 1, 1),
    (5, 2, 6, 3),  # 6 // 2 prompts, the last wave has one place free
    (5, 2, 7, 3),  # a slot left over is not used
    (6, 2, 6, 3),
    (5, 4, 64, 5),  # no larger than there are prompts
    (7, 8, 8, 1),
  ],
)
def test_waves_hold_every_prompt_once(count, samples, slots, size):
  lengths = np.random.default_rng(0).integers(1, 50, count)
  waves = schedule.waves(lengths, samples, slots)
  assert all(wave.shape == (size,) for wave in waves)
  assert len(waves) == -(-count // size)
  assert all(size * samples <= slots for _ in waves)
  flat = np.concatenate(waves)
  real = flat[flat >= 0]
  assert sorted(real) == list(range(count))
  # Only the end is filled up, so each wave begins with a prompt.
  assert (flat[: len(real)] >= 0).all() and (flat[len(real) :] == -1).all()
  assert (np.diff(lengths[real]) <= 0).all()


def test_equal_lengths_keep_their_order():
  waves = schedule.waves(np.array([3, 9, 3, 9, 3]), 1, 2)
  assert [wave.tolist() for wave in waves] == [[1, 3], [0, 2], [4, -1]]


def test_samples_that_do_not_fit_the_slots():
  with pytest.raises(ValueError, match=r'slots=7 .* 8 samples.*raise'):
    schedule.waves(np.array([3, 4]), 8, 7)
