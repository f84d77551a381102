"""Workdirs that may not be used, and the totals of a run."""

import json

import numpy as np
import pytest

from rlhf_jax.monitor import writers
from rlhf_jax.trainers import run as run_lib
from rlhf_jax.trainers import state as state_lib
from rlhf_jax.trainers import workdir as workdir_lib

_CONFIG = {
  'seed': 0,
  'steps': 5,
  'model': {'path': 'a'},
  'checkpoint': {'every': 1},
}


def _make(workdir, *, config=True, checkpoint=None, summary=None):
  workdir.mkdir(exist_ok=True)
  if config:
    (workdir / writers.CONFIG).write_text(json.dumps(_CONFIG))
  if checkpoint:
    (workdir / 'checkpoints' / checkpoint).mkdir(parents=True)
  if summary:
    line = dict(
      exit_reason=summary,
      step=5,
      steps=5,
      wall_time_s=1.0,
      tokens=9,
      best={},
      last={},
    )
    (workdir / writers.SUMMARY).write_text(json.dumps(line))
  return workdir


@pytest.mark.parametrize('resume', ['auto', 'never'])
def test_an_empty_or_absent_workdir_begins(tmp_path, resume):
  workdir_lib.check_workdir(tmp_path, _CONFIG, resume)
  workdir_lib.check_workdir(tmp_path / 'absent', _CONFIG, resume)
  assert not (tmp_path / 'absent').exists()  # a check writes nothing


@pytest.mark.parametrize('resume', ['auto', 'must'])
def test_the_same_config_goes_on(tmp_path, resume):
  _make(tmp_path, checkpoint='3')
  workdir_lib.check_workdir(tmp_path, _CONFIG, resume)


@pytest.mark.parametrize(
  'made, resume, message',
  [
    ({}, 'always', "--resume=always is not one of .*'auto'"),
    (dict(checkpoint='3'), 'never', 'is not empty: .*name another workdir or'),
    ({}, 'must', 'holds no checkpoint; use --resume=auto to start'),
    # A save that was killed, and the reference of a stage, are none.
    (dict(checkpoint='3.orbax-tmp-1'), 'must', 'holds no checkpoint'),
    (dict(checkpoint='reference-ppo'), 'must', 'holds no checkpoint'),
    (
      dict(config=False, checkpoint='3'),
      'auto',
      'not the workdir of a run .no config.json.*name another workdir',
    ),
  ],
)
def test_check_workdir_refuses(tmp_path, made, resume, message):
  _make(tmp_path, **made)
  with pytest.raises(ValueError, match=message):
    workdir_lib.check_workdir(tmp_path, _CONFIG, resume)


def test_must_with_an_absent_workdir(tmp_path):
  with pytest.raises(ValueError, match='holds no checkpoint'):
    workdir_lib.check_workdir(tmp_path / 'absent', _CONFIG, 'must')


def test_a_file_is_no_workdir(tmp_path):
  path = tmp_path / 'file'
  path.write_text('')
  with pytest.raises(ValueError, match='is a file, expected a folder'):
    workdir_lib.check_workdir(path, _CONFIG, 'auto')


@pytest.mark.parametrize('left', ['checkpoint', 'metrics'])
def test_another_config_is_shown_as_a_difference(tmp_path, left):
  _make(tmp_path, checkpoint='3' if left == 'checkpoint' else None)
  if left == 'metrics':
    (tmp_path / writers.METRICS).write_text('{"step": 1}\n')
  other = _CONFIG | {'steps': 6, 'model': {'path': 'b'}, 'new': 1}
  del other['seed']
  with pytest.raises(ValueError, match='holds another run') as error:
    workdir_lib.check_workdir(tmp_path, other, 'auto')
  lines = [line.strip() for line in str(error.value).splitlines()]
  assert lines[1:-1] == [
    'model.path: a -> b',
    'new: (absent) -> 1',
    'seed: 0 -> (absent)',
    'steps: 5 -> 6',
  ]
  assert 'name another workdir' in lines[-1]


def test_an_attempt_that_left_nothing_may_be_mended(tmp_path):
  _make(tmp_path)
  (tmp_path / writers.METRICS).write_text('')
  workdir_lib.check_workdir(tmp_path, _CONFIG | {'steps': 6}, 'auto')


def test_harmless_keys_may_change(tmp_path):
  _make(tmp_path, checkpoint='3')
  other = _CONFIG | {'checkpoint': {'every': 9}, 'export': False, 'wandb': 'x'}
  workdir_lib.check_workdir(tmp_path, other, 'auto')
  # A section is compared key by key: nothing else slips through.
  assert workdir_lib.difference({'steps': 1}, {'steps': 1.5}) == [
    'steps: 1 -> 1.5'
  ]


def test_only_a_finished_run_is_shown(tmp_path, capsys):
  assert not run_lib.show_finished(tmp_path)
  _make(tmp_path, summary='interrupted')
  assert not run_lib.show_finished(tmp_path)
  assert capsys.readouterr().out == ''
  _make(tmp_path, summary='finished')
  assert run_lib.show_finished(tmp_path)
  assert 'finished' in capsys.readouterr().out


def test_running_scores_are_those_of_all_steps_together():
  host = state_lib.HostState(seed=0)
  parts = ([1.0, 2.0, np.nan], [], [np.inf], [4.0, 8.0, 0.0])
  for part in parts:
    run_lib.add_scores(host, np.array(part, np.float32))
  everything = np.array([1, 2, 4, 8, 0], float)
  assert host.scores['count'] == 5
  np.testing.assert_allclose(host.scores['mean'], everything.mean())
  np.testing.assert_allclose(
    host.scores['m2'], ((everything - everything.mean()) ** 2).sum()
  )


def test_host_state_survives_json():
  host = state_lib.HostState(seed=3, step=7, stage='ppo', cursor=12)
  host.kl_reward = host.kl_reward.replace(coef=0.25, kind='adaptive')
  host.best = dict(name='val/a/b', value=0.5, step=6)
  text = json.dumps(host.to_json())
  assert state_lib.HostState.from_json(json.loads(text)) == host


def test_timings():
  timings = run_lib.Timings()
  with timings('gen'):
    pass
  assert list(timings) == ['timing_s/gen']
  assert timings['timing_s/gen'] >= 0


def test_a_long_negative_divergence_raises_one_warning(tmp_path):
  notes = []
  run = run_lib.Run(
    workdir=tmp_path,
    config={},
    host=state_lib.HostState(seed=0),
    writer=writers.RunWriter(tmp_path),
    console=type('Console', (), {'note': staticmethod(notes.append)}),
    checkpoints=None,
    restored_step=None,
    started=0.0,
  )
  watch = lambda value, times: [
    run.watch_kl({'kl/k1': value}) for _ in range(times)
  ]
  watch(-0.1, 9)
  watch(0.1, 1)  # one that is not negative begins anew
  watch(-0.1, 9)
  run.watch_kl({})  # no reference in this step: nothing is known
  assert not notes
  watch(-0.1, 5)
  assert len(notes) == 1
  (event,) = writers.read(tmp_path / writers.EVENTS)
  assert event['kind'] == 'warning' and 'negative for 10' in event['message']
