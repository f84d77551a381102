"""The engine against the full forward pass, and against itself.

Tokens are drawn at their address, so many things have an exact prediction:
another stop set or another length limit only cuts the sequences of a base run.
"""

import dataclasses
import types as python_types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import keys as keys_lib
from rlhf_jax import testing
from rlhf_jax import types
from rlhf_jax.models import decoder
from rlhf_jax.models import heads
from rlhf_jax.models import spec
from rlhf_jax.sampling import decode
from rlhf_jax.sampling import engine
from rlhf_jax.sampling import pick
from rlhf_jax.sharding import mesh as mesh_lib

_CONFIG = testing.tiny_config(family='qwen2', init_std=0.4, attention_bias=True)
_KEY = keys_lib.key(0, 'rollout', 0)
# 5 prompts with 2 samples in waves of 3 prompts: the second wave has a fill-up.
_SHAPE = engine.Shape(
  max_prompt_tokens=6, max_new_tokens=8, slots=6, samples_per_prompt=2, chunk=3
)
_PREFIX = np.array([11, 4])
_PROMPTS = [
  np.array([11, 4, *rest])
  for rest in ([9], [30, 2, 7, 1], [9, 0], [17, 17, 36], [5])
]
_NO_STOP = ()


@pytest.fixture(scope='module')
def world():
  """Parameters of the trainer, and `generate` for the sampler's."""
  specs = decoder.specs(_CONFIG)
  params = spec.init(specs, jax.random.key(0))
  # Biases start at zero; away from there a mistake in the fusing shows.
  attention = params['layers']['attention']
  for number, name in enumerate(('q_bias', 'k_bias', 'v_bias')):
    attention[name] = 0.3 * jax.random.normal(
      jax.random.key(number), attention[name].shape
    )

  def generate(prompts=_PROMPTS, *, key=_KEY, mesh=None, **kwargs):
    mesh = mesh or mesh_lib.make(devices=jax.devices()[:1])
    laid_out = engine.relayout_program(mesh, specs, jnp.float32)(params)
    kwargs = dict(shape=_SHAPE, stop_ids=_NO_STOP, temperature=0.7) | kwargs
    return engine.generate(
      laid_out, prompts, key, config=_CONFIG, mesh=mesh, **kwargs
    )

  return python_types.SimpleNamespace(params=params, generate=generate)


@pytest.fixture(scope='module')
def base(world):
  """10 sequences of 8 new tokens each, none of them stopped."""
  return world.generate()


@pytest.fixture(scope='module')
def greedy(world):
  return world.generate(temperature=0.0)


@jax.jit
def _logits(params, tokens):
  """[N, T] -> [N, T, V]: entry t is what the full pass says of token t."""
  count, width = tokens.shape
  states = decoder.hidden(
    params,
    _CONFIG,
    tokens,
    jnp.broadcast_to(jnp.arange(width)[None], tokens.shape),
    jnp.ones((count, width), jnp.int32),
  )
  return jnp.roll(decoder.logits(params, _CONFIG, states), 1, axis=1)


_score = jax.jit(heads.score, static_argnums=1)


def _trainer_logprobs(params, rollout, temperature):
  """Log-probs [N, T] by the trainer's function, in the sequence layout."""
  at = np.arange(rollout.tokens.shape[1])[None]
  left = lambda x: np.roll(x, -1, axis=1)
  rows = types.Rows(
    tokens=rollout.tokens,
    targets=left(rollout.tokens),
    positions=np.broadcast_to(at, rollout.tokens.shape),
    segment_ids=(at < rollout.lengths[:, None]).astype(np.int32),
    mask=left(rollout.mask),
    temperature=np.broadcast_to(
      temperature[:, None].astype(np.float32), rollout.tokens.shape
    ),
  )
  rows = jax.tree.map(jnp.asarray, rows)
  return np.roll(_score(params, _CONFIG, rows).logprobs, 1, axis=1)


def _assert_equal(a, b, rows=slice(None)):
  """Bit for bit."""
  for field in dataclasses.fields(a):
    np.testing.assert_array_equal(
      getattr(a, field.name)[rows],
      getattr(b, field.name)[rows],
      err_msg=field.name,
    )


