"""An actor of which only adapters train: its parts, its loss, its files."""

from collections.abc import Callable
import pathlib

import jax
import jax.numpy as jnp

from rlhf_jax import tree
from rlhf_jax import types
from rlhf_jax.models import hf
from rlhf_jax.models import lora
from rlhf_jax.models import peft
from rlhf_jax.sharding import rules
from rlhf_jax.trainers import setup as setup_lib
from rlhf_jax.trainers import state as state_lib


def frozen(setup: setup_lib.Setup) -> types.PyTree:
  """The model under the adapters, in `model.lora.base_dtype`; and the scale."""
  section = setup.config.model.lora
  return state_lib.frozen_params(
    setup.config.model.path,
    setup.model,
    setup.mesh,
    dtype=setup_lib.dtype(section.base_dtype),
    scale=lora.scale(section.alpha, section.rank),
  )


def initial(setup: setup_lib.Setup, key: types.Array) -> types.PyTree:
  """The adapters of `model.lora.path`, or new ones, which change nothing."""
  specs = setup.adapters(state_lib.specs_of(setup.model, 'actor'))
  folder = setup.config.model.lora.path
  if folder:
    return peft.load(folder, specs, rules.params(setup.mesh, specs))
  return state_lib.init_specs(specs, key, setup.mesh)


def of_adapters(loss: Callable[..., tuple]) -> Callable[..., tuple]:
  """The loss as a function of the adapters; `coefs` has the model under them.

  There it is an argument that nothing differentiates: no gradient of its
  weights is computed.
  """

  def adapted(trained, batch, coefs):
    coefs = dict(coefs)
    frozen = coefs.pop('frozen')
    return loss(lora.combine(frozen, trained), batch, coefs)

  return adapted


def merged(setup: setup_lib.Setup, params: types.PyTree) -> types.PyTree:
  """A policy as a model without adapters, float32, see `lora.merge`."""
  if not lora.present(params):
    return params
  shardings = rules.params(setup.mesh, state_lib.specs_of(setup.model, 'actor'))
  merge = lambda params: tree.cast(lora.merge(params), jnp.float32)
  return jax.jit(merge, out_shardings=shardings)(params)


def export(
  setup: setup_lib.Setup, workdir: pathlib.Path, params: types.PyTree
) -> None:
  """Writes a policy as a model folder; its adapters, if any, as another."""
  section = setup.config.model.lora
  if setup.adapts:
    table = state_lib.specs_of(setup.model, 'actor')
    peft.export(
      workdir / 'adapter',
      lora.split(params)[1],
      setup.adapters(table),
      rank=section.rank,
      alpha=section.alpha,
      base=setup.config.model.path,
    )
  policy = merged(setup, params)
  hf.export(workdir / 'export', policy, setup.model, setup.tokenizer)
