"""The sampling command: what it shows and writes, from which folders.

One small run from scratch, warmed up until it says digits and stops, is asked
in most tests; where the text itself matters, the engine is scripted.
"""

import importlib
import io
import itertools
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch import sample as launch
from launch import train as train_launch
from rlhf_jax import keys
from rlhf_jax import testing
from rlhf_jax.data import tokenizer as tokenizer_lib
from rlhf_jax.models import decoder
from rlhf_jax.models import hf
from rlhf_jax.monitor import writers
from rlhf_jax.sampling import conversation
from rlhf_jax.sampling import engine
from rlhf_jax.sampling import text as text_lib
from rlhf_jax.sharding import mesh as mesh_lib
from rlhf_jax.trainers import policy as policy_lib
from rlhf_jax.trainers import workdir as workdir_lib

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_EOS = tokenizer_lib.BYTES_EOS
_PROMPTS = ('12+34=', '5+5=', '9+9=')
_TEMPLATE = (
  '{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}'
  '{% endfor %}{% if add_generation_prompt %}a:{% endif %}'
)
_QUICK = dict(slots=6, max_new_tokens=8)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """The workdir of a run with the checkpoints 9 and 10 and an export."""
  config = importlib.import_module('configs.quickstart').get_config('tiny')
  config.update_from_flattened_dict(
    {
      'mesh.devices': 1,
      'model.architecture.max_positions': 128,
      'checkpoint.every': 9,
      'evaluation.every': 0,
      'rollout.stop': ('\n',),
    }
  )
  overrides = {
    'steps': 10,
    'evaluation.before_train': False,
    'actor.optimizer.learning_rate': 2e-2,
    'training.sequences_per_minibatch': 64,
    'training.tokens_per_microbatch': 512,
  }
  config.stages = (('warmup', 'sft', overrides),)
  workdir = tmp_path_factory.mktemp('runs') / 'run'
  assert train_launch.train(config, str(workdir)) == 0
  return workdir


@pytest.fixture(scope='module')
def chat_model(run, tmp_path_factory):
  """The exported model with a chat template."""
  folder = tmp_path_factory.mktemp('models') / 'chat'
  shutil.copytree(run / 'export', folder)
  tokenizer = tokenizer_lib.load(str(folder))
  tokenizer.chat_template = _TEMPLATE
  tokenizer.save_pretrained(folder)
  return folder


@pytest.fixture
def ask(tmp_path):
  """Runs the command; returns the lines that it wrote."""
  numbers = itertools.count()

  def call(model, *, seed=0, file='', prompt=(), **settings):
    output = tmp_path / f'{next(numbers)}.jsonl'
    code = launch.sample(
      str(model),
      text_lib.Settings(**settings),
      prompt=prompt,
      file=file,
      output=str(output),
      seed=seed,
    )
    assert code == 0
    return [json.loads(line) for line in output.read_text().splitlines()]

  return call


@pytest.fixture
def script(monkeypatch):
  """Lets the engine say given pieces of token ids, one answer a call."""

  def set_answers(*answers):
    calls = []
    left = iter(answers)

    def stream(params, prompts, key, **options):
      calls.append(dict(prompts=prompts, **options))
      *pieces, finish = next(left)
      for n, piece in enumerate(pieces, 1):
        if piece is KeyboardInterrupt:
          raise piece
        ids = np.array(list(piece), np.int32)
        last = finish if n == len(pieces) else None
        yield [engine.Piece(0, ids, -1.0 * ids, -1.0 * ids, last)]

    monkeypatch.setattr(engine, 'stream', stream)
    monkeypatch.setattr(engine, 'warm_up', lambda *args, **options: 0)
    return calls

  return set_answers


def _full_logprobs(folder, line, temperature):
  """Log-probs of the answer in a line, by the model without a cache."""
  config = hf.load_config(folder)
  params = hf.load(folder, config)
  ids = np.array([line['prompt_ids'] + line['ids']], np.int32)
  at = np.arange(ids.shape[1], dtype=np.int32)[None]
  states = decoder.hidden(params, config, ids, at, np.ones_like(ids))
  logits = decoder.logits(params, config, states)[0] / temperature
  table = jax.nn.log_softmax(logits)
  first = len(line['prompt_ids'])
  return np.array([table[t - 1, ids[0, t]] for t in range(first, ids.shape[1])])


def _escaped(text):
  return ''.join(f'\\x{ord(c):02x}' if c < ' ' else c for c in text)


# ---- Against the engine and the model ----------------------------------------