def _assert_same_up_to_ties(params, a, b, temperature=0.7):
  """Two programs: log-probs to 1e-4, and a token differs only at a near-tie."""
  for row in range(len(a.tokens)):
    differ = np.flatnonzero(a.tokens[row] != b.tokens[row])
    if not differ.size:
      assert a.lengths[row] == b.lengths[row]
      testing.assert_close(b.logprobs[row], a.logprobs[row], 'teacher_forced')
      continue
    at = int(differ[0])
    testing.assert_close(
      b.logprobs[row, :at], a.logprobs[row, :at], 'teacher_forced'
    )
    key = pick.noise_keys(_KEY, jnp.array([row]), jnp.array([at]))[0]
    noise = pick.noise(key[None], _CONFIG.vocab_size)[0]
    scores = _logits(params, a.tokens)[row, at] / temperature + noise
    gap = scores[a.tokens[row, at]] - scores[b.tokens[row, at]]
    assert abs(float(gap)) < 1e-3, f'row {row}, token {at}: no tie, gap {gap}'


def _cut(rollout, stop_ids):
  """What `rollout` is when `stop_ids` end its sequences, by a plain loop."""
  lengths, stopped = (
    rollout.lengths.copy(),
    np.zeros(len(rollout.lengths), bool),
  )
  for row, (begin, end) in enumerate(zip(rollout.prompt_lengths, lengths)):
    for at in range(begin, end):
      if rollout.tokens[row, at] in stop_ids:
        lengths[row], stopped[row] = at + 1, True
        break
  inside = np.arange(rollout.tokens.shape[1])[None] < lengths[:, None]
  return rollout.replace(
    lengths=lengths,
    tokens=np.where(inside, rollout.tokens, 0),
    mask=rollout.mask & inside,
    logprobs=np.where(inside, rollout.logprobs, 0),
    drawn_logprobs=np.where(inside, rollout.drawn_logprobs, 0),
    truncated=~stopped,
  )


def _compiled():
  return engine.programs()


def test_rollout_keeps_its_contract(base):
  assert base.tokens.shape == (10, 14) and base.tokens.dtype == np.int32
  assert base.prompt_lengths.tolist() == [3, 3, 6, 6, 4, 4, 5, 5, 3, 3]
  assert (base.lengths == base.prompt_lengths + 8).all()
  assert base.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
  assert base.truncated.all() and (base.policy_version == 0).all()
  for row, prompt in enumerate(np.repeat(np.arange(5), 2)):
    begin, end = base.prompt_lengths[row], base.lengths[row]
    assert base.tokens[row, :begin].tolist() == _PROMPTS[prompt].tolist()
    assert (base.tokens[row, end:] == 0).all()
    assert np.flatnonzero(base.mask[row]).tolist() == list(range(begin, end))
  assert (base.logprobs[base.mask] < 0).all()
  assert (base.logprobs[~base.mask] == 0).all()
  # Token 0, which is also the padding, is an action like any other.
  assert 0 in base.tokens[base.mask]
  # Two samples of a prompt differ.
  assert (base.tokens[::2] != base.tokens[1::2]).any(1).all()


def test_log_probs_equal_the_trainer_s(world, base):
  expected = _trainer_logprobs(world.params, base, base.temperature)
  testing.assert_close(base.logprobs, expected, 'teacher_forced')
  # The temperature matters by far more than the tolerance.
  other = _trainer_logprobs(world.params, base, np.ones(10))
  assert np.abs(base.logprobs - other).max() > 0.1


def test_greedy_equals_argmax_of_the_full_pass(world, greedy):
  logits = np.asarray(_logits(world.params, greedy.tokens))
  chosen = np.take_along_axis(logits, greedy.tokens[..., None], 2)[..., 0]
  short = np.where(greedy.mask, logits.max(-1) - chosen, 0.0)
  testing.assert_close(short, np.zeros_like(short), 'teacher_forced')
  np.testing.assert_array_equal(greedy.tokens[::2], greedy.tokens[1::2])
  # Greedy rows report temperature 1.
  expected = _trainer_logprobs(world.params, greedy, np.ones(10))
  testing.assert_close(greedy.logprobs, expected, 'teacher_forced')
  assert (greedy.temperature == 0).all()


