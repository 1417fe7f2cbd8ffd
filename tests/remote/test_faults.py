"""What the network can do to a client and a learner, by a proxy between them."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from peers import Envs, Learner, assert_whole, lives, until


class Proxy:
  """Forwards TCP connections; can hold back either direction, delay both, and reset all."""

  def __init__(self, port: int) -> None:
    self._to = ('127.0.0.1', port)
    self._listener = socket.create_server(('127.0.0.1', 0))
    self.address = f'tcp://127.0.0.1:{self._listener.getsockname()[1]}'
    self.up = self.down = True  # towards the learner; towards the client
    self.delay = 0.0
    self._pairs: list[tuple[socket.socket, socket.socket]] = []
    self._stop = False
    self._threads = [threading.Thread(target=self._accept, daemon=True)]
    self._threads[0].start()

  def _accept(self) -> None:
    while not self._stop:
      if not select.select([self._listener], [], [], 0.05)[0]:
        continue
      near, _ = self._listener.accept()
      try:
        far = socket.create_connection(self._to, 5)
      except OSError:
        near.close()
        continue
      self._pairs.append((near, far))
      for a, b, name in ((near, far, 'up'), (far, near, 'down')):
        thread = threading.Thread(target=self._forward, args=(a, b, name), daemon=True)
        thread.start()
        self._threads.append(thread)

  def _forward(self, a: socket.socket, b: socket.socket, name: str) -> None:
    held: list[tuple[float, bytes]] = []
    with contextlib.suppress(OSError, ValueError):
      while not self._stop:
        if getattr(self, name) and select.select([a], [], [], 0.01)[0]:
          data = a.recv(65536)
          if not data:
            break
          held.append((time.monotonic() + self.delay, data))
        elif not getattr(self, name):
          time.sleep(0.01)
        while held and held[0][0] <= time.monotonic():
          b.sendall(held.pop(0)[1])
    for s in (a, b):
      with contextlib.suppress(OSError):
        s.shutdown(socket.SHUT_RDWR)

  def reset(self) -> None:
    """All connections, as a router that has forgotten them would."""
    pairs, self._pairs = self._pairs, []
    for s in (s for pair in pairs for s in pair):
      with contextlib.suppress(OSError):
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
        s.close()

  def close(self) -> None:
    self._stop = True
    for thread in self._threads:
      thread.join(10)
    self.reset()
    self._listener.close()


@contextlib.contextmanager
def between(tmp_path: Path, peer_timeout: float = 1.0) -> Iterator[tuple[Learner, Proxy, Envs]]:
  """A learner, a proxy and a client that steps; at the end, what arrived must be whole."""
  with Learner(slots=2, peer_timeout=peer_timeout) as learner:
    proxy = Proxy(int(learner.address.rpartition(':')[2]))
    try:
      with Envs(proxy.address, tmp_path / 'log', '--num-envs', '2') as envs:
        until(lambda: learner.steps > 50)
        yield learner, proxy, envs
    finally:
      proxy.close()
    counts = learner.server.counts
    until(lambda: learner.steps == counts['frames'] - counts['withdrawn'])  # the last is taken
    found = lives(learner.arrivals)
    assert_whole(found)
    assert counts['malformed'] == 0
    assert sum(map(len, found.values())) == learner.steps


def goes_on(learner: Learner) -> None:
  before = learner.steps
  until(lambda: learner.steps > before + 50)


@pytest.mark.parametrize(
  'directions',
  [('up', 'down'), ('up',), ('down',)],
  ids=['both', 'to the learner', 'to the client'],
)
def test_a_cut_is_noticed_and_outlived(directions: tuple[str, ...], tmp_path: Path) -> None:
  with between(tmp_path) as (learner, proxy, envs):
    for direction in directions:
      setattr(proxy, direction, False)
    if 'up' in directions:  # else the client's PINGs arrive, until it gives up
      learner.says('silent for')
    until(lambda: 'begin anew when it is back' in envs.output)
    for direction in directions:
      setattr(proxy, direction, True)
    goes_on(learner)


@pytest.mark.slow
def test_a_cut_of_30_seconds(tmp_path: Path) -> None:
  with between(tmp_path, peer_timeout=5.0) as (learner, proxy, _):
    proxy.up = proxy.down = False
    learner.says('no environments are connected')
    time.sleep(30)
    proxy.up = proxy.down = True
    goes_on(learner)


def test_a_delay_of_200_ms_is_slow_and_nothing_else(tmp_path: Path) -> None:
  with between(tmp_path) as (learner, proxy, envs):
    proxy.delay = 0.2
    before, began = learner.steps, time.monotonic()
    until(lambda: learner.steps > before + 16)
    assert time.monotonic() - began > 1.0
    assert envs.output.count('joined') == 1


def test_connections_that_are_reset(tmp_path: Path) -> None:
  with between(tmp_path) as (learner, proxy, envs):
    for i in range(5):
      proxy.reset()
      until(lambda i=i: envs.output.count('joined') >= i + 2)
      goes_on(learner)
    until(lambda: learner.server.counts['dropped'] >= 5)
