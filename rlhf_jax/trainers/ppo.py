"""KL-regularised PPO: one loop, readable from top to bottom.

A step: rollout -> old log-probs, reference, values -> rewards -> advantages ->
mini-batches of updates -> KL controllers, metrics, evaluation, checkpoint.
The loop is plain Python (control); what it calls is jitted (computation).
"""

import functools
import itertools
import time

import jax
import numpy as np

from rlhf_jax import keys
from rlhf_jax import metrics
from rlhf_jax import types
from rlhf_jax.algorithms import importance
from rlhf_jax.algorithms import kl
from rlhf_jax.data import packing
from rlhf_jax.models import flops
from rlhf_jax.planner import fit
from rlhf_jax.sampling import engine
from rlhf_jax.sharding import multihost
from rlhf_jax.trainers import algorithm as algorithm_lib
from rlhf_jax.trainers import checks
from rlhf_jax.trainers import evaluate
from rlhf_jax.trainers import experience as experience_lib
from rlhf_jax.trainers import measure
from rlhf_jax.trainers import memory
from rlhf_jax.trainers import packed
from rlhf_jax.trainers import roles
from rlhf_jax.trainers import rollout as rollout_lib
from rlhf_jax.trainers import run as run_lib
from rlhf_jax.trainers import setup as setup_lib
from rlhf_jax.trainers import update

# Compiled, since it is many small steps.
_MISMATCH = jax.jit(importance.mismatch)


