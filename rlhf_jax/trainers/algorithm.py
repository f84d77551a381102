"""What `config.algorithm` asks for: checked, and turned into a plan.

Every choice is a name in a literal table of `algorithms/`; the tables at the
bottom say which config keys each name reads.  A key that the choice does not
read must stay at its default: nothing is accepted and ignored.
"""

from collections.abc import Callable
import dataclasses
import functools

from ml_collections import ConfigDict
import numpy as np

from rlhf_jax import keys
from rlhf_jax import metrics
from rlhf_jax import types
from rlhf_jax.algorithms import advantages
from rlhf_jax.algorithms import aggregation
from rlhf_jax.algorithms import filtration
from rlhf_jax.algorithms import importance
from rlhf_jax.algorithms import kl
from rlhf_jax.algorithms import policy_losses
from rlhf_jax.models import config as model_config
from rlhf_jax.models import hf
from rlhf_jax.rewards import rules as reward_rules
from rlhf_jax.sharding import multihost
from rlhf_jax.trainers import arithmetic
from rlhf_jax.trainers import workdir


@dataclasses.dataclass(frozen=True)
class Plan:
  """What a step has to compute before its updates."""

  critic: bool
  reference: bool
  on_policy: bool  # one update, and nothing before it reads old log-probs
  reuse: bool  # the sampler's log-probs are the old ones
  divergence: bool  # the exact KL, for the reward
  exact_loss: bool  # the exact KL, in the loss
  sum_squares: bool  # sum_v pi(v)^2 of the old policy
  greedy_baseline: bool  # a greedy response to every prompt
  selection: bool  # tokens that the loss picks from the whole mini-batch
  correction: bool  # importance weights or rejection, sampler to trainer

  @property
  def reference_states(self) -> bool:
    """Whether the reference's hidden states are kept for the step."""
    return self.divergence or self.exact_loss

  @property
  def old_pass(self) -> bool:
    """Whether the actor reads the rollout once before the updates."""
    needed = self.divergence or self.sum_squares
    return needed or not (self.on_policy or self.reuse)


def plan(config: ConfigDict, updates_per_step: int) -> Plan:
  """The plan of a stage whose config has been checked."""
  algorithm = config.algorithm
  reuse = config.rollout.logprobs == 'reuse'
  in_reward, in_loss = algorithm.kl_reward, algorithm.kl_loss
  exact = lambda section: section.coef > 0 and section.estimator == 'full'
  correction = not reuse and (
    algorithm.importance.level != 'off'
    or algorithm.rejection.statistic != 'off'
  )
  selection = algorithm.policy_loss in policy_losses.SELECTIONS
  sum_squares = algorithm.advantages in advantages.SUM_SQUARES_ESTIMATORS
  return Plan(
    critic=algorithm.advantages in advantages.CRITIC_ESTIMATORS,
    reference=in_reward.coef > 0 or in_loss.coef > 0,
    on_policy=(
      updates_per_step == 1
      and not (in_reward.coef > 0 or reuse or correction or selection)
      and not sum_squares
    ),
    reuse=reuse,
    divergence=exact(in_reward),
    exact_loss=exact(in_loss),
    sum_squares=sum_squares,
    greedy_baseline=algorithm.advantages == 'remax',
    selection=selection,
    correction=correction,
  )


def estimator_settings(algorithm: ConfigDict) -> dict:
  """The keywords that the advantage estimator takes from the config."""
  keys = ESTIMATOR_KEYS[algorithm.advantages]
  return {key: algorithm[key] for key in keys if key in ESTIMATOR_KEYWORDS}


def whitens(algorithm: ConfigDict) -> bool:
  """Whether advantages are whitened over the step; by default they are."""
  return algorithm.advantages == 'gae' and algorithm.whiten is not False


def policy_loss(algorithm: ConfigDict) -> Callable:
  """The configured policy loss, its keywords bound."""
  name = algorithm.policy_loss
  settings = _bound(algorithm, LOSS_KEYS[name])
  return functools.partial(policy_losses.loss(name), **settings)


