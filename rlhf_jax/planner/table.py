"""What `launch/plan.py` prints: one table, a verdict and suggestions."""

from collections.abc import Sequence

from rlhf_jax.planner import compilation
from rlhf_jax.planner import estimate
from rlhf_jax.planner import fit
from rlhf_jax.sharding import chips
from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.trainers import setup as setup_lib

_KINDS = (
  'parameters',
  'optimizer',
  'gradients',
  'reference',
  'weights',
  'cache',
)


def lines(
  setup: setup_lib.Setup,
  target: chips.Target,
  found: Sequence[compilation.Phase],
  costs: Sequence[estimate.Cost],
  step: estimate.Step,
  most: int | None,
) -> list[str]:
  """The whole text.

  Args:
    setup: of the stage, with the micro-batch in force.
    target: planned for.
    found: memory by phase.
    costs: of the programs.
    step: their sum.
    most: bytes of a device.
  """
  numbers, shape = setup.numbers, dict(setup.mesh.shape)
  groups = mesh_lib.data_groups(setup.mesh)
  axes = ' '.join(f'{name}={n}' for name, n in shape.items() if n > 1)
  return [
    f'{setup.config.name}, stage {setup.name}, on {target}:'
    f' {setup.mesh.size} devices, mesh {axes or "of one device"}',
    f'{numbers.sequences_per_step} sequences of {numbers.longest_sequence}'
    f' tokens a step, {numbers.updates_per_step} updates,'
    f' {numbers.tokens_per_microbatch // groups} tokens per micro-batch and'
    f' data group; {setup.config.model.dtype},'
    f' rollout {setup.config.rollout.dtype}',
    '',
    *_memory(found, most),
    '',
    *_programs(costs),
    '',
    *_traffic(costs),
    '',
    *_time(step, setup, target),
    '',
    *verdict(setup, found, costs, step, most),
  ]


def _memory(found, most) -> list[str]:
  small = max(phase.peak for phase in found) < 2**30
  unit, name = (2**20, 'MiB') if small else (2**30, 'GiB')
  size = lambda n: f'{n / unit:.2f}'
  head = ''.join(f'{kind:>11}' for kind in _KINDS)
  out = [
    f'Memory per device, {name} (activations: temporaries and batches of the'
    ' largest program)',
    f'  {"phase":<14}{head}{"activations":>13}{"total":>9}',
  ]
  for phase in found:
    sums = [
      sum(n for kind, n in phase.held.items() if kind.endswith(name))
      for name in _KINDS
    ]
    numbers = ''.join(f'{size(n):>11}' for n in sums)
    out.append(
      f'  {phase.name:<14}{numbers}{size(phase.passing):>13}'
      f'{size(phase.peak):>9}  {phase.program}'
    )
  return out + [f'  of {"no limit" if most is None else size(most)}']


def _programs(costs) -> list[str]:
  out = [
    'Programs',
    f'  {"":<18}{"calls":>8}{"compiled in":>13}{"TFLOP":>9}'
    f'{"memory GB":>11}{"sent GB":>9}{"seconds":>10}  bound by',
  ]
  for cost in costs:
    took = cost.compile_seconds
    sent = sum(x.moved for x in cost.traffic)
    out.append(
      f'  {cost.name:<18}{cost.calls:>8g}'
      f'{"" if took is None else f"{took:.1f} s":>13}{cost.flops / 1e12:>9.2f}'
      f'{cost.memory_bytes / 1e9:>11.2f}{sent / 1e9:>9.2f}'
      f'{cost.seconds:>10.4f}  {cost.bound if cost.seconds else "-"}'
    )
  return out


def _traffic(costs) -> list[str]:
  out = [
    'Collectives of a call (GB that a device sends; hidden: behind computation)'
  ]
  for cost in costs:
    for one in cost.traffic:
      if one.moved < 1e6:  # counts and norms
        continue
      hidden = 'hidden' if one.hidden else 'exposed'
      out.append(
        f'  {cost.name:<18}{one.kind:<19}{one.axes:<14}{one.count:>7g} x'
        f'{one.moved / 1e9:>9.3f}  {hidden:<8}{one.largest[-70:]}'
      )
  return out + (['  none'] if len(out) == 1 else [])


def _time(step, setup, target) -> list[str]:
  if not step.seconds:
    return ['No time: simulated devices share the cores of one machine']
  parts = ', '.join(
    f'{name} {seconds:.2f} ({step.bounds[name]})'
    for name, seconds in step.phases.items()
  )
  chip = target.chip
  share = step.flops / step.seconds / chip.flops
  return [
    f'Least time of a step: {step.seconds:.2f} s = {parts}',
    f'  {step.tokens_per_second:,.0f} tokens/s per device,'
    f' {step.tokens_per_second * setup.mesh.size:,.0f} in all;'
    f' {step.flops / 1e12:,.0f} TFLOP and {step.moved / 1e9:,.0f} GB sent per'
    f' device; {share:.0%} of peak',
  ]


def verdict(setup, found, costs, step, most) -> list[str]:
  """Whether it fits, and what to change."""
  worst = max(found, key=lambda phase: phase.peak)
  if most is None:
    out = [f'Verdict: no limit to compare with; {worst.name} needs the most']
  elif worst.peak > most:
    out = [
      f'Verdict: DOES NOT FIT: {worst.name} needs'
      f' {compilation.text(worst.peak)} of {compilation.text(most)}'
    ]
    out += [f'  - {text}' for text in fit.remedies(setup, worst)[:3]]
  else:
    out = [
      f'Verdict: fits; {worst.name} needs the most,'
      f' {compilation.text(worst.peak)} of {compilation.text(most)}'
      f' ({worst.peak / most:.0%})'
    ]
  return out + [
    f'  - {text}' for text in suggestions(setup, found, costs, step, most)
  ]


def suggestions(setup, found, costs, step, most) -> list[str]:
  """What would make a step shorter."""
  out, config, shape = [], setup.config, setup.mesh.shape
  by_name = {cost.name: cost for cost in costs}
  peaks = {phase.name: phase.peak for phase in found}
  accumulate = by_name['actor/accumulate']
  update = peaks['update_actor']
  if step.seconds and accumulate.bound == 'network':
    nodes = {d.process_index for d in setup.mesh.devices.flat}
    node = setup.mesh.size // len(nodes)
    inside = node // shape['tensor']
    if shape['fsdp'] > inside > 1 and len(nodes) > 1:
      out.append(
        f'updates wait for the network: mesh.fsdp={inside} keeps the gathers'
        ' inside of nodes, if that fits'
      )
    out.append(
      'updates wait for the network: a larger training.tokens_per_microbatch'
      ' gathers the weights less often'
    )
  elif most and update < 0.6 * most and accumulate.calls > 1:
    out.append(
      f'the update leaves {1 - update / most:.0%} of the memory:'
      " training.tokens_per_microbatch='auto' would use it"
    )
  decode = by_name.get('advance')
  if decode and decode.bound == 'memory' and most:
    room = most - peaks['gen']
    if room > 0.3 * most and config.rollout.slots < (
      setup.numbers.sequences_per_step
    ):
      out.append(
        'decoding is bound by memory and has room: more rollout.slots read the'
        ' weights for more sequences'
      )
  for cost in costs:
    for one in cost.traffic:
      if one.axes.endswith('?'):
        out.append(
          f'{cost.name}: {one.kind} over groups that are no mesh axes'
          f' ({one.largest[-60:]}): a sharding that the compiler made up'
        )
  return out
