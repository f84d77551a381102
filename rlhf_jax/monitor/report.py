"""One self-contained page about a run, from the files in its workdir.

It can be built while the run writes, mailed, and opened without a network:
curves are inline SVG, there is no script, and all text of the run is escaped.
"""

from collections.abc import Mapping, Sequence
import html
import json
import os
import pathlib
import time
from typing import Any

from rlhf_jax.monitor import charts
from rlhf_jax.monitor import writers

REPORT = 'report.html'

# Of samples: dumped steps shown, samples of each, characters of each text.
_SAMPLE_STEPS = 3
_SAMPLES_PER_STEP = 8
_MAX_TEXT = 1500
_MAX_EVENTS = 200

Lines = Sequence[Mapping[str, Any]]


def write(workdir: str | os.PathLike[str]) -> pathlib.Path:
  """Writes `report.html` into the workdir and returns its path.

  Raises:
    FileNotFoundError: if the folder holds no run.
  """
  page = build(workdir)
  path = pathlib.Path(workdir) / REPORT
  temporary = path.with_name(f'.{REPORT}.{os.getpid()}')
  temporary.write_bytes(page.encode('utf-8', 'replace'))
  os.replace(temporary, path)
  return path


def build(workdir: str | os.PathLike[str]) -> str:
  """Returns the page as text.

  Raises:
    FileNotFoundError: if the folder holds no run.
  """
  workdir = pathlib.Path(workdir)
  lines = writers.last_of_each_step(writers.read(workdir / writers.METRICS))
  config = _read_json(workdir / writers.CONFIG)
  if not lines and not config:
    raise FileNotFoundError(
      f'got {workdir}, which has no {writers.METRICS} and no {writers.CONFIG}; '
      'expected the --workdir of a run'
    )
  summary = _read_json(workdir / writers.SUMMARY)
  events = writers.read(workdir / writers.EVENTS)
  samples = writers.read(workdir / writers.SAMPLES)
  name = workdir.resolve().name
  sections = [
    ('Summary', _summary(summary, lines)),
    ('Curves', _curves(lines)),
    ('Samples', _samples(samples)),
    ('Events', _events(events, lines)),
    ('All metrics', _all_metrics(lines)),
    ('Config', _config(config)),
  ]
  body = ''.join(
    f'<section><h2>{title}</h2>{content}</section>'
    for title, content in sections
    if content
  )
  return (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f'<title>{_text(name)}</title><style>{_STYLE}</style></head><body>'
    f'<header><h1>{_text(name)}</h1>{_headline(summary, lines)}</header>'
    f'{body}</body></html>\n'
  )


def _headline(summary: Mapping[str, Any], lines: Lines) -> str:
  facts = []
  if summary:
    reason = summary.get('exit_reason', 'finished')
    facts.append(str(reason))
  else:
    facts.append('running or interrupted (no summary yet)')
  if lines:
    facts.append(f'step {lines[-1]["step"]}')
    stages = list(dict.fromkeys(str(x.get('stage', '')) for x in lines))
    facts.append(f'stages: {", ".join(stages)}')
    if lines[-1].get('time'):
      stamp = time.gmtime(lines[-1]['time'])
      facts.append(time.strftime('last step %Y-%m-%d %H:%M UTC', stamp))
  return f'<p class="facts">{_text(" · ".join(facts))}</p>'


def _summary(summary: Mapping[str, Any], lines: Lines) -> str:
  tiles = []
  for name in _names(lines):
    if name.startswith('val/') or name in _TILES:
      values = [y for _, y in _points(lines, name) if y is not None]
      tiles.append(
        f'<div class="tile"><b>{charts.number(values[-1])}</b>'
        f'<span>{_text(_TILES.get(name, name.removeprefix("val/")))}</span>'
        f'<small>first {charts.number(values[0])}</small></div>'
      )
  rows = ''.join(
    f'<tr><th>{_text(name)}</th><td class="n">{_value(value)}</td></tr>'
    for name, value in _flat(summary)
  )
  table = f'<table>{rows}</table>' if rows else ''
  more = f'<details><summary>summary.json</summary>{table}</details>'
  return f'<div class="tiles">{"".join(tiles)}</div>' + (more if rows else '')


