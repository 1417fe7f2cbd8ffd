"""What podrace.tables.Writer writes to, where the tables are elsewhere.

Each writer has a store of its own; each connection an outbox, over which their items go. Rows are cut into pieces, packed by the writer, which go to the service with
the first item that needs them. A chunk that is full is one piece; one that is not yet is cut early if an item
has waited long enough for it, or is flushed.
"""

from __future__ import annotations

import collections
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from podrace.distributed.net.link import Link
from podrace.distributed.replay import messages
from podrace.tables.blocking import REPORT_AFTER, Desk, InFlight, Pending, Wait
from podrace.tables.chunks import Account, Chunk, ChunkStore, pack, unpack
from podrace.tables.items import NEW, Item, Signature

if TYPE_CHECKING:
  from podrace.distributed.replay.connection import Connection
  from podrace.distributed.replay.remote_table import RemoteTable

TURN = 0.05  # seconds between looks at the clock
OUTSTANDING = 4  # INSERTs that are not yet acknowledged
FRAME_SLACK = 2**16  # bytes of an INSERT besides the chunks of one item
FEW = 64  # items that wait for others while an INSERT is not yet acknowledged, or for
SPACING = 0.02  # seconds since the last one
RELEASE_SECONDS = 1.0  # after which chunks that nobody needs are let go without a further item
COUNTED = 4096  # bytes of a chunk that is counted in the size of a message
REFERENCE = 16  # bytes that any chunk counts for


class Piece:
  """Rows of a chunk as they are sent, and their number in the session in which they were."""

  __slots__ = ('data', 'how', 'number', 'rows', 'session')

  def __init__(self, rows: int, how: int, data: bytes) -> None:
    self.rows, self.how, self.data = rows, how, data
    self.number, self.session = 0, -1


class SentChunk(Chunk):
  """A chunk and its pieces, which are its rows up to `through`."""

  __slots__ = ('pieces', 'store', 'through')

  def __init__(self, key: int, array: np.ndarray, length: int, store: WriterStore) -> None:
    super().__init__(key, array, length)
    self.pieces: list[Piece] = []
    self.store, self.through = store, 0


