"""The bytes of one connection, plain or under TLS, without blocking."""

from __future__ import annotations

import contextlib
import socket as sockets
import ssl
import threading
from collections.abc import Sequence
from typing import Any

from podrace.distributed.net.frame import Buffer, Kind, short
from podrace.errors import TransportError


class ConnectionClosed(TransportError):
  """The connection is over; the message is the reason."""


class Channel:
  """A connected socket.

  Args:
    socket: non-blocking.
    context: for TLS; None for a plain connection.
    server: whether this end accepted the connection.
    scratch: memory for TLS, which the channels of one thread may share.

  Attributes:
    lock: held to write, and under TLS also to read.
    shaken: whether the handshake of TLS is complete; true without TLS.
  """

  def __init__(
    self,
    socket: sockets.socket,
    context: ssl.SSLContext | None,
    server: bool,
    scratch: memoryview,
  ) -> None:
    self.socket, self.tls = socket, None
    if context is not None:
      from podrace.distributed.net.tls import Tls  # most environment processes have no keys

      self.tls = Tls(socket, context, server, scratch)
    self.shaken = self.tls is None
    self.lock = threading.Lock()

  def shake(self) -> str:
    """Continue the handshake of TLS.

    Returns:
      '' if it is complete, else the event that it waits for: 'read' or 'write'.

    Raises:
      ConnectionClosed: if it failed.
    """
    assert self.tls is not None
    try:
      with self.lock:
        wants = self.tls.shake()
    except (OSError, ValueError) as e:
      raise ConnectionClosed(describe_error(e)) from e
    self.shaken = not wants
    return wants

  @property
  def pending(self) -> bool:
    """Whether TLS has read bytes that the kernel no longer reports."""
    return self.tls is not None and self.tls.pending

  def read(self, into: memoryview) -> int:
    """Return the number of bytes read; 0 if none have come.

    Raises:
      ConnectionClosed: if the other end closed the connection, or it failed.
    """
    try:
      if self.tls is None:
        n = self.socket.recv_into(into)
      else:
        with self.lock:
          n = self.tls.recv_into(into)
    except BlockingIOError:
      return 0
    except (OSError, ValueError) as e:
      raise ConnectionClosed(describe_error(e)) from e
    if n == 0:
      raise ConnectionClosed('the other end closed the connection')
    return n

  def write(self, buffers: Sequence[Buffer]) -> int:
    """Return the number of bytes taken. The caller holds `lock`.

    Raises:
      ConnectionClosed: if the connection is over.
    """
    try:
      return self.socket.sendmsg(buffers) if self.tls is None else self.tls.send(buffers)
    except BlockingIOError:
      return 0
    except (OSError, ValueError) as e:
      raise ConnectionClosed(describe_error(e)) from e

  def say_plain(self, kind: Kind, *fields: Any) -> None:
    """Send a message without TLS, to a peer that speaks none. It is sent at once, or not at all."""
    with self.lock, contextlib.suppress(OSError, ValueError):
      self.socket.send(b''.join(kind.pack(fields)))

  def end_writing(self) -> None:
    """Tell the other end that no more bytes come."""
    with self.lock, contextlib.suppress(OSError, ValueError):
      self.socket.shutdown(sockets.SHUT_WR)


def describe_error(error: BaseException) -> str:
  """Return the reason why a connection is over, for a message."""
  if isinstance(error, ssl.SSLCertVerificationError):
    return f'its certificate is not one of these keys ({error.verify_message})'
  if isinstance(error, ssl.SSLError):
    return f'TLS failed ({error.reason or short(error)})'
  return getattr(error, 'strerror', None) or str(error) or type(error).__name__


def set_no_delay(socket: sockets.socket) -> None:
  """Make a socket non-blocking, and have small frames sent at once."""
  socket.setblocking(False)
  if socket.family != getattr(sockets, 'AF_UNIX', None):
    socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)
