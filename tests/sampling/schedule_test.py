"""Buckets, calls of prefill, and when the host looks again."""

import numpy as np
import pytest

from rlhf_jax.sampling import schedule


@pytest.mark.parametrize(
  'widest, new, slots, groups, widths, places, all_slots',
  [
    # Small: one size of each.
    (12, 8, 6, 1, (12,), (20,), (6,)),
    # Halves: of widths three, of places four, of slots three.
    (1024, 3072, 256, 1, (256, 512, 1024), (512, 1024, 2048, 4096),
     (64, 128, 256)),
    (100, 500, 48, 1, (50, 100), (384, 640), (48,)),
    # Rows are a multiple of the data groups, halves too.
    (12, 8, 62, 8, (12,), (20,), (32, 64)),
    (12, 8, 65, 8, (12,), (20,), (72,)),
  ],
)  # fmt: skip
def test_buckets(widest, new, slots, groups, widths, places, all_slots):
  sizes = schedule.buckets(widest, new, slots, groups)
  assert sizes == schedule.Buckets(widths, places, all_slots)
  single = schedule.buckets(widest, new, slots, groups, prompt_sizes=1)
  assert single == schedule.Buckets((widest,), places, all_slots)


def test_fitting():
  assert [schedule.fitting(n, (4, 8, 16)) for n in (1, 4, 5, 16, 99)] == [
    4, 4, 8, 16, 16,
  ]  # fmt: skip


def test_calls_of_prefill_hold_every_prompt_once():
  rng = np.random.default_rng(0)
  lengths = rng.integers(1, 1025, 50)
  sizes = schedule.buckets(1024, 64, 16, 1)
  calls = schedule.prefills(lengths, sizes, 1)
  seen = []
  for width, prompts in calls:
    # 2048 tokens a call: 2 prompts of 1024, 4 of 512, 8 of 256.
    assert len(prompts) == 2048 // width
    real = prompts[prompts >= 0]
    assert (lengths[real] <= width).all()
    smaller = [w for w in sizes.widths if w < width]
    if smaller:
      assert (lengths[real] > smaller[-1]).all()
    seen += real.tolist()
  assert sorted(seen) == list(range(50))
  # Longest first, so that the end of a rollout is not one long sequence.
  assert (np.diff(lengths[seen]) <= 0).all()


def test_rows_of_a_call():
  assert schedule.prefill_rows(12, 512, 1) == 128  # 170, rounded to 2^7
  assert schedule.prefill_rows(12, 6, 1) == 4  # no more than slots
  assert schedule.prefill_rows(4096, 64, 1) == 1
  assert schedule.prefill_rows(4096, 64, 8) == 8


def test_when_the_host_looks_again():
  # 64 slots, 10 empty. Sequences wait: when 8 more are done.
  assert schedule.wanted_done(64, 10, True, 32) == 18
  # Nothing waits: when the rest fits into 32 slots.
  assert schedule.wanted_done(64, 10, False, 32) == 32
  # It is the smallest bucket: when all are done.
  assert schedule.wanted_done(16, 10, False, None) == 16
