"""A listener with clients that are right, wrong, slow, gone or hostile; its handler is a stub."""

from __future__ import annotations

import gc
import os
import random
import re
import socket as sockets
import ssl
import time
import types
import weakref
from pathlib import Path
from typing import Any

import bare
import pytest
from bare import Service
from children import until

from podrace import errors
from podrace.distributed.net import (
  connections,
  descriptors,
  keys,
  listener,
  session_messages,
  sessions,
)
from podrace.distributed.net.frame import PREFIX, WireError, fixed, packed

SAY = packed(20, 'SAY', str, arrays=1)
ASK_BACK = fixed(90, 'ASK_BACK', '<I', arrays=1)
KINDS = session_messages.of_listeners(ASK_BACK)
HELLO = session_messages.hello('test', 0)


def connect(service: Service, **more: Any) -> bare.Bare:
  return bare.connect(service.address, KINDS, **more)


def client(service: Service, number: int = 0) -> bare.Bare:
  end = connect(service)
  end.hello('test', number)
  return end


def test_a_session_begins_speaks_and_ends() -> None:
  with Service(SAY).listen() as service, connect(service) as end:
    assert end.hello('test')['silence'] == session_messages.SILENCE
    end.say(SAY, 'hello', arrays=(b'bytes',))
    end.say(session_messages.PING, 7)
    assert end.expect(session_messages.PONG)[0] == [7]
    assert service.of('handle') == [('SAY', ['hello'], [b'bytes'])]
    end.say(session_messages.BYE, 'test')
    until(lambda: service.of('left'))
    assert service.of('left')[0][1] == 'left: test' and not service.listener.peers
    assert service.listener.counts['sessions'] == 1


def test_nothing_stays_open_where_somebody_listens_already() -> None:
  with Service(SAY).listen() as service:
    other = Service(SAY)
    before = len(os.listdir('/dev/fd'))
    with pytest.raises(errors.SecurityError):
      other.listen(service.address)
    assert len(os.listdir('/dev/fd')) <= before


def test_the_end_of_a_connection_ends_its_session_last() -> None:
  with Service(SAY).listen() as service:
    end = client(service)
    end.say(SAY, 'last', arrays=(b'',))
    end.close()
    until(lambda: service.of('left'))
    assert [x[0] for x in service.happened] == ['welcome', 'handle', 'left']


def test_a_returning_client_replaces_its_older_connection() -> None:
  with Service().listen() as service:
    old, *newer = (client(service, number) for number in (5, 6, 5))
    assert old.is_closed()
    assert len(service.of('left')) == 1 and len(service.listener.peers) == 2
    for end in (old, *newer):
      end.close()


@pytest.mark.parametrize(
  ('change', 'reason'),
  [(dict(name='other'), r"'test' .* 2 .*'other'"), (dict(version=1), r"'test' .* 1")],
)
def test_another_service_or_version_is_refused(change: dict[str, Any], reason: str) -> None:
  with Service().listen() as service, connect(service) as end:
    end.say(session_messages.HELLO, {**session_messages.hello('test', 0), **change})
    heard = end.hear()
    assert heard is not None and heard[0] is session_messages.REFUSED
    assert re.search(reason, heard[1][0][0])
    until(lambda: any('refused' in x for x in service.said))
    assert not service.listener.peers


def test_a_client_is_told_to_wait_and_joins_later() -> None:
  service = Service()
  service.wait = 'getting ready'
  with service.listen(), connect(service) as end:
    end.say(session_messages.HELLO, session_messages.hello('test', 0))
    assert end.expect(session_messages.WAIT)[0] == ['getting ready']
    service.wait = ''
    end.hello('test')
    assert len(service.listener.peers) == 1


@pytest.mark.parametrize(
  ('said', 'reason'),
  [
    ([(session_messages.HELLO, [{}])], 'name'),
    ([(session_messages.HELLO, [{**HELLO, 'pid': -1}])], 'pid'),
    ([(session_messages.HELLO, [{**HELLO, 'host': 'x' * 201}])], 'host'),
    ([(session_messages.PING, [None])], 'PING'),
    ([(session_messages.BYE, ['x'])], 'BYE'),
    ([(SAY, ['x'])], 'SAY'),
    ([(session_messages.HELLO, [HELLO])] * 2, 'second HELLO'),
  ],
)
def test_what_is_not_as_it_must_be_ends_the_connection(said: Any, reason: str) -> None:
  with Service(SAY).listen() as service, connect(service) as end:
    for kind, fields in said:
      end.say(kind, *fields, arrays=(b'x',) if kind.arrays else ())
    assert reason in end.gone() and end.is_closed()
    assert service.listener.counts['malformed'] == 1 and not service.listener.counts['unexpected']


