"""Tokenizers: the built-in one, and real ones where they are at hand."""

import os

import numpy as np
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


# ---- Text as it comes, and stop strings -------------------------------------

_TEXTS = (
  'Once upon a time, é and ï.  Two  spaces\n\n\tand 日本語 😀😀!',
  '  begins with spaces',
  '日',
  'a\n\n\n\n        b',
  '',
)


def _each_tokenizer():
  yield tokenizer_lib.load('bytes')
  yield tokenizer_lib.load(str(testing.shared_path('data/stories260k')))
  if os.environ.get('RLHF_JAX_SMOLLM2'):
    yield real_tokenizer()


def _streamed(tokenizer, ids, size, **options):
  """The pieces of text, where `size` tokens come at a time."""
  stream = tokenizer_lib.TextStream(tokenizer, **options)
  pieces = [stream.push(ids[i : i + size]) for i in range(0, len(ids), size)]
  return [*pieces, stream.finish()]


@pytest.mark.parametrize('size', [1, 2, 3, 50])
def test_stream_gives_the_text_in_whole_characters(size):
  for tokenizer in _each_tokenizer():
    for text in _TEXTS:
      ids = tokenizer.encode(text, add_special_tokens=False)
      pieces = _streamed(tokenizer, ids, size)
      assert ''.join(pieces) == tokenizer_lib.decode(tokenizer, ids)
      assert '\ufffd' not in ''.join(pieces)
      assert pieces[-1] == ''  # nothing was held back to the end


def test_stream_holds_back_half_a_character(byte_level):
  stream = tokenizer_lib.TextStream(byte_level)
  assert [stream.push([byte]) for byte in 'aé😀'.encode()] == [
    'a', '', 'é', '', '', '', '😀'
  ]  # fmt: skip
  assert stream.push([0xC3]) == ''
  assert stream.finish() == '\ufffd'
  # In the same piece, but behind whole characters.
  assert _streamed(byte_level, list(b'ab\xc3\xa9\xc3'), 5) == ['abé', '\ufffd']
  # No character at all: shown as soon as it cannot become one.
  assert _streamed(byte_level, [0xFF, 0x61], 1) == ['', '\ufffda', '']


def test_stream_where_half_a_character_spoils_the_one_before():
  # This decoder turns a whole run of bytes to U+FFFD if one of them is wrong.
  stories = tokenizer_lib.load(str(testing.shared_path('data/stories260k')))
  ids = stories.encode('日日', add_special_tokens=False)
  broken = ids[:-1]
  assert tokenizer_lib.decode(stories, broken).count('\ufffd') == 5
  assert ''.join(_streamed(stories, broken, 1)) == '日\ufffd'
  assert ''.join(_streamed(stories, ids, 1)) == '日日'


def test_stream_keeps_a_space_behind_a_special_token():
  stories = tokenizer_lib.load(str(testing.shared_path('data/stories260k')))
  encode = lambda text: stories.encode(text, add_special_tokens=False)
  ids = [*encode('a'), stories.eos_token_id, *encode('the')]
  assert tokenizer_lib.decode(stories, ids) == 'a the'
  assert ''.join(_streamed(stories, ids, 1)) == 'a the'


def test_stream_of_any_bytes(byte_level):
  generator = np.random.default_rng(0)
  for _ in range(20):
    ids = generator.integers(0, 259, 60).tolist()  # special tokens as well
    text = tokenizer_lib.decode(byte_level, ids)
    for size in (1, 4):
      assert ''.join(_streamed(byte_level, ids, size)) == text


def test_stream_decodes_a_few_tokens_only(byte_level, monkeypatch):
  longest = 0

  def decode(tokenizer, ids, *arguments, _decode=tokenizer_lib.decode):
    nonlocal longest
    longest = max(longest, len(ids))
    return _decode(tokenizer, ids, *arguments)

  monkeypatch.setattr(tokenizer_lib, 'decode', decode)
  text = 'Some words, é and so on. ' * 20
  assert ''.join(_streamed(byte_level, list(text.encode()), 4)) == text
  assert longest <= 12


