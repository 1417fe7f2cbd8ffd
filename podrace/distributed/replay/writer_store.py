"""What podrace.tables.Writer writes to, where the tables are elsewhere.

Each writer has a store of its own; each connection an outbox, over which their items go. Rows are cut into pieces, packed by the writer, which go to the service with
the first item that needs them. A chunk that is full is one piece; one that is not yet is cut early if an item
has waited long enough for it, or is flushed.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from podrace.distributed.replay import replay_messages
from podrace.distributed.replay.sent_chunks import Piece, Sending, SentChunk
from podrace.tables.blocking import REPORT_AFTER, Desk, InFlight, Wait
from podrace.tables.chunks import Account, Chunk, ChunkStore, pack, unpack
from podrace.tables.items import NEW, Item

if TYPE_CHECKING:
  from podrace.distributed.replay.outbox import Outbox
  from podrace.distributed.replay.connection import Connection
  from podrace.distributed.replay.remote_table import RemoteTable


class WriterStore(ChunkStore):
  """One writer's chunks, and its items that are not yet in their tables."""

  def __init__(self, connection: Connection, outbox: Outbox, delay: float) -> None:
    super().__init__(cache_bytes=0)
    if not 0 <= delay < math.inf:
      raise ValueError(f'{delay=} must be at least 0, in seconds')
    self.connection, self._outbox, self.delay = connection, outbox, delay
    self.queue: deque[Sending] = deque()  # not yet sent
    self.forced = False  # all of them are to be sent
    self.unacknowledged = Account()
    self._done = threading.Condition(self.lock)  # type: ignore[arg-type]
    self._cutting = threading.Lock()
    self._key = -1

  # --- for the writer ------------------------------------------------------------------------------

  def chunk(self, array: np.ndarray, length: int) -> Chunk:
    return SentChunk(next(self._chunk_keys), array, length, self)

  def seal(self, chunk: Chunk, differences: bool) -> None:
    assert isinstance(chunk, SentChunk)
    self.cut(chunk, differences)
    with self.lock:
      self._resize(chunk, sum(len(piece.data) for piece in chunk.pieces))

  def drop(self, chunk: Chunk, account: Account) -> None:
    super().drop(chunk, account)
    if not chunk.holders:
      assert isinstance(chunk, SentChunk)
      self._outbox.released.append(chunk)

  def read(self, chunk: Chunk) -> np.ndarray:
    array = chunk.array
    if array is not None:
      return array
    assert isinstance(chunk, SentChunk)
    pieces = [
      np.frombuffer(piece.data, chunk.dtype).reshape(piece.rows, *chunk.shape)
      if piece.how == replay_messages.AS_IS
      else unpack(
        (piece.data, piece.how == replay_messages.DIFFERENCES),
        chunk.dtype,
        (piece.rows, *chunk.shape),
      )
      for piece in chunk.pieces
    ]
    return np.concatenate(pieces)

  def submit(self, table: RemoteTable, item: Item, writer: InFlight) -> Sending:
    """Queues an item, which is sent when its chunks are full, or in `delay` seconds."""
    self.connection.check_open()
    if item.key == NEW:
      item.key = self._new_key()
    with self.lock:
      sending = Sending(item, writer, table, self, time.monotonic() + self.delay)
      for part in item.parts:
        for chunk in part[0]:
          self.hold(chunk, self.unacknowledged)
    self.queue.append(sending)
    if (self._outbox.idle and self.is_ready(item)) or len(
      self.queue
    ) == replay_messages.MESSAGE_ITEMS:
      self.connection.wake()
    return sending

  def _new_key(self) -> int:
    """A key that nobody else draws: 42 random bits, which last for a million items."""
    if (self._key + 1) % 2**replay_messages.KEY_BITS == 0:
      self._key = int.from_bytes(os.urandom(8), 'little') >> 22 << replay_messages.KEY_BITS
    self._key += 1
    return self._key

  def wait_for(self, pending: Sending, most: int, wait: Wait) -> None:
    """Returns when an item is in its table, or at most so many wait, or one has been refused."""
    if not pending.number:
      self.forced = True
      self.connection.wake()
    writer, table = pending.writer, pending.table
    desk = Desk(table.name, self.lock, REPORT_AFTER, table.report)
    with self.lock:
      while not pending.done and len(writer.waiting) > most and not writer.refusals:
        self.connection.check_open()
        wait.on(desk, self._done, 'insert into', self._why_not)

  def _why_not(self) -> str:
    connection, why = self.connection, self._outbox.why_held or 'it has not been acknowledged yet'
    return f'at {connection.address} {connection.state() if connection.away else why}'

  # --- for the connection's thread -----------------------------------------------------------------

  def cut(self, chunk: SentChunk, differences: bool = False) -> None:
    """Makes a piece of the rows that are in none yet."""
    with self._cutting:
      upto = chunk.length
      if upto > chunk.through:
        assert chunk.array is not None
        rows = chunk.array[chunk.through : upto]
        packed = pack(rows, differences)
        if packed is None:
          piece = Piece(len(rows), replay_messages.AS_IS, rows.tobytes())
        else:
          piece = Piece(
            len(rows),
            replay_messages.DIFFERENCES if packed[1] else replay_messages.PACKED,
            packed[0],
          )
        chunk.pieces.append(piece)
        chunk.through = upto
      if chunk.array is not None and upto == len(chunk.array):
        chunk.array = None

  def is_ready(self, item: Item) -> bool:
    """Whether all its rows are in pieces."""
    for chunks, offset, rows in item.parts:
      if len(chunks) > 1:
        offset -= sum([chunk.length for chunk in chunks[:-1]])
      if chunks[-1].through < offset + rows:  # type: ignore[attr-defined]
        return False
    return True

  def complete(self, item: Item) -> None:
    """Makes pieces of all its rows."""
    if not self.is_ready(item):
      for part in item.parts:
        self.cut(part[0][-1])  # type: ignore[arg-type]

  def take(self, most: int, size: int, now: float) -> list[Sending]:
    """Items to send next: so many at most, of about so many bytes, and at least one."""
    queue, taken = self.queue, list[Sending]()
    while queue and len(taken) < most and size > 0:
      head = queue[0]
      size -= head.bytes
      if not (self.is_ready(head.item) or self.forced or head.due <= now):
        break
      taken.append(queue.popleft())
    if not queue:
      self.forced = False
    return taken

  def finish(self, done: list[Sending], refusal: str | None = None) -> None:
    """Items are in, or refused; whoever waits looks around."""
    with self.lock:
      for sending in done:
        if sending.done:
          continue
        sending.finish()
        if refusal is not None:
          sending.writer.refuse(ValueError(refusal))
        for part in sending.item.parts:
          for chunk in part[0]:
            self.drop(chunk, self.unacknowledged)
      self._done.notify_all()


# --- over a connection ------------------------------------------------------------------------------
