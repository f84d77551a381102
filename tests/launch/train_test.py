"""Runs from the launch command: files, resume, refusals, configs.

All runs are two small stages (supervised, then PPO with a critic and an
adaptive KL coefficient) that differ in nothing that is compiled, and share the
compiled programs through a cache on disk.
"""

import importlib
import json
import pathlib
import subprocess
import sys

import jax
from ml_collections import ConfigDict
import numpy as np
import orbax.checkpoint as ocp
import pytest

from launch import train as launch
from rlhf_jax import testing
from rlhf_jax.models import decoder
from rlhf_jax.models import hf
from rlhf_jax.monitor import writers
from rlhf_jax.trainers import run as run_lib
from rlhf_jax.trainers import update
from rlhf_jax.trainers import workdir as workdir_lib

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_STEPS = 5  # 2 of the warm-up, 3 of PPO


def _config(**changes) -> ConfigDict:
  config = importlib.import_module('configs.quickstart').get_config('tiny')
  values = {
    'mesh.devices': 1,
    'steps': 3,
    'checkpoint.every': 1,
    'checkpoint.keep': 9,
    'evaluation.every': 2,
    # A state that moves with every step, and that a resumed run must have.
    'algorithm.kl_reward.coef': 0.2,
    'algorithm.kl_reward.controller': 'adaptive',
    'algorithm.kl_reward.horizon': 20,
    'training.epochs_per_step': 2,
    'actor.optimizer.warmup_updates': 2,
    'actor.optimizer.decay': 'linear',
  }
  config.update_from_flattened_dict(values | changes)
  with config.rewards.unlocked():  # a fraction that every policy gets some of
    config.rewards.ascii = ConfigDict(
      dict(
        rule='character_share',
        weight=0.5,
        args=dict(characters=''.join(map(chr, range(128)))),
      )
    )
  (name, trainer, overrides), ppo = config.stages
  own = {'training.epochs_per_step': 1, 'actor.optimizer.warmup_updates': 0}
  config.stages = ((name, trainer, overrides | own), ppo)
  return config


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """The workdir of a run that was never interrupted."""
  workdir = tmp_path_factory.mktemp('runs') / 'finished'
  assert launch.train(_config(), str(workdir)) == 0
  return workdir


def _read(workdir, name):
  return writers.read(workdir / name)


def _summary(workdir):
  return json.loads((workdir / writers.SUMMARY).read_text())


