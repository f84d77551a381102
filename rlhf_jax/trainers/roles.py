"""Actor, critic and reference of a stage: made, or restored."""

from collections.abc import Callable
import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

from rlhf_jax import checkpoint
from rlhf_jax import keys
from rlhf_jax import optim
from rlhf_jax import types
from rlhf_jax.models import heads
from rlhf_jax.models import hf
from rlhf_jax.models import lora
from rlhf_jax.models import spec
from rlhf_jax.sampling import engine
from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.sharding import multihost
from rlhf_jax.sharding import rules
from rlhf_jax.trainers import adapters
from rlhf_jax.trainers import algorithm
from rlhf_jax.trainers import run as run_lib
from rlhf_jax.trainers import setup as setup_lib
from rlhf_jax.trainers import state as state_lib
from rlhf_jax.trainers import update


@dataclasses.dataclass(frozen=True)
class Learner:
  """How a role computes and learns; its state travels apart."""

  specs: types.PyTree  # weight table of what trains
  score: Callable[..., types.Scores]  # `heads.score`, its keywords bound
  optimizer: optax.GradientTransformation
  learning_rate: Callable[[types.Array], types.Array]
  max_grad_norm: float
  model_specs: types.PyTree  # of the model; the same, or `specs` are adapters

  @property
  def adapts(self) -> bool:
    """Whether adapters train and the model stays as it is."""
    return self.specs is not self.model_specs


@dataclasses.dataclass(frozen=True)
class Parts:
  """What a stage computes with, known before there is any array."""

  learners: dict[str, Learner]  # 'actor', perhaps 'critic'
  updates: dict[str, dict[str, Callable]]  # role -> see `programs`
  relayout: Callable[[types.PyTree], types.PyTree]
  plan: algorithm.Plan | None = None  # None in a supervised stage
  passes: dict[str, Callable] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Roles:
  """The arrays of a stage, by role; the states change with every update.

  What `config.offload` names lives in host memory.  Where it is used, ask for
  it on the devices, and hold it no longer than it is needed.
  """

  states: dict[str, state_lib.TrainState]  # 'actor', perhaps 'critic'
  reference: types.PyTree | None = None
  restored: bool = False  # from a checkpoint, in the middle of the stage
  host: tuple[str, ...] = ()  # fields of the states that live on the host
  # Of the actor, where its state holds adapters only, see `lora.split`.
  frozen: types.PyTree = dataclasses.field(default_factory=dict)

  def params(self, role: str) -> types.PyTree:
    """The parameters of a role (also 'reference') on the devices."""
    if role == 'reference':
      return rules.on_device(self.reference)
    return self.whole(role, rules.on_device(self.states[role].params))

  def whole(self, role: str, trained: types.PyTree) -> types.PyTree:
    """What the forward pass of a role reads: trained and frozen parameters."""
    return lora.combine(self.frozen, trained) if role == 'actor' else trained

  def untrained(self, role: str) -> dict[str, types.PyTree]:
    """`coefs` of a loss: the parameters that it reads and does not train."""
    adapts = role == 'actor' and self.frozen
    return {'frozen': self.frozen} if adapts else {}

  @property
  def actor(self) -> types.PyTree:
    return self.params('actor')

  @property
  def reference_head(self) -> types.PyTree:
    """See `heads.head_params`; on the devices."""
    return rules.on_device(heads.head_params(self.reference))

  def take(self, role: str) -> state_lib.TrainState:
    """Hands a state out for updates, its parameters on the devices."""
    state = self.states.pop(role)
    return state.replace(params=rules.on_device(state.params))

  def put(self, role: str, state: state_lib.TrainState) -> None:
    """Puts a state (back) to where it lives."""
    kept = {name: getattr(state, name) for name in self.host}
    kept = jax.device_put(kept, rules.in_host(kept))
    self.states[role] = state.replace(**kept)


