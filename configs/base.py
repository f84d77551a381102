"""Every key that a run has, with its default and its unit.

An experiment is a file beside this one that starts from `get_config()` and
changes what differs.  The result is locked: an unknown key is an error.
"""

from ml_collections import config_dict
from ml_collections import ConfigDict


def optimizer(learning_rate: float) -> ConfigDict:
  """AdamW's settings, one set for the actor and one for the critic."""
  return ConfigDict(
    dict(
      learning_rate=learning_rate,  # the largest value
      warmup_updates=0,  # optimiser updates of linear rise
      decay='constant',  # constant | linear | cosine, over the stage
      end_fraction=0.0,  # of learning_rate, where the decay ends
      b1=0.9,
      b2=0.99,
      eps=1e-8,
      weight_decay=0.0,
      max_grad_norm=1.0,  # larger gradients are scaled down to it; 0 = off
      # float32 | bfloat16: of both moments, 8 or 4 bytes per parameter; the
      # second is rounded at random, so that it does not stall.
      moments_dtype='float32',
    )
  )


def kl(estimator: str) -> ConfigDict:
  """One place where the KL to the reference acts: the reward or the loss."""
  return ConfigDict(
    dict(
      coef=0.0,  # of the KL in nats per token; 0 is off
      # k1 | k2 | k3 | abs | low_var_kl_verl, each also with a + (the gradient
      # of k2) | full (over the vocabulary); the loss: not k1, abs.
      estimator=estimator,
      controller='fixed',  # fixed | adaptive (Ziegler et al. 2019)
      target=0.1,  # adaptive: nats per token to hold
      horizon=10_000,  # adaptive: sequences
    )
  )


