"""Memory of host and devices: where arrays live, and when there is too little.

The role is a linear model, so that programs compile at once; programs that do
not fit are ordinary ones behind a function that raises what XLA raises.
"""

import types as types_lib

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np
import pytest

from launch import train as launch
from rlhf_jax import checkpoint
from rlhf_jax import metrics
from rlhf_jax import optim
from rlhf_jax import testing
from rlhf_jax.models import hf
from rlhf_jax.models import spec
from rlhf_jax.monitor import writers
from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.sharding import multihost
from rlhf_jax.sharding import rules
from rlhf_jax.trainers import checks
from rlhf_jax.trainers import memory
from rlhf_jax.trainers import packed
from rlhf_jax.trainers import roles as roles_lib
from rlhf_jax.trainers import run as run_lib
from rlhf_jax.trainers import state as state_lib
from rlhf_jax.trainers import update
from rlhf_jax.trainers import workdir as workdir_lib

_SPECS = {
  'w': spec.Spec((8, 4), ('embed', 'mlp'), 'normal', 'w', std=1.0),
  'bias': spec.Spec((4,), ('mlp',), 'zeros', 'bias'),
}
_RATE = lambda updates: jnp.float32(0.1)


def _loss(params, batch, coefs):
  out = batch['x'] @ params['w'] + params['bias'][None]
  loss = coefs['scale'] * jnp.sum(jnp.square(out - batch['y']))
  return loss, {'actor/loss': metrics.sum(loss)}


def _optimizer():
  return optim.adamw(
    _RATE, b1=0.9, b2=0.99, eps=1e-5, weight_decay=0.1, max_grad_norm=1.0
  )


def _state(mesh):
  make = jax.jit(
    lambda key: spec.init(_SPECS, key), out_shardings=rules.params(mesh, _SPECS)
  )
  params = make(jax.random.key(0))
  return state_lib.create(params, _optimizer(), mesh, _SPECS)


def _programs(mesh, **options):
  return update.programs(
    _loss,
    _optimizer(),
    _RATE,
    params=spec.abstract(_SPECS, jnp.float32),
    specs=_SPECS,
    mesh=mesh,
    max_grad_norm=1.0,
    **options,
  )


def _batch(rows=16):
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  return {'x': normal(rows, 8), 'y': normal(rows, 4)}


_COEFS = {'scale': 0.5}
_islands = multihost.islands


@pytest.fixture(scope='module')
def mesh():
  return mesh_lib.make(fsdp=2, tensor=2, devices=jax.devices()[:4])


def _kinds(tree):
  return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


def _equal(one, other):
  jax.tree.map(
    np.testing.assert_array_equal, jax.device_get(one), jax.device_get(other)
  )


# ---- Where arrays live ------------------------------------------------------


@pytest.mark.parametrize(
  'host', [('opt_state',), ('params',), ('params', 'opt_state')]
)
def test_offloading_changes_no_number(mesh, host):
  programs = _programs(mesh)
  plain = roles_lib.Roles({'actor': _state(mesh)})
  away = roles_lib.Roles({}, host=host)
  away.put('actor', _state(mesh))
  asked = {
    name: 'pinned_host' if name in host else 'device'
    for name in ('params', 'opt_state')
  }
  for _ in range(3):
    for stage in (plain, away):
      state = stage.take('actor')
      assert 'actor' not in stage.states  # one copy of what is on the host
      assert _kinds(state.params) == {'device'}
      state, statistics = update.update(
        state,
        packed.slices(_batch(), 8, _islands(mesh)),
        _COEFS,
        programs=programs,
        prefix='actor',
      )
      stage.put('actor', state)
    # Moments also while the next mini-batch is computed.
    assert _kinds(state.opt_state[1][0].mu) == {asked['opt_state']}
    kept = away.states['actor']
    assert _kinds(kept.params) == {asked['params']}
    adam = kept.opt_state[1][0]
    assert _kinds((adam.mu, adam.nu)) == {asked['opt_state']}
    assert _kinds((adam.count, kept.updates)) == {'device'}
    assert kept.params['w'].sharding.spec == jax.P('fsdp', 'tensor')
    assert _kinds(away.actor) == {'device'}
    _equal(kept, plain.states['actor'])
    assert metrics.compute(statistics)['actor/skipped_updates'] == 0
  assert int(kept.updates) == 3
  # No program was compiled anew for arrays that were away.
  assert programs['apply']._cache_size() == 1
  assert programs['accumulate']._cache_size() == 1


