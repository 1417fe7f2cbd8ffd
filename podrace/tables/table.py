"""A table: items over shared chunks, what to sample and to remove next, and how fast.

The semantics are Reverb's (Cassirer et al. 2021, arXiv 2102.04736); docs/tables.md has its names
next to ours. Everything here may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from podrace.tables.chunks import ChunkStore
from podrace.tables.contents import Contents
from podrace.tables.inserts import Inserts
from podrace.tables.items import Draws, Item, Samples, TableInfo
from podrace.tables.limiters import RateLimiter
from podrace.tables.selectors import Selector
from podrace.tables.waiting import (
  REPORT_AFTER,
  Cancelled,
  Closed,
  Desk,
  InFlight,
  Pending,
  RateLimited,
  Wait,
  deadline_of,
  log,
)


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
    self._cancels = 0  # so many times has all waiting been cancelled
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
    least = n if at_least is None else at_least
    if not 1 <= least <= n:
      raise ValueError(f'table {self.name!r}: {at_least=} of {n=}, expected 1 <= at_least <= n')
    draws = Draws([], [])
    try:
      self._take(draws, n, least, deadline_of(timeout), peek)
    except (RateLimited, Cancelled, Closed) as e:
      if draws.items:
        e.taken = self._read(draws)
      raise
    return self._read(draws)

  def _read(self, draws: Draws) -> Samples:
    signature = self.contents.signature or draws.items[0].signature
    return draws.read(self.store, signature.structure)

  def _take(self, draws: Draws, n: int, least: int, deadline: float, peek: bool) -> None:
    with self.desk.sampling:
      wait = None
      while True:
        self._draw_now(draws, n, peek)
        if len(draws.items) >= least:
          return
        wait = wait or Wait(deadline, lambda: self._cancels)
        self.desk.wait_more(1, peek)
        try:
          why = self.why_no_peek if peek else self.why_no_sample
          wait.on(self.desk, self.desk.readable, 'sample from', why)
        finally:
          self.desk.wait_more(-1, peek)

  def draw(self, draws: Draws, n: int, peek: bool = False) -> None:
    """Draws what the limiter permits now, until `draws` has n items; never waits.

    Raises:
      Closed: if the table is.
    """
    with self.desk.sampling:
      self._draw_now(draws, n, peek)

  def _draw_now(self, draws: Draws, n: int, peek: bool) -> None:
    self.desk.check_open()
    if peek:
      if self.contents.slots:
        self.contents.peek(draws, n - len(draws.items))
      return
    while self._draw(draws, n - len(draws.items)) and self.desk.inserts:
      self.inserts.admit()  # what has come in may be sampled as well

  def _draw(self, draws: Draws, most: int) -> int:
    """Draws up to `most` items, if and as many as the limiter permits now."""
    contents, limiter = self.contents, self.rate_limiter
    if contents.max_times_sampled:
      n = 0
      while n < most and limiter.may_sample(contents.counts):
        contents.draw(draws, 1)
        n += 1
    else:
      n = limiter.samples_allowed(contents.counts, most)
      if n:
        contents.draw(draws, n)
    return n

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

  def readers(self, more: int, peek: bool = False) -> None:
    """So many more samplers wait, which use `draw`, or less."""
    with self.desk.running:
      self.desk.wait_more(more, peek)

  def cancel(self) -> None:
    """Every call that waits now, to insert or to sample, raises Cancelled; later ones wait as ever.

    What was being waited for is as after a timeout: items of a flush still wait for the limiter, and samples
    that a call had been given are in the error's `taken`.
    """
    with self.store.lock:
      self._cancels += 1
      self.desk.readable.notify_all()
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

  def why_no_peek(self) -> str:
    """Why a sampler that only peeks waits."""
    return f'there is no item; {len(self.desk.inserts)} inserts wait as well'

  def why_no_sample(self) -> str:
    """What keeps a sampler waiting."""
    contents = self.contents
    why = self.rate_limiter.why_no_sample(contents.counts)
    if contents.max_bytes is not None and contents.account.bytes > 0.9 * contents.max_bytes:
      why += f'; {contents.account.bytes} of {contents.max_bytes} bytes are used, which may be why'
    return f'{why}; {len(self.desk.inserts)} inserts wait as well'
