"""A listener reads its clients in turn: one that says much, or reads nothing, holds up no other for long."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bare
import pytest
from bare import Service
from children import until

from podrace.distributed.net import connections, keys, session_messages, stream
from podrace.distributed.net.frame import Kind, packed

SAY = packed(20, 'SAY', str)
ANSWER = packed(90, 'ANSWER', str)
KINDS = session_messages.of_listeners(ANSWER)
FLOODERS, MESSAGES = 5, 3000


@contextlib.contextmanager
def stopped(service: Service) -> Iterator[Callable[[], None]]:
  """The listener looks at nothing until what this yields is called."""
  turning, turn = threading.Event(), threading.Event()
  service.listener.call(lambda: (turning.set(), turn.wait(60)))
  assert turning.wait(60)
  try:
    yield turn.set
  finally:
    turn.set()


def connect(service: Service, keys: Path | None = None) -> bare.Bare:
  return bare.connect(service.address, KINDS, keys)


class Counting(Service):
  """Counts what the listener handles, and how much of it came before the PING of the client `good`."""

  def __init__(self) -> None:
    super().__init__(SAY)
    self.handled, self.before = 0, -1

  def handle(self, peer: Any, kind: Kind, fields: Any, arrays: Any) -> None:
    self.handled += 1

  def ping(self, peer: Any, said: Any) -> Any:
    if said == 'good':
      self.before = self.handled + self.listener.counts['asked']
    else:
      self.handled += 1
    return said


@pytest.mark.parametrize('kind', [SAY, session_messages.PING, session_messages.ASK])
@pytest.mark.parametrize('with_keys', [False, True])
def test_others_wait_for_a_few_messages_of_each_client_only(
  kind: Kind, with_keys: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  directory = None
  if with_keys:
    keys.new_keys(tmp_path / 'keys')
    directory = tmp_path / 'keys'
  monkeypatch.setattr(connections, 'MESSAGE_SECONDS', 60.0)  # the number of messages decides here
  fields = {SAY: ['x'], session_messages.PING: ['more'], session_messages.ASK: []}[kind]
  flood = b''.join(kind.pack(fields)) * MESSAGES
  with Counting().listen(keys=directory) as service, contextlib.ExitStack() as stack:
    ends = [stack.enter_context(connect(service, directory)) for _ in range(FLOODERS)]
    good = stack.enter_context(connect(service, directory))
    for end in (*ends, good):
      end.hello('test')
    counts = service.listener.counts
    with stopped(service) as go_on:
      for end in ends:
        end.send(flood)
      good.say(session_messages.PING, 'good')
      go_on()
      assert good.expect(session_messages.PONG)[0] == ['good']
    assert 0 <= service.before <= 2 * FLOODERS * connections.MESSAGES
    if kind is SAY:  # nothing of the flood is lost
      until(lambda: service.handled == FLOODERS * MESSAGES)
    assert not counts['malformed']


def test_one_that_has_no_session_is_heard_less(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(connections, 'MESSAGE_SECONDS', 60.0)
  with Counting().listen() as service, connect(service) as guest, connect(service) as good:
    good.hello('test')
    with stopped(service) as go_on:
      guest.send(b''.join(session_messages.ASK.pack([])) * MESSAGES)
      good.say(session_messages.PING, 'good')
      go_on()
      good.expect(session_messages.PONG)
    assert 0 <= service.before <= 2 * connections.GUEST_MESSAGES


def test_a_long_message_is_the_last_of_its_turn() -> None:
  order: list[str] = []
  waiting = threading.Event()

  def slow(service: Service, peer: Any, kind: Kind, fields: Any, arrays: Any) -> None:
    order.append(fields[0])
    if fields[0] == 'slow':
      waiting.wait(3 * connections.MESSAGE_SECONDS)

  with Service(SAY, on=slow).listen() as service, connect(service) as one, connect(service) as two:
    one.hello('test')
    two.hello('test')
    with stopped(service) as go_on:
      one.send(b''.join(SAY.pack(['slow'])) * 5)
      two.say(SAY, 'quick')
      go_on()
      until(lambda: len(order) == 6)
    assert order.index('quick') <= 1


def test_answers_that_are_not_read_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(stream, 'ANSWER_BYTES', 2**20)
  size = 2**18
  waiting: list[int] = []

  def answer(service: Service, peer: Any, kind: Kind, fields: Any, arrays: Any) -> None:
    service.listener.send(peer, ANSWER, 'x' * size)
    waiting.append(peer.stream.answer_bytes)

  with Service(SAY, on=answer).listen() as service, connect(service) as deaf:
    deaf.hello('test')
    with contextlib.suppress(OSError):  # it is cut off
      for _ in range(200):
        deaf.say(SAY, 'x')
    until(lambda: service.of('left'))
    assert max(waiting) <= 2**20 + size + 64
    assert len(waiting) < 200
