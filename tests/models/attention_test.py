"""Masks and attention against plain numpy, and which code is chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.models import attention
from rlhf_jax.models import attention_xla
from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.sharding import rules


def test_segment_mask_by_hand():
  # a shared prefix of one place, two sequences, padding
  mask = attention.segment_mask(jnp.array([[-1, 1, 1, 2, 0]]))
  np.testing.assert_array_equal(
    mask[0].astype(int),
    [
      [1, 0, 0, 0, 0],
      [1, 1, 0, 0, 0],
      [1, 1, 1, 0, 0],
      [1, 0, 0, 1, 0],
      [0, 0, 0, 0, 0],
    ],
  )


def _inputs(seed=0, rows=2, length=3, cache=5, heads=4, kv_heads=2, width=6):
  rng = np.random.default_rng(seed)
  q = rng.normal(size=(rows, length, heads, width))
  k, v = rng.normal(size=(2, rows, kv_heads, cache, width))
  mask = rng.random((rows, length, cache)) < 0.6
  mask[:, :, 0] = True
  mask[0, 1] = False  # a query that sees nothing
  mask[1, :, 4] = False  # a key that no query sees
  return q, k, v, mask


def _plain(q, k, v, mask):
  """One query at a time, one head at a time."""
  out = np.zeros_like(q)
  group = q.shape[2] // k.shape[1]
  for r, i, h in np.ndindex(*q.shape[:3]):
    seen = np.flatnonzero(mask[r, i])
    if not len(seen):
      continue
    scores = k[r, h // group, seen] @ q[r, i, h] / np.sqrt(q.shape[3])
    p = np.exp(scores - scores.max())
    out[r, i, h] = (p / p.sum()) @ v[r, h // group, seen]
  return out


def test_attend_equals_a_plain_loop():
  q, k, v, mask = _inputs()
  with jax.enable_x64(True):
    out = attention.attend(*map(jnp.asarray, (q, k, v, mask)))
    np.testing.assert_allclose(out, _plain(q, k, v, mask), atol=1e-12)
  assert not np.asarray(out)[0, 1].any()


def test_a_count_is_the_mask_of_the_first_places():
  q, k, v, _ = _inputs()
  counts = np.array([[0, 1, 5], [2, 3, 4]], np.int32)
  mask = np.arange(5) < counts[..., None]
  with jax.enable_x64(True):
    out = attention.attend(*map(jnp.asarray, (q, k, v, counts)))
    np.testing.assert_allclose(out, _plain(q, k, v, mask), atol=1e-12)


@pytest.mark.parametrize('kind', ['mask', 'counts'])
def test_keys_may_have_their_places_last(kind):
  q, k, v, mask = map(jnp.asarray, _inputs())
  if kind == 'counts':
    mask = jnp.array([[0, 1, 5], [2, 3, 4]], jnp.int32)
  expected = attention.attend(q, k, v, mask)
  turned = attention.attend(q, jnp.swapaxes(k, 2, 3), v, mask, turned=True)
  np.testing.assert_allclose(turned, expected, atol=1e-6)


@pytest.mark.parametrize('length', [2, 5, 150])
def test_no_mask_is_the_causal_one(length):
  q, k, v, _ = _inputs(length=length, cache=max(length, 5))
  k, v = k[:, :, :length], v[:, :, :length]
  mask = np.broadcast_to(np.tri(length, dtype=bool), (2, length, length))
  with jax.enable_x64(True):
    out = attention.attend(*map(jnp.asarray, (q, k, v)), None)
    np.testing.assert_allclose(out, _plain(q, k, v, mask), atol=1e-12)


@pytest.mark.parametrize('kind', ['mask', 'counts', 'causal'])
def test_a_prefix_is_like_more_places_in_front(kind):
  q, k, v, mask = _inputs(length=5)
  rng = np.random.default_rng(5)
  prefix = rng.normal(size=(2, 2, 3, 6))
  counts = rng.integers(0, 6, (2, 5)).astype(np.int32)
  own, mask = {
    'mask': (mask, mask),
    'counts': (counts, np.arange(5) < counts[..., None]),
    'causal': (None, np.broadcast_to(np.tri(5, dtype=bool), (2, 5, 5))),
  }[kind]
  before = lambda x, y: np.concatenate([np.stack([x] * 2), y], axis=2)
  mask = np.concatenate([np.ones((2, 5, 3), bool), mask], axis=2)
  expected = _plain(q, before(prefix[0], k), before(prefix[1], v), mask)
  with jax.enable_x64(True):
    put = lambda x: None if x is None else jnp.asarray(x)
    out = attention.attend(
      *map(put, (q, k, v, own)), prefix=tuple(map(put, prefix))
    )
    np.testing.assert_allclose(out, expected, atol=1e-12)


def test_gradient_is_finite_where_a_query_sees_nothing():
  q, k, v, mask = (jnp.asarray(a) for a in _inputs())
  weights = jax.random.normal(jax.random.key(0), q.shape)
  loss = lambda q, k, v: jnp.sum(attention.attend(q, k, v, mask) * weights)
  gradients = jax.grad(loss, argnums=(0, 1, 2))(q, k, v)
  assert all(bool(jnp.isfinite(g).all()) for g in gradients)
  assert not gradients[0][0, 1].any()


def test_gradient_equals_finite_differences():
  q, k, v, mask = _inputs(seed=1)
  with jax.enable_x64(True):
    weights = jnp.asarray(np.random.default_rng(2).normal(size=q.shape))
    mask = jnp.asarray(mask)

    def loss(args):
      return jnp.sum(attention.attend(*args, mask) * weights)

    args = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    way = [
      jax.random.normal(jax.random.key(i), a.shape) for i, a in enumerate(args)
    ]
    step = lambda e: [a + e * w for a, w in zip(args, way)]
    slope = (loss(step(1e-5)) - loss(step(-1e-5))) / 2e-5
    back = sum(jnp.sum(g * w) for g, w in zip(jax.grad(loss)(args), way))
    np.testing.assert_allclose(back, slope, rtol=1e-7)


def test_masked_keys_have_no_effect():
  q, k, v, mask = (jnp.asarray(a) for a in _inputs())
  seen = mask.any(axis=1)  # R C: by any query
  assert not seen.all()
  dirty = jnp.where(seen[:, None, :, None], k, 1e4)
  out = attention.attend(q, k, v, mask)
  np.testing.assert_array_equal(attention.attend(q, dirty, v, mask), out)


def test_bfloat16_scores_are_float32():
  # 257 keys with equal scores: in bfloat16 a sum of 257 ones would be 256
  q, k = jnp.zeros((1, 1, 1, 2)), jnp.zeros((1, 1, 257, 2))
  v = jnp.ones((1, 1, 257, 2))
  half = [a.astype(jnp.bfloat16) for a in (q, k, v)]
  out = attention.attend(*half, jnp.ones((1, 1, 257), bool))
  assert out.dtype == jnp.bfloat16
  np.testing.assert_allclose(out.astype(jnp.float32), 1.0, atol=4e-3)


def _packed_rows(length=150):
  """Several blocks of queries; prefix, borders inside blocks, padding."""
  ids = np.full((2, length), 2, np.int32)
  ids[0, : length * 7 // 15], ids[0, length - 20 :] = 1, 0
  ids[1, :5], ids[1, 5 : length * 3 // 5] = -1, 1
  rng = np.random.default_rng(3)
  q = rng.normal(size=(2, length, 4, 6))
  k, v = rng.normal(size=(2, 2, length, 2, 6))
  return q, k, v, ids


@pytest.mark.parametrize(
  'length, largest_block',
  # Three blocks; one; eight, and some padded places; more than eight.
  [(150, 256), (40, 256), (601, 256), (150, 16)],
)
def test_attend_rows_equals_attend_with_the_mask(
  length, largest_block, monkeypatch
):
  monkeypatch.setattr(attention_xla, '_LARGEST_BLOCK', largest_block)
  with jax.enable_x64(True):
    q, k, v, ids = (jnp.asarray(a) for a in _packed_rows(length))
    weights = jnp.asarray(np.random.default_rng(4).normal(size=q.shape))

    def run(f):
      loss = lambda q, k, v: jnp.sum(f(q, k, v) * weights)
      grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
      return jax.jit(f)(q, k, v), grad(q, k, v)

    mask = attention.segment_mask(ids)
    front = lambda x: jnp.swapaxes(x, 1, 2)
    expected = run(
      lambda q, k, v: attention.attend(q, front(k), front(v), mask)
    )
    actual = run(lambda q, k, v: attention.attend_rows(q, k, v, ids))
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12),
      actual,
      expected,
    )
    assert not actual[0][0, length - 20 :].any()  # padding
    assert not actual[1][1][0, length - 20 :].any()


def test_window_mask_by_hand():
  # A prefix of two tokens, a sequence of three behind it, one without window.
  ids = jnp.array([[-1, -1, 1, 1, 1, 2, 2]])
  positions = jnp.array([[0, 1, 2, 3, 4, 2, 3]])
  span = attention_xla.Span(positions, jnp.int32(2))
  mask = attention_xla.segment_mask(ids, span)
  np.testing.assert_array_equal(
    mask[0].astype(int),
    [
      [1, 0, 0, 0, 0, 0, 0],
      [1, 1, 0, 0, 0, 0, 0],
      [0, 1, 1, 0, 0, 0, 0],
      [0, 0, 1, 1, 0, 0, 0],
      [0, 0, 0, 1, 1, 0, 0],
      # Next to the prefix by its position, though not by its place.
      [0, 1, 0, 0, 0, 1, 0],
      [0, 0, 0, 0, 0, 1, 1],
    ],
  )


def _positions(ids):
  """Of rows with at most one prefix, in front."""
  out = np.zeros_like(ids)
  for row in range(len(ids)):
    prefix = int((ids[row] == -1).sum())
    for segment in np.unique(ids[row]):
      places = np.flatnonzero(ids[row] == segment)
      begin = prefix if segment > 0 else 0
      out[row, places] = begin + np.arange(len(places))
  return out


@pytest.mark.parametrize('window', [1, 7, 2**31 - 1])
def test_windows_in_rows_equal_attend_with_the_mask(window, monkeypatch):
  monkeypatch.setattr(attention_xla, '_LARGEST_BLOCK', 16)  # ten blocks
  q, k, v, ids = _packed_rows(150)
  positions = _positions(ids)
  distance = positions[:, :, None] - positions[:, None]
  with jax.enable_x64(True):
    mask = np.asarray(attention.segment_mask(jnp.asarray(ids)))
    mask = mask & (distance < window)
    q, k, v, ids, positions = map(jnp.asarray, (q, k, v, ids, positions))
    weights = jnp.asarray(np.random.default_rng(4).normal(size=q.shape))

    def run(f):
      loss = lambda q, k, v: jnp.sum(f(q, k, v) * weights)
      grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
      return jax.jit(f)(q, k, v), grad(q, k, v)

    front = lambda x: jnp.swapaxes(x, 1, 2)
    expected = run(
      lambda q, k, v: attention.attend(q, front(k), front(v), mask)
    )
    actual = run(
      lambda q, k, v: attention.attend_rows(
        q, k, v, ids, positions, jnp.int32(window)
      )
    )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), actual, expected
  )


def test_blocks_out_of_the_window_are_left_out():
  ids = jnp.ones((2, 8), jnp.int32)
  pairs = jnp.array([(i, j) for i in range(4) for j in range(i + 1)])

  def pairs_seen(window, ids):
    span = attention_xla.Span(jnp.zeros_like(ids), jnp.int32(window))
    seen = jnp.zeros((4, 4), jnp.int32)
    body = lambda seen, pair: seen.at[pair[0], pair[1]].add(1)
    return attention_xla._over_pairs(body, seen, pairs, 2, ids, span)

  # Blocks of two: place 2 sees place 1 from a window of 2 on, place 4 sees
  # place 1 from one of 4 on.
  band = lambda n: np.tril(np.ones((4, 4))) - np.tril(np.ones((4, 4)), -n)
  for window, blocks in ((1, 1), (2, 2), (3, 2), (4, 3), (6, 4)):
    np.testing.assert_array_equal(pairs_seen(window, ids), band(blocks))
  prefix = ids.at[1, 0].set(-1)
  expected = band(1)
  expected[:, 0] = 1
  np.testing.assert_array_equal(pairs_seen(1, prefix), expected)


@pytest.mark.parametrize('task, name', [('rows', 'xla'), ('decode', 'pallas')])
def test_only_decoding_has_a_kernel_for_windows(task, name):
  chosen = attention.implementation(
    task, 'gpu', 'bfloat16', 64, 2048, sliding=True
  )
  assert chosen.startswith(name)


def test_memory_of_rows_is_linear_in_their_length():
  def compiled_bytes(length):
    shape = lambda heads: jax.ShapeDtypeStruct(
      (1, length, heads, 16), 'float32'
    )
    loss = lambda q, k, v, ids: jnp.sum(attention.attend_rows(q, k, v, ids))
    ids = jax.ShapeDtypeStruct((1, length), 'int32')
    grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    compiled = grad.lower(shape(4), shape(2), shape(2), ids).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert compiled_bytes(8192) < 2.1 * compiled_bytes(4096)


@pytest.mark.parametrize(
  'task, platform, dtype, width, places, expected',
  [
    ('rows', 'gpu', 'bfloat16', 64, 2048, 'pallas_gpu'),
    ('rows', 'gpu', 'bfloat16', 80, 200, 'pallas_gpu'),
    ('rows', 'gpu', 'bfloat16', 256, 2048, 'xla'),  # too wide for its tiles
    ('rows', 'gpu', 'bfloat16', 64, 96, 'xla'),  # too short to be worth it
    ('rows', 'gpu', 'float32', 64, 2048, 'xla'),
    ('rows', 'tpu', 'bfloat16', 64, 2048, 'pallas_tpu'),
    ('rows', 'tpu', 'bfloat16', 80, 2048, 'xla'),
    ('rows', 'cpu', 'bfloat16', 64, 2048, 'xla'),
    ('rows', 'other gpu', 'bfloat16', 64, 2048, 'xla'),
    ('decode', 'gpu', 'bfloat16', 64, 448, 'pallas_gpu'),
    ('decode', 'gpu', 'bfloat16', 80, 448, 'xla'),
    ('decode', 'gpu', 'bfloat16', 64, 450, 'xla'),
    ('decode', 'tpu', 'bfloat16', 128, 384, 'pallas_tpu'),
    ('decode', 'tpu', 'bfloat16', 64, 384, 'xla'),
    ('decode', 'tpu', 'bfloat16', 128, 448, 'xla'),
  ],
)
def test_table_of_implementations(
  task, platform, dtype, width, places, expected
):
  name = attention.implementation(task, platform, dtype, width, places)
  assert name == expected


def test_force_names_what_there_is():
  with pytest.raises(ValueError, match="'cudnn'; one of .'pallas_gpu'"):
    with attention.force('cudnn'):
      pass


def test_a_kernel_gives_way_to_xla_on_another_platform():
  """The choice may be wrong about the device; compiling is not."""
  q, k, v, ids = (jnp.asarray(a) for a in _packed_rows())
  expected = jax.jit(lambda *args: attention.attend_rows(*args))(q, k, v, ids)
  with attention.force('pallas_gpu'):
    rows = jax.jit(lambda *args: attention.attend_rows(*args))
    np.testing.assert_array_equal(rows(q, k, v, ids), expected)
    # The kernel is in the program as it was traced, not as it is compiled.
    assert 'pallas_call' in str(jax.make_jaxpr(rows)(q, k, v, ids))
    assert 'triton' not in rows.lower(q, k, v, ids).as_text()


@pytest.mark.parametrize('tensor, expected', [(2, 1), (4, 0)])
def test_kernels_are_split_over_the_mesh_where_it_divides(tensor, expected):
  """Two key/value heads on four devices are left to XLA."""
  mesh = mesh_lib.make(tensor=tensor)
  axes = 'rows', None, 'heads', None
  args = [np.concatenate([a] * 2) for a in _packed_rows()]
  args = [
    jax.device_put(
      x.astype(np.float32) if x.ndim == 4 else x,
      rules.sharding(mesh, axes[: x.ndim], x.shape),
    )
    for x in args
  ]
  with attention.force('pallas_gpu'):
    jaxpr = str(jax.make_jaxpr(attention.attend_rows)(*args))
  assert jaxpr.count('shard_map[') == expected
  assert jaxpr.count('pallas_call[') == expected
