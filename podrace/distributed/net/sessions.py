"""The sessions of a listener: begin, messages, end. A service is their handler."""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from podrace.distributed.net import process_metrics, session_messages
from podrace.distributed.net.channel import ConnectionClosed
from podrace.distributed.net.connections import Connections, Peer
from podrace.distributed.net.frame import VERSION, Buffer, Kind, WireError, split
from podrace.distributed.net.loop import Loop
from podrace.distributed.net.safe_text import Lines, label, plain, plain_reasons
from podrace.distributed.net.stream import SendQueueFull
from podrace.version import __version__

PEERS = 16384  # sessions, at most
BACKLOG = 256  # frames that may wait for one client
REPORT_SECONDS = 0.5  # that a report is reused, as it takes time to make
_COMMON = frozenset(kind.number for kind in session_messages.OF_CLIENTS)


class ServiceHandler(Protocol):
  """A service, as its listener sees it. The thread that serves the network calls all methods.

  A subclass overrides the methods that it needs.

  Attributes:
    service: its name in HELLO.
    kinds: that clients send, see `session_messages.of_clients`.
  """

  service: str
  kinds: dict[int, Kind]

  @property
  def largest(self) -> int:
    """Bytes of a frame of a client, at most."""
    ...

  def memory(self, peer: Peer, kind: Kind, fields: Sequence[Any], size: int) -> Any:
    """Return memory [size] u8 for the arrays of a message, or None. May raise WireError."""
    return None

  def reasons_against(self, details: dict[str, Any]) -> list[str]:
    """Return the reasons to refuse a client; [] to accept it."""
    return []

  def why_wait(self, details: dict[str, Any]) -> str:
    """Return the reason why a client must wait for its session, or ''."""
    return ''

  def welcome(self, peer: Peer, details: dict[str, Any]) -> dict[str, Any]:
    """Begin a session; return further entries of WELCOME."""
    return {}

  def welcomed(self, peer: Peer) -> None:
    """Act after WELCOME is on its way."""
    return

  def handle(self, peer: Peer, kind: Kind, fields: Sequence[Any], arrays: list[memoryview]) -> None:
    """Handle a message of a session. May raise WireError, which ends the session."""

  def ping(self, peer: Peer, field: Any) -> Any:
    """Handle the field of PING; return the field of PONG."""
    return None

  def drained(self, peer: Peer) -> None:
    """Act when all frames that waited for a client are sent."""
    return

  def left(self, peer: Peer, reason: str, level: int) -> None:
    """Handle the end of a session."""

  def turned(self) -> None:
    """Act once in each turn, after its messages."""
    return

  def tick(self, now: float) -> None:
    """Check deadlines, every TICK seconds."""
    return

  def forgive(self, seconds: float) -> None:
    """Extend deadlines by the seconds in which no message was read."""
    return

  def report(self) -> dict[str, Any]:
    """Return the report for `podrace top`."""
    ...


