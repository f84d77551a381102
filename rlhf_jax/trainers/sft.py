"""Supervised fine-tuning: cross-entropy on the reference answers."""

import functools
import time

import numpy as np

from rlhf_jax import metrics
from rlhf_jax import types
from rlhf_jax.algorithms import aggregation
from rlhf_jax.data import packing
from rlhf_jax.data import pipeline
from rlhf_jax.models import flops
from rlhf_jax.planner import fit
from rlhf_jax.sharding import multihost
from rlhf_jax.trainers import memory
from rlhf_jax.trainers import packed
from rlhf_jax.trainers import roles
from rlhf_jax.trainers import run as run_lib
from rlhf_jax.trainers import setup as setup_lib
from rlhf_jax.trainers import update


def train(
  setup: setup_lib.Setup, run: run_lib.Run, params: types.PyTree | None
) -> types.PyTree:
  """Runs a supervised stage; a step is one mini-batch.

  Args:
    setup: of the stage, checked.
    run: files, progress and host state; `run.host` is updated.
    params: of the policy from the stage before, None in the first.

  Returns:
    The parameters after the last step; with adapters, see `lora`.
  """
  computes = parts(setup)
  setup = fit.ahead(setup, run, computes)
  config, numbers, islands = setup.config, setup.numbers, setup.islands
  host = run.host
  last_step = setup.first_step + numbers.steps

  # ---- Role and programs ---------------------------------------------------
  stage = roles.begin_or_restore(setup, run, computes.learners, params)
  programs = computes.updates['actor']
  relayout = roles.relayout(setup, computes.relayout)

  # ---- Before the first step -----------------------------------------------
  run.console.start_stage(
    setup.name, numbers.steps, done=host.step - setup.first_step
  )
  if run.validates_before(setup, stage.restored):
    run.log_before(run.validate(setup, relayout, stage.actor))
  if config.evaluation.only:
    return stage.actor

  while host.step < last_step:
    began = time.perf_counter()
    # ---- Data: prompts and their answers, packed ---------------------------
    count = numbers.sequences_per_step
    prompts = setup.train.at(
      range(host.cursor + islands.index, host.cursor + count, islands.count)
    )
    examples = pipeline.supervised(
      prompts, setup.tokenizer, width=numbers.longest_sequence
    )
    batch = pack(examples, setup, memory.rows(run, setup))
    # ---- Update --------------------------------------------------------------
    state = stage.take('actor')
    state, measured = memory.update(
      run, setup, state, batch, stage.untrained('actor'),
      programs=programs, prefix='actor',
    )  # fmt: skip
    stage.put('actor', state)
    values = metrics.compute(measured)
    # ---- Host state, metrics, evaluation, checkpoint -----------------------
    host.step += 1
    host.cursor += count
    host.policy_version += 1
    tokens = int(multihost.total(islands, examples.lengths.sum()))
    host.tokens += tokens
    run.count_skipped(values)
    seconds = time.perf_counter() - began
    if setup.validation and setup.rewards:
      if run.due(config.evaluation.every, setup):
        values |= run.validate(setup, relayout, stage.actor)
    values |= {
      'timing_s/step': seconds,
      'perf/tokens_per_second_per_device': (tokens / seconds / setup.mesh.size),
      'training/epoch': setup.train.epoch(host.cursor),
    }
    run.log(values)
    if run.due(config.checkpoint.every, setup):
      run.save(stage.states)
  return stage.actor


def parts(setup: setup_lib.Setup) -> roles.Parts:
  """All functions that a supervised stage computes with."""
  learner = roles.learner(setup, 'actor', setup.numbers.steps)
  loss = functools.partial(update.supervised_loss, score=learner.score)
  return roles.Parts(
    learners={'actor': learner},
    updates={'actor': roles.programs(setup, learner, loss)},
    relayout=roles.relayout_program(setup, learner),
  )


def pack(
  examples: types.Rollout, setup: setup_lib.Setup, rows_per_microbatch: int
) -> types.TokenBatch:
  """Packs examples into rows, weighted as `algorithm.aggregation` says."""
  (batch,) = packed.split(
    examples,
    np.zeros(len(examples.lengths), int),
    1,
    islands=setup.islands,
    tokens_per_row=setup.config.training.tokens_per_row,
    rows_per_microbatch=rows_per_microbatch,
    share_prefix=False,
    cost=functools.partial(flops.of_sequences, setup.model),
  )
  lengths = examples.mask.sum(axis=1)
  counts = np.array([lengths.sum(), (lengths > 0).sum()])
  weights = aggregation.token_weights(
    examples.mask,
    setup.config.algorithm.aggregation,
    totals=multihost.total(setup.islands, counts),
  )
  nothing = np.zeros(batch.rows.tokens.shape, np.float32)
  return types.TokenBatch(
    rows=batch.rows,
    old_logprobs=nothing,
    reference_logprobs=nothing,
    advantages=nothing,
    old_values=nothing,
    returns=nothing,
    weights=packing.pack(np.asarray(weights)[batch.members], batch.pack_map),
  )
