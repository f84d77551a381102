"""What a forward pass says of packed rows: log-probs, entropy, values."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp

from rlhf_jax import types
from rlhf_jax.algorithms import kl
from rlhf_jax.models import config as config_lib
from rlhf_jax.models import decoder
from rlhf_jax.sharding import rules

Array = jax.Array
PyTree = Any


def score(
  params: PyTree,
  config: config_lib.ModelConfig,
  rows: types.Rows,
  *,
  entropy: bool = False,
  sum_squares: bool = False,
  reference: tuple[PyTree, Array] | None = None,
  keep_states: bool = False,
  head_chunk: int = 2048,
  remat: str = 'none',
  dtype: Any = jnp.float32,
) -> types.Scores:
  """Log-probs (and more) of the targets, or values with a critic's params.

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
    sum_squares: also return sum_v p_v^2; it carries no gradient.
    reference: the head of the reference (see `head_params`) and its hidden
      states [R, L, D] of the same rows, for `divergence`: the exact
      KL(policy, reference) over the vocabulary, both tempered.
    keep_states: also return the hidden states, for `reference`.
    head_chunk: places whose logits exist at a time, over all R rows.
    remat: what is kept for the backward pass, see `decoder.hidden`.
    dtype: of the computation; the results are in at least float32.

  Returns:
    `Scores` with `logprobs` and what was asked for (nats), or with `values`.
    A critic's value stands at the place from which the action is predicted.

  Raises:
    ValueError: a critic is asked for more than values.
  """
  if 'value_head' in params and (entropy or sum_squares or reference):
    raise ValueError(
      'a critic has no entropy, sum of squares or divergence: it has values'
    )
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
  if reference is not None:
    reference_params, reference_states = reference
    reference = (
      reference_states.astype(dtype),
      decoder.output_head(reference_params, config, dtype),
    )
  scores = token_scores(
    states,
    decoder.output_head(params, config, dtype),
    rows.targets,
    rows.mask,
    rows.temperature,
    entropy=entropy,
    sum_squares=sum_squares,
    reference=reference,
    head_chunk=head_chunk,
  )
  return scores.replace(states=states) if keep_states else scores


def head_params(params: PyTree) -> PyTree:
  """The part of a policy's parameters that turns states into logits."""
  name = 'head' if 'head' in params else 'embed'
  return {name: params[name]}


def token_scores(
  states: Array,
  head: tuple[Array, int],
  targets: Array,
  mask: Array,
  temperature: Array,
  *,
  entropy: bool = False,
  sum_squares: bool = False,
  reference: tuple[Array, tuple[Array, int]] | None = None,
  head_chunk: int = 2048,
) -> types.Scores:
  """Chunked log softmax of states times head, and what follows from it.

  Args:
    states: [R, L, D].
    head: as `decoder.output_head` returns it.
    targets: [R, L] int32.
    mask: [R, L] bool.
    temperature: [R, L], > 0 where mask.
    entropy: also return the entropy.
    sum_squares: also return sum_v p_v^2.
    reference: states and head of the reference, for the exact divergence.
    head_chunk: places whose logits exist at a time.

  Returns:
    `Scores` of [R, L], at least float32, 0 outside the mask.
  """
  chex.assert_rank([states, targets, mask, temperature], [3, 2, 2, 2])
  chex.assert_equal_shape([targets, mask, temperature])
  if head_chunk < 1:
    raise ValueError(f'head_chunk={head_chunk}; it must be at least 1 place.')
  other_states, other_head = (None, None) if reference is None else reference
  heads = [head] if other_head is None else [head, other_head]
  mesh = rules.mesh_of(states, head[0])
  split = rules.parts(mesh, 'rows'), rules.parts(mesh, 'places')
  if any(size % n for size, n in zip(targets.shape, split)):
    split = 1, 1
  length = targets.shape[1] // split[1]
  width = head_chunk // (targets.shape[0] * split[1])
  scores = functools.partial(
    _scores,
    axes=[axis for _, axis in heads],
    width=min(max(width, 1), length),
    asked=dict(entropy=entropy, sum_squares=sum_squares),
  )
  if split == (1, 1):
    mesh = None
  weights = [weight for weight, _ in heads]
  places = states, other_states, targets, mask, temperature
  if mesh is None:
    return scores(weights, places)
  # Each device goes through its own places: none of them crosses devices, and
  # the gradient of the head does once, and not after every chunk.
  # So wide that the gradient is summed over devices in at least float32.  (On
  # the CPU XLA ends the process over such a sum in bfloat16.)
  wide = jnp.promote_types(states.dtype, jnp.float32)
  names = ('embed', 'vocab'), ('vocab', 'embed')
  weights = [
    rules.copies(weight.astype(wide), names[axis], mesh, states.dtype)
    for weight, axis in heads
  ]
  run = rules.on_places(
    lambda weights, places: scores([weight[0] for weight in weights], places),
    mesh,
    targets.shape,
    in_specs=(rules.every_part(), None),
    out_specs=None,
  )
  return run(weights, places)