def get_config() -> ConfigDict:
  """The defaults; units are in the comments."""
  config = ConfigDict()
  config.name = 'base'
  config.seed = 0
  # (name, trainer, overrides): run one after the other, each starting from
  # the parameters of the last.  Overrides are {'dotted.key': value}.
  config.stages = (('ppo', 'ppo', {}),)

  # Length of a stage: one of the two.
  config.steps = 0  # rollout steps (ppo) or mini-batches (sft)
  config.epochs = 0.0  # passes over the training prompts

  config.model = ConfigDict()
  config.model.path = ''  # local Hugging Face folder or hub id; '' = scratch
  config.model.architecture = ConfigDict()  # fields of ModelConfig, if scratch
  config.model.dtype = 'auto'  # float32 | bfloat16 | auto (by the platform)
  # For the backward pass: none (keep what the matrix products read) | block
  # (recompute each block) | offload (as none, but in the host's memory).
  config.model.remat = 'none'
  # Low-rank adapters: only they train, and the model stays as it is.
  config.model.lora = ConfigDict(
    dict(
      rank=0,  # 0 = off: all parameters of the actor train
      # The adapters' product counts alpha / rank times; unset: once.
      alpha=config_dict.placeholder(float),
      # Modules: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj;
      # or all-linear, which is all of them.
      targets=('all-linear',),
      # Folder of an adapter (PEFT) to start from, of this rank, alpha and
      # targets; '' = new ones, which change nothing at first.
      path='',
      base_dtype='auto',  # float32 | bfloat16 | auto: of the model under them
    )
  )
  config.model.head_chunk = 2048  # tokens per data group with logits at a time
  config.tokenizer = ''  # 'bytes', a folder or hub id; '' = model.path
  # Bytes that a run may hold on a device; 0 = what the device says it has (a
  # CPU says nothing, and is not limited).
  config.memory_limit_bytes = 0

  config.mesh = ConfigDict()
  config.mesh.devices = 0  # use the first so many devices; 0 = all
  config.mesh.data = 1  # replicas of the parameters
  config.mesh.fsdp = -1  # shards of parameters and optimiser; -1 = the rest
  config.mesh.tensor = 1  # shards of heads, MLP and vocabulary
  config.mesh.context = 1  # shards of the tokens of a row (Ulysses)
  config.mesh.expert = 1  # must be 1: there are no models with experts

  # What lives in the host's pinned memory until it is used; slower, and needed
  # only where the devices' memory is too small.
  config.offload = ConfigDict()
  config.offload.optimizer = False  # moments, outside of the optimiser step
  config.offload.reference = False  # outside of its forward pass
  # Float32 parameters of actor and critic, while another role works (of LoRA
  # the adapters, not the model under them).
  config.offload.params = False

  config.data = ConfigDict()
  config.data.train = ConfigDict(dict(source='', args=ConfigDict()))
  config.data.validation = ConfigDict(dict(source='', args=ConfigDict()))
  config.data.prompt_format = '{prompt}'  # text around each prompt
  config.data.chat = False  # use the tokenizer's chat template
  config.data.system = ''  # system message of the chat template
  config.data.max_prompt_tokens = 256  # tokens
  config.data.overlong = 'error'  # error | drop | truncate_left

  # name -> {rule, weight, args}; the score is the weighted sum.
  config.rewards = ConfigDict()
  config.reward_timeout_s = 60.0  # seconds for one call of one rule
  # Score of a call that ran out of time; NaN drops its sequences.
  config.reward_on_timeout = 0.0

  config.rollout = ConfigDict()
  config.rollout.prompts_per_step = 64  # prompts
  config.rollout.samples_per_prompt = 4  # sequences per prompt
  config.rollout.max_new_tokens = 64  # tokens
  config.rollout.temperature = 1.0  # above 0; divides every logit
  config.rollout.top_k = 0  # tokens, 0 = off
  config.rollout.top_p = 1.0  # probability mass, 1 = off
  config.rollout.min_p = 0.0  # share of the likeliest token's, 0 = off
  config.rollout.min_new_tokens = 0  # tokens before which no stop is drawn
  config.rollout.stop = ()  # strings of one token each that end a response
  # Strings that end a response wherever they end in its text; looked for every
  # 16 tokens, and slower than `stop`.  Rewards read the text before them.
  config.rollout.stop_strings = ()
  config.rollout.slots = 256  # sequences that decode at the same time
  # Steps that the rollout runs ahead of training; 0 is on-policy.  More than 0
  # needs devices of its own, and weights or ratios that correct for it.
  config.rollout.staleness = 0
  config.rollout.devices = 0  # of each process, only for rollouts; 0 = shared
  # Sample on all devices of the job together, not in each process by itself:
  # for a model that the devices of one process cannot hold.
  config.rollout.whole_mesh = False
  config.rollout.share_prefix = True  # compute what all prompts share once
  config.rollout.dtype = 'auto'  # float32 | bfloat16 | auto
  # Old log-probs: recompute (by the trainer) | reuse (those of the sampler).
  config.rollout.logprobs = 'recompute'

  # Names, formulas and sources: docs/algorithms.md.  A key that the chosen
  # estimator or loss does not read must keep its default.
  config.algorithm = ConfigDict()
  # gae | grpo | rloo | opo | gpg | grpo_passk | gdpo | remax |
  # reinforce_plus_plus | reinforce_plus_plus_baseline |
  # optimal_token_baseline | multi_turn_optimal_token_baseline
  config.algorithm.advantages = 'gae'
  config.algorithm.gamma = 1.0  # discount per token (gae, reinforce_plus_plus)
  config.algorithm.lam = 1.0  # lambda of gae
  # Advantages to mean 0 and deviation 1 over the step (gae); unset: yes.
  config.algorithm.whiten = config_dict.placeholder(bool)
  # Divide by the deviation of the group (grpo, grpo_passk).
  config.algorithm.normalize_std = True
  config.algorithm.bootstrap_truncated = False  # value after a cut sequence
  config.algorithm.mask_truncated = False  # cut sequences do not train
  config.algorithm.truncated_penalty = 0.0  # taken off the score of a cut one
  # Groups of equal scores have no advantage (grpo, rloo ...): leave them out of
  # the update, with their part in the KL loss and in the metrics of the update.
  config.algorithm.drop_uniform_groups = False
  # Or sample new prompts in their place (DAPO).
  config.algorithm.dynamic_sampling = ConfigDict(
    dict(rounds=0)  # of replacement, at most; 0 = off
  )
  # ppo | gspo | cispo | sapo | geo_mean | clip_cov | kl_cov | dppo_tv |
  # dppo_kl | dro | gpg | reinforce
  config.algorithm.policy_loss = 'ppo'
  # Ratio from 1 - clip_low to 1 + clip_high; unset, what the paper of the loss
  # has: 0.2, gspo 3e-4 and 4e-4, geo_mean 0.4 (of the log-ratio), dppo_tv 0.15
  # and dppo_kl 0.05 (of the divergence).
  config.algorithm.clip_low = config_dict.placeholder(float)
  config.algorithm.clip_high = config_dict.placeholder(float)
  config.algorithm.dual_clip = 0.0  # bound for A < 0 as a ratio; 0 = off
  config.algorithm.sapo = ConfigDict(
    dict(
      tau_positive=1.0,  # steepness of the gate where A > 0
      tau_negative=1.05,  # and elsewhere
    )
  )
  config.algorithm.clip_cov = ConfigDict(
    dict(
      share=2e-4,  # of the tokens of a mini-batch that are stopped
      low=1.0,  # drawn among those whose covariance lies
      high=5.0,  # between these two
    )
  )
  config.algorithm.kl_cov = ConfigDict(
    dict(
      share=2e-4,  # of the tokens of a mini-batch, of largest covariance
      coef=1.0,  # of |log pi - log pi_old| there
    )
  )
  # Tokens of larger ratio weigh as this (dppo_tv, dppo_kl).
  config.algorithm.dppo = ConfigDict(dict(max_ratio=20.0))
  config.algorithm.dro = ConfigDict(dict(beta=0.1))  # of the squared log-ratio
  # token-mean | token-sum | seq-mean-token-sum | seq-mean-token-mean |
  # seq-mean-token-sum-norm
  config.algorithm.aggregation = 'token-mean'
  config.algorithm.entropy_coef = 0.0  # bonus per nat per token
  config.algorithm.kl_reward = kl('k1')  # penalty in the token rewards
  config.algorithm.kl_loss = kl('k3')  # term in the policy loss
  # Weights pi_trainer / pi_sampler on the policy loss.
  config.algorithm.importance = ConfigDict(
    dict(
      level='off',  # off | token | sequence
      upper=2.0,  # larger weights become this (lower = 0), or 0
      lower=0.0,  # smaller weights become 0; 0 = off
      normalize=False,  # to a mean of 1
    )
  )
  # Tokens or sequences on which sampler and trainer disagree do not train.
  config.algorithm.rejection = ConfigDict(
    dict(
      statistic='off',  # off | k1 | k2 | k3
      level='token',  # token | sequence_sum | sequence_mean | sequence_max
      low=0.5,  # k1: smallest ratio pi_sampler / pi_trainer
      high=2.0,  # k1: largest ratio; k2, k3: largest statistic
    )
  )
  # PF-PPO: sequences are drawn anew by their scores.
  config.algorithm.filtration = ConfigDict(
    dict(
      method='off',  # off | pow | max_min | max_random
      power=2.0,  # pow: probability in proportion to |score|^power
    )
  )

  config.training = ConfigDict()
  config.training.sequences_per_minibatch = 256  # sequences per update
  config.training.epochs_per_step = 1  # passes over the rollout
  config.training.tokens_per_row = 512  # tokens; rows hold whole sequences
  # Tokens per data group, halved where memory runs out; 'auto' is the largest
  # power of two times tokens_per_row that fits, found by compiling before the
  # first step.
  config.training.tokens_per_microbatch = config_dict.FieldReference(
    2048, field_type=object
  )
  # float32 | bfloat16: in which the gradients of micro-batches are added; norms
  # and moments are computed in float32.  bfloat16: up to about 16 of them.
  config.training.gradient_dtype = 'float32'

  config.actor = ConfigDict()
  config.actor.optimizer = optimizer(1e-6)

  config.critic = ConfigDict()
  config.critic.path = ''  # folder or hub id; '' = starts from the actor
  config.critic.warmup_steps = 0  # steps in which only the critic learns
  config.critic.clip = 0.2  # values move this far per step; 0 = off
  config.critic.optimizer = optimizer(1e-5)

  config.evaluation = ConfigDict()
  config.evaluation.every = 10  # steps; 0 = only at the end
  config.evaluation.before_train = True
  config.evaluation.only = False  # evaluate and stop
  config.evaluation.max_prompts = 0  # prompts; 0 = all of the validation set
  # `summary.json` has the largest value of this metric, val/SOURCE/REWARD.
  config.evaluation.best_metric = ''

  config.checkpoint = ConfigDict()
  config.checkpoint.every = 0  # steps; 0 = only at the end of a stage
  config.checkpoint.keep = 2  # newest ones that stay
  config.export = True  # write a Hugging Face folder at the end

  config.dump_every = 10  # steps between two writes to samples.jsonl
  config.dump_sequences = 16  # sequences per write
  config.tensorboard = False  # also write TensorBoard files
  config.wandb = ''  # project of Weights & Biases; '' = off
  return config
