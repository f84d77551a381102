"""Whether a stage fits, and the micro-batch that does, before the first step.

`ahead` compiles every program, refuses what does not fit, and picks the
micro-batch where that is 'auto'.
"""

from collections.abc import Callable, Sequence
import dataclasses
import math
import time

import jax
from ml_collections import ConfigDict

from rlhf_jax.planner import compilation
from rlhf_jax.planner import programs as programs_lib
from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.sharding import multihost
from rlhf_jax.trainers import arithmetic
from rlhf_jax.trainers import roles as roles_lib
from rlhf_jax.trainers import run as run_lib
from rlhf_jax.trainers import setup as setup_lib
from rlhf_jax.trainers import workdir


def limit(config: ConfigDict, mesh: jax.sharding.Mesh) -> int | None:
  """Bytes that a device may hold; None where nobody says (CPU)."""
  if config.memory_limit_bytes:
    return config.memory_limit_bytes
  own = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
  reported = [device.memory_stats() or {} for device in own]
  reported = [x['bytes_limit'] for x in reported if 'bytes_limit' in x]
  return min(reported, default=None)


def ahead(
  setup: setup_lib.Setup, run: run_lib.Run, parts: roles_lib.Parts
) -> setup_lib.Setup:
  """Compiles a stage before it begins, and sees that it fits.

  The loop finds what is compiled here in JAX's cache.

  Args:
    setup: of the stage.
    run: that goes on from a checkpoint, or not.
    parts: what the stage computes with.

  Returns:
    The setup with the micro-batch in force: that of the checkpoint in a stage
    that is resumed, else the config's, else the largest that fits.

  Raises:
    DoesNotFit: has the numbers, and what would help.
  """
  config = setup.config
  if config.evaluation.only:
    return setup
  began = time.perf_counter()
  # The same answer in every process.
  limits = multihost.gather(setup.islands, limit(config, setup.mesh))
  most = min((x for x in limits if x is not None), default=None)
  if run.restored_in(setup.name) is not None:
    setup = with_microbatch(setup, run.host.tokens_per_microbatch)
    done = compilation.compile_all(programs_lib.of_stage(setup, parts))
  elif config.training.tokens_per_microbatch == arithmetic.AUTO:
    setup, done = largest_that_fits(setup, parts, most)
  else:
    done = compilation.compile_all(
      programs_lib.of_stage(_heed(setup, run), parts)
    )
  found = compilation.phases(done)
  check(setup, found, most)
  seconds = time.perf_counter() - began
  for line in describe(found, most):
    run.console.note(line)
  groups = mesh_lib.data_groups(setup.mesh)
  tokens = setup.numbers.tokens_per_microbatch // groups
  run.writer.event(
    'memory',
    f'{len(done.compiled)} programs of stage {setup.name} compiled ahead'
    f' ({tokens} tokens per micro-batch and data group)',
    stage=setup.name,
    step=run.host.step,
    seconds=seconds,
    tokens_per_microbatch=tokens,
    limit_bytes=most or 0,
    peak_bytes={phase.name: phase.peak for phase in found},
  )
  return setup


def _heed(setup: setup_lib.Setup, run: run_lib.Run) -> setup_lib.Setup:
  """With what `Run.heed_memory` will lower the micro-batch to."""
  known = workdir.allowed_microbatch(run.workdir, setup.name)
  if known is None:
    return setup
  own = setup.numbers.tokens_per_microbatch // mesh_lib.data_groups(setup.mesh)
  return with_microbatch(setup, min(own, known['tokens_per_microbatch']))


def with_microbatch(setup: setup_lib.Setup, tokens: int) -> setup_lib.Setup:
  """The setup with so many tokens per micro-batch and data group."""
  numbers = arithmetic.with_microbatch(
    setup.numbers,
    tokens,
    tokens_per_row=setup.config.training.tokens_per_row,
    data_groups=mesh_lib.data_groups(setup.mesh),
  )
  return dataclasses.replace(setup, numbers=numbers)


def largest_that_fits(
  setup: setup_lib.Setup,
  parts: roles_lib.Parts,
  most: int | None,
  note: Callable[[str], None] = lambda line: None,
) -> tuple[setup_lib.Setup, compilation.Compilation]:
  """The largest micro-batch of 1, 2, 4, .. rows per data group that fits.

  Memory grows with the rows nearly in proportion: two compilations tell where
  to look, and the answer is one that fits below one that does not (or below
  what a whole mini-batch needs).

  Args:
    setup: of the stage.
    parts: what it computes with.
    most: bytes of a device.
    note: is told of every program that is compiled.

  Raises:
    DoesNotFit: not even one row does.
    ValueError: nothing says what a device has.
  """
  if most is None:
    raise workdir.Refused(
      "training.tokens_per_microbatch='auto' needs to know what a device has,"
      f' and {setup.mesh.devices.flat[0].device_kind} does not say: set'
      ' memory_limit_bytes, or a number of tokens'
    )
  row = setup.config.training.tokens_per_row
  tried: dict[int, tuple[setup_lib.Setup, compilation.Compilation, int]] = {}
  fixed: dict[str, jax.stages.Compiled] = {}

  def peak(rows):
    if rows not in tried:
      one = with_microbatch(setup, rows * row)
      try:
        done = compilation.compile_all(
          programs_lib.of_stage(one, parts), fixed, note
        )
      except compilation.DoesNotFit:
        if rows == 1:
          raise
        return math.inf
      fixed.update(
        (program.name, done.compiled[program.name])
        for program in done.plan.programs
        if not program.by_rows
      )
      tried[rows] = one, done, max(x.peak for x in compilation.phases(done))
    return tried[rows][2]

  smallest = peak(1)
  check(tried[1][0], compilation.phases(tried[1][1]), most)
  # More rows than a mini-batch can have would only be padding.
  enough = programs_lib.microbatches(tried[1][0])
  rows = 1
  if enough > 1 and peak(2) <= most:
    rows = 2
    growth = max(tried[2][2] - smallest, 1)
    guess = 2 ** int(math.log2(max(1 + (most - smallest) / growth, 2)))
    rows = min(guess, 2 ** math.ceil(math.log2(enough)))
    while peak(rows) > most:
      rows //= 2
    while rows < enough and peak(2 * rows) <= most:
      rows *= 2
  return tried[rows][:2]


