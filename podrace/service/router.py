"""A service's end of the network: one socket, sessions, and a thread that looks after both.

What replay and parameters have in common: who may connect, who is there, who is silent, who sends what
is none. Everything that a client says is checked; what is not as docs/protocol.md has it ends the client's
session, never the service.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import zmq

from podrace import __version__
from podrace.remote import security
from podrace.remote.server import Listen
from podrace.remote.wire import Wake, WireError, fields, pack, unpack
from podrace.service import wire

PEERS = 4096  # with a session, at most
BANNED = 4096  # connections that misbehaved, remembered
TICK = 0.2  # seconds between looks at who is silent
LINES, LINE_SECONDS = 20, 10.0  # logged at most
BACKLOG = 64  # messages that one client has not read

_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # enums are slow to combine

Say = Callable[[str], None]


class Peer:
  """A client with a session."""

  def __init__(self, address: bytes, session: int, told: dict[str, Any], key: bytes) -> None:
    self.address, self.session, self.key = address, session, key
    self.nonce: int = told['nonce']
    self.name = f'{told["host"]}:{told["pid"]}'
    self.since = self.last_seen = time.monotonic()
    self.finished = False  # it has said BYE
    self.state: Any = None  # the service's


class Router:
  """Listens while it is entered; a service derives from it, and is told what clients say.

  Its methods, but for `call` and those that say otherwise, belong to its own thread.
  """

  service = ''  # its name in HELLO

  def __init__(self, listen: Listen, say: Say) -> None:
    self.listen, self._say = listen, say
    self.address = listen.address
    self.peers: dict[bytes, Peer] = {}
    self.counts: collections.Counter[str] = collections.Counter()
    self.events: collections.deque[str] = collections.deque(maxlen=1000)
    self.failure: str | None = None
    self._banned: collections.OrderedDict[bytes, None] = collections.OrderedDict()
    self._calls: collections.deque[Callable[[], None]] = collections.deque()
    self._lines: collections.deque[float] = collections.deque()
    self._unsaid = 0
    self._stop = threading.Event()
    self.ended = threading.Event()  # its thread has

  # --- what a service says to this ---------------------------------------------------------------

  def reasons_against(self, told: dict[str, Any]) -> list[str]:
    """Why this client is refused, which a service may add to."""
    return []

  def welcome(self, peer: Peer, told: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """What a new client is told besides, and frames."""
    raise NotImplementedError

  def handle(self, peer: Peer, header: list[Any], frames: list[Any]) -> None:
    """A message of a client that has this session."""
    raise NotImplementedError

  def pong(self, peer: Peer) -> Any:
    """What a PONG carries."""
    raise NotImplementedError

  def turn(self) -> None:
    """After messages have come, or the clock has."""

  def wait(self) -> float:
    """Seconds until `turn` has something to do, if nothing comes."""
    return TICK

  def left(self, peer: Peer) -> None:
    """A client is gone."""

  def leave(self) -> None:
    """At the end, before clients are told."""

  def told_of(self, peer: Peer) -> dict[str, Any]:
    """A client's part of the report."""
    return {}

  def report(self) -> dict[str, Any]:
    """What `podrace top` shows."""
    now = time.monotonic()
    clients = [
      dict(
        name=p.name,
        seconds=round(now - p.since, 3),
        last_seen_s=round(now - p.last_seen, 3),
        **self.told_of(p),
      )
      for p in list(self.peers.values())[:500]
    ]
    return dict(
      service=self.service,
      counts=dict(self.counts),
      clients=clients,
      more_clients=max(len(self.peers) - 500, 0),
    )

  # --- its life ----------------------------------------------------------------------------------

  def start(self) -> None:
    """Listens, from now on."""
    self._wake = Wake()
    self._context = zmq.Context()
    self._gate: security.Gate | None = None
    try:
      self._bind()
    except BaseException:
      self._shut()
      raise
    self._thread = threading.Thread(target=self._main, name=self.service, daemon=True)
    self._thread.start()

  def __enter__(self) -> Any:
    self.start()
    return self

  def _bind(self) -> None:
    keys = self.listen.keys
    if keys is not None:
      self._gate = security.Gate(self._context, security.Allowed(keys / security.ALLOWED))
    router = self._router = self._context.socket(zmq.ROUTER)
    if keys is not None:
      security.secure_server(router, keys)
    router.linger = 500  # milliseconds, for the last words
    router.router_mandatory = True  # so that we are told who is gone
    router.maxmsgsize = wire.FRAME_BYTES
    router.sndhwm, router.rcvhwm = 4 * BACKLOG, BACKLOG  # frames' messages are counted by some
    # Not heartbeat_ivl: with it libzmq 4.3.5 aborts when a connection whose input is held back ends.
    router.tcp_keepalive, router.tcp_keepalive_idle, router.tcp_keepalive_intvl = 1, 30, 10
    router.handshake_ivl = 5000
    if '[' in self.listen.address:
      router.ipv6 = True
    try:
      router.bind(self.listen.address)
    except zmq.ZMQError as e:
      raise security.SecurityError(f'cannot listen at {self.listen.address}: {e}') from e
    self.address = router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip('\0')

  def __exit__(self, *exc: object) -> None:
    self.stop()

  def stop(self) -> None:
    """Ends the service; from any thread, more than once if need be."""
    self.ask_to_stop()
    self._thread.join()
    self._shut()

  def ask_to_stop(self) -> None:
    """Has its thread come to its end; `ended` says when."""
    self._stop.set()
    self._wake.set()

  def _shut(self) -> None:
    for socket in (getattr(self, '_router', None), self._gate):
      if socket:
        socket.close()
    self._context.term()
    self._wake.close()

  def call(self, do: Callable[[], None]) -> None:
    """Has something done by the thread; from any other."""
    self._calls.append(do)
    self._wake.set()

  def _main(self) -> None:
    try:
      self._listen()
      self.leave()
      self._goodbye()
    except BaseException:
      self.failure = traceback.format_exc()
      self.log(f'the service failed:\n{self.failure}', always=True)
    finally:
      self.ended.set()

  def _listen(self) -> None:
    poller = zmq.Poller()
    wake = self._wake.fileno()
    for socket in (self._router, wake, *([self._gate.socket] if self._gate else [])):
      poller.register(socket, zmq.POLLIN)
    ticked = 0.0
    while not self._stop.is_set():
      for ready, _ in poller.poll(max(int(min(self.wait(), TICK) * 1000 + 0.999), 0)):
        if ready == wake:
          self._wake.clear()
        elif self._gate and ready is self._gate.socket and (told := self._gate.answer()):
          self.counts['turned away'] += 1
          self.log(told)
      while self._calls:
        self._calls.popleft()()
      self._receive_some()
      self.turn()
      if time.monotonic() - ticked > TICK:
        self._tick()
        ticked = time.monotonic()

  def _receive_some(self) -> None:
    """What has come, but not for so long that others wait."""
    receive = self._router.recv
    for _ in range(64):
      try:
        frame = receive(_NOBLOCK, False)  # without copying
        raw = [frame]
        while frame.more:
          frame = receive(_NOBLOCK, False)
          raw.append(frame)
      except zmq.Again:
        return
      except zmq.ZMQError as e:
        self.counts['errors'] += 1
        self.log(f'receiving: {e}')
        return
      self._message(raw)

  # --- what clients say --------------------------------------------------------------------------

  def _message(self, raw: list[Any]) -> None:
    address = raw[0].bytes
    if address in self._banned:
      self.counts['ignored'] += 1
      return
    try:
      if len(raw) < 2:
        raise WireError('a message without a header')
      header = unpack(raw[1].buffer)
      self._dispatch(address, header, [f.buffer for f in raw[2:]], raw[1])
    except WireError as e:
      self.ban(address, str(e))

  def _dispatch(self, address: bytes, header: list[Any], frames: list[Any], raw: Any) -> None:
    kind = header[0]
    if kind in (wire.HELLO, wire.ASK, wire.PING, wire.BYE) and frames:
      raise WireError(f'{len(frames)} frames after a header of kind {kind}, expected none')
    if kind == wire.HELLO:
      (told,) = fields(header, dict)
      self._hello(address, told, self._key_of(raw))
      return
    if kind == wire.ASK:
      fields(header)
      self._key_of(raw)
      self.send(address, wire.REPORT, self.report())
      return
    if len(header) < 2 or type(header[1]) is not int or header[1] < 0:
      raise WireError(f'a header of kind {kind} without a session')
    peer = self.peers.get(address)
    if peer is None or peer.session != header[1]:
      self.counts['stale'] += 1
      self.send(address, wire.GONE, header[1], 'there is no such session; say hello again')
      return
    peer.last_seen = time.monotonic()
    if kind == wire.PING:
      fields(header, int)
      self.send(address, wire.PONG, peer.session, self.pong(peer))
    elif kind == wire.BYE:
      _, reason = fields(header, int, str)
      peer.finished = True
      self.drop(peer, f'left: {reason[:200]}')
    else:
      self.handle(peer, header, frames)

  def _key_of(self, raw: Any) -> bytes:
    """The client's; connections live on when a key is taken from the list."""
    if self._gate is None:
      return b''
    key = raw.get('User-Id').encode()
    if key not in self._gate.allowed:
      raise WireError('something with a key that is not listed any more')
    return key

  def _hello(self, address: bytes, told: dict[str, Any], key: bytes) -> None:
    for name, kind in (('name', str), ('version', int), ('nonce', int), ('host', str),
                       ('pid', int), ('podrace', str)):  # fmt: skip
      if type(told.get(name)) is not kind or (kind is str and len(told[name]) > 200):
        raise WireError(f'a hello without a {name} that is {kind.__name__}')
    peer = self.peers.get(address)
    if peer is not None and peer.nonce == told['nonce']:
      return  # asked again, while the answer was on its way
    reasons = [
      f'this is {self.service!r} version {wire.VERSION} (podrace {__version__}), '
      f'the client wants {told["name"]!r} version {told["version"]} (podrace {told["podrace"]})'
    ]
    if (told['name'], told['version']) == (self.service, wire.VERSION):
      reasons = self.reasons_against(told)
      if len(self.peers) >= PEERS and peer is None:
        reasons.append(f'there are {PEERS} clients already')
    if reasons:
      self.counts['refused'] += 1
      self.log(f'refused {told["host"]}:{told["pid"]}: ' + '; '.join(reasons))
      self.send(address, wire.REFUSED, reasons)
      return
    if peer is not None:
      self.drop(peer, 'said hello anew')
    session = int.from_bytes(os.urandom(7), 'little')
    peer = self.peers[address] = Peer(address, session, told, key)
    self.counts['sessions'] += 1
    more, frames = self.welcome(peer, told)
    self.log(f'{peer.name} joins')
    answer = dict(nonce=peer.nonce, silence=self.listen.peer_timeout, **more)
    self.send(address, wire.WELCOME, session, answer, frames=frames)

  # --- ends --------------------------------------------------------------------------------------

  def drop(self, peer: Peer, reason: str) -> None:
    """Ends a session."""
    if self.peers.get(peer.address) is not peer:
      return
    del self.peers[peer.address]
    self.counts['dropped'] += 1
    self.log(f'{peer.name}: {reason}')
    self.left(peer)

  def tell_gone(self, peer: Peer, reason: str) -> None:
    """Ends a session, and says why."""
    self.drop(peer, reason)
    self.send(peer.address, wire.GONE, peer.session, reason)

  def ban(self, address: bytes, reason: str) -> None:
    """Ignores a connection from now on, and tells why."""
    self.counts['malformed'] += 1
    peer = self.peers.get(address)
    self._banned[address] = None
    while len(self._banned) > BANNED:
      self._banned.popitem(last=False)
    if peer is not None:
      self.drop(peer, f'dropped, it sent {reason}')
    else:
      self.log(f'ignoring somebody who sent {reason}')
    self.send(address, wire.GONE, peer.session if peer else 0, f'you sent {reason}')

  def send(self, address: bytes, *header: Any, frames: list[Any] | None = None) -> bool:
    """Whether it is on its way; else the client has been dropped."""
    message: list[Any] = [address, pack(*header), *(frames or [])]
    last = message.pop()
    try:
      for frame in message:
        self._router.send(frame, _MORE, copy=len(frame) < 65536)
      self._router.send(last, _NOBLOCK, copy=len(last) < 65536)
    except zmq.ZMQError as e:  # it is gone, or does not read what it is sent
      if (peer := self.peers.get(address)) is not None:
        reason = 'does not read what it is sent' if e.errno == zmq.EAGAIN else 'is gone'
        self.drop(peer, reason)
      return False
    return True

  def _tick(self) -> None:
    now = time.monotonic()
    for peer in list(self.peers.values()):
      if now - peer.last_seen > self.listen.peer_timeout:
        self.tell_gone(peer, f'silent for {now - peer.last_seen:.1f} s')
    if self._gate and self._gate.allowed.refresh():
      for peer in list(self.peers.values()):
        if peer.key not in self._gate.allowed:
          self.tell_gone(peer, 'its key is not listed any more')
    if self._unsaid and now - self._lines[-1] > LINE_SECONDS:
      self.log(f'({self._unsaid} more lines were left out)', always=True)
      self._unsaid = 0

  def _goodbye(self) -> None:
    for address in list(self.peers):
      with contextlib.suppress(zmq.ZMQError):
        message = [address, pack(wire.END, f'{self.service} has ended')]
        self._router.send_multipart(message, zmq.NOBLOCK)

  def log(self, line: str, always: bool = False) -> None:
    """Says it, unless there was much to say lately."""
    now = time.monotonic()
    self.events.append(line)
    while self._lines and now - self._lines[0] > LINE_SECONDS:
      self._lines.popleft()
    if len(self._lines) >= LINES and not always:
      self._unsaid += 1
      return
    self._lines.append(now)
    self._say(line)
