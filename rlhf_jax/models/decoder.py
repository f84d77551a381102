"""The decoder: one pure function over packed rows, one over a cache.

Parameters are a nested dict; the layers are stacked on a leading axis and run
by `lax.scan`, so compile time does not grow with depth.  Only the sampler takes
them apart.
"""

from collections.abc import Sequence
import math
from typing import Any

import chex
import jax
from jax import ad_checkpoint
import jax.numpy as jnp
import numpy as np

from rlhf_jax.models import attention
from rlhf_jax.models import config as config_lib
from rlhf_jax.models import context
from rlhf_jax.models import layers
from rlhf_jax.models import lora
from rlhf_jax.models import spec as spec_lib
from rlhf_jax.sharding import rules

Array = jax.Array
PyTree = Any
Spec = spec_lib.Spec

# What a block's matrix products read: kept for the backward pass, or moved out.
_KEPT = ('input', 'attention', 'middle', 'mlp')

# The place of a token that is not written to the cache.
NOWHERE = np.iinfo(np.int32).max


def specs(config: config_lib.ModelConfig, head: str = 'policy') -> PyTree:
  """The weight table of a model with a head of HEADS."""
  if head not in HEADS:
    raise ValueError(f'unknown head {head!r}; one of {sorted(HEADS)}.')
  d, v, std = config.d_model, config.vocab_size, config.init_std
  ones = dict(init='ones')
  table = {
    'embed': Spec(
      (v, d), ('vocab', 'embed'), 'normal', 'model.embed_tokens.weight', std=std
    ),
    'layers': {
      'attention_norm': _stacked(
        config, (d,), ('embed',), 'input_layernorm.weight', **ones
      ),
      'attention': _attention_specs(config),
      'mlp_norm': _stacked(
        config, (d,), ('embed',), 'post_attention_layernorm.weight', **ones
      ),
      'mlp': _mlp_specs(config),
    },
    'final_norm': Spec((d,), ('embed',), 'ones', 'model.norm.weight'),
  }
  return table | HEADS[head](config)


def hidden(
  params: PyTree,
  config: config_lib.ModelConfig,
  tokens: Array,
  positions: Array,
  segment_ids: Array,
  *,
  remat: str = 'none',
  dtype: Any = jnp.float32,
) -> Array:
  """Final-normed hidden states of packed rows.

  Args:
    params: of `specs(config, head)` with any head; perhaps with adapters, see
      `lora`.
    config: static.
    tokens: [R, L] int32.
    positions: [R, L] int32, in the sequence.
    segment_ids: [R, L] int32, as in `types.Rows`.
    remat: what the backward pass finds, a name in `REMAT`.  'none': what
      the matrix products of a block need; only element-wise work is done again.
      'block': the block's input, and the whole block is computed again.
      'offload': as 'none', but in the host's pinned memory in between.
    dtype: of the computation; parameters are cast to it layer by layer.

  Returns:
    [R, L, D] in `dtype`; arbitrary but finite at padding.

  Raises:
    ValueError: `remat` is unknown; lists the names.
  """
  if remat not in REMAT:
    raise ValueError(f'remat={remat!r} is not one of {sorted(REMAT)}')
  chex.assert_rank([tokens, positions, segment_ids], 2)
  chex.assert_equal_shape([tokens, positions, segment_ids])
  mesh = rules.mesh_of(tokens, params['embed'])
  segment_ids = rules.constrain(segment_ids, ('rows', None), mesh)
  table = _rope_table(config, context.fold(positions, mesh), dtype)
  params = lora.scaled(params)
  whole_table = lora.extend(specs(config), params)
  axes = jax.tree.map(lambda spec: spec.axes, whole_table)
  gather = lambda w, axes: rules.gather(w.astype(dtype), axes, mesh)

  def block(x, layer):
    weights, window = layer
    x = ad_checkpoint.checkpoint_name(x, 'input')
    weights = jax.tree.map(
      lambda w, axes: gather(w, axes[1:]), weights, axes['layers']
    )
    q, k, v = _project(x, weights, config, table)
    out = context.attend_rows(q, k, v, segment_ids, mesh, positions, window)
    return _split(_finish(x, out, weights, config), mesh)

  # Without a policy of ours the scan would write about three times as much for
  # the backward pass: every intermediate, and the weights once more.
  body = jax.checkpoint(block, prevent_cse=False, policy=REMAT[remat])
  x = _look_up(params['embed'], tokens, dtype, mesh)  # R L D
  x = context.fold(x, mesh)
  stacked = params['layers'], _windows(config)
  x, _ = jax.lax.scan(lambda x, w: (body(x, w), None), x, stacked)
  norm = gather(params['final_norm'], axes['final_norm'])
  x = layers.rms_norm(x, norm, config.norm_eps)
  return context.unfold(x, mesh)


