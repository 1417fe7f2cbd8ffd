"""TLS over a non-blocking socket, with one call of the kernel for many records.

ssl.SSLSocket calls the kernel twice for each record of 16 KB.
"""

from __future__ import annotations

import contextlib
import socket as sockets
import ssl
from collections.abc import Sequence
from typing import cast

from podrace.distributed.net.frame import Buffer

RECORD = 2**14  # bytes of a record
AT_ONCE = 2**18  # bytes that are encrypted before the kernel takes them
ANSWERS = 2**16  # bytes of TLS's own answers that the other end may leave unread
SHAKE_BYTES = 2**14  # read at once during the handshake


class Tls:
  """One end of TLS. The caller holds a lock.

  Args:
    scratch: memory to read into, which the connections of one thread may share.
  """

  def __init__(
    self, socket: sockets.socket, context: ssl.SSLContext, server: bool, scratch: memoryview
  ) -> None:
    self._socket, self._scratch = socket, scratch
    self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
    self._tls = context.wrap_bio(self._in, self._out, server_side=server)
    self._sending = memoryview(b'')  # encrypted, for the kernel

  def shake(self) -> str:
    """Continue the handshake.

    Returns:
      '' if it is complete, else the event that it waits for: 'read' or 'write'.

    Raises:
      OSError: if it failed.
    """
    while True:
      try:
        self._tls.do_handshake()
        return '' if self.push() else 'write'
      except ssl.SSLWantReadError:
        if not self.push():
          return 'write'
      except OSError:
        with contextlib.suppress(OSError):  # send the alert of TLS
          self.push()
        raise
      try:
        if not self._fill(SHAKE_BYTES):
          raise ConnectionError('the other end closed the connection')
      except BlockingIOError:
        return 'read'

  def certificate(self) -> bytes:
    """Return the certificate of the other end; b'' if it has none."""
    return self._tls.getpeercert(binary_form=True) or b''

  @property
  def pending(self) -> bool:
    """Whether there are bytes that the kernel no longer reports."""
    return bool(self._in.pending or self._tls.pending())

  def _fill(self, limit: int) -> int:
    """Read from the kernel; return the number of bytes, 0 at the end."""
    n = self._socket.recv_into(self._scratch[:limit])
    self._in.write(self._scratch[:n])
    return cast(int, n)

  def recv_into(self, into: memoryview) -> int:
    """Read at most one record, as `socket.recv_into`.

    Raises:
      BlockingIOError: if no record is whole yet.
      OSError: if the connection is over.
    """
    if not self.pending and not self._fill(len(self._scratch)):
      return 0
    try:
      n = self._tls.read(len(into), into)
    except ssl.SSLWantReadError:
      raise BlockingIOError from None
    finally:
      if self._out.pending > ANSWERS:
        raise ConnectionError('it does not read what TLS answers')
    return cast(int, n)

  @property
  def waiting(self) -> bool:
    """Whether anything waits to be pushed."""
    return bool(len(self._sending) or self._out.pending)

  def send(self, buffers: Sequence[Buffer]) -> int:
    """Encrypt buffers, and send as much as there is room for.

    Returns:
      The number of bytes taken; some of them may wait to be pushed.
    """
    if sum(map(len, buffers)) <= RECORD:
      buffers = [b''.join(buffers)]
    taken = 0
    for x in buffers:
      view = memoryview(x)
      for at in range(0, len(view), AT_ONCE):
        if len(self._sending) + self._out.pending >= AT_ONCE and not self.push():
          return taken
        taken += self._tls.write(view[at : at + AT_ONCE])
    self.push()
    return taken

  def push(self) -> bool:
    """Send the bytes that wait; return whether none is left."""
    while self.waiting:
      if not len(self._sending):
        self._sending = memoryview(self._out.read())
      try:
        sent = self._socket.send(self._sending)
      except BlockingIOError:
        return False
      self._sending = self._sending[sent:]
    return True
