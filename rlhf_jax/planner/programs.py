"""All programs of a stage, with abstract arguments, ready to be compiled.

They are the very functions that the loop calls, with arguments of the same
shapes and shardings: what is compiled here is not compiled again there.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from rlhf_jax import checkpoint
from rlhf_jax import types
from rlhf_jax.models import flops
from rlhf_jax.models import heads
from rlhf_jax.models import lora
from rlhf_jax.models import spec
from rlhf_jax.sampling import engine
from rlhf_jax.sharding import rules
from rlhf_jax.trainers import roles as roles_lib
from rlhf_jax.trainers import setup as setup_lib
from rlhf_jax.trainers import state as state_lib

Compiled = jax.stages.Compiled


@dataclasses.dataclass(frozen=True)
class Program:
  """One jitted function as a stage calls it."""

  name: str  # 'actor/accumulate'
  phase: str  # as in `timing_s/PHASE`
  function: Callable  # jitted
  # (arguments, keywords) of a call, from the programs compiled before it.
  arguments: Callable[[Mapping[str, Compiled]], tuple[tuple, dict]]
  mesh: jax.sharding.Mesh  # of its devices
  calls: float  # a step
  flops: float = 0.0  # of a call, over all devices
  trips: float = 1.0  # of a loop whose length is data
  reads: float = 1.0  # how often a call goes through its arguments
  # Arguments that live on the devices only for the call, and whether its
  # results do; all others are in the `Plan`.
  passing: Callable[[Mapping[str, Compiled]], Any] = lambda done: ()
  result_passes: bool = False
  by_rows: bool = False  # its shapes follow the micro-batch

  def lower(self, compiled: Mapping[str, Compiled]) -> jax.stages.Lowered:
    arguments, keywords = self.arguments(compiled)
    return self.function.lower(*arguments, **keywords)


@dataclasses.dataclass(frozen=True)
class Plan:
  """The programs of a stage, and what its devices hold meanwhile."""

  programs: list[Program]
  # Kind -> abstract arrays that live all stage.
  resident: dict[str, types.PyTree]
  # Phase -> kind -> abstract arrays that live in that phase.
  in_phase: dict[str, Callable[[Mapping[str, Compiled]], dict[str, Any]]]
  # Phases on devices of their own.
  apart: tuple[str, ...] = ()


def of_stage(setup: setup_lib.Setup, parts: roles_lib.Parts) -> Plan:
  """The programs of a PPO or supervised stage.

  Args:
    setup: of the stage; `numbers` decides the micro-batch.
    parts: what the stage computes with.
  """
  arrays = _arrays(setup, parts)
  resident, in_phase = {}, {}
  for role, stored in arrays.stored.items():
    resident[f'{role} parameters'] = stored.params
    resident[f'{role} optimizer'] = stored.opt_state
    held = {'gradients': arrays.gradients[role]}
    if setup.offloads('params'):  # fetched for all updates of a step
      held['fetched parameters'] = arrays.states[role].params
    in_phase[f'update_{role}'] = lambda done, held=held: held
  if arrays.frozen:
    resident['frozen parameters'] = arrays.frozen
  found, apart = _updates(setup, parts, arrays), ()
  if parts.plan is not None:
    resident['reference'] = () if arrays.shares else arrays.reference_stored
    found += _passes(setup, parts, arrays)
    found += _rollout(setup, parts, arrays)
    in_phase['gen'] = _rollout_arrays
    training = set(setup.mesh.devices.flat)
    if not training & set(setup.islands.rollout.devices.flat):
      apart = ('gen',)
  order = list(PHASES)
  found.sort(key=lambda program: order.index(program.phase))
  return Plan(found, resident, in_phase, apart)


@dataclasses.dataclass(frozen=True)
class _Arrays:
  """The abstract arrays of the roles."""

  states: dict[str, state_lib.TrainState]  # on the devices
  stored: dict[str, state_lib.TrainState]  # where they live between uses
  gradients: dict[str, types.PyTree]
  frozen: types.PyTree  # the model under adapters, {} without
  reference: types.PyTree | None
  reference_stored: types.PyTree
  shares: bool  # the reference is the frozen model itself

  def params(self, role: str) -> types.PyTree:
    """What the forward pass of a role reads."""
    params = self.states[role].params
    return lora.combine(self.frozen, params) if role == 'actor' else params


def _arrays(setup, parts) -> _Arrays:
  mesh, config = setup.mesh, setup.config
  state_of = lambda one, host: state_lib.abstract(
    one.optimizer, mesh, one.specs, host=host
  )
  learners, host = parts.learners, roles_lib.host_fields(setup)
  states = {role: state_of(one, ()) for role, one in learners.items()}
  stored = {role: state_of(one, host) for role, one in learners.items()}
  place = lambda specs, dtype: checkpoint.abstract(
    spec.abstract(specs, dtype), rules.params(mesh, specs)
  )
  dtype = jnp.dtype(config.training.gradient_dtype)
  gradients = {role: place(one.specs, dtype) for role, one in learners.items()}
  actor, frozen = learners['actor'], {}
  if actor.adapts:
    base = setup_lib.dtype(config.model.lora.base_dtype)
    scale = jax.ShapeDtypeStruct(
      (), jnp.float32, sharding=rules.sharding(mesh, (), ())
    )
    frozen = place(actor.model_specs, base) | {lora.SCALE: scale}
  reference, kept = None, ()
  # See `roles.begin_reference`.
  shares = bool(frozen) and not setup.first_step and not config.model.lora.path
  if parts.plan is not None and parts.plan.reference:
    kept = states['actor'].params
    reference = frozen if shares else lora.combine(frozen, kept)
    if setup.offloads('reference'):
      kept = checkpoint.abstract(kept, rules.in_host(kept))
  return _Arrays(states, stored, gradients, frozen, reference, kept, shares)


PHASES = {
  'relayout': 'weights of the rollout',
  'gen': 'rollout',
  'ref': 'log-probs of the reference',
  'old_log_prob': 'old log-probs',
  'values': 'values',
  'update_critic': 'updates of the critic',
  'update_actor': 'updates of the actor',
}


def microbatches(setup: setup_lib.Setup) -> int:
  """Micro-batches of a mini-batch whose sequences are all the longest."""
  training, numbers = setup.config.training, setup.numbers
  in_row = training.tokens_per_row // numbers.longest_sequence
  sequences = numbers.sequences_per_step // numbers.minibatches_per_step
  return math.ceil(sequences / in_row / numbers.rows_per_microbatch)


def forward_flops(
  setup: setup_lib.Setup, tokens: float, *, head: bool, attended: float = 0.0
) -> float:
  """Operations of a forward pass over tokens of the longest sequences."""
  longest = setup.numbers.longest_sequence
  share = setup.config.rollout.max_new_tokens / longest
  return flops.forward(
    setup.model,
    tokens,
    tokens * share * head,
    attended or tokens * longest / 2,
  )


def rows_like(setup: setup_lib.Setup) -> types.Rows:
  """The abstract `types.Rows` of a micro-batch."""
  make = lambda dtype: _rows(setup, dtype)
  return types.Rows(
    tokens=make(jnp.int32),
    targets=make(jnp.int32),
    positions=make(jnp.int32),
    segment_ids=make(jnp.int32),
    mask=make(bool),
    temperature=make(jnp.float32),
  )


def _rows(setup, dtype, *shape):
  shape = (
    setup.numbers.rows_per_microbatch,
    setup.config.training.tokens_per_row,
    *shape,
  )
  place = rules.rows_sharding(setup.mesh, shape)
  return jax.ShapeDtypeStruct(shape, dtype, sharding=place)


def _batch(setup, parts) -> types.TokenBatch:
  """The abstract `types.TokenBatch` of a micro-batch."""
  real, plan = _rows(setup, jnp.float32), parts.plan
  states = importance = selected = None
  if plan is not None:
    # `algorithm.correct` gives weights only where importance is on.
    if plan.correction and setup.config.algorithm.importance.level != 'off':
      importance = real
    selected = _rows(setup, bool) if plan.selection else None
    if plan.exact_loss:
      states = _states(setup)
  return types.TokenBatch(
    rows=rows_like(setup),
    old_logprobs=real,
    reference_logprobs=real,
    advantages=real,
    old_values=real,
    returns=real,
    weights=real,
    importance=importance,
    selected=selected,
    reference_states=states,
  )


def _states(setup):
  dtype = setup_lib.dtype(setup.config.model.dtype)
  return _rows(setup, dtype, setup.model.d_model)


def _updates(setup, parts, arrays) -> list[Program]:
  """zeros, accumulate and apply of every role."""
  numbers, plan = setup.numbers, parts.plan
  tokens = numbers.rows_per_microbatch * setup.config.training.tokens_per_row
  number = jax.ShapeDtypeStruct((), jnp.float32)
  batch = _batch(setup, parts)
  found = []
  for role, programs in parts.updates.items():
    state, grads, coefs = arrays.states[role], arrays.gradients[role], {}
    if plan is not None:
      coefs = dict(entropy=number, kl=number)
      if plan.exact_loss:
        coefs['reference_head'] = heads.head_params(arrays.reference)
    if role == 'actor' and arrays.frozen:
      coefs['frozen'] = arrays.frozen
    # A pass backward is two forward, and what it recomputes is another.
    passes = 3 + (setup.remat == 'block')
    forward = forward_flops(setup, tokens, head=role == 'actor')
    updates = numbers.updates_per_step
    fetched = (state.opt_state,) if setup.offloads('optimizer') else ()
    add = lambda name, calls, arguments, role=role, programs=programs, **more: (
      found.append(
        Program(
          f'{role}/{name}', f'update_{role}', programs[name],
          lambda done: (arguments, {}), setup.mesh, calls, **more,
        )
      )
    )  # fmt: skip
    add('zeros', updates, (state.params,))
    add(
      'accumulate', updates * microbatches(setup),
      (state.params, grads, batch, coefs),
      flops=forward * passes, passing=lambda done: batch, by_rows=True,
    )  # fmt: skip
    add(
      'apply', updates, (state, grads), passing=lambda done, x=fetched: x
    )  # fmt: skip
  return found


def _passes(setup, parts, arrays) -> list[Program]:
  """The forward passes of a step, see `measure`."""
  numbers, plan = setup.numbers, parts.plan
  tokens = numbers.rows_per_microbatch * setup.config.training.tokens_per_row
  calls = numbers.minibatches_per_step * microbatches(setup)
  found = []

  def add(name, phase, role, params, fetched, **keywords):
    keywords = dict(rows=rows_like(setup)) | keywords
    passing = (keywords, params if setup.offloads(fetched) else ())
    forward = forward_flops(setup, tokens, head=role != 'critic')
    found.append(
      Program(
        name, phase, parts.passes[role], lambda done: ((params,), keywords),
        setup.mesh, calls, flops=forward, by_rows=True,
        passing=lambda done: passing, result_passes=True,
      )
    )  # fmt: skip

  if plan.reference:
    add('reference', 'ref', 'reference', arrays.reference, 'reference')
  if plan.old_pass:
    exact = {}
    if plan.divergence:
      head = heads.head_params(arrays.reference)
      exact['reference'] = head, _states(setup)
    actor = arrays.params('actor')
    add('log-probs', 'old_log_prob', 'actor', actor, 'params', **exact)
  if plan.critic:
    add('values', 'values', 'critic', arrays.params('critic'), 'params')
  return found


def _rollout(setup, parts, arrays) -> list[Program]:
  """relayout, and the sampler's programs at their largest."""
  sampler = setup.sampler(setup.config.rollout.samples_per_prompt)
  shape, mesh = sampler['shape'], sampler['mesh']
  sizes = engine.largest(**sampler)
  sequences = setup.numbers.sequences_per_step // setup.islands.count
  prompts = math.ceil(sequences / shape.samples_per_prompt / sizes.prompts)
  rounds = math.ceil(sequences / sizes.slots)
  middle = shape.max_prompt_tokens + shape.max_new_tokens / 2
  forward = functools.partial(flops.forward, setup.model)
  rows, width, slots = sizes.prompts, sizes.width, sizes.slots
  prefill = dict(flops=forward(rows * width, rows, rows * width**2 / 2))
  decode = dict(
    flops=forward(slots, slots, slots * middle) * shape.chunk,
    trips=shape.chunk,
    reads=shape.chunk,
  )
  more = {
    'prefill': (prompts, prefill),
    'insert': (
      math.ceil(sequences / sizes.inserted),
      dict(trips=sizes.inserted),
    ),
    'advance': (rounds * math.ceil(shape.max_new_tokens / shape.chunk), decode),
    'grow': (
      0,
      dict(result_passes=True, passing=lambda done: done['less'].out_info),
    ),
  }

  def policy(done):
    """The weights as the sampler has them: those of its own devices."""
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, x.sharding.spec)
      ),
      results(done['relayout']),
    )

  params = arrays.params('actor')
  fetched = arrays.states['actor'].params if setup.offloads('params') else ()
  found = [
    Program(
      'relayout', 'relayout', parts.relayout, lambda done: ((params,), {}),
      setup.mesh, 1, result_passes=True, passing=lambda done: fetched,
    )
  ]  # fmt: skip
  for name, function, arguments in engine.ahead(
    sizes, policy, results, **sampler
  ):
    calls, keywords = more.get(name, (0, {}))
    found.append(
      Program(name, 'gen', function, arguments, mesh, calls, **keywords)
    )
  return found


def _rollout_arrays(done) -> dict[str, Any]:
  """What the devices hold while they sample."""
  cache = [done[name].out_info for name in ('prefill', 'insert', 'prefix')
           if name in done]  # fmt: skip
  return {'rollout weights': done['relayout'].out_info, 'cache': cache}


def results(compiled: Compiled) -> types.PyTree:
  """Shapes, dtypes and shardings of what a compiled program returns."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    compiled.out_info,
  )
