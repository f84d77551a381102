"""Collectives of hand-written HLO, and of programs compiled here."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from rlhf_jax.sharding import hlo
from rlhf_jax.sharding import mesh as mesh_lib

_TEXT = """\
HloModule jit_f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], f32[4,8]{1,0:T(8,128)})) -> (s32[], f32[4,8]) {
  %p = (s32[], f32[4,8]{1,0:T(8,128)}) parameter(0)
  %x = f32[4,8]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %g = (f32[4,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%x), channel_id=1, GROUPS, dimensions={0}, metadata={op_name="jit(f)/while/dot"}
  %f = f32[4,8]{1,0} fusion(%x), kind=kLoop, calls=%fused
  %d = f32[8,8]{1,0} all-gather-done(%g)
  ROOT %t = (s32[], f32[4,8]) tuple(%i, %f)
}

%fused (q: f32[4,8]) -> f32[4,8] {
  %q = f32[4,8]{1,0} parameter(0)
  ROOT %r = f32[4,8]{1,0} negate(%q)
}

%condition (c: (s32[], f32[4,8])) -> pred[] {
  %c = (s32[], f32[4,8]) parameter(0)
  ROOT %less = pred[] compare(%c), direction=LT
}

ENTRY %main (y: bf16[6]) -> f32[4,8] {
  %y = bf16[6]{0} parameter(0)
  %w = (s32[], f32[4,8]) while(%init), condition=%condition, body=%body, backend_config={TRIPS}
  ROOT %r = bf16[6]{0} all-reduce(%y), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
}
"""  # noqa: E501
_KNOWN = '"known_trip_count":{"n":"3"}'


def _parse(groups='replica_groups=[4,2]<=[8]', trips=_KNOWN, known=1.0):
  text = _TEXT.replace('GROUPS', groups).replace('TRIPS', trips)
  return hlo.collectives(text, 8, known)


def test_counts_bytes_and_runs_of_loops():
  gather, reduce = _parse()
  assert (gather.kind, gather.runs, gather.hidden) == ('all-gather', 3, True)
  assert gather.operand_bytes == 4 * 8 * 4  # float32
  assert gather.source == 'jit(f)/while/dot'
  # A ring of two: each sends its part once.
  assert gather.moved == 128
  assert (reduce.kind, reduce.runs, reduce.hidden) == ('all-reduce', 1, False)
  # bfloat16: 12 bytes; half of them in each of the two rounds.
  assert (reduce.operand_bytes, reduce.moved) == (12, 2 * 12 / 2)
  assert reduce.group == (0, 4)


def test_a_loop_over_data_runs_as_often_as_is_said():
  assert _parse(trips='')[0].runs == 1
  gather, reduce = _parse('replica_groups={}', '', known=64)
  assert (gather.runs, reduce.runs) == (64, 1)
  assert gather.group == tuple(range(8))  # no groups: all
  assert gather.moved == 7 * 128


def test_trips_that_only_the_condition_knows():
  text = _TEXT.replace('GROUPS', 'replica_groups={}').replace('TRIPS', '')
  number = '  %n = s32[]{:T(128)} constant(28)\n  ROOT %less'
  text = text.replace('  ROOT %less', number)
  text = text.replace('compare(%c)', 'compare(%i, %n)')
  assert hlo.collectives(text, 8, 64)[0].runs == 28


def test_what_a_tpu_does_in_the_background():
  """One collective in two fusions, and one that leaves each its part."""
  line = (
    '  %g = f32[8,8]{1,0} all-gather(%x), channel_id=7, '
    'replica_groups=[4,2]<=[8], dimensions={0}\n'
  )
  fusion = (
    '%async_collective_fusion.N (x: f32[4,8]) -> f32[8,8] {\n'
    '  %x = f32[4,8]{1,0} parameter(0)\n' + line + '}\n\n'
  )
  scatter = (
    '%all-reduce-scatter.1 (y: f32[8]) -> f32[4] {\n'
    '  %y = f32[8]{0} parameter(0)\n'
    '  ROOT %r = f32[8]{0} all-reduce(%y), replica_groups=[4,2]<=[8]\n}\n\n'
  )
  entry = 'ENTRY %main (x: f32[4,8]) -> f32[8,8] {\n' + ''.join(
    f'  %f{i} = f32[8,8]{{1,0}} fusion(%x), calls=%{name}\n'
    for i, name in enumerate(
      ('fused_computation.5', 'async_collective_fusion.2',
       'all-reduce-scatter.1')
    )
  )  # fmt: skip
  text = fusion.replace('async_collective_fusion.N', 'fused_computation.5')
  text += fusion.replace('.N', '.2')
  gather, reduce = hlo.collectives(text + scatter + entry + '}\n', 8)
  assert (gather.kind, gather.runs, gather.hidden) == ('all-gather', 1, True)
  assert (reduce.kind, reduce.hidden) == ('reduce-scatter', False)
  assert reduce.moved == 8 * 4 / 2


def test_what_nothing_is_computed_during_is_not_hidden():
  text = _TEXT.replace('GROUPS', 'replica_groups={}').replace('TRIPS', '')
  lines = text.splitlines()
  fusion = next(line for line in lines if ' fusion(' in line)
  lines.remove(fusion)
  lines.insert(next(i for i, x in enumerate(lines) if '%t = ' in x), fusion)
  assert not hlo.collectives('\n'.join(lines), 8)[0].hidden


@pytest.mark.parametrize(
  'groups, expected',
  [
    ('replica_groups={{1,3},{0,2}}', (1, 3)),
    ('replica_groups=[4,2]<=[8]', (0, 1)),
    ('replica_groups=[2,4]<=[4,2]T(1,0)', (0, 2, 4, 6)),
    ("replica_groups=mesh['a'=8,'b'=1] {'a'}", tuple(range(8))),
    ("replica_groups=mesh['a'=4,'b'=2] {'b'}", (0, 1)),
    (
      # Two data groups of four: devices in the order 0 4 1 5 2 6 3 7, as 4 x 2.
      "replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}",
      (0, 1, 2, 3),
    ),
    # Half of an axis of eight: of (2, 4), the four, or the two.
    ("replica_groups=mesh['a'=8] {'a':(2)4}", (0, 1, 2, 3)),
    ("replica_groups=mesh['a'=8] {'a':(1)2}", (0, 4)),
    ('source_target_pairs={{0,1},{1,0},{2,6}}', (2, 6)),
  ],
)
def test_groups(groups, expected):
  assert _parse(groups)[0].group == expected


def test_axes_of_groups():
  sizes = dict(data=2, fsdp=2, tensor=2)
  of = lambda *group: hlo.axes_of(group, sizes)
  assert of(0, 1) == (('tensor',), True)
  assert of(0, 2) == (('fsdp',), True)
  assert of(0, 1, 4, 5) == (('data', 'tensor'), True)
  assert of(0, 3) == (('fsdp', 'tensor'), False)  # a diagonal


def test_a_compiled_program():
  """Weights [4 x 8, 16] gathered over fsdp=4 in each of five iterations."""
  mesh = mesh_lib.make(data=2, fsdp=4)
  put = lambda shape, *spec: jax.ShapeDtypeStruct(
    shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec))
  )

  def f(x, weights):
    def local(x, weights):
      def step(x, w):
        w = jax.lax.all_gather(w, 'fsdp', axis=0, tiled=True)
        return jnp.tanh(x @ w @ w.T), None

      x, _ = jax.lax.scan(step, x, weights)
      return jax.lax.psum(jnp.sum(x), ('data', 'fsdp'))

    return jax.shard_map(
      local,
      mesh=mesh,
      in_specs=(P(('data', 'fsdp')), P(None, 'fsdp')),
      out_specs=P(),
    )(x, weights)

  arguments = put((8, 32), ('data', 'fsdp')), put((5, 32, 16), None, 'fsdp')
  text = jax.jit(f).lower(*arguments).compile().as_text()
  found = {one.kind: one for one in hlo.collectives(text, 8)}
  gather, reduce = found['all-gather'], found['all-reduce']
  assert (gather.runs, gather.operand_bytes) == (5, 8 * 16 * 4)
  assert gather.moved == 3 * 8 * 16 * 4
  assert hlo.axes_of(gather.group, dict(mesh.shape)) == (('fsdp',), True)
  assert hlo.axes_of(reduce.group, dict(mesh.shape))[0] == ('data', 'fsdp')
  np.testing.assert_allclose(reduce.moved, 2 * 4 * 7 / 8)