def _curves(lines: Lines) -> str:
  names = _names(lines)
  if not names:
    return ''
  x_range = (lines[0]['step'], lines[-1]['step'])
  borders, stage = [], None
  for line in lines:
    if line.get('stage') != stage:
      stage = line.get('stage')
      borders.append((line['step'], str(stage)))
  groups: list[tuple[str, list[str]]] = [
    (name, [name]) for name in names if name.startswith('val/')
  ]
  groups += [(t, [n for n in names if n in wanted]) for t, wanted in _CHARTS]
  rewards = [n for n in names if n.startswith('reward/') and n.endswith('mean')]
  groups += [('rewards by name', rewards)]
  groups += [('seconds', [n for n in names if n.startswith('timing_s/')])]
  figures = []
  for title, chosen in groups:
    series = {name: _points(lines, name) for name in chosen}
    if not series:
      continue
    drawing = charts.line(series, x_range=x_range, borders=borders)
    last = {
      name: next(y for _, y in reversed(points) if y is not None)
      for name, points in series.items()
    }
    legend = ''.join(
      f'<li><i style="background:var(--c{i % charts.COLOURS})"></i>'
      f'{_text(name)} <b>{charts.number(last[name])}</b></li>'
      for i, name in enumerate(series)
    )
    figures.append(
      f'<figure><figcaption>{_text(title)}</figcaption>{drawing}'
      f'<ul>{legend}</ul></figure>'
    )
  return f'<div class="figures">{"".join(figures)}</div>'