def test_steps_and_seeds_differ(world, base):
  for key in (keys_lib.key(0, 'rollout', 1), keys_lib.key(1, 'rollout', 0)):
    other = world.generate(key=key)
    assert (other.tokens != base.tokens).any(1).all()


def test_stop_ids_cut_the_same_sequences_without_recompiling(world, base):
  first = int(base.tokens[0, base.prompt_lengths[0]])
  last = int(base.tokens[3, base.lengths[3] - 1])
  # 0 is the padding of `tokens` and 11 begins every prompt.
  sets = [{first}, {last}, {0}, {11, 9, 17}, {0, first, last, 36}, range(15)]
  before = _compiled()
  for stop_ids in sets:
    rollout = world.generate(stop_ids=sorted(stop_ids))
    expected = _cut(base, stop_ids)
    assert not expected.truncated.all(), f'{stop_ids} cuts nothing'
    _assert_equal(rollout, expected)
  assert _compiled() == before


def test_stop_id_is_the_first_token(world, base):
  begin = base.prompt_lengths
  first = int(base.tokens[0, begin[0]])
  rollout = world.generate(stop_ids=[first])
  assert rollout.lengths[0] == begin[0] + 1 and not rollout.truncated[0]
  assert rollout.mask[0].sum() == 1 and rollout.mask[0, begin[0]]
  assert rollout.tokens[0, begin[0]] == first
  assert rollout.logprobs[0, begin[0]] == base.logprobs[0, begin[0]]
  # All sequences stop at once: there is nothing left to decode.
  at_once = world.generate(stop_ids=base.tokens[np.arange(10), begin])
  assert (at_once.lengths == begin + 1).all() and not at_once.truncated.any()


def test_last_allowed_token_is_a_stop(world, base):
  row = next(
    r for r in range(10)
    if (base.tokens[r] == base.tokens[r, base.lengths[r] - 1]).sum() == 1
  )  # fmt: skip
  last = int(base.tokens[row, base.lengths[row] - 1])
  rollout = world.generate(stop_ids=[last])
  assert rollout.lengths[row] == base.lengths[row]
  assert not rollout.truncated[row]
  other = [r for r in range(10) if last not in base.tokens[r][base.mask[r]]]
  assert rollout.truncated[other].all() and other


def test_requests_are_per_row_and_do_not_recompile(world, base, greedy):
  before = _compiled()
  # Lengths: each row is the base run, cut at its own limit.
  limits = np.array([1, 8, 2, 7, 3, 6, 4, 5, 8, 1])
  rollout = world.generate(max_new_tokens=limits)
  assert (rollout.lengths == rollout.prompt_lengths + limits).all()
  assert rollout.truncated.all()
  inside = np.arange(14)[None] < rollout.lengths[:, None]
  np.testing.assert_array_equal(
    rollout.tokens, np.where(inside, base.tokens, 0)
  )
  np.testing.assert_array_equal(
    rollout.logprobs, np.where(inside, base.logprobs, 0)
  )
  # Greedy and sampled rows side by side: each as if among its own kind.
  mixed = np.tile([0.0, 0.7], 5).astype(np.float32)
  rollout = world.generate(temperature=mixed)
  _assert_equal(rollout, greedy, rows=mixed == 0)
  _assert_equal(rollout, base, rows=mixed > 0)
  # One candidate: greedy tokens, log-probs before truncation.
  for one in (dict(top_k=1), dict(top_p=1e-6), dict(top_k=5, top_p=1e-6)):
    rollout = world.generate(**one)
    np.testing.assert_array_equal(rollout.tokens, greedy.tokens)
    testing.assert_close(
      rollout.logprobs,
      _trainer_logprobs(world.params, rollout, np.full(10, 0.7)),
      'teacher_forced',
    )
  top_k = np.tile([0, 1], 5)
  rollout = world.generate(top_k=top_k)
  _assert_equal(rollout, base, rows=top_k == 0)
  np.testing.assert_array_equal(rollout.tokens[1::2], greedy.tokens[1::2])
  assert _compiled() == before


