"""Runs in which only adapters train: what moves, what stays, what is written.

One small run (supervised, then PPO with a critic and KL in reward and loss) on
a random model folder; supervised steps on one device and on a mesh.
"""

import importlib
import json
import shutil
import types

import jax
from ml_collections import ConfigDict
import numpy as np
import orbax.checkpoint as ocp
import pytest

from launch import sample as sample_launch
from launch import train as launch
from rlhf_jax import checkpoint
from rlhf_jax import metrics
from rlhf_jax import testing
from rlhf_jax import tree
from rlhf_jax.models import config as model_config
from rlhf_jax.models import decoder
from rlhf_jax.models import hf
from rlhf_jax.models import lora
from rlhf_jax.models import spec
from rlhf_jax.monitor import writers
from rlhf_jax.sampling import text as text_lib
from rlhf_jax.trainers import policy as policy_lib
from rlhf_jax.trainers import roles as roles_lib
from rlhf_jax.trainers import run as run_lib
from rlhf_jax.trainers import setup as setup_lib
from rlhf_jax.trainers import state as state_lib
from rlhf_jax.trainers import update
from rlhf_jax.trainers import workdir as workdir_lib

_RANK, _STEPS = 3, 4
_TARGETS = ('q_proj', 'v_proj', 'down_proj')


def _quickstart():
  return importlib.import_module('configs.quickstart').get_config('tiny')


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  """A model folder, its config and its parameters."""
  config = model_config.ModelConfig(
    **_quickstart().model.architecture.to_dict() | {'vocab_size': 264}
  )
  init = jax.jit(lambda key: spec.init(decoder.specs(config), key))
  params = init(jax.random.key(5))
  folder = tmp_path_factory.mktemp('models') / 'base'
  hf.export(folder, params, config)
  return folder, config, params


def _config(folder, **changes) -> ConfigDict:
  config = _quickstart()
  with config.unlocked():
    config.model.architecture = ConfigDict()
    (name, trainer, overrides), ppo = config.stages
    own = {'training.sequences_per_minibatch': 8}
    config.stages = ((name, trainer, overrides | own), ppo)
  values = {
    'mesh.devices': 1,
    'model.path': str(folder),
    'model.lora.rank': _RANK,
    'model.lora.alpha': 6.0,
    'model.lora.targets': _TARGETS,
    'actor.optimizer.learning_rate': 3e-2,
    # One update a step, whose old log-probs come from another program.
    'training.sequences_per_minibatch': 16,
    'algorithm.kl_reward.coef': 0.1,
    'checkpoint.every': 1,
    'checkpoint.keep': 9,
    'evaluation.every': 2,
  }
  config.update_from_flattened_dict(values | changes)
  with config.rewards.unlocked():  # some of every response
    config.rewards.ascii = ConfigDict(
      dict(
        rule='character_share',
        weight=1.0,
        args=dict(characters=''.join(map(chr, range(128)))),
      )
    )
  return config


def _train(config, workdir, *args):
  """A run, and the arrays of its stages as they were at their ends."""
  stages = []
  original = roles_lib.begin_or_restore
  with pytest.MonkeyPatch.context() as patch:

    def recorded(*args, **kwargs):
      stages.append(original(*args, **kwargs))
      return stages[-1]

    patch.setattr(roles_lib, 'begin_or_restore', recorded)
    assert launch.train(config, str(workdir), *args) == 0
  return stages


@pytest.fixture(scope='module')
def run(model, tmp_path_factory):
  """The workdir of a finished run, and its stages."""
  workdir = tmp_path_factory.mktemp('runs') / 'run'
  return workdir, _train(_config(model[0]), workdir)


def _metrics(workdir):
  return writers.last_of_each_step(writers.read(workdir / writers.METRICS))


def _arrays(path):
  with ocp.StandardCheckpointer() as checkpointer:
    return tree.flatten(checkpointer.restore(path))


def _saved(workdir, step=_STEPS):
  return _arrays(workdir / 'checkpoints' / str(step) / 'arrays')


def _equal(one, other):
  jax.tree.map(np.testing.assert_array_equal, one, other)


def test_the_policy_begins_as_its_own_reference(run):
  first, last = _metrics(run[0])[2:]
  # The reference is the model with the adapters of the supervised stage.
  for line in (first, last):
    assert abs(line['actor/ppo_kl']) < 1e-6
    assert line['actor/pg_clipfrac'] == 0
    assert line['training/rollout_probs_diff_max'] < 1e-4
  assert abs(first['kl/reward']) < 1e-6 and abs(first['kl/reference']) < 1e-6
  assert last['kl/reference'] > 1e-4
  assert last['actor/grad_norm'] > 0


