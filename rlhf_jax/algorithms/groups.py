"""Statistics over the sequences that answer the same prompt.

Each function gives every sequence what its group says, in its own place: arrays
of N in, arrays of N out.  Groups may have any numbers and any sizes, and their
sequences need not be neighbours.
"""

from collections.abc import Callable

import chex
from flax import struct
import jax
import jax.numpy as jnp

from rlhf_jax import masked
from rlhf_jax import types

Array = types.Array

# Sequences whose groups are looked through at once.
BLOCK = 256


@struct.dataclass
class GroupStatistics:
  """Of each sequence, the statistics of the group that it belongs to."""

  valid: Array  # [N] bool: the sequence counts in its group
  count: Array  # [N] int32: valid sequences of its group
  mean: Array  # [N] float32
  std: Array  # [N] float32, Bessel-corrected; 0 for fewer than two
  centred: Array  # [N] float32: score - mean; 0 where not valid


def group_statistics(
  scores: Array, group: Array, valid: Array
) -> GroupStatistics:
  """Statistics of scores over the sequences that answer the same prompt.

  Scores that differ by rounding only are equal: their deviation is exactly 0,
  however small the number that it is later divided by.

  Args:
    scores: `[N]` float; one that is not finite is left out.
    group: `[N]` int, any numbers.
    valid: `[N]` bool, False leaves a sequence out of its group.

  Returns:
    Arrays `[N]`, at least float32.
  """
  chex.assert_rank([scores, group, valid], 1)
  chex.assert_equal_shape([scores, group, valid])
  valid = jnp.asarray(valid, bool) & jnp.isfinite(scores)
  scores = masked.fill(scores, valid)

  def of_sequence(member, score):
    low = masked.min(scores, member)
    high = masked.max(scores, member)
    # Distances to the lowest have a mean of exactly 0 where scores are equal.
    distance = scores - low  # N
    offset = masked.mean(distance, member)
    scale = jnp.where(masked.is_rounding(low, high), 0.0, 1.0)
    count = masked.count(member)
    total = masked.sum(jnp.square(distance - offset), member) * scale
    std = jnp.sqrt(total / jnp.maximum(count - 1, 1).astype(total.dtype))
    return count, low + offset, std, (score - low - offset) * scale

  count, mean, std, centred = _map_groups(of_sequence, group, valid, scores)
  centred = jnp.where(valid, centred, 0.0)
  return GroupStatistics(
    valid=valid, count=count, mean=mean, std=std, centred=centred
  )


def sums(x: Array, group: Array, valid: Array) -> Array:
  """The sum of each column of `x` over the valid sequences of the group.

  Args:
    x: `[N, M]` float; M is T, or anything else that sequences have a number of.
      Rows that are not valid may hold anything.
    group: `[N]` int, any numbers.
    valid: `[N]` bool.

  Returns:
    `[N, M]`, at least float32.
  """
  chex.assert_rank([x, group, valid], [2, 1, 1])
  chex.assert_equal_shape_prefix([x, group, valid], 1)
  valid = jnp.asarray(valid, bool)
  rows = jnp.broadcast_to(valid[:, None], x.shape)
  x = masked.fill(x, rows)  # N M

  def of_sequence(member):
    # By default an accelerator rounds the factors of a product to bfloat16.
    return jnp.dot(
      member.astype(x.dtype), x, precision=jax.lax.Precision.HIGHEST
    )

  return _map_groups(of_sequence, group, valid)


def largest_other(x: Array, group: Array, valid: Array) -> Array:
  """The largest `x` among the *other* valid sequences of the group.

  Args:
    x: `[N]` real.
    group: `[N]` int, any numbers.
    valid: `[N]` bool.

  Returns:
    `[N]`, at least float32; 0 where there is no other.
  """
  chex.assert_rank([x, group, valid], 1)
  chex.assert_equal_shape([x, group, valid])
  place = jnp.arange(x.shape[0])

  def of_sequence(member, own):
    return masked.max(x, member & (place != own))

  return _map_groups(of_sequence, group, jnp.asarray(valid, bool), place)


def _map_groups(function: Callable, group: Array, valid: Array, *own: Array):
  """`function(member, *own[n])` for every sequence n, stacked.

  `member` `[N]` bool are the valid sequences of the group of n.  Comparing ids
  makes do with any numbers and gives the same bits in every run, which a
  scatter-add on a GPU does not promise; in blocks of sequences, so that nothing
  of size N x N is stored.
  """
  group = jnp.asarray(group)

  def of_sequence(inputs):
    number, *own = inputs
    return function(valid & (group == number), *own)

  return jax.lax.map(of_sequence, (group, *own), batch_size=BLOCK)