def test_greedy_lines_are_those_of_the_engine(run, ask, capsys):
  lines = ask(run, prompt=_PROMPTS, temperature=0.0, **_QUICK)
  out, err = capsys.readouterr()
  config = hf.load_config(run / 'export')
  mesh = mesh_lib.make(devices=jax.devices()[:1])
  relayout = engine.relayout_program(mesh, decoder.specs(config), jnp.float32)
  rollout = engine.generate(
    relayout(hf.load(run / 'export', config)),
    [np.array(list(prompt.encode())) for prompt in _PROMPTS],
    keys.key(0, 'evaluate', 0),
    config=config,
    mesh=mesh,
    shape=engine.Shape(32, 8, 3, 1),
    stop_ids=(_EOS, ord('\n')),
    temperature=0.0,
  )
  assert len(lines) == len(_PROMPTS)
  shown = ''
  for n, (prompt, line) in enumerate(zip(_PROMPTS, lines)):
    first, end = rollout.prompt_lengths[n], rollout.lengths[n]
    ids = rollout.tokens[n, first:end].tolist()
    assert line['prompt'] == prompt
    assert line['prompt_ids'] == list(prompt.encode())
    assert line['ids'] == ids
    testing.assert_close(
      line['logprobs'], rollout.logprobs[n, first:end], 'teacher_forced'
    )
    text = bytes(i for i in ids if i < 256).decode()
    assert line['response'] == text
    assert (line['finish_reason'] == 'length') == rollout.truncated[n]
    assert line['sample'] == 0
    shown += f'[{n + 1}/3] {prompt}\n{text}\n\n'
  assert out == shown
  assert 'step 10' in err and 'tokens/s' in err


def test_drawn_lines(run, ask):
  settings = dict(temperature=0.7, top_k=5, samples=3, **_QUICK)
  lines = ask(run, prompt=_PROMPTS, seed=4, **settings)
  assert [line['sample'] for line in lines] == 3 * [0, 1, 2]
  assert [line['prompt'] for line in lines] == list(np.repeat(_PROMPTS, 3))
  assert len({line['seed'] for line in lines}) == 9
  for line in lines:
    # Those of the policy at the temperature, whatever top-k left.
    testing.assert_close(
      line['logprobs'],
      _full_logprobs(run / 'export', line, 0.7),
      'teacher_forced',
    )
    stopped = line['ids'][-1] in (_EOS, ord('\n'))
    assert line['finish_reason'] == ('stop' if stopped else 'length')
    assert stopped or len(line['ids']) == 8
  assert {line['finish_reason'] for line in lines} >= {'stop'}
  assert len({line['response'] for line in lines}) > 1


def test_any_answer_again_from_its_own_seed(run, ask):
  # Hot and never stopped: no two answers are alike by chance.
  settings = dict(temperature=3.0, ban=('<eos>', '\n'), **_QUICK)
  lines = ask(run, prompt=_PROMPTS, seed=4, samples=3, **settings)
  assert len({line['response'] for line in lines}) == 9
  assert lines[0]['seed'] == 4
  for line in lines[::4]:
    (again,) = ask(run, prompt=[line['prompt']], seed=line['seed'], **settings)
    assert again['ids'] == line['ids']
    assert again['seed'] == line['seed']
  # Neighbouring seeds have no noise in common.
  others = ask(run, prompt=_PROMPTS, seed=5, samples=3, **settings)
  assert not {o['seed'] for o in others} & {line['seed'] for line in lines}


def test_more_prompts_than_slots_come_in_order(run, ask):
  prompts = [f'{n}+{n}=' for n in range(20)]
  lines = ask(run, prompt=prompts, temperature=0.0, **_QUICK)
  assert [line['prompt'] for line in lines] == prompts
  backwards = ask(run, prompt=prompts[::-1], temperature=0.0, **_QUICK)
  assert [line['ids'] for line in backwards[::-1]] == [
    line['ids'] for line in lines
  ]


def test_requests(run, ask):
  settings = dict(prompt=_PROMPTS, temperature=0.0, **_QUICK)
  plain = ask(run, **settings)
  assert all(line['ids'][0] < 128 for line in plain)
  first = plain[0]['response'][0]
  for line in ask(run, ban=[first], **settings):
    assert ord(first) not in line['ids']
  # Only the likeliest token is left, by each of the three.
  for only in (dict(top_k=1), dict(top_p=1e-6), dict(min_p=1.0)):
    hot = ask(run, **settings | dict(temperature=2.0), **only)
    assert [line['ids'] for line in hot] == [line['ids'] for line in plain]
  for line in ask(run, min_new_tokens=6, **settings):
    assert len(line['ids']) >= 6
    assert _EOS not in line['ids'][:5]


