"""How many floating-point operations a model needs, for `perf/mfu`."""

from typing import Any

import jax

from rlhf_jax.models import config as model_config
from rlhf_jax.models import decoder
from rlhf_jax.models import spec
from rlhf_jax.sharding import chips


def forward(
  config: model_config.ModelConfig,
  tokens: float,
  head_tokens: float,
  attended: float,
) -> float:
  """Operations of a forward pass: 2 per weight and token, and attention.

    2 body tokens + 2 V D head_tokens + 4 layers heads head_dim attended

  Args:
    config: of the model.
    tokens: that went through the body.
    head_tokens: whose logits were computed.
    attended: pairs of a token and one that it attends to, over all sequences;
      for one sequence of n tokens about n^2 / 2.

  Returns:
    Floating-point operations; a backward pass takes twice as many.
  """
  table = decoder.specs(config)
  body = spec.count(table['layers'])
  head = config.vocab_size * config.d_model
  attention = config.num_layers * config.num_heads * config.head_dim
  return 2 * body * tokens + 2 * head * head_tokens + 4 * attention * attended


def of_sequences(config: model_config.ModelConfig, lengths: Any) -> Any:
  """Operations of a forward pass over each sequence of so many tokens."""
  return forward(config, lengths, lengths, lengths * lengths / 2)


def peak(device: jax.Device) -> float | None:
  """Peak FLOP/s of a device in bfloat16, None where it is not known."""
  chip = chips.of_device(device)
  return None if chip is None else chip.flops
