"""Samples: python launch/sample.py --model=MODEL --prompt='Once upon a time'.

  --model=MODEL        a Hugging Face folder, a hub id, or the workdir of a run:
                       its newest checkpoint, else its export
  --prompt=TEXT        may be repeated
  --file=PATH          .jsonl: objects with the key "prompt", a text or a list
                       of chat messages; any other name: one prompt a line
  --chat               uses the chat template; without --prompt and --file it
                       talks: /reset forgets the conversation, /exit ends
  --output=out.jsonl   prompt, response, ids, log-probs, finish reason

A single answer is shown as it comes, several in the order of their prompts.
Answers go to standard output, everything else to standard error.  Exits with 0,
or with 2 where something was refused.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import time
from typing import Any
import unicodedata

# Only its tokenizers are used: it need not say that there is no torch.
os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')

from absl import app  # noqa: E402
from absl import flags  # noqa: E402
from absl import logging  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402

from rlhf_jax.data import sources  # noqa: E402
from rlhf_jax.monitor import writers  # noqa: E402
from rlhf_jax.sampling import conversation  # noqa: E402
from rlhf_jax.sampling import text as text_lib  # noqa: E402
from rlhf_jax.trainers import policy as policy_lib  # noqa: E402
from rlhf_jax.trainers import workdir as workdir_lib  # noqa: E402

_HELP = dict(
  chat='Use the chat template; unset: as the run does.',
  system='System message; unset: that of the run.',
  temperature='Divides the logits; 0 is greedy.',
  top_k='Likeliest tokens to draw from; 0 is all.',
  top_p='Probability mass to draw from; 1 is all.',
  min_p="Least share of the likeliest token's probability; 0 is off.",
  max_new_tokens='Tokens; unset: 256, or what the model has room for.',
  min_new_tokens='No answer ends before so many tokens.',
  stop='A string that ends an answer',
  ban='A string of one token that is never drawn',
  samples='Answers to each prompt.',
  slots='Sequences that decode at the same time.',
  dtype='float32, bfloat16 or auto (by the platform).',
)


def sample(
  model: str,
  settings: text_lib.Settings,
  *,
  prompt: Sequence[str] = (),
  file: str = '',
  output: str = '',
  seed: int = 0,
) -> int:
  """Answers prompts, or talks (`settings.conversation`).

  Args:
    model: folder, hub id or workdir.
    settings: how prompts are put, and how answers are drawn.
    prompt: prompts.
    file: more of them, '' for none.
    output: file for the answers as JSON lines, '' for none.
    seed: of the first answer, see `text.sequence_seeds`.

  Returns:
    The exit code.

  Raises:
    Refused: it cannot be done as asked; nothing was compiled or written.
  """
  # ---- Checks: all of them before anything is compiled or written ----------
  try:
    text_lib.sequence_seeds(seed, 1)
    prompts = _prompts(prompt, file)
    if not prompts and not settings.conversation:
      raise ValueError('no prompt: give --prompt, --file, or --chat to talk')
    path = _free(output) if output else None
    # No more slots, and so no more devices, than there are answers.
    answers = max(len(prompts), 1) * settings.samples
    settings = dataclasses.replace(settings, slots=min(settings.slots, answers))
    sampler = text_lib.Sampler(policy_lib.find(model), settings)
    prompt_ids = [
      _encode(sampler, one, number) for number, one in enumerate(prompts, 1)
    ]
    sampler.load()
  except (ValueError, FileNotFoundError) as error:
    raise workdir_lib.Refused(str(error)) from error

  # ---- Answers --------------------------------------------------------------
  _note(sampler.describe())
  with open(path, 'xb') if path else contextlib.nullcontext() as lines:
    if settings.conversation:
      records = talk(sampler, seed)
    else:
      records = answer(sampler, prompts, prompt_ids, seed)
    for record in records:
      if lines:
        _write(lines, record)
  if path:
    _note(f'wrote {path}')
  return 0


def answer(
  sampler: text_lib.Sampler,
  prompts: Sequence[text_lib.Prompt],
  prompt_ids: Sequence[np.ndarray],
  seed: int,
) -> Iterator[dict[str, Any]]:
  """Shows the answers to all prompts in order; yields a record of each."""
  samples = sampler.settings.samples
  count = len(prompts) * samples
  seeds = text_lib.sequence_seeds(seed, count)
  with Clock() as clock:
    if count == 1:
      alone = text_lib.Answer()
      for text in sampler.speak(prompt_ids[0], seed, alone):
        _show(text)
      _show('\n')
      answers = [alone]
    else:
      answers = sampler.answers(prompt_ids, seeds)
    for n, one in enumerate(answers):
      clock.tokens += len(one.ids)
      if count > 1:
        _show(f'[{n + 1}/{count}] {_title(prompts[n // samples])}\n')
        _show(f'{sampler.text(one)}\n\n')
      yield _record(
        sampler, prompts[n // samples], prompt_ids[n // samples], one,
        sample=n % samples, seed=seeds[n],
      )  # fmt: skip
  _note(str(clock))


def talk(sampler: text_lib.Sampler, seed: int) -> Iterator[dict[str, Any]]:
  """Answers what is typed until /exit or the end; yields a record of each."""
  with contextlib.suppress(ImportError):
    import readline  # noqa: F401 - gives `input` editing and a history
  _note('/reset forgets the conversation, /exit ends')
  said, total, turns = conversation.Conversation(sampler), Clock(), 0
  sampler.prepare(1)
  while (line := _read()) not in (None, '/exit'):
    if line == '/reset':
      said = conversation.Conversation(sampler)
      _note('forgotten')
    elif line.startswith('/'):
      _note(f'{line} is not one of /reset, /exit')
    if not line or line.startswith('/'):
      continue
    try:
      asked, ids = said.ask(line)
    except ValueError as error:
      _note(f'error: {error}; /reset begins anew')
      continue
    if said.rewritten:
      _note(
        'the chat template rewrites earlier answers: they are put to the model'
        ' from their text, not by the tokens that it said'
      )
    try:
      sampler.wait()
    except KeyboardInterrupt:  # as if never asked
      _show('\n')
      continue
    turns += 1
    of_turn = text_lib.sequence_seeds(seed, turns)[-1]
    one = text_lib.Answer()
    with Clock() as clock:
      try:
        for text in sampler.speak(ids, of_turn, one):
          _show(text)
      except KeyboardInterrupt:  # what was said stays said
        one.finish = 'interrupted'
    clock.tokens = len(one.ids)
    total.add(clock)
    _show('\n')
    _note(f'({clock}{_ENDS.get(one.finish, "")})')
    if not one.ids:  # interrupted before the first word: as if never asked
      continue
    said.answered(asked, ids, one)
    # Before the conversation grows out of its programs, there are the next.
    sampler.prepare(2 * said.tokens)
    yield _record(sampler, asked, ids, one, sample=0, seed=of_turn)
  if turns > 1:
    _note(f'all {turns} answers: {total}')


_ENDS = {'length': '; cut by the length limit', 'interrupted': '; interrupted'}


class Clock:
  """Tokens and seconds of sampling; compiling is counted apart."""

  def __init__(self):
    self.tokens, self.seconds, self.compiling = 0, 0.0, 0.0

  def __enter__(self) -> 'Clock':
    jax.monitoring.register_event_duration_secs_listener(self._heard)
    self._began = time.perf_counter()
    return self

  def __exit__(self, *unused_exception: Any) -> None:
    self.seconds = time.perf_counter() - self._began - self.compiling
    jax.monitoring.unregister_event_duration_listener(self._heard)

  def _heard(self, event: str, seconds: float, **unused: Any) -> None:
    if event.startswith('/jax/core/compile/'):
      self.compiling += seconds

  def add(self, other: 'Clock') -> None:
    self.tokens += other.tokens
    self.seconds += other.seconds
    self.compiling += other.compiling

  def __str__(self) -> str:
    rate = self.tokens / max(self.seconds, 1e-9)
    text = f'{self.tokens} tokens in {self.seconds:.2f} s: {rate:,.1f} tokens/s'
    if self.compiling >= 0.005:
      text += f', and {self.compiling:.2f} s of compiling'
    return text


# ---- In and out --------------------------------------------------------------


def _prompts(texts: Sequence[str], file: str) -> list[text_lib.Prompt]:
  """All prompts, in order."""
  prompts = list(texts)
  path = pathlib.Path(file).expanduser()
  if path.suffix == '.jsonl':
    read = sources.jsonl(path=str(path), answer_key=None)
    prompts += [example.prompt for example in read]
  elif file:
    try:
      lines = path.read_text('utf-8').split('\n')
    except (OSError, UnicodeDecodeError) as error:
      raise ValueError(f'cannot read {file}: {error}') from error
    lines = [line for line in lines if line.strip()]
    if not lines:
      raise ValueError(f'{file} has no line with a prompt')
    prompts += lines
  return prompts


def _encode(sampler, prompt, number: int) -> np.ndarray:
  try:
    return sampler.encode(prompt)
  except ValueError as error:
    raise ValueError(f'prompt {number}: {error}') from error


def _free(output: str) -> pathlib.Path:
  path = pathlib.Path(output).expanduser()
  if path.exists():
    raise ValueError(f'--output={path} exists: name another file')
  if not path.parent.is_dir():
    raise ValueError(f'--output={path}: there is no folder {path.parent}')
  return path


def _record(sampler, prompt, ids, one, *, sample, seed) -> dict[str, Any]:
  return dict(
    prompt=prompt,
    prompt_ids=ids,
    response=sampler.text(one),
    ids=one.ids,
    logprobs=one.logprobs,
    finish_reason=one.finish,
    sample=sample,
    seed=seed,
  )


def _write(lines, record: dict[str, Any]) -> None:
  text = json.dumps(writers.plain(record), ensure_ascii=False, allow_nan=False)
  lines.write(text.encode('utf-8', 'replace') + b'\n')
  lines.flush()


def _read() -> str | None:
  """What is typed, None at the end."""
  try:
    return input('> ' if sys.stdin.isatty() else '').strip()
  except (EOFError, KeyboardInterrupt):
    if sys.stdin.isatty():
      print()
    return None


def _show(text: str) -> None:
  """Prints text of a model, as it is but for control characters.

  They could move the cursor or clear the screen, and are shown as \\x1b.
  """
  harmless = (
    c
    if c in '\n\t' or unicodedata.category(c) != 'Cc'
    else c.encode('unicode_escape').decode()
    for c in text
  )
  print(''.join(harmless), end='', flush=True)


def _title(prompt: text_lib.Prompt) -> str:
  text = prompt if isinstance(prompt, str) else prompt[-1]['content']
  text = ' '.join(text.split())
  # The tail of a long prompt is what was asked.
  return text if len(text) <= 60 else f'...{text[-57:]}'


def _note(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


# ---- The command line --------------------------------------------------------


def _define_flags() -> None:
  flags.DEFINE_string('model', None, 'Model folder, hub id, or workdir.')
  flags.DEFINE_multi_string('prompt', [], 'A prompt')
  flags.DEFINE_string('file', '', 'Prompts: .jsonl, or one a line.')
  flags.DEFINE_string('output', '', 'New file for the answers, JSON lines.')
  flags.DEFINE_integer(
    'seed', 0, 'Of the first answer; the others have their own, see --output.'
  )
  define = dict(
    chat=flags.DEFINE_bool,
    top_k=flags.DEFINE_integer,
    max_new_tokens=flags.DEFINE_integer,
    min_new_tokens=flags.DEFINE_integer,
    samples=flags.DEFINE_integer,
    slots=flags.DEFINE_integer,
    temperature=flags.DEFINE_float,
    top_p=flags.DEFINE_float,
    min_p=flags.DEFINE_float,
    stop=flags.DEFINE_multi_string,
    ban=flags.DEFINE_multi_string,
    system=flags.DEFINE_string,
    dtype=flags.DEFINE_string,
  )
  default = text_lib.Settings()
  for name, text in _HELP.items():
    define[name](name, getattr(default, name), text)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments: {argv[1:]}', exitcode=2)
  logging.set_verbosity(logging.WARNING)  # Orbax narrates every restore
  flag = {name: flags.FLAGS[name].value for name in flags.FLAGS}
  settings = text_lib.Settings(
    conversation=bool(flag['chat']) and not flag['prompt'] and not flag['file'],
    **{name: flag[name] for name in _HELP},
  )
  names = ('model', 'prompt', 'file', 'output', 'seed')
  try:
    code = sample(settings=settings, **{name: flag[name] for name in names})
  except workdir_lib.Refused as error:
    _note(f'error: {error}')
    code = 2
  sys.exit(code)


if __name__ == '__main__':
  _define_flags()
  flags.mark_flag_as_required('model')
  app.run(main)
