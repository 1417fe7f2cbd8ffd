"""What a table's items must hold is checked at the service's door: who sends other things ends nobody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from children import until
from services import ANY
from test_service_security import Raw, joined
from test_service_tables import SIMPLE

from podrace.distributed import replay
from podrace.distributed.net.dashboard import Asker
from podrace.distributed.net.frame import WireError
from podrace.distributed.replay import item_schema, replay_messages, sample_reader
from podrace.distributed.replay.item_schema import FINITE, ItemSchema, pack_column
from podrace.distributed.replay.server import ReplayServer
from podrace.tables.items import Leaf, Signature

COLUMNS = [
  pack_column('image', np.uint8, (64, 64), 4),
  pack_column('reward', np.float32, (), 4, FINITE),
  pack_column('step_type', np.int8, (), 4, (0, 2)),
  pack_column('action', np.int32, (2,), 3, ([0, 0], [3, 5])),
  pack_column('value', np.float32, (), 3),
  pack_column('env_id', np.int32, ()),
]
ITEMS: dict[str, Any] = {**SIMPLE, 'contents': COLUMNS}


def step(**changes: Any) -> dict[str, Any]:
  good = dict(
    image=np.zeros((64, 64), np.uint8), reward=np.float32(1), step_type=np.int8(1),
    action=np.array([3, 5], np.int32), value=np.float32(-np.inf), env_id=np.int32(7),
  )  # fmt: skip
  return good | changes


def write(client: replay.ReplayClient, rows: int = 4, **changes: Any) -> None:
  """An item, of whose steps the last but one is otherwise; raises what the service has against it."""
  with client.writer(8) as writer:
    for i in range(rows):
      writer.append(step(**(changes if i == rows - 2 else {})))
    history = writer.history
    item = {k: history[k][-rows:] for k in ('image', 'reward', 'step_type')}
    item |= {k: history[k][-rows + 1 :] for k in ('action', 'value')}
    writer.create_item(client.table('it'), 1.0, item | {'env_id': history['env_id'][-1]})
    writer.flush(timeout=30)


@pytest.fixture
def server() -> Iterator[ReplayServer]:
  with ReplayServer(ANY) as server:
    yield server
  assert server.failure is None


BAD = {
  r'reward: float32\[\] .* nan,': dict(reward=np.float32('nan')),
  r'reward: .* -inf,': dict(reward=np.float32('-inf')),
  r'step_type: int8\[\] .* 77, .* 0 to 2': dict(step_type=np.int8(77)),
  r'action: .* 6, .* \[0\. 0\.\] to \[3\. 5\.\]': dict(action=np.array([0, 6], np.int32)),
  r'value: .* nan,': dict(value=np.float32('nan')),
  r'5 rows .* image.* 4 rows': dict(rows=5),
  r'3 rows .* image.* 4 rows': dict(rows=3),
}


def test_what_is_none_is_refused_counted_and_named(server: ReplayServer) -> None:
  with replay.connect(server.address) as good, replay.connect(server.address) as bad:
    table = good.table('it', **ITEMS)
    write(good)
    for text, changes in BAD.items():
      with pytest.raises(ValueError, match=f"'it': {text}"):
        write(bad, **changes)
      write(good)
    write(bad)  # its session goes on
    assert table.info().inserts == 2 + len(BAD)
    assert np.isfinite(table.sample(100, at_least=9, timeout=20).data['reward']).all()
    assert server.counts['refused items'] == len(BAD)
    asker = Asker(server.address, None, False)
    found = [(c['inserted'], c['refused']) for c in asker.ask()['clients']]
    asker.close()
    assert sorted(found) == [(1, len(BAD)), (1 + len(BAD), 0)]
    lines = [x for x in server.listener.lines.events if 'refused an item' in x]
    assert len(lines) == 1 and ' nan' in lines[0]  # of each client the first


def test_the_first_item_does_not_decide_what_the_others_are(server: ReplayServer) -> None:
  """With contents the table knows its columns from the beginning."""
  with replay.connect(server.address) as client:
    client.table('it', **ITEMS)
    with client.writer(2) as writer, pytest.raises(ValueError, match='other'):
      writer.append({'other': np.float32(0)})
      writer.create_item(client.table('it'), 1.0, num_steps=1)
      writer.flush(timeout=30)
    write(client)
    assert client.table('it').info().inserts == 1


def test_contents_outlive_the_service(tmp_path: Path) -> None:
  for _ in range(2):
    with ReplayServer(ANY, dir=tmp_path) as server, replay.connect(server.address) as client:
      client.table('it', **ITEMS)
      client.table('it', **SIMPLE)  # who does not say what it holds is not asked
      other = [*COLUMNS[:-1], pack_column('env_id', np.int32, (), None, (0, 9))]
      with pytest.raises(replay.Refused, match='env_id'):
        client.table('it', **{**ITEMS, 'contents': other})
      with pytest.raises(ValueError, match='step_type'):
        write(client, step_type=np.int8(-1))
      write(client)


def test_an_older_table_takes_its_runs_contents(server: ReplayServer) -> None:
  with replay.connect(server.address) as client:
    client.table('it', **SIMPLE)
    write(client, reward=np.float32('nan'))
    client.table('it', **ITEMS)
    with pytest.raises(ValueError, match='finite'):
      write(client, reward=np.float32('nan'))
    other = client.table('other', **SIMPLE)
    with client.writer(1) as writer:
      writer.append({'x': np.float32(0)})
      writer.create_item(other, 1.0, num_steps=1)
    with pytest.raises(replay.Refused, match='columns'):
      client.table('other', **ITEMS)


@pytest.mark.parametrize('wrong', [
  7, [], [[]], [['x', 'O', [], True, 1, None, None]], [['x', '<f4', [], True, 0, None, None]],
  [['x', '<f4', [], True, 1, 0.0, None]], [['x', '<f4', [], True, 1, [0.0, 0.0], 1.0]],
  [['x', '<f4', [], True, 1, float('nan'), 1.0]], [['x', '<f4', [], True, 1, 'a', 'b']], [COLUMNS[0]] * 2,
  [['x', '<f4', [], True, 1, b'0', b'1']], [['x', '<f4', [2], True, 1, [0, b'0'], 1]],
])  # fmt: skip
def test_contents_that_are_none(wrong: Any, server: ReplayServer) -> None:
  with pytest.raises(ValueError):
    ItemSchema(wrong)
  with replay.connect(server.address) as client:
    if wrong:
      with pytest.raises(replay.Refused):
        client.table('it', **{**SIMPLE, 'contents': wrong})
      assert 'it' not in server.tables


def test_items_of_a_message_that_failed_are_sent_again(
  server: ReplayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
  check, calls = ItemSchema.check, 0

  def fail_once(self: ItemSchema, item: Any) -> None:
    nonlocal calls
    calls += 1
    if calls == 1:
      raise MemoryError
    check(self, item)

  monkeypatch.setattr(ItemSchema, 'check', fail_once)
  with replay.connect(server.address) as client:
    client.table('it', **ITEMS)
    write(client)
    assert calls == 2 and len(client.table('it')) == 1


def test_requested_checkpoints_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """So many at once, then one now and then, for all who have asked meanwhile; the last when it ends."""
  monkeypatch.setattr('podrace.distributed.replay.checkpoints.SAVES_AT_ONCE', 3)
  monkeypatch.setattr('podrace.distributed.replay.checkpoints.SAVE_SECONDS', 3600.0)
  with ReplayServer(ANY, dir=tmp_path) as server:
    raw = joined(server)
    for number in range(3):
      raw.say(replay_messages.SAVE, number)
      assert list(raw.answer(replay_messages.ANSWER)[0][:2]) == [number, True]
    for number in range(3, 13):
      raw.say(replay_messages.SAVE, number)
    until(lambda: len(server.saving.requests) == 10)
    assert server.counts['checkpoints'] == 3
    server.listener.call(lambda: server.saving.saves.take(-1))  # as it is an hour later
    answers = [raw.answer(replay_messages.ANSWER)[0] for _ in range(10)]
    assert [x[0] for x in answers] == list(range(3, 13)) and len({x[2] for x in answers}) == 1
    assert server.counts['checkpoints'] == 4
    raw.close()


# --- what a few bytes are unpacked to -------------------------------------------------------------


def packed(size: int) -> bytes:
  return zstandard.ZstdCompressor(level=19).compress(bytes(size))


X = pack_column('x', np.int64, (2,), 3)


def declared(server: ReplayServer) -> Raw:
  raw = joined(server)
  signature = replay_messages.pack_signature(ItemSchema([X]).signature)
  told = {'tables': ['it'], 'specs': [['<i8', [2]]], 'signatures': [signature]}
  raw.say(replay_messages.DECLARE, told)
  return raw


def test_chunks_that_take_much_more_unpacked_are_refused(server: ReplayServer) -> None:
  """At a table with contents by these, elsewhere as soon as they come."""
  with replay.connect(server.address) as client:
    client.table('it', **{**SIMPLE, 'contents': [X]})
    for rows, data, kind, text in (
      (2**17, packed(2**21), replay_messages.ACK, '1,048,576'),
      (2**23, packed(2**27), None, '67,108,864'),
      (3, packed(48)[:-4] + b'\xff' * 4, replay_messages.ACK, 'damaged'),
    ):
      raw = declared(server)
      assert len(data) < 2**14
      raw.insert(1, chunks=[(0, rows, 1, len(data))], data=data)
      assert text in str(raw.gone() if kind is None else raw.answer(kind)[0])
      raw.close()
    assert not client.table('it').info().inserts


def test_unpacking_of_a_message_is_bounded(
  server: ReplayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr('podrace.distributed.replay.inserting.MESSAGE_UNPACKED', 40)
  with replay.connect(server.address) as client:
    client.table('it', **{**SIMPLE, 'contents': [X]})
    raw = declared(server)
    data = packed(48)
    raw.insert(
      1,
      item=[(1, 1, 1.0, 0, 0), (2, 2, 1.0, 0, 0)],
      parts=[(1, 0, 3)] * 2,
      refs=[0, 1],
      chunks=[(0, 3, 1, len(data))] * 2,
      data=2 * data,
    )
    ack, *numbers = raw.answer(replay_messages.ACK)
    assert ' 40 bytes' in ack[1]
    assert [np.frombuffer(x, '<u8').tolist() for x in numbers] == [[1], [], [2]]
    raw.close()


def samples_of(
  rows: int, parts: list[Any], refs: list[int], chunks: int = 2
) -> tuple[Any, list[Any]]:
  """A SAMPLES of items over packed chunks of these rows, which count from 0 on, in two columns' order."""
  leaf = Leaf('x', np.dtype('<i8'), (64,), False)
  every = np.arange(chunks * rows * 64).reshape(chunks, rows, 64)
  data = [zstandard.ZstdCompressor().compress(x.tobytes()) for x in every]
  drawn = np.zeros(len(parts), replay_messages.DRAWN)
  drawn['key'] = range(1, len(parts) + 1)
  return Signature(('dict', ('x',), (('leaf', (), ()),)), (leaf,)), [
    drawn.tobytes(), np.array(parts, replay_messages.PART).tobytes(), np.array(refs, '<u4').tobytes(),
    np.array([(0, rows, 1, len(x)) for x in data], replay_messages.CHUNK).tobytes(), b''.join(data),
  ]  # fmt: skip