def test_an_error_of_the_handler_ends_that_session_only() -> None:
  def fail(service: Service, peer: Any, *args: Any) -> None:
    raise ZeroDivisionError('missing check')

  with Service(SAY, on=fail).listen() as service, client(service) as good, client(service) as bad:
    bad.say(SAY, 'x', arrays=(b'',))
    assert bad.is_closed()
    assert any('ZeroDivisionError' in x for x in service.said)
    good.say(session_messages.PING, 1)
    assert good.expect(session_messages.PONG)[0] == [1]
    assert service.listener.counts['unexpected'] == 1


def test_a_failure_of_the_thread_is_raised_at_its_owner() -> None:
  class Failing(Service):
    def turned(self) -> None:
      raise MemoryError

  service = Failing().listen()
  service.serving.ended.wait(20)
  assert 'MemoryError' in service.serving.failure
  with pytest.raises(MemoryError):
    service.__exit__()


def test_silence_ends_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
  with Service().listen(peer_timeout=0.5) as service, client(service) as end:
    assert end.is_closed()
    assert 'silent' in service.of('left')[0][1]


def test_a_stop_of_the_listener_is_nobodys_silence(monkeypatch: pytest.MonkeyPatch) -> None:
  stopped = 0.0  # seconds that its clock has gone on without it
  clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + stopped)
  for module in (connections, listener, sessions):
    monkeypatch.setattr(module, 'time', clock)
  with Service().listen(peer_timeout=3.0) as service, client(service) as end:
    until(lambda: service.listener.peers)
    stopped = 3.5
    until(lambda: service.of('forgive'))
    end.say(session_messages.PING, 2)
    assert end.expect(session_messages.PONG)[0] == [2] and not service.of('left')


def test_connections_that_say_nothing_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(connections, 'SILENT_SECONDS', 0.3)
  with Service().listen() as service, connect(service) as silent, connect(service) as half:
    half.send(PREFIX.pack(50, 1 | 40 << 8) + b'x')
    assert silent.is_closed() and half.is_closed()
    assert service.listener.counts['cut'] == 2 and not service.listener.guests


def test_a_connection_that_has_ended_holds_no_memory() -> None:
  """Nor waits for the garbage collector."""
  with Service().listen() as service, connect(service) as end:
    until(lambda: service.listener.guests)
    gone = weakref.ref(next(iter(service.listener.guests)).stream)
    gc.disable()
    try:
      end.close()
      until(lambda: not service.listener.guests)
      service.listener.call(lambda: None)
      until(lambda: gone() is None, 20)
    finally:
      gc.enable()


def test_connections_without_a_session_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(descriptors, 'GUESTS', 20)
  with Service().listen() as service:
    ends = [connect(service) for _ in range(60)]
    until(lambda: service.listener.counts['cut'] == 40)
    assert len(service.listener.guests) == 20
    assert all(end.is_closed() for end in ends[:40])
    with client(service) as good:  # whoever says hello at once is let in
      good.say(session_messages.PING, 3)
      assert good.expect(session_messages.PONG)[0] == [3]
    for end in ends:
      end.close()


def test_a_guest_may_send_no_large_frame() -> None:
  with Service(SAY, largest=2**24).listen() as service, connect(service) as end:
    end.send(PREFIX.pack(session_messages.GUEST_BYTES + 1, 1 | 10 << 8))
    heard = end.hear()
    assert heard is not None and '65536' in heard[1][0]
    with client(service) as known:
      known.say(SAY, 'x', arrays=(bytes(2**20),))
      until(lambda: service.of('handle'))