def learner(setup: setup_lib.Setup, role: str, total_updates: int) -> Learner:
  """The forward pass and the optimiser of 'actor' or 'critic'."""
  config = setup.config[role].optimizer
  learning_rate = optim.schedule(
    config.learning_rate,
    warmup_updates=config.warmup_updates,
    decay=config.decay,
    total_updates=total_updates,
    end_fraction=config.end_fraction,
  )
  optimizer = optim.adamw(
    learning_rate,
    b1=config.b1,
    b2=config.b2,
    eps=config.eps,
    weight_decay=config.weight_decay,
    max_grad_norm=config.max_grad_norm,
    moments_dtype=config.moments_dtype,
  )
  model = _model_of(setup, role)
  score = functools.partial(
    heads.score,
    config=model,
    head_chunk=(
      setup.config.model.head_chunk * mesh_lib.data_groups(setup.mesh)
    ),
    remat=setup.remat,
    dtype=setup_lib.dtype(setup.config.model.dtype),
  )
  table = state_lib.specs_of(model, role)
  return Learner(
    setup.adapters(table) if role == 'actor' and setup.adapts else table,
    score,
    optimizer,
    learning_rate,
    config.max_grad_norm,
    model_specs=table,
  )


def begin_or_restore(
  setup: setup_lib.Setup,
  run: run_lib.Run,
  learners: dict[str, Learner],
  params: types.PyTree | None,
  *,
  with_reference: bool = False,
) -> Roles:
  """The roles of a stage: from the run's checkpoint, or as the stage begins.

  Args:
    setup: of the stage.
    run: says whether there is a checkpoint; its host state is begun anew where
      there is none.
    learners: 'actor', perhaps 'critic'.
    params: of the actor from the stage before, None in the first.
    with_reference: keep the actor as it was when the stage began.
  """
  step = run.restored_in(setup.name)
  if step is not None:
    run.restored_step = None  # later stages begin anew
    states = restore(setup, learners, run.checkpoints, step)
    roles = Roles(states, restored=True, host=host_fields(setup))
    if setup.adapts:
      checkpoint.verify(run.host.base, 'the model under the adapters')
      roles.frozen = adapters.frozen(setup)
    if with_reference:
      roles.reference = restore_reference(
        setup, run.workdir, run.host.reference, roles.frozen
      )
    return roles
  run.begin_stage(setup)
  untouched = params is None
  if untouched and setup.adapts:
    run.host.base = _folder(setup)
  params = actor_params(setup, params)
  frozen, trained = lora.split(params)
  roles = Roles({}, host=host_fields(setup), frozen=frozen)
  if with_reference:
    roles.reference, run.host.reference = begin_reference(
      setup, run.workdir, params, untouched
    )
  if 'critic' in learners:
    critic = critic_params(setup, params)
    roles.put('critic', create(setup, learners['critic'], critic))
  roles.put('actor', create(setup, learners['actor'], trained))
  return roles


def programs(
  setup: setup_lib.Setup,
  learner_: Learner,
  loss: Callable[..., tuple],
) -> dict[str, Callable]:
  """The jitted programs that update a role, see `update.programs`."""
  return update.programs(
    adapters.of_adapters(loss) if learner_.adapts else loss,
    learner_.optimizer,
    learner_.learning_rate,
    params=spec.abstract(learner_.specs, jnp.float32),
    specs=learner_.specs,
    mesh=setup.mesh,
    max_grad_norm=learner_.max_grad_norm,
    gradient_dtype=jnp.dtype(setup.config.training.gradient_dtype),
  )


def relayout_program(
  setup: setup_lib.Setup, learner_: Learner
) -> Callable[[types.PyTree], types.PyTree]:
  """See `engine.relayout_program`."""
  return engine.relayout_program(
    setup.mesh,
    learner_.model_specs,
    setup_lib.dtype(setup.config.rollout.dtype),
  )


def relayout(
  setup: setup_lib.Setup, program: Callable[[types.PyTree], types.PyTree]
) -> Callable[[types.PyTree], types.PyTree]:
  """`relayout(params)`: the policy as this island's sampler takes it.

  `program` is that of `Parts`.
  """
  return lambda params: multihost.to_rollout(setup.islands, program(params))


def actor_params(
  setup: setup_lib.Setup, params: types.PyTree | None
) -> types.PyTree:
  """The last stage's parameters, or those of the model folder, or fresh.

  Where adapters train they have the model and the adapters, see `lora`.
  """
  if params is not None:
    return params
  table = state_lib.specs_of(setup.model, 'actor')
  key = keys.key(setup.config.seed, 'init')
  if setup.adapts:
    return lora.combine(adapters.frozen(setup), adapters.initial(setup, key))
  if setup.config.model.path:
    return hf.load(
      setup.config.model.path,
      setup.model,
      shardings=rules.params(setup.mesh, table),
    )
  return state_lib.init_params(setup.model, 'actor', key, setup.mesh)


