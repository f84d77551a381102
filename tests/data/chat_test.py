"""Rendering of prompts: one BOS, the template as it is, contradictions."""

import os

import pytest

from rlhf_jax import testing
from rlhf_jax.data import chat
from rlhf_jax.data import tokenizer as tokenizer_lib

_PLAIN = (
  '{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}'
  '{{ eos_token }}{% endfor %}'
  '{% if add_generation_prompt %}[assistant]{% endif %}'
)
# Opens a thought for the answer, and drops it once the answer is there.
_DROPS_THOUGHT = _PLAIN.replace('[assistant]', '[assistant]<think>')
# Writes a system message only while there is no answer.
_MOVES_SYSTEM = _PLAIN.replace(
  '{{ bos_token }}', '{% if messages|length == 1 %}[system]hi{% endif %}'
)


@pytest.fixture(name='tokenizer')
def _tokenizer():
  return tokenizer_lib.load('bytes')


def _with_template(tokenizer, template):
  tokenizer.chat_template = template
  return tokenizer


def test_plain_text(tokenizer):
  assert chat.render('1+2=', tokenizer, chat=False) == list(b'1+2=')
  ids = chat.render(
    '3+4=', tokenizer, chat=False, prompt_format='{"a": 1}\n{prompt}'
  )
  assert ids == list(b'{"a": 1}\n3+4=')


def test_plain_text_has_one_bos():
  stories = tokenizer_lib.load(str(testing.shared_path('data/stories260k')))
  ids = chat.render('Once upon a time', stories, chat=False)
  assert ids.count(stories.bos_token_id) == 1 and ids[0] == stories.bos_token_id
  assert ids == stories.encode('Once upon a time')
  again = chat.render('<s>Once upon a time', stories, chat=False)
  assert again.count(stories.bos_token_id) == 1
  # BOS alone is a prompt.
  assert chat.render('', stories, chat=False) == [stories.bos_token_id]


def test_template_that_writes_bos_has_one_bos():
  stories = tokenizer_lib.load(str(testing.shared_path('data/stories260k')))
  ids = chat.render('hi', _with_template(stories, _PLAIN), chat=True)
  assert ids[0] == stories.bos_token_id
  assert ids.count(stories.bos_token_id) == 1
  # A template without BOS is taken at its word.
  without = _with_template(stories, _PLAIN.replace('{{ bos_token }}', ''))
  assert stories.bos_token_id not in chat.render('hi', without, chat=True)


def test_chat(tokenizer):
  tokenizer = _with_template(tokenizer, _PLAIN)

  def text(*arguments, **keywords):
    ids = chat.render(*arguments, tokenizer, chat=True, **keywords)
    return tokenizer_lib.decode(tokenizer, ids, skip_special=False)

  assert text('hi') == '<bos>[user]hi<eos>[assistant]'
  assert text('hi', prompt_format='Q: {prompt}', system='Be kind.') == (
    '<bos>[system]Be kind.<eos>[user]Q: hi<eos>[assistant]'
  )
  messages = (
    {'role': 'user', 'content': 'a'},
    {'role': 'assistant', 'content': 'b'},
    {'role': 'user', 'content': 'c'},
  )
  assert text(messages) == (
    '<bos>[user]a<eos>[assistant]b<eos>[user]c<eos>[assistant]'
  )


@pytest.mark.parametrize('template', [_DROPS_THOUGHT, _MOVES_SYSTEM])
def test_template_not_stable_under_an_answer(tokenizer, template):
  with pytest.raises(ValueError, match='not stable'):
    chat.render('hi', _with_template(tokenizer, template), chat=True)


_USER = ({'role': 'user', 'content': 'hi'},)


@pytest.mark.parametrize(
  'prompt, keywords, message',
  [
    ('', dict(chat=False), 'no token'),
    ('hi', dict(chat=False, prompt_format='Q:'), 'once'),
    ('hi', dict(chat=False, system='Be kind.'), 'chat=True'),
    (_USER, dict(chat=False), 'chat=True'),
    (_USER, dict(chat=True, prompt_format='Q: {prompt}'), 'text prompts'),
    (({'role': 'user'},), dict(chat=True), "'content'"),
    ((), dict(chat=True), 'ends with'),
    (({'role': 'assistant', 'content': 'x'},), dict(chat=True), 'ends with'),
    (
      ({'role': 'system', 'content': 'x'}, *_USER),
      dict(chat=True, system='y'),
      'own system message',
    ),
  ],
)
def test_contradictions(tokenizer, prompt, keywords, message):
  with pytest.raises(ValueError, match=message):
    chat.render(prompt, _with_template(tokenizer, _PLAIN), **keywords)


def test_no_template(tokenizer):
  with pytest.raises(ValueError, match='no chat template'):
    chat.render('hi', tokenizer, chat=True)


def test_real_template():
  folder = os.environ.get('RLHF_JAX_SMOLLM2')
  if not folder:
    pytest.skip('RLHF_JAX_SMOLLM2 names no folder with the real tokenizer')
  tokenizer = tokenizer_lib.load(folder)
  ids = chat.render('hi', tokenizer, chat=True, system='S')
  assert tokenizer_lib.decode(tokenizer, ids, skip_special=False) == (
    '<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n'
    '<|im_start|>assistant\n'
  )
  # The vocabulary's BOS is <|im_start|>, which plain text does not get.
  assert chat.render('hi', tokenizer, chat=False) == [6004]
