"""launch/plan.py as a person runs it, on simulated devices."""

import json
import os
import pathlib
import subprocess
import sys

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _plan(*arguments):
  environment = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
  return subprocess.run(
    [sys.executable, _ROOT / 'launch/plan.py', *arguments],
    env=environment,
    capture_output=True,
    text=True,
    timeout=600,
  )


def test_plans_a_run_that_does_not_fit(tmp_path):
  numbers = tmp_path / 'plan.json'
  result = _plan(
    f'--config={_ROOT}/configs/ppo_scaling.py:tiny',
    '--target=cpu:4',
    '--config.mesh.data=2',
    '--config.mesh.fsdp=2',
    '--config.model.architecture.num_layers=1',
    '--config.algorithm.advantages=grpo',
    '--config.algorithm.lam=1.0',
    '--config.rollout.samples_per_prompt=2',
    '--config.rollout.prompts_per_step=8',
    '--config.memory_limit_bytes=1000',
    f'--json={numbers}',
  )
  assert result.returncode == 2, result.stderr
  for part in (
    'ppo_scaling, stage ppo, on cpu:4: 4 devices, mesh data=2 fsdp=2',
    '16 sequences of 40 tokens a step, 2 updates, 64 tokens per micro-batch',
    'Verdict: DOES NOT FIT: ',
    '  - mesh.fsdp=4 mesh.data=1: about ',
    'No time: simulated devices share',
  ):
    assert part in result.stdout, result.stdout
  values = json.loads(numbers.read_text())
  assert values['mesh']['data'] == values['mesh']['fsdp'] == 2
  assert not values['fits'] and values['limit_bytes'] == 1000
  programs = {program['name']: program for program in values['programs']}
  assert set(programs) == {
    'relayout', 'less', 'empty', 'prefill', 'insert', 'advance', 'reference',
    'log-probs', 'actor/zeros', 'actor/accumulate', 'actor/apply',
  }  # fmt: skip
  # Two updates of 8 sequences, a row each; 4 rows in a micro-batch.
  assert programs['actor/accumulate']['calls'] == 4
  assert programs['reference']['calls'] == 4
  assert programs['actor/apply']['calls'] == 2
  # What is stored in two parts is brought together, and its gradient divided.
  kinds = {
    (x['kind'], x['axes']) for x in programs['actor/accumulate']['traffic']
  }
  assert ('all-gather', 'fsdp') in kinds
  assert any('data' in axes for _, axes in kinds)


def test_says_what_is_wrong():
  config = f'--config={_ROOT}/configs/ppo_scaling.py:tiny'
  result = _plan(config, '--target=b200:8')
  assert result.returncode == 1
  assert "error: target 'b200:8': no chip 'b200'" in result.stderr
