"""Live progress: a bar with ETA, the metrics that matter, a few samples.

On a terminal the display is redrawn in place. Elsewhere (a log file, a batch
job) it is one compact line now and then, without control codes.
"""

from collections.abc import Mapping, Sequence
import statistics
import sys
import time
from typing import Any, IO

from rich import console as rich_console
from rich import live
from rich import progress_bar
from rich import table as rich_table
from rich import text as rich_text

# Points of the small curve beside each metric.
_TREND = 16
_BLOCKS = '▁▂▃▄▅▆▇█'


class Console:
  """Shows a run while it goes. A class because it owns the terminal.

  Use it as a context manager, so that an error gives the terminal back.
  """

  def __init__(
    self,
    total_steps: int,
    stage_names: Sequence[str],
    *,
    file: IO[str] | None = None,
    terminal: bool | None = None,
    enabled: bool = True,
    plain_interval_s: float = 5.0,
  ):
    """Prepares the display; it begins with the first stage.

    Args:
      total_steps: steps of all stages together.
      stage_names: names of the stages in order.
      file: where to write, standard output by default.
      terminal: whether to redraw in place; None asks the file.
      enabled: False shows nothing (every process but the first).
      plain_interval_s: without a terminal, the least seconds between two step
        lines; first and last steps of a stage and evaluations always show.
    """
    self._total_steps = total_steps
    self._stage_names = list(stage_names)
    self._console = rich_console.Console(
      file=file or sys.stdout, force_terminal=terminal, highlight=False
    )
    self._enabled = enabled
    self._terminal = enabled and self._console.is_terminal
    self._plain_interval_s = plain_interval_s
    self._utf8 = 'utf' in (self._console.encoding or '').lower()
    self._stage = ''
    self._stage_step = self._stage_steps = self._step = 0
    self._started = self._last_step = time.monotonic()
    self._last_line = float('-inf')
    self._durations: list[float] = []  # seconds of each step of this stage
    self._history: dict[str, list[float]] = {}  # by label, of this stage
    self._samples: list[Mapping[str, Any]] = []
    self._live = None

  def __enter__(self) -> 'Console':
    return self

  def __exit__(self, *unused_exception: Any) -> None:
    self.close()

  def start_stage(self, name: str, steps: int, *, done: int = 0) -> None:
    """Begins a stage of `steps` steps, of which a resumed run has `done`."""
    self._stage, self._stage_steps, self._stage_step = name, steps, done
    self._durations, self._history, self._samples = [], {}, []
    self._last_step = time.monotonic()
    if self._terminal and self._live is None:
      self._live = live.Live(
        console=self._console,
        get_renderable=self._render,
        refresh_per_second=2,  # enough for a clock; cores are for training
        vertical_overflow='ellipsis',
      )
      self._live.start()
    number = ''
    if name in self._stage_names and len(self._stage_names) > 1:
      index = self._stage_names.index(name) + 1
      number = f' ({index} of {len(self._stage_names)})'
    self.note(f'stage {name}{number}: {steps} steps')

  def step(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Shows a finished step.

    Args:
      step: global step, counted from 1.
      metrics: numbers by name; the table shows those in `METRICS` and all that
        begin with 'val/'.
    """
    now = time.monotonic()
    self._durations.append(now - self._last_step)
    self._last_step = now
    self._step = step
    self._stage_step += 1
    self._record(metrics)
    if self._enabled and not self._terminal:
      edge = self._stage_step in (1, self._stage_steps)
      validated = any(name.startswith('val/') for name in metrics)
      late = now - self._last_line >= self._plain_interval_s
      if edge or validated or late:
        self._last_line = now
        self._console.out(self._plain_line(metrics), highlight=False)

  def evaluated(self, metrics: Mapping[str, Any]) -> None:
    """Shows an evaluation that belongs to no new step (before the first)."""
    self._record(metrics)
    if self._enabled and not self._terminal:
      shown = '  '.join(_pairs(metrics))
      self._console.out(f'[{self._stage} eval] {shown}', highlight=False)

  def samples(self, rows: Sequence[Mapping[str, Any]], limit: int = 3) -> None:
    """Shows samples (prompt, response, score or rewards), at most `limit`."""
    self._samples = list(rows[:limit])
    if self._enabled and not self._terminal:
      for row in self._samples:
        line = f'  sample {_sample_line(row)}'
        self._console.out(line, highlight=False)

  def note(self, text: str) -> None:
    """Prints a line that stays, above the display."""
    if self._enabled:
      self._console.print(rich_text.Text(printable(text)))

  def finish(
    self, summary: Mapping[str, Any], next_commands: Sequence[str] = ()
  ) -> None:
    """Ends the display; prints the summary and the commands to try next."""
    self.close()
    if not self._enabled:
      return
    self._console.print()
    for name, value in summary.items():
      self._console.out(f'{name:<44} {_format(value)}', highlight=False)
    if next_commands:
      self._console.print()
      self._console.print('Next:')
      for command in next_commands:
        # `out`: no wrapping, so that the line can be copied.
        self._console.out(f'  {command}', highlight=False)

  def close(self) -> None:
    """Gives the terminal back; closing twice is harmless."""
    if self._live is not None:
      self._live.stop()
      self._live = None

  def eta_s(self) -> float | None:
    """Returns the seconds left in this stage, None before its second step.

    Steps left times the median of the last steps. The first step, which
    compiles, is left out.
    """
    recent = self._durations[1:][-32:]
    if not recent:
      return None
    return (self._stage_steps - self._stage_step) * statistics.median(recent)

  def _record(self, metrics: Mapping[str, Any]) -> None:
    for label, value in _select(metrics):
      self._history.setdefault(label, []).append(value)

  def _plain_line(self, metrics: Mapping[str, Any]) -> str:
    eta = self.eta_s()
    parts = [
      f'[{self._stage} {self._stage_step}/{self._stage_steps}]',
      f'step {self._step}/{self._total_steps}',
      *_pairs(metrics),
    ]
    if eta is not None:
      parts.append(f'eta {_clock(eta)}')
    return '  '.join(parts)

  def _render(self) -> rich_console.Group:
    parts: list[Any] = [self._bar()]
    if self._history:
      parts.append(self._table())
    parts.extend(
      rich_text.Text(_sample_line(row), overflow='ellipsis', no_wrap=True)
      for row in self._samples
    )
    return rich_console.Group(*parts)

  def _bar(self) -> rich_table.Table:
    eta = self.eta_s()
    grid = rich_table.Table.grid(padding=(0, 1))
    grid.add_row(
      rich_text.Text(self._stage, style='bold'),
      progress_bar.ProgressBar(
        total=max(self._stage_steps, 1), completed=self._stage_step, width=24
      ),
      f'{self._stage_step}/{self._stage_steps}',
      f'step {self._step}/{self._total_steps}',
      _clock(time.monotonic() - self._started),
      f'eta {_clock(eta)}' if eta is not None else 'eta -:--',
    )
    return grid

  def _table(self) -> rich_table.Table:
    table = rich_table.Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column('metric', style='dim')
    table.add_column('first', justify='right')
    table.add_column('now', justify='right', style='bold')
    table.add_column('trend')
    for label, values in self._history.items():
      trend = sparkline(values[-_TREND:]) if self._utf8 else ''
      table.add_row(
        rich_text.Text(label), _format(values[0]), _format(values[-1]), trend
      )
    return table


def sparkline(values: Sequence[float]) -> str:
  """Returns a curve of block characters; equal values stand in the middle."""
  low, high = min(values), max(values)
  if high <= low:
    return _BLOCKS[3] * len(values)
  top = len(_BLOCKS) - 1
  return ''.join(
    _BLOCKS[round((value - low) / (high - low) * top)] for value in values
  )


def printable(text: str) -> str:
  """Returns the text with control characters escaped.

  What a model says may hold escape sequences that would move the cursor or
  clear the screen: '\\x1b[2J' becomes the six characters backslash x 1 b [ ...
  """
  return ''.join(
    c if c.isprintable() else c.encode('unicode_escape').decode() for c in text
  )


def _select(metrics: Mapping[str, Any]) -> list[tuple[str, float]]:
  """Returns (label, value) of the metrics worth showing, finite ones only."""
  names = [(label, name) for name, label in METRICS.items()]
  names += [
    (name.replace('/', ' '), name)
    for name in metrics
    if name.startswith('val/')
  ]
  chosen = []
  for label, name in names:
    if metrics.get(name) is None:
      continue
    value = float(metrics[name])
    if value - value == 0:  # neither NaN nor infinite
      chosen.append((label, value))
  return chosen


def _pairs(metrics: Mapping[str, Any]) -> list[str]:
  return [f'{label} {_format(value)}' for label, value in _select(metrics)]


def _sample_line(row: Mapping[str, Any]) -> str:
  # The tail of a long prompt is what was asked; the start of an answer tells.
  prompt = printable(str(row.get('prompt', '')))
  response = printable(str(row.get('response', '')))
  if len(prompt) > 60:
    prompt = f'...{prompt[-57:]}'
  if len(response) > 80:
    response = f'{response[:77]}...'
  score = row.get('score')
  if score is None and isinstance(row.get('rewards'), Mapping):
    score = ' '.join(f'{k} {_format(v)}' for k, v in row['rewards'].items())
  shown = '-' if score is None else _format(score)
  return f'[{shown}] {prompt} => {response}'


def _format(value: Any) -> str:
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    return '-' if value is None else printable(str(value))
  if isinstance(value, int):
    return str(value)
  size = abs(value)
  if size >= 1e7 or (0 < size < 1e-3):
    return f'{value:.2e}'
  if size >= 100:
    return f'{value:,.0f}'
  return f'{value:.3f}' if size < 10 else f'{value:.1f}'


def _clock(seconds: float) -> str:
  minutes, seconds = divmod(int(seconds + 0.5), 60)
  hours, minutes = divmod(minutes, 60)
  return (
    f'{hours}:{minutes:02}:{seconds:02}' if hours else f'{minutes}:{seconds:02}'
  )


# Metric name -> label in the table, in the order shown. Evaluations (`val/...`)
# follow by themselves.
METRICS: dict[str, str] = {
  'sft/loss': 'loss',
  'critic/score/mean': 'score',
  'kl/reference': 'kl',
  'actor/entropy': 'entropy',
  'actor/pg_clipfrac': 'clipped',
  'actor/grad_norm': 'grad norm',
  'critic/vf_explained_var': 'value ev',
  'response_length/mean': 'length',
  'response_length/clip_ratio': 'cut',
  'perf/tokens_per_second_per_device': 'tokens/s',
}
