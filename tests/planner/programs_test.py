"""What crosses devices in a compiled update, and how often."""

import pytest

from configs import ppo_scaling
from rlhf_jax.planner import programs as programs_lib
from rlhf_jax.sharding import hlo
from rlhf_jax.trainers import setup as setup_lib
from rlhf_jax.trainers import sft


@pytest.fixture(scope='module')
def crossing():
  """(kind, axes, type, runs) of the collectives of a supervised update.

  data=2, fsdp=4; two layers, rows of 64 places whose head is computed in four
  chunks of 16.
  """
  config = ppo_scaling.get_config('tiny')
  with config.unlocked():
    config.stages = (('warmup', 'sft', {}),)
  with config.model.architecture.unlocked():
    config.model.architecture.tied_embeddings = False
  config.update_from_flattened_dict(
    {'mesh.data': 2, 'mesh.fsdp': 4, 'model.head_chunk': 16}
  )
  setup = setup_lib.stages(config, ('sft',))[0]
  plan = programs_lib.of_stage(setup, sft.parts(setup))
  (program,) = (p for p in plan.programs if p.name == 'actor/accumulate')
  text = program.lower({}).compile().as_text()
  sizes = dict(setup.mesh.shape)
  return [
    (one.kind, '+'.join(hlo.axes_of(one.group, sizes)[0]), one.type, one.runs)
    for one in hlo.collectives(text, 8)
    if one.moved
  ]


def test_the_embedding_stays_where_it_is(crossing):
  """Neither the table [259, 32] nor its gradient is brought together."""
  assert not [
    one
    for one in crossing
    if one[0] in ('all-gather', 'reduce-scatter') and '[259,32]' in one[2]
  ]
  # Instead the width of what was looked up is, and back.
  turns = [one for one in crossing if one[0] == 'all-to-all']
  assert [one[1] for one in turns] == ['fsdp', 'fsdp']
  assert [one[3] for one in turns] == [1, 1]
  # Each part of the gradient is summed over the replicas.
  (summed,) = (one for one in crossing if '[259,8]' in one[2])
  assert summed[:2] == ('all-reduce', 'data')


def test_the_head_crosses_once_and_not_per_chunk(crossing):
  gathers = [x for x in crossing if x[0] == 'all-gather' and '[32,259]' in x[2]]
  assert [(x[1], x[3]) for x in gathers] == [('fsdp', 1)]
  scatters = [
    x for x in crossing if x[0] == 'reduce-scatter' and '[8,259]' in x[2]
  ]
  assert [(x[1], x[3]) for x in scatters] == [('fsdp', 1)]


def test_the_layers_are_gathered_twice_and_scattered_once(crossing):
  """Forward, and again backward; a gradient each."""
  of = lambda kind: [x for x in crossing if x[0] == kind and '32,64' in x[2]]
  # gate and up [32, 64]
  assert sum(x[3] for x in of('all-gather')) == 2 * 2 * 2
  assert {x[1] for x in of('all-gather')} == {'fsdp'}
