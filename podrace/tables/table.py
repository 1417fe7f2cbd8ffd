"""A table: items over shared chunks, what to sample and to remove next, and how fast.

The semantics are Reverb's (Cassirer et al. 2021, arXiv 2102.04736); docs/tables.md has its names
next to ours. Everything here may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from podrace.tables.blocking import (
  REPORT_AFTER,
  Closed,
  Desk,
  InFlight,
  Pending,
  Wait,
  log,
)
from podrace.tables.chunks import ChunkStore
from podrace.tables.contents import Contents
from podrace.tables.inserts import Inserts
from podrace.tables.items import Item, Samples, TableInfo
from podrace.tables.limiters import RateLimiter
from podrace.tables.reads import Reads
from podrace.tables.selectors import Selector


class Table:
  """Items of one kind, sampled and removed by its selectors; on a store that it may share.

  Args:
    name: within the store.
    store: where its items' chunks are.
    sampler: which item is sampled next.
    remover: which item goes when there are too many; the newest is in the choice.
    rate_limiter: when sampling and inserting have to wait.
    max_size: items.
    max_bytes: what the items' chunks may take, as they are kept; None for no bound.
    max_times_sampled: items are removed after so many samples; 0 for no bound.
    seed: for the selectors. Equal calls in equal order give equal samples.
    report_after: seconds after which a call that still waits is reported, and again at
      intervals that double.
    report: is given what waits and why; by default a warning of the logger podrace.tables.
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
    """Whether items over chunks of this store can be inserted."""
    return store is self.store

  def check_priority(self, priority: float) -> float:
    """A priority that the selectors can bear; raises ValueError for any other."""
    return self.contents.check_priority(priority)

  def submit(self, item: Item, writer: InFlight) -> Pending | None:
    """Inserts an item, as Inserts.submit."""
    return self.inserts.submit(item, writer)

  def wait_for(self, pending: Pending, most: int, wait: Wait) -> None:
    """Waits for an item that `submit` left waiting, as Inserts.wait_for."""
    self.inserts.wait_for(pending, most, wait)

  # --- sampling ---------------------------------------------------------------------------------

  def sample(
    self, n: int, at_least: int | None = None, timeout: float | None = None, peek: bool = False
  ) -> Samples:
    """n items, drawn one after the other with replacement, as the limiter permits.

    Args:
      n: how many, at most.
      at_least: with how many to be content if more would mean to wait; all n by default.
      timeout: seconds; None waits for as long as the table is open.
      peek: these are no samples for the limiter, nor for the items' times sampled. It waits only while there
        is no item.

    Raises:
      RateLimited: if fewer than `at_least` could be sampled in that time.
      Cancelled: if it waited when `cancel` was called.
      Closed: if the table is.

    What it had been given until then, and counts, is in the error's `taken`.
    """
    return self.reads.sample(n, n if at_least is None else at_least, timeout, peek)

  # --- by key -----------------------------------------------------------------------------------

  def update_priorities(
    self, keys: Sequence[int] | np.ndarray, priorities: Sequence[float] | np.ndarray
  ) -> int:
    """Sets priorities [n] of keys [n]; of a key given twice, the last. How many keys were there.

    Keys that are not (any longer) in the table are passed over, as others may have removed them.

    Raises:
      ValueError: if any priority is negative, NaN or too large; then none is set.
    """
    names, values = np.asarray(keys), np.asarray(priorities, np.float64)
    if names.shape != values.shape or names.ndim != 1:
      raise ValueError(f'expected keys [n] and priorities [n], got {names.shape}, {values.shape}')
    self.contents.check_priorities(values)
    with self.desk.running:
      return self.contents.update_priorities(names, values)

  def delete(self, keys: Sequence[int] | np.ndarray) -> int:
    """Removes items by key; how many of the keys were there."""
    with self.desk.running:
      deleted = self.contents.delete(keys)
      self.inserts.admit()
      return deleted

  # --- its state --------------------------------------------------------------------------------

  def info(self) -> TableInfo:
    """How it does."""
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
    """Every call that waits now, to insert or to sample, raises Cancelled; later ones wait as ever.

    What was being waited for is as after a timeout: items of a flush still wait for the limiter, and samples
    that a call had been given are in the error's `taken`.
    """
    with self.store.lock:
      self.reads.cancel()
      self.inserts.cancel()

  def close(self) -> None:
    """Every call that waits, and every later insert and sample, raises Closed.

    Items that waited for the limiter are dropped, and the next call of each of their writers raises that
    once; those in the table stay, and can be saved.
    """
    with self.store.lock:
      self.desk.closed = True
      self.inserts.refuse_all(
        Closed(f'table {self.name!r} is closed; the items that waited for it are dropped')
      )
      self.desk.readable.notify_all()

  def snapshot(self) -> dict[str, Any]:
    """All that a checkpoint needs, copied or immutable; under the lock."""
    return dict(self.contents.snapshot(), config=self.config())

  def config(self) -> dict[str, Any]:
    """What a table must have in common with one whose checkpoint it reads."""
    limiter = self.rate_limiter
    limits = list(map(float, limiter.numbers))
    return dict(self.contents.config(), rate_limiter=limiter.name, limits=limits)

  def load(self, state: dict[str, Any]) -> None:
    """Takes over what `snapshot` gave, with items over this store's chunks; under the lock."""
    self.contents.load(state)
    self.inserts.admit()
