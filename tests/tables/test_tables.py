"""Tables: distributions, limits, waiting, sharing, memory, threads."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from podrace import tables
from podrace.tables.chunks import DIFFERENCES, PACKED
from podrace.tables.items import held
from podrace.tables.limiters import Counts, RateLimiter

REPLAY = dict(
  sampler=tables.uniform(), remover=tables.fifo(), rate_limiter=tables.min_size(1), max_size=1000
)
ONCE: dict[str, Any] = dict(sampler=tables.fifo(), max_times_sampled=1)
ONE_AT_A_TIME: dict[str, Any] = dict(ONCE, rate_limiter=tables.queue(1))


def make(store: tables.ChunkStore | None = None, name: str = 'it', **changes: Any) -> tables.Table:
  return tables.Table(name, store or tables.ChunkStore(), **{**REPLAY, **changes})


def fill(table: tables.Table, priorities: list[float], **options: Any) -> list[int]:
  """An item of one row, its number, for each priority; their keys."""
  with tables.Writer(table.store, history=1, **options) as writer:
    return write(writer, table, *range(len(priorities)), priorities=priorities)


def write(
  writer: tables.Writer, table: tables.Table, *values: Any, priorities: Sequence[float] = ()
) -> list[int]:
  """An item of one row for each value; their keys."""
  keys = []
  for value, priority in itertools.zip_longest(values, priorities, fillvalue=1.0):
    writer.append(np.int64(value) if isinstance(value, int) else value)
    keys.append(writer.create_item(table, priority, num_steps=1))
  return keys


def writer_of(table: tables.Table, *values: Any, **options: Any) -> tables.Writer:
  """A writer that has made an item of one row for each value."""
  writer = tables.Writer(table.store, **{'history': 1, **options})
  write(writer, table, *values)
  return writer


def noise(seed: int) -> np.ndarray:
  """1,000 bytes that no chunk packs."""
  return np.frombuffer(np.random.default_rng(seed).bytes(1000), np.uint8)


def in_thread(call: Callable[[], Any]) -> Callable[[], Any]:
  """Starts it; what is returned waits for its end, and returns what it returned or raised."""
  outcome: list[Any] = []

  def run() -> None:
    try:
      outcome.append(call())
    except BaseException as e:
      outcome.append(e)

  thread = threading.Thread(target=run, daemon=True)
  thread.start()

  def result() -> Any:
    thread.join(120)
    assert not thread.is_alive(), 'the thread hangs'
    return outcome[0]

  return result


class Waits:
  """A `report` that tells when somebody waits; to be given as **Waits().options."""

  def __init__(self) -> None:
    self.reported, self.messages = threading.Event(), []
    self.options = dict(report_after=1e-3, report=self)

  def __call__(self, message: str) -> None:
    self.messages.append(message)
    self.reported.set()

  def wait(self) -> str:
    assert self.reported.wait(30), 'nobody waits'
    return self.messages[0]


def test_imports_no_jax() -> None:
  code = 'import sys, podrace.tables; sys.exit("jax" in sys.modules)'
  assert subprocess.run([sys.executable, '-c', code], check=False).returncode == 0


# --- selectors --------------------------------------------------------------------------------


def drawn(table: tables.Table, keys: list[int], n: int) -> np.ndarray:
  """How often each key was sampled, in n samples taken in batches."""
  found = np.concatenate([table.sample(500).key for _ in range(n // 500)])
  return np.array([(found == key).sum() for key in keys])


@pytest.mark.parametrize('exponent', [0.0, 0.5, 1.0, 2.5])
def test_prioritized_distribution(exponent: float) -> None:
  table = make(sampler=tables.prioritized(exponent), seed=3)
  priorities = np.random.default_rng(0).uniform(0.1, 2, 150).tolist()
  priorities[7] = priorities[100] = 0.0
  keys = fill(table, priorities)
  weights = np.array([p**exponent if p else 0.0 for p in priorities])
  counts = drawn(table, keys, 30_000)
  assert counts[7] == counts[100] == 0
  some = weights > 0
  expected = 30_000 * weights[some] / weights.sum()
  assert stats.chisquare(counts[some], expected).pvalue > 0.01
  sample = table.sample(100)
  np.testing.assert_allclose(sample.probability, weights[sample.data.ravel()] / weights.sum())


def test_prioritized_distribution_follows_updates_and_deletes() -> None:
  table = make(sampler=tables.prioritized(1.0), seed=5)
  keys = fill(table, [1.0] * 300)
  table.sample(1)  # the sums are made, and must be kept up to date
  table.update_priorities(keys[:100], np.full(100, 3.0))
  table.delete(keys[200:])
  counts = drawn(table, keys, 20_000)
  assert not counts[200:].any()
  expected = 20_000 * np.repeat([3 / 400, 1 / 400], 100)
  assert stats.chisquare(counts[:200], expected).pvalue > 0.01


@pytest.mark.parametrize('u', [0.0, 1.0])
@pytest.mark.parametrize('weights', [[0.0, 1.0, 0.0], [0.0, 0.0, 0.3, 0.1, 0.0, 0.0], [1e-300] * 3])
def test_zero_priority_is_never_drawn_not_even_at_the_edges(u: float, weights: list[float]) -> None:
  class Edge:
    def random(self, n: int) -> np.ndarray:
      return np.full(n, u)

  order = tables.prioritized(1.0).make()
  for slot, weight in enumerate(weights):
    order.insert(slot, weight)
  slots, probabilities = order.draw(3, Edge())  # type: ignore[arg-type]
  positive = np.flatnonzero(weights)
  assert slots.tolist() == [positive[-1 if u else 0]] * 3
  assert (probabilities > 0).all()


def test_all_zero_priorities_are_uniform() -> None:
  table = make(sampler=tables.prioritized(0.8), seed=1)
  counts = drawn(table, fill(table, [0.0] * 20), 10_000)
  assert stats.chisquare(counts).pvalue > 0.01


def test_uniform_distribution() -> None:
  table = make(seed=2)
  keys = fill(table, [1.0] * 60)
  table.delete(keys[::3])
  counts = drawn(table, keys, 20_000)
  assert not counts[::3].any()
  assert stats.chisquare(np.delete(counts, np.s_[::3])).pvalue > 0.01


@pytest.mark.parametrize(
  'remover, expected', [('uniform', [1, 1, 1, 1]), ('prioritized', [0, 1, 2, 5])]
)
def test_removers_distribution(remover: str, expected: list[int]) -> None:
  """Which of four items goes when a fifth comes in; over many tables."""
  selector = tables.uniform() if remover == 'uniform' else tables.prioritized(1.0)
  gone = np.zeros(5)
  for seed in range(2000):
    table = make(remover=selector, max_size=4, seed=seed)
    keys = fill(table, [0.0, 1.0, 2.0, 5.0, 0.0], rows_per_chunk=8)
    gone[[key not in table.contents.slots for key in keys]] += 1
  if remover == 'uniform':
    assert stats.chisquare(gone).pvalue > 0.01
  else:
    assert gone[0] == gone[4] == 0
    assert stats.chisquare(gone[1:4], 2000 * np.array([1, 2, 5]) / 8).pvalue > 0.01


@pytest.mark.slow
def test_a_million_priorities() -> None:
  """Sums stay exact to rounding, whatever the order of changes; the tree against a plain sum."""
  order = tables.prioritized(1.0).make()
  rng = np.random.default_rng(0)
  n = 2**20
  for slot in range(n):
    order.insert(slot, 1e-6)
  weights = rng.uniform(0, 1, n) ** 8
  for part in np.array_split(rng.permutation(n), 50):
    order.update(part, weights[part])
    order.draw(1, rng)
  slots, probabilities = order.draw(200_000, rng)
  np.testing.assert_allclose(probabilities, weights[slots] / math.fsum(weights), rtol=1e-12)
  tenths = np.digitize(slots, np.linspace(0, n, 11)[1:-1])
  expected = np.array([x.sum() for x in np.split(weights[: n // 10 * 10], 10)])
  expected *= 200_000 / expected.sum()
  assert stats.chisquare(np.bincount(tenths, minlength=10), expected, sum_check=False).pvalue > 0.01


def test_equal_seeds_give_equal_samples() -> None:
  def sampled(seed: int) -> list[int]:
    table = make(sampler=tables.prioritized(0.5), seed=seed)
    fill(table, [1.0, 2.0, 3.0] * 20)
    return [key for _ in range(5) for key in table.sample(20).key.tolist()]

  assert sampled(4) == sampled(4)
  assert sampled(4) != sampled(5)


@pytest.mark.parametrize('priority', [-1.0, float('nan'), float('inf'), -1e-300])
def test_bad_priorities_are_refused(priority: float) -> None:
  table = make(sampler=tables.prioritized(1.0))
  keys = fill(table, [1.0, 2.0])
  with pytest.raises(ValueError, match='priority'):
    fill(table, [priority])
  with pytest.raises(ValueError, match='priority'):
    table.update_priorities(keys, [5.0, priority])
  assert sorted(table.sample(50).priority.tolist())[-1] == 2.0  # none of the two was set


def test_priorities_whose_power_is_too_large_are_refused() -> None:
  table = make(sampler=tables.prioritized(10.0))
  fill(table, [1e29])
  with pytest.raises(ValueError, match=r'prioritized\(10\)'):
    fill(table, [1e31])


def test_update_takes_the_last_of_equal_keys() -> None:
  table = make(sampler=tables.max_heap())
  keys = fill(table, [1.0, 2.0, 3.0])
  n = table.update_priorities([keys[0], 12345, keys[0], keys[1]], [9.0, 7.0, 0.5, 2.5])
  assert n == 3
  assert table.sample(1).key == keys[2]
  table.delete([keys[2]])
  assert (table.sample(1).key, table.sample(1).priority) == (keys[1], 2.5)
  with pytest.raises(ValueError, match=r'3.*1'):
    table.update_priorities(keys, [1.0])


# --- limiters ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'make_limiter, message',
  [
    (lambda: tables.min_size(0), 'min_size'),
    (lambda: tables.sample_to_insert_ratio(0.0, 1, 5.0), 'samples_per_insert'),
    (lambda: tables.sample_to_insert_ratio(-1.0, 1, 5.0), 'samples_per_insert'),
    (lambda: tables.sample_to_insert_ratio(float('nan'), 1, 5.0), 'samples_per_insert'),
    (lambda: tables.sample_to_insert_ratio(2.0, 0, 5.0), 'min_size'),
    (lambda: tables.sample_to_insert_ratio(2.0, 10, 1.99), 'error must be at least 2,'),
    (lambda: tables.sample_to_insert_ratio(2.0, 10, (18.0, 21.9)), ' 4,'),
    (lambda: tables.sample_to_insert_ratio(0.5, 10, 0.99), 'error must be at least 1,'),
    (lambda: tables.sample_to_insert_ratio(2.0, 10, float('nan')), ' 2,'),
    (
      lambda: tables.sample_to_insert_ratio(1.0, 3, (3.5, 9.0)),
      r'deadlocks.* 3 samples.* 3\.5.*min_size',
    ),
    (lambda: tables.queue(0), 'size'),
    (lambda: tables.stack(0), 'size'),
    (lambda: make(max_size=4, rate_limiter=tables.min_size(5)), 'deadlocks'),
    (lambda: make(max_bytes=0), 'max_bytes=0'),
    (lambda: make(max_times_sampled=-1), 'max_times_sampled=-1'),
    (lambda: tables.prioritized(-0.1), 'exponent'),
    (lambda: tables.prioritized(float('nan')), 'exponent'),
  ],
)
def test_impossible_settings_are_refused(make_limiter: Callable[[], Any], message: str) -> None:
  with pytest.raises(ValueError, match=message):
    make_limiter()


def test_bounds_just_wide_enough_are_accepted() -> None:
  limiter = tables.sample_to_insert_ratio(2.0, 10, 2.0)
  assert (limiter.min_diff, limiter.max_diff) == (18, 22)
  assert tables.sample_to_insert_ratio(1.0, 3, (3.0, 9.0)).min_diff == 3.0


def test_no_accepted_ratio_deadlocks() -> None:
  """From any reachable balance one side can go on: both sides played at random, some greedily."""
  rng = np.random.default_rng(0)
  for _ in range(150):
    spi, size = float(rng.choice([0.1, 0.3, 1, 1.7, 4])), int(rng.integers(1, 6))
    limiter = tables.sample_to_insert_ratio(spi, size, max(1.0, spi) * rng.uniform(1, 1.2))
    counts, eager = Counts(), rng.uniform()
    for _ in range(200):
      moves = [limiter.may_insert(counts), limiter.may_sample(counts)]
      assert any(moves), (limiter, counts)
      if moves[0] and (not moves[1] or rng.uniform() < eager):
        counts.inserts += 1
      else:
        counts.samples += 1


@given(
  st.floats(0.01, 10),
  st.floats(-20, 20),
  st.integers(1, 10**6),
  st.integers(-5, 5),
  st.integers(1, 9),
)
def test_as_many_samples_as_the_rule_allows(
  spi: float, low: float, inserts: int, off: int, most: int
) -> None:
  """Also where the balance is within a rounding error of the bound."""
  limiter = RateLimiter('it', spi, 1, min(low, spi), 1e9)
  counts = Counts(inserts, max(0, int(inserts * spi - limiter.min_diff) + off))
  n = limiter.samples_allowed(counts, most)
  assert n == sum(limiter.may_sample(counts, k) for k in range(1, most + 1))


@pytest.mark.parametrize('samples_per_insert', [0.25, 1.0, 3.0])
def test_samples_per_insert_is_exact(samples_per_insert: float) -> None:
  """A greedy sampler gets every sample that is due and none that isn't."""
  limiter = tables.sample_to_insert_ratio(samples_per_insert, 4, 4.0)
  table = make(rate_limiter=limiter, max_size=10)
  writer = tables.Writer(table.store, history=1, max_in_flight=1)
  for i in range(101):
    write(writer, table, i)
    with contextlib.suppress(tables.RateLimited):
      while True:
        table.sample(1, timeout=0)
  due = (101 - 4) * samples_per_insert + 4
  assert table.info().samples == math.floor(due)
  assert table.info().inserts == 101


def test_queue_gives_each_item_once_in_order() -> None:
  table = make(rate_limiter=tables.queue(5), max_size=5, **ONCE)
  written = in_thread(lambda: writer_of(table, *range(200), max_in_flight=1).flush())
  got = [x for _ in range(25) for x in table.sample(8, timeout=30).data.ravel().tolist()]
  assert written() is None
  assert got == list(range(200)) and (len(table), table.info().deletes) == (0, 200)


# --- waiting ----------------------------------------------------------------------------------


def test_a_blocked_sample_says_why() -> None:
  table = make(rate_limiter=tables.sample_to_insert_ratio(2.0, 3, 2.0))
  fill(table, [1.0, 1.0])
  with pytest.raises(tables.RateLimited) as e:
    table.sample(1, timeout=0)
  for part in ("'it'", str(table.rate_limiter.name), '2 inserts', '0 samples', '(insert 1 more)'):
    assert part in str(e.value)
  assert e.value.taken is None and isinstance(e.value, TimeoutError)


def test_a_blocked_insert_says_why() -> None:
  table = make(rate_limiter=tables.queue(2), **ONCE)
  fill(table, [1.0, 1.0])
  writer = tables.Writer(table.store, history=1, max_in_flight=0)
  writer.append(np.int64(7))
  with pytest.raises(tables.RateLimited, match=r"'it'.*queue\(2\).*\(sample 1 more\)"):
    writer.create_item(table, 1.0, num_steps=1, timeout=0)
  assert (writer.in_flight, table.info().waiting_inserts) == (0, 0)  # it was taken back
  table.sample(1)
  assert len(table) == 1


def test_samples_taken_before_a_timeout_are_not_lost() -> None:
  table = make(rate_limiter=tables.queue(3), **ONCE)
  fill(table, [1.0, 1.0])
  with pytest.raises(tables.RateLimited) as e:
    table.sample(3, timeout=0)
  assert e.value.taken is not None
  assert e.value.taken.data.ravel().tolist() == [0, 1]
  assert table.info().samples == 2
  fill(table, [1.0, 1.0])
  assert len(table.sample(3, at_least=1, timeout=0).key) == 2
  for n, at_least in ((2, 3), (0, None)):
    with pytest.raises(ValueError, match='at_least'):
      table.sample(n, at_least=at_least)


def test_a_stuck_sample_reports_itself_and_can_be_cancelled() -> None:
  waits = Waits()
  table = make(rate_limiter=tables.min_size(5), **waits.options)
  fill(table, [1.0, 1.0])
  result = in_thread(lambda: table.sample(1))
  message = waits.wait()
  assert all(part in message for part in ("'it'", 'min_size(5)', '(insert 3 more)'))
  assert table.info().waiting_samplers == 1
  table.close()
  error = result()
  assert isinstance(error, tables.Closed) and error.taken is None
  assert table.info().waiting_samplers == 0
  with pytest.raises(tables.Closed):
    table.sample(1)


def test_a_stuck_insert_reports_itself_and_can_be_cancelled() -> None:
  waits = Waits()
  table = make(rate_limiter=tables.queue(1), sampler=tables.fifo(), **waits.options)
  writer = tables.Writer(table.store, history=3, max_in_flight=1)
  for i in range(3):
    writer.append(np.int64(i))
  writer.create_item(table, 1.0, num_steps=1)
  writer.create_item(table, 1.0, num_steps=2)  # waits, but nobody waits for it
  result = in_thread(lambda: writer.create_item(table, 1.0, num_steps=3))
  message = waits.wait()
  assert "'it'" in message and 'queue(1)' in message
  assert table.info().waiting_inserts == writer.in_flight == 1
  table.close()
  assert isinstance(result(), tables.Closed)
  with pytest.raises(tables.Closed):
    writer.create_item(table, 1.0, num_steps=1)
  writer.close()  # it was said
  table.delete(list(table.contents.slots))
  assert table.store.total.bytes == 0


def test_waiting_is_cancelled_and_the_table_goes_on() -> None:
  """Samples that were taken come with the error; an item that was made still waits, one that was not is not."""
  waits = Waits()
  table = make(rate_limiter=tables.queue(2), **ONCE, **waits.options)
  keys = fill(table, [1.0, 1.0])
  table.cancel()  # nobody waits: nothing happens
  writer = tables.Writer(table.store, history=1, max_in_flight=1)
  keys += write(writer, table, 7)  # waits; no call waits for it
  for call in (writer.flush, lambda: writer.create_item(table, 1.0, num_steps=1)):
    waits.reported.clear()
    result = in_thread(call)
    waits.wait()
    table.cancel()
    error = result()
    assert isinstance(error, tables.Cancelled) and "'it'" in str(error)
    assert writer.in_flight == table.info().waiting_inserts == 1
  waits.reported.clear()
  result = in_thread(lambda: table.sample(4))
  waits.wait()
  table.cancel()
  error = result()
  assert isinstance(error, tables.Cancelled) and "'it'" in str(error)
  assert error.taken is not None and error.taken.key.tolist() == keys
  assert (table.info().samples, table.info().waiting_samplers, writer.in_flight) == (3, 0, 0)
  fill(table, [1.0])
  assert table.sample(1, timeout=30).data.tolist() == [[0]]
  writer.close()