def train(
  setup: setup_lib.Setup, run: run_lib.Run, params: types.PyTree | None
) -> types.PyTree:
  """Runs a stage of PPO.

  Args:
    setup: of the stage, checked.
    run: files, progress and host state; `run.host` is updated.
    params: of the actor from the stage before, None in the first.

  Returns:
    The actor's parameters after the last step; with adapters, see `lora`.
  """
  computes = parts(setup)
  setup = fit.ahead(setup, run, computes)
  config, numbers, islands = setup.config, setup.numbers, setup.islands
  host = run.host
  algorithm, seed = config.algorithm, config.seed
  last_step = setup.first_step + numbers.steps

  # ---- Roles and programs: each program is compiled once -----------------
  plan, learners = computes.plan, computes.learners
  programs, passes = computes.updates, computes.passes
  relayout = roles.relayout(setup, computes.relayout)
  stage = roles.begin_or_restore(
    setup,
    run,
    learners,
    params,
    with_reference=plan.reference and not config.evaluation.only,
  )
  timings = run_lib.Timings()
  fitting = functools.partial(memory.fitting, run, setup)

  # ---- Before the first step ----------------------------------------------
  run.console.start_stage(
    setup.name, numbers.steps, done=host.step - setup.first_step
  )
  if run.validates_before(setup, stage.restored):
    run.log_before(run.validate(setup, relayout, stage.actor))
  if config.evaluation.only:
    return stage.actor
  engine.warm_up(relayout(stage.actor), **setup.sampler(1))
  run.console.note(f'{engine.programs()} programs of the sampler are compiled')

  sampler = run.resources.enter_context(
    rollout_lib.Sampler(
      setup,
      relayout,
      steps=range(host.step, last_step),
      cursor=host.cursor,
      greedy_baseline=plan.greedy_baseline,
    )
  )

  while host.step < last_step:
    timings.clear()
    began = time.perf_counter()
    step = host.step
    train_actor = step - setup.first_step >= config.critic.warmup_steps

    # ---- Rollout, rewards, and which sequences take part ------------------
    sampled = sampler.take(
      stage.actor, step=step, policy_version=host.policy_version
    )
    rewards = sampled.rewards
    rollout = _taking_part(config.algorithm, sampled)
    split = functools.partial(
      packed.split,
      count=numbers.minibatches_per_step,
      tokens_per_row=config.training.tokens_per_row,
      rows_per_microbatch=memory.rows(run, setup),
      share_prefix=config.rollout.share_prefix,
      cost=functools.partial(flops.of_sequences, setup.model),
      islands=islands,
    )
    minibatches = split(rollout, sampled.home)

    # ---- Old log-probs, reference, values; sampler against trainer --------
    seen = fitting(
      measure.measure,
      plan,
      passes,
      stage,
      minibatches,
      rollout,
      islands=islands,
      timings=timings,
    )
    # What this island saw, and what the whole job did.
    seen_here, measured, weights = sampled.metrics, {}, None
    if plan.old_pass and not plan.reuse:
      arrays = seen.old_logprobs, rollout.logprobs, rollout.mask
      seen_here |= update.sampler_gap(*arrays)
      seen_here |= _MISMATCH(*arrays)
    if plan.correction:
      rollout, weights, done = algorithm_lib.correct(
        algorithm, rollout, seen.old_logprobs, islands
      )
      measured |= done

    # ---- KL in the reward, advantages, batches -----------------------------
    with timings('adv'):
      experience, done = _advantages(
        setup, host, sampled, rollout, seen, weights
      )
      seen_here |= done
      trained = experience
      if algorithm.filtration.method != 'off':
        trained, home, done = _filtrated(setup, experience, step)
        measured |= done
        minibatches = split(trained.rollout, home)
      totals = packed.totals(trained, minibatches, islands)
      states = seen.reference_states if plan.exact_loss else None
      batches = _batches(config, trained, minibatches, totals, states)
    seen_here |= experience_lib.statistics(
      experience,
      list(setup.rewards),
      islands=islands,
      with_critic=plan.critic,
    )
    seen_here['perf/padding'] = packed.padding(minibatches)

    # ---- Updates: epochs x mini-batches x micro-batches -------------------
    coefs = dict(entropy=algorithm.entropy_coef, kl=host.kl_loss.coef)
    if plan.exact_loss:
      coefs['reference_head'] = stage.reference_head
    order = packed.update_order(
      len(batches), config.training.epochs_per_step, seed=seed, step=step
    )
    # Rejection may have left nothing of a mini-batch.
    order = [index for index in order if totals[index][0]]
    for role in ('critic', 'actor'):
      if role not in learners or (role == 'actor' and not train_actor):
        continue
      with timings(f'update_{role}'):
        state = stage.take(role)
        for number, index in enumerate(order):
          batch = batches[index]
          if plan.selection and role == 'actor':
            batch = fitting(
              _selected,
              algorithm_lib.selection(algorithm),
              keys.key(seed, 'select', step, number),
              functools.partial(
                passes['actor'], stage.whole('actor', state.params)
              ),
              batch,
              minibatches[index],
              trained,
              islands=islands,
            )
          state, new = memory.update(
            run,
            setup,
            state,
            batch,
            coefs | stage.untrained(role),
            programs=programs[role],
            prefix=role,
          )
          measured = metrics.merge(measured, new)
        stage.put(role, state)

    # ---- Host state, metrics, evaluation, checkpoint ----------------------
    everyone = experience_lib.report(
      islands, seen_here, rollout, rewards.scores, rewards.dropped
    )
    computed = metrics.compute(metrics.merge(measured, everyone.metrics))
    computed['actor/kl_coef'] = host.kl_loss.coef
    host.step += 1
    host.cursor += sampled.prompts_read
    host.policy_version += len(order) * train_actor
    run.count_skipped(computed)
    run.watch_kl(computed)
    run.events(multihost.join(islands, rewards.events), host.step)
    run.add_step(everyone.scores, everyone.dropped, everyone.lengths.sum())
    if train_actor:  # while it is frozen the divergence says nothing
      _update_controllers(host, computed, numbers.sequences_per_step)
    if run.due(config.dump_every, setup):
      _dump(setup, run, sampled, rollout, experience)
    seconds = time.perf_counter() - began
    if setup.validation and run.due(config.evaluation.every, setup):
      with timings('evaluate'):
        computed |= run.validate(setup, relayout, stage.actor)
    computed |= (
      sampled.timings
      | timings
      | {
        'timing_s/step': seconds,
        'training/epoch': setup.train.epoch(host.cursor),
      }
    )
    computed |= experience_lib.throughput(
      everyone.lengths,
      everyone.prompt_lengths,
      everyone.actions,
      setup.model,
      seconds,
      setup.mesh.devices.flat,
      passes=_passes(config, plan, train_actor),
    )
    run.log(computed)
    if run.due(config.checkpoint.every, setup):
      run.save(stage.states)
  return stage.actor