class Sessions:
  """Clients with a session. A client without one is a guest of `connections`.

  Owner: the Listener.

  Args:
    silence: seconds after which a silent client is dropped.

  Attributes:
    peers: oldest session first.
  """

  def __init__(
    self, handler: ServiceHandler, loop: Loop, keys: Path | None, silence: float, lines: Lines
  ) -> None:
    self._handler, self._silence, self._lines, self._counts = handler, silence, lines, lines.counts
    self.peers: dict[Peer, None] = {}
    self.connections = Connections(
      loop, keys, handler.kinds, self._message, self._memory, lines, lambda: len(self.peers)
    )
    self._clients: dict[tuple[str, int], Peer] = {}  # by key and client's number
    self._over: tuple[bool, str] | None = None  # the fields of END
    # Packed, and the time until which it is reused.
    self._report: tuple[list[Buffer], float] = [], -math.inf

  # --- messages ----------------------------------------------------------------------------------

  def _memory(self, peer: Peer, kind: Kind, fields: Sequence[Any], size: int) -> Any:
    if peer in self.peers:
      return self._handler.memory(peer, kind, fields, size)
    if peer.ending:
      return None
    raise WireError(f'a {kind.name} without a session')

  def _message(
    self, peer: Peer, kind: Kind, fields: Sequence[Any], body: memoryview, sizes: Sequence[int]
  ) -> None:
    if peer.ending:
      return
    if peer in self.peers and kind.number not in _COMMON:
      self._handler.handle(peer, kind, fields, split(body, sizes) if kind.arrays else [])
    elif kind is session_messages.PING and peer in self.peers:
      self.send(peer, session_messages.PONG, self._handler.ping(peer, fields[0]))
    elif kind is session_messages.METRICS and peer in self.peers:
      peer.metrics = process_metrics.check(fields[0])
    elif kind is session_messages.HELLO:
      self._hello(peer, fields[0])
    elif kind is session_messages.ASK:
      self._counts['asked'] += 1
      self.connections.talks(peer)
      peer.wants_report = True
      if not peer.stream.waiting:
        self._answer(peer)
    elif kind is session_messages.BYE and peer in self.peers:
      peer.finished = True
      self.drop(peer, f'left: {plain(fields[0])}', logging.INFO)
    else:
      raise WireError(f'a {kind.name} without a session')

  def _answer(self, peer: Peer) -> None:
    """Send the report. At most one waits for each connection."""
    peer.wants_report = False
    report, until = self._report
    if time.monotonic() > until:
      report = session_messages.REPORT.pack([self._handler.report()])
      self._report = report, time.monotonic() + REPORT_SECONDS
    self._send(peer, report)

  # --- begin -------------------------------------------------------------------------------------

  def _hello(self, peer: Peer, details: dict[str, Any]) -> None:
    session_messages.check_hello(details)
    if peer in self.peers:
      raise WireError('a second HELLO in a session')
    if reasons := self._reasons_against(details):
      self._counts['refused'] += 1
      reasons = plain_reasons(reasons)
      name = plain(f'{details["host"]}:{details["pid"]}')
      self._lines.log('\n  '.join([f'refused {name}:', *reasons]), logging.WARNING)
      self.send(peer, session_messages.REFUSED, reasons)
      return
    if self._over is not None:
      self.send(peer, session_messages.END, *self._over)
      return
    self._end_before(peer, details)
    if wait := self._why_wait(details):
      self._counts['made to wait'] += not peer.waits
      peer.waits = True
      self.connections.talks(peer)
      self.send(peer, session_messages.WAIT, wait)
      return
    self._join(peer, details)

  def _reasons_against(self, details: dict[str, Any]) -> list[str]:
    name = self._handler.service
    if (details['name'], details['version']) == (name, VERSION):
      return self._handler.reasons_against(details)
    return [
      f'this is {name!r} version {VERSION} (podrace {__version__}), '
      f'the client wants {details["name"]!r} version {details["version"]} '
      f'(podrace {details["podrace"]})'
    ]

  def _why_wait(self, details: dict[str, Any]) -> str:
    if len(self.peers) >= PEERS:
      return f'{self._handler.service} has {PEERS} clients and takes no more'
    if self.connections.share.is_full:
      limit = self.connections.share.sessions
      return (
        f'{self._handler.service} has as many clients as its limit of open files (`ulimit -n`) '
        f'permits: {limit} of all that its process listens for'
      )
    return self._handler.why_wait(details)

  def _end_before(self, peer: Peer, details: dict[str, Any]) -> None:
    """End this client's session over an older connection."""
    before = self._clients.get((peer.key, details['client']))
    if details['client'] and before is not None:
      self.drop(before, 'is back over another connection', logging.INFO)
      self.connections.end(before, 'you are back over another connection')

  def _join(self, peer: Peer, details: dict[str, Any]) -> None:
    """Begin a session."""
    peer.client, peer.name = details['client'], f'{label(details["host"])}:{details["pid"]}'
    peer.since = time.monotonic()
    answer = self._handler.welcome(peer, details)
    self.connections.guests.pop(peer, None)
    self.peers[peer] = None
    if peer.client:
      self._clients[peer.key, peer.client] = peer
    peer.stream.reader.largest, peer.stream.max_queued = self._handler.largest, BACKLOG
    self._counts['sessions'] += 1
    if self.send(peer, session_messages.WELCOME, dict(silence=self._silence, **answer)):
      self._handler.welcomed(peer)

  # --- send --------------------------------------------------------------------------------------

  def written(self, peer: Peer) -> None:
    """Act when all frames that waited for a connection are sent."""
    if peer.wants_report:
      self._answer(peer)
    if peer in self.peers:
      self._handler.drained(peer)

  def send(self, peer: Peer, kind: Kind, *fields: Any, arrays: Sequence[Buffer] = ()) -> bool:
    """Send a message to a client.

    Returns:
      False if the client is dropped, now or when its last messages are read.
    """
    return not (peer.gone or peer.ending) and self._send(peer, kind.pack(fields, arrays))

  def _send(self, peer: Peer, buffers: Sequence[Buffer]) -> bool:
    """Send a packed message, as `send`."""
    if peer.gone or peer.ending:
      return False
    try:
      if not peer.stream.send_packed(buffers):
        self.connections.look_for_room(peer, True)
    except SendQueueFull as e:
      self.cut(peer, f'dropped: {e}')
      return False
    except ConnectionClosed:
      peer.gone = True
      return False
    return True

  # --- end ---------------------------------------------------------------------------------------

  def lost(self, peer: Peer) -> None:
    """Remove a connection that is over."""
    self.connections.remove(peer)
    self.drop(peer, 'is gone', logging.INFO if peer.finished else logging.WARNING)

  def end(self, complete: bool, reason: str) -> None:
    """Tell all clients, also later ones, that the service ends."""
    self._over = complete, reason
    for peer in (*self.peers, *(g for g in self.connections.guests if g.waits)):
      self.send(peer, session_messages.END, complete, reason)

  def blame(self, peer: Peer, e: Exception) -> None:
    """End a connection whose message raised `e`, and tell the client the reason."""
    if isinstance(e, WireError):
      what = str(e)
    else:
      self.unexpected(e)  # only this client is affected
      what = f'what could not be dealt with ({type(e).__name__})'
    self._counts['malformed'] += 1
    if peer not in self.peers:
      self._lines.log(f'cut off {peer.where}, which sent {what}', logging.WARNING)
    self.drop(peer, f'dropped, it sent {what}')
    self.connections.end(peer, f'you sent {what}')

  def unexpected(self, e: Exception) -> None:
    """Count and log an exception that is no WireError: a check is missing."""
    self._counts['unexpected'] += 1
    trace = ''.join(traceback.format_exception(e))[-4000:]
    self._lines.log(f'a message that was not checked well enough:\n{trace}', logging.ERROR)

  def tell_gone(self, peer: Peer, reason: str) -> None:
    """End a session, and tell the reason."""
    self.drop(peer, reason)
    self.connections.end(peer, reason)

  def cut(self, peer: Peer, reason: str) -> None:
    """End a session and its connection at once. Frames that wait are lost."""
    self.drop(peer, reason)
    self.connections.remove(peer)

  def drop(self, peer: Peer, reason: str, level: int = logging.WARNING) -> None:
    """End a session, if it has not ended. Its connection becomes a guest."""
    if peer not in self.peers:
      return
    del self.peers[peer]
    if self._clients.get((peer.key, peer.client)) is peer:
      del self._clients[peer.key, peer.client]
    self._counts['dropped'] += 1
    self._lines.log(f'{peer.name}: {reason}', level)
    self.connections.take_back(peer)
    self._handler.left(peer, reason, level)

  # --- time --------------------------------------------------------------------------------------

  def forgive(self, seconds: float, now: float) -> None:
    """Extend deadlines by the seconds in which no message was read."""
    for peer in (*self.peers, *self.connections.guests):
      peer.last_seen = min(peer.last_seen + seconds, now)
      peer.until += seconds
    self._handler.forgive(seconds)

  def tick(self, now: float) -> None:
    """Close idle sessions, expired guests, and connections with revoked keys."""
    for peer in list(self.peers):
      if now - peer.last_seen > self._silence:
        self.tell_gone(peer, f'silent for {now - peer.last_seen:.1f} s')
    self.connections.tick(now)
    for peer in self.connections.revoked((*self.peers, *self.connections.guests)):
      self.tell_gone(peer, 'its key is not listed any more')

  def close(self) -> None:
    """Close all connections at once."""
    for peer in (*self.peers, *self.connections.guests):
      peer.stream.close()
    self.peers.clear()
    self.connections.close()
