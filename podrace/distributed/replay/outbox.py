"""Sends the items of a connection's writers to a replay service."""

from __future__ import annotations

import collections
import time
import weakref
from collections import deque
from collections.abc import Collection
from typing import Any

import numpy as np

from podrace.distributed.net.frame import WireError
from podrace.distributed.net.link import Link
from podrace.distributed.replay import replay_messages
from podrace.distributed.replay.replay_messages import CHUNK, ITEM, PART
from podrace.distributed.replay.writer_store import (
  ChunkPiece,
  Sending,
  SentChunk,
  WriterStore,
  pieces_of,
)
from podrace.tables.items import Item, Signature

TURN = 0.05  # seconds between looks at the clock
OUTSTANDING = 4  # INSERTs that are not yet acknowledged
HEAD_BYTES = 2**10  # bytes of an INSERT besides its arrays, at most
# Fewer items than FEW wait for more while an INSERT is not acknowledged, or for SPACING seconds.
FEW = 64
SPACING = 0.02
RELEASE_SECONDS = 1.0  # after which chunks are released without a further item


class Declarations:
  """The numbers of tables, specs and signatures in one session, and the next DECLARE."""

  def __init__(self) -> None:
    self._numbers: dict[str, dict[Any, int]] = collections.defaultdict(dict)
    self._known: dict[int, tuple[int, Signature]] = {}  # signatures by id
    self._new: dict[str, list[Any]] = {}
    self.take_new()

  def number(self, kind: str, key: Any, details: Any = None) -> int:
    """Return the number of a key, and declare it if it is new.

    Args:
      kind: 'tables', 'specs' or 'signatures'.
      key: a table's name, a signature, or a spec (dtype, shape).
      details: declared for a new key. A spec is declared by its key.
    """
    numbers = self._numbers[kind]
    if (number := numbers.get(key)) is None:
      number = numbers[key] = len(numbers)
      self._new[kind].append(details or [key[0].str, list(key[1])])
    return number

  def signature(self, signature: Signature) -> int:
    """Return the number of a signature. Look it up by identity, because comparing is slow.

    Raises:
      WireError: no service takes it.
    """
    known = self._known.get(id(signature))
    if known is None:
      details = replay_messages.pack_signature(signature)
      replay_messages.read_signature(details)
      number = self.number('signatures', signature, details)
      if len(self._known) > 1000:
        self._known.clear()
      known = self._known[id(signature)] = number, signature
    return known[0]

  def take_new(self) -> dict[str, list[Any]]:
    """Return, and forget, the details of the DECLARE that the next INSERT needs."""
    new, self._new = self._new, {'tables': [], 'specs': [], 'signatures': []}
    return new


