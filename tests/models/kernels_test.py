"""Kernels, interpreted on the CPU, against plain XLA."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import testing
from rlhf_jax import types
from rlhf_jax.models import attention
from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.sharding import rules

_KERNELS = ['pallas_gpu', 'pallas_tpu']


def _rows(dtype, length, rows=2, shared=0, seed=0):
  """Queries with 2 heads for each of 2 key/value heads; outer gradients."""
  rng = np.random.default_rng(seed)
  ids = np.full((rows, length), 2, np.int32)
  ids[:, : length // 2 - 9] = 1
  ids[0, length - 20 :] = types.PADDING
  ids[-1, :shared] = types.SHARED
  draw = lambda heads: jnp.asarray(
    rng.normal(size=(rows, length, heads, 64)), dtype
  )
  return draw(4), draw(2), draw(2), jnp.asarray(ids), draw(4)


def _value_and_gradients(q, k, v, ids, outer):
  def loss(q, k, v):
    out = attention.attend_rows(q, k, v, ids)
    return jnp.sum(out * outer), out

  (_, out), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(
    q, k, v
  )
  return out, gradients


def _double(tree):
  wide = lambda x: np.asarray(x, np.float64)
  return jax.tree.map(
    lambda x: wide(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
  )


def _check(f, args, name, dtype):
  """f(*args) by a kernel, against itself in float64 by XLA."""
  with jax.enable_x64(True):
    expected = jax.jit(lambda *a: f(*a))(*_double(args))
    expected = jax.tree.map(np.asarray, expected)
  with attention.force(name, interpret=True):
    actual = jax.jit(lambda *a: f(*a))(*args)
  for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
    assert a.dtype == dtype
    if dtype == jnp.float32:
      testing.assert_norm_close(a, b, 'gradient_layout_float32')
    else:
      # Weights, outputs and gradients are rounded by up to 2^-9 each.
      error = np.linalg.norm(np.asarray(a, np.float64) - b)
      assert error < 5e-3 * np.linalg.norm(b)
  return actual


@pytest.mark.parametrize('name', _KERNELS)
@pytest.mark.parametrize(
  'dtype, length, shared',
  # Padded to blocks, with more of a prefix than is joined at once; whole
  # blocks, without one.
  [(jnp.float32, 300, 140), (jnp.bfloat16, 256, 0), (jnp.bfloat16, 150, 5)],
)
def test_rows_and_their_gradients(name, dtype, length, shared):
  args = _rows(dtype, length, shared=shared)
  out, gradients = _check(_value_and_gradients, args, name, dtype)
  for x in (out, *gradients):
    assert not x[0, length - 20 :].any()  # padding


@pytest.mark.parametrize('name', _KERNELS)
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize('with_prefix', [True, False])
def test_decoding(name, dtype, with_prefix):
  rng = np.random.default_rng(1)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  # 5 query heads a key/value head; rows that see all, hardly anything, nothing
  q, k, v = draw(5, 1, 10, 64), draw(5, 2, 384, 64), draw(5, 2, 384, 64)
  counts = jnp.array([[384], [1], [0], [129], [300]], jnp.int32)
  prefix = (draw(2, 7, 64), draw(2, 7, 64)) if with_prefix else None
  f = lambda q, k, v, prefix: attention.attend(q, k, v, counts, prefix=prefix)
  out = _check(f, (q, k, v, prefix), name, dtype)
  assert out[2].any() == with_prefix


@pytest.mark.parametrize('name', _KERNELS)
def test_places_behind_the_end_have_no_effect(name):
  """An earlier sequence left something there."""
  rng = np.random.default_rng(2)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  q, k, v = draw(2, 4, 64), draw(2, 2, 256, 64), draw(2, 2, 256, 64)
  lengths = jnp.array([3, 200], jnp.int32)
  behind = jnp.arange(256)[None, :] >= lengths[:, None]
  dirty = lambda x: jnp.where(behind[:, None, :, None], 1e4, x)
  decode = attention.IMPLEMENTATIONS[name].decode
  clean = decode(q, k, v, lengths, interpret=True)
  other = decode(q, dirty(k), dirty(v), lengths, interpret=True)
  jax.tree.map(np.testing.assert_array_equal, clean, other)


@pytest.mark.parametrize('name', _KERNELS)
def test_a_prompt_behind_a_prefix(name):
  q, k, v, *_ = _rows(jnp.float32, 150)
  rng = np.random.default_rng(3)
  prefix = jnp.asarray(rng.normal(size=(2, 2, 7, 64)), jnp.float32)
  front = lambda x: jnp.swapaxes(x, 1, 2)
  f = lambda q, k, v, p: attention.attend(
    q, front(k), front(v), None, prefix=(p[0], p[1])
  )
  _check(f, (q, k, v, prefix), name, jnp.float32)


def test_each_device_runs_the_kernel_on_its_part():
  args = _rows(jnp.float32, 130, rows=4, shared=5)
  mesh = mesh_lib.make(data=2, fsdp=2, tensor=2)
  axes = ('rows', None, 'heads', None)
  place = lambda x: jax.device_put(
    x, rules.sharding(mesh, axes[: x.ndim], x.shape)
  )
  with attention.force('pallas_gpu', interpret=True):
    expected = jax.jit(lambda *a: _value_and_gradients(*a))(*args)
    program = jax.jit(lambda *a: _value_and_gradients(*a))
    program = program.lower(*map(place, args)).compile()
  assert 'all-gather' not in program.as_text()
  actual = program(*map(place, args))
  testing.assert_norm_close(actual, expected, 'gradient_layout_float32')


@pytest.mark.parametrize('name', _KERNELS)
def test_the_backward_pass_keeps_what_it_needs(name):
  """The forward kernel runs once, also under the policy of the decoder."""
  q, k, v, ids, outer = _rows(jnp.float32, 128)

  def loss(q, k, v):
    kept = jax.checkpoint_policies.save_only_these_names('attention')
    f = jax.checkpoint(attention.attend_rows, policy=kept)
    return jnp.sum(f(q, k, v, ids) * outer)

  with attention.force(name, interpret=True):
    jaxpr = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(q, k, v))
  # Forward; and one before the backward kernel, or two of them.
  assert jaxpr.count('pallas_call[') == 3


@pytest.mark.parametrize('name', _KERNELS)
def test_other_lengths_are_refused(name):
  q, k, v, ids, _ = _rows(jnp.float32, 150)
  front = [jnp.swapaxes(x, 1, 2) for x in (q, k, v)]
  made = attention.IMPLEMENTATIONS[name]
  with pytest.raises(
    ValueError, match='150 places; expected a multiple of 128'
  ):
    made.rows(*front, ids)
  with pytest.raises(ValueError, match='150 places; expected a multiple of'):
    made.decode(front[0][:, :, 0], *front[1:], jnp.array([1, 2]))


def test_a_run_on_the_cpu_loads_no_kernel():
  code = """
import sys
import jax.numpy as jnp
from rlhf_jax.models import attention
x = jnp.ones((1, 256, 2, 64), jnp.bfloat16)
attention.attend_rows(x, x, x, jnp.ones((1, 256), jnp.int32))
heads = jnp.swapaxes(x, 1, 2)
attention.attend(x[:, :1], heads, heads, jnp.ones((1, 1), jnp.int32))
kernels = 'ops', 'tpu', 'triton'
kernels = tuple(f'jax.experimental.pallas.{name}' for name in kernels)
print([name for name in sys.modules if name.startswith(kernels)])
"""
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  assert done.stdout.strip() == '[]'
