"""AdamW with warm-up, decay and clipping, put together from optax."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from rlhf_jax import tree
from rlhf_jax import types


def schedule(
  learning_rate: float,
  *,
  warmup_updates: int,
  decay: str,
  total_updates: int,
  end_fraction: float,
) -> Callable[[types.Array], types.Array]:
  """Learning rate as a function of the number of updates made so far.

    warm-up: lr * (u + 1) / warmup      for u < warmup, so the first is not 0
    then     lr * shape(progress)       from 1 down to `end_fraction`

  Args:
    learning_rate: the largest value.
    warmup_updates: optimiser updates of linear rise.
    decay: 'constant', 'linear' or 'cosine'.
    total_updates: optimiser updates of the whole stage.
    end_fraction: of `learning_rate`, reached at `total_updates`.

  Raises:
    ValueError: unknown decay, or a warm-up longer than the stage.
  """
  if decay not in DECAYS:
    raise ValueError(
      f'optimizer.decay={decay!r} is not one of {sorted(DECAYS)}'
    )
  if decay != 'constant' and warmup_updates >= total_updates:
    raise ValueError(
      f'optimizer.warmup_updates={warmup_updates} must be less than the'
      f' {total_updates} updates of the stage'
    )

  def value(update):
    update = jnp.asarray(update, jnp.float32)
    span = max(total_updates - warmup_updates, 1)
    progress = jnp.clip((update - warmup_updates) / span, 0.0, 1.0)
    decayed = end_fraction + (1 - end_fraction) * DECAYS[decay](progress)
    rise = (update + 1) / max(warmup_updates, 1)
    return learning_rate * jnp.where(update < warmup_updates, rise, decayed)

  return value


def adamw(
  learning_rate: Callable[[types.Array], types.Array],
  *,
  b1: float,
  b2: float,
  eps: float,
  weight_decay: float,
  max_grad_norm: float,
) -> optax.GradientTransformation:
  """Clips the global norm, then AdamW; vectors (norms, biases) do not decay.

  Args:
    learning_rate: see `schedule`.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    weight_decay: decoupled (Loshchilov and Hutter 2019).
    max_grad_norm: gradients with a larger global norm are scaled down to it;
      0 is off.

  Raises:
    ValueError: a negative norm, which would turn the gradient around.
  """
  if max_grad_norm < 0:
    raise ValueError(
      f'optimizer.max_grad_norm={max_grad_norm} must be positive, or 0 for off'
    )
  clip = optax.identity()
  if max_grad_norm:
    clip = optax.clip_by_global_norm(max_grad_norm)
  return optax.chain(
    clip,
    optax.adamw(
      learning_rate,
      b1=b1,
      b2=b2,
      eps=eps,
      weight_decay=weight_decay,
      mask=_decays,
    ),
  )


def _decays(params):
  """True where a weight is a matrix; stacked layers add a leading axis."""

  def decide(path, x):
    name = tree.name(path)
    stacked = name.startswith('layers/')
    # A bias of heads has two axes, but is a vector all the same.
    return x.ndim - stacked >= 2 and not name.endswith('bias')

  return jax.tree_util.tree_map_with_path(decide, params)


DECAYS = {
  'constant': lambda progress: jnp.ones_like(progress),
  'linear': lambda progress: 1.0 - progress,
  'cosine': lambda progress: 0.5 * (1.0 + jnp.cos(jnp.pi * progress)),
}
