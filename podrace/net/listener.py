"""A listening end: connections, sessions, and what is logged of them. A service is its handler.

One thread at a time has the network: that of `start`, or whoever calls `turn`. What clients say is checked;
what is not as docs/protocol.md has it ends the client's session, never the listener.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import math
import resource
import selectors
import socket as sockets
import ssl
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from podrace.net import address as addresses
from podrace.net import keys as net_keys
from podrace.net import measures, session
from podrace.net.announce import Announcement
from podrace.net.frame import VERSION, Buffer, Kind, WireError, split
from podrace.net.lines import Lines, Say
from podrace.net.stream import Ended, Full, Stream, new_scratch, no_delay, why
from podrace.net.text import label, plain, plain_reasons
from podrace.version import __version__
from podrace.worker import Worker

PEERS = 16384  # with a session, at most
GUESTS = 1024  # connections without one; then those go that were heard of longest ago
SILENT_SECONDS = 10.0  # that a connection may take to say hello
TALKING_SECONDS = 300.0  # that one may be silent which must wait, or has asked
ENDING_SECONDS = 1.0  # that a connection is kept to hear why it ends
TICK = 0.2  # seconds between looks at who is silent
PAUSE = 1.0  # seconds between them from which on nobody has been listened to
BACKLOG = 256  # frames that one client has not read
GUEST_BACKLOG = 8
REPORTED = 1000  # clients, in a report
FEW_FILES = 4096  # with which there is no warning
FILES = 2**16  # that may be open, if that is permitted: each connection is one
REPORT_SECONDS = 0.5  # that a report is sent again: to make it takes time
GREETING_SHARE = 0.1  # of the time, that new connections may take
GREETING_SECONDS = 1.0  # at once
WANTS_KEYS = 'this listener wants keys: give --keys DIR'
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_COMMON = frozenset(kind.number for kind in session.OF_CLIENTS)


@dataclasses.dataclass(frozen=True)
class Listen:
  """Where to listen, and to whom."""

  address: str
  keys: Path | None = None
  insecure: bool = False
  peer_timeout: float = session.SILENCE  # of silence after which a client is dropped
  announce: Announcement | None = None  # of the address, once it listens

  def __post_init__(self) -> None:
    addresses.check_address(self.address, self.keys, self.insecure, '--listen', listens=True)
    if not 0 < self.peer_timeout < math.inf:
      raise ValueError(f'--peer-timeout must be more than 0, not {self.peer_timeout}')


class Peer:
  """A connection, and its session if it has one.

  Attributes:
    name: HOST:PID, once it has said hello.
    key: its certificate's fingerprint, '' without keys.
    state: the handler's.
    metrics: the newest numbers that it has sent of itself.
    finished: it has said BYE.
  """

  __slots__ = (
    'asked', 'client', 'ending', 'finished', 'gone', 'key', 'last_seen', 'metrics', 'name', 'since',
    'state', 'stream', 'until', 'waits', 'where', 'writes',
  )  # fmt: skip

  stream: Stream

  def __init__(self, where: str) -> None:
    self.where, self.name, self.key, self.client = where, '', '', 0
    self.state: Any = None
    self.metrics: measures.Measures = {}
    self.since = self.last_seen = time.monotonic()
    self.until = self.since + SILENT_SECONDS  # as one without a session
    self.finished = self.ending = self.gone = self.asked = self.waits = self.writes = False


class Handler(Protocol):
  """A service, as far as a listener knows it. All of it is called by the thread that has the network.

  A class that is declared as one need only have what it does otherwise than here.

  Attributes:
    service: its name in HELLO.
    kinds: that clients send, see `session.of_clients`.
    largest: bytes of a frame of a client, at most.
  """

  @property
  def service(self) -> str: ...
  @property
  def kinds(self) -> dict[int, Kind]: ...
  @property
  def largest(self) -> int: ...

  def memory(self, peer: Peer, kind: Kind, fields: Sequence[Any], size: int) -> Any:
    """Memory [size] u8 for the arrays of a message; None to leave that to the stream. May raise WireError."""
    return None

  def reasons_against(self, details: dict[str, Any]) -> list[str]:
    """Why a client is refused; it may be none."""
    return []

  def why_wait(self, details: dict[str, Any]) -> str:
    """Why a client must wait for its session; '' if it need not."""
    return ''

  def welcome(self, peer: Peer, details: dict[str, Any]) -> dict[str, Any]:
    """Begins a session: what WELCOME tells besides."""
    return {}

  def welcomed(self, peer: Peer) -> None:
    """After WELCOME is on its way."""
    return

  def handle(self, peer: Peer, kind: Kind, fields: Sequence[Any], arrays: list[memoryview]) -> None:
    """A message of a session. May raise WireError, which ends it."""

  def ping(self, peer: Peer, said: Any) -> Any:
    """What PING tells; returns what PONG does."""
    return None

  def drained(self, peer: Peer) -> None:
    """All that a client was sent is on its way, after something had to wait."""
    return

  def left(self, peer: Peer, reason: str, level: int) -> None:
    """A session is over."""

  def turned(self) -> None:
    """After messages have come, or the clock has."""
    return

  def tick(self, now: float) -> None:
    """Every TICK seconds."""
    return

  def forgive(self, seconds: float) -> None:
    """Nobody was listened to for so long."""
    return

  def report(self) -> dict[str, Any]:
    """What `podrace top` shows."""


def allow_files() -> int:
  """Has this process open as many files as it may, up to FILES; how many that is."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
  if soft == resource.RLIM_INFINITY or soft >= wanted:
    return FILES if soft == resource.RLIM_INFINITY else soft
  with contextlib.suppress(OSError, ValueError):  # not even that is permitted
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
  return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Listener:
  """Listens from `open` to `close`.

  Args:
    say: gets what is worth a line, and its level.

  Attributes:
    peers: clients with a session, in the order in which they came.
    guests: connections without one, those heard of longest ago first.
    address: with the port that it has.
    counts: of what has happened, by name.

  Raises:
    SecurityError: for keys that can't be used; of `open` also for the address.
    UsageError: of `open`, if it can't announce the address.
  """

  def __init__(self, listen: Listen, handler: Handler, say: Say) -> None:
    self.listen, self.handler, self.address = listen, handler, listen.address
    self.lines = Lines(say)
    self.log = self.lines.log
    self.counts: collections.Counter[str] = collections.Counter()
    self.peers: dict[Peer, None] = {}
    self.guests: collections.OrderedDict[Peer, None] = collections.OrderedDict()
    self._clients: dict[tuple[str, int], Peer] = {}
    self._context: ssl.SSLContext | None = None
    self._allowed: net_keys.Allowed | None = None
    if listen.keys is not None:
      self._context = net_keys.server_context(listen.keys)
      self._allowed = net_keys.Allowed(listen.keys / net_keys.ALLOWED)
    self._scratch = new_scratch()
    self._selector: selectors.BaseSelector | None = None
    self._wake: session.Wake | None = None
    self._calls: collections.deque[Callable[[], None]] = collections.deque()
    self._socket: sockets.socket | None = None
    self._over: tuple[bool, str] | None = None  # how it ends
    self._accepting = False
    self._greeting, self._greeted_at = GREETING_SECONDS, time.monotonic()
    self._ticked = time.monotonic()
    self._report: tuple[dict[str, Any], float] = ({}, -math.inf)

  # --- its life ----------------------------------------------------------------------------------

  def open(self) -> None:
    """Listens, from now on."""
    if (files := allow_files()) < FEW_FILES:
      self.log(
        f'this process may have {files:,} files open, enough for about {max(files - 200, 0):,} clients: '
        f'`ulimit -n {FILES}` before it is started allows more',
        logging.WARNING, always=True,
      )  # fmt: skip
    self._socket, self.address = addresses.listen(self.listen.address)
    self._selector, self._wake = selectors.DefaultSelector(), session.Wake()
    self._selector.register(self._wake.fileno(), READ)
    self._listen_on(True)
    self._ticked = time.monotonic()
    if self.listen.announce is not None:
      try:
        self.listen.announce.make(self.reachable)
      except BaseException:
        self.close()
        raise

  def close(self) -> None:
    """Ends all connections at once; `end` says goodbye before. No other thread has the network any more."""
    for peer in (*self.peers, *self.guests):
      peer.stream.close()
    self.peers.clear()
    self.guests.clear()
    for x in (self._selector, self._socket, self._wake):
      if x is not None:
        x.close()
    if (path := addresses.unix_path(self.address)) is not None and self._socket is not None:
      with contextlib.suppress(OSError):
        Path(path).unlink()
    self._selector = self._socket = None

  @property
  def reachable(self) -> str:
    """The address as others can use it."""
    return addresses.reachable(self.address)

  def wake(self) -> None:
    """Has the thread that has the network look around; from any other."""
    if self._wake is not None:
      self._wake.set()

  def later(self, do: Callable[[], None]) -> None:
    """As `call`, without waking it."""
    self._calls.append(do)

  def call(self, do: Callable[[], None]) -> None:
    """Has something done by the thread that has the network; from any other."""
    self._calls.append(do)
    self.wake()

  def do_calls(self) -> None:
    """What others want done; of the thread that has the network."""
    while self._calls:
      self._calls.popleft()()

  def turn(self, seconds: float) -> None:
    """Listens until something comes, for so long at most, and deals with it."""
    self.poll(seconds)
    self.handler.turned()
    self._look_at_the_clock()

  def poll(self, seconds: float) -> None:
    """As `turn`, for connections and calls only."""
    selector = self._selector
    assert selector is not None
    ready = selector.select(max(seconds, 0.0))
    self.do_calls()  # which may have been wanted before anything came
    for key, events in ready:
      peer = key.data
      if type(peer) is Peer:
        self._ready(peer, events)
      elif key.fileobj is self._socket:
        self._accept()
      elif self._wake is not None:
        self._wake.clear()
    self.do_calls()

  def end(self, complete: bool, reason: str, seconds: float) -> None:
    """Tells all that it ends, and gives them so long to leave."""
    self._over = complete, reason
    for peer in (*self.peers, *(g for g in self.guests if g.waits)):
      self.send(peer, session.END, complete, reason)
    until = time.monotonic() + seconds
    while self.peers and (left := until - time.monotonic()) > 0:
      self.poll(left)
      self.handler.turned()

  # --- connections -------------------------------------------------------------------------------

  def _listen_on(self, on: bool) -> None:
    """Has new connections accepted, or wait in the kernel."""
    if self._selector is None or self._socket is None or on == self._accepting:
      return
    self._accepting = on
    if on:
      self._selector.register(self._socket, READ)
    else:
      self._selector.unregister(self._socket)

  def _accept(self) -> None:
    assert self._socket is not None
    begun = time.monotonic()
    for _ in range(16):
      try:
        socket, where = self._socket.accept()
      except BlockingIOError:
        break
      except OSError as e:  # no more files, or the peer has left
        self.counts['errors'] += 1
        self.log(f'accepting: {e.strerror or e}', logging.WARNING)
        break
      self._come(socket, where)
    self._greet(begun)

  def _greet(self, begun: float) -> None:
    """Counts time that new connections have taken: others have a right to the rest."""
    now = time.monotonic()
    earned = GREETING_SHARE * (now - self._greeted_at)
    self._greeting = min(self._greeting + earned, GREETING_SECONDS) - (now - begun)
    self._greeted_at = now
    if self._greeting < 0:
      self._listen_on(False)

  def _come(self, socket: sockets.socket, where: Any) -> None:
    """A new connection."""
    is_unix = socket.family == getattr(sockets, 'AF_UNIX', None)
    peer = Peer('a process here' if is_unix else f'{where[0]}:{where[1]}')
    try:
      if is_unix and not addresses.same_user(socket):
        self.counts['turned away'] += 1
        self.log("turned away another user's process", logging.WARNING)
        socket.close()
        return
      no_delay(socket)
    except (OSError, ValueError):
      socket.close()
      return
    h = self.handler
    peer.stream = Stream(
      socket, h.kinds, functools.partial(self._message, peer), functools.partial(self._memory, peer), session.GUEST_BYTES,
      GUEST_BACKLOG, self._scratch, self._context, True,
    )  # fmt: skip
    assert self._selector is not None
    self._selector.register(socket, READ, peer)
    self.guests[peer] = None
    self.counts['connections'] += 1
    while len(self.guests) > GUESTS:
      self._cut(next(iter(self.guests)))

  def _ready(self, peer: Peer, events: int) -> None:
    """A connection can be read or written."""
    stream = peer.stream
    try:
      if stream.closed:
        return
      if peer.ending and events & READ:
        self._discard(peer)
        return
      if not stream.shaken:
        self._shake(peer)
        events = (
          READ if stream.pending() and not peer.ending else 0
        )  # said with the last of the handshake
      if events & READ:
        peer.last_seen = time.monotonic()
        stream.receive()
      if events & WRITE and not stream.closed and stream.flush():
        self._written(peer)
    except Ended as e:
      self._lost(peer, str(e))
    except Exception as e:
      self.blame(peer, e)

  def _shake(self, peer: Peer) -> None:
    begun = time.monotonic()
    try:
      wants = peer.stream.shake()
    except Ended as e:
      self.counts['turned away'] += 1
      self.log(f'turned away {peer.where}: {e}', logging.WARNING)
      if 'WRONG_VERSION' in str(e):  # no TLS
        peer.stream.say_plain(session.GONE, WANTS_KEYS)
      self._hush(peer)  # what TLS has said of it is on its way
      return
    finally:
      self._greet(begun)
    self._writes(peer, wants == 'write')
    if wants or self._allowed is None:
      return
    assert peer.stream.tls is not None
    peer.key = net_keys.fingerprint_of(peer.stream.tls.certificate())
    self._allowed.refresh()
    if peer.key not in self._allowed:
      self.counts['turned away'] += 1
      self.log(f'turned away {peer.where}: its key {peer.key} is not listed', logging.WARNING)
      self._end(peer, f'the key {peer.key} is not in {net_keys.ALLOWED}')

  def _writes(self, peer: Peer, on: bool) -> None:
    """Whether to look for room to write."""
    if peer.writes != on and self._selector is not None and not peer.stream.closed:
      peer.writes = on
      self._selector.modify(peer.stream.socket, READ | WRITE if on else READ, peer)

  def _written(self, peer: Peer) -> None:
    """Nothing waits to be sent any more."""
    self._writes(peer, False)
    if peer.ending:
      peer.stream.end_writing()
    elif peer.asked:
      self._answer(peer)
    if peer in self.peers:
      self.handler.drained(peer)

  def _discard(self, peer: Peer) -> None:
    """Reads nothing more of a connection that ends, but waits for the other end to read the last words."""
    try:
      if not peer.stream.socket.recv(65536):
        raise Ended('it ended')
    except BlockingIOError:
      return
    except OSError as e:
      raise Ended(why(e)) from e

  def _remove(self, peer: Peer) -> None:
    """Closes a connection."""
    self.guests.pop(peer, None)
    if not peer.stream.closed:
      if self._selector is not None:
        with contextlib.suppress(KeyError, ValueError):
          self._selector.unregister(peer.stream.socket)
      peer.stream.close()

  def _lost(self, peer: Peer, reason: str) -> None:
    self._remove(peer)
    self.drop(peer, 'is gone', logging.INFO if peer.finished else logging.WARNING)

  def _cut(self, peer: Peer) -> None:
    self.counts['cut'] += 1
    self._remove(peer)

  # --- what comes --------------------------------------------------------------------------------

  def _memory(self, peer: Peer, kind: Kind, fields: Sequence[Any], size: int) -> Any:
    if peer not in self.peers:
      if peer.ending:
        return None
      raise WireError(f'a {kind.name} without a session')
    return self.handler.memory(peer, kind, fields, size)

  def _message(
    self, peer: Peer, kind: Kind, fields: Sequence[Any], body: memoryview, sizes: Sequence[int]
  ) -> None:
    if peer.ending:
      return
    if peer in self.peers and kind.number not in _COMMON:
      self.handler.handle(peer, kind, fields, split(body, sizes) if kind.arrays else [])
    elif kind is session.PING and peer in self.peers:
      self.send(peer, session.PONG, self.handler.ping(peer, fields[0]))
    elif kind is session.METRICS and peer in self.peers:
      peer.metrics = measures.check(fields[0])
    elif kind is session.HELLO:
      self._hello(peer, fields[0])
    elif kind is session.ASK:
      self.counts['asked'] += 1
      self._talks(peer)
      peer.asked = True
      if not peer.stream.waiting:
        self._answer(peer)
    elif kind is session.BYE and peer in self.peers:
      peer.finished = True
      self.drop(peer, f'left: {plain(fields[0])}', logging.INFO)
    else:
      raise WireError(f'a {kind.name} without a session')

  def _talks(self, peer: Peer) -> None:
    """A connection without a session has said something sensible."""
    if peer in self.guests:
      peer.until = time.monotonic() + TALKING_SECONDS
      self.guests.move_to_end(peer)

  def _hello(self, peer: Peer, details: dict[str, Any]) -> None:
    session.check_hello(details)
    if peer in self.peers:
      raise WireError('a second HELLO in a session')
    if reasons := self._reasons_against(details):
      self.counts['refused'] += 1
      reasons = plain_reasons(reasons)
      who = plain(f'{details["host"]}:{details["pid"]}')
      self.log('\n  '.join([f'refused {who}:', *reasons]), logging.WARNING)
      self.send(peer, session.REFUSED, reasons)
      return
    if self._over is not None:
      self.send(peer, session.END, *self._over)
      return
    self._end_before(peer, details)
    wait = self.handler.why_wait(details)
    if not wait and len(self.peers) >= PEERS:
      wait = f'{self.handler.service} has {PEERS} clients and takes no more'
    if wait:
      self.counts['made to wait'] += not peer.waits
      peer.waits = True
      self._talks(peer)
      self.send(peer, session.WAIT, wait)
      return
    self._join(peer, details)

  def _reasons_against(self, details: dict[str, Any]) -> list[str]:
    name = self.handler.service
    if (details['name'], details['version']) == (name, VERSION):
      return self.handler.reasons_against(details)
    return [
      f'this is {name!r} version {VERSION} (podrace {__version__}), '
      f'the client wants {details["name"]!r} version {details["version"]} (podrace {details["podrace"]})'
    ]

  def _end_before(self, peer: Peer, details: dict[str, Any]) -> None:
    """Ends this client's session over an older connection, with all that it has."""
    before = self._clients.get((peer.key, details['client']))
    if details['client'] and before is not None:
      self.drop(before, 'is back over another connection', logging.INFO)
      self._end(before, 'you are back over another connection')

  def _join(self, peer: Peer, details: dict[str, Any]) -> None:
    """Begins a session."""
    peer.client, peer.name = details['client'], f'{label(details["host"])}:{details["pid"]}'
    peer.since = time.monotonic()
    answer = self.handler.welcome(peer, details)
    self.guests.pop(peer, None)
    self.peers[peer] = None
    if peer.client:
      self._clients[peer.key, peer.client] = peer
    peer.stream.largest, peer.stream.most_out = self.handler.largest, BACKLOG
    self.counts['sessions'] += 1
    if self.send(peer, session.WELCOME, dict(silence=self.listen.peer_timeout, **answer)):
      self.handler.welcomed(peer)

  def blame(self, peer: Peer, e: Exception) -> None:
    """Ends a connection that has sent what led to this, and tells why."""
    if isinstance(e, WireError):
      what = str(e)
    else:
      self.unexpected(e)  # nobody else shall be the worse for it
      what = f'what could not be dealt with ({type(e).__name__})'
    self.counts['malformed'] += 1
    if peer not in self.peers:
      self.log(f'cut off {peer.where}, which sent {what}', logging.WARNING)
    self.drop(peer, f'dropped, it sent {what}')
    self._end(peer, f'you sent {what}')

  def unexpected(self, e: Exception) -> None:
    """Counts and tells that a check is missing."""
    self.counts['unexpected'] += 1
    trace = ''.join(traceback.format_exception(e))[-4000:]
    self.log(f'a message that was not checked well enough:\n{trace}', logging.ERROR)

  # --- what goes ---------------------------------------------------------------------------------

  def send(self, peer: Peer, kind: Kind, *fields: Any, arrays: Sequence[Buffer] = ()) -> bool:
    """Whether it is on its way; else the client has been dropped, or is when all that it has said is read."""
    if peer.gone or peer.ending:
      return False
    try:
      if not peer.stream.send(kind, *fields, arrays=arrays):
        self._writes(peer, True)
    except Full as e:
      self.drop(peer, f'dropped: {e}')
      self._remove(peer)
      return False
    except Ended:
      peer.gone = True
      return False
    return True

  def _answer(self, peer: Peer) -> None:
    """Sends the report. Nobody has more than one to read."""
    peer.asked = False
    report, until = self._report
    if time.monotonic() > until:
      report = self.handler.report()
      self._report = report, time.monotonic() + REPORT_SECONDS
    self.send(peer, session.REPORT, report)

  def report(self, describe: Callable[[Peer], dict[str, Any]]) -> dict[str, Any]:
    """What `podrace top` shows of any service; `describe` is what the handler adds of a client."""
    now = time.monotonic()
    clients = [
      dict(
        name=p.name,
        seconds=round(now - p.since, 3),
        last_seen_s=round(now - p.last_seen, 3),
        **describe(p),
        metrics=p.metrics,
      )
      for p in list(self.peers)[:REPORTED]
    ]
    return dict(
      service=self.handler.service,
      counts=dict(self.counts),
      clients=clients,
      more_clients=max(len(self.peers) - REPORTED, 0),
      resident_mb=measures.resident_mb(),
    )

  def tell_gone(self, peer: Peer, reason: str) -> None:
    """Ends a session, and says why."""
    self.drop(peer, reason)
    self._end(peer, reason)

  def _end(self, peer: Peer, reason: str) -> None:
    """Closes a connection when it has heard why, or soon."""
    if peer.ending or peer.stream.closed:
      return
    self.send(peer, session.GONE, plain(reason))
    if peer.stream.closed:
      return
    self._hush(peer)

  def _hush(self, peer: Peer) -> None:
    """Has a connection end when the other end has read what it was sent, or soon.

    One that is closed with something unread is reset, and the last words with it.
    """
    peer.ending = True
    peer.until = time.monotonic() + ENDING_SECONDS
    self.guests[peer] = None
    self.guests.move_to_end(peer, last=False)
    if not peer.stream.waiting:
      peer.stream.end_writing()

  def drop(self, peer: Peer, reason: str, level: int = logging.WARNING) -> None:
    """Ends a session, if it has not ended; its connection says no more."""
    if peer not in self.peers:
      return
    del self.peers[peer]
    if self._clients.get((peer.key, peer.client)) is peer:
      del self._clients[peer.key, peer.client]
    self.counts['dropped'] += 1
    self.log(f'{peer.name}: {reason}', level)
    if not peer.stream.closed and not peer.ending:
      peer.until = time.monotonic() + SILENT_SECONDS
      peer.stream.largest = session.GUEST_BYTES
      self.guests[peer] = None
    self.handler.left(peer, reason, level)

  # --- time --------------------------------------------------------------------------------------

  def _look_at_the_clock(self) -> None:
    """Every TICK seconds: who is silent, whose key was taken from the list."""
    now = time.monotonic()
    if (passed := now - self._ticked) <= TICK:
      return
    if passed > PAUSE:  # stopped, or busy: what was said meanwhile may not have been read yet
      for peer in (*self.peers, *self.guests):
        peer.last_seen = min(peer.last_seen + passed, now)
        peer.until += passed
      self.handler.forgive(passed)
    self._tick(now)
    self._ticked = time.monotonic()

  def _tick(self, now: float) -> None:
    if not self._accepting:
      self._greet(now)
      self._listen_on(self._greeting > 0)
    for peer in list(self.peers):
      if now - peer.last_seen > self.listen.peer_timeout:
        self.tell_gone(peer, f'silent for {now - peer.last_seen:.1f} s')
    for peer in [g for g in self.guests if g.until < now]:
      if peer.ending:
        self._remove(peer)
      else:
        self._cut(peer)
    if self._allowed is not None:  # which has perhaps read the list again itself, for somebody new
      self._allowed.refresh()
      for peer in (*self.peers, *self.guests):
        if peer.key and peer.key not in self._allowed:
          self.tell_gone(peer, 'its key is not listed any more')
    self.handler.tick(now)
    self.lines.tick(now)


