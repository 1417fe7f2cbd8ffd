"""Several servers as shards of one table."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
from children import until
from services import ANY, Replay, all_of, read_all
from test_service_tables import SIMPLE, fill

from podrace import tables
from podrace.architectures.sebulba import example_trajectory
from podrace.distributed import replay as service
from podrace.distributed import run_tables
from podrace.distributed.replay import replay_messages, sampler
from podrace.distributed.replay.server import ReplayServer
from podrace.replay.layout import Layout
from podrace.settings.presets import PRESETS
from podrace.settings.resolved import resolve


@contextlib.contextmanager
def shards(n: int = 2) -> Iterator[tuple[list[ReplayServer], service.ReplayClient]]:
  with contextlib.ExitStack() as stack:
    servers = [stack.enter_context(ReplayServer(ANY, peer_timeout=2.0)) for _ in range(n)]
    yield servers, stack.enter_context(service.connect([s.address for s in servers]))


def test_writers_spread_and_samples_are_in_proportion_to_size() -> None:
  with shards() as (servers, client):
    table = client.table('it', **{**SIMPLE, 'sampler': tables.prioritized(1.0)})
    fill(client, table, 300).close(timeout=30)
    fill(client, table, 100).close(timeout=30)
    sizes = [len(s.tables['it']) for s in servers]
    assert sorted(sizes) == [100, 300] and len(table) == 400
    until(lambda: [c.sizes.get('it') for c in client.connections] == sizes)
    samples = [table.sample(100, timeout=30) for _ in range(40)]
    drawn = [s.tables['it'].info().samples for s in servers]
    assert abs(drawn[sizes.index(300)] - 3000) < 150  # five standard deviations and more
    for s in samples:
      np.testing.assert_allclose(s.probability, 1 / 400)
      assert (s.table_size == 400).all() and s.data['x'].shape == (100, 1)
    with pytest.raises(ValueError, match=servers[0].address):
      service.connect([servers[0].address] * 2)


def test_priorities_and_deletes_go_to_the_right_shard() -> None:
  with shards(3) as (servers, client):
    table = client.table('it', **{**SIMPLE, 'sampler': tables.prioritized(1.0)})
    for _ in range(3):
      fill(client, table, 20).close(timeout=30)
    until(lambda: all(c.sizes.get('it') == 20 for c in client.connections))
    samples = table.sample(200, timeout=30)
    keys = np.unique(samples.key)[::2]  # some are left at each
    assert table.update_priorities(keys, np.zeros(len(keys))) == len(keys)
    assert sum(s.counts['updated'] for s in servers) == len(keys)  # each to one shard only
    kept = set().union(*(set(s.tables['it'].contents.slots) for s in servers)) - set(keys.tolist())
    again = table.sample(64, timeout=30)
    assert set(again.key.tolist()) <= kept
    unknown = np.array(sorted(kept))[:3]
    table = client.table('it')  # it knows no key's shard
    assert table.update_priorities(unknown, np.ones(len(unknown))) == len(unknown)
    assert table.delete(keys) == len(keys) and len(table) == 60 - len(keys)


def test_a_dead_shard_is_named_and_comes_back(
  tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
  with contextlib.ExitStack() as stack:
    first = stack.enter_context(ReplayServer(ANY))
    replay = stack.enter_context(Replay(tmp_path))
    client = stack.enter_context(service.connect([first.address, replay.address]))
    table = all_of(client)
    other = client.table('other', **SIMPLE)
    writers = [fill(client, other, 50) for _ in range(2)]
    for writer in writers:
      writer.flush(timeout=30)
    client.connections[1].ask(replay_messages.SAVE).wait(1e9, '')  # of the one that will die
    replay.kill()
    until(lambda: client.connections[1].away)
    for _ in range(10):
      samples = other.sample(20, timeout=30)
      assert len(samples.key) == 20 and (samples.table_size == 50).all()
    assert any(replay.address in r.getMessage() for r in caplog.records)
    lonely = fill(client, table, 5)  # to the one that is there
    lonely.close(timeout=30)
    waiting = client.writers(history=1)[1]
    waiting.append({'x': np.int64(7)})
    waiting.create_item(other, 1.0, num_steps=1)
    with pytest.raises(tables.RateLimited, match=replay.address):
      waiting.flush(timeout=0.5)
    stack.enter_context(Replay(tmp_path, address=replay.address))
    waiting.flush(timeout=30)
    until(lambda: len(other) == 101)
    until(lambda: (other.sample(10, timeout=30).table_size == 101).all())


@pytest.mark.parametrize('full', [0, 1])
def test_a_sample_that_one_shard_refuses_is_requested_of_none(
  full: int, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(replay_messages, 'MOST_REQUESTS', 2)
  with shards() as (_, client):
    table = client.table('it', **SIMPLE)
    for _ in range(2):  # of an empty table: they wait
      client.connections[full].ask(replay_messages.SAMPLE, 'it', 1, 1, False)
    with pytest.raises(ValueError, match='prefetch'):
      table.sample(64, timeout=30)  # both get a part, but for once in 2 ** 63 times
    assert not client.connections[1 - full].calls


def test_a_sample_leaves_an_empty_shard() -> None:
  with shards() as (servers, client):
    table = client.table('it', **SIMPLE)
    found: list[Any] = []
    # Both shards get a part of 64 items, but for once in 2 ** 63 times.
    thread = threading.Thread(
      target=lambda: found.append(table.sample(64, timeout=60)), daemon=True
    )
    thread.start()
    until(lambda: sum(s.tables['it'].info().waiting_samplers for s in servers) == 2)
    fill(client, table, 50).close(timeout=30)  # all to one of them
    thread.join(30)
    assert len(found) == 1 and len(found[0].key) == 64
    assert not any(s.tables['it'].info().waiting_samplers for s in servers)
    assert not any(s.counts['malformed'] for s in servers)


def test_a_sample_leaves_a_shard_whose_limiter_holds_it_back(monkeypatch: Any) -> None:
  """The only writer of that shard has ended; the other one goes on."""
  monkeypatch.setattr(sampler, 'HELD_AFTER', 0.1)
  limiter = tables.sample_to_insert_ratio(2.0, min_size=1, error=32.0)
  with shards() as (servers, client):
    table = client.table('it', **{**SIMPLE, 'rate_limiter': limiter})
    writers = client.writers(history=1)

    def insert(n: int, shard: int) -> None:
      for _ in range(n):
        writers[shard].append({'x': np.int64(shard)})
        writers[shard].create_item(table, 1.0, num_steps=1)
      writers[shard].flush(timeout=30)

    for shard in (0, 1):
      insert(8, shard)
    until(lambda: all(c.sizes.get('it') == 8 for c in client.connections))
    going_on = threading.Thread(target=insert, args=(62, 0))
    going_on.start()
    try:
      for _ in range(20):
        assert len(table.sample(8, timeout=30).key) == 8
    finally:
      going_on.join(40)
    assert servers[1].tables['it'].info().samples <= 46  # of 160: all that its limiter allows


def test_capacity_and_first_windows_are_of_all_shards_together() -> None:
  config = PRESETS['r2d2-remote-memory']()
  resolved = resolve(config)
  example = example_trajectory(resolved.agent, resolved.env, config.num_envs, config.unroll_length)
  windows = resolved.replay.windows
  for n in (1, 2):
    with shards(n) as (servers, client):
      table = run_tables.replay_table(
        client, Layout(windows, example), resolved.env.action_space, 'run'
      )
      each = [s.tables[table.name] for s in servers]
      steps = windows.period * table.info().max_size
      assert 0 <= steps - windows.buffer.capacity < n * windows.period
      first = windows.period * sum(x.rate_limiter.min_size for x in each)
      assert 0 <= windows.buffer.min_size - first < n * windows.period


def write(client: service.ReplayClient, table: Any, who: int, steps: int) -> None:
  """Steps as programs.py has them, and an item of each three."""
  with client.writer(history=3, delay=0.0) as writer:
    for i in range(steps):
      writer.append(programs.step(who, i))
      if i >= 2:
        writer.create_item(table, 1.0, num_steps=3)


def test_at_least_is_of_all_shards_together() -> None:
  with shards() as (servers, client):
    table = all_of(client)
    write(client, table, 0, 82)
    for connection in client.connections:  # as they may be known, while others read as well
      connection.sizes = {'all': 40}
    full = next(s for s in servers if len(s.tables['all']))
    assert len(read_all(table)) == 80 and not len(full.tables['all'])


@pytest.mark.parametrize('n', [1, 2])
def test_requests_to_absent_servers_end_in_time(n: int) -> None:
  with shards(n) as (servers, client):
    table = client.table('it', **SIMPLE)
    fill(client, table, 3).close(timeout=30)
    until(lambda: table.last_size == 3)
    for server in servers:
      server.stop()
    until(lambda: all(c.away for c in client.connections))
    assert table.last_size == 3  # at once
    with pytest.raises(tables.RateLimited, match="'it'"):
      table.info(timeout=0.1)


def test_a_sample_leaves_a_dead_shard(tmp_path: Path) -> None:
  with contextlib.ExitStack() as stack:
    first = stack.enter_context(ReplayServer(ANY))
    replay = stack.enter_context(Replay(tmp_path))
    client = stack.enter_context(service.connect([first.address, replay.address]))
    table = client.table('it', **SIMPLE)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(table.sample(8, timeout=60)), daemon=True)
    thread.start()
    until(lambda: client.connections[1].calls or client.connections[0].calls)
    until(lambda: first.tables['it'].info().waiting_samplers == 1)
    replay.kill()
    until(lambda: client.connections[1].away)
    fill(client, table, 3).close(timeout=30)
    thread.join(30)
    assert len(found) == 1 and len(found[0].key) == 8


def test_reading_all_of_all_shards() -> None:
  with shards() as (_, client):
    table = all_of(client)
    for who in range(4):
      write(client, table, who, 50)
    until(lambda: all(c.sizes.get('all') == 96 for c in client.connections))
    assert sorted(read_all(table)) == [(w, i) for w in range(4) for i in range(2, 50)]
