"""The bare ends of a connection: a socket, and frames put together by hand."""

from __future__ import annotations

import socket as sockets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from podrace.distributed.net import keys as net_keys
from podrace.distributed.net import session_messages
from podrace.distributed.net.address import unix_path
from podrace.distributed.net.frame import PREFIX, Kind, split
from podrace.distributed.net.listener import Listen, Listener, Peer, Serving

ANY = 'tcp://127.0.0.1:*'


class Bare:
  """One end, that can be made to say anything; `kinds` are those that the other end sends."""

  def __init__(self, socket: sockets.socket, kinds: dict[int, Kind]) -> None:
    self.socket, self.kinds = socket, kinds
    self._come = b''

  def __enter__(self) -> Bare:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()

  def close(self) -> None:
    self.socket.close()

  def end(self) -> None:
    """Tells the other end that nothing more comes."""
    self.socket.shutdown(sockets.SHUT_WR)

  def say(self, kind: Kind, *fields: Any, arrays: Sequence[Any] = ()) -> None:
    self.send(b''.join(bytes(x) for x in kind.pack(fields, arrays)))

  def send(self, data: bytes) -> None:
    self.socket.settimeout(10)
    self.socket.sendall(data)

  def hear(self, seconds: float = 10.0) -> tuple[Kind, Sequence[Any], list[memoryview]] | None:
    """The next message; None if the other end has closed it, or says nothing."""
    end = time.monotonic() + seconds
    while not self._is_whole():
      self.socket.settimeout(max(end - time.monotonic(), 0.001))
      try:
        data = self.socket.recv(2**20)
      except (TimeoutError, ConnectionError):
        return None
      if not data:
        return None
      self._come += data
    size, word = PREFIX.unpack_from(self._come)
    payload, self._come = self._come[8 : 8 + size], self._come[8 + size :]
    kind, head = self.kinds[word & 0xFF], word >> 8
    fields, sizes = kind.header(payload[:head], size - head)
    return kind, fields, split(payload[head:], sizes) if kind.arrays else []

  def _is_whole(self) -> bool:
    return len(self._come) >= 8 and len(self._come) >= 8 + PREFIX.unpack_from(self._come)[0]

  def expect(self, kind: Kind, seconds: float = 10.0) -> tuple[Sequence[Any], list[memoryview]]:
    """The next message of this kind; others are passed over, but not what ends a session."""
    end = time.monotonic() + seconds
    while (heard := self.hear(max(end - time.monotonic(), 0.001))) is not None:
      if heard[0] is kind:
        return heard[1], heard[2]
      assert heard[0] not in (
        session_messages.GONE,
        session_messages.REFUSED,
        session_messages.END,
      ), heard
    raise AssertionError(f'no {kind.name} in {seconds} s')

  def last(self, kind: Kind) -> Any:
    """The first field of the next message of this kind. Earlier messages are passed over."""
    while (heard := self.hear()) is not None:
      if heard[0] is kind:
        return heard[1][0]
    raise AssertionError('the connection ended without a word')

  def gone(self) -> str:
    """Why the session is over."""
    return self.last(session_messages.GONE)

  def refused(self) -> list[str]:
    """Why it is refused."""
    return self.last(session_messages.REFUSED)

  def is_closed(self, seconds: float = 10.0) -> bool:
    """Whether the other end closes it in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
      self.socket.settimeout(0.1)
      try:
        if not self.socket.recv(2**20):
          return True
      except TimeoutError:
        continue
      except ConnectionError:
        return True
    return False

  def hello(self, service: str, client: int = 0, **more: Any) -> dict[str, Any]:
    """Begins a session; what WELCOME tells."""
    self.say(session_messages.HELLO, {**session_messages.hello(service, client), **more})
    (told,), _ = self.expect(session_messages.WELCOME)
    return told


def connect(
  address: str, kinds: dict[int, Kind], keys: Path | None = None, source: str = ''
) -> Bare:
  """A client's end; `source` is an address of this machine that it connects from."""
  if (path := unix_path(address)) is not None:
    socket = sockets.socket(sockets.AF_UNIX)
    socket.connect(path)
  else:
    host, port = address.removeprefix('tcp://').rsplit(':', 1)
    from_there = (source, 0) if source else None
    socket = sockets.create_connection((host.strip('[]'), int(port)), 10, from_there)
  if keys is not None:
    socket = net_keys.client_context(keys).wrap_socket(socket)
  return Bare(socket, kinds)


