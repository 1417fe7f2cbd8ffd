"""What one client of a replay service writes: its chunks and its numbered items, over all its connections."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from podrace.distributed.net.frame import WireError
from podrace.distributed.net.listener import Peer
from podrace.distributed.replay import replay_messages
from podrace.distributed.replay.served_tables import Entry
from podrace.tables.blocking import Pending
from podrace.tables.chunks import Account, Chunk, ChunkStore, Part
from podrace.tables.items import Item, Leaf, Signature

CHUNK_BYTES = 512  # that a chunk takes besides its rows, about
PART_BYTES = 128  # that a part of an item takes besides its rows, and a reference to a chunk, about
REFUSED_ITEMS = 2048  # of a stream, that are refused again if they are sent again


class Stream:
  """What one client has written, over all its connections.

  Its items are numbered. Which have come is remembered, and in the checkpoint, at the same moment as the
  tables: so an item that is sent again is known.
  """

  def __init__(
    self,
    number: int = 0,
    missing: set[int] | None = None,
    unheard: set[int] | None = None,
    most_lost: int = 0,
  ) -> None:
    self.number = number  # of the newest item that has come
    # Items that may have come after the checkpoint from which the stream was restored; 0 once that is known.
    self.most_lost = most_lost
    # Older ones that are not in: a restart has lost them, or they were refused, which the client may not have heard.
    self.missing = missing or set()
    # Of those, which waited in the checkpoint: the client sends them again before any newer one, or it has heard
    # that they are in, and they are lost.
    self.unheard = unheard or set()
    self.refused: list[int] = []  # of those, the newest last (an empty deque has 760 bytes)
    self.waiting: dict[int, Pending] = {}  # by number, for a limiter
    self.waiting_parts = 0  # of those: rows of a column, and references to chunks
    self.account = Account()
    self.peer: Peer | None = None
    self.begin()

  def begin(self) -> None:
    """For a new connection, in which everything is said anew."""
    self.tables: list[Entry] = []
    self.specs: list[tuple[np.dtype, tuple[int, ...]]] = []
    self.signatures: list[Signature] = []
    self.declared = self.declared_bytes = 0
    self.pieces: dict[int, Chunk] = {}
    self.next_piece = 0
    self.inserted = self.refusals = 0  # items

  @property
  def kept_bytes(self) -> int:
    """Of what its writers keep, and of its items that wait."""
    return self.account.bytes + CHUNK_BYTES * len(self.pieces) + PART_BYTES * self.waiting_parts

  def refuse(self, number: int) -> None:
    """An item is not in: who has not heard it asks again, and is refused again."""
    self.missing.add(number)
    self.refused.append(number)
    if len(self.refused) > REFUSED_ITEMS:
      self.missing.discard(self.refused.pop(0))

  # --- chunks

  def take_chunks(self, store: ChunkStore, details: np.ndarray, data: memoryview) -> None:
    """New chunks; each is held until the client says otherwise."""
    if len(details) > replay_messages.MESSAGE_CHUNKS:
      raise WireError(
        f'{len(details)} chunks in a message, at most {replay_messages.MESSAGE_CHUNKS}'
      )
    if int(details['bytes'].astype(np.int64).sum()) != len(data):
      raise WireError(f'{len(data)} bytes of chunks, which differ from what is said of them')
    start, made = 0, []
    for spec, rows, how, size in details.tolist():
      if spec >= len(self.specs) or not rows:
        raise WireError(f'a chunk of {rows} rows of spec {spec}')
      own = bytes(data[start : start + size])
      made.append(replay_messages.make_chunk(store, own, how, rows, *self.specs[spec]))
      start += size
    with store.lock:
      for chunk in made:
        store.hold(chunk, self.account)
        self.pieces[self.next_piece] = chunk
        self.next_piece += 1

  def release(self, store: ChunkStore, numbers: np.ndarray) -> None:
    """Chunks that the client needs no longer."""
    with store.lock:
      for number in numbers.tolist():
        chunk = self.pieces.pop(number, None)
        if chunk is None:
          raise WireError(f'a chunk {number} that is released, which there is not')
        store.drop(chunk, self.account)

  # --- items

  def take_items(
    self, details: np.ndarray, parts: np.ndarray, refs: np.ndarray
  ) -> tuple[list[int], list[int], list[tuple[Entry, list[tuple[int, Item]]]], int]:
    """Items that came before and are in or wait, by number; the new ones; and how many are lost."""
    self._check_items(details, parts, refs)
    rows, numbers = iter(parts.tolist()), iter(refs.tolist())
    found = [
      tuple([self._part(leaf, next(rows), numbers) for leaf in self.signatures[s].leaves])
      for s in details['signature'].tolist()
    ]
    done: list[int] = []
    waiting: list[int] = []
    groups: list[tuple[Entry, list[tuple[int, Item]]]] = []
    lost = 0
    for (number, key, priority, table, s), own in zip(details.tolist(), found, strict=True):
      if number > self.number:
        lost += self._count_lost(number) + len(self.unheard)
        self.number, self.unheard = number, set()
      elif number in self.missing:
        self.missing.discard(number)
        self.unheard.discard(number)
      else:  # it has come before
        (waiting if number in self.waiting else done).append(number)
        continue
      entry = self.tables[table]
      if not groups or groups[-1][0] is not entry:
        groups.append((entry, []))
      item = Item(abs(key), priority, self.signatures[s], own, amends=key < 0)
      groups[-1][1].append((number, item))
    return done, waiting, groups, lost

  def _count_lost(self, number: int) -> int:
    """Items between the newest and this one that were in an earlier process, after its last checkpoint.

    Only a stream that was restored can have lost any: of other ones the service knows all that has come.
    """
    between, most = number - self.number - 1, self.most_lost
    self.most_lost = 0
    if not most:
      return 0
    if between > most:
      raise WireError(
        f'item {number} after {self.number}, where at most {most:,} can have come since'
      )
    return between

  def _check_items(self, details: np.ndarray, parts: np.ndarray, refs: np.ndarray) -> None:
    if len(details) > replay_messages.MESSAGE_ITEMS:
      raise WireError(f'{len(details)} items in a message, at most {replay_messages.MESSAGE_ITEMS}')
    if len(refs) > replay_messages.MESSAGE_CHUNKS:
      raise WireError(f'{len(refs)} references to chunks, at most {replay_messages.MESSAGE_CHUNKS}')
    if int(parts['chunks'].sum()) != len(refs):
      raise WireError(f'{len(refs)} chunks for parts of {int(parts["chunks"].sum())}')
    if len(details) and (int(details['table'].max()) >= len(self.tables)
                      or int(details['signature'].max()) >= len(self.signatures)):  # fmt: skip
      raise WireError('an item of a table or signature that was not declared')
    if len(details) and (details['key'] == 0).any():
      raise WireError('an item without a key')
    needed = sum(len(self.signatures[s].leaves) for s in details['signature'].tolist())
    if needed != len(parts):
      raise WireError(f'{len(parts)} parts, expected {needed}')

  def _part(self, leaf: Leaf, details: list[int], numbers: Iterator[int]) -> Part:
    count, offset, rows = details
    try:
      chunks = tuple([self.pieces[next(numbers)] for _ in range(count)])
    except KeyError as e:
      raise WireError(f'a part over chunk {e}, which there is not') from None
    replay_messages.check_part(leaf, chunks, offset, rows)
    return chunks, offset, rows
