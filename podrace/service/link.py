"""A client's end of the network: a thread that has the socket, and comes back after whatever happens.

A session ends with its connection. In the next one the service is told again what it needs, and asked
again what it has not answered.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import os
import random
import socket as sockets
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import zmq

from podrace.remote import security
from podrace.remote.dial import CUT, NOTHING_KNOWN, Connection
from podrace.remote.wire import (
  Wake,
  WireError,
  fields,
  pack,
  plain,
  plain_reasons,
  unpack,
)
from podrace.service import wire
from podrace.version import __version__

HELLO_SECONDS = 0.5  # between attempts to get a session
REMIND = 30.0  # seconds between messages that there is none
TURN = 0.05  # seconds between looks at the clock

log = logging.getLogger('podrace.service')


class Refused(ValueError):
  """The service does not take this client, or not on these terms; the message has both sides."""


class Link:
  """A connection to one service; whoever derives from it is told what the service says.

  `changed` guards what both the thread and callers use, perhaps of several links, and is notified when a
  session begins or ends.
  """

  service = ''

  def __init__(
    self, address: str, keys: Path | None, insecure: bool, changed: threading.Condition
  ) -> None:
    security.check_address(address, keys, insecure, 'connect')
    self._keys = security.client_keys(keys)
    self.address, self.changed = address, changed
    self.session: int | None = None
    self.failure: BaseException | None = None  # why it will not come back
    self.closed = False
    self.why = NOTHING_KNOWN  # there is no session
    self.patience = TURN  # seconds until the next turn, if nothing comes
    self.silence = 5.0  # seconds after which a peer is taken for dead
    self.ping_every = math.inf  # seconds, at most
    self._calls: collections.deque[Any] = collections.deque()
    self._context = security.new_context()
    self._wake = Wake()
    self._connection: Connection | None = None
    self._told, self._last_reason = 0.0, ''
    self._lost_since = time.monotonic()
    self._thread = threading.Thread(target=self._main, name=f'link {address}', daemon=True)

  # --- what derives from it says -------------------------------------------------------------------

  def hello(self) -> dict[str, Any]:
    """What HELLO tells besides."""
    return {}

  def joined(self, told: dict[str, Any], frames: list[Any]) -> None:
    """A session has begun."""

  def handle(self, header: list[Any], frames: list[Any]) -> None:
    """A message of this session."""

  def ping(self) -> tuple[Any, ...]:
    """What PING tells besides."""
    return ()

  def pong(self, told: Any) -> None:
    """What a PONG carries."""

  def turn(self) -> None:
    """In each turn of a session."""

  def lost(self) -> None:
    """The session is over."""

  # --- from any thread -----------------------------------------------------------------------------

  def wake(self) -> None:
    """Has the thread look around."""
    self._wake.set()

  def check(self) -> None:
    """Raises what has ended the link for good."""
    if self.failure is not None:
      if isinstance(self.failure, Refused):
        raise Refused(str(self.failure))
      raise RuntimeError(f'the connection to {self.address} failed: {self.failure}')

  def wait_joined(self, deadline: float) -> bool:
    """Whether there is a session in time."""
    with self.changed:
      while self.session is None and not self.closed:
        self.check()
        left = deadline - time.monotonic()
        if left <= 0:
          return False
        self.changed.wait(min(left, 3600.0))
    return not self.closed

  def close(self) -> None:
    """Ends the session and the thread."""
    with self.changed:
      if self.closed:
        return
      self.closed = True
      self.changed.notify_all()
    self._wake.set()
    if self._thread.ident is not None:
      self._thread.join()
    self._context.term()
    self._wake.close()

  # --- the thread ----------------------------------------------------------------------------------

  def _main(self) -> None:
    try:
      while not self.closed:
        self._connect()
        self._listen()
      self._bye()
    except BaseException as e:
      self.failure = e
      if not isinstance(e, Refused):
        log.error('the connection to %s failed:\n%s', self.address, traceback.format_exc())
    finally:
      with self.changed:
        self.session = None
        self.changed.notify_all()
      self.lost()
      self._disconnect()

  @property
  def is_open(self) -> bool:
    """Whether there is a socket, with a connection or on its way to one; of the thread."""
    return self._connection is not None

  def _connect(self) -> None:
    self._connection = Connection(
      self._context, self.address, self._keys, sends=1000, receives=1000,
      largest=wire.FRAME_BYTES, patience_ms=1000,
    )  # fmt: skip
    self._nonce = random.getrandbits(48)
    self._heard, self._pinged = time.monotonic(), 0.0

  def _disconnect(self) -> None:
    if self._connection is not None:
      self._connection.close()
    self._connection = None

  def _listen(self) -> None:
    """Until the connection is of no further use."""
    connection, wake, poller = self._connection, self._wake.fileno(), zmq.Poller()
    assert connection is not None
    for socket in (connection.socket, connection.monitor, wake):
      poller.register(socket, zmq.POLLIN)
    while self.is_open and not self.closed:
      cut = False
      for ready, _ in poller.poll(int(self.patience * 1000)):
        if ready == wake:
          self._wake.clear()
        elif ready is connection.monitor:
          event = connection.event()
          if event and event != CUT:
            self.why = connection.why
          cut = event == CUT
      while self.is_open and (raw := connection.receive(copy=False)) is not None:
        try:
          self._message(raw)
        except WireError as e:
          self.lose(f'it sent {e}')
      if cut and self.is_open and self.session is not None:  # what had come has been heard
        self.lose('the connection was cut')
      if self.is_open and self.session is not None:
        self.turn()
      self._look_at_the_clock()

  def _message(self, raw: list[Any]) -> None:
    header, frames = unpack(raw[0].buffer, 2**20), [f.buffer for f in raw[1:]]
    self._heard = time.monotonic()
    kind = header[0]
    if kind == wire.REFUSED:
      (reasons,) = fields(header, list)
      reasons = plain_reasons(reasons)
      raise Refused('\n  '.join([f'{self.address} refused this client:', *reasons]))
    if kind == wire.WAIT:
      (reason,) = fields(header, str)
      self.why = plain(reason)
    elif kind == wire.END:
      (reason,) = fields(header, str)
      self.lose(plain(reason))
    elif len(header) < 2 or type(header[1]) is not int:
      raise WireError(f'a header of kind {kind} without a session')
    elif kind == wire.WELCOME:
      session, told = fields(header, int, dict)
      if self.session is None and told.get('nonce') == self._nonce:
        self._join(session, told, frames)
    elif kind == wire.GONE:
      session, reason = fields(header, int, str)
      if session == self.session or session == 0:
        self.lose(plain(reason))
    elif header[1] == self.session:
      if kind == wire.PONG:
        if len(header) != 3:
          raise WireError('a pong without what it tells')
        self.pong(header[2])
      else:
        self.handle(header, frames)

  def _join(self, session: int, told: dict[str, Any], frames: list[Any]) -> None:
    silence = told.get('silence')
    if type(silence) is not float or not 0 < silence < math.inf:
      raise WireError('a welcome without the seconds of silence')
    self.silence = told['silence']
    self.joined(told, frames)
    if self._last_reason:
      log.info('%s at %s is back', self.service, self.address)
    with self.changed:
      self.session, self._last_reason = session, ''
      self.changed.notify_all()

  def lose(self, reason: str) -> None:
    """Ends the session; the next turn begins with a new connection."""
    with self.changed:
      had, self.session, self.why = self.session is not None, None, reason
      self._lost_since = time.monotonic()
      self.changed.notify_all()
    if had:
      self._remind(f'the session with {self.service} at {self.address} is over: {reason}')
    self._disconnect()
    self.lost()
    time.sleep(0.05 * random.random())  # all clients lose a service together

  def send(self, *header: Any, frames: list[Any] | None = None) -> bool:
    """Whether it is on its way; if not, the session is given up."""
    assert self._connection is not None
    message, socket = [pack(*header), *(frames or [])], self._connection.socket
    try:
      last = message.pop()
      for frame in message:
        socket.send(frame, zmq.NOBLOCK | zmq.SNDMORE, copy=len(frame) < 65536)
      socket.send(last, zmq.NOBLOCK, copy=len(last) < 65536)
    except zmq.Again:
      self.lose('it does not take what it is sent')
      return False
    return True

  def _look_at_the_clock(self) -> None:
    if self._connection is None:
      return
    now = time.monotonic()
    if self.session is None:
      if self._connection.ready and now - self._pinged > HELLO_SECONDS:
        self._pinged = now
        self._hello(self._connection)
      if now - self._lost_since > 2.0:
        self._remind(f'no {self.service} answers at {self.address} ({self.why}); trying again')
      if now - self._heard > security.NEW_SOCKET_SECONDS:  # turned away, perhaps
        self._disconnect()
      return
    if now - self._pinged > min(self.silence / 4, self.ping_every):
      self._pinged = now
      self.send(wire.PING, self.session, *self.ping())
    if now - self._heard > 2 * self.silence:
      self.lose(f'it has been silent for {now - self._heard:.1f} s')

  def _hello(self, connection: Connection) -> None:
    told = {
      'name': self.service,
      'version': wire.VERSION,
      'nonce': self._nonce,
      'host': sockets.gethostname()[:200],
      'pid': os.getpid(),
      'podrace': __version__,
      **self.hello(),
    }
    with contextlib.suppress(zmq.Again):  # it does not read
      connection.socket.send(pack(wire.HELLO, told), zmq.NOBLOCK)

  def _remind(self, message: str) -> None:
    """Says what is being waited for, when it begins and every half minute."""
    now = time.monotonic()
    if message != self._last_reason or now - self._told > REMIND:
      self._told, self._last_reason = now, message
      log.warning('%s', message)

  def _bye(self) -> None:
    if self._connection is not None and self.session is not None:
      self._connection.say_last(pack(wire.BYE, self.session, 'closed'), 500)
