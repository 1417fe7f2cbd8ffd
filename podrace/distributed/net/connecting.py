"""A connection that this end makes, and the time in which it has none."""

from __future__ import annotations

import logging
import ssl
import time
from random import random

from podrace.distributed.net import address as addresses
from podrace.distributed.net.channel import ConnectionClosed, describe_error, set_no_delay
from podrace.distributed.net.frame import Kind
from podrace.distributed.net.frame_reader import Memory, Message
from podrace.distributed.net.loop import READ, WRITE, Loop
from podrace.distributed.net.stream import SendQueueFull, Stream

CONNECT_SECONDS = 5.0  # to make a connection, and to get its first answer; then it is tried anew
BYE_SECONDS = 1.0  # that the last word has
BACKLOG = 1024  # frames that the other end has not read
HAS_NO_KEYS = 'somebody listens there without keys, or who is no podrace'
LARGEST = 2**32 - 1  # bytes of a frame: this end has chosen whom it listens to
# Seconds between attempts, at first and at most; drawn between half of it and all.
BACKOFF = 0.05, 2.0
NEAR = 0.1  # the most of a Unix socket, where an attempt costs next to nothing
REMIND = 30.0  # seconds between messages that there is no session
ALONE = 2.0  # seconds after which there is one at all

# Why there is no session, as far as is known.
NOTHING_KNOWN = 'it has not answered yet'
NOBODY = 'nobody listens there'
SAYS_NOTHING = 'the connection stands, and it does not answer'

log = logging.getLogger('podrace.distributed.net')


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
    set_no_delay(socket)
    self._loop, self.heard = loop, time.monotonic()
    self.stream = Stream(socket, kinds, message, memory, LARGEST, BACKLOG, scratch, context)
    loop.add(socket, READ if self.stream.shaken else WRITE, self)

  def serve(self, events: int) -> bool:
    """Reads what has come and sends what waited; whether this has completed TLS's handshake.

    Raises:
      ConnectionClosed: if the connection is over.
      WireError: if what came is no message; whatever `message` raises.
    """
    shakes = not self.stream.shaken
    if shakes:
      try:
        wants = self.stream.shake()
      except ConnectionClosed as e:
        raise ConnectionClosed(f'{HAS_NO_KEYS}, or with other keys ({e})') from e
      self._wait_for(WRITE if wants == 'write' else READ)
      if wants:
        return False
      events = READ  # something may have come with the last of the handshake
    if events & READ:
      self.heard = time.monotonic()
      self.stream.receive()
    if events & WRITE and not self.stream.closed and self.stream.flush():
      self._wait_for(READ)
    return shakes

  def look_for_room(self) -> None:
    """Has what another thread could not send go when there is room for it."""
    if self.stream.waiting:
      self._wait_for(READ | WRITE)

  def _wait_for(self, events: int) -> None:
    self._loop.change(self.stream.socket, events, self)

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
    except (ConnectionClosed, SendQueueFull, OSError):
      pass

  def close(self) -> None:
    """At once."""
    if not self.stream.closed:
      self._loop.remove(self.stream.socket)
      self.stream.close()


def why_not(error: BaseException) -> str:
  """Why there is no connection, in words."""
  nobody = isinstance(error, ConnectionRefusedError | FileNotFoundError)
  return NOBODY if nobody else describe_error(error)


class Outage:
  """Why there is no session, what is said of it, when it is tried again, and when it has been too long.

  Args:
    what: the service, for messages.
    give_up: seconds after which `check` raises; 0 for never.

  Attributes:
    why: there is no session, as far as is known.
    due: when the next attempt is, on time.monotonic's clock.
  """

  def __init__(self, what: str, address: str, give_up: float) -> None:
    self._what, self._address, self._give_up = what, address, give_up
    self.why = NOTHING_KNOWN
    self._pause, self._most = BACKOFF[0], NEAR if addresses.unix_path(address) else BACKOFF[1]
    self._since = self.due = time.monotonic()
    self._said, self._said_at = '', 0.0

  def failed(self, reason: str) -> None:
    """An attempt had no success."""
    self.why = reason
    self.due = time.monotonic() + self._pause * (0.5 + 0.5 * random())
    self._pause = min(2 * self._pause, self._most)

  def begin(self, reason: str) -> None:
    """A session is over. All clients lose a service together, so the next attempt waits as well."""
    self._since = time.monotonic()
    self.failed(reason)
    self._remind(f'the session with {self._what} at {self._address} is over: {reason}')

  def stands(self) -> None:
    """A connection is made; if more is known already, that stays."""
    if self.why in (NOTHING_KNOWN, NOBODY):
      self.why = SAYS_NOTHING

  def wait(self, reason: str) -> None:
    """The service is there, and says why there is no session."""
    self.why, self._since = reason, time.monotonic()
    self._remind(f'waiting: {reason}')

  def end(self) -> None:
    """A session begins."""
    if self._said:
      log.info('%s at %s is back', self._what, self._address)
    self._pause, self._said, self.why = BACKOFF[0], '', NOTHING_KNOWN

  def check(self, now: float) -> None:
    """Raises TimeoutError if it has been too long."""
    alone = now - self._since
    if alone > ALONE:
      self._remind(f'no {self._what} answers at {self._address} ({self.why}); trying again')
    if self._give_up and alone > self._give_up:
      raise TimeoutError(
        f'no {self._what} at {self._address} for {self._give_up:.0f} s: {self.why}'
      )

  def _remind(self, message: str) -> None:
    """Says what is being waited for, when it begins and every half minute."""
    now = time.monotonic()
    if message != self._said or now - self._said_at > REMIND:
      self._said, self._said_at = message, now
      log.warning('%s', message)