def test_stop_string_over_two_tokens(run, ask, capsys):
  settings = dict(
    prompt=['12+34='], temperature=0.0, max_new_tokens=8, ban=['<eos>', '\n']
  )
  (plain,) = ask(run, **settings)
  ids = plain['ids']
  assert len(ids) == 8 and plain['finish_reason'] == 'length'
  assert capsys.readouterr().out == f'{_escaped(plain["response"])}\n'
  # Two neighbours that are ASCII characters, as late as there are.
  first = max(n for n in range(7) if max(ids[n : n + 2]) < 128)
  stop = bytes(ids[first : first + 2])
  end = bytes(ids).find(stop) + 2
  (line,) = ask(run, stop=[stop.decode()], **settings)
  assert line['finish_reason'] == 'stop'
  assert line['ids'] == ids[:end]
  assert line['logprobs'] == plain['logprobs'][:end]
  text = bytes(ids[: end - 2]).decode(errors='replace')
  assert line['response'] == text
  assert capsys.readouterr().out == f'{_escaped(text)}\n'


# ---- Where the policy lies ---------------------------------------------------


def test_checkpoint_export_and_folder_say_the_same(run, ask, tmp_path):
  ask_greedily = lambda model: ask(
    model, prompt=_PROMPTS, temperature=0.0, **_QUICK
  )
  before = {p: p.stat().st_mtime_ns for p in run.rglob('*')}
  expected = ask_greedily(run)
  assert {p: p.stat().st_mtime_ns for p in run.rglob('*')} == before
  for name, lost in (
    ('checkpoint', 'export'),
    ('export', 'checkpoints'),
  ):
    copy = tmp_path / name
    shutil.copytree(run, copy)
    shutil.rmtree(copy / lost)
    assert ask_greedily(copy) == expected
  assert ask_greedily(run / 'export') == expected
  older = tmp_path / 'checkpoint'
  shutil.rmtree(older / 'checkpoints' / '10')
  assert ask_greedily(older) != expected
  shutil.rmtree(older / 'checkpoints' / '9')
  with pytest.raises(workdir_lib.Refused, match='neither a checkpoint nor'):
    ask_greedily(older)


def test_a_run_is_asked_as_it_was_trained(run, chat_model, tmp_path):
  copy = tmp_path / 'run'
  shutil.copytree(run, copy)
  shutil.rmtree(copy / 'checkpoints')
  config = json.loads((run / writers.CONFIG).read_text())
  config['data']['prompt_format'] = 'Q: {prompt}'
  # A stage's own value goes before the config's.
  config['stages'][0][2] |= {
    'rollout.stop': [';'],
    'rollout.stop_strings': ['no way'],
  }
  (copy / writers.CONFIG).write_text(json.dumps(config))
  policy = policy_lib.find(str(copy))
  assert policy.stop_ids == {_EOS, ord(';')}
  sampler = text_lib.Sampler(policy, text_lib.Settings(stop=('x',)))
  assert sampler.stop == ('x', 'no way')
  asked = lambda **settings: bytes(
    i if i < 256 else ord('|')
    for i in text_lib.Sampler(
      policy_lib.find(str(copy)), text_lib.Settings(**settings)
    )
    .encode('1+1=')
    .tolist()
  ).decode()
  assert asked() == 'Q: 1+1='
  # With a chat template.
  shutil.rmtree(copy / 'export')
  shutil.copytree(chat_model, copy / 'export')
  config['data'] |= dict(chat=True, system='add')
  (copy / writers.CONFIG).write_text(json.dumps(config))
  assert asked() == 's:add|u:Q: 1+1=|a:'
  assert asked(chat=True, system='') == 'u:Q: 1+1=|a:'
  assert asked(conversation=True) == 's:add|u:1+1=|a:'
  assert asked(chat=False) == '1+1='  # the format was made for the chat


