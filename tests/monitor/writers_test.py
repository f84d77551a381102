"""The files of a run: strict JSON, whole lines, resume, one writer."""

import dataclasses
import json
import math
import sys
import time
import types

import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from rlhf_jax.monitor import writers


def test_metrics_lines_have_stage_step_time_then_the_values(tmp_path):
  with writers.RunWriter(tmp_path) as writer:
    writer.metrics('ppo', 3, {'critic/score/mean': 0.7})
    # Readable while the run writes: no close, no flush.
    (line,) = writers.read(tmp_path / 'metrics.jsonl')
  assert list(line) == ['stage', 'step', 'time', 'critic/score/mean']
  assert (line['stage'], line['step']) == ('ppo', 3)
  assert line['critic/score/mean'] == 0.7
  assert abs(line['time'] - time.time()) < 60


def test_numbers_of_every_kind_become_strict_json(tmp_path):
  values = {
    'nan': math.nan,
    'inf': -math.inf,
    'numpy': np.float32(0.5),
    'numpy_nan': np.float32('nan'),
    'int': np.int64(3),
    'bool': np.bool_(True),
    'device': jnp.float32(0.25),
    'bfloat16': jnp.bfloat16(1.5),
    'one': np.array([2.0]),
  }
  with writers.RunWriter(tmp_path) as writer:
    writer.metrics('s', np.int32(1), values)

  def refuse(constant):
    raise AssertionError(f'{constant} is not JSON')

  text = (tmp_path / 'metrics.jsonl').read_text()
  line = json.loads(text, parse_constant=refuse)
  assert [line[k] for k in values] == [
    None, None, 0.5, None, 3, True, 0.25, 1.5, [2.0],
  ]  # fmt: skip
  assert line['bool'] is True and isinstance(line['int'], int)


def test_plain_takes_configs_structs_and_sets():
  @dataclasses.dataclass(frozen=True)
  class Point:
    x: float
    y: tuple

  config = ml_collections.ConfigDict({'a': {'b': (1, 2)}, 'c': None})
  assert writers.plain(config) == {'a': {'b': [1, 2]}, 'c': None}
  assert writers.plain(Point(math.inf, (1,))) == {'x': None, 'y': [1]}
  assert writers.plain(frozenset({3, 1})) == [1, 3]
  assert writers.plain({1: np.arange(2)}) == {'1': [0, 1]}
  assert writers.plain(Point) == str(Point)


def test_samples_and_events_keep_text_as_it_is(tmp_path):
  with writers.RunWriter(tmp_path) as writer:
    writer.samples([{'prompt': 'a\n"é"', 'response': 'half \ud83d'}])
    writer.event('skip', 'gradient not finite', step=4, norm=math.nan)
  (sample,) = writers.read(tmp_path / 'samples.jsonl')
  assert sample == {'prompt': 'a\n"é"', 'response': 'half ?'}
  (event,) = writers.read(tmp_path / 'events.jsonl')
  assert event.pop('time') > 0
  assert event == {
    'kind': 'skip', 'message': 'gradient not finite', 'step': 4, 'norm': None,
  }  # fmt: skip


