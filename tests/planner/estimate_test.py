"""Rooflines by hand, of devices that are not there."""

import json
import types

import numpy as np

from rlhf_jax.planner import estimate
from rlhf_jax.sharding import chips

_H100, _V5P = chips.CHIPS['h100'], chips.CHIPS['v5p']


def _gpus(*processes):
  return [types.SimpleNamespace(process_index=p) for p in processes]


def test_collectives_within_and_across_nodes():
  of = lambda *processes: estimate.collective_seconds(
    9e9, _gpus(*processes), _H100
  )
  # 9 GB at 450 GB/s.
  np.testing.assert_allclose(of(0, 0, 0, 0), 0.02)
  # One device in each of two nodes: one port of 50 GB/s.
  np.testing.assert_allclose(of(0, 1), 9 / 50)
  # Eight in each: eight ports, 9 / 400, more than the 0.02 inside.
  np.testing.assert_allclose(of(*[0] * 8, *[1] * 8), 9 / 400)
  # What all nodes share well is bound by the links inside of them.
  many = estimate.collective_seconds(9e9, _gpus(*[0] * 16, *[1] * 16), _H100)
  np.testing.assert_allclose(many, 0.02)


def test_collectives_in_a_torus():
  of = lambda *coords: estimate.collective_seconds(
    3e9, [types.SimpleNamespace(coords=c) for c in coords], _V5P
  )
  # 300 GB/s on the links of three dimensions; a line has those of one.
  np.testing.assert_allclose(of((0, 0, 0), (0, 0, 1)), 0.03)
  np.testing.assert_allclose(of((0, 0, 0), (1, 0, 1)), 0.015)
  np.testing.assert_allclose(of((0, 0, 0), (1, 1, 1)), 0.01)


def test_no_rates_no_seconds():
  cpu = chips.CHIPS['cpu']
  assert estimate.collective_seconds(1e9, _gpus(0, 1), cpu) == 0


def _cost(name='actor/accumulate', phase='update_actor', calls=4.0, **fields):
  default = dict(
    compile_seconds=1.0,
    compile_cpu_seconds=1.0,
    flops=1e12,
    memory_bytes=1e9,
    temporaries=0,
    traffic=(),
    compute_seconds=2.0,
    memory_seconds=1.0,
  )
  return estimate.Cost(name, phase, calls, **(default | fields))


def _traffic(seconds, hidden, moved=1e9):
  return estimate.Traffic(
    'all-gather', 'fsdp', 1, moved, seconds, hidden, 'f32[8] dot'
  )


def test_seconds_of_a_program():
  assert (_cost().seconds, _cost().bound) == (2.0, 'compute')
  # Hidden collectives cost nothing as long as they are shorter.
  cost = _cost(traffic=(_traffic(1.5, True), _traffic(0.25, False)))
  assert (cost.seconds, cost.bound) == (2.25, 'compute')
  cost = _cost(traffic=(_traffic(3.0, True), _traffic(0.25, False)))
  assert (cost.seconds, cost.bound) == (3.25, 'network')
  assert _cost(memory_seconds=5.0).bound == 'memory'


def test_a_step_is_the_sum_of_its_calls():
  found = [
    _cost(),
    _cost('actor/apply', calls=1.0, flops=0.0, compute_seconds=0.5),
    _cost('advance', 'gen', calls=3.0, memory_seconds=4.0,
          traffic=(_traffic(0.0, False),)),
  ]  # fmt: skip
  step = estimate.step(found, tokens=1800, devices=2)
  assert step.phases == {'gen': 12.0, 'update_actor': 4 * 2.0 + 1.0}
  assert step.bounds == {'gen': 'memory', 'update_actor': 'compute'}
  assert step.seconds == 21.0
  np.testing.assert_allclose(step.tokens_per_second, 1800 / 21 / 2)
  assert (step.moved, step.flops) == (3e9, 7e12)


def test_plain_is_json():
  text = json.dumps(estimate.plain([_cost(traffic=(_traffic(1.0, True),))]))
  (value,) = json.loads(text)
  assert value['seconds'] == 2.0 and value['bound'] == 'compute'
  assert value['traffic'][0]['moved'] == 1e9
