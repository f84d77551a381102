"""Floor two of the sampler: prefill, and a decode loop over slots.

A slot holds one sequence at a time.  `insert` puts a prefilled prompt into a
slot and draws its first token; `advance` draws further tokens of all slots
until enough of them are done; then the host reads them and inserts others.
"""

import functools

from flax import struct
import jax
import jax.numpy as jnp

from rlhf_jax import types
from rlhf_jax.models import config as model_config
from rlhf_jax.models import decoder
from rlhf_jax.sampling import cache as cache_lib
from rlhf_jax.sampling import pick

# Keys and values [H, P, E] of each of the G layers.
Prefix = tuple[tuple[types.Array, types.Array], ...]


@struct.dataclass
class Prefilled:
  """Prompts that have been through the model, without a common prefix."""

  logits: types.Array  # [B, V] float32, of the first response token
  cache: cache_lib.Cache  # B rows of W places


@struct.dataclass
class State:
  """The loop carry: S slots."""

  cache: cache_lib.Cache  # S rows; place 0 is the first behind the prefix
  request: pick.Request  # of the sequences in the slots
  prompt_lengths: types.Array  # [S] int32
  counts: types.Array  # [S] int32: tokens drawn so far
  newest: types.Array  # [S] int32: the last of them
  tokens: types.Array  # [S, R] int32: the tokens drawn
  logprobs: types.Array  # [S, R] float32
  drawn_logprobs: types.Array  # [S, R] float32: after biases and truncation
  done: types.Array  # [S] bool: ended, or nothing in the slot
  stopped: types.Array  # [S] bool: ended by a stop id


def empty(
  config: model_config.ModelConfig,
  slots: int,
  places: int,
  max_new_tokens: int,
  sizes: tuple[int, int],
  dtype: jnp.dtype,
  *,
  turned: bool = False,
) -> State:
  """Slots without sequences.

  Args:
    config: of the model.
    slots: S.
    places: C, cache places per slot to begin with.
    max_new_tokens: R.
    sizes: stop ids and biases that a sequence can have.
    dtype: of the cache.
    turned: see `cache.Cache`.
  """
  whole = lambda *shape: jnp.zeros((slots, *shape), jnp.int32)
  real = lambda *shape: jnp.zeros((slots, *shape), jnp.float32)
  return State(
    cache=cache_lib.zeros(config, slots, places, dtype, turned=turned),
    request=pick.Request(
      address=whole(),
      temperature=real(),
      top_k=whole(),
      top_p=real() + 1,
      min_p=real(),
      min_new_tokens=whole(),
      max_new_tokens=whole() + 1,
      stop_ids=whole(sizes[0]) - 1,
      bias_ids=whole(sizes[1]) - 1,
      bias=real(sizes[1]),
    ),
    prompt_lengths=whole() + 1,
    counts=whole(),
    newest=whole(),
    tokens=whole(max_new_tokens),
    logprobs=real(max_new_tokens),
    drawn_logprobs=real(max_new_tokens),
    done=jnp.ones(slots, bool),
    stopped=jnp.zeros(slots, bool),
  )


@functools.partial(jax.jit, static_argnames=('config', 'dtype'))
def prefix_cache(
  params: types.PyTree,
  prefix: types.Array,
  *,
  config: model_config.ModelConfig,
  dtype: jnp.dtype,
) -> Prefix:
  """Keys and values of the tokens [P] that all prompts share."""
  count = prefix.shape[0]
  _, keys, values = decoder.hidden_cached(
    params,
    config,
    prefix[None],
    jnp.arange(count)[None],
    *_NO_CACHE,
    dtype=dtype,
  )
  return tuple((k[0], v[0]) for k, v in zip(keys, values))


@functools.partial(jax.jit, static_argnames=('config', 'dtype'))
def prefill(
  params: types.PyTree,
  prefix: Prefix | None,
  suffixes: types.Array,
  lengths: types.Array,
  *,
  config: model_config.ModelConfig,
  dtype: jnp.dtype,
) -> Prefilled:
  """Runs prompts through the model, without the prefix they share.

  Args:
    params: of the policy.
    prefix: see `prefix_cache`, or None.
    suffixes: [B, W] int32, the prompts from the prefix on, padded on the right.
    lengths: [B] int32, tokens of each suffix, 1 or more.
    config: of the model.
    dtype: of the computation and the cache.
  """
  begin = 0 if prefix is None else prefix[0][0].shape[1]
  positions = begin + jnp.arange(suffixes.shape[1])[None]
  hidden, keys, values = decoder.hidden_cached(
    params,
    config,
    suffixes,
    jnp.broadcast_to(positions, suffixes.shape),
    *_NO_CACHE,
    prefix=prefix,
    dtype=dtype,
  )
  last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
  return Prefilled(
    logits=decoder.logits(params, config, last[:, 0]),
    cache=cache_lib.from_prompts(keys, values, lengths, config.windows),
  )