def selection(algorithm: ConfigDict) -> Callable | None:
  """`select(key, index, logprobs, old_logprobs, advantages, mask)`, or None.

  See `policy_losses.SELECTIONS`; arrays `[N, T]` of one mini-batch; `index`
  `[N]` numbers its sequences in the step and addresses what is drawn.
  """
  name = algorithm.policy_loss
  if name not in policy_losses.SELECTIONS:
    return None
  settings = _bound(algorithm, SELECTION_KEYS[name])
  function = functools.partial(policy_losses.SELECTIONS[name], **settings)
  if name == 'kl_cov':  # takes the largest: nothing is drawn
    return lambda key, index, *arrays: function(*arrays)
  return lambda key, index, *arrays: function(key, *arrays, index=index)


def _bound(algorithm, keys):
  """keyword -> value; unset clips are left to the function's default."""
  values = workdir.flatten(algorithm)
  settings = {keyword: values[key] for keyword, key in keys.items()}
  if not settings.get('dual_clip'):
    settings.pop('dual_clip', None)  # 0 is off
  return {k: v for k, v in settings.items() if v is not None}


def kl_estimator(section: ConfigDict) -> Callable | None:
  """The estimator of a KL section; None is the exact divergence.

  Of a section that is off it only names what is reported: then it is k3.
  """
  if section.estimator == 'full':
    return None if section.coef > 0 else kl.k3
  return kl.estimator(section.estimator)


def controller(section: ConfigDict) -> kl.Controller:
  """The KL controller that a config section asks for."""
  if section.controller == 'fixed':
    return kl.fixed(section.coef)
  if section.controller == 'adaptive':
    return kl.adaptive(
      section.coef, target=section.target, horizon=section.horizon
    )
  raise ValueError(
    f"controller={section.controller!r} is not one of ['adaptive', 'fixed']"
  )


def loss_importance(config: ConfigDict) -> Callable | None:
  """Weights inside the loss: with reused log-probs and a loss without a ratio.

  Elsewhere they are computed once per step, see `correct`.
  """
  section = config.algorithm.importance
  if config.rollout.logprobs != 'reuse' or section.level == 'off':
    return None
  return functools.partial(
    importance.weights,
    level=section.level,
    upper=section.upper,
    lower=section.lower or None,
  )


def correct(
  algorithm: ConfigDict,
  rollout: types.Rollout,
  old_logprobs: np.ndarray,
  islands: multihost.Islands,
) -> tuple[types.Rollout, np.ndarray | None, metrics.Metrics]:
  """Rejection and importance weights between sampler and trainer.

  Args:
    algorithm: section of the config.
    rollout: numpy, with the sampler's log-probs.
    old_logprobs: [N, T], the trainer's.
    islands: of the job; what is normalised or counted is over all of them.

  Returns:
    The rollout with the mask that remains; the weights [N, T] of that mask, or
    None; and what was done.
  """
  *arrays, mask = multihost.rows(
    islands, (old_logprobs, rollout.logprobs, rollout.mask)
  )
  rejection, section = algorithm.rejection, algorithm.importance
  measured = {}
  if rejection.statistic != 'off':
    kept = importance.keep(
      *arrays,
      mask,
      statistic=rejection.statistic,
      level=rejection.level,
      low=rejection.low if rejection.statistic == 'k1' else None,
      high=rejection.high,
    )
    measured |= importance.keep_metrics(mask, kept)
    mask = kept
    rollout = rollout.replace(mask=multihost.own_rows(islands, kept))
  if section.level == 'off':
    return rollout, None, measured
  settings = dict(
    level=section.level, upper=section.upper, lower=section.lower or None
  )
  weights = importance.weights(
    *arrays, mask, normalize=section.normalize, **settings
  )
  measured |= importance.weight_metrics(*arrays, mask, **settings)
  return rollout, multihost.own_rows(islands, weights), measured


def notes(config: ConfigDict) -> list[str]:
  """What is allowed, but not what the paper of a loss did."""
  loss, mode = config.algorithm.policy_loss, config.algorithm.aggregation
  paper = policy_losses.PAPER_AGGREGATION.get(loss, mode)
  if paper == mode:
    return []
  return [
    f'algorithm.aggregation={mode!r}: the paper of {loss!r} has {paper!r}'
  ]


def check(
  config: ConfigDict, model: model_config.ModelConfig, rewards: dict
) -> None:
  """Refuses PPO settings that would be ignored or make no sense together.

  Args:
    config: of the stage.
    model: of the policy.
    rewards: by name.

  Raises:
    ValueError: says which, and what to do.
  """
  if not rewards:
    raise ValueError(
      f'no rewards: add one of {sorted(reward_rules.RULES)} to config.rewards'
    )
  _check_names(config)
  _check_unread(config)
  _check_rollout(config)
  _check_values(config)
  _check_combinations(config)
  _check_critic(config, model)