def test_the_reference_comes_to_the_devices(mesh):
  params = {'embed': _state(mesh).params['w'], 'rest': jnp.ones(3)}
  away = jax.device_put(params, rules.in_host(params))
  stage = roles_lib.Roles({}, reference=away)
  assert _kinds(stage.reference) == {'pinned_host'}
  assert _kinds(stage.params('reference')) == {'device'}
  assert list(stage.reference_head) == ['embed']
  assert _kinds(stage.reference_head) == {'device'}
  _equal(stage.params('reference'), params)


@pytest.mark.parametrize('from_folder', [False, True])
def test_the_reference_lives_on_the_host(mesh, tmp_path, from_folder):
  model = testing.tiny_config()
  table = state_lib.specs_of(model, 'actor')
  params = jax.device_put(
    spec.init(table, jax.random.key(0)), rules.params(mesh, table)
  )
  path = ''
  if from_folder:
    path = str(tmp_path / 'model')
    hf.export(path, params, model)
  setup = types_lib.SimpleNamespace(
    name='ppo', model=model, mesh=mesh, offloads=lambda name: True,
    config=ConfigDict({'model': {'path': path, 'lora': {'path': ''}}}),
  )  # fmt: skip
  begun, where = roles_lib.begin_reference(setup, tmp_path, params, True)
  assert ('path' in where) == from_folder
  again = roles_lib.restore_reference(setup, tmp_path, where, {})
  for reference in (begun, again):
    assert _kinds(reference) == {'pinned_host'}
    _equal(reference, params)
    assert _kinds(roles_lib.Roles({}, reference).params('reference')) == {
      'device'
    }


def test_checkpoints_do_not_care_where_arrays_live(mesh, tmp_path):
  state = _state(mesh)
  abstract = lambda *host: state_lib.abstract(
    _optimizer(), mesh, _SPECS, host=host
  )
  for number, host in enumerate([(), ('params', 'opt_state')]):
    saved = roles_lib.Roles({}, host=host)
    saved.put('actor', state)
    with checkpoint.manager(tmp_path / str(number), keep=1) as checkpoints:
      checkpoint.save(checkpoints, 1, saved.states, {})
      for wanted in ((), ('opt_state',), ('params', 'opt_state')):
        restored = checkpoint.restore_arrays(
          checkpoints, 1, {'actor': abstract(*wanted)}
        )['actor']
        _equal(restored, state)
        for part in ('params', 'opt_state'):
          kinds = _kinds(
            [x for x in jax.tree.leaves(getattr(restored, part)) if x.ndim]
          )
          assert kinds == {'pinned_host' if part in wanted else 'device'}
        assert jax.tree.map(lambda x: x.sharding, restored) == (
          jax.tree.map(lambda x: x.sharding, abstract(*wanted))
        )


def test_notes_say_what_becomes_of_it(mesh):
  config = ConfigDict(
    {'model': {'remat': 'none'}, 'offload': {'params': False}}
  )
  assert checks.memory_notes(config, mesh) == []
  config.offload.params, config.model.remat = True, 'offload'
  (note,) = checks.memory_notes(config, mesh)
  assert note == (
    "offload.params, model.remat='offload': on CPUs host memory is the same"
    ' memory; saves nothing'
  )
  own = types_lib.SimpleNamespace(kind='device')
  device = types_lib.SimpleNamespace(
    platform='odd', addressable_memories=lambda: [own]
  )
  other = types_lib.SimpleNamespace(devices=np.array([device]))
  (note,) = checks.memory_notes(config, other)
  assert 'odd devices have no pinned_host memory here; everything stays' in note
  assert rules.has_host_memory(mesh) and not rules.has_host_memory(other)


def test_gradients_may_be_added_in_bfloat16(mesh):
  states, values = [], []
  for dtype in (None, jnp.bfloat16):
    programs = _programs(mesh, gradient_dtype=dtype)
    state = _state(mesh)
    grads = programs['zeros'](state.params)
    for part in packed.slices(_batch(), 4, _islands(mesh)):
      grads, _ = programs['accumulate'](state.params, grads, part, _COEFS)
    assert {x.dtype for x in jax.tree.leaves(grads)} == {
      jnp.dtype(dtype or jnp.float32)
    }
    state, statistics = programs['apply'](state, grads)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {
      jnp.dtype('float32')
    }
    states.append(grads)
    values.append(metrics.compute(statistics)['grad_norm'])
  wide, narrow = (jax.device_get(grads)['w'] for grads in states)
  error = np.linalg.norm(narrow - wide) / np.linalg.norm(wide)
  # Four sums, each rounded by up to 2^-9: not exact, and not worse.
  assert 1e-4 < error < 4 * 2**-9, error
  assert 0 < abs(values[1] / values[0] - 1) < 4 * 2**-9


# ---- Out of memory ----------------------------------------------------------