def hidden_cached(
  params: PyTree,
  config: config_lib.ModelConfig,
  tokens: Array,
  positions: Array,
  cache_keys: Sequence[Array] | None,
  cache_values: Sequence[Array] | None,
  places: Array | None,
  mask: Array | None,
  *,
  prefix: Sequence[tuple[Array, Array]] | None = None,
  turned: bool = False,
  dtype: Any = jnp.float32,
) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
  """Hidden states of new tokens, which attend through a cache.

  Each layer first writes the keys and values of the new tokens, then reads
  its whole cache, so `mask` decides what a token sees, itself included.

  The cache of a layer with a sliding window may have just the window's places:
  place c is then written at c modulo that number, over the one that no token
  sees any more (a ring).  Only one token at a time can go there.

  Prompts need no cache: they attend to themselves, and what is returned is all
  their keys and values, in their order.

  The layers are a loop of Python and not a scan: a scan would copy the cache of
  a layer out of the stack before every product with it.

  Args:
    params: of `specs(config)`, better unstacked (see `unstack` and `fuse`).
    config: static.
    tokens: [B, S] int32: a prompt (S long) or one token each (S = 1).
    positions: [B, S] int32, in the sequence.
    cache_keys: G arrays [B, H, C, E]; None, as the next three, for prompts.
    cache_values: G arrays [B, H, C, E].
    places: [B, S] int32: the place a token is written to; NOWHERE drops it.
    mask: the places that a token sees, see `attention.attend`: [B, S] int32 (so
      many first ones, of those in the window), or [B, S, C] bool, where no
      layer slides.
    prefix: G pairs of keys and values [H, P, E], of the tokens at the positions
      before P, which all rows share and see, as far as windows reach.
    turned: the keys of the cache are [B, H, E, C].
    dtype: of the computation; the cache may have another.

  Returns:
    ([B, S, D] in `dtype`, the caches with the new tokens), or those of the
    prompts, [B, H, S, E] in `dtype`.
  """
  chex.assert_rank([tokens, positions], 2)
  one_by_one = mask is not None and mask.ndim == 2 and tokens.shape[1] == 1
  if config.sliding_window and mask is not None and not one_by_one:
    raise ValueError(
      f'{tokens.shape[1]} tokens a row and a mask of rank {mask.ndim}, with'
      ' sliding windows: expected one token a row, and counts [B, 1]'
    )
  table = _rope_table(config, positions, dtype)
  x = params['embed'][tokens].astype(dtype)  # B S D
  all_keys, all_values = [], []
  for layer, weights in enumerate(unstack(params)['layers']):
    weights = _cast(weights, dtype)
    window = config.windows[layer]
    q, k, v = _project(x, weights, config, table)
    if cache_keys is None:
      keys, values = (jnp.moveaxis(x, 1, 2) for x in (k, v))
    else:
      cached = cache_keys[layer], cache_values[layer]
      keys, values = _write(*cached, k, v, places, window > 0, turned)
    shared = prefix and tuple(a.astype(dtype) for a in prefix[layer])
    sees, prefix_seen = mask, None
    if window:
      if mask is not None:
        sees = jnp.minimum(mask, values.shape[2])
      if prefix:
        begin = shared[0].shape[1]
        prefix_seen = window - 1 - (positions - begin)
        # No token behind the prefix sees more of it.
        shared = tuple(a[:, max(begin - window, 0) :] for a in shared)
    out = attention.attend(
      q, keys.astype(dtype), values.astype(dtype), sees,
      prefix=shared, prefix_seen=prefix_seen, window=window, turned=turned,
    )  # fmt: skip
    x = _finish(x, out, weights, config)
    all_keys.append(keys)
    all_values.append(values)
  norm = params['final_norm'].astype(dtype)
  hidden_states = layers.rms_norm(x, norm, config.norm_eps)
  return hidden_states, tuple(all_keys), tuple(all_values)


