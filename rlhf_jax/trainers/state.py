"""What a run consists of: arrays on devices, and one struct on the host."""

import dataclasses
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlhf_jax import checkpoint
from rlhf_jax import types
from rlhf_jax.algorithms import kl
from rlhf_jax.models import config as model_config
from rlhf_jax.models import decoder
from rlhf_jax.models import hf
from rlhf_jax.models import lora
from rlhf_jax.models import spec
from rlhf_jax.sharding import rules


@struct.dataclass
class TrainState:
  """One role that learns: parameters and optimiser."""

  params: types.PyTree  # float32
  opt_state: types.PyTree
  updates: types.Array  # [] int32: updates that were applied
  skipped: types.Array  # [] int32: updates whose gradient was not finite


@dataclasses.dataclass
class HostState:
  """All that a resumed run needs beside the arrays; saved as JSON."""

  seed: int
  step: int = 0  # global, monotone over stages
  stage: str = ''
  cursor: int = 0  # prompts (ppo) or examples (sft) the stage has read
  policy_version: int = 0  # updates the actor of this stage has seen
  kl_reward: kl.Controller = dataclasses.field(
    default_factory=lambda: kl.fixed(0.0)
  )
  kl_loss: kl.Controller = dataclasses.field(
    default_factory=lambda: kl.fixed(0.0)
  )
  # In force; a resumed run does not choose them again.
  tokens_per_microbatch: int = 0
  # {'name', 'value', 'step'} of the best evaluation so far.
  best: dict[str, Any] = dataclasses.field(default_factory=dict)
  last: dict[str, float] = dataclasses.field(default_factory=dict)  # metrics
  # Running statistics of the scores of all steps: count, mean, m2 (Welford).
  scores: dict[str, float] = dataclasses.field(
    default_factory=lambda: dict(count=0.0, mean=0.0, m2=0.0)
  )
  skipped_updates: int = 0
  negative_kl_steps: int = 0  # in a row, see `Run.watch_kl`
  dropped_sequences: int = 0
  tokens: int = 0  # prompt and response tokens of all rollouts
  wall_time_s: float = 0.0  # of all processes that worked on the run
  # The stage's reference: {'path', 'sha256'} or {'saved': True}.
  reference: dict[str, Any] = dataclasses.field(default_factory=dict)
  # The model under the adapters, where they train: {'path', 'sha256'}.
  base: dict[str, Any] = dataclasses.field(default_factory=dict)

  def to_json(self) -> dict[str, Any]:
    return dataclasses.asdict(self)

  @classmethod
  def from_json(cls, values: dict[str, Any]) -> 'HostState':
    values = dict(values)
    for name in ('kl_reward', 'kl_loss'):
      values[name] = kl.Controller(**values[name])
    return cls(**values)


def specs_of(config: model_config.ModelConfig, role: str) -> types.PyTree:
  """The weight table of a role: 'actor', 'reference' or 'critic'."""
  return decoder.specs(config, head='value' if role == 'critic' else 'policy')


def init_params(
  config: model_config.ModelConfig,
  role: str,
  key: types.Array,
  mesh: jax.sharding.Mesh,
) -> types.PyTree:
  """Fresh float32 parameters, made in their shards."""
  return init_specs(specs_of(config, role), key, mesh)


def init_specs(
  specs: types.PyTree, key: types.Array, mesh: jax.sharding.Mesh
) -> types.PyTree:
  """Fresh float32 parameters of a weight table, made in their shards."""
  make = jax.jit(
    lambda key: spec.init(specs, key, jnp.float32),
    out_shardings=rules.params(mesh, specs),
  )
  return make(key)


def frozen_params(
  path: str,
  config: model_config.ModelConfig,
  mesh: jax.sharding.Mesh,
  *,
  dtype: jnp.dtype,
  scale: float,
) -> types.PyTree:
  """The model under the adapters of an actor, and their scale, see `lora`."""
  model = hf.load(
    path,
    config,
    dtype=dtype,
    shardings=rules.params(mesh, specs_of(config, 'actor')),
  )
  everywhere = rules.sharding(mesh, (), ())
  return model | {lora.SCALE: rules.put(np.float32(scale), everywhere)}


def critic_from_actor(
  config: model_config.ModelConfig, actor: types.PyTree, mesh
) -> types.PyTree:
  """A critic with a copy of the actor's body and a value head of zeros."""
  table = specs_of(config, 'critic')
  body = {name: actor[name] for name in table if name != 'value_head'}
  head = rules.put(
    np.zeros(table['value_head'].shape, np.float32),
    rules.params(mesh, table)['value_head'],
  )
  return jax.tree.map(jnp.copy, body) | {'value_head': head}


def create(
  params: types.PyTree,
  optimizer: optax.GradientTransformation,
  mesh: jax.sharding.Mesh,
  specs: types.PyTree,
) -> TrainState:
  """A train state around parameters; moments are made in their shards."""

  def make(params):
    zero = jnp.zeros((), jnp.int32)
    return TrainState(params, optimizer.init(params), zero, zero)

  return jax.jit(make, out_shardings=shardings(params, optimizer, mesh, specs))(
    params
  )


def shardings(params, optimizer, mesh, specs) -> TrainState:
  """The shardings of `create`'s result."""
  of_params = rules.params(mesh, specs)
  abstract = jax.eval_shape(optimizer.init, params)
  zero = rules.sharding(mesh, (), ())
  return TrainState(
    of_params, rules.like_params(mesh, abstract, of_params), zero, zero
  )


def abstract(optimizer, mesh, specs, *, host=()) -> TrainState:
  """Shapes and shardings of `create`'s result, for restoring.

  Args:
    optimizer: see `optim.adamw`.
    mesh: of the role.
    specs: its weight table.
    host: fields that go to pinned host memory: 'params', 'opt_state'.
  """
  params = spec.abstract(specs, jnp.float32)
  make = lambda p: TrainState(
    p, optimizer.init(p), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
  )
  state = checkpoint.abstract(
    jax.eval_shape(make, params), shardings(params, optimizer, mesh, specs)
  )
  return state.replace(
    **{
      name: checkpoint.abstract(part, rules.in_host(part))
      for name in host
      for part in [getattr(state, name)]
    }
  )
