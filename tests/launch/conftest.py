"""Programs are compiled by the first run that needs them, and kept on disk."""

import jax
from jax.experimental.compilation_cache import compilation_cache
import pytest


@pytest.fixture(scope='session')
def program_folder(tmp_path_factory):
  return str(tmp_path_factory.mktemp('programs'))


@pytest.fixture(scope='module', autouse=True)
def compiled_once(program_folder):
  names = (
    'jax_compilation_cache_dir',
    'jax_persistent_cache_min_compile_time_secs',
    'jax_persistent_cache_min_entry_size_bytes',
  )
  before = {name: jax.config.values[name] for name in names}
  if before['jax_compilation_cache_dir'] is None:
    for name, value in zip(names, (program_folder, 0, -1)):
      jax.config.update(name, value)
    compilation_cache.reset_cache()
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()
