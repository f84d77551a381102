"""A run's workdir: whether it may start, what it leaves, where it goes on."""

from collections.abc import Callable
import contextlib
import dataclasses
import json
import pathlib
import sys
import time
from typing import Any

from clu import parameter_overview
import jax
import numpy as np
import orbax.checkpoint as ocp

from rlhf_jax import checkpoint
from rlhf_jax import types
from rlhf_jax.models import decoder
from rlhf_jax.models import spec
from rlhf_jax.monitor import console as console_lib
from rlhf_jax.monitor import report
from rlhf_jax.monitor import writers
from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.sharding import multihost
from rlhf_jax.trainers import algorithm
from rlhf_jax.trainers import evaluate
from rlhf_jax.trainers import setup as setup_lib
from rlhf_jax.trainers import state as state_lib
from rlhf_jax.trainers import workdir as workdir_lib


class Timings(dict):
  """Seconds by metric name: `with timings('gen'): ...`."""

  @contextlib.contextmanager
  def __call__(self, name: str):
    began = time.perf_counter()
    yield
    self[f'timing_s/{name}'] = time.perf_counter() - began


# Steps with a negative mean of k1 before `Run.watch_kl` warns.
NEGATIVE_KL_STEPS = 10


@dataclasses.dataclass
class Run:
  """What the trainer loops share: files, progress and host state."""

  workdir: pathlib.Path
  config: dict[str, Any]
  writer: writers.RunWriter
  console: console_lib.Console
  checkpoints: ocp.CheckpointManager
  host: state_lib.HostState
  restored_step: int | None  # checkpoint that the run goes on from
  started: float  # time.time() less what earlier processes worked
  # What the loops open and `conclude` closes, whatever ended them.
  resources: contextlib.ExitStack = dataclasses.field(
    default_factory=contextlib.ExitStack
  )

  def restored_in(self, stage: str) -> int | None:
    """The checkpoint to restore in this stage, None to begin it anew."""
    return self.restored_step if self.host.stage == stage else None

  def begin_stage(self, setup: setup_lib.Setup) -> None:
    """Resets what belongs to one stage."""
    host = self.host
    host.stage, host.cursor, host.policy_version = setup.name, 0, 0
    host.reference = {}
    host.tokens_per_microbatch = (
      setup.numbers.tokens_per_microbatch // mesh_lib.data_groups(setup.mesh)
    )
    host.kl_reward = algorithm.controller(setup.config.algorithm.kl_reward)
    host.kl_loss = algorithm.controller(setup.config.algorithm.kl_loss)
    self.heed_memory()

  def heed_memory(self) -> None:
    """Lowers the micro-batch to what earlier processes found to fit."""
    host = self.host
    known = workdir_lib.allowed_microbatch(self.workdir, host.stage)
    if known and known['tokens_per_microbatch'] < host.tokens_per_microbatch:
      host.tokens_per_microbatch = known['tokens_per_microbatch']
      text = (
        f'micro-batches of {host.tokens_per_microbatch} tokens per data group,'
        f' as an earlier attempt found: {known["message"]}'
      )
      self.console.note(text)
      self.writer.event(
        'smaller_microbatch',
        text,
        stage=host.stage,
        step=host.step,
        tokens_per_microbatch=host.tokens_per_microbatch,
      )

  def rewind(self) -> None:
    """Back to the last checkpoint, where a new process would begin."""
    lost = self.host.step
    self.resources.close()
    self.restored_step = self.checkpoints.latest_step()
    self.host = _progress(self.checkpoints, self.restored_step, self.config)
    self.writer.event(
      'rollback',
      f'back from step {lost} to step {self.host.step}',
      stage=self.host.stage,
      step=self.host.step,
    )
    self.heed_memory()

  def save(self, arrays: types.PyTree) -> None:
    """Writes a checkpoint of arrays and host state under the current step."""
    began = time.time()
    self.host.wall_time_s = began - self.started
    checkpoint.save(
      self.checkpoints, self.host.step, arrays, self.host.to_json()
    )
    self.writer.event(
      'checkpoint',
      f'saved step {self.host.step}',
      stage=self.host.stage,
      step=self.host.step,
      seconds=time.time() - began,
    )

  def log(self, values: dict[str, float]) -> None:
    """Writes the metrics of the current step and shows them."""
    host = self.host
    self.writer.metrics(host.stage, host.step, values)
    self.console.step(host.step, values)
    host.last |= values

  def validate(
    self,
    setup: setup_lib.Setup,
    relayout: Callable[[types.PyTree], types.PyTree],
    params: types.PyTree,
  ) -> dict[str, float]:
    """Evaluates a policy; writes and shows samples, remembers the best."""
    config, host = setup.config, self.host
    values, rows, events = evaluate.evaluate(
      relayout(params),
      setup.validation,
      setup.tokenizer,
      setup.rewards,
      setup.reward_weights,
      islands=setup.islands,
      seed=config.seed,
      stage=setup.name,
      step=host.step,
      stop_strings=config.rollout.stop_strings,
      timeout_s=config.reward_timeout_s,
      default=config.reward_on_timeout,
      **setup.sampler(1),
    )
    self.events(events, host.step)
    self.writer.samples(rows)
    self.console.samples(rows)
    host.last |= values
    name = config.evaluation.best_metric
    value = values.get(name)
    if value is not None and value > host.best.get('value', -np.inf):
      host.best = dict(name=name, value=value, step=host.step)
    return values

  def validates_before(self, setup: setup_lib.Setup, restored: bool) -> bool:
    """Whether to evaluate before the first step of a stage."""
    if not setup.validation or not setup.rewards:
      return False
    evaluation = setup.config.evaluation
    return evaluation.only or (not restored and evaluation.before_train)

  def log_before(self, values: dict[str, float]) -> None:
    """Writes an evaluation that belongs to no new step."""
    self.writer.metrics(self.host.stage, self.host.step, values)
    self.console.evaluated(values)

  def due(self, every: int, setup: setup_lib.Setup) -> bool:
    """True every so many steps, and at the end of the stage; 0: only then."""
    done = self.host.step - setup.first_step
    at_end = done == setup.numbers.steps
    return at_end or (every > 0 and done % every == 0)

  def add_step(
    self, scores: np.ndarray, rejected: np.ndarray, tokens: int
  ) -> None:
    """Adds a step's scores, rejected sequences and tokens to the totals."""
    add_scores(self.host, scores)
    self.host.dropped_sequences += int(rejected.sum())
    self.host.tokens += int(tokens)

  def count_skipped(self, values: dict[str, float]) -> None:
    """Notes updates whose gradient was not finite."""
    for role in ('actor', 'critic'):
      count = int(values.get(f'{role}/skipped_updates', 0))
      if count:
        self.host.skipped_updates += count
        self.writer.event(
          'skipped_update',
          f'{count} {role} updates had a gradient that is not finite and'
          ' were skipped',
          stage=self.host.stage,
          step=self.host.step,
          count=count,
        )

  def watch_kl(self, values: dict[str, float]) -> None:
    """Warns when the mean of k1 stays below 0.

    Over samples of the policy that mean is a divergence, which is never
    negative: a long run of negative ones says that the samples are not the
    policy's (top-k or top-p that cut much, or a sampler that is off).
    """
    value = values.get('kl/k1')
    if value is None:
      return
    self.host.negative_kl_steps += 1
    if not value < 0:
      self.host.negative_kl_steps = 0
    if self.host.negative_kl_steps == NEGATIVE_KL_STEPS:
      text = (
        f'the mean of log pi - log pi_ref was negative for {NEGATIVE_KL_STEPS}'
        ' steps in a row: the samples do not come from the policy that is'
        ' trained; look at rollout.top_k, top_p and'
        ' training/rollout_probs_diff_max'
      )
      self.console.note(f'warning: {text}')
      self.writer.event(
        'warning', text, stage=self.host.stage, step=self.host.step
      )

  def events(self, events: list[dict[str, Any]], step: int) -> None:
    """Writes events of rewards and the like, with stage and step."""
    for event in events:
      self.writer.event(**event, stage=self.host.stage, step=step)

  def finish(self, reason: str, total_steps: int) -> dict[str, Any]:
    """Writes `summary.json`."""
    host = self.host
    summary = dict(
      exit_reason=reason,
      step=host.step,
      steps=total_steps,
      stage=host.stage,
      wall_time_s=time.time() - self.started,
      tokens=host.tokens,
      best=host.best,
      last=host.last,
      score=_moments(host.scores),
      skipped_updates=host.skipped_updates,
      dropped_sequences=host.dropped_sequences,
      devices=f'{jax.device_count()} x {jax.devices()[0].device_kind}',
      jax=jax.__version__,
    )
    self.writer.summary(summary)
    return summary