class Serving:
  """A listener's own thread, which turns it from `start` to `stop`; what fails in it is raised at its owner.

  Args:
    before_end: is called by the thread at the end, before clients hear of it.
    wait: seconds until the handler's `turned` has something to do, if nothing comes.
  """

  def __init__(
    self,
    listener: Listener,
    wait: Callable[[], float] = lambda: TICK,
    before_end: Callable[[], None] = lambda: None,
  ) -> None:
    self._listener, self._wait, self._before_end = listener, wait, before_end
    self._stop = threading.Event()
    self.ended = threading.Event()
    self.worker: Worker | None = None

  def start(self) -> None:
    """Listens, from now on."""
    self._listener.open()
    self.worker = Worker(self._listener.handler.service, self._main, self.ended.set)

  @property
  def failure(self) -> str | None:
    """The traceback of what has ended the thread; None if nothing has."""
    return (self.worker and self.worker.failure) or None

  def ask_to_stop(self) -> None:
    """Has the thread come to its end; `ended` says when."""
    self._stop.set()
    self._listener.wake()

  def stop(self) -> None:
    """Ends it; from any thread, more than once if need be."""
    self.ask_to_stop()
    if self.worker is not None:
      self.worker.wait()
      self._listener.close()

  def _main(self) -> None:
    listener = self._listener
    with contextlib.ExitStack() as last:  # each, whatever became of the others
      last.callback(self._goodbye)
      last.callback(self._before_end)
      try:
        while not self._stop.is_set():
          listener.turn(min(self._wait(), TICK))
      except BaseException:
        listener.log(f'the service failed:\n{traceback.format_exc()}', logging.ERROR, always=True)
        raise

  def _goodbye(self) -> None:
    self._listener.end(False, f'{self._listener.handler.service} has ended', ENDING_SECONDS)
