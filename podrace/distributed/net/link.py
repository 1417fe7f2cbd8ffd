"""The end of a client: a thread that connects, keeps a session, and connects again after failures.

A session ends with its connection. In the next session the handler sends its state again.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from podrace.distributed.net import address as addresses
from podrace.distributed.net import keys as net_keys
from podrace.distributed.net import session_messages
from podrace.distributed.net.channel import ConnectionClosed
from podrace.distributed.net.connecting import (
  CONNECT_SECONDS,
  UNIX_RETRY_SECONDS,
  ForeignKeys,
  Outage,
  Outgoing,
  describe_failure,
)
from podrace.distributed.net.frame import PREFIX, Buffer, Kind, WireError, split
from podrace.distributed.net.frame_reader import new_scratch
from podrace.distributed.net.loop import Loop
from podrace.distributed.net.safe_text import plain, plain_reasons
from podrace.distributed.net.stream import SendQueueFull
from podrace.errors import UsageError
from podrace.system.threads import Worker

HELLO_SECONDS = 1.0  # between HELLOs of a connection that must wait, unless it is a Unix socket
METRICS_SECONDS = 10.0  # between METRICS
CLOSE_SECONDS = 10.0  # for the thread's end: it may need a lock that an interrupted thread has kept

NO_PODRACE = 'somebody listens there who is no podrace, or one of another time'


class Refused(UsageError):
  """The service refuses this client, or its terms; the message has both sides."""


class LinkHandler(Protocol):
  """A client, as its link sees it. The link's thread calls all methods.

  A subclass overrides the methods that it needs.

  Attributes:
    service: name of the service in HELLO.
    kinds: that the service sends, see `session_messages.of_listeners`.
  """

  service: str
  kinds: dict[int, Kind]

  def memory(self, kind: Kind, fields: Sequence[Any], size: int) -> Any:
    """Return memory [size] u8 for the arrays of a message, or None. May raise WireError."""
    return None

  def hello(self) -> dict[str, Any]:
    """Return further entries of HELLO."""
    return {}

  def joined(self, details: dict[str, Any]) -> None:
    """Begin a session with the `details` of WELCOME. May raise WireError."""
    return

  def handle(self, kind: Kind, fields: Sequence[Any], arrays: list[memoryview]) -> None:
    """Handle a message of a session. May raise WireError, which ends the session."""

  def ping(self) -> Any:
    """Return the field of PING."""
    return None

  def pong(self, details: Any) -> None:
    """Handle the field of PONG. May raise WireError."""
    return

  def metrics(self) -> dict[str, float]:
    """Return the numbers of METRICS. If empty, none is sent."""
    return {}

  def turned(self) -> None:
    """Act once in each turn of the thread, with or without a session."""
    return

  def lost(self, reason: str) -> None:
    """Handle the end of a session."""
    return

  def ended(self, complete: bool, reason: str) -> bool:
    """Handle the end of the service; return whether this client has nothing more to do."""
    return False


class Link:
  """A session with the service at an address, while the service runs.

  Owner: the caller, which calls `start` and `close`.
  Ends when: `close` is called, the service ends or refuses the client, or `give_up` has passed.

  Args:
    insecure: whether to use no keys beyond this machine.
    give_up: seconds without a session; 0 for no limit.
    changed: notified when a session or the link begins or ends.
    flag, what: names of the address and of the service in messages.

  Attributes:
    session: number of the current session, or None.
    number: of the session that is current, begins, or was last.
    waits: whether the service makes this client wait.
    closed: whether the link ends.
    ping_every, patience: seconds between PINGs and between turns. Handlers may lower them.
    wake: ends the thread's wait, from any thread.

  Raises:
    SecurityError: for an invalid address or keys.
  """

  def __init__(
    self,
    address: str,
    keys: Path | None,
    insecure: bool,
    handler: LinkHandler,
    changed: threading.Condition | None = None,
    give_up: float = 0.0,
    flag: str = 'connect',
    what: str = '',
  ) -> None:
    addresses.check_address(address, keys, insecure, flag)
    self._context = None if keys is None else net_keys.client_context(keys)
    self.address, self.handler = address, handler
    self.changed = changed or threading.Condition()
    self.session: int | None = None
    self.number = 0
    self.closed = self.waits = False
    self.silence, self.ping_every, self.patience = session_messages.SILENCE, math.inf, 0.5
    self._client = session_messages.new_client()
    self._outage = Outage(what or handler.service, address, give_up)
    self._hello_seconds = UNIX_RETRY_SECONDS if addresses.unix_path(address) else HELLO_SECONDS
    self._connection: Outgoing | None = None
    self._open: Outgoing | None = None  # the connection of the session
    self._bye = 'closed'
    self._loop, self._scratch = Loop(), new_scratch()
    self.wake = self._loop.wake
    self._pinged = self._waits_since = self._measured = 0.0
    self._worker: Worker | None = None

  def start(self) -> Link:
    """Begin to connect."""
    self._worker = Worker(f'link {self.address}', self._main, self._at_end)
    return self

  # --- from any thread

  @property
  def why(self) -> str:
    """Reason why there is no session."""
    return self._outage.why

  def send(
    self, kind: Kind, *fields: Any, arrays: Sequence[Buffer] = (), within: int | None = None
  ) -> bool:
    """Send a message; return False without a session, or if its number is not `within`."""
    # In this order: the number of a session is set before its connection.
    connection, number = self._open, self.number
    if connection is None or (within is not None and within != number):
      return False
    try:
      if not connection.stream.send(kind, *fields, arrays=arrays):
        self.wake()
    except (SendQueueFull, ConnectionClosed) as e:
      self._loop.call(functools.partial(self._lose, str(e), connection))
      return False
    return True

  def check(self) -> None:
    """Raise Refused or TimeoutError if it ended the link, or the exception of its thread."""
    if self._worker is not None:
      self._worker.check()

  def close(self, reason: str = 'closed') -> None:
    """End the session and the thread. Wait for the end of the thread for CLOSE_SECONDS at most."""
    self._bye = reason
    with self.changed:
      self.closed = True
      self.changed.notify_all()
    self.wake()
    if self._worker is not None:
      self._worker.wait(CLOSE_SECONDS)

  # --- the thread

  def _main(self) -> None:
    while not self.closed:
      if self._connection is None and time.monotonic() >= self._outage.due:
        self._connect()
      self._turn()
    self._leave()

  def _at_end(self) -> None:
    self._hang_up()
    with contextlib.closing(self._loop):
      self.handler.lost('it has ended')

  def _turn(self) -> None:
    """Wait for messages, and handle them."""
    seconds = self.patience
    if self._connection is None:
      seconds = min(seconds, self._outage.due - time.monotonic())
    elif self.waits:
      seconds = min(seconds, self._hello_seconds)
    for key, events in self._loop.wait(seconds):
      self._ready(key.data, events)
    self._loop.do_calls()  # afterwards, as a message may have the reason why a session is over
    if self._connection is not None:
      self._connection.look_for_room()
    self.handler.turned()
    self._check_deadlines()

  def _connect(self) -> None:
    """Begin a connection."""
    h = self.handler
    try:
      self._connection = Outgoing(
        self._loop, self.address, self._context, h.kinds, self._message, h.memory, self._scratch
      )
    except (OSError, ValueError) as e:
      self._outage.failed(describe_failure(e))
      return
    self._pinged, self._waits_since = 0.0, math.inf
    self._outage.stands()
    if self._connection.stream.shaken:
      self._hello()

  def _ready(self, connection: Outgoing, events: int) -> None:
    try:
      if connection.serve(events):
        self._hello()
    except ConnectionClosed as e:
      self._lose(_reason(self, e))
    except WireError as e:
      self._lose(f'it sent {e}' if self.session is not None else f'{NO_PODRACE}: it sent {e}')

  def _leave(self) -> None:
    """Say BYE."""
    if self._open is not None:
      self._open.leave(session_messages.BYE, self._bye)

  def _lose(self, reason: str, connection: Outgoing | None = None) -> None:
    """End the connection, unless it has been replaced. A new one follows."""
    if self._connection is None or connection not in (None, self._connection):
      return
    had = self.session is not None
    if had:
      self._outage.begin(reason)
    else:
      self._outage.failed(reason)
    self._hang_up()
    if had:
      self.handler.lost(reason)

  def _hang_up(self) -> None:
    if self._connection is not None:
      self._connection.close()
    with self.changed:
      self.session = self._connection = self._open = None
      self.waits = False
      self.changed.notify_all()

  # --- messages

  def _message(
    self, kind: Kind, fields: Sequence[Any], body: memoryview, sizes: Sequence[int]
  ) -> None:
    if kind.number in _COMMON:
      _COMMON[kind.number](self, *fields)
    elif self.session is None:
      raise WireError(f'a {kind.name} before WELCOME')
    else:
      self.handler.handle(kind, fields, split(body, sizes) if kind.arrays else [])

  def _hello(self) -> None:
    """Ask for a session."""
    if self._connection is not None:
      self._waits_since = math.inf
      details = session_messages.hello(self.handler.service, self._client, **self.handler.hello())
      _check_hello(details, self.address)
      try:
        self._connection.stream.send(session_messages.HELLO, details)
      except (ConnectionClosed, SendQueueFull) as e:
        self._lose(str(e))

  def _join(self, details: dict[str, Any]) -> None:
    silence = details.get('silence')
    if self.session is not None or type(silence) is not float or not 0 < silence < math.inf:
      raise WireError('a second WELCOME, or one without the seconds of silence')
    self.silence, self.patience = silence, min(self.patience, silence / 4)
    self.number += 1
    self._open, self._measured = self._connection, time.monotonic()
    self.handler.joined(details)
    with self.changed:
      self.session = self.number
      self.changed.notify_all()
    self._outage.end()
    self.waits = False

  def _wait(self, reason: str) -> None:
    self._waits_since, self.waits = time.monotonic(), True
    self._outage.wait(plain(reason))

  def _end(self, complete: bool, reason: str) -> None:
    reason = plain(reason)
    if self.handler.ended(complete, reason):
      self._bye = 'the service has ended'
      self.closed = True
    else:
      self._leave()
      self._lose(reason)

  # --- time

  def _check_deadlines(self) -> None:
    now, connection = time.monotonic(), self._connection
    if self.session is None:
      self._outage.check(now)
    if connection is None:
      return
    silent = now - connection.heard
    if self.session is None:
      if silent > CONNECT_SECONDS:
        self._lose(self.why)
      elif now - self._waits_since >= self._hello_seconds:
        self._hello()
      return
    if now - self._pinged > min(self.silence / 4, self.ping_every):
      self._pinged = now
      self.send(session_messages.PING, self.handler.ping())
    if now - self._measured > METRICS_SECONDS:
      self._measured = now
      if metrics := self.handler.metrics():
        self.send(session_messages.METRICS, metrics)
    if silent > 2 * self.silence:
      self._lose(f'it has been silent for {silent:.1f} s')


def _check_hello(details: dict[str, Any], address: str) -> None:
  size = sum(map(len, session_messages.HELLO.pack([details]))) - PREFIX.size
  if size > session_messages.GUEST_BYTES:
    raise Refused(
      f'HELLO to {address} would have {size:,} bytes, and a service takes at most '
      f'{session_messages.GUEST_BYTES:,}: the description of this client, as its spaces, is too '
      'large'
    )


def _reason(link: Link, error: ConnectionClosed) -> str:
  """Return the reason why a connection is over.

  Raises:
    Refused: for keys of another authority, which the listener has for good. After a session, or
      where the address may change, another process listens there for now.
  """
  lasts = not (link.number or addresses.announced_at(link.address))
  if lasts and isinstance(error, ForeignKeys):
    link._outage.failed(str(error))
    raise Refused(f'{link.address}: {error}')
  return str(error)


def refusal(address: str, reasons: list[Any]) -> Refused:
  """Return the error for a REFUSED."""
  return Refused('\n  '.join([f'{address} refused this client:', *plain_reasons(reasons)]))


def _refuse(link: Link, reasons: list[Any]) -> None:
  error = refusal(link.address, reasons)
  link._outage.failed(str(error))
  raise error


_COMMON: dict[int, Callable[..., None]] = {
  session_messages.WAIT.number: Link._wait,
  session_messages.WELCOME.number: Link._join,
  session_messages.PONG.number: lambda link, details: link.handler.pong(details),
  session_messages.REFUSED.number: _refuse,
  session_messages.GONE.number: lambda link, reason: link._lose(plain(reason)),
  session_messages.END.number: Link._end,
}
