"""Recent steps of a stream, in columns of chunks, and slices of their rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from podrace.tables import trees
from podrace.tables.chunks import (
  BYTES_PER_CHUNK,
  ROWS_PER_CHUNK,
  Account,
  Chunk,
  ChunkStore,
  Part,
  differences_help,
  gather,
)
from podrace.tables.items import Leaf, Signature

KINDS = 'biufc'  # of the dtypes that a column holds: bool, integer, float and complex
TRY_AGAIN = 64  # chunks after which a column tests again whether differences are smaller


class Slice:
  """Rows [start, stop) of a column, counted from its first row. No time axis if `single`."""

  __slots__ = ('column', 'single', 'start', 'stop')

  def __init__(self, column: Column, start: int, stop: int, single: bool) -> None:
    self.column, self.start, self.stop, self.single = column, start, stop, single


class Column:
  """One leaf of the steps: the chunk being filled, and earlier chunks that items may still use."""

  def __init__(
    self, store: ChunkStore, name: str, like: np.ndarray, history: int, rows: int | None
  ) -> None:
    if like.dtype.kind not in KINDS:
      raise ValueError(f'column {name}: {like.dtype} is none of bool, integer, float and complex')
    self.name, self.dtype, self.shape = name, like.dtype, like.shape
    self.length = rows or max(1, min(ROWS_PER_CHUNK, BYTES_PER_CHUNK // max(1, like.nbytes)))
    self.end = 0  # rows written in total
    self.begin = 0  # first row of this episode
    self.account = Account()
    self._store, self._history = store, history
    self.chunks: deque[Chunk] = deque()
    self._first = 0  # number of the oldest chunk in chunks
    self._newest: tuple[Chunk, ...] = ()  # the newest chunk; items within it share this tuple
    self._open: np.ndarray | None = None
    self._at = 0  # row in _open
    self._differences, self._sealed = False, 0

  def __len__(self) -> int:
    """Return the number of usable rows of this episode."""
    return min(self.end - self.begin, self._history)

  def __getitem__(self, index: int | slice) -> Slice:
    """Return a slice of this episode's usable rows, indexed as a list.

    Raises:
      IndexError: If the index is out of range, or selects no contiguous rows.
    """
    end = self.end
    n = min(end - self.begin, self._history)
    if isinstance(index, slice):
      start, stop, step = index.indices(n)
      if step != 1 or stop <= start:
        raise IndexError(f'column {self.name}: {index} of {n} rows selects no run of rows')
      return Slice(self, end - n + start, end - n + stop, False)
    if not -n <= index < n:
      raise IndexError(f'column {self.name}: row {index} of {n}')
    row = end + index if index < 0 else end - n + index
    return Slice(self, row, row + 1, True)

  def check(self, x: Any, many: bool = False) -> np.ndarray:
    """Convert a row, or rows [n, ...] if `many`, to an array of this column's dtype and shape.

    Raises:
      ValueError: If the dtype or shape differs, or a number is out of the dtype's range.
    """
    row = np.asarray(x)
    if not isinstance(x, np.ndarray | np.generic) and np.can_cast(
      row.dtype, self.dtype, 'same_kind'
    ):
      given, row = row, row.astype(self.dtype)  # a Python number has no dtype
      if given.dtype.kind in 'iu' and self.dtype.kind in 'iu' and (given != row).any():
        raise ValueError(f'column {self.name}: {x!r:.100} is not within the range of {self.dtype}')
    if (
      row.dtype != self.dtype
      or row.ndim != many + len(self.shape)
      or row.shape[many:] != self.shape
    ):
      axes = ', '.join(['n'] * many + [str(n) for n in self.shape])
      raise ValueError(
        f'column {self.name}: expected {self.dtype}[{axes}], got {row.dtype}{list(row.shape)}'
      )
    return row

  def append(self, row: np.ndarray) -> None:
    """Copy a checked row into the column."""
    if self._open is None:
      self._start_chunk()
    at = self._at
    self._open[at] = row  # type: ignore[index]
    self._at = at = at + 1
    self.chunks[-1].length = at
    self.end += 1
    if at == self.length:
      self.seal()

  def extend(self, rows: np.ndarray) -> None:
    """Copy checked rows [n, ...] into the column."""
    while len(rows):
      if self._open is None:
        self._start_chunk()
      room = self.length - self._at
      some, rows = rows[:room], rows[room:]
      at = self._at + len(some)
      self._open[self._at : at] = some  # type: ignore[index]
      self._at = self.chunks[-1].length = at
      self.end += len(some)
      if at == self.length:
        self.seal()

  def part(self, start: int, stop: int) -> Part:
    """Locate rows [start, stop) in the chunks.

    Raises:
      ValueError: If the rows are not within this episode's history.
    """
    oldest = max(self.begin, self.end - self._history)
    if not oldest <= start < stop <= self.end:
      raise ValueError(
        f'column {self.name}: rows {start} to {stop} are not within {oldest} to {self.end}, '
        'the history of this episode'
      )
    first, offset = divmod(start, self.length)
    last = (stop - 1) // self.length - self._first
    first -= self._first
    if first == last:
      newest = last == len(self.chunks) - 1
      return self._newest if newest else (self.chunks[first],), offset, stop - start
    return tuple(self.chunks[i] for i in range(first, last + 1)), offset, stop - start

  def _start_chunk(self) -> None:
    store = self._store
    self._open, self._at = np.empty((self.length, *self.shape), self.dtype), 0
    chunk = store.chunk(self._open, 0)
    self._newest = (chunk,)
    with store.lock:
      store.hold(chunk, self.account)
      self.chunks.append(chunk)
      while (self._first + 1) * self.length <= self.end + 1 - self._history:  # counts the next row
        store.drop(self.chunks.popleft(), self.account)
        self._first += 1

  def seal(self) -> None:
    """Pack the chunk that is being filled."""
    if self._open is None:
      return
    if self._sealed % TRY_AGAIN == 0:
      self._differences = differences_help(self._open[: self._at])
    self._sealed += 1
    self._open = None
    self._store.seal(self.chunks[-1], self._differences)

  def close(self) -> None:
    """Drop all chunks. The column then accepts no more rows."""
    self.seal()
    self._newest = ()
    with self._store.lock:
      while self.chunks:
        self._store.drop(self.chunks.popleft(), self.account)


class History:
  """Columns of a stream of steps, with the nesting of the steps.

  Args:
    store: Store of the chunks.
    length: Number of the newest rows of each column that items can use.
    rows_per_chunk: As in `Writer`.
  """

  def __init__(self, store: ChunkStore, length: int, rows_per_chunk: int | None) -> None:
    self._store, self._length, self._rows_per_chunk = store, length, rows_per_chunk
    self.structure: tuple[Any, ...] | None = None  # of a step; None before the first
    self.columns: list[Column] = []
    self.nested: Any = None  # the columns, nested as the steps
    self._flat: tuple[str, ...] | None = None  # names, if a step is a flat dict
    self._signatures: dict[Any, Signature] = {}

  def append(self, step: Any) -> None:
    """Append one step, as `Writer.append`."""
    if self.structure is None:
      self._begin(step)
    values: list[Any]
    if type(step) is dict and tuple(step) == self._flat:
      values = list(step.values())
    else:
      values = []
      trees.match(self.structure, step, values)  # type: ignore[arg-type]
    for i, column in enumerate(self.columns):
      x = values[i]
      if type(x) is not np.ndarray or x.dtype is not column.dtype or x.shape != column.shape:
        values[i] = None if x is None else column.check(x)
    for i, column in enumerate(self.columns):  # after all checks: all columns or none
      if values[i] is not None:
        column.append(values[i])

  def extend(self, steps: Any) -> None:
    """Append many steps, as `Writer.extend`."""
    if self.structure is None:
      self._begin(steps, many=True)
    values: list[Any] = []
    trees.match(self.structure, steps, values)  # type: ignore[arg-type]
    checked = [
      (column, column.check(x, many=True))
      for column, x in zip(self.columns, values, strict=True)
      if x is not None
    ]
    for column, rows in checked:
      column.extend(rows)

  def _begin(self, step: Any, many: bool = False) -> None:
    leaves: list[Any] = []
    structure = trees.flatten(step, leaves)
    names, arrays = trees.names(structure), list(map(np.asarray, leaves))
    if any(x.dtype == object for x in arrays):
      raise ValueError('the first step must have an array in every column')
    if many:
      if any(not x.ndim for x in arrays):
        raise ValueError('many steps are arrays [n, ...], not numbers')
      arrays = [np.zeros(x.shape[1:], x.dtype) for x in arrays]
    self.columns = [
      Column(self._store, name, x, self._length, self._rows_per_chunk)
      for name, x in zip(names, arrays, strict=True)
    ]
    if structure[0] == 'dict' and all(child is trees.LEAF for child in structure[2]):
      self._flat = structure[1]
    self.structure = structure
    self.nested = trees.build(structure, list(self.columns))

  @property
  def bytes(self) -> int:
    """Stored size of the chunks that are being filled or that items may still use."""
    return sum(column.account.bytes for column in self.columns)

  def parts(self, trajectory: Any, num_steps: int | None) -> tuple[Signature, tuple[Part, ...]]:
    """Locate an item's rows: nested slices, or the newest `num_steps` rows of every column.

    Returns:
      The item's signature, and one part for each leaf.

    Raises:
      ValueError: If not exactly one of the arguments is set, or rows are outside the history.
    """
    if (trajectory is None) == (num_steps is None):
      raise ValueError('create_item needs a trajectory or num_steps, and not both')
    if self.structure is None:
      raise ValueError('nothing has been appended yet')
    if num_steps is not None:
      parts = tuple([c.part(c.end - num_steps, c.end) for c in self.columns])
      signature = self._signatures.get(None)
      if signature is None:
        every = [Slice(c, 0, 1, False) for c in self.columns]
        signature = self._signatures[None] = self._signature(self.structure, every)
      return signature, parts
    slices: list[Slice] = []
    known: list[Any] = [trees.flatten(trajectory, slices)]
    found: list[Part] = []
    for s in slices:
      if type(s) is not Slice:
        raise ValueError(f"expected slices of this writer's history, got {trajectory!r}")
      known += id(s.column), s.single
      found.append(s.column.part(s.start, s.stop))
    signature = self._signatures.get(tuple(known))
    if signature is None:
      signature = self._signatures[tuple(known)] = self._signature(known[0], slices)
    return signature, tuple(found)

  def _signature(self, structure: tuple[Any, ...], slices: list[Slice]) -> Signature:
    for s in slices:
      if not any(s.column is column for column in self.columns):
        raise ValueError(f"the slice of column {s.column.name} is of another writer's history")
    leaves = tuple(
      Leaf(name, s.column.dtype, s.column.shape, s.single)
      for name, s in zip(trees.names(structure), slices, strict=True)
    )
    return self._store.same(Signature(structure, leaves))

  def reader(self, trajectory: Any) -> Callable[[], Any]:
    """Return a function that reads slices, as `Writer.reader`."""
    signature, parts = self.parts(trajectory, None)

    def rows() -> Any:
      found = []
      for leaf, part in zip(signature.leaves, parts, strict=True):
        data = gather(self._store, [part], leaf.dtype, leaf.shape)[0][0]
        found.append(data[0] if leaf.single else data)
      return trees.build(signature.structure, found)

    return rows

  def begin_episode(self) -> None:
    """Begin an episode. Earlier rows can no longer be used."""
    for column in self.columns:
      column.begin = column.end

  def close(self) -> None:
    """Drop all chunks. The history then accepts no more steps."""
    for column in self.columns:
      column.close()