def test_stream_holds_back_the_beginning_of_a_stop_string(byte_level):
  pieces = _streamed(byte_level, list(b'a###b##'), 1, stop=('###!', '\n\n'))
  assert pieces == ['a', '', '', '', '###b', '', '', '##']


@pytest.mark.parametrize('fresh', [None, 3])
def test_stop_finder_counts_the_tokens_up_to_the_first(byte_level, fresh):
  find = tokenizer_lib.stop_finder(byte_level, ('llo w', 'é'), fresh=fresh)
  ids = np.array(list('hello wörld é'.encode()), np.int32)
  assert [find(ids[:n]) for n in (0, 1, 6)] == [None] * 3
  # 'hello w' is 7 tokens; the string is complete with the last of them.
  assert [find(ids[:n]) for n in (7, 8, 9)] == [7, 7, 7]
  only = tokenizer_lib.stop_finder(byte_level, ('é',), fresh=fresh)
  assert only(ids[:-1]) is None  # half of it
  assert only(ids) == len(ids)
  assert tokenizer_lib.text(byte_level, ids[:7], ('llo w',)) == 'he'
  assert tokenizer_lib.text(byte_level, ids, ('é',)) == 'hello wörld '


def test_stop_finder_within_a_token():
  stories = tokenizer_lib.load(str(testing.shared_path('data/stories260k')))
  ids = stories.encode('Once upon a time there was', add_special_tokens=False)
  tokens = stories.convert_ids_to_tokens(ids)
  at = tokens.index('▁upon') if '▁upon' in tokens else 1
  find = tokenizer_lib.stop_finder(stories, (' u',), fresh=4)
  assert find(np.array(ids[: at + 1])) == at + 1
  assert find(np.array(ids[:at])) is None
  kept = ids[: at + 1]
  assert tokenizer_lib.text(stories, kept, (' u',)) == 'Once'


def test_stop_finder_reads_special_tokens_and_ignores_early_matches(byte_level):
  find = tokenizer_lib.stop_finder(byte_level, ('<pad>',))
  ids = np.array([*b'ab', tokenizer_lib.BYTES_PAD, *b'c'])
  assert find(ids) == 3
  assert tokenizer_lib.text(byte_level, ids[:3], ('<pad>',)) == 'ab'
  late = tokenizer_lib.stop_finder(byte_level, ('b',), min_tokens=3)
  assert late(np.array(list(b'abab'))) == 4
  assert late(np.array(list(b'aba'))) is None
  # Complete with the token of that number: not early.
  assert late(np.array(list(b'aab'))) == 3
  assert tokenizer_lib.text(byte_level, list(b'abab'), ('b',)) == 'aba'


def test_stop_finder_equals_looking_after_every_token():
  generator = np.random.default_rng(1)
  for tokenizer in _each_tokenizer():
    for strings in 5 * [('ab', 'ba '), ('é a', '  '), ('日b',)]:
      text = ''.join(generator.choice(list('ab é日'), 40))
      ids = np.array(tokenizer.encode(text, add_special_tokens=False))
      expected = next(
        (
          n
          for n in range(1, len(ids) + 1)
          if any(s in tokenizer_lib.decode(tokenizer, ids[:n]) for s in strings)
        ),
        None,
      )
      assert tokenizer_lib.stop_finder(tokenizer, strings)(ids) == expected
      find = tokenizer_lib.stop_finder(tokenizer, strings, fresh=4)
      found = (find(ids[:n]) for n in range(4, len(ids) + 4, 4))
      assert next((n for n in found if n is not None), None) == expected


@pytest.mark.parametrize('strings', ['ab', (), ('a', '')])
def test_stop_strings_that_mean_nothing(byte_level, strings):
  with pytest.raises(ValueError, match='tuple of stop strings'):
    tokenizer_lib.stop_finder(byte_level, strings)
