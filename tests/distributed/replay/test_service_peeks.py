"""Peeks and amendments through the wire; the property test of both is with the other operations."""

from __future__ import annotations

import numpy as np
import pytest
from children import until
from services import ANY
from test_contents import ITEMS, write
from test_service_tables import SIMPLE, fill
from test_shards import shards
from test_tables import in_thread

from podrace import tables
from podrace.distributed import replay
from podrace.distributed.replay.server import ReplayServer


def test_a_peek_does_not_wait_behind_samples() -> None:
  with ReplayServer(ANY) as server, replay.connect(server.address) as client:
    table = client.table('it', **{**SIMPLE, 'rate_limiter': tables.min_size(3)})
    sample = in_thread(lambda: table.sample(1, timeout=60))
    until(lambda: table.info().waiting_samplers == 1)
    with pytest.raises(tables.RateLimited, match='item'):
      table.sample(1, timeout=0.01, peek=True)
    peek = in_thread(lambda: table.sample(4, timeout=60, peek=True))
    until(lambda: table.info().waiting_samplers == 2)
    writer = fill(client, table, 1)
    writer.flush(timeout=30)
    assert peek().data['x'].ravel().tolist() == [0] * 4
    with table.sampler(5, prefetch=2, peek=True, timeout=60) as ahead:
      assert [len(next(ahead).key) for _ in range(3)] == [5] * 3
    info = table.info()
    assert (info.inserts, info.samples, info.waiting_samplers) == (1, 0, 1)
    for i in range(2):
      writer.append({'x': np.int64(i)})
      writer.create_item(table, 1.0, num_steps=1)
    writer.close(timeout=30)
    assert len(sample().key) == 1 and table.info().samples == 1


def test_an_amendment_is_held_to_the_tables_contents() -> None:
  with ReplayServer(ANY) as server, replay.connect(server.address) as client:
    table = client.table('it', **ITEMS)
    write(client)
    before = table.sample(1, timeout=30)
    (writer,) = client.writers(history=4)

    def amend(key: int, rows: int, reward: float) -> None:
      for _ in range(rows):
        writer.append({'reward': np.float32(reward)})
      writer.amend_item(table, key, {'reward': writer.history['reward'][-rows:]})
      writer.flush(timeout=30)

    key = int(before.key[0])
    for rows, reward, why in ((4, np.nan, 'nan'), (3, 0.0, '4 rows')):
      with pytest.raises(ValueError, match=why):
        amend(key, rows, reward)
    amend(key + 1, 4, 5.0)
    assert len(table) == 1
    amend(key, 4, 6.0)
    after = table.sample(1, timeout=30)
    assert after.data['reward'].tolist() == [[6.0] * 4] and after.times_sampled.item() == 2
    for name in before.data.keys() - {'reward'}:
      np.testing.assert_array_equal(after.data[name], before.data[name])
    assert table.info().inserts == 1
    writer.close(timeout=30)


def test_an_amendment_goes_to_the_shard_that_has_the_item() -> None:
  with shards(2) as (servers, client):
    table = client.table('it', **SIMPLE)
    for _ in range(2):
      fill(client, table, 20).close(timeout=30)
    until(lambda: all(c.sizes.get('it') == 20 for c in client.connections))
    found, writers = table.sample(64, timeout=30, peek=True), client.writers(history=1)
    keys = set(found.key.tolist())
    for key in keys:
      writer = writers[table.shard_of(key)]
      writer.append({'x': np.int64(-key)})
      writer.amend_item(table, key, {'x': writer.history['x'][-1:]})
    for writer in writers:
      writer.close(timeout=30)
    again = table.sample(200, timeout=30)
    for key, x in zip(again.key.tolist(), again.data['x'].ravel().tolist(), strict=True):
      assert (x == -key) == (key in keys)
    assert sum(len(s.tables['it']) for s in servers) == 40
    with pytest.raises(KeyError):
      table.shard_of(12345)