@functools.partial(jax.jit, donate_argnums=0)
def insert(
  state: State,
  prefilled: Prefilled,
  rows: types.Array,
  slots: types.Array,
  request: pick.Request,
  prompt_lengths: types.Array,
  key: types.Array,
  count: types.Array,
) -> State:
  """Begins M sequences: copies their prompts' cache, draws the first token.

  Args:
    state: is donated.
    prefilled: prompts.
    rows: [M] int32: of `prefilled`; the samples of a prompt share one.
    slots: [M] int32; what begins beyond `count` has the slot S, which is none.
    request: of the M sequences.
    prompt_lengths: [M] int32, with the prefix.
    key: of the rollout.
    count: [] int32: how many are real.
  """
  begun = jnp.zeros_like(rows)
  keys = pick.noise_keys(key, request.address, prompt_lengths)
  tokens, logprobs, drawn = pick.pick(
    prefilled.logits[rows], keys, request, begun
  )
  done, stopped = _ends(tokens, begun + 1, request)
  put = lambda all_, new: all_.at[slots].set(new, mode='drop')
  first = lambda all_, new: all_.at[slots, 0].set(new, mode='drop')
  return State(
    cache=cache_lib.copy_rows(state.cache, prefilled.cache, slots, rows, count),
    request=jax.tree.map(put, state.request, request),
    prompt_lengths=put(state.prompt_lengths, prompt_lengths),
    counts=put(state.counts, begun + 1),
    newest=put(state.newest, tokens),
    tokens=first(state.tokens, tokens),
    logprobs=first(state.logprobs, logprobs),
    drawn_logprobs=first(state.drawn_logprobs, drawn),
    done=put(state.done, done),
    stopped=put(state.stopped, stopped),
  )


@functools.partial(
  jax.jit, static_argnames=('config', 'dtype'), donate_argnums=1
)
def advance(
  params: types.PyTree,
  state: State,
  prefix: Prefix | None,
  key: types.Array,
  steps: types.Array,
  enough: types.Array,
  *,
  config: model_config.ModelConfig,
  dtype: jnp.dtype,
) -> State:
  """Draws up to `steps` tokens a slot, until `enough` slots are done.

  Args:
    params: of the policy.
    state: is donated; its cache has places for `steps` more tokens.
    prefix: see `prefix_cache`, or None.
    key: of the rollout.
    steps: [] int32.
    enough: [] int32.
    config: of the model.
    dtype: of the computation and the cache.
  """
  begin = 0 if prefix is None else prefix[0][0].shape[1]

  def body(carry):
    step, state = carry
    at = state.prompt_lengths + state.counts - 1  # S, position of the newest
    own = at - begin  # its place in the cache
    hidden, keys, values = decoder.hidden_cached(
      params,
      config,
      state.newest[:, None],
      at[:, None],
      state.cache.keys,
      state.cache.values,
      jnp.where(state.done, decoder.NOWHERE, own)[:, None],
      own[:, None] + 1,  # places that it sees
      prefix=prefix,
      turned=state.cache.turned,
      dtype=dtype,
    )
    logits = decoder.logits(params, config, hidden[:, 0])
    state = state.replace(cache=state.cache.replace(keys=keys, values=values))
    return step + 1, append(state, logits, key)

  def unfinished(carry):
    step, state = carry
    return (step < steps) & (jnp.sum(state.done) < enough)

  return jax.lax.while_loop(unfinished, body, (jnp.int32(0), state))[1]


def append(state: State, logits: types.Array, key: types.Array) -> State:
  """Draws the next token of every slot that is not done.

  A stop id is written like any other token: it is an action.
  """
  rows = jnp.arange(state.tokens.shape[0])
  at = state.prompt_lengths + state.counts
  keys = pick.noise_keys(key, state.request.address, at)
  tokens, logprobs, drawn = pick.pick(logits, keys, state.request, state.counts)
  counts = state.counts + jnp.where(state.done, 0, 1)
  done, stopped = _ends(tokens, counts, state.request)
  # Slots that are done write to a place that does not exist.
  place = jnp.where(state.done, state.tokens.shape[1], state.counts)
  write = lambda all_, new: all_.at[rows, place].set(new, mode='drop')
  return state.replace(
    counts=counts,
    newest=jnp.where(state.done, state.newest, tokens),
    tokens=write(state.tokens, tokens),
    logprobs=write(state.logprobs, logprobs),
    drawn_logprobs=write(state.drawn_logprobs, drawn),
    stopped=state.stopped | (~state.done & stopped),
    done=state.done | done,
  )


@functools.partial(jax.jit, donate_argnums=0)
def release(state: State, ended: types.Array) -> State:
  """Marks slots [S] as done: the host ended their sequences."""
  return state.replace(done=state.done | ended)


@functools.partial(jax.jit, static_argnums=1)
def grow(state: State, places: int) -> State:
  """Makes room for more tokens in every slot."""
  return state.replace(cache=cache_lib.grow(state.cache, places))


@jax.jit
def keep(state: State, slots: types.Array) -> State:
  """Only the given slots [S'], in that order."""
  return jax.tree.map(lambda x: x[slots], state)


def _ends(tokens, counts, request):
  """(ended, by a stop id) of sequences that have just drawn `tokens`."""
  stopped = jnp.any(tokens[:, None] == request.stop_ids, axis=1)
  return stopped | (counts >= request.max_new_tokens), stopped


# Keys, values, places and mask of `decoder.hidden_cached` for prompts.
_NO_CACHE = (None,) * 4

PROGRAMS = (prefix_cache, prefill, insert, advance, release, grow, keep)
