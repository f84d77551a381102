"""Speed of the sampler on this machine.  Prints one JSON line per measurement.

  python benchmarks/rollout.py --model=FOLDER [--only=NAME,...] [--peer=PYTHON]

FOLDER is a Hugging Face folder of SmolLM2-135M (random weights of its shape if
none is given; the peer needs the folder).  PYTHON is the interpreter of another
environment with torch and transformers, run in turn with ours.  Names:

  batch     32 prompts of 64 tokens, 64 new ones each, temperature 1
  single    the same with one prompt
  small     4 layers of width 128, 259 tokens, 16 prompts of 32, 128 new ones
  queue     32 slots, 512 requests of lognormal length: against static batches
  shared    8 samples of prompts of 256 tokens: prefill against one sample
  recompile 20 rollouts with changing requests: programs compiled
  slots     1 to 256 slots, where a decode step spends its time
  context   128 to 4096 tokens of context, likewise

Everything is float32, and warm unless said otherwise: the first call is apart.
"""

import argparse
import json
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from update import SMOLLM2_135M  # the script beside this one

from rlhf_jax import keys
from rlhf_jax.models import attention
from rlhf_jax.models import config as model_config
from rlhf_jax.models import decoder
from rlhf_jax.models import hf
from rlhf_jax.models import spec
from rlhf_jax.sampling import cache as cache_lib
from rlhf_jax.sampling import decode
from rlhf_jax.sampling import engine
from rlhf_jax.sampling import pick
from rlhf_jax.sampling import requests as request_lib
from rlhf_jax.sharding import mesh as mesh_lib

SMALL = model_config.ModelConfig(
  family='llama',
  vocab_size=259,
  d_model=128,
  d_mlp=384,
  num_layers=4,
  num_heads=4,
  num_kv_heads=2,
  head_dim=32,
  max_positions=256,
  rope_theta=10000.0,
  norm_eps=1e-5,
  tied_embeddings=True,
)
MESH = mesh_lib.make(devices=jax.devices()[:1])
FLOAT32 = jnp.float32

PEER = """
import json, sys, time
import torch, transformers
folder, rows, prompt, new = sys.argv[1], *map(int, sys.argv[2:5])
torch.set_num_threads(2)
model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32)
ids = torch.randint(100, 40000, (rows, prompt))
run = lambda: model.generate(
    ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0,
    top_k=0, top_p=1.0, max_new_tokens=new, min_new_tokens=new, pad_token_id=0)
with torch.no_grad():
  run()
  times = []
  for _ in range(3):
    began = time.perf_counter(); run()
    times.append(time.perf_counter() - began)
print(json.dumps(dict(seconds=min(times), torch=torch.__version__,
                      transformers=transformers.__version__)))
"""


def report(name: str, **values) -> None:
  rounded = {
    key: round(value, 4) if isinstance(value, float) else value
    for key, value in values.items()
  }
  print(json.dumps(dict(benchmark='rollout', name=name) | rounded), flush=True)


def seconds(function, *args, repeat: int = 3) -> float:
  """The fastest of `repeat` calls after a first one."""
  jax.block_until_ready(function(*args))
  times = []
  for _ in range(repeat):
    began = time.perf_counter()
    jax.block_until_ready(function(*args))
    times.append(time.perf_counter() - began)
  return min(times)


