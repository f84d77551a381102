"""The rollout engine: prompts in, responses out.  It knows token ids only.

Continuous batching: a fixed number of slots decodes; sequences leave as they
end, and the next prompts, already prefilled, take their slots.  The host looks
at the device once per chunk of tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import tree
from rlhf_jax import types
from rlhf_jax.models import config as model_config
from rlhf_jax.models import decoder
from rlhf_jax.sampling import cache as cache_lib
from rlhf_jax.sampling import decode
from rlhf_jax.sampling import requests
from rlhf_jax.sampling import schedule
from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.sharding import multihost
from rlhf_jax.sharding import rules

# Sequences that `decode.insert` begins in one call, at most.
INSERT = 128


@dataclasses.dataclass(frozen=True)
class Shape:
  """The static sizes of a rollout; a few programs are compiled for them."""

  max_prompt_tokens: int
  max_new_tokens: int
  slots: int  # sequences that decode at the same time
  samples_per_prompt: int
  chunk: int = 64  # tokens a sequence between two looks of the host
  max_stop_ids: int = 16  # per sequence
  max_biases: int = 16  # per sequence
  prompt_sizes: int = 3  # widths that prompts are padded to, at most

  @property
  def width(self) -> int:
    """T, tokens of the longest possible sequence."""
    return self.max_prompt_tokens + self.max_new_tokens


@dataclasses.dataclass(frozen=True)
class Piece:
  """What one sequence has drawn since its last piece."""

  sequence: int  # prompt * samples_per_prompt + sample
  tokens: np.ndarray  # [n] int32
  logprobs: np.ndarray  # [n] float32, of the policy at the temperature
  drawn_logprobs: np.ndarray  # [n] float32, after biases and truncation
  finish: str | None  # 'stop' | 'length', or None: it goes on


def relayout_program(
  mesh: jax.sharding.Mesh,
  specs: types.PyTree,
  dtype: jnp.dtype,
) -> Callable[[types.PyTree], types.PyTree]:
  """`relayout(params)`: cast to `dtype`, in the rollout sharding; jitted.

  Layers are unstacked.  Where heads are not split over devices, the products
  of a layer that read the same input are fused into one (`decoder.fuse`), which
  small batches need.  Adapters are merged, see `lora.merge`.

  Args:
    mesh: of the rollout.
    specs: of the model, without adapters.
    dtype: of the rollout.
  """
  if mesh.shape['tensor'] == 1:
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.jit(
      lambda params: decoder.fuse(params, dtype),
      out_shardings=everywhere,
    )
  shardings = rules.params(mesh, specs, rules.ROLLOUT)
  count = specs['layers']['attention_norm'].shape[0]
  of_layer = jax.tree.map(
    lambda x: jax.sharding.NamedSharding(
      mesh, jax.sharding.PartitionSpec(*x.spec[1:])
    ),
    shardings['layers'],
  )
  shardings = shardings | {'layers': (of_layer,) * count}
  return jax.jit(
    lambda params: tree.cast(decoder.unstack(params), dtype),
    out_shardings=shardings,
  )


def generate(
  params: types.PyTree,
  prompts: Sequence[np.ndarray],
  key: types.Array,
  *,
  shape: Shape,
  temperature: float | np.ndarray = 1.0,
  policy_version: int = 0,
  **options,
) -> types.Rollout:
  """Samples `samples_per_prompt` responses to every prompt.

  Args:
    params: of the policy, see `relayout_program`.
    prompts: B int arrays of token ids, each with a token or more.
    key: see `keys.key`.
    shape: static sizes.
    temperature: number or [B * samples]; 0 is greedy.
    policy_version: written to the rollout.
    **options: see `stream`.

  Returns:
    A `Rollout` of numpy arrays, N = B * samples_per_prompt, in prompt order.

  Raises:
    ValueError: see `stream`.
  """
  pieces = stream(
    params, prompts, key, shape=shape, temperature=temperature, whole=True,
    **options,
  )  # fmt: skip
  samples = shape.samples_per_prompt
  count = len(prompts) * samples
  tokens = np.zeros((count, shape.width), np.int32)
  logprobs = np.zeros((count, shape.width), np.float32)
  drawn = np.zeros((count, shape.width), np.float32)
  lengths = np.repeat(np.array([len(p) for p in prompts], np.int32), samples)
  prompt_lengths = lengths.copy()
  truncated = np.zeros(count, bool)
  for piece in (piece for some in pieces for piece in some):
    n = piece.sequence
    prompt = prompts[n // samples]
    begin, end = len(prompt), len(prompt) + len(piece.tokens)
    tokens[n, :begin] = prompt
    tokens[n, begin:end] = piece.tokens
    logprobs[n, begin:end] = piece.logprobs
    drawn[n, begin:end] = piece.drawn_logprobs
    lengths[n] = end
    truncated[n] = piece.finish == 'length'
  at = np.arange(shape.width)[None]
  return types.Rollout(
    tokens=tokens,
    lengths=lengths,
    prompt_lengths=prompt_lengths,
    mask=(at >= prompt_lengths[:, None]) & (at < lengths[:, None]),
    logprobs=logprobs,
    temperature=requests.spread('temperature', temperature, count, np.float32),
    truncated=truncated,
    group=np.repeat(np.arange(len(prompts), dtype=np.int32), samples),
    policy_version=np.full(count, policy_version, np.int32),
    drawn_logprobs=drawn,
  )


def stream(
  params: types.PyTree,
  prompts: Sequence[np.ndarray],
  key: types.Array,
  *,
  config: model_config.ModelConfig,
  mesh: jax.sharding.Mesh,
  shape: Shape,
  stop_ids: Sequence[int] | Sequence[Sequence[int]] = (),
  temperature: float | np.ndarray = 1.0,
  top_k: int | np.ndarray = 0,
  top_p: float | np.ndarray = 1.0,
  min_p: float | np.ndarray = 0.0,
  min_new_tokens: int | np.ndarray = 0,
  max_new_tokens: int | np.ndarray | None = None,
  bias: Mapping[int, float] | Sequence[Mapping[int, float]] = (),
  seeds: np.ndarray | None = None,
  find_stop: Callable[[np.ndarray], int | None] | None = None,
  prefix: np.ndarray | None = None,
  dtype: jnp.dtype = jnp.float32,
  whole: bool = False,
) -> Iterator[list[Piece]]:
  """Samples responses, and yields their tokens as they come.

  What a sequence draws depends on the key, its address and the position only,
  not on slots, order or neighbours.  None of the arguments from `stop_ids` to
  `find_stop` recompiles anything, whatever it is.

  Args:
    params: of the policy, see `relayout_program`.
    prompts: B int arrays of token ids, each with a token or more.
    key: see `keys.key`; sequence n draws with the address (n, position).
    config: of the model.
    mesh: rows are split over its (data, fsdp).
    shape: static sizes.
    stop_ids: each ends a sequence and stays in it; one set for all, or one for
      each sequence.
    temperature: number or [B * samples], as the next; 0 is greedy.
    top_k: 0 is off.
    top_p: 1 is off.
    min_p: share of the likeliest token's probability; 0 is off.
    min_new_tokens: no stop id before so many.
    max_new_tokens: `shape.max_new_tokens` by default.
    bias: token id -> number added to its logit (-inf bans it); one for all, or
      one for each sequence.
    seeds: [B * samples] int32, address of each sequence instead of n.
    find_stop: is given the tokens [n] of a response so far, and says how many
      of them to keep if it ends there (a stop string), else None.
    prefix: tokens with which every prompt begins, computed once; used only if
      they all do and go on after it.
    dtype: of computation and cache.
    whole: yield sequences that have ended only, in one piece each.

  Raises:
    ValueError: a prompt is empty or longer than the shape allows, or a request
      is out of range.
  """
  samples, groups = shape.samples_per_prompt, mesh_lib.rollout_groups(mesh)
  lengths = _lengths(prompts, shape)
  asked = requests.make(
    len(prompts) * samples, shape,
    stop_ids=stop_ids, temperature=temperature, top_k=top_k, top_p=top_p,
    min_p=min_p, min_new_tokens=min_new_tokens, max_new_tokens=max_new_tokens,
    bias=bias, seeds=seeds,
  )  # fmt: skip
  prefix = _usable_prefix(prefix, prompts)
  sizes = _buckets(shape, len(prefix), groups)
  return _Rollout(
    params, prompts, lengths, asked, key, prefix,
    config=config, mesh=mesh, shape=shape, sizes=sizes, dtype=dtype,
    find_stop=find_stop, whole=whole,
  ).run()  # fmt: skip


class _Rollout:
  """The host side of one call of `stream`."""

  def __init__(
    self, params, prompts, lengths, asked, key, prefix, *, config, mesh,
    shape, sizes, dtype, find_stop, whole,
  ):  # fmt: skip
    self.params, self.prompts, self.key = params, prompts, key
    self.lengths, self.requests = lengths, asked
    self.mesh, self.shape, self.sizes = mesh, shape, sizes
    self.groups = mesh_lib.rollout_groups(mesh)
    self.find_stop, self.whole = find_stop, whole
    self.options = dict(config=config, dtype=dtype)
    self.begin = len(prefix)  # position of place 0 of the cache
    self.prefix = None
    if len(prefix):
      self.prefix = decode.prefix_cache(
        params, jnp.asarray(prefix, jnp.int32), **self.options
      )
    self.calls = schedule.prefills(lengths - self.begin, sizes, self.groups)
    self.ready = []  # (prefilled, row, sequence), the next one last
    count = len(prompts) * shape.samples_per_prompt
    self.read = np.zeros(count, np.int64)  # tokens already yielded
    slots = schedule.fitting(count, sizes.slots)
    self.owner = np.full(slots, -1)  # sequence in each slot, -1 is none
    self.counts = np.zeros(slots, np.int64)  # tokens it has drawn
    width = max(width for width, _ in self.calls)
    places = schedule.fitting(width + 1, sizes.places)
    self.state = empty_slots(mesh, shape, slots, places, **self.options)

  def run(self) -> Iterator[list[Piece]]:
    """Fills slots, decodes, reads, until nothing is left."""
    while True:
      self._fill()
      if (self.owner < 0).all():
        return
      self._resize()
      waiting = bool(self.ready or self.calls)
      self.state = decode.advance(
        self.params,
        self.state,
        self.prefix,
        self.key,
        np.int32(self._steps()),
        np.int32(
          schedule.wanted_done(
            len(self.owner),
            int((self.owner < 0).sum()),
            waiting,
            self._smaller(),
          )
        ),
        **self.options,
      )
      if not self.ready and self.calls:
        self._prefill()  # while the device decodes
      pieces = self._collect()
      if pieces:
        yield pieces

  def _prefill(self):
    """Runs the next prompts through the model."""
    width, chosen = self.calls.popleft()
    suffixes = np.zeros((len(chosen), width), np.int32)
    lengths = np.ones(len(chosen), np.int32)
    for row, prompt in enumerate(chosen):
      if prompt >= 0:
        own = self.prompts[prompt][self.begin :]
        suffixes[row, : len(own)] = own
        lengths[row] = len(own)
    prefilled = decode.prefill(
      self.params,
      self.prefix,
      *rules.rows(self.mesh, (suffixes, lengths), rules.ROLLOUT),
      **self.options,
    )
    samples = self.shape.samples_per_prompt
    self.ready = [
      (prefilled, row, prompt * samples + sample)
      for row, prompt in enumerate(chosen)
      if prompt >= 0
      for sample in range(samples)
    ][::-1]

  def _fill(self):
    """Begins waiting sequences in free slots."""
    most = min(INSERT, self.sizes.slots[-1])
    while (free := np.flatnonzero(self.owner < 0)).size:
      if not self.ready and self.calls:
        self._prefill()
      if not self.ready:
        return
      number = min(len(free), len(self.ready), most)
      taken = [self.ready.pop() for _ in range(number)]
      prefilled = taken[0][0]
      rows, slots, sequences = np.zeros((3, most), np.int32)
      rows[:number] = [row for _, row, _ in taken]
      sequences[:number] = [sequence for _, _, sequence in taken]
      slots[:] = len(self.owner)  # none
      slots[:number] = free[:number]
      self._reserve(prefilled.cache.places)
      self.state = decode.insert(
        self.state,
        prefilled,
        rows,
        slots,
        jax.tree.map(lambda x, s=sequences: x[s], self.requests),
        self.lengths[sequences // self.shape.samples_per_prompt],
        self.key,
        np.int32(number),
      )
      self.owner[free[:number]] = sequences[:number]
      self.counts[free[:number]] = 1

  def _own_lengths(self):
    """Places that the sequence of each slot takes, [S]; 0 for none."""
    prompt = self.owner // self.shape.samples_per_prompt
    used = self.lengths[prompt] - self.begin + self.counts
    return np.where(self.owner < 0, 0, used)

  def _steps(self) -> int:
    """Tokens until the next look: what the cache has room for."""
    room = self.state.cache.places - int(self._own_lengths().max())
    return max(min(self.shape.chunk, room + 1), 1)

  def _reserve(self, places: int):
    """Grows the cache to the bucket that has so many places."""
    wanted = schedule.fitting(places, self.sizes.places)
    if wanted > self.state.cache.places:
      self.state = decode.grow(self.state, wanted)

  def _smaller(self) -> int | None:
    """The next smaller bucket of slots, None if there is none."""
    below = [x for x in self.sizes.slots if x < len(self.owner)]
    return below[-1] if below else None

  def _resize(self):
    """More places if the longest sequence needs them; then fewer slots."""
    self._reserve(int(self._own_lengths().max()) + 1)
    if self.ready or self.calls:
      return
    active = np.flatnonzero(self.owner >= 0)
    slots = schedule.fitting(len(active), self.sizes.slots)
    if slots >= len(self.owner):
      return
    idle = np.flatnonzero(self.owner < 0)
    kept = np.concatenate([active, idle])[:slots]
    self.state = decode.keep(self.state, kept.astype(np.int32))
    self.owner, self.counts = self.owner[kept], self.counts[kept]

  def _collect(self) -> list[Piece]:
    """Reads what the slots have drawn; frees those that are done."""
    state = self.state
    done, stopped, counts = multihost.fetch(
      (state.done, state.stopped, state.counts)
    )
    self.counts = counts.astype(np.int64)
    active = self.owner >= 0
    # With stop strings, and for a stream, every token matters at once.
    look = active if self.find_stop or not self.whole else active & done
    if not look.any():
      return []
    tokens, logprobs, drawn = multihost.fetch(
      (state.tokens, state.logprobs, state.drawn_logprobs)
    )
    pieces, cut = [], np.zeros(len(self.owner), bool)
    for slot in np.flatnonzero(look):
      n, end = self.owner[slot], int(counts[slot])
      finish = None
      if done[slot]:
        finish = 'stop' if stopped[slot] else 'length'
      if self.find_stop is not None:
        found = self.find_stop(tokens[slot, :end])
        if found is not None and found <= end:
          cut[slot] = not done[slot]
          end, finish = found, 'stop'
      if finish is None and self.whole:
        continue
      new = slice(int(self.read[n]), end)
      pieces.append(
        Piece(
          sequence=int(n),
          tokens=tokens[slot, new].copy(),
          logprobs=logprobs[slot, new].copy(),
          drawn_logprobs=drawn[slot, new].copy(),
          finish=finish,
        )
      )
      self.read[n] = end
      if finish is not None:
        self.owner[slot] = -1
    if cut.any():
      self.state = decode.release(self.state, cut)
    return pieces


def memory(
  config: model_config.ModelConfig,
  shape: Shape,
  prefix_length: int,
  dtype: jnp.dtype,
  data_groups: int = 1,
) -> int:
  """Bytes that the key/value caches of a rollout take at most.

  Of all slots with all their places, the prompts of one call of prefill, and
  the prefix; over all data groups.
  """
  sizes = _buckets(shape, prefix_length, data_groups)
  slots, width = sizes.slots[-1], sizes.widths[-1]
  of = functools.partial(cache_lib.nbytes, dtype=dtype)
  # A prefix has all places in every layer.
  full = dataclasses.replace(config, sliding_window=0, sliding_layers=())
  return (
    of(config, slots, sizes.places[-1])
    + of(config, schedule.prefill_rows(width, slots, data_groups), width)
    + of(full, 1, prefix_length)
  )


def warm_up(
  params: types.PyTree,
  *,
  config: model_config.ModelConfig,
  mesh: jax.sharding.Mesh,
  shape: Shape,
  prefix: np.ndarray | None = None,
  dtype: jnp.dtype = jnp.float32,
  **unused,
) -> int:
  """Compiles every program that rollouts of this shape can use.

  Args:
    params: as for `stream`, and so are the others.
    config: of the model.
    mesh: of the rollout.
    shape: static sizes.
    prefix: tokens that all prompts share.
    dtype: of computation and cache.
    **unused: other keywords of `stream`, which compile nothing.

  Returns:
    How many programs there are.
  """
  del unused
  before = programs()
  prefix = np.zeros(0, np.int32) if prefix is None else np.asarray(prefix)
  groups = mesh_lib.rollout_groups(mesh)
  sizes = _buckets(shape, len(prefix), groups)
  options = dict(config=config, dtype=dtype)
  key = jax.random.key(0, impl='threefry2x32')
  shared = None
  if len(prefix):
    shared = decode.prefix_cache(
      params, jnp.asarray(prefix, jnp.int32), **options
    )
  most = min(INSERT, sizes.slots[-1])
  nothing = np.zeros(most, np.int32)
  asked = requests.make(most, shape)
  for width in sizes.widths:
    rows = schedule.prefill_rows(width, sizes.slots[-1], groups)
    blank = np.zeros((rows, width), np.int32), np.ones(rows, np.int32)
    prefilled = decode.prefill(
      params, shared, *rules.rows(mesh, blank, rules.ROLLOUT), **options
    )
    for slots in sizes.slots:
      for places in sizes.places:
        if places <= width:  # a rollout begins with one place more
          continue
        state = empty_slots(mesh, shape, slots, places, **options)
        state = decode.insert(
          state, prefilled, nothing, nothing + slots, asked, nothing + 1, key,
          np.int32(0),
        )  # fmt: skip
        state = decode.advance(
          params, state, shared, key, np.int32(0), np.int32(0), **options
        )
        bigger = [x for x in sizes.places if x > places]
        if bigger:
          decode.grow(state, bigger[0])
        for fewer in [x for x in sizes.slots if x < slots]:
          decode.keep(state, np.arange(fewer, dtype=np.int32))
  return programs() - before


@dataclasses.dataclass(frozen=True)
class Sizes:
  """The largest programs of a rollout, see `schedule.buckets`."""

  slots: int
  places: int  # of the cache, per slot
  smaller_places: int  # the bucket that grows to it; itself if there is none
  prompts: int  # of a call of prefill
  width: int  # tokens of each
  inserted: int  # sequences of a call of insert


def largest(
  shape: Shape,
  *,
  mesh: jax.sharding.Mesh,
  prefix: np.ndarray | None = None,
  **unused,
) -> Sizes:
  """The sizes that need the most memory; keywords as for `warm_up`."""
  del unused
  groups = mesh_lib.rollout_groups(mesh)
  sizes = _buckets(shape, 0 if prefix is None else len(prefix), groups)
  width, slots = sizes.widths[-1], sizes.slots[-1]
  return Sizes(
    slots=slots,
    places=sizes.places[-1],
    smaller_places=sizes.places[-2:][0],
    prompts=schedule.prefill_rows(width, slots, groups),
    width=width,
    inserted=min(INSERT, slots),
  )


def ahead(
  sizes: Sizes,
  policy: Callable[[Mapping[str, jax.stages.Compiled]], types.PyTree],
  results: Callable[[jax.stages.Compiled], types.PyTree],
  *,
  config: model_config.ModelConfig,
  mesh: jax.sharding.Mesh,
  shape: Shape,
  prefix: np.ndarray | None = None,
  dtype: jnp.dtype = jnp.float32,
  **unused,
) -> Iterator[tuple[str, Callable, Callable]]:
  """The largest programs, to be compiled before there are arrays.

  Args:
    sizes: see `largest`.
    policy: abstract parameters, given what is compiled by name.
    results: abstract results of a compiled program.
    config: of the model.
    mesh: of the rollout.
    shape: static sizes.
    prefix: tokens that all prompts share.
    dtype: of computation and cache.
    **unused: other keywords of `stream`.

  Yields:
    Name, jitted function, and a function from what is compiled so far by name
    to (arguments, keywords).
  """
  del unused
  options = dict(config=config, dtype=dtype)
  whole = lambda *shape: jax.ShapeDtypeStruct(shape, np.int32)
  key = jax.eval_shape(lambda: jax.random.key(0, impl='threefry2x32'))
  n = sizes.inserted
  asked = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), requests.make(n, shape)
  )
  of_prompts = lambda *shape: jax.ShapeDtypeStruct(
    shape,
    np.int32,
    sharding=rules.rows_sharding(mesh, shape, rules.ROLLOUT),
  )
  shared = lambda done: None
  if prefix is not None and len(prefix):
    shared = lambda done: results(done['prefix'])
    yield 'prefix', decode.prefix_cache, lambda done: (
      (policy(done), whole(len(prefix))), options,
    )  # fmt: skip
  for name, places in (('less', sizes.smaller_places), ('empty', sizes.places)):
    yield name, empty_slots, lambda done, places=places: (
      (mesh, shape, sizes.slots, places), options,
    )  # fmt: skip
  yield 'prefill', decode.prefill, lambda done: (
    (policy(done), shared(done), of_prompts(sizes.prompts, sizes.width),
     of_prompts(sizes.prompts)), options,
  )  # fmt: skip
  yield 'insert', decode.insert, lambda done: (
    (results(done['empty']), results(done['prefill']), whole(n), whole(n),
     asked, whole(n), key, whole()), {},
  )  # fmt: skip
  yield 'advance', decode.advance, lambda done: (
    (policy(done), results(done['insert']), shared(done), key, whole(),
     whole()), options,
  )  # fmt: skip
  if sizes.smaller_places < sizes.places:
    yield 'grow', decode.grow, lambda done: (
      (results(done['less']), sizes.places), {},
    )  # fmt: skip


def programs() -> int:
  """Programs of the sampler that this process has compiled so far."""
  return sum(program._cache_size() for program in decode.PROGRAMS)


def _buckets(shape, prefix_length, data_groups):
  widest = shape.max_prompt_tokens - prefix_length
  return schedule.buckets(
    widest, shape.max_new_tokens, shape.slots, data_groups, shape.prompt_sizes
  )


@functools.partial(
  jax.jit,
  static_argnames=('mesh', 'shape', 'slots', 'places', 'config', 'dtype'),
)
def empty_slots(
  mesh: jax.sharding.Mesh,
  shape: Shape,
  slots: int,
  places: int,
  *,
  config: model_config.ModelConfig,
  dtype: jnp.dtype,
) -> decode.State:
  """Slots without sequences, split over the mesh.

  Args:
    mesh: of the rollout.
    shape: of the rollout, for what is not said by the next two.
    slots: S.
    places: C, cache places per slot.
    config: of the model.
    dtype: of the cache.
  """
  state = decode.empty(
    config, slots, places, shape.max_new_tokens,
    (shape.max_stop_ids, shape.max_biases), dtype,
    turned=cache_lib.turned(mesh),
  )  # fmt: skip
  axes = lambda x: ('rows',) + (None,) * (x.ndim - 1)
  place = lambda x, axes: jax.lax.with_sharding_constraint(
    x, rules.sharding(mesh, axes, x.shape, rules.ROLLOUT)
  )
  cache = jax.tree.map(
    lambda x: place(x, ('rows', 'kv_heads', None, None)), state.cache
  )
  rest = jax.tree.map(lambda x: place(x, axes(x)), state.replace(cache=None))
  return rest.replace(cache=cache)


def _lengths(prompts: Sequence[np.ndarray], shape: Shape) -> np.ndarray:
  """The prompts' lengths, [B] int32; refuses what does not fit."""
  if not len(prompts):
    raise ValueError('no prompts: give one or more')
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  if lengths.min() < 1:
    raise ValueError(
      f'prompt {lengths.argmin()} is empty: give it a token or more, for'
      ' example a BOS'
    )
  if lengths.max() > shape.max_prompt_tokens:
    raise ValueError(
      f'prompt {lengths.argmax()} has {lengths.max()} tokens, the sampler was'
      f' made for max_prompt_tokens={shape.max_prompt_tokens}: raise that, or'
      ' drop or cut long prompts'
    )
  return lengths


def _usable_prefix(prefix, prompts) -> np.ndarray:
  """The prefix if all prompts begin with it and go on, else nothing."""
  if prefix is None:
    return np.zeros(0, np.int32)
  size = len(prefix)
  shared = all(
    len(prompt) > size and np.array_equal(prompt[:size], prefix)
    for prompt in prompts
  )
  return np.asarray(prefix if shared else [], np.int32)
