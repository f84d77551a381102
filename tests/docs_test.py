"""The table of algorithms names all there is, and nothing else."""

import pathlib
import re

import pytest

from rlhf_jax.algorithms import advantages
from rlhf_jax.algorithms import aggregation
from rlhf_jax.algorithms import filtration
from rlhf_jax.algorithms import kl
from rlhf_jax.algorithms import policy_losses
from rlhf_jax.trainers import algorithm

_TEXT = (
  pathlib.Path(__file__).resolve().parents[1] / 'docs' / 'algorithms.md'
).read_text(encoding='utf-8')


def _rows(title) -> list[list[str]]:
  """The cells of the first table under a heading that begins with `title`."""
  section = re.split(rf'^## {title}', _TEXT, flags=re.M)[1]
  section = section.split('\n## ')[0]
  lines = [line for line in section.splitlines() if line.startswith('|')]
  return [
    [cell.strip() for cell in line.strip('|').split('|')] for line in lines[2:]
  ]


def _names(cell) -> list[str]:
  return re.findall(r'`([^`]+)`', cell)


@pytest.mark.parametrize(
  'title, table, keys',
  [
    ('Advantages', advantages.ESTIMATORS, algorithm.ESTIMATOR_KEYS),
    ('Policy losses', policy_losses.LOSSES, algorithm.LOSS_KEYS),
  ],
)
def test_names_keys_and_functions(title, table, keys):
  rows = _rows(title)
  assert sorted(_names(row[0])[0] for row in rows) == sorted(table)
  for name, _, _, reads, function in rows:
    (name,) = _names(name)
    expected = keys[name]
    if title == 'Policy losses':
      selection = algorithm.SELECTION_KEYS.get(name, {})
      expected = {*expected.values(), *selection.values()}
    known = {x for x in _names(reads) if x in algorithm.DEFAULTS}
    assert known == set(expected), name
    assert _names(function) == [table[name].__name__]


def test_aggregation_modes():
  assert [_names(row[0])[0] for row in _rows('Aggregation')] == list(
    aggregation.MODES
  )


def test_kl_estimators():
  rows = _rows('KL to the reference')
  named = {name for row in rows for name in _names(row[0])}
  plain = {name for name in kl.ESTIMATORS if not name.endswith('+')}
  assert named == plain | {'full', '+'}
  for row in rows:
    assert hasattr(kl, _names(row[3])[0])


def test_filtration_methods():
  assert [_names(row[0])[0] for row in _rows('Filtration')] == list(
    filtration.METHODS
  )
