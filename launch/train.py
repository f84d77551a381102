"""Trains: python launch/train.py --config=configs/NAME.py --workdir=DIR.

  --config=configs/NAME.py[:VARIANT]   the experiment
  --config.some.key=value              changes one value of it
  --workdir=DIR                        where everything goes
  --resume=auto|must|never             auto goes on with the same config, must
                                       needs a checkpoint, never an empty DIR

Several processes start with the same command; where srun, mpirun, a Kubernetes
Indexed Job or TPU metadata do not say which is which (docs/multihost.md):

  --coordinator=HOST:PORT --process_id=I --num_processes=N

Exits with 0 only when the run reached its last step, with 75 where memory ran
out and the same command, started again, goes on with smaller micro-batches.
"""

import json
import os
import pathlib
import sys
import time
from typing import Any

# Only its tokenizers are used: it need not say that there is no torch.
os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')
# `configs` is not part of the installed package.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from absl import app  # noqa: E402
from absl import flags  # noqa: E402
from absl import logging  # noqa: E402
import jax  # noqa: E402
import jaxlib  # noqa: E402
from ml_collections import config_flags  # noqa: E402
from ml_collections import ConfigDict  # noqa: E402

import rlhf_jax  # noqa: E402
from rlhf_jax.data import pipeline  # noqa: E402
from rlhf_jax.monitor import writers  # noqa: E402
from rlhf_jax.sharding import distributed  # noqa: E402
from rlhf_jax.sharding import jobs  # noqa: E402
from rlhf_jax.trainers import adapters  # noqa: E402
from rlhf_jax.trainers import checks  # noqa: E402
from rlhf_jax.trainers import memory  # noqa: E402
from rlhf_jax.trainers import ppo  # noqa: E402
from rlhf_jax.trainers import run as run_lib  # noqa: E402
from rlhf_jax.trainers import setup as setup_lib  # noqa: E402
from rlhf_jax.trainers import sft  # noqa: E402
from rlhf_jax.trainers import workdir as workdir_lib  # noqa: E402

TRAINERS = {'ppo': ppo.train, 'sft': sft.train}

CONFIG = config_flags.DEFINE_config_file('config', lock_config=True)
WORKDIR = flags.DEFINE_string('workdir', None, 'Where the run writes.')
RESUME = flags.DEFINE_enum(
  'resume', 'auto', workdir_lib.RESUME, 'What to do with what is in workdir.'
)
COORDINATOR = flags.DEFINE_string(
  'coordinator', None, 'HOST:PORT of process 0, on which it listens.'
)
PROCESS_ID = flags.DEFINE_integer(
  'process_id', None, 'Which process of the job this is, from 0.'
)
NUM_PROCESSES = flags.DEFINE_integer(
  'num_processes', None, 'Processes of the job; 1 runs alone.'
)
LOCAL_DEVICE_IDS = flags.DEFINE_list(
  'local_device_ids', None, 'GPUs of this host for this process: 0,1,...'
)
TPU_POD = flags.DEFINE_bool(
  'tpu_pod', False, 'All hosts of a Cloud TPU slice run this together.'
)

# Prompts of each stage that are compared between processes.
_COMPARED_PROMPTS = 64


