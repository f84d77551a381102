"""KL-regularised PPO: one loop, readable from top to bottom.

A step: rollout -> old log-probs, reference, values -> rewards -> advantages ->
mini-batches of updates -> KL controllers, metrics, evaluation, checkpoint.
The loop is plain Python (control); what it calls is jitted (computation).
"""

import functools
import time

import jax
import numpy as np

from rlhf_jax import keys
from rlhf_jax import metrics
from rlhf_jax import types
from rlhf_jax.algorithms import advantages as advantages_lib
from rlhf_jax.algorithms import kl
from rlhf_jax.algorithms import policy_losses
from rlhf_jax.rewards import base as rewards_lib
from rlhf_jax.sampling import engine
from rlhf_jax.trainers import checks
from rlhf_jax.trainers import evaluate
from rlhf_jax.trainers import experience as experience_lib
from rlhf_jax.trainers import roles
from rlhf_jax.trainers import run as run_lib
from rlhf_jax.trainers import setup as setup_lib
from rlhf_jax.trainers import update


def train(
  setup: setup_lib.Setup, run: run_lib.Run, params: types.PyTree | None
) -> types.PyTree:
  """Runs a stage of PPO.

  Args:
    setup: of the stage, checked.
    run: files, progress and host state; `run.host` is updated.
    params: of the actor from the stage before, None in the first.

  Returns:
    The actor's parameters after the last step.
  """
  config, numbers, mesh = setup.config, setup.numbers, setup.mesh
  host = run.host
  algorithm, seed = config.algorithm, config.seed
  samples = config.rollout.samples_per_prompt
  last_step = setup.first_step + numbers.steps

  # ---- Roles and programs: each program is compiled once -----------------
  with_critic = algorithm.advantages in advantages_lib.CRITIC_ESTIMATORS
  with_reference = algorithm.kl_reward.coef > 0 or algorithm.kl_loss.coef > 0
  # A step of a single update whose KL is in the loss needs no old log-probs:
  # they are those of the update itself, without their gradient.
  on_policy = numbers.updates_per_step == 1 and not algorithm.kl_reward.coef
  learners = _learners(setup, with_critic and not config.evaluation.only)
  stage = roles.begin_or_restore(
    setup,
    run,
    learners,
    params,
    with_reference=with_reference and not config.evaluation.only,
  )
  score = {
    role: update.score_program(learners[role].score) for role in learners
  }
  losses = _losses(config, learners, on_policy, with_reference)
  programs = {
    role: roles.programs(
      setup, learners[role], losses[role], stage.states[role]
    )
    for role in learners
  }
  relayout = engine.relayout_program(
    mesh, learners['actor'].specs, setup_lib.dtype(config.rollout.dtype)
  )
  timings = run_lib.Timings()

  # ---- Before the first step ----------------------------------------------
  run.console.start_stage(
    setup.name, numbers.steps, done=host.step - setup.first_step
  )
  if run.validates_before(setup, stage.restored):
    run.log_before(run.validate(setup, relayout, stage.actor))
  if config.evaluation.only:
    return stage.actor

  while host.step < last_step:
    timings.clear()
    began = time.perf_counter()
    step = host.step
    train_actor = step - setup.first_step >= config.critic.warmup_steps

    # ---- Rollout ----------------------------------------------------------
    with timings('gen'):
      prompts = setup.train.batch(host.cursor, config.rollout.prompts_per_step)
      rollout = engine.generate(
        relayout(stage.actor),
        [prompt.ids for prompt in prompts],
        keys.key(seed, 'rollout', step),
        temperature=config.rollout.temperature,
        top_k=config.rollout.top_k,
        top_p=config.rollout.top_p,
        policy_version=host.policy_version,
        **setup.sampler(samples),
      )

    # ---- Rewards, and which sequences take part ---------------------------
    with timings('reward'):
      texts = evaluate.responses(rollout, setup.tokenizer)
      asked = evaluate.prompts_of(rollout, prompts)
      rewards = rewards_lib.evaluate(
        setup.rewards,
        setup.reward_weights,
        texts,
        [prompt.example for prompt in asked],
        timeout_s=config.reward_timeout_s,
        default=config.reward_on_timeout,
      )
    run.events(rewards.events, step + 1)
    rejected = experience_lib.rejected(
      rollout,
      rewards.scores,
      truncated=algorithm.mask_truncated,
      uniform_groups=algorithm.drop_uniform_groups,
    )
    rollout = rollout.replace(mask=rollout.mask & ~rejected[:, None])

    minibatches = experience_lib.split(
      rollout,
      numbers.minibatches_per_step,
      seed=seed,
      step=step,
      tokens_per_row=config.training.tokens_per_row,
      rows_per_microbatch=numbers.rows_per_microbatch,
      share_prefix=config.rollout.share_prefix,
    )

    # ---- Old log-probs, reference, values ---------------------------------
    run_score = functools.partial(
      experience_lib.run_score,
      batches=minibatches,
      rollout=rollout,
      rows_per_microbatch=numbers.rows_per_microbatch,
      mesh=mesh,
    )
    old_logprobs, measured = rollout.logprobs, {}
    reference_logprobs = values = np.zeros(rollout.tokens.shape, np.float32)
    bootstrap = np.zeros(len(rollout.lengths), np.float32)
    if not on_policy:
      with timings('old_log_prob'):
        old_logprobs, _ = run_score(score['actor'], stage.actor)
      measured |= update.sampler_gap(
        old_logprobs, rollout.logprobs, rollout.mask
      )
    if with_reference:
      with timings('ref'):
        reference_logprobs, _ = run_score(score['actor'], stage.reference)
    if with_critic:
      critic = stage.states['critic'].params
      with timings('values'):
        values, after = run_score(score['critic'], critic)
      if algorithm.bootstrap_truncated:
        bootstrap = np.where(rollout.truncated, after, 0.0)

    # ---- KL in the reward, advantages -------------------------------------
    penalty = None
    with timings('adv'):
      if algorithm.kl_reward.coef:
        penalty = np.asarray(
          kl.estimator(algorithm.kl_reward.estimator)(
            old_logprobs, reference_logprobs, mask=rollout.mask
          )
        )
        measured['kl/reward'] = metrics.mean(penalty, rollout.mask)
        measured['kl/reward_coef'] = metrics.mean(host.kl_reward.coef)
      experience = experience_lib.estimate(
        rollout,
        rewards.values,
        rewards.scores,
        old_logprobs,
        reference_logprobs,
        values,
        bootstrap,
        estimator=algorithm.advantages,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        whiten=algorithm.whiten,
        kl=penalty,
        kl_coef=host.kl_reward.coef,
      )
      batches = [
          experience_lib.token_batch(
              experience, batch, algorithm.aggregation,
              scale=_scale(algorithm.aggregation, config),
          )
          for batch in minibatches
      ]  # fmt: skip
    measured |= experience_lib.statistics(
      experience, list(setup.rewards), with_critic=with_critic
    )

    # ---- Updates: epochs x mini-batches x micro-batches -------------------
    coefs = dict(entropy=algorithm.entropy_coef, kl=host.kl_loss.coef)
    order = experience_lib.update_order(
      len(batches), config.training.epochs_per_step, seed=seed, step=step
    )
    for role in ('critic', 'actor'):
      if role not in learners or (role == 'actor' and not train_actor):
        continue
      with timings(f'update_{role}'):
        for index in order:
          stage.states[role], new = update.update(
            stage.states[role],
            experience_lib.slices(
              batches[index], numbers.rows_per_microbatch, mesh
            ),
            coefs,
            programs=programs[role],
            prefix=role,
          )
          measured = metrics.merge(measured, new)
        jax.block_until_ready(stage.states[role].params)

    # ---- Host state, metrics, evaluation, checkpoint ----------------------
    computed = metrics.compute(measured)
    computed['actor/kl_coef'] = host.kl_loss.coef
    host.step += 1
    host.cursor += config.rollout.prompts_per_step
    host.policy_version += len(order) * train_actor
    run.count_skipped(computed)
    run.add_step(rewards.scores, rewards.dropped, rollout.lengths.sum())
    if train_actor:  # while it is frozen the divergence says nothing
      host.kl_reward = kl.update(
        host.kl_reward, computed.get('kl/reward', np.nan), len(texts)
      )
      host.kl_loss = kl.update(
        host.kl_loss, computed.get('kl/reference', np.nan), len(texts)
      )
    if run.due(config.dump_every, setup):
      rows = evaluate.sample_rows(
          setup.name, host.step, texts, rewards, list(setup.rewards), rollout,
          prompts, setup.tokenizer, advantages=experience.advantages,
          limit=config.dump_sequences,
      )  # fmt: skip
      run.writer.samples(rows)
      run.console.samples(rows)
    seconds = time.perf_counter() - began
    if setup.validation and run.due(config.evaluation.every, setup):
      with timings('evaluate'):
        computed |= run.validate(setup, relayout, stage.actor)
    computed |= timings | {
      'timing_s/step': seconds,
      'perf/padding': experience_lib.padding(minibatches),
      'training/epoch': setup.train.epoch(host.cursor),
    }
    computed |= experience_lib.throughput(
      rollout,
      setup.model,
      seconds,
      mesh.devices.flat,
      passes=_passes(
        config, with_critic, with_reference, on_policy, train_actor
      ),
    )
    run.log(computed)
    if run.due(config.checkpoint.every, setup):
      run.save(stage.states)
  return stage.actor


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


def _passes(config, with_critic, with_reference, on_policy, train_actor):
  """Forward passes of a step; a backward pass counts as two."""
  update_passes = 3 * config.training.epochs_per_step
  actor = (not on_policy) + with_reference + update_passes * train_actor
  return actor + with_critic * (1 + update_passes)


def _losses(config, learners, on_policy: bool, with_reference: bool) -> dict:
  """The loss of every role: `loss(params, batch, coefs)`."""
  algorithm = config.algorithm
  policy_loss = functools.partial(
    policy_losses.loss(algorithm.policy_loss),
    **checks.loss_settings(algorithm),
  )
  losses = {
    'actor': functools.partial(
      update.actor_loss,
      score=learners['actor'].score,
      policy_loss=policy_loss,
      kl_estimator=kl.loss_estimator(algorithm.kl_loss.estimator),
      on_policy=on_policy,
      with_entropy_gradient=algorithm.entropy_coef != 0,
      with_reference=with_reference,
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