def test_files_of_prompts(chat_model, ask, tmp_path):
  lines = tmp_path / 'prompts.txt'
  lines.write_text('1+1=\n\n 2+2=\n')
  got = ask(chat_model, file=str(lines), prompt=['0+0='], **_QUICK)
  assert [line['prompt'] for line in got] == ['0+0=', '1+1=', ' 2+2=']
  objects = tmp_path / 'prompts.jsonl'
  messages = [dict(role='system', content='s'), dict(role='user', content='u')]
  objects.write_text(
    f'{json.dumps(dict(prompt="1+1="))}\n{json.dumps(dict(prompt=messages))}\n'
  )
  got = ask(chat_model, file=str(objects), chat=True, **_QUICK)
  assert [line['prompt'] for line in got] == ['1+1=', messages]
  assert got[1]['prompt_ids'] == [*b's:s', _EOS, *b'u:u', _EOS, *b'a:']


# ---- Text as it comes --------------------------------------------------------


def _sampler(model, **settings):
  return text_lib.Sampler(
    policy_lib.find(str(model)), text_lib.Settings(**settings)
  )


def test_characters_arrive_whole(chat_model, script, ask, capsys):
  script(
    ('a\xc3'.encode('latin1'), b'\xa9 \xf0\x9f', b'\x98\x80!\xc3', 'length')
  )
  answer = text_lib.Answer()
  sampler = _sampler(chat_model)
  pieces = list(sampler.speak(np.array([1]), 0, answer))
  assert pieces == ['a', 'é ', '😀!\ufffd']
  assert answer.finish == 'length' and len(answer.ids) == 10
  assert answer.logprobs == [-float(i) for i in answer.ids]
  # On a terminal, control characters would do things.
  script((b'\x1b[2Jx\ty', 'length'))
  (line,) = ask(chat_model, prompt=['1'])
  assert line['response'] == '\x1b[2Jx\ty'
  assert capsys.readouterr().out == '\\x1b[2Jx\ty\n'


def test_a_stop_string_is_not_shown(chat_model, script):
  calls = script(
    (b'one #', b'# two #', b'##', 'stop'),
    (b'a#', b'#', 'length'),
    (b'', 'stop'),
  )
  sampler = _sampler(chat_model, stop=('###',), min_new_tokens=6)
  speak = lambda: list(sampler.speak(np.array([1]), 0, text_lib.Answer()))
  assert speak() == ['one ', '## two ', '']
  assert speak() == ['a', '##']  # it was none
  find_stop = calls[0]['find_stop']
  assert find_stop(np.array(list(b'###12'))) is None
  assert find_stop(np.array(list(b'###12###'))) == 8
  assert calls[0]['min_new_tokens'] == 6
  # Found wherever the host looks: behind it came the rest of a chunk.
  list(sampler.pieces([np.array([1])], np.zeros(1, int), whole=True))
  for call in calls:
    rest = b'x' * (call['shape'].chunk - 3)
    assert call['find_stop'](np.array(list(b'abcdef###' + rest))) == 9


# ---- Conversation ------------------------------------------------------------


def test_conversation(chat_model, ask, monkeypatch, capsys):
  typed = '5+5=\n\nand?\n/what\n/reset\n5+5=\n/exit\nnever\n'
  monkeypatch.setattr(sys, 'stdin', io.StringIO(typed))
  lines = ask(
    chat_model, chat=True, conversation=True, system='add', temperature=0.0,
    max_new_tokens=8,
  )  # fmt: skip
  out, err = capsys.readouterr()
  first, second, third = lines
  system, user = b's:add', b'u:5+5='
  assert first['prompt_ids'] == [*system, _EOS, *user, _EOS, *b'a:']
  said = first['ids'][: -1 if first['ids'][-1] == _EOS else None]
  assert second['prompt_ids'] == [
    *first['prompt_ids'], *said, _EOS, *b'u:and?', _EOS, *b'a:',
  ]  # fmt: skip
  assert second['prompt'][1] == dict(
    role='assistant', content=first['response']
  )
  assert third['ids'] == first['ids']
  assert third['prompt_ids'] == first['prompt_ids']
  assert out == ''.join(f'{_escaped(line["response"])}\n' for line in lines)
  assert '/what is not one of' in err and 'all 3 answers' in err
  # All of it was compiled before the first answer.
  assert 'of compiling' not in err


