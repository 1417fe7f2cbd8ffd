"""A client's end: a thread that connects, keeps a session, and comes back after whatever happens.

A session ends with its connection. In the next one the handler tells the service again what it needs.
"""

from __future__ import annotations

import logging
import math
import selectors
import socket as sockets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import random
from typing import Any, Protocol

from podrace.net import address as addresses
from podrace.net import keys as net_keys
from podrace.net import session
from podrace.net.frame import PREFIX, Buffer, Kind, WireError, split
from podrace.net.stream import Ended, Full, Stream, new_scratch, no_delay, why
from podrace.net.text import plain, plain_reasons
from podrace.worker import Worker

CONNECT_SECONDS = 5.0  # to make a connection, and to get its first answer; then it is tried anew
BACKOFF = (
  0.05,
  2.0,
)  # seconds between attempts, at first and at most; drawn between half of it and all
HELLO_SECONDS = 1.0  # between attempts to get a session, of a connection that must wait
REMIND = 30.0  # seconds between messages that there is none
METRICS_SECONDS = 10.0  # between numbers that a process sends of itself
BYE_SECONDS = 1.0  # that the last word has
BACKLOG = 1024  # frames that the other end has not read
LARGEST = 2**32 - 1  # bytes of a frame: this end has chosen whom it listens to
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

# Why there is no session, as far as is known.
NOTHING_KNOWN = 'it has not answered yet'
NOBODY = 'nobody listens there'
SAYS_NOTHING = 'the connection stands, and it does not answer'
NO_PODRACE = 'somebody listens there who is no podrace, or one of another time'
HAS_NO_KEYS = 'somebody listens there without keys, or who is no podrace'

log = logging.getLogger('podrace.net')


class Refused(ValueError):
  """The service does not take this client, or not on these terms; the message has both sides."""


class Handler(Protocol):
  """A client, as far as its link knows it. All of it is called by the link's thread.

  A class that is declared as one need only have what it does otherwise than here.

  Attributes:
    service: its name in HELLO.
    kinds: that the service sends, see `session.of_listeners`.
  """

  @property
  def service(self) -> str: ...
  @property
  def kinds(self) -> dict[int, Kind]: ...

  def memory(self, kind: Kind, fields: Sequence[Any], size: int) -> Any:
    """Memory [size] u8 for the arrays of a message; None to leave that to the stream. May raise WireError."""
    return None

  def hello(self) -> dict[str, Any]:
    """What HELLO tells besides."""
    return {}

  def joined(self, details: dict[str, Any]) -> None:
    """A session begins; `details` is what WELCOME has. May raise WireError."""
    return

  def handle(self, kind: Kind, fields: Sequence[Any], arrays: list[memoryview]) -> None:
    """A message of a session. May raise WireError, which ends it."""

  def ping(self) -> Any:
    """What PING tells."""
    return None

  def pong(self, details: Any) -> None:
    """What PONG tells. May raise WireError."""
    return

  def metrics(self) -> dict[str, float]:
    """What METRICS tells of this process, now and then; nothing if it is empty."""
    return {}

  def turned(self) -> None:
    """In each turn of the thread; `Link.session` says whether there is one."""
    return

  def lost(self, reason: str) -> None:
    """A session is over."""
    return

  def ended(self, complete: bool, reason: str) -> bool:
    """The service says that it ends; whether this client has nothing more to do."""
    return False


