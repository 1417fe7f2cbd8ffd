"""A client's connection: its socket, and what ZeroMQ tells of it. What all clients have in common."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import zmq

from podrace.remote import security
from podrace.remote.wire import CONNECT_MS

READY = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
CUT = int(zmq.EVENT_DISCONNECTED)
TURNED_AWAY = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)  # the other end does not list this key
FAILED = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL), int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
CLOSED = int(zmq.EVENT_CLOSED)  # an attempt to connect that failed

# Why there is no answer, as far as is known.
NOTHING_KNOWN = 'it has not answered yet'
NOBODY = 'nobody listens there'
OTHER_KEYS = 'somebody listens there, but with another server key, with keys where this side has none, or without'
NOT_LISTED = "it does not list this client's key in its allowed_clients"
SAYS_NOTHING = 'the connection stands, and it does not answer'
_REASONS = {
  READY: SAYS_NOTHING, TURNED_AWAY: NOT_LISTED, CLOSED: NOBODY, **dict.fromkeys(FAILED, OTHER_KEYS),
}  # fmt: skip


class Connection:
  """A DEALER socket on its way to an address, for as long as it takes, and again when it has been cut.

  Args:
    keys: of `security.client_keys`.
    sends, receives: messages that wait, at most.
    largest: bytes of a frame that comes in.
    patience_ms: between attempts to connect, at most.

  Attributes:
    monitor: readable when `event` has something to tell.
    why: there is no answer, by what events have told.
    ready: whether the two ends understand each other, as far as events have told. What is sent before waits for
      the next connection. (With ZeroMQ's IMMEDIATE it would not, but then a connection that is cut takes
      with it what had come over it and is not yet read.)

  Raises:
    SecurityError: if ZeroMQ says that it can't be.
  """

  def __init__(
    self,
    context: zmq.Context[Any],
    address: str,
    keys: security.Keys | None,
    *,
    sends: int,
    receives: int,
    largest: int,
    patience_ms: int,
  ) -> None:
    socket = self.socket = context.socket(zmq.DEALER)
    self.monitor: Any = None
    self.ready = False
    self.why = NOTHING_KNOWN
    try:
      self.monitor = socket.get_monitor_socket(READY | CUT | TURNED_AWAY | CLOSED | sum(FAILED))
      if keys is not None:
        security.secure_client(socket, keys)
      socket.linger = 0
      socket.sndhwm, socket.rcvhwm = sends, receives
      socket.maxmsgsize = largest
      socket.tcp_keepalive, socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl = 1, 30, 10
      socket.reconnect_ivl, socket.reconnect_ivl_max = 100, patience_ms
      socket.connect_timeout = CONNECT_MS
      security.connect(socket, address)
    except BaseException:
      self.close()
      raise

  def event(self) -> int:
    """READY, CUT, TURNED_AWAY, CLOSED or one of FAILED; 0 if there is none."""
    try:
      event: int = struct.unpack('=Hi', self.monitor.recv_multipart(zmq.NOBLOCK)[0])[0]
    except zmq.Again:
      return 0
    self.ready = event == READY
    self.why = _REASONS.get(event, self.why)
    return event

  def receive(self, copy: bool = True) -> list[Any] | None:
    """A message, if one has come."""
    try:
      return self.socket.recv_multipart(zmq.NOBLOCK, copy=copy)
    except zmq.Again:
      return None

  def say_last(self, message: bytes, patience_ms: int) -> None:
    """Before `close`: a word that goes out within that time, or not at all."""
    while self.event():
      pass
    if self.ready:
      self.socket.linger = patience_ms
      with contextlib.suppress(zmq.ZMQError):
        self.socket.send(message, zmq.NOBLOCK)

  def close(self) -> None:
    if self.monitor is not None:
      self.socket.disable_monitor()
      self.monitor.close(0)
    self.socket.close()
