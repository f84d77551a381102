"""KL-regularised PPO: one loop, readable from top to bottom.

A step: rollout -> old log-probs, reference, values -> rewards -> advantages ->
mini-batches of updates -> KL controllers, metrics, evaluation, checkpoint.
The loop is plain Python (control); what it calls is jitted (computation).
"""

import contextlib
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
from rlhf_jax.models import heads
from rlhf_jax.rewards import base as rewards_lib
from rlhf_jax.sampling import engine
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
  config, numbers, mesh, host = (
    setup.config,
    setup.numbers,
    setup.mesh,
    run.host,
  )
  algorithm, seed = config.algorithm, config.seed
  samples = config.rollout.samples_per_prompt
  compute = setup_lib.dtype(config.model.dtype)
  last_step = setup.first_step + numbers.steps

  # ---- Roles: an actor, perhaps a critic, perhaps a reference -------------
  with_critic = algorithm.advantages in advantages_lib.CRITIC_ESTIMATORS
  with_reference = algorithm.kl_reward.coef > 0 or algorithm.kl_loss.coef > 0
  updates = numbers.updates_per_step
  learners = {
      'actor': roles.learner(
          setup, 'actor',
          max(numbers.steps - config.critic.warmup_steps, 1) * updates,
      )
  }  # fmt: skip
  if with_critic:
    learners['critic'] = roles.learner(setup, 'critic', numbers.steps * updates)
  states, reference = {}, None
  restored = run.restored_in(setup.name)
  if restored is not None:
    states = roles.restore(setup, learners, run.checkpoints, restored)
    if with_reference:
      reference = roles.restore_reference(setup, run.workdir, host.reference)
  else:
    run.begin_stage(setup)
    untouched = params is None
    params = roles.actor_params(setup, params)
    if with_reference and not config.evaluation.only:
      reference, host.reference = roles.begin_reference(
        setup, run.workdir, params, untouched
      )
    if with_critic and not config.evaluation.only:
      states['critic'] = roles.create(
        setup, learners['critic'], roles.critic_params(setup, params)
      )
    states['actor'] = roles.create(setup, learners['actor'], params)

  # ---- Programs: each is compiled once ------------------------------------
  # A step of a single update whose KL is in the loss needs no old log-probs:
  # they are those of the update itself, without their gradient.
  on_policy = updates == 1 and not algorithm.kl_reward.coef
  scoring = dict(
    head_chunk=config.model.head_chunk,
    remat=config.model.remat,
    dtype=compute,
  )
  actor_score = functools.partial(heads.score, config=setup.model, **scoring)
  policy_loss = policy_losses.loss(algorithm.policy_loss)
  if algorithm.policy_loss == 'ppo':
    policy_loss = functools.partial(
      policy_loss,
      clip_low=algorithm.clip_low,
      clip_high=algorithm.clip_high,
      dual_clip=algorithm.dual_clip or None,
    )
  losses = {
    'actor': functools.partial(
      update.actor_loss,
      score=actor_score,
      policy_loss=policy_loss,
      kl_estimator=kl.loss_estimator(algorithm.kl_loss.estimator),
      on_policy=on_policy,
      with_reference=with_reference,
    )
  }
  score = {'actor': update.score_program(actor_score)}
  if with_critic:
    critic_score = functools.partial(
      heads.score, config=roles.critic_model(setup), **scoring
    )
    losses['critic'] = functools.partial(
      update.critic_loss, score=critic_score, clip=config.critic.clip or None
    )
    score['critic'] = update.score_program(critic_score)
  programs = {
    role: update.programs(
      losses[role],
      learners[role].optimizer,
      learners[role].learning_rate,
      params=states[role].params,
      specs=learners[role].specs,
      mesh=mesh,
      max_grad_norm=learners[role].max_grad_norm,
    )
    for role in states
  }
  relayout = engine.relayout_program(
    mesh, learners['actor'].specs, setup_lib.dtype(config.rollout.dtype)
  )
  by_rows = dict(rows_per_microbatch=numbers.rows_per_microbatch, mesh=mesh)

  def validate():
    with timer('evaluate'):
      values, rows, events = evaluate.evaluate(
        relayout(states['actor'].params),
        setup.validation,
        setup.tokenizer,
        setup.rewards,
        setup.reward_weights,
        seed=seed,
        stage=setup.name,
        step=host.step,
        timeout_s=config.reward_timeout_s,
        default=config.reward_on_timeout,
        **setup.sampler(1),
      )
    run.events(events)
    run.writer.samples(rows)
    run.console.samples(rows)
    run.log_evaluation(values, config.evaluation.best_metric)
    return values

  timings = {}

  @contextlib.contextmanager
  def timer(name):
    began = time.perf_counter()
    yield
    timings[f'timing_s/{name}'] = time.perf_counter() - began

  # ---- Before the first step ----------------------------------------------
  run.console.start_stage(
    setup.name, numbers.steps, done=host.step - setup.first_step
  )
  before = restored is None and config.evaluation.before_train
  if setup.validation and (before or config.evaluation.only):
    run.log_before(validate())
  if config.evaluation.only:
    return states['actor'].params

  while host.step < last_step:
    timings.clear()
    began = time.perf_counter()
    step = host.step
    train_actor = step - setup.first_step >= config.critic.warmup_steps

    # ---- Rollout ----------------------------------------------------------
    with timer('gen'):
      prompts = setup.train.batch(host.cursor, config.rollout.prompts_per_step)
      rollout = engine.generate(
        relayout(states['actor'].params),
        [prompt.ids for prompt in prompts],
        keys.key(seed, 'rollout', step),
        temperature=config.rollout.temperature,
        top_k=config.rollout.top_k,
        top_p=config.rollout.top_p,
        policy_version=host.policy_version,
        **setup.sampler(samples),
      )

    # ---- Rewards, and which sequences take part ---------------------------
    with timer('reward'):
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
    run.events(rewards.events)
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
    zeros = np.zeros(rollout.tokens.shape, np.float32)
    old_logprobs, reference_logprobs, values = rollout.logprobs, zeros, zeros
    bootstrap = np.zeros(len(rollout.lengths), np.float32)
    measured = {}
    if not on_policy:
      with timer('old_log_prob'):
        old_logprobs, _ = experience_lib.run_score(
            score['actor'], states['actor'].params, minibatches, rollout,
            **by_rows,
        )  # fmt: skip
      measured |= update.sampler_gap(
        old_logprobs, rollout.logprobs, rollout.mask
      )
    if with_reference:
      with timer('ref'):
        reference_logprobs, _ = experience_lib.run_score(
          score['actor'], reference, minibatches, rollout, **by_rows
        )
    if with_critic:
      with timer('values'):
        values, bootstrap = experience_lib.run_score(
            score['critic'], states['critic'].params, minibatches, rollout,
            **by_rows,
        )  # fmt: skip
      cut = rollout.truncated & algorithm.bootstrap_truncated
      bootstrap = np.where(cut, bootstrap, 0.0)

    # ---- KL in the reward, advantages -------------------------------------
    penalty = None
    with timer('adv'):
      if algorithm.kl_reward.coef:
        penalty = np.asarray(
          kl.estimator(algorithm.kl_reward.estimator)(
            old_logprobs, reference_logprobs, mask=rollout.mask
          )
        )
        mean_kl = metrics.mean(penalty, rollout.mask)
        measured['kl/reward'] = mean_kl
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
    for role in ('critic', 'actor'):
      if role not in states or (role == 'actor' and not train_actor):
        continue
      with timer(f'update_{role}'):
        order = experience_lib.update_order(
          len(batches), config.training.epochs_per_step, seed=seed, step=step
        )
        for index in order:
          states[role], new = update.update(
            states[role],
            experience_lib.slices(
              batches[index], numbers.rows_per_microbatch, mesh
            ),
            coefs,
            programs=programs[role],
            prefix=role,
          )
          measured = metrics.merge(measured, new)
        jax.block_until_ready(states[role].params)

    # ---- Host state, metrics, evaluation, checkpoint ----------------------
    values = metrics.compute(measured) | {'actor/kl_coef': host.kl_loss.coef}
    host.step += 1
    host.cursor += config.rollout.prompts_per_step
    host.policy_version += updates * train_actor
    run.count_skipped(values)
    run.add_step(rewards.scores, rewards.dropped, rollout.lengths.sum())
    host.kl_reward = kl.update(
      host.kl_reward, values.get('kl/reward', np.nan), len(texts)
    )
    host.kl_loss = kl.update(
      host.kl_loss, values.get('kl/reference', np.nan), len(texts)
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
      values |= validate()
    values |= timings | {
      'timing_s/step': seconds,
      'perf/tokens_per_second_per_device': (
        rollout.lengths.sum() / seconds / mesh.size
      ),
      'perf/padding': experience_lib.padding(minibatches),
      'training/epoch': setup.train.epoch(host.cursor),
    }
    run.log(values)
    if run.due(config.checkpoint.every, setup):
      run.save(states)
  return states['actor'].params


def _scale(aggregation: str, config) -> float | None:
  """The divisor of 'seq-mean-token-sum-norm': the longest response."""
  if aggregation == 'seq-mean-token-sum-norm':
    return float(config.rollout.max_new_tokens)
  return None