def _exhausted():
  return jax.errors.JaxRuntimeError(
    'RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12345 bytes.'
  )


def _small(program, limit, calls):
  """The program on a device where `limit` rows fit; counts its calls."""

  def run(params, grads, batch, coefs):
    rows = len(batch['x'])
    calls.append(rows)
    if rows > limit and len(calls) > 1:  # the first fits, by luck
      raise _exhausted()
    return program(params, grads, batch, coefs)

  return run


def _setup(mesh, tokens_per_row=32):
  training = dict(tokens_per_row=tokens_per_row)
  return types_lib.SimpleNamespace(
    config=ConfigDict(dict(training=training)),
    mesh=mesh,
    islands=_islands(mesh),
  )


def _run(workdir, tokens=8 * 32, checkpoints=None):
  notes = []
  host = state_lib.HostState(
    seed=0, step=3, stage='ppo', tokens_per_microbatch=tokens
  )
  return run_lib.Run(
    workdir=workdir,
    config={'seed': 0},
    writer=writers.RunWriter(workdir),
    console=types_lib.SimpleNamespace(note=notes.append, notes=notes),
    checkpoints=checkpoints,
    host=host,
    restored_step=None,
    started=0.0,
  )


def _events(workdir, kind):
  lines = writers.read(workdir / writers.EVENTS)
  return [line for line in lines if line['kind'] == kind]


def test_a_micro_batch_that_does_not_fit_is_halved(mesh, tmp_path):
  programs = _programs(mesh)
  expected, statistics = update.update(
    _state(mesh),
    packed.slices(_batch(), 4, _islands(mesh)),
    _COEFS,
    programs=programs,
    prefix='actor',
  )
  expected_values = metrics.compute(statistics)
  calls = []
  small = programs | {'accumulate': _small(programs['accumulate'], 4, calls)}
  # 4 rows x 32 tokens for each of 2 data groups.
  run = _run(tmp_path, tokens=4 * 32)
  state, statistics = memory.update(
    run,
    _setup(mesh),
    _state(mesh),
    _batch(),
    _COEFS,
    programs=small,
    prefix='actor',
  )
  # The gradient of the first 8 rows was dropped, not counted twice.
  assert calls == [8, 8, 4, 4, 4, 4]
  _equal(state, expected)
  assert metrics.compute(statistics) == expected_values
  # In force for all that follows, and noted for processes to come.
  assert run.host.tokens_per_microbatch == 2 * 32
  assert memory.rows(run, _setup(mesh)) == 4
  (event,) = _events(tmp_path, 'out_of_memory')
  assert 'a micro-batch of 4 rows x 32 tokens' in event['message']
  assert 'allocate 12345 bytes' in event['message']
  assert (event['stage'], event['step']) == ('ppo', 3)
  assert event['tokens_per_microbatch'] == 64
  assert 'warning: out of memory' in run.console.notes[0]
  known = workdir_lib.allowed_microbatch(tmp_path, 'ppo')
  assert known['tokens_per_microbatch'] == 64
  assert workdir_lib.allowed_microbatch(tmp_path, 'sft') is None


class _Late:
  """An array of a program that is found not to fit when it is waited for."""

  def block_until_ready(self):
    raise _exhausted()


def test_errors_that_come_late_find_the_state_whole(mesh, tmp_path):
  programs = _programs(mesh)
  applied = []

  def accumulate(params, grads, batch, coefs):
    if len(batch['x']) > 8:
      return {'w': _Late(), 'bias': _Late()}, {}
    return programs['accumulate'](params, grads, batch, coefs)

  def apply(state, grads):
    applied.append(grads)
    return programs['apply'](state, grads)

  state, _ = memory.update(
    _run(tmp_path),
    _setup(mesh),
    _state(mesh),
    _batch(),
    _COEFS,
    programs=programs | {'accumulate': accumulate, 'apply': apply},
    prefix='actor',
  )
  # What did not fit was never given to the optimiser.
  assert len(applied) == 1 and int(state.updates) == 1


def test_halves_until_one_row_and_then_says_what_to_do(mesh, tmp_path):
  seen = []

  def attempt(name, *, rows_per_microbatch, limit):
    seen.append(rows_per_microbatch)
    if rows_per_microbatch > limit:
      raise _exhausted()
    return name

  # 5 rows per data group: 2, then 1.
  run, setup = _run(tmp_path, tokens=5 * 32), _setup(mesh)
  assert memory.fitting(run, setup, attempt, 'done', limit=2) == 'done'
  assert seen == [10, 4, 2]
  with pytest.raises(memory.DoesNotFit, match=r'one row of .*=32 .*remat'):
    memory.fitting(run, setup, attempt, 'done', limit=1)
  assert run.host.tokens_per_microbatch == 32


