"""One connection's bytes: frames in, frames out, without blocking; plain or under TLS."""

from __future__ import annotations

import collections
import contextlib
import socket as sockets
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from podrace.net.frame import PREFIX, Buffer, Kind, WireError, short

SCRATCH_BYTES = 2**18  # of the memory into which small frames are read
DIRECT = 2**16  # bytes of a frame, from which on its arrays are read straight into their memory
AT_ONCE = 64  # buffers that one call hands to the kernel
RECORD = 2**14  # bytes of TLS's records
READS = 32  # under TLS, one after the other: each is a record at most
PREFIX_BYTES = PREFIX.size

Message = Callable[[Kind, Sequence[Any], memoryview, Sequence[int]], None]
Memory = Callable[[Kind, Sequence[Any], int], Any]


class Ended(Exception):
  """The connection is over; says why."""


class Full(Exception):
  """The other end does not read what it is sent."""


class Stream:
  """A connected socket. One thread receives and flushes; any may send.

  Args:
    socket: not blocking; an ssl.SSLSocket, whose handshake `shake` makes, or a plain one.
    kinds: of the frames that come in, by number.
    on_message: gets a kind, its fields, its arrays' bytes, which are there until it returns unless `memory` gave
      them, and their sizes.
    memory: gives memory [n] u8 for the arrays of a message; None to leave that to the stream.
    largest: bytes of a frame that comes in, at most.
    most_out: frames that wait to be sent, at most.
    scratch: memory of SCRATCH_BYTES, which streams of one thread may share.

  Attributes:
    closed: this end has closed it.
    stuck_since: when it last took bytes, if some wait; for whoever looks at the clock. 0: none wait.
  """

  def __init__(
    self,
    socket: sockets.socket,
    kinds: dict[int, Kind],
    on_message: Message,
    memory: Memory,
    largest: int,
    most_out: int,
    scratch: bytearray,
  ) -> None:
    self.socket, self.kinds, self.on_message, self.memory = socket, kinds, on_message, memory
    self.largest, self.most_out = largest, most_out
    self.secure = isinstance(socket, ssl.SSLSocket)
    self.closed = False
    self.shaken = not self.secure
    self._scratch = memoryview(scratch)
    self._partial = b''
    self._into: memoryview | None = None  # what is being read straight into its memory
    self._at = 0
    self._direct: tuple[Kind, Any] | None = None  # its kind and fields, if they are known already
    self._word = 0  # of its prefix
    self._out: collections.deque[memoryview] = collections.deque()
    self._frames: collections.deque[int] = collections.deque()  # buffers of each frame that waits
    self._lock = threading.Lock()  # of what is to be sent; under TLS of the socket as well

  def fileno(self) -> int:
    return self.socket.fileno()

  def shake(self) -> str:
    """Goes on with TLS's handshake: '' if it is done, else what it waits for, 'read' or 'write'.

    Raises:
      Ended: if it has failed.
    """
    try:
      self.socket.do_handshake()  # type: ignore[attr-defined]
    except ssl.SSLWantReadError:
      return 'read'
    except ssl.SSLWantWriteError:
      return 'write'
    except (OSError, ValueError) as e:
      raise Ended(why(e)) from e
    self.shaken = True
    return ''

  # --- in ----------------------------------------------------------------------------------------

  def receive(self) -> None:
    """Reads what has come, and deals with the frames that are whole.

    Raises:
      Ended: if the other end has closed it, or it was cut.
      WireError: if a frame isn't one.
    """
    if not self.secure:
      self._receive()
      return
    for _ in range(READS):  # the kernel tells of what has not been read; to try in vain takes long
      if not self._receive() or self.closed:
        return
      if self._into is None and not self._partial and not self.pending():
        return

  def pending(self) -> bool:
    """Whether there is more to read of which the kernel knows nothing."""
    return self.secure and not self.closed and bool(self.socket.pending())  # type: ignore[attr-defined]

  def _receive(self) -> bool:
    """Reads once; whether something was there."""
    if self._into is not None:
      if not (n := self._read(self._into[self._at :])):
        return False
      self._at += n
      if self._at == len(self._into):
        self._finish()
      return True
    kept = len(self._partial)
    scratch = self._scratch
    if kept:
      scratch[:kept] = self._partial
    if not (n := self._read(scratch[kept:])):
      return False
    end = kept + n
    at = self._parse(end)
    self._partial = bytes(scratch[at:end]) if at < end else b''
    return True

  def _read(self, into: memoryview) -> int:
    """How many bytes were read, 0 if there are none yet."""
    try:
      if self.secure:
        with self._lock:
          n = self.socket.recv_into(into)
      else:
        n = self.socket.recv_into(into)
    except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
      return 0
    except (OSError, ValueError) as e:
      raise Ended(why(e)) from e
    if n == 0:
      raise Ended('the other end closed the connection')
    return n

  def _parse(self, end: int) -> int:
    """Deals with the whole frames in the scratch memory; where the first byte is that is left."""
    scratch, at = self._scratch, 0
    while end - at >= PREFIX_BYTES:
      size, word = PREFIX.unpack_from(scratch, at)
      start = at + PREFIX_BYTES
      head = word >> 8
      if size > self.largest or head > size:
        raise WireError(f'a frame of {size} bytes with a header of {head}, at most {self.largest}')
      if end - start >= size:
        at = start + size
        self._whole(word, scratch[start:at])
        if self.closed:
          return end
      elif size >= DIRECT:
        self._begin(size, word, start, end)
        return end
      else:
        break
    return at

  def _kind(self, word: int) -> Kind:
    kind = self.kinds.get(word & 0xFF)
    if kind is None:
      raise WireError(f'a frame of kind {word & 0xFF}, which is not sent to this end')
    return kind

  def _whole(self, word: int, payload: memoryview) -> None:
    """Deals with a frame, which is not in memory of its own."""
    kind, head = self._kind(word), word >> 8
    body = payload[head:]
    fields, sizes = kind.header(payload[:head], len(body))
    if kind.arrays:
      into = self.memory(kind, fields, len(body))
      if into is not None:
        into = memoryview(into)
        into[:] = body
        body = into
    self.on_message(kind, fields, body, sizes)

  def _begin(self, size: int, word: int, start: int, end: int) -> None:
    """Begins with a large frame, of which some bytes have come already."""
    head, have = word >> 8, end - start
    self._word = word
    if have < head or not self._kind(word).arrays:  # all of it, and then its header
      self._direct, begun = None, start
      self._into = np.empty(size, np.uint8).data
    else:
      kind, begun = self._kind(word), start + head
      fields, sizes = kind.header(self._scratch[start:begun], size - head)
      into = self.memory(kind, fields, size - head)
      # Memory that is not touched takes none: a frame of which nothing more comes costs nothing.
      self._into = np.empty(size - head, np.uint8).data if into is None else memoryview(into)
      self._direct = kind, (fields, sizes)
    self._at = end - begun
    self._into[: self._at] = self._scratch[begun:end]

  def _finish(self) -> None:
    """Deals with a large frame that is whole."""
    body, self._into = self._into, None
    assert body is not None
    if self._direct is None:
      self._whole(self._word, body)
      return
    (kind, (fields, sizes)), self._direct = self._direct, None
    self.on_message(kind, fields, body, sizes)

  # --- out ---------------------------------------------------------------------------------------

  @property
  def waiting(self) -> bool:
    """Whether there is something to flush."""
    return bool(self._out)

  def send(self, kind: Kind, *fields: Any, arrays: Sequence[Buffer] = ()) -> bool:
    """Sends a message, now or when there is room: whoever owns its arrays must leave them as they are.

    Returns:
      whether all of it went; else `flush` must be called when the socket can be written to.

    Raises:
      Full: if too many frames wait.
      Ended: if the connection is over.
    """
    buffers = kind.pack(fields, arrays)
    with self._lock:
      if self.closed:
        raise Ended('it is closed')
      if self._out:
        if len(self._frames) >= self.most_out:
          raise Full('it does not read what it is sent')
        self._queue(buffers, 0)
        return False
      total = sum(map(len, buffers))
      sent = self._write(buffers)
      if sent == total:
        return True
      self._queue(buffers, sent)
      return False

  def _queue(self, buffers: Sequence[Buffer], sent: int) -> None:
    kept = 0
    for x in buffers:
      view = memoryview(x)
      n = view.nbytes
      if sent >= n:
        sent -= n
        continue
      self._out.append(view[sent:])
      sent, kept = 0, kept + 1
    self._frames.append(kept)

  def flush(self) -> bool:
    """Sends what waits; whether nothing does any more.

    Raises:
      Ended: if the connection is over.
    """
    with self._lock:
      out = self._out
      while out and not self.closed:
        sent = self._write([out[i] for i in range(min(len(out), AT_ONCE))])
        if not sent:
          return False
        while out and sent >= out[0].nbytes:
          sent -= out.popleft().nbytes
          self._frames[0] -= 1
          if not self._frames[0]:
            self._frames.popleft()
        if sent:
          out[0] = out[0][sent:]
      return not out

  def _write(self, buffers: Sequence[Buffer]) -> int:
    """How many bytes the kernel took."""
    try:
      if not self.secure:
        return self.socket.sendmsg(buffers)
      return self._write_secure(buffers)
    except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
      return 0
    except (OSError, ValueError) as e:
      raise Ended(why(e)) from e

  def _write_secure(self, buffers: Sequence[Buffer]) -> int:
    """TLS has no call for several buffers: small ones are joined, so that they are one record."""
    sent = 0
    joined = bytearray()
    pieces: list[Any] = []
    for x in buffers:
      view = memoryview(x)
      if view.nbytes and len(joined) + view.nbytes <= RECORD:
        joined += view
        continue
      if joined:
        pieces.append(bytes(joined))
        joined = bytearray()
      if view.nbytes:
        pieces.append(view)
    if joined:
      pieces.append(bytes(joined))
    try:
      for piece in pieces:
        view, at = memoryview(piece), 0
        while at < view.nbytes:
          n = self.socket.send(view[at:])
          at, sent = at + n, sent + n
    except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
      pass
    return sent

  def close(self) -> None:
    """At once; what waits is not sent."""
    with self._lock:
      self.closed = True
      self._out.clear()
      self._frames.clear()
      self._into = None
      self.socket.close()

  def say_plain(self, kind: Kind, *fields: Any) -> None:
    """A message without TLS, to one that does not speak it; it goes at once, or not at all."""
    with self._lock, contextlib.suppress(OSError, ValueError):
      sockets.socket.send(self.socket, b''.join(kind.pack(fields)))

  def end_writing(self) -> None:
    """Tells the other end that nothing more comes."""
    with self._lock, contextlib.suppress(OSError, ValueError):
      self.socket.shutdown(sockets.SHUT_WR)


def why(error: BaseException) -> str:
  """Why a connection is over, in words."""
  if isinstance(error, ssl.SSLCertVerificationError):
    return f'its certificate is not one of these keys ({error.verify_message})'
  if isinstance(error, ssl.SSLError):
    return f'TLS failed ({error.reason or short(error)})'
  return getattr(error, 'strerror', None) or str(error) or type(error).__name__


def no_delay(socket: sockets.socket) -> None:
  """Has small frames go out at once."""
  socket.setblocking(False)
  if socket.family != getattr(sockets, 'AF_UNIX', None):
    socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)
