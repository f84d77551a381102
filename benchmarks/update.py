"""Speed of the actor update, against matrix products of the same token count.

  python benchmarks/update.py [--model=FOLDER] [--rows=4] [--length=512]

Prints one JSON line.  An update is one micro-batch through the forward and
backward pass of the PPO loss, and the optimiser.  Its FLOPs are counted as

  6 per parameter and token, without embedding and head
  6 D V per action (the head is computed for actions only)
  6 L Q E per token and layer: causal attention, half of the square

`share` is that count per second over the measured rate of [tokens, D] times
[D, F] products and back, the largest of the model, with the same two matrices
again and again: they stay in the cache.  `share_of_products_apart` takes 16
pairs of matrices in turn, as a model does.  Everything is timed in turns in
one process, and the best turn counts, so other work on the machine hurts less;
`share_of_cpu_time` compares processor seconds instead.
"""

import argparse
import ctypes
import functools
import json
import math
import time

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import optim
from rlhf_jax import types
from rlhf_jax.algorithms import kl
from rlhf_jax.algorithms import policy_losses
from rlhf_jax.models import config as config_lib
from rlhf_jax.models import decoder
from rlhf_jax.models import heads
from rlhf_jax.models import hf
from rlhf_jax.models import spec
from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.trainers import state as state_lib
from rlhf_jax.trainers import update

SMOLLM2_135M = config_lib.ModelConfig(
  vocab_size=49152,
  d_model=576,
  d_mlp=1536,
  num_layers=30,
  num_heads=9,
  num_kv_heads=3,
  head_dim=64,
  max_positions=8192,
  rope_theta=100000.0,
)


def batch(config, rows: int, length: int, prompt: int) -> types.TokenBatch:
  """Rows of one sequence each; the first `prompt` tokens are no actions."""
  rng = np.random.default_rng(0)
  shape = rows, length
  tokens = rng.integers(0, config.vocab_size, shape).astype(np.int32)
  place = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
  mask = (place >= prompt - 1) & (place < length - 1)
  normal = lambda: rng.normal(size=shape).astype(np.float32)
  old = np.full(shape, -math.log(config.vocab_size), np.float32)
  return types.TokenBatch(
    rows=types.Rows(
      tokens=tokens,
      targets=np.roll(tokens, -1, axis=1),
      positions=place,
      segment_ids=np.ones(shape, np.int32),
      mask=mask,
      temperature=np.ones(shape, np.float32),
    ),
    old_logprobs=old,
    reference_logprobs=old,
    advantages=normal(),
    old_values=np.zeros(shape, np.float32),
    returns=np.zeros(shape, np.float32),
    weights=(mask / mask.sum()).astype(np.float32),
  )


def flops(config, places: int, length: int, actions: int) -> float:
  """See the head of the file."""
  table = decoder.specs(config)
  body = spec.count(table['layers'])
  attention = config.num_layers * length * config.num_heads * config.head_dim
  head = config.d_model * config.vocab_size
  return 6.0 * (places * (body + attention) + actions * head)