def critic_params(setup: setup_lib.Setup, actor: types.PyTree) -> types.PyTree:
  """From `critic.path`, else a copy of the actor; the value head is zero."""
  if not setup.config.critic.path:
    actor = adapters.merged(setup, actor)
    return state_lib.critic_from_actor(setup.model, actor, setup.mesh)
  model = _model_of(setup, 'critic')
  table = state_lib.specs_of(model, 'critic')
  return hf.load(
    setup.config.critic.path,
    model,
    head='value',
    shardings=rules.params(setup.mesh, table),
  )


def create(
  setup: setup_lib.Setup, learner_: Learner, params: types.PyTree
) -> state_lib.TrainState:
  """A train state around parameters."""
  return state_lib.create(
    params, learner_.optimizer, setup.mesh, learner_.specs
  )


def restore(
  setup: setup_lib.Setup,
  learners: dict[str, Learner],
  checkpoints: ocp.CheckpointManager,
  step: int,
) -> dict[str, state_lib.TrainState]:
  """The train states of a checkpoint, by role."""
  abstract = {
    role: state_lib.abstract(
      one.optimizer, setup.mesh, one.specs, host=host_fields(setup)
    )
    for role, one in learners.items()
  }
  return checkpoint.restore_arrays(checkpoints, step, abstract)


def begin_reference(
  setup: setup_lib.Setup, workdir, params: types.PyTree, untouched: bool
) -> tuple[types.PyTree, dict]:
  """Keeps a copy of the actor, and says how a resumed run finds it again.

  Of an actor with adapters only they are copied: the model under them does not
  change.  As long as the actor is that model, it is its own reference.

  Args:
    setup: of the stage.
    workdir: of the run.
    params: the actor when the stage begins.
    untouched: the actor is exactly what lies in `model.path`.

  Returns:
    The reference, and {'path', 'sha256'} or {'saved': True}.
  """
  frozen, trained = lora.split(params)
  if untouched and setup.config.model.path and not setup.config.model.lora.path:
    where = _folder(setup)
    if frozen:
      return frozen, where
  else:
    checkpoint.save_reference(workdir, setup.name, trained)
    where = dict(saved=True)
  if setup.offloads('reference'):
    kept = jax.device_put(trained, rules.in_host(trained))
  else:
    kept = jax.tree.map(jnp.copy, trained)
  return lora.combine(frozen, kept), where


def restore_reference(
  setup: setup_lib.Setup, workdir, where: dict, frozen: types.PyTree
) -> types.PyTree:
  """The reference that `begin_reference` described.

  Args:
    setup: of the stage.
    workdir: of the run.
    where: see `begin_reference`.
    frozen: of the actor, {} where all of it trains.

  Raises:
    ValueError: the model folder is not what it was when the stage began.
  """
  if frozen and 'path' in where:
    return frozen
  table = state_lib.specs_of(setup.model, 'actor')
  if frozen:
    table = setup.adapters(table)
  shardings = rules.params(setup.mesh, table)
  shapes = checkpoint.abstract(spec.abstract(table, jnp.float32), shardings)
  if setup.offloads('reference'):
    shardings = rules.in_host(shapes)
    shapes = checkpoint.abstract(shapes, shardings)
  if 'path' in where:
    checkpoint.verify(where, f'the reference of stage {setup.name!r}')
    return hf.load(where['path'], setup.model, shardings=shardings)
  kept = checkpoint.restore_reference(workdir, setup.name, shapes)
  return lora.combine(frozen, kept)


def _folder(setup: setup_lib.Setup) -> dict[str, str]:
  """Where the model lies, and how to know that it is still the same."""
  folder = hf.folder(setup.config.model.path)
  return dict(path=str(folder), sha256=checkpoint.fingerprint(folder))


def host_fields(setup: setup_lib.Setup) -> tuple[str, ...]:
  """The fields of a train state that live in host memory."""
  fields = {'params': 'params', 'optimizer': 'opt_state'}
  return tuple(fields[name] for name in fields if setup.offloads(name))


def _model_of(setup, role):
  path = setup.config.critic.path
  return hf.load_config(path) if role == 'critic' and path else setup.model