def _samples(samples: Lines) -> str:
  # By kind (training rollouts, evaluations), then by step.
  kinds: dict[str, dict[Any, list[Mapping[str, Any]]]] = {}
  for sample in samples:
    by_step = kinds.setdefault(str(sample.get('kind', '')), {})
    by_step.setdefault(sample.get('step'), []).append(sample)
  parts = []
  for kind, by_step in kinds.items():
    steps = list(by_step)
    if len(steps) > _SAMPLE_STEPS:
      # The first, the middle and the last show what the policy learned.
      gaps = _SAMPLE_STEPS - 1
      steps = [steps[i * (len(steps) - 1) // gaps] for i in range(gaps + 1)]
    for step in steps:
      rows = ''.join(map(_sample_row, by_step[step][:_SAMPLES_PER_STEP]))
      where = f'{by_step[step][0].get("stage", "")} {kind}'.strip()
      parts.append(
        f'<h3>step {_text(step)} ({_text(where)})</h3><div class="scroll">'
        '<table><tr><th>prompt</th><th>response</th><th>answer</th>'
        '<th>score</th><th>rewards</th><th>advantage</th><th>finish</th></tr>'
        f'{rows}</table></div>'
      )
  return ''.join(parts)


def _sample_row(sample: Mapping[str, Any]) -> str:
  rewards = sample.get('rewards')
  rewards = rewards if isinstance(rewards, Mapping) else {}
  shown = '<br>'.join(f'{_text(k)} {_value(v)}' for k, v in rewards.items())
  texts = ''.join(
    f'<td><pre>{_long(sample.get(name, ""))}</pre></td>'
    for name in ('prompt', 'response', 'answer')
  )
  return (
    f'<tr>{texts}<td class="n">{_value(sample.get("score"))}</td>'
    f'<td class="n">{shown}</td>'
    f'<td class="n">{_value(sample.get("advantage"))}</td>'
    f'<td>{_text(sample.get("finish_reason", ""))}</td></tr>'
  )


def _events(events: Lines, lines: Lines) -> str:
  if not events:
    return ''
  start = min(
    x['time']
    for x in [*events[:1], *lines[:1]]
    if isinstance(x.get('time'), (int, float))
  )
  rows = []
  for event in events[-_MAX_EVENTS:]:
    known = ('time', 'kind', 'message')
    fields = ' '.join(f'{k}={v}' for k, v in event.items() if k not in known)
    when = f'{event.get("time", start) - start:+.0f} s'
    rows.append(
      f'<tr><td class="n">{when}</td><td>{_text(event.get("kind", ""))}</td>'
      f'<td>{_text(event.get("message", ""))}</td><td>{_text(fields)}</td></tr>'
    )
  left_out = len(events) - len(rows)
  note = f'<p>{left_out} earlier events left out.</p>' if left_out else ''
  return f'{note}<div class="scroll"><table>{"".join(rows)}</table></div>'


def _all_metrics(lines: Lines) -> str:
  rows = []
  for name in sorted(_names(lines)):
    values = [y for _, y in _points(lines, name) if y is not None]
    cells = (values[0], values[-1], min(values), max(values))
    rows.append(
      f'<tr><th>{_text(name)}</th>'
      + ''.join(f'<td class="n">{charts.number(x)}</td>' for x in cells)
      + '</tr>'
    )
  if not rows:
    return ''
  heads = ''.join(f'<th>{x}</th>' for x in ('first', 'last', 'least', 'most'))
  return (
    '<details><summary>first, last, least and most of each</summary>'
    f'<div class="scroll"><table><tr><th>metric</th>{heads}</tr>'
    f'{"".join(rows)}</table></div></details>'
  )


def _config(config: Mapping[str, Any]) -> str:
  if not config:
    return ''
  text = json.dumps(config, indent=2, ensure_ascii=False)
  return (
    '<details><summary>config.json</summary>'
    f'<pre class="config">{_text(text)}</pre></details>'
  )


def _points(lines: Lines, name: str) -> list[tuple[float, float | None]]:
  """Returns (step, value) where the metric was written; null is a gap."""
  return [
    (line['step'], line[name] if _is_number(line[name]) else None)
    for line in lines
    if name in line
  ]


def _names(lines: Lines) -> list[str]:
  """Returns the metrics with at least one number, in order of appearance."""
  names: dict[str, None] = {}
  for line in lines:
    for name, value in line.items():
      if name not in ('stage', 'step', 'time') and _is_number(value):
        names[name] = None
  return list(names)


def _is_number(value: Any) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool)


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  try:
    value = json.loads(path.read_text(encoding='utf-8'))
  except (FileNotFoundError, ValueError):
    return {}
  return value if isinstance(value, dict) else {}


def _flat(tree: Mapping[str, Any], prefix: str = ''):
  for name, value in tree.items():
    if isinstance(value, Mapping):
      yield from _flat(value, f'{prefix}{name}.')
    else:
      yield f'{prefix}{name}', value


def _value(value: Any) -> str:
  if value is None:
    return '–'
  return charts.number(value) if _is_number(value) else _text(value)


def _long(text: Any) -> str:
  text = str(text)
  if len(text) > _MAX_TEXT:
    # Both ends: a question stands at the end of its prompt.
    half = _MAX_TEXT // 2
    left_out = len(text) - 2 * half
    text = f'{text[:half]}\n[... {left_out} characters ...]\n{text[-half:]}'
  return _text(text)


def _text(value: Any) -> str:
  return html.escape(str(value))


# Metric -> what it is called on its tile; `val/...` have tiles by themselves.
_TILES: dict[str, str] = {
  'critic/score/mean': 'mean score',
  'kl/reference': 'KL to the reference, nats per token',
  'actor/entropy': 'entropy, nats per token',
  'response_length/mean': 'response tokens',
  'perf/tokens_per_second_per_device': 'tokens per second and device',
}

# Title -> the metrics drawn together; evaluations come before, rewards by name
# and timings after.
_CHARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
  ('score', ('critic/score/mean', 'critic/rewards/mean')),
  ('KL to the reference (nats per token)', ('kl/reference', 'kl/reward')),
  ('KL coefficients', ('actor/kl_coef', 'kl/reward_coef')),
  ('entropy (nats per token)', ('actor/entropy',)),
  ('response length (tokens)', ('response_length/mean', 'response_length/max')),
  ('share cut by the length limit', ('response_length/clip_ratio',)),
  ('supervised loss', ('sft/loss', 'sft/token_nll')),
  ('policy loss', ('actor/pg_loss',)),
  ('value loss', ('critic/vf_loss',)),
  ('explained variance of the values', ('critic/vf_explained_var',)),
  ('clipped share', ('actor/pg_clipfrac', 'critic/vf_clipfrac')),
  ('largest ratio', ('actor/ratio_max',)),
  ('KL of the update', ('actor/ppo_kl',)),
  ('gradient norm', ('actor/grad_norm', 'critic/grad_norm', 'sft/grad_norm')),
  ('learning rate', ('actor/lr', 'critic/lr', 'sft/lr')),
  (
    'sampler against trainer (probability)',
    ('training/rollout_probs_diff_mean', 'training/rollout_probs_diff_max'),
  ),
  ('groups with equal rewards', ('training/frac_reward_zero_std',)),
  ('tokens per second and device', ('perf/tokens_per_second_per_device',)),
)

_STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--soft:#5b6570;
--faint:#d9dee4;--card:#f6f8fa;--c0:#1f6feb;--c1:#d1570a;--c2:#1a8a4a;
--c3:#a03bb5;--c4:#b08800;--c5:#0b8f9c}
@media(prefers-color-scheme:dark){:root{--bg:#0f1318;--fg:#e4e8ec;
--soft:#98a2ad;--faint:#2c343d;--card:#171d24;--c0:#5aa2ff;--c1:#ff9350;
--c2:#4cc77f;--c3:#d38be6;--c4:#e0bc3c;--c5:#45c8d4}}
*{box-sizing:border-box}
body{margin:0 auto;padding:24px;max-width:1440px;background:var(--bg);
color:var(--fg);font:14px/1.45 system-ui,sans-serif}
h1{margin:0;font-size:24px}h2{margin:32px 0 12px;font-size:18px}
h3{margin:18px 0 6px;font-size:14px}
.facts{margin:4px 0 0;color:var(--soft)}
.tiles{display:flex;flex-wrap:wrap;gap:10px;margin-bottom:10px}
.tile{display:flex;flex-direction:column;padding:10px 14px;min-width:130px;
background:var(--card);border:1px solid var(--faint);border-radius:8px}
.tile b{font-size:22px}.tile small,.tile span{color:var(--soft)}
.figures{display:grid;gap:14px;
grid-template-columns:repeat(auto-fill,minmax(340px,1fr))}
figure{margin:0;padding:10px 12px;background:var(--card);
border:1px solid var(--faint);border-radius:8px}
figcaption{font-weight:600}
figure ul{display:flex;flex-wrap:wrap;gap:2px 14px;margin:4px 0 0;padding:0;
list-style:none;color:var(--soft);font-size:12px}
figure b{color:var(--fg)}
figure i{display:inline-block;width:10px;height:10px;margin-right:5px;
border-radius:2px}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--soft);font-size:10.5px}
svg .grid{stroke:var(--faint);stroke-width:1}
svg .border{stroke:var(--soft);stroke-width:1;stroke-dasharray:3 3}
svg .line{fill:none;stroke-width:1.6;stroke-linejoin:round}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:13px}
th,td{padding:4px 10px 4px 0;border-bottom:1px solid var(--faint);
text-align:left;vertical-align:top}
th{font-weight:600;color:var(--soft)}
.n{font-variant-numeric:tabular-nums;white-space:nowrap}
pre{margin:0;max-width:520px;white-space:pre-wrap;overflow-wrap:anywhere;
font:12px/1.4 ui-monospace,monospace}
pre.config{max-width:none}
summary{cursor:pointer;color:var(--soft);margin-bottom:6px}
"""