def parts(setup: setup_lib.Setup) -> roles.Parts:
  """All functions that a PPO stage computes with, before any array exists."""
  config = setup.config
  plan = algorithm_lib.plan(config, setup.numbers.updates_per_step)
  learners = _learners(setup, plan.critic and not config.evaluation.only)
  losses = _losses(config, learners, plan)
  return roles.Parts(
    plan=plan,
    learners=learners,
    updates={
      role: roles.programs(setup, learners[role], losses[role])
      for role in learners
    },
    passes={} if config.evaluation.only else measure.programs(plan, learners),
    relayout=roles.relayout_program(setup, learners['actor']),
  )


def _learners(setup: setup_lib.Setup, with_critic: bool) -> dict:
  """The actor, and the critic if there is one."""
  numbers = setup.numbers
  learners = {
    'actor': roles.learner(
      setup, 'actor', checks.actor_updates(setup.config, numbers)
    )
  }
  if with_critic:
    learners['critic'] = roles.learner(
      setup, 'critic', numbers.steps * numbers.updates_per_step
    )
  return learners


def _taking_part(algorithm, sampled: rollout_lib.Sampled) -> types.Rollout:
  """The rollout of a step; what does not train has lost its actions."""
  rollout, scores = sampled.rollout, sampled.rewards.scores
  if sampled.baseline is not None:
    # Without a baseline there is nothing to compare a score with.
    scores = scores + 0 * sampled.baseline
  rejected = experience_lib.rejected(
    rollout,
    scores,
    truncated=algorithm.mask_truncated,
    uniform_groups=algorithm.drop_uniform_groups,
  )
  return rollout.replace(mask=rollout.mask & ~rejected[:, None])


def _advantages(
  setup, host, sampled, rollout, seen: measure.Measured, weights
) -> tuple[types.Experience, metrics.Metrics]:
  """Token rewards with the KL penalty, advantages, returns."""
  algorithm, measured, penalty = setup.config.algorithm, {}, None
  if algorithm.kl_reward.coef:
    penalty = _penalty(algorithm.kl_reward, seen, rollout.mask)
    measured['kl/reward'] = metrics.mean(penalty, rollout.mask)
    # Every island says the same.
    measured['kl/reward_coef'] = metrics.mean(host.kl_reward.coef)
  cut = rollout.truncated & algorithm.bootstrap_truncated
  experience = experience_lib.estimate(
    rollout,
    sampled.rewards.values,
    sampled.rewards.scores,
    seen.old_logprobs,
    seen.reference_logprobs,
    seen.values,
    np.where(cut, seen.values_after, 0.0),
    islands=setup.islands,
    estimator=algorithm.advantages,
    settings=algorithm_lib.estimator_settings(algorithm),
    whiten=algorithm_lib.whitens(algorithm),
    kl=penalty,
    kl_coef=host.kl_reward.coef,
    reward_weights=list(setup.reward_weights.values()),
    baseline=sampled.baseline,
    sum_squares=seen.sum_squares,
    importance=weights,
  )
  return experience, measured


def _filtrated(
  setup, experience: types.Experience, step: int
) -> tuple[types.Experience, np.ndarray, metrics.Metrics]:
  """The sequences drawn anew, and the mini-batch of each."""
  config, islands, seed = setup.config, setup.islands, setup.config.seed
  section = config.algorithm.filtration
  trained, measured = experience_lib.filtrate(
    experience,
    keys.key(seed, 'filtration', step),
    islands=islands,
    method=section.method,
    power=section.power,
  )
  numbers, count = setup.numbers, len(trained.scores)
  home, _ = packed.assign(
    numbers.sequences_per_step,
    numbers.minibatches_per_step,
    1,
    seed=seed,
    step=step,
  )
  return trained, home[islands.index * count :][:count], measured


def _batches(
  config, experience, minibatches, totals, reference_states
) -> list[types.TokenBatch]:
  """What the updates read, one per mini-batch."""
  mode = config.algorithm.aggregation
  return [
    packed.token_batch(
      experience,
      batch,
      mode,
      scale=_scale(mode, config),
      totals=of_batch,
      reference_states=of_reference,
    )
    for batch, of_batch, of_reference in zip(
      minibatches, totals, reference_states or itertools.repeat(None)
    )
  ]