def _write(cache_keys, cache_values, k, v, places, sliding, turned):
  """New keys and values [B, S, H, E] into a layer's cache."""
  if sliding:
    ring = places % cache_values.shape[2]
    places = jnp.where(places == NOWHERE, NOWHERE, ring)
  rows = jnp.arange(k.shape[0])[:, None, None]  # B 1 1
  heads = jnp.arange(k.shape[2])[None, None]  # 1 1 H
  at = places[:, :, None]
  if turned:
    at_keys = cache_keys.at[rows, heads, :, at]
  else:
    at_keys = cache_keys.at[rows, heads, at]
  return (
    at_keys.set(k.astype(cache_keys.dtype), mode='drop'),
    cache_values.at[rows, heads, at].set(
      v.astype(cache_values.dtype), mode='drop'
    ),
  )


def unstack(params: PyTree) -> PyTree:
  """The same parameters with a tuple of G layers in place of stacked ones.

  Adapters are merged.
  """
  if isinstance(params['layers'], tuple):
    return params
  params = lora.merge(params)
  stacked = params['layers']
  of = lambda layer: jax.tree.map(lambda w: w[layer], stacked)
  count = len(stacked['attention_norm'])
  return params | {'layers': tuple(of(i) for i in range(count))}


def logits(
  params: PyTree, config: config_lib.ModelConfig, hidden_states: Array
) -> Array:
  """Unscaled logits, [..., D] -> [..., V] in at least float32.

  The weights are cast to the dtype of the hidden states.
  """
  return project_to_vocabulary(
    hidden_states, output_head(params, config, hidden_states.dtype)
  )


def values(params: PyTree, hidden_states: Array) -> Array:
  """A critic's values, [..., D] -> [...] in at least float32."""
  wide = jnp.promote_types(hidden_states.dtype, jnp.float32)
  weight = params['value_head'].astype(wide)  # D 1
  return jnp.squeeze(hidden_states.astype(wide) @ weight, axis=-1)


def output_head(
  params: PyTree, config: config_lib.ModelConfig, dtype: Any
) -> tuple[Array, int]:
  """The output matrix in `dtype` and which of its axes is the model width."""
  if 'head' in params:
    return params['head'].astype(dtype), 0
  if 'value_head' in params or not config.tied_embeddings:
    raise ValueError(
      f'these parameters have no output head (keys {sorted(params)}); logits'
      " need parameters made with head='policy'."
    )
  return params['embed'].astype(dtype), 1


def project_to_vocabulary(x: Array, head: tuple[Array, int]) -> Array:
  """[..., D] times the matrix of `output_head` -> [..., V]."""
  weight, axis = head
  wide = jnp.promote_types(x.dtype, jnp.float32)
  return layers.matmul(x, weight, axis, dtype=wide)


