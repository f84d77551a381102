"""Checkpoints: nothing is lost, and nothing incomplete is chosen."""

import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import checkpoint
from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.sharding import rules

_HOST = {
  'step': 3,
  'stage': 'ppo',
  'cursor': 2**40 + 1,
  'kl': {'coef': 0.1 + 0.2, 'kind': 'adaptive'},
  'best': None,
  'units': [1, 2.5, 'x'],
}


def _arrays(mesh):
  """Arrays of several dtypes, and their shardings on a mesh."""
  rng = np.random.default_rng(0)
  weights = rng.normal(size=(16, 8)).astype(np.float32)
  arrays = {
    'params': {'w': weights, 'half': weights.astype(jnp.bfloat16)},
    'updates': np.int32(7),
    'odd': np.arange(3, dtype=np.int32),
  }
  matrix = rules.sharding(mesh, ('embed', 'mlp'), (16, 8))
  whole = rules.sharding(mesh, (), ())
  shardings = {
    'params': {'w': matrix, 'half': matrix}, 'updates': whole, 'odd': whole,
  }  # fmt: skip
  return arrays, shardings


def _small(value):
  return {'w': jnp.full(2, value, jnp.float32)}


def _steps(workdir):
  """What a new process would find."""
  with checkpoint.manager(workdir, keep=100) as found:
    return found.latest_step(), sorted(found.all_steps())


def test_round_trip_with_shardings(tmp_path):
  mesh = mesh_lib.make(tensor=2)
  arrays, shardings = _arrays(mesh)
  placed = jax.device_put(arrays, shardings)
  with checkpoint.manager(tmp_path, keep=2) as checkpoints:
    checkpoint.save(checkpoints, 3, placed, _HOST)
  # On the same mesh, and on another number of devices.
  for other in (mesh, mesh_lib.make(devices=jax.devices()[:2])):
    _, wanted = _arrays(other)
    with checkpoint.manager(tmp_path, keep=2) as checkpoints:
      step = checkpoints.latest_step()
      assert step == 3
      assert checkpoint.restore_host(checkpoints, step) == _HOST
      restored = checkpoint.restore_arrays(
        checkpoints, step, checkpoint.abstract(placed, wanted)
      )
    for x, y, sharding in zip(
      *(jax.tree.leaves(t) for t in (restored, arrays, wanted)), strict=True
    ):
      assert x.dtype == y.dtype and x.sharding == sharding
      np.testing.assert_array_equal(np.asarray(x), y)


def test_part_of_the_arrays(tmp_path):
  saved = {'actor': _small(1), 'critic': _small(2), 'count': jnp.int32(3)}
  with checkpoint.manager(tmp_path, keep=1) as checkpoints:
    checkpoint.save(checkpoints, 1, saved, {})
  with checkpoint.manager(tmp_path, keep=1) as checkpoints:
    part = checkpoint.restore_arrays(
      checkpoints, 1, jax.eval_shape(lambda: {'critic': _small(0)})
    )
    assert list(part) == ['critic'] and part['critic']['w'].tolist() == [2, 2]
    # A run that was resumed saves with the same manager.
    checkpoint.save(checkpoints, 2, saved, {})
    assert checkpoints.latest_step() == 2


def test_another_shape_is_refused(tmp_path):
  with checkpoint.manager(tmp_path, keep=1) as checkpoints:
    checkpoint.save(checkpoints, 1, _small(1), {})
  # Neither padded nor cut.
  for size in (1, 3):
    wanted = jax.ShapeDtypeStruct(
      (size,), jnp.float32,
      sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    )  # fmt: skip
    with checkpoint.manager(tmp_path, keep=1) as checkpoints:
      with pytest.raises(ValueError, match='shape'):
        checkpoint.restore_arrays(checkpoints, 1, {'w': wanted})


def test_steps_are_numbers_and_the_newest_stay(tmp_path):
  with checkpoint.manager(tmp_path, keep=2) as checkpoints:
    for step in (9, 99, 100):
      checkpoint.save(checkpoints, step, _small(step), {'step': step})
  # As text '99' is the largest and '9' comes before '100' only by accident.
  assert _steps(tmp_path) == (100, [99, 100])
  with checkpoint.manager(tmp_path, keep=2) as checkpoints:
    for step in (99, 100):
      assert checkpoint.restore_host(checkpoints, step) == {'step': step}
      restored = checkpoint.restore_arrays(
        checkpoints, step, jax.eval_shape(lambda: _small(0))
      )
      assert restored['w'].tolist() == [step, step]