class InsertMessage:
  """The arrays of one INSERT.

  Args:
    declared: the numbers of the session.
    session: its number.
    first: the number of the next piece.
    released: numbers of chunks that no later item needs.
    largest: bytes of a frame of the service.

  Attributes:
    items: records of ITEM.
    pieces: that have not been sent before.
  """

  def __init__(
    self, declared: Declarations, session: int, first: int, released: list[int], largest: int
  ) -> None:
    self.items: list[Any] = []
    self.pieces: list[ChunkPiece] = []
    self._chunks: list[Any] = []
    self._parts: list[Any] = []
    self._references: list[int] = []
    self._size = HEAD_BYTES + 8 * len(released)
    self._declared, self._session, self._first = declared, session, first
    self._released, self._largest = released, largest

  def add_parts(self, item: Item) -> str:
    """Add the parts of an item; returns the reason if the message has no room, else ''."""
    parts, references, chunks = self._parts, self._references, self._chunks
    before, data = (len(parts), len(references), len(chunks)), 0
    for leaf, part in zip(item.signature.leaves, item.parts, strict=True):
      pieces, offset = pieces_of(part)
      parts.append((len(pieces), offset, part[2]))
      for piece in pieces:
        if piece.session != self._session:
          piece.session, piece.number = self._session, self._first + len(chunks)
          spec = self._declared.number('specs', (leaf.dtype, leaf.shape))
          chunks.append((spec, piece.rows, piece.how, len(piece.data)))
          self.pieces.append(piece)
          data += len(piece.data)
        references.append(piece.number)
    count, new = len(references) - before[1], len(chunks) - before[2]
    size = ITEM.itemsize + PART.itemsize * len(item.parts) + 8 * count + CHUNK.itemsize * new + data
    if len(references) > replay_messages.MESSAGE_CHUNKS or self._size + size > self._largest:
      self._undo(*before)
      return self._why_not(count, size)
    self._size += size
    return ''

  def _undo(self, parts: int, references: int, chunks: int) -> None:
    for piece in self.pieces[chunks:]:
      piece.session = -1
    del self._parts[parts:], self._references[references:]
    del self._chunks[chunks:], self.pieces[chunks:]

  def _why_not(self, count: int, size: int) -> str:
    if count > replay_messages.MESSAGE_CHUNKS:
      return (
        f'it has {count:,} references to chunks, and a message at most '
        f'{replay_messages.MESSAGE_CHUNKS:,}: make it shorter, or flush less often'
      )
    return (
      f'it has {size:,} bytes, and the service takes frames of {self._largest:,}: make it '
      'shorter, or start the service with more --client-bytes'
    )

  def arrays(self) -> list[Any]:
    """Return the arrays as they are sent."""
    return [
      np.array(self._chunks, '<u4').reshape(-1, 4),
      np.array(self.items, ITEM),
      np.array(self._parts, '<u4').reshape(-1, 3),
      np.array(self._references, '<u8'),
      np.array(self._released, '<u8'),
      b''.join([piece.data for piece in self.pieces]),
    ]


