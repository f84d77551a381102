"""The structs that travel between sampler, rewards and trainers.

Legend of capitals, used in every shape comment of the project:

  N sequences     T positions of a sequence     K rewards
  R rows          L tokens of a packed row
  B batch         S positions of a call         C cache slots
  D model width   F MLP width   G layers        V vocabulary
  Q query heads   H key/value heads             E head width

Two layouts.  The *sequence layout* `[N, T]` holds one sequence per row:
prompt and response are contiguous, padding is only on the right.  The *token
layout* `[R, L]` holds rows into which whole sequences are packed; a sequence
never spans rows.

One time convention.  In the sequence layout, entry t of `logprobs`, `values`,
`rewards`, `advantages` and `mask` speaks of the token at position t *as an
action*: the token that was predicted from the positions before t.  So

  tokens      [ p0   p1   a2   a3  EOS   .  ]
  mask        [  0    0    1    1    1   0  ]      EOS is an action
  logprobs[3] = log pi(a3 | p0 p1 a2)
  values[3]   = V(p0 p1 a2)

In the token layout the same numbers stand one place to the left, at the token
from which the action is predicted, so that no computation has to shift across
rows or shards: `pack` does the shift once, `unpack` undoes it.
"""

from typing import Any

from flax import struct
import jax

Array = jax.Array
PyTree = Any

# Values of `Rows.segment_ids` that are not the number of a sequence.
PADDING = 0
SHARED = -1


@struct.dataclass
class Rollout:
  """What the sampler returns, in the sequence layout."""

  tokens: Array  # [N, T] int32: prompt, response, then 0
  lengths: Array  # [N] int32: prompt and response tokens
  prompt_lengths: Array  # [N] int32
  mask: Array  # [N, T] bool: the token is an action of the policy
  logprobs: Array  # [N, T] float32: the sampler's log-probs of its actions
  temperature: Array  # [N] float32: 0 is greedy (not usable as training data)
  truncated: Array  # [N] bool: cut by the length limit, no stop token
  group: Array  # [N] int32: the prompt of this step that it answers
  policy_version: Array  # [N] int32: updates the sampling policy had seen
  # [N, T] float32: log-probs after biases and truncation (top-k, top-p, min-p)
  drawn_logprobs: Array | None = None


@struct.dataclass
class Experience:
  """A scored rollout: all that advantages and updates need, per token."""

  rollout: Rollout
  rewards: Array  # [N, K] float32 by name; NaN where one does not apply
  scores: Array  # [N] float32: the weighted sum of `rewards`
  old_logprobs: Array  # [N, T] float32: trainer's, before the update
  reference_logprobs: Array  # [N, T] float32
  values: Array  # [N, T] float32, zero without a critic
  bootstrap_values: Array  # [N] float32: the critic after the last token
  token_rewards: Array  # [N, T] float32: scores, KL penalty, bootstrap
  advantages: Array  # [N, T] float32
  returns: Array  # [N, T] float32: the critic's targets
  importance: Array | None = None  # [N, T] float32: sampler to trainer


@struct.dataclass
class Rows:
  """Model input in the token layout."""

  tokens: Array  # [R, L] int32
  targets: Array  # [R, L] int32: the next token of the same sequence
  positions: Array  # [R, L] int32: position in the sequence
  # [R, L] int32: 1, 2, ... number the sequences of a row; PADDING; SHARED
  # marks a prefix at the start of a row that all its sequences continue.
  segment_ids: Array
  mask: Array  # [R, L] bool: the target is an action
  temperature: Array  # [R, L] float32: divides the logits


@struct.dataclass
class TokenBatch:
  """A mini- or micro-batch for the update, in the token layout."""

  rows: Rows
  old_logprobs: Array  # [R, L] float32
  reference_logprobs: Array  # [R, L] float32
  advantages: Array  # [R, L] float32
  old_values: Array  # [R, L] float32
  returns: Array  # [R, L] float32
  weights: Array  # [R, L] float32: the loss is sum(loss * weights)
  # What only some algorithms read; None otherwise.
  importance: Array | None = None  # [R, L] float32: factor of the policy loss
  selected: Array | None = None  # [R, L] bool: see `policy_losses.SELECTIONS`
  reference_states: Array | None = None  # [R, L, D], for the exact KL


@struct.dataclass
class Scores:
  """What a forward pass says of rows; None where it was not asked."""

  logprobs: Array | None = None  # [R, L] float32
  entropy: Array | None = None  # [R, L] float32, nats
  sum_squares: Array | None = None  # [R, L] float32: sum_v p_v^2
  divergence: Array | None = None  # [R, L] float32: exact KL to a reference
  states: Array | None = None  # [R, L, D]: what the head reads
  values: Array | None = None  # [R, L] float32
