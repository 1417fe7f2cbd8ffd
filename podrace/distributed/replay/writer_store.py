"""The chunks and items of one writer to tables of a replay service.

Each writer has a store, and each connection an outbox that sends the items of its stores. The
writer cuts its rows into pieces and packs them. A piece is sent with the first item that needs it.
A full chunk is one piece. A chunk that is not full is cut early if an item has waited for `delay`
seconds or is flushed.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from podrace.distributed.replay import replay_messages
from podrace.tables.blocking import REPORT_AFTER, Desk, InFlight, Pending, Wait
from podrace.tables.chunks import AS_IS, Account, Chunk, ChunkStore, encode, unpack
from podrace.tables.items import NEW, Item

COUNTED = 4096  # bytes above which a chunk counts in the size of a message
REFERENCE = 16  # bytes that a reference to a chunk counts for
# Bytes that a row of a piece counts for, at least: a piece has at most ROWS rows.
LEAST_ROW = replay_messages.UNPACKED_CHUNK_BYTES // replay_messages.ROWS


class Session(Protocol):
  """The connection that sends the items of a store.

  Attributes:
    address: of the service.
    released: chunks that writers no longer need, for the connection to announce.
  """

  address: str
  released: deque[SentChunk]

  @property
  def idle(self) -> bool:
    """Whether an item would be sent at once."""

  def wake(self) -> None:
    """Wake the connection's thread."""

  def check_open(self) -> None:
    """Raise Closed, or the error that ended the connection."""

  def why_not_inserted(self) -> str:
    """Return the reason why the newest items are not in their tables."""


class WriterTarget(Protocol):
  """The table of an item; `report` gets a line if an insert waits long."""

  name: str
  report: Callable[[str], None]


class ChunkPiece:
  """Packed rows of a chunk, and their number in the session that sent them."""

  __slots__ = ('data', 'how', 'number', 'rows', 'session')

  def __init__(self, rows: int, data: bytes, how: int) -> None:
    self.rows, self.data, self.how = rows, data, how
    self.number, self.session = 0, -1


class SentChunk(Chunk):
  """A chunk, and the pieces of its rows before `through`."""

  __slots__ = ('pieces', 'store', 'through')

  def __init__(self, key: int, array: np.ndarray, length: int, store: WriterStore) -> None:
    super().__init__(key, array, length)
    self.pieces: list[ChunkPiece] = []
    self.store, self.through = store, 0


class Sending(Pending):
  """An item that is not yet acknowledged; it must be sent at the time `due`."""

  __slots__ = ('due', 'number', 'place', 'store')

  def __init__(
    self, item: Item, writer: InFlight, table: WriterTarget, store: WriterStore, due: float
  ) -> None:
    super().__init__(item, table, writer)
    self.store, self.due = store, due
    self.place = store.submitted  # among the items of its store, from 1 on
    self.number = 0  # in the client's stream, once the item has been sent

  @property
  def bytes(self) -> int:
    """About the bytes of its chunks, also if an earlier item has sent them."""
    parts = self.item.parts
    references = REFERENCE * sum([len(part[0]) for part in parts])
    return references + sum([c.nbytes for part in parts for c in part[0] if c.nbytes > COUNTED])


