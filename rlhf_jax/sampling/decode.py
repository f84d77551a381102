"""Floor two of the sampler: prefill, and a decode loop over a cache."""

import functools

from flax import struct
import jax
import jax.numpy as jnp

from rlhf_jax import types
from rlhf_jax.models import config as model_config
from rlhf_jax.models import decoder
from rlhf_jax.sampling import cache as cache_lib
from rlhf_jax.sampling import pick


@struct.dataclass
class Request:
  """What each sequence asks for; all of it may change without recompiling."""

  samples: types.Array  # [N] int32: global index of the sample in the step
  temperature: types.Array  # [N] float32, 0 is greedy
  top_k: types.Array  # [N] int32, 0 is off
  top_p: types.Array  # [N] float32, 1 is off
  max_new_tokens: types.Array  # [N] int32, at least 1
  stop_ids: types.Array  # [M] int32, padded with -1


@struct.dataclass
class State:
  """The loop carry: N sequences in flight."""

  cache: cache_lib.Cache
  tokens: types.Array  # [N, T] int32
  logprobs: types.Array  # [N, T] float32
  lengths: types.Array  # [N] int32, prompt and response so far
  limits: types.Array  # [N] int32, length at which a sequence is cut
  done: types.Array  # [N] bool
  stopped: types.Array  # [N] bool, ended by a stop id


def prefill(
  params: types.PyTree,
  config: model_config.ModelConfig,
  prefix: types.Array,
  suffixes: types.Array,
  lengths: types.Array,
  slots: int,
  dtype: jnp.dtype,
) -> tuple[types.Array, cache_lib.Cache]:
  """Runs the prompts through the model, the prefix they share only once.

  Args:
    params: of the policy.
    config: of the model, static.
    prefix: [P] int32, the tokens with which every prompt begins; P may be 0.
    suffixes: [B, S] int32, the rest of each prompt, padded on the right.
    lengths: [B] int32, prefix and suffix; each suffix has a token or more.
    slots: cache slots per row, at least P + S.
    dtype: of the computation and the cache.

  Returns:
    [B, V] float32 logits of the first response token, and the cache.
  """
  batch, width = suffixes.shape
  begin = prefix.shape[0]
  cache = cache_lib.zeros(config, batch, slots, dtype)
  if begin:
    one = cache_lib.zeros(config, 1, begin, dtype)
    at = jnp.arange(begin)[None]  # 1 P
    causal = at[:, :, None] >= at[:, None, :]  # 1 P P
    _, keys, values = decoder.hidden_cached(
        params, config, prefix[None], at, one.keys, one.values, at, causal,
        dtype=dtype,
    )  # fmt: skip
    cache = cache_lib.Cache(
      keys=cache.keys.at[:, :, :begin].set(keys),
      values=cache.values.at[:, :, :begin].set(values),
    )
  positions = jnp.broadcast_to(begin + jnp.arange(width)[None], suffixes.shape)
  real = positions < lengths[:, None]
  mask = jnp.arange(slots)[None, None] <= positions[:, :, None]  # B S C
  hidden, keys, values = decoder.hidden_cached(
    params,
    config,
    suffixes,
    positions,
    cache.keys,
    cache.values,
    jnp.where(real, positions, slots),  # padding is not written
    mask,
    dtype=dtype,
  )
  last = (lengths - 1 - begin)[:, None, None]
  hidden = jnp.take_along_axis(hidden, last, axis=1)[:, 0]  # B D
  return (
    decoder.logits(params, config, hidden),
    cache_lib.Cache(keys=keys, values=values),
  )


