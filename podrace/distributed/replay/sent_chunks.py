"""Chunks on their way to a replay service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from podrace.tables.blocking import InFlight, Pending
from podrace.tables.chunks import Chunk
from podrace.tables.items import Item

if TYPE_CHECKING:
  from podrace.distributed.replay.writer_store import WriterStore
  from podrace.distributed.replay.remote_table import RemoteTable

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
