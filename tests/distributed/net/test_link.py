"""A link to services that come, go, hang, cut, and lie; the service is a few lines."""

from __future__ import annotations

import logging
import re
import socket as sockets
import time
from typing import Any

import bare
import pytest
from bare import Service
from children import until
from proxy import Proxy
from test_net_keys import Nobody

from podrace.distributed.net import connecting, session_messages
from podrace.distributed.net.frame import PREFIX, WireError, packed
from podrace.distributed.net.link import NO_PODRACE, Link, Refused

SAY = packed(20, 'SAY', str)
HEAR = packed(90, 'HEAR', str, arrays=1)


class Client(Nobody):
  """Keeps what it hears."""

  kinds = session_messages.of_listeners(HEAR)

  def __init__(self) -> None:
    super().__init__()
    self.heard: list[Any] = []

  def handle(self, kind: Any, fields: Any, arrays: Any) -> None:
    if fields[0] == 'lie':
      raise WireError('a lie')
    self.heard.append((fields[0], bytes(arrays[0])))


def to(address: str, client: Any = None, **more: Any) -> Link:
  return Link(address, None, False, client or Client(), **more).start()


def joined(link: Link) -> bool:
  until(lambda: link.check() or link.session is not None, 20)
  return True


def test_it_joins_says_and_hears() -> None:
  def answer(service: Service, peer: Any, kind: Any, fields: Any, arrays: Any) -> None:
    service.listener.send(peer, HEAR, fields[0], arrays=(bytes(10**6),))

  with Service(SAY, on=answer).listen() as service:
    client = Client()
    link = to(service.address, client)
    assert joined(link) and link.session == 1
    assert link.send(SAY, 'x') and not link.send(SAY, 'of another session', within=2)
    until(lambda: client.heard)
    assert client.heard == [('x', bytes(10**6))]
    link.close('done')
    assert not link.send(SAY, 'x')
    until(lambda: service.of('left'))
    assert service.of('left')[0][1] == 'left: done'


def test_it_waits_for_a_service_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
  free = bare.Accepting(session_messages.of_clients())
  free.close()
  with caplog.at_level(logging.INFO):
    link = to(free.address)
    until(lambda: link.why == connecting.NOBODY)
    assert link.session is None
    until(lambda: caplog.text.count(free.address) == 1)
    with Service().listen(free.address):
      assert joined(link)
      until(lambda: caplog.text.count(free.address) == 2)  # that it is back
  link.close()


def test_a_hello_that_is_too_large_names_both_sizes() -> None:
  class Large(Client):
    def hello(self) -> dict[str, Any]:
      return {'spaces': 'x' * 80_000}

  with Service().listen() as service:
    link = to(service.address, Large())
    with pytest.raises(Refused, match=r'80,\d{3} bytes, .* 65,536'):
      joined(link)
    assert not service.said


def test_a_hello_in_parts_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
  class Large(Client):
    def hello(self) -> dict[str, Any]:
      return {'spaces': 'x' * 60_000}

  def little_room(socket: sockets.socket) -> None:
    socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDBUF, 1)

  monkeypatch.setattr(connecting, 'set_no_delay', little_room)
  with Service().listen() as service:
    link = to(service.address, Large())
    assert joined(link)
    link.close()


def test_it_comes_back_over_a_new_connection() -> None:
  with Service(SAY).listen() as service:
    client, proxy = Client(), Proxy(service.address)
    link = to(proxy.address, client)
    assert joined(link)
    for session_number in (2, 3):
      proxy.reset()
      until(lambda n=session_number: link.session == n)
    assert client.joins == 3 and client.losses == 2
    link.close()
    proxy.close()


def test_silence_is_no_session_and_does_not_hang() -> None:
  with Service().listen(peer_timeout=0.5) as service:
    proxy = Proxy(service.address)
    link = to(proxy.address)
    heard_after = time.monotonic()
    assert joined(link)
    proxy.up = proxy.down = False  # a cut that no kernel sees
    until(lambda: link.session is None)
    assert time.monotonic() - heard_after > 0.5
    proxy.up = proxy.down = True
    assert joined(link)
    link.close()
    proxy.close()


