"""Writer of a stream of steps, which makes items of its slices.

writer = Writer(store, history=5)
writer.append({'observation': o, 'action': a})           # for each step, then
writer.create_item(table, priority=1.0, num_steps=5)      # all columns' newest 5, or
h = writer.history
writer.create_item(table, 1.0, {'o': h['observation'][-5:], 'a': h['action'][-1]})
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from podrace.tables.blocking import Cancelled, InFlight, RateLimited, Wait, deadline_of
from podrace.tables.chunks import ChunkStore
from podrace.tables.history import History
from podrace.tables.items import END_OF_KEYS, NEW, Item
from podrace.tables.table import Table


class Writer:
  """Writer of steps, from which it makes items. A store may have any number of writers.

  Each writer is for one thread at a time.

  Example:
    with Writer(store, history=5) as writer:
      for _ in range(5):
        writer.append({'observation': np.zeros(3, np.float32), 'action': np.int32(0)})
      writer.create_item(table, priority=1.0, num_steps=5)

  Args:
    store: Store of the chunks. Items can go to any of its tables.
    history: Number of the newest rows of each column that items can use.
    rows_per_chunk: Chunk length of every column. Default: about a quarter of a megabyte, at most
      256 rows. Sampling unpacks whole chunks, so choose a length that divides the period of
      overlapping sequences.
    max_in_flight: Number of items that may wait for limiters before `create_item` waits.

  Owner: the caller, by `close` or a `with` block.
  Ends when: `close` is called. Items stay in their tables.
  Raises: Closed from a later call, if a table drops a waiting item of this writer.
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
    self._store, self._max_in_flight = store, max_in_flight
    self._history = History(store, history, rows_per_chunk)
    self._in_flight = InFlight(store.lock)
    self._closed = False

  def append(self, step: Any) -> None:
    """Write one step, nested as the first one.

    A part that is None or missing from a dict is left out. Each column counts its own rows, so a
    column that was left out is shorter.

    Raises:
      ValueError: If the nesting, or the shape or dtype of an array, differs from the first step.
    """
    self._check_open()
    self._history.append(step)

  def extend(self, steps: Any) -> None:
    """Write many steps, such as an unroll. Equal to `append` for each step, and faster.

    Args:
      steps: Arrays [n, ...], nested as a step. n may differ between columns, as each column counts
        its own rows. A list is nesting, as in a step.

    Raises:
      ValueError: As `append`. Nothing has been written then.
    """
    self._check_open()
    self._history.extend(steps)

  @property
  def history(self) -> Any:
    """Columns, nested as the steps. Index them for slices to pass to `create_item`. Read-only."""
    if self._history.structure is None:
      raise ValueError('nothing has been appended yet')
    return self._history.nested

  @property
  def in_flight(self) -> int:
    """Number of items that wait for a limiter."""
    return len(self._in_flight.waiting)

  @property
  def bytes(self) -> int:
    """Stored size of the chunks that are being filled or that items may still use."""
    return self._history.bytes

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
    """Make an item, insert it as soon as the table's limiter permits, and return its key.

    Args:
      table: Table on the writer's store.
      priority: Priority, at least 0.
      trajectory: Slices of `history`, nested as the samples will be. Exclusive with `num_steps`.
      num_steps: Number of the newest rows of every column to use.
      key: Key above 0 and below 2^62. An item with this key is replaced. Default: a new key.
      timeout: Seconds to wait if `max_in_flight` items are waiting already.

    Returns:
      The item's key.

    Raises:
      ValueError: If slices are outside of the history, the item doesn't match the table's items, or
        the writer is closed.
      RateLimited: If the wait exceeds `timeout`. The item is not made then.
      Cancelled: If the call was waiting when a table's `cancel` was called. The item is not made.
      Closed: If the table is closed, or a table dropped earlier items of this writer when it was
        closed. The item is not made.
    """
    priority = table.check_priority(priority)
    return self._make(table, key, priority, trajectory, num_steps, timeout)

  def amend_item(
    self, table: Table, key: int, trajectory: Any, *, timeout: float | None = None
  ) -> None:
    """Replace rows of an item if it is still in the table. Otherwise do nothing.

    The item keeps its priority, its place in the order and its times sampled. For the limiter this
    is no insert.

    Args:
      table: Table on the writer's store.
      key: Key of the item.
      trajectory: Dict of slices of `history`, by column of the item. The remaining columns stay.
      timeout: As in `create_item`.

    Raises:
      ValueError: For columns that the table's items do not have, and as `create_item`.
      RateLimited: As `create_item`.
      Cancelled: As `create_item`.
      Closed: As `create_item`.
    """
    self._make(table, key, 0.0, trajectory, None, timeout, amends=True)

  def _make(
    self,
    table: Table,
    key: int | None,
    priority: float,
    trajectory: Any,
    num_steps: int | None,
    timeout: float | None,
    amends: bool = False,
  ) -> int:
    """Submit an item to its table, and return its key. Wait for it if max_in_flight is 0."""
    if not table.takes_from(self._store):
      raise ValueError(f'table {table.name!r} is on another store than the writer')
    if key is not None and not 1 <= (key := operator.index(key)) < END_OF_KEYS:
      raise ValueError(f'{key=} must be above 0 and below 2^62')
    self._check_open()
    signature, parts = self._history.parts(trajectory, num_steps)
    deadline = deadline_of(timeout)
    self._wait(max(0, self._max_in_flight - 1), deadline)
    item = Item(key or NEW, priority, signature, parts, amends=amends)
    cancels = self._in_flight.cancels  # read before the item can wait and be cancelled
    pending = table.submit(item, self._in_flight)
    if pending is not None and self._max_in_flight == 0:
      try:
        self._wait(0, deadline, cancels)
      except BaseException as e:
        # If the item was inserted in the meantime, a timeout or cancellation is ignored.
        if pending.table.withdraw(pending) or not isinstance(e, RateLimited | Cancelled):
          raise
    return item.key

  def read(self, trajectory: Any) -> Any:
    """Read slices of the history, nested as they are, as [L, ...] arrays as in samples."""
    return self.reader(trajectory)()

  def reader(self, trajectory: Any) -> Callable[[], Any]:
    """Return a function that reads slices of the present history, later and in any thread."""
    self._check_open()
    return self._history.reader(trajectory)

  def flush(self, max_in_flight: int = 0, timeout: float | None = None) -> None:
    """Wait until at most `max_in_flight` items are still waiting for their tables' limiters.

    Raises:
      RateLimited: If the wait exceeds `timeout` seconds. No item is lost.
      Cancelled: If the call was waiting when a table's `cancel` was called. No item is lost.
      Closed: Once for each table that dropped items when it was closed. Items of the remaining
        tables still wait.
    """
    self._wait(max_in_flight, deadline_of(timeout))

  def _wait(self, most: int, deadline: float, cancels: int | None = None) -> None:
    """Wait until at most `most` items are waiting. Reports and errors describe the oldest one."""
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
    """Raise the oldest error of an item that a table refused after `create_item` returned."""
    if self._in_flight.refusals:
      raise self._in_flight.refusals.pop(0)

  def end_episode(self, timeout: float | None = None) -> None:
    """Flush the items and begin a new episode with an empty history."""
    self.flush(0, timeout)
    self._history.begin_episode()

  def close(self, timeout: float | None = None) -> None:
    """Flush the items and drop the history. Items stay in their tables.

    Raises:
      RateLimited: As `flush`. The history is dropped nevertheless, as for the next two errors.
      Cancelled: As `flush`.
      Closed: As `flush`.
    """
    if self._closed:
      return
    try:
      self.flush(0, timeout)
    finally:
      self._let_go()

  def _let_go(self) -> None:
    self._closed = True
    self._history.close()

  def _check_open(self) -> None:
    if self._closed:
      raise ValueError('the writer is closed')

  def __enter__(self) -> Writer:
    return self

  def __exit__(self, kind: object, *rest: object) -> None:
    """Close the writer. If an exception is propagating, skip the flush."""
    if kind is None:
      self.close()
    elif not self._closed:
      self._let_go()
