"""Two real processes: they agree, part, and end together when one is lost."""

import json
import signal
import socket
import sys
import textwrap
import time

import pytest

from rlhf_jax.sharding import distributed
from rlhf_jax.sharding import watch
from tests import processes

HOST = socket.gethostname()
# What each process does; `ME` is its id, and `step()` needs all of them.
_SCRIPT = """
import os, sys, time
import jax, numpy as np
from jax.experimental import multihost_utils
from rlhf_jax.sharding import distributed, jobs

ME = int(os.environ['JAX_PROCESS_ID'])

def step():
  return multihost_utils.process_allgather(np.array([ME])).ravel().tolist()

job = jobs.detect(os.environ)
with distributed.member(job, heartbeat_s={heartbeat_s}, join_s={join_s}):
{body}
print('AFTER', flush=True)
if ME == {stays}: time.sleep(1)
print('END', flush=True)
"""


def _command(body, heartbeat_s=40, join_s=60, stays=-1):
  script = _SCRIPT.format(
    body=textwrap.indent(textwrap.dedent(body), '  '),
    heartbeat_s=heartbeat_s,
    join_s=join_s,
    stays=stays,
  )
  return [sys.executable, '-c', script]


@pytest.mark.parametrize('stays', [0, 1])
def test_agree_and_part(stays):
  # The facts differ in nothing but their order; process 1 comes late. The one
  # that stays after the job must not take the end of the other for a loss.
  results = processes.run_processes(
    _command(
      """
      if ME: time.sleep(0.5)
      facts = {'a': '1', 'b': '2'}
      distributed.agree('x', dict(sorted(facts.items(), reverse=bool(ME))))
      distributed.agree('y', {})
      print('GATHERED', step(), jax.device_count(), flush=True)
      if not ME: time.sleep(0.5)
      """,
      stays=stays,
    ),
    count=2,
    devices=3,
    timeout_s=60,
  )
  for result in results:
    assert result.returncode == 0, result.output
    assert 'GATHERED [0, 1] 6' in result.output
    assert 'END' in result.output
    assert 'lost' not in result.output


@pytest.mark.parametrize('lost', [0, 1])
def test_a_killed_process_ends_the_other(lost):
  command = _command(
    """
    distributed.agree('x', {})
    step()
    print('READY', flush=True)
    while True: step()
    """
  )
  with processes.started(command, 2, 1) as job:
    for index in range(2):
      job.wait_for(index, 'READY', 60)
    killed = time.monotonic()
    job.kill(lost, signal.SIGKILL)
    results = job.results(timeout_s=30)
    # Well under JAX's own heartbeats, which are 40 s here.
    assert time.monotonic() - killed < 20
  assert results[lost].returncode == -signal.SIGKILL
  code, output, _ = results[1 - lost]
  if not lost and code == -signal.SIGABRT:
    # JAX was faster to see that its coordinator is gone, and names its role.
    assert 'the leader' in output
  else:
    assert code == watch.LOST
    assert f'process {lost} ({HOST})' in output
    assert 'was lost' in output
  assert 'AFTER' not in output


@pytest.mark.parametrize(
  'who, statement, code, said',
  [
    (1, "raise ValueError('broken reward')", 1, 'ValueError: broken reward'),
    (0, 'sys.exit(75)', 75, 'exit code 75'),
  ],
)
def test_a_process_that_gives_up_ends_the_other(who, statement, code, said):
  # The other waits for it: first in a collective, then for facts.
  results = processes.run_processes(
    _command(
      f"""
      step()
      if ME == {who}: {statement}
      if {code} == 75: distributed.agree('never', {{}})
      while True: step()
      """
    ),
    count=2,
    devices=1,
    timeout_s=60,
  )
  assert [result.returncode for result in results] == [code, code]
  for result in results:
    assert said in result.output
    assert 'AFTER' not in result.output
  assert f'process {who} ({HOST}) gave up: {said}' in results[1 - who].output


def test_the_end_of_the_hub_is_named():
  """Without JAX, which may be faster to abort."""
  hub = (
    'from rlhf_jax.sharding import watch\n'
    'hub = watch.Hub("process 0 (a)", 2, "t")\n'
    'print("PORT", hub.port, flush=True)\n'
    'hub.complete.wait()'
  )
  member = (
    'import sys, time\n'
    'from rlhf_jax.sharding import watch\n'
    'address = ("localhost", int(sys.argv[1]))\n'
    'both = [watch.Member(index, name, "process 0 (a)", address, "t", 5)\n'
    '  for index, name in enumerate(["process 0 (a)", "process 1 (b)"])]\n'
    'time.sleep(20)'
  )
  with processes.started([sys.executable, '-c', hub], 1, 1) as job:
    job.wait_for(0, '\n', 20)
    port = job.output(0).split()[1]
    ((code, output, _),) = processes.run_processes(
      [sys.executable, '-c', member, port], 1, 1, timeout_s=20
    )
  assert code == watch.LOST
  assert '[process 1 (b)] process 0 (a), which coordinates' in output


