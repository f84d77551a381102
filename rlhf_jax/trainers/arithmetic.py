"""Batch arithmetic: every size in a stated unit, every division exact."""

import dataclasses
import math

from ml_collections import ConfigDict

# A micro-batch that is decided by compiling; until then it has one row.
AUTO = 'auto'


@dataclasses.dataclass(frozen=True)
class Numbers:
  """The batch arithmetic of a stage, in stated units."""

  steps: int  # of this stage
  sequences_per_step: int
  minibatches_per_step: int
  updates_per_step: int
  longest_sequence: int  # tokens
  rows_per_microbatch: int  # over all data groups
  tokens_per_microbatch: int  # over all data groups


def derive(
  config: ConfigDict,
  trainer: str,
  *,
  max_positions: int,
  data_groups: int,
  islands: int,
  prompts_in_data: int,
) -> Numbers:
  """The numbers of a stage.

  Args:
    config: of the stage.
    trainer: 'ppo' or 'sft'.
    max_positions: tokens that the model can read.
    data_groups: over which rows are split.
    islands: over which prompts are split.
    prompts_in_data: of the training set.

  Raises:
    ValueError: a division is not exact or something does not fit; the message
      has the numbers.
  """
  _check_sizes(config, max_positions)
  rollout, training = config.rollout, config.training
  if trainer == 'ppo':
    prompts = rollout.prompts_per_step
    sequences = prompts * rollout.samples_per_prompt
    if training.sequences_per_minibatch % rollout.samples_per_prompt:
      raise ValueError(
        'training.sequences_per_minibatch='
        f'{training.sequences_per_minibatch} must be a multiple of'
        f' rollout.samples_per_prompt={rollout.samples_per_prompt}: the'
        ' samples of a prompt stay in one mini-batch'
      )
    if sequences % training.sequences_per_minibatch:
      raise ValueError(
        f'{prompts} prompts x {rollout.samples_per_prompt} samples ='
        f' {sequences} sequences per step cannot be divided into'
        ' mini-batches of training.sequences_per_minibatch='
        f'{training.sequences_per_minibatch}'
      )
    minibatches = sequences // training.sequences_per_minibatch
    updates = minibatches * training.epochs_per_step
  else:
    prompts = sequences = training.sequences_per_minibatch
    minibatches = updates = 1
  if islands > 1 and prompts % (minibatches * islands):
    raise ValueError(
      f'{minibatches} mini-batches of {prompts // minibatches} prompts cannot'
      f' be divided over {islands} islands (processes that sample by'
      ' themselves): make the prompts of a mini-batch a multiple of that'
    )
  if islands > 1 and sequences % data_groups:
    raise ValueError(
      f'{sequences} sequences per step cannot be divided over {data_groups}'
      ' data groups (mesh.data x mesh.fsdp)'
    )
  if prompts > prompts_in_data:
    raise ValueError(
      f'a step takes {prompts} prompts, the training set has'
      f' {prompts_in_data}: lower the batch or add data'
    )
  if (config.steps > 0) == (config.epochs > 0):
    raise ValueError(
      f'set the length of the stage by one of steps={config.steps} and'
      f' epochs={config.epochs}'
    )
  steps = config.steps or math.floor(config.epochs * prompts_in_data / prompts)
  if steps < 1:
    raise ValueError(
      f'epochs={config.epochs} of {prompts_in_data} prompts are less than one'
      f' step of {prompts} prompts'
    )
  numbers = Numbers(
    steps=steps,
    sequences_per_step=sequences,
    minibatches_per_step=minibatches,
    updates_per_step=updates,
    longest_sequence=longest_sequence(config),
    rows_per_microbatch=0,
    tokens_per_microbatch=0,
  )
  tokens = training.tokens_per_microbatch
  return with_microbatch(
    numbers,
    training.tokens_per_row if tokens == AUTO else tokens,
    tokens_per_row=training.tokens_per_row,
    data_groups=data_groups,
  )


def with_microbatch(
  numbers: Numbers, tokens: int, *, tokens_per_row: int, data_groups: int
) -> Numbers:
  """The numbers with another micro-batch, in tokens per data group."""
  return dataclasses.replace(
    numbers,
    rows_per_microbatch=tokens // tokens_per_row * data_groups,
    tokens_per_microbatch=tokens * data_groups,
  )


def longest_sequence(config: ConfigDict) -> int:
  """Tokens of the longest possible prompt and response."""
  return config.data.max_prompt_tokens + config.rollout.max_new_tokens


def _check_sizes(config: ConfigDict, max_positions: int) -> None:
  """Refuses sizes of sequences, rows and micro-batches that do not fit."""
  rollout, training = config.rollout, config.training
  tokens = training.tokens_per_microbatch
  if tokens == AUTO:
    tokens = training.tokens_per_row
  if not isinstance(tokens, int) or isinstance(tokens, bool):
    raise ValueError(
      f'training.tokens_per_microbatch={tokens!r} must be a number of tokens,'
      f' or {AUTO!r}'
    )
  for key, value in {
    'rollout.prompts_per_step': rollout.prompts_per_step,
    'rollout.samples_per_prompt': rollout.samples_per_prompt,
    'rollout.max_new_tokens': rollout.max_new_tokens,
    'data.max_prompt_tokens': config.data.max_prompt_tokens,
    'training.sequences_per_minibatch': training.sequences_per_minibatch,
    'training.epochs_per_step': training.epochs_per_step,
    'training.tokens_per_row': training.tokens_per_row,
    'training.tokens_per_microbatch': tokens,
  }.items():
    if value < 1:
      raise ValueError(f'{key}={value} must be 1 or more')
  longest = longest_sequence(config)
  if longest > max_positions:
    raise ValueError(
      f'data.max_prompt_tokens={config.data.max_prompt_tokens} and'
      f' rollout.max_new_tokens={rollout.max_new_tokens} make sequences of'
      f' {longest} tokens, the model has {max_positions} positions'
    )
  if longest > training.tokens_per_row:
    raise ValueError(
      f'training.tokens_per_row={training.tokens_per_row} cannot hold the'
      f' longest sequence of {longest} tokens (max_prompt_tokens +'
      ' max_new_tokens): raise tokens_per_row'
    )
  if tokens % training.tokens_per_row:
    raise ValueError(
      f'training.tokens_per_microbatch={tokens} must be a multiple of'
      f' training.tokens_per_row={training.tokens_per_row}'
    )
