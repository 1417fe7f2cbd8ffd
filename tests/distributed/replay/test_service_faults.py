"""What is killed, cut, frozen and restarted: nothing twice, nothing that was acknowledged lost."""

from __future__ import annotations

import collections
import contextlib
import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import bare
import numpy as np
import programs
import pytest
from children import environment, until
from proxy import Proxy
from services import ANY, Program, Replay, all_of, read_all
from test_service_tables import FIFO, SIMPLE, fill

from podrace import cli, tables
from podrace.distributed import replay as service
from podrace.distributed.net import sessions
from podrace.distributed.replay import insert_streams, replay_messages
from podrace.distributed.replay.replay_messages import SAMPLE
from podrace.distributed.replay.server import ReplayServer
from podrace.tables import checkpoint
from podrace.tables.chunks import Chunk

QUEUE: dict[str, Any] = dict(FIFO, rate_limiter=tables.queue(3), max_size=3, max_times_sampled=1)


def check_once(found: list[tuple[int, int]], known: dict[int, int]) -> None:
  """No item twice, and of each writer all up to the one that it knows to be in, from the 3rd step."""
  counted = collections.Counter(found)
  assert max(counted.values()) == 1, [k for k, v in counted.items() if v > 1][:10]
  for who, newest in known.items():
    missing = [i for i in range(2, newest + 1) if (who, i) not in counted]
    assert not missing, (who, newest, missing[:10])


def newest(program: Program) -> int:
  """The newest item that a writer knows to be in; -1 if none."""
  return max((line[1] for line in program.said()), default=-1)


def test_writers_that_are_killed(tmp_path: Path) -> None:
  with ReplayServer(ANY, peer_timeout=600.0) as server, service.connect(server.address) as client:
    table = all_of(client)
    writers = {
      i: Program(tmp_path / f'{i}', 'write', server.address, i, 10**6, 5) for i in range(3)
    }
    for i, writer in writers.items():
      until(lambda i=i: newest(writers[i]) > 50 * (i + 1))
      writer.kill()
    until(lambda: server.counts['dropped'] >= 3)
    known = {i: newest(w) for i, w in writers.items()}
    check_once(read_all(table), known)
    info = table.info()
    assert info.inserts == info.samples == server.counts['items']
    assert info.size == info.waiting_inserts == 0
    assert server.failure is None and not server.counts['malformed'] + server.counts['repeated']


def test_samplers_that_are_killed_wait_no_longer(tmp_path: Path) -> None:
  with ReplayServer(ANY, peer_timeout=2.0) as server, service.connect(server.address) as client:
    table = client.table('it', **SIMPLE)
    sampler = Program(tmp_path / 'log', 'sample', server.address, 'it', 5)
    until(lambda: table.info().waiting_samplers == 2)
    sampler.kill()
    until(lambda: table.info().waiting_samplers == 0)
    fill(client, table, 3).close(timeout=30)
    assert table.info().samples == 0
    assert len(table.sample(4, timeout=30).key) == 4


def test_a_frozen_client_holds_up_nobody(tmp_path: Path) -> None:
  with ReplayServer(ANY, peer_timeout=1.0) as server, service.connect(server.address) as client:
    table = client.table('it', **SIMPLE)
    writer = client.writer(history=1)
    for _ in range(50):
      writer.append({'x': np.random.default_rng(0).integers(0, 255, 100_000).astype(np.uint8)})
      writer.create_item(table, 1.0, num_steps=1)
    writer.close(timeout=60)
    with Program(tmp_path / 'log', 'sample', server.address, 'it', 100) as sampler:
      until(sampler.said)  # a whole line: it may be stopped within one
      sampler.signal(signal.SIGSTOP)
      for _ in range(20):
        assert len(table.sample(10, timeout=30).key) == 10
      until(lambda: any('silent' in e for e in server.listener.lines.events))
      before = sampler.said()[-1][0]
      sampler.signal(signal.SIGCONT)
      until(lambda: sampler.said()[-1][0] > before + 500)
    assert server.failure is None


