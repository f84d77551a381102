"""Imports go down the floors or sideways, never up and never in a circle.

The table is the map of the package: a new module gets a line here first.
"""

import ast
import fnmatch
import pathlib

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PACKAGE = 'rlhf_jax'

# Floor -> modules, without the name of the package; `*` is a wildcard.
FLOORS = {
  # Structs, masked statistics, metrics that carry their reduction, pytrees.
  0: 'types masked metrics tree keys',
  # Pure maths; devices and processes; what a model is.
  1: 'algorithms.* sharding.* models.spec models.config sampling.pick',
  # One decoder; prompts and packing; rule rewards; the optimiser.
  2: """models.layers models.attention models.attention_xla models.kernels
      models.moe models.context models.decoder models.lora data.*
      rewards.base rewards.rules rewards.combine optim""",
  # What wraps a decoder; caches; files of a run's state; fakes.
  3: """models.heads models.hf models.peft models.flax_module sampling.cache
      sampling.decode sampling.schedule sampling.requests checkpoint buffer
      testing
      models.flops""",
  # What a trainer is made of.
  4: """trainers.state trainers.update trainers.experience trainers.packed
      trainers.evaluate
      sampling.engine rewards.model""",
  # Loops, and what watches them.
  5: """trainers.ppo trainers.sft trainers.reward trainers.preference
      trainers.arithmetic trainers.checks trainers.setup trainers.roles
      trainers.run trainers.workdir trainers.algorithm trainers.measure
      trainers.memory
      trainers.rollout trainers.adapters trainers.policy sampling.text
      sampling.conversation
      planner planner.* monitor.*""",
}

# Modules outside the package that only these may import, and why.
RESTRICTED = {
  # The config stops at set-up and loops; below are keyword arguments.
  'ml_collections': {'trainers.algorithm', 'trainers.arithmetic',
                     'trainers.checks',
                     'trainers.setup', 'trainers.run', 'trainers.ppo',
                     'trainers.sft', 'trainers.reward', 'trainers.preference',
                     'planner.fit'},
  # Its API is in flux and it does not import on some newer JAX versions.
  'flax.nnx': set(),
  # Tests use the package, not the other way round.
  'pytest': {'testing'},
  'torch': set(),
}  # fmt: skip


def modules(root: pathlib.Path) -> dict[str, pathlib.Path]:
  """Returns the files of the package by dotted name, '' for the package."""
  found = {}
  for path in sorted((root / _PACKAGE).rglob('*.py')):
    parts = path.relative_to(root / _PACKAGE).with_suffix('').parts
    name = '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)
    found[name] = path
  return found


def imports(path: pathlib.Path, name: str) -> set[str]:
  """Returns the dotted names that a file imports, inside functions too.

  `from a import b` gives both 'a' and 'a.b': b may be a module.
  """
  parts = [_PACKAGE, *(name.split('.') if name else [])]
  package = parts if path.name == '__init__.py' else parts[:-1]
  found = set()
  for node in ast.walk(ast.parse(path.read_text(), str(path))):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ''
      if node.level:
        above = package[: len(package) - node.level + 1]
        base = '.'.join([*above, base]).rstrip('.')
      found |= {base} | {f'{base}.{alias.name}' for alias in node.names}
  return found


def floor_of(name: str) -> int | None:
  for floor, patterns in FLOORS.items():
    if any(fnmatch.fnmatchcase(name, p) for p in patterns.split()):
      return floor
  return None


def graph(root: pathlib.Path) -> dict[str, set[str]]:
  """Returns for each module the modules of the package that it imports."""
  files = modules(root)
  prefix = f'{_PACKAGE}.'
  return {
    name: {
      target.removeprefix(prefix)
      for target in imports(path, name)
      if target.startswith(prefix) and target.removeprefix(prefix) in files
    }
    - {name}
    for name, path in files.items()
  }


