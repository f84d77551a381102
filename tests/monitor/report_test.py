"""The page about a run: whole, self-contained, escaped, at any moment."""

import html.parser
import json
import pathlib
import subprocess
import sys

import pytest

from rlhf_jax.monitor import report
from rlhf_jax.monitor import writers

_ROOT = pathlib.Path(__file__).resolve().parents[2]

_VOID = {'meta', 'br', 'link', 'img'}


class Balance(html.parser.HTMLParser):
  """Checks that tags are closed in order; collects them and the text."""

  def __init__(self, page):
    super().__init__()
    self.open, self.tags, self.text = [], [], []
    self.feed(page)
    assert not self.open

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))
    if tag not in _VOID:
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.text.append(data)


@pytest.fixture
def workdir(tmp_path):
  with writers.RunWriter(tmp_path) as writer:
    writer.config({'seed': 3, 'model': {'path': '</pre><script>x()</script>'}})
    for step in range(1, 5):
      stage = 'sft' if step < 3 else 'ppo'
      values = {'actor/grad_norm': step * 1.5, 'odd': None}
      if step >= 3:
        values |= {'critic/score/mean': step / 8, 'timing_s/gen': 0.5}
        values |= {'reward/exact/mean': 0.25, 'val/a/exact_match': 0.125 * step}
      writer.metrics(stage, step, values)
    for step in (1, 2, 3, 4):
      writer.samples(
        [
          {
            'stage': 'ppo',
            'step': step,
            'prompt': f'prompt{step} <script>alert(1)</script>',
            'response': '\x1b[2J</table>' + 'long ' * 1000,
            'rewards': {'exact': 1.0, 'length': None},
            'advantage': -0.5,
            'finish_reason': 'length',
          }
        ]
      )
    writer.event('skip', 'norm <b>not</b> finite', step=2)
    writer.summary({'exit_reason': 'finished', 'last': {'x': 0.75}})
  return tmp_path


def test_the_page_has_every_part(workdir):
  path = report.write(workdir)
  assert path == workdir / 'report.html'
  page = Balance(path.read_text())
  text = ''.join(page.text)
  for part in ('Summary', 'Curves', 'Samples', 'Events', 'Config', 'Metrics'):
    assert part.lower() in text.lower(), part
  assert 'finished · step 4 · stages: sft, ppo' in text
  assert 'last.x' in text and '0.75' in text
  # Curves of score, gradient norm, reward, seconds and the evaluation, each
  # with the borders of both stages.
  assert [tag for tag, _ in page.tags].count('svg') == 5
  borders = [a for _, a in page.tags if a.get('class') == 'border']
  assert len(borders) == 10
  # First, middle and last dumped step.
  assert 'prompt1' in text and 'prompt2' in text and 'prompt4' in text
  assert 'prompt3' not in text
  assert 'step=2' in text and 'length –' in text


def test_text_of_the_run_is_escaped_and_nothing_is_fetched(workdir):
  page = report.build(workdir)
  assert '<script' not in page
  assert '&lt;script&gt;alert(1)' in page and '<b>not' not in page
  for tag, attributes in Balance(page).tags:
    assert not {'src', 'href', 'onclick'} & set(attributes), tag
  assert 'url(' not in page and '@import' not in page
  assert '[... 3' in page  # the long response is cut in its middle


def test_a_run_that_only_began_has_a_page(tmp_path):
  with writers.RunWriter(tmp_path) as writer:
    writer.config({'a': 1})
  Balance(report.build(tmp_path))
  with writers.RunWriter(tmp_path) as writer:
    writer.metrics('s', 1, {'critic/score/mean': None})
    writer.event('start', 'began')
    writer.samples([{'prompt': 'p', 'response': 'r'}])
  (tmp_path / 'metrics.jsonl').open('a').write('{"step": 2, "cri')
  page = report.build(tmp_path)
  Balance(page)
  assert 'running or interrupted' in page


def test_a_folder_without_a_run_is_an_error(tmp_path):
  with pytest.raises(FileNotFoundError, match='expected the --workdir'):
    report.write(tmp_path)
  assert list(tmp_path.iterdir()) == []


def test_the_command(workdir, tmp_path_factory):
  command = [sys.executable, str(_ROOT / 'launch/report.py')]

  def run(folder):
    return subprocess.run(
      [*command, f'--workdir={folder}'],
      capture_output=True,
      text=True,
      env={'PYTHONPATH': str(_ROOT), 'PATH': ''},
    )

  done = run(workdir)
  assert done.returncode == 0, done.stderr
  assert pathlib.Path(done.stdout.strip()).exists()
  failed = run(tmp_path_factory.mktemp('empty'))
  assert failed.returncode == 1 and 'expected the --workdir' in failed.stderr


def test_the_config_is_shown_as_json(workdir):
  shown = ''.join(Balance(report.build(workdir)).text)
  config = json.loads((workdir / 'config.json').read_text())
  assert json.dumps(config, indent=2) in shown