def add_scores(host: state_lib.HostState, scores: np.ndarray) -> None:
  """Adds the finite scores of a step to the running statistics (Chan 1979)."""
  scores = np.asarray(scores, np.float64)
  scores = scores[np.isfinite(scores)]
  if not len(scores):
    return
  old = host.scores
  count = old['count'] + len(scores)
  delta = scores.mean() - old['mean']
  host.scores = dict(
    count=count,
    mean=old['mean'] + delta * len(scores) / count,
    m2=old['m2']
    + float(((scores - scores.mean()) ** 2).sum())
    + delta**2 * old['count'] * len(scores) / count,
  )


def _moments(scores: dict[str, float]) -> dict[str, float]:
  count = scores['count']
  std = (scores['m2'] / (count - 1)) ** 0.5 if count > 1 else 0.0
  return dict(count=count, mean=scores['mean'], std=std)


def show_finished(workdir: pathlib.Path) -> bool:
  """Whether the run in `workdir` reached its last step; prints its summary."""
  path = workdir / writers.SUMMARY
  if not path.exists():
    return False
  summary = json.loads(path.read_text())
  if summary['exit_reason'] != 'finished':
    return False
  print(f'{workdir} holds the finished run of this config:')
  with console_lib.Console(0, []) as console:
    console.finish(_short(summary))
  return True


