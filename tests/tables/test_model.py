"""Any sequence of operations on a table, against the plain model, for every pair of selectors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_model import Limits, Model, removals

from podrace import tables

EXPONENT = 0.7
SELECTORS = {
  'uniform': tables.uniform(),
  'fifo': tables.fifo(),
  'lifo': tables.lifo(),
  'prioritized': tables.prioritized(EXPONENT),
  'min_heap': tables.min_heap(),
  'max_heap': tables.max_heap(),
}
INFINITY = float('inf')
LIMITERS = [
  (tables.min_size(1), Limits(1, 1, -INFINITY, INFINITY)),
  (tables.min_size(3), Limits(1, 3, -INFINITY, INFINITY)),
  (tables.sample_to_insert_ratio(1.5, 3, 2.0), Limits(1.5, 3, 2.5, 6.5)),
  (tables.sample_to_insert_ratio(0.25, 2, (-1.0, 1.0)), Limits(0.25, 2, -1, 1)),
  (tables.sample_to_insert_ratio(4.0, 1, 4.0), Limits(4, 1, 0, 8)),
  (tables.queue(2), Limits(1, 1, 0, 2)),
  (tables.stack(4), Limits(1, 1, 0, 4)),
]
LATEST: dict[str, Any] = dict(
  sampler=tables.fifo(), remover=tables.fifo(), rate_limiter=tables.min_size(1), max_size=3
)
PRIORITIES = st.sampled_from([0.0, 0.0, 0.5, 1.0, 1.0, 3.0])
OPERATIONS = st.lists(
  st.one_of(
    st.tuples(st.just('insert'), PRIORITIES, st.integers(1, 3)),
    st.tuples(st.just('insert'), PRIORITIES, st.integers(1, 3)),
    st.tuples(st.just('insert known'), PRIORITIES, st.integers(0, 9)),
    st.tuples(st.just('amend'), st.integers(0, 9), st.integers(1, 3)),
    st.tuples(st.just('peek'), st.integers(1, 4)),
    st.tuples(st.just('sample'), st.integers(1, 4)),
    st.tuples(st.just('sample together'), st.integers(1, 4)),
    st.tuples(st.just('update'), st.lists(st.tuples(st.integers(0, 9), PRIORITIES), max_size=4)),
    st.tuples(st.just('delete'), st.lists(st.integers(0, 9), max_size=2)),
    st.tuples(st.just('end episode')),
  ),
  max_size=40,
)
CASES: dict[str, Any] = dict(
  limiter=st.integers(0, len(LIMITERS) - 1), max_size=st.integers(1, 5),
  max_times=st.integers(0, 2), rows=st.sampled_from([1, 2, 3, 40]), operations=OPERATIONS,
)  # fmt: skip


class Pair:
  """A table and its model, told the same things."""

  def __init__(
    self,
    sampler: str,
    remover: str,
    limiter: int,
    max_size: int,
    max_times: int,
    rows: int,
    max_bytes: int | None = None,
  ) -> None:
    rate_limiter, limits = LIMITERS[limiter]
    max_size = max(max_size, limits.min_size)
    self.store = tables.ChunkStore(cache_bytes=300)  # so that chunks come and go
    self.table = tables.Table(
      'it', self.store, sampler=SELECTORS[sampler], remover=SELECTORS[remover],
      rate_limiter=rate_limiter, max_size=max_size, max_times_sampled=max_times, max_bytes=max_bytes,
    )  # fmt: skip
    self.probe = tables.Table('probe', self.store, **LATEST)
    self.host = self.table  # where it really is
    self.writer = tables.Writer(self.store, history=5, rows_per_chunk=rows, max_in_flight=10**6)
    removed = removals(self.table)
    self.model = Model(sampler, remover, limits, max_size, max_times, EXPONENT, removed)
    self.keys: list[int] = []
    self.step = self.rows = 0

  def run(self, operations: list[Any]) -> None:
    for name, *args in operations:
      getattr(self, name.replace(' ', '_'))(*args)
      self.check()
    self.finish()

  def there(self) -> set[int]:
    return set(self.host.contents.slots)

  def write(self, length: int) -> np.ndarray:
    """Appends that many rows; what an item of as many as that should hold."""
    values = np.arange(self.step, self.step + length, dtype=np.int32)[:, None] * [1, -3] // 2
    self.step += length
    self.rows += length
    for value in values.astype(np.int32):
      self.writer.append({'x': value})
    return values

  def insert(self, priority: float, length: int) -> Any:
    payload = self.write(length)
    if self.too_large(length):
      return payload
    key = self.writer.create_item(self.table, priority, num_steps=length)
    self.arrived()
    self.keys.append(key)
    self.model.insert(key, priority, payload)
    return payload

  def too_large(self, length: int) -> bool:
    """Whether an item of so many steps can't be in the table, which then refuses it."""
    if (limit := self.host.contents.max_bytes) is None:
      return False
    key = self.writer.create_item(self.probe, 1.0, num_steps=length)
    needed = self.probe.info().bytes
    self.probe.delete([key])
    if needed <= limit:
      return False
    with pytest.raises(ValueError, match=f'{needed} bytes'):
      self.writer.create_item(self.table, 1.0, num_steps=length)
    return True

  def insert_known(self, priority: float, which: int) -> None:
    if not self.keys:
      return
    payload, key = self.write(1), self.keys[-1 - which % len(self.keys)]
    if self.too_large(1):
      return
    self.writer.create_item(self.table, priority, num_steps=1, key=key)
    self.arrived()
    self.model.insert(key, priority, payload)

  def amend(self, which: int, length: int) -> None:
    if not self.keys:
      return
    payload, key = self.write(length), self.keys[-1 - which % len(self.keys)]
    if self.too_large(length):
      return
    self.writer.amend_item(self.table, key, {'x': self.writer.history['x'][-length:]})
    self.arrived()
    self.model.amend(key, payload)

  def arrived(self) -> None:
    """Returns when what was written is in the table, or waits there."""

  def peek(self, n: int) -> None:
    if not self.model.entries:
      with pytest.raises(tables.RateLimited, match='item'):
        self.table.sample(n, timeout=0, peek=True)
      return
    sample = self.table.sample(n, timeout=0, peek=True)
    assert len(sample.key) == n
    self.compare(sample, self.model.peek)

  def sample(self, times: int) -> None:
    for _ in range(times):
      if not self.model.may_sample():
        with pytest.raises(tables.RateLimited, match="'it'"):
          self.table.sample(1, timeout=0)
        return
      self.compare(self.table.sample(1, timeout=0))
      self.model.admit()

  def sample_together(self, n: int) -> None:
    if self.model.waiting or not self.model.may_sample():
      return
    sample = self.table.sample(n, at_least=1, timeout=0)
    self.compare(sample)
    assert len(sample.key) == n or not self.model.may_sample()

  def compare(self, sample: tables.Samples, said: Callable[[int], Any] | None = None) -> None:
    for i, key in enumerate(sample.key.tolist()):
      probability, size, priority, times, payload = (said or self.model.sample)(key)
      assert sample.probability[i] == pytest.approx(probability)
      assert sample.table_size[i] == size
      assert sample.priority[i] == priority
      assert sample.times_sampled[i] == times
      assert sample.lengths['x'][i] == len(payload)
      np.testing.assert_array_equal(sample.data['x'][i, : len(payload)], payload)
      assert not sample.data['x'][i, len(payload) :].any()

  def update(self, changes: list[tuple[int, float]]) -> None:
    changes = [(self.keys[-1 - i % len(self.keys)], p) for i, p in changes if self.keys]
    self.table.update_priorities([k for k, _ in changes], [p for _, p in changes])
    # Of a key given twice only the last counts, also for what was touched when.
    for i, (key, priority) in enumerate(changes):
      if key not in [k for k, _ in changes[i + 1 :]]:
        self.model.update(key, priority)

  def delete(self, which: list[int]) -> None:
    keys = [self.keys[-1 - i % len(self.keys)] for i in which if self.keys]
    expected = len(set(keys) & set(self.model.entries))
    assert self.table.delete(keys) == expected
    for key in keys:
      self.model.delete(key)
    self.model.admit()

  def end_episode(self) -> None:
    if not self.model.waiting:
      self.writer.end_episode()

  def check(self) -> None:
    model, table, info = self.model, self.host, self.table.info()
    assert self.there() == set(model.entries) and not model.removed
    assert (info.inserts, info.samples, info.deletes, info.size, info.waiting_inserts) == (
      model.inserts,
      model.samples,
      model.deletes,
      len(model.entries),
      len(model.waiting),
    )
    items = [item for item in table.contents.items if item is not None]
    needed = {chunk for item in items for part in item.parts for chunk in part[0]}
    assert table.contents.account.bytes == sum(chunk.nbytes for chunk in needed)
    assert table.contents.account.chunks == len(needed)
    assert (
      table.contents.max_bytes is None
      or table.contents.account.bytes <= table.contents.max_bytes
      or len(items) == 1
    )
    assert self.store.cached <= self.store.cache_bytes
    assert self.writer.in_flight == len(model.waiting)

  def finish(self) -> None:
    """Without items and writers, nothing is left."""
    waiting = self.writer.in_flight
    self.table.close()
    if waiting:
      with pytest.raises(tables.Closed):
        self.writer.close()
    else:
      self.writer.close()
    self.table.delete(list(self.there()))
    assert (self.store.total.bytes, self.store.total.chunks, self.store.cached) == (0, 0, 0)


