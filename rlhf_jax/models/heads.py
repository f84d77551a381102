"""What a forward pass says of packed rows: log-probs, entropy, values."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp

from rlhf_jax import types
from rlhf_jax.models import config as config_lib
from rlhf_jax.models import decoder

Array = jax.Array
PyTree = Any


def score(
  params: PyTree,
  config: config_lib.ModelConfig,
  rows: types.Rows,
  *,
  entropy: bool = False,
  head_chunk: int = 2048,
  remat: bool = False,
  dtype: Any = jnp.float32,
) -> types.Scores:
  """Log-probs (and entropy) of the targets, or values with a critic's params.

  log softmax(logits / temperature)[target], 0 outside `rows.mask`.

  The head runs over chunks of places, actions first, and skips chunks
  without one; each chunk is recomputed in the backward pass, so no more than
  `head_chunk` rows of logits exist at a time.  If one chunk covers all places
  nothing is recomputed: the fastest where [R, L, V] fits into memory.

  Args:
    params: of `decoder.specs(config, 'policy')` or `(config, 'value')`.
    config: static.
    rows: the input, [R, L].
    entropy: also return the entropy of the tempered distribution.
    head_chunk: places whose logits exist at a time, over all R rows.
    remat: recompute the blocks in the backward pass.
    dtype: of the computation; the results are in at least float32.

  Returns:
    `Scores` with `logprobs` (and `entropy`, in nats), or with `values`.
    A critic's value stands at the place from which the action is predicted.
  """
  if 'value_head' in params and entropy:
    raise ValueError('a critic has no entropy; call score with entropy=False.')
  states = decoder.hidden(
    params,
    config,
    rows.tokens,
    rows.positions,
    rows.segment_ids,
    remat=remat,
    dtype=dtype,
  )
  if 'value_head' in params:
    return types.Scores(values=decoder.values(params, states))
  head = decoder.output_head(params, config, dtype)
  logprobs, entropies = token_logprobs(
    states,
    head,
    rows.targets,
    rows.mask,
    rows.temperature,
    entropy=entropy,
    head_chunk=head_chunk,
  )
  return types.Scores(logprobs=logprobs, entropy=entropies)


def token_logprobs(
  states: Array,
  head: tuple[Array, int],
  targets: Array,
  mask: Array,
  temperature: Array,
  *,
  entropy: bool = False,
  head_chunk: int = 2048,
) -> tuple[Array, Array | None]:
  """Chunked log softmax of states times head, at the targets.

  Args:
    states: [R, L, D].
    head: as `decoder.output_head` returns it.
    targets: [R, L] int32.
    mask: [R, L] bool.
    temperature: [R, L], > 0 where mask.
    entropy: also return the entropy.
    head_chunk: places whose logits exist at a time.

  Returns:
    ([R, L], [R, L] or None) in at least float32, 0 outside the mask.
  """
  chex.assert_rank([states, targets, mask, temperature], [3, 2, 2, 2])
  chex.assert_equal_shape([targets, mask, temperature])
  if head_chunk < 1:
    raise ValueError(f'head_chunk={head_chunk}; it must be at least 1 place.')
  num_rows, length = targets.shape
  width = min(max(head_chunk // num_rows, 1), length)
  if width == length:
    return _chunk(states, head, targets, mask, temperature, entropy)

  # Actions first in each row: the chunks without any action are then the last.
  order = jnp.argsort(~mask, axis=1, stable=True)  # R L
  back = jnp.argsort(order, axis=1)  # R L
  num_chunks = -(-length // width)
  arrays = tuple(
    _split(_permute(a, order, back), num_chunks, width)
    for a in (states, targets, mask, temperature)
  )

  @jax.checkpoint
  def chunk(head_weight, states, targets, mask, temperature):
    return jax.lax.cond(
      jnp.any(mask),
      lambda *a: _chunk(a[1], (a[0], head[1]), *a[2:], entropy),
      lambda *a: _empty(a[1], a[2], entropy),
      *(head_weight, states, targets, mask, temperature),
    )

  _, out = jax.lax.scan(
    lambda carry, a: (carry, chunk(head[0], *a)), None, arrays
  )
  logprobs, entropies = jax.tree.map(
    lambda a: _permute(_join(a, length), back, order), out
  )
  return logprobs, entropies


def _chunk(states, head, targets, mask, temperature, entropy):
  """Log-probs of some places; materialises their logits, [R, l, V]."""
  logits = decoder.project_to_vocabulary(states, head)
  # A masked place may hold anything; softmax(0 logits) is safe and unused.
  inverse = jnp.where(mask, 1 / jnp.where(mask, temperature, 1.0), 0.0)
  targets = jnp.where(mask, targets, 0)
  logprobs, entropies = _log_softmax(
    logits, inverse.astype(logits.dtype), targets, entropy
  )
  logprobs = jnp.where(mask, logprobs, 0.0)
  return logprobs, jnp.where(mask, entropies, 0.0) if entropy else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _log_softmax(
  logits: Array, inverse: Array, targets: Array, entropy: bool
) -> tuple[Array, Array | None]:
  """log softmax(logits * inverse) at the targets, and its entropy.

  With p the probabilities and H the entropy,

    d logprob / d logit_j = inverse (1[j = target] - p_j)
    d H       / d logit_j = -inverse p_j (log p_j + H)

  so the backward pass is one pass over the logits, and they are all it keeps.
  There is no gradient in `inverse` (one over the temperature).

  Args:
    logits: [R, l, V].
    inverse: [R, l], >= 0.
    targets: [R, l] int32.
    entropy: static; whether to compute it.
  """
  return _log_softmax_forward(logits, inverse, targets, entropy)[0]


def _log_softmax_forward(logits, inverse, targets, entropy):
  top = jnp.max(logits, axis=-1) * inverse  # R l
  shifted = logits * inverse[..., None] - top[..., None]  # R l V
  weights = jnp.exp(shifted)
  total = jnp.sum(weights, axis=-1)  # R l
  at_target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  log_total = top + jnp.log(total)
  logprobs = at_target * inverse - log_total
  entropies = None
  if entropy:
    mean = jnp.sum(weights * shifted, axis=-1) / total
    entropies = jnp.log(total) - mean
  saved = logits, inverse, targets, log_total, entropies
  return (logprobs, entropies), saved


def _log_softmax_backward(entropy, saved, gradients):
  logits, inverse, targets, log_total, entropies = saved
  gradient, gradient_entropy = (
    None if g is None else (g * inverse)[..., None] for g in gradients
  )
  log_probs = logits * inverse[..., None] - log_total[..., None]  # R l V
  probs = jnp.exp(log_probs)
  vocabulary = jnp.arange(logits.shape[-1])[None, None]
  hit = vocabulary == targets[..., None]
  # A comparison and not a scatter: it becomes part of the same pass.
  out = gradient * (hit.astype(probs.dtype) - probs)
  if entropy:
    surprise = log_probs + entropies[..., None]
    out = out - gradient_entropy * probs * surprise
  # `inverse` is 0 at masked places; whatever their logits are, nothing leaks.
  return jnp.where(inverse[..., None] > 0, out, 0.0), None, None


_log_softmax.defvjp(_log_softmax_forward, _log_softmax_backward)


def _empty(states, targets, entropy):
  zeros = jnp.zeros(targets.shape, jnp.promote_types(states.dtype, jnp.float32))
  return zeros, zeros if entropy else None


@jax.custom_vjp
def _permute(a: Array, order: Array, back: Array) -> Array:
  """a[r, order[r, l]]; `back` undoes `order`, so its gradient is a gather."""
  index = order.reshape(order.shape + (1,) * (a.ndim - 2))
  return jnp.take_along_axis(a, index, axis=1)


def _permute_forward(a, order, back):
  return _permute(a, order, back), (order, back)


def _permute_backward(saved, gradient):
  order, back = saved
  return _permute(gradient, back, order), None, None


_permute.defvjp(_permute_forward, _permute_backward)


def _split(a: Array, num_chunks: int, width: int) -> Array:
  """[R, L, ...] -> [chunks, R, width, ...], padded with zeros."""
  missing = num_chunks * width - a.shape[1]
  a = jnp.pad(a, [(0, 0), (0, missing)] + [(0, 0)] * (a.ndim - 2))
  a = a.reshape(a.shape[0], num_chunks, width, *a.shape[2:])
  return jnp.moveaxis(a, 1, 0)


def _join(a: Array, length: int) -> Array:
  """The reverse of `_split`."""
  a = jnp.moveaxis(a, 0, 1)
  return a.reshape(a.shape[0], -1, *a.shape[3:])[:, :length]
