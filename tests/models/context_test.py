"""Attention over rows whose places and heads are split over devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import testing
from rlhf_jax.models import attention
from rlhf_jax.models import context
from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.sharding import rules

_ROWS, _LENGTH, _WIDTH = 8, 16, 4


def _mesh_of_one(function, *args):
  """On one device."""
  return jax.jit(lambda *args: function(*args, None))(*args)


def _inputs(heads, kv_heads):
  rng = np.random.default_rng(0)
  draw = lambda n: rng.normal(size=(_ROWS, _LENGTH, n, _WIDTH)).astype('f')
  ids = np.sort(rng.integers(0, 4, (_ROWS, _LENGTH)), axis=1)[:, ::-1]
  return draw(heads), draw(kv_heads), draw(kv_heads), ids.astype(np.int32)


def _value(q, k, v, ids, mesh):
  """Of [R, L, ..]; every place and head counts in another way."""
  q, k, v = (context.fold(x, mesh, name, None) for x, name in (
    (q, 'heads'), (k, 'kv_heads'), (v, 'kv_heads')
  ))  # fmt: skip
  out = context.unfold(context.attend_rows(q, k, v, ids, mesh), mesh)
  weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
  return jnp.sum(out * weights), out


@pytest.mark.parametrize(
  'sizes, heads, kv_heads, repeated',
  [
    (dict(fsdp=2, context=4), 8, 4, 4),
    (dict(fsdp=2, tensor=2, context=2), 4, 2, 4),
    (dict(fsdp=4, tensor=2), 6, 3, 6),  # lcm(3, 2)
    # Heads that cannot be divided stay whole; a run refuses such a mesh.
    (dict(fsdp=4, tensor=2), 3, 3, 3),
  ],
)
def test_split_attention(sizes, heads, kv_heads, repeated, monkeypatch):
  q, k, v, ids = _inputs(heads, kv_heads)
  gradient = jax.value_and_grad(_value, argnums=(0, 1, 2), has_aux=True)
  (_, expected), expected_grads = _mesh_of_one(gradient, q, k, v, ids)
  np.testing.assert_array_equal(
    expected, jax.jit(attention.attend_rows)(q, k, v, ids)
  )
  seen, run = [], attention.attend_rows
  monkeypatch.setattr(
    attention, 'attend_rows', lambda *a: seen.append(a[1].shape) or run(*a)
  )
  mesh = mesh_lib.make(**sizes)
  names = 'rows', 'places', 'heads', None
  args = [
    jax.device_put(x, rules.sharding(mesh, names[: x.ndim], x.shape))
    for x in (q, k, v, ids)
  ]
  program = jax.jit(lambda q, *a: gradient(q, *a, rules.mesh_of(q)))
  (_, out), grads = program(*args)
  assert seen[0] == (_ROWS, _LENGTH, repeated, _WIDTH)
  testing.assert_close(out, expected, 'layout_float32')
  testing.assert_norm_close(grads, expected_grads, 'gradient_layout_float32')
  # What crosses devices: turned, never gathered.
  text = program.lower(*args).compile().as_text()
  turned = len(re.findall(r' all-to-all\(', text))
  gathered = re.findall(r'= (f32\S+) all-gather\(', text)
  assert (turned > 0) == (sizes.get('context', 1) > 1)
  assert not gathered, gathered


def test_fold_is_undone_and_moves_nothing():
  mesh = mesh_lib.make(data=2, fsdp=2, context=2)
  x = np.arange(8 * 6 * 3, dtype=np.float32).reshape(8, 6, 3)
  there = lambda x: context.fold(x, rules.mesh_of(x))
  back = lambda x: context.unfold(there(x), rules.mesh_of(x))
  placed = rules.rows(mesh, x)
  # Part i of row r is at i R + r.
  folded = jax.jit(there)(placed)
  np.testing.assert_array_equal(
    folded, np.concatenate([x[:, :3], x[:, 3:]], axis=0)
  )
  np.testing.assert_array_equal(jax.jit(back)(placed), x)
  before, after = (
    {
      shard.device.id: np.asarray(shard.data).ravel()
      for shard in y.addressable_shards
    }
    for y in (placed, folded)
  )
  jax.tree.map(np.testing.assert_array_equal, before, after)


def test_rows_that_do_not_divide():
  mesh = mesh_lib.make(fsdp=4, context=2)
  x = rules.rows(mesh, np.zeros((4, 7), np.int32))
  with pytest.raises(
    ValueError, match='7 places .* context=2: make tokens_per'
  ):
    jax.jit(lambda x: context.fold(x, rules.mesh_of(x)))(x)


def test_kernels_of_the_rollout_split_the_batch_over_context():
  mesh = mesh_lib.make(fsdp=2, context=4)
  names = 'rows', 'kv_heads', None, None
  put = lambda x, names: jax.device_put(
    x, rules.sharding(mesh, names, x.shape, rules.ROLLOUT)
  )
  q = put(np.ones((8, 1, 4, 16), 'f'), ('rows', None, None, None))
  k = put(np.ones((8, 2, 64, 16), 'f'), names)
  counts = put(np.ones((8, 1), np.int32), ('rows', None))
  with attention.force('pallas_gpu'):
    jaxpr = str(jax.make_jaxpr(attention.attend)(q, k, k, counts))
  assert jaxpr.count('pallas_call[') == 1
  assert 'f32[1,2,64,16]' in jaxpr  # one row a device
