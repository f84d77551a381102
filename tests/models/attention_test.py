"""Masks and attention against plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.models import attention


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
  k, v = rng.normal(size=(2, rows, cache, kv_heads, width))
  mask = rng.random((rows, length, cache)) < 0.6
  mask[:, :, 0] = True
  mask[0, 1] = False  # a query that sees nothing
  mask[1, :, 4] = False  # a key that no query sees
  return q, k, v, mask


def _plain(q, k, v, mask):
  """One query at a time, one head at a time."""
  out = np.zeros_like(q)
  group = q.shape[2] // k.shape[2]
  for r, i, h in np.ndindex(*q.shape[:3]):
    seen = np.flatnonzero(mask[r, i])
    if not len(seen):
      continue
    scores = k[r, seen, h // group] @ q[r, i, h] / np.sqrt(q.shape[3])
    p = np.exp(scores - scores.max())
    out[r, i, h] = (p / p.sum()) @ v[r, seen, h // group]
  return out


def test_attend_equals_a_plain_loop():
  q, k, v, mask = _inputs()
  with jax.enable_x64(True):
    out = attention.attend(*map(jnp.asarray, (q, k, v, mask)))
    np.testing.assert_allclose(out, _plain(q, k, v, mask), atol=1e-12)
  assert not np.asarray(out)[0, 1].any()


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
  dirty = jnp.where(seen[:, :, None, None], k, 1e4)
  out = attention.attend(q, k, v, mask)
  np.testing.assert_array_equal(attention.attend(q, dirty, v, mask), out)


def test_bfloat16_scores_are_float32():
  # 257 keys with equal scores: in bfloat16 a sum of 257 ones would be 256
  q, k = jnp.zeros((1, 1, 1, 2)), jnp.zeros((1, 257, 1, 2))
  v = jnp.ones((1, 257, 1, 2))
  half = [a.astype(jnp.bfloat16) for a in (q, k, v)]
  out = attention.attend(*half, jnp.ones((1, 1, 257), bool))
  assert out.dtype == jnp.bfloat16
  np.testing.assert_allclose(out.astype(jnp.float32), 1.0, atol=4e-3)


def _packed_rows(length=150):
  """Several blocks of queries; prefix, borders inside blocks, padding."""
  ids = np.full((2, length), 2)
  ids[0, :70], ids[0, 130:] = 1, 0
  ids[1, :5], ids[1, 5:90] = -1, 1
  rng = np.random.default_rng(3)
  q = rng.normal(size=(2, length, 4, 6))
  k, v = rng.normal(size=(2, 2, length, 2, 6))
  return q, k, v, ids


def test_attend_rows_equals_attend_with_the_mask():
  with jax.enable_x64(True):
    q, k, v, ids = (jnp.asarray(a) for a in _packed_rows())
    weights = jnp.asarray(np.random.default_rng(4).normal(size=q.shape))

    def run(f):
      loss = lambda q, k, v: jnp.sum(f(q, k, v) * weights)
      return f(q, k, v), jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    mask = attention.segment_mask(ids)
    expected = run(lambda q, k, v: attention.attend(q, k, v, mask))
    actual = run(lambda q, k, v: attention.attend_rows(q, k, v, ids))
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12),
      actual,
      expected,
    )
    assert not actual[0][0, 130:].any()  # padding
    assert not actual[1][1][0, 130:].any()


def test_blocks_of_the_mask_are_parts_of_it():
  ids = jnp.asarray(_packed_rows()[3])
  mask = attention.segment_mask(ids)
  part = attention.segment_mask(ids, 64, 128)
  np.testing.assert_array_equal(part, mask[:, 64:128, :128])