def _update_controllers(host, computed: dict[str, float], count: int) -> None:
  """Moves the KL coefficients by what `count` sequences showed."""
  of = lambda name: computed.get(name, np.nan)
  host.kl_reward = kl.update(host.kl_reward, of('kl/reward'), count)
  host.kl_loss = kl.update(host.kl_loss, of('kl/reference'), count)


def _dump(setup, run, sampled, rollout, experience) -> None:
  """Writes and shows some samples of the step (of the first island)."""
  config = setup.config
  texts = evaluate.responses(
    rollout, setup.tokenizer, config.rollout.stop_strings
  )
  dump = evaluate.sample_rows(
    setup.name,
    run.host.step,
    texts,
    sampled.rewards,
    list(setup.rewards),
    rollout,
    sampled.prompts,
    setup.tokenizer,
    advantages=experience.advantages,
    limit=config.dump_sequences,
  )
  run.writer.samples(dump)
  run.console.samples(dump)


def _penalty(section, seen: measure.Measured, mask) -> np.ndarray:
  """KL of the old policy to the reference per token, [N, T] nats."""
  estimator = algorithm_lib.kl_estimator(section)
  if estimator is None:
    return seen.divergence
  logprobs = seen.old_logprobs, seen.reference_logprobs
  return np.asarray(estimator(*logprobs, mask=mask))


def _selected(
    select, key, score, batch, minibatch, experience, *, islands, **rows
) -> types.TokenBatch:  # fmt: skip
  """The mini-batch with the tokens that its loss picks under the policy now.

  It picks among all tokens of the mini-batch, so every island looks at all.
  """
  scored = [
    multihost.own_rows(islands, score(rows=part).logprobs)
    for part in packed.slices(batch.rows, islands=islands, **rows)
  ]
  of = lambda x: np.asarray(x)[minibatch.members]
  first = islands.index * len(experience.scores)
  parts = multihost.gather(
    islands,
    (
      (minibatch.members + first).astype(np.int32),
      packing.unpack(np.concatenate(scored), minibatch.pack_map),
      of(experience.old_logprobs),
      of(experience.advantages),
      of(experience.rollout.mask),
    ),
  )
  picked = select(key, *(np.concatenate(x) for x in zip(*parts)))
  before = sum(len(part[0]) for part in parts[: islands.index])
  picked = np.asarray(picked)[before:][: len(minibatch.members)]
  return batch.replace(
    selected=packing.pack(picked, minibatch.pack_map, fill=False)
  )


def _passes(config, plan: algorithm_lib.Plan, train_actor: bool) -> int:
  """Forward passes of a step; a backward pass counts as two.

  As one where adapters train: there are no gradients of the large weights.
  """
  epochs = config.training.epochs_per_step
  actor_updates = (2 if config.model.lora.rank else 3) * epochs * train_actor
  actor = plan.old_pass + plan.reference + actor_updates
  return actor + plan.critic * (1 + 3 * epochs)


def _losses(config, learners, plan: algorithm_lib.Plan) -> dict:
  """The loss of every role: `loss(params, batch, coefs)`."""
  algorithm = config.algorithm
  losses = {
    'actor': functools.partial(
      update.actor_loss,
      score=learners['actor'].score,
      policy_loss=algorithm_lib.policy_loss(algorithm),
      kl_estimator=algorithm_lib.kl_estimator(algorithm.kl_loss),
      on_policy=plan.on_policy,
      reuse=plan.reuse,
      with_entropy_gradient=algorithm.entropy_coef != 0,
      with_reference=plan.reference,
      importance=algorithm_lib.loss_importance(config),
    )
  }
  if 'critic' in learners:
    losses['critic'] = functools.partial(
      update.critic_loss,
      score=learners['critic'].score,
      clip=config.critic.clip or None,
    )
  return losses


def _scale(aggregation: str, config) -> float | None:
  """The divisor of 'seq-mean-token-sum-norm': the longest response."""
  if aggregation == 'seq-mean-token-sum-norm':
    return float(config.rollout.max_new_tokens)
  return None