class Accepting:
  """A listener's end without a service: each connection is a `Bare`."""

  def __init__(self, kinds: dict[int, Kind], port: int = 0) -> None:
    self._socket = sockets.create_server(('127.0.0.1', port))
    self.kinds = kinds
    self.address = f'tcp://127.0.0.1:{self._socket.getsockname()[1]}'

  def accept(self, seconds: float = 10.0) -> Bare:
    self._socket.settimeout(seconds)
    return Bare(self._socket.accept()[0], self.kinds)

  def welcome(self, **more: Any) -> Bare:
    """Accepts a client, and begins its session."""
    end = self.accept()
    end.expect(session_messages.HELLO)
    end.say(session_messages.WELCOME, {'silence': 5.0, **more})
    return end

  def close(self) -> None:
    self._socket.close()


class Service:
  """A handler for tests: keeps what happens, and does what it is given to do with messages."""

  service = 'test'

  def __init__(
    self, *kinds: Kind, largest: int = 2**20, on: Callable[..., None] | None = None
  ) -> None:
    self.kinds, self.largest, self._on = session_messages.of_clients(*kinds), largest, on
    self.happened: list[tuple[Any, ...]] = []
    self.said: list[str] = []
    self.refuse: list[str] = []
    self.wait = ''
    self.listener: Listener

  def listen(self, address: str = ANY, keys: Path | None = None, **more: Any) -> Service:
    def say(level: int, line: str) -> None:
      self.said.append(line)

    self.listener = Listener(Listen(address, keys, **more), self, say)
    self.serving = Serving(self.listener)
    self.serving.start()
    return self

  @property
  def address(self) -> str:
    return self.listener.address

  def __enter__(self) -> Service:
    return self

  def __exit__(self, *exc: object) -> None:
    self.serving.stop()
    self.serving.worker.check()

  def of(self, what: str) -> list[tuple[Any, ...]]:
    return [x[1:] for x in self.happened if x[0] == what]

  def memory(self, peer: Peer, kind: Kind, fields: Sequence[Any], size: int) -> Any:
    return None

  def reasons_against(self, told: dict[str, Any]) -> list[str]:
    return self.refuse

  def why_wait(self, told: dict[str, Any]) -> str:
    return self.wait

  def welcome(self, peer: Peer, told: dict[str, Any]) -> dict[str, Any]:
    self.happened.append(('welcome', peer, told))
    return {}

  def welcomed(self, peer: Peer) -> None:
    pass

  def handle(self, peer: Peer, kind: Kind, fields: Sequence[Any], arrays: list[memoryview]) -> None:
    if self._on is not None:
      self._on(self, peer, kind, fields, arrays)
    else:
      self.happened.append(('handle', kind.name, list(fields), [bytes(x) for x in arrays]))

  def ping(self, peer: Peer, said: Any) -> Any:
    return said

  def drained(self, peer: Peer) -> None:
    self.happened.append(('drained', peer))

  def left(self, peer: Peer, reason: str, level: int) -> None:
    self.happened.append(('left', peer, reason))

  def turned(self) -> None:
    pass

  def tick(self, now: float) -> None:
    pass

  def forgive(self, seconds: float) -> None:
    self.happened.append(('forgive', seconds))

  def report(self) -> dict[str, Any]:
    return self.listener.report(lambda peer: {})
