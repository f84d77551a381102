"""Which part of an array each device holds."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlhf_jax import testing
from rlhf_jax import tree
from rlhf_jax.models import decoder
from rlhf_jax.models import spec
from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.sharding import rules


@pytest.fixture(scope='module')
def mesh():
  return mesh_lib.make(data=2, fsdp=2, tensor=2)


@pytest.mark.parametrize(
  'axes, shape, table, part',
  [
    (('layers', 'embed', 'mlp'), (3, 8, 6), 'TRAINING', (3, 4, 3)),
    (('layers', 'embed', 'mlp'), (3, 8, 6), 'ROLLOUT', (3, 8, 3)),
    (('vocab', 'embed'), (10, 8), 'TRAINING', (5, 4)),
    # Dimensions that do not divide stay whole: 3 heads, 37 words, 9 wide.
    (('embed', 'kv_heads', 'head_dim'), (8, 3, 6), 'TRAINING', (4, 3, 6)),
    (('vocab', 'embed'), (37, 9), 'TRAINING', (37, 9)),
    # Rows are split over data and fsdp together, or not at all.
    (('rows', None), (8, 5), 'TRAINING', (2, 5)),
    (('rows', None), (6, 5), 'TRAINING', (6, 5)),
    ((), (), 'TRAINING', ()),
  ],
)
def test_part_of_each_device(mesh, axes, shape, table, part):
  sharding = rules.sharding(mesh, axes, shape, getattr(rules, table))
  assert sharding.shard_shape(shape) == part


def test_every_axis_needs_a_name(mesh):
  with pytest.raises(ValueError):
    rules.sharding(mesh, ('embed',), (8, 8))


def test_parameters_are_spread_over_the_devices(mesh):
  config = testing.tiny_config(vocab_size=38, tied_embeddings=False)
  specs = decoder.specs(config)
  shardings = rules.params(mesh, specs)
  parts = {
    name: sharding.shard_shape(weight.shape)
    for (name, weight), sharding in zip(
      tree.flatten(spec.abstract(specs)).items(), jax.tree.leaves(shardings)
    )
  }
  assert parts['embed'] == (19, 8)  # [V=38, D=16]
  assert parts['head'] == (8, 19)
  assert parts['layers/attention/q'] == (2, 8, 2, 6)  # [G=2, D, Q=4, E=6]
  assert parts['layers/attention/k'] == (2, 8, 1, 6)  # [G, D, H=2, E]
  assert parts['layers/mlp/down'] == (2, 12, 8)  # [G, F=24, D]
  assert parts['final_norm'] == (8,)
  rollout = rules.params(mesh, specs, rules.ROLLOUT)
  assert rollout['final_norm'].is_fully_replicated
  assert rollout['embed'].shard_shape((38, 16)) == (19, 16)


def test_optimiser_state_follows_its_parameters(mesh):
  specs = decoder.specs(
    testing.tiny_config(attention_bias=True, output_bias=True)
  )
  abstract = spec.abstract(specs)
  of_params = rules.params(mesh, specs)
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(lambda count: 1e-3 * count, mask=lambda params: jax.tree.map(
      lambda x: x.ndim > 1, params)),
  )  # fmt: skip
  state = jax.eval_shape(optimizer.init, abstract)
  found = rules.like_params(mesh, state, of_params)
  expected = tree.flatten(of_params)
  followed, counters = 0, 0
  for name, sharding in tree.flatten(found).items():
    owner = [path for path in expected if f'/{name}'.endswith(f'/{path}')]
    if owner:
      # The longest suffix: 'layers/mlp/up' and not some 'up'.
      assert sharding == expected[max(owner, key=len)], name
      followed += 1
    else:
      assert sharding.is_fully_replicated, name
      counters += 1
  # Two moments each, and the counts of Adam and of its schedule.
  assert followed == 2 * len(expected) and counters == 2
  # The state can be made in these shardings.
  made = jax.jit(optimizer.init, out_shardings=found)(
    jax.tree.map(lambda x: jnp.zeros(x.shape), abstract)
  )
  moments = {
    name: x for name, x in tree.flatten(made).items() if 'mu/embed' in name
  }
  assert len(moments) == 1
  for moment in moments.values():
    # 37 words do not divide by 2, the width of 16 does.
    assert moment.addressable_shards[0].data.shape == (37, 8)


def test_rows_are_split_over_the_data_groups(mesh):
  host = {
    'tokens': np.arange(24).reshape(8, 3),
    'weights': np.arange(8.0, dtype=np.float32),
    'odd': np.arange(6),
  }
  placed = rules.rows(mesh, host)
  for name, x in placed.items():
    np.testing.assert_array_equal(x, host[name])
  shards = placed['tokens'].addressable_shards
  assert len(shards) == 8
  # 4 groups of 2 rows, each held by both devices of the tensor axis.
  begins = sorted(int(shard.data[0, 0]) // 6 for shard in shards)
  assert begins == [0, 0, 1, 1, 2, 2, 3, 3]
  assert placed['weights'].addressable_shards[0].data.shape == (2,)
  assert placed['odd'].sharding.is_fully_replicated


def test_places_are_split_over_context():
  mesh = mesh_lib.make(fsdp=2, context=4)
  host = {
    'ids': np.zeros((4, 8)),
    'states': np.zeros((4, 8, 3)),
    'n': np.ones(4),
  }
  shapes = lambda rules_: {
    name: x.sharding.shard_shape(x.shape)
    for name, x in rules.rows(mesh, host, rules_).items()
  }
  training = {'ids': (2, 2), 'states': (2, 2, 3), 'n': (2,)}
  assert shapes(rules.TRAINING) == training
  # Four rows on eight devices stay whole; eight would be split.
  assert shapes(rules.ROLLOUT) == {k: x.shape for k, x in host.items()}
  assert rules.rows(mesh, np.zeros((8, 8)), rules.ROLLOUT).sharding.shard_shape(
    (8, 8)
  ) == (1, 8)
  assert rules.parts(mesh, 'attended_heads') == 4
  assert rules.parts(mesh, 'attended_heads', rules.ROLLOUT) == 1
  assert rules.parts(None, 'rows') == 1


def test_mesh_of_what_is_traced(mesh):
  """Ours, where there is more than one device to split over."""
  seen = lambda *args: rules.mesh_of(*args)
  found = []
  run = lambda *args: jax.jit(lambda *a: found.append(seen(*a)) or a[0])(*args)
  run(jnp.ones(8), rules.rows(mesh, np.ones(8)))
  run(jnp.ones(8))
  run(rules.rows(mesh_lib.make(devices=jax.devices()[:1]), np.ones(8)))
  other = jax.make_mesh((8,), ('x',), axis_types=(jax.sharding.AxisType.Auto,))
  place = jax.sharding.NamedSharding(other, jax.sharding.PartitionSpec('x'))
  run(jax.device_put(np.ones(8), place))
  assert found[0].shape == mesh.shape
  assert found[1:] == [None] * 3
  # Without a mesh nothing is done.
  x = jnp.ones((2, 2))
  assert rules.constrain(x, ('rows', 'places'), None) is x
  assert rules.gather(x, ('embed', 'mlp'), None) is x


def test_gathered_weights_have_split_gradients(mesh):
  axes = 'embed', 'mlp'
  weight = np.arange(48.0, dtype=np.float32).reshape(8, 6)
  placed = jax.device_put(weight, rules.sharding(mesh, axes, (8, 6)))

  def value(w):
    whole = rules.gather(w, axes, rules.mesh_of(w))
    return jnp.sum(whole**2), whole

  (_, whole), gradient = jax.jit(jax.value_and_grad(value, has_aux=True))(
    placed
  )
  assert whole.sharding.shard_shape((8, 6)) == (8, 3)
  assert gradient.sharding.shard_shape((8, 6)) == (4, 3)
  np.testing.assert_array_equal(gradient, 2 * weight)


@pytest.mark.parametrize(
  'sizes, message',
  [
    ({'heads': ('attended_heads', 6), 'length': ('places', 32)}, None),
    (
      {'heads': ('attended_heads', 9), 'words': ('vocab', 37)},
      'fsdp=2 tensor=2 context=1 cannot split the model: heads=9 is not a'
      ' multiple of tensor x context = 2; words=37 is not a multiple of tensor'
      ' = 2; nearest: data=2 fsdp=4 tensor=1 context=1, or',
    ),
    ({'width': ('embed', 7)}, 'width=7 .* fsdp = 2; nearest: data=4 fsdp=1'),
  ],
)
def test_check(mesh, sizes, message):
  if message is None:
    return rules.check(mesh, sizes)
  with pytest.raises(ValueError, match=message):
    rules.check(mesh, sizes)