def test_a_stopped_process_is_missed():
  command = _command("step()\nprint('READY', flush=True)\ntime.sleep(99)", 4)
  with processes.started(command, 2, 1) as job:
    for index in range(2):
      job.wait_for(index, 'READY', 60)
    job.kill(1, signal.SIGSTOP)
    job.wait_for(0, 'heartbeat', 30)
    job.kill(1, signal.SIGKILL)
    assert job.results(30)[0].returncode != 0


def test_a_process_that_never_comes():
  ((code, output, _),) = processes.run_processes(
    _command('pass', join_s=2),
    count=1,
    devices=1,
    timeout_s=30,
    env={'JAX_NUM_PROCESSES': '2', 'JAX_PROCESS_ID': '0'},
  )
  assert code == watch.LOST
  assert 'could not join the 2 processes' in output


def test_a_difference_is_named_in_every_process():
  results = processes.run_processes(
    _command(
      """
      distributed.agree('same', {'a': '1'})
      facts = {'seed': str(ME), 'steps': '5'} | ({'new': 'x'} if ME else {})
      distributed.agree('not', facts)
      """
    ),
    count=2,
    devices=1,
    timeout_s=60,
  )
  for index, result in enumerate(results):
    assert result.returncode == 1
    if index:  # whichever gives up first: process 0 has the last word
      continue
    assert f'seed: 0 in process 0 ({HOST}); 1 in process 1 ({HOST})' in (
      result.output
    )
    assert f'new: (absent) in process 0 ({HOST}); x in process 1' in (
      result.output
    )
    assert 'steps' not in result.output


def test_differences_group_processes():
  same = {}
  reports = [
    ('p0', same),
    ('p1', {'seed': '2'}),
    ('p2', same),
    ('p3', {'seed': '2', 'late': None}),
  ]
  lines = distributed.differences({'seed': '1', 'late': 'x'}, reports)
  assert lines.splitlines() == [
    'the 4 processes of this job are not the same:',
    '  late: x in p0, p1, p2; (absent) in p3',
    '  seed: 1 in p0, p2; 2 in p1, p3',
    'start all of them with the same command, code and data',
  ]
  assert distributed.differences({'seed': '1'}, [('p0', {}), ('p1', {})]) == ''


def test_many_differences_are_cut():
  facts = {f'key{index:03}': 'v' * 300 for index in range(100)}
  many = [(f'p{index}', dict.fromkeys(facts, 'w')) for index in range(1, 9)]
  lines = distributed.differences(facts, [('p0', {}), *many]).splitlines()
  assert len(lines) == 23
  assert lines[-2] == '  and 80 more'
  assert f'{"v" * 120}... in p0; w in p1, p2, p3, p4 and 4 more' in lines[1]


def test_one_process_needs_nobody():
  with distributed.member(None):
    distributed.agree('x', {'a': '1'})


def test_source_is_the_content_of_files(tmp_path):
  (tmp_path / 'inner').mkdir()
  (tmp_path / 'inner' / 'a.py').write_text('1')
  (tmp_path / 'b.py').write_text('2')
  (tmp_path / 'notes.txt').write_text('3')
  before = distributed.source(tmp_path, 'package')
  assert list(before) == ['source package/b.py', 'source package/inner/a.py']
  (tmp_path / 'inner' / 'a.py').write_text('changed')
  after = distributed.source(tmp_path, 'package')
  changed = [name for name in before if before[name] != after[name]]
  assert changed == ['source package/inner/a.py']


def test_strangers_are_sent_away():
  hub = watch.Hub('process 0 (here)', 2, 'secret')
  hello = {'process': 1, 'name': 'process 1 (there)'}
  for line in (
    b'GET / HTTP/1.1\r\n\r\n',
    json.dumps(hello | {'token': 'guess'}).encode() + b'\n',
    json.dumps({'code': 1, 'reason': 'end all'}).encode() + b'\n',
    b'[]\n',
    b'x' * 100_000,
  ):
    with socket.create_connection(('localhost', hub.port), 5) as stranger:
      try:
        stranger.sendall(line)
        assert stranger.recv(10) == b''  # closed, and this process goes on
      except ConnectionError:
        pass
  assert hub.missing() == [0, 1]
  with socket.create_connection(('localhost', hub.port), 5) as friend:
    friend.sendall(json.dumps(hello | {'token': 'secret'}).encode() + b'\n')
    until = time.monotonic() + 5
    while hub.missing() == [0, 1] and time.monotonic() < until:
      time.sleep(0.01)
    friend.sendall(b'{"left": true}\n')
    assert hub.missing() == [0]