def _check_names(config):
  """Unknown names, each with the list of choices."""
  algorithm = config.algorithm
  advantages.estimator(algorithm.advantages)
  policy_losses.loss(algorithm.policy_loss)
  kl.check(algorithm.kl_reward.estimator, loss=False)
  kl.check(algorithm.kl_loss.estimator, loss=True)
  for key, choices in (
    ('rollout.logprobs', ('recompute', 'reuse')),
    ('algorithm.aggregation', tuple(aggregation.MODES)),
    ('algorithm.importance.level', ('off', *importance.WEIGHT_LEVELS)),
    ('algorithm.rejection.statistic', ('off', *importance.STATISTICS)),
    ('algorithm.rejection.level', tuple(importance.KEEP_LEVELS)),
    ('algorithm.filtration.method', ('off', *filtration.METHODS)),
  ):
    value = workdir.flatten(config)[key]
    if value not in choices:
      raise ValueError(f'{key}={value!r} is not one of {sorted(choices)}')


def _check_unread(config):
  """Settings that the choices do not read must stay at their defaults."""
  algorithm = config.algorithm
  values = workdir.flatten(algorithm)
  read = {
    *ESTIMATOR_KEYS[algorithm.advantages],
    *LOSS_KEYS[algorithm.policy_loss].values(),
    *SELECTION_KEYS.get(algorithm.policy_loss, {}).values(),
  }
  for switch, off, section in (
    (algorithm.importance.level, 'off', 'importance'),
    (algorithm.rejection.statistic, 'off', 'rejection'),
    (algorithm.filtration.method, 'off', 'filtration'),
    (algorithm.kl_reward.controller, 'fixed', 'kl_reward'),
    (algorithm.kl_loss.controller, 'fixed', 'kl_loss'),
  ):
    if switch != off:
      read |= {key for key in values if key.startswith(f'{section}.')}
  if algorithm.filtration.method != 'pow':
    read -= {'filtration.power'}
  if algorithm.rejection.statistic != 'k1':
    read -= {'rejection.low'}
  for key, default in DEFAULTS.items():
    if key in read or values[key] == default:
      continue
    if key == 'whiten' and values[key] is False:  # says what is done anyway
      continue
    owner = f'algorithm.advantages={algorithm.advantages!r} and'
    owner += f' algorithm.policy_loss={algorithm.policy_loss!r}'
    if '.' in key and key.split('.')[0] in SWITCHES:
      section, switch = key.split('.')[0], SWITCHES[key.split('.')[0]]
      owner = f'algorithm.{section}.{switch}={algorithm[section][switch]!r}'
    raise ValueError(
      f'algorithm.{key}={values[key]} would be ignored by {owner}: set it to'
      f' {default}'
    )


def _check_rollout(config):
  """What sampling must be like for the algorithm."""
  rollout, algorithm = config.rollout, config.algorithm
  if rollout.temperature <= 0:
    raise ValueError(
      f'rollout.temperature={rollout.temperature} is greedy: it has no'
      ' log-probs to train on; set it above 0'
    )
  if rollout.slots < rollout.samples_per_prompt:
    raise ValueError(
      f'rollout.slots={rollout.slots} sequences cannot hold the'
      f' rollout.samples_per_prompt={rollout.samples_per_prompt} of one'
      ' prompt: raise slots'
    )
  if (
    rollout.samples_per_prompt < 2
    and algorithm.advantages in advantages.GROUP_ESTIMATORS
  ):
    raise ValueError(
      f'algorithm.advantages={algorithm.advantages!r} compares the samples of'
      ' a prompt: set rollout.samples_per_prompt to 2 or more'
    )


def _check_values(config):
  """Tries every function on one token: each checks its settings itself."""
  algorithm = config.algorithm
  for name in ('kl_reward', 'kl_loss'):
    controller(algorithm[name])
  one = np.zeros((1, 1), np.float32)
  extra = {}
  select = selection(algorithm)
  if select is not None:
    key = keys.key(0, 'select')
    extra['selected'] = select(
      key, np.zeros(1, np.int32), one, one, one, one == 0
    )
  policy_loss(algorithm)(one, one, one, one == 0, **extra)
  rollout = types.Rollout(
      tokens=one, lengths=one, prompt_lengths=one, mask=one == 0, logprobs=one,
      temperature=one, truncated=one, group=one, policy_version=one,
  )  # fmt: skip
  correct(algorithm, rollout, one, multihost.alone())
  if algorithm.filtration.method != 'off':
    filtration.weights(
      one[0],
      one[0] == 0,
      method=algorithm.filtration.method,
      power=algorithm.filtration.power,
    )


