"""PPO with a critic on the shapes of well-known models, from scratch.

To plan with: what a run of this size needs, on devices that are not there
(docs/scaling.md has the table).

  python launch/plan.py --config=configs/ppo_scaling.py:qwen2-7b \
    --target=h100:128x8

A variant is 'qwen2.5-0.5b', 'qwen2-7b' or 'llama3-70b': random weights in
bfloat16 and float32 masters, bytes for tokens, sums for prompts.  Prompts have
up to 512 tokens, responses 1536; a step takes 1024 sequences in four updates.
`:tiny` takes two steps anywhere.
"""

from ml_collections import ConfigDict

from configs import base

# From the files config.json of the models on the Hugging Face hub.
SHAPES = {
  'qwen2.5-0.5b': dict(
    family='qwen2',
    vocab_size=151936,
    d_model=896,
    d_mlp=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    max_positions=32768,
    rope_theta=1e6,
    norm_eps=1e-6,
    tied_embeddings=True,
    attention_bias=True,
  ),
  'qwen2-7b': dict(
    family='qwen2',
    vocab_size=152064,
    d_model=3584,
    d_mlp=18944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    max_positions=131072,
    rope_theta=1e6,
    norm_eps=1e-6,
    tied_embeddings=False,
    attention_bias=True,
  ),
  'llama3-70b': dict(
    family='llama',
    vocab_size=128256,
    d_model=8192,
    d_mlp=28672,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    max_positions=8192,
    rope_theta=5e5,
    norm_eps=1e-5,
    tied_embeddings=False,
  ),
  'tiny': dict(
    family='llama',
    vocab_size=259,
    d_model=32,
    d_mlp=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
  ),
}


def get_config(arg: str = '') -> ConfigDict:
  """`arg` is a key of SHAPES; '' is 'qwen2-7b'."""
  arg = arg or 'qwen2-7b'
  if arg not in SHAPES:
    raise ValueError(
      f'configs/ppo_scaling.py: unknown variant {arg!r}, one of'
      f' {sorted(SHAPES)}'
    )
  config = base.get_config()
  config.name = 'ppo_scaling'
  config.tokenizer = 'bytes'
  config.model.architecture = ConfigDict(SHAPES[arg])
  config.data.train = ConfigDict(
    dict(source='arithmetic', args=dict(digits=9, size=10_000_000))
  )
  config.rewards.exact_match = ConfigDict(
    dict(rule='exact_match', weight=1.0, args=ConfigDict())
  )
  config.steps = 100
  config.evaluation.before_train = False
  config.export = False
  config.data.max_prompt_tokens = 512
  config.rollout.share_prefix = False
  config.rollout.prompts_per_step = 1024
  config.rollout.samples_per_prompt = 1
  config.rollout.max_new_tokens = 1536
  config.rollout.slots = 512
  config.training.sequences_per_minibatch = 256
  config.training.tokens_per_row = 2048
  config.training.tokens_per_microbatch = 4096
  config.algorithm.lam = 0.95
  config.algorithm.kl_loss.coef = 0.001
  if arg == 'llama3-70b':
    # A data group is a whole node (mesh.tensor=8): its micro-batch must be
    # large to be worth the gathers, and only recomputation leaves room for it.
    config.model.remat = 'block'
    config.training.tokens_per_microbatch = 16384
    config.rollout.slots = 64
  if arg == 'tiny':
    config.steps = 2
    config.data.train.args.size = 64
    config.data.max_prompt_tokens = 32
    config.rollout.prompts_per_step = 16
    config.rollout.max_new_tokens = 8
    config.rollout.slots = 16
    config.training.sequences_per_minibatch = 8
    config.training.tokens_per_row = 64
    config.training.tokens_per_microbatch = 64
  config.lock()
  return config
