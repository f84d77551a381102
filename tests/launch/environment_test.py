"""The set-up scripts: which Python, what is installed, when it is reused.

A stand-in for Python records what it is asked to do, so nothing is installed.
"""

import pathlib
import shutil
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[2]

# `-c` is the version check, answered with the version of the stand-in;
# `-m venv` copies the stand-in to where the interpreter of the new environment
# would be; `-` hashes files, for real.
_PYTHON = """#!/bin/bash
case "$1" in
  -c) exec {real} -c 'import sys; sys.version_info = {info}
exec(sys.argv[1])' "$2" ;;
  --version) echo 'Python {version}' ;;
  -) exec {real} "$@" ;;
  -m)
    echo "$@" >>{log}
    case "$2" in
      venv) mkdir -p "${{@: -1}}/bin"; cp "$0" "${{@: -1}}/bin/python" ;;
      pip) exit "${{PIP_FAILS:-0}}" ;;
    esac ;;
  *) echo "$@" >>{log} ;;
esac
"""


@pytest.fixture
def repository(tmp_path):
  """A copy of the scripts, in a folder with a space, and a PATH of its own."""
  root = tmp_path / 'a copy'
  shutil.copytree(_ROOT / 'launch', root / 'launch')
  for name in ('requirements.txt', 'setup.cfg', 'pyproject.toml'):
    shutil.copy(_ROOT / name, root)
  tools = tmp_path / 'tools'
  tools.mkdir()
  for name in ('bash', 'dirname', 'head', 'rm', 'mkdir', 'cp', 'sed'):
    (tools / name).symlink_to(shutil.which(name))
  return Repository(root, tools, tmp_path / 'log')


class Repository:
  """Runs the scripts and tells what they asked Python to do."""

  def __init__(self, root, tools, log):
    self.root, self.tools, self.log = root, tools, log

  def add_python(self, name, version):
    path = self.tools / name
    info = tuple(map(int, version.split('.')))
    path.write_text(
      _PYTHON.format(
        info=info, version=version, real=sys.executable, log=self.log
      )
    )
    path.chmod(0o755)
    return path

  def run(self, script, *arguments, cwd=None, **env):
    """Returns the exit status, standard error, and the calls of Python."""
    self.log.write_text('')
    done = subprocess.run(
      [str(self.root / 'launch' / script), *arguments],
      env={'PATH': str(self.tools), **env},
      cwd=cwd or self.root,
      capture_output=True,
      text=True,
    )
    calls = self.log.read_text().replace(str(self.root), 'ROOT').splitlines()
    return done.returncode, done.stderr, calls


_TESTS = '-m pytest -q -n 2 --dist loadfile'
_VENV = '-m venv --clear ROOT/.venv'
_PIP = '-m pip install --disable-pip-version-check --quiet --editable '


def test_test_installs_once_and_then_reuses(repository):
  repository.add_python('python3', '3.12.1')
  status, _, calls = repository.run('test.sh', '-k', 'a b')
  assert status == 0
  assert calls == [_VENV, f'{_PIP}ROOT[test]', f'{_TESTS} -k a b']
  assert repository.run('test.sh')[2] == [_TESTS]


def test_quickstart_trains_the_embedded_default(repository, tmp_path):
  repository.add_python('python3', '3.11')
  train = 'launch/train.py --config=configs/quickstart.py '
  _, _, calls = repository.run('quickstart.sh')
  assert calls == [_VENV, f'{_PIP}ROOT', f'{train}--workdir=runs/quickstart']
  # A relative workdir is relative to where the command was given.
  _, _, calls = repository.run(
    'quickstart.sh', 'w', '--config.a=1', cwd=tmp_path
  )
  assert calls == [f'{train}--workdir={tmp_path}/w --config.a=1']
  _, _, calls = repository.run('quickstart.sh', '--resume=never')
  assert calls == [f'{train}--workdir=runs/quickstart --resume=never']


def test_extras_are_added_and_stay(repository):
  repository.add_python('python3', '3.12')
  repository.run('quickstart.sh')
  _, _, calls = repository.run('test.sh', RLHF_JAX_EXTRAS='test,parity')
  assert calls == [f'{_PIP}ROOT[test,parity]', _TESTS]
  assert len(repository.run('test.sh')[2]) == 1
  assert len(repository.run('quickstart.sh')[2]) == 1


def test_changed_requirements_are_installed_with_all_extras(repository):
  repository.add_python('python3', '3.12')
  repository.run('test.sh', RLHF_JAX_EXTRAS='test,lint')
  (repository.root / 'setup.cfg').write_text('changed')
  assert repository.run('test.sh')[2][0] == f'{_PIP}ROOT[test,lint]'


def test_an_installation_that_failed_is_done_again(repository):
  repository.add_python('python3', '3.12')
  status, stderr, calls = repository.run('test.sh', PIP_FAILS='1')
  assert status == 1 and 'pip failed' in stderr
  assert calls[-1].startswith('-m pip')  # The tests were not started.
  again = [f'{_PIP}ROOT[test]', _TESTS]
  assert repository.run('test.sh')[2] == again
  # An upgrade that failed leaves who knows what: going back installs, too.
  path = repository.root / 'requirements.txt'
  before = path.read_text()
  path.write_text('changed')
  repository.run('test.sh', PIP_FAILS='1')
  path.write_text(before)
  assert repository.run('test.sh')[2] == again


def test_an_older_python_is_a_clear_message(repository):
  repository.add_python('python3', '3.9.18')
  for script in ('test.sh', 'quickstart.sh'):
    status, stderr, calls = repository.run(script)
    assert status == 1 and calls == []
    assert 'got: python3 (Python 3.9.18); expected Python 3.11' in stderr
  status, stderr, _ = repository.run('test.sh', PYTHON='python3')
  assert status == 1 and 'PYTHON=python3 is Python 3.9.18' in stderr
  assert not (repository.root / '.venv').exists()


def test_no_python_is_a_clear_message(repository):
  status, stderr, _ = repository.run('test.sh')
  assert status == 1 and 'no python on PATH; expected Python 3.11' in stderr


def test_a_newer_python_beside_the_old_one_is_found(repository):
  repository.add_python('python3', '3.9')
  repository.add_python('python3.11', '3.11.2')
  assert repository.run('test.sh')[0] == 0
  # And the variable PYTHON comes before all others.
  shutil.rmtree(repository.root / '.venv')
  chosen = repository.add_python('mine', '3.13')
  repository.run('test.sh', PYTHON=str(chosen))
  made = (repository.root / '.venv/bin/python').read_text()
  assert 'Python 3.13' in made


def test_an_environment_that_does_not_run_is_made_anew(repository):
  repository.add_python('python3', '3.12')
  repository.run('test.sh')
  (repository.root / '.venv/bin/python').unlink()
  _, _, calls = repository.run('test.sh')
  assert calls[0] == _VENV


def test_help_installs_nothing(repository):
  for script in ('test.sh', 'quickstart.sh'):
    status, _, calls = repository.run(script, '--help')
    assert status == 0 and calls == []


def test_scripts_pass_shellcheck():
  if shutil.which('shellcheck') is None:
    pytest.skip('shellcheck is not installed')
  scripts = [*(_ROOT / 'launch').glob('*.sh'), _ROOT / '.ci/run']
  done = subprocess.run(
    ['shellcheck', '-x', *map(str, scripts)],
    cwd=_ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout
