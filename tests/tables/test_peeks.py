"""Peeks, which count as no samples, and amendments of items that are still there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from children import until
from test_tables import fill, in_thread, make

from podrace import tables

RATIO = dict(rate_limiter=tables.sample_to_insert_ratio(1.0, 2, 2.0), sampler=tables.fifo())


def counted(table: tables.Table) -> tuple[int, int, int]:
  info = table.info()
  return info.inserts, info.samples, info.deletes


def test_a_peek_is_no_sample_for_the_limiter() -> None:
  table = make(**RATIO)
  keys = fill(table, [1.0, 2.0, 1.0])
  before = counted(table)
  for _ in range(20):  # of 3 inserts the limiter permits 3 samples
    found = table.sample(8, timeout=0, peek=True)
    assert found.key.tolist() == [keys[0]] * 8 and (found.times_sampled == 0).all()
  assert counted(table) == before == (3, 0, 0)
  assert len(table.sample(3, timeout=0).key) == 3
  with pytest.raises(tables.RateLimited):
    table.sample(1, timeout=0)
  assert table.sample(1, timeout=0, peek=True).times_sampled.tolist() == [3]
  assert counted(table) == (3, 3, 0)


def test_a_peek_draws_as_the_sampler_does() -> None:
  table = make(sampler=tables.prioritized(1.0), seed=3)
  keys = fill(table, [1.0, 0.0, 3.0])
  found = table.sample(4000, peek=True)
  share = {k: float((found.key == k).mean()) for k in keys}
  assert share[keys[1]] == 0 and share[keys[2]] == pytest.approx(0.75, abs=0.03)
  np.testing.assert_allclose(found.probability, np.where(found.key == keys[2], 0.75, 0.25))


def test_a_peek_waits_for_an_item_only() -> None:
  table = make(rate_limiter=tables.min_size(3))
  with pytest.raises(tables.RateLimited, match='item'):
    table.sample(1, timeout=0.01, peek=True)
  peek = in_thread(lambda: table.sample(2, timeout=60, peek=True))
  sample = in_thread(lambda: table.sample(1, timeout=60))
  until(lambda: table.info().waiting_samplers == 2)
  fill(table, [1.0])
  assert peek().data.ravel().tolist() == [0, 0]
  assert table.info().waiting_samplers == 1
  fill(table, [1.0, 1.0])
  assert len(sample().key) == 1


@pytest.mark.parametrize(('end', 'error'), [('cancel', tables.Cancelled), ('close', tables.Closed)])
def test_a_peek_that_waits_can_be_ended(end: str, error: Any) -> None:
  table = make()
  peek = in_thread(lambda: table.sample(1, peek=True))
  until(lambda: table.info().waiting_samplers == 1)
  getattr(table, end)()
  assert isinstance(peek(), error)


# --- amendments -------------------------------------------------------------------------------------


def two_columns(table: tables.Table, *priorities: float) -> tuple[tables.Writer, list[int]]:
  """Items of 2 rows of x and y; the writer, and their keys."""
  writer, keys = tables.Writer(table.store, history=2, rows_per_chunk=2), []
  for i, priority in enumerate(priorities):
    for t in range(2):
      writer.append({'x': np.int32(10 * i + t), 'y': np.float32(-i)})
    keys.append(writer.create_item(table, priority, num_steps=2))
  return writer, keys


def amend(writer: tables.Writer, table: tables.Table, key: int, *values: float) -> None:
  for value in values:
    writer.append({'x': None, 'y': np.float32(value)})
  writer.amend_item(table, key, {'y': writer.history['y'][-len(values) :]})


def test_an_amendment_changes_its_columns_and_nothing_else() -> None:
  table = make(sampler=tables.max_heap(), **{k: v for k, v in RATIO.items() if k != 'sampler'})
  writer, keys = two_columns(table, 5.0, 5.0, 1.0)
  before = counted(table), table.info().updates
  amend(writer, table, keys[0], 7.0, 8.0)
  assert (counted(table), table.info().updates) == before
  found = table.sample(1)  # the heap's ties are broken by what was touched longest ago
  assert found.key.item() == keys[0] and found.priority.item() == 5.0
  assert found.data['x'].tolist() == [[0, 1]] and found.data['y'].tolist() == [[7.0, 8.0]]
  assert found.times_sampled.item() == 1
  amend(writer, table, keys[0], 9.0, 9.5)
  again = table.sample(1)
  assert again.data['y'].tolist() == [[9.0, 9.5]] and again.times_sampled.item() == 2
  writer.close()
  bytes_now = table.info().bytes
  needed = {c for i in table.contents.items if i for part in i.parts for c in part[0]}
  assert bytes_now == sum(c.nbytes for c in needed)  # of what was replaced nothing is kept
  table.delete(keys)
  assert table.store.total.bytes == 0


def test_what_is_gone_does_not_come_back() -> None:
  table = make(rate_limiter=tables.queue(2), sampler=tables.fifo(), max_times_sampled=1)
  writer, keys = two_columns(table, 1.0, 1.0)
  table.delete(keys[:1])
  before = counted(table)
  amend(writer, table, keys[0], 7.0, 8.0)
  amend(writer, table, 2**40, 7.0, 8.0)
  assert counted(table) == before and set(table.contents.slots) == {keys[1]}
  assert writer.in_flight == 0  # it did not wait for the limiter either
  writer.append({'x': np.int32(0), 'y': np.float32(0)})
  assert writer.create_item(table, 1.0, num_steps=1) < 2**40  # it has drawn no keys from it


def test_columns_that_there_are_not_are_refused() -> None:
  table = make()
  writer, keys = two_columns(table, 1.0)
  other = tables.Writer(table.store, history=1)
  other.append({'z': np.float32(1), 'y': np.float64(1)})
  for name in 'zy':
    with pytest.raises(ValueError, match=f'{name}: float'):
      other.amend_item(table, keys[0], {name: other.history[name][-1:]})
  with pytest.raises(ValueError, match='key=0'):
    amend(writer, table, 0, 1.0)
  with pytest.raises(ValueError, match='store'):
    other.amend_item(make(), keys[0], {'y': other.history['y'][-1:]})
