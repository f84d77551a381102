"""The parts of a block that look at one token at a time."""

import math

import chex
import jax
from jax import ad_checkpoint
import jax.numpy as jnp
import numpy as np

from rlhf_jax.models import config as config_lib
from rlhf_jax.models import lora

Array = jax.Array


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
  """x / sqrt(mean(x^2) + eps) * weight, over the last axis.

  The mean is taken in at least float32.  [..., D], [D] -> [..., D] in the
  dtype of x.  Source: https://arxiv.org/abs/1910.07467
  """
  chex.assert_rank(weight, 1)
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
  return (wide * scale).astype(x.dtype) * _like(weight, x)


def mlp(x: Array, weights: dict[str, Array]) -> Array:
  """(silu(x gate) * (x up)) down: [..., D] -> [..., D].

  `weights` has gate and up [D, F] and down [F, D], or gate and up side by side
  as gate_up [D, 2F]; and their biases where the model has them.
  Source: https://arxiv.org/abs/2002.05202
  """
  if 'gate_up' in weights:
    gate, up = jnp.split(dense(x, weights, 'gate_up'), 2, axis=-1)
  else:
    gate, up = dense(x, weights, 'gate'), dense(x, weights, 'up')
  # Named for `decoder.hidden`, which keeps them for the backward pass.
  gate, up = (ad_checkpoint.checkpoint_name(a, 'mlp') for a in (gate, up))
  return dense(jax.nn.silu(gate) * up, weights, 'down')


def dense(x: Array, weights: dict[str, Array], name: str) -> Array:
  """x weights[name] (+ weights[name + '_bias']): [..., D] -> [..., F].

  The weight is [D, ...]; its other axes become one, F.  With adapters, whose
  B has the scale in it (see `lora`), + (x A) B.
  """
  weight = weights[name].reshape(x.shape[-1], -1)
  y = matmul(x, weight)
  if name + lora.A in weights:
    a = weights[name + lora.A].reshape(x.shape[-1], -1)
    b = weights[name + lora.B].reshape(a.shape[-1], -1)
    y += matmul(matmul(x, a), b)
  bias = weights.get(f'{name}_bias')
  return y if bias is None else y + _like(bias.reshape(-1), y)


def matmul(x: Array, weight: Array, axis: int = 0, dtype=None) -> Array:
  """Product over the last axis of x and `axis` of weight: [..., D] -> [..., F].

  All leading axes of x are made one for the product.  Otherwise the gradient
  of the weight sums over several axes, and XLA on the CPU then writes both
  operands in another order first, which takes longer than the product.
  """
  flat = x.reshape(-1, x.shape[-1])
  y = jax.lax.dot_general(
    flat, weight, (((1,), (axis,)), ((), ())), preferred_element_type=dtype
  )
  return y.reshape(*x.shape[:-1], -1)


def rope_frequencies(
  head_dim: int,
  theta: float,
  scaling: config_lib.RopeScaling | None,
) -> tuple[np.ndarray, float]:
  """Radians per position of each pair of dimensions, and a factor on both.

  theta^(-2i / E) for i < E / 2, changed by `scaling`.
  Returns ([E / 2] float32, the factor that yarn puts on cosine and sine).
  Sources: https://arxiv.org/abs/2104.09864 (rope), 2306.15595 (linear),
  2309.00071 (yarn), 2407.21783 (llama3).
  """
  exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
  base = 1.0 / np.float32(theta) ** exponent
  if scaling is None:
    return base, 1.0
  return _SCALINGS[scaling.kind](base, head_dim, theta, scaling)


def rope_table(
  positions: Array, frequencies: np.ndarray, factor: float, dtype
) -> tuple[Array, Array]:
  """Cosines and sines of position * frequency: [...] -> two [..., E / 2].

  Computed in at least float32, whatever the dtype of the model.
  """
  dtype = jnp.promote_types(dtype, jnp.float32)
  angles = positions[..., None].astype(dtype)
  angles = angles * _like(jnp.asarray(frequencies, dtype), angles)
  return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rope(x: Array, cos: Array, sin: Array) -> Array:
  """Turns the pairs (i, i + E / 2) of each head by the position's angles.

  [..., heads, E] with tables [..., E / 2] -> [..., heads, E] in x's dtype.
  """
  chex.assert_equal_shape([cos, sin])
  cos, sin = cos[..., None, :], sin[..., None, :]  # ... 1 E/2
  first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
  turned = (first * cos - second * sin, second * cos + first * sin)
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _like(vector: Array, x: Array) -> Array:
  """[n] -> [1, ..., n] of the rank of x."""
  return jnp.expand_dims(vector, tuple(range(x.ndim - vector.ndim)))


def _linear(base, head_dim, theta, scaling):
  del head_dim, theta
  return base / np.float32(scaling.factor), 1.0


def _llama3(base, head_dim, theta, scaling):
  """Long waves are stretched, short ones kept, a linear blend between."""
  del head_dim, theta
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  waves = scaling.original_max_positions * base / (2 * math.pi)
  keep = np.clip((waves - low) / (high - low), 0.0, 1.0)
  scaled = (1 - keep) * base / scaling.factor + keep * base
  return scaled.astype(np.float32), 1.0


def _yarn(base, head_dim, theta, scaling):
  """Dimensions that turn rarely in the old context are stretched."""

  def dimension(turns):  # that makes so many turns in the old context
    wave = scaling.original_max_positions / (turns * 2 * math.pi)
    return head_dim * math.log(wave) / (2 * math.log(theta))

  low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
  if scaling.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, head_dim - 1)
  width = max(high - low, 1e-3)  # a step where both are the same dimension
  stretch = np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)
  scaled = stretch * base / scaling.factor + (1 - stretch) * base

  def magnitude(mscale):  # how much sharper attention is made
    if scaling.factor <= 1:
      return 1.0
    return 0.1 * mscale * math.log(scaling.factor) + 1.0

  factor = scaling.attention_factor
  if factor is None and scaling.mscale and scaling.mscale_all_dim:
    factor = magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
  elif factor is None:
    factor = magnitude(1.0)
  return scaled.astype(np.float32), float(factor)


_SCALINGS = {'linear': _linear, 'llama3': _llama3, 'yarn': _yarn}