def test_who_compiles_for_a_while_is_not_dropped(tmp_path: Path) -> None:
  with ReplayServer(ANY) as server, service.connect(server.address) as client:
    fill(client, client.table('it', **SIMPLE), 1).close(timeout=30)
    with Program(tmp_path / 'log', 'hold', server.address, 5.5) as program:
      until(lambda: program.said() == [[0], [1]])
      assert program.wait() == 0
    assert not [e for e in server.listener.lines.events if 'silent' in e]


@pytest.mark.parametrize('numbers', [2, 2**19])  # 16 bytes, 4 megabytes
def test_a_client_that_does_not_read_is_sent_little(numbers: int) -> None:
  with ReplayServer(ANY, peer_timeout=30.0) as server, service.connect(server.address) as client:
    table = client.table('it', **SIMPLE)
    writer = client.writer(history=1)
    row = np.random.default_rng(0).integers(0, 2**63, numbers)
    writer.append({'x': row})
    writer.create_item(table, 1.0, num_steps=1)
    writer.close(timeout=60)
    connection = client.connections[0]
    ping, connection.ping = connection.ping, lambda: 0  # type: ignore[method-assign]
    asked = [
      connection.ask(replay_messages.SAMPLE, 'it', 1, 1, False)
      for _ in range(400 if numbers == 2 else 80)
    ]  # none says what it has
    most = min(replay_messages.MOST_UNREAD, replay_messages.MOST_BYTES // (8 * numbers))
    until(lambda: sum(a.done for a in asked) >= most)
    peer = next(iter(server.peers))
    assert peer.state.window.bytes <= replay_messages.MOST_BYTES + 9 * numbers
    assert len(peer.state.window.unread) <= replay_messages.MOST_UNREAD
    assert not all(a.done for a in asked)
    connection.ping = ping  # type: ignore[method-assign]
    until(lambda: all(a.done for a in asked))  # it says what has come without asking for more


def test_connections_that_are_cut(tmp_path: Path) -> None:
  with ReplayServer(ANY, peer_timeout=2.0) as server, service.connect(server.address) as client:
    table = all_of(client)
    with Proxy(server.address) as proxy:
      writers = [Program(tmp_path / f'{i}', 'write', proxy.address, i, 300, 1) for i in range(2)]
      for cut in range(5):  # while each of them still has something to say
        until(lambda cut=cut: newest(writers[cut % 2]) >= 50 * (cut + 1))
        proxy.reset()
      assert [w.wait() for w in writers] == [0, 0], writers[0].output
    assert server.counts['sessions'] > 4
    check_once(read_all(table), {0: 299, 1: 299})
    assert table.info().inserts == 2 * 298
    assert server.failure is None and not server.counts['malformed']


CUTS = [
  pytest.param(('up', 'down'), 3.0, id='both ways'),
  pytest.param(('up',), 3.0, id='to the server', marks=pytest.mark.slow),
  pytest.param(('down',), 3.0, id='to the client', marks=pytest.mark.slow),
  pytest.param(('up', 'down'), 30.0, id='30 s', marks=pytest.mark.slow),
]


@pytest.mark.parametrize('directions, seconds', CUTS)
def test_a_cut_is_noticed_and_outlived(
  directions: tuple[str, ...], seconds: float, tmp_path: Path
) -> None:
  with (
    ReplayServer(ANY, peer_timeout=1.0) as server,
    service.connect(server.address) as client,
    Proxy(server.address) as proxy,
  ):
    table = all_of(client)
    writing = ('write', proxy.address, 0, 10**6, 1)
    with Program(tmp_path / 'log', *writing) as writer:
      until(lambda: newest(writer) > 50)
      for direction in directions:
        setattr(proxy, direction, False)
      if 'up' in directions:
        until(lambda: any('silent' in e for e in server.listener.lines.events))
      with pytest.raises(subprocess.TimeoutExpired):  # it does not end
        writer.process.wait(seconds)
      before = newest(writer)
      for direction in directions:
        setattr(proxy, direction, True)
      until(lambda: newest(writer) > before + 50)
    check_once(read_all(table), {0: newest(writer)})
    assert server.failure is None and not server.counts['malformed']


@pytest.mark.parametrize('kills', [2, pytest.param(10, marks=pytest.mark.slow)])
def test_a_server_that_is_killed_and_comes_back(kills: int, tmp_path: Path) -> None:
  replay = Replay(tmp_path)
  address = replay.address
  with service.connect(address) as client:
    table = all_of(client)
    writer = Program(tmp_path / 'writer', 'write', address, 1, 10**6, 1)
    fill(client, client.table('other', **SIMPLE), 100).flush(timeout=30)
    sampler = Program(tmp_path / 'sampler', 'sample', address, 'other', 4)
    until(sampler.said)
    saved: set[tuple[int, int]] = set()
    first = 2  # that was written since the last restart
    for i in range(kills):
      until(lambda: newest(writer) > 60 * (i + 1))
      known = newest(writer)
      (path,) = client.checkpoint(timeout=30)
      assert Path(path).is_dir()
      saved |= {(1, k) for k in range(first, known + 1)}
      before = newest(writer)
      until(lambda: newest(writer) > before)
      replay.kill()
      replay = Replay(tmp_path, address=address)
      assert 'restored' in replay.output
      before, sampled = newest(writer), sampler.said()[-1][0]
      until(lambda: newest(writer) > before + 20)  # it goes on by itself
      first = newest(writer) + 1
      until(lambda: sampler.said()[-1][0] > sampled)
    writer.signal(signal.SIGTERM)
    writer.wait()
    sampler.kill()
    found = read_all(table)
    check_once(found, {})
    assert saved <= set(found)  # all that was in a checkpoint, once
    info = table.info()
    assert info.inserts == info.samples == info.deletes == len(found)
    replay.signal(signal.SIGTERM)
    assert replay.wait() == 143 and 'checkpoint' in replay.output
    replay = Replay(tmp_path, address=address)
    again = table.info()
    assert (again.inserts, again.samples, again.size) == (info.inserts, info.samples, 0)
    replay.kill()


def seven_wait(client: Any) -> tuple[Any, Any]:
  """A queue for three with ten items, of which seven wait in its newest checkpoint; and their writer."""
  table = client.table('queue', **QUEUE)
  writer = fill(client, table, 10, delay=0.0)
  until(lambda: table.info().waiting_inserts == 7)
  client.checkpoint(timeout=30)
  return table, writer


def test_waiting_items_are_sent_once_after_a_restart(tmp_path: Path) -> None:
  with Replay(tmp_path) as replay, service.connect(replay.address) as client:
    address = replay.address
    table, writer = seven_wait(client)
    assert f'{tmp_path}/kept has no checkpoint' in replay.output
    replay.kill()
    with Replay(tmp_path, address=address) as replay:
      until(lambda: table.info().waiting_inserts == 7)
      assert 'has no checkpoint' not in replay.output
      seen = [int(table.sample(1, timeout=30).data['x'][0, 0]) for _ in range(10)]
      assert seen == list(range(10))
      writer.close(timeout=30)
      assert table.info().inserts == 10


def test_items_that_wait_go_on_waiting_over_another_connection() -> None:
  with ReplayServer(ANY) as server, service.connect(server.address) as client:
    table = client.table('queue', **QUEUE)
    with Proxy(server.address) as proxy, service.connect(proxy.address) as far:
      writer = fill(far, far.table('queue'), 10, delay=0.0)
      until(lambda: table.info().waiting_inserts == 7 and writer.in_flight == 7)
      proxy.reset()
      until(lambda: far.connections[0].link.session == 2)
      assert writer.in_flight == 7
      assert [int(table.sample(1, timeout=30).data['x'][0, 0]) for _ in range(10)] == [*range(10)]
      writer.close(timeout=30)
    assert table.info().inserts == 10 and not server.counts['repeated']


def test_items_inserted_after_the_checkpoint_are_lost(tmp_path: Path) -> None:
  with Replay(tmp_path) as replay, service.connect(replay.address) as client:
    address = replay.address
    table, writer = seven_wait(client)
    assert len(table.sample(2, timeout=30).key) == 2  # two of the seven go in
    until(lambda: writer.in_flight == 5)
    replay.kill()
    with Replay(tmp_path, address=address) as replay:
      until(lambda: table.info().waiting_inserts == 5)
      assert '2 items' not in replay.output  # nothing newer has come
      writer.append({'x': np.int64(10)})
      writer.create_item(table, 1.0, num_steps=1)
      seen = [int(table.sample(1, timeout=30).data['x'][0, 0]) for _ in range(9)]
      assert seen == [0, 1, 2, 5, 6, 7, 8, 9, 10]
      replay.says('2 items')
      writer.close(timeout=30)


def test_as_many_items_as_may_wait_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(replay_messages, 'MOST_ITEMS', 8)
  with ReplayServer(ANY) as server, service.connect(server.address) as client:
    table = client.table('queue', **{**QUEUE, 'rate_limiter': tables.queue(1), 'max_size': 9})
    writer = fill(client, table, 9, delay=0.0)
    until(lambda: table.info().waiting_inserts == 8 and writer.in_flight == 8)
    server.stop()
    with ReplayServer(server.address) as again:  # which has none of them
      seen = [int(table.sample(1, timeout=30).data['x'][0, 0]) for _ in range(8)]
      assert seen == list(range(1, 9))
      writer.close(timeout=30)
      assert again.failure is None


@pytest.mark.slow
def test_checkpoints_under_traffic_are_whole(tmp_path: Path) -> None:
  with Replay(tmp_path, '--checkpoint-every', '0.2') as replay:
    address = replay.address
    with service.connect(address) as client:
      table = all_of(client)
      writers = [Program(tmp_path / f'{i}', 'write', address, i, 10**6, 5) for i in range(2)]
      until(lambda: min(map(newest, writers)) > 100)
      before = replay.output.count('traffic for')
      until(lambda: replay.output.count('traffic for') >= before + 3)
      known = {i: newest(w) for i, w in enumerate(writers)}
      client.checkpoint(timeout=30)
      for writer in writers:
        writer.kill()
      kept = [p for p in (tmp_path / 'kept').iterdir() if p.name != 'lock']
      assert len(kept) <= 3  # the newest two, and one being written
      replay.kill()
      with Replay(tmp_path, address=address):
        check_once(read_all(table), known)


@pytest.mark.parametrize('kept_by', ['a checkpoint', 'a deadline'])
def test_items_that_are_gone_leave_no_memory(kept_by: str, tmp_path: Path) -> None:
  shape = (1, 2, 3, 4, 5)  # of no other chunk

  def chunks() -> list[Any]:  # this takes long
    return [x for x in gc.get_objects() if type(x) is Chunk and x.shape == shape]

  with ReplayServer(ANY, tmp_path) as server, service.connect(server.address) as client:
    table, empty = all_of(client), all_of(client, 'empty')
    with client.writer(history=1) as writer:
      for _ in range(9):
        writer.append({'x': np.zeros(shape)})
        writer.create_item(table, 1.0, num_steps=1)
    seen = list(map(weakref.ref, chunks()))
    assert seen
    client.checkpoint(timeout=30)
    if kept_by == 'a deadline':
      waiting = client.connections[0].ask(SAMPLE, 'empty', 1, 1, False, end=time.monotonic() + 600)
      until(lambda: empty.info().waiting_samplers == 1)
    assert len(table.sample(9, timeout=900).key) == 9  # and they are gone
    if kept_by == 'a deadline':
      client.checkpoint(timeout=30)  # of empty tables
      assert not waiting.done
    until(lambda: not any(x() for x in seen), 10)
    until(lambda: not chunks(), 10)


def test_a_damaged_checkpoint_and_other_settings_are_refused(tmp_path: Path) -> None:
  with Replay(tmp_path) as replay, service.connect(replay.address) as client:
    fill(client, client.table('it', **SIMPLE), 5).close(timeout=30)
    replay.signal(signal.SIGTERM)
    assert replay.wait() == 143
  other = 'name=it,sampler=lifo,remover=fifo,rate=min_size:1,max_size=1000'
  with pytest.raises(AssertionError, match=r'sampler .*uniform .*lifo'):
    Replay(tmp_path, '--table', other)
  same = other.replace('lifo', 'uniform')
  with Replay(tmp_path, '--table', same) as replay, service.connect(replay.address) as client:
    assert len(client.table('it')) == 5
  (chunks,) = (tmp_path / 'kept').glob('*1/chunks.bin')
  chunks.write_bytes(b'x' * chunks.stat().st_size)
  for later in (tmp_path / 'kept').glob('0*/chunks.bin'):
    later.write_bytes(b'x')
  with pytest.raises(AssertionError, match=r'00000001 .*chunks\.bin .*00000001 '):
    Replay(tmp_path)


def test_an_unwritable_last_checkpoint_is_a_failure(tmp_path: Path) -> None:
  with Replay(tmp_path) as replay, service.connect(replay.address) as client:
    fill(client, client.table('it', **SIMPLE), 5).close(timeout=30)
    (tmp_path / 'kept' / 'lock').unlink()
    (tmp_path / 'kept').rmdir()
    (tmp_path / 'kept').write_text('in the way')
    replay.signal(signal.SIGTERM)
    assert replay.wait() == 1, replay.output
    replay.says('kept')


def fail(*args: Any) -> None:
  raise ZeroDivisionError('of the test')


def test_a_service_saves_when_its_thread_fails(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  with ReplayServer(ANY, tmp_path) as server:
    monkeypatch.setattr(ReplayServer, 'turned', fail)
    assert server.ended.wait(60)
    assert 'ZeroDivisionError' in (server.failure or '')
  monkeypatch.undo()
  with ReplayServer(ANY, tmp_path) as again:
    assert [p.name for p in again.saving.saved] == ['00000001']


def test_a_checkpoint_needs_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  def full(*args: Any) -> None:
    raise MemoryError

  with ReplayServer(ANY, tmp_path) as server, service.connect(server.address) as client:
    for name in ('snapshot', 'write'):
      monkeypatch.setattr(checkpoint, name, full)
      with pytest.raises(ValueError, match='MemoryError'):
        client.checkpoint(timeout=60)
      monkeypatch.undo()
    assert len(client.checkpoint(timeout=60)) == 1 and server.failure is None
    monkeypatch.setattr(checkpoint, 'write', full)
    server.stop()
    assert 'MemoryError' in (server.failure or '')


def test_the_last_checkpoint_is_written_after_a_failure(tmp_path: Path) -> None:
  with ReplayServer(ANY, tmp_path) as server:
    server.listener.call(fail)
    assert server.ended.wait(60)
    assert len(list(tmp_path.glob('0*'))) == 1 and 'ZeroDivisionError' in (server.failure or '')


def test_nobody_reads_what_it_says(tmp_path: Path) -> None:
  command = ['-m', 'podrace.cli', 'replay', '--listen', ANY, '--dir', str(tmp_path / 'kept')]
  with subprocess.Popen(
    [sys.executable, *command], stderr=subprocess.PIPE, text=True, env=environment()
  ) as process:
    assert process.stderr is not None
    address = process.stderr.readline().split()[-1]
    process.stderr.close()  # from now on it writes to a pipe without a reader
    with service.connect(address) as client:
      fill(client, client.table('it', **SIMPLE), 5).close(timeout=60)
      process.send_signal(signal.SIGTERM)
      assert process.wait(60) == 143
  assert len(list((tmp_path / 'kept').glob('0*'))) == 1


def test_a_directory_has_one_service(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
  with ReplayServer(ANY, tmp_path):
    with pytest.raises(SystemExit) as end:
      cli.main(['replay', '--listen', ANY, '--dir', str(tmp_path)])
    assert end.value.code == 2
    assert f'--dir {tmp_path} ' in capfd.readouterr().err
  with ReplayServer(ANY, tmp_path):
    pass
  (tmp_path / 'file').write_text('')
  with pytest.raises(tables.CheckpointError, match=str(tmp_path / 'file')):
    ReplayServer(ANY, tmp_path / 'file')


def test_what_was_half_written_is_removed(tmp_path: Path) -> None:
  partial = tmp_path / '.00000007.partial-123'
  partial.mkdir()
  (partial / 'chunks.bin').write_text('half')
  (tmp_path / '²').mkdir()  # a digit, and the number of no checkpoint
  with ReplayServer(ANY, tmp_path) as server:
    assert not partial.exists() and not server.saving.saved
    assert any('half-written' in line for line in server.listener.lines.events)


def test_one_client_too_many_is_taken_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(sessions, 'PEERS', 1)
  with ReplayServer(ANY) as server, service.connect(server.address) as first:
    with pytest.raises(TimeoutError, match=' 1 '):
      service.connect(server.address, timeout=2.0)
    found: list[service.ReplayClient] = []
    thread = threading.Thread(
      target=lambda: found.append(service.connect(server.address)), daemon=True
    )
    before = server.counts['made to wait']
    thread.start()
    until(lambda: server.counts['made to wait'] > before)
    first.close()
    thread.join(60)
    assert len(found) == 1 and server.counts['sessions'] == 2 and not server.counts['refused']
    found[0].close()


def test_an_unheard_refusal_is_heard_in_the_next_session() -> None:
  with ReplayServer(ANY) as server, service.connect(server.address) as client:
    fill(client, client.table('it', **SIMPLE), 1).close(timeout=30)
    with Proxy(server.address) as proxy, service.connect(proxy.address) as far:
      table, writer = far.table('it'), far.writer(history=1, delay=0.0)
      proxy.down = False
      for _ in range(2):
        writer.append({'x': np.float32(1)})
        writer.create_item(table, 1.0, num_steps=1)
      until(lambda: server.counts['refused items'] == 2)
      proxy.reset()
      proxy.down = True
      with pytest.raises(ValueError, match=r'x: int64.*x: float32'):
        writer.flush(timeout=60)
      until(lambda: server.counts['refused items'] == 4)
      fill(far, table, 3).close(timeout=60)
      assert len(table) == 4
    told = [e for e in server.listener.lines.events if 'refused an item' in e]
    assert len(told) == 1 and "'it'" in told[0]
    assert server.failure is None and not server.counts['malformed']


def test_arguments_of_other_types_do_not_end_a_client() -> None:
  with ReplayServer(ANY) as server, service.connect(server.address) as client:
    table = client.table('it', **(SIMPLE | {'max_size': np.int64(7)}))
    writer = fill(client, table, 2)
    for key in (0, 2**62, 2**63):
      with pytest.raises(ValueError, match=str(key)):
        writer.create_item(table, 1.0, num_steps=1, key=key)
    with pytest.raises(TypeError, match='UPDATE'):
      table._shards.connections[0].ask(replay_messages.UPDATE, object())
    writer.close(timeout=30)
    sample = table.sample(np.int32(2), np.int64(1), timeout=30, peek=np.bool_(True))
    assert len(sample.key) == 2 and table.info().max_size == 7


def nested(levels: int) -> Any:
  return {'x': nested(levels - 1)} if levels else np.zeros(2)


@pytest.mark.parametrize(
  'step',
  [{'k' * 201: 0.0}, {f'{i}': 0.0 for i in range(1025)}, nested(33), np.zeros((1,) * 17)],
  ids=['a long key', 'many columns', 'many levels', 'many dimensions'],
)
def test_an_item_that_no_service_takes_is_refused_alone(step: Any) -> None:
  with ReplayServer(ANY) as server, service.connect(server.address) as client:
    table = client.table('it', **SIMPLE)
    writer = client.writer(history=1)
    writer.append({'it': step})
    writer.create_item(table, 1.0, num_steps=1)
    with pytest.raises(ValueError, match="'it'"):
      writer.flush(timeout=10)
    fill(client, table, 3).close(timeout=30)
    assert len(table) == 3 and server.counts['sessions'] == 1
    with pytest.raises(ValueError, match='TABLE'):
      client.table('other', **SIMPLE, contents=[['x', '<f4', [10**6], True, 1, [0.0] * 10**6, 1.0]])


def test_rows_for_each_chunk_may_be_many(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(replay_messages, 'UNPACKED_CHUNK_BYTES', 2**16)
  with ReplayServer(ANY) as server, service.connect(server.address) as client:
    table = client.table('it', **SIMPLE)
    with client.writer(history=300, rows_per_chunk=300) as writer:
      writer.extend({'x': np.arange(300).repeat(1000).reshape(300, 1000)})
      writer.create_item(table, 1.0, num_steps=300)
    assert (table.sample(1, timeout=30).data['x'][0, :, 0] == np.arange(300)).all()


def test_of_refused_items_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(insert_streams, 'REFUSED_ITEMS', 3)
  one = insert_streams.InsertStream(10)
  for number in range(5):
    one.refuse(number)
  assert one.missing == {2, 3, 4} and list(one.refused) == [2, 3, 4]


def test_what_is_asked_while_a_service_is_away_leaves_nothing() -> None:
  with ReplayServer(ANY) as server, service.connect(server.address) as client:
    table, connection = client.table('it', **SIMPLE), client.connections[0]
    server.stop()
    until(lambda: connection.away)
    for _ in range(20):
      with pytest.raises(tables.RateLimited):
        table.sample(1, timeout=0.001)
    assert not connection.calls and not connection.unsent
    with ReplayServer(server.address) as again:
      fill(client, table, 2).close(timeout=60)
      assert len(table.sample(1, timeout=60).key) == 1 and not again.counts['malformed']


def test_each_session_asks_for_a_table_once() -> None:
  """Also if the sessions before it ended without an answer."""
  end = bare.Accepting(replay_messages.OF_CLIENTS)
  with (
    contextlib.closing(end),
    contextlib.closing(service.ReplayClient([end.address], None, False)) as client,
  ):
    (connection,) = client.connections
    connection.tables['it'] = {}
    details = dict(number=0, largest=2**20, waiting=b'', missing=b'', sizes={})
    for _ in range(3):
      with end.welcome(**details) as session:
        session.expect(replay_messages.TABLE)
        until(lambda: not connection.unsent)
        assert len(connection.calls) == 1


def test_many_threads_share_a_client(tmp_path: Path) -> None:
  with ReplayServer(ANY) as server, service.connect(server.address) as client:
    table = all_of(client)

    def write(who: int) -> None:
      writer = client.writer(history=3, rows_per_chunk=8, max_in_flight=32, delay=0.01)
      for i in range(300):
        writer.append(programs.step(who, i))
        if i >= 2:
          writer.create_item(table, 1.0, num_steps=3)
      writer.close()

    threads = [threading.Thread(target=write, args=(i,), daemon=True) for i in range(8)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(60)
    check_once(read_all(table), dict.fromkeys(range(8), 299))
