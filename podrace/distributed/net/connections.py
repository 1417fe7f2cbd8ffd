"""The connections of a listener: accept, handshake, bounds without a session, and end."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import socket as sockets
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from podrace.distributed.net import address as addresses
from podrace.distributed.net import descriptors, process_metrics, session_messages
from podrace.distributed.net import keys as net_keys
from podrace.distributed.net.channel import ConnectionClosed, describe_error, set_no_delay
from podrace.distributed.net.frame import Kind
from podrace.distributed.net.frame_reader import new_scratch
from podrace.distributed.net.loop import READ, WRITE, Loop
from podrace.distributed.net.safe_text import Lines, TokenBucket, plain
from podrace.distributed.net.stream import SendQueueFull, Stream

GUEST_BACKLOG = 8  # frames that may wait for a connection without a session
SILENT_SECONDS = 10.0  # until HELLO, at most
TALKING_SECONDS = 300.0  # of silence after WAIT or ASK, at most
ENDING_SECONDS = 1.0  # that a connection is kept to hear why it ends
AT_ONCE = 16  # connections that are accepted in one turn
# Limits of one connection in one turn: messages of a guest, of a session, and seconds.
GUEST_MESSAGES, MESSAGES, MESSAGE_SECONDS = 4, 16, 0.005
GREETING_SHARE = 0.1  # share of the time for new connections
GREETING_SECONDS = 1.0  # of it that may be used at once
WANTS_KEYS = 'this listener wants keys: give --keys DIR'


class Peer:
  """A connection, and its session if it has one.

  Attributes:
    is_local: whether it is on this machine, as far as the kernel knows.
    name: HOST:PID, after HELLO.
    key: fingerprint of its certificate; '' without keys.
    state: for the handler.
    metrics: of its newest METRICS.
    finished: whether it has said BYE.
    gone: whether nothing can be sent any more, although messages may be unread.
    ending: whether the connection is kept only to hear why it ends.
    until: time at which a connection without a session ends.
    writes: whether the loop waits for room to write.
  """

  __slots__ = (
    'client', 'ending', 'finished', 'gone', 'is_local', 'key', 'last_seen', 'metrics', 'name',
    'since', 'state', 'stream', 'until', 'waits', 'wants_report', 'where', 'writes',
  )  # fmt: skip

  stream: Stream

  def __init__(self, where: str, is_local: bool = True) -> None:
    self.where, self.is_local, self.name, self.key, self.client = where, is_local, '', '', 0
    self.state: Any = None
    self.metrics: process_metrics.Measures = {}
    self.since = self.last_seen = time.monotonic()
    self.until = self.since + SILENT_SECONDS
    self.finished = self.ending = self.gone = self.wants_report = self.waits = self.writes = False


class Acceptor:
  """Accepts connections, without blocking.

  New connections get a bounded share of the time, so sessions are served even under a flood. When
  it is used up, new connections wait in the kernel.

  Attributes:
    address: with the port.

  Raises:
    SecurityError: if it cannot listen at the address.
  """

  def __init__(self, address: str, loop: Loop) -> None:
    self._socket, self.address = addresses.listen(address)
    self._loop, self._seconds = loop, TokenBucket(GREETING_SECONDS, GREETING_SHARE)
    self._accepting = False
    self.resume()

  def accept(self) -> Iterator[tuple[sockets.socket, Any]]:
    """Yield at most AT_ONCE new connections and their addresses.

    Raises:
      OSError: if files run out, for example.
    """
    with contextlib.suppress(BlockingIOError):
      for _ in range(AT_ONCE):
        yield self._socket.accept()

  @contextlib.contextmanager
  def timed(self) -> Iterator[None]:
    """Count the time that a new connection takes."""
    begun = time.monotonic()
    try:
      yield
    finally:
      self._seconds.take(time.monotonic() - begun)
      if self._seconds.left < 0:
        self.pause()

  @property
  def descriptor(self) -> int:
    """File descriptor of the socket."""
    return self._socket.fileno()

  def pause(self) -> None:
    """Leave new connections in the kernel until `resume`."""
    if self._accepting:
      self._accepting = False
      self._loop.remove(self._socket)

  def resume(self) -> None:
    """Accept connections again, if there is time for them."""
    if not self._accepting and self._seconds.left > 0:
      self._accepting = True
      self._loop.add(self._socket, READ, self)

  def close(self) -> None:
    """Stop listening. A second call does nothing: another process may own the path by then."""
    if self._socket.fileno() < 0:
      return
    if self._accepting:
      self._loop.remove(self._socket)
    self._socket.close()
    if (path := addresses.unix_path(self.address)) is not None:
      with contextlib.suppress(OSError):
        Path(path).unlink()


class Connections:
  """Connections, from `open` to `close`. A connection without a session is a guest.

  Owner: Sessions.

  Args:
    keys: directory of the listener's keys, or None.
    kinds: that clients send.
    message, memory: as for Stream, with the peer as first argument.
    sessions: returns the number of sessions.

  Attributes:
    guests: longest silent first.
    share: of the process's descriptors.

  Raises:
    SecurityError: for invalid keys; of `open` for the address.
  """

  def __init__(
    self,
    loop: Loop,
    keys: Path | None,
    kinds: dict[int, Kind],
    message: Callable[..., None],
    memory: Callable[..., Any],
    lines: Lines,
    sessions: Callable[[], int],
  ) -> None:
    self.share = descriptors.Share(sessions)
    self._loop, self._kinds, self._message, self._memory = loop, kinds, message, memory
    self._lines, self._counts = lines, lines.counts
    self.guests: collections.OrderedDict[Peer, None] = collections.OrderedDict()
    self._context: ssl.SSLContext | None = None
    self._allowed: net_keys.Allowed | None = None
    if keys is not None:
      self._context = net_keys.server_context(keys)
      self._allowed = net_keys.Allowed(keys / net_keys.ALLOWED)
    self._scratch = new_scratch()
    self._acceptor: Acceptor
    self._closing = contextlib.ExitStack()

  def open(self, address: str) -> str:
    """Start to listen; return the address with the port."""
    self._acceptor = Acceptor(address, self._loop)
    self._closing.callback(self._acceptor.close)
    self.share.open(self._acceptor.descriptor)
    self._closing.callback(self.share.close)
    return self._acceptor.address

  def close(self) -> None:
    """Forget all guests, and stop listening."""
    self.guests.clear()
    self._closing.close()

  # --- new connections ---------------------------------------------------------------------------

  def accept(self) -> None:
    """Make guests of new connections."""
    with self._acceptor.timed():
      try:
        for socket, where in self._acceptor.accept():
          self._add(socket, where)
      except OSError as e:  # no more files, or the peer has left
        self._counts['errors'] += 1
        self._lines.log(f'accepting: {e.strerror or e}', logging.WARNING)
        # Without a pause the kernel would report the same connection again at once.
        if e.errno in descriptors.LACKING:
          self._acceptor.pause()
          self._cut_oldest()

  def _add(self, socket: sockets.socket, where: Any) -> None:
    is_unix = socket.family == getattr(sockets, 'AF_UNIX', None)
    if is_unix:
      peer = Peer('a process here')
    else:
      peer = Peer(f'{where[0]}:{where[1]}', is_local=where[0] == socket.getsockname()[0])
    try:
      if is_unix and not addresses.same_user(socket):
        self._turned_away(peer, "it is another user's")
        socket.close()
        return
      set_no_delay(socket)
    except (OSError, ValueError):
      socket.close()
      return
    peer.stream = Stream(
      socket, self._kinds,
      functools.partial(self._message, peer), functools.partial(self._memory, peer),
      session_messages.GUEST_BYTES, GUEST_BACKLOG, self._scratch, self._context, True,
    )  # fmt: skip
    self._loop.add(socket, READ, peer)
    self.guests[peer] = None
    self._counts['connections'] += 1
    if self.share.is_reserved(socket.fileno()):
      self._cut_oldest()
    while len(self.guests) > self.share.guests:
      self._cut_oldest()

  def _shake(self, peer: Peer) -> None:
    """Continue a handshake. When it is complete, the key must be on the list."""
    with self._acceptor.timed():
      try:
        wants = peer.stream.shake()
      except ConnectionClosed as e:
        self._turned_away(peer, str(e))
        if 'WRONG_VERSION' in str(e):  # the client speaks no TLS
          peer.stream.say_plain(session_messages.REFUSED, [WANTS_KEYS])
        self._hush(peer)  # the alert of TLS is on its way
        return
    self.look_for_room(peer, wants == 'write')
    if not wants:
      assert peer.stream.tls is not None
      peer.key = net_keys.fingerprint_of(peer.stream.tls.certificate())
      if self.revoked([peer]):
        self._turned_away(peer, f'its key {peer.key} is not listed')
        self.end(peer, f'the key {peer.key} is not in {net_keys.ALLOWED}')

  def _turned_away(self, peer: Peer, reason: str) -> None:
    self._counts['turned away'] += 1
    self._lines.log(f'turned away {peer.where}: {reason}', logging.WARNING)

  def revoked(self, peers: Iterable[Peer]) -> list[Peer]:
    """Return the peers with keys outside the list, which is read again if it has changed."""
    if self._allowed is None:
      return []
    self._allowed.refresh()
    return [peer for peer in peers if peer.key and peer.key not in self._allowed]

  # --- all connections ---------------------------------------------------------------------------

  def serve(self, peer: Peer, events: int) -> bool:
    """Read the bytes that have come, and send the frames that wait.

    Returns:
      Whether all frames that waited are sent.

    Raises:
      ConnectionClosed: if the connection is over.
      WireError: if a frame is invalid. Exceptions of `message` pass through.
    """
    stream = peer.stream
    if stream.closed:
      return False
    if peer.ending and events & READ:
      stream.reader.unread = False
      self._discard(stream)
      return False
    if not stream.shaken:
      self._shake(peer)
      # A frame may have come with the end of the handshake.
      events = READ if stream.reader.pending and not peer.ending else 0
    if events & READ:
      peer.last_seen = time.monotonic()
      messages = GUEST_MESSAGES if peer in self.guests else MESSAGES
      stream.receive(messages, MESSAGE_SECONDS)
    if not events & WRITE or stream.closed or not stream.flush():
      return False
    self.look_for_room(peer, False)
    if peer.ending:
      stream.end_writing()
    return not peer.ending

  def _discard(self, stream: Stream) -> None:
    """Drop the bytes of a connection that ends, while the peer reads the last message."""
    try:
      if not stream.socket.recv(65536):
        raise ConnectionClosed('it ended')
    except BlockingIOError:
      return
    except OSError as e:
      raise ConnectionClosed(describe_error(e)) from e

  def look_for_room(self, peer: Peer, on: bool) -> None:
    """Wait for room to write, or not any more."""
    if peer.writes != on and not peer.stream.closed:
      peer.writes = on
      self._loop.change(peer.stream.socket, READ | WRITE if on else READ, peer)

  # --- their ends --------------------------------------------------------------------------------

  def end(self, peer: Peer, reason: str) -> None:
    """Close a connection without a session after it has heard the reason, or soon."""
    if peer.ending or peer.stream.closed:
      return
    try:
      if not peer.stream.send(session_messages.GONE, plain(reason)):
        self.look_for_room(peer, True)
    except SendQueueFull:
      self.remove(peer)
      return
    except ConnectionClosed:  # it cannot hear it, but its messages may be unread
      pass
    self._hush(peer)

  def _hush(self, peer: Peer) -> None:
    """Close a connection when the peer has read the last message, or soon.

    Closing with unread bytes would reset the connection, and the last message would be lost.
    """
    peer.ending = True
    peer.until = time.monotonic() + ENDING_SECONDS
    self.guests[peer] = None
    self.guests.move_to_end(peer, last=False)
    if not peer.stream.waiting:
      peer.stream.end_writing()

  def remove(self, peer: Peer) -> None:
    """Close a connection at once."""
    self.guests.pop(peer, None)
    if not peer.stream.closed:
      self._loop.remove(peer.stream.socket)
      peer.stream.close()

  def _cut_oldest(self) -> None:
    """Close the guest that has been silent longest, if there is any."""
    if self.guests:
      self._cut(next(iter(self.guests)))

  def _cut(self, peer: Peer) -> None:
    self._counts['cut'] += 1
    self.remove(peer)

  # --- guests ------------------------------------------------------------------------------------

  def take_back(self, peer: Peer) -> None:
    """Make the connection of a session that is over a guest again, if it is open."""
    if not peer.stream.closed:
      peer.until = time.monotonic() + SILENT_SECONDS
      peer.stream.reader.largest = session_messages.GUEST_BYTES
      self.guests[peer] = None

  def talks(self, peer: Peer) -> None:
    """Give a guest more time after a valid message."""
    if peer in self.guests:
      peer.until = time.monotonic() + TALKING_SECONDS
      self.guests.move_to_end(peer)

  def tick(self, now: float) -> None:
    """Close guests after their time limit."""
    self._acceptor.resume()
    for peer in [guest for guest in self.guests if guest.until < now]:
      if peer.ending:
        self.remove(peer)
      else:
        self._cut(peer)
