"""Curves as SVG: ticks, gaps, thinning, escaping."""

import math
import re
from xml.etree import ElementTree

import pytest

from rlhf_jax.monitor import charts


@pytest.mark.parametrize(
  'low, high, count, expected',
  [
    # (1 - 0) / 4 = 0.25: the next of 1, 2, 5 times a power of ten is 0.5.
    (0.0, 1.0, 4, [0.0, 0.5, 1.0]),
    (0.0, 1.0, 5, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
    (3.0, 97.0, 5, [20.0, 40.0, 60.0, 80.0]),
    (-0.05, 0.07, 4, [-0.05, 0.0, 0.05]),
    (1e-5, 3e-5, 4, [1e-5, 1.5e-5, 2e-5, 2.5e-5, 3e-5]),
  ],
)
def test_ticks_are_round_numbers(low, high, count, expected):
  assert charts.ticks(low, high, count) == pytest.approx(expected, abs=1e-12)


def test_steps_have_whole_ticks():
  assert charts.ticks(0.5, 1.5, 5, whole=True) == [1.0]


def test_thinning_keeps_the_mean_the_last_step_and_gaps():
  # 480 points, twice the limit: pairs are averaged.
  points = [(i, float(i)) for i in range(480)]
  thinned = charts.thin(points)
  assert len(thinned) == 240
  assert thinned[0] == (1, 0.5) and thinned[-1] == (479, 478.5)
  assert charts.thin([(0, None)] * 480)[0] == (0, None)
  assert charts.thin([(0, math.nan), (1, 3.0)] * 240)[0] == (1, 3.0)


def test_a_gap_lifts_the_pen():
  points = [(1, 1.0), (2, 2.0), (3, None), (4, math.nan), (5, 1.0), (6, 2.0)]
  path = re.search(r'class="line"[^>]*d="([^"]*)"', charts.line({'a': points}))
  assert re.sub(r'[^ML]', '', path[1]) == 'MLML'


def test_the_corners_lie_on_the_frame():
  # The y-range is padded by 6 % on both sides, the x-range is not.
  drawing = charts.line({'a': [(10, 0.0), (20, 1.0)]})
  path = re.search(r'class="line"[^>]*d="([^"]*)"', drawing)[1]
  (x0, y0), (x1, y1) = re.findall(r'([\d.]+) ([\d.]+)', path)
  assert (float(x0), float(x1)) == (52, 430)
  # 150 pixels for 1.12: (190 - 24) - 150 * 0.06 / 1.12 = 157.96; 16 + 8.04.
  assert (float(y0), float(y1)) == (158.0, 24.0)


def test_names_are_escaped_and_the_drawing_is_xml():
  drawing = charts.line(
    {'<a "b">&': [(1, 1.0)], 'c': [(1, 2.0)]}, borders=[(1, '<stage>')]
  )
  root = ElementTree.fromstring(drawing)
  assert root.get('aria-label') == '<a "b">&, c'
  assert '<stage>' in [t.text for t in root.iter('text')]
  assert root.find('circle').find('title').text == '<a "b">& 1 at step 1'


def test_nothing_to_draw_is_an_error():
  with pytest.raises(ValueError, match='no finite value'):
    charts.line({'a': [(1, None)]})


@pytest.mark.parametrize(
  'value, text',
  [
    (0.0, '0'),
    (0.12345, '0.1235'),
    (5120.0, '5120'),
    (51200.0, '51.2k'),
    (2.1e6, '2.1M'),
    (1.2e-5, '1.2e-05'),
    (-0.5, '-0.5'),
  ],
)
def test_numbers_are_short(value, text):
  assert charts.number(value) == text
