"""A table: items over shared chunks, what to sample and to remove next, and how fast.

The semantics are Reverb's (Cassirer et al. 2021, arXiv 2102.04736); docs/tables.md has its names
beside ours. Everything here may be called from any thread.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition
from typing import Any, NamedTuple

import numpy as np

from podrace.tables import trees
from podrace.tables.chunks import Account, Chunk, ChunkStore, Lock, Part, gather
from podrace.tables.limiters import Counts, RateLimiter
from podrace.tables.selectors import Selector

log = logging.getLogger('podrace.tables')

SLEEPING, RUNNING, SAMPLING, INSERTING = 'sleeping', 'running', 'sampling', 'inserting'
NEW = 0  # the key of an item that shall be given one
END_OF_KEYS = 2**62  # further ones are counted from the largest, and all are int64
REPORT_AFTER = 10.0  # seconds after which a call that still waits is reported
WAITING_FOR_INSERTS, WAITING_FOR_SAMPLES = 'waiting_for_inserts', 'waiting_for_samples'


class Closed(Exception):
  """The table was closed, before or during the call; `taken` as of RateLimited."""

  taken: Samples | None = None


class RateLimited(TimeoutError):
  """A call waited as long as it was allowed to; the message says for what.

  `taken` are samples that a call had already been given, and that count; None if there are none.
  """

  taken: Samples | None = None


class Cancelled(Exception):
  """A call waited when `Table.cancel` was called; `taken` as of RateLimited."""

  taken: Samples | None = None


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

  __slots__ = ('__weakref__', 'key', 'parts', 'priority', 'signature')

  def __init__(
    self, key: int, priority: float, signature: Signature, parts: tuple[Part, ...]
  ) -> None:
    self.key = key
    self.priority = priority  # when it was made
    self.signature = signature
    self.parts = parts  # one for each leaf


class Samples(NamedTuple):
  """n items, and what their table knew about each when it was sampled."""

  data: Any  # [n, L, ...] as the items are nested; L is the longest of a column, then zeros
  lengths: Any  # [n] i64 how many rows are real, nested likewise
  key: np.ndarray  # [n] i64
  probability: np.ndarray  # [n] f64
  table_size: np.ndarray  # [n] i64
  priority: np.ndarray  # [n] f64
  times_sampled: np.ndarray  # [n] i64, this time included


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


class Pending:
  """An item that the limiter holds back, and is among those of its `writer` while it is."""

  __slots__ = ('done', 'item', 'table', 'writer')

  def __init__(self, item: Item, table: Any, writer: InFlight) -> None:
    self.item, self.table, self.writer, self.done = item, table, writer, False
    writer.waiting[self] = None

  def finish(self) -> None:
    """It waits no longer; under the lock."""
    self.done = True
    del self.writer.waiting[self]
    self.writer.fewer.notify_all()


class InFlight:
  """The items of one writer that wait, over all tables; changed under their lock."""

  def __init__(self, lock: Lock) -> None:
    self.waiting: dict[Pending, None] = {}  # the oldest first
    self.fewer = Condition(lock)  # type: ignore[arg-type]
    self.cancels = 0  # so many times has waiting for one of them been cancelled
    self.refusals: list[Exception] = []  # of some of them, which its writer was not told yet

  def refuse(self, error: Exception) -> None:
    """Has the writer told, by one of its next calls; once of what is the same. Under the lock."""
    if str(error) not in map(str, self.refusals):
      self.refusals.append(error)


class Draws(NamedTuple):
  """What was drawn under the lock, before any data is read."""

  items: list[Item]
  columns: list[tuple[np.ndarray, ...]]  # probability, table_size, priority, times_sampled


class Table:
  """Items of one kind, sampled and removed as told; on a store that it may share.

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
    report: is told what waits and why; by default a warning of the logger podrace.tables.
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
    seed: int = 0,
    report_after: float = REPORT_AFTER,
    report: Callable[[str], None] = log.warning,
  ) -> None:
    if max_size < rate_limiter.min_size:
      raise ValueError(
        f'table {name!r} deadlocks: {max_size=} and {rate_limiter.name} wants '
        f'{rate_limiter.min_size} items before any is sampled'
      )
    if max_bytes is not None and max_bytes < 1:
      raise ValueError(f'table {name!r}: {max_bytes=} must be positive')
    if max_times_sampled < 0:
      raise ValueError(f'table {name!r}: {max_times_sampled=} must be at least 0')
    if not report_after > 0:
      raise ValueError(f'table {name!r}: {report_after=} must be positive')
    self.name, self.store = name, store
    self.sampler, self.remover, self.rate_limiter = sampler, remover, rate_limiter
    self.max_size, self.max_bytes, self.max_times_sampled = max_size, max_bytes, max_times_sampled
    self.counts, self.updates = Counts(), 0
    self.signature: Signature | None = None
    self.account = Account()
    self.closed = False

    self._most = min(sampler.most, remover.most)
    self._rng = np.random.default_rng(seed)
    self._next_sampled, self._next_removed = sampler.make(), remover.make()
    self._slots: dict[int, int] = {}  # by key
    self._items: list[Item | None] = []  # by slot, as the following
    self._priorities = np.zeros(64)
    self._times = array('q')
    self._free: list[int] = []

    self._waiting: deque[Pending] = deque()
    self._waiting_account = Account()
    self._readers = 0
    self._cancels = 0  # so many times has all waiting been cancelled
    self._readable = Condition(store.lock)  # type: ignore[arg-type]
    self._clock = _Clock()
    self._running, self._sampling = _Working(self, RUNNING), _Working(self, SAMPLING)
    self._inserting = _Working(self, INSERTING)
    self.report_after, self._report = report_after, report
    with store.lock:
      if name in store.tables:
        raise ValueError(f'the store has a table {name!r} already')
      store.tables[name] = self

  def __len__(self) -> int:
    return len(self._slots)

  def takes_from(self, store: ChunkStore) -> bool:
    """Whether items over chunks of this store can be inserted."""
    return store is self.store

  # --- inserting --------------------------------------------------------------------------------

  def check_priority(self, priority: float) -> float:
    """A priority that the selectors can bear; raises ValueError for any other."""
    if not 0 <= priority <= self._most:
      raise ValueError(
        f'table {self.name!r}: priority {priority} is not in [0, {self._most:g}], which '
        f'{self.sampler.name} and {self.remover.name} need'
      )
    return float(priority)

  def submit(self, item: Item, writer: InFlight) -> Pending | None:
    """Inserts an item now, or leaves it waiting for the limiter and says so.

    An item whose key is known replaces the one of that key: its data and its priority, not its place
    in the order nor its times sampled. That is no insert for the limiter, and never waits.

    Raises:
      ValueError: if it isn't like the table's other items, or can't fit into max_bytes.
      Closed: if the table is.
    """
    with self._inserting:
      return self._submit(item, writer)

  def submit_all(
    self, items: Sequence[Item], writer: InFlight
  ) -> list[Pending | ValueError | None]:
    """What `submit` returns, or the ValueError that it raises, for each of the items."""
    found: list[Pending | ValueError | None] = []
    with self._inserting:
      for item in items:
        try:
          self.check_priority(item.priority)
          found.append(self._submit(item, writer))
        except ValueError as e:
          found.append(e)
    return found

  def _submit(self, item: Item, writer: InFlight) -> Pending | None:
    self._check_open()
    self._check_item(item)
    if item.key == NEW:
      item.key = self.store.next_key
    if item.key >= self.store.next_key:
      self.store.next_key = item.key + 1
    if item.key in self._slots:
      self._replace(item)
      self._wake()  # max_bytes may have made it delete others
    elif self.rate_limiter.may_insert(self.counts):
      self._insert(item)
      if self._readers:
        self._wake()
    else:
      pending = Pending(item, self, writer)
      self._hold(item, self._waiting_account)
      self._waiting.append(pending)
      return pending
    return None

  def wait_for(self, pending: Pending, most: int, wait: Wait) -> None:
    """Returns when an item waits no longer, or at most so many of its writer's, or one was refused.

    Raises:
      RateLimited: if the deadline has passed.
      Cancelled: if a table on which one of the writer's items waits was cancelled.
    """
    writer = pending.writer
    with self._inserting:
      while not pending.done and len(writer.waiting) > most and not writer.refusals:
        wait.on(self, writer.fewer, 'insert into', self.why_no_insert)

  def withdraw(self, pending: Pending) -> bool:
    """Takes back an item that still waits; False if it has been inserted."""
    with self._inserting:
      if pending.done:
        return False
      self._waiting.remove(pending)
      self._finish(pending)
      self._wake()  # the one behind it may be a replacement
      return True

  def _finish(self, pending: Pending) -> None:
    pending.finish()
    self._drop(pending.item, self._waiting_account)

  def _check_item(self, item: Item) -> None:
    if not NEW <= item.key < END_OF_KEYS:
      raise ValueError(f'table {self.name!r}: key={item.key} must be above 0 and below 2^62')
    if item.signature is not self.signature:
      self._check_signature(item.signature)
    if self.max_bytes is not None:
      chunks = {chunk for part in item.parts for chunk in part[0]}
      if (needed := sum(chunk.nbytes for chunk in chunks)) > self.max_bytes:
        raise ValueError(
          f'table {self.name!r}: the item needs chunks of {needed} bytes, '
          f'and max_bytes is {self.max_bytes}'
        )

  def _check_signature(self, signature: Signature) -> None:
    if self.signature is None:
      self.signature = signature
      return
    known = self.signature
    same = trees.to_json(signature.structure) == trees.to_json(known.structure)
    if not same or signature.leaves != known.leaves:
      raise ValueError(
        f'table {self.name!r}: items are ({", ".join(map(str, known.leaves))}), '
        f'got ({", ".join(map(str, signature.leaves))})'
      )
    self.signature = signature  # after a restore, with the caller's own types of named tuples

  def _insert(self, item: Item) -> None:
    slot = self._free.pop() if self._free else self._new_slot()
    self._items[slot] = item
    self._slots[item.key] = slot
    self._priorities[slot] = item.priority
    self._times[slot] = 0
    self._hold(item, self.account)
    self._next_sampled.insert(slot, item.priority)
    self._next_removed.insert(slot, item.priority)
    self.counts.inserts += 1
    if len(self._slots) > self.max_size or self.max_bytes is not None:
      self._shrink()

  def _new_slot(self) -> int:
    slot = len(self._items)
    self._items.append(None)
    self._times.append(0)
    if slot == len(self._priorities):
      self._priorities = np.concatenate([self._priorities, np.zeros_like(self._priorities)])
    return slot

  def _replace(self, item: Item) -> None:
    slot = self._slots[item.key]
    old = self._items[slot]
    assert old is not None
    self._hold(item, self.account)
    self._drop(old, self.account)
    self._items[slot] = item
    self._set_priorities(np.array([slot]), np.array([item.priority]))
    self._shrink()

  def _shrink(self) -> None:
    while len(self._slots) > self.max_size or (
      self.max_bytes is not None and self.account.bytes > self.max_bytes and len(self._slots) > 1
    ):
      (slot,), _ = self._next_removed.draw(1, self._rng)
      self._remove(int(slot))

  def _remove(self, slot: int) -> None:
    item = self._items[slot]
    assert item is not None
    self._next_sampled.remove(slot)
    self._next_removed.remove(slot)
    del self._slots[item.key]
    self._items[slot] = None
    self._free.append(slot)
    self._drop(item, self.account)
    self.counts.deletes += 1

  def _hold(self, item: Item, account: Account) -> None:
    hold = self.store.hold
    for part in item.parts:
      for chunk in part[0]:
        hold(chunk, account)

  def _drop(self, item: Item, account: Account) -> None:
    drop = self.store.drop
    for part in item.parts:
      for chunk in part[0]:
        drop(chunk, account)

  def _wake(self) -> None:
    """Whatever may now go on, does: waiting items in their order, then samplers."""
    while self._waiting:
      item = self._waiting[0].item
      if item.key in self._slots:
        self._replace(item)
      elif self.rate_limiter.may_insert(self.counts):
        self._insert(item)
      else:
        break
      self._finish(self._waiting.popleft())
    if self._readers and self.rate_limiter.may_sample(self.counts):
      self._readable.notify_all()

  # --- sampling ---------------------------------------------------------------------------------

  def sample(self, n: int, at_least: int | None = None, timeout: float | None = None) -> Samples:
    """n items, drawn one after the other with replacement, as the limiter permits.

    Args:
      n: how many, at most.
      at_least: with how many to be content if more would mean to wait; all n by default.
      timeout: seconds; None waits for as long as the table is open.

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
      self._take(draws, n, least, deadline_of(timeout))
    except (RateLimited, Cancelled, Closed) as e:
      if draws.items:
        e.taken = self._deliver(draws)
      raise
    return self._deliver(draws)

  def _take(self, draws: Draws, n: int, least: int, deadline: float) -> None:
    with self._sampling:
      wait = None
      while True:
        self._draw_now(draws, n)
        if len(draws.items) >= least:
          return
        wait = wait or Wait(deadline, lambda: self._cancels)
        self._readers += 1
        try:
          wait.on(self, self._readable, 'sample from', self.why_no_sample)
        finally:
          self._readers -= 1

  def draw(self, draws: Draws, n: int) -> None:
    """Draws what the limiter permits now, until `draws` has n items; never waits.

    Raises:
      Closed: if the table is.
    """
    with self._sampling:
      self._draw_now(draws, n)

  def _draw_now(self, draws: Draws, n: int) -> None:
    self._check_open()
    while self._draw(draws, n - len(draws.items)) and self._waiting:
      self._wake()  # what has come in may be sampled as well

  def _draw(self, draws: Draws, most: int) -> int:
    """Draws up to `most` items, if and as many as the limiter permits now."""
    if self.max_times_sampled:
      n = 0
      while n < most and self.rate_limiter.may_sample(self.counts):
        self._draw_together(draws, 1)
        n += 1
    else:
      n = self.rate_limiter.samples_allowed(self.counts, most)
      if n:
        self._draw_together(draws, n)
    return n

  def _draw_together(self, draws: Draws, n: int) -> None:
    slots, probabilities = self._next_sampled.draw(n, self._rng)
    chosen, times = slots.tolist(), self._times
    sampled = []
    for slot in chosen:
      times[slot] = count = times[slot] + 1
      sampled.append(count)
    draws.items.extend([self._items[slot] for slot in chosen])
    size = np.full(n, len(self._slots))
    draws.columns.append((probabilities, size, self._priorities[slots], np.array(sampled)))
    self.counts.samples += n
    if self.max_times_sampled and sampled[0] >= self.max_times_sampled:  # then n is 1
      self._remove(chosen[0])

  def _deliver(self, draws: Draws) -> Samples:
    items = draws.items
    signature = items[0].signature
    columns = zip(*(item.parts for item in items), strict=True)
    data, lengths = [], []
    for leaf, parts in zip(signature.leaves, columns, strict=True):
      rows, counts = gather(self.store, parts, leaf.dtype, leaf.shape)
      data.append(rows[:, 0] if leaf.single else rows)
      lengths.append(counts)
    probability, size, priority, times = map(np.concatenate, zip(*draws.columns, strict=True))
    structure = (self.signature or signature).structure
    return Samples(
      data=trees.build(structure, data),
      lengths=trees.build(structure, lengths),
      key=np.array([item.key for item in items], np.int64),
      probability=probability,
      table_size=size,
      priority=priority,
      times_sampled=times,
    )

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
    wrong = ~((values >= 0) & (values <= self._most))
    if wrong.any():
      self.check_priority(float(values[wrong][0]))
    with self._running:
      found = [self._slots.get(key, -1) for key in names.tolist()]
      slots = np.array(found, np.int64)
      known = slots >= 0
      slots, values = slots[known], values[known]
      if len(set(found)) < len(found):
        last = {slot: i for i, slot in enumerate(slots.tolist())}
        order = sorted(last.values())
        slots, values = slots[order], values[order]
      self._set_priorities(slots, values)
      self.updates += len(slots)
      return int(known.sum())

  def _set_priorities(self, slots: np.ndarray, priorities: np.ndarray) -> None:
    self._priorities[slots] = priorities
    self._next_sampled.update(slots, priorities)
    self._next_removed.update(slots, priorities)

  def delete(self, keys: Sequence[int] | np.ndarray) -> int:
    """Removes items by key; how many of the keys were there."""
    with self._running:
      before = self.counts.deletes
      for key in np.asarray(keys).tolist():
        slot = self._slots.get(key)
        if slot is not None:
          self._remove(slot)
      self._wake()
      return self.counts.deletes - before

  # --- its state --------------------------------------------------------------------------------

  def info(self) -> TableInfo:
    """How it does."""
    with self._running:
      return TableInfo(
        name=self.name,
        size=len(self._slots),
        max_size=self.max_size,
        bytes=self.account.bytes,
        max_bytes=self.max_bytes,
        chunks=self.account.chunks,
        inserts=self.counts.inserts,
        samples=self.counts.samples,
        deletes=self.counts.deletes,
        updates=self.updates,
        waiting_inserts=len(self._waiting),
        waiting_samplers=self._readers,
        limiter=self.rate_limiter.name,
        seconds=self._clock.split(),
      )

  def readers(self, more: int) -> None:
    """So many more samplers wait, which use `draw`, or less."""
    with self._running:
      self._readers += more

  def cancel(self) -> None:
    """Every call that waits now, to insert or to sample, raises Cancelled; later ones wait as ever.

    What was being waited for is as after a timeout: items of a flush still wait for the limiter, and samples
    that a call had been given are in the error's `taken`.
    """
    with self.store.lock:
      self._cancels += 1
      self._readable.notify_all()
      for writer in {pending.writer for pending in self._waiting}:
        writer.cancels += 1
        writer.fewer.notify_all()

  def close(self) -> None:
    """Every call that waits, and every later insert and sample, raises Closed.

    Items that waited for the limiter are dropped, which each of their writers is told once, by its next
    calls; those in the table stay, and can be saved.
    """
    with self.store.lock:
      self.closed = True
      while self._waiting:
        pending = self._waiting.popleft()
        self._finish(pending)
        pending.writer.refuse(
          Closed(f'table {self.name!r} is closed; the items that waited for it are dropped')
        )
      self._readable.notify_all()

  def snapshot(self) -> dict[str, Any]:
    """All that a checkpoint needs, copied or immutable; under the lock."""
    return dict(
      config=self.config(),
      counts=dataclasses.asdict(self.counts),
      updates=self.updates,
      rng=self._rng.bit_generator.state,
      signature=self.signature,
      items=list(self._items),
      priorities=self._priorities[: len(self._items)].copy(),
      times=np.array(self._times, np.int64),
      free=np.array(self._free, np.int64),
      sampling=self._next_sampled.state(),
      removing=self._next_removed.state(),
    )

  def config(self) -> dict[str, Any]:
    """What a table must have in common with one whose checkpoint it reads."""
    return dict(
      sampler=self.sampler.name,
      remover=self.remover.name,
      rate_limiter=self.rate_limiter.name,
      limits=list(map(float, self.rate_limiter.numbers)),
      max_size=self.max_size,
      max_bytes=self.max_bytes,
      max_times_sampled=self.max_times_sampled,
    )

  def load(self, state: dict[str, Any]) -> None:
    """Takes over what `snapshot` gave, with items over this store's chunks; under the lock."""
    self.counts = Counts(**state['counts'])
    self.updates = state['updates']
    self._rng.bit_generator.state = state['rng']
    self.signature = state['signature']
    self._items = list(state['items'])
    self._slots = {item.key: slot for slot, item in enumerate(self._items) if item is not None}
    self._priorities = np.concatenate([state['priorities'], np.zeros(64)])
    self._times = array('q', state['times'].tolist())
    self._free = state['free'].tolist()
    self._next_sampled.load(state['sampling'])
    self._next_removed.load(state['removing'])
    for item in self._items:
      if item is not None:
        self._hold(item, self.account)
    self._wake()

  def _check_open(self) -> None:
    if self.closed:
      raise Closed(f'table {self.name!r} is closed')

  def why_no_sample(self) -> str:
    """What keeps a sampler waiting."""
    why = self.rate_limiter.why_no_sample(self.counts)
    if self.max_bytes is not None and self.account.bytes > 0.9 * self.max_bytes:
      why += f'; {self.account.bytes} of {self.max_bytes} bytes are used, which may be why'
    return f'{why}; {len(self._waiting)} inserts wait as well'

  def why_no_insert(self) -> str:
    """What keeps an item waiting."""
    why = self.rate_limiter.why_no_insert(self.counts)
    return f'{why}; {len(self._waiting)} inserts and {self._readers} samplers wait'

  def rest(self, work: Callable[[], Any]) -> None:
    """Calls what lets go of the lock for a while, and isn't counted as work on the table."""
    before = self._clock.switch(self._idle())
    try:
      work()
    finally:
      self._clock.switch(before)

  def tell(self, message: str) -> None:
    """Reports; without the lock, as who is told may ask the table, or take long; or fail: no matter."""

    def report() -> None:
      self.store.lock.release()
      try:
        self._report(message)
      except Exception:
        log.exception('a report failed: %s', message)
      finally:
        self.store.lock.acquire()

    self.rest(report)

  def _idle(self) -> str:
    if self._readers:
      return WAITING_FOR_INSERTS
    return WAITING_FOR_SAMPLES if self._waiting else SLEEPING


