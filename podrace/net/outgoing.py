"""A connection that this end makes."""

from __future__ import annotations

import ssl
import time

from podrace.net import address as addresses
from podrace.net.frame import Kind
from podrace.net.loop import READ, WRITE, Loop
from podrace.net.outage import NOBODY
from podrace.net.stream import Ended, Full, Memory, Message, Stream, no_delay, why

CONNECT_SECONDS = 5.0  # to make a connection, and to get its first answer; then it is tried anew
BYE_SECONDS = 1.0  # that the last word has
BACKLOG = 1024  # frames that the other end has not read
HAS_NO_KEYS = 'somebody listens there without keys, or who is no podrace'
LARGEST = 2**32 - 1  # bytes of a frame: this end has chosen whom it listens to


class Outgoing:
  """A connection to an address, in a loop, until `close`.

  Args:
    context: for TLS; None for none.
    kinds, message, memory, scratch: as a Stream's.

  Attributes:
    heard: when something came last, or it was made.

  Raises:
    OSError, ValueError: if it can't be made; see `why_not`.
  """

  def __init__(
    self,
    loop: Loop,
    address: str,
    context: ssl.SSLContext | None,
    kinds: dict[int, Kind],
    message: Message,
    memory: Memory,
    scratch: bytearray,
  ) -> None:
    socket = addresses.connect(address, CONNECT_SECONDS)
    no_delay(socket)
    self._loop, self.heard = loop, time.monotonic()
    self.stream = Stream(socket, kinds, message, memory, LARGEST, BACKLOG, scratch, context)
    self._events = READ if self.stream.shaken else WRITE
    loop.add(socket, self, self._events)

  def serve(self, events: int) -> bool:
    """Reads what has come and sends what waited; whether this has completed TLS's handshake.

    Raises:
      Ended: if the connection is over.
      WireError: if what came is no message; whatever `message` raises.
    """
    shakes = not self.stream.shaken
    if shakes:
      if not self._shake():
        return False
      events = READ  # something may have come with the last of the handshake
    if events & READ:
      self.heard = time.monotonic()
      self.stream.receive()
    if events & WRITE and not self.stream.closed and self.stream.flush():
      self._wait_for(READ)
    return shakes

  def _shake(self) -> bool:
    """Goes on with TLS's handshake; whether it is done."""
    try:
      wants = self.stream.shake()
    except Ended as e:
      raise Ended(f'{HAS_NO_KEYS}, or with other keys ({e})') from e
    self._wait_for(WRITE if wants == 'write' else READ)
    return not wants

  def look_for_room(self) -> None:
    """Has what another thread could not send go when there is room for it."""
    if self.stream.waiting:
      self._wait_for(READ | WRITE)

  def _wait_for(self, events: int) -> None:
    if events != self._events:
      self._events = events
      self._loop.change(self.stream.socket, self, events)

  def leave(self, bye: Kind, reason: str) -> None:
    """Says a last word, and waits until that is read."""
    stream, until = self.stream, time.monotonic() + BYE_SECONDS
    try:
      stream.send(bye, reason)
      stream.socket.settimeout(BYE_SECONDS)
      while not stream.flush() and time.monotonic() < until:
        pass  # it waits for room itself, until the timeout
      stream.end_writing()
      # A connection that is closed with something unread is reset, and the last word with it.
      while time.monotonic() < until and stream.socket.recv(65536):
        pass
    except (Ended, Full, OSError):
      pass

  def close(self) -> None:
    """At once."""
    if not self.stream.closed:
      self._loop.remove(self.stream.socket)
      self.stream.close()


def why_not(error: BaseException) -> str:
  """Why there is no connection, in words."""
  nobody = isinstance(error, ConnectionRefusedError | FileNotFoundError)
  return NOBODY if nobody else why(error)