def fuse(params: PyTree, dtype: Any = jnp.float32) -> PyTree:
  """The same model for decoding: fewer, larger products per token.

  q, k and v become one matrix, gate and up another, a tied embedding gets a
  copy [D, V] as the head, adapters are merged, and layers are unstacked.
  Computed once per weight update, outside the decode loop.  Only
  `hidden_cached` and `logits` read it.
  """
  params = lora.merge(params)
  block, heads = params['layers'], params['layers']['attention']
  mlp = block['mlp']
  flat = lambda *ws: jnp.concatenate(
    [w.reshape(w.shape[0], w.shape[1], -1) for w in ws], axis=-1
  ).astype(dtype)
  biases = lambda *ws: jnp.concatenate(
    [w.reshape(w.shape[0], -1) for w in ws], axis=-1
  ).astype(dtype)
  fused_heads = {'qkv': flat(heads['q'], heads['k'], heads['v'])}
  fused_mlp = {'gate_up': flat(mlp['gate'], mlp['up'])}
  if 'q_bias' in heads:
    fused_heads['qkv_bias'] = biases(
      heads['q_bias'], heads['k_bias'], heads['v_bias']
    )
  if 'gate_bias' in mlp:
    fused_mlp['gate_up_bias'] = biases(mlp['gate_bias'], mlp['up_bias'])
  kept = _cast(
    {
      'attention': {n: heads[n] for n in ('o', 'o_bias') if n in heads},
      'mlp': {n: mlp[n] for n in ('down', 'down_bias') if n in mlp},
      'attention_norm': block['attention_norm'],
      'mlp_norm': block['mlp_norm'],
    },
    dtype,
  )
  kept['attention'] |= fused_heads
  kept['mlp'] |= fused_mlp
  out = _cast({k: w for k, w in params.items() if k != 'layers'}, dtype)
  if 'head' not in out and 'value_head' not in out:
    out['head'] = out['embed'].T
  return unstack(out | {'layers': kept})


def _look_up(embed, tokens, dtype, mesh):
  """Rows of the embedding, [R, L] -> [R, L, D].

  Where its width is split over `fsdp`, each device looks up its part of the
  width for the tokens of all, and an all-to-all brings together the width of
  its own: the table and its gradient stay where they are.
  """
  split = rules.parts(mesh, 'rows'), rules.parts(mesh, 'places')
  alone = mesh is None or split == (1, 1)
  if alone or any(n % k for n, k in zip(tokens.shape, split)):
    return embed[tokens].astype(dtype)
  stored = rules.manual(mesh, {1: 'embed'}, embed.shape)
  axes = stored[1]

  def local(embed, tokens):
    if not axes:
      return embed[tokens].astype(dtype)
    every = jax.lax.all_gather(tokens, axes, axis=0, tiled=True)
    part = embed[every].astype(dtype)
    return jax.lax.all_to_all(part, axes, 0, 2, tiled=True)

  run = rules.on_places(
    local, mesh, tokens.shape, in_specs=(stored, None), out_specs=None
  )
  return run(embed, tokens)


def _split(x, mesh):
  return rules.constrain(x, ('row_parts', None, None), mesh)


def _cast(weights: PyTree, dtype: Any) -> PyTree:
  return jax.tree.map(lambda w: w.astype(dtype), weights)


def _windows(config) -> Array | None:
  """[G] int32, for one program of all layers; None where none slides."""
  if not config.sliding_window:
    return None
  everything = jnp.iinfo(jnp.int32).max
  return jnp.array([w or everything for w in config.windows], jnp.int32)


def _rope_table(config, positions, dtype):
  frequencies, factor = layers.rope_frequencies(
    config.head_dim, config.rope_theta, config.rope_scaling
  )
  return layers.rope_table(positions, frequencies, factor, dtype)


def _project(x, weights, config, table):
  """Queries [.., Q, E], keys and values [.., H, E] of a block's input."""
  x = layers.rms_norm(x, weights['attention_norm'], config.norm_eps)
  weights = weights['attention']
  q_heads, kv_heads = config.num_heads, config.num_kv_heads
  by_head = lambda y: y.reshape(*x.shape[:-1], -1, config.head_dim)
  if 'qkv' in weights:
    all_heads = by_head(layers.dense(x, weights, 'qkv'))
    q, k, v = jnp.split(all_heads, (q_heads, q_heads + kv_heads), axis=-2)
  else:
    q, k, v = (by_head(layers.dense(x, weights, name)) for name in 'qkv')
  return layers.rope(q, *table), layers.rope(k, *table), v


