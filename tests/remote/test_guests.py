"""Connections that say nothing are cut, and bounded; how ZeroMQ numbers them is not known beforehand."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import zmq
from children import environment, until
from peers import ANY, Learner, Raw
from podrace.remote.guests import Guests
from podrace.remote.top import Asker

import podrace
from podrace.remote import guests

FIRST = """
import sys, zmq
from podrace.remote import security
from podrace.remote.hub import Hub, Listen
found = []
hub = Hub(Listen('tcp://127.0.0.1:*'), lambda level, line: None)
hub.dispatch = lambda address, *rest: found.append(address)
hub.open(1000, 10, 10)
context = zmq.Context()
one = context.socket(zmq.DEALER)
one.connect(hub.address)
one.send(b'\\x91\\x06')
while not found:
  hub.poll(1.0)
  for raw in hub.received(1):
    hub.take(raw)
print(found[0].hex())
one.close()
context.term()
hub.shut()
"""


def test_the_numbers_of_connections_are_others_in_each_process() -> None:
  """A peer that takes the next one ends libzmq's process, and unseeded they are the same everywhere."""
  found = [
    subprocess.run(
      [sys.executable, '-c', FIRST], env=environment(), capture_output=True, text=True, check=True
    ).stdout.strip()
    for _ in range(3)
  ]
  assert len(set(found)) == 3 and '006b8b4567' not in found, found


def test_every_context_is_made_where_they_are_seeded() -> None:
  files = [
    p for p in Path(podrace.__file__).parent.rglob('*.py') if 'zmq.Context(' in p.read_text()
  ]
  assert [p.name for p in files] == ['security.py']


def strangers(context: zmq.Context, address: str, count: int) -> list[zmq.Socket]:
  """Connections that finish the handshake, say nothing, and do not come back."""
  found = []
  for _ in range(count):
    one = context.socket(zmq.DEALER)
    one.linger, one.reconnect_ivl = 0, -1
    one.connect(address)
    found.append(one)
  return found


@pytest.mark.parametrize('kind', ['tcp', 'ipc'])
def test_who_says_nothing_is_cut(
  kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(guests, 'SILENT_SECONDS', 0.5)
  context = zmq.Context()
  address = ANY if kind == 'tcp' else f'ipc://{tmp_path}/socket'
  with Learner(address=address, peer_timeout=60.0) as learner, Raw(learner.address) as raw:
    raw.join(2)
    asker = Asker(learner.address, None, False)
    asker.ask()  # who has said something may be silent for longer
    hub = learner.server
    until(lambda: hub._guests._until and len(hub._connections) == 2)
    sockets = strangers(context, learner.address, 50)
    until(lambda: hub.counts['cut'] == 50)
    until(lambda: len(hub._connections) == 2)
    assert any('connections that said nothing' in line for line in learner.said)
    assert len(hub.peers) == 1 and asker.ask()['counts']['cut'] == 50
    asker.close()
    for one in sockets:
      one.close()
  context.term()


def test_there_are_so_many_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
  """Those that came last stay, so that a client can still join."""
  monkeypatch.setattr(guests, 'MOST', 20)
  context = zmq.Context()
  with Learner(peer_timeout=60.0) as learner:
    hub = learner.server
    sockets = strangers(context, learner.address, 200)
    until(lambda: hub._guests.cut == 180)
    until(lambda: len(hub._connections) == 20)
    with Raw(learner.address) as raw:
      raw.join(2)
      sockets += strangers(context, learner.address, 200)
      until(lambda: hub._guests.cut == 380)
      until(lambda: len(hub._connections) == 21)
      assert len(hub.peers) == 1
    for one in sockets:
      one.close()
  context.term()


def test_a_file_that_is_somebody_elses_by_now_is_left_alone() -> None:
  with socket.create_server(('127.0.0.1', 0)) as listener:
    pair = socket.create_connection(listener.getsockname()), listener.accept()[0]
    other = socket.create_connection(listener.getsockname()), listener.accept()[0]
  found = Guests()
  file = pair[1].detach()
  found.came(file, -1.0)
  os.dup2(other[1].fileno(), file)  # closed, and opened anew
  found.look(1e18)
  assert not found.cut and not len(found)
  other[1].sendall(b'x')
  assert other[0].recv(1) == b'x'
  os.close(file)
  for one in (pair[0], *other):
    one.close()
