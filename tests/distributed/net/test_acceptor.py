"""The socket that accepts connections: its share of the time, and the file of a Unix socket."""

from __future__ import annotations

import socket as sockets
import types
from pathlib import Path

import pytest

from podrace.distributed.net import connections, safe_text
from podrace.distributed.net.connections import Acceptor
from podrace.distributed.net.loop import READ, Loop


def connect(one: Acceptor) -> sockets.socket:
  return sockets.create_connection(('127.0.0.1', int(one.address.rpartition(':')[2])))


def test_it_pauses_after_its_share_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
  clock = types.SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
  for module in (connections, safe_text):
    monkeypatch.setattr(module, 'time', clock)
  loop = Loop()
  one = Acceptor('tcp://127.0.0.1:*', loop)
  with connect(one):
    assert [(key.data, events) for key, events in loop.wait(60)] == [(one, READ)]
    with one.timed():
      (socket, where), *more = one.accept()
      clock.now += 2 * connections.GREETING_SECONDS
    assert not more and where[0] == '127.0.0.1'
    socket.close()
    with connect(one), one.timed():  # what is left of a handshake goes on
      assert loop.wait(0) == []
      one.resume()
      assert loop.wait(0) == []
      clock.now += 1.1 * connections.GREETING_SECONDS / connections.GREETING_SHARE
      one.resume()
      assert [(key.data, events) for key, events in loop.wait(60)] == [(one, READ)]
  one.close()
  loop.close()


def test_a_closed_path_is_left_to_the_next(tmp_path: Path) -> None:
  loop, path = Loop(), tmp_path / 'socket'
  one = Acceptor(f'unix:{path}', loop)
  one.close()
  assert not path.exists()
  other = Acceptor(f'unix:{path}', loop)
  one.close()
  assert path.exists()
  other.close()
  loop.close()
