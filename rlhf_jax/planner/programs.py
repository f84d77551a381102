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

from rlhf_jax import tree
from rlhf_jax import types
from rlhf_jax.models import flops
from rlhf_jax.models import heads
from rlhf_jax.models import lora
from rlhf_jax.sampling import engine
from rlhf_jax.sharding import rules
from rlhf_jax.trainers import adapters
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
  # Arguments (by place or keyword) and results that live only for the call;
  # all others are in the `Plan`.
  passing: tuple[int | str, ...] = ()
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


def of_stage(setup: setup_lib.Setup, parts: roles_lib.Parts) -> Plan:
  """The programs of a PPO or supervised stage.

  Args:
    setup: of the stage; `numbers` decides the micro-batch.
    parts: what the stage computes with.
  """
  host = ('opt_state',) if setup.offloads('optimizer') else ()
  states = {
    role: state_lib.abstract(one.optimizer, setup.mesh, one.specs, host=host)
    for role, one in parts.learners.items()
  }
  frozen = {}
  if parts.learners['actor'].adapts:
    frozen = adapters.abstract_frozen(setup)
  # What each role's forward pass reads.
  params = {role: state.params for role, state in states.items()}
  params['actor'] = lora.combine(frozen, params['actor'])
  resident, held = {}, {name: {} for name in PHASES}
  if frozen:
    resident['model under the adapters'] = frozen
  lone = setup.config.model.path and not setup.config.model.lora.path
  if frozen and lone and not setup.first_step:
    params['reference'] = frozen  # as `roles.begin_reference` has it
  elif parts.plan is not None and parts.plan.reference:
    params['reference'] = params['actor']
    _hold(resident, held, 'reference', states['actor'].params,
          ('ref',) if setup.offloads('reference') else None)  # fmt: skip
  for role, state in states.items():
    used = _USED[role] if setup.offloads('params') else None
    _hold(resident, held, f'{role} parameters', state.params, used)
    resident[f'{role} optimizer'] = state.opt_state
    held[f'update_{role}']['gradients'] = _gradients(setup, state)
  found = _updates(setup, parts, states, params, frozen)
  in_phase = {name: lambda done, more=more: more for name, more in held.items()}
  if parts.plan is not None:
    found += _passes(setup, parts, params)
    found += _rollout(setup, parts, params['actor'])
    in_phase['gen'] = lambda done: held['gen'] | _rollout_arrays(done)
  order = list(PHASES)
  found.sort(key=lambda program: order.index(program.phase))
  return Plan(found, resident, in_phase)


def _hold(resident, held, kind, arrays, used) -> None:
  """Notes arrays that live all stage, or in the phases that use them."""
  if used is None:
    resident[kind] = arrays
    return
  for phase in used:
    held[phase][kind] = arrays


def _gradients(setup, state) -> types.PyTree:
  return tree.cast(state.params, setup.config.training.gradient_dtype)


# Phases in which the parameters of a role are on the devices, where they live
# on the host.
_USED = {
  'actor': ('relayout', 'old_log_prob', 'update_actor'),
  'critic': ('values', 'update_critic'),
}
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


def _updates(setup, parts, states, params, frozen) -> list[Program]:
  """zeros, accumulate and apply of every role."""
  numbers, remat = setup.numbers, setup.config.model.remat
  tokens = numbers.rows_per_microbatch * setup.config.training.tokens_per_row
  number = jax.ShapeDtypeStruct((), jnp.float32)
  batch = _batch(setup, parts)
  found = []
  for role, programs in parts.updates.items():
    state, coefs = states[role], {}
    if parts.plan is not None:
      coefs = dict(entropy=number, kl=number)
      if parts.plan.exact_loss:
        coefs['reference_head'] = heads.head_params(params['reference'])
    if frozen and role == 'actor':
      coefs['frozen'] = frozen
    gradients = _gradients(setup, state)
    # A pass backward is two forward, and what it recomputes is another.
    passes = 3 + (remat == 'block')
    forward = forward_flops(setup, tokens, head=role == 'actor')
    updates = numbers.updates_per_step
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
      (state.params, gradients, batch, coefs),
      flops=forward * passes, passing=(2,), by_rows=True,
    )  # fmt: skip
    add('apply', updates, (state, gradients))
  return found


def _passes(setup, parts, params) -> list[Program]:
  """The forward passes of a step, see `measure`."""
  numbers, plan = setup.numbers, parts.plan
  tokens = numbers.rows_per_microbatch * setup.config.training.tokens_per_row
  calls = numbers.minibatches_per_step * microbatches(setup)
  found = []

  def add(name, phase, role, *, head, **keywords):
    keywords = dict(rows=rows_like(setup)) | keywords
    found.append(
      Program(
        name, phase, parts.passes[role],
        lambda done: ((params[role],), keywords),
        setup.mesh, calls, flops=forward_flops(setup, tokens, head=head),
        by_rows=True, passing=tuple(keywords), result_passes=True,
      )
    )  # fmt: skip

  if plan.reference:
    add('reference', 'ref', 'reference', head=True)
  if plan.old_pass:
    exact = {}
    if plan.divergence:
      head = heads.head_params(params['reference'])
      exact['reference'] = head, _states(setup)
    add('log-probs', 'old_log_prob', 'actor', head=True, **exact)
  if plan.critic:
    add('values', 'values', 'critic', head=False)
  return found


def _rollout(setup, parts, params) -> list[Program]:
  """relayout, and the sampler's programs at their largest."""
  sampler = setup.sampler(setup.config.rollout.samples_per_prompt)
  shape, mesh = sampler['shape'], sampler['mesh']
  sizes = engine.largest(**sampler)
  # The rollout may run on islands of the training mesh, side by side.
  sequences = setup.numbers.sequences_per_step * mesh.size // setup.mesh.size
  prompts = math.ceil(sequences / shape.samples_per_prompt / sizes.prompts)
  rounds = math.ceil(sequences / sizes.slots)
  middle = shape.max_prompt_tokens + shape.max_new_tokens / 2
  forward = functools.partial(flops.forward, setup.model)
  rows, width, slots = sizes.prompts, sizes.width, sizes.slots
  prefill = dict(flops=forward(rows * width, rows, rows * width**2 / 2))
  decode = dict(
    flops=forward(slots, slots, slots * middle) * shape.chunk, trips=shape.chunk
  )
  more = {
    'prefill': (prompts, prefill),
    'insert': (math.ceil(sequences / sizes.inserted), {}),
    'advance': (rounds * math.ceil(shape.max_new_tokens / shape.chunk), decode),
    'grow': (0, dict(result_passes=True, passing=(0,))),
  }

  def policy(done):
    """The weights as the sampler has them: those of its own devices."""
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, x.sharding.spec)
      ),
      results(done['relayout']),
    )

  found = [
    Program(
      'relayout', 'relayout', parts.relayout, lambda done: ((params,), {}),
      setup.mesh, 1, result_passes=True,
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
