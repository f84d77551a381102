"""One device and eight are the same trainer, whatever splits the work.

Every mesh runs three steps of the whole loop, and then, with the programs that
this has compiled, scores and updates on the batches that one device recorded.
"""

import functools
import math
import re
import types as python_types

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np
import pytest

from configs import quickstart
from launch import train as launch
from rlhf_jax import keys
from rlhf_jax import metrics
from rlhf_jax import testing
from rlhf_jax.monitor import writers
from rlhf_jax.sampling import decode
from rlhf_jax.sampling import pick
from rlhf_jax.sharding import rules
from rlhf_jax.trainers import measure
from rlhf_jax.trainers import packed
from rlhf_jax.trainers import roles
from rlhf_jax.trainers import rollout as rollout_lib
from rlhf_jax.trainers import run as run_lib
from rlhf_jax.trainers import state as state_lib
from rlhf_jax.trainers import update

_ROWS, _LENGTH, _STEPS = 8, 32, 3
# Three key/value heads: on 2 devices they become 6, on 4 devices 12.
_HEADS = dict(num_heads=12, num_kv_heads=3, head_dim=8)
_ONE = dict(devices=1)
_COEFS = dict(entropy=np.float32(0.01), kl=np.float32(0.0))
MESHES = [
  dict(fsdp=8),
  dict(data=2, fsdp=4),
  dict(fsdp=2, tensor=4),
  dict(fsdp=2, context=4),
  dict(data=2, fsdp=2, tensor=2),
]


def _config(sizes) -> ConfigDict:
  config = quickstart.get_config('tiny')
  groups = sizes.get('data', 1) * sizes.get('fsdp', 1)
  values = {
    'model.architecture.vocab_size': 264,  # the 259 of the bytes do not divide
    'algorithm.advantages': 'grpo',
    'algorithm.entropy_coef': 0.01,
    'algorithm.kl_loss.coef': 0.0,
    'actor.optimizer.learning_rate': 1e-2,
    # As large as the noise of float32 gradients, see `three_updates`.
    'actor.optimizer.eps': 1e-5,
    'model.head_chunk': 64 // groups,  # 4 chunks
    'rollout.samples_per_prompt': 4,
    'rollout.slots': 32,
    'training.sequences_per_minibatch': 16,
    'training.tokens_per_row': _LENGTH,
    'training.tokens_per_microbatch': _ROWS * _LENGTH // groups,
    'data.validation.source': '',
    'evaluation.best_metric': '',
    'steps': _STEPS,
    'export': False,
  }
  values |= {
    f'model.architecture.{key}': value for key, value in _HEADS.items()
  }
  values |= {f'mesh.{key}': value for key, value in sizes.items()}
  config.update_from_flattened_dict(values)
  with config.unlocked():
    config.stages = (('ppo', 'ppo', {}),)
    config.rewards = ConfigDict(
      dict(
        ascii=dict(  # some of every response, from the first step on
          rule='character_share',
          weight=1.0,
          args=dict(characters=''.join(map(chr, range(128)))),
        )
      )
    )
  return config


@functools.cache
def _live(sizes, folder):
  """A run of three steps: what it computed, and its programs."""
  seen = python_types.SimpleNamespace(
    policies=[], rollouts=[], batches=[], start=None
  )
  if dict(sizes) != _ONE:
    seen.start = _live(_key(_ONE), folder).start

  def record(module, name, keep):
    run = getattr(module, name)

    def recorded(*args, **kwargs):
      result = run(*args, **kwargs)
      keep(result, *args)
      return result

    patch.setattr(module, name, recorded)

  def began(setup, params):
    """From the very weights of one device, which made them."""
    if seen.start is None:
      seen.start = jax.device_get(initial(setup, params))
    table = rules.params(setup.mesh, state_lib.specs_of(setup.model, 'actor'))
    return jax.device_put(seen.start, table)

  def sampled(result, setup, policy):
    seen.setup = setup
    seen.policies.append(jax.device_get(policy))
    seen.rollouts.append(result.rollout)

  def made(result, setup, learner, *_):
    seen.learner, seen.programs = learner, result

  with pytest.MonkeyPatch.context() as patch:
    initial = roles.actor_params
    patch.setattr(roles, 'actor_params', began)
    patch.setattr(run_lib.Run, 'save', lambda *_: None)
    record(rollout_lib, 'sample', sampled)
    record(roles, 'programs', made)
    record(measure, 'programs', lambda made, *_: vars(seen).update(passes=made))
    record(packed, 'token_batch', lambda made, *_: seen.batches.append(made))
    config = _config(dict(sizes))
    workdir = folder / '-'.join(f'{k}{v}' for k, v in sizes)
    assert launch.train(config, str(workdir)) == 0
  seen.metrics = writers.last_of_each_step(
    writers.read(workdir / writers.METRICS)
  )
  return seen


