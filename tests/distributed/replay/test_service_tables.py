"""Tables through the wire do what tables in the process do."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import ROOT, environment, until
from hypothesis import given, settings
from hypothesis import strategies as st
from services import ANY

sys.path.append(str(ROOT / 'tests' / 'tables'))

from table_model import Model, removals
from test_model import CASES, EXPONENT, LIMITERS, SELECTORS, Pair

from podrace import tables
from podrace.commands.replay import parse_tables
from podrace.distributed import parameters, replay
from podrace.distributed.replay import replay_messages
from podrace.distributed.replay.server import ReplayServer

SIMPLE: dict[str, Any] = dict(
  sampler=tables.uniform(), remover=tables.fifo(), rate_limiter=tables.min_size(1), max_size=1000
)
FIFO: dict[str, Any] = dict(sampler=tables.fifo(), remover=tables.fifo())


@pytest.fixture(scope='module')
def server() -> Iterator[ReplayServer]:
  with ReplayServer(ANY) as server:
    yield server
  assert server.failure is None


@pytest.fixture
def client(server: ReplayServer) -> Iterator[replay.ReplayClient]:
  with replay.connect(server.address) as client:
    yield client


class RemotePair(Pair):
  """A table that is elsewhere and its model, told the same things."""

  def __init__(
    self, sampler: str, remover: str, limiter: int, max_size: int, max_times: int, rows: int
  ) -> None:
    rate_limiter, limits = LIMITERS[limiter]
    max_size = max(max_size, limits.min_size)
    self.server = ReplayServer(ANY).__enter__()
    self.client = replay.connect(self.server.address)
    self.table: Any = self.client.table(
      'it', sampler=SELECTORS[sampler], remover=SELECTORS[remover], rate_limiter=rate_limiter,
      max_size=max_size, max_times_sampled=max_times,
    )  # fmt: skip
    self.host, self.store = self.server.tables['it'], self.server.store
    self.writer = self.client.writer(5, rows, max_in_flight=10**6, delay=0.0)
    removed = removals(self.host)
    self.model = Model(sampler, remover, limits, max_size, max_times, EXPONENT, removed)
    self.keys: list[int] = []
    self.step = self.rows = self.made = 0

  def arrived(self) -> None:
    self.made += 1
    until(lambda: self.server.counts['items'] == self.made)

  def check(self) -> None:
    until(lambda: self.writer.in_flight == len(self.model.waiting), 5.0)
    super().check()

  def finish(self) -> None:
    self.client.close()
    with pytest.raises(tables.Closed):
      self.table.sample(1)
    until(lambda: not self.server.peers)
    self.host.close()
    served = self.server.served.by_name['it']
    held = self.server.inserting.held[served]
    for pending, stream, _ in held.items:  # who waits for a table that nobody closes
      for account in (stream.account, held.account):
        served.table.contents.drop(pending.item, account)
    self.host.delete(list(self.there()))
    assert (self.store.total.bytes, self.store.total.chunks) == (0, 0)
    self.server.stop()
    assert self.server.failure is None


CHOSEN = st.sampled_from(sorted(SELECTORS))


@settings(max_examples=40, deadline=None)
@given(sampler=CHOSEN, remover=CHOSEN, **CASES)
def test_any_operations(operations: list[Any], **case: Any) -> None:
  RemotePair(**case).run(operations)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(sampler=CHOSEN, remover=CHOSEN, **CASES)
def test_many_operations(operations: list[Any], **case: Any) -> None:
  RemotePair(**case).run(operations)


# --- data ---------------------------------------------------------------------------------------


Point = namedtuple('Point', ['x', 'y'])


def test_items_come_back_as_they_were(client: replay.ReplayClient) -> None:
  table = client.table('data', **SIMPLE)
  rng, writer = np.random.default_rng(0), client.writer(history=20, rows_per_chunk=6)
  steps = [
    {
      'frame': rng.integers(0, 3, (20, 20), np.uint8),
      'point': Point(np.float32(t), np.int64(t)),
      'list': [rng.normal(size=3), np.bool_(t % 2)],
      'empty': np.zeros((0, 2), np.float16),
      'complex': np.complex64(t + 1j),
    }
    for t in range(40)
  ]
  for t, step in enumerate(steps):
    writer.append({**step, 'list': None} if t % 5 == 4 else step)  # a shorter column
    if t >= 10:
      h = writer.history
      item = {'f': h['frame'][-9:], 'y': h['point'].y[-1], 'b': h['list'][1][-3:]}
      item |= {'e': h['empty'][-1], 'c': Point(h['complex'][-3:], h['point'].x[-1])}
      writer.create_item(table, 1.0, item)
  writer.flush(timeout=30)
  samples = table.sample(64, timeout=30)
  kept = [s for t, s in enumerate(steps) if t % 5 != 4]
  for i, t in enumerate(samples.data['y'].tolist()):
    np.testing.assert_array_equal(samples.data['f'][i], [s['frame'] for s in steps[t - 8 : t + 1]])
    np.testing.assert_array_equal(
      samples.data['c'].x[i], [s['complex'] for s in steps[t - 2 : t + 1]]
    )
    assert samples.data['c'].y[i] == t
    before = [s['list'][1] for s in kept if s['point'].y <= t][-3:]
    np.testing.assert_array_equal(samples.data['b'][i], before)
  assert samples.data['e'].shape == (64, 0, 2) and samples.data['e'].dtype == np.float16
  assert samples.data['f'].flags.writeable
  assert type(samples.data['c']).__name__ == 'Point'
  writer.close()


def test_either_byte_order(client: replay.ReplayClient) -> None:
  table = client.table('orders', **SIMPLE)
  with client.writer(history=40, rows_per_chunk=40) as writer:
    for t in range(40):
      writer.append({k: np.full(50, t, k) for k in ('>f4', '<f4', '>i8', '<i8')})
    writer.create_item(table, 1.0, num_steps=40)
  found = table.sample(1, timeout=30).data
  for dtype, rows in found.items():
    assert rows.dtype == np.dtype(dtype), dtype
    np.testing.assert_array_equal(rows[0, :, 0], np.arange(40))


def test_a_step_is_sent_once_and_stays_packed(
  server: ReplayServer, client: replay.ReplayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
  def refuse(*args: Any) -> Any:
    raise AssertionError('the server unpacks')

  monkeypatch.setattr(server.store, 'read', refuse)
  table = client.table('once', **SIMPLE)
  before = server.counts['pieces']
  writer = client.writer(history=8, rows_per_chunk=8)
  for t in range(80):
    writer.append({'x': np.full(1000, t, np.int64)})
    if t >= 7:
      writer.create_item(table, 1.0, num_steps=8)
  writer.flush(timeout=30)
  info = table.info()
  assert (info.inserts, server.counts['pieces'] - before, info.chunks) == (73, 10, 10)
  assert info.bytes < 80 * 8000 / 3  # as packed by the writer
  assert (table.sample(16, timeout=10).data['x'][:, 0, 0] <= 72).all()
  writer.close()


def test_large_items_go_out_in_several_messages(
  server: ReplayServer, client: replay.ReplayClient
) -> None:
  table = client.table('large', **SIMPLE)
  writer = client.writer(history=1, rows_per_chunk=1)
  rows = np.random.default_rng(0).integers(0, 2**63, (20, 2**16))  # of half a megabyte each
  for row in rows:
    writer.append({'x': row})
    writer.create_item(table, 1.0, num_steps=1)
  writer.flush(timeout=60)
  assert client.connections[0].outbox.messages >= 7
  found = table.sample(40, timeout=60).data['x'][:, 0]
  assert all((rows == row).all(axis=1).any() for row in found)
  writer.close()


def test_a_sample_that_is_too_large(
  client: replay.ReplayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
  table = client.table('too large', **SIMPLE)
  with client.writer(history=1) as writer:
    for seed in range(2):
      writer.append({'x': np.random.default_rng(seed).integers(0, 2**63, 1000)})
      writer.create_item(table, 1.0, num_steps=1)
  monkeypatch.setattr(replay_messages, 'FRAME_BYTES', 15_000)
  with pytest.raises(ValueError, match='15,000'):
    for _ in range(20):  # until both are in it
      table.sample(2, timeout=30)
  assert len(table.sample(1, timeout=30).key) == 1


def test_keys_go_in_as_many_messages_as_they_need(client: replay.ReplayClient) -> None:
  table = client.table('many keys', **SIMPLE)
  fill(client, table, 3).close(timeout=30)
  keys = np.arange(1, 200_001)
  keys[[0, 70_000, 199_999]] = np.unique(table.sample(100, timeout=30).key)
  assert table.update_priorities(keys, np.ones(len(keys))) == 3
  assert table.delete(keys) == 3 and not len(table)


def test_what_nobody_needs_is_let_go(server: ReplayServer, client: replay.ReplayClient) -> None:
  table = client.table('short', **{**SIMPLE, 'max_size': 5})
  writer = client.writer(history=2, rows_per_chunk=2, delay=0.0)
  for t in range(400):
    writer.append({'x': np.full(500, t)})
    if t:
      writer.create_item(table, 1.0, num_steps=2)
    if t % 40 == 39:
      writer.flush(timeout=30)
  writer.close(timeout=30)
  stream = next(iter(server.peers)).state.stream
  assert table.info().chunks <= 6
  until(lambda: len(stream.pieces) <= 6)  # told with items, or some time later


# --- what is refused ------------------------------------------------------------------------------


def test_settings_that_differ_are_refused_with_both_sides(client: replay.ReplayClient) -> None:
  client.table('set', **SIMPLE)
  assert client.table('set').name == 'set'
  assert client.table('set', **SIMPLE).name == 'set'
  with pytest.raises(replay.Refused, match=r'max_size .*1000 .* 7 '):
    client.table('set', **{**SIMPLE, 'max_size': 7})
  with pytest.raises(replay.Refused, match=r'sampler .*uniform .* prioritized\(0.5\)'):
    client.table('set', **{**SIMPLE, 'sampler': tables.prioritized(0.5)})
  with pytest.raises(ValueError, match=r"'nowhere'; .*\[.*'set'"):
    client.table('nowhere')
  with pytest.raises(ValueError, match='remover'):
    client.table('set', sampler=tables.uniform())
  limiter = tables.min_size(9)
  with pytest.raises(ValueError, match='deadlocks'):
    client.table('never', **{**SIMPLE, 'rate_limiter': limiter, 'max_size': 3})
  assert client.table('set').info().size == 0  # the connection goes on


def test_a_limiter_is_compared_by_its_numbers(client: replay.ReplayClient) -> None:
  ratio = tables.sample_to_insert_ratio
  client.table('ratio', **{**SIMPLE, 'rate_limiter': ratio(8.0, 10, error=80)})
  client.table('ratio', **{**SIMPLE, 'rate_limiter': ratio(8.0, 10, error=80.0)})
  (typed,) = parse_tables([
    'name=ratio,sampler=uniform,remover=fifo,rate=sample_to_insert:8:10:80,max_size=1000'
  ]).values()  # fmt: skip
  assert client.connections[0].ask(replay_messages.TABLE, 'ratio', typed).wait(1e9, '')['most']
  with pytest.raises(replay.Refused, match=r'error=80\)'):
    client.table('ratio', **{**SIMPLE, 'rate_limiter': ratio(8.0, 10, error=81)})


def test_a_table_is_of_one_run(tmp_path: Path) -> None:
  with ReplayServer(ANY, tmp_path) as server, replay.connect(server.address) as client:
    client.table('it', **SIMPLE, run='one-1')
    client.table('nobodys', **SIMPLE)
    assert client.table('it').name == client.table('it', **SIMPLE, run='one-1').name == 'it'
    for name, run, part in (
      ('it', 'two-2', r"'it' .*'one-1'.*'two-2' .*--dir"),
      ('nobodys', 'two-2', r"'nobodys' .*'two-2'"),
      ('other', 'x' * 201, 'name'),
    ):
      with pytest.raises(replay.Refused, match=part):
        client.table(name, **SIMPLE, run=run)
  settings = parse_tables(['name=it,sampler=uniform,remover=fifo,rate=min_size:1,max_size=1000'])
  for told in ({}, settings):  # it is in the checkpoint
    server = ReplayServer(ANY, tmp_path, tables=told)
    with server, replay.connect(server.address) as client:
      client.table('it', **SIMPLE, run='one-1')
      with pytest.raises(replay.Refused, match="'one-1'"):
        client.table('it', **SIMPLE, run='two-2')


def test_only_an_item_unlike_the_others_is_refused(client: replay.ReplayClient) -> None:
  table = client.table('alike', **SIMPLE)
  writer = client.writer(history=2)
  writer.append({'x': np.float32(1)})
  writer.create_item(table, 1.0, num_steps=1)
  writer.flush(timeout=30)
  other = client.writer(history=2)
  other.append({'x': np.float64(1)})
  other.create_item(table, 1.0, num_steps=1)
  with pytest.raises(ValueError, match=r'x: float32.*x: float64'):
    other.flush(timeout=30)
  other.flush(timeout=30)  # it was said once
  writer.append({'x': np.float32(2)})
  writer.create_item(table, 1.0, num_steps=1)
  writer.flush(timeout=30)
  assert len(table) == 2
  for bad in (-1.0, float('nan'), float('inf')):
    with pytest.raises(ValueError, match='priority'):
      writer.create_item(table, bad, num_steps=1)
    with pytest.raises(ValueError, match='priority'):
      table.update_priorities([1], [bad])
  with pytest.raises(ValueError, match='store'):
    writer.create_item(tables.Table('it', tables.ChunkStore(), **SIMPLE), 1.0, num_steps=1)  # type: ignore[arg-type]
  with pytest.raises(ValueError, match='max_in_flight'):
    client.writer(history=2, max_in_flight=0)


# --- waiting --------------------------------------------------------------------------------------


def fill(client: replay.ReplayClient, table: Any, n: int, **options: Any) -> tables.Writer:
  writer = client.writer(history=1, **options)
  for i in range(n):
    writer.append({'x': np.int64(i)})
    writer.create_item(table, 1.0, num_steps=1)
  return writer


def test_a_limiter_is_felt_as_back_pressure_and_loses_nothing(client: replay.ReplayClient) -> None:
  queue = dict(FIFO, rate_limiter=tables.queue(3), max_size=3, max_times_sampled=1)
  table = client.table('queue', **queue)
  writer = client.writer(history=1, max_in_flight=2, delay=0.0)
  made: list[int] = []

  def write() -> None:
    for i in range(50):
      writer.append({'x': np.int64(i)})
      writer.create_item(table, 1.0, num_steps=1)
      made.append(i)
    writer.close()

  thread = threading.Thread(target=write, daemon=True)
  thread.start()
  until(lambda: len(made) == 5)
  writer_waits = client.writer(history=1)
  writer_waits.append({'x': np.int64(99)})
  key = writer_waits.create_item(table, 1.0, num_steps=1)
  with pytest.raises(tables.RateLimited, match=r'queue\(3\) .*3 inserts.*\(sample 1 more\)'):
    writer_waits.flush(timeout=0.5)
  assert len(made) == 5 and table.info().waiting_inserts == 3
  seen = [int(x) for _ in range(51) for x in table.sample(1, timeout=30).data['x'][:, 0]]
  assert sorted(seen) == [*range(50), 99] and [x for x in seen if x < 99] == list(range(50))
  thread.join(30)
  writer_waits.close(timeout=30)
  assert not thread.is_alive() and key > 0


def test_timeouts_tell_what_is_missing_and_keep_what_was_drawn(client: replay.ReplayClient) -> None:
  table = client.table(
    'late', **{**SIMPLE, 'rate_limiter': tables.sample_to_insert_ratio(2.0, 1, (0.0, 1e6))}
  )
  begun = time.monotonic()
  with pytest.raises(tables.RateLimited, match=r'1 .* 0 ') as empty:
    table.sample(1, timeout=0.3)
  assert empty.value.taken is None and 0.25 < time.monotonic() - begun < 5
  fill(client, table, 2).close(timeout=30)
  assert len(table.sample(9, at_least=1, timeout=30).key) == 4
  fill(client, table, 1).close(timeout=30)
  with pytest.raises(tables.RateLimited) as late:
    table.sample(5, timeout=0.3)
  assert late.value.taken is not None and len(late.value.taken.key) == 2
  assert table.info().samples == 6
  with pytest.raises(ValueError, match='at_least'):
    table.sample(2, at_least=3)


def test_a_waiting_sampler_is_served_at_once(client: replay.ReplayClient) -> None:
  table = client.table('soon', **SIMPLE)
  found: list[Any] = []
  threads = [
    threading.Thread(target=lambda: found.append(table.sample(2, timeout=60))) for _ in range(3)
  ]
  for thread in threads:
    thread.start()
  until(lambda: table.info().waiting_samplers == 3)
  fill(client, table, 1).close(timeout=30)
  for thread in threads:
    thread.join(30)
  assert len(found) == 3 and table.info().waiting_samplers == 0


def test_prefetching_is_bounded_and_taken_back(
  server: ReplayServer, client: replay.ReplayClient
) -> None:
  table = client.table('ahead', **SIMPLE)
  fill(client, table, 100).close(timeout=30)
  with table.sampler(10, prefetch=3) as batches:
    for _ in range(20):
      assert len(next(batches).key) == 10
    until(lambda: table.info().samples == 230)
    assert table.info().samples == 230  # 20 taken, 3 on their way
  waiting = client.table('nothing', **SIMPLE).sampler(1, prefetch=4, timeout=0.2)
  with waiting as batches, pytest.raises(tables.RateLimited):
    next(batches)
  until(lambda: not server.tables['nothing'].info().waiting_samplers)
  with pytest.raises(tables.Closed):
    next(waiting)


def test_closing_ends_all_waits(server: ReplayServer) -> None:
  client = replay.connect(server.address)
  table = client.table('ends', **{**SIMPLE, 'rate_limiter': tables.queue(1)})
  writer = fill(client, table, 1)
  writer.flush(timeout=30)
  ended: list[Any] = []

  def expect(call: Any) -> threading.Thread:
    def run() -> None:
      with pytest.raises(tables.Closed):
        call()
      ended.append(call)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread

  writer.append({'x': np.int64(1)})
  writer.create_item(table, 1.0, num_steps=1)
  empty = client.table('empty', **SIMPLE)
  threads = [expect(writer.flush), expect(lambda: empty.sample(5))]
  until(lambda: table.info().waiting_inserts == 1 and empty.info().waiting_samplers == 1)
  client.close()
  for thread in threads:
    thread.join(10)
  assert len(ended) == 2
  with pytest.raises(tables.Closed):
    writer.append({'x': np.int64(2)})
    writer.create_item(table, 1.0, num_steps=1)


def test_sizes_are_told_every_second_and_with_each_sample() -> None:
  once: dict[str, Any] = {**SIMPLE, 'max_times_sampled': 1}
  with (
    ReplayServer(ANY, peer_timeout=100.0) as server,
    replay.connect(server.address) as client,
    replay.connect(server.address) as other,
  ):
    table = client.table('it', **once)
    fill(other, other.table('it'), 5).close(timeout=30)
    until(lambda: table.last_size == 5)
    table.sample(5, timeout=30)
    assert table.last_size == 0  # at once
    client.connections[0].sizes = {'it': 7}
    with pytest.raises(tables.RateLimited):
      table.sample(1, timeout=0.01)
    assert table.last_size == 0


def test_a_server_that_is_not_there_is_named() -> None:
  with pytest.raises(TimeoutError, match=r'tcp://127\.0\.0\.1:9'):
    replay.connect('tcp://127.0.0.1:9', timeout=0.3)
  refused = pytest.raises(replay.Refused, match="'podrace replay'")
  with parameters.Publisher(ANY) as other, refused:
    replay.connect(other.address, timeout=10)


# --- what it is made of -----------------------------------------------------------------------------


def test_a_million_keys_differ(client: replay.ReplayClient) -> None:
  stores = [client.connections[0].writer_store(0.5) for _ in range(4)]
  keys = {store.new_key() for store in stores for _ in range(300_000)}
  assert len(keys) == 1_200_000 and min(keys) > 0 and max(keys) < 2**63
  store = stores[0]
  store.last_key = (store.last_key | (2**replay_messages.KEY_BITS - 1)) - 1
  last = [store.new_key() for _ in range(3)]
  assert len({k >> replay_messages.KEY_BITS for k in last}) == 2


def test_neither_jax_nor_tensorflow_is_imported() -> None:
  code = (
    'import sys; from podrace import cli; from podrace.distributed import replay; '
    'import podrace.distributed.replay.server, podrace.distributed.net.dashboard; '
    "print(sorted({'jax', 'flax', 'tensorflow'} & set(sys.modules)))"
  )
  done = subprocess.run(
    [sys.executable, '-c', code], env=environment(), capture_output=True, text=True, check=True
  )
  assert done.stdout.strip() == '[]'