class Outbox:
  """The items of all writers of a connection. For its thread only, except `add` and `idle`.

  Attributes:
    released: chunks that writers no longer need.
    why_held: the reason why the newest items wait, as the service reports.
    messages: INSERTs sent in this session.
    sent: items that are not yet acknowledged, by number.
  """

  def __init__(self, link: Link) -> None:
    self._link = link
    self.released: deque[SentChunk] = deque()
    self.why_held = ''
    self.messages = 0
    self.sent: dict[int, Sending] = {}
    self._stores: list[weakref.ref[WriterStore]] = []
    self._number = 0  # of the newest item
    self._unsent: deque[Sending] = deque()  # items that must be sent again
    self._inserted_at = 0.0
    self._begin_session(replay_messages.FRAME_BYTES)

  def _begin_session(self, largest: int) -> None:
    self._largest = largest
    self._declared = Declarations()
    self._next_piece = self._outstanding = self.messages = 0
    self.released.clear()  # the service has forgotten them with the last session

  @property
  def idle(self) -> bool:
    """Whether an item would be sent at once."""
    return not self._outstanding and time.monotonic() > self._inserted_at + SPACING

  def add(self, store: WriterStore) -> None:
    """Send the items of this store until it is garbage-collected. For any thread."""
    with self._link.changed:
      self._stores = [*(r for r in self._stores if r() is not None), weakref.ref(store)]

  def _live_stores(self) -> list[WriterStore]:
    return [store for ref in self._stores if (store := ref()) is not None]

  def joined(
    self, newest: int, largest: int, waiting: Collection[int], missing: Collection[int]
  ) -> None:
    """Begin a session, in which the items that the service lacks are sent before any new one.

    Args:
      newest: the largest number that has come.
      largest: frame in bytes.
      waiting: numbers of items that wait for a limiter.
      missing: numbers up to `newest` of items that the service does not have.
    """
    self._begin_session(largest)
    unsent = [i for i in sorted(self.sent) if i > newest or i in missing]
    done = [i for i in sorted(self.sent) if i <= newest and i not in missing and i not in waiting]
    self._unsent = deque(self.sent[i] for i in unsent)
    self._finish(done)

  def lost(self) -> None:
    """End a session: wake the calls that wait, so that they check the connection."""
    for store in self._live_stores():
      store.finish([])

  # --- acknowledgements

  def acknowledge(self, message: int, why: str, *numbers: memoryview) -> None:
    """Take an ACK: numbers of inserted, waiting and refused items."""
    done, waiting, refused = (replay_messages.read_records(x, '<u8').tolist() for x in numbers)
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

  # --- messages

  def send(self) -> bool:
    """Send one INSERT if it is due; return whether it was."""
    if self._outstanding >= OUTSTANDING:
      return False
    stores = self._live_stores()
    queued = sum(len(store.queue) for store in stores)
    now = time.monotonic()
    early = bool(self._outstanding) or now < self._inserted_at + SPACING
    is_urgent = bool(self._unsent) or queued >= FEW or any(store.has_flushed for store in stores)
    if early and not is_urgent:
      self._link.patience = SPACING if queued else TURN
      return False
    self._link.patience = TURN
    batch = self._batch(stores, now)
    if not batch and not (self.released and now - self._inserted_at > RELEASE_SECONDS):
      return False
    self._inserted_at = now
    self._insert(batch)
    return True

  def _batch(self, stores: list[WriterStore], now: float) -> list[Sending]:
    """Take the items of the next message."""
    batch: list[Sending] = []
    size = 0
    while (
      self._unsent
      and len(batch) < replay_messages.MESSAGE_ITEMS
      and size < replay_messages.MESSAGE_BYTES
    ):
      batch.append(self._unsent.popleft())
      size += batch[-1].bytes
    room = min(
      replay_messages.MESSAGE_ITEMS, len(batch) + replay_messages.MOST_ITEMS - len(self.sent)
    )
    for store in stores:
      if store.queue and len(batch) < room and size < replay_messages.MESSAGE_BYTES:
        taken = store.take(room - len(batch), replay_messages.MESSAGE_BYTES - size, now)
        batch += taken
        size += sum(sending.bytes for sending in taken)
    return batch

  def _insert(self, batch: list[Sending]) -> None:
    declared, released = self._declared, self._released_numbers()
    message = InsertMessage(declared, self._link.number, self._next_piece, released, self._largest)
    for at, sending in enumerate(batch):
      item = sending.item
      try:
        signature = declared.signature(item.signature)
      except WireError as e:
        self._refuse(sending, str(e))
        continue
      sending.store.complete(item)
      if why := message.add_parts(item):
        if message.items:
          self._put_back(batch[at:])
          break
        self._refuse(sending, why)
        continue
      self._give_number(sending)
      table = declared.number('tables', sending.table.name, sending.table.name)
      key = -item.key if item.amends else item.key
      message.items.append((sending.number, key, item.priority, table, signature))
    self._next_piece += len(message.pieces)
    new = declared.take_new()
    if any(new.values()) and not self._link.send(replay_messages.DECLARE, new):
      return
    self.messages += 1
    self._outstanding += 1
    self._link.send(replay_messages.INSERT, self.messages, arrays=message.arrays())

  def _give_number(self, sending: Sending) -> None:
    if not sending.number:
      self._number += 1
      sending.number = self._number
      self.sent[sending.number] = sending

  def _put_back(self, batch: list[Sending]) -> None:
    """Make items the first ones of the next message."""
    for sending in batch:
      self._give_number(sending)
    self._unsent.extendleft(reversed(batch))

  def _refuse(self, sending: Sending, why: str) -> None:
    """Refuse an item that no message can have."""
    self.sent.pop(sending.number, None)
    where = f'table {sending.table.name!r} at {self._link.address}'
    sending.store.finish([sending], f'an item for {where}: {why}')

  def _released_numbers(self) -> list[int]:
    numbers = []
    while self.released:
      chunk = self.released.popleft()
      numbers += [p.number for p in chunk.pieces if p.session == self._link.number]
    return numbers
