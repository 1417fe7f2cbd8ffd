"""What a table has: items, what they have in common, and what is sampled of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from podrace.tables import trees
from podrace.tables.chunks import Chunk, ChunkStore, Part, gather

NEW = 0  # the key of an item that shall be given one
END_OF_KEYS = 2**62  # further ones are counted from the largest, and all are int64


class Leaf(NamedTuple):
  """What one column of an item is."""

  name: str
  dtype: np.dtype
  shape: tuple[int, ...]  # of one row
  single: bool  # one row without a time axis

  def __str__(self) -> str:
    return f'{self.name}: {self.dtype}{list(self.shape)}{"" if self.single else " over time"}'


class Signature(NamedTuple):
  """What all items of a table have in common; their columns may differ in length."""

  structure: tuple[Any, ...]
  leaves: tuple[Leaf, ...]


class Item:
  """Rows of some columns, under a key."""

  __slots__ = ('__weakref__', 'amends', 'key', 'parts', 'priority', 'signature')

  def __init__(
    self,
    key: int,
    priority: float,
    signature: Signature,
    parts: tuple[Part, ...],
    amends: bool = False,
  ) -> None:
    self.key = key
    self.priority = priority  # when it was made
    self.signature = signature
    self.parts = parts  # one for each leaf
    self.amends = amends  # they take the place of those of the item of this key, if it is there


class Samples(NamedTuple):
  """n items, and what their table knew about each when it was sampled."""

  data: Any  # [n, L, ...] as the items are nested; L is the longest of a column, then zeros
  lengths: Any  # [n] i64 how many rows are real, nested likewise
  key: np.ndarray  # [n] i64
  probability: np.ndarray  # [n] f64
  table_size: np.ndarray  # [n] i64
  priority: np.ndarray  # [n] f64
  times_sampled: np.ndarray  # [n] i64, this time included unless it was a peek


@dataclasses.dataclass(frozen=True)
class TableInfo:
  """How a table does; `seconds` are a partition of the time since it was made."""

  name: str
  size: int
  max_size: int
  bytes: int  # of the chunks that its items need, as they are kept
  max_bytes: int | None
  chunks: int
  inserts: int
  samples: int
  deletes: int
  updates: int  # priorities changed by key
  waiting_inserts: int  # items that the limiter holds back
  waiting_samplers: int
  limiter: str
  seconds: dict[str, float]


class Draws(NamedTuple):
  """What was drawn under the lock, before any data is read."""

  items: list[Item]
  columns: list[tuple[np.ndarray, ...]]  # probability, table_size, priority, times_sampled

  def read(self, store: ChunkStore, structure: tuple[Any, ...]) -> Samples:
    """The rows of all items, nested like `structure`; without the lock, as it unpacks chunks."""
    leaves = self.items[0].signature.leaves
    columns = zip(*(item.parts for item in self.items), strict=True)
    data, lengths = [], []
    for leaf, parts in zip(leaves, columns, strict=True):
      rows, counts = gather(store, parts, leaf.dtype, leaf.shape)
      data.append(rows[:, 0] if leaf.single else rows)
      lengths.append(counts)
    probability, size, priority, times = map(np.concatenate, zip(*self.columns, strict=True))
    return Samples(
      data=trees.build(structure, data),
      lengths=trees.build(structure, lengths),
      key=np.array([item.key for item in self.items], np.int64),
      probability=probability,
      table_size=size,
      priority=priority,
      times_sampled=times,
    )


def held(items: Sequence[Item | None]) -> dict[int, Chunk]:
  """The chunks that items need, by key, in the order of first need."""
  return {c.key: c for item in items if item is not None for part in item.parts for c in part[0]}
