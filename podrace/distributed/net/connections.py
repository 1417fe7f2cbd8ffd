"""A listener's connections: how they come, prove their keys, are bounded while they have no session, and end."""

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

GUEST_BACKLOG = 8  # frames that a connection without a session has not read
SILENT_SECONDS = 10.0  # that a connection may take to say hello
TALKING_SECONDS = 300.0  # that one may be silent which must wait, or has asked
ENDING_SECONDS = 1.0  # that a connection is kept to hear why it ends
AT_ONCE = 16  # connections that are accepted before others are served
# That are handled of one connection before others are served: messages of a guest, of a session, and the time.
GUEST_MESSAGES, MESSAGES, MESSAGE_SECONDS = 4, 16, 0.005
GREETING_SHARE = 0.1  # of the time, that new connections may take
GREETING_SECONDS = 1.0  # at once
WANTS_KEYS = 'this listener wants keys: give --keys DIR'


class Peer:
  """A connection, and its session if it has one.

  Attributes:
    here: it is on this machine, as far as the kernel knows.
    name: HOST:PID, once it has said hello.
    key: its certificate's fingerprint, '' without keys.
    state: the handler's.
    metrics: the newest numbers that it has sent of itself.
    finished: it has said BYE.
    gone: nothing can be sent to it any more, but what it has said is not all read.
  """

  __slots__ = (
    'asked', 'client', 'ending', 'finished', 'gone', 'here', 'key', 'last_seen', 'metrics', 'name',
    'since', 'state', 'stream', 'until', 'waits', 'where', 'writes',
  )  # fmt: skip

  stream: Stream

  def __init__(self, where: str, here: bool = True) -> None:
    self.where, self.here, self.name, self.key, self.client = where, here, '', '', 0
    self.state: Any = None
    self.metrics: process_metrics.Measures = {}
    self.since = self.last_seen = time.monotonic()
    self.until = self.since + SILENT_SECONDS  # as one without a session
    self.finished = self.ending = self.gone = self.asked = self.waits = self.writes = False


class Acceptor:
  """Accepts connections, without blocking.

  New ones have a bounded share of the time, for others have a right to the rest. While it is used up they wait in the
  kernel.

  Attributes:
    address: with the port that it has.
    accepting: new connections do not wait.

  Raises:
    SecurityError: if the address can't be listened at.
  """

  def __init__(self, address: str, loop: Loop) -> None:
    self._socket, self.address = addresses.listen(address)
    self._loop, self._seconds = loop, TokenBucket(GREETING_SECONDS, GREETING_SHARE)
    self.accepting = False
    self.resume()

  def accept(self) -> Iterator[tuple[sockets.socket, Any]]:
    """Some of the connections that have come, and where from; raises OSError, as where files run out."""
    with contextlib.suppress(BlockingIOError):
      for _ in range(AT_ONCE):
        yield self._socket.accept()

  @contextlib.contextmanager
  def timed(self) -> Iterator[None]:
    """Counts the time that a new connection takes."""
    begun = time.monotonic()
    try:
      yield
    finally:
      self._seconds.take(time.monotonic() - begun)
      if self._seconds.left < 0:
        self.pause()

  @property
  def descriptor(self) -> int:
    """The socket's."""
    return self._socket.fileno()

  def pause(self) -> None:
    """Leaves new connections in the kernel until `resume`."""
    if self.accepting:
      self.accepting = False
      self._loop.remove(self._socket)

  def resume(self) -> None:
    """Accepts connections again, if there is time for them."""
    if not self.accepting and self._seconds.left > 0:
      self.accepting = True
      self._loop.add(self._socket, READ, self)

  def close(self) -> None:
    """For good; once it is closed the path may be another process's."""
    if self._socket.fileno() < 0:
      return
    if self.accepting:
      self._loop.remove(self._socket)
    self._socket.close()
    if (path := addresses.unix_path(self.address)) is not None:
      with contextlib.suppress(OSError):
        Path(path).unlink()


