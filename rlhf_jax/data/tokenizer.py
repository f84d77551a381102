"""Tokenizers: one built in that needs no download, and any Hugging Face one.

Both are `transformers` fast tokenizers, so that exporting, chat templates and
everything else have one path.
"""

import bisect
from collections.abc import Callable, Sequence
import os

import numpy as np
import tokenizers
import transformers

BYTES = 'bytes'
BYTES_PAD, BYTES_BOS, BYTES_EOS = 256, 257, 258
# What a decoder writes for bytes that are no character, or not yet one.
REPLACEMENT = '\ufffd'


def load(path: str) -> transformers.PreTrainedTokenizerBase:
  """Loads a tokenizer.

  Args:
    path: 'bytes' for the built-in byte-level tokenizer (token id = byte value,
      then <pad> 256, <bos> 257, <eos> 258), a local folder, or a hub id.

  Raises:
    ValueError: there is no tokenizer at `path`; says what to do.
  """
  if path == BYTES:
    return _byte_level()
  expanded = os.path.expanduser(path)
  if os.path.isdir(expanded):
    advice = (
      'the folder should hold tokenizer.json and tokenizer_config.json; it'
      f' holds {sorted(os.listdir(expanded))}'
    )
  elif path.startswith(('/', '.', '~')) or path.count('/') > 1:
    raise ValueError(
      f'no folder {path!r}; give an existing local folder, a hub id such as'
      f" 'Qwen/Qwen2.5-0.5B-Instruct', or {BYTES!r}"
    )
  else:
    advice = (
      'it was taken for a hub id: check the spelling, the connection and, for'
      ' a gated repository, the access token; or give a local folder, or'
      f' {BYTES!r} for the built-in tokenizer'
    )
  try:
    tokenizer = transformers.AutoTokenizer.from_pretrained(
      expanded if os.path.isdir(expanded) else path
    )
  # The loader's failures share no base class: OSError, ValueError, KeyError,
  # and others for files that do not parse.
  except Exception as error:
    raise ValueError(
      f'could not load a tokenizer from {path!r} ({error}): {advice}'
    ) from error
  if not tokenizer.get_vocab():
    raise ValueError(f'the tokenizer of {path!r} is empty: {advice}')
  return tokenizer


def _byte_level() -> transformers.PreTrainedTokenizerFast:
  """A BPE without merges over the 256 bytes."""
  vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  backend.decoder = tokenizers.decoders.ByteLevel()
  # Added one by one: the ids follow the order.
  for token in ('<pad>', '<bos>', '<eos>'):
    backend.add_special_tokens([token])
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend,
    pad_token='<pad>',
    bos_token='<bos>',
    eos_token='<eos>',
    clean_up_tokenization_spaces=False,
  )


def _byte_symbols() -> list[str]:
  """The printable character by which byte-level BPE writes each byte.

  Printable Latin-1 bytes are themselves; the others take the characters from
  code point 256 on, in order.
  """
  printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
  others = [byte for byte in range(256) if byte not in printable]
  shifted = {byte: 256 + i for i, byte in enumerate(others)}
  return [chr(shifted.get(byte, byte)) for byte in range(256)]


def stop_ids(tokenizer, extra: Sequence[str] = ()) -> frozenset[int]:
  """The token ids that end a response: EOS and `extra`.

  Args:
    tokenizer: from `load`.
    extra: strings that are exactly one token each, such as '<|im_end|>' or
      a newline.

  Raises:
    ValueError: a string is not one token, or there is nothing to stop at.
  """
  if isinstance(extra, str):
    raise ValueError(
      f'extra must be a tuple of strings, got {extra!r}; write ({extra!r},)'
    )
  ids = set()
  if tokenizer.eos_token_id is not None:
    ids.add(int(tokenizer.eos_token_id))
  for text in extra:
    encoded = continuation(tokenizer, text)
    if len(encoded) != 1:
      raise ValueError(
        f'stop string {text!r} is {len(encoded)} tokens'
        f' {tokenizer.convert_ids_to_tokens(encoded)}, expected exactly 1:'
        ' generation stops at single tokens, so name one of the vocabulary'
      )
    ids.add(int(encoded[0]))
  if not ids:
    raise ValueError(
      'the tokenizer has no EOS token: name at least one stop string'
    )
  return frozenset(ids)


def continuation(tokenizer, text: str) -> list[int]:
  """Encodes text that goes on from other text: no BOS, no invented space.

  Tokenizers of the SentencePiece kind put a space before whatever they
  encode; behind a newline, which is then cut off, they do not.
  """
  anchor = tokenizer.encode('\n', add_special_tokens=False)
  ids = tokenizer.encode('\n' + text, add_special_tokens=False)
  if anchor and ids[: len(anchor)] == anchor:
    return ids[len(anchor) :]
  return tokenizer.encode(text, add_special_tokens=False)


def decode(tokenizer, ids: Sequence[int], skip_special: bool = True) -> str:
  """The text of token ids; bytes that are not UTF-8 show as U+FFFD."""
  return tokenizer.decode(
    [int(i) for i in ids],
    skip_special_tokens=skip_special,
    clean_up_tokenization_spaces=False,
  )


