"""Floor three of the sampler: which prompts decode together."""

import numpy as np


def waves(
  lengths: np.ndarray, samples_per_prompt: int, slots: int
) -> list[np.ndarray]:
  """Groups prompts into waves that fit the slots, longest prompts first.

  Args:
    lengths: [B] tokens of each prompt.
    samples_per_prompt: sequences that a prompt takes; they stay together.
    slots: sequences that decode at the same time.

  Returns:
    A list of int arrays of prompt indices, all of the same size: the last one
    is filled up with -1.  Prompts of similar length share a wave.

  Raises:
    ValueError: one prompt's samples do not fit the slots.
  """
  size = slots // samples_per_prompt
  if size < 1:
    raise ValueError(
      f'rollout.slots={slots} sequences cannot hold the {samples_per_prompt}'
      ' samples of one prompt: raise rollout.slots or lower the samples'
    )
  size = min(size, len(lengths))
  order = np.argsort(-np.asarray(lengths), kind='stable')
  count = -(-len(order) // size)
  padded = np.full(count * size, -1, order.dtype)
  padded[: len(order)] = order
  return list(padded.reshape(count, size))