def test_new_connections_have_a_bounded_share(
  monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
  monkeypatch.setattr(connections, 'GREETING_SECONDS', 0.02)
  keys.new_keys(tmp_path / 'keys')
  with Service().listen(keys=tmp_path / 'keys') as service:
    ends = []
    for _ in range(50):
      ends.append(sockets.create_connection(('127.0.0.1', int(service.address.rpartition(':')[2]))))
      ends[-1].send(b'no handshake')
    until(lambda: service.listener.counts['connections'] >= 50)  # all in the end
    assert service.listener.counts['turned away'] > 0
    with bare.connect(service.address, KINDS, tmp_path / 'keys') as good:
      good.hello('test')
    for end in ends:
      end.close()


def test_half_open_handshakes_hold_nobody_up(tmp_path: Path) -> None:
  keys.new_keys(tmp_path / 'keys')
  with Service().listen(keys=tmp_path / 'keys') as service:
    port = int(service.address.rpartition(':')[2])
    ends = [sockets.create_connection(('127.0.0.1', port)) for _ in range(30)]
    context = keys.client_context(tmp_path / 'keys')
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
      context.wrap_bio(incoming, outgoing).do_handshake()
    hello = outgoing.read()
    for i, end in enumerate(ends):
      end.send(hello[: 1 + i * len(hello) // len(ends)])
    with bare.connect(service.address, KINDS, tmp_path / 'keys') as good:
      good.hello('test')
      good.say(session_messages.PING, 1)
      assert good.expect(session_messages.PONG)[0] == [1]
    for end in ends:
      end.close()


def test_a_client_that_reads_nothing_is_dropped() -> None:
  def answer(service: Service, peer: Any, kind: Any, fields: Any, arrays: Any) -> None:
    service.listener.send(peer, ASK_BACK, 1, arrays=(bytes(10**6),))

  with (
    Service(SAY, on=answer).listen() as service,
    client(service) as deaf,
    client(service) as good,
  ):
    for _ in range(2 * sessions.BACKLOG):
      try:
        deaf.say(SAY, 'more', arrays=(b'',))
      except OSError:
        break
    until(lambda: service.of('left'))
    assert 'read' in service.of('left')[0][1]
    good.say(SAY, 'x', arrays=(b'',))
    assert len(good.expect(ASK_BACK)[1][0]) == 10**6


def test_whoever_has_read_is_told_about() -> None:
  def answer(service: Service, peer: Any, kind: Any, fields: Any, arrays: Any) -> None:
    service.listener.send(peer, ASK_BACK, 1, arrays=(bytes(3 * 10**7),))
    service.happened.append(('waits', peer.stream.waiting))

  with Service(SAY, on=answer).listen() as service, client(service) as end:
    end.say(SAY, 'x', arrays=(b'',))
    until(lambda: service.of('waits'))
    assert service.of('waits') == [(True,)] and not service.of('drained')
    assert len(end.expect(ASK_BACK)[1][0]) == 3 * 10**7
    until(lambda: service.of('drained'))


def test_reports_are_for_anybody_and_one_at_a_time() -> None:
  with Service().listen() as service, client(service), connect(service) as guest:
    for _ in range(50):
      guest.say(session_messages.ASK)
    ((report,), _) = guest.expect(session_messages.REPORT)
    assert report['service'] == 'test' and len(report['clients']) == 1
    assert service.listener.counts['asked'] >= 1


def test_the_end_is_told() -> None:
  service = Service().listen()
  with service, client(service) as end:
    until(lambda: service.listener.peers)
    service.serving.ask_to_stop()
    assert end.last(session_messages.END) is False


def test_an_endless_log_is_bounded() -> None:
  with Service().listen() as service:
    for _ in range(200):
      with connect(service) as end:
        end.send(b'GET / HTTP/1.1\r\n\r\n')
    until(lambda: service.listener.counts['malformed'] == 200)
    assert 1 <= len(service.said) < 40


@pytest.mark.parametrize('known', [False, True])
def test_hostile_bytes_do_no_harm(known: bool) -> None:
  """Spoiled messages of all kinds, cut anywhere: nothing unexpected, nothing left behind."""
  rng = random.Random(known)

  def refuse(service: Service, peer: Any, kind: Any, fields: Any, arrays: Any) -> None:
    if fields[0] != 'good':
      raise WireError('no')

  good = [(session_messages.HELLO, [session_messages.hello('test', 1)], ()), (SAY, ['good'], (b'abc',)),
          (session_messages.PING, [1], ()), (session_messages.ASK, [], ()), (session_messages.BYE, ['x'], ())]  # fmt: skip
  with Service(SAY, on=refuse).listen() as service:
    for _ in range(300):
      with client(service) if known else connect(service) as end:
        kind, fields, arrays = rng.choice(good)
        data = bytearray(b''.join(map(bytes, kind.pack(fields, arrays))))
        for _ in range(rng.randint(1, 3)):
          data[rng.randrange(len(data))] = rng.randrange(256)
        end.send(bytes(data[: rng.randint(1, len(data))]))
    until(lambda: not service.listener.peers)
    until(lambda: not [g for g in service.listener.guests if not g.ending])
    assert not service.listener.counts['unexpected'], service.said
    with client(service) as end:
      end.say(session_messages.PING, 1)
      assert end.expect(session_messages.PONG)[0] == [1]
