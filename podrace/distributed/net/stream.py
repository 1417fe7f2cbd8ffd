"""One connection's bytes: frames in, frames out, without blocking; plain or under TLS."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import socket as sockets
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from podrace.distributed.net.frame import PREFIX, Buffer, Kind, WireError, short
from podrace.distributed.net.send_queue import SendQueue

SCRATCH_BYTES = 2**18  # of the memory into which small frames are read
DIRECT = 2**16  # bytes of a frame, from which on its arrays are read straight into their memory
AWAITED = 2**18  # bytes of a large frame that are read at once, or more
MANY = 2**63  # messages: no limit
ANSWER_BYTES = 2**24  # of frames without arrays that may wait to be sent, besides the first
PREFIX_BYTES = PREFIX.size

Message = Callable[[Kind, Sequence[Any], memoryview, Sequence[int]], None]
Memory = Callable[[Kind, Sequence[Any], int], Any]


class Ended(Exception):
  """The connection is over; says why."""


class Full(Exception):
  """The other end does not read what it is sent."""


@dataclasses.dataclass
class Large:
  """A large frame that is being read straight into its memory."""

  kind: Kind
  head: int  # bytes of its header
  into: memoryview  # of its arrays; of all of it, if its header has not come
  header: Any = None  # its fields and sizes, if they are known already
  at: int = 0  # bytes that have come

  @property
  def left(self) -> int:
    return len(self.into) - self.at


class LowWater:
  """Has the kernel wake this end when much of what is left of a frame has come, not for each packet."""

  def __init__(self, socket: sockets.socket | None) -> None:
    self._socket, self._awaited = socket, 1

  def expect(self, left: int) -> None:
    """So many bytes are left; 0 if a frame is whole."""
    some = max(min(left, AWAITED), 1)
    if self._socket is not None and some != self._awaited:
      self._awaited = some
      with contextlib.suppress(OSError):
        self._socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVLOWAT, some)


class Stream:
  """A connected socket. One thread receives and flushes; any may send.

  Args:
    socket: not blocking.
    kinds: of the frames that come in, by number.
    on_message: gets a kind, its fields, its arrays' bytes, which are there until it returns unless `memory` gave
      them, and their sizes.
    memory: gives memory [n] u8 for the arrays of a message; None to leave that to the stream.
    largest: bytes of a frame that comes in, at most.
    most_out: frames that wait to be sent, at most.
    scratch: of `new_scratch`, which streams of one thread may share.
    context, server: for TLS, whose handshake `shake` makes; None for none.

  Attributes:
    closed: this end has closed it.
    unread: `receive` has read bytes from the kernel whose frames it has not handled yet.
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
    context: ssl.SSLContext | None = None,
    server: bool = False,
  ) -> None:
    self.socket, self.kinds, self.on_message, self.memory = socket, kinds, on_message, memory
    self.largest, self.most_out = largest, most_out
    self.closed = self.unread = False
    self._scratch, more = memoryview(scratch)[:SCRATCH_BYTES], memoryview(scratch)[SCRATCH_BYTES:]
    self.tls = None
    if context is not None:
      from podrace.distributed.net.tls import (
        Tls,  # most clients in a process of environments have no keys
      )

      self.tls = Tls(socket, context, server, more)
    self.shaken = self.tls is None
    self._partial = b''  # the beginning of a frame
    self._kept, self._kept_at = b'', 0  # frames that the next `receive` handles first
    self._allowed, self._until = (
      MANY,
      math.inf,
    )  # messages, and the time, that `receive` may still take
    self._large: Large | None = None
    self._low = LowWater(None if self.tls else socket)  # TLS may have some of a frame already
    self._out = SendQueue()
    self._lock = threading.Lock()  # of what is to be sent; under TLS of the socket as well

  def shake(self) -> str:
    """Goes on with TLS's handshake: '' if it is done, else what it waits for, 'read' or 'write'.

    Raises:
      Ended: if it has failed.
    """
    assert self.tls is not None
    try:
      with self._lock:
        wants = self.tls.shake()
    except (OSError, ValueError) as e:
      raise Ended(why(e)) from e
    self.shaken = not wants
    return wants

  # --- in ----------------------------------------------------------------------------------------

  def receive(self, messages: int = MANY, seconds: float = math.inf) -> None:
    """Reads what has come, and handles the frames that are whole.

    Args:
      messages, seconds: after which it returns. If `unread` is then true, call it again, whatever the kernel says.

    Raises:
      Ended: if the other end has closed it, or it was cut.
      WireError: if a frame isn't one.
    """
    self._allowed = messages
    self._until = math.inf if seconds == math.inf else time.monotonic() + seconds
    if self.unread:
      self.unread = False
      kept = memoryview(self._kept)
      self._keep(kept, self._parse(kept, self._kept_at, len(kept)), len(kept))
    else:
      self._receive()
    while not self.unread and self.pending() and self._receive():
      pass

  @property
  def _spent(self) -> bool:
    return self._allowed <= 0 or (self._until < math.inf and time.monotonic() > self._until)

  def _keep(self, buffer: memoryview, at: int, end: int) -> None:
    """Keeps the bytes of a buffer from `at` on: frames for the next `receive`, or the beginning of one."""
    if self.closed:
      return
    if self._spent and (at < end or self.pending()):
      self.unread = True
      if buffer.obj is self._kept:
        self._kept_at = at
      else:
        self._kept, self._kept_at = bytes(buffer[at:end]), 0
      return
    self._partial = bytes(buffer[at:end]) if at < end else b''
    self._kept, self._kept_at = b'', 0

  def pending(self) -> bool:
    """Whether there is more to read of which the kernel knows nothing."""
    return self.tls is not None and not self.closed and self.tls.pending

  def _receive(self) -> bool:
    """Reads once; whether something was there."""
    if (large := self._large) is not None:
      if not (n := self._read(large.into[large.at :])):
        return False
      large.at += n
      left = large.left
      if not left:
        self._finish(large)
        self.unread = self._spent and self.pending()
      self._low.expect(left)
      return True
    kept, scratch = len(self._partial), self._scratch
    if kept:
      scratch[:kept] = self._partial
    if not (n := self._read(scratch[kept:])):
      return False
    end = kept + n
    self._partial = b''
    self._keep(scratch, self._parse(scratch, 0, end), end)
    return True

  def _read(self, into: memoryview) -> int:
    """How many bytes were read, 0 if there are none yet."""
    try:
      if self.tls is None:
        n = self.socket.recv_into(into)
      else:
        with self._lock:
          n = self.tls.recv_into(into)
    except BlockingIOError:
      return 0
    except (OSError, ValueError) as e:
      raise Ended(why(e)) from e
    if n == 0:
      raise Ended('the other end closed the connection')
    return n

  def _parse(self, buffer: memoryview, at: int, end: int) -> int:
    """Handles the whole frames in a buffer from `at` to `end`, as many as it may; where the first byte is that is left."""
    while end - at >= PREFIX_BYTES and not self._spent:
      size, word = PREFIX.unpack_from(buffer, at)
      start = at + PREFIX_BYTES
      # Whoever speaks something else hears it at once.
      if (kind := self.kinds.get(word & 0xFF)) is None:
        raise WireError(f'a frame of kind {word & 0xFF}, which is not sent to this end')
      head = word >> 8
      if size > self.largest or head > size:
        raise WireError(f'a frame of {size} bytes with a header of {head}, at most {self.largest}')
      if end - start >= size:
        at = start + size
        self._whole(kind, head, buffer[start:at])
        if self.closed:
          return end
      elif size >= DIRECT:
        self._begin(size, kind, head, buffer, start, end)
        return end
      else:
        break
    return at

  def _whole(self, kind: Kind, head: int, payload: memoryview) -> None:
    """Deals with a frame, which is not in memory of its own."""
    self._allowed -= 1
    body = payload[head:]
    fields, sizes = kind.header(payload[:head], len(body))
    if kind.arrays:
      into = self.memory(kind, fields, len(body))
      if into is not None:
        into = memoryview(into)
        into[:] = body
        body = into
    self.on_message(kind, fields, body, sizes)

  def _begin(
    self, size: int, kind: Kind, head: int, buffer: memoryview, start: int, end: int
  ) -> None:
    """Begins with a large frame, of which some bytes have come already."""
    begun, header, into = start, None, None
    if end - start >= head and kind.arrays:  # else all of it, and then its header
      begun = start + head
      header = fields, _ = kind.header(buffer[start:begun], size - head)
      into = self.memory(kind, fields, size - head)
    # Memory that is not touched takes none: a frame of which nothing more comes costs nothing.
    memory = np.empty(size + start - begun, np.uint8).data if into is None else memoryview(into)
    memory[: end - begun] = buffer[begun:end]
    self._large = Large(kind, head, memory, header, end - begun)
    self._low.expect(self._large.left)

  def _finish(self, large: Large) -> None:
    """Deals with a large frame that is whole."""
    self._large = None
    if large.header is None:
      self._whole(large.kind, large.head, large.into)
      return
    self._allowed -= 1
    fields, sizes = large.header
    self.on_message(large.kind, fields, large.into, sizes)

  # --- out ---------------------------------------------------------------------------------------

  @property
  def waiting(self) -> bool:
    """Whether there is something to flush."""
    return bool(self._out) or (self.tls is not None and self.tls.waiting)

  def send(self, kind: Kind, *fields: Any, arrays: Sequence[Buffer] = ()) -> bool:
    """Sends a message, now or when there is room: whoever owns its arrays must leave them as they are.

    Returns:
      whether all of it went; else `flush` must be called when the socket can be written to.

    Raises:
      Full: if too many frames wait, or too many bytes of frames without arrays.
      Ended: if the connection is over.
    """
    return self.send_packed(kind.pack(fields, arrays))

  def send_packed(self, buffers: Sequence[Buffer]) -> bool:
    """As `send`, of a message as `Kind.pack` gives it."""
    with self._lock:
      if self.closed:
        raise Ended('it is closed')
      if self._out:
        if len(self._out) >= self.most_out or self._out.answer_bytes > ANSWER_BYTES:
          raise Full('it does not read what it is sent')
        self._out.add(buffers, 0)
        return False
      if (sent := self._write(buffers)) == sum(map(len, buffers)):
        return self.tls is None or not self.tls.waiting
      self._out.add(buffers, sent)
      return False

  def flush(self) -> bool:
    """Sends what waits; whether nothing does any more.

    Raises:
      Ended: if the connection is over.
    """
    with self._lock:
      out = self._out
      while not self.closed:
        if not out:
          return self.tls is None or (self._write([]) == 0 and not self.tls.waiting)
        if not (sent := self._write(out.next())):
          return False
        out.took(sent)
      return True

  def _write(self, buffers: Sequence[Buffer]) -> int:
    """How many bytes the kernel took."""
    try:
      return self.socket.sendmsg(buffers) if self.tls is None else self.tls.send(buffers)
    except BlockingIOError:
      return 0
    except (OSError, ValueError) as e:
      raise Ended(why(e)) from e

  def close(self) -> None:
    """At once; what waits is not sent."""
    with self._lock:
      self.closed = True
      self._out.clear()
      self._large, self._kept, self.unread = None, b'', False
      # Its owner is in them, which has it: only the garbage collector would find the two, and TLS's memory, some time.
      self.on_message = self.memory = no_memory
      self.socket.close()

  def say_plain(self, kind: Kind, *fields: Any) -> None:
    """A message without TLS, to one that does not speak it; it goes at once, or not at all."""
    with self._lock, contextlib.suppress(OSError, ValueError):
      self.socket.send(b''.join(kind.pack(fields)))

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


def new_scratch() -> bytearray:
  """Memory for what streams of one thread read."""
  return bytearray(2 * SCRATCH_BYTES)  # the second half for TLS


def no_memory(*args: Any) -> None:
  """Leaves memory to the stream, and messages of a connection that is closed alone."""


def no_delay(socket: sockets.socket) -> None:
  """Has small frames go out at once."""
  socket.setblocking(False)
  if socket.family != getattr(sockets, 'AF_UNIX', None):
    socket.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)
