"""Addressed randomness: a key is computed from what it is for, never consumed.

A draw depends only on its address (seed, purpose, step, sample, position), so
it is the same whatever the order, batch, slot or device.
"""

import jax

# New purposes go to the end: the number is part of every run's randomness.
PURPOSES = (
  'init',
  'critic_init',
  'rollout',
  'minibatch',
  'epoch',
  'evaluate',
  'filtration',
  'select',
)


def key(seed: int, purpose: str, *address) -> jax.Array:
  """`fold_in(... fold_in(fold_in(key(seed), purpose), address[0]) ...)`.

  Args:
    seed: of the run.
    purpose: one of `PURPOSES`.
    *address: integers or int32 scalars, for example the step.

  Returns:
    A threefry key (its bits are the same on every platform).

  Raises:
    ValueError: unknown purpose.
  """
  if purpose not in PURPOSES:
    raise ValueError(f'purpose {purpose!r} is not in {PURPOSES}')
  result = jax.random.key(seed, impl='threefry2x32')
  for number in (PURPOSES.index(purpose), *address):
    result = jax.random.fold_in(result, number)
  return result