@functools.cache
def _recorded(sizes, folder):
  """Scores, gradient and three updates on the batches of one device."""
  live = _live(sizes, folder)
  one = _live(_key(_ONE), folder)
  batches = jax.device_get(one.batches[:2])
  mesh, programs = live.setup.mesh, live.programs
  state = roles.create(
    live.setup,
    live.learner,
    jax.device_put(one.start, rules.params(mesh, live.learner.specs)),
  )
  scores, grads = [], programs['zeros'](state.params)
  statistics = {}
  for batch in batches:
    (part,) = packed.slices(batch, _ROWS, live.setup.islands)
    scores.append(live.passes['actor'](state.params, rows=part.rows).logprobs)
    grads, new = programs['accumulate'](state.params, grads, part, _COEFS)
    statistics = metrics.merge(statistics, new)
  before = {name: program._cache_size() for name, program in programs.items()}
  for batch in (*batches, batches[0]):
    state, _ = update.update(
      state,
      packed.slices(batch, _ROWS, live.setup.islands),
      _COEFS,
      programs=programs,
      prefix='actor',
    )
  # The programs of the run, none of its own.
  assert before == {k: program._cache_size() for k, program in programs.items()}
  end = jax.device_get(state.params)
  return python_types.SimpleNamespace(
    logprobs=np.stack(jax.device_get(scores)),
    statistics=metrics.compute(statistics),
    gradient=jax.device_get(grads),
    way=jax.tree.map(lambda a, b: a - b, end, one.start),
    state=state,
  )


def _key(sizes):
  """Sizes as a key of a cache; one device has a mesh of one."""
  return tuple(sizes.items())


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('runs')


every_mesh = pytest.mark.parametrize(
  'sizes',
  MESHES,
  ids=lambda sizes: ','.join(f'{k}={v}' for k, v in sizes.items()),
)


@every_mesh
def test_recorded_rollout(sizes, folder):
  one = _recorded(_key(_ONE), folder)
  many = _recorded(_key(sizes), folder)
  assert np.abs(one.logprobs).max() > 1 and one.logprobs.shape[0] == 2
  testing.assert_close(many.logprobs, one.logprobs, 'layout_float32')
  assert many.statistics.keys() == one.statistics.keys()
  for name in ('actor/loss', 'actor/pg_loss', 'actor/entropy'):
    testing.assert_close(
      many.statistics[name], one.statistics[name], 'layout_float32'
    )
  testing.assert_norm_close(
    many.gradient, one.gradient, 'gradient_layout_float32'
  )
  testing.assert_norm_close(many.way, one.way, 'three_updates')
  # There was something to do, and the parameters are where the table says.
  assert int(many.state.updates) == 3 and int(many.state.skipped) == 0
  live = _live(_key(sizes), folder)
  mesh = live.setup.mesh
  assert mesh.size == 8 and all(mesh.shape[k] == v for k, v in sizes.items())
  table = rules.params(mesh, state_lib.specs_of(live.setup.model, 'actor'))
  jax.tree.map(
    lambda leaf, sharding: np.testing.assert_(
      leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    ),
    many.state.params,
    table,
  )