class Link:
  """A session with the service at an address, whenever that is there.

  Args:
    insecure: no keys, beyond this machine.
    give_up: seconds without a session after which it ends; 0 for never.
    changed: is notified when a session begins or ends, or the link does.
    flag, what: how messages call the address, and the service (default: its name).

  Attributes:
    session: how many there have been, if there is one now; None if not.
    why: there is none.
    waits: the service has it wait for a session.
    closed: `close` was called, or the service has no more to do for it.
    ping_every, patience: seconds, at most, between PINGs and between turns; handlers may lower them.

  Raises:
    SecurityError: for addresses or keys that can't be used.
  """

  def __init__(
    self,
    address: str,
    keys: Path | None,
    insecure: bool,
    handler: Handler,
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
    self.closed = self.over = self.waits = False
    self.why = NOTHING_KNOWN
    self.silence, self.ping_every, self.patience = session.SILENCE, math.inf, 0.5
    self._client = session.new_client()
    self._give_up, self._what = give_up, what or handler.service
    self._sessions = 0
    self._stream: Stream | None = None  # connected, or on its way
    self._open: Stream | None = None  # of a session
    self._lost_why = ''  # noticed by another thread
    self._wants = READ
    self._bye = 'closed'
    self._wake = session.Wake()
    self._selector = selectors.DefaultSelector()
    self._selector.register(self._wake.fileno(), READ)
    self._scratch = new_scratch()
    self._must_wait = False
    self._waits, self._alone_since = 0, time.monotonic()
    self._said, self._last_reason = 0.0, ''
    self._heard = self._pinged = self._asked = self._measured = 0.0
    self._worker: Worker | None = None

  def start(self) -> Link:
    """Begins to connect."""
    self._worker = Worker(f'link {self.address}', self._main, self._at_end)
    return self

  @property
  def number(self) -> int:
    """Of the session that is, begins, or was last."""
    return self._sessions

  # --- from any thread -----------------------------------------------------------------------------

  def wake(self) -> None:
    """Has the thread look around."""
    self._wake.set()

  def send(
    self, kind: Kind, *fields: Any, arrays: Sequence[Buffer] = (), within: int | None = None
  ) -> bool:
    """Whether it is on its way; if not, there is no session, or not the one numbered `within`."""
    number, stream = self._sessions, self._open
    if stream is None or (within is not None and within != number):
      return False
    try:
      if not stream.send(kind, *fields, arrays=arrays):
        self.wake()
    except (Full, Ended) as e:
      if stream is self._open:
        self._lost_why = str(e)
        self.wake()
      return False
    return True

  def check(self) -> None:
    """Raises what has ended the link for good: Refused, TimeoutError, or what failed in its thread."""
    if self._worker is not None:
      self._worker.check()

  @property
  def failed(self) -> bool:
    """Whether `check` raises."""
    return self._worker is not None and self._worker.failed

  def wait_joined(self, deadline: float) -> bool:
    """Whether there is a session in time; raises as `check`."""
    with self.changed:
      while self.session is None and not self.closed:
        self.check()
        if (left := deadline - time.monotonic()) <= 0:
          return False
        self.changed.wait(min(left, 3600.0))
    return not self.closed

  def close(self, reason: str = 'closed') -> None:
    """Ends the session and the thread."""
    self._bye = reason
    with self.changed:
      self.closed = True
      self.changed.notify_all()
    self.wake()
    if self._worker is not None:
      self._worker.wait()

  def lose(self, reason: str) -> None:
    """Ends the session; another one begins."""
    self._lost_why = reason
    self.wake()

  # --- the thread ----------------------------------------------------------------------------------

  def _main(self) -> None:
    try:
      while not self.closed:
        if self._stream is None:
          self._connect()
        self._turn()
      self._leave()
    finally:
      self._hang_up()

  def _at_end(self) -> None:
    with self.changed:
      self.session = self._open = None
      self.changed.notify_all()
    self.handler.lost('it has ended')
    self._selector.close()
    self._wake.close()

  def _turn(self) -> None:
    """Waits for something to come, and deals with it."""
    stream = self._stream
    for key, events in self._selector.select(self.patience):
      if stream is None or key.data is not stream:
        self._wake.clear()
      else:
        self._ready(stream, events)
    if self._lost_why and self._stream is stream and stream is not None:
      self._lose(self._lost_why)
    self._lost_why = ''
    self._flush()
    self.handler.turned()
    self._look_at_the_clock()

  def _flush(self) -> None:
    """Has the selector tell of room where another thread's message waits for it."""
    if (stream := self._open) is not None and stream.waiting:
      self._select(READ | WRITE)

  def _connect(self) -> None:
    """Begins a connection, after a while if the one before was no success."""
    if self._waits:
      first, most = BACKOFF
      seconds = min(first * 2 ** (self._waits - 1), most) * (0.5 + 0.5 * random())
      if self._sleep(seconds):
        return
    self._waits += 1
    self._heard, self._pinged, self._must_wait = time.monotonic(), 0.0, False
    try:
      socket = self._socket()
    except (OSError, ValueError) as e:
      self.why = NOBODY if isinstance(e, (ConnectionRefusedError, FileNotFoundError)) else why(e)
      return
    h = self.handler
    self._stream = Stream(
      socket, h.kinds, self._message, h.memory, LARGEST, BACKLOG, self._scratch, self._context
    )
    self._wants = READ if self._stream.shaken else WRITE
    self._selector.register(socket, self._wants, self._stream)
    if self.why in (NOTHING_KNOWN, NOBODY):  # else it is known better
      self.why = SAYS_NOTHING
    if self._stream.shaken:
      self._hello()

  def _socket(self) -> sockets.socket:
    socket = addresses.connect(self.address, CONNECT_SECONDS)
    no_delay(socket)
    return socket

  def _sleep(self, seconds: float) -> bool:
    """Lets time pass; whether the link is to end."""
    until = time.monotonic() + seconds
    while not self.closed and (left := until - time.monotonic()) > 0:
      self._look_at_the_clock()
      if self._selector.select(min(left, 0.2)):
        self._wake.clear()
    return self.closed

  def _select(self, events: int) -> None:
    if self._stream is not None and events != self._wants:
      self._wants = events
      self._selector.modify(self._stream.socket, events, self._stream)

  def _ready(self, stream: Stream, events: int) -> None:
    try:
      if not stream.shaken:
        wants = stream.shake()
        self._select(WRITE if wants == 'write' else READ)
        if not wants:
          self._hello()
        events = READ if stream.pending() else 0
      if events & READ:
        self._heard = time.monotonic()
        stream.receive()
      if events & WRITE and not stream.closed and stream.flush():
        self._select(READ)
    except Ended as e:
      self._lose(self._explained(stream, str(e)))
    except WireError as e:
      self._lose(f'it sent {e}' if self.session is not None else f'{NO_PODRACE}: it sent {e}')

  def _explained(self, stream: Stream, reason: str) -> str:
    """Why a connection is over that had no session."""
    if self.session is not None or stream.shaken:
      return reason
    return f'{HAS_NO_KEYS}, or with other keys ({reason})'

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
    """Asks for a session."""
    if self._stream is not None:
      self._asked, self._must_wait = time.monotonic(), False
      try:
        details = session.hello(self.handler.service, self._client, **self.handler.hello())
        self._check_hello(details)
        self._stream.send(session.HELLO, details)
      except (Ended, Full) as e:
        self._lose(str(e))

  def _check_hello(self, details: dict[str, Any]) -> None:
    size = sum(map(len, session.HELLO.pack([details]))) - PREFIX.size
    if size > session.GUEST_BYTES:
      raise Refused(
        f'HELLO to {self.address} would have {size:,} bytes, and a service takes at most {session.GUEST_BYTES:,}: '
        'what this client tells of itself, as its spaces, is too large'
      )

  def _join(self, details: dict[str, Any]) -> None:
    silence = details.get('silence')
    if self.session is not None or type(silence) is not float or not 0 < silence < math.inf:
      raise WireError('a second WELCOME, or one without the seconds of silence')
    self.silence = silence
    self._sessions += 1
    self._open, self._measured = self._stream, time.monotonic()
    self.handler.joined(details)
    with self.changed:
      self.session = self._sessions
      self.changed.notify_all()
    if self._last_reason:
      log.info('%s at %s is back', self._what, self.address)
    self._waits, self._last_reason, self.why = 0, '', NOTHING_KNOWN
    self.waits = False

  def _wait(self, reason: str) -> None:
    self.why, self._must_wait, self.waits = plain(reason), True, True
    self._alone_since = time.monotonic()
    self._remind(f'waiting: {self.why}')

  def _refused(self, reasons: list[Any]) -> None:
    lines = plain_reasons(reasons)
    raise Refused('\n  '.join([f'{self.address} refused this client:', *lines]))

  def _gone(self, reason: str) -> None:
    self._lose(plain(reason))

  def _end(self, complete: bool, reason: str) -> None:
    reason = plain(reason)
    if self.handler.ended(complete, reason):
      self._bye = 'the service has ended'
      self.over = self.closed = True
    else:
      self._leave()
      self._lose(reason)

  def _lose(self, reason: str) -> None:
    """Ends the connection; the next turn begins another."""
    if self._stream is None:
      return
    self.why = reason
    self._hang_up()
    with self.changed:
      had, self.session = self.session is not None, None
      self.changed.notify_all()
    if had:
      self._alone_since = time.monotonic()
      self._remind(f'the session with {self._what} at {self.address} is over: {reason}')
      self._waits = 1  # all clients lose a service together
      self.handler.lost(reason)

  def _hang_up(self) -> None:
    stream, self._stream, self._open, self.waits = self._stream, None, None, False
    if stream is not None and not stream.closed:
      self._selector.unregister(stream.socket)
      stream.close()

  def _look_at_the_clock(self) -> None:
    now = time.monotonic()
    if self.session is None:
      self._look_for_a_session(now)
      return
    if now - self._pinged > min(self.silence / 4, self.ping_every):
      self._pinged = now
      self.send(session.PING, self.handler.ping())
    if now - self._measured > METRICS_SECONDS:
      self._measured = now
      if found := self.handler.metrics():
        self.send(session.METRICS, found)
    if now - self._heard > 2 * self.silence:
      self._lose(f'it has been silent for {now - self._heard:.1f} s')

  def _look_for_a_session(self, now: float) -> None:
    alone = now - self._alone_since
    if alone > 2.0:
      self._remind(f'no {self._what} answers at {self.address} ({self.why}); trying again')
    if self._give_up and alone > self._give_up:
      raise TimeoutError(f'no {self._what} at {self.address} for {self._give_up:.0f} s: {self.why}')
    if self._stream is None:
      return
    if now - self._heard > CONNECT_SECONDS:
      self._lose(self.why)
    elif self._must_wait and now - self._asked > HELLO_SECONDS:
      self._hello()

  def _remind(self, message: str) -> None:
    """Says what is being waited for, when it begins and every half minute."""
    now = time.monotonic()
    if message != self._last_reason or now - self._said > REMIND:
      self._said, self._last_reason = now, message
      log.warning('%s', message)

  def _leave(self) -> None:
    """Says goodbye, and waits until that is read."""
    stream = self._open
    if stream is None:
      return
    until = time.monotonic() + BYE_SECONDS
    try:
      stream.send(session.BYE, self._bye)
      stream.socket.settimeout(BYE_SECONDS)
      while not stream.flush() and time.monotonic() < until:
        pass  # it waits for room itself, until the timeout
      stream.end_writing()
      # A connection that is closed with something unread is reset, and the last word with it.
      while time.monotonic() < until and stream.socket.recv(65536):
        pass
    except (Ended, Full, OSError):
      pass


_COMMON: dict[int, Callable[..., None]] = {
  session.WAIT.number: Link._wait,
  session.WELCOME.number: Link._join,
  session.PONG.number: lambda link, details: link.handler.pong(details),
  session.REFUSED.number: Link._refused,
  session.GONE.number: Link._gone,
  session.END.number: Link._end,
}