def stop_finder(
  tokenizer,
  strings: Sequence[str],
  *,
  min_tokens: int = 0,
  fresh: int | None = None,
) -> Callable[[np.ndarray], int | None]:
  """Looks for stop strings in the text of a response.

  Special tokens count as they are written, so '<|im_end|>' can be a stop
  string.  A match may span tokens and begin or end within one.

  Args:
    tokenizer: from `load`.
    strings: any of them ends a response.
    min_tokens: a string that is complete before so many tokens does not count.
    fresh: tokens at the end of a response, at most, that no earlier call has
      seen; only they, and a stretch before them as long as the longest string,
      are decoded.  None decodes the whole response in every call.

  Returns:
    `find_stop(ids)`: the number of tokens after which a stop string is
    complete for the first time, None if there is none.

  Raises:
    ValueError: no string, or an empty one.
  """
  strings = _stop_strings(strings)
  # A cut within a character or before a space changes up to 3 characters.
  reach = max(map(len, strings)) + 4
  read = lambda ids: decode(tokenizer, ids, skip_special=False)

  def find_stop(ids: np.ndarray) -> int | None:
    seen = 0 if fresh is None else max(len(ids) - fresh, 0)
    start = max(seen - reach, 0)
    while start > 0 and len(read(ids[start:seen])) < reach:
      start = max(start - reach, 0)
    early = max(min_tokens - 1, start)
    after = len(read(ids[start:early]).rstrip(REPLACEMENT))

    def ended(count: int) -> bool:
      return _find(read(ids[start:count]), strings, after) is not None

    if len(ids) <= early or not ended(len(ids)):
      return None
    counts = range(early + 1, len(ids))
    return early + 1 + bisect.bisect_left(counts, True, key=ended)

  return find_stop


def text(tokenizer, ids: Sequence[int], strings: Sequence[str] = ()) -> str:
  """The text of a response up to the stop string that its last token ended.

  Args:
    tokenizer: from `load`.
    ids: of the response, kept as `stop_finder` says.
    strings: the stop strings; none for a response that was cut elsewhere.
  """
  whole = decode(tokenizer, ids)
  if not strings:
    return whole
  before = decode(tokenizer, ids[:-1]).rstrip(REPLACEMENT)
  return whole[: _find(whole, strings, len(before))]


class TextStream:
  """Text of tokens as they come, in whole characters.

  All pieces together are the text of all tokens, special ones left out.  Held
  back is what later tokens may still change: bytes that are not yet a
  character, and the beginning of a stop string.
  """

  def __init__(self, tokenizer, stop: Sequence[str] = ()):
    """Begins a text.

    Args:
      tokenizer: from `load`.
      stop: strings of which no beginning is given out while it may go on.
    """
    self._tokenizer = tokenizer
    self._stop = _stop_strings(stop) if stop else ()
    # Decoding the last few tokens is enough: those that the next one may join
    # to a character, and one with text before them, because the first token of
    # a text loses its space.
    self._window: list[int] = []
    self._shown = ''  # text of the window that was read
    self._held = ''  # text that was read, but not given out

  def push(self, ids: Sequence[int]) -> str:
    """Adds tokens; returns the text that has become final."""
    self._window += [int(i) for i in ids]
    text = decode(self._tokenizer, self._window)
    ready = text.rstrip(REPLACEMENT)
    # Half a character can make a tokenizer doubt the characters before it.
    if ready.startswith(self._shown):
      self._held += ready[len(self._shown) :]
      self._shown = ready
      if ready == text:
        self._forget()
    final = len(self._held) - _begun(self._held, self._stop)
    given, self._held = self._held[:final], self._held[final:]
    return given

  def finish(self) -> str:
    """The rest of the text; a character cut short shows as U+FFFD."""
    text = decode(self._tokenizer, self._window)
    rest = REPLACEMENT
    if text.startswith(self._shown):
      rest = text[len(self._shown) :]
    rest = self._held + rest
    self._window, self._shown, self._held = [], '', ''
    return rest

  def _forget(self) -> None:
    """Keeps as few tokens as have a text that the whole window ends with."""
    count = 1
    while count < len(self._window):
      tail = decode(self._tokenizer, self._window[-count:])
      if tail.strip() and self._shown.endswith(tail):
        self._window, self._shown = self._window[-count:], tail
        return
      count *= 2


def _stop_strings(strings: Sequence[str]) -> tuple[str, ...]:
  if isinstance(strings, str) or not strings or not all(strings):
    raise ValueError(
      f'expected a tuple of stop strings, none of them empty, got {strings!r}'
    )
  return tuple(strings)


def _find(text: str, strings: Sequence[str], after: int) -> int | None:
  """Where the first of the strings begins that ends behind `after`."""
  found = [
    text.find(string, max(after - len(string) + 1, 0)) for string in strings
  ]
  return min((at for at in found if at >= 0), default=None)


def _begun(text: str, strings: Sequence[str]) -> int:
  """Length of the longest end of `text` with which a string begins."""
  return max(
    (
      size
      for string in strings
      for size in range(1, min(len(string), len(text)) + 1)
      if text.endswith(string[:size])
    ),
    default=0,
  )


def vocab_size(tokenizer) -> int:
  """The largest token id plus one, which added tokens may raise."""
  return max(tokenizer.get_vocab().values()) + 1


def check_against_model(tokenizer, model_vocab: int) -> None:
  """Raises a ValueError if the model lacks embeddings for some tokens.

  A model with more rows than tokens is fine: checkpoints pad their vocabulary.
  """
  size = vocab_size(tokenizer)
  if size > model_vocab:
    raise ValueError(
      f'the tokenizer has ids up to {size - 1}, but the model only'
      f' {model_vocab} embeddings: take the tokenizer that belongs to the'
      f' model, or set the vocab_size of a new model to {size} or more'
    )
