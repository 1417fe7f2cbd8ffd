"""A connection that this end makes, and the outages between connections."""

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

CONNECT_SECONDS = 5.0  # to make a connection, and to get its first answer
BYE_SECONDS = 1.0  # to send the last message
BACKLOG = 1024  # frames that wait to be sent
HAS_NO_KEYS = 'somebody listens there without keys, or who is no podrace'
FOREIGN_KEYS = 'keys of another authority: give both ends keys of one `podrace keys new`'
LARGEST = 2**32 - 1  # bytes of a frame: a client trusts the service that it has chosen
# Seconds between attempts, first and longest. Half of it to all of it, at random.
BACKOFF = 0.05, 2.0
UNIX_RETRY_SECONDS = 0.1  # between attempts at a Unix socket, at most
REMIND_SECONDS = 30.0  # between messages that there is no session
QUIET_SECONDS = 2.0  # without a session before the first message

# Reasons for an outage.
NOTHING_KNOWN = 'it has not answered yet'
NOBODY = 'nobody listens there'
SAYS_NOTHING = 'the connection stands, and it does not answer'

log = logging.getLogger('podrace.distributed.net')


class ForeignKeys(ConnectionClosed):
  """The listener's certificate is not of the authority of this client's keys."""


class Outgoing:
  """A connection to an address, in a loop.

  Owner: the caller, which calls `close`.

  Args:
    context: for TLS; None for a plain connection.
    kinds, message, memory, scratch: as for Stream.

  Attributes:
    heard: time at which bytes came last, or it was made.

  Raises:
    OSError, ValueError: if it cannot be made; see `describe_failure`.
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
    """Read the bytes that have come, and send the frames that wait.

    Args:
      events: READ, WRITE or both.

    Returns:
      Whether this has completed the handshake of TLS.

    Raises:
      ForeignKeys: if the listener has keys of another authority.
      ConnectionClosed: if the connection is over.
      WireError: if a frame is invalid. Exceptions of `message` pass through.
    """
    shakes = not self.stream.shaken
    if shakes:
      try:
        wants = self.stream.shake()
      except ConnectionClosed as e:
        if isinstance(e.__cause__, ssl.SSLCertVerificationError):
          raise ForeignKeys(f'{FOREIGN_KEYS} ({e})') from e
        raise ConnectionClosed(f'{HAS_NO_KEYS}, or with other keys ({e})') from e
      self._wait_for(WRITE if wants == 'write' else READ)
      if wants:
        return False
      events = READ  # a frame may have come with the end of the handshake
    if events & READ:
      self.heard = time.monotonic()
      self.stream.receive()
    if events & WRITE and not self.stream.closed and self.stream.flush():
      self._wait_for(READ)
    return shakes

  def look_for_room(self) -> None:
    """Wait for room to send the frames of other threads."""
    if self.stream.waiting:
      self._wait_for(READ | WRITE)

  def _wait_for(self, events: int) -> None:
    self._loop.change(self.stream.socket, events, self)

  def leave(self, bye: Kind, reason: str) -> None:
    """Send a last message, and wait until it is read."""
    stream, until = self.stream, time.monotonic() + BYE_SECONDS
    try:
      stream.send_packed(bye.pack((reason,)), last=True)
      stream.socket.settimeout(BYE_SECONDS)
      while not stream.flush() and time.monotonic() < until:
        pass  # the socket waits for room, up to its timeout
      stream.end_writing()
      # Closing with unread bytes resets the connection, and the last message is lost.
      while time.monotonic() < until and stream.socket.recv(65536):
        pass
    except (ConnectionClosed, SendQueueFull, OSError):
      pass

  def close(self) -> None:
    """Close the connection at once."""
    if not self.stream.closed:
      self._loop.remove(self.stream.socket)
      self.stream.close()


def describe_failure(error: BaseException) -> str:
  """Return the reason why there is no connection, for a message."""
  is_refused = isinstance(error, ConnectionRefusedError | FileNotFoundError)
  return NOBODY if is_refused else describe_error(error)


class Outage:
  """The time without a session: its reason, its log messages, its retries and its limit.

  Args:
    what: name of the service, for messages.
    give_up: seconds after which `check` raises; 0 for never.

  Attributes:
    why: reason why there is no session, as far as is known.
    due: time of the next attempt.
  """

  def __init__(self, what: str, address: str, give_up: float) -> None:
    self._what, self._address, self._give_up = what, address, give_up
    self.why = NOTHING_KNOWN
    self._pause = BACKOFF[0]
    self._max_pause = UNIX_RETRY_SECONDS if addresses.unix_path(address) else BACKOFF[1]
    self._since = self.due = time.monotonic()
    self._message, self._logged_at = '', 0.0

  def failed(self, reason: str) -> None:
    """Record that an attempt failed."""
    self.why = reason
    self.due = time.monotonic() + self._pause * (0.5 + 0.5 * random())
    self._pause = min(2 * self._pause, self._max_pause)

  def begin(self, reason: str) -> None:
    """Record the end of a session. The next attempt waits: all clients lose a service together."""
    self._since = time.monotonic()
    self.failed(reason)
    self._remind(f'the session with {self._what} at {self._address} is over: {reason}')

  def stands(self) -> None:
    """Record that a connection is made. A more precise reason is kept."""
    if self.why in (NOTHING_KNOWN, NOBODY):
      self.why = SAYS_NOTHING

  def wait(self, reason: str) -> None:
    """Record that the service makes this client wait."""
    self.why, self._since = reason, time.monotonic()
    self._remind(f'waiting: {reason}')

  def end(self) -> None:
    """Record that a session begins."""
    if self._message:
      log.info('connected to %s at %s', self._what, self._address)
    self._pause, self._message, self.why = BACKOFF[0], '', NOTHING_KNOWN

  def check(self, now: float) -> None:
    """Log the outage now and then. Raise TimeoutError after `give_up` seconds."""
    alone = now - self._since
    if alone > QUIET_SECONDS:
      self._remind(f'no {self._what} answers at {self._address} ({self.why}); trying again')
    if self._give_up and alone > self._give_up:
      raise TimeoutError(
        f'no {self._what} at {self._address} for {self._give_up:.0f} s: {self.why}'
      )

  def _remind(self, message: str) -> None:
    """Log a message if it is new, or after REMIND_SECONDS."""
    now = time.monotonic()
    if message != self._message or now - self._logged_at > REMIND_SECONDS:
      self._message, self._logged_at = message, now
      log.warning('%s', message)