def test_what_trains_and_what_stays(run, model):
  workdir, (supervised, ppo) = run
  folder, config, params = model
  for stage in (supervised, ppo):
    frozen = dict(stage.frozen)
    assert float(frozen.pop(lora.SCALE)) == 2.0  # 6 / 3
    _equal(frozen, params)
  assert ppo.frozen['embed'] is supervised.frozen['embed']  # loaded once
  # No second copy of the model for the reference, but the adapters of then.
  kept, adapters = lora.split(ppo.reference)
  for name, weight in tree.flatten(kept).items():
    assert weight is tree.flatten(ppo.frozen)[name]
  _equal(adapters, supervised.states['actor'].params)
  specs = lora.specs(decoder.specs(config), _RANK, _TARGETS)
  state = ppo.states['actor']
  assert jax.tree.structure(state.params) == jax.tree.structure(specs)
  # It moved, and all of its second factors did.
  for name, weight in tree.flatten(state.params).items():
    assert np.abs(weight).max() > 1e-2, name
    assert np.abs(weight - tree.flatten(adapters)[name]).max() > 1e-4, name
  # A small part of the model, and so are its moments.
  whole = tree.nbytes(params)
  assert tree.nbytes(state.params) == 4 * spec.count(specs) < whole / 5
  assert tree.nbytes(state.opt_state) < 2.01 * tree.nbytes(state.params)
  # The critic is a whole model.
  assert tree.nbytes(ppo.states['critic'].params) > 0.9 * whole
  assert hf.load_config(folder) == config


def test_checkpoints_hold_the_adapters_only(run):
  workdir, (_, ppo) = run
  actor = {n: a for n, a in _saved(workdir).items() if n.startswith('actor/')}
  assert actor and not any('embed' in name for name in actor)
  assert sum('/params/' in name for name in actor) == 6
  for name, array in tree.flatten(ppo.states['actor'].params).items():
    np.testing.assert_array_equal(actor[f'actor/params/{name}'], array)
  reference = _arrays(checkpoint.reference_folder(workdir, 'ppo'))
  assert len(reference) == 6 and all('_lora_' in name for name in reference)


def test_the_export_is_the_merged_policy(run, model):
  workdir, (_, ppo) = run
  folder, config, params = model
  exported = tree.flatten(hf.load(workdir / 'export', config))
  changed = ('attention/q', 'attention/v', 'mlp/down')
  trained = tree.flatten(ppo.states['actor'].params)
  for name, weight in tree.flatten(params).items():
    weight, new = np.asarray(weight), np.asarray(exported[name])
    if not name.endswith(changed):
      np.testing.assert_array_equal(new, weight)
      continue
    inputs = trained[f'{name}_lora_a'].shape[1:-1]
    by_layer = (len(weight), int(np.prod(inputs)), -1)
    a = np.reshape(trained[f'{name}_lora_a'], (*by_layer[:2], _RANK))
    b = np.reshape(trained[f'{name}_lora_b'], (len(weight), _RANK, -1))
    difference = (new - weight).reshape(by_layer)
    testing.assert_close(difference, 2.0 * (a @ b), 'layout_float32')
    assert (np.linalg.matrix_rank(difference, tol=1e-4) <= _RANK).all()


def test_the_sampling_command_has_the_adapters(run, tmp_path):
  def ask(folder):
    output = tmp_path / f'{folder.name}.jsonl'
    settings = text_lib.Settings(slots=2, max_new_tokens=6)
    prompts = ('12+34=', '5+5=')
    arguments = dict(prompt=prompts, file='', output=str(output), seed=3)
    assert sample_launch.sample(str(folder), settings, **arguments) == 0
    return [json.loads(line) for line in output.read_text().splitlines()]

  of_run = ask(run[0])  # its newest checkpoint, by adapters and folder
  shutil.copytree(run[0] / 'export', tmp_path / 'export')
  for ours, theirs in zip(of_run, ask(tmp_path / 'export'), strict=True):
    assert ours['ids'] == theirs['ids']
    testing.assert_close(ours['logprobs'], theirs['logprobs'], 'teacher_forced')