@pytest.mark.parametrize('chunk', [1, 2, 64])
def test_chunk_changes_nothing(world, base, chunk):
  before = _compiled()
  shape = dataclasses.replace(_SHAPE, chunk=chunk)
  _assert_equal(world.generate(shape=shape), base)
  assert _compiled() == before


def test_neighbours_and_slots_change_no_bit(world, base):
  # Prompt 2 stays at its index (its address), among others of other lengths:
  # it moves to another wave and slot.
  others = [np.arange(1, n) for n in (3, 2, 0, 3, 2)]
  others[2] = _PROMPTS[2]
  _assert_equal(world.generate(others), base, rows=slice(4, 6))
  others = [np.arange(6) + n for n in range(5)]
  others[2] = _PROMPTS[2]
  _assert_equal(world.generate(others), base, rows=slice(4, 6))


@pytest.mark.parametrize('slots', [2, 11])
def test_other_slots_give_the_same_tokens(world, base, slots):
  # 5 waves of one prompt; one wave of all, with a slot left over.
  shape = dataclasses.replace(_SHAPE, slots=slots)
  _assert_same_up_to_ties(world.params, base, world.generate(shape=shape))


def test_other_padding_gives_the_same_tokens(world, base):
  # Wider prompts and fewer new tokens: the first 5 tokens are the same.
  shape = dataclasses.replace(_SHAPE, max_prompt_tokens=9, max_new_tokens=5)
  rollout = world.generate(shape=shape)
  assert rollout.tokens.shape == (10, 14)
  short = world.generate(max_new_tokens=5)
  _assert_same_up_to_ties(world.params, short, rollout)


def _spy_on_prefix(monkeypatch):
  """Records how many prefix tokens `decode.prefix_cache` is given."""
  sizes, run = [], decode.prefix_cache

  def record(params, prefix, **kwargs):
    sizes.append(len(prefix))
    return run(params, prefix, **kwargs)

  monkeypatch.setattr(decode, 'prefix_cache', record)
  return sizes


def test_shared_prefix_gives_the_same_tokens(world, base, monkeypatch):
  sizes = _spy_on_prefix(monkeypatch)
  rollout = world.generate(prefix=_PREFIX)
  assert sizes == [2]
  assert rollout.prompt_lengths.tolist() == base.prompt_lengths.tolist()
  _assert_same_up_to_ties(world.params, base, rollout)


def test_prefix_that_not_all_prompts_continue_is_not_used(
  world, base, monkeypatch
):
  sizes = _spy_on_prefix(monkeypatch)
  # No prompt begins so; one of them ends with it; only some begin so.
  for prefix in (np.array([4, 11]), _PROMPTS[0], np.array([11, 4, 9])):
    _assert_equal(world.generate(prefix=prefix), base)
  assert not sizes


@pytest.mark.parametrize('sizes', [dict(fsdp=8), dict(fsdp=4, tensor=2)])
def test_eight_devices_equal_one(world, base, sizes):
  mesh = mesh_lib.make(**sizes)
  rollout = world.generate(mesh=mesh)
  _assert_same_up_to_ties(world.params, base, rollout)
  before = _compiled()
  _assert_equal(world.generate(mesh=mesh), rollout)
  assert _compiled() == before