def _check_combinations(config):
  """Pairs of choices that contradict each other."""
  algorithm, rollout = config.algorithm, config.rollout
  estimator, loss = algorithm.advantages, algorithm.policy_loss
  importance_on = algorithm.importance.level != 'off'
  rejection_on = algorithm.rejection.statistic != 'off'
  filtration_on = algorithm.filtration.method != 'off'
  reuse = rollout.logprobs == 'reuse'
  updates = (
    rollout.prompts_per_step
    * rollout.samples_per_prompt
    // config.training.sequences_per_minibatch
    * config.training.epochs_per_step
  )
  full_loss = plan(config, updates).exact_loss
  for wrong, message in (
    (
      algorithm.drop_uniform_groups
      and (estimator not in UNIFORM_IS_ZERO or algorithm.kl_reward.coef > 0),
      'algorithm.drop_uniform_groups leaves out groups without an advantage;'
      f' with {estimator} or a KL in the reward equal scores may have one: set'
      f' it to False, or use one of {sorted(UNIFORM_IS_ZERO)} without'
      ' kl_reward',
    ),
    (
      algorithm.dynamic_sampling.rounds > 0
      and estimator not in advantages.GROUP_ESTIMATORS,
      'algorithm.dynamic_sampling replaces groups of equal scores, which'
      f' {estimator} can learn from as well: set rounds to 0, or use one of'
      f' {sorted(advantages.GROUP_ESTIMATORS)}',
    ),
    (
      algorithm.mask_truncated and algorithm.truncated_penalty != 0,
      'algorithm.truncated_penalty is never seen where mask_truncated takes'
      ' cut sequences out: set one of them only',
    ),
    (
      estimator == 'gdpo' and algorithm.truncated_penalty != 0,
      "algorithm.advantages='gdpo' reads each reward by itself and not the"
      ' score: use the rule length_penalty instead of truncated_penalty',
    ),
    (
      estimator == 'gdpo' and algorithm.kl_reward.coef > 0,
      "algorithm.advantages='gdpo' normalises each reward by itself and has no"
      ' place for a KL in the reward: use algorithm.kl_loss',
    ),
    (
      algorithm.bootstrap_truncated and algorithm.mask_truncated,
      'algorithm.bootstrap_truncated and algorithm.mask_truncated exclude'
      ' each other',
    ),
    (
      loss in NO_RATIO and updates > 1 and not (reuse and importance_on),
      f'algorithm.policy_loss={loss} is on-policy, a step of {updates}'
      ' updates is not: use ppo or one mini-batch and one epoch, or'
      " rollout.logprobs='reuse' with algorithm.importance.level='token'",
    ),
    (
      reuse and rejection_on,
      "rollout.logprobs='reuse' has no trainer's log-probs to compare with:"
      " algorithm.rejection.statistic must be 'off', or logprobs 'recompute'",
    ),
    (
      reuse and importance_on and loss not in NO_RATIO,
      f"rollout.logprobs='reuse' makes the ratio of {loss} the importance"
      " weight itself: set algorithm.importance.level to 'off' (its clips, and"
      f' dual_clip, truncate it), or use one of {sorted(NO_RATIO)}',
    ),
    (
      reuse
      and importance_on
      and (
        algorithm.importance.level != 'token' or algorithm.importance.normalize
      ),
      "rollout.logprobs='reuse' weights inside the loss, token by token: set"
      " algorithm.importance.level to 'token' and normalize to False",
    ),
    (
      filtration_on and full_loss,
      'algorithm.filtration resamples sequences after the reference has read'
      " them: kl_loss.estimator='full' needs them in the same rows; use 'k3'",
    ),
    (
      filtration_on and algorithm.mask_truncated,
      'algorithm.filtration chooses sequences by score, mask_truncated by'
      ' length: set mask_truncated to False',
    ),
  ):
    if wrong:
      raise ValueError(message)


