"""Text in, text out: asks a policy and gives its answers as they come."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent import futures
import dataclasses
import itertools
import math

import jax
import numpy as np

from rlhf_jax import keys
from rlhf_jax.data import chat as chat_lib
from rlhf_jax.data import tokenizer as tokenizer_lib
from rlhf_jax.models import decoder
from rlhf_jax.sampling import engine
from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.trainers import policy as policy_lib
from rlhf_jax.trainers import setup as setup_lib

# A text, or chat messages {'role', 'content'}.
Prompt = str | Sequence[Mapping[str, str]]

# Tokens a sequence between two looks of the host: few where somebody reads.
STREAM_CHUNK, CHUNK = 4, 64
# Prompts get room for so many tokens at least; a conversation needs others
# whenever it has doubled, see `Sampler.prepare`.
CONVERSATION_TOKENS, PROMPT_TOKENS = 256, 32
DEFAULT_NEW_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class Settings:
  """How prompts are put, and how answers are drawn."""

  chat: bool | None = None  # use the chat template; None: as the run does
  system: str | None = None  # system message; None: that of the run
  conversation: bool = False  # prompts are turns of one, and grow
  temperature: float = 1.0  # divides the logits; 0 is greedy
  top_k: int = 0  # likeliest tokens to draw from; 0 is all
  top_p: float = 1.0  # probability mass to draw from; 1 is all
  min_p: float = 0.0  # least share of the likeliest token's probability
  max_new_tokens: int | None = None  # None: 256, or what the model has room for
  min_new_tokens: int = 0  # no answer ends before
  stop: Sequence[str] = ()  # end an answer, beside those of the run
  ban: Sequence[str] = ()  # strings of one token each, never drawn
  samples: int = 1  # answers to each prompt
  slots: int = 64  # sequences that decode at the same time
  dtype: str = 'auto'  # float32 | bfloat16 | auto (by the platform)

  def check(self) -> None:
    """Raises a ValueError if a number is out of range."""
    s = self
    for name, ok, expected in (
      ('temperature', 0 <= s.temperature < math.inf, '0 (greedy) or more'),
      ('top_k', s.top_k >= 0, '0 (off) or more'),
      ('top_p', 0 < s.top_p <= 1, 'above 0 and at most 1 (off)'),
      ('min_p', 0 <= s.min_p <= 1, '0 (off) to 1'),
      (
        'max_new_tokens',
        s.max_new_tokens is None or s.max_new_tokens >= 1,
        '1 or more',
      ),
      (
        'min_new_tokens',
        0 <= s.min_new_tokens <= (s.max_new_tokens or math.inf),
        f'0 or more, and at most max_new_tokens={s.max_new_tokens}',
      ),
      ('stop', all(s.stop), 'no empty string'),
      ('samples', s.samples >= 1, '1 or more'),
      ('slots', s.slots >= 1, '1 or more'),
      (
        'samples',
        s.samples == 1 or not s.conversation,
        '1, since a conversation goes on from one answer',
      ),
    ):
      if not ok:
        raise ValueError(f'{name}={getattr(s, name)}: expected {expected}')


@dataclasses.dataclass
class Answer:
  """A response while it grows."""

  ids: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  finish: str | None = None  # 'stop' | 'length', or None: it goes on


class Sampler:
  """A policy's weights on the devices, and what is asked of it."""

  def __init__(self, policy: policy_lib.Policy, settings: Settings):
    """Checks the settings against the policy; reads nothing yet.

    Raises:
      ValueError: they do not go together.
    """
    settings.check()
    self.policy, self.settings = policy, settings
    self.positions = policy.config.max_positions
    self.dtype = setup_lib.dtype(settings.dtype)
    self.stop = (*settings.stop, *policy.stop_strings)
    self._chat = policy.chat if settings.chat is None else settings.chat
    self._system = settings.system
    if settings.system is None:
      self._system = policy.system if self._chat else ''
    # The run's format goes with the run's way of putting prompts.
    as_the_run = self._chat == policy.chat and not settings.conversation
    self._format = policy.prompt_format if as_the_run else chat_lib.SLOT
    self._bias = {
      token: -np.inf for token in _banned(policy.tokenizer, settings.ban)
    }
    self.mesh = mesh_lib.make(devices=jax.devices()[: settings.slots])
    self._params = None
    self._thread = futures.ThreadPoolExecutor(1)
    self._prepared: dict[engine.Shape, futures.Future[int]] = {}
    if settings.conversation:
      self.encode('Hello')

  def load(self) -> None:
    """Reads the weights and puts them on the devices.

    Raises:
      ValueError: the files do not fit the model.
      FileNotFoundError: there are none.
    """
    specs = decoder.specs(self.policy.config)
    relayout = engine.relayout_program(self.mesh, specs, self.dtype)
    self._params = relayout(self.policy.load(self.mesh, self.dtype))

  def encode(self, prompt: Prompt) -> np.ndarray:
    """The token ids of a prompt, [P] int32.

    Raises:
      ValueError: it cannot be put to this policy, or leaves no room for the
        answer.
    """
    # Where a tokenizer puts BOS first, that alone is a prompt.
    if not prompt and (self._chat or not self.policy.tokenizer.encode('')):
      raise ValueError('it is empty')
    ids = chat_lib.render(
      prompt,
      self.policy.tokenizer,
      chat=self._chat,
      system=self._system,
      prompt_format=self._format if isinstance(prompt, str) else chat_lib.SLOT,
    )
    return self.fitting(ids)

  def between(self, messages: Sequence[Mapping[str, str]]) -> list[int] | None:
    """See `chat.between`."""
    return chat_lib.between(
      messages, self.policy.tokenizer, system=self._system
    )

  def fitting(self, ids: Sequence[int]) -> np.ndarray:
    """A prompt as an array, [P] int32.

    Raises:
      ValueError: it leaves no room for the answer.
    """
    settings = self.settings
    wanted = max(settings.min_new_tokens, 1)
    if not settings.conversation:
      wanted = settings.max_new_tokens or wanted
    if len(ids) + wanted > self.positions:
      raise ValueError(
        f'it has {len(ids)} tokens, and with {wanted} new ones it is longer'
        f' than the {self.positions} positions of the model: shorten it, or'
        ' lower max_new_tokens'
      )
    return np.asarray(ids, np.int32)

  def pieces(
    self, prompts: Sequence[np.ndarray], seeds: np.ndarray, *, whole: bool
  ) -> Iterator[engine.Piece]:
    """Samples `samples` answers to every prompt.

    Args:
      prompts: token ids, see `encode`.
      seeds: one for each answer, see `sequence_seeds`.
      whole: give answers that have ended only, in one piece each.
    """
    longest = max(len(ids) for ids in prompts)
    settings, shape = self.settings, self._shape(longest, len(prompts), whole)
    room = self.positions - np.array([len(ids) for ids in prompts])
    limits = np.minimum(shape.max_new_tokens, room).repeat(settings.samples)
    find_stop = None
    if self.stop:
      find_stop = tokenizer_lib.stop_finder(
        self.policy.tokenizer,
        self.stop,
        min_tokens=settings.min_new_tokens,
        fresh=2 * shape.chunk,
      )
    return itertools.chain.from_iterable(
      engine.stream(
        self._params,
        prompts,
        keys.key(0, 'rollout', 0),  # the seeds tell answers apart
        config=self.policy.config,
        mesh=self.mesh,
        shape=shape,
        stop_ids=sorted(self.policy.stop_ids),
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        min_new_tokens=settings.min_new_tokens,
        max_new_tokens=limits,
        bias=self._bias,
        seeds=seeds,
        find_stop=find_stop,
        dtype=self.dtype,
        whole=whole,
      )
    )

  def answers(
    self, prompts: Sequence[np.ndarray], seeds: np.ndarray
  ) -> Iterator[Answer]:
    """Samples; the answers in the order of the prompts, each when it can be."""
    answers, given = [Answer() for _ in seeds], 0
    for piece in self.pieces(prompts, seeds, whole=True):
      _add(answers[piece.sequence], piece)
      while given < len(answers) and answers[given].finish is not None:
        yield answers[given]
        given += 1

  def speak(
    self, prompt: np.ndarray, seed: int, answer: Answer
  ) -> Iterator[str]:
    """Samples one answer; its text as it comes, in whole characters.

    Args:
      prompt: token ids, see `encode`.
      seed: of the answer.
      answer: a new one, filled as the text comes.
    """
    return self._spoken(
      self.pieces([prompt], np.array([seed], np.int32), whole=False), answer
    )

  def _spoken(self, pieces: Iterable[engine.Piece], answer) -> Iterator[str]:
    stream = tokenizer_lib.TextStream(self.policy.tokenizer, self.stop)
    given = 0
    for piece in pieces:
      _add(answer, piece)
      text = stream.push(piece.tokens)
      if answer.finish is not None:  # the rest, but no stop string
        text = self.text(answer)[given:]
      given += len(text)
      yield text

  def text(self, answer: Answer) -> str:
    """The text of an answer, without the stop string that ended it."""
    strings = self.stop if answer.finish == 'stop' else ()
    return tokenizer_lib.text(self.policy.tokenizer, answer.ids, strings)

  def describe(self) -> str:
    """The model and where it runs, in one line."""
    config, devices = self.policy.config, self.mesh.devices.flatten()
    table = jax.tree.leaves(decoder.specs(config))
    size = sum(math.prod(one.shape) for one in table)
    return (
      f'{self.policy.name}: {size:,} parameters, {self.dtype.name}'
      f' on {len(devices)} x {devices[0].device_kind}'
    )

  def prepare(self, tokens: int) -> None:
    """Begins to compile what a turn of so many tokens needs, see `wait`.

    It goes on in a thread, while a person reads and types.
    """
    shape = self._shape(min(tokens, self.positions), 1, whole=False)
    if shape in self._prepared:
      return
    self._prepared[shape] = self._thread.submit(
      engine.warm_up, self._params, config=self.policy.config, mesh=self.mesh,
      shape=shape, dtype=self.dtype,
    )  # fmt: skip

  def wait(self) -> None:
    """Waits for what `prepare` has begun."""
    for compiling in self._prepared.values():
      compiling.result()

  def _shape(self, longest: int, count: int, whole: bool) -> engine.Shape:
    """Sizes that many calls have in common: each is compiled."""
    settings = self.settings
    least = CONVERSATION_TOKENS if settings.conversation else PROMPT_TOKENS
    bucket = max(1 << (longest - 1).bit_length(), least)
    new_tokens = settings.max_new_tokens
    if new_tokens is None:
      new_tokens = max(DEFAULT_NEW_TOKENS, settings.min_new_tokens)
    return engine.Shape(
      max_prompt_tokens=min(bucket, self.positions),
      max_new_tokens=min(new_tokens, self.positions),
      slots=min(settings.slots, count * settings.samples),
      samples_per_prompt=settings.samples,
      chunk=CHUNK if whole else STREAM_CHUNK,
      max_stop_ids=max(16, len(self.policy.stop_ids)),
      max_biases=max(16, len(self._bias)),
      # A conversation grows out of the smaller ones, and somebody would wait
      # for them to be compiled.
      prompt_sizes=1 if settings.conversation else 3,
    )


def sequence_seeds(seed: int, count: int) -> np.ndarray:
  """Seeds of `count` answers, [count] int32.

  The first is `seed`, so that any answer comes again, alone, from its own
  seed.  The others are not its neighbours: runs with the seeds 0 and 1 have
  none in common.
  """
  if not 0 <= seed < 2**31:
    raise ValueError(f'seed={seed}: expected 0 to {2**31 - 1}')
  state = np.random.SeedSequence(seed).generate_state(count)
  seeds = (state >> 1).astype(np.int32)
  seeds[:1] = seed
  return seeds


def _banned(tokenizer, strings: Sequence[str]) -> list[int]:
  ids = []
  for text in strings:
    encoded = tokenizer_lib.continuation(tokenizer, text)
    if len(encoded) != 1:
      raise ValueError(
        f'ban={text!r} is {len(encoded)} tokens'
        f' {tokenizer.convert_ids_to_tokens(encoded)}, expected exactly 1'
      )
    ids += encoded
  return ids


def _add(answer: Answer, piece: engine.Piece) -> None:
  answer.ids += piece.tokens.tolist()
  answer.logprobs += piece.logprobs.tolist()
  answer.finish = piece.finish