def test_parts_share_chunks_and_need_some_of_their_rows() -> None:
  parts, refs = [(1, 1, 2), (2, 3, 3), (1, 0, 5), (1, 4, 1)], [0, 0, 1, 0, 1]
  one = samples_of(5, parts, refs)
  rows = np.arange(2 * 5 * 64).reshape(10, 64)
  expected = [rows[1:3], rows[3:6], rows[:5], rows[9:]]
  found = sample_reader.read_samples([one])
  for i, x in enumerate(expected):
    np.testing.assert_array_equal(found.data['x'][i, : len(x)], x)
    assert found.lengths['x'][i] == len(x) and not found.data['x'][i, len(x) :].any()
  both = sample_reader.read_samples([one, samples_of(8, [(1, 0, 8)], [1])])
  assert both.data['x'].shape == (5, 8, 64) and both.key.tolist() == [1, 2, 3, 4, 1]
  np.testing.assert_array_equal(both.data['x'][4], np.arange(512, 1024).reshape(8, 64))
  np.testing.assert_array_equal(both.data['x'][:4, :5], found.data['x'])


def test_a_shared_chunk_is_unpacked_once(monkeypatch: pytest.MonkeyPatch) -> None:
  many = samples_of(8, [(1, 0, 1)] * 100, [0] * 100)
  monkeypatch.setattr(replay_messages, 'UNPACKED_SAMPLE_BYTES', (100 + 8) * 512)
  assert len(sample_reader.read_samples([many]).key) == 100
  monkeypatch.setattr(replay_messages, 'UNPACKED_SAMPLE_BYTES', (100 + 8) * 512 - 1)
  with pytest.raises(WireError, match=f'{108 * 512 - 1:,}'):
    sample_reader.read_samples([many])