def deadline_of(timeout: float | None) -> float:
  """On time.monotonic's clock; None is never."""
  return math.inf if timeout is None else time.monotonic() + timeout


class _Clock:
  """Divides the time since it was made among what was done in it."""

  def __init__(self) -> None:
    self._seconds = dict.fromkeys(
      (RUNNING, SAMPLING, INSERTING, SLEEPING, WAITING_FOR_INSERTS, WAITING_FOR_SAMPLES), 0.0
    )
    self._since, self._state = time.perf_counter(), SLEEPING

  def switch(self, state: str) -> str:
    """From now on, it is `state`; returns what it was."""
    now, before = time.perf_counter(), self._state
    self._seconds[before] += now - self._since
    self._since, self._state = now, state
    return before

  def split(self) -> dict[str, float]:
    """Seconds by what was done."""
    self.switch(self._state)
    return dict(self._seconds)


class _Working:
  """Takes the lock, and counts the time until it is given back (or waited with) as work `on` this.

  One object serves all threads, as it has no state of its own.
  """

  __slots__ = ('_lock', '_on', '_switch', '_table')

  def __init__(self, table: Table, on: str) -> None:
    self._table, self._on, self._lock = table, on, table.store.lock
    self._switch = table._clock.switch

  def __enter__(self) -> None:
    self._lock.acquire()
    self._switch(self._on)

  def __exit__(self, *error: object) -> None:
    self._switch(self._table._idle())
    self._lock.release()