class Connections:
  """Connections, from `open` to `close`. Those without a session are guests.

  Args:
    keys: the listener's directory of keys; None for none.
    kinds: that clients send.
    message, memory: as a Stream's, with the peer before their other arguments.
    sessions: returns how many sessions there are.

  Attributes:
    guests: those heard of longest ago first.
    share: of the process's descriptors.

  Raises:
    SecurityError: for keys that can't be used; of `open` for the address.
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
    self.acceptor: Acceptor
    self._closing = contextlib.ExitStack()

  def open(self, address: str) -> str:
    """Listens, from now on; the address with the port that it has."""
    self.acceptor = Acceptor(address, self._loop)
    self._closing.callback(self.acceptor.close)
    self.share.open(self.acceptor.descriptor)
    self._closing.callback(self.share.close)
    return self.acceptor.address

  def close(self) -> None:
    """Forgets all guests, and listens no more."""
    self.guests.clear()
    self._closing.close()

  # --- new ones ----------------------------------------------------------------------------------

  def accept(self) -> None:
    """Makes guests of those that have come."""
    with self.acceptor.timed():
      try:
        for socket, where in self.acceptor.accept():
          self._come(socket, where)
      except OSError as e:  # no more files, or the peer has left
        self._counts['errors'] += 1
        self._lines.log(f'accepting: {e.strerror or e}', logging.WARNING)
        if (
          e.errno in descriptors.LACKING
        ):  # the kernel would say at once again that there is a connection
          self.acceptor.pause()
          self._cut_oldest()

  def _come(self, socket: sockets.socket, where: Any) -> None:
    is_unix = socket.family == getattr(sockets, 'AF_UNIX', None)
    if is_unix:
      peer = Peer('a process here')
    else:
      peer = Peer(f'{where[0]}:{where[1]}', here=where[0] == socket.getsockname()[0])
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
      socket, self._kinds, functools.partial(self._message, peer), functools.partial(self._memory, peer),
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
    """Goes on with a handshake; when it is done, its key must be on the list."""
    with self.acceptor.timed():
      try:
        wants = peer.stream.shake()
      except ConnectionClosed as e:
        self._turned_away(peer, str(e))
        if 'WRONG_VERSION' in str(e):  # no TLS
          peer.stream.say_plain(session_messages.GONE, WANTS_KEYS)
        self._hush(peer)  # what TLS has said of it is on its way
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
    """Those of them whose keys are not on the list, which is read again if it has changed."""
    if self._allowed is None:
      return []
    self._allowed.refresh()
    return [peer for peer in peers if peer.key and peer.key not in self._allowed]

  # --- all of them -------------------------------------------------------------------------------

  def serve(self, peer: Peer, events: int) -> bool:
    """Reads what has come and sends what waited; whether nothing waits any more.

    Raises:
      ConnectionClosed: if the connection is over.
      WireError: if what it sent is no message; whatever `message` raises.
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
      # Something may have been said with the last of the handshake.
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
    """Reads nothing more of a connection that ends, but waits for the other end to read the last words."""
    try:
      if not stream.socket.recv(65536):
        raise ConnectionClosed('it ended')
    except BlockingIOError:
      return
    except OSError as e:
      raise ConnectionClosed(describe_error(e)) from e

  def look_for_room(self, peer: Peer, on: bool) -> None:
    """Whether to wait for room to write."""
    if peer.writes != on and not peer.stream.closed:
      peer.writes = on
      self._loop.change(peer.stream.socket, READ | WRITE if on else READ, peer)

  # --- their ends --------------------------------------------------------------------------------

  def end(self, peer: Peer, reason: str) -> None:
    """Closes a connection without a session when it has heard why, or soon."""
    if peer.ending or peer.stream.closed:
      return
    try:
      if not peer.stream.send(session_messages.GONE, plain(reason)):
        self.look_for_room(peer, True)
    except SendQueueFull:
      self.remove(peer)
      return
    except ConnectionClosed:  # it can't hear it, but may have more to say
      pass
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

  def remove(self, peer: Peer) -> None:
    """Closes a connection at once."""
    self.guests.pop(peer, None)
    if not peer.stream.closed:
      self._loop.remove(peer.stream.socket)
      peer.stream.close()

  def _cut_oldest(self) -> None:
    """Ends the guest that was heard of longest ago, if there is one."""
    if self.guests:
      self._cut(next(iter(self.guests)))

  def _cut(self, peer: Peer) -> None:
    self._counts['cut'] += 1
    self.remove(peer)

  # --- guests ------------------------------------------------------------------------------------

  def take_back(self, peer: Peer) -> None:
    """A session is over, and its connection, if it is open still, a guest's."""
    if not peer.stream.closed:
      peer.until = time.monotonic() + SILENT_SECONDS
      peer.stream.reader.largest = session_messages.GUEST_BYTES
      self.guests[peer] = None

  def talks(self, peer: Peer) -> None:
    """A guest has said something sensible: it has more time."""
    if peer in self.guests:
      peer.until = time.monotonic() + TALKING_SECONDS
      self.guests.move_to_end(peer)

  def tick(self, now: float) -> None:
    """Ends guests whose time is over."""
    self.acceptor.resume()
    for peer in [guest for guest in self.guests if guest.until < now]:
      if peer.ending:
        self.remove(peer)
      else:
        self._cut(peer)