def check(
  setup: setup_lib.Setup, found: Sequence[compilation.Phase], most: int | None
) -> None:
  """Refuses a stage of which a phase does not fit."""
  worst = max(found, key=lambda phase: phase.peak)
  if most is None or worst.peak <= most:
    return
  text = compilation.text
  kinds = ', '.join(
    f'{kind} {text(size)}' for kind, size in worst.held.items() if size
  )
  lines = [
    f'stage {setup.name!r} does not fit: phase {worst.name!r} needs'
    f' {worst.peak:,} bytes on a device ({text(worst.peak)}), which has'
    f' {most:,} ({text(most)}).',
    f'  It holds {kinds}, and {text(worst.passing)} for {worst.program}.',
    '  What would help, cheapest first:',
  ]
  lines += [f'  - {text}' for text in remedies(setup, worst)[:3]]
  raise compilation.DoesNotFit('\n'.join(lines))


def remedies(setup: setup_lib.Setup, worst: compilation.Phase) -> list[str]:
  """Changes of the config that make a phase smaller, cheapest first."""
  text = compilation.text
  config, shape = setup.config, setup.mesh.shape
  groups = mesh_lib.data_groups(setup.mesh)
  tokens = setup.numbers.tokens_per_microbatch // groups
  row = config.training.tokens_per_row
  held, shards = worst.held, shape['fsdp'] * shape['tensor']
  of = lambda *names: sum(
    size for kind, size in held.items() if any(name in kind for name in names)
  )
  update, rollout = worst.name.startswith('update_'), worst.name == 'gen'
  slots = config.rollout.slots // 2
  moments = config.actor.optimizer.moments_dtype
  choices = [
    # applies, bytes that it saves about, what to set, what it costs
    (
      tokens > row and worst.program.endswith(_BY_ROWS),
      worst.passing / 2,
      f'training.tokens_per_microbatch={tokens // 2 // row * row}',
      'smaller products',
    ),
    (
      rollout and slots >= groups,
      of('cache') / 2,
      f'rollout.slots={slots}',
      'more rounds of decoding',
    ),
    (
      not update and not config.offload.optimizer,
      of('optimizer'),
      'offload.optimizer=True',
      'copies before and after the updates',
    ),
    (
      worst.name != 'ref' and not config.offload.reference,
      of('reference'),
      'offload.reference=True',
      'one copy a step',
    ),
    (
      shape['data'] > 1,
      of('parameters', 'optimizer', 'gradients', 'reference') / 2,
      f'mesh.fsdp={shape["fsdp"] * 2} mesh.data={shape["data"] // 2}',
      'gathers reach over more devices',
    ),
    (
      update and setup.remat == 'none',
      worst.temporaries / 2,
      'model.remat=block',
      'one more forward pass in the updates',
    ),
    (
      moments == 'float32',
      of('optimizer') / 2,
      'actor.optimizer.moments_dtype=bfloat16, and of the critic',
      'rounded moments',
    ),
    (
      rollout and shape['tensor'] < setup.model.num_kv_heads,
      of('rollout weights') / 2,
      f'mesh.tensor={shape["tensor"] * 2}',
      'reductions in every layer',
    ),
    (
      256 < config.model.head_chunk <= tokens
      and worst.program.endswith(_BY_ROWS),
      4 * config.model.head_chunk * setup.model.vocab_size / shape['tensor'],
      f'model.head_chunk={config.model.head_chunk // 2}',
      'smaller products with the vocabulary',
    ),
    (
      True,
      of('parameters', 'optimizer', 'gradients', 'reference') / 2,
      f'twice the devices (parameters are in {shards} shards now)',
      'devices',
    ),
  ]
  return [
    f'{what}: about {text(saves)} less; costs {costs}'
    for applies, saves, what, costs in choices
    if applies and saves > 0
  ]


_BY_ROWS = ('accumulate', 'reference', 'log-probs', 'values')


def describe(found: Sequence[compilation.Phase], most: int | None) -> list[str]:
  """One line per phase."""
  text = compilation.text
  has = 'no limit' if most is None else f'of {text(most)}'
  return [
    f'  memory {phase.name:<13} {text(phase.peak):>10} per device {has}:'
    f' {text(sum(phase.held.values()))} stay,'
    f' {text(phase.passing)} for {phase.program}'
    for phase in found
  ]