class Model:
  """Weights in the rollout layout, and what to call the engine with."""

  def __init__(self, config, folder=None):
    self.config = config
    specs = decoder.specs(config)
    params = (
      hf.load(folder, config)
      if folder
      else spec.init(specs, jax.random.key(0), FLOAT32)
    )
    relayout = engine.relayout_program(MESH, specs, FLOAT32)
    self.params = jax.block_until_ready(relayout(params))

  def prompts(self, count, length, seed=0):
    rng = np.random.default_rng(seed)
    return list(rng.integers(2, self.config.vocab_size, (count, length)))

  def generate(self, prompts, shape, step=0, **asked):
    return engine.generate(
      self.params, prompts, keys.key(0, 'rollout', step), config=self.config,
      mesh=MESH, shape=shape, dtype=FLOAT32, **asked,
    )  # fmt: skip

  def weights_bytes(self):
    used = dict(self.params)
    used.pop('embed')  # a row of it per token
    return sum(x.nbytes for x in jax.tree.leaves(used))

  def product_seconds(self, rows):
    """The matrix products of a decode step alone, with these weights."""
    config = self.config
    width = config.num_heads * config.head_dim

    def block(x, weights):
      heads, mlp = weights['attention'], weights['mlp']
      qkv = x @ heads['qkv']
      out = qkv[:, :width] @ heads['o'].reshape(width, -1)
      both = out @ mlp['gate_up']
      return both[:, : config.d_mlp] @ mlp['down']

    @jax.jit
    def run(x, params):
      for weights in params['layers']:
        x = block(x, weights)
      return x @ params['head']

    return seconds(
      run, jnp.ones((rows, config.d_model)), self.params, repeat=10
    )

  def decode_seconds(self, rows, context, new=20):
    """A decode step of full slots, at about `context` tokens."""
    shape = engine.Shape(context - new, new, rows, 1)
    state = engine.empty_slots(
      MESH, shape, rows, context, config=self.config, dtype=FLOAT32
    )
    request = state.request.replace(
      max_new_tokens=jnp.full(rows, new, jnp.int32), temperature=jnp.ones(rows)
    )
    state = state.replace(
      done=jnp.zeros(rows, bool),
      prompt_lengths=jnp.full(rows, context - new, jnp.int32),
      counts=jnp.ones(rows, jnp.int32),
      request=request,
    )
    advance = lambda state, steps: jax.block_until_ready(
      decode.advance(
        self.params, state, None, keys.key(0, 'rollout', 0), np.int32(steps),
        np.int32(rows), config=self.config, dtype=FLOAT32,
      )
    )  # fmt: skip
    for _ in range(2):  # the second call has the placement of all later ones
      state = advance(state, 1)
    began = time.perf_counter()
    advance(state, new - 4)
    return (time.perf_counter() - began) / (new - 4)

  def attention_seconds(self, rows, context):
    """The attention of a decode step alone."""
    config = self.config
    cache = cache_lib.zeros(
      config, rows, context, FLOAT32, turned=cache_lib.turned(MESH)
    )
    q = jnp.ones((rows, 1, config.num_heads, config.head_dim))
    counts = jnp.full((rows, 1), context, jnp.int32)

    @jax.jit
    def run(q, cache):
      for k, v in zip(cache.keys, cache.values):
        q = attention.attend(q, k, v, counts, turned=cache.turned)
      return q

    return seconds(run, q, cache)

  def pick_seconds(self, rows):
    """The choice of a token from given logits."""
    logits = jax.random.normal(
      jax.random.key(0), (rows, self.config.vocab_size)
    )
    request = request_lib.make(rows, engine.Shape(1, 1, rows, 1))
    key = keys.key(0, 'rollout', 0)
    zeros = jnp.zeros(rows, jnp.int32)

    @jax.jit
    def run(logits):
      noise = pick.noise_keys(key, request.address, zeros)
      return pick.pick(logits, noise, request, zeros)

    return seconds(run, logits, repeat=10)


def bandwidth() -> float:
  """Bytes per second of reading a large array with both cores."""
  x = jnp.ones((1 << 28,), FLOAT32)  # 1 GiB
  run = jax.jit(lambda x: jnp.sum(x.reshape(-1, 1 << 14), axis=1))
  return x.nbytes / seconds(run, x, repeat=5)


