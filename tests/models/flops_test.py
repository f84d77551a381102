"""Hand counts of the operations of a model."""

from rlhf_jax import testing
from rlhf_jax.models import flops


def test_forward_by_hand():
  config = testing.tiny_config()
  d, f, layers = config.d_model, config.d_mlp, config.num_layers
  q = config.num_heads * config.head_dim
  kv = config.num_kv_heads * config.head_dim
  # Per layer: q and o, k and v, gate/up/down, two norms; biases if any.
  body = layers * (2 * d * q + 2 * d * kv + 3 * d * f + 2 * d)
  if config.attention_bias:
    body += layers * (q + 2 * kv)
  # A sequence of 10 tokens with 4 actions, 50 attended pairs: scores and
  # weighted values are 2 q operations each per pair and layer.
  expected = 2 * body * 10 + 2 * config.vocab_size * d * 4 + layers * 4 * q * 50
  assert flops.forward(config, 10, 4, 50) == expected


def test_peak_is_known_by_the_name_of_the_device():
  class Device:
    device_kind = 'NVIDIA H100 80GB HBM3'

  assert flops.peak(Device()) == 989e12
  Device.device_kind = 'TPU v5 lite'  # and not the v5p, whose name is in it
  assert flops.peak(Device()) == 197e12
  Device.device_kind = 'cpu'
  assert flops.peak(Device()) is None