def _scores(
  weights: list[Array], places, *, axes: list[int], width: int, asked: dict
) -> types.Scores:
  """`token_scores` of the places of one device, `width` of each row at a time.

  `weights` are those of the policy's head, and of the reference's if there is
  one; `axes` are their axes of the model width.
  """
  mask = places[3]
  length = mask.shape[1]
  weights = [weight.astype(places[0].dtype) for weight in weights]
  of = lambda weights: [*zip(weights, axes), None][:2]
  if width == length:
    return _chunk(*of(weights), *places, **asked)

  # Actions first in each row: the chunks without any action are then the last.
  order = jnp.argsort(~mask, axis=1, stable=True)  # R L
  back = jnp.argsort(order, axis=1)  # R L
  num_chunks = -(-length // width)
  places = jax.tree.map(
    lambda a: _split(_permute(a, order, back), num_chunks, width), places
  )

  @jax.checkpoint
  def chunk(weights, places):
    some = lambda: _chunk(*of(weights), *places, **asked)
    # Only the shapes of `some` are read here.
    none = lambda: jax.tree.map(
      lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(some)
    )
    return jax.lax.cond(jnp.any(places[3]), some, none)

  _, out = jax.lax.scan(
    lambda carry, a: (carry, chunk(weights, a)), None, places
  )
  return jax.tree.map(lambda a: _permute(_join(a, length), back, order), out)


def _chunk(
    head, other_head, states, other_states, targets, mask, temperature, *,
    entropy, sum_squares,
) -> types.Scores:  # fmt: skip
  """Scores of some places; materialises their logits, [R, l, V]."""
  logits = decoder.project_to_vocabulary(states, head)
  # A masked place may hold anything; softmax(0 logits) is safe and unused.
  inverse = jnp.where(mask, 1 / jnp.where(mask, temperature, 1.0), 0.0)
  inverse = inverse.astype(logits.dtype)
  targets = jnp.where(mask, targets, 0)
  logprobs, entropies = _log_softmax(logits, inverse, targets, entropy)
  scores = types.Scores(logprobs=logprobs, entropy=entropies)
  if sum_squares:
    probs = jax.nn.softmax(jax.lax.stop_gradient(logits) * inverse[..., None])
    scores = scores.replace(sum_squares=jnp.sum(jnp.square(probs), axis=-1))
  if other_head is not None:
    other = decoder.project_to_vocabulary(other_states, other_head)
    scores = scores.replace(
      divergence=kl.full(
        jnp.where(mask[..., None], logits * inverse[..., None], 0.0),
        jnp.where(mask[..., None], other * inverse[..., None], 0.0),
      )
    )
  return jax.tree.map(lambda a: jnp.where(mask, a, 0.0), scores)


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