def test_conversation_that_is_full_or_interrupted(
  chat_model, ask, script, monkeypatch, capsys
):
  calls = script(
    (KeyboardInterrupt, 'stop'),
    (b'yes', KeyboardInterrupt, 'stop'),
    (b'no', b'', 'length'),
  )
  typed = f'{"x" * 130}\nnever\nhi\n{"x" * 90}\n'
  monkeypatch.setattr(sys, 'stdin', io.StringIO(typed))
  lines = ask(chat_model, chat=True, conversation=True)
  out, err = capsys.readouterr()
  assert 'longer than the 128 positions' in err and '/reset begins' in err
  assert [line['finish_reason'] for line in lines] == ['interrupted', 'length']
  assert out == '\nyes\nno\n'
  assert lines[0]['prompt'] == [dict(role='user', content='hi')]
  assert lines[1]['prompt'][1]['content'] == 'yes'
  # The answer gets what is left of the positions.
  size = len(lines[1]['prompt_ids'])
  assert calls[2]['max_new_tokens'].tolist() == [128 - size] != [128]
  # Both turns run in the programs of the first.
  assert calls[1]['shape'] == calls[2]['shape']
  assert 'cut by the length limit' in err and 'interrupted' in err


def test_interrupted_while_it_is_compiled(
  chat_model, ask, script, monkeypatch, capsys
):
  script((b'yes', 'length'))
  waits = iter([KeyboardInterrupt, None])

  def wait(sampler):
    if next(waits):
      raise KeyboardInterrupt

  monkeypatch.setattr(text_lib.Sampler, 'wait', wait)
  monkeypatch.setattr(sys, 'stdin', io.StringIO('hi\nho\n'))
  lines = ask(chat_model, chat=True, conversation=True)
  assert capsys.readouterr().out == '\nyes\n'
  assert [line['prompt'][-1]['content'] for line in lines] == ['ho']


def _conversation(folder, **settings):
  settings = text_lib.Settings(chat=True, conversation=True, **settings)
  return conversation.Conversation(
    text_lib.Sampler(policy_lib.find(str(folder)), settings)
  )


def _answered(said, line, ids, finish):
  asked, prompt = said.ask(line)
  said.answered(asked, prompt, text_lib.Answer(list(ids), [], finish))
  return prompt.tolist()


@pytest.mark.parametrize(
  'ids, finish, kept',
  [
    # Half a character, which the text would not bring back.
    (b'a\xc3', 'length', b'a\xc3'),
    # The end that the template writes as well, once.
    ([*b'ab', _EOS], 'stop', b'ab'),
    # A stop string is no longer in the text.
    (b'ab##', 'stop', b'ab##'),
  ],
)
def test_answers_go_on_by_their_ids(chat_model, ids, finish, kept):
  said = _conversation(chat_model, stop=('##',))
  prompt = _answered(said, 'hi', ids, finish)
  assert prompt == [*b'u:hi', _EOS, *b'a:']
  assert said.tokens == len(prompt) + len(ids)
  second = said.ask('on')[1].tolist()
  assert second == [*prompt, *kept, _EOS, *b'u:on', _EOS, *b'a:']
  assert said.messages[1]['content'] == {b'a\xc3': 'a\ufffd'}.get(
    bytes(kept), 'ab'
  )
  assert not said.rewritten


def test_a_template_that_rewrites_answers_is_told(chat_model, tmp_path):
  folder = tmp_path / 'chat'
  shutil.copytree(chat_model, folder)
  tokenizer = tokenizer_lib.load(str(folder))
  # What stands before a bar is left out once the conversation has gone on.
  tokenizer.chat_template = _TEMPLATE.replace(
    'm.content', '(m.content if loop.last else m.content.split("|")[-1])'
  )
  tokenizer.save_pretrained(folder)
  said = _conversation(folder)
  prompt = _answered(said, 'hi', [*b'well|yes', _EOS], 'stop')
  second = said.ask('on')[1].tolist()
  assert said.rewritten
  assert second == [*prompt, *b'yes', _EOS, *b'u:on', _EOS, *b'a:']
  _answered(said, 'on', b'yes', 'length')
  said.ask('and on')
  assert not said.rewritten


def test_a_conversation_that_is_full_by_its_ids(chat_model):
  said = _conversation(chat_model)
  # As text these would be three bytes each.
  prompt = _answered(said, 'hi', [*b'\xc3' * 100], 'length')
  ids = said.ask('x')[1].tolist()
  assert ids == [*prompt, *b'\xc3' * 100, _EOS, *b'u:x', _EOS, *b'a:']
  with pytest.raises(ValueError, match='it has 133 tokens, .* the 128 pos'):
    said.ask('x' * 20)


# ---- Refusals ----------------------------------------------------------------


