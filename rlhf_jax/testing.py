"""What tests and colabs share: tolerances, shared data, fakes.

`TOLERANCES` is the one table of numerical tolerances: a test names its entry
instead of inventing a number, and the reason stands beside the number.
"""

from collections.abc import Callable, Sequence
import os
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np

from rlhf_jax.models import config as model_config

_ROOT = pathlib.Path(__file__).resolve().parents[1]


class Tolerance(NamedTuple):
  """How far two numbers that should be equal may lie apart, and why."""

  atol: float  # absolute: |a - b| <= atol + rtol * |b|
  rtol: float  # relative
  reason: str


def shared_path(name: str) -> pathlib.Path:
  """Returns a path in the shared data folder, or skips the test.

  The folder is `RLHF_JAX_SHARED`, by default `../shared` beside the repository.

  Args:
    name: path inside it, like 'data/stories260k'.

  Raises:
    pytest.skip.Exception: if the folder or the file is absent.
  """
  root = pathlib.Path(os.environ.get('RLHF_JAX_SHARED', _ROOT / '../shared'))
  path = (root / name).resolve()
  if not path.exists():
    # Not a requirement of the package: only tests come here.
    import pytest

    pytest.skip(
      f'shared data {name!r} is absent from {root.resolve()}; set '
      'RLHF_JAX_SHARED to the folder that holds it'
    )
  return path


def tiny_config(**overrides: Any) -> model_config.ModelConfig:
  """Returns a decoder config that compiles in a second: 2 layers, width 16.

  Grouped heads, an odd vocabulary and a width that is not heads * head_dim, so
  that a mix-up of axes shows as a shape error.

  Args:
    **overrides: fields of `ModelConfig`, like `family='qwen2'`.
  """
  fields = dict(
    family='llama',
    vocab_size=37,
    d_model=16,
    d_mlp=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_positions=64,
    rope_theta=10000.0,
    norm_eps=1e-5,
    tied_embeddings=True,
    init_std=0.1,
  )
  return model_config.ModelConfig(**(fields | overrides))


def constant_reward(value: float = 1.0) -> Callable[..., list[float]]:
  """Returns a reward function that scores every response with `value`."""

  def reward(responses: Sequence[str], examples: Sequence[Any]) -> list[float]:
    del examples
    return [value] * len(responses)

  return reward


def assert_close(actual: Any, expected: Any, name: str) -> None:
  """Asserts that two arrays are equal to the tolerance `TOLERANCES[name]`.

  Args:
    actual: array, or anything `numpy.asarray` takes.
    expected: array of the same shape.
    name: entry of `TOLERANCES`.

  Raises:
    AssertionError: on other shapes or a larger difference; it cites the entry.
    KeyError: on an unknown name; it lists the names.
  """
  tolerance = _tolerance(name)
  actual, expected = np.asarray(actual), np.asarray(expected)
  assert actual.shape == expected.shape, (
    f'got shape {actual.shape}, expected {expected.shape}'
  )
  np.testing.assert_allclose(
    actual,
    expected,
    atol=tolerance.atol,
    rtol=tolerance.rtol,
    err_msg=f'tolerance {name!r}: {tolerance.reason}',
  )


def assert_norm_close(actual: Any, expected: Any, name: str) -> None:
  """Asserts |actual - expected| <= rtol |expected| + atol, as one norm.

  The norm runs over all leaves together. Element-wise comparison of gradients
  is meaningless where the true gradient is 0, as for a key bias: there one
  compares rounding noise with rounding noise.

  Args:
    actual: pytree of arrays.
    expected: pytree of the same structure and shapes.
    name: entry of `TOLERANCES`.

  Raises:
    AssertionError: on another structure, other shapes or a larger difference.
    KeyError: on an unknown name; it lists the names.
  """
  tolerance = _tolerance(name)
  structures = [jax.tree.structure(x) for x in (actual, expected)]
  assert structures[0] == structures[1], (
    f'got {structures[0]}, expected {structures[1]}'
  )
  difference = scale = 0.0
  for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape, f'got shape {a.shape}, expected {b.shape}'
    difference += float(np.sum((a - b) ** 2))
    scale += float(np.sum(b**2))
  difference, scale = difference**0.5, scale**0.5
  limit = tolerance.rtol * scale + tolerance.atol
  assert difference <= limit, (
    f'got a difference of norm {difference:.3g}, expected at most {limit:.3g} '
    f'(norm {scale:.3g}); tolerance {name!r}: {tolerance.reason}'
  )


def _tolerance(name: str) -> Tolerance:
  if name not in TOLERANCES:
    raise KeyError(f'no tolerance {name!r}; there are {", ".join(TOLERANCES)}')
  return TOLERANCES[name]


TOLERANCES: dict[str, Tolerance] = {
  'exact': Tolerance(0.0, 0.0, 'the same program on the same bits'),
  'oracle_float32': Tolerance(
    1e-6, 1e-5, 'the same formula in float32 by another library'
  ),
  'oracle_float64': Tolerance(
    1e-12, 1e-9, 'the same formula in float64 by another program'
  ),
  'first_ratio': Tolerance(
    1e-5,
    0.0,
    'old and new log-probs come from two compilations of one function',
  ),
  'ln2': Tolerance(
    1e-6, 0.0, 'DPO loss of equal log-ratios is ln 2 in float32'
  ),
  'kl_of_itself': Tolerance(
    1e-6, 0.0, 'KL(pi, pi) is 0; log_softmax twice rounds in float32'
  ),
  'gradient_invariance_float64': Tolerance(
    1e-14,
    1e-10,
    'norm-wise; micro-batching, packing and padding only reorder float64 sums',
  ),
  'finite_difference_float64': Tolerance(
    1e-8,
    1e-6,
    'central differences with step 1e-5 err by about the step squared',
  ),
  'layout_float32': Tolerance(
    1e-5, 1e-5, 'log-probs and losses over layouts or device counts, float32'
  ),
  'gradient_layout_float32': Tolerance(
    1e-7, 1e-5, 'norm-wise; gradients over layouts or device counts, float32'
  ),
  'remat': Tolerance(
    1e-7, 1e-6, 'norm-wise; the same float32 operations, fused differently'
  ),
  'three_updates': Tolerance(
    1e-7,
    1e-3,
    'norm-wise; AdamW (eps 1e-5) divides rounding noise by tiny second moments',
  ),
  'teacher_forced': Tolerance(
    1e-4, 0.0, 'log-probs of one text by two programs (cached, full), float32'
  ),
  'teacher_forced_bfloat16': Tolerance(
    0.15,
    0.0,
    'log-probs of a bfloat16 sampler against float32: 8 bits of logits near 5',
  ),
  'logits_of_largest': Tolerance(
    1e-4, 0.0, 'logits over the largest logit; against transformers, float32'
  ),
}