def peer(python, folder, rows, prompt, new):
  """Seconds of `transformers.generate`, in its own environment."""
  if not (python and folder):
    return None
  out = subprocess.run(
    [python, '-c', PEER, folder, *map(str, (rows, prompt, new))],
    capture_output=True, text=True, check=True,
  )  # fmt: skip
  return json.loads(out.stdout.splitlines()[-1])


def against_peer(name, model, args, rows, prompt=64, new=64):
  """Tokens per second end to end, and decoding alone."""
  shape = engine.Shape(prompt, new, rows, 1)
  prompts = model.prompts(rows, prompt)
  began = time.perf_counter()
  model.generate(prompts, shape)
  first = time.perf_counter() - began
  ours = []
  other = peer(args.peer, args.model, rows, prompt, new)
  for step in range(3):
    began = time.perf_counter()
    model.generate(prompts, shape, step)
    ours.append(time.perf_counter() - began)
  again = peer(args.peer, args.model, rows, prompt, new)
  step_s, products = (
    model.decode_seconds(rows, prompt + new),
    (model.product_seconds(rows)),
  )
  values = dict(
    rows=rows, first_call_s=first, seconds=min(ours),
    tokens_per_second=rows * new / min(ours), decode_step_ms=step_s * 1e3,
    decode_tokens_per_second=rows / step_s, products_ms=products * 1e3,
    share_of_products=products / step_s,
  )  # fmt: skip
  if rows == 1:
    bytes_s = bandwidth()
    floor = model.weights_bytes() / bytes_s
    values |= dict(
      bandwidth_gb_s=bytes_s / 1e9, floor_ms=floor * 1e3,
      over_floor=step_s / floor,
    )  # fmt: skip
  if other:
    best = min(other['seconds'], again['seconds'])
    values |= dict(
      peer=f'transformers {other["transformers"]}, torch {other["torch"]}',
      peer_seconds=best, ratio=best / min(ours),
    )  # fmt: skip
  report(name, **values)


def small():
  model = Model(SMALL)
  shape = engine.Shape(32, 128, 16, 1)
  prompts = model.prompts(16, 32)
  began = time.perf_counter()
  model.generate(prompts, shape)
  first = time.perf_counter() - began
  best = seconds(lambda: model.generate(prompts, shape).tokens, repeat=5)
  report(
    'small', first_call_s=first, seconds=best, tokens_per_second=16 * 128 / best
  )


def ideal_steps(lengths, slots):
  """Decode steps of a list schedule: the next request to the free slot."""
  free = np.zeros(slots, np.int64)
  for length in lengths:
    free[free.argmin()] += length
  return int(free.max())


def queue(model, slots=32, requests=512, limit=256, sigma=1.0, seed=0):
  rng = np.random.default_rng(seed)
  mean = limit / 8
  lengths = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, requests)
  lengths = np.clip(np.round(lengths), 1, limit).astype(np.int32)
  prompts = model.prompts(requests, 32)
  shape = engine.Shape(32, limit, slots, 1)
  run = lambda part, shape: model.generate(
    [prompts[i] for i in part], shape, max_new_tokens=lengths[part]
  )
  everyone = np.arange(requests)
  run(everyone[: 2 * slots], shape)
  began = time.perf_counter()
  run(everyone, shape)
  ours = time.perf_counter() - began
  began = time.perf_counter()
  for start in range(0, requests, slots):
    run(everyone[start : start + slots], shape)
  static = time.perf_counter() - began
  step = model.decode_seconds(slots, 256 + 32)
  # The first token of a request comes from its prompt.
  ideal = ideal_steps(lengths - 1, slots) * step
  report(
    'queue', slots=slots, requests=requests, limit=limit, sigma=sigma,
    seed=seed, mean_length=float(lengths.mean()), tokens=int(lengths.sum()),
    seconds=ours, static_seconds=static, over_static=static / ours,
    ideal_seconds=ideal, share_of_ideal=ideal / ours,
    occupancy=float((lengths - 1).sum() * step / slots / ours),
  )  # fmt: skip


