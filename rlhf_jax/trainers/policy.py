"""Opens a policy wherever it lies: a model folder, the hub, a run's workdir."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax import checkpoint
from rlhf_jax import types
from rlhf_jax.data import chat as chat_lib
from rlhf_jax.data import tokenizer as tokenizer_lib
from rlhf_jax.models import config as model_config
from rlhf_jax.models import decoder
from rlhf_jax.models import hf
from rlhf_jax.models import lora
from rlhf_jax.models import spec
from rlhf_jax.monitor import writers
from rlhf_jax.sharding import rules
from rlhf_jax.trainers import setup as setup_lib
from rlhf_jax.trainers import state as state_lib
from rlhf_jax.trainers import workdir as workdir_lib


@dataclasses.dataclass(frozen=True)
class Policy:
  """A model that can be asked, and how its run puts prompts to it."""

  name: str  # where it comes from, for people
  config: model_config.ModelConfig
  tokenizer: Any
  stop_ids: frozenset[int]  # may be empty
  # `load(mesh, dtype)`: the parameters in the training sharding.  Those of a
  # checkpoint stay float32.
  load: Callable[[jax.sharding.Mesh, jnp.dtype], types.PyTree]
  stop_strings: tuple[str, ...] = ()  # the run's, see `tokenizer.stop_finder`
  chat: bool = False  # the next three: see `chat.render`
  system: str = ''
  prompt_format: str = chat_lib.SLOT


def find(path: str) -> Policy:
  """The policy of a model folder, a hub id, or the workdir of a run.

  Of a run it is the actor in the newest checkpoint, else the export; of a run
  that is at work, the checkpoint that is the newest now.

  Raises:
    ValueError: what lies there is no model that can be used.
    FileNotFoundError: nothing lies there.
  """
  if not path:
    raise ValueError(
      'no model: name a folder, a hub id or the workdir of a run'
    )
  folder = pathlib.Path(path).expanduser()
  file = folder / writers.CONFIG  # both kinds of folder have this name
  if file.is_file() and 'stages' in (run := json.loads(file.read_text())):
    policy = _of_run(folder, run)
  else:
    policy = _of_folder(path)
  tokenizer_lib.check_against_model(policy.tokenizer, policy.config.vocab_size)
  return policy


def _of_folder(path: str) -> Policy:
  folder = hf.folder(path)
  config = hf.load_config(folder)
  tokenizer = tokenizer_lib.load(str(folder))

  def load(mesh, dtype):
    shardings = rules.params(mesh, decoder.specs(config))
    return hf.load(folder, config, dtype=dtype, shardings=shardings)

  stop_ids = _stop_ids(tokenizer) | hf.stop_ids(folder)
  return Policy(path, config, tokenizer, stop_ids, load)


def _of_run(folder: pathlib.Path, run: dict[str, Any]) -> Policy:
  saved = folder / 'checkpoints'
  steps = [int(p.name) for p in saved.glob('*') if p.name.isdigit()]
  if steps:
    stage, policy = _of_checkpoint(folder, run, max(steps))
  elif (folder / 'export').is_dir():
    stage, policy = run['stages'][-1][0], _of_folder(str(folder / 'export'))
  else:
    raise ValueError(
      f'{folder} is the workdir of a run with neither a checkpoint nor an'
      ' export: wait for its first checkpoint'
    )
  (overrides,) = (extra for name, _, extra in run['stages'] if name == stage)
  values = workdir_lib.flatten(run) | overrides
  stop_ids = _stop_ids(policy.tokenizer, values['rollout.stop'])
  return dataclasses.replace(
    policy,
    stop_ids=policy.stop_ids | stop_ids,
    # Runs of older configs have none.
    stop_strings=tuple(values.get('rollout.stop_strings', ())),
    chat=values['data.chat'],
    system=values['data.system'],
    prompt_format=values['data.prompt_format'],
  )


def _of_checkpoint(folder, run, step: int) -> tuple[str, Policy]:
  """The stage in which a checkpoint was made, and its actor."""
  path = run['model']['path']
  # Runs of older configs have none.
  adapters = run['model'].get('lora', {'rank': 0})
  tokenizer = tokenizer_lib.load(run['tokenizer'] or path)
  stop_ids = _stop_ids(tokenizer)
  if path:
    config = hf.load_config(path)
    stop_ids |= hf.stop_ids(path)
  else:
    config = model_config.ModelConfig(**run['model']['architecture'])
  checkpoints = checkpoint.manager(folder, keep=1)
  host = checkpoint.restore_host(checkpoints, step)
  load = functools.partial(_restore, checkpoints, step, config)
  if adapters['rank']:
    load = functools.partial(
      _restore_adapters, checkpoints, step, config, adapters, host['base']
    )
  return host['stage'], Policy(
    f'{folder}, step {step}', config, tokenizer, stop_ids, load
  )


def _restore(checkpoints, step, config, mesh, unused_dtype) -> types.PyTree:
  return _actor(checkpoints, step, decoder.specs(config), mesh)


def _restore_adapters(
  checkpoints, step, config, section, base, mesh, unused_dtype
) -> types.PyTree:
  """The adapters of a checkpoint with the model that they belong to."""
  checkpoint.verify(base, 'the model under the adapters')
  frozen = state_lib.frozen_params(
    base['path'],
    config,
    mesh,
    dtype=setup_lib.dtype(section['base_dtype']),
    scale=lora.scale(section['alpha'], section['rank']),
  )
  specs = lora.specs(decoder.specs(config), section['rank'], section['targets'])
  return lora.combine(frozen, _actor(checkpoints, step, specs, mesh))


def _actor(checkpoints, step, specs, mesh) -> types.PyTree:
  params = checkpoint.abstract(
    spec.abstract(specs, jnp.float32), rules.params(mesh, specs)
  )
  # Without the optimiser, which is twice as large.
  wanted = {'actor': {'params': params}}
  arrays = checkpoint.restore_arrays(checkpoints, step, wanted)
  return arrays['actor']['params']


def _stop_ids(tokenizer, extra: Sequence[str] = ()) -> frozenset[int]:
  """Those of the tokenizer; none if it has no EOS."""
  if tokenizer.eos_token_id is None and not extra:
    return frozenset()
  return tokenizer_lib.stop_ids(tokenizer, extra)
