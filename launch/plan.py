"""Plans: python launch/plan.py --config=configs/NAME.py --target=h100:128x8.

Compiles every program of a run for devices that are not there, and prints what
they need: memory by phase, collectives, operations, the least time of a step.

  --config=configs/NAME.py[:VARIANT]   the experiment
  --config.some.key=value              changes one value of it
  --target=h100:8 | h100:128x8 | h200:.. | a100:..   one node, nodes x devices
           v5p:8x16x8 | v5e:4x4 | v6e:.. | v4:..     a torus
           cpu:8                                     simulated devices
  --stage=NAME                         by default the last one
  --json=FILE                          the same as numbers

Needs `pip install 'rlhf_jax[plan-gpu]'` or `[plan-tpu]`, neither of which needs
a device or a driver; without them it plans on simulated CPU devices.

Exits with 0 if the run fits, 2 if it does not, 1 if it cannot be done at all.
"""

import json
import os
import pathlib
import subprocess
import sys

os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')
# `configs` is not part of the installed package.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from absl import app  # noqa: E402
from absl import flags  # noqa: E402
from ml_collections import config_flags  # noqa: E402
from ml_collections import ConfigDict  # noqa: E402

from rlhf_jax.planner import compilation  # noqa: E402
from rlhf_jax.planner import estimate  # noqa: E402
from rlhf_jax.planner import fit  # noqa: E402
from rlhf_jax.planner import programs as programs_lib  # noqa: E402
from rlhf_jax.planner import table  # noqa: E402
from rlhf_jax.sharding import chips  # noqa: E402
from rlhf_jax.trainers import arithmetic  # noqa: E402
from rlhf_jax.trainers import ppo  # noqa: E402
from rlhf_jax.trainers import setup as setup_lib  # noqa: E402
from rlhf_jax.trainers import sft  # noqa: E402

PARTS = {'ppo': ppo.parts, 'sft': sft.parts}
# Of a device's memory: the driver, the buffers of collectives and what the
# allocator cannot use take the rest.  (A run on GPUs must ask for as much,
# XLA_PYTHON_CLIENT_MEM_FRACTION=0.9; the default is 0.75.)
USABLE = 0.9
# Set for the process that compiles: the target that it has devices of.
_CHILD = 'RLHF_JAX_PLAN_TARGET'

CONFIG = config_flags.DEFINE_config_file('config', lock_config=True)
TARGET = flags.DEFINE_string('target', None, 'Devices to plan for.')
STAGE = flags.DEFINE_string('stage', '', 'Stage to plan; the last by default.')
JSON = flags.DEFINE_string('json', '', 'File for the same as numbers.')


def plan(
  config: ConfigDict, target: chips.Target, asked: chips.Target, stage: str
) -> tuple[list[str], dict, bool]:
  """Compiles a stage.

  Args:
    config: from a file in configs/.
    target: whose devices this process can compile for.
    asked: the target whose rates and memory count.
    stage: its name, '' is the last.

  Returns:
    The lines to print, the numbers, and whether it fits.

  Raises:
    ValueError: the run cannot be done as configured.
  """
  if target != asked:  # the precision of the target, not of a CPU
    with config.unlocked():
      config.model.dtype = config.rollout.dtype = 'bfloat16'
  setups = setup_lib.stages(config, tuple(PARTS), devices=chips.devices(target))
  names = [setup.name for setup in setups]
  if stage and stage not in names:
    raise ValueError(f'--stage={stage!r} is not one of {names}')
  setup = setups[names.index(stage) if stage else -1]
  most = config.memory_limit_bytes or (
    int(USABLE * asked.chip.memory_bytes) if asked.chip.memory_bytes else None
  )
  parts = PARTS[setup.trainer](setup)
  if config.training.tokens_per_microbatch == arithmetic.AUTO:
    setup, done = fit.largest_that_fits(setup, parts, most, _progress)
  else:
    plan_ = programs_lib.of_stage(setup, parts)
    done = compilation.compile_all(plan_, note=_progress)
  found, costs = compilation.phases(done), estimate.costs(done, asked.chip)
  numbers = setup.numbers
  tokens = numbers.sequences_per_step * numbers.longest_sequence
  step = estimate.step(costs, tokens, setup.mesh.size)
  fits = most is None or max(phase.peak for phase in found) <= most
  values = dict(
    config=config.name,
    target=str(asked),
    compiled_for=str(target),
    devices=setup.mesh.size,
    mesh=dict(setup.mesh.shape),
    limit_bytes=most,
    fits=fits,
    numbers=estimate.plain(numbers),
    memory=estimate.plain(found),
    programs=estimate.plain(costs),
    step=estimate.plain(step),
  )
  return table.lines(setup, asked, found, costs, step, most), values, fits


def _progress(line: str) -> None:
  print(line, file=sys.stderr, flush=True)


def start(asked: chips.Target, arguments: list[str]) -> int:
  """Runs this file again, with the environment that the target needs."""
  target, missing = asked, chips.extra(asked)
  if missing:
    target = chips.Target(chips.CHIPS['cpu'], (asked.count,))
    print(
      f"without `pip install 'rlhf_jax[{missing}]'` there is no compiler for"
      f' {asked}: this plans on {asked.count} simulated CPU devices.\n'
      'Parameters, optimiser, cache and operations are right. Left open:'
      ' temporaries (the CPU computes bfloat16 in float32, and has no attention'
      ' kernels), which collectives the real compiler joins or hides, nodes'
      ' (here all devices are one), and so whether it fits by a small margin,'
      ' and the times.\n',
      flush=True,
    )
  environment = os.environ | chips.environment(target) | {_CHILD: str(target)}
  ours = chips.environment(target).get('XLA_FLAGS', '')
  flags_ = f'{os.environ.get("XLA_FLAGS", "")} {ours}'.strip()
  environment = environment | ({'XLA_FLAGS': flags_} if flags_ else {})
  code = subprocess.run(
    [sys.executable, __file__, *arguments], env=environment
  ).returncode
  if code < 0:
    print(
      f'error: the compiler died of signal {-code} while it compiled for'
      f' {target}; the last lines above are its own',
      file=sys.stderr,
    )
    return 1
  return code


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments: {argv[1:]}')
  try:
    asked = chips.parse(TARGET.value)
    if _CHILD not in os.environ:
      sys.exit(start(asked, sys.argv[1:]))
    target = chips.parse(os.environ[_CHILD])
    lines, values, fits = plan(CONFIG.value, target, asked, STAGE.value)
  except (ValueError, FileNotFoundError, ImportError) as error:
    sys.exit(f'error: {error}')
  print('\n'.join(lines))
  if JSON.value:
    path = pathlib.Path(JSON.value)
    path.write_text(json.dumps(values, indent=2) + '\n')
  sys.exit(0 if fits else 2)


if __name__ == '__main__':
  flags.mark_flags_as_required(['config', 'target'])
  app.run(main)