def introduce(
  run: Run, setups: list[setup_lib.Setup], notes: list[str]
) -> None:
  """Prints the resolved config and the derived numbers of every stage."""
  for key, value in workdir_lib.flatten(run.config).items():
    run.console.note(f'{key:<44}{value}')
  table = parameter_overview.get_parameter_overview(
    spec.abstract(decoder.specs(setups[0].model)), include_stats=False
  )
  for line in table.splitlines():
    run.console.note(line)
  for line in notes:
    run.console.note(line)
    run.writer.event('config', line)
  for setup in setups:
    for line in setup_lib.describe(setup):
      run.console.note(line)
  if run.restored_step is not None:
    run.console.note(f'resumes after step {run.restored_step}')


def remaining(run: Run, setups: list[setup_lib.Setup]) -> list[setup_lib.Setup]:
  """The stages from the one that a checkpoint was made in."""
  names = [setup.name for setup in setups]
  begin = 0
  if run.restored_step is not None:
    begin = names.index(run.host.stage)
  if setups[-1].config.evaluation.only:
    # One policy: the checkpoint's, else the one that the run would start from.
    return setups[begin : begin + 1] if run.restored_step else setups[-1:]
  return setups[begin:]


def conclude(run: Run, reason: str, total_steps: int) -> None:
  """Writes summary and report; ends the display with what to do next.

  Args:
    run: at its end, whatever ended it.
    reason: 'finished', 'evaluated', 'interrupted' or the error.
    total_steps: of all stages.
  """
  run.resources.close()
  workdir = run.workdir
  if reason == 'evaluated':  # the summary stays that of the training
    run.console.finish(run.host.last)
    run.writer.close()
    return
  summary = run.finish(reason, total_steps)
  try:
    if multihost.is_primary():
      report.write(workdir)
  except Exception as error:  # a picture must not change how a run ended
    run.writer.event('warning', f'no report.html: {error}')
  commands = [f'python launch/report.py --workdir={workdir}']
  if summary['exit_reason'] == 'finished':
    python = sys.executable
    commands = [
      f'{python} -m http.server --directory {workdir}  # report.html',
      f'tail -n 3 {workdir / "samples.jsonl"}',
      f'{python} launch/train.py --config=configs/ppo_smollm2_arithmetic.py'
      ' --config.model.path=MODEL_FOLDER --workdir=runs/smollm2',
    ]
  run.console.finish(_short(summary), commands)
  run.writer.close()


def _short(summary: dict[str, Any]) -> dict[str, Any]:
  """The lines of a summary that fit a terminal."""
  short = {
    key: summary[key]
    for key in ('exit_reason', 'step', 'steps', 'wall_time_s', 'tokens')
  }
  best = summary['best']
  if best:
    short[f'best {best["name"]} (step {best["step"]})'] = best['value']
  last = summary['last']
  names = [name for name in last if name.startswith('val/')]
  for name in (*names, 'critic/score/mean', 'kl/reference'):
    if name in last:
      short[f'last {name}'] = last[name]
  return short


def open_run(
  workdir: pathlib.Path,
  config: dict[str, Any],
  setups: list[setup_lib.Setup],
  *,
  keep: int,
  tensorboard: bool,
  wandb: str,
  began: float,
) -> Run:
  """Opens files and checkpoints; goes on from the newest checkpoint.

  Args:
    workdir: checked by `check_workdir`.
    config: resolved, JSON-able.
    setups: all stages.
    keep: checkpoints that stay.
    tensorboard: also write TensorBoard files.
    wandb: project, '' is off.
    began: `time.time()` when this process began to work on the run.
  """
  writer = writers.RunWriter(
    workdir,
    primary=multihost.is_primary(),
    tensorboard=tensorboard,
    wandb=dict(project=wandb, name=workdir.name) if wandb else None,
  )
  again = (workdir / writers.CONFIG).exists()
  writer.config(config)
  checkpoints = checkpoint.manager(workdir, keep=keep)
  # Seen by process 0: a shared file system may show others an older state.
  step = multihost.gather(setups[0].islands, checkpoints.latest_step())[0]
  host = _progress(checkpoints, step, config)
  if step is not None:
    writer.event(
      'resume', f'goes on after step {step}', stage=host.stage, step=step
    )
  elif again:
    writer.event('restart', 'no checkpoint yet: starts from the beginning')
  total = sum(setup.numbers.steps for setup in setups)
  run = Run(
    workdir=workdir,
    config=config,
    writer=writer,
    console=console_lib.Console(
      total, [setup.name for setup in setups], enabled=multihost.is_primary()
    ),
    checkpoints=checkpoints,
    host=host,
    restored_step=step,
    started=began - host.wall_time_s,
  )
  run.heed_memory()
  return run


def _progress(checkpoints, step, config) -> state_lib.HostState:
  """The host state of a checkpoint; that of a run that begins if None."""
  if step is None:
    return state_lib.HostState(seed=config['seed'])
  return state_lib.HostState.from_json(
    checkpoint.restore_host(checkpoints, step)
  )
