"""Who may use the services, and that nobody else gets anywhere; what is none is dropped."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
from children import Process, until
from mutants import Document, spoiled, tell
from services import ANY, all_of
from storm import MESSAGES, storm
from test_service_tables import SIMPLE, fill

from podrace import cli, service, tables
from podrace.remote import dial, security
from podrace.remote.top import Asker
from podrace.remote.wire import checksum, pack, unpack
from podrace.service import server as replay_server
from podrace.service import wire
from podrace.service.server import ReplayServer, parse_tables
from podrace.tables.items import Leaf, Signature


def command(*args: str) -> int:
  with pytest.raises(SystemExit) as end:
    cli.main(args)
  return end.value.code


def test_the_command_line_refuses_what_can_not_be(capfd: pytest.CaptureFixture[str]) -> None:
  listen = ['replay', '--listen', 'tcp://127.0.0.1:0']
  for args, text in (
    (['replay', '--listen', 'tcp://0.0.0.0:5560'], 'needs keys'),
    (['replay', '--dir', 'x'], 'needs --listen'),
    ([*listen, '--checkpoint-every', 'nan'], "takes a number of at least 0, not 'nan'"),
    ([*listen, '--checkpoint-every', '-1'], "--checkpoint-every takes a number of at least 0, not '-1'"),
    ([*listen, '--checkpoint-every', '5'], '--checkpoint-every 5 needs --dir'),
    ([*listen, '--peer-timeout', 'inf'], "--peer-timeout takes a number of at least 0, not 'inf'"),
    ([*listen, '--peer-timeout', '0'], '--peer-timeout must be more than 0'),
    ([*listen, '--client-bytes', '0'], '--client-bytes must be at least 1'),
    (['top', 'tcp://127.0.0.1:1', '--every', '0'], '--every must be more than 0'),
    ([*listen, '--table', 'name=a'], 'needs sampler, remover, rate, max_size'),
    ([*listen, '--table', 'nome=a'], "'nome=a', expected name, sampler"),
    ([*listen, '--table', 'name=a,sampler=x,remover=fifo,rate=queue:3,max_size=9'], 'a selector is'),
    ([*listen, '--table', 'name=a,sampler=lifo,remover=fifo,rate=x:3,max_size=9'], 'rate=x:3, expec'),
    ([*listen, '--table', 'name=a,sampler=lifo,remover=fifo,rate=queue:3,max_size=x'], 'whole number'),
  ):  # fmt: skip
    assert command(*args) == 2
    assert text in capfd.readouterr().err


def test_tables_as_they_are_typed() -> None:
  found = parse_tables([
    'name=a,sampler=prioritized:0.6,remover=fifo,rate=sample_to_insert:8:100:800,max_size=1000',
    'name=b,sampler=min_heap,remover=lifo,rate=queue:9,max_size=9,max_bytes=5,max_times_sampled=1',
  ])  # fmt: skip
  with ReplayServer(ANY, tables=found) as server:
    a, b = server.tables['a'], server.tables['b']
    assert a.config()['rate_limiter'] == 'sample_to_insert_ratio(8, min_size=100, error=800.0)'
    assert (a.contents.sampler.name, b.contents.max_bytes, b.contents.max_times_sampled) == (
      'prioritized(0.6)',
      5,
      1,
    )
  with pytest.raises(ValueError, match='already'):
    parse_tables(['name=b,sampler=lifo,remover=lifo,rate=queue:9,max_size=9'] * 2)


def test_a_listed_key_is_needed_for_either_service(tmp_path: Path) -> None:
  keys = tmp_path / 'keys'
  security.new_keys(keys)
  stranger = tmp_path / 'stranger'
  security.new_keys(stranger)
  (stranger / security.SERVER_PUBLIC).write_text((keys / security.SERVER_PUBLIC).read_text())
  with ReplayServer(ANY, keys=keys) as server, service.Publisher(ANY, keys=keys) as publisher:
    publisher.publish(1, [('x', np.ones(3))])
    with service.connect(server.address, keys=keys) as client:
      fill(client, client.table('it', **SIMPLE), 3).close(timeout=30)
      reader = service.Parameters(publisher.address, keys=keys)
      assert reader.get(timeout=30).version == 1
      for other in (None, stranger):
        with pytest.raises(TimeoutError, match='with the same keys'):
          service.connect(server.address, keys=other, timeout=1.0)
        late = service.Parameters(publisher.address, keys=other)
        with pytest.raises(service.Stale):
          late.get(timeout=0.5)
        late.close()
      assert server.counts['turned away'] and publisher.counts['turned away']
      assert server.counts['sessions'] == 1 and not server.counts['malformed']
      away = server.counts['turned away']
      (keys / security.ALLOWED).write_text('')  # nobody is listed any more
      until(lambda: not server.peers and not publisher.peers, 10.0)
      until(lambda: server.counts['malformed'] or server.counts['turned away'] > away)  # came again
      assert server.counts['sessions'] == 1
      reader.close()


def test_who_was_turned_away_joins_once_its_key_is_listed(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(security, 'NEW_SOCKET_SECONDS', 0.5)
  keys, own = tmp_path / 'keys', tmp_path / 'own'
  security.new_keys(keys)
  security.new_client(keys, own)
  listed = keys / security.ALLOWED
  text = listed.read_text()
  with ReplayServer(ANY, keys=keys) as server, service.Publisher(ANY, keys=keys) as publisher:
    publisher.publish(1, [('x', np.ones(3))])
    reader = service.Parameters(publisher.address, keys=own)
    assert reader.get(timeout=30).version == 1
    with service.connect(server.address, keys=own) as client:
      (connection,) = client.connections
      for _ in range(2):  # the list is replaced, by an editor that takes its time
        before = server.counts['turned away'], publisher.counts['turned away']
        listed.write_text('')
        until(lambda b=before: server.counts['turned away'] > b[0])
        until(lambda b=before: publisher.counts['turned away'] > b[1])
        until(lambda: dial.NOT_LISTED in (connection.why, reader.why))
        assert connection.session is reader.session is None
        listed.write_text(text)
        assert connection.wait_joined(time.monotonic() + 30) and reader.wait_joined(
          time.monotonic() + 30
        )
      fill(client, client.table('it', **SIMPLE), 3).close(timeout=30)
    reader.close()


def ended(call: Any, seconds: float = 30.0) -> BaseException:
  """What `call` raises, which it does in time."""
  raised: list[BaseException] = []

  def run() -> None:
    try:
      call()
    except BaseException as e:
      raised.append(e)

  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  thread.join(seconds)
  assert raised, f'nothing was raised in {seconds} s'
  return raised[0]


@pytest.mark.parametrize(
  'lacks', [security.SERVER_PUBLIC, security.CLIENT_SECRET, security.CLIENT_PUBLIC]
)
def test_a_key_that_is_missing_is_told_at_once(lacks: str, tmp_path: Path) -> None:
  security.new_keys(tmp_path / 'keys')
  (tmp_path / 'keys' / lacks).unlink()
  for connect in (
    lambda: service.connect('tcp://127.0.0.1:9', keys=tmp_path / 'keys', timeout=None),
    lambda: service.Parameters('tcp://127.0.0.1:9', keys=tmp_path / 'keys').get(),
  ):
    error = ended(connect)
    assert isinstance(error, security.SecurityError) and f'no {lacks}' in str(error)


def test_keys_are_read_once(tmp_path: Path) -> None:
  keys, own = tmp_path / 'keys', tmp_path / 'own'
  security.new_keys(keys)
  security.new_client(keys, own)
  with ReplayServer(ANY, keys=keys) as server, service.connect(server.address, keys=own) as client:
    table = client.table('it', **SIMPLE)
    shutil.rmtree(own)
    server.stop()
    with ReplayServer(server.address, keys=keys):
      fill(client, table, 3).close(timeout=60)


def test_a_link_that_fails_ends_all_waits(monkeypatch: pytest.MonkeyPatch) -> None:
  def fail(*args: Any) -> None:
    raise OSError(24, 'Too many open files')

  monkeypatch.setattr(zmq.Socket, 'get_monitor_socket', fail)
  error = ended(lambda: service.connect('tcp://127.0.0.1:9', timeout=None))
  assert isinstance(error, RuntimeError) and 'Too many open files' in str(error)


# --- what is none -----------------------------------------------------------------------------------


HELLO = {'name': wire.REPLAY, 'version': wire.VERSION, 'nonce': 1, 'host': 'raw', 'podrace': '0',
         'pid': os.getpid()}  # fmt: skip


class Raw:
  """A client of a few lines, that can be made to say anything."""

  def __init__(self, context: zmq.Context[Any], address: str) -> None:
    self.socket = context.socket(zmq.DEALER)
    self.socket.linger = 0
    self.socket.sndhwm = self.socket.rcvhwm = 0
    self.socket.connect(address)
    self.session = 0

  def say(self, *header: Any, frames: Any = ()) -> None:
    self.socket.send_multipart([pack(*header), *frames])

  def hear(self, kind: int, seconds: float = 10.0) -> list[Any]:
    end = time.monotonic() + seconds
    while self.socket.poll(int(max(end - time.monotonic(), 0) * 1000)):
      header, *frames = self.socket.recv_multipart()
      if unpack(header, 2**20)[0] == kind:
        return [unpack(header, 2**20), *frames]
    raise AssertionError(f'nothing of kind {kind}')

  def hello(self, **changes: Any) -> None:
    self.say(wire.HELLO, {**HELLO, 'stream': random.getrandbits(60) + 1, **changes})
    _, self.session, self.told = self.hear(wire.WELCOME)[0]

  def close(self) -> None:
    self.socket.close()


SIGNATURE = wire.told_signature(
  Signature(('dict', ('x',), (('leaf', (), ()),)), (Leaf('x', np.dtype('<i8'), (2,), False),))
)


def insert(number: int, **changes: Any) -> tuple[list[Any], list[Any]]:
  """(header but for kind and session, frames) of a good INSERT of one item, but for the changes."""
  parts: dict[str, Any] = dict(
    chunks=[(0, 3, 0, 48)],
    item=[(number, 100 + number, 1.0, 0, 0)],
    parts=[(1, 0, 3)],
    refs=[number - 1],
    released=[],
    data=b'x' * 48,
  )
  parts.update(changes)
  frames = [
    np.array(parts['chunks'], '<u4').tobytes(),
    np.array(parts['item'], wire.ITEM).tobytes(),
    np.array(parts['parts'], '<u4').tobytes(),
    np.array(parts['refs'], '<u8').tobytes(),
    np.array(parts['released'], '<u8').tobytes(),
    parts['data'],
  ]
  return [number, checksum(frames)], frames


def ready(context: zmq.Context[Any], server: ReplayServer, **changes: Any) -> Raw:
  raw = Raw(context, server.address)
  raw.hello(**changes)
  raw.say(
    wire.DECLARE, raw.session,
    {'tables': ['it'], 'specs': [['<i8', [2]]], 'signatures': [SIGNATURE]},
  )  # fmt: skip
  return raw


def test_what_came_before_a_connection_was_closed_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
  """A session ends with its connection, and of both the server hears in one look: what was said comes first."""
  turning, turn = threading.Event(), threading.Event()

  def held(server: ReplayServer, again: Any = ReplayServer.turn) -> None:
    again(server)
    if turning.is_set():
      turning.clear()
      assert turn.wait(60)

  monkeypatch.setattr(ReplayServer, 'turn', held)
  with ReplayServer(ANY, peer_timeout=600.0) as server, service.connect(server.address) as client:
    client.table('it', **SIMPLE)
    for i in range(10):
      context, more_context = zmq.Context(), zmq.Context()
      clients = ready(context, server), ready(more_context, server)
      turn.clear()
      turning.set()
      server.wake()
      until(lambda: not turning.is_set())  # it looks at nothing from now on
      for one in clients:
        for number in range(1, 61):  # of the 64 that are read at a time
          more, frames = insert(number)
          one.say(wire.INSERT, one.session, *more, frames=frames)
        one.socket.linger = 10_000
        one.close()
      context.term()  # after all has been sent and the connection is closed
      more_context.term()
      turn.set()
      until(lambda n=2 * (i + 1): server.counts['dropped'] == n)
      assert server.counts['items'] == 120 * (i + 1)
    assert server.counts['stale'] == server.counts['malformed'] == 0 and len(server.peers) == 1


BAD: list[tuple[str, dict[str, Any]]] = [
  ('of spec 9', dict(chunks=[(9, 3, 0, 48)])),
  ('expected 48', dict(chunks=[(0, 3, 0, 47)], data=b'x' * 47)),
  ('differ from what is told', dict(data=b'x' * 49)),
  ('not zstandard', dict(chunks=[(0, 3, 1, 48)])),
  ('kind 7', dict(chunks=[(0, 3, 7, 48)])),
  ('0 rows', dict(chunks=[(0, 0, 0, 48)])),
  ('rows 0 to 4 of 3', dict(parts=[(1, 0, 4)])),
  ('rows 3 to 4', dict(parts=[(1, 3, 1)])),
  ('rows 0 to 0', dict(parts=[(1, 0, 0)])),
  ('which there is not', dict(refs=[5])),
  ('chunks for parts of', dict(parts=[(2, 0, 3)])),
  ('expected 1', dict(parts=[(1, 0, 3)] * 2, refs=[0, 0])),
  ('was not declared', dict(item=[(1, 101, 1.0, 7, 0)])),
  ('was not declared', dict(item=[(1, 101, 1.0, 0, 7)])),
  ('without a key', dict(item=[(1, 0, 1.0, 0, 0)])),
  ('released, which', dict(released=[77])),
]


def test_an_insert_that_is_none_inserts_nothing() -> None:
  context = zmq.Context()
  with ReplayServer(ANY) as server, service.connect(server.address) as client:
    table = client.table('it', **SIMPLE)
    for text, changes in BAD:
      raw = ready(context, server)
      header, frames = insert(1, **changes)
      raw.say(wire.INSERT, raw.session, *header, frames=frames)
      assert text in raw.hear(wire.GONE)[0][2], text
      raw.close()
    for crc, count in ((1, 6), (0, 5)):
      raw = ready(context, server)
      header, frames = insert(1)
      raw.say(wire.INSERT, raw.session, 1, header[1] + crc, frames=frames[:count])
      assert 'checksum' in (said := raw.hear(wire.GONE)[0][2]) or 'frames after' in said
      raw.close()
    raw = ready(context, server)
    header, frames = insert(1)
    raw.say(wire.INSERT, raw.session, 0, header[1], frames=frames)
    assert 'message 0' in raw.hear(wire.GONE)[0][2]
    raw.close()
    raw = ready(context, server)
    for number in (1, 2, 2, 1, 3):  # what comes again is known
      header, frames = insert(number, refs=[0])
      raw.say(wire.INSERT, raw.session, *header, frames=frames)
      assert np.frombuffer(raw.hear(wire.ACK)[1], '<u8').tolist() == [number]
    assert table.info().inserts == 3 and server.counts['repeated'] == 2
    header, frames = insert(4, item=[(4, 104, -1.0, 0, 0)], refs=[0])
    raw.say(wire.INSERT, raw.session, *header, frames=frames)
    assert 'priority -1' in (heard := raw.hear(wire.ACK))[0][4] and len(heard[3]) == 8
    twice: dict[str, Any] = dict(parts=[(1, 0, 3)] * 2, refs=[0, 0])
    header, frames = insert(5, item=[(4, 104, 1.0, 0, 0)] * 2, **twice)  # what was refused, mended
    raw.say(wire.INSERT, raw.session, *header, frames=frames)
    assert {*np.frombuffer(raw.hear(wire.ACK)[1], '<u8').tolist()} == {4}
    assert table.info().inserts == 4 and server.counts['repeated'] == 3
    raw.close()
    assert len(table.sample(2, timeout=10).key) == 2 and server.failure is None
  context.term()


def test_a_message_holds_up_others_for_so_long_only() -> None:
  context = zmq.Context()
  with ReplayServer(ANY) as server, service.connect(server.address) as client:
    client.table('it', **SIMPLE)
    items = dict(item=[(i, i, 1.0, 0, 0) for i in range(1, 514)], parts=[(1, 0, 3)] * 513,
                 refs=[0] * 513)  # fmt: skip
    references = dict(parts=[(2**20 + 1, 0, 3)], refs=[0] * (2**20 + 1))
    chunks = dict(chunks=[(0, 1, 0, 0)] * (2**20 + 1), data=b'')
    for text, changes in (
      ('513 items', items),
      ('1048577 ref', references),
      ('1048577 ch', chunks),
    ):
      raw = ready(context, server)
      header, frames = insert(1, **changes)
      raw.say(wire.INSERT, raw.session, *header, frames=frames)
      assert text in raw.hear(wire.GONE)[0][2]
      raw.close()
    for kind, columns in ((wire.UPDATE, 2), (wire.DELETE, 1)):
      raw = ready(context, server)
      frames = [bytes(8 * 65_537)] * columns
      raw.say(kind, raw.session, 1, 'it', checksum(frames), frames=frames)
      assert '65537 keys' in raw.hear(wire.GONE)[0][2]
      raw.close()
  context.term()


def test_what_waits_for_a_limiter_is_bounded_whoever_has_sent_it() -> None:
  context = zmq.Context()
  with ReplayServer(ANY, most_bytes=2**14) as server, service.connect(server.address) as client:
    client.table('it', **{**SIMPLE, 'rate_limiter': tables.queue(1)})
    refused, sent = '', 0
    while not refused:
      raw = ready(context, server)  # with a stream of its own
      rows = 500
      item = [(1, 100 + sent, 1.0, 0, 0)]
      header, frames = insert(1, item=item, chunks=[(0, rows, 0, 16 * rows)], parts=[(1, 0, rows)],
                              data=bytes(16 * rows))  # fmt: skip
      raw.say(wire.INSERT, raw.session, *header, frames=frames)
      sent += 1
      assert raw.socket.poll(10_000)
      header, *_ = raw.socket.recv_multipart()
      if unpack(header)[0] == wire.REFUSED:
        refused = unpack(header)[1][0]
      else:
        raw.say(wire.BYE, raw.session, 'no more')
      raw.close()
      assert sent < 100
    assert '65,536 are allowed' in refused and "wait for table 'it'" in refused
    assert server.store.total.bytes <= 2**16 + 2 * 16 * rows
    table = client.table('it')
    for _ in range(sent):  # nothing of it is lost, and nothing is kept of what has been sampled
      table.sample(1, timeout=10)
    table.delete(list(server.tables['it'].contents.slots))
    until(lambda: not server.store.total.bytes)
  context.term()


def test_a_client_may_keep_no_more_of_items_that_wait() -> None:
  context = zmq.Context()
  with ReplayServer(ANY, most_bytes=2**14) as server, service.connect(server.address) as client:
    client.table('it', **{**SIMPLE, 'rate_limiter': tables.queue(1)})
    raw, number = ready(context, server), 0
    while server.peers and (number := number + 1) < 100:
      chunks = dict(chunks=[(0, 250, 0, 4000)], parts=[(1, 0, 250)], data=bytes(4000))
      header, frames = insert(number, released=[number - 1], **chunks)
      raw.say(wire.INSERT, raw.session, *header, frames=frames)
      assert raw.socket.poll(10_000)
      header, *_ = raw.socket.recv_multipart()
      if unpack(header)[0] == wire.REFUSED:
        break
    assert 'its writers keep' in unpack(header)[1][0] and 4 <= number <= 7
    raw.close()
  context.term()


def test_streams_declarations_and_wishes_for_checkpoints_are_bounded(
  monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
  context = zmq.Context()
  monkeypatch.setattr(replay_server, 'STREAMS', 3)
  monkeypatch.setattr(replay_server, 'SAVES', 2)
  with ReplayServer(ANY, tmp_path) as server, service.connect(server.address) as client:
    client.table('it', **SIMPLE)
    first = ready(context, server, stream=1)
    for stream in range(2, 9):
      raw = ready(context, server, stream=stream)
      header, frames = insert(1)
      raw.say(wire.INSERT, raw.session, *header, frames=frames)
      raw.hear(wire.ACK)
      raw.say(wire.HELLO, {**HELLO, 'stream': 99, 'nonce': 2})  # lets go of the stream
      raw.hear(wire.WELCOME)
      raw.close()
    assert len(server._streams) <= 4 and 1 in server._streams
    monkeypatch.setattr(server, '_save', lambda: None)
    for number in range(3):
      first.say(wire.SAVE, first.session, number)
    assert 'wait for a checkpoint already' in first.hear(wire.ANSWER)[0][4]
    for _ in range(33):
      first.say(wire.DECLARE, first.session, {'tables': ['it'] * 2000})
    assert 'more than 65536' in first.hear(wire.GONE)[0][2]
    server._save_wanted.clear()
    monkeypatch.undo()
    first.close()
  context.term()


LEAF = ['leaf', [], []]
NO_DECLARATION: list[tuple[str, dict[str, Any]]] = [
  ('a shape 5', {'specs': [['<f4', 5]]}),
  ('expected [dtype, shape]', {'specs': [['(,)f4,', []]]}),
  ('expected [dtype, shape]', {'specs': [['O', []]]}),
  ('at most 1073741824', {'specs': [['<f4', [0, 2**62, 2**62]]]}),
  ('a shape', {'signatures': [[LEAF, [['x', '<f4', b'\1\2', True]]]]}),
  ('without a list of leaves', {'signatures': [[LEAF, 'x']]}),
  ('without lists of keys', {'signatures': [[['tuple', [], 'x'], [['x', '<f4', [], True]]]]}),
  ('there twice', {'signatures': [[['dict', ['a', 'a'], [LEAF, LEAF]],
                                   [['a', '<f4', [], True]] * 2]]}),
]  # fmt: skip


def test_a_declaration_that_is_none_ends_its_session_only() -> None:
  context = zmq.Context()
  with ReplayServer(ANY) as server:
    for text, told in NO_DECLARATION:
      raw = Raw(context, server.address)
      raw.hello()
      raw.say(wire.DECLARE, raw.session, told)
      assert text in (said := raw.hear(wire.GONE)[0][2]), (text, said)
      raw.close()
    assert server.failure is None and not server.counts['unexpected']
  context.term()


def limited(*numbers: Any, **more: Any) -> dict[str, Any]:
  told = dict(sampler='fifo', remover='fifo', rate_limiter=['x', *numbers], max_size=9,
              max_bytes=None, max_times_sampled=0)  # fmt: skip
  return {**told, **more}


INF, NAN = float('inf'), float('nan')
NO_SETTINGS: list[tuple[str, dict[str, Any]]] = [
  ('min_size must be', limited(1.0, INF, 0.0, 0.0)),
  ('min_size must be', limited(1.0, NAN, 0.0, 0.0)),
  ('min_size must be', limited(1.0, 1.5, 0.0, 0.0)),
  ('samples_per_insert must be', limited(1e-320, 1.0, 0.0, 0.0)),
  ('samples_per_insert must be', limited(1e308, 9.0, INF, INF)),
  ('min_diff must be', limited(1.0, 1.0, INF, INF)),
  ('max_diff must be', limited(1.0, 1.0, -INF, -INF)),
  ('expected four numbers', limited(1.0, 1.0, b'', 0.0)),
  ('settings without', limited(1.0, 1.0, 0.0)),
  ('which there are not', limited(1.0, 1.0, 0.0, 9.0, more=b'x')),
]


def test_settings_that_are_none_are_refused() -> None:
  context = zmq.Context()
  with ReplayServer(ANY) as server:
    raw = Raw(context, server.address)
    raw.hello()
    for number, (text, told) in enumerate(NO_SETTINGS):
      raw.say(wire.TABLE, raw.session, number, 'it', told)
      header = raw.hear(wire.ANSWER)[0]
      assert header[3] is False and text in header[4], (text, header)
    raw.say(wire.TABLE, raw.session, 99, 'it', limited(1.0, 1.0, -INF, INF))
    assert raw.hear(wire.ANSWER)[0][3] is True
    assert server.failure is None and not server.counts['unexpected']
    raw.close()
  context.term()


def test_items_are_lost_beyond_what_can_be_counted() -> None:
  context = zmq.Context()
  with ReplayServer(ANY) as server, service.connect(server.address) as client:
    client.table('it', **SIMPLE)
    for _ in range(2):
      raw = ready(context, server)
      header, frames = insert(1, item=[(2**64 - 1, 5, 1.0, 0, 0)])
      raw.say(wire.INSERT, raw.session, *header, frames=frames)
      raw.hear(wire.ACK)
      raw.say(wire.ASK)
      assert raw.hear(wire.REPORT)[0][1]['counts']['lost'] == 2**63
      raw.close()
    assert server.failure is None and not server.counts['unexpected']
  context.term()


def test_what_no_check_foresaw_ends_its_session_only(monkeypatch: pytest.MonkeyPatch) -> None:
  def fail(*args: Any) -> None:
    raise ZeroDivisionError('of the test')

  context = zmq.Context()
  with ReplayServer(ANY) as server, service.connect(server.address) as client:
    monkeypatch.setattr(server, '_declare', fail)
    raw = ready(context, server)
    assert 'ZeroDivisionError' in raw.hear(wire.GONE)[0][2]
    raw.close()
    assert any('of the test' in line for line in server.events)
    assert client.table('it', **SIMPLE).info().size == 0 and server.failure is None
  context.term()


def test_a_stream_goes_on_over_another_connection() -> None:
  context = zmq.Context()
  with ReplayServer(ANY) as server, service.connect(server.address) as client:
    table = client.table('it', **SIMPLE)
    raws = []
    for i in range(4):  # the ones before are still there
      raws.append(ready(context, server, stream=77))
      assert raws[-1].told['number'] == i
      for number in range(1, i + 2):  # those that have come, and another one
        header, frames = insert(number, refs=[0])
        raws[-1].say(wire.INSERT, raws[-1].session, *header, frames=frames)
        assert np.frombuffer(raws[-1].hear(wire.ACK)[1], '<u8').tolist() == [number]
    raws[0].say(wire.PING, raws[0].session)
    assert 'no such session' in raws[0].hear(wire.GONE)[0][2]
    assert table.info().inserts == 4 and len(server.peers) == 2
    again = Raw(context, server.address)
    for _ in range(5):  # as a client does that is impatient
      again.say(wire.HELLO, {**HELLO, 'stream': 77})
    sessions = [again.hear(wire.WELCOME)[0][1]]
    again.say(wire.PING, sessions[0])
    assert again.hear(wire.PONG)[0][2] == {'it': 4}
    for raw in (*raws, again):
      raw.close()
  context.term()


def test_who_keeps_too_many_bytes_is_refused_and_told_so() -> None:
  with (
    ReplayServer(ANY, most_bytes=2**16) as server,
    service.connect(server.address) as greedy,
    service.connect(server.address) as modest,
  ):
    table = greedy.table('it', **SIMPLE)
    writer = greedy.writer(history=1000, rows_per_chunk=16)
    rng = np.random.default_rng(0)
    with pytest.raises(service.Refused, match=r'65,536 are allowed.*--client-bytes'):
      for _ in range(1000):
        writer.append({'x': rng.random(128)})
        writer.create_item(table, 1.0, num_steps=1)
      writer.flush(timeout=30)
    until(lambda: len(server.peers) == 1)
    fill(modest, modest.table('other', **SIMPLE), 5).close(timeout=30)
    assert server.counts['sessions'] == 2  # it did not come back


def flood(messages: int, seed: int) -> None:
  """Through the network, from ever new connections, most of it after they are ignored; a good client goes on."""
  rng, context = random.Random(seed), zmq.Context()
  with ReplayServer(ANY, most_bytes=2**20) as server, service.connect(server.address) as client:
    table = client.table('it', **SIMPLE)
    fill(client, table, 5).close(timeout=30)
    before = resident()
    sent = 0
    while sent < messages:
      raw = ready(context, server)
      for _ in range(rng.randrange(1, 200)):
        raw.socket.send_multipart(wrong(rng, raw.session))
        sent += 1
      before_it = server.counts['ignored'] + server.counts['malformed']
      raw.socket.send(b'x' * 100_000)  # the last one; it has been read when that is counted
      until(lambda n=before_it: server.counts['ignored'] + server.counts['malformed'] > n)
      raw.close()
      if rng.random() < 0.05:
        assert len(table.sample(2, timeout=30).key) == 2
    assert len(table.sample(2, timeout=60).key) == 2
    fill(client, table, 5).close(timeout=60)
    assert server.failure is None and server.counts['malformed'] > messages / 1000
    until(lambda: len(server.peers) == 1)
    assert server.store.total.bytes < 2**20 and len(server._streams) <= 65536
    assert resident() < before + 2**27
  context.term()


def fuzz(messages: int, seed: int) -> None:
  """So many messages that are wrong in some way, each heard; a good client goes on."""
  with ReplayServer(ANY, most_bytes=2**20) as server, service.connect(server.address) as client:
    table = client.table('it', **SIMPLE)
    fill(client, table, 5).close(timeout=60)
    told = {'tables': ['it'], 'specs': [['<i8', [2]]], 'signatures': [SIGNATURE]}

    def case(rng: random.Random, session: int) -> Any:
      return [([wire.DECLARE, session, told], [], None)], wrong(rng, session)

    before = resident()
    heard = tell(server, lambda: told_hello(wire.REPLAY), case, messages, seed)
    assert heard.parsed > 0.8 * messages and heard.good < 0.9 * messages, heard
    assert len(server.tables) < 100 and server.store.total.bytes < 2**24
    assert resident() < before + 2**27
    assert len(table.sample(2, timeout=60).key) == 2


def told_hello(name: str) -> list[Any]:
  return [wire.HELLO, {**HELLO, 'name': name, 'stream': random.getrandbits(60) + 1}]


def documents(session: int) -> list[Document]:
  """What a client of replay may say, in an order in which it may say it."""
  structure = ['dict', ['x', 'y'], [LEAF, ['named Point', ['a'], [LEAF]]]]
  leaves = [['x', '<i8', [2], False], ['y/a', '<f4', [], True]]
  more, frames = insert(1)
  keys = [np.arange(1, 4, dtype='<i8').tobytes(), np.ones(3, '<f8').tobytes()]
  settings = limited(2.0, 1.0, -5.0, 1e6, sampler='prioritized(0.6)')
  told = {'tables': ['it'], 'specs': [['<i8', [2]]], 'signatures': [SIGNATURE, [structure, leaves]]}
  return [
    ([wire.PING, session, 0], [], None),
    ([wire.TABLE, session, 1, 'it', settings], [], None),
    ([wire.DECLARE, session, told], [], None),
    ([wire.INSERT, session, *more], frames, 3),
    ([wire.SAMPLE, session, 2, 'it', 3, 1, True, 0.0, 0], [], None),
    ([wire.SAMPLE, session, 3, 'it', 60_000, 60_000, False, -1.0, 0], [], None),
    ([wire.CANCEL, session, 3], [], None),
    ([wire.UPDATE, session, 4, 'it', checksum(keys)], keys, 4),
    ([wire.DELETE, session, 5, 'it', checksum(keys[:1])], keys[:1], 4),
    ([wire.INFO, session, 6, 'it'], [], None),
    ([wire.SAVE, session, 7], [], None),
    ([wire.ASK], [], None),
    ([wire.BYE, session, 'enough'], [], None),
  ]


def fuzz_documents(count: int) -> None:
  with ReplayServer(ANY, most_bytes=2**20) as server, service.connect(server.address) as client:
    table = client.table('other', **SIMPLE)
    before = resident()
    hello = lambda: told_hello(wire.REPLAY)  # noqa: E731
    heard = tell(server, hello, spoiled(hello, documents), count)
    assert heard.parsed > 0.8 * count and count / 10 < heard.good < count * 0.9, heard
    assert len(server.tables) <= 1024 and server.store.total.bytes < 2**24
    assert resident() - before < 2**27
    fill(client, table, 5).close(timeout=60)
    assert len(table.sample(2, timeout=60).key) == 2
  with service.Publisher(ANY) as publisher:
    publisher.publish(1, [('x', np.ones(5))])
    before = resident()
    hello = lambda: told_hello(wire.PARAMETERS)  # noqa: E731
    short = lambda session: [  # noqa: E731
      ([wire.PING, session], [], None),
      ([wire.FETCH, session, 1, 8], [], None),
      ([wire.BYE, session, 'enough'], [], None),
    ]
    heard = tell(publisher, hello, spoiled(hello, short), count)
    assert heard.parsed > 0.8 * count and count / 10 < heard.good < count * 0.9, heard
    assert resident() - before < 2**25
    reader = service.Parameters(publisher.address)
    assert reader.get(timeout=30).version == 1
    reader.close()


def test_documents_that_are_nearly_right() -> None:
  fuzz_documents(3000)


@pytest.mark.slow
def test_many_documents_that_are_nearly_right() -> None:
  fuzz_documents(200_000)


def resident() -> int:
  text = Path('/proc/self/status').read_text()
  return int(text.partition('RssAnon:')[2].split()[0]) * 1024


def wrong(rng: random.Random, session: int) -> list[bytes]:
  """A message that is not as it should be, or is, of a kind drawn at random."""
  kind = rng.choice([1, 4, 5, 6, *range(16, 26), 32, 66, 80, 200])
  number = rng.randrange(1, 5)
  header: list[Any] = [kind, session, number]
  frames: list[Any] = []
  if kind == wire.INSERT:
    more, frames = insert(number)
    header = [kind, session, *more]
    if rng.random() < 0.7:
      k = rng.randrange(6)
      data = bytearray(frames[k])
      if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
      frames[k] = bytes(data)
      if rng.random() < 0.8:
        header[3] = checksum(frames)
  elif kind == wire.SAMPLE:
    n = rng.choice([0, 1, 3, 2**17])
    header = [kind, session, number, rng.choice(['it', 'none']), n, 1, number % 2 == 0, rng.choice([-1.0, 0.0, 1e9]), rng.randrange(2)]  # fmt: skip
  elif kind == wire.DECLARE:
    header = [kind, session, rng.choice([{'tables': ['x']}, {'specs': [['<f4', [2**31, 2]]]}, {'specs': [['O', []]]}, {'signatures': [[['leaf', [], []], []]]}, {'signatures': [5]}, {'a': 1}])]  # fmt: skip
  elif kind == wire.TABLE:
    header = [kind, session, number, 'it', rng.choice([{}, {'sampler': 'x'}, {'max_size': 1}])]
  elif kind in (wire.UPDATE, wire.DELETE):
    frames = [bytes(8 * rng.randrange(3)), bytes(8 * rng.randrange(3))][: rng.randrange(3)]
    header = [kind, session, number, 'it', checksum(frames)]
  if rng.random() < 0.5:
    spoil = rng.randrange(rng.random() < 0.9, len(header))  # seldom the kind
    header[spoil] = rng.choice([None, -1, 2**63, 'x' * rng.randrange(300), [], {}, 1.5, True, b'x'])
  data = msgpack.packb(header)
  if rng.random() < 0.05:
    data = data[: rng.randrange(len(data) + 1)] + os.urandom(rng.randrange(4))
  if rng.random() < 0.05:
    frames.append(os.urandom(rng.randrange(2000)))
  if rng.random() < 0.01:
    data = b'x' * 100_000
  return [data, *frames]


def test_messages_that_are_none() -> None:
  fuzz(3000, 0)
  flood(2000, 0)


@pytest.mark.slow
def test_a_million_messages_that_are_none() -> None:
  fuzz(1_000_000, 1)
  flood(100_000, 1)


def weather(folder: Path, count: int) -> None:
  """Over real connections to a process; what is nearly right first, then what is wrong."""
  log = folder / 'log'
  with Process(
    log, '-m', 'podrace.cli', 'replay', '--listen', ANY, '--client-bytes', str(2**20)
  ) as replay:
    replay.says('listening at')
    address = replay.output.partition('listening at ')[2].split()[0]
    hello = lambda: told_hello(wire.REPLAY)  # noqa: E731
    small = lambda s: [d for d in documents(s) if 60_000 not in d[0]]  # noqa: E731  # they take seconds
    nearly, number = spoiled(hello, small), 0

    def messages(rng: random.Random, session: int) -> Iterator[list[bytes]]:
      before, mutant = nearly(rng, session)
      for header, frames, _ in before:
        yield [pack(*header), *frames]
      yield mutant
      for _ in range(rng.randrange(6)):
        yield wrong(rng, session)

    with service.connect(address) as client:
      client.table('it', **SIMPLE)
      table, writer = all_of(client, 'good'), client.writer(history=1, delay=0.0)

      def go_on() -> None:
        nonlocal number
        writer.append({'x': np.int64(number)})
        writer.create_item(table, 1.0, num_steps=1)
        assert table.sample(1, timeout=30).data['x'].tolist() == [[number]]
        number += 1

      def memory() -> int:
        text = Path(f'/proc/{replay.process.pid}/status').read_text()
        return int(text.partition('RssAnon:')[2].split()[0]) * 1024

      told = storm(address, count, hello, wire.WELCOME, messages, go_on, memory)
      asker = Asker(address, None, False)
      until(lambda: len(asker.ask()['clients']) == 1)  # the others are silent
      report = asker.ask()
      asker.close()
      counts = report['counts']
      print(told, counts)
      assert told.slowest < 10 and told.megabytes < 64, told
      assert counts['malformed'] > told.connections / 2 and 'unexpected' not in counts
      assert counts['ignored'] < 0.7 * told.messages
      assert counts['sessions'] == counts['dropped'] + 1
      (good,) = [t for t in report['tables'] if t['name'] == 'good']
      assert good['inserts'] == good['samples'] == number
      writer.close(timeout=30)
    assert 'dropped, it sent' in replay.output and 'who sent' in replay.output
    assert replay.process.poll() is None
    replay.signal(signal.SIGTERM)
    assert replay.wait() == 143


def test_a_storm(tmp_path: Path) -> None:
  weather(tmp_path, 2000)


@pytest.mark.slow
def test_a_long_storm(tmp_path: Path) -> None:
  weather(tmp_path, MESSAGES)