def test_resume_is_bit_for_bit(run, model, tmp_path, monkeypatch):
  original = run_lib.Run.save

  def dying(self, values):
    original(self, values)
    if self.host.step == 3:
      raise KeyboardInterrupt

  config = _config(model[0])
  with monkeypatch.context() as patch:
    patch.setattr(run_lib.Run, 'save', dying)
    with pytest.raises(KeyboardInterrupt):
      launch.train(config, str(tmp_path / 'run'))
  (stage,) = _train(config, tmp_path / 'run', 'must')
  assert stage.restored
  ours, theirs = _saved(tmp_path / 'run'), _saved(run[0])
  assert ours.keys() == theirs.keys()
  for name, value in theirs.items():
    np.testing.assert_array_equal(ours[name], value, err_msg=name)


def test_another_model_under_the_adapters_is_refused(run, model, monkeypatch):
  """Or they would be added to weights that they do not belong to."""
  workdir, _ = run
  _, setup = setup_lib.stages(_config(model[0]), ('ppo', 'sft'))
  learners = {'actor': roles_lib.learner(setup, 'actor', 2)}
  checkpoints = checkpoint.manager(workdir, keep=9)
  host = checkpoint.restore_host(checkpoints, _STEPS)
  resumed = types.SimpleNamespace(
    restored_in=lambda stage: _STEPS,
    restored_step=_STEPS,
    checkpoints=checkpoints,
    host=state_lib.HostState.from_json(host),
  )
  asked = policy_lib.find(str(workdir))
  monkeypatch.setattr(checkpoint, 'fingerprint', lambda folder: 'another')
  message = 'the model under the adapters was .* put the original model back'
  with pytest.raises(ValueError, match=message):
    roles_lib.begin_or_restore(setup, resumed, learners, None)
  with pytest.raises(ValueError, match=message):
    asked.load(setup.mesh, np.float32)


def test_the_hash_is_that_of_the_weights(model, tmp_path):
  folder, config, params = model
  where = dict(path=str(folder), sha256=checkpoint.fingerprint(folder))
  checkpoint.verify(where, 'the model')
  hf.export(tmp_path / 'other', jax.tree.map(lambda x: x + 1, params), config)
  with pytest.raises(ValueError, match='the model was .* put the original'):
    checkpoint.verify(where | {'path': str(tmp_path / 'other')}, 'the model')


def test_the_untouched_model_is_its_own_reference(model, tmp_path):
  _, setup = setup_lib.stages(_config(model[0]), ('ppo', 'sft'))
  params = roles_lib.actor_params(setup, None)
  reference, where = roles_lib.begin_reference(setup, tmp_path, params, True)
  assert where == dict(
    path=str(model[0]), sha256=checkpoint.fingerprint(model[0])
  )
  frozen, _ = lora.split(params)
  assert tree.names(reference) == tree.names(frozen)
  for one, other in zip(jax.tree.leaves(reference), jax.tree.leaves(frozen)):
    assert one is other
  assert not list(tmp_path.iterdir())


def test_an_adapter_goes_on(run, model, tmp_path):
  """The reference is the model with that adapter, not the bare model."""
  workdir, (_, ppo) = run
  changes = {'model.lora.path': str(workdir / 'adapter')}
  _, setup = setup_lib.stages(_config(model[0], **changes), ('ppo', 'sft'))
  params = roles_lib.actor_params(setup, None)
  frozen, trained = lora.split(params)
  _equal(trained, ppo.states['actor'].params)
  reference, where = roles_lib.begin_reference(setup, tmp_path, params, True)
  assert where == dict(saved=True)
  again = roles_lib.restore_reference(setup, tmp_path, where, frozen)
  for one in (reference, again):
    _equal(one, params)
    assert one['embed'] is frozen['embed']
    # A copy: the update takes the actor's for itself.
    leaves = zip(jax.tree.leaves(lora.split(one)[1]), jax.tree.leaves(trained))
    assert not any(a is b for a, b in leaves)


def test_the_critic_begins_as_the_merged_policy(model):
  _, setup = setup_lib.stages(_config(model[0]), ('ppo', 'sft'))
  params = roles_lib.actor_params(setup, None)
  frozen, trained = lora.split(params)
  params = lora.combine(frozen, jax.tree.map(lambda x: x + 0.1, trained))
  critic = roles_lib.critic_params(setup, params)
  policy = lora.merge(params)
  assert not np.any(critic.pop('value_head'))
  for name, weight in tree.flatten(critic).items():
    testing.assert_close(weight, tree.flatten(policy)[name], 'layout_float32')


