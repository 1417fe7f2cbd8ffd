"""One connection's frames, in both directions, without blocking."""

from __future__ import annotations

import socket as sockets
import ssl
from collections.abc import Sequence
from typing import Any

from podrace.distributed.net.channel import Channel, ConnectionClosed
from podrace.distributed.net.frame import Buffer, Kind
from podrace.distributed.net.frame_reader import SCRATCH_BYTES, FrameReader, Memory, Message
from podrace.distributed.net.send_queue import SendQueue
from podrace.errors import TransportError

ANSWER_BYTES = 2**24  # frames without arrays that may wait to be sent, besides the first


class SendQueueFull(TransportError):
  """The peer does not read."""


class Stream:
  """A connection. One thread receives and flushes; any thread may send.

  Owner: a listener's Connections, or a client's Outgoing, which calls `close`.

  Args:
    socket: non-blocking.
    kinds, on_message, memory, largest: of the frames that come in, as for FrameReader.
    max_queued: frames that may wait to be sent.
    scratch: of `new_scratch`, which the streams of one thread may share.
    context, server: for TLS, as for Channel.

  Attributes:
    closed: whether this end has closed it.
    receive: see FrameReader.
    shake, say_plain, end_writing: see Channel.
  """

  def __init__(
    self,
    socket: sockets.socket,
    kinds: dict[int, Kind],
    on_message: Message,
    memory: Memory,
    largest: int,
    max_queued: int,
    scratch: bytearray,
    context: ssl.SSLContext | None = None,
    server: bool = False,
  ) -> None:
    own, of_tls = memoryview(scratch)[:SCRATCH_BYTES], memoryview(scratch)[SCRATCH_BYTES:]
    self.socket, self.max_queued, self.closed = socket, max_queued, False
    self._channel = channel = Channel(socket, context, server, of_tls)
    self.reader = FrameReader(channel, kinds, on_message, memory, largest, own)
    self.receive = self.reader.receive
    self.shake, self.tls = channel.shake, channel.tls
    self.say_plain, self.end_writing = channel.say_plain, channel.end_writing
    self._queue, self._ended = SendQueue(), False

  @property
  def shaken(self) -> bool:
    """Whether the handshake of TLS is complete; true without TLS."""
    return self._channel.shaken

  @property
  def waiting(self) -> bool:
    """Whether anything waits to be flushed."""
    return bool(self._queue) or (self.tls is not None and self.tls.waiting)

  @property
  def answer_bytes(self) -> int:
    """Bytes of the frames without arrays that wait to be sent."""
    return self._queue.answer_bytes

  def send(self, kind: Kind, *fields: Any, arrays: Sequence[Buffer] = ()) -> bool:
    """Send a message now, or when there is room. Its arrays must not change any more.

    Returns:
      Whether all of it went. If not, call `flush` when the socket is ready to write.

    Raises:
      SendQueueFull: if too many frames wait, or too many bytes of frames without arrays.
      ConnectionClosed: if the connection is over.
    """
    return self.send_packed(kind.pack(fields, arrays))

  def send_packed(self, buffers: Sequence[Buffer], last: bool = False) -> bool:
    """Send the buffers of `Kind.pack`, as `send`. Nothing can be sent after the `last`."""
    with self._channel.lock:
      if self.closed or self._ended:
        raise ConnectionClosed('it is closed')
      self._ended = last
      if self._queue:
        if len(self._queue) >= self.max_queued or self._queue.answer_bytes > ANSWER_BYTES:
          raise SendQueueFull('it does not read what it is sent')
        self._queue.add(buffers, 0)
        return False
      if (sent := self._channel.write(buffers)) == sum(map(len, buffers)):
        return self.tls is None or not self.tls.waiting
      self._queue.add(buffers, sent)
      return False

  def flush(self) -> bool:
    """Send the frames that wait; return whether none is left.

    Raises:
      ConnectionClosed: if the connection is over.
    """
    channel, queue = self._channel, self._queue
    with channel.lock:
      while not self.closed:
        if not queue:
          return self.tls is None or (channel.write([]) == 0 and not self.tls.waiting)
        if not (sent := channel.write(queue.next())):
          return False
        queue.drop(sent)
      return True

  def close(self) -> None:
    """Close the connection at once. Frames that wait are not sent."""
    with self._channel.lock:
      self.closed = True
      self._queue.clear()
      self.reader.close()
      self.socket.close()