def train(
  config: ConfigDict,
  workdir: str,
  resume: str = 'auto',
  from_flags: frozenset[str] = frozenset(),
) -> int:
  """Runs all stages of a config.

  Args:
    config: from a file in configs/.
    workdir: folder of the run.
    resume: 'auto', 'must' or 'never'.
    from_flags: dotted keys that were set on the command line.

  Returns:
    The exit code: 0 if the run reached its last step.

  Raises:
    Refused: the run cannot be done as configured; nothing was compiled.
  """
  began = time.time()
  # ---- Checks: all of them before anything is compiled or written ----------
  workdir = pathlib.Path(workdir).expanduser().resolve()
  resolved = writers.plain(config)
  try:
    distributed.agree('program', program(resolved, workdir, resume))
    workdir_lib.check_workdir(workdir, resolved, resume)
    if not config.evaluation.only and run_lib.show_finished(workdir):
      return 0
    notes = checks.check_overrides(config, from_flags)
    setups = setup_lib.stages(config, tuple(TRAINERS))
    # Also waits for all: nothing is written while one still checks.
    distributed.agree('data', data(setups))
  except (ValueError, FileNotFoundError, ImportError) as error:
    raise workdir_lib.Refused(str(error)) from error

  # ---- The run: one stage after the other ----------------------------------
  run = run_lib.open_run(
    workdir,
    resolved,
    setups,
    keep=config.checkpoint.keep,
    tensorboard=config.tensorboard,
    wandb=config.wandb,
    began=began,
  )
  total = sum(setup.numbers.steps for setup in setups)
  reason = 'error'
  try:
    run_lib.introduce(run, setups, notes)
    params = _stages(run, setups)
    if config.evaluation.only:
      reason = 'evaluated'
      return 0
    if config.export:
      adapters.export(setups[-1], workdir, params)
    reason = 'finished'
  except KeyboardInterrupt:
    reason = 'interrupted'
    raise
  except Exception as error:
    reason = f'{type(error).__name__}: {error}'[:500]
    run.writer.event('error', reason, step=run.host.step)
    raise
  finally:
    run_lib.conclude(run, reason, total)
  return 0


def _stages(run: run_lib.Run, setups: list[setup_lib.Setup]):
  """Runs the stages that remain; the parameters after the last."""
  while True:
    params = None
    try:
      for setup in run_lib.remaining(run, setups):
        params = TRAINERS[setup.trainer](setup, run, params)
      return params
    except memory.Restart:
      if jax.process_count() > 1:
        raise
    # Behind the handler, which holds what the stage had on the devices.
    run.rewind()


def program(
  config: dict[str, Any], workdir: pathlib.Path, resume: str
) -> dict[str, str]:
  """What must be the same in all processes before they read any data."""
  package = pathlib.Path(rlhf_jax.__file__).parent
  return {
    **{
      f'config.{key}': json.dumps(value)
      for key, value in workdir_lib.flatten(config).items()
    },
    '--workdir': str(workdir),
    '--resume': resume,
    'rlhf_jax': rlhf_jax.__version__,
    'jax': f'{jax.__version__} with jaxlib {jaxlib.__version__}',
    **distributed.source(package, 'rlhf_jax'),
    **distributed.source(pathlib.Path(__file__).parent, 'launch'),
  }


def data(setups: list[setup_lib.Setup]) -> dict[str, str]:
  """What must be the same in all processes before they write anything."""
  facts = {
    'devices of a process': f'{jax.local_device_count()}'
    f' {jax.local_devices()[0].device_kind}'
  }
  for setup in setups:
    first = setup.train.batch(0, min(_COMPARED_PROMPTS, len(setup.train)))
    facts[f'data of stage {setup.name}'] = pipeline.fingerprint(
      first, len(setup.train)
    )
    facts[f'validation of stage {setup.name}'] = pipeline.fingerprint(
      setup.validation[:_COMPARED_PROMPTS], len(setup.validation)
    )
  return facts


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments: {argv[1:]}')
  logging.set_verbosity(logging.WARNING)  # Orbax narrates every save
  from_flags = config_flags.get_override_values(flags.FLAGS['config'])
  try:
    job = jobs.detect(
      os.environ,
      coordinator=COORDINATOR.value,
      process_id=PROCESS_ID.value,
      num_processes=NUM_PROCESSES.value,
      local_device_ids=LOCAL_DEVICE_IDS.value,
      tpu_pod=TPU_POD.value,
    )
  except ValueError as error:
    sys.exit(f'error: {error}')
  # First of all: it must come before the first thing that JAX computes.
  with distributed.member(job):
    try:
      code = train(
        CONFIG.value, WORKDIR.value, RESUME.value, frozenset(from_flags)
      )
    except workdir_lib.Refused as error:
      sys.exit(f'error: {error}')
    except memory.Restart as error:
      sys.stderr.write(f'out of memory, start the same job again: {error}\n')
      code = memory.EXIT_CODE
    sys.exit(code)


if __name__ == '__main__':
  flags.mark_flags_as_required(['config', 'workdir'])
  app.run(main)