@pytest.mark.parametrize(
  'arguments, message',
  [
    (dict(prompt=()), 'no prompt: give --prompt, --file, or --chat'),
    (dict(prompt=['1', '']), 'prompt 2: it is empty'),
    (dict(model='/nowhere/at/all'), '/nowhere/at/all is not a folder'),
    (dict(model=''), 'no model: name a folder'),
    (dict(prompt=['1', 128 * 'x']), 'prompt 2: it has 128 tokens'),
    (dict(max_new_tokens=128), 'prompt 1: .* with 128 new ones .* 128 pos'),
    (dict(min_new_tokens=128), 'prompt 1: .* with 128 new ones'),
    (dict(max_new_tokens=0), 'max_new_tokens=0: expected 1 or more'),
    (
      dict(max_new_tokens=4, min_new_tokens=5),
      'min_new_tokens=5: expected .* at most max_new_tokens=4',
    ),
    (dict(min_new_tokens=-1), 'min_new_tokens=-1: expected 0 or more'),
    (dict(temperature=-0.5), 'temperature=-0.5: expected 0'),
    (dict(temperature=float('nan')), 'temperature=nan: expected 0'),
    (dict(temperature=float('inf')), 'temperature=inf: expected 0'),
    (dict(top_k=-1), 'top_k=-1: expected 0'),
    (dict(top_p=0.0), 'top_p=0.0: expected above 0'),
    (dict(top_p=1.5), 'top_p=1.5: expected above 0 and at most 1'),
    (dict(min_p=2.0), 'min_p=2.0: expected 0'),
    (dict(samples=0), 'samples=0: expected 1 or more'),
    (dict(slots=0), 'slots=0: expected 1 or more'),
    (dict(seed=-1), 'seed=-1: expected 0 to 2147483647'),
    (dict(stop=['a', '']), 'expected no empty string'),
    (dict(ban=['two']), "ban='two' is 3 tokens"),
    (dict(dtype='float16'), "'float16' is not"),
    (dict(system='x'), 'a system message needs chat=True'),
    (dict(chat=True), 'prompt 1: the tokenizer has no chat template'),
    (
      dict(prompt=(), chat=True, conversation=True),
      'the tokenizer has no chat template',
    ),
    (
      dict(prompt=(), conversation=True, samples=2),
      'samples=2: expected 1, since a conversation',
    ),
    (dict(file='/nowhere.txt'), 'cannot read /nowhere.txt'),
    (dict(file='/nowhere.jsonl'), "cannot read '/nowhere.jsonl'"),
    (dict(output='/nowhere/out.jsonl'), 'there is no folder /nowhere'),
    (dict(output=__file__), 'exists: name another file'),
  ],
)
def test_refused_before_anything_is_read(run, monkeypatch, arguments, message):
  def load(self):
    raise AssertionError('this should have been refused')

  monkeypatch.setattr(text_lib.Sampler, 'load', load)
  own = {'model': str(run), 'prompt': ['1+1=']} | arguments
  names = ('model', 'prompt', 'file', 'output', 'seed')
  direct = {name: own.pop(name) for name in names if name in own}
  with pytest.raises(workdir_lib.Refused, match=message):
    launch.sample(settings=text_lib.Settings(**own), **direct)


def test_weights_that_do_not_fit(run, ask, tmp_path):
  folder = tmp_path / 'broken'
  shutil.copytree(run / 'export', folder)
  config = json.loads((folder / 'config.json').read_text())
  config['intermediate_size'] += 1
  (folder / 'config.json').write_text(json.dumps(config))
  with pytest.raises(workdir_lib.Refused, match='weights do not fit'):
    ask(folder, prompt=['1'])
  assert not list(tmp_path.glob('*.jsonl'))


def _command(*arguments):
  return subprocess.run(
    [sys.executable, 'launch/sample.py', *arguments],
    cwd=_ROOT,
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )


def test_command_line(run, tmp_path):
  refused = _command(f'--model={run}', '--prompt=1+1=', '--top_p=2')
  assert refused.returncode == 2
  assert refused.stdout == ''
  assert refused.stderr.startswith('error: top_p=2.0: expected above 0')

  output = tmp_path / 'out.jsonl'
  done = _command(
    f'--model={run / "export"}', '--prompt=1+1=', '--prompt=2+2=',
    '--temperature=0', '--max_new_tokens=4', '--stop=x', '--stop=y', '--ban=z',
    f'--output={output}', '--seed=3',
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  lines = [json.loads(line) for line in output.read_text().splitlines()]
  assert lines[0]['seed'] == 3
  assert done.stdout == ''.join(
    f'[{n + 1}/2] {line["prompt"]}\n{line["response"]}\n\n'
    for n, line in enumerate(lines)
  )
  assert 'tokens/s' in done.stderr and str(output) in done.stderr