@every_mesh
def test_what_crosses_devices(sizes, folder):
  """Weights are gathered, activations and logits are not."""
  live = _live(_key(sizes), folder)
  mesh, programs = live.setup.mesh, live.programs
  one = _live(_key(_ONE), folder)
  batch = jax.device_get(one.batches[0])
  (part,) = packed.slices(batch, _ROWS, live.setup.islands)
  params = jax.device_put(one.start, rules.params(mesh, live.learner.specs))
  args = params, programs['zeros'](params), part, _COEFS
  text = programs['accumulate'].lower(*args).compile().as_text()
  found = [
    (kind, tuple(int(n) for n in shape.split(',') if int(n) > 1))
    for shapes, kind in re.findall(
      r'= (\S+|\(.*?\)) (all-to-all|all-gather|all-reduce)\(', text
    )
    for shape in re.findall(r'f32\[([\d,]+)\]', shapes)
  ]
  weights = {
    math.prod(
      rules.sharding(mesh, x.axes, x.shape, rules.ROLLOUT).shard_shape(x.shape)
    )
    // (x.shape[0] if x.stacked else 1)
    for x in jax.tree.leaves(live.learner.specs)
  }
  gathered = [shape for kind, shape in found if kind == 'all-gather']
  assert gathered and all(math.prod(x) in weights for x in gathered), gathered
  # The width of what was looked up is brought together over fsdp.
  part_of_width = live.setup.model.d_model // mesh.shape['fsdp']
  turned = [shape for kind, shape in found if kind == 'all-to-all']
  others = [shape for shape in turned if shape[-1] != part_of_width]
  assert len(turned) > len(others)
  assert bool(others) == (mesh.shape['context'] > 1)
  # Of the vocabulary only gradients of weights are summed.
  vocab = live.setup.model.vocab_size // mesh.shape['tensor']
  width = {live.setup.model.d_model, part_of_width}
  summed = [shape for kind, shape in found if kind == 'all-reduce']
  for shape in summed:
    assert vocab not in shape or width & set(shape), shape


@every_mesh
def test_live_run(sizes, folder):
  """Token for token the run of one device, up to the first near-tie."""
  one = _live(_key(_ONE), folder)
  many = _live(_key(sizes), folder)
  assert len(one.rollouts) == len(many.rollouts) == _STEPS
  agreed = 0
  for step, (a, b) in enumerate(zip(one.rollouts, many.rollouts)):
    differ = np.argwhere(a.tokens != b.tokens)
    if differ.size:
      row, at = map(int, differ[np.argmin(differ[:, 1])])
      scores = _draw(one, step, row, at)
      gap = scores[a.tokens[row, at]] - scores[b.tokens[row, at]]
      report = (
        f'step {step + 1}, sequence {row}, token {at}: {a.tokens[row, at]} on'
        f' one device, {b.tokens[row, at]} on {sizes}; gap {gap:.2g}'
      )
      print('first near-tie:', report)
      assert abs(gap) < 1e-3, f'no near-tie: {report}'
      break
    agreed += int(a.mask.sum())
    testing.assert_close(b.logprobs, a.logprobs, 'teacher_forced')
    for name in ('critic/score/mean', 'actor/pg_loss', 'actor/entropy'):
      testing.assert_close(
        many.metrics[step][name], one.metrics[step][name], 'teacher_forced'
      )
  print(f'{sizes}: {agreed} tokens agree')  # pytest -s shows it
  assert agreed > 100 or differ.size
  # It learns: the policy of the last step is another.
  first, last = (jax.tree.leaves(one.policies[i])[0] for i in (0, -1))
  assert np.abs(first - last).max() > 1e-2


def _draw(live, step, row, at):
  """What the token at a place was the largest of, by a full forward pass."""
  rollout, setup = live.rollouts[step], live.setup
  before = jnp.asarray(rollout.tokens[row : row + 1, :at])
  logits = decode.prefill(
    live.policies[step],
    None,
    before,
    jnp.array([at]),
    config=setup.model,
    dtype=jnp.float32,
  ).logits[0]
  key = keys.key(setup.config.seed, 'rollout', step)
  address = pick.noise_keys(key, jnp.array([row]), jnp.array([at]))
  noise = pick.noise(address, setup.model.vocab_size)[0]
  return np.asarray(logits / setup.config.rollout.temperature + noise)


def test_draw_is_what_the_sampler_does(folder):
  """Or a near-tie would not be known for one."""
  one = _live(_key(_ONE), folder)
  for step, row in ((0, 3), (2, 17)):
    rollout = one.rollouts[step]
    at = int(rollout.prompt_lengths[row]) + 1
    scores = _draw(one, step, row, at)
    assert scores.argmax() == rollout.tokens[row, at]
