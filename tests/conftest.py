"""Strict JAX on eight simulated CPU devices, for every test."""

import os

# Before the first import of JAX: it reads these once.
_FLAG = '--xla_force_host_platform_device_count=8'
if 'xla_force_host_platform_device_count' not in os.environ.get(
  'XLA_FLAGS', ''
):
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {_FLAG}'.strip()
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# Tests never download; a hub id that is not cached must fail at once.
os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')

import jax  # noqa: E402

# A silent broadcast of [N] against [N, T] is the commonest bug of this kind of
# code: `[N] - [N, N]` raises instead.
jax.config.update('jax_numpy_rank_promotion', 'raise')