def products(config, places: int, layers: int):
  """A program of matrix products of `layers` pairs of weights; its FLOPs."""
  keys = jax.random.split(jax.random.key(0), 3)
  d, f = config.d_model, config.d_mlp
  x = jax.random.normal(keys[0], (places, d))
  up = jax.random.normal(keys[1], (layers, d, f)) / math.sqrt(d)
  down = jax.random.normal(keys[2], (layers, f, d)) / math.sqrt(f)

  @jax.jit
  def run(x, up, down):
    for _ in range(16 // layers):
      for i in range(layers):
        x = (x @ up[i]) @ down[i]
    return x

  count = 4.0 * (16 // layers) * layers * places * d * f
  return functools.partial(run, x, up, down), count


def actor(config, params, *, head_chunk: int, remat: str, reference: bool):
  """`step(state, batch) -> state`, with the trainers' own programs."""
  mesh = mesh_lib.make(devices=jax.devices()[:1])
  table = decoder.specs(config)
  rate = optim.schedule(
    1e-5, warmup_updates=0, decay='constant', total_updates=1, end_fraction=1.0
  )
  optimizer = optim.adamw(
    rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0
  )
  loss = functools.partial(
    update.actor_loss,
    score=functools.partial(
      heads.score, config=config, head_chunk=head_chunk, remat=remat
    ),
    policy_loss=policy_losses.ppo,
    kl_estimator=kl.k3,
    on_policy=False,
    with_entropy_gradient=False,
    with_reference=reference,
  )
  programs = update.programs(
    loss,
    optimizer,
    rate,
    params=params,
    specs=table,
    mesh=mesh,
    max_grad_norm=1.0,
  )
  state = state_lib.create(params, optimizer, mesh, table)
  coefs = dict(entropy=0.0, kl=1e-3)

  def step(state, data):
    state, statistics = update.update(
      state, [data], coefs, programs=programs, prefix='actor'
    )
    return state, statistics

  return step, state


def timed(f):
  """Result, wall seconds, processor seconds."""
  wall, cpu = time.perf_counter(), time.process_time()
  out = jax.block_until_ready(f())
  return out, time.perf_counter() - wall, time.process_time() - cpu


def keep_freed_memory() -> None:
  """Makes malloc reuse large blocks instead of asking the kernel each time.

  XLA on the CPU allocates the buffers of a program on every call.  glibc maps
  and unmaps blocks of that size, and the page faults cost more than an
  element-wise operation on them.  No effect where the C library has no mallopt.
  """
  mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
  if mallopt is not None:
    mallopt(-4, 0)  # M_MMAP_MAX: no block gets a mapping of its own
    mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap is never given back


def main() -> None:
  keep_freed_memory()
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--model', help='folder or hub id; random 135M if absent')
  parser.add_argument('--rows', type=int, default=4)
  parser.add_argument('--length', type=int, default=512, help='tokens of a row')
  parser.add_argument('--prompt', type=int, default=1, help='tokens, no action')
  parser.add_argument('--head_chunk', type=int, default=2048, help='places')
  parser.add_argument('--remat', choices=sorted(decoder.REMAT), default='none')
  parser.add_argument('--reference', action='store_true', help='with a KL loss')
  parser.add_argument('--repeats', type=int, default=3)
  args = parser.parse_args()
  if args.model:
    config = hf.load_config(args.model)
    params = hf.load(args.model, config)
  else:
    config = SMOLLM2_135M
    params = jax.jit(
      lambda: spec.init(decoder.specs(config), jax.random.key(0))
    )()
  data = jax.tree.map(
    jnp.asarray, batch(config, args.rows, args.length, args.prompt)
  )
  places, actions = args.rows * args.length, int(data.rows.mask.sum())
  step, state = actor(
    config,
    params,
    head_chunk=args.head_chunk,
    remat=args.remat,
    reference=args.reference,
  )
  del params
  (state, _), compile_s, _ = timed(functools.partial(step, state, data))
  same, same_flops = products(config, places, 1)
  apart, apart_flops = products(config, places, 16)
  best = {}

  def measure(name, program):
    out, wall, cpu = timed(program)
    old = best.get(name, (math.inf, math.inf))
    best[name] = min(old[0], wall), min(old[1], cpu)
    return out

  for _ in range(args.repeats):
    # The first products after an update run in cold caches; the best is kept.
    for _ in range(4):
      measure('same', same)
      measure('apart', apart)
    state, _ = measure('update', functools.partial(step, state, data))
  count = flops(config, places, args.length, actions)
  share = lambda clock, name, of: (
    (count / best['update'][clock]) / (of / best[name][clock])
  )
  line = {
    'benchmark': 'update',
    'device': jax.devices()[0].device_kind,
    'rows': args.rows,
    'length': args.length,
    'actions': actions,
    'remat': args.remat,
    'head_chunk': args.head_chunk,
    'compile_s': compile_s,
    'update_s': best['update'][0],
    'tokens_per_second': places / best['update'][0],
    'update_gflops_per_second': count / best['update'][0] / 1e9,
    'product_gflops_per_second': same_flops / best['same'][0] / 1e9,
    'share': share(0, 'same', same_flops),
    'share_of_cpu_time': share(1, 'same', same_flops),
    'share_of_products_apart': share(0, 'apart', apart_flops),
  }
  print(
    json.dumps(
      {k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}
    )
  )


if __name__ == '__main__':
  main()
