"""When the devices run out of memory: smaller micro-batches, then a restart.

Gradients do not depend on how a mini-batch is cut (see `update`), so a program
that does not fit is run again on half the rows.  The size in force is
`HostState.tokens_per_microbatch`; it is in the checkpoints, and in a small file
for the case that the process ends before the next one.
"""

from collections.abc import Callable
from typing import TypeVar

import jax

from rlhf_jax import metrics
from rlhf_jax import types
from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.trainers import packed
from rlhf_jax.trainers import run as run_lib
from rlhf_jax.trainers import setup as setup_lib
from rlhf_jax.trainers import state as state_lib
from rlhf_jax.trainers import update as update_lib
from rlhf_jax.trainers import workdir as workdir_lib

# The same command may succeed now (EX_TEMPFAIL of sysexits.h).
EXIT_CODE = 75

T = TypeVar('T')


class Restart(Exception):
  """The run must go on from its last checkpoint, with the size noted there.

  One process does so by itself (`Run.rewind`).  Several end with `EXIT_CODE`
  and are started again: the others wait in a program that this one has left.
  """


class DoesNotFit(RuntimeError):
  """Not even one row per data group fits; the message says what to change."""


def rows(run: run_lib.Run, setup: setup_lib.Setup) -> int:
  """Rows of the micro-batch in force, over all data groups."""
  return _rows_per_group(run, setup) * mesh_lib.data_groups(setup.mesh)


def update(
  run: run_lib.Run,
  setup: setup_lib.Setup,
  state: state_lib.TrainState,
  batch: types.TokenBatch,
  coefs: dict[str, types.PyTree],
  *,
  programs: dict[str, Callable],
  prefix: str,
) -> tuple[state_lib.TrainState, metrics.Metrics]:
  """`update.update` on a mini-batch, cut into micro-batches that fit.

  Args:
    run: see `fitting`.
    setup: see `fitting`.
    state: is donated.
    batch: numpy, all rows of the mini-batch.
    coefs: see `update.update`.
    programs: see `update.update`.
    prefix: see `update.update`.
  """

  def attempt(rows_per_microbatch):
    parts = packed.slices(batch, rows_per_microbatch, setup.islands)
    return update_lib.update(
      state, parts, coefs, programs=programs, prefix=prefix
    )

  return fitting(run, setup, attempt)


def fitting(
  run: run_lib.Run,
  setup: setup_lib.Setup,
  attempt: Callable[..., T],
  *args,
  **keywords,
) -> T:
  """`attempt(...)`, with half the rows each time that memory runs out.

  Args:
    run: its host state has the size in force, and gets the smaller one.
    setup: of the stage.
    attempt: is called with `rows_per_microbatch` over all data groups, and
      again where it ran out of memory.
    *args: for `attempt`.
    **keywords: for `attempt`.

  Raises:
    Restart: the state is lost, or other processes wait for this one.
    DoesNotFit: there is no smaller size.
  """
  while True:
    try:
      return attempt(*args, rows_per_microbatch=rows(run, setup), **keywords)
    except (jax.errors.JaxRuntimeError, update_lib.StateLost) as error:
      lost = isinstance(error, update_lib.StateLost)
      if not lost and not update_lib.out_of_memory(error):
        raise
      cause = str(error).splitlines()[0][:300]
    # Behind the handler: the error's frames hold what is on the devices.
    _halve(run, setup, 'the optimiser step' if lost else 'a micro-batch', cause)
    if lost or jax.process_count() > 1:
      raise Restart(cause)


def _halve(run, setup, where, cause) -> None:
  """Half the micro-batch from now on, with an event and a note for later."""
  host, row = run.host, setup.config.training.tokens_per_row
  before = _rows_per_group(run, setup)
  if before < 2:
    raise DoesNotFit(
      f'{where} of one row of training.tokens_per_row={row} tokens per data'
      f' group does not fit the memory of a device ({cause}).  In order of'
      " cost: model.remat='block', a smaller model.head_chunk,"
      ' offload.optimizer, offload.reference and offload.params,'
      " optimizer.moments_dtype='bfloat16', more shards (mesh.fsdp,"
      ' mesh.tensor) or shorter rows'
    )
  host.tokens_per_microbatch = before // 2 * row
  message = (
    f'out of memory in {where} of {before} rows x {row} tokens per data group:'
    f' {before // 2} rows from now on ({cause})'
  )
  workdir_lib.allow_microbatch(
    run.workdir, host.stage, host.tokens_per_microbatch, message
  )
  run.console.note(f'warning: {message}')
  run.writer.event(
    'out_of_memory', message, stage=host.stage, step=host.step,
    tokens_per_microbatch=host.tokens_per_microbatch,
  )  # fmt: skip


def _rows_per_group(run, setup) -> int:
  tokens = run.host.tokens_per_microbatch
  return tokens // setup.config.training.tokens_per_row