def test_the_scale_stays_on_the_devices():
  """As a number of the host it would ask for a program of its own."""
  seen = []
  scale = jax.numpy.float32(2)
  programs = dict(
    zeros=lambda params: params,
    accumulate=lambda params, grads, batch, coefs: (seen.append(coefs), {}),
    apply=lambda state, grads: (state, {'skipped': metrics.sum(0)}),
  )
  state = state_lib.TrainState({}, {}, 0, 0)
  coefs = {'entropy': 0.5, 'frozen': {lora.SCALE: scale}}
  update.update(state, [None], coefs, programs=programs, prefix='actor')
  (coefs,) = seen
  assert coefs['frozen'][lora.SCALE] is scale
  assert type(coefs['entropy']) is np.float32


@pytest.mark.slow
def test_a_mesh_trains_the_same(model, tmp_path):
  stages = {}
  for name, sizes in (('one', {}), ('many', {'fsdp': 2, 'tensor': 2})):
    config = _config(
      model[0],
      **{f'mesh.{axis}': size for axis, size in sizes.items()},
      **{
        'mesh.devices': 4 if sizes else 1,
        'model.lora.base_dtype': 'bfloat16',
        'model.lora.targets': ('all-linear',),
        'actor.optimizer.eps': 1e-5,  # see `three_updates`
        'checkpoint.every': 0,
        'data.validation.source': '',
        'evaluation.best_metric': '',
        'export': False,
      },
    )
    config.stages = (('warmup', 'sft', {'steps': 2}),)
    (stages[name],) = _train(config, tmp_path / name)
  for one, many in zip(*(_metrics(tmp_path / name) for name in stages)):
    testing.assert_close(many['sft/loss'], one['sft/loss'], 'layout_float32')
  one, many = (stage.states['actor'].params for stage in stages.values())
  testing.assert_norm_close(
    jax.device_get(many), jax.device_get(one), 'three_updates'
  )
  frozen, trained = (
    x['layers']['attention'] for x in (stages['many'].frozen, many)
  )
  assert frozen['q'].dtype == 'bfloat16'
  assert frozen['q'].sharding.spec == jax.P(None, 'fsdp', 'tensor', None)
  assert trained['q_lora_a'].sharding.spec == jax.P(None, 'fsdp', None)
  assert trained['q_lora_b'].sharding.spec == jax.P(None, None, 'tensor', None)
  assert trained['q_lora_b'].dtype == 'float32' and trained['q_lora_b'].any()


# ---- Refused before anything is compiled ------------------------------------


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'model.lora.rank': -1}, r'model.lora.rank=-1 must be 0 \(off'),
    ({'model.lora.alpha': 0.0}, 'model.lora.alpha=0.0 must be more than 0'),
    (
      {'model.lora.rank': 0, 'model.lora.targets': ('all-linear',)},
      'model.lora.alpha=6.0 would change nothing with model.lora.rank=0',
    ),
    (
      {'model.lora.targets': ('query',)},
      r"model.lora.targets: .*\['query'\] are no linear maps of a block: choose"
      " among .*'q_proj'",
    ),
    ({'model.lora.base_dtype': 'int8'}, "dtype 'int8' is not 'float32', 'bf"),
    (
      {'model.lora.rank': 0, 'model.lora.alpha': None, 'model.lora.path': 'x'},
      "model.lora.path='x' would change nothing with model.lora.rank=0",
    ),
    ({'offload.reference': True}, 'the reference is the model under the adap'),
  ],
)
def test_refusals(model, changes, message):
  with pytest.raises(ValueError, match=message):
    setup_lib.stages(_config(model[0], **changes), ('ppo', 'sft'))


def test_adapters_need_a_trained_model():
  config = _quickstart()
  config.model.lora.rank = 2
  with pytest.raises(ValueError, match='rank=2 without model.path: adapters'):
    setup_lib.stages(config, ('ppo', 'sft'))
  config.stages = (('ppo', 'ppo', {'model.lora.rank': 2}),)
  with pytest.raises(
    ValueError, match=r"'model.lora.rank'\] belong to the who"
  ):
    setup_lib.stages(config, ('ppo', 'sft'))


def test_the_overview_says_what_trains(model):
  _, setup = setup_lib.stages(_config(model[0]), ('ppo', 'sft'))
  (line,) = (x for x in setup_lib.describe(setup) if 'actor trains' in x)
  count = spec.count(lora.specs(decoder.specs(model[1]), _RANK, _TARGETS))
  assert f' {count:,} of {spec.count(decoder.specs(model[1])):,} ' in line
  assert 'rank 3, scale 2, on q_proj, v_proj, down_proj; the model is' in line


def test_another_rank_is_another_run(run, model):
  config = _config(model[0], **{'model.lora.rank': 2})
  with pytest.raises(workdir_lib.Refused, match='model.lora.rank: 3 -> 2'):
    launch.train(config, str(run[0]))
