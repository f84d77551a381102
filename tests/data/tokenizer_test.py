"""Tokenizers: the built-in one, and real ones where they are at hand."""

import os

import pytest
import transformers

from rlhf_jax import testing
from rlhf_jax.data import tokenizer as tokenizer_lib


@pytest.fixture(scope='module', name='byte_level')
def _byte_level():
  return tokenizer_lib.load('bytes')


def real_tokenizer():
  folder = os.environ.get('RLHF_JAX_SMOLLM2')
  if not folder:
    pytest.skip('RLHF_JAX_SMOLLM2 names no folder with the real tokenizer')
  return tokenizer_lib.load(folder)


@pytest.mark.parametrize(
  'text', ['47+385=', 'naïve  \n\t “quoted” 😀', '\x00\x7f\xad', "it's . ok !"]
)
def test_bytes_are_the_ids(byte_level, text):
  ids = byte_level.encode(text)
  assert ids == list(text.encode())
  assert tokenizer_lib.decode(byte_level, ids) == text


def test_every_byte_and_the_specials(byte_level):
  symbols = tokenizer_lib._byte_symbols()
  assert byte_level.convert_tokens_to_ids(symbols) == list(range(256))
  assert byte_level.pad_token_id == tokenizer_lib.BYTES_PAD == 256
  assert byte_level.bos_token_id == tokenizer_lib.BYTES_BOS == 257
  assert byte_level.eos_token_id == tokenizer_lib.BYTES_EOS == 258
  assert byte_level.encode('1<eos>') == [49, 258]
  assert tokenizer_lib.vocab_size(byte_level) == 259
  assert tokenizer_lib.decode(byte_level, [49, 258]) == '1'
  assert tokenizer_lib.decode(byte_level, [49, 258], False) == '1<eos>'
  # Half of a two-byte character.
  assert tokenizer_lib.decode(byte_level, [195]) == '�'


def test_bytes_survive_export(byte_level, tmp_path):
  byte_level.save_pretrained(tmp_path)
  again = transformers.AutoTokenizer.from_pretrained(tmp_path)
  for text in ('naïve\n😀', '1<eos>', ' a  b .'):
    assert again.encode(text) == byte_level.encode(text)
  assert again.eos_token_id == 258
  assert tokenizer_lib.load(str(tmp_path)).get_vocab() == again.get_vocab()


def test_stop_ids(byte_level):
  assert tokenizer_lib.stop_ids(byte_level) == {258}
  assert tokenizer_lib.stop_ids(byte_level, ('\n', '<pad>')) == {258, 10, 256}
  # A byte's printable symbol is not that byte: this letter is two bytes.
  with pytest.raises(ValueError, match='2 tokens'):
    tokenizer_lib.stop_ids(byte_level, ('¡',))
  with pytest.raises(ValueError, match='tuple'):
    tokenizer_lib.stop_ids(byte_level, '\n')


def test_check_against_model(byte_level):
  tokenizer_lib.check_against_model(byte_level, 259)
  tokenizer_lib.check_against_model(byte_level, 320)
  with pytest.raises(ValueError, match='up to 258.*only 256'):
    tokenizer_lib.check_against_model(byte_level, 256)


def test_load_says_what_to_do(tmp_path):
  with pytest.raises(ValueError, match='no folder'):
    tokenizer_lib.load('/nowhere/model')
  with pytest.raises(ValueError, match='no folder'):
    tokenizer_lib.load('./nowhere')
  (tmp_path / 'weights.bin').write_text('')
  with pytest.raises(ValueError, match=r"holds \['weights.bin'\]"):
    tokenizer_lib.load(str(tmp_path))
  with pytest.raises(ValueError, match='hub id'):
    tokenizer_lib.load('nobody/never-such-a-model')


def test_continuation_has_neither_bos_nor_an_invented_space(byte_level):
  assert tokenizer_lib.continuation(byte_level, '42') == list(b'42')
  stories = tokenizer_lib.load(str(testing.shared_path('data/stories260k')))
  # Encoded on its own the text would be <s> ▁42.
  ids = tokenizer_lib.continuation(stories, '42')
  assert stories.convert_ids_to_tokens(ids) == ['4', '2']
  ids = tokenizer_lib.continuation(stories, ' once')
  assert stories.convert_ids_to_tokens(ids)[0].startswith('▁')
  newline = tokenizer_lib.stop_ids(stories, ('\n',)) - {stories.eos_token_id}
  assert stories.convert_ids_to_tokens(list(newline)) == ['<0x0A>']


def test_real_tokenizer():
  tokenizer = real_tokenizer()
  assert tokenizer_lib.vocab_size(tokenizer) == 49152
  tokenizer_lib.check_against_model(tokenizer, 49152)
  assert tokenizer_lib.stop_ids(tokenizer, ('<|endoftext|>', '\n')) >= {0, 2}
  with pytest.raises(ValueError, match='expected exactly 1'):
    tokenizer_lib.stop_ids(tokenizer, ('no single token',))
  text = 'What is 12 - 7 ? It\'s "5" .'
  ids = tokenizer_lib.continuation(tokenizer, text)
  assert tokenizer_lib.decode(tokenizer, ids) == text