class WriterStore(ChunkStore):
  """The chunks of one writer, and its items that have not been sent.

  Args:
    delay: seconds that an item waits for its last chunks to fill up.

  Attributes:
    queue: items that have not been sent.
    submitted: number of items so far.
    flushed: number of items, from the first one on, that are to be sent at once.
    unacknowledged: account of the chunks of items that are not yet in their tables.
  """

  def __init__(self, session: Session, delay: float) -> None:
    super().__init__(cache_bytes=0)
    if not 0 <= delay < math.inf:
      raise ValueError(f'{delay=} must be at least 0, in seconds')
    self.session, self.delay = session, delay
    self.queue: deque[Sending] = deque()
    self.submitted = self.flushed = 0
    self.unacknowledged = Account()
    self._done = threading.Condition(self.lock)  # type: ignore[arg-type]
    self._cutting = threading.Lock()
    self.last_key = -1

  # --- for the writer

  def chunk(self, array: np.ndarray, length: int) -> Chunk:
    """Make a chunk."""
    return SentChunk(next(self._chunk_keys), array, length, self)

  def seal(self, chunk: Chunk, differences: bool) -> None:
    """Cut and pack the rest of a full chunk."""
    assert isinstance(chunk, SentChunk)
    self.cut(chunk, differences)
    with self.lock:
      self._resize(chunk, sum(len(piece.data) for piece in chunk.pieces))

  def drop(self, chunk: Chunk, account: Account) -> None:
    """Drop a chunk, and release it at the service if no account holds it."""
    super().drop(chunk, account)
    if not chunk.holders:
      assert isinstance(chunk, SentChunk)
      self.session.released.append(chunk)

  def read(self, chunk: Chunk) -> np.ndarray:
    """Return the rows of a chunk."""
    array = chunk.array
    if array is not None:
      return array
    assert isinstance(chunk, SentChunk)
    pieces = [
      np.frombuffer(piece.data, chunk.dtype).reshape(piece.rows, *chunk.shape)
      if piece.how == AS_IS
      else unpack((piece.data, piece.how), chunk.dtype, (piece.rows, *chunk.shape))
      for piece in chunk.pieces
    ]
    return np.concatenate(pieces)

  def submit(self, table: WriterTarget, item: Item, writer: InFlight) -> Sending:
    """Queue an item, which is sent when its chunks are full, or after `delay` seconds."""
    self.session.check_open()
    if item.key == NEW:
      item.key = self.new_key()
    self.submitted += 1
    with self.lock:
      sending = Sending(item, writer, table, self, time.monotonic() + self.delay)
      for part in item.parts:
        for chunk in part[0]:
          self.hold(chunk, self.unacknowledged)
    self.queue.append(sending)
    if (self.session.idle and self.is_ready(item)) or len(
      self.queue
    ) == replay_messages.MESSAGE_ITEMS:
      self.session.wake()
    return sending

  def new_key(self) -> int:
    """Return a key that no other writer draws: 42 random bits, new after 2^KEY_BITS items."""
    if (self.last_key + 1) % 2**replay_messages.KEY_BITS == 0:
      self.last_key = int.from_bytes(os.urandom(8), 'little') >> 22 << replay_messages.KEY_BITS
    self.last_key += 1
    return self.last_key

  def wait_for(self, pending: Sending, most: int, wait: Wait) -> None:
    """Wait until an item is in its table, at most `most` wait, or one has been refused."""
    if not pending.number:
      self.flushed = self.submitted
      self.session.wake()
    writer, table = pending.writer, pending.table
    desk = Desk(table.name, self.lock, REPORT_AFTER, table.report)
    with self.lock:
      while not pending.done and len(writer.waiting) > most and not writer.refusals:
        self.session.check_open()
        wait.on(desk, self._done, 'insert into', self.session.why_not_inserted)

  # --- for the connection's thread

  def cut(self, chunk: SentChunk, differences: bool = False) -> None:
    """Make pieces of the rows that are in no piece yet, none too large for a service."""
    with self._cutting:
      upto = chunk.length
      if upto > chunk.through:
        assert chunk.array is not None
        row = max(chunk.array[:1].nbytes, LEAST_ROW)
        most = max(replay_messages.UNPACKED_CHUNK_BYTES // row, 1)
        for start in range(chunk.through, upto, most):
          rows = chunk.array[start : min(start + most, upto)]
          chunk.pieces.append(ChunkPiece(len(rows), *encode(rows, differences)))
        chunk.through = upto
      if chunk.array is not None and upto == len(chunk.array):
        chunk.array = None

  def is_ready(self, item: Item) -> bool:
    """Return whether all rows of an item are in pieces."""
    for chunks, offset, rows in item.parts:
      if len(chunks) > 1:
        offset -= sum([chunk.length for chunk in chunks[:-1]])
      if chunks[-1].through < offset + rows:  # type: ignore[attr-defined]
        return False
    return True

  def complete(self, item: Item) -> None:
    """Make pieces of all rows of an item."""
    if not self.is_ready(item):
      for part in item.parts:
        self.cut(part[0][-1])  # type: ignore[arg-type]

  def take(self, most: int, size: int, now: float) -> list[Sending]:
    """Take at most `most` items to send next, and stop after about `size` bytes."""
    queue, taken = self.queue, list[Sending]()
    while queue and len(taken) < most and size > 0:
      head = queue[0]
      size -= head.bytes
      if not (self.is_ready(head.item) or head.place <= self.flushed or head.due <= now):
        break
      taken.append(queue.popleft())
    return taken

  @property
  def has_flushed(self) -> bool:
    """Whether there are items to be sent at once."""
    return bool(self.queue) and self.queue[0].place <= self.flushed

  def finish(self, done: list[Sending], refusal: str | None = None) -> None:
    """Finish items that were inserted or refused, and wake the calls that wait."""
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


def pieces_of(part: Any) -> tuple[list[ChunkPiece], int]:
  """Return the pieces that a part of an item needs, and its first row in the first of them."""
  chunks, offset, rows = part
  if len(chunks) == 1 and len(chunks[0].pieces) == 1:
    return chunks[0].pieces, offset
  needed: list[ChunkPiece] = []
  first, start, end = offset, 0, offset + rows
  for chunk in chunks:
    for piece in chunk.pieces:
      stop = start + piece.rows
      if stop > offset and start < end:
        if not needed:
          first = offset - start
        needed.append(piece)
      start = stop
  return needed, first
