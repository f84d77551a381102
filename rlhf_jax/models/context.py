"""Rows whose places are split over the mesh axis `context`.

Everything but attention looks at one place at a time, so each device does it
for its places, L / n of them.  Attention looks at all places of a head at a
time: before it an all-to-all gives each device all places of Q / n heads, and
after it another gives them back (Ulysses, https://arxiv.org/abs/2309.14509).
With tensor parallelism the heads that a device has already are divided again.
"""

import functools
import math

import jax
import jax.numpy as jnp

from rlhf_jax.models import attention
from rlhf_jax.sharding import rules

Array = jax.Array
_AbstractMesh = jax.sharding.AbstractMesh


def fold(x: Array, mesh: _AbstractMesh | None, *names: str | None) -> Array:
  """[R, L, ...] -> [n R, L / n, ...]: the parts of rows, as rows.

  The parts come first: row r of part i is at i R + r, and stays on the devices
  where it was.  For work that does not depend on the order of places.
  `names` are the logical axes of the rest, by default whole.

  Raises:
    ValueError: n does not divide L.
  """
  n = rules.parts(mesh, 'places')
  if x.shape[1] % n:
    raise ValueError(
      f'rows of {x.shape[1]} places cannot be split over context={n}: make'
      ' tokens_per_row a multiple of it'
    )
  if n > 1:
    x = x.reshape(x.shape[0], n, x.shape[1] // n, *x.shape[2:])
    x = jnp.moveaxis(x, 1, 0)
    x = x.reshape(-1, *x.shape[2:])
  names = names or (None,) * (x.ndim - 2)
  return rules.constrain(x, ('row_parts', None, *names), mesh)


def unfold(x: Array, mesh: _AbstractMesh | None) -> Array:
  """The reverse of `fold`."""
  n = rules.parts(mesh, 'places')
  if n > 1:
    x = jnp.moveaxis(x.reshape(n, -1, *x.shape[1:]), 0, 1)
    x = x.reshape(x.shape[0], -1, *x.shape[3:])
  return x


def attend_rows(
  q: Array,
  k: Array,
  v: Array,
  segment_ids: Array,
  mesh: _AbstractMesh | None,
  positions: Array | None = None,
  window: Array | None = None,
) -> Array:
  """`attention.attend_rows` of folded rows, over all their parts.

  Where the H key/value heads cannot be divided by tensor x context, each is
  repeated, to the least number that can: 3 on 2 devices become 6, of which a
  device gets 3.  Query heads still find the same keys: repeats are neighbours.

  Args:
    q: [n R, L / n, Q, E], see `fold`.
    k: [n R, L / n, H, E].
    v: [n R, L / n, H, E].
    segment_ids: [R, L] int32.
    mesh: see `rules.mesh_of`; n is 1 without one.
    positions: as for `attention.attend_rows`, and so is the next.
    window: [] int32 or None.

  Returns:
    [n R, L / n, Q, E], split as q.
  """
  devices = rules.parts(mesh, 'attended_heads')
  if devices == 1:
    return attention.attend_rows(q, k, v, segment_ids, positions, window)
  heads, kv_heads = q.shape[2], k.shape[2]
  divisible = math.lcm(kv_heads, devices)
  if heads % divisible == 0 and divisible > kv_heads:
    k, v = (_repeated(x, divisible, mesh) for x in (k, v))
  by_places = 'rows', 'places', 'heads', None
  by_heads = 'rows', None, 'attended_heads', None
  turn = lambda x, *ways: functools.reduce(
    lambda x, axes: rules.constrain(x, axes, mesh), ways, x
  )
  q, k, v = (turn(unfold(x, mesh), by_places, by_heads) for x in (q, k, v))
  segment_ids = rules.constrain(segment_ids, ('rows', None), mesh)
  if window is not None:
    positions = rules.constrain(positions, ('rows', None), mesh)
  out = attention.attend_rows(q, k, v, segment_ids, positions, window)
  return fold(turn(out, by_heads, by_places), mesh, 'heads', None)


def _repeated(x: Array, heads: int, mesh: _AbstractMesh) -> Array:
  """[.., H, E] with each head repeated, to so many heads."""
  each = heads // x.shape[2]
  if x.shape[2] % rules.parts(mesh, 'kv_heads') == 0:
    return jnp.repeat(x, each, axis=2)
  # Every device has all H heads, and not those that its repeats come from: the
  # gradient of this adds up parts, that of a repeat gathers all repeats first.
  return jnp.take(x, jnp.arange(heads) // each, axis=2, mode='clip')
