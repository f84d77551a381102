"""Turns a prompt into token ids, as plain text or through a chat template."""

from collections.abc import Mapping, Sequence
import functools
import os

from rlhf_jax.data import tokenizer as tokenizer_lib

SLOT = '{prompt}'


def render(
  prompt: str | Sequence[Mapping[str, str]],
  tokenizer,
  *,
  chat: bool,
  prompt_format: str = SLOT,
  system: str = '',
) -> list[int]:
  """Encodes a prompt, ready to be continued by the model.

  Plain text gets the special tokens that the tokenizer puts in front of a
  text, and BOS once at most; whatever it would put behind is left out.  A
  chat gets exactly what its template writes, with the opening of the
  assistant's turn.

  Args:
    prompt: a text, or messages `{'role': ..., 'content': ...}` (`chat` only).
    tokenizer: from `tokenizer.load`.
    chat: use the tokenizer's chat template.
    prompt_format: a text around '{prompt}', e.g. worked examples before it;
      other braces are left alone.  For text prompts only.
    system: the content of a system message put first; `chat` only.

  Returns:
    The token ids.

  Raises:
    ValueError: the arguments contradict each other, there is no template, it
      is not stable under continuation, or the prompt has no token.
  """
  if prompt_format.count(SLOT) != 1:
    raise ValueError(
      f'prompt_format must contain {SLOT} once, got {prompt_format!r}'
    )
  is_text = isinstance(prompt, str)
  if not is_text and prompt_format != SLOT:
    raise ValueError(
      'prompt_format is for text prompts; these are messages: write the format'
      ' into them'
    )
  if is_text:
    prompt = prompt_format.replace(SLOT, prompt)
  if chat:
    messages = [{'role': 'user', 'content': prompt}] if is_text else prompt
    ids = _render_chat(_with_system(messages, system), tokenizer)
  elif not is_text:
    raise ValueError(
      'the prompt is a list of messages: set chat=True to use the chat template'
    )
  elif system:
    raise ValueError(
      f'a system message needs chat=True, got system={system!r} with chat=False'
    )
  else:
    ids = _render_text(prompt, tokenizer)
  if not ids:
    raise ValueError(
      f'the prompt {prompt!r} has no token, so there is nothing to predict'
      ' from: drop it, or put a token in front with prompt_format'
    )
  return ids


def between(
  messages: Sequence[Mapping[str, str]], tokenizer, *, system: str = ''
) -> list[int] | None:
  """What the template writes from the end of an answer to the next one.

  The prompt of the answer, the answer and this are the prompt of the next one.

  Args:
    messages: the last two are the answer, and what is said to it.
    tokenizer: from `tokenizer.load`.
    system: as for `render`.

  Returns:
    Token ids; None where the template writes an answer otherwise once others
    follow (it drops thoughts, for example), but for spaces around it.
  """
  messages = _with_system(messages, system)
  write = functools.partial(
    tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True
  )
  before, whole = write(messages[:-2]), write(messages)
  content = messages[-2]['content']
  for said in (content, content.strip()):
    if whole.startswith(before + said):
      rest = whole[len(before + said) :]
      return tokenizer_lib.continuation(tokenizer, rest)
  return None


def _render_text(text: str, tokenizer) -> list[int]:
  """Encodes with the tokenizer's own leading special tokens."""
  ids = tokenizer.encode(text, add_special_tokens=False)
  leading = list(_leading_specials(tokenizer))
  if ids[: len(leading)] == leading:  # the text already has them
    return ids
  return leading + ids


@functools.lru_cache(maxsize=8)
def _leading_specials(tokenizer) -> tuple[int, ...]:
  """What the tokenizer puts before a text, e.g. [BOS]."""
  bare = tokenizer.encode('a', add_special_tokens=False)
  full = tokenizer.encode('a', add_special_tokens=True)
  for start in range(len(full) - len(bare) + 1):
    if full[start : start + len(bare)] == bare:
      return tuple(full[:start])
  raise ValueError(
    f'cannot tell what the tokenizer adds to a text: it encodes it as {full}'
    f' with and {bare} without special tokens'
  )


def _with_system(messages, system: str) -> list[dict[str, str]]:
  messages = [dict(message) for message in messages]
  for message in messages:
    if not {'role', 'content'} <= set(message):
      raise ValueError(
        f"a message needs the keys 'role' and 'content', got {message}"
      )
  if not system:
    return messages
  if messages and messages[0]['role'] == 'system':
    raise ValueError(
      f'the prompt has its own system message; set system to the empty string'
      f' (got {system!r}) or take it out of the data'
    )
  return [{'role': 'system', 'content': system}, *messages]


def _render_chat(messages: list[dict[str, str]], tokenizer) -> list[int]:
  """Applies the chat template, once checked to be continued as it stands."""
  if tokenizer.chat_template is None:
    raise ValueError(
      'the tokenizer has no chat template: set chat=False, or take the'
      ' tokenizer of an instruction-tuned model'
    )
  if not messages or messages[-1]['role'] == 'assistant':
    raise ValueError(
      'a prompt ends with the message that is to be answered, got'
      f' {messages[-1:]}'
    )
  text = tokenizer.apply_chat_template(
    messages, tokenize=False, add_generation_prompt=True
  )
  _check_stable(text, messages, tokenizer)
  # A template that wants BOS writes it: special tokens on top would double it.
  return tokenizer.encode(text, add_special_tokens=False)


def _check_stable(text: str, messages, tokenizer) -> None:
  """Checks that an answer leaves the prompt before it as it was.

  What is sampled from `text` is trained as a continuation of `text`.  Under a
  template that rewrites earlier turns, drops a think tag or moves the system
  prompt once an answer is there, a later turn would see another text.
  """
  turn = [*messages, {'role': 'assistant', 'content': 'x'}]
  whole = tokenizer.apply_chat_template(turn, tokenize=False)
  if whole.startswith(text):
    return
  common = len(os.path.commonprefix([text, whole]))
  raise ValueError(
    'the chat template is not stable: with an answer it does not begin with'
    f' the prompt.  They part at character {common}:'
    f' {text[common : common + 40]!r} against'
    f' {whole[common : common + 40]!r}.  Use a template that only appends (set'
    ' tokenizer.chat_template), or chat=False with a prompt_format'
  )
