"""The rollout engine: prompts in, a `Rollout` out.  It knows token ids only."""

from collections.abc import Callable, Sequence
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import tree
from rlhf_jax import types
from rlhf_jax.models import config as model_config
from rlhf_jax.models import decoder
from rlhf_jax.sampling import decode
from rlhf_jax.sampling import schedule
from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.sharding import rules


@dataclasses.dataclass(frozen=True)
class Shape:
  """The static sizes of a rollout; one program each is compiled for them."""

  max_prompt_tokens: int
  max_new_tokens: int
  slots: int  # sequences that decode at the same time
  samples_per_prompt: int
  chunk: int = 64  # tokens a sequence between two looks of the host

  @property
  def width(self) -> int:
    """T, tokens of the longest possible sequence."""
    return self.max_prompt_tokens + self.max_new_tokens


def relayout_program(
  mesh: jax.sharding.Mesh, specs: types.PyTree, dtype: jnp.dtype
) -> Callable[[types.PyTree], types.PyTree]:
  """`relayout(params)`: cast to `dtype`, in the rollout sharding; jitted.

  Where heads are not split over devices, the products of a layer that read the
  same input are fused into one (`decoder.fuse`), which small batches need.
  """
  if mesh.shape['tensor'] == 1:
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.jit(
      lambda params: decoder.fuse(params, dtype), out_shardings=everywhere
    )
  return jax.jit(
    lambda params: tree.cast(params, dtype),
    out_shardings=rules.params(mesh, specs, rules.ROLLOUT),
  )


def generate(
  params: types.PyTree,
  prompts: Sequence[np.ndarray],
  key: types.Array,
  *,
  config: model_config.ModelConfig,
  mesh: jax.sharding.Mesh,
  shape: Shape,
  stop_ids: Sequence[int],
  temperature: float | np.ndarray = 1.0,
  top_k: int | np.ndarray = 0,
  top_p: float | np.ndarray = 1.0,
  max_new_tokens: int | np.ndarray | None = None,
  prefix: np.ndarray | None = None,
  policy_version: int = 0,
  dtype: jnp.dtype = jnp.float32,
) -> types.Rollout:
  """Samples `samples_per_prompt` responses to every prompt.

  Args:
    params: of the policy, see `relayout`.
    prompts: B int arrays of token ids, each with a token or more.
    key: see `keys.key`; sample i of prompt b draws with the address
      (b * samples_per_prompt + i, position).
    config: of the model.
    mesh: rows are split over its (data, fsdp).
    shape: static sizes.
    stop_ids: each ends a sequence and stays in it.
    temperature: number or [B * samples]; 0 is greedy.
    top_k: number or [B * samples]; 0 is off.
    top_p: number or [B * samples]; 1 is off.
    max_new_tokens: number or [B * samples], `shape.max_new_tokens` by default.
    prefix: tokens with which every prompt begins, computed once; used only if
      they all do and go on after it.
    policy_version: written to the rollout.
    dtype: of computation and cache.

  Returns:
    A `Rollout` of numpy arrays, N = B * samples_per_prompt, in prompt order.

  Raises:
    ValueError: a prompt is empty or longer than the shape allows, or a request
      is out of range.
  """
  samples = shape.samples_per_prompt
  lengths = _lengths(prompts, shape)
  count = len(prompts) * samples
  asked = _requests(
    count, shape, temperature, top_k, top_p, max_new_tokens, stop_ids
  )
  prefix = _usable_prefix(prefix, prompts)
  begin = len(prefix)
  suffixes = np.zeros((len(prompts), shape.max_prompt_tokens - begin), np.int32)
  for row, prompt in zip(suffixes, prompts):
    row[: len(prompt) - begin] = prompt[begin:]

  tokens = np.zeros((count, shape.width), np.int32)
  logprobs = np.zeros((count, shape.width), np.float32)
  totals = np.zeros(count, np.int32)
  stopped = np.zeros(count, bool)
  for wave in schedule.waves(lengths, samples, shape.slots):
    # A wave is a multiple of the data groups, so that all have the same rows.
    fill = -len(wave) % mesh_lib.data_groups(mesh)
    wave = np.pad(wave, (0, fill), constant_values=-1)
    chosen = np.where(wave >= 0, wave, wave[0])
    rows = (chosen[:, None] * samples + np.arange(samples)).reshape(-1)
    real = np.repeat(wave >= 0, samples)
    state = _decode(
      params,
      prefix,
      rules.rows(mesh, (suffixes[chosen], lengths[chosen])),
      asked.replace(
        samples=asked.samples[rows],
        temperature=asked.temperature[rows],
        top_k=asked.top_k[rows],
        top_p=asked.top_p[rows],
        # Fill-ups repeat the wave's first prompt for a single token.
        max_new_tokens=np.where(real, asked.max_new_tokens[rows], 1),
      ),
      key,
      config=config,
      shape=shape,
      dtype=dtype,
    )
    for target, source in (
      (tokens, state.tokens),
      (logprobs, state.logprobs),
      (totals, state.lengths),
      (stopped, state.stopped),
    ):
      target[rows[real]] = np.asarray(source)[real]

  at = np.arange(shape.width)[None]
  prompt_lengths = np.repeat(lengths, samples)
  mask = (at >= prompt_lengths[:, None]) & (at < totals[:, None])
  return types.Rollout(
    tokens=np.where(at < totals[:, None], tokens, 0),
    lengths=totals,
    prompt_lengths=prompt_lengths,
    mask=mask,
    logprobs=np.where(mask, logprobs, 0.0),
    temperature=asked.temperature,
    truncated=~stopped,
    group=np.repeat(np.arange(len(prompts), dtype=np.int32), samples),
    policy_version=np.full(count, policy_version, np.int32),
  )


def _decode(params, prefix, prompts, request, key, *, config, shape, dtype):
  """Prefills a wave and decodes it to its end."""
  state = decode.start(
    params,
    jnp.asarray(prefix),
    *prompts,
    request,
    key,
    config=config,
    samples_per_prompt=shape.samples_per_prompt,
    slots=shape.width,
    dtype=dtype,
  )
  while not bool(jnp.all(state.done)):
    state = decode.advance(
      params, state, request, key, shape.chunk, config=config, dtype=dtype
    )
  return state


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


def _requests(
  count, shape, temperature, top_k, top_p, max_new_tokens, stop_ids
) -> decode.Request:
  """Checks the numbers and spreads them over the sequences."""
  if max_new_tokens is None:
    max_new_tokens = shape.max_new_tokens
  spread = lambda x, dtype: np.broadcast_to(np.asarray(x, dtype), count).copy()
  request = decode.Request(
    samples=np.arange(count, dtype=np.int32),
    temperature=spread(temperature, np.float32),
    top_k=spread(top_k, np.int32),
    top_p=spread(top_p, np.float32),
    max_new_tokens=spread(max_new_tokens, np.int32),
    stop_ids=_padded(stop_ids),
  )
  for ok, what in (
    ((request.temperature >= 0).all(), 'temperature must be 0 or more'),
    ((request.top_k >= 0).all(), 'top_k must be 0 (off) or more'),
    (
      ((request.top_p > 0) & (request.top_p <= 1)).all(),
      'top_p must lie in (0, 1]',
    ),
    (
      (request.max_new_tokens >= 1).all()
      and (request.max_new_tokens <= shape.max_new_tokens).all(),
      f'max_new_tokens must lie in 1..{shape.max_new_tokens}',
    ),
  ):
    if not ok:
      raise ValueError(f'{what}, got {temperature=} {top_k=} {top_p=}'
                       f' {max_new_tokens=}')  # fmt: skip
  return request


def _padded(stop_ids: Sequence[int]) -> np.ndarray:
  """The ids and -1 up to a multiple of 16: most sets share a program."""
  ids = np.array(sorted(set(stop_ids)), np.int32)
  size = max(-(-len(ids) // 16), 1) * 16
  return np.pad(ids, (0, size - len(ids)), constant_values=-1)


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
