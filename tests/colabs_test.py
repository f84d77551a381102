"""Every notebook runs from top to bottom."""

import json
import pathlib

import pytest

_FOLDER = pathlib.Path(__file__).resolve().parents[1] / 'colabs'
_NOTEBOOKS = sorted(_FOLDER.glob('*.ipynb'))


def test_there_are_notebooks():
  assert _NOTEBOOKS


@pytest.mark.parametrize('path', _NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path):
  """Cells hold their own assertions; outputs are not stored."""
  namespace = {'__name__': '__main__'}
  for number, cell in enumerate(json.loads(path.read_text())['cells']):
    if cell['cell_type'] != 'code':
      continue
    assert not cell['outputs'], f'cell {number} has stored outputs'
    source = ''.join(cell['source'])
    exec(compile(source, f'{path.name}, cell {number}', 'exec'), namespace)