def _check_critic(config, model):
  """A critic that fits, or none."""
  estimator = config.algorithm.advantages
  path = config.critic.path
  if estimator not in advantages.CRITIC_ESTIMATORS:
    if path or config.critic.warmup_steps:
      raise ValueError(
        f'algorithm.advantages={estimator!r} has no critic:'
        " critic.path must be '' and critic.warmup_steps 0"
      )
    return
  if not path:
    return
  critic = hf.load_config(path)
  longest = arithmetic.longest_sequence(config)
  if critic.max_positions < longest:
    raise ValueError(
      f'the critic of {path} has {critic.max_positions} positions, sequences'
      f' have up to {longest} tokens'
    )
  if critic.vocab_size != model.vocab_size:
    raise ValueError(
      f'the critic of {path} has a vocabulary of {critic.vocab_size}, the'
      f' policy one of {model.vocab_size}'
    )


# Where all scores of a group are equal, so are all advantages: 0.
UNIFORM_IS_ZERO = frozenset({'grpo', 'grpo_passk', 'opo', 'rloo'})
# Losses that do not look at the old log-probs.
NO_RATIO = frozenset({'gpg', 'reinforce'})

# Keys of `config.algorithm` that an estimator reads, beside rewards and masks.
ESTIMATOR_KEYS = {
  'gae': ('gamma', 'lam', 'whiten', 'bootstrap_truncated'),
  'gdpo': (),
  'gpg': (),
  'grpo': ('normalize_std',),
  'grpo_passk': ('normalize_std',),
  'multi_turn_optimal_token_baseline': (),
  'opo': (),
  'optimal_token_baseline': (),
  'reinforce_plus_plus': ('gamma',),
  'reinforce_plus_plus_baseline': (),
  'remax': (),
  'rloo': (),
}
# Of those, the ones that are keywords of the function.
ESTIMATOR_KEYWORDS = frozenset({'gamma', 'lam', 'normalize_std'})

_CLIPS = {'clip_low': 'clip_low', 'clip_high': 'clip_high'}
# Keyword of a policy loss -> key of `config.algorithm`.
LOSS_KEYS = {
  'cispo': _CLIPS,
  'clip_cov': _CLIPS,
  'dppo_kl': _CLIPS | {'max_ratio': 'dppo.max_ratio'},
  'dppo_tv': _CLIPS | {'max_ratio': 'dppo.max_ratio'},
  'dro': {'beta': 'dro.beta'},
  'geo_mean': _CLIPS,
  'gpg': {},
  'gspo': _CLIPS,
  'kl_cov': {'coef': 'kl_cov.coef'},
  'ppo': _CLIPS | {'dual_clip': 'dual_clip'},
  'reinforce': {},
  'sapo': {
    'tau_positive': 'sapo.tau_positive',
    'tau_negative': 'sapo.tau_negative',
  },
}

# Keyword of a selection -> key of `config.algorithm`.
SELECTION_KEYS = {
  'clip_cov': _CLIPS
  | {
    'share': 'clip_cov.share',
    'low': 'clip_cov.low',
    'high': 'clip_cov.high',
  },
  'kl_cov': {'share': 'kl_cov.share'},
}

# Section -> the key that switches it on.
SWITCHES = {
  'filtration': 'method',
  'importance': 'level',
  'kl_loss': 'controller',
  'kl_reward': 'controller',
  'rejection': 'statistic',
}

# What a key must be where nothing reads it: the defaults of configs/base.py.
DEFAULTS = {
  'bootstrap_truncated': False,
  'clip_cov.high': 5.0,
  'clip_cov.low': 1.0,
  'clip_cov.share': 2e-4,
  'clip_high': None,
  'clip_low': None,
  'dppo.max_ratio': 20.0,
  'dro.beta': 0.1,
  'dual_clip': 0.0,
  'filtration.power': 2.0,
  'gamma': 1.0,
  'importance.lower': 0.0,
  'importance.normalize': False,
  'importance.upper': 2.0,
  'kl_cov.coef': 1.0,
  'kl_cov.share': 2e-4,
  'kl_loss.horizon': 10_000,
  'kl_loss.target': 0.1,
  'kl_reward.horizon': 10_000,
  'kl_reward.target': 0.1,
  'lam': 1.0,
  'normalize_std': True,
  'rejection.high': 2.0,
  'rejection.level': 'token',
  'rejection.low': 0.5,
  'sapo.tau_negative': 1.05,
  'sapo.tau_positive': 1.0,
  'whiten': None,
}
