"""Frames that come in over one connection."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import socket as sockets
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from podrace.distributed.net.channel import Channel
from podrace.distributed.net.frame import PREFIX, Kind, WireError

SCRATCH_BYTES = 2**18  # memory into which small frames are read
DIRECT = 2**16  # bytes of a frame from which its arrays are read straight into their memory
LOW_WATER = 2**18  # bytes of a large frame for which the kernel waits, at most
NO_LIMIT = 2**63  # messages
PREFIX_BYTES = PREFIX.size

Message = Callable[[Kind, Sequence[Any], memoryview, Sequence[int]], None]
Memory = Callable[[Kind, Sequence[Any], int], Any]


@dataclasses.dataclass
class LargeFrame:
  """A large frame that is being read straight into its memory.

  Attributes:
    head: bytes of its header.
    into: memory of its arrays; of the whole frame until its header is known.
    header: fields and sizes, if known.
    at: bytes that have come.
  """

  kind: Kind
  head: int
  into: memoryview
  header: Any = None
  at: int = 0

  @property
  def left(self) -> int:
    """Bytes that are missing."""
    return len(self.into) - self.at


class LowWater:
  """Makes the kernel report a socket when much of a frame has come, not for each packet."""

  def __init__(self, socket: sockets.socket | None) -> None:
    self._socket, self._bytes = socket, 1

  def expect(self, left: int) -> None:
    """Set the mark for a frame with `left` missing bytes; 0 if it is whole."""
    mark = max(min(left, LOW_WATER), 1)
    if self._socket is not None and mark != self._bytes:
      self._bytes = mark
      with contextlib.suppress(OSError):
        self._socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVLOWAT, mark)


class FrameReader:
  """Reads frames. For one thread.

  Args:
    channel: of the bytes.
    kinds: by number, of the frames that may come.
    on_message: called with a kind, its fields, the bytes of its arrays and their sizes. The bytes
      are valid until it returns, unless `memory` gave them.
    memory: returns memory [n] u8 for the arrays of a message, or None.
    largest: bytes of a frame, at most.
    scratch: memory, which the readers of one thread may share.

  Attributes:
    large: the large frame that is being read, or None.
    unread: whether `receive` must be called again, although the kernel reports nothing.
  """

  def __init__(
    self,
    channel: Channel,
    kinds: dict[int, Kind],
    on_message: Message,
    memory: Memory,
    largest: int,
    scratch: memoryview,
  ) -> None:
    self._channel, self._kinds, self._on_message, self._memory = channel, kinds, on_message, memory
    self.largest, self._scratch = largest, scratch
    self._closed = self.unread = False
    self._partial = b''  # the beginning of a frame
    self._kept, self._kept_at = b'', 0  # frames that the next `receive` handles first
    self._messages, self._until = NO_LIMIT, math.inf  # left for this `receive`, and its end
    self.large: LargeFrame | None = None
    # Under TLS the kernel cannot count the bytes of a frame.
    self._low = LowWater(None if channel.tls else channel.socket)

  def receive(self, messages: int = NO_LIMIT, seconds: float = math.inf) -> None:
    """Read the bytes that have come, and handle the frames that are whole.

    Args:
      messages: after which it returns, perhaps with `unread` set.
      seconds: after which it returns, likewise.

    Raises:
      ConnectionClosed: if the other end has closed the connection, or it was cut.
      WireError: if a frame is invalid.
    """
    self._messages = messages
    self._until = math.inf if seconds == math.inf else time.monotonic() + seconds
    if self.unread:
      self.unread = False
      kept = memoryview(self._kept)
      self._keep(kept, self._parse(kept, self._kept_at, len(kept)), len(kept))
    else:
      self._read()
    while not self.unread and self.pending and self._read():
      pass

  def close(self) -> None:
    """Forget all frames."""
    self._closed = True
    self.large, self._kept, self.unread = None, b'', False
    # Their owner has this connection: without this cycle its memory is freed at once.
    self._on_message = self._memory = no_memory

  @property
  def pending(self) -> bool:
    """Whether there are bytes that the kernel no longer reports."""
    return not self._closed and self._channel.pending

  @property
  def _is_spent(self) -> bool:
    return self._messages <= 0 or (self._until < math.inf and time.monotonic() > self._until)

  def _keep(self, buffer: memoryview, at: int, end: int) -> None:
    """Keep the rest of a buffer: frames for the next `receive`, or the beginning of a frame."""
    if self._closed:
      return
    if self._is_spent and (at < end or self.pending):
      self.unread = True
      if buffer.obj is self._kept:
        self._kept_at = at
      else:
        self._kept, self._kept_at = bytes(buffer[at:end]), 0
      return
    self._partial = bytes(buffer[at:end]) if at < end else b''
    self._kept, self._kept_at = b'', 0

  def _read(self) -> bool:
    """Read once; return whether any bytes had come."""
    if (large := self.large) is not None:
      if not (n := self._channel.read(large.into[large.at :])):
        return False
      large.at += n
      left = large.left
      if not left:
        self._finish(large)
        self.unread = self._is_spent and self.pending
      self._low.expect(left)
      return True
    kept, scratch = len(self._partial), self._scratch
    if kept:
      scratch[:kept] = self._partial
    if not (n := self._channel.read(scratch[kept:])):
      return False
    end = kept + n
    self._partial = b''
    self._keep(scratch, self._parse(scratch, 0, end), end)
    return True

  def _parse(self, buffer: memoryview, at: int, end: int) -> int:
    """Handle the whole frames of buffer[at:end], up to the limits of `receive`.

    Returns:
      The position of the first byte that is left.
    """
    while end - at >= PREFIX_BYTES and not self._is_spent:
      size, word = PREFIX.unpack_from(buffer, at)
      start = at + PREFIX_BYTES
      # Checked before the frame is whole: a client of another protocol hears it at once.
      if (kind := self._kinds.get(word & 0xFF)) is None:
        raise WireError(f'a frame of kind {word & 0xFF}, which is not sent to this end')
      head = word >> 8
      if size > self.largest or head > size:
        raise WireError(f'a frame of {size} bytes with a header of {head}, at most {self.largest}')
      if end - start >= size:
        at = start + size
        self._handle(kind, head, buffer[start:at])
        if self._closed:
          return end
      elif size >= DIRECT:
        self._begin(size, kind, head, buffer, start, end)
        return end
      else:
        break
    return at

  def _handle(self, kind: Kind, head: int, payload: memoryview) -> None:
    """Handle a whole frame in shared memory."""
    self._messages -= 1
    body = payload[head:]
    fields, sizes = kind.header(payload[:head], len(body))
    if kind.arrays:
      into = self._memory(kind, fields, len(body))
      if into is not None:
        into = memoryview(into)
        into[:] = body
        body = into
    self._on_message(kind, fields, body, sizes)

  def _begin(
    self, size: int, kind: Kind, head: int, buffer: memoryview, start: int, end: int
  ) -> None:
    """Begin a large frame, of which buffer[start:end] has come."""
    begun, header, into = start, None, None
    if end - start >= head and kind.arrays:  # the header is whole, so the arrays have their memory
      begun = start + head
      header = fields, _ = kind.header(buffer[start:begun], size - head)
      into = self._memory(kind, fields, size - head)
    # The kernel maps memory when it is touched: a frame of which no more comes costs nothing.
    memory = np.empty(size + start - begun, np.uint8).data if into is None else memoryview(into)
    memory[: end - begun] = buffer[begun:end]
    self.large = LargeFrame(kind, head, memory, header, end - begun)
    self._low.expect(self.large.left)

  def _finish(self, large: LargeFrame) -> None:
    """Handle a large frame that is whole."""
    self.large = None
    if large.header is None:
      self._handle(large.kind, large.head, large.into)
      return
    self._messages -= 1
    fields, sizes = large.header
    self._on_message(large.kind, fields, large.into, sizes)


def new_scratch() -> bytearray:
  """Return memory for the streams of one thread. The second half is for TLS."""
  return bytearray(2 * SCRATCH_BYTES)


def no_memory(*args: Any) -> None:
  """Give no memory for arrays; as `on_message`, ignore messages of a closed connection."""