def test_an_item_whose_wait_is_cancelled_is_withdrawn() -> None:
  waits = Waits()
  table = make(rate_limiter=tables.queue(1), sampler=tables.fifo(), **waits.options)
  with writer_of(table, 0, max_in_flight=0) as writer:
    result = in_thread(lambda: writer.create_item(table, 1.0, num_steps=1))
    waits.wait()
    table.cancel()
    assert isinstance(result(), tables.Cancelled)
    assert (len(table), writer.in_flight, table.info().waiting_inserts) == (1, 0, 0)


def two_that_are_full(**options: Any) -> tuple[tables.Table, tables.Table, tables.Writer]:
  """Tables on one store, in each of which an item of the writer's is, and for each of which one waits."""
  first = make(name='first', **ONE_AT_A_TIME, **options)
  second = make(first.store, 'second', **ONE_AT_A_TIME)
  writer = tables.Writer(first.store, history=1, max_in_flight=2)
  writer.append(np.int64(0))
  for table in (first, second) * 2:
    writer.create_item(table, 1.0, num_steps=1)
  assert writer.in_flight == 2
  return first, second, writer


def test_a_flush_waits_for_any_of_several_tables() -> None:
  """Not for the oldest item, which may be stuck."""
  waits = Waits()
  first, second, writer = two_that_are_full(**waits.options)
  flushed = in_thread(lambda: writer.flush(1, timeout=60))
  assert "'first'" in waits.wait()
  second.sample(1)
  assert flushed() is None and writer.in_flight == 1
  writer.create_item(second, 1.0, num_steps=1)
  waits.reported.clear()
  made = in_thread(lambda: writer.create_item(second, 1.0, num_steps=1, timeout=60))
  waits.wait()
  second.sample(1)
  assert isinstance(made(), int) and writer.in_flight == 2
  waits.reported.clear()
  flushed = in_thread(writer.flush)
  waits.wait()
  second.cancel()
  assert isinstance(flushed(), tables.Cancelled) and writer.in_flight == 2
  second.sample(2)
  first.sample(2)
  writer.close(timeout=60)


def test_inserted_items_are_forgotten_behind_a_stuck_one() -> None:
  _, second, writer = two_that_are_full()
  (item,) = [weakref.ref(pending.item) for pending in second.desk.inserts]
  second.sample(1)
  assert item() is not None
  second.sample(1)
  assert item() is None and writer.in_flight == 1


def test_a_writer_hears_once_of_a_closed_table() -> None:
  waits = Waits()
  first, second, writer = two_that_are_full(**waits.options)
  flushed = in_thread(writer.flush)
  waits.wait()
  first.close()
  assert isinstance(error := flushed(), tables.Closed) and "'first'" in str(error)
  assert writer.in_flight == 1
  second.sample(1)
  writer.end_episode(timeout=60)
  write(writer, second, 1)
  second.close()
  with pytest.raises(tables.Closed, match="'second'"):
    writer.close()
  assert writer.in_flight == 0