class TwoTables(Pair):
  """Beside it there is another table on the store, with items of the same steps."""

  def __init__(self, *args: Any, **more: Any) -> None:
    super().__init__(*args, **more)
    self.other = tables.Table('other', self.store, **LATEST)
    removed = removals(self.other)
    self.copies = Model('fifo', 'fifo', LIMITERS[0][1], 3, 0, EXPONENT, removed)

  def insert(self, priority: float, length: int) -> Any:
    payload = super().insert(priority, length)
    key = self.writer.create_item(self.other, priority, num_steps=length)
    self.copies.insert(key, priority, payload)
    return payload

  def sample(self, times: int) -> None:
    super().sample(times)
    if self.copies.entries:
      self.compare(self.other.sample(times, timeout=0), self.copies.sample)

  def check(self) -> None:
    super().check()
    assert set(self.other.contents.slots) == set(self.copies.entries) and not self.copies.removed
    held = set(self.writer.history['x'].chunks if self.step else ())
    items = [*self.table.contents.items, *self.other.contents.items]
    for item in [*items, *(p.item for p in self.table.desk.inserts)]:
      held |= {chunk for part in item.parts for chunk in part[0]} if item else set()
    assert self.store.total.bytes == sum(chunk.nbytes for chunk in held)
    assert self.store.total.chunks == len(held)

  def finish(self) -> None:
    self.other.delete(list(self.other.contents.slots))
    super().finish()


def pairs_of_selectors() -> list[Any]:
  """All pairs; those of a selector and the one after it are fast: each once as either."""
  names = list(SELECTORS)
  fast = set(zip(names, [*names[1:], names[0]], strict=True))
  pairs = itertools.product(SELECTORS, SELECTORS)
  return [pytest.param(*p, marks=() if p in fast else pytest.mark.slow) for p in pairs]


@pytest.mark.parametrize('sampler, remover', pairs_of_selectors())
@settings(max_examples=30, deadline=None)
@given(max_bytes=st.sampled_from([None, 50, 350, 700]), **CASES)
def test_any_operations(sampler: str, remover: str, operations: list[Any], **case: Any) -> None:
  TwoTables(sampler, remover, **case).run(operations)


@pytest.mark.slow
@pytest.mark.parametrize('sampler, remover', itertools.product(SELECTORS, SELECTORS))
@settings(max_examples=500, deadline=None)
@given(max_bytes=st.sampled_from([None, 50, 350, 700]), **CASES)
def test_many_operations(sampler: str, remover: str, operations: list[Any], **case: Any) -> None:
  TwoTables(sampler, remover, **case).run(operations)