def cycle(edges: dict[str, set[str]]) -> list[str] | None:
  """Returns the modules of one circle of imports, or None."""
  done: set[str] = set()

  def visit(name: str, trail: list[str]) -> list[str] | None:
    if name in trail:
      return [*trail[trail.index(name) :], name]
    if name in done:
      return None
    for target in sorted(edges[name]):
      found = visit(target, [*trail, name])
      if found:
        return found
    done.add(name)
    return None

  for name in edges:
    found = visit(name, [])
    if found:
      return found
  return None


def _inside(target: str, module: str) -> bool:
  return target == module or target.startswith(f'{module}.')


def violations(root: pathlib.Path) -> list[str]:
  """Returns a sentence for each import that breaks the order."""
  files = modules(root)
  edges = graph(root)
  # A package's own __init__ runs on every import below it: it imports nothing.
  packages = {n for n, p in files.items() if p.name == '__init__.py'}
  problems = []
  for name in files:
    floor = floor_of(name)
    if name in packages:
      problems += [
        f'{name or _PACKAGE}/__init__.py imports {target}; expected none: '
        'callers import modules'
        for target in sorted(edges[name])
      ]
      continue
    if floor is None:
      problems.append(f'{name} has no floor; give it one in FLOORS')
      continue
    for target in sorted(edges[name] - packages):
      below = floor_of(target)
      if below is not None and below > floor:
        problems.append(
          f'{name} (floor {floor}) imports {target} (floor {below}); '
          'expected its own floor or a lower one: move what is needed down'
        )
    targets = imports(files[name], name)
    for above in ('configs', 'launch', 'tests'):
      if any(_inside(target, above) for target in targets):
        problems.append(f'{name} imports {above}, which is above the package')
    for module, allowed in RESTRICTED.items():
      if name not in allowed and any(_inside(t, module) for t in targets):
        who = sorted(allowed) or 'nobody'
        problems.append(f'{name} imports {module}; only {who} may')
  found = cycle(edges)
  if found:
    problems.append(f'a circle of imports: {" -> ".join(found)}')
  return problems


def test_imports_of_the_package_go_down():
  assert violations(_ROOT) == []


@pytest.fixture
def package(tmp_path):
  """Writes a small package; returns its root."""

  def write(files):
    for name, text in {'__init__.py': '', **files}.items():
      path = tmp_path / _PACKAGE / name
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(text)
    return tmp_path

  return write


@pytest.mark.parametrize(
  'line',
  [
    'from rlhf_jax.trainers import update',
    'from rlhf_jax.trainers.update import apply',
    'import rlhf_jax.trainers.update',
    'import rlhf_jax.trainers.update as u',
    'from .trainers import update',
    'from . import trainers, optim',
    'def f():\n  from rlhf_jax import optim',
  ],
)
def test_an_upward_import_is_found_however_it_is_written(package, line):
  root = package(
    {
      'masked.py': line,
      'optim.py': '',
      'trainers/update.py': '',
    }
  )
  (problem,) = violations(root)
  assert 'masked (floor 0) imports' in problem


def test_down_and_sideways_are_fine(package):
  root = package(
    {
      'masked.py': 'from rlhf_jax import types\nimport jax',
      'types.py': '',
      'optim.py': 'from rlhf_jax import masked',
    }
  )
  assert violations(root) == []


def test_a_circle_is_found(package):
  root = package(
    {
      'masked.py': 'from rlhf_jax import types',
      'types.py': 'from rlhf_jax import tree',
      'tree.py': 'def f():\n  from rlhf_jax import masked',
    }
  )
  (problem,) = violations(root)
  assert 'masked -> types -> tree -> masked' in problem


@pytest.mark.parametrize(
  'name, line, expected',
  [
    ('newcomer.py', '', 'no floor'),
    ('masked.py', 'from configs import base', 'above the package'),
    ('masked.py', 'from flax import nnx', 'nobody may'),
    ('optim.py', 'import ml_collections', 'may'),
    ('algorithms/__init__.py', 'from rlhf_jax.algorithms import kl', 'none'),
  ],
)
def test_other_breaches_are_found(package, name, line, expected):
  (problem,) = violations(package({'algorithms/kl.py': '', name: line}))
  assert expected in problem