def _finish(x, attended, weights, config):
  """The rest of a block after attention: [.., D] and [.., Q, E] -> [.., D]."""
  attended = attended.reshape(*x.shape[:-1], -1)
  x = x + layers.dense(attended, weights['attention'], 'o')
  x = ad_checkpoint.checkpoint_name(x, 'middle')
  normed = layers.rms_norm(x, weights['mlp_norm'], config.norm_eps)
  return x + layers.mlp(normed, weights['mlp'])


def _stacked(config, shape, axes, hf_name, **kwargs) -> Spec:
  return Spec(
    (config.num_layers, *shape),
    ('layers', *axes),
    hf_name=f'model.layers.{{layer}}.{hf_name}',
    **kwargs,
  )


def _attention_specs(config: config_lib.ModelConfig) -> PyTree:
  d, e = config.d_model, config.head_dim
  heads = {
    'q': (config.num_heads, 'heads'),
    'k': (config.num_kv_heads, 'kv_heads'),
    'v': (config.num_kv_heads, 'kv_heads'),
  }
  table = {}
  for name, (number, axis) in heads.items():
    table[name] = _stacked(
      config,
      (d, number, e),
      ('embed', axis, 'head_dim'),
      f'self_attn.{name}_proj.weight',
      init='normal',
      std=config.init_std,
      inputs=1,
    )
    if config.attention_bias:
      table[f'{name}_bias'] = _stacked(
        config,
        (number, e),
        (axis, 'head_dim'),
        f'self_attn.{name}_proj.bias',
        init='zeros',
      )
  table['o'] = _stacked(
    config,
    (config.num_heads, e, d),
    ('heads', 'head_dim', 'embed'),
    'self_attn.o_proj.weight',
    init='normal',
    std=_residual_std(config),
    inputs=2,
  )
  if config.output_bias:
    table['o_bias'] = _stacked(
      config, (d,), ('embed',), 'self_attn.o_proj.bias', init='zeros'
    )
  return table


def _mlp_specs(config: config_lib.ModelConfig) -> PyTree:
  d, f = config.d_model, config.d_mlp
  std = config.init_std
  weights = {
    'gate': ((d, f), ('embed', 'mlp'), std),
    'up': ((d, f), ('embed', 'mlp'), std),
    'down': ((f, d), ('mlp', 'embed'), _residual_std(config)),
  }
  table = {}
  for name, (shape, axes, std) in weights.items():
    table[name] = _stacked(
      config,
      shape,
      axes,
      f'mlp.{name}_proj.weight',
      init='normal',
      std=std,
      inputs=1,
    )
    if config.mlp_bias:
      table[f'{name}_bias'] = _stacked(
        config, shape[1:], axes[1:], f'mlp.{name}_proj.bias', init='zeros'
      )
  return table


def _residual_std(config: config_lib.ModelConfig) -> float:
  # 2G projections add to the residual stream: scaled so that its variance at
  # the start does not grow with depth (GPT-2).
  return config.init_std / math.sqrt(2 * config.num_layers)


def _policy_head(config: config_lib.ModelConfig) -> PyTree:
  if config.tied_embeddings:
    return {}
  shape = config.d_model, config.vocab_size
  return {
    'head': Spec(
      shape,
      ('embed', 'vocab'),
      'normal',
      'lm_head.weight',
      inputs=1,
      std=config.init_std,
    )
  }


def _value_head(config: config_lib.ModelConfig) -> PyTree:
  # Zeros: the first values are 0, whatever the body says.
  shape = config.d_model, 1
  return {
    'value_head': Spec(
      shape, ('embed', None), 'zeros', 'score.weight', inputs=1
    )
  }


HEADS = {'policy': _policy_head, 'value': _value_head}

# Rematerialisation: the checkpoint policy of a block.
REMAT = {
  'none': jax.checkpoint_policies.save_only_these_names(*_KEPT),
  'block': None,
  'offload': jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=list(_KEPT),
    offload_src='device',
    offload_dst='pinned_host',
  ),
}