@pytest.mark.parametrize(
  'kwargs, message',
  [
    (dict(prompts=[]), 'no prompts'),
    (dict(prompts=[np.array([1]), np.zeros(0, int)]), 'prompt 1 is empty'),
    (
      dict(prompts=[np.array([1]), np.arange(7)]),
      r'prompt 1 has 7 tokens.*max_prompt_tokens=6',
    ),
    (dict(temperature=-0.1), r'temperature must be 0 .*temperature=-0.1'),
    (dict(temperature=float('nan')), 'temperature must be 0'),
    (dict(top_p=0.0), r'top_p must lie in \(0, 1\].*top_p=0.0'),
    (dict(top_p=1.1), r'top_p must lie in'),
    (dict(top_k=-1), r'top_k must be 0 \(off\) or more.*top_k=-1'),
    (dict(max_new_tokens=0), r'max_new_tokens must lie in 1\.\.8'),
    (dict(max_new_tokens=9), r'max_new_tokens must lie in 1\.\.8.*=9'),
    (dict(min_p=1.5), r'min_p must lie in \[0, 1\]'),
    (dict(min_new_tokens=9), 'min_new_tokens must not be more than max'),
    (dict(temperature=np.ones(3)), r'temperature has shape \(3,\), expected'),
    (dict(stop_ids=[[1], [2]]), 'stop_ids has 2 sets, expected one .* 4'),
    (dict(stop_ids=range(17)), '17 stop ids .*max_stop_ids=16: raise that'),
    (dict(bias={n: 1.0 for n in range(17)}), '17 biases .*max_biases=16'),
    (dict(bias={3: float('nan')}), 'expected a token id of 0 or more and a'),
    (dict(bias=[{}]), 'bias has 1 entries, expected one mapping, or one'),
  ],
)
def test_errors_say_what_to_do(world, kwargs, message):
  kwargs = dict(prompts=_PROMPTS[:2]) | kwargs
  with pytest.raises(ValueError, match=message):
    world.generate(**kwargs)


# ---- Continuous batching -----------------------------------------------------


_LONG = engine.Shape(
  max_prompt_tokens=6, max_new_tokens=40, slots=4, samples_per_prompt=2, chunk=8
)


def _many(count):
  rng = np.random.default_rng(1)
  return [rng.integers(0, 37, rng.integers(1, 7)) for _ in range(count)]


def test_slots_are_refilled_as_sequences_end(world):
  """20 sequences of 1 to 40 tokens in 4 slots; then all of them at once."""
  prompts = _many(10)
  limits = np.random.default_rng(2).integers(1, 41, 20)
  few = world.generate(prompts, shape=_LONG, max_new_tokens=limits)
  assert (few.lengths - few.prompt_lengths == limits).all()
  wide = dataclasses.replace(_LONG, slots=20)
  many = world.generate(prompts, shape=wide, max_new_tokens=limits)
  _assert_same_up_to_ties(world.params, many, few)
  # The host looks at the device far less often than there are tokens.
  expected = _trainer_logprobs(world.params, few, np.full(20, 0.7))
  testing.assert_close(few.logprobs, expected, 'teacher_forced')


@pytest.mark.parametrize('chunk', [1, 3, 64])
def test_pieces_are_the_rollout(world, chunk):
  prompts = _many(5)
  shape = dataclasses.replace(_LONG, chunk=chunk)
  stop = [3, 11]
  whole = world.generate(prompts, shape=shape, stop_ids=stop)
  mesh = mesh_lib.make(devices=jax.devices()[:1])
  specs = decoder.specs(_CONFIG)
  laid_out = engine.relayout_program(mesh, specs, jnp.float32)(world.params)
  pieces = [
    piece
    for some in engine.stream(
      laid_out, prompts, _KEY, config=_CONFIG, mesh=mesh, shape=shape,
      stop_ids=stop, temperature=0.7,
    )
    for piece in some
  ]  # fmt: skip
  for n in range(10):
    own = [piece for piece in pieces if piece.sequence == n]
    joined = np.concatenate([piece.tokens for piece in own])
    begin, end = whole.prompt_lengths[n], whole.lengths[n]
    np.testing.assert_array_equal(joined, whole.tokens[n, begin:end])
    # It says once, and last, how it ended.
    ends = [piece.finish for piece in own]
    assert ends[:-1] == [None] * (len(own) - 1)
    assert ends[-1] == ('length' if whole.truncated[n] else 'stop')
    assert max(len(piece.tokens) for piece in own) <= chunk + 1


