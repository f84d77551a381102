"""Programs compiled ahead of time, and what their phases hold on a device.

peak of a phase = what lives all stage + what lives in the phase
                  + the largest of its programs' temporaries, batches and
                    new results
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
import time

import jax

from rlhf_jax import types
from rlhf_jax.planner import programs as programs_lib
from rlhf_jax.trainers import workdir


class DoesNotFit(workdir.Refused):
  """A phase needs more memory than a device has."""


@dataclasses.dataclass(frozen=True)
class Phase:
  """What one device holds in a phase, in bytes."""

  name: str
  held: dict[str, int]  # kind -> bytes, all phase long
  passing: int  # batches, results and temporaries of its largest program
  temporaries: int  # of that program
  program: str  # its name

  @property
  def peak(self) -> int:
    return sum(self.held.values()) + self.passing


@dataclasses.dataclass(frozen=True)
class Compilation:
  """Compiled programs by name, and what compiling each of them took."""

  plan: programs_lib.Plan
  compiled: dict[str, jax.stages.Compiled]
  seconds: dict[str, float]
  cpu_seconds: dict[str, float]  # of all threads of this process


def compile_all(
  plan: programs_lib.Plan,
  done: Mapping[str, jax.stages.Compiled] | None = None,
  note: Callable[[str], None] = lambda line: None,
) -> Compilation:
  """Compiles the programs of a plan, in order.

  Args:
    plan: see `programs.of_stage`.
    done: programs that are compiled already.
    note: is told of every program.

  Raises:
    DoesNotFit: the compiler says so.
  """
  compiled, seconds, cpu_seconds = dict(done or {}), {}, {}
  for program in plan.programs:
    if program.name in compiled:
      continue
    began, cpu_began = time.perf_counter(), time.process_time()
    lowered = program.lower(compiled)
    try:
      compiled[program.name] = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
      # A TPU's compiler knows what the device has.
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      raise DoesNotFit(
        f'{program.name} does not fit a device by itself: {error}'
      ) from error
    seconds[program.name] = time.perf_counter() - began
    cpu_seconds[program.name] = time.process_time() - cpu_began
    note(f'{program.name} compiled in {seconds[program.name]:.1f} s')
  return Compilation(plan, compiled, seconds, cpu_seconds)


def phases(done: Compilation) -> list[Phase]:
  """The memory of every phase, in the order of a step."""
  plan, compiled = done.plan, done.compiled
  resident = {kind: on_device(x) for kind, x in plan.resident.items()}
  found = []
  for name in programs_lib.PHASES:
    own = [program for program in plan.programs if program.phase == name]
    if not own:
      continue
    extra = plan.in_phase.get(name, lambda _: {})(compiled)
    held = {} if name in plan.apart else resident
    held = held | {kind: on_device(x) for kind, x in extra.items()}
    worst = max(own, key=lambda program: _passing(program, compiled)[0])
    passing, temporaries = _passing(worst, compiled)
    found.append(Phase(name, held, passing, temporaries, worst.name))
  return found


def _passing(program, compiled) -> tuple[int, int]:
  """Bytes that exist for one call of a program, and temporaries of these."""
  stats = compiled[program.name].memory_analysis()
  size = stats.temp_size_in_bytes + stats.generated_code_size_in_bytes
  size += on_device(program.passing(compiled))
  if program.result_passes:
    size += stats.output_size_in_bytes - stats.alias_size_in_bytes
  return size, stats.temp_size_in_bytes


def on_device(tree: types.PyTree) -> int:
  """Bytes of abstract arrays on one device; what is on the host is not."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape) if x.sharding else x.shape)
    * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
    if x.sharding is None or x.sharding.memory_kind not in _HOST
  )


_HOST = ('pinned_host', 'unpinned_host')


def text(size: float) -> str:
  """Bytes for a person."""
  for unit, name in ((2**30, 'GiB'), (2**20, 'MiB')):
    if size >= unit:
      return f'{size / unit:.2f} {name}'
  return f'{size / 2**10:.1f} KiB'
