"""Memory of phases, the micro-batch that fits, and what is refused."""

import json
import logging
import re
import types as py_types

import jax
from ml_collections import ConfigDict
import numpy as np
import pytest

from configs import ppo_scaling
from launch import train
from rlhf_jax.models import spec
from rlhf_jax.planner import compilation
from rlhf_jax.planner import fit
from rlhf_jax.planner import programs as programs_lib
from rlhf_jax.trainers import ppo
from rlhf_jax.trainers import setup as setup_lib
from rlhf_jax.trainers import sft
from rlhf_jax.trainers import state as state_lib

_SFT = (('warmup', 'sft', {}),)


def _config(stages=None, **changes) -> ConfigDict:
  config = ppo_scaling.get_config('tiny')
  config.update_from_flattened_dict({'mesh.devices': 1} | changes)
  if stages is not None:
    with config.unlocked():
      config.stages = stages
  return config


def _setup(stages=None, **changes) -> setup_lib.Setup:
  return setup_lib.stages(_config(stages, **changes), ('ppo', 'sft'))[-1]


@pytest.fixture(scope='module')
def supervised():
  """A supervised stage on eight devices, compiled."""
  setup = _setup(_SFT, **{'mesh.devices': 8})
  parts = sft.parts(setup)
  return setup, compilation.compile_all(programs_lib.of_stage(setup, parts))


def test_what_stays_is_what_the_weight_table_says(supervised):
  setup, done = supervised
  (phase,) = compilation.phases(done)
  table = state_lib.specs_of(setup.model, 'actor')
  # What has a width of 32 is split over fsdp=8; only norms' scalars are not.
  parameters = spec.count(table) * 4 // 8
  assert phase.held['actor parameters'] == parameters
  # Two moments, and two counters of 4 bytes (of Adam and of its schedule).
  assert phase.held['actor optimizer'] == 2 * parameters + 8
  assert phase.held['gradients'] == parameters
  assert phase.program == 'actor/accumulate'
  stats = done.compiled[phase.program].memory_analysis()
  assert phase.temporaries == stats.temp_size_in_bytes > 0
  # A batch: one row of 64 tokens a device; 5 arrays of integers and numbers,
  # a mask, 6 of numbers per token.
  batch = 64 * (5 * 4 + 1 + 6 * 4)
  assert phase.passing - phase.temporaries == batch
  assert phase.peak == 4 * parameters + 8 + phase.passing


