"""What else the oracle holds, in float32 and in float64.

Estimators, policy losses, corrections and filtration are compared in the tests
of their own files; here KL types, aggregation with global counts, value losses,
whitening and entropy.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import masked
from rlhf_jax.algorithms import aggregation
from rlhf_jax.algorithms import kl
from rlhf_jax.algorithms import value_losses
from rlhf_jax.models import heads

CLOSE = dict(rtol=1e-5, atol=1e-6)


@pytest.fixture(params=[np.float32, np.float64], ids=['float32', 'float64'])
def dtype(request):
  """Runs the test in this precision."""
  with jax.enable_x64(request.param == np.float64):
    yield request.param


@pytest.mark.parametrize(
  'verl, ours',
  [
    ('kl', 'k1'),
    ('abs', 'abs'),
    ('mse', 'k2'),
    ('low_var_kl', 'low_var_kl'),
    ('low_var_kl', 'low_var_kl_verl'),
    ('k1+', 'k1+'),
    ('abs+', 'abs+'),
    ('k2+', 'k2+'),
    ('k3+', 'low_var_kl+'),
  ],
)
def test_kl(oracle, dtype, verl, ours):
  new, reference = (oracle['inputs'][x].astype(dtype) for x in ('new', 'ref'))
  value, pull = jax.vjp(lambda x: kl.estimator(ours)(x, reference), new)
  assert value.dtype == dtype
  np.testing.assert_allclose(value, oracle['kl'][verl]['val'], **CLOSE)
  np.testing.assert_allclose(
    pull(jnp.ones_like(value))[0], oracle['kl'][verl]['grad'], **CLOSE
  )


@pytest.mark.parametrize('mode', sorted(aggregation.MODES))
def test_aggregation(oracle, dtype, mode):
  loss = oracle['inputs']['adv'].astype(dtype)
  mask = oracle['inputs']['mask']
  # verl's divisor of the last mode is the padded width, here 7.
  scale = 7.0 if mode == 'seq-mean-token-sum-norm' else None
  weights = aggregation.token_weights(mask, mode, scale=scale)
  total = aggregation.total(loss, weights, mask)
  np.testing.assert_allclose(total, oracle['agg'][mode]['default'], **CLOSE)
  # With 40 tokens and 10 sequences in a global batch over 2 ranks verl
  # multiplies by 2, to undo the mean of the gradients over the ranks.  Here the
  # weights hold the global counts by themselves: 32 tokens and 8 sequences are
  # in the file, and the rest of that batch would have loss 0.
  others = np.zeros((2, 7), bool)
  others[:, :4] = True
  everything = np.concatenate([mask, others])
  weights = aggregation.token_weights(everything, mode, scale=scale)
  total = aggregation.total(loss, weights[:8], mask)
  (other,) = set(oracle['agg'][mode]) - {'default'}
  np.testing.assert_allclose(2 * total, oracle['agg'][mode][other], **CLOSE)


@pytest.mark.parametrize(
  'mode', ['token-mean', 'seq-mean-token-mean', 'seq-mean-token-sum']
)
def test_value_loss(oracle, dtype, mode):
  inputs, mask = oracle['inputs'], oracle['inputs']['mask']
  returns = np.asarray(oracle['advantages']['gae_g1.0_l0.95']['ret'], dtype)
  expected = oracle['value_loss_cliprange0.5'][mode]
  weights = aggregation.token_weights(mask, mode)

  def loss(values):
    losses, statistics = value_losses.clipped(
      values, inputs['values'].astype(dtype), returns, mask, clip=0.5
    )
    return aggregation.total(losses, weights, mask), statistics

  (value, _), gradient = jax.value_and_grad(loss, has_aux=True)(
    jnp.asarray(inputs['vpreds'].astype(dtype))
  )
  np.testing.assert_allclose(value, expected['loss'], **CLOSE)
  np.testing.assert_allclose(gradient, expected['grad'], **CLOSE)


@pytest.mark.parametrize('shift', [True, False])
def test_whitening(oracle, dtype, shift):
  x, mask = oracle['inputs']['adv'].astype(dtype), oracle['inputs']['mask']
  expected = oracle['whiten' if shift else 'whiten_noshift']
  white = masked.whiten(x, mask, shift_mean=shift)
  # On purpose: 0 at masked places, where verl leaves numbers.
  np.testing.assert_allclose(white, np.where(mask, expected, 0), **CLOSE)


def test_entropy(oracle, dtype):
  logits = np.asarray(oracle['entropy']['logits'], dtype)[None]  # 1 5 11
  shape = logits.shape[:2]
  scores = heads.token_scores(
    jnp.asarray(logits),
    (jnp.eye(11, dtype=dtype), 0),
    jnp.zeros(shape, jnp.int32),
    jnp.ones(shape, bool),
    jnp.ones(shape, dtype),
    entropy=True,
  )
  np.testing.assert_allclose(
    scores.entropy[0], oracle['entropy']['ent'], **CLOSE
  )