def test_an_idle_link_pings_however_rarely_it_looks() -> None:
  listening = bare.Accepting(session_messages.of_clients())
  link = Link(listening.address, None, False, Client())
  link.patience = 600.0
  link.start()
  end = listening.welcome(silence=4.0)
  for _ in range(2):
    end.expect(session_messages.PING)
    end.say(session_messages.PONG, None)
  link.close()
  listening.close()


def test_a_refusal_ends_it_for_good() -> None:
  service = Service()
  service.refuse = ['another \x1b[2J schema']
  with service.listen():
    link = to(service.address)
    with pytest.raises(Refused, match=r'another \\x1b\[2J schema'):
      joined(link)
    with pytest.raises(Refused):
      link.check()
    link.close()


def test_it_waits_when_it_is_told_to() -> None:
  service = Service()
  service.wait = 'all is taken'
  with service.listen():
    link = to(service.address)
    until(lambda: link.why == 'all is taken')
    service.wait = ''
    assert joined(link)
    link.close()


def test_it_gives_up_when_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
  free = bare.Accepting(session_messages.of_clients())
  free.close()
  link = to(free.address, give_up=0.3)
  with pytest.raises(TimeoutError, match=re.escape(connecting.NOBODY)):
    joined(link)
  link.close()


def test_an_end_that_is_complete_ends_it() -> None:
  end = bare.Accepting(session_messages.of_clients())
  client = Client()
  link = to(end.address, client)
  with end.welcome() as one:
    one.say(session_messages.END, False, 'later')
    one.expect(session_messages.BYE)
  with end.welcome() as two:
    two.say(session_messages.END, True, 'all done')
    two.expect(session_messages.BYE)
  until(lambda: link.closed)
  assert link.closed and client.over
  link.close()
  end.close()


@pytest.mark.parametrize('lie', ['kind', 'length', 'message', 'early', 'welcome'])
def test_a_service_that_lies_is_left_and_tried_again(lie: str) -> None:
  end, client = bare.Accepting(session_messages.of_clients()), Client()
  link = to(end.address, client)
  if lie in ('early', 'welcome'):
    with end.accept() as one:
      one.expect(session_messages.HELLO)
      if lie == 'early':
        one.say(HEAR, 'x', arrays=(b'',))
      else:
        one.say(session_messages.WELCOME, {'silence': -1.0})
      assert one.is_closed()
  else:
    with end.welcome() as one:
      if lie == 'kind':
        one.send(PREFIX.pack(0, 250))
      elif lie == 'length':
        one.send(PREFIX.pack(3, 90 | 9 << 8))
      else:
        one.say(HEAR, 'lie', arrays=(b'',))
      assert one.is_closed()
  with end.welcome() as two:
    until(lambda: link.session is not None)
    two.say(HEAR, 'truth', arrays=(b'',))
    until(lambda: client.heard == [('truth', b'')])
    link.close()
  end.close()


@pytest.mark.parametrize(
  'greeting',
  [
    b'HTTP/1.1 400 Bad Request\r\n\r\n',
    b'SSH-2.0-OpenSSH_9.6\r\n',
    b'\xff' + bytes(8) + b'\x7f\x03\x00NULL',
  ],
  ids=['a web server', 'ssh', 'podrace of version 1'],
)
def test_another_program_at_the_port_is_named(
  greeting: bytes, caplog: pytest.LogCaptureFixture
) -> None:
  end = bare.Accepting(session_messages.of_clients())
  link = to(end.address)
  with end.accept() as one:
    one.send(greeting)
    until(lambda: NO_PODRACE in link.why)
    assert link.session is None
    link.check()  # its thread goes on
  link.close()
  end.close()


def test_a_failure_of_its_handler_is_raised_at_its_owner() -> None:
  class Failing(Client):
    def joined(self, told: Any) -> None:
      raise ZeroDivisionError('missing check')

  with Service().listen() as service:
    link = to(service.address, Failing())
    with pytest.raises(ZeroDivisionError):
      joined(link)
    link.close()


def test_a_link_that_waits_for_its_session_can_be_closed() -> None:
  free = bare.Accepting(session_messages.of_clients())  # it accepts, and says nothing
  link = to(free.address)
  begun = time.monotonic()
  link.close()
  assert time.monotonic() - begun < 3 and link.closed and link.session is None
  free.close()
