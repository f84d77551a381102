"""Tokenizers: one built in that needs no download, and any Hugging Face one.

Both are `transformers` fast tokenizers, so that exporting, chat templates and
everything else have one path.
"""

from collections.abc import Sequence
import os

import tokenizers
import transformers

BYTES = 'bytes'
BYTES_PAD, BYTES_BOS, BYTES_EOS = 256, 257, 258


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