class Wait:
  """One call's waiting, on however many things one after the other: until its deadline, with reports.

  Args:
    deadline: on time.monotonic's clock.
    cancels: how many times has such waiting been cancelled.
    before: so many of them were before the call; by default those until now.
  """

  def __init__(
    self, deadline: float, cancels: Callable[[], int] = int, before: int | None = None
  ) -> None:
    self.deadline, self.begun = deadline, time.monotonic()
    self._count_cancels = cancels
    self._before = cancels() if before is None else before
    self._next = self._interval = 0.0

  @property
  def is_cancelled(self) -> bool:
    return self._count_cancels() != self._before

  def seconds(self, now: float, report_after: float) -> float:
    """How long to wait until there is something to be told or raised."""
    if not self._interval:
      self._interval, self._next = report_after, self.begun + report_after
    return min(self.deadline, self._next) - now

  def report_is_due(self, now: float) -> bool:
    """Whether to report now; if so, the next one is due in twice the time."""
    if now < self._next:
      return False
    self._interval *= 2
    self._next = now + self._interval
    return True

  def on(self, table: Table, condition: Condition, what: str, why: Callable[[], str]) -> None:
    """Until something has changed; under the lock, which is free in the meantime.

    Raises:
      RateLimited: if the deadline has passed.
      Cancelled: if the waiting has been.
    """
    now = time.monotonic()

    def message(waited: str) -> str:
      return f'{what} table {table.name!r} {waited} {now - self.begun:.3g} s: {why()}'

    if self.is_cancelled:
      raise Cancelled(message('was cancelled after'))
    if now >= self.deadline:
      raise RateLimited(message('timed out after'))
    seconds = self.seconds(now, table.report_after)
    if self.report_is_due(now):
      table.tell(message('has waited for'))
      return  # things may have changed: the caller looks again
    table.rest(lambda: condition.wait(seconds))


def held(items: Sequence[Item | None]) -> dict[int, Chunk]:
  """The chunks that items need, by key, in the order of first need."""
  return {c.key: c for item in items if item is not None for part in item.parts for c in part[0]}