def test_the_largest_microbatch_that_fits(monkeypatch):
  """Chosen: fits.  The next larger: does not."""
  setup = _setup(
    _SFT,
    **{
      'model.architecture.num_layers': 1,
      'training.tokens_per_microbatch': 'auto',
      'training.sequences_per_minibatch': 16,
    },
  )
  parts, known, original = sft.parts(setup), {}, compilation.compile_all

  def compile_once(plan, done=None, note=None):
    rows = plan.programs[1].calls  # micro-batches of a mini-batch
    if rows not in known:
      known[rows] = original(plan, done)
    return known[rows]

  monkeypatch.setattr(compilation, 'compile_all', compile_once)

  def peak(rows):
    one = fit.with_microbatch(setup, rows * 64)
    done = compilation.compile_all(programs_lib.of_stage(one, parts))
    return max(phase.peak for phase in compilation.phases(done))

  most = (peak(4) + peak(8)) // 2
  chosen, done = fit.largest_that_fits(setup, parts, most)
  assert chosen.numbers.rows_per_microbatch == 4
  assert chosen.numbers.tokens_per_microbatch == 4 * 64
  assert (
    max(x.peak for x in compilation.phases(done)) == peak(4) <= most < peak(8)
  )
  # With room for anything it stops at what a mini-batch holds: 16 sequences of
  # at most 40 tokens, each in a row of 64.
  chosen, _ = fit.largest_that_fits(setup, parts, 10**12)
  assert chosen.numbers.rows_per_microbatch == 16
  with pytest.raises(compilation.DoesNotFit, match='does not fit'):
    fit.largest_that_fits(setup, parts, peak(1) // 100)
  with pytest.raises(ValueError, match='set memory_limit_bytes, or a number'):
    fit.largest_that_fits(setup, parts, None)


def test_refuses_with_numbers_and_three_remedies():
  setup = _setup(**{'training.tokens_per_microbatch': 128})
  held = {
    'actor parameters': 2 * 2**30,
    'actor optimizer': 4 * 2**30,
    'reference': 2**30,
  }
  small = compilation.Phase('gen', held, 0, 0, 'advance')
  worst = compilation.Phase(
    'update_actor', held, 3 * 2**30, 2 * 2**30, 'actor/accumulate'
  )
  fit.check(setup, [small, worst], 10 * 2**30)  # just fits
  fit.check(setup, [small, worst], None)  # no limit
  with pytest.raises(compilation.DoesNotFit) as error:
    fit.check(setup, [small, worst], 10 * 2**30 - 1)
  text = str(error.value)
  for part in (
    "stage 'ppo' does not fit: phase 'update_actor' needs 10,737,418,240 bytes",
    'which has 10,737,418,239',
    'actor optimizer 4.00 GiB',
    '3.00 GiB for actor/accumulate',
    '- training.tokens_per_microbatch=64: about 1.50 GiB less',
    '- model.remat=',
  ):
    assert part in text, text
  assert text.count('\n  - ') == 3
  cache = compilation.Phase('gen', held | {'cache': 8 * 2**30}, 0, 0, 'advance')
  assert fit.remedies(setup, cache)[0].startswith(
    'rollout.slots=8: about 4.00 GiB less'
  )


def test_limit():
  device = lambda stats, process=0: py_types.SimpleNamespace(
    memory_stats=lambda: stats, process_index=process
  )
  mesh = lambda *devices: py_types.SimpleNamespace(devices=np.array(devices))
  config = ConfigDict(dict(memory_limit_bytes=0))
  has = lambda n: device({'bytes_limit': n})
  assert fit.limit(config, mesh(has(7), has(5))) == 5
  # Those of other processes cannot be asked; a CPU says nothing.
  assert fit.limit(config, mesh(has(7), device(None, process=1))) == 7
  assert fit.limit(config, mesh(device(None))) is None
  config.memory_limit_bytes = 3
  assert fit.limit(config, mesh(has(7))) == 3


class _Compiled(logging.Handler):
  """Names of the functions that JAX compiles."""

  def __init__(self):
    super().__init__()
    self.names = []

  def emit(self, record):
    found = re.search(r'Finished XLA compilation of jit\((.*?)\)',
                      record.getMessage())  # fmt: skip
    if found:
      self.names.append(found.group(1))


def test_a_run_finds_what_was_compiled_ahead(tmp_path, monkeypatch):
  compiled, marks, original = _Compiled(), [], fit.ahead

  def ahead(setup, run, parts):
    before = len(compiled.names)
    result = original(setup, run, parts)
    marks.append((before, len(compiled.names), result))
    return result

  monkeypatch.setattr(fit, 'ahead', ahead)
  config = _config(
    **{
      'model.architecture.num_layers': 1,
      'algorithm.advantages': 'grpo',
      'algorithm.lam': 1.0,
      'rollout.samples_per_prompt': 2,
      'rollout.prompts_per_step': 8,
      'algorithm.kl_loss.coef': 0.0,
      'memory_limit_bytes': 10**12,
      'steps': 1,
    }
  )
  logger = logging.getLogger('jax')
  logger.addHandler(compiled)
  monkeypatch.setattr(logger, 'propagate', False)
  with jax.log_compiles():
    train.train(config, tmp_path, 'never')
  logger.removeHandler(compiled)
  ((before, after, setup),) = marks
  ahead_names, loop_names = compiled.names[before:after], compiled.names[after:]
  for name in ('accumulate', 'apply', 'zeros_like', 'insert', 'advance'):
    assert name in ahead_names, (name, ahead_names)
    assert name not in loop_names, (name, loop_names)
  lines = (tmp_path / 'events.jsonl').read_text().splitlines()
  (event,) = (x for x in map(json.loads, lines) if x['kind'] == 'memory')
  assert event['tokens_per_microbatch'] == 64
  assert event['limit_bytes'] == 10**12
  assert set(event['peak_bytes']) == {
    'relayout', 'gen', 'old_log_prob', 'update_actor'
  }  # fmt: skip


def test_a_resumed_stage_keeps_its_microbatch(monkeypatch):
  """The host state decides, not the limit, which would allow more or less."""
  setup = _setup(
    **{'training.tokens_per_microbatch': 'auto', 'memory_limit_bytes': 1000}
  )
  run = py_types.SimpleNamespace(
    host=state_lib.HostState(seed=0, tokens_per_microbatch=128),
    restored_in=lambda stage: 7,
    console=py_types.SimpleNamespace(note=print),
    writer=py_types.SimpleNamespace(event=lambda *_, **__: None),
  )
  done = compilation.Compilation(programs_lib.Plan([], {}, {}), {}, {}, {})
  phase = compilation.Phase('gen', {}, 900, 0, 'advance')
  monkeypatch.setattr(compilation, 'compile_all', lambda plan: done)
  monkeypatch.setattr(compilation, 'phases', lambda done: [phase])
  resumed = fit.ahead(setup, run, ppo.parts(setup))
  assert resumed.numbers.tokens_per_microbatch == 128
  assert resumed.numbers.rows_per_microbatch == 2


@pytest.mark.parametrize(
  'peaks, most, rows',
  [
    # Two compilations say 2, for memory grows more slowly from there.
    ({1: 10, 2: 20, 4: 24, 8: 30, 16: 50}, 35, 8),
    # They say 8, for it grows faster.
    ({1: 10, 2: 11, 4: 30, 8: 70, 16: 150}, 20, 2),
    # A compiler that refuses.
    ({1: 10, 2: 11, 4: 12, 8: None, 16: None}, 14, 4),
    ({1: 10, 2: 25, 4: 50, 8: 99, 16: 99}, 20, 1),
  ],
)
def test_the_search_where_memory_does_not_grow_in_proportion(
  peaks, most, rows, monkeypatch
):
  setup = _setup(
    _SFT,
    **{
      'training.tokens_per_microbatch': 'auto',
      'training.sequences_per_minibatch': 16,
    },
  )
  plan = programs_lib.Plan([], {}, {})
  monkeypatch.setattr(
    programs_lib, 'of_stage', lambda one, parts: one.numbers.rows_per_microbatch
  )

  def compile_all(asked, done=None, note=None):
    if peaks[asked] is None:
      raise compilation.DoesNotFit('too large')
    return compilation.Compilation(plan, {'rows': asked}, {}, {})

  monkeypatch.setattr(compilation, 'compile_all', compile_all)
  monkeypatch.setattr(
    compilation,
    'phases',
    lambda done: [
      compilation.Phase(
        'update_actor', {}, peaks[done.compiled['rows']], 0, 'x'
      )
    ],
  )
  chosen, done = fit.largest_that_fits(setup, None, most)
  assert chosen.numbers.rows_per_microbatch == rows
  assert done.compiled['rows'] == rows
