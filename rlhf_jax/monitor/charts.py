"""Line charts as inline SVG text: no script, no font, no network.

Colours come from the CSS variables --c0 ... --c5 and --faint of the page, so
that one drawing serves a light and a dark page.
"""

from collections.abc import Mapping, Sequence
import html
import math

COLOURS = 6

# A chart this wide has no room for more.
_MAX_POINTS = 240
# Points are marked, with their value as a tooltip, while they are few.
_MAX_MARKERS = 60

# Pixels: the drawing, and its margins left, right, top, bottom.
_WIDTH, _HEIGHT = 440, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 16, 24

Points = Sequence[tuple[float, float | None]]


def line(
  series: Mapping[str, Points],
  *,
  x_range: tuple[float, float] | None = None,
  borders: Sequence[tuple[float, str]] = (),
) -> str:
  """Returns an `<svg>` of one or more curves over steps.

  Args:
    series: points (x, y) by name, in the order of x; a y of None, NaN or
      infinity leaves a gap.
    x_range: lowest and highest x; None takes them from the points.
    borders: (x, label) of vertical lines, where a stage begins.

  Raises:
    ValueError: if no point has a finite y.
  """
  series = {name: thin(points) for name, points in series.items()}
  drawn = [(x, y) for points in series.values() for x, y in points if _ok(y)]
  if not drawn:
    raise ValueError(f'no finite value to draw in {", ".join(series)}')
  x_low, x_high = x_range or (min(drawn)[0], max(drawn)[0])
  if x_high <= x_low:
    x_low, x_high = x_low - 0.5, x_low + 0.5
  y_low, y_high = _y_range([y for _, y in drawn])

  def px(x: float) -> float:
    share = (x - x_low) / (x_high - x_low)
    return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

  def py(y: float) -> float:
    share = (y - y_low) / (y_high - y_low)
    return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)

  label = html.escape(', '.join(series), quote=True)
  parts = [
    f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
  ]
  for y in ticks(y_low, y_high, 5):
    parts.append(
      f'<path class="grid" d="M{_LEFT} {py(y)}H{_WIDTH - _RIGHT}"/>'
      f'<text x="{_LEFT - 6}" y="{py(y) + 3.5}" text-anchor="end">'
      f'{number(y)}</text>'
    )
  for x in ticks(x_low, x_high, 5, whole=True):
    parts.append(
      f'<text x="{px(x)}" y="{_HEIGHT - 8}" text-anchor="middle">'
      f'{number(x)}</text>'
    )
  for x, name in borders:
    parts.append(
      f'<path class="border" d="M{px(x)} {_TOP}V{_HEIGHT - _BOTTOM}"/>'
      f'<text x="{px(x) + 4}" y="{_TOP - 5}">{html.escape(name)}</text>'
    )
  for index, (name, points) in enumerate(series.items()):
    parts.append(_curve(name, points, index % COLOURS, px, py))
  parts.append('</svg>')
  return ''.join(parts)


def ticks(
  low: float, high: float, count: int, *, whole: bool = False
) -> list[float]:
  """Returns at most `count` + 1 round numbers in [low, high].

  The step is 1, 2 or 5 times a power of ten: the least that needs no more
  than `count` of them. 0 to 1 by 4: 0, 0.5, 1; 3 to 97 by 5: 20, 40, 60, 80.

  Args:
    low: lower end.
    high: upper end, above `low`.
    count: how many steps at most.
    whole: only whole numbers.
  """
  raw = (high - low) / count
  power = 10.0 ** math.floor(math.log10(raw))
  step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999999)
  if whole:
    step = max(step, 1.0)
  first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
  # Rounded, because 3 * 0.1 is 0.30000000000000004.
  return [float(f'{i * step:.12g}') for i in range(first, last + 1)]


def thin(points: Points) -> list[tuple[float, float | None]]:
  """Returns at most `_MAX_POINTS` points: means over runs of equal length."""
  if len(points) <= _MAX_POINTS:
    return list(points)
  run = math.ceil(len(points) / _MAX_POINTS)
  thinned = []
  for start in range(0, len(points), run):
    part = points[start : start + run]
    values = [y for _, y in part if _ok(y)]
    mean = sum(values) / len(values) if values else None
    thinned.append((part[-1][0], mean))
  return thinned


def number(value: float) -> str:
  """Returns a short number: 0.1235, 12.3, 5120, 2.1M, 1.2e-05."""
  size = abs(value)
  if size >= 1e9 or 0 < size < 1e-4:
    return f'{value:.2g}'
  if size >= 1e6:
    return f'{value / 1e6:.4g}M'
  if size >= 1e4:
    return f'{value / 1e3:.4g}k'
  return f'{value:.4g}'


def _curve(name, points, colour, px, py) -> str:
  path, pen_down = [], False
  for x, y in points:
    if _ok(y):
      path.append(f'{"L" if pen_down else "M"}{px(x)} {py(y)}')
    pen_down = _ok(y)
  parts = [f'<path class="line" style="stroke:var(--c{colour})" ']
  parts.append(f'd="{"".join(path)}"/>')
  if len(points) <= _MAX_MARKERS:
    for x, y in points:
      if _ok(y):
        parts.append(
          f'<circle cx="{px(x)}" cy="{py(y)}" r="2.2" '
          f'style="fill:var(--c{colour})"><title>{html.escape(name)} '
          f'{number(y)} at step {number(x)}</title></circle>'
        )
  return ''.join(parts)


def _y_range(values: Sequence[float]) -> tuple[float, float]:
  low, high = min(values), max(values)
  pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
  return low - pad, high + pad


def _ok(y: float | None) -> bool:
  return y is not None and math.isfinite(y)
