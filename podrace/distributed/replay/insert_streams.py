"""The chunks and numbered items of each client of a replay service, over all its connections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from podrace.distributed.net.frame import WireError
from podrace.distributed.net.listener import Peer
from podrace.distributed.replay import replay_messages
from podrace.distributed.replay.served_tables import ServedTable
from podrace.tables.blocking import Pending
from podrace.tables.chunks import Account, Chunk, ChunkStore, Part
from podrace.tables.items import Item, Leaf, Signature

CHUNK_BYTES = 512  # of a chunk besides its rows, about
PART_BYTES = 128  # of a part of an item besides its rows, and of a reference to a chunk, about
REFUSED_ITEMS = 2048  # of a stream that are refused again if they are sent again


class TakenItems(NamedTuple):
  """The items of one INSERT.

  Attributes:
    done: numbers of repeated items that are in their tables; inserted ones are added.
    waiting: numbers of repeated items that wait for a limiter; new ones are added.
    groups: (table, [(number, item)]) of the new items, in their order.
    lost: how many items were lost with an earlier process.
  """

  done: list[int]
  waiting: list[int]
  groups: list[tuple[ServedTable, list[tuple[int, Item]]]]
  lost: int


class InsertStream:
  """The items of one client, over all its connections.

  Items are numbered. The numbers that have come are remembered, and saved in the checkpoint at the
  same moment as the tables. So an item that is sent again is recognized.

  Args:
    number: of the newest item that has come.
    missing: older items that are not in their tables: a restart has lost them, or they were refused
      and the client may not know.
    unheard: the items of `missing` that waited in the checkpoint. The client sends them again
      before any newer item, or it knows that they were inserted, and then they are lost.
    most_lost: items that may have come after the checkpoint from which the stream was restored; 0
      once their number is known.
  """

  def __init__(
    self,
    number: int = 0,
    missing: set[int] | None = None,
    unheard: set[int] | None = None,
    most_lost: int = 0,
  ) -> None:
    self.number = number
    self.most_lost = most_lost
    self.missing = missing or set()
    self.unheard = unheard or set()
    # The refused items of `missing`, the newest last. A list: an empty deque takes 760 bytes.
    self.refused: list[int] = []
    self.waiting: dict[int, Pending] = {}  # for a limiter, by number
    self.waiting_parts = 0  # of waiting items: rows of a column, and references to chunks
    self.account = Account()
    self.peer: Peer | None = None
    self.begin_session()

  def begin_session(self) -> None:
    """Forget the declarations and chunks of the last connection."""
    self.tables: list[ServedTable] = []
    self.specs: list[tuple[np.dtype, tuple[int, ...]]] = []
    self.signatures: list[Signature] = []
    self.declared = self.declared_bytes = 0
    self.pieces: dict[int, Chunk] = {}
    self.next_piece = 0
    self.inserted = self.refusals = 0  # items

  @property
  def kept_bytes(self) -> int:
    """Bytes of the chunks that the client's writers keep, and of its waiting items."""
    return self.account.bytes + CHUNK_BYTES * len(self.pieces) + PART_BYTES * self.waiting_parts

  def refuse(self, number: int) -> None:
    """Record a refused item: if the client did not hear it, it sends the item again."""
    self.missing.add(number)
    self.refused.append(number)
    if len(self.refused) > REFUSED_ITEMS:
      self.missing.discard(self.refused.pop(0))

  # --- chunks

  def take_chunks(self, store: ChunkStore, details: np.ndarray, data: memoryview) -> None:
    """Make new chunks and hold them until the client releases them.

    Args:
      store: of the chunks.
      details: records of CHUNK [n].
      data: their bytes one after the other.
    """
    if len(details) > replay_messages.MESSAGE_CHUNKS:
      raise WireError(
        f'{len(details)} chunks in a message, at most {replay_messages.MESSAGE_CHUNKS}'
      )
    if int(details['bytes'].astype(np.int64).sum()) != len(data):
      raise WireError(f'{len(data)} bytes of chunks, which differ from what is said of them')
    start, chunks = 0, []
    for spec, rows, how, size in details.tolist():
      if spec >= len(self.specs) or not rows:
        raise WireError(f'a chunk of {rows} rows of spec {spec}')
      packed = bytes(data[start : start + size])
      chunks.append(replay_messages.make_chunk(store, packed, how, rows, *self.specs[spec]))
      start += size
    with store.lock:
      for chunk in chunks:
        store.hold(chunk, self.account)
        self.pieces[self.next_piece] = chunk
        self.next_piece += 1

  def release(self, store: ChunkStore, numbers: np.ndarray) -> None:
    """Drop the chunks that the client no longer needs."""
    with store.lock:
      for number in numbers.tolist():
        chunk = self.pieces.pop(number, None)
        if chunk is None:
          raise WireError(f'a chunk {number} that is released, which there is not')
        store.drop(chunk, self.account)

  # --- items

  def take_items(self, details: np.ndarray, parts: np.ndarray, refs: np.ndarray) -> TakenItems:
    """Read the items of an INSERT from its records of ITEM, PART and numbers of chunks."""
    self._check_items(details, parts, refs)
    rows, numbers = iter(parts.tolist()), iter(refs.tolist())
    parts_of_items = [
      tuple([self._read_part(leaf, next(rows), numbers) for leaf in self.signatures[s].leaves])
      for s in details['signature'].tolist()
    ]
    done: list[int] = []
    waiting: list[int] = []
    groups: list[tuple[ServedTable, list[tuple[int, Item]]]] = []
    # First, as it may raise.
    newer = next((n for n in details['number'].tolist() if n > self.number), None)
    lost = 0 if newer is None else self._count_lost(newer)
    for (number, key, priority, table, s), item_parts in zip(
      details.tolist(), parts_of_items, strict=True
    ):
      if number > self.number:
        lost += len(self.unheard)
        self.number, self.unheard = number, set()
      elif number in self.missing:
        self.missing.discard(number)
        self.unheard.discard(number)
      else:  # it has come before
        (waiting if number in self.waiting else done).append(number)
        continue
      served = self.tables[table]
      if not groups or groups[-1][0] is not served:
        groups.append((served, []))
      item = Item(abs(key), priority, self.signatures[s], item_parts, amends=key < 0)
      groups[-1][1].append((number, item))
    return TakenItems(done, waiting, groups, lost)

  def _count_lost(self, number: int) -> int:
    """Count the items before `number` that an earlier process took after its last checkpoint.

    Only a restored stream can have lost any. Of any other one the service knows every item.
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

  def _read_part(self, leaf: Leaf, details: list[int], numbers: Iterator[int]) -> Part:
    count, offset, rows = details
    try:
      chunks = tuple([self.pieces[next(numbers)] for _ in range(count)])
    except KeyError as e:
      raise WireError(f'a part over chunk {e}, which there is not') from None
    replay_messages.check_part(leaf, chunks, offset, rows)
    return chunks, offset, rows