def test_two_tables_that_close_are_told_of_both() -> None:
  first, second, writer = two_that_are_full()
  first.close()
  second.close()
  for name in ('first', 'second'):
    with pytest.raises(tables.Closed, match=f"'{name}'"):
      writer.flush()
  writer.close()


def test_items_that_are_dropped_together_are_told_of_once() -> None:
  table = make(rate_limiter=tables.queue(1))
  writer = writer_of(table, *range(5))
  table.close()
  with pytest.raises(tables.Closed):
    writer.flush()
  writer.close()


def instead_of_waiting(monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[float], None]) -> None:
  """Calls `meanwhile` where this thread would wait for a condition."""
  wait, thread = threading.Condition.wait, threading.current_thread()

  def instead(condition: threading.Condition, timeout: float | None = None) -> bool:
    if threading.current_thread() is not thread:
      return wait(condition, timeout)
    meanwhile(math.inf if timeout is None else timeout)
    return True

  monkeypatch.setattr(threading.Condition, 'wait', instead)


@pytest.mark.parametrize('blocking', [False, True])
def test_an_insert_loses_no_cancel(blocking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
  """The flush goes on to the next item; and while an item is made that nobody waits for yet."""
  table = make(**ONE_AT_A_TIME)
  looks: list[float] = []

  def meanwhile(seconds: float) -> None:
    looks.append(seconds)
    assert len(looks) == 1, 'it waits on'
    table.store.lock.release()
    table.sample(1)
    table.cancel()
    table.store.lock.acquire()

  instead_of_waiting(monkeypatch, meanwhile)
  writer = writer_of(table, 0, max_in_flight=0 if blocking else 9)
  if not blocking:
    write(writer, table, 1, 2, 3)
    with pytest.raises(tables.Cancelled):
      writer.flush()
    assert writer.in_flight == 2
    return
  submit = table.submit

  def submit_and_cancel(*args: Any) -> Any:
    pending = submit(*args)
    table.cancel()
    return pending

  monkeypatch.setattr(table, 'submit', submit_and_cancel)
  with pytest.raises(tables.Cancelled):
    writer.create_item(table, 1.0, num_steps=1)
  assert writer.in_flight == 0 and not looks


def test_a_flush_is_one_wait_whatever_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
  """Its reports count from its beginning, and become rarer."""
  now, told = [0.0], []
  table = make(
    report_after=2.0, report=lambda message: told.append((now[0], message)), **ONE_AT_A_TIME
  )
  writer = writer_of(table, *range(60), max_in_flight=99)
  monkeypatch.setattr(time, 'monotonic', lambda: now[0])

  def meanwhile(seconds: float) -> None:
    now[0] += 1
    table.store.lock.release()
    table.sample(1)
    table.store.lock.acquire()

  instead_of_waiting(monkeypatch, meanwhile)
  with pytest.raises(tables.RateLimited, match='50 s'):
    writer.flush(timeout=50.0)
  assert [seconds for seconds, _ in told] == [2, 6, 14, 30]
  assert all(f'{seconds:.0f} s' in message for seconds, message in told)


def test_reports_become_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
  now, told = [0.0], []
  table = make(report_after=2.0, report=lambda message: told.append(now[0]))
  monkeypatch.setattr(time, 'monotonic', lambda: now[0])
  instead_of_waiting(monkeypatch, lambda seconds: now.__setitem__(0, now[0] + seconds))
  with pytest.raises(tables.RateLimited, match='50 s'):
    table.sample(1, timeout=50.0)
  assert told == [2, 6, 14, 30]


def test_who_is_told_of_waiting_may_ask_the_table() -> None:
  told: list[Any] = []

  def report(message: str) -> None:
    told.append(table.info())
    table.cancel()

  table = make(report_after=0.002, report=report)
  assert isinstance(in_thread(lambda: table.sample(1))(), tables.Cancelled)
  assert len(told) == 1 and told[0].samples == 0


def test_samples_taken_before_a_table_is_closed_are_not_lost(caplog: Any) -> None:
  """Nor by a report that fails."""
  told = threading.Event()

  def report(message: str) -> None:
    told.set()
    raise ArithmeticError('of the report')

  table = make(rate_limiter=tables.queue(2), report_after=1e-3, report=report, **ONCE)
  fill(table, [1.0, 1.0])
  result = in_thread(lambda: table.sample(3))
  assert told.wait(30)
  table.close()
  error = result()
  assert isinstance(error, tables.Closed)
  assert error.taken is not None and error.taken.data.ravel().tolist() == [0, 1]
  assert 'of the report' in caplog.text and "'it'" in caplog.text


def test_seconds_are_a_partition_of_the_time() -> None:
  waits = Waits()
  begun = time.perf_counter()
  table = make(rate_limiter=tables.min_size(50), **waits.options)
  made = time.perf_counter()
  result = in_thread(lambda: table.sample(1))
  waits.wait()
  fill(table, [1.0] * 50)
  result()
  before = time.perf_counter()
  seconds = table.info().seconds
  after = time.perf_counter()
  assert before - made <= sum(seconds.values()) <= after - begun
  assert seconds['waiting_for_inserts'] > 1e-3
  assert seconds['waiting_for_samples'] == 0
  assert min(seconds[k] for k in ('sampling', 'inserting', 'sleeping')) > 0


# --- chunks -----------------------------------------------------------------------------------


def test_a_chunk_is_freed_with_its_last_item() -> None:
  store = tables.ChunkStore()
  one, two = make(store, 'one'), make(store, 'two')
  writer = tables.Writer(store, history=4, rows_per_chunk=2)
  for i in range(4):
    writer.append({'x': np.full(1000, i)})
  a = writer.create_item(one, 1.0, num_steps=4)
  b = writer.create_item(two, 1.0, num_steps=3)  # needs both chunks as well
  c = writer.create_item(two, 1.0, num_steps=1)
  writer.close()
  chunks = [weakref.ref(chunk) for chunk in held(one.contents.items).values()]
  assert len(chunks) == 2
  assert store.total.bytes == one.contents.account.bytes == two.contents.account.bytes > 0

  one.delete([a])
  assert (one.contents.account.bytes, one.contents.account.chunks, store.total.chunks) == (0, 0, 2)
  np.testing.assert_array_equal(two.sample(1).data['x'].max(), 3)
  two.delete([b])
  gc.collect(1)  # the objects of this test are young
  assert [chunk() is None for chunk in chunks] == [True, False]
  assert store.total.chunks == two.contents.account.chunks == 1
  two.delete([c])
  gc.collect(1)
  assert [chunk() is None for chunk in chunks] == [True, True]
  assert (store.total.bytes, store.cached) == (0, 0)


def test_an_item_that_is_refused_fixes_no_columns() -> None:
  store = tables.ChunkStore()
  table = make(store, max_bytes=100)
  large, small = (tables.Writer(store, history=1, rows_per_chunk=1) for _ in range(2))
  large.append({'large': noise(0)})
  with pytest.raises(ValueError, match='max_bytes'):
    large.create_item(table, 1.0, num_steps=1)
  small.append({'small': np.zeros(1)})
  small.create_item(table, 1.0, num_steps=1)
  assert len(table) == 1


def test_a_sampler_that_max_bytes_starves_says_so() -> None:
  table = make(max_bytes=3000, rate_limiter=tables.min_size(10))
  writer_of(table, *map(noise, range(20)), rows_per_chunk=1)
  with pytest.raises(tables.RateLimited, match='3000 of 3000 bytes'):
    table.sample(1, timeout=0)


def test_the_cache_is_bounded_and_used() -> None:
  store = tables.ChunkStore(cache_bytes=3 * 8000)
  table = make(store)
  writer_of(table, *(np.full(1000, i) for i in range(10)), rows_per_chunk=1)
  for _ in range(20):
    sample = table.sample(10)
    assert (sample.data[:, 0, 0] == sample.data[:, 0, -1]).all()
    assert 0 < store.cached <= 24_000
  unpacked = [c for c in held(table.contents.items).values() if c.array is not None]
  assert sum(c.array.nbytes for c in unpacked if c.packed) == store.cached


def test_the_cache_keeps_what_is_used() -> None:
  table = make(tables.ChunkStore(cache_bytes=3 * 16_000), sampler=tables.max_heap())
  writer = tables.Writer(table.store, history=1, rows_per_chunk=2)
  keys = []
  for i in range(12):
    writer.append(np.full(1000, i))
    keys += write(writer, table, np.full(1000, i), priorities=[0.0])
  favourite = table.contents.items[table.contents.slots[keys[0]]].parts[0][0][0]
  for key in keys[1:]:  # the first one every other time, the others once
    for wanted in (keys[0], key):
      table.update_priorities([wanted], [1.0])
      table.sample(1)
      table.update_priorities([wanted], [0.0])
    assert favourite.array is not None


def test_whole_chunks_are_not_cached_where_there_is_no_room() -> None:
  """They are unpacked to where they are wanted, differences or not, beside parts of others."""
  table = make(tables.ChunkStore(cache_bytes=0), sampler=tables.fifo(), max_times_sampled=1)
  writer = tables.Writer(table.store, history=11, rows_per_chunk=4)
  rows = np.arange(40)[:, None] * np.int64(10**6) + np.arange(200)
  for i, row in enumerate(rows):
    writer.append({'counts': row, 'zeros': np.float32(row * 0)})
    if i >= 10:
      writer.create_item(table, 1.0, num_steps=11)
  packed = [c.packed for c in held(table.contents.items).values() if c.packed]
  assert {encoding for _, encoding in packed} == {PACKED, DIFFERENCES}
  found = table.sample(30).data
  np.testing.assert_array_equal(found['counts'], [rows[i : i + 11] for i in range(30)])
  assert not found['zeros'].any() and table.store.cached == 0


# --- threads ----------------------------------------------------------------------------------


def everything_at_once(seconds: float, tmp_path: Any, writers: int = 3) -> None:
  """Writers, samplers and somebody who changes, deletes and saves; then the books must balance."""
  store = tables.ChunkStore(cache_bytes=20_000)
  limiter = tables.sample_to_insert_ratio(2.0, 20, 40.0)
  replay = make(
    store, 'replay', rate_limiter=limiter, sampler=tables.prioritized(0.7), max_size=300
  )
  recent = make(store, 'recent', sampler=tables.lifo(), max_size=50, remover=tables.uniform())
  end, made, got = time.monotonic() + seconds, [0] * writers, [0, 0]

  def write(number: int) -> None:
    writer = tables.Writer(store, history=6, rows_per_chunk=4, max_in_flight=2)
    i = 0
    while time.monotonic() < end:
      writer.append({'who': np.int32(number), 'i': np.arange(i, i + 20)})
      i += 1
      if i % 50 == 0:
        writer.end_episode(timeout=30)
      elif i % 50 > 6:
        writer.create_item(replay, i % 5, num_steps=6, timeout=30)
        h = writer.history
        writer.create_item(recent, 1.0, {'who': h['who'][-1], 'i': h['i'][-3:]}, timeout=30)
        made[number] += 1
    writer.flush(timeout=30)
    writer.close()

  def read(number: int, table: tables.Table) -> None:
    while True:  # until the table is closed
      sample = table.sample(7, at_least=1, timeout=30)
      i = sample.data['i']
      assert (np.diff(i[:, :, 0], axis=1) == 1).all()
      assert (np.diff(i, axis=2) == 1).all()
      who = sample.data['who'].reshape(len(i), -1)
      assert (who == who[:, :1]).all()
      got[number] += len(i)
      table.update_priorities(sample.key, sample.priority + 1)

  def meddle() -> None:
    n = 0
    while time.monotonic() < end:
      recent.delete(recent.sample(1, timeout=30).key)
      tables.save(store, tmp_path / str(n))
      info = replay.info()
      assert info.size == info.inserts - info.deletes <= 300
      n += 1
    assert n

  reading = [in_thread(lambda: read(0, replay)), in_thread(lambda: read(1, recent))]
  others = [in_thread(lambda i=i: write(i)) for i in range(writers)]
  outcomes = [result() for result in [*others, in_thread(meddle)]]
  replay.close()
  recent.close()
  for outcome in outcomes + [result() for result in reading]:
    if outcome is not None and not isinstance(outcome, tables.Closed):
      raise outcome
  assert outcomes == [None] * (writers + 1)

  info = replay.info()
  assert info.inserts == sum(made) > 0
  assert info.samples == got[0] > 0
  assert recent.info().inserts == sum(made)
  assert limiter.min_diff <= 2 * info.inserts - info.samples <= limiter.max_diff
  for table in (replay, recent):
    chunks = held(table.contents.items).values()
    assert table.contents.account.bytes == sum(chunk.nbytes for chunk in chunks)
  both = held([*replay.contents.items, *recent.contents.items]).values()
  assert store.total.bytes == sum(chunk.nbytes for chunk in both)
  replay.delete(list(replay.contents.slots))
  recent.delete(list(recent.contents.slots))
  assert (store.total.bytes, store.total.chunks, store.cached) == (0, 0, 0)


def test_everything_at_once(tmp_path: Any) -> None:
  everything_at_once(1.0, tmp_path)


@pytest.mark.slow
def test_everything_at_once_for_a_minute(tmp_path: Any) -> None:
  everything_at_once(60.0, tmp_path, writers=6)
