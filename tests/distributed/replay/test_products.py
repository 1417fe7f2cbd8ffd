"""Bounds that are each small and together are not: what a few bytes make a service do or keep is bounded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from children import until
from services import ANY
from test_service_security import LEAF, Raw, joined
from test_service_tables import SIMPLE, fill

from podrace import tables
from podrace.distributed import replay
from podrace.distributed.net import session_messages
from podrace.distributed.replay import (
  inserting,
  replay_messages,
  sampling,
  served_tables,
  table_settings,
)
from podrace.distributed.replay.server import ReplayServer
from podrace.tables import trees

COLUMNS = 64


@pytest.fixture
def server() -> Iterator[ReplayServer]:
  with ReplayServer(ANY, most_bytes=2**26) as one:
    yield one
    assert one.failure is None and not one.counts['unexpected']


def many_columns(n: int = COLUMNS) -> list[Any]:
  """A signature of so many columns of a byte."""
  keys = [f'c{i}' for i in range(n)]
  return [['dict', keys, [LEAF] * n], [[k, '|u1', [], False] for k in keys]]


def filled(server: ReplayServer, chunks: int = 1, columns: int = COLUMNS, **settings: Any) -> Raw:
  """A client that has put one item of many columns into the table `it`, each over so many chunks."""
  with replay.connect(server.address) as client:
    client.table('it', **{**SIMPLE, **settings})
  raw = joined(server)
  raw.say(
    replay_messages.DECLARE,
    {'tables': ['it'], 'specs': [['|u1', []]], 'signatures': [many_columns(columns)]},
  )
  parts = dict(parts=[(chunks, 0, chunks)] * columns, refs=[0] * (columns * chunks))
  raw.insert(1, chunks=[(0, 1, 0, 1)], item=[(1, 77, 1.0, 0, 0)], data=b'x', **parts)
  raw.expect(replay_messages.ACK)
  return raw


def sample(raw: Raw, number: int, n: int, peek: bool = False, table: str = 'it') -> None:
  raw.say(replay_messages.SAMPLE, number, table, n, 1, peek, -1.0, 0)


def heard(raw: Raw) -> tuple[Any, Any]:
  """The next answer to a SAMPLE: its kind and its fields."""
  while (message := raw.hear()) is not None:
    if message[0] in (replay_messages.SAMPLES, replay_messages.ANSWER):
      return message[0], message[1]
  raise AssertionError('no answer')


def test_items_times_columns_of_a_sample_are_bounded(server: ReplayServer) -> None:
  raw = filled(server)
  most = replay_messages.MESSAGE_PARTS // COLUMNS
  for n, kind in (
    (most + 1, replay_messages.ANSWER),
    (replay_messages.MOST_ITEMS, replay_messages.ANSWER),
    (most, replay_messages.SAMPLES),
  ):
    sample(raw, n, n)
    assert heard(raw)[0] is kind
  assert server.tables['it'].info().samples == most  # what is refused is not drawn
  raw.close()


def test_items_times_chunks_are_bounded(
  server: ReplayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
  chunks = 2048
  raw = filled(server, chunks=chunks)
  sample(raw, 1, replay_messages.MESSAGE_PARTS // COLUMNS)
  kind, fields = heard(raw)
  assert kind is replay_messages.ANSWER and not fields[1]
  monkeypatch.setattr(replay_messages, 'MESSAGE_CHUNKS', 2 * chunks * COLUMNS)
  for n, expected in ((2, replay_messages.SAMPLES), (3, replay_messages.ANSWER)):
    sample(raw, n, n, peek=True)
    assert heard(raw)[0] is expected
  raw.close()


def test_many_requests_of_a_client_delay_others_by_one(server: ReplayServer) -> None:
  with replay.connect(server.address) as client:
    # Each item is sampled once.
    table = client.table(
      'it', **{**SIMPLE, 'rate_limiter': tables.queue(10), 'max_times_sampled': 1}
    )
    readers = server.sampling.queue(server.served.by_name['it'], peek=False)
    greedy, modest = Raw(server.address), Raw(server.address)
    for raw, count in ((greedy, 50), (modest, 2)):
      raw.join()
      for number in range(1, count + 1):
        sample(raw, number, 1)
    until(lambda: len(readers) == 52)
    fill(client, table, 4).flush()
    for raw in (greedy, modest):
      for number in (1, 2):
        kind, fields = heard(raw)
        assert kind is replay_messages.SAMPLES and fields[0] == number
      raw.close()
    until(lambda: not readers)


def test_rows_without_bytes_are_bounded(server: ReplayServer) -> None:
  with replay.connect(server.address) as client:
    client.table('it', **SIMPLE)
  for rows, good in ((2**32 - 1, False), (replay_messages.ROWS + 1, False), (5, True)):
    raw = joined(server)
    signature = [LEAF, [['x', '|u1', [0], False]]]
    raw.say(
      replay_messages.DECLARE,
      {'tables': ['it'], 'specs': [['|u1', [0]]], 'signatures': [signature]},
    )
    raw.insert(1, chunks=[(0, rows, 0, 0)], parts=[(1, 0, rows)], data=b'')
    if good:
      raw.expect(replay_messages.ACK)
    else:
      assert str(rows) in raw.gone()
    raw.close()


def test_names_of_declarations_are_bounded(
  server: ReplayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
  long = 'x' * (replay_messages.NAME_CHARACTERS + 1)
  deep: list[Any] = ['tuple', [], [LEAF] + [['tuple', [], []]] * replay_messages.NODES]
  monkeypatch.setattr(inserting, 'DECLARED_BYTES', 2**16)
  for signature in (
    [LEAF, [[long, '|u1', [], False]]],
    [['dict', [long], [LEAF]], [['x', '|u1', [], False]]],
    [deep, [['x', '|u1', [], False]]],
    [['named a b', ['x'], [LEAF]], [['x', '|u1', [], False]]],
    [['named A', ['_x'], [LEAF]], [['x', '|u1', [], False]]],
  ):
    raw = joined(server)
    raw.say(replay_messages.DECLARE, {'signatures': [signature]})
    assert raw.gone()
    raw.close()
  raw = joined(server)
  for i in range(100):
    raw.say(
      replay_messages.DECLARE, {'signatures': [[LEAF, [[f'{i}' + 'x' * 900, '|u1', [], False]]]]}
    )
  assert '65,536' in raw.gone()
  raw.close()
  assert server.inserting.signature_bytes <= 2**17


def test_only_readers_make_named_tuples() -> None:
  document = ['named Step', ['x', 'y'], [LEAF, LEAF]]
  one, two = (trees.from_json(document) for _ in range(2))
  assert one == two and trees.to_json(one) == document
  built = trees.build(one, [1, 2])
  assert type(built).__name__ == 'Step' and (built.x, built.y) == (1, 2)
  assert trees.named_type.cache_info().currsize <= 256


def test_settings_of_all_tables_are_bounded(
  server: ReplayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(served_tables, 'SETTINGS_BYTES', 4000)
  settings = table_settings.pack_settings(
    sampler=tables.fifo(), remover=tables.fifo(), rate_limiter=tables.min_size(1), max_size=5
  )
  raw = joined(server)
  good = 0
  for number in range(1, 101):
    raw.say(replay_messages.TABLE, number, f'table{number}', settings)
    good += raw.answer(replay_messages.ANSWER)[0][1]
  assert 0 < good == len(server.tables) < 50
  raw.say(replay_messages.TABLE, 101, 'table1', settings)  # those that there are can be used
  assert raw.answer(replay_messages.ANSWER)[0][1]
  raw.close()


def test_parts_of_items_that_wait_count_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
  columns = 512
  with ReplayServer(ANY, most_bytes=2**21) as server:
    raw = filled(server, columns=columns, rate_limiter=tables.queue(1))
    number = 1
    while number < 200:
      number += 1
      raw.insert(number, chunks=[], parts=[(1, 0, 1)] * columns, refs=[0] * columns, data=b'')
      message = raw.hear()
      assert message is not None
      if message[0] is session_messages.REFUSED:
        break
    assert 10 < number < 40
    raw.close()
    until(lambda: not server.peers)


def test_samples_that_no_client_reads_are_bounded_for_all_together(
  server: ReplayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(sampling, 'UNREAD_BYTES', 2**22)
  first = filled(server, chunks=4)
  raws = [first]
  for _ in range(5):
    raws.append(Raw(server.address))
    raws[-1].join()
  with replay.connect(server.address) as good:
    for raw in raws:
      for number in range(3):
        sample(raw, number + 1, 2000, peek=True)
    events = server.listener.lines.events
    until(lambda: sum('samples unread' in line for line in events) >= 2, 60)
    assert server.sampling.unread_bytes <= 2**22
    assert len(good.table('it').sample(1, peek=True).key) == 1
  for raw in raws:
    raw.close()
  until(lambda: not server.peers)
  assert server.sampling.unread_bytes == 0


def test_awaited_samples_are_drawn_in_turns(
  server: ReplayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
  """An item that comes when thousands wait for it: others are answered before all of them are."""
  monkeypatch.setattr(sampling, 'SERVE_SECONDS', 0.0)
  with replay.connect(server.address) as client:
    client.table('it', **SIMPLE)
  many = [Raw(server.address) for _ in range(4)]
  for raw in many:
    raw.join()
    for number in range(1, 101):
      sample(raw, number, 1)
  until(lambda: server.tables['it'].info().waiting_samplers == 400)
  served = threading.Event()
  counts: list[int] = []

  expire = server.sampling.expire

  def look() -> None:
    """In each turn."""
    counts.append(server.counts['samples'])
    if counts[-1] >= 400:
      served.set()
    expire()

  monkeypatch.setattr(server.sampling, 'expire', look)
  raw = filled(server)
  assert served.wait(60)
  assert max(np.diff(counts)) <= 8  # of one turn
  monkeypatch.undo()
  for one in (raw, *many):
    one.close()


def test_requests_of_a_client_that_does_not_read_rest(server: ReplayServer) -> None:
  raw = filled(server)
  for number in range(1, replay_messages.MOST_UNREAD + 301):
    sample(raw, number, 1)
  until(lambda: server.counts['samples'] == replay_messages.MOST_UNREAD)
  until(lambda: server.tables['it'].info().waiting_samplers == 300)
  assert not server.sampling.queue(server.served.by_name['it'], peek=False)
  with replay.connect(server.address) as good:
    assert len(good.table('it').sample(3).key) == 3
  raw.say(session_messages.PING, replay_messages.MOST_UNREAD)
  until(lambda: server.counts['samples'] >= 2 * replay_messages.MOST_UNREAD + 3)
  raw.say(replay_messages.CANCEL, replay_messages.MOST_UNREAD + 300)
  until(
    lambda: server.tables['it'].info().waiting_samplers <= 300 - replay_messages.MOST_UNREAD - 1
  )
  raw.close()
  until(lambda: server.tables['it'].info().waiting_samplers == 0)
