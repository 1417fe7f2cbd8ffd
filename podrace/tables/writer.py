"""Writes a stream of steps once, and makes items of its slices.

writer = Writer(store, history=5)
writer.append({'observation': o, 'action': a})           # and so on, then
writer.create_item(table, priority=1.0, num_steps=5)      # all columns' newest 5, or
h = writer.history
writer.create_item(table, 1.0, {'o': h['observation'][-5:], 'a': h['action'][-1]})
"""

from __future__ import annotations

import operator
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
from podrace.tables.items import NEW, Item, Leaf, Signature
from podrace.tables.table import Table
from podrace.tables.waiting import Cancelled, InFlight, RateLimited, Wait, deadline_of

TRY_AGAIN = 64  # chunks after which a column asks anew whether differences are smaller


class Slice:
  """Rows [start, stop) of a column, counted from the column's first; no time axis if `single`."""

  __slots__ = ('column', 'single', 'start', 'stop')

  def __init__(self, column: Column, start: int, stop: int, single: bool) -> None:
    self.column, self.start, self.stop, self.single = column, start, stop, single


class Column:
  """One leaf of the steps: the chunk that is being filled, and those that items may still use."""

  def __init__(
    self, store: ChunkStore, name: str, like: np.ndarray, history: int, rows: int | None
  ) -> None:
    if like.dtype.kind not in 'biufc':
      raise ValueError(f'column {name}: {like.dtype} is none of bool, integer, float and complex')
    self.name, self.dtype, self.shape = name, like.dtype, like.shape
    self.length = rows or max(1, min(ROWS_PER_CHUNK, BYTES_PER_CHUNK // max(1, like.nbytes)))
    self.end = 0  # rows written, ever
    self.begin = 0  # the first row of this episode
    self.account = Account()
    self._store, self._history = store, history
    self._chunks: deque[Chunk] = deque()
    self._first = 0  # number of the oldest chunk in _chunks
    self._newest: tuple[Chunk, ...] = ()  # the newest one, as all items within it have it
    self._open: np.ndarray | None = None
    self._at = 0  # row in _open
    self._differences, self._sealed = False, 0

  def __len__(self) -> int:
    """Rows of this episode that can be used."""
    return min(self.end - self.begin, self._history)

  def __getitem__(self, index: int | slice) -> Slice:
    """Rows by place in what can be used of this episode, as of a list; negative is from the end."""
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
    """A row as this column keeps them, or an array of rows [n, ...] if `many`; refuses what is neither."""
    row = np.asarray(x)
    if not isinstance(x, np.ndarray | np.generic) and np.can_cast(
      row.dtype, self.dtype, 'same_kind'
    ):
      given, row = row, row.astype(self.dtype)  # a Python number has no type of its own
      if given.dtype.kind in 'iu' and self.dtype.kind in 'iu' and (given != row).any():
        raise ValueError(f'column {self.name}: {x!r:.100} is not within the range of {self.dtype}')
    expected = (*row.shape[:1], *self.shape) if many and row.ndim else self.shape
    if row.dtype != self.dtype or row.shape != expected or (many and not row.ndim):
      axes = ', '.join(['n'] * many + [str(n) for n in self.shape])
      raise ValueError(
        f'column {self.name}: expected {self.dtype}[{axes}], got {row.dtype}{list(row.shape)}'
      )
    return row

  def append(self, row: np.ndarray) -> None:
    """A copy of a row that has been checked."""
    if self._open is None:
      self._start_chunk()
    at = self._at
    self._open[at] = row  # type: ignore[index]
    self._at = at = at + 1
    self._chunks[-1].length = at
    self.end += 1
    if at == self.length:
      self.seal()

  def extend(self, rows: np.ndarray) -> None:
    """Copies of rows [n, ...] that have been checked."""
    while len(rows):
      if self._open is None:
        self._start_chunk()
      room = self.length - self._at
      some, rows = rows[:room], rows[room:]
      at = self._at + len(some)
      self._open[self._at : at] = some  # type: ignore[index]
      self._at = self._chunks[-1].length = at
      self.end += len(some)
      if at == self.length:
        self.seal()

  def part(self, start: int, stop: int) -> Part:
    """Where rows are."""
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
      newest = last == len(self._chunks) - 1
      return self._newest if newest else (self._chunks[first],), offset, stop - start
    return tuple(self._chunks[i] for i in range(first, last + 1)), offset, stop - start

  def _start_chunk(self) -> None:
    store = self._store
    self._open, self._at = np.empty((self.length, *self.shape), self.dtype), 0
    chunk = store.chunk(self._open, 0)
    self._newest = (chunk,)
    with store.lock:
      store.hold(chunk, self.account)
      self._chunks.append(chunk)
      while (self._first + 1) * self.length <= self.end + 1 - self._history:  # with this row
        store.drop(self._chunks.popleft(), self.account)
        self._first += 1

  def seal(self) -> None:
    """Packs the chunk that is being filled."""
    if self._open is None:
      return
    if self._sealed % TRY_AGAIN == 0:
      self._differences = differences_help(self._open[: self._at])
    self._sealed += 1
    self._open = None
    self._store.seal(self._chunks[-1], self._differences)

  def close(self) -> None:
    """Lets go of all chunks; nothing may be appended any more."""
    self.seal()
    self._newest = ()
    with self._store.lock:
      while self._chunks:
        self._store.drop(self._chunks.popleft(), self.account)


class Writer:
  """Steps in, items out. For one thread at a time; as many writers as you like.

  Args:
    store: where the chunks go; items may be made for any of its tables.
    history: how many of the newest rows of each column items may be made of.
    rows_per_chunk: of every column. By default chunks of about a quarter of a megabyte and at most 256
      rows. What is sampled is unpacked by whole chunks: divide overlapping sequences' period
      by it without rest.
    max_in_flight: items that may wait for their tables' limiters before `create_item` does.
  """

  def __init__(
    self,
    store: ChunkStore,
    history: int,
    rows_per_chunk: int | None = None,
    max_in_flight: int = 16,
  ) -> None:
    for name, value, least in (
      ('history', history, 1),
      ('rows_per_chunk', 1 if rows_per_chunk is None else rows_per_chunk, 1),
      ('max_in_flight', max_in_flight, 0),
    ):
      if value < least:
        raise ValueError(f'{name}={value} must be at least {least}')
    self._store, self._history = store, history
    self._rows_per_chunk, self._max_in_flight = rows_per_chunk, max_in_flight
    self._structure: tuple[Any, ...] | None = None
    self._flat: tuple[str, ...] | None = None  # names, if a step is a dict of arrays
    self._columns: list[Column] = []
    self._history_view: Any = None  # the columns, nested as the steps
    self._signatures: dict[Any, Signature] = {}
    self._in_flight = InFlight(store.lock)
    self._closed = False

  def append(self, step: Any) -> None:
    """Writes one step, nested as the first one; what is None or lacks in a dict is left out.

    Each column counts its own rows, so a column that was left out is shorter.

    Raises:
      ValueError: if it is nested otherwise, or an array has another shape or dtype.
    """
    if self._structure is None:
      self._begin(step)
    if self._closed:
      raise ValueError('the writer is closed')
    values: list[Any]
    if type(step) is dict and tuple(step) == self._flat:
      values = list(step.values())
    else:
      values = []
      trees.match(self._structure, step, values)  # type: ignore[arg-type]
    for i, column in enumerate(self._columns):
      x = values[i]
      if type(x) is not np.ndarray or x.dtype is not column.dtype or x.shape != column.shape:
        values[i] = None if x is None else column.check(x)
    for i, column in enumerate(self._columns):  # all or none
      if values[i] is not None:
        column.append(values[i])

  def extend(self, steps: Any) -> None:
    """Writes many steps, such as an unroll: as `append` for each, and faster.

    Args:
      steps: arrays [n, ...], nested as a step; n may differ, as each column counts its own rows.

    Raises:
      ValueError: as `append`; then nothing has been written.
    """
    if self._structure is None:
      self._begin(steps, many=True)
    if self._closed:
      raise ValueError('the writer is closed')
    values: list[Any] = []
    trees.match(self._structure, steps, values)  # type: ignore[arg-type]
    pairs = [(c, x) for c, x in zip(self._columns, values, strict=True) if x is not None]
    for column, rows in [(c, c.check(x, many=True)) for c, x in pairs]:
      column.extend(rows)

  def _begin(self, step: Any, many: bool = False) -> None:
    structure = trees.structure_of(step)
    names, arrays = trees.names(structure), [np.asarray(x) for x in trees.leaves(step)]
    if any(x.dtype == object for x in arrays):
      raise ValueError('the first step must have an array in every column')
    if many:
      if any(not x.ndim for x in arrays):
        raise ValueError('many steps are arrays [n, ...], not numbers')
      arrays = [np.zeros(x.shape[1:], x.dtype) for x in arrays]
    self._columns = [
      Column(self._store, name, x, self._history, self._rows_per_chunk)
      for name, x in zip(names, arrays, strict=True)
    ]
    if structure[0] == 'dict' and all(child is trees.LEAF for child in structure[2]):
      self._flat = structure[1]
    self._structure = structure
    self._history_view = trees.build(structure, list(self._columns))

  @property
  def history(self) -> Any:
    """The columns, nested as the steps; indexed, they give slices for `create_item`. Not to be changed."""
    if self._structure is None:
      raise ValueError('nothing has been appended yet')
    return self._history_view

  @property
  def in_flight(self) -> int:
    """Items that wait for a limiter."""
    return len(self._in_flight.waiting)

  @property
  def bytes(self) -> int:
    """Of the chunks that may still be used for items, or are being filled."""
    return sum(column.account.bytes for column in self._columns)

  def create_item(
    self,
    table: Table,
    priority: float,
    trajectory: Any = None,
    *,
    num_steps: int | None = None,
    key: int | None = None,
    timeout: float | None = None,
  ) -> int:
    """Makes an item, and inserts it as soon as the table's limiter permits; returns its key.

    Args:
      table: of the writer's store.
      priority: at least 0.
      trajectory: slices of `history`, nested as samples shall be; or
      num_steps: the newest so many rows of every column.
      key: above 0, below 2^62; of an item that is to be replaced, if there is one. By default a new one.
      timeout: seconds to wait, if max_in_flight items are waiting already.

    Raises:
      ValueError: for slices outside of the history, or items unlike the table's others; if the writer is closed.
      RateLimited: if it had to wait longer than `timeout`; then the item isn't made.
      Cancelled: if it waited when a table's `cancel` was called; likewise.
      Closed: if the table is, or one that dropped earlier items of this writer as it was closed; likewise.
    """
    if not table.takes_from(self._store):
      raise ValueError(f'table {table.name!r} is on another store than the writer')
    if key is not None and (key := operator.index(key)) < 1:
      raise ValueError(f'{key=} must be above 0')
    priority = table.check_priority(priority)
    signature, parts = self._parts(trajectory, num_steps)
    deadline = deadline_of(timeout)
    self._wait(max(0, self._max_in_flight - 1), deadline)
    item = Item(key or NEW, priority, signature, parts)
    self._submit(table, item, deadline)
    return item.key

  def amend_item(
    self, table: Table, key: int, trajectory: Any, *, timeout: float | None = None
  ) -> None:
    """Replaces rows of an item, if it is still in the table; else nothing happens.

    Its priority, its place in the order and its times sampled stay. It is no insert for the limiter.

    Args:
      table: of the writer's store.
      key: of the item.
      trajectory: a dict of slices of `history`, by column of the item; other columns stay as they are.
      timeout: as of `create_item`.

    Raises:
      ValueError: for columns that the table's items do not have; and as `create_item`.
      RateLimited, Cancelled, Closed: as `create_item`.
    """
    if not table.takes_from(self._store):
      raise ValueError(f'table {table.name!r} is on another store than the writer')
    if (key := operator.index(key)) < 1:
      raise ValueError(f'{key=} must be above 0')
    signature, parts = self._parts(trajectory, None)
    deadline = deadline_of(timeout)
    self._wait(max(0, self._max_in_flight - 1), deadline)
    item = Item(key, 0.0, signature, parts, amends=True)
    self._submit(table, item, deadline)

  def _submit(self, table: Table, item: Item, deadline: float) -> None:
    """Hands an item to its table; waits for it if none may be in flight."""
    cancels = self._in_flight.cancels  # from here on it can be seen to wait, and be cancelled
    pending = table.submit(item, self._in_flight)
    if pending is not None and self._max_in_flight == 0:
      try:
        self._wait(0, deadline, cancels)
      except BaseException as e:
        # It may have been let in just now: then it is made, whatever had become of the wait.
        if pending.table.withdraw(pending) or not isinstance(e, RateLimited | Cancelled):
          raise

  def read(self, trajectory: Any) -> Any:
    """The rows of slices of the history, nested as they are; [L, ...], as samples would have them."""
    return self.reader(trajectory)()

  def reader(self, trajectory: Any) -> Callable[[], Any]:
    """What `read` gives now, read when it is called: later, in any thread."""
    signature, parts = self._parts(trajectory, None)

    def rows() -> Any:
      found = []
      for leaf, part in zip(signature.leaves, parts, strict=True):
        data = gather(self._store, [part], leaf.dtype, leaf.shape)[0][0]
        found.append(data[0] if leaf.single else data)
      return trees.build(signature.structure, found)

    return rows

  def _parts(self, trajectory: Any, num_steps: int | None) -> tuple[Signature, tuple[Part, ...]]:
    if (trajectory is None) == (num_steps is None):
      raise ValueError('create_item needs a trajectory or num_steps, and not both')
    if self._closed:
      raise ValueError('the writer is closed')
    if self._structure is None:
      raise ValueError('nothing has been appended yet')
    if num_steps is not None:
      parts = tuple([c.part(c.end - num_steps, c.end) for c in self._columns])
      signature = self._signatures.get(None)
      if signature is None:
        every = [Slice(c, 0, 1, False) for c in self._columns]
        signature = self._signatures[None] = self._signature(self._structure, every)
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
      if not any(s.column is column for column in self._columns):
        raise ValueError(f"the slice of column {s.column.name} is of another writer's history")
    leaves = tuple(
      Leaf(name, s.column.dtype, s.column.shape, s.single)
      for name, s in zip(trees.names(structure), slices, strict=True)
    )
    return self._store.same(Signature(structure, leaves))

  def flush(self, max_in_flight: int = 0, timeout: float | None = None) -> None:
    """Waits until at most `max_in_flight` items are still waiting for their tables' limiters.

    Raises:
      RateLimited: if that takes longer than `timeout` seconds; nothing is lost.
      Cancelled: if it waited when a table's `cancel` was called; likewise.
      Closed: once for each table that dropped items as it was closed; those of other tables still wait.
    """
    self._wait(max_in_flight, deadline_of(timeout))

  def _wait(self, most: int, deadline: float, cancels: int | None = None) -> None:
    """Until at most so many items wait, whichever they are; the oldest one says why it does."""
    flight = self._in_flight
    if len(flight.waiting) > most:
      wait = Wait(deadline, lambda: flight.cancels, cancels)
      while len(flight.waiting) > most:
        self._raise_refusal()
        with self._store.lock:
          oldest = next(iter(flight.waiting), None)
        if oldest is not None:
          oldest.table.wait_for(oldest, most, wait)
    self._raise_refusal()

  def _raise_refusal(self) -> None:
    """Of an item that was made earlier, and of which its table could not say so at once."""
    if self._in_flight.refusals:
      raise self._in_flight.refusals.pop(0)

  def end_episode(self, timeout: float | None = None) -> None:
    """Flushes; what is appended from now on is another episode, and the history begins anew."""
    self.flush(0, timeout)
    for column in self._columns:
      column.begin = column.end

  def close(self, timeout: float | None = None) -> None:
    """Flushes and lets go of the history; items stay in their tables."""
    if self._closed:
      return
    try:
      self.flush(0, timeout)
    finally:
      self._let_go()

  def _let_go(self) -> None:
    self._closed = True
    for column in self._columns:
      column.close()

  def __enter__(self) -> Writer:
    return self

  def __exit__(self, kind: object, *rest: object) -> None:
    """Closes; without waiting for anything if an exception is on its way."""
    if kind is None:
      self.close()
    elif not self._closed:
      self._let_go()