def test_save_that_was_cut_short_is_not_chosen(tmp_path):
  with checkpoint.manager(tmp_path, keep=2) as checkpoints:
    checkpoint.save(checkpoints, 5, _small(5), {'step': 5})
    # Host state that JSON cannot hold: the save dies halfway.
    with pytest.raises(Exception, match='JSON serializable'):
      checkpoint.save(checkpoints, 6, _small(6), {'step': object()})
  folder = tmp_path / 'checkpoints'
  left = {path.name for path in folder.iterdir()} - {'5'}
  assert left and '6' not in left, 'the save left nothing to be mistaken for'
  # Likewise a whole step under the name of one that was not finished.
  for name in left:
    shutil.rmtree(folder / name)
    shutil.copytree(folder / '5', folder / name)
  assert _steps(tmp_path) == (5, [5])
  # The run goes on with the same step.
  with checkpoint.manager(tmp_path, keep=2) as checkpoints:
    assert checkpoint.restore_host(checkpoints, 5) == {'step': 5}
    checkpoint.save(checkpoints, 6, _small(6), {'step': 6})
    assert checkpoints.latest_step() == 6
    assert checkpoint.restore_host(checkpoints, 6) == {'step': 6}


def test_nothing_there(tmp_path):
  assert _steps(tmp_path) == (None, [])


def test_keep_none_is_refused(tmp_path):
  with pytest.raises(ValueError, match='checkpoint.keep=0: at least 1'):
    checkpoint.manager(tmp_path, keep=0)


def test_reference_lies_beside_the_steps(tmp_path):
  mesh = mesh_lib.make()
  arrays, shardings = _arrays(mesh)
  params, shardings = arrays['params'], shardings['params']
  placed = jax.device_put(params, shardings)
  checkpoint.save_reference(
    tmp_path, 'warmup', jax.tree.map(jnp.zeros_like, placed)
  )
  checkpoint.save_reference(tmp_path, 'ppo', placed)
  with checkpoint.manager(tmp_path, keep=1) as checkpoints:
    checkpoint.save(checkpoints, 1, _small(1), {})
    checkpoint.save(checkpoints, 2, _small(2), {})
  # The steps do not see it, and keep=1 does not delete it.
  assert _steps(tmp_path) == (2, [2])
  restored = checkpoint.restore_reference(
    tmp_path, 'ppo', checkpoint.abstract(params, shardings)
  )
  for name, x in restored.items():
    assert x.sharding == shardings[name]
    np.testing.assert_array_equal(np.asarray(x), params[name])
  zeros = checkpoint.restore_reference(
    tmp_path, 'warmup', checkpoint.abstract(params, shardings)
  )
  assert not np.asarray(zeros['w']).any()


def test_fingerprint_speaks_of_contents(tmp_path):
  def folder(name, files):
    path = pathlib.Path(tmp_path, name)
    path.mkdir()
    for file, content in files.items():
      (path / file).write_bytes(content)
    return path

  files = {
    'config.json': b'{}',
    'a.safetensors': b'1',
    'b.safetensors': b'2',
    'README.md': b'text',
  }
  one = checkpoint.fingerprint(folder('one', files))
  assert len(one) == 64
  # The place and the text beside the weights do not matter.
  other = folder('other', files | {'README.md': b'another'})
  assert checkpoint.fingerprint(str(other)) == one
  # The config, a weight, the name of a shard and the split do.
  changed = [
    files | {'config.json': b'{ }'},
    files | {'b.safetensors': b'3'},
    files | {'a.safetensors': b'2', 'b.safetensors': b'1'},
    files | {'a.safetensors': b'12', 'b.safetensors': b''},
    {k.replace('b.', 'c.'): v for k, v in files.items()},
    files | {'c.safetensors': b''},
  ]
  prints = {
    checkpoint.fingerprint(folder(str(i), f)) for i, f in enumerate(changed)
  }
  assert len(prints) == len(changed) and one not in prints
