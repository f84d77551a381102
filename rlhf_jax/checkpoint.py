"""Checkpoints with Orbax: arrays and host state in one atomic step folder."""

import hashlib
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from rlhf_jax import tree
from rlhf_jax import types


def manager(workdir: str | pathlib.Path, *, keep: int) -> ocp.CheckpointManager:
  """The checkpoints of a run, in `workdir/checkpoints/STEP`.

  A step folder gets its name only when it is complete, so a save that was
  killed is never chosen; steps are compared as numbers.

  Args:
    workdir: of the run.
    keep: newest checkpoints that stay, 1 or more.
  """
  if keep < 1:
    raise ValueError(f'checkpoint.keep={keep}: at least 1 must stay')
  return ocp.CheckpointManager(
    pathlib.Path(workdir).resolve() / 'checkpoints',
    options=ocp.CheckpointManagerOptions(
      max_to_keep=keep, create=True, enable_async_checkpointing=False
    ),
  )


def save(
  checkpoints: ocp.CheckpointManager,
  step: int,
  arrays: types.PyTree,
  host: dict[str, Any],
) -> None:
  """Saves arrays and the JSON-able host state under one step."""
  checkpoints.save(
    step,
    args=ocp.args.Composite(
      arrays=ocp.args.PyTreeSave(arrays), host=ocp.args.JsonSave(host)
    ),
    force=True,
  )
  checkpoints.wait_until_finished()


def restore_host(checkpoints: ocp.CheckpointManager, step: int) -> dict:
  """The host state of a step; it says what the arrays look like."""
  return checkpoints.restore(
    step, args=ocp.args.Composite(host=ocp.args.JsonRestore())
  )['host']


def restore_arrays(
  checkpoints: ocp.CheckpointManager, step: int, abstract: types.PyTree
) -> types.PyTree:
  """The arrays of a step, in the shapes, dtypes and shardings of `abstract`.

  Top-level entries of the checkpoint that `abstract` lacks are not read.

  Raises:
    ValueError: the checkpoint lacks an array; the message names them.
  """
  arrays = checkpoints.restore(
    step,
    args=ocp.args.Composite(
      arrays=ocp.args.PyTreeRestore(
        abstract,
        restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
        partial_restore=True,
      )
    ),
  )['arrays']
  missing = [
    name
    for name, x in tree.flatten(arrays).items()
    if isinstance(x, jax.ShapeDtypeStruct)
  ]
  if missing:
    raise ValueError(
      f'the checkpoint of step {step} lacks {missing}: it was written by a run'
      ' with other roles'
    )
  return arrays


def save_reference(
  workdir: str | pathlib.Path, stage: str, params: types.PyTree
) -> None:
  """Saves the reference of a stage, once, when the stage begins."""
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(reference_folder(workdir, stage), params, force=True)


def restore_reference(
  workdir: str | pathlib.Path, stage: str, abstract: types.PyTree
) -> types.PyTree:
  """The reference that `save_reference` saved."""
  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(reference_folder(workdir, stage), abstract)


def reference_folder(workdir: str | pathlib.Path, stage: str) -> pathlib.Path:
  """Where the reference of a stage lies."""
  return pathlib.Path(workdir).resolve() / 'checkpoints' / f'reference-{stage}'


def abstract(tree: types.PyTree, shardings: types.PyTree) -> types.PyTree:
  """Shapes, dtypes and shardings of a tree, for `restore_arrays`."""
  return jax.tree.map(
    lambda x, sharding: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=sharding
    ),
    tree,
    shardings,
  )


def verify(where: dict[str, str], what: str) -> None:
  """Refuses a model folder that is not what it was.

  Args:
    where: 'path' and 'sha256', the `fingerprint` of then.
    what: what the model is to the run, for the message.

  Raises:
    ValueError: with both hashes.
  """
  found = fingerprint(where['path'])
  if found != where['sha256']:
    raise ValueError(
      f'{what} was {where["path"]} with hash {where["sha256"][:12]}, now it has'
      f' {found[:12]}: put the original model back to resume'
    )


def fingerprint(folder: str | pathlib.Path) -> str:
  """SHA-256 over names and contents of a model folder's weights and config."""
  digest = hashlib.sha256()
  folder = pathlib.Path(folder)
  for path in sorted(folder.glob('*.safetensors')) + [folder / 'config.json']:
    digest.update(path.name.encode())
    with open(path, 'rb') as file:
      digest.update(hashlib.file_digest(file, 'sha256').digest())
  return digest.hexdigest()
