"""Progress on terminals and in logs."""

import io
import math
import re

import pytest

from rlhf_jax.monitor import console


class Clock:
  """A clock that the test moves."""

  now = 100.0

  def monotonic(self):
    return self.now


@pytest.fixture
def clock(monkeypatch):
  clock = Clock()
  monkeypatch.setattr(console, 'time', clock)
  return clock


def test_a_log_gets_plain_lines_without_control_codes(clock):
  out = io.StringIO()
  with console.Console(3, ['sft', 'ppo'], file=out) as shown:
    shown.start_stage('ppo', 3)
    clock.now += 30  # compiles
    shown.step(11, {'critic/score/mean': 0.25, 'actor/lr': 1e-5})
    clock.now += 4
    shown.step(12, {'critic/score/mean': 0.5})  # within 5 s: no line
    clock.now += 4
    shown.step(13, {'critic/score/mean': 0.75, 'val/a/exact_match': 0.9})
    shown.samples([{'prompt': '1+2=', 'response': '3', 'score': 1.0}])
    shown.note('a note')
  assert out.getvalue().splitlines() == [
    'stage ppo (2 of 2): 3 steps',
    '[ppo 1/3]  step 11/3  score 0.250',
    '[ppo 3/3]  step 13/3  score 0.750  val a exact_match 0.900  eta 0:00',
    '  sample [1.000] 1+2= => 3',
    'a note',
  ]


def test_eta_is_the_median_without_the_compiling_step(clock):
  shown = console.Console(10, ['s'], file=io.StringIO())
  shown.start_stage('s', 10)
  assert shown.eta_s() is None
  for seconds in (60, 2, 100, 3):
    clock.now += seconds
    shown.step(1, {})
  # 6 steps left, median of 2, 100, 3 is 3; the first step is left out.
  assert shown.eta_s() == 18


def test_a_resumed_stage_counts_what_is_done(clock):
  out = io.StringIO()
  shown = console.Console(10, ['s'], file=out)
  shown.start_stage('s', 10, done=8)
  shown.step(9, {})
  clock.now += 1
  shown.step(10, {})
  assert '[s 10/10]  step 10/10' in out.getvalue()
  assert shown.eta_s() == 0


def test_a_terminal_shows_bar_table_and_samples_and_escapes_text(clock):
  out = io.StringIO()
  with console.Console(4, ['sft', 'ppo'], file=out, terminal=True) as shown:
    shown.start_stage('ppo', 4)
    for step, score in enumerate((0.1, 0.2, 0.4), 1):
      clock.now += 60
      shown.step(step, {'critic/score/mean': score, 'kl/reference': 0.01})
    evil = '\x1b[2J\x07[bold]x'
    shown.samples([{'prompt': 'p' * 30, 'response': evil, 'rewards': {'e': 1}}])
  text = out.getvalue()
  assert '3/4' in text and 'eta 1:00' in text and 'trend' in text
  assert 'score' in text and '0.100' in text and '0.400' in text
  # The model's escape sequence and markup are shown, not obeyed.
  assert '\x1b[2J' not in text and '\\x1b[2J\\x07[bold]x' in text
  assert 'e 1' in text
  # The cursor that was hidden is shown again.
  assert text.rindex('\x1b[?25h') > text.rindex('\x1b[?25l')


def test_the_terminal_is_given_back_on_an_error():
  out = io.StringIO()
  with pytest.raises(ZeroDivisionError):
    with console.Console(1, ['s'], file=out, terminal=True) as shown:
      shown.start_stage('s', 1)
      raise ZeroDivisionError
  assert out.getvalue().count('\x1b[?25h') == 1


def test_finish_prints_summary_and_commands_that_can_be_copied():
  out = io.StringIO()
  command = 'python launch/train.py --config=' + 'x' * 200
  shown = console.Console(1, ['s'], file=out)
  shown.finish({'wall_time_s': 123.4, 'reason': 'done', 'n': None}, [command])
  lines = out.getvalue().splitlines()
  assert f'  {command}' in lines
  assert any(re.fullmatch(r'wall_time_s +123', x) for x in lines)


def test_without_a_stage_there_is_no_bar():
  out = io.StringIO()
  with console.Console(0, [], file=out, terminal=True) as shown:
    shown.finish({'exit_reason': 'finished'})
  assert out.getvalue().split() == ['exit_reason', 'finished']


def test_other_processes_show_nothing():
  out = io.StringIO()
  with console.Console(1, ['s'], file=out, terminal=True, enabled=False) as c:
    c.start_stage('s', 1)
    c.step(1, {'critic/score/mean': 1.0})
    c.evaluated({'val/a': 1.0})
    c.samples([{}])
    c.finish({'a': 1}, ['b'])
  assert out.getvalue() == ''


def test_sparkline():
  assert console.sparkline([0.0, 1.0, 7.0]) == '▁▂█'
  assert console.sparkline([2.0, 2.0]) == '▄▄'


def test_what_is_not_finite_is_not_shown():
  out = io.StringIO()
  shown = console.Console(1, ['s'], file=out)
  shown.start_stage('s', 1)
  shown.step(1, {'critic/score/mean': math.nan, 'kl/reference': None})
  assert out.getvalue().splitlines()[1] == '[s 1/1]  step 1/1'


@pytest.mark.parametrize(
  'value, text',
  [
    (0.0, '0.000'),
    (1e-5, '1.00e-05'),
    (12.34, '12.3'),
    (5123.4, '5,123'),
    (3, '3'),
    (None, '-'),
    (True, 'True'),
  ],
)
def test_numbers_are_short(value, text):
  assert console._format(value) == text
