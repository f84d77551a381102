"""Processes of a job that watch each other: none waits for one that is gone.

Every process keeps a connection to process 0. The kernel closes it when its
process ends in any way, and process 0 tells the others at once who was lost,
or what another said when it gave up; all end with that message and its exit
code. JAX alone waits for missed heartbeats, and knows numbers but no hosts.
What no connection shows (a process that hangs as a whole, a bug here) is left
to those heartbeats.
"""

import hmac
import json
import os
import select
import selectors
import socket
import sys
import threading
import time
from typing import NoReturn

# Exit code of a process that ended because another one was lost.
LOST = 76
# Of a machine that vanished nothing closes the connection: the kernel asks
# after this many silent seconds, four times.
_SILENCE_S, _ASK_EVERY_S, _ASK_TIMES = 15, 5, 4
# How long process 0, whose end would end the others with a message of JAX,
# lets them go first.
_LAST_S = 5.0
_LINE = 1 << 16  # bytes of the longest message


def end(who: str, message: str, code: int) -> NoReturn:
  """Ends this process at once, whatever its other threads wait for.

  Args:
    who: this process, in front of the message.
    message: why, to standard error.
    code: exit code.
  """
  # Not print: another thread may hold the lock of sys.stderr for ever.
  os.write(2, f'\n[{who}] {message}\n'.encode())
  # Atexit functions of JAX would wait for the others at a barrier.
  os._exit(code)


class Hub:
  """Process 0's end of all connections."""

  def __init__(self, who: str, num_processes: int, token: str):
    """Listens on a port of its own.

    Args:
      who: this process in messages.
      num_processes: of the job, this one included.
      token: what a connection must show.
    """
    self._who = who
    self.token = token
    self._count = num_processes
    self._names = {}  # of the processes that said hello, by id
    self._left: set[int] = set()
    self._open: dict[socket.socket, int] = {}
    self._buffers: dict[socket.socket, bytes] = {}
    dual = socket.has_dualstack_ipv6()
    self._listener = socket.create_server(
      ('', 0),
      family=socket.AF_INET6 if dual else socket.AF_INET,
      dualstack_ipv6=dual,
      backlog=num_processes,
    )
    self.port = self._listener.getsockname()[1]
    self.complete = threading.Event()  # all have said hello
    threading.Thread(target=self._run, name='hub', daemon=True).start()

  def missing(self) -> list[int]:
    """Ids of the processes that have not said hello."""
    return sorted(set(range(self._count)) - set(self._names))

  def names(self) -> list[str]:
    """The processes by id, with their hosts."""
    return [self._names[index] for index in sorted(self._names)]

  def _run(self) -> None:
    with selectors.DefaultSelector() as selector:
      selector.register(self._listener, selectors.EVENT_READ)
      while True:
        for key, _ in selector.select():
          if key.fileobj is self._listener:
            connection, _ = self._listener.accept()
            _keep_alive(connection)
            selector.register(connection, selectors.EVENT_READ)
            self._buffers[connection] = b''
          elif not self._read(key.fileobj):
            selector.unregister(key.fileobj)
            key.fileobj.close()

  def _read(self, connection: socket.socket) -> bool:
    """Takes what arrived; False where the connection is over."""
    try:
      data = connection.recv(4096)
      cause = 'its connection closed without a word'
    except OSError as error:
      data, cause = b'', str(error)
    if not data:
      index = self._open.pop(connection, None)
      if index is not None and index not in self._left:
        self._end_all(
          f'{self._names[index]} was lost ({cause}: killed, out of memory, or'
          ' its machine is gone)',
          LOST,
        )
      return False
    *lines, rest = (self._buffers[connection] + data).split(b'\n')
    self._buffers[connection] = rest
    return len(rest) < _LINE and all(
      self._take(connection, line) for line in lines
    )

  def _take(self, connection: socket.socket, line: bytes) -> bool:
    """Handles a message; False for one that is not of this job."""
    try:
      message = json.loads(line)
      if connection not in self._open:
        if not hmac.compare_digest(message['token'], self.token):
          return False
        self._open[connection] = message['process']
        self._names[message['process']] = message['name']
        if len(self._names) == self._count:
          self.complete.set()
      elif 'left' in message:
        self._left.add(self._open[connection])
      else:
        name = self._names[self._open[connection]]
        self._end_all(f'{name} gave up: {message["reason"]}', message['code'])
    except (ValueError, KeyError, TypeError):
      return False
    return True

  def _end_all(self, message: str, code: int) -> NoReturn:
    line = json.dumps({'end': message, 'code': code}).encode() + b'\n'
    others = []
    for connection, index in self._open.items():
      if index:
        try:
          connection.sendall(line)
          others.append(connection)
        except OSError:
          pass  # gone as well
    os.write(2, f'\n[{self._who}] {message}\n'.encode())
    until = time.monotonic() + _LAST_S
    while others and time.monotonic() < until:
      for connection in select.select(others, [], [], 0.1)[0]:
        try:
          if connection.recv(4096):
            continue
        except OSError:
          pass
        others.remove(connection)
    os._exit(code)


class Member:
  """The connection of a process (process 0 has one too) to the hub."""

  def __init__(
    self,
    process_id: int,
    name: str,
    hub_name: str,
    address: tuple[str, int],
    token: str,
    timeout_s: float,
  ):
    """Connects and says hello.

    Args:
      process_id: of this process.
      name: of this process in messages, with its host.
      hub_name: the same of process 0.
      address: host and port of the hub.
      token: of the job.
      timeout_s: for the connection.

    Raises:
      OSError: there is no way to the hub.
    """
    self._id = process_id
    self._name = name
    self._hub_name = hub_name
    self._leaving = False
    self._socket = socket.create_connection(address, timeout_s)
    self._socket.settimeout(None)
    _keep_alive(self._socket)
    self._send({'process': process_id, 'name': name, 'token': token})
    if process_id:  # process 0 is told by its own hub
      threading.Thread(target=self._run, name='watch', daemon=True).start()

  def leave(self) -> None:
    """Says that this process ends well: its end is no loss."""
    self._leaving = True
    self._send({'left': True})

  def give_up(self, code: int, reason: str) -> NoReturn:
    """Tells all others to end with this reason and code, and ends."""
    try:
      self._send({'code': code, 'reason': reason[: _LINE // 8]})
      if self._id == 0:
        time.sleep(2 * _LAST_S)  # the hub ends this process, as the last one
    except OSError:
      pass  # the hub is gone: so are the others, or soon
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

  def _send(self, message: dict) -> None:
    self._socket.sendall(json.dumps(message).encode() + b'\n')

  def _run(self) -> None:
    try:
      line = self._socket.makefile('rb').readline()
    except OSError:
      line = b''
    if line:
      message = json.loads(line)
      end(self._name, message['end'], message['code'])
    if not self._leaving:
      end(
        self._name,
        f'{self._hub_name}, which coordinates the job, was lost (its'
        ' connection closed without a word: killed, out of memory, or its'
        ' machine is gone)',
        LOST,
      )


def _keep_alive(connection: socket.socket) -> None:
  """Lets the kernel find out that the machine at the other end is gone."""
  connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
  for name, value in (
    ('TCP_KEEPIDLE', _SILENCE_S),
    ('TCP_KEEPINTVL', _ASK_EVERY_S),
    ('TCP_KEEPCNT', _ASK_TIMES),
  ):
    if hasattr(socket, name):  # not all on macOS
      connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