class Sending(Pending):
  """An item that is not yet known to be in its table."""

  __slots__ = ('due', 'number', 'store')

  def __init__(
    self, item: Item, writer: InFlight, table: RemoteTable, store: WriterStore, due: float
  ) -> None:
    super().__init__(item, table, writer)
    self.store, self.due = store, due
    self.number = 0  # in the client's stream, once it has been sent

  @property
  def bytes(self) -> int:
    """Of its chunks, if they are worth counting; some of them may have been sent already."""
    parts = self.item.parts
    few = REFERENCE * sum([len(part[0]) for part in parts])
    return few + sum([c.nbytes for part in parts for c in part[0] if c.nbytes > COUNTED])


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
      if piece.how == messages.AS_IS
      else unpack(
        (piece.data, piece.how == messages.DIFFERENCES), chunk.dtype, (piece.rows, *chunk.shape)
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
    if (self._outbox.idle and self.is_ready(item)) or len(self.queue) == messages.MESSAGE_ITEMS:
      self.connection.wake()
    return sending

  def _new_key(self) -> int:
    """A key that nobody else draws: 42 random bits, which last for a million items."""
    if (self._key + 1) % 2**messages.KEY_BITS == 0:
      self._key = int.from_bytes(os.urandom(8), 'little') >> 22 << messages.KEY_BITS
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
          piece = Piece(len(rows), messages.AS_IS, rows.tobytes())
        else:
          piece = Piece(
            len(rows), messages.DIFFERENCES if packed[1] else messages.PACKED, packed[0]
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


def pieces_of(part: Any) -> tuple[list[Piece], int]:
  """The pieces that a part needs, and where in the first of them it begins."""
  chunks, offset, rows = part
  if len(chunks) == 1 and len(chunks[0].pieces) == 1:
    return chunks[0].pieces, offset
  found: list[Piece] = []
  first, start, end = offset, 0, offset + rows
  for chunk in chunks:
    for piece in chunk.pieces:
      stop = start + piece.rows
      if stop > offset and start < end:
        if not found:
          first = offset - start
        found.append(piece)
      start = stop
  return found, first


# --- over a connection ------------------------------------------------------------------------------


class Declarations:
  """What numbers mean in one session, and what of it has still to be said."""

  def __init__(self) -> None:
    self._numbers: dict[str, dict[Any, int]] = collections.defaultdict(dict)
    self._known: dict[int, tuple[int, Signature]] = {}  # signatures by id
    self._new: dict[str, list[Any]] = {}
    self.take_new()

  def number(self, what: str, key: Any, details: Any = None) -> int:
    """Of a table, spec or signature; `details` are declared if it is new, of a spec the (dtype, shape) itself."""
    numbers = self._numbers[what]
    if (number := numbers.get(key)) is None:
      number = numbers[key] = len(numbers)
      self._new[what].append(details or [key[0].str, list(key[1])])
    return number

  def signature(self, signature: Signature) -> int:
    """Writers have signatures of their own, most of them equal; looked up by identity first."""
    known = self._known.get(id(signature))
    if known is None:
      number = self.number('signatures', signature, messages.packed_signature(signature))
      if len(self._known) > 1000:
        self._known.clear()
      known = self._known[id(signature)] = number, signature
    return known[0]

  def take_new(self) -> dict[str, list[Any]]:
    """What a DECLARE has to say before the next INSERT."""
    new, self._new = self._new, {'tables': [], 'specs': [], 'signatures': []}
    return new


class Outbox:
  """One connection's. Of its thread, but for `store` and `idle`."""

  def __init__(self, connection: Connection, link: Link) -> None:
    self._connection, self._link = connection, link
    self.released: deque[SentChunk] = deque()  # which writers need no longer
    self.why_held = ''  # what keeps the newest items out of their tables, as the service says
    self.messages = 0
    self.sent: dict[int, Sending] = {}  # items that are not yet known to be in, by number
    self._stores: list[weakref.ref[WriterStore]] = []
    self._number = 0  # of the newest item
    self._again: deque[Sending] = deque()
    self._inserted_at = 0.0
    self._begin(messages.FRAME_BYTES)

  def _begin(self, largest: int) -> None:
    """What is of one session only."""
    self._largest = largest
    self._declared = Declarations()
    self._next_piece = self._outstanding = self.messages = 0
    self.released.clear()  # with the session in which they were sent

  @property
  def idle(self) -> bool:
    """Whether an item would be sent at once."""
    return not self._outstanding and time.monotonic() > self._inserted_at + SPACING

  def store(self, delay: float) -> WriterStore:
    """A new writer's."""
    store = WriterStore(self._connection, self, delay)
    with self._link.changed:
      self._stores = [*(r for r in self._stores if r() is not None), weakref.ref(store)]
    return store

  def _live_stores(self) -> list[WriterStore]:
    return [store for ref in self._stores if (store := ref()) is not None]

  def joined(
    self, newest: int, largest: int, waiting: Collection[int], missing: Collection[int]
  ) -> None:
    """A session begins: what the service has not got is sent again, before anything new."""
    self._begin(largest)
    again = [i for i in sorted(self.sent) if i > newest or i in missing]
    done = [i for i in sorted(self.sent) if i <= newest and i not in missing and i not in waiting]
    self._again = deque(self.sent[i] for i in again)
    self._finish(done)

  def lost(self) -> None:
    """A session is over: who waits looks why."""
    for store in self._live_stores():
      store.finish([])

  # --- what is acknowledged

  def acknowledged(self, message: int, why: str, *numbers: memoryview) -> None:
    """What ACK says: items that are in, that wait, and that are refused."""
    done, waiting, refused = (messages.records(x, '<u8').tolist() for x in numbers)
    if message:
      self._outstanding -= 1
    if waiting:
      self.why_held = why
    self._finish(done)
    self._finish(refused, why)

  def _finish(self, numbers: list[int], refusal: str | None = None) -> None:
    by_store: dict[WriterStore, list[Sending]] = {}
    for number in numbers:
      sending = self.sent.pop(number, None)
      if sending is not None:
        by_store.setdefault(sending.store, []).append(sending)
    for store, sendings in by_store.items():
      store.finish(sendings, refusal)

  # --- what is sent

  def send(self) -> bool:
    """Sends one INSERT, if it is time; whether it was."""
    if self._outstanding >= OUTSTANDING:
      return False
    stores = self._live_stores()
    queued = sum(len(store.queue) for store in stores)
    now = time.monotonic()
    early = bool(self._outstanding) or now < self._inserted_at + SPACING
    is_urgent = bool(self._again) or queued >= FEW or any(store.forced for store in stores)
    if early and not is_urgent:
      self._link.patience = SPACING if queued else TURN
      return False
    self._link.patience = TURN
    batch = self._batch(stores, now)
    if not batch and not (self.released and now - self._inserted_at > RELEASE_SECONDS):
      return False
    self._inserted_at = now
    self._insert(self._fitting(batch))
    return True

  def _batch(self, stores: list[WriterStore], now: float) -> list[Sending]:
    """Items for one message."""
    batch: list[Sending] = []
    size = 0
    while self._again and len(batch) < messages.MESSAGE_ITEMS and size < messages.MESSAGE_BYTES:
      batch.append(self._again.popleft())
      size += batch[-1].bytes
    room = min(messages.MESSAGE_ITEMS, len(batch) + messages.MOST_ITEMS - len(self.sent))
    for store in stores:
      if store.queue and len(batch) < room and size < messages.MESSAGE_BYTES:
        taken = store.take(room - len(batch), messages.MESSAGE_BYTES - size, now)
        batch += taken
        size += sum(sending.bytes for sending in taken)
    return batch

  def _fitting(self, batch: list[Sending]) -> list[Sending]:
    """The items that a frame of the service has room for; the others are refused, here already."""
    if sum(sending.bytes for sending in batch) < self._largest // 2:
      return batch
    found = []
    for sending in batch:
      if (size := sending.bytes) > self._largest - FRAME_SLACK:
        why = (
          f'an item of {size:,} bytes for table {sending.table.name!r} at {self._link.address}, which takes '
          f'frames of {self._largest:,}: make it shorter, or start the service with more --client-bytes'
        )
        self.sent.pop(sending.number, None)
        sending.store.finish([sending], why)
      else:
        found.append(sending)
    return found

  def _insert(self, batch: list[Sending]) -> None:
    declared, items, parts, refs, pieces = self._declared, [], [], list[int](), list[Any]()
    data: list[bytes] = []
    for sending in batch:
      item = sending.item
      if not sending.number:
        self._number += 1
        sending.number = self._number
        self.sent[sending.number] = sending
      table = declared.number('tables', sending.table.name, sending.table.name)
      signature = declared.signature(item.signature)
      key = -item.key if item.amends else item.key
      items.append((sending.number, key, item.priority, table, signature))
      sending.store.complete(item)
      for leaf, part in zip(item.signature.leaves, item.parts, strict=True):
        needed, offset = pieces_of(part)
        parts.append((len(needed), offset, part[2]))
        for piece in needed:
          if piece.session != self._link.number:
            piece.session, piece.number = self._link.number, self._next_piece
            self._next_piece += 1
            number = declared.number('specs', (leaf.dtype, leaf.shape))
            pieces.append((number, piece.rows, piece.how, len(piece.data)))
            data.append(piece.data)
          refs.append(piece.number)
    new = declared.take_new()
    if any(new.values()) and not self._link.send(messages.DECLARE, new):
      return
    arrays = [
      np.array(pieces, '<u4').reshape(-1, 4),
      np.array(items, messages.ITEM),
      np.array(parts, '<u4').reshape(-1, 3),
      np.array(refs, '<u8'),
      np.array(self._released_numbers(), '<u8'),
      b''.join(data),
    ]
    self.messages += 1
    self._outstanding += 1
    self._link.send(messages.INSERT, self.messages, arrays=arrays)

  def _released_numbers(self) -> list[int]:
    found = []
    while self.released:
      chunk = self.released.popleft()
      found += [p.number for p in chunk.pieces if p.session == self._link.number]
    return found
