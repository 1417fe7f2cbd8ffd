"""Writes a stream of steps once, and makes items of its slices.

writer = Writer(store, history=5)
writer.append({'observation': o, 'action': a})           # and so on, then
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
from podrace.tables.items import NEW, Item
from podrace.tables.table import Table


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
    self._store, self._max_in_flight = store, max_in_flight
    self._history = History(store, history, rows_per_chunk)
    self._in_flight = InFlight(store.lock)
    self._closed = False

  def append(self, step: Any) -> None:
    """Writes one step, nested as the first one; what is None or lacks in a dict is left out.

    Each column counts its own rows, so a column that was left out is shorter.

    Raises:
      ValueError: if it is nested otherwise, or an array has another shape or dtype.
    """
    self._check_open()
    self._history.append(step)

  def extend(self, steps: Any) -> None:
    """Writes many steps, such as an unroll: as `append` for each, and faster.

    Args:
      steps: arrays [n, ...], nested as a step; n may differ, as each column counts its own rows. A list is nesting,
        as it is in a step.

    Raises:
      ValueError: as `append`; then nothing has been written.
    """
    self._check_open()
    self._history.extend(steps)

  @property
  def history(self) -> Any:
    """The columns, nested as the steps; indexed, they give slices for `create_item`. Not to be changed."""
    if self._history.structure is None:
      raise ValueError('nothing has been appended yet')
    return self._history.nested

  @property
  def in_flight(self) -> int:
    """Items that wait for a limiter."""
    return len(self._in_flight.waiting)

  @property
  def bytes(self) -> int:
    """Of the chunks that may still be used for items, or are being filled."""
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
    self._check_open()
    signature, parts = self._history.parts(trajectory, num_steps)
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
    self._check_open()
    signature, parts = self._history.parts(trajectory, None)
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
    self._check_open()
    return self._history.reader(trajectory)

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
    self._history.begin_episode()

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
    self._history.close()

  def _check_open(self) -> None:
    if self._closed:
      raise ValueError('the writer is closed')

  def __enter__(self) -> Writer:
    return self

  def __exit__(self, kind: object, *rest: object) -> None:
    """Closes; without waiting for anything if an exception is on its way."""
    if kind is None:
      self.close()
    elif not self._closed:
      self._let_go()