def shared(model, prompts=8, length=256):
  """One new token each: what is left is the prefill."""
  texts = model.prompts(prompts, length)
  times = {}
  for samples in (1, 8):
    shape = engine.Shape(length, 1, prompts * samples, samples)
    times[samples] = seconds(
      lambda s=shape: model.generate(texts, s).tokens, repeat=3
    )
  report(
    'shared', prompts=prompts, length=length, one_s=times[1], eight_s=times[8],
    ratio=times[8] / times[1],
  )  # fmt: skip


def recompile():
  model = Model(SMALL)
  shape = engine.Shape(32, 16, 16, 2)
  options = dict(config=model.config, mesh=MESH, shape=shape, dtype=FLOAT32)
  engine.warm_up(model.params, **options)
  before = engine.programs()
  rng = np.random.default_rng(0)
  for step in range(20):
    count = int(rng.integers(1, 12))
    prompts = [rng.integers(2, 259, rng.integers(1, 33)) for _ in range(count)]
    n = count * 2
    model.generate(
      prompts, shape, step, temperature=rng.uniform(0, 2, n),
      top_k=rng.integers(0, 50, n), top_p=rng.uniform(0.1, 1, n),
      min_p=rng.uniform(0, 0.2, n), min_new_tokens=rng.integers(0, 5, n),
      max_new_tokens=rng.integers(5, 17, n),
      stop_ids=[rng.integers(0, 259, 3).tolist() for _ in range(n)],
      bias={int(rng.integers(0, 259)): -np.inf},
      seeds=rng.integers(0, 2**31 - 1, n),
    )  # fmt: skip
  report('recompile', rollouts=20, compiled=engine.programs() - before)


def split(name, model, rows, context):
  """Where a decode step spends its time."""
  step = model.decode_seconds(rows, context)
  config = model.config
  head = seconds(
    jax.jit(lambda x, w: x @ w), jnp.ones((rows, config.d_model)),
    model.params['head'], repeat=10,
  )  # fmt: skip
  products = model.product_seconds(rows) - head
  parts = dict(
    attention_ms=model.attention_seconds(rows, context) * 1e3,
    products_ms=products * 1e3,
    head_ms=head * 1e3,
    choice_ms=model.pick_seconds(rows) * 1e3,
  )
  # What must be read: weights once, and all keys and values.
  floor = model.weights_bytes() + (
    2 * 4 * config.num_layers * rows * config.num_kv_heads
    * config.head_dim * context
  )  # fmt: skip
  report(
    name, rows=rows, context=context, step_ms=step * 1e3,
    tokens_per_second=rows / step, read_gb_per_s=floor / step / 1e9, **parts,
  )  # fmt: skip


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--model', default='')
  parser.add_argument('--peer', default='')
  parser.add_argument('--only', default='')
  args = parser.parse_args()
  names = 'batch single small queue shared recompile slots context'.split()
  wanted = args.only.split(',') if args.only else names
  if unknown := set(wanted) - set(names):
    sys.exit(f'unknown {sorted(unknown)}: choose of {names}')
  model = None
  if set(wanted) - {'small', 'recompile'}:
    config = hf.load_config(args.model) if args.model else SMOLLM2_135M
    model = Model(config, args.model)
  if 'batch' in wanted:
    against_peer('batch', model, args, 32)
  if 'single' in wanted:
    against_peer('single', model, args, 1)
  if 'small' in wanted:
    small()
  if 'queue' in wanted:
    queue(model)
  if 'shared' in wanted:
    shared(model)
  if 'recompile' in wanted:
    recompile()
  if 'slots' in wanted:
    for rows in (1, 4, 16, 32, 64, 128, 256):
      split('slots', model, rows, 128)
  if 'context' in wanted:
    for context in (128, 512, 1024, 2048, 4096):
      split('context', model, 8, context)


if __name__ == '__main__':
  main()