def _arrays(workdir, step=_STEPS):
  """All arrays of a checkpoint, by path."""
  with ocp.StandardCheckpointer() as checkpointer:
    tree = checkpointer.restore(workdir / 'checkpoints' / str(step) / 'arrays')
  return {
    jax.tree_util.keystr(path): np.asarray(leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def _of_the_clock(name):
  return name.startswith('timing_s/') or '_per_second' in name or 'mfu' in name


def _numbers(workdir):
  """The metrics of every step, without those that a clock decides."""
  return [
    {
      name: value
      for name, value in line.items()
      if name != 'time' and not _of_the_clock(name)
    }
    for line in writers.last_of_each_step(_read(workdir, writers.METRICS))
  ]


def _snapshot(workdir):
  """Content of every file."""
  return {
    path.relative_to(workdir): path.read_bytes()
    for path in sorted(workdir.rglob('*'))
    if path.is_file()
  }


# ---- The files of a finished run --------------------------------------------


def test_metrics(finished):
  lines = _read(finished, writers.METRICS)
  steps = [line['step'] for line in lines]
  assert steps == sorted(steps)
  # Before PPO the policy of the warm-up is evaluated once more.
  assert [(line['stage'], line['step']) for line in lines] == [
    ('warmup', 1), ('warmup', 2), ('ppo', 2), ('ppo', 3), ('ppo', 4), ('ppo', 5)
  ]  # fmt: skip
  assert {'sft/loss', 'actor/grad_norm', 'actor/lr'} <= lines[0].keys()
  assert 'val/arithmetic/exact_match' in lines[2]
  # The names that dashboards know.
  wanted = """
    actor/pg_loss actor/pg_clipfrac actor/ppo_kl actor/kl_loss actor/kl_coef
    actor/entropy actor/grad_norm actor/lr critic/vf_loss critic/vf_clipfrac
    critic/vf_explained_var critic/grad_norm critic/score/mean
    critic/rewards/mean critic/advantages/mean critic/returns/mean
    critic/values/mean reward/exact_match/mean reward/ascii/mean kl/reference
    response_length/mean response_length/max response_length/min
    response_length/clip_ratio prompt_length/mean
    perf/tokens_per_second_per_device timing_s/gen timing_s/reward
    timing_s/old_log_prob timing_s/ref timing_s/values timing_s/adv
    timing_s/update_critic timing_s/update_actor timing_s/step
    training/rollout_probs_diff_mean training/rollout_probs_diff_max
    training/frac_reward_zero_std
  """.split()
  for line in lines[3:]:
    assert not set(wanted) - line.keys()
    numbers = [value for name, value in line.items() if name != 'stage']
    assert np.isfinite(numbers).all()  # strict JSON writes NaN as null
  # The policy that sampled is the one that trains, up to rounding.
  assert lines[3]['training/rollout_probs_diff_max'] < 1e-4
  # Against itself before its first update; the reference of the stage.
  assert abs(lines[3]['kl/reward']) < 1e-6
  assert lines[3]['critic/values/mean'] == 0
  # Evaluated every 2 steps of the stage, and at its end.
  validated = [
    line['step'] for line in lines if 'val/arithmetic/exact_match' in line
  ]
  assert validated == [2, 2, 4, 5]


def test_samples(finished):
  rows = _read(finished, writers.SAMPLES)
  kinds = {(row['stage'], row['kind']) for row in rows}
  assert ('ppo', 'train') in kinds and ('ppo', 'validation') in kinds
  steps = [row['step'] for row in rows]
  assert steps == sorted(steps)
  for row in rows:
    assert row['prompt'].endswith('=')
    assert str(eval(row['prompt'][:-1])) == row['answer']
    response = row['response']
    share = sum(c < '\x80' for c in response) / max(len(response), 1)
    exact = float(response.strip() == row['answer'])
    assert row['rewards'] == pytest.approx(dict(exact_match=exact, ascii=share))
    assert row['score'] == pytest.approx(exact + 0.5 * share)
    assert row['finish_reason'] in ('stop', 'length')
    assert 'advantage' in row
  assert any(row['score'] > 0 for row in rows)


def test_events(finished):
  events = _read(finished, writers.EVENTS)
  saved = [event for event in events if event['kind'] == 'checkpoint']
  assert [event['step'] for event in saved] == [1, 2, 3, 4, 5]
  assert not [event for event in events if event['kind'] == 'error']
  folder = finished / 'checkpoints'
  numbers = {int(p.name) for p in folder.iterdir() if p.name.isdigit()}
  assert numbers == {1, 2, 3, 4, 5}
  assert (folder / 'reference-ppo').is_dir()


def test_config_summary_report(finished):
  config = json.loads((finished / writers.CONFIG).read_text())
  assert config == writers.plain(_config())
  summary = _summary(finished)
  assert summary['exit_reason'] == 'finished'
  assert (summary['step'], summary['steps']) == (_STEPS, _STEPS)
  assert summary['stage'] == 'ppo'
  assert summary['wall_time_s'] > 0 and summary['tokens'] > 0
  last = _read(finished, writers.METRICS)[-1]
  for name in ('critic/score/mean', 'kl/reference', 'val/arithmetic/score'):
    assert summary['last'][name] == last[name]
  assert summary['best']['name'] == 'val/arithmetic/exact_match'
  # 3 steps x 8 prompts x 2 samples, none dropped
  assert summary['score']['count'] == 48
  assert summary['dropped_sequences'] == summary['skipped_updates'] == 0
  report = (finished / 'report.html').read_text()
  assert report.lstrip().lower().startswith('<!doctype html')
  assert 'critic/score/mean' in report


def test_export_is_the_policy_of_the_last_step(finished):
  export = finished / 'export'
  model = hf.load_config(export)
  params = hf.load(export, model)
  saved = _arrays(finished)
  for name, leaf in jax.tree_util.tree_leaves_with_path(params):
    key = f"['actor']['params']{jax.tree_util.keystr(name)}"
    if key not in saved:  # as an attribute of the struct
      key = f"['actor'].params{jax.tree_util.keystr(name)}"
    np.testing.assert_array_equal(leaf, saved[key])


def test_export_in_transformers(finished):
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  export = finished / 'export'
  theirs = transformers.AutoModelForCausalLM.from_pretrained(export)
  tokenizer = transformers.AutoTokenizer.from_pretrained(export)
  ids = tokenizer('12+7=', return_tensors='np')['input_ids'].astype(np.int32)
  assert ids.tolist() == [list(b'12+7=')]
  with torch.no_grad():
    expected = theirs(torch.tensor(ids, dtype=torch.long)).logits.numpy()
  model = hf.load_config(export)
  params = hf.load(export, model)
  hidden = decoder.hidden(
    params,
    model,
    ids,
    np.arange(ids.shape[1], dtype=np.int32)[None],
    np.ones_like(ids),
  )
  logits = np.asarray(decoder.logits(params, model, hidden))
  largest = np.abs(expected).max()
  testing.assert_close(
    logits / largest, expected / largest, 'logits_of_largest'
  )


# ---- The same workdir again -------------------------------------------------


def test_running_again_changes_nothing(finished, capsys):
  before = _snapshot(finished)
  assert launch.train(_config(), str(finished)) == 0
  assert launch.train(_config(), str(finished), 'must') == 0
  assert _snapshot(finished) == before
  assert 'finished' in capsys.readouterr().out


def test_refusals_change_nothing(finished, tmp_path):
  before = _snapshot(finished)
  with pytest.raises(
    workdir_lib.Refused, match='algorithm.clip_low: None -> 0.1'
  ) as error:
    launch.train(_config(**{'algorithm.clip_low': 0.1}), str(finished))
  assert 'checkpoint' not in str(error.value)
  with pytest.raises(
    workdir_lib.Refused, match='--resume=never, but .* not empty'
  ):
    launch.train(_config(), str(finished), 'never')
  assert _snapshot(finished) == before
  empty = tmp_path / 'empty'
  with pytest.raises(
    workdir_lib.Refused, match='--resume=must, but .* holds no'
  ):
    launch.train(_config(), str(empty), 'must')
  with pytest.raises(workdir_lib.Refused, match='tokens_per_row=3 cannot hold'):
    launch.train(_config(**{'training.tokens_per_row': 3}), str(empty))
  assert not empty.exists()


def test_flags_that_no_stage_reads(tmp_path):
  config = _config()
  config.stages = tuple(
    (name, trainer, {'steps': 1}) for name, trainer, _ in config.stages
  )
  with pytest.raises(
    workdir_lib.Refused, match='--config.steps would change noth'
  ):
    launch.train(config, str(tmp_path / 'run'), from_flags=frozenset({'steps'}))
  assert not (tmp_path / 'run').exists()


# ---- Killed and resumed: bit for bit ----------------------------------------


def _kill_after(monkeypatch, method, step):
  """Ends the process, as it were, when `method` of a step has returned."""
  original = getattr(run_lib.Run, method)

  def dying(self, values):
    original(self, values)
    if self.host.step == step:
      raise KeyboardInterrupt

  monkeypatch.setattr(run_lib.Run, method, dying)


@pytest.mark.parametrize(
  'method, step, restored',
  [
    pytest.param('save', 2, 2, id='between the stages'),
    # A step was computed and written, but not saved: it is done again.
    pytest.param('log', 4, 3, id='within ppo'),
  ],
)
def test_resume_is_bit_for_bit(
  finished, tmp_path, monkeypatch, method, step, restored
):
  workdir = tmp_path / 'run'
  with monkeypatch.context() as patch:
    _kill_after(patch, method, step)
    with pytest.raises(KeyboardInterrupt):
      launch.train(_config(), str(workdir), 'never')
  summary = _summary(workdir)
  assert (summary['exit_reason'], summary['step']) == ('interrupted', step)
  assert not (workdir / 'export').exists()

  assert launch.train(_config(), str(workdir), 'must') == 0
  (event,) = [
    e for e in _read(workdir, writers.EVENTS) if e['kind'] == 'resume'
  ]
  assert event['step'] == restored
  for ours, theirs in zip(_numbers(workdir), _numbers(finished), strict=True):
    assert ours == theirs
  ours, theirs = _arrays(workdir), _arrays(finished)
  assert ours.keys() == theirs.keys()
  # Parameters and moments of actor and critic.
  for part in ('actor', 'critic', 'embed', 'value_head', 'opt_state'):
    assert any(part in name for name in ours), part
  for name, value in theirs.items():
    np.testing.assert_array_equal(ours[name], value, err_msg=name)
  hosts = []
  for folder in (workdir, finished):
    path = folder / 'checkpoints' / str(_STEPS) / 'host'
    host = json.loads((path / 'metadata').read_text())
    host.pop('wall_time_s')
    host['last'] = {
      name: value
      for name, value in host['last'].items()
      if not _of_the_clock(name)
    }
    hosts.append(host)
  assert hosts[0] == hosts[1]
  assert hosts[0]['kl_reward']['coef'] != 0.2  # it did move
  for name in ('model.safetensors', 'config.json'):
    one, other = (f / 'export' / name for f in (workdir, finished))
    assert one.read_bytes() == other.read_bytes()
  assert _summary(workdir)['exit_reason'] == 'finished'


# ---- Too little memory ------------------------------------------------------


def test_what_lives_on_the_host_changes_no_number(
  finished, tmp_path, monkeypatch
):
  # The same programs on the same bits, and checkpoints that do not care.
  workdir, kinds = tmp_path / 'run', []
  original = run_lib.Run.save

  def looking(self, states):
    kinds.append(
      {
        (role, part): {
          leaf.sharding.memory_kind
          for leaf in jax.tree.leaves(getattr(state, part))
          if leaf.ndim
        }
        for role, state in states.items()
        for part in ('params', 'opt_state')
      }
    )
    original(self, states)

  away = {f'offload.{x}': True for x in ('optimizer', 'params', 'reference')}
  with monkeypatch.context() as patch:
    patch.setattr(run_lib.Run, 'save', looking)
    _kill_after(patch, 'log', 4)
    with pytest.raises(KeyboardInterrupt):
      launch.train(_config(**away), str(workdir), 'never')
  assert len(kinds) == 3
  for step in kinds:
    assert set(map(frozenset, step.values())) == {frozenset({'pinned_host'})}
  assert {role for role, _ in kinds[-1]} == {'actor', 'critic'}
  # Then on the devices, from the last checkpoint on.
  assert launch.train(_config(), str(workdir), 'must') == 0
  for ours, theirs in zip(_numbers(workdir), _numbers(finished), strict=True):
    assert ours == theirs
  ours, theirs = _arrays(workdir), _arrays(finished)
  for name, value in theirs.items():
    np.testing.assert_array_equal(ours[name], value, err_msg=name)


def test_a_run_that_does_not_fit_is_one_with_smaller_micro_batches(
  tmp_path, monkeypatch
):
  # Four rows do not fit: first in an optimiser step, when there is no
  # checkpoint yet, then in a forward pass of PPO.
  error = jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: out of memory')
  make, make_score = update.programs, update.score_program
  raised = []
  steady = {f'{role}.optimizer.eps': 1e-5 for role in ('actor', 'critic')}

  def programs(*args, **kwargs):
    built = make(*args, **kwargs)

    def apply(state, grads):
      if not raised:
        raised.append('apply')
        raise error
      return built['apply'](state, grads)

    apply.lower = built['apply'].lower  # it is compiled before the first step
    return built | {'apply': apply}

  def score_program(*args, **kwargs):
    program = make_score(*args, **kwargs)

    def score(params, rows, **inputs):
      if rows.tokens.shape[0] > 2:
        raised.append('score')
        raise error
      return program(params, rows=rows, **inputs)

    score.lower = program.lower
    return score

  with monkeypatch.context() as patch:
    patch.setattr(update, 'programs', programs)
    patch.setattr(update, 'score_program', score_program)
    assert launch.train(_config(**steady), str(tmp_path / 'starved')) == 0
  assert raised == ['apply', 'score']
  events = _read(tmp_path / 'starved', writers.EVENTS)
  wanted = 'out_of_memory', 'rollback', 'smaller_microbatch'
  assert [
    (event['kind'], event['stage'], event['step'])
    for event in events
    if event['kind'] in wanted
  ] == [
    ('out_of_memory', 'warmup', 0),
    ('rollback', '', 0),
    ('smaller_microbatch', 'warmup', 0),
    ('out_of_memory', 'ppo', 2),
  ]
  small = {'training.tokens_per_microbatch': 2 * 32}
  assert launch.train(_config(**steady, **small), str(tmp_path / 'small')) == 0
  ours, theirs = (_numbers(tmp_path / name) for name in ('starved', 'small'))
  # The rows of the first step of PPO were balanced for micro-batches of four:
  # its sums have another order.
  for one, other in zip(ours, theirs, strict=True):
    assert one.keys() == other.keys()
    if one['stage'] == 'warmup':
      assert one == other
    for name in one.keys() - {'stage', 'perf/padding'}:
      np.testing.assert_allclose(
        one[name], other[name], rtol=2e-4, atol=1e-5, err_msg=name
      )
  ours, theirs = (_arrays(tmp_path / name) for name in ('starved', 'small'))
  of_params = lambda arrays: {n: x for n, x in arrays.items() if 'params' in n}
  testing.assert_norm_close(of_params(ours), of_params(theirs), 'three_updates')
  # A resumed run would go on with it.
  path = tmp_path / 'starved' / 'checkpoints' / str(_STEPS) / 'host'
  host = json.loads((path / 'metadata').read_text())
  assert host['tokens_per_microbatch'] == 2 * 32


# ---- Evaluation alone -------------------------------------------------------


def test_evaluation_only_of_a_fresh_model(tmp_path):
  workdir = tmp_path / 'run'
  assert launch.train(_config(**{'evaluation.only': True}), str(workdir)) == 0
  (line,) = _read(workdir, writers.METRICS)
  assert line['step'] == 0
  assert 'val/arithmetic/exact_match' in line
  # Nothing was trained: no summary of a training, nothing to go on from.
  assert not (workdir / writers.SUMMARY).exists()
  assert not list((workdir / 'checkpoints').glob('[0-9]*'))
  assert not (workdir / 'export').exists()


def test_evaluation_only_of_a_finished_run(finished, tmp_path):
  # On a copy: the other tests read the original.
  workdir = tmp_path / 'copy'
  for path, content in _snapshot(finished).items():
    target = workdir / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
  for folder in sorted(finished.rglob('*')):
    if folder.is_dir():
      (workdir / folder.relative_to(finished)).mkdir(
        parents=True, exist_ok=True
      )
  config = _config(**{'evaluation.only': True})
  assert launch.train(config, str(workdir)) == 0
  *_, trained, evaluated = _read(workdir, writers.METRICS)
  assert evaluated['step'] == trained['step'] == _STEPS
  # The policy of the last step, greedily, on the same problems.
  for name in ('exact_match', 'score', 'response_length'):
    key = f'val/arithmetic/{name}'
    assert evaluated[key] == trained[key]
  for name in ('checkpoints', 'export', writers.SUMMARY):
    parts = lambda w, n=name: {
      p: c for p, c in _snapshot(w).items() if p.parts[0] == n
    }
    assert parts(workdir) == parts(finished)


# ---- Configs and the command line -------------------------------------------

_CONFIGS = sorted(
  path.stem
  for path in (_ROOT / 'configs').glob('*.py')
  if path.stem not in ('base', '__init__')
)


@pytest.mark.parametrize('name', _CONFIGS)
def test_configs(name):
  module = importlib.import_module(f'configs.{name}')
  whole, tiny = module.get_config(), module.get_config('tiny')
  base = importlib.import_module('configs.base').get_config()
  for config in (whole, tiny):
    assert config.is_locked
    assert config.name == name
    # Nothing but the keys that base.py explains.
    assert config.keys() == base.keys()
    with pytest.raises(AttributeError, match='prompts_per_step'):
      config.rollout.promts_per_step = 1
  assert writers.plain(whole) != writers.plain(tiny)
  with pytest.raises(ValueError, match="'tiny'"):
    module.get_config('tinny')
  # The command that its docstring gives.
  assert f'--config=configs/{name}.py' in module.__doc__


def test_base_config():
  config = importlib.import_module('configs.base').get_config()
  assert config.name == 'base'
  assert [name for name, _, _ in config.stages] == ['ppo']


def test_command_line_with_a_misspelt_key(tmp_path):
  result = subprocess.run(
    [
      sys.executable,
      'launch/train.py',
      '--config=configs/quickstart.py:tiny',
      f'--workdir={tmp_path / "run"}',
      '--config.rollout.promts_per_step=4',
    ],
    cwd=_ROOT,
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert result.returncode != 0
  assert 'prompts_per_step' in result.stderr
  assert not (tmp_path / 'run').exists()