def test_stop_found_by_the_host(world):
  """A pair of tokens ends a response, as a stop string does."""
  prompts = _many(5)
  base_ = world.generate(prompts, shape=_LONG)
  begin = base_.prompt_lengths[0]
  pair = base_.tokens[0, begin + 4 : begin + 6].tolist()

  def find(ids):
    for end in range(2, len(ids) + 1):
      if ids[end - 2 : end].tolist() == pair:
        return end
    return None

  for chunk in (1, 5, 64):
    shape = dataclasses.replace(_LONG, chunk=chunk)
    got = world.generate(prompts, shape=shape, find_stop=find)
    assert got.lengths[0] == begin + 6 and not got.truncated[0]
    for n in range(10):
      own = base_.tokens[n, base_.prompt_lengths[n] : base_.lengths[n]]
      end = find(own)
      assert got.truncated[n] == (end is None)
      kept = len(own) if end is None else end
      assert got.lengths[n] - got.prompt_lengths[n] == kept
      np.testing.assert_array_equal(
        got.tokens[n, got.prompt_lengths[n] : got.lengths[n]], own[:kept]
      )


def test_seeds_are_addresses(world, base):
  # Sequence 3's seed at sequence 2, which answers the same prompt.
  seeds = np.arange(10)
  seeds[2] = 3
  rollout = world.generate(seeds=seeds)
  np.testing.assert_array_equal(rollout.tokens[2], base.tokens[3])
  _assert_equal(rollout, base, rows=[0, 1, *range(3, 10)])


def test_bans_and_minimum_lengths(world, base):
  before = _compiled()
  first = int(base.tokens[0, base.prompt_lengths[0]])
  banned = world.generate(bias={first: -np.inf, 5: 2.0})
  assert not (banned.tokens[banned.mask] == first).any()
  # Log-probs are the policy's all the same.
  expected = _trainer_logprobs(world.params, banned, np.full(10, 0.7))
  testing.assert_close(banned.logprobs, expected, 'teacher_forced')
  later = world.generate(stop_ids=range(15), min_new_tokens=4)
  assert (later.lengths - later.prompt_lengths >= 5).any()
  for n in range(10):
    own = later.tokens[n, later.prompt_lengths[n] : later.lengths[n]]
    assert (own[:4] >= 15).all() and (own[:4] > 0).all()
  # One bias of its own for one sequence leaves the others alone.
  each = [{} for _ in range(10)]
  each[4] = {first: -np.inf}
  _assert_equal(
    world.generate(bias=each), base, rows=[n for n in range(10) if n != 4]
  )
  assert _compiled() == before


def test_everything_is_compiled_by_warm_up(world):
  """Buckets of widths, places and slots: a rollout compiles nothing more."""
  shape = engine.Shape(
    max_prompt_tokens=70, max_new_tokens=450, slots=64, samples_per_prompt=1
  )
  mesh = mesh_lib.make(devices=jax.devices()[:1])
  specs = decoder.specs(_CONFIG)
  laid_out = engine.relayout_program(mesh, specs, jnp.float32)(world.params)
  options = dict(config=_CONFIG, mesh=mesh, shape=shape)
  assert engine.warm_up(laid_out, **options) >= 10
  before = _compiled()
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, 37, n) for n in rng.integers(1, 71, 70)]
  limits = rng.integers(1, 20, 70)
  limits[3] = 450  # grows the cache, and is alone at the end
  rollout = world.generate(prompts, shape=shape, max_new_tokens=limits)
  assert (rollout.lengths - rollout.prompt_lengths == limits).all()
  assert _compiled() == before
  expected = _trainer_logprobs(world.params, rollout, np.full(70, 0.7))
  testing.assert_close(rollout.logprobs, expected, 'teacher_forced')


def test_bytes_of_the_cache():
  # Slots 6 (one bucket), 14 - 2 places; one call of prefill: 6 prompts rounded
  # down to 4, of 6 - 2 places; the prefix: 2.  2 layers, 2 heads of width 6,
  # keys and values of 4 bytes: 2 * 2 * 2 * 6 * 4 = 192 bytes a place.
  expected = 192 * (6 * 12 + 4 * 4 + 2)
  assert engine.memory(_CONFIG, _SHAPE, 2, jnp.float32) == expected