@pytest.mark.parametrize(
  'text, parts, refs',
  [
    ('last chunk', [(2, 0, 5)], [0, 1]),
    ('rows 0 to 11 of 10', [(2, 0, 11)], [0, 1]),
    ('rows 5 to 6', [(2, 5, 1)], [0, 1]),
    ('rows 0 to 0', [(1, 0, 0)], [0]),
    ('chunk', [(1, 0, 5)], [2]),
    ('parts over 1 chunks', [(2, 0, 5)], [0]),
  ],
)
def test_parts_outside_of_their_chunks_are_refused(
  text: str, parts: list[Any], refs: list[int]
) -> None:
  with pytest.raises(WireError, match=text):
    sample_reader.read_samples([samples_of(5, parts, refs)])


def test_a_sampler_does_not_unpack_what_nobody_samples() -> None:
  leaf = Leaf('x', np.dtype('<i8'), (2,), False)
  signature = Signature(('dict', ('x',), (('leaf', (), ()),)), (leaf,))
  rows = 2**22  # 64 MiB
  data = packed(16 * rows)

  def frames(n: int, count: int) -> list[Any]:
    return [
      np.zeros(n, replay_messages.DRAWN).tobytes(),
      np.array([(count, 0, count * rows)] * n, replay_messages.PART).tobytes(),
      np.zeros(n * count, '<u4').tobytes(),
      np.array([(0, rows, 1, len(data))], replay_messages.CHUNK).tobytes(),
      data,
    ]

  for n, count in ((1, 100), (100, 1)):
    with pytest.raises(WireError, match='4,294,967,296'):
      sample_reader.read_samples([(signature, frames(n, count))])
  assert sample_reader.read_samples([(signature, frames(1, 1))]).data['x'].shape == (1, rows, 2)
  assert (
    item_schema.CHUNK_BYTES
    < replay_messages.UNPACKED_CHUNK_BYTES
    < replay_messages.UNPACKED_SAMPLE_BYTES
  )
