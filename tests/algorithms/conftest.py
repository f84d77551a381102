"""The numbers of verl's own maths, run in float32 on fixed inputs."""

import json
import pathlib

import numpy as np
import pytest

FIXTURE = pathlib.Path(__file__).parents[1] / 'fixtures' / 'verl_core.json'


@pytest.fixture(scope='session')
def oracle():
  """The fixture with its inputs as arrays and prompt groups as numbers."""
  numbers = json.loads(FIXTURE.read_text())
  uid = numbers['inputs'].pop('uid')
  numbers['inputs'] = {
    name: np.asarray(value, np.float32)
    for name, value in numbers['inputs'].items()
  }
  numbers['inputs']['mask'] = numbers['inputs']['mask'] > 0
  numbers['inputs']['group'] = np.unique(uid, return_inverse=True)[1]
  for value in numbers['inputs'].values():
    value.flags.writeable = False  # all tests of the session share them
  return numbers