def test_a_resumed_run_appends_and_drops_a_torn_line(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  with writers.RunWriter(tmp_path) as writer:
    writer.metrics('s', 1, {'x': 1.0})
  # Killed in the middle of a line that is longer than one read block.
  with path.open('a') as file:
    file.write('{"stage": "' + 'x' * 10000)
  with writers.RunWriter(tmp_path) as writer:
    writer.metrics('s', 2, {'x': 2.0})
  assert [json.loads(x)['step'] for x in path.read_text().splitlines()] == [
    1, 2,
  ]  # fmt: skip


def test_a_file_that_is_only_a_torn_line_becomes_empty(tmp_path):
  (tmp_path / 'events.jsonl').write_text('{"ki')
  with writers.RunWriter(tmp_path) as writer:
    writer.event('resume', 'again')
  assert len((tmp_path / 'events.jsonl').read_text().splitlines()) == 1


def test_read_skips_what_is_not_an_object(tmp_path):
  (tmp_path / 'x').write_text('{"a": 1}\n\n[1]\nnonsense\n{"a": 2}\n{"a')
  assert writers.read(tmp_path / 'x') == [{'a': 1}, {'a': 2}]
  assert writers.read(tmp_path / 'absent') == []


def test_last_of_each_step_takes_the_later_attempt():
  # 1 2 3, resumed from the checkpoint of step 1: 2 and 3 ran again. The value
  # `old` of the abandoned step 3 must not survive in the new one.
  lines = [
    {'step': 1, 'x': 1},
    {'step': 2, 'x': 2},
    {'step': 3, 'x': 3, 'old': True},
    {'step': 2, 'x': 20},
    {'step': 2, 'val': 7},  # the evaluation of the same step: merged
    {'step': 3, 'x': 30},
    {'step': 10, 'x': 100},
  ]
  assert writers.last_of_each_step(lines) == [
    {'step': 1, 'x': 1},
    {'step': 2, 'x': 20, 'val': 7},
    {'step': 3, 'x': 30},
    {'step': 10, 'x': 100},
  ]


def test_only_the_primary_process_writes(tmp_path):
  workdir = tmp_path / 'run'
  with writers.RunWriter(workdir, primary=False, tensorboard=True) as writer:
    writer.metrics('s', 1, {'x': 1.0})
    writer.samples([{'prompt': 'p'}])
    writer.event('k', 'm')
    writer.config({'a': 1})
    writer.summary({'a': 1})
  assert not workdir.exists()


def test_summary_and_config_are_replaced_whole(tmp_path):
  with writers.RunWriter(tmp_path) as writer:
    writer.config({'a': 1})
    writer.summary({'wall_time_s': 1.5, 'best': math.nan})
    writer.summary({'wall_time_s': 2.5})
  assert json.loads((tmp_path / 'config.json').read_text()) == {'a': 1}
  assert json.loads((tmp_path / 'summary.json').read_text()) == {
    'wall_time_s': 2.5
  }
  # No temporary file is left.
  names = sorted(x.name for x in tmp_path.iterdir())
  assert names == ['config.json', 'summary.json']


def test_reserved_names_are_refused(tmp_path):
  with writers.RunWriter(tmp_path) as writer:
    with pytest.raises(ValueError, match="'step'.*rename"):
      writer.metrics('s', 1, {'step': 2.0})
    with pytest.raises(ValueError, match="'time'"):
      writer.event('k', 'm', time=1)


def test_a_failing_disk_is_logged_once_and_training_goes_on(tmp_path, caplog):
  # A folder stands where the file should be: opening it fails.
  (tmp_path / 'metrics.jsonl').mkdir()
  with writers.RunWriter(tmp_path) as writer:
    writer.metrics('s', 1, {'x': 1.0})
    writer.metrics('s', 2, {'x': 1.0})
    writer.event('k', 'still written')
  assert len(writers.read(tmp_path / 'events.jsonl')) == 1
  errors = [r for r in caplog.records if 'metrics.jsonl' in r.getMessage()]
  assert len(errors) == 1


def test_optional_writers_say_how_to_install(tmp_path, monkeypatch):
  # None in sys.modules makes the import raise ImportError.
  monkeypatch.setitem(sys.modules, 'tensorboardX', None)
  monkeypatch.setitem(sys.modules, 'wandb', None)
  with pytest.raises(ImportError, match=r'rlhf_jax\[tensorboard\]'):
    writers.RunWriter(tmp_path, tensorboard=True)
  with pytest.raises(ImportError, match=r'rlhf_jax\[wandb\]'):
    writers.RunWriter(tmp_path, wandb={'project': 'p'})


def test_wandb_gets_the_same_names_and_one_id_over_resumes(
  tmp_path, monkeypatch
):
  calls = []

  class Run:
    config = {}
    summary = {}

    def log(self, values, step):
      calls.append((step, values))
      if step == 2:
        raise ConnectionError('down')

    def finish(self):
      calls.append('finish')

  ids = []

  def init(**kwargs):
    ids.append((kwargs['id'], kwargs['project'], kwargs['resume']))
    return Run()

  fake = types.SimpleNamespace(init=init)
  monkeypatch.setitem(sys.modules, 'wandb', fake)
  for _ in range(2):
    with writers.RunWriter(tmp_path, wandb={'project': 'p'}) as writer:
      writer.metrics('ppo', 1, {'x': 1.0, 'y': math.nan})
      writer.metrics('ppo', 2, {'x': 1.0})  # The dashboard is down: no matter.
      writer.summary({'a': 1})
  assert ids[0] == ids[1] and ids[0][1:] == ('p', 'allow')
  assert calls[0] == (1, {'x': 1.0, 'stage': 'ppo'})
  assert calls[2] == 'finish'
  assert len(writers.read(tmp_path / 'metrics.jsonl')) == 4


def test_tensorboard_writes_scalars(tmp_path):
  pytest.importorskip('tensorboardX', reason='tensorboardX is not installed')
  with writers.RunWriter(tmp_path, tensorboard=True) as writer:
    writer.metrics('ppo', 1, {'critic/score/mean': 0.7, 'not/finite': math.nan})
  (file,) = (tmp_path / 'tensorboard').iterdir()
  data = file.read_bytes()
  assert b'critic/score/mean' in data and b'not/finite' not in data
