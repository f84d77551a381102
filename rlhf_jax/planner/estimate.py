"""Collectives, operations and the least time of a step, from its programs.

  seconds of a call = max(operations / peak, bytes of memory / rate,
                          hidden collectives) + collectives in plain sight

A collective is hidden where the compiler schedules computation between its
start and its end.  These are roofline numbers: peak rates, and nothing lost to
launches, imbalance or contention; a good run reaches about half of them.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
import numpy as np

from rlhf_jax.planner import compilation
from rlhf_jax.planner import programs as programs_lib
from rlhf_jax.sharding import chips
from rlhf_jax.sharding import hlo


@dataclasses.dataclass(frozen=True)
class Traffic:
  """All collectives of one kind along the same mesh axes, in one call."""

  kind: str
  axes: str  # 'fsdp', 'data+fsdp'; with a '?' if groups do not fill the axes
  count: float
  moved: float  # bytes that one device sends
  seconds: float
  hidden: bool
  largest: str  # type and source of the one that moves the most


@dataclasses.dataclass(frozen=True)
class Cost:
  """One program: what a call of it takes on each device."""

  name: str
  phase: str
  calls: float  # a step
  compile_seconds: float | None  # None: it was compiled before
  compile_cpu_seconds: float | None
  flops: float
  memory_bytes: float  # read or written, at least
  temporaries: int  # bytes
  traffic: tuple[Traffic, ...]
  compute_seconds: float
  memory_seconds: float

  @property
  def hidden_seconds(self) -> float:
    return sum(x.seconds for x in self.traffic if x.hidden)

  @property
  def exposed_seconds(self) -> float:
    return sum(x.seconds for x in self.traffic if not x.hidden)

  @property
  def seconds(self) -> float:
    return (
      max(self.compute_seconds, self.memory_seconds, self.hidden_seconds)
      + self.exposed_seconds
    )

  @property
  def bound(self) -> str:
    """What takes the most time."""
    parts = {
      'compute': self.compute_seconds,
      'memory': self.memory_seconds,
      'network': self.hidden_seconds + self.exposed_seconds,
    }
    return max(parts, key=parts.get)


def costs(done: compilation.Compilation, chip: chips.Chip) -> list[Cost]:
  """The cost of every program; seconds are 0 where the chip has no rates."""
  found = []
  for program in done.plan.programs:
    compiled = done.compiled[program.name]
    stats = compiled.memory_analysis()
    # What a loop over data goes through, it reads in every round.
    moved = stats.argument_size_in_bytes * program.reads
    moved += stats.output_size_in_bytes + 2 * stats.temp_size_in_bytes
    flops = program.flops / program.mesh.size
    found.append(
      Cost(
        name=program.name,
        phase=program.phase,
        calls=program.calls,
        compile_seconds=done.seconds.get(program.name),
        compile_cpu_seconds=done.cpu_seconds.get(program.name),
        flops=flops,
        memory_bytes=moved,
        temporaries=stats.temp_size_in_bytes,
        traffic=traffic(compiled.as_text(), program.mesh, program.trips, chip),
        compute_seconds=flops / chip.flops if chip.flops else 0.0,
        memory_seconds=moved / chip.memory_rate if chip.memory_rate else 0.0,
      )
    )
  return found


def traffic(
  text: str, mesh: jax.sharding.Mesh, trips: float, chip: chips.Chip
) -> tuple[Traffic, ...]:
  """The collectives of a program, summed, the largest first."""
  sums: dict[tuple, list[hlo.Collective]] = {}
  for one in hlo.collectives(text, mesh.size, trips):
    if one.moved:
      names, whole = hlo.axes_of(one.group, dict(mesh.shape))
      axes = '+'.join(names) + ('' if whole else '?')
      sums.setdefault((one.kind, axes, one.hidden), []).append(one)
  devices = list(mesh.devices.flat)
  found = []
  for (kind, axes, hidden), several in sums.items():
    largest = max(several, key=lambda one: one.moved * one.runs)
    members = [devices[place] for place in largest.group]
    moved = sum(one.moved * one.runs for one in several)
    found.append(
      Traffic(
        kind=kind,
        axes=axes,
        count=sum(one.runs for one in several),
        moved=moved,
        seconds=collective_seconds(moved, members, chip),
        hidden=hidden,
        largest=f'{largest.type.split("{")[0]} {largest.source}',
      )
    )
  return tuple(sorted(found, key=lambda x: -x.moved))


def collective_seconds(
  moved: float, members: Sequence[jax.Device], chip: chips.Chip
) -> float:
  """The least time in which the devices of a group each send `moved` bytes.

  Within a node over its links.  Across nodes as many network ports work as
  devices of the group share a node.  In a torus the links of those dimensions
  work along which the group extends.

  Args:
    moved: bytes that each device sends, counted as for a ring.
    members: devices of one group.
    chip: rates.
  """
  if not chip.link_rate:
    return 0.0
  if chip.network_rate is None:
    coords = np.array([device.coords for device in members])
    extends = (coords != coords[:1]).any(axis=0).sum()
    dimensions = chip.example.count('x') + 1
    return moved / (chip.link_rate * max(extends, 1) / dimensions)
  nodes = {device.process_index for device in members}
  seconds = moved / chip.link_rate
  if len(nodes) > 1:
    ports = max(len(members) / len(nodes), 1)
    seconds = max(seconds, moved / (ports * chip.network_rate))
  return seconds


@dataclasses.dataclass(frozen=True)
class Step:
  """A whole step, on one device."""

  phases: dict[str, float]  # seconds
  bounds: dict[str, str]  # phase -> what takes the most time in it
  seconds: float
  tokens_per_second: float  # per device, prompts and responses
  moved: float  # bytes that it sends
  flops: float


def step(found: Sequence[Cost], tokens: float, devices: int) -> Step:
  """Sums the programs of a step over their calls.

  Args:
    found: see `costs`.
    tokens: of all sequences of a step.
    devices: of the run.
  """
  phases, bounds = {}, {}
  for name in programs_lib.PHASES:
    own = [cost for cost in found if cost.phase == name]
    if own:
      phases[name] = sum(cost.seconds * cost.calls for cost in own)
      longest = max(own, key=lambda cost: cost.seconds * cost.calls)
      bounds[name] = longest.bound
  seconds = sum(phases.values())
  return Step(
    phases=phases,
    bounds=bounds,
    seconds=seconds,
    tokens_per_second=tokens / seconds / devices if seconds else math.nan,
    moved=sum(x.moved * c.calls for c in found for x in c.traffic),
    flops=sum(cost.flops * cost.calls for cost in found),
  )


def plain(value: Any) -> Any:
  """Dataclasses and their properties as JSON-able values."""
  if dataclasses.is_dataclass(value):
    fields = {x.name: getattr(value, x.name) for x in dataclasses.fields(value)}
    extra = {
      name: getattr(value, name)
      for name, x in vars(type(value)).items()
      if isinstance(x, property)
    }
    return plain(fields | extra)
  if isinstance(value, dict):
    return {key: plain(x) for key, x in value.items()}
  if isinstance(value, (list, tuple)):
    return [plain(x) for x in value]
  return value
