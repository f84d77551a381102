"""Fakes and tolerances that the other tests lean on."""

import re

import numpy as np
import pytest

from rlhf_jax import testing


def test_shared_path_finds_what_is_there(tmp_path, monkeypatch):
  (tmp_path / 'data').mkdir()
  monkeypatch.setenv('RLHF_JAX_SHARED', str(tmp_path))
  assert testing.shared_path('data') == (tmp_path / 'data').resolve()


def test_shared_path_skips_with_a_reason(tmp_path, monkeypatch):
  monkeypatch.setenv('RLHF_JAX_SHARED', str(tmp_path))
  reason = re.escape("'data/x' is absent") + '.*RLHF_JAX_SHARED'
  with pytest.raises(pytest.skip.Exception, match=reason):
    testing.shared_path('data/x')


def test_tiny_config_takes_overrides_and_refuses_unknown_fields():
  assert testing.tiny_config(num_layers=3).num_layers == 3
  assert testing.tiny_config() == testing.tiny_config()
  with pytest.raises(TypeError, match='num_layer'):
    testing.tiny_config(num_layer=3)


def test_constant_reward():
  assert testing.constant_reward(0.7)(['a', 'b'], [None, None]) == [0.7, 0.7]


def test_every_tolerance_has_a_reason():
  for name, tolerance in testing.TOLERANCES.items():
    assert len(tolerance.reason) > 20, name
    # bfloat16 has 8 bits: 2^-9 is 2e-3.
    most = 1e-2 if 'bfloat16' in name else 1e-3
    largest = 0.2 if name == 'teacher_forced_bfloat16' else 1e-3
    assert 0 <= tolerance.atol < largest and 0 <= tolerance.rtol <= most, name


def test_assert_close_cites_the_tolerance():
  testing.assert_close([1.0 + 9e-6], [1.0], 'first_ratio')
  with pytest.raises(AssertionError, match="tolerance 'first_ratio'"):
    testing.assert_close([1.0 + 2e-5], [1.0], 'first_ratio')
  with pytest.raises(AssertionError, match='shape'):
    testing.assert_close([1.0], 1.0, 'exact')
  with pytest.raises(KeyError, match='there are exact'):
    testing.assert_close(1.0, 1.0, 'unheard of')


def test_assert_norm_close_looks_at_all_leaves_together():
  # |b| = 5 and rtol 1e-3 + atol 1e-7: a difference of 4.9e-3 in one leaf, where
  # the expected number is 0, is fine; 5.1e-3 is not.
  expected = {'w': np.array([3.0, 4.0]), 'bias': np.array([0.0])}
  near = {'w': np.array([3.0, 4.0]), 'bias': np.array([4.9e-3])}
  far = {'w': np.array([3.0, 4.0]), 'bias': np.array([5.1e-3])}
  testing.assert_norm_close(near, expected, 'three_updates')
  with pytest.raises(AssertionError, match="tolerance 'three_updates'"):
    testing.assert_norm_close(far, expected, 'three_updates')
  with pytest.raises(AssertionError):
    testing.assert_norm_close({'w': np.zeros(2)}, expected, 'three_updates')
  nan = {'w': np.array([np.nan, 4.0]), 'bias': np.array([0.0])}
  with pytest.raises(AssertionError):
    testing.assert_norm_close(nan, expected, 'three_updates')
