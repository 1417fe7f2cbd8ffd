"""Replay table: items over shared chunks, with selectors and a rate limiter.

The semantics are Reverb's (Cassirer et al. 2021, arXiv 2102.04736). docs/tables.md maps Reverb's
names to the names here. All public functions may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from podrace.tables.blocking import REPORT_AFTER, Closed, Desk, InFlight, Pending, log
from podrace.tables.chunks import ChunkStore
from podrace.tables.contents import Contents, read_updates
from podrace.tables.inserts import Inserts
from podrace.tables.items import Item, Samples, TableInfo
from podrace.tables.limiters import RateLimiter
from podrace.tables.reads import Reads
from podrace.tables.selectors import Selector


class Table:
  """Table of items of one signature, with its own selectors. Tables may share a store.

  Example:
    store = ChunkStore()
    table = Table(
      'replay',
      store,
      sampler=uniform(),
      remover=fifo(),
      rate_limiter=min_size(1),
      max_size=1000,
    )
    with Writer(store, history=2) as writer:
      writer.append({'reward': np.float32(1.0)})
      writer.create_item(table, priority=1.0, num_steps=1)
    samples = table.sample(4)  # samples.data['reward'] is [4, 1]

  Args:
    name: Name within the store.
    store: Store of the items' chunks.
    sampler: Selector of the next item to sample.
    remover: Selector of the item to remove when a bound is exceeded. It may remove the newest.
    rate_limiter: Limiter of sampling and inserting.
    max_size: Largest number of items.
    max_bytes: Largest stored size of the items' chunks. None for no bound.
    max_times_sampled: Number of samples after which an item is removed. 0 for no bound.
    seed: Seed of the selectors. Equal calls in equal order give equal samples.
    report_after: Seconds before a waiting call is reported. The interval doubles after each report.
    report: Function that receives the report. Default: a warning of the logger podrace.tables.

  Raises:
    ValueError: If a setting is out of range or deadlocks, or the store has a table of this name.
  """

  def __init__(
    self,
    name: str,
    store: ChunkStore,
    *,
    sampler: Selector,
    remover: Selector,
    rate_limiter: RateLimiter,
    max_size: int,
    max_bytes: int | None = None,
    max_times_sampled: int = 0,
    seed: int | Sequence[int] = 0,
    report_after: float = REPORT_AFTER,
    report: Callable[[str], None] = log.warning,
  ) -> None:
    if max_size < rate_limiter.min_size:
      raise ValueError(
        f'table {name!r} deadlocks: {max_size=} and {rate_limiter.name} wants '
        f'{rate_limiter.min_size} items before any is sampled'
      )
    self.name, self.store, self.rate_limiter = name, store, rate_limiter
    self.contents = Contents(
      name, store, sampler, remover, max_size, max_bytes, max_times_sampled, seed
    )
    self.desk = Desk(name, store.lock, report_after, report)
    self.inserts = Inserts(self.contents, rate_limiter, self.desk)
    self.reads = Reads(self.contents, rate_limiter, self.desk, self.inserts)
    with store.lock:
      if name in store.tables:
        raise ValueError(f'the store has a table {name!r} already')
      store.tables[name] = self

  def __len__(self) -> int:
    return len(self.contents.slots)

  def takes_from(self, store: ChunkStore) -> bool:
    """Return whether items over chunks of `store` can be inserted."""
    return store is self.store

  def check_priority(self, priority: float) -> float:
    """Check a priority and return it as a float.

    Raises:
      ValueError: If the selectors don't accept the priority.
    """
    return self.contents.check_priority(priority)

  def submit(self, item: Item, writer: InFlight) -> Pending | None:
    """Insert an item or queue it, as Inserts.submit."""
    return self.inserts.submit(item, writer)

  # --- sampling ---------------------------------------------------------------------------------

  def sample(
    self, n: int, at_least: int | None = None, timeout: float | None = None, peek: bool = False
  ) -> Samples:
    """Sample items one after the other with replacement, as the limiter permits.

    Args:
      n: Largest number of samples.
      at_least: Number of samples to return if more would have to wait. Default: n.
      timeout: Seconds to wait. None waits for as long as the table is open.
      peek: Whether to count nothing, neither for the limiter nor for the items' times sampled. The
        call then waits only while the table is empty.

    Returns:
      Between `at_least` and `n` samples.

    Raises:
      RateLimited: If fewer than `at_least` items could be sampled within `timeout`.
      Cancelled: If the call was waiting when `cancel` was called.
      Closed: If the table is closed.

    Each of these errors has the samples drawn until then, which count as sampled, in `taken`.
    """
    return self.reads.sample(n, n if at_least is None else at_least, timeout, peek)

  # --- by key -----------------------------------------------------------------------------------

  def update_priorities(
    self, keys: Sequence[int] | np.ndarray, priorities: Sequence[float] | np.ndarray
  ) -> int:
    """Set priorities [n] of keys [n]. For a repeated key the last priority counts.

    Keys that are not in the table are skipped, because their items may have been removed.

    Returns:
      The number of keys that were present.

    Raises:
      ValueError: If any priority is negative, NaN or too large. No priority is set then.
    """
    updates = read_updates(keys, priorities, self.check_priority)
    with self.desk.running:
      return self.contents.update_priorities(*updates)

  def delete(self, keys: Sequence[int] | np.ndarray) -> int:
    """Remove items by key and return the number of keys that were present."""
    with self.desk.running:
      deleted = self.contents.delete(keys)
      self.inserts.admit()
      return deleted

  # --- its state --------------------------------------------------------------------------------

  def info(self) -> TableInfo:
    """Return the table's statistics."""
    contents, desk = self.contents, self.desk
    with desk.running:
      return TableInfo(
        name=self.name,
        size=len(contents.slots),
        max_size=contents.max_size,
        bytes=contents.account.bytes,
        max_bytes=contents.max_bytes,
        chunks=contents.account.chunks,
        inserts=contents.counts.inserts,
        samples=contents.counts.samples,
        deletes=contents.counts.deletes,
        updates=contents.updates,
        waiting_inserts=len(desk.inserts),
        waiting_samplers=desk.samplers,
        limiter=self.rate_limiter.name,
        seconds=desk.clock.split(),
      )

  def cancel(self) -> None:
    """Cancel every call that is waiting to insert or to sample. Later calls are not affected.

    A cancelled call leaves the same state as a timeout. Items of a flush still wait for the
    limiter. Drawn samples are in the error's `taken`.
    """
    with self.store.lock:
      self.reads.cancel()
      self.inserts.cancel()

  def close(self) -> None:
    """Close the table. Waiting calls, and all later inserts and samples, raise Closed.

    Items that wait for the limiter are dropped, and the next call of each of their writers raises
    Closed once. Items in the table stay and can be saved.
    """
    with self.store.lock:
      self.desk.closed = True
      self.inserts.refuse_all(
        Closed(f'table {self.name!r} is closed; the items that waited for it are dropped')
      )
      self.desk.readable.notify_all()

  def snapshot(self) -> dict[str, Any]:
    """Return the complete state for a checkpoint, copied or immutable. Requires the lock."""
    return dict(self.contents.snapshot(), config=self.config())

  def config(self) -> dict[str, Any]:
    """Return the settings that a checkpoint and its table must share."""
    limiter = self.rate_limiter
    limits = list(map(float, limiter.numbers))
    return dict(self.contents.config(), rate_limiter=limiter.name, limits=limits)

  def load(self, state: dict[str, Any]) -> None:
    """Load the state from `snapshot`, with items over this store's chunks. Requires the lock."""
    self.contents.load(state)
    self.inserts.admit()
