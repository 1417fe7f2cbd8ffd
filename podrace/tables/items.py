"""Items of a table, their signature, and samples of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from podrace.tables import trees
from podrace.tables.chunks import Chunk, ChunkStore, Part, gather

NEW = 0  # key of an item that has none yet
END_OF_KEYS = 2**62  # new keys count up from the largest, within int64


class Leaf(NamedTuple):
  """Type of one column of an item."""

  name: str
  dtype: np.dtype
  shape: tuple[int, ...]  # of one row
  single: bool  # one row without a time axis

  def __str__(self) -> str:
    return f'{self.name}: {self.dtype}{list(self.shape)}{"" if self.single else " over time"}'


class Signature(NamedTuple):
  """Structure that all items of a table share. Their columns may differ in length."""

  structure: tuple[Any, ...]
  leaves: tuple[Leaf, ...]


class Item:
  """Rows of one or more columns, under a key."""

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
    self.priority = priority  # at creation
    self.signature = signature
    self.parts = parts  # one for each leaf
    self.amends = amends  # whether `parts` replace columns of the item with this key


class Samples(NamedTuple):
  """Batch of n sampled items, with the table's statistics of each at the time of sampling."""

  data: Any  # [n, L, ...] nested as the items; zeros pad to the longest, L, of each column
  lengths: Any  # [n] i64, rows before the padding, nested as `data`
  key: np.ndarray  # [n] i64
  probability: np.ndarray  # [n] f64
  table_size: np.ndarray  # [n] i64
  priority: np.ndarray  # [n] f64
  times_sampled: np.ndarray  # [n] i64, includes this sample unless it was a peek


@dataclasses.dataclass(frozen=True)
class TableInfo:
  """Statistics of a table. `seconds` divides its lifetime among the states of its clock."""

  name: str
  size: int
  max_size: int
  bytes: int  # stored size of the items' chunks
  max_bytes: int | None
  chunks: int
  inserts: int
  samples: int
  deletes: int
  updates: int  # priorities changed by key
  waiting_inserts: int  # held back by the limiter
  waiting_samplers: int
  limiter: str
  seconds: dict[str, float]


class Draws(NamedTuple):
  """Items drawn under the lock, before their data is read."""

  items: list[Item]
  columns: list[tuple[np.ndarray, ...]]  # probability, table_size, priority, times_sampled

  def read(self, store: ChunkStore, structure: tuple[Any, ...]) -> Samples:
    """Read the rows of all items, nested like `structure`.

    Call it without the lock, because it unpacks chunks.
    """
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
  """Return the chunks of items, by chunk key, in the order of first use."""
  return {c.key: c for item in items if item is not None for part in item.parts for c in part[0]}
