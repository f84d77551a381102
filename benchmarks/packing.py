"""The actor update on packed rows, against one padded sequence per row.

  python benchmarks/packing.py [--lengths=FILE] [--model=FOLDER] [--sequences=N]

Prints one JSON line.  Lengths are those of GSM8K problems with their answers:
`--lengths` is a JSON-lines file with `question` and `answer`, counted in
bytes and divided by four, about a token of a usual vocabulary.  Both sides
hold the same sequences in rows of the longest one, run the same programs with
the same number of rows per micro-batch, in turns in one process; the best turn
counts.  Tokens per second are real tokens, without padding.
"""

import argparse
import json
import os
import pathlib
import sys
import time

import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks import update as update_benchmark  # noqa: E402
from rlhf_jax import types  # noqa: E402
from rlhf_jax.data import packing  # noqa: E402
from rlhf_jax.models import decoder  # noqa: E402
from rlhf_jax.models import hf  # noqa: E402
from rlhf_jax.models import spec  # noqa: E402


def lengths(path: pathlib.Path, count: int) -> np.ndarray:
  """Tokens of `count` problems with answers, drawn with seed 0."""
  lines = map(json.loads, path.read_text().splitlines())
  sizes = np.array([len(x['question'] + x['answer']) for x in lines]) // 4
  return np.random.default_rng(0).choice(sizes, count, replace=False)


def rollout(sizes: np.ndarray, vocabulary: int) -> types.Rollout:
  """Random tokens; the second half of each sequence is the response."""
  rng = np.random.default_rng(1)
  count, width = len(sizes), int(sizes.max())
  prompts = (sizes // 2).astype(np.int32)
  at = np.arange(width)[None]
  return types.Rollout(
    tokens=rng.integers(1, vocabulary, (count, width)).astype(np.int32),
    lengths=sizes.astype(np.int32),
    prompt_lengths=prompts,
    mask=(at >= prompts[:, None]) & (at < sizes[:, None]),
    logprobs=np.zeros((count, width), np.float32),
    temperature=np.ones(count, np.float32),
    truncated=np.zeros(count, bool),
    group=np.arange(count, dtype=np.int32),
    policy_version=np.zeros(count, np.int32),
  )


def micro_batches(
  data: types.Rollout, *, packed: bool, rows: int
) -> tuple[list[types.TokenBatch], float]:
  """The update's input, and the share of its places that hold a token."""
  width = data.tokens.shape[1]
  # As long as a row, every sequence gets one to itself.
  sizes = data.lengths if packed else np.full_like(data.lengths, width)
  plan = packing.plan(sizes, width, width, rows_multiple=rows)
  whole = packing.rows(data.replace(lengths=sizes), plan)
  mask = whole.mask
  nothing = np.zeros(mask.shape, np.float32)
  advantages = np.random.default_rng(2).normal(size=mask.shape)
  batch = types.TokenBatch(
    rows=whole,
    old_logprobs=nothing - 10,
    reference_logprobs=nothing - 10,
    advantages=advantages.astype(np.float32),
    old_values=nothing,
    returns=nothing,
    weights=(mask / mask.sum()).astype(np.float32),
  )
  parts = [
    jax.tree.map(lambda x, s=start: x[s : s + rows], batch)
    for start in range(0, len(mask), rows)
  ]
  return parts, float(data.lengths.sum() / mask.size)


def main() -> None:
  update_benchmark.keep_freed_memory()
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  shared = os.environ.get('RLHF_JAX_SHARED', '../shared')
  parser.add_argument('--lengths', default=f'{shared}/data/gsm8k/test.jsonl')
  parser.add_argument('--model', help='folder or hub id; random 135M if absent')
  parser.add_argument('--sequences', type=int, default=64)
  parser.add_argument('--rows', type=int, default=4, help='of a micro-batch')
  parser.add_argument('--repeats', type=int, default=3)
  args = parser.parse_args()
  if args.model:
    config = hf.load_config(args.model)
    params = hf.load(args.model, config)
  else:
    config = update_benchmark.SMOLLM2_135M
    params = jax.jit(
      lambda: spec.init(decoder.specs(config), jax.random.key(0))
    )()
  sizes = lengths(pathlib.Path(args.lengths), args.sequences)
  data = rollout(sizes, config.vocab_size)
  step, state = update_benchmark.actor(
    config, params, head_chunk=2048, remat='none', reference=False
  )
  sides = {
    name: micro_batches(data, packed=packed, rows=args.rows)
    for name, packed in (('packed', True), ('padded', False))
  }
  best = {name: float('inf') for name in sides}
  for turn in range(args.repeats + 2):  # two to compile and warm up
    for name, (parts, _) in sides.items():
      began = time.perf_counter()
      for part in parts if turn else parts[:1]:
        state, statistics = step(state, part)
      jax.block_until_ready((state, statistics))
      if turn > 1:
        best[name] = min(best[name], time.perf_counter() - began)
  tokens = int(sizes.sum())
  result = {
    'benchmark': 'packing',
    'sequences': args.sequences,
    'tokens': tokens,
    'tokens_per_row': int(sizes.max()),
    'rows_per_microbatch': args.rows,
    'model_parameters': spec.count(decoder.specs(config)),
  }
  for name, (parts, real) in sides.items():
    result |= {
      f'{name}_micro_batches': len(parts),
      f'{name}_real_tokens': round(real, 4),
      f'{name}_seconds': round(best[name], 3),
      f'{name}_tokens_per_second': round(tokens / best[name], 1),
    }
  result['ratio'] = round(best['padded'] / best['packed'], 3)
  print(json.dumps(result))


if __name__ == '__main__':
  main()