def append(
  state: State, logits: types.Array, request: Request, key: types.Array
) -> State:
  """Picks the next token of every sequence that is not done.

  A stop id is written like any other token: it is an action.
  """
  rows = jnp.arange(state.tokens.shape[0])
  keys = pick.noise_keys(key, request.samples, state.lengths)
  tokens, logprobs = pick.pick(
    logits, keys, request.temperature, request.top_k, request.top_p
  )
  # Sequences that are done write to a place that does not exist.
  place = jnp.where(state.done, state.tokens.shape[1], state.lengths)
  lengths = state.lengths + jnp.where(state.done, 0, 1)
  stop = jnp.any(tokens[:, None] == request.stop_ids[None], axis=1)
  stopped = state.stopped | (~state.done & stop)
  return state.replace(
    tokens=state.tokens.at[rows, place].set(tokens, mode='drop'),
    logprobs=state.logprobs.at[rows, place].set(logprobs, mode='drop'),
    lengths=lengths,
    stopped=stopped,
    done=state.done | stopped | (lengths >= state.limits),
  )


@functools.partial(
  jax.jit, static_argnames=('config', 'samples_per_prompt', 'slots', 'dtype')
)
def start(
  params: types.PyTree,
  prefix: types.Array,
  suffixes: types.Array,
  lengths: types.Array,
  request: Request,
  key: types.Array,
  *,
  config: model_config.ModelConfig,
  samples_per_prompt: int,
  slots: int,
  dtype: jnp.dtype,
) -> State:
  """Prefills B prompts and picks the first token of N = B * samples.

  Args:
    params: of the policy.
    prefix: [P] int32, see `prefill`.
    suffixes: [B, S] int32.
    lengths: [B] int32.
    request: of the N sequences; the samples of a prompt are neighbours.
    key: of the rollout.
    config: of the model.
    samples_per_prompt: each prompt's cache is computed once and repeated.
    slots: the longest possible sequence, T.
    dtype: of computation and cache.
  """
  logits, cache = prefill(
    params, config, prefix, suffixes, lengths, slots, dtype
  )
  batch, begin, width = suffixes.shape[0], prefix.shape[0], suffixes.shape[1]
  tokens = jnp.zeros((batch, slots), jnp.int32)
  tokens = tokens.at[:, :begin].set(prefix[None])
  tokens = tokens.at[:, begin : begin + width].set(suffixes)
  tokens, lengths, logits = jax.tree.map(
    lambda x: jnp.repeat(x, samples_per_prompt, axis=0),
    (tokens, lengths, logits),
  )
  nothing = jnp.zeros(tokens.shape[0], bool)
  state = State(
    cache=cache_lib.repeat(cache, samples_per_prompt),
    tokens=tokens,
    logprobs=jnp.zeros(tokens.shape, jnp.float32),
    lengths=lengths,
    limits=jnp.minimum(lengths + request.max_new_tokens, slots),
    done=nothing,
    stopped=nothing,
  )
  return append(state, logits, request, key)


@functools.partial(
  jax.jit, static_argnames=('config', 'dtype'), donate_argnums=1
)
def advance(
  params: types.PyTree,
  state: State,
  request: Request,
  key: types.Array,
  steps: types.Array,
  *,
  config: model_config.ModelConfig,
  dtype: jnp.dtype,
) -> State:
  """Decodes up to `steps` tokens a sequence, stopping when all are done."""
  slots = state.tokens.shape[1]

  def body(carry):
    count, state = carry
    at = state.lengths - 1  # N, position of the newest token
    newest = jnp.take_along_axis(state.tokens, at[:, None], axis=1)  # N 1
    place = jnp.where(state.done, slots, at)[:, None]
    mask = jnp.arange(slots)[None, None] <= at[:, None, None]  # N 1 C
    hidden, keys, values = decoder.hidden_cached(
        params, config, newest, at[:, None], state.cache.keys,
        state.cache.values, place, mask, dtype=dtype,
    )  # fmt: skip
    logits = decoder.logits(params, config, hidden[:, 0])
    state = state.replace(cache=cache_lib.Cache(keys=keys, values=values))
    return count + 1, append(state, logits, request, key)

  def unfinished(carry):
    count, state = carry
    return (count < steps) & ~jnp.all(state.done)

  return jax.lax.while_loop(unfinished, body, (jnp.int32(0), state))[1]
