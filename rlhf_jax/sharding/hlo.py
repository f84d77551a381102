"""Collectives of a compiled program, read from its HLO text."""

from collections.abc import Sequence
import dataclasses
import math
import re

import numpy as np

# An instruction: `%name = TYPE op(operands), attributes`.
_INSTRUCTION = re.compile(r'^\s+(ROOT )?%?([\w.\-]+) = (.*)$')
_OP = re.compile(r'(?:^|[\s)}\]])([a-z][a-z0-9\-]*)\(')
_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$')
_ARRAY = re.compile(r'\b([a-z][a-z0-9]*)\[([0-9,]*)\]')
_CALLED = re.compile(
  r'(?:calls|to_apply|body|condition|true_computation|false_computation)='
  r'%?([\w.\-]+)'
)
_CALLED_LISTS = re.compile(
  r'(?:branch_computations|called_computations)=\{([^}]*)\}'
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_GROUPS = re.compile(r'replica_groups=\{(\{[\d,{}]*\})\}')
_IOTA = re.compile(
  r'replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?'
)
# mesh['a'=8,'b'=128], device_ids=([128,8]T(1,0)) {'a'}: of the devices in this
# order, laid out as this mesh, a group differs along these axes (or parts of
# them, 'a':(2)4).
_MESH = re.compile(
  r'replica_groups=mesh\[([^\]]*)\]'
  r'(?:, ?device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{([^}]*)\}'
)
_AXIS = re.compile(r"'([^']+)'(?:=(\d+))?(?::\((\d+)\)(\d+))?")
_PAIRS = re.compile(r'source_target_pairs=\{(\{[\d,{}]*\})\}')
_CHANNEL = re.compile(r'channel_id=(\d+)')
_CONDITION = re.compile(r'condition=%?([\w.\-]+)')
_NUMBER = re.compile(r'^\((\d+)\)')
_SOURCE = re.compile(r'op_name="([^"]*)"')

KINDS = (
  'all-gather',
  'all-reduce',
  'reduce-scatter',
  'all-to-all',
  'collective-permute',
  'ragged-all-to-all',
  'collective-broadcast',
)


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective instruction, with how often a call of the program runs it.

  `moved` counts the bytes that one device sends in one run, by a ring (n
  devices in a group, s bytes of operands on each):

    all-gather (n-1) s, reduce-scatter and all-to-all (n-1)/n s,
    all-reduce 2 (n-1)/n s, permute and others s
  """

  kind: str
  operand_bytes: int  # on one device
  group: tuple[int, ...]  # the first group, as places in the flat mesh
  runs: float
  hidden: bool  # computation is scheduled while it is under way
  source: str  # where in the program it comes from
  type: str  # of the result, as HLO writes it

  @property
  def moved(self) -> float:
    n = len(self.group)
    if n <= 1:
      return 0.0
    share = {
      'all-gather': n - 1.0,
      'reduce-scatter': (n - 1) / n,
      'all-to-all': (n - 1) / n,
      'all-reduce': 2 * (n - 1) / n,
    }
    return self.operand_bytes * share.get(self.kind, 1.0)


def collectives(
  text: str, device_count: int, trips: float = 1.0
) -> list[Collective]:
  """The collectives of a compiled program, in the order of its text.

  Args:
    text: `compiled.as_text()`.
    device_count: of the program.
    trips: runs of an outermost loop whose count the compiler does not know; of
      such loops inside of others it assumes one.
  """
  computations, entry = _parse(text)
  runs = _runs(computations, entry, trips)
  # What a TPU does in the background: beginning, middle and end are fusions
  # with other work, and each shows the whole collective.
  background = {
    _channel(one)
    for name, instructions in computations.items()
    for one in instructions
    if name.startswith('async_collective_fusion') and one.op in KINDS
  }
  found, begun = [], set()
  for name, instructions in computations.items():
    if not runs.get(name):
      continue
    types = {one.name: one.type for one in instructions}
    for place, one in enumerate(instructions):
      kind = one.op.removesuffix('-start')
      if kind not in KINDS:
        continue
      channel = _channel(one)
      if channel in background:
        if channel in begun:
          continue
        begun.add(channel)
      # A TPU's name for one that leaves each device its part.
      if kind == 'all-reduce' and name.startswith('all-reduce-scatter'):
        kind = 'reduce-scatter'
      operands = _operands(one.rest)
      size = sum(_nbytes(types.get(operand, '')) for operand in operands)
      found.append(
        Collective(
          kind=kind,
          operand_bytes=size,
          group=_group(one.rest, device_count),
          runs=runs[name],
          hidden=channel in background
          or (one.op.endswith('-start') and _overlaps(instructions, place)),
          source=''.join(_SOURCE.findall(one.rest)[:1]),
          type=one.type,
        )
      )
  return found


def axes_of(
  group: Sequence[int], sizes: dict[str, int]
) -> tuple[tuple[str, ...], bool]:
  """The mesh axes along which the members of a group differ.

  Args:
    group: places in the flat mesh.
    sizes: of the mesh, by axis.

  Returns:
    The axes, in order of the mesh, and whether the group fills them.
  """
  shape = tuple(sizes.values())
  places = np.stack(np.unravel_index(np.asarray(group), shape))
  differ = (places != places[:, :1]).any(axis=1)
  names = tuple(name for name, d in zip(sizes, differ) if d)
  return names, math.prod(sizes[name] for name in names) == len(group)


@dataclasses.dataclass(frozen=True)
class _Instruction:
  name: str
  type: str
  op: str
  rest: str  # operands and attributes


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str]:
  """The instructions of every computation, and the entry's name."""
  computations, entry, current = {}, '', None
  for line in text.splitlines():
    if current is None or not line.startswith(' '):
      found = _COMPUTATION.match(line.strip()) if '{' in line else None
      if found and not line.startswith('HloModule'):
        current = computations.setdefault(found.group(2), [])
        entry = found.group(2) if found.group(1) else entry
      continue
    found = _INSTRUCTION.match(line)
    if not found:
      continue
    name, rest = found.group(2), found.group(3)
    op = _OP.search(rest)
    if op:
      current.append(
        _Instruction(name, rest[: op.start(1)], op.group(1), rest[op.end(1) :])
      )
  return computations, entry


def _channel(one: _Instruction) -> tuple[str, ...]:
  return one.op, *_CHANNEL.findall(one.rest)[:1]


def _runs(computations, entry: str, trips: float) -> dict[str, float]:
  """How often a call of the program runs each computation.

  All branches of a conditional count, since any may be taken.
  """
  total: dict[str, float] = {}

  def visit(name, times, in_loop):
    total[name] = total.get(name, 0.0) + times
    for one in computations.get(name, ()):
      called = _CALLED.findall(one.rest)
      for several in _CALLED_LISTS.findall(one.rest):
        called += [x.strip().lstrip('%') for x in several.split(',')]
      if not called:
        continue
      inner, loop = times, in_loop
      if one.op == 'while':
        known = _trips(one, computations)
        inner = times * (known or (1.0 if in_loop else trips))
        loop = True
      for other in called:
        if other in computations:
          visit(other, inner, loop)

  visit(entry, 1.0, False)
  return total


def _trips(loop: _Instruction, computations) -> float | None:
  """How often a loop runs, None where that is data."""
  known = _TRIPS.search(loop.rest)
  if known:
    return float(known.group(1))
  # As `lax.scan` makes it: from 0, as long as it is less than a number.
  condition = computations.get(''.join(_CONDITION.findall(loop.rest)[:1]), ())
  compares = [x for x in condition if x.op == 'compare']
  numbers = {
    x.name: float(_NUMBER.search(x.rest).group(1))
    for x in condition
    if x.op == 'constant' and _NUMBER.search(x.rest)
  }
  if len(compares) != 1 or 'direction=LT' not in compares[0].rest:
    return None
  return numbers.get(_operands(compares[0].rest)[-1])


def _operands(rest: str) -> list[str]:
  """Names between the parentheses that begin `rest`."""
  depth = 0
  for place, character in enumerate(rest):
    depth += (character == '(') - (character == ')')
    if not depth:
      return re.findall(r'%([\w.\-]+)', rest[:place])
  return []


def _nbytes(type_: str) -> int:
  """Bytes of an array type, or of all arrays of a tuple type."""
  return sum(
    math.prod(int(x) for x in shape.split(',') if x) * _itemsize(dtype)
    for dtype, shape in _ARRAY.findall(type_)
  )


def _itemsize(dtype: str) -> int:
  bits = re.search(r'\d+', dtype)
  if not bits:
    return {'pred': 1}.get(dtype, 0)  # tokens and the like have no bytes
  return max(int(bits.group()) // 8, 1)


def _group(rest: str, device_count: int) -> tuple[int, ...]:
  """The first group of devices of a collective."""
  iota = _IOTA.search(rest)
  if iota:
    groups, shape, order = (
      [int(x) for x in part.split(',')] if part else None
      for part in iota.groups()
    )
    places = np.arange(math.prod(shape)).reshape(shape)
    if order is not None:
      places = places.transpose(order)
    return tuple(places.reshape(groups)[0].tolist())
  mesh = _MESH.search(rest)
  if mesh:
    return _mesh_group(*mesh.groups())
  found = _GROUPS.search(rest)
  if found:
    first = found.group(1).split('}')[0].lstrip('{')
    return tuple(int(x) for x in first.split(',') if x)
  pairs = _PAIRS.search(rest)
  if pairs:
    # Who sends to whom: the farthest pair stands for all.
    ends = re.findall(r'\{(\d+),(\d+)\}', pairs.group(0))
    ends = [(int(a), int(b)) for a, b in ends if a != b]
    return max(ends, key=lambda p: abs(p[0] - p[1]), default=(0,))
  return tuple(range(device_count))


def _mesh_group(axes, shape, order, along) -> tuple[int, ...]:
  """The first group of the form `_MESH`."""
  sizes = {name: int(size) for name, size, *_ in _AXIS.findall(axes)}
  places = np.arange(math.prod(sizes.values()))
  if shape:
    places = places.reshape([int(x) for x in shape.split(',')])
  if order:
    places = places.transpose([int(x) for x in order.split(',')])
  places = places.reshape(tuple(sizes.values()))
  index = [np.zeros(1, int)] * len(sizes)
  for name, _, before, part in _AXIS.findall(along):
    place, size = list(sizes).index(name), sizes[name]
    steps = np.arange(size)
    if part:
      # The axis is (before, part, rest): only the middle varies.
      steps = np.arange(int(part)) * (size // int(before) // int(part))
    index[place] = (index[place][:, None] + steps).reshape(-1)
  return tuple(places[np.ix_(*index)].reshape(-1).tolist())


def _overlaps(instructions: Sequence[_Instruction], start: int) -> bool:
  """Whether anything is computed between a start and its done."""
  name = instructions[start].name
  for one in instructions[start + 1 :]:
    if one.op.endswith('-done') and name in _operands(one.rest):
      return False
    if one.op in _COMPUTES:
      return True
  return False


# What takes time; bitcasts, tuples and the like do not.
_COMPUTES = ('fusion', 'dot', 'custom-call', 'while', 'conditional', 'call')