def test_other_errors_are_not_swallowed(mesh, tmp_path):
  run, setup = _run(tmp_path), _setup(mesh)
  for error in (
    jax.errors.JaxRuntimeError('INTERNAL: a bug'),
    ValueError('RESOURCE_EXHAUSTED'),
  ):

    def attempt(*, rows_per_microbatch, error=error):
      raise error

    with pytest.raises(type(error), match='bug|EXHAUSTED'):
      memory.fitting(run, setup, attempt)
  assert run.host.tokens_per_microbatch == 8 * 32
  assert workdir_lib.allowed_microbatch(tmp_path, 'ppo') is None


def test_in_the_optimiser_step_the_state_is_lost(mesh, tmp_path):
  programs = _programs(mesh)

  def apply(state, grads):
    raise _exhausted()

  run = _run(tmp_path)
  with pytest.raises(memory.Restart, match='RESOURCE_EXHAUSTED'):
    memory.update(
      run,
      _setup(mesh),
      _state(mesh),
      _batch(),
      _COEFS,
      programs=programs | {'apply': apply},
      prefix='actor',
    )
  # Smaller from now on: the same size would end in the same way.
  assert run.host.tokens_per_microbatch == 4 * 32
  (event,) = _events(tmp_path, 'out_of_memory')
  assert 'out of memory in the optimiser step' in event['message']


def test_one_of_several_processes_ends(mesh, tmp_path, monkeypatch):
  calls = []

  def attempt(*, rows_per_microbatch):
    calls.append(rows_per_microbatch)
    raise _exhausted()

  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  with pytest.raises(memory.Restart):
    memory.fitting(_run(tmp_path), _setup(mesh), attempt)
  assert calls == [16]  # the others wait: there is nothing to try alone
  # The next process begins with what the last one found.
  again = _run(tmp_path)
  again.heed_memory()
  assert again.host.tokens_per_microbatch == 4 * 32
  (event,) = _events(tmp_path, 'smaller_microbatch')
  assert 'out of memory in a micro-batch of 8 rows' in event['message']
  # Once; and never larger than what is in force.
  again.host.tokens_per_microbatch = 32
  again.heed_memory()
  assert again.host.tokens_per_microbatch == 32
  assert len(_events(tmp_path, 'smaller_microbatch')) == 1
  # Another stage has a size of its own.
  other = _run(tmp_path)
  other.host.stage = 'sft'
  other.heed_memory()
  assert other.host.tokens_per_microbatch == 8 * 32


@pytest.mark.parametrize('saved', [False, True])
def test_rewind(tmp_path, saved):
  workdir_lib.allow_microbatch(tmp_path, 'ppo', 64, 'out of memory')
  with checkpoint.manager(tmp_path, keep=1) as checkpoints:
    run = _run(tmp_path, checkpoints=checkpoints)
    if saved:
      checkpoint.save(checkpoints, 3, {'w': jnp.ones(2)}, run.host.to_json())
    run.host.step = 5
    run.rewind()
  if saved:
    assert (run.restored_step, run.host.step) == (3, 3)
    assert run.host.tokens_per_microbatch == 64
  else:  # as a run that has not begun
    assert (run.restored_step, run.host.step) == (None, 0)
    assert run.host == state_lib.HostState(seed=0)
  (event,) = _events(tmp_path, 'rollback')
  assert event['message'] == f'back from step 5 to step {3 * saved}'


def test_the_launcher_goes_on_from_the_last_checkpoint(tmp_path, monkeypatch):
  run = _run(tmp_path)
  run.host.stage = ''
  rewound, begun = [], []

  def trainer(setup, run, params):
    begun.append((setup.name, params))
    if len(begun) == 2:
      raise memory.Restart('no memory')
    return f'of {setup.name}'

  monkeypatch.setattr(launch, 'TRAINERS', {'fake': trainer})
  monkeypatch.setattr(run_lib.Run, 'rewind', lambda run: rewound.append(run))
  evaluation = ConfigDict({'evaluation': {'only': False}})
  setups = [
    types_lib.SimpleNamespace(name=name, trainer='fake', config=evaluation)
    for name in ('one', 'two')
  ]
  assert launch._stages(run, setups) == 'of two'
  assert rewound == [run]
  assert begun == [
    ('one', None), ('two', 'of one'), ('one', None), ('two', 'of one')
  ]  # fmt: skip
  # Several processes end; whoever started them starts them again.
  begun.clear()
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  with pytest.raises(memory.Restart):
    launch._stages(run, setups)
  assert rewound == [run]
