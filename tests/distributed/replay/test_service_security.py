"""Who may use the services, and that nobody else gets anywhere; what is none is dropped."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bare
import msgpack
import numpy as np
import pytest
from children import Process, until
from mutants import Document, data_of, spoiled, tell
from services import ANY, all_of
from storm import MESSAGES, storm
from test_service_tables import SIMPLE, fill
from test_tables import in_thread

from podrace import cli, errors, tables
from podrace.commands import replay as replay_command
from podrace.commands.replay import parse_tables
from podrace.distributed import parameters
from podrace.distributed import replay as service
from podrace.distributed.net import keys as net_keys
from podrace.distributed.net import session_messages
from podrace.distributed.net.dashboard import Asker
from podrace.distributed.net.frame import PREFIX
from podrace.distributed.parameters import parameter_messages
from podrace.distributed.replay import checkpoints, inserting, replay_messages
from podrace.distributed.replay.connection import ReplayConnection
from podrace.distributed.replay.server import ReplayServer
from podrace.tables.items import Leaf, Signature


def command(*args: str) -> int:
  with pytest.raises(SystemExit) as end:
    cli.main(args)
  return end.value.code


@pytest.mark.parametrize(
  ('args', 'seconds'),
  [((), 0), (('--dir', 'x'), 60), (('--dir', 'x', '--checkpoint-every', '0'), 0)],
)
def test_a_service_with_a_directory_saves_by_time(
  args: tuple[str, ...], seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
  served = {}
  monkeypatch.setattr(replay_command, 'serve', lambda address, **more: served.update(more) or 0)
  assert command('replay', '--listen', 'tcp://127.0.0.1:0', *args) == 0
  assert served['checkpoint_every'] == seconds


def test_the_command_line_refuses_what_can_not_be(capfd: pytest.CaptureFixture[str]) -> None:
  listen = ['replay', '--listen', 'tcp://127.0.0.1:0']
  for args, text in (
    (['replay', '--listen', 'tcp://0.0.0.0:5560'], '--keys'),
    (['replay', '--dir', 'x'], '--listen'),
    ([*listen, '--checkpoint-every', 'nan'], '--checkpoint-every'),
    ([*listen, '--checkpoint-every', '-1'], '--checkpoint-every'),
    ([*listen, '--checkpoint-every', '5'], '--dir'),
    ([*listen, '--peer-timeout', 'inf'], '--peer-timeout'),
    ([*listen, '--peer-timeout', '0.4'], '--peer-timeout'),
    ([*listen, '--client-bytes', '0'], '--client-bytes'),
    (['top', 'tcp://127.0.0.1:1', '--every', '0'], '--every'),
    ([*listen, '--table', 'name=a'], 'max_size'),
    ([*listen, '--table', 'nome=a'], "'nome=a'"),
    ([*listen, '--table', 'name=a,sampler=x,remover=fifo,rate=queue:3,max_size=9'], 'selector'),
    ([*listen, '--table', 'name=a,sampler=lifo,remover=fifo,rate=x:3,max_size=9'], 'rate=x:3'),
    ([*listen, '--table', 'name=a,sampler=lifo,remover=fifo,rate=queue:3,max_size=x'], 'max_size'),
    (
      [*listen, '--table', 'name=a,sampler=lifo,remover=fifo,rate=queue:x,max_size=9'],
      'N of queue',
    ),
    (
      [*listen, '--table', f'name={"a" * 201},sampler=lifo,remover=fifo,rate=queue:3,max_size=9'],
      '201',
    ),
  ):
    assert command(*args) == 2
    assert text in capfd.readouterr().err


def test_tables_as_they_are_typed() -> None:
  found = parse_tables([
    'name=a,sampler=prioritized:0.6,remover=fifo,rate=sample_to_insert:8:100:800,max_size=1000',
    'name=b,sampler=min_heap,remover=lifo,rate=queue:9,max_size=9,max_bytes=5,max_times_sampled=1',
    'name=c,sampler=uniform,remover=fifo,rate=min_size:1e3,max_size=1_000_000,max_bytes=1e9',
  ])  # fmt: skip
  with ReplayServer(ANY, tables=found) as server:
    a, b = server.tables['a'], server.tables['b']
    assert a.config()['rate_limiter'] == 'sample_to_insert_ratio(8, min_size=100, error=800.0)'
    assert a.contents.sampler.name == 'prioritized(0.6)'
    assert (b.contents.max_bytes, b.contents.max_times_sampled) == (5, 1)
    assert server.tables['c'].config()['rate_limiter'] == 'min_size(1000)'
    c = server.tables['c'].contents
    assert (c.max_size, c.max_bytes) == (10**6, 10**9)
  with pytest.raises(ValueError, match='already'):
    parse_tables(['name=b,sampler=lifo,remover=lifo,rate=queue:9,max_size=9'] * 2)


def test_a_listed_key_is_needed_for_either_service(tmp_path: Path) -> None:
  keys = tmp_path / 'keys'
  net_keys.new_keys(keys)
  stranger = tmp_path / 'stranger'
  net_keys.new_keys(stranger)
  with ReplayServer(ANY, keys=keys) as server, parameters.Publisher(ANY, keys=keys) as publisher:
    publisher.publish(1, [('x', np.ones(3))])
    with service.connect(server.address, keys=keys) as client:
      fill(client, client.table('it', **SIMPLE), 3).close(timeout=30)
      reader = parameters.Parameters(publisher.address, keys=keys)
      assert reader.get(timeout=30).version == 1
      counts, others = server.counts, publisher.listener.counts
      for other in (None, stranger):
        with pytest.raises(errors.UsageError, match=server.address):
          service.connect(server.address, keys=other, timeout=30.0)
        late = parameters.Parameters(publisher.address, keys=other)
        with pytest.raises(errors.UsageError):
          late.get(timeout=30.0)
        late.close()
      assert counts['turned away'] and others['turned away']
      assert counts['sessions'] == 1 and not counts['malformed']
      away = counts['turned away']
      (keys / net_keys.ALLOWED).write_text('')  # nobody is listed any more
      until(lambda: not server.peers and not publisher.peers)
      until(lambda: counts['turned away'] > away)  # came again
      assert counts['sessions'] == 1
      reader.close()


def test_a_reader_and_a_client_join_once_listed(tmp_path: Path) -> None:
  keys, own = tmp_path / 'keys', tmp_path / 'own'
  net_keys.new_keys(keys)
  net_keys.new_client(keys, own)
  listed = keys / net_keys.ALLOWED
  text = listed.read_text()
  with ReplayServer(ANY, keys=keys) as server, parameters.Publisher(ANY, keys=keys) as publisher:
    publisher.publish(1, [('x', np.ones(3))])
    reader = parameters.Parameters(publisher.address, keys=own)
    assert reader.get(timeout=30).version == 1
    with service.connect(server.address, keys=own) as client:
      (connection,) = client.connections
      for _ in range(2):  # the list is replaced, by an editor that takes its time
        listed.write_text('')
        links = (connection.link, reader.link)
        until(lambda: all(net_keys.ALLOWED in link.why for link in links))
        assert connection.away and not reader.connected
        listed.write_text(text)
        assert connection.wait_until(lambda: not connection.away, time.monotonic() + 30)
        until(lambda: reader.connected)
      fill(client, client.table('it', **SIMPLE), 3).close(timeout=30)
    reader.close()


@pytest.mark.parametrize('lacks', net_keys.CLIENT_FILES)
def test_a_key_that_is_missing_is_told_at_once(lacks: str, tmp_path: Path) -> None:
  net_keys.new_keys(tmp_path / 'keys')
  (tmp_path / 'keys' / lacks).unlink()
  for connect in (
    lambda: service.connect('tcp://127.0.0.1:9', keys=tmp_path / 'keys', timeout=None),
    lambda: parameters.Parameters('tcp://127.0.0.1:9', keys=tmp_path / 'keys').get(),
  ):
    error = in_thread(connect)()
    assert isinstance(error, errors.SecurityError) and lacks in str(error)


def test_keys_are_read_once(tmp_path: Path) -> None:
  keys, own = tmp_path / 'keys', tmp_path / 'own'
  net_keys.new_keys(keys)
  net_keys.new_client(keys, own)
  with ReplayServer(ANY, keys=keys) as server, service.connect(server.address, keys=own) as client:
    table = client.table('it', **SIMPLE)
    shutil.rmtree(own)
    server.stop()
    with ReplayServer(server.address, keys=keys):
      fill(client, table, 3).close(timeout=60)


def test_a_link_that_fails_ends_all_waits(monkeypatch: pytest.MonkeyPatch) -> None:
  def fail(*args: Any) -> None:
    raise MemoryError('no room')

  monkeypatch.setattr(ReplayConnection, 'turned', fail)
  error = in_thread(lambda: service.connect('tcp://127.0.0.1:9', timeout=None))()
  assert isinstance(error, MemoryError)


# --- what is none -----------------------------------------------------------------------------------


class Raw(bare.Bare):
  """A client of a few lines, that can be made to say anything."""

  def __init__(self, address: str, keys: Path | None = None) -> None:
    super().__init__(bare.connect(address, {}, keys).socket, replay_messages.OF_SERVICES)

  def answer(self, kind: Any, seconds: float = 10.0) -> list[Any]:
    """The next message of a kind: its fields, and its arrays."""
    fields, arrays = self.expect(kind, seconds)
    return [fields, *arrays]

  def join(self, **changes: Any) -> None:
    self.told = self.hello(
      replay_messages.SERVICE, changes.pop('client', session_messages.new_client()), **changes
    )

  def insert(self, number: int, **changes: Any) -> None:
    """An INSERT of one item, good but for the changes."""
    fields, arrays = insert(number, **changes)
    self.say(replay_messages.INSERT, *fields, arrays=arrays)

  def acked(self) -> list[int]:
    """The numbers of the items that the next ACK tells to be in."""
    return np.frombuffer(self.answer(replay_messages.ACK)[1], '<u8').tolist()

  def declare(self) -> None:
    """What `insert` needs."""
    declared = {'tables': ['it'], 'specs': [['<i8', [2]]], 'signatures': [SIGNATURE]}
    self.say(replay_messages.DECLARE, declared)


SIGNATURE = replay_messages.pack_signature(
  Signature(('dict', ('x',), (('leaf', (), ()),)), (Leaf('x', np.dtype('<i8'), (2,), False),))
)


def insert(number: int, **changes: Any) -> tuple[list[Any], list[Any]]:
  """(fields, arrays) of a good INSERT of one item, but for the changes."""
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
    np.array(parts['item'], replay_messages.ITEM).tobytes(),
    np.array(parts['parts'], '<u4').tobytes(),
    np.array(parts['refs'], '<u8').tobytes(),
    np.array(parts['released'], '<u8').tobytes(),
    parts['data'],
  ]
  return [number], frames


def joined(server: ReplayServer, **changes: Any) -> Raw:
  raw = Raw(server.address)
  raw.join(**changes)
  return raw


def ready(server: ReplayServer, **changes: Any) -> Raw:
  raw = joined(server, **changes)
  raw.declare()
  return raw


def test_what_came_before_a_connection_was_closed_is_in() -> None:
  """A session ends with its connection, and of both the server hears in one look: what was said comes first."""
  with ReplayServer(ANY, peer_timeout=600.0) as server, service.connect(server.address) as client:
    client.table('it', **SIMPLE)
    for i in range(10):
      clients = ready(server), ready(server)
      until(lambda: len(server.peers) == 3)
      turning, turn = threading.Event(), threading.Event()
      server.listener.call(lambda go=turn, on=turning: (on.set(), go.wait(60)))
      assert turning.wait(60)  # it looks at nothing from now on
      for one in clients:
        for number in range(1, 61):
          one.insert(number)
        one.close()
      turn.set()
      until(lambda n=2 * (i + 1): server.counts['dropped'] == n)
      assert server.counts['items'] == 120 * (i + 1)
    assert not server.counts['malformed'] and len(server.peers) == 1


BAD: list[tuple[str, dict[str, Any]]] = [
  ('of spec 9', dict(chunks=[(9, 3, 0, 48)])),
  ('expected 48', dict(chunks=[(0, 3, 0, 47)], data=b'x' * 47)),
  ('49', dict(data=b'x' * 49)),
  ('zstandard', dict(chunks=[(0, 3, 1, 48)])),
  ('kind 7', dict(chunks=[(0, 3, 7, 48)])),
  ('0 rows', dict(chunks=[(0, 0, 0, 48)])),
  ('rows 0 to 4 of 3', dict(parts=[(1, 0, 4)])),
  ('rows 3 to 4', dict(parts=[(1, 3, 1)])),
  ('last chunk', dict(parts=[(2, 0, 3)], refs=[0, 0])),
  ('rows 0 to 0', dict(parts=[(1, 0, 0)])),
  ('5', dict(refs=[5])),
  ('parts', dict(parts=[(2, 0, 3)])),
  ('expected 1', dict(parts=[(1, 0, 3)] * 2, refs=[0, 0])),
  ('declared', dict(item=[(1, 101, 1.0, 7, 0)])),
  ('declared', dict(item=[(1, 101, 1.0, 0, 7)])),
  ('key', dict(item=[(1, 0, 1.0, 0, 0)])),
  ('released', dict(released=[77])),
]


def test_an_insert_that_is_none_inserts_nothing() -> None:
  with ReplayServer(ANY) as server, service.connect(server.address) as client:
    table = client.table('it', **SIMPLE)
    for text, changes in BAD:
      raw = ready(server)
      raw.insert(1, **changes)
      assert text in raw.gone(), text
      raw.close()
    raw = ready(server)
    raw.say(replay_messages.INSERT, 0, arrays=insert(1)[1])
    assert 'message 0' in raw.gone()
    raw.close()
    raw = ready(server)
    for number in (1, 2, 2, 1, 3):  # what comes again is known
      raw.insert(number, refs=[0])
      assert raw.acked() == [number]
    assert table.info().inserts == 3 and server.counts['repeated'] == 2
    raw.insert(4, item=[(4, 104, -1.0, 0, 0)], refs=[0])
    assert 'priority -1' in (heard := raw.answer(replay_messages.ACK))[0][1] and len(heard[3]) == 8
    twice: dict[str, Any] = dict(parts=[(1, 0, 3)] * 2, refs=[0, 0])
    raw.insert(5, item=[(4, 104, 1.0, 0, 0)] * 2, **twice)  # the refused item, mended
    assert {*raw.acked()} == {4}
    assert table.info().inserts == 4 and server.counts['repeated'] == 3
    raw.close()
    assert len(table.sample(2, timeout=10).key) == 2 and server.failure is None


def test_a_message_holds_up_others_for_so_long_only() -> None:
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
      raw = ready(server)
      raw.insert(1, **changes)
      assert text in raw.gone()
      raw.close()
    for kind, columns in ((replay_messages.UPDATE, 2), (replay_messages.DELETE, 1)):
      raw = ready(server)
      frames = [bytes(8 * 65_537)] * columns
      raw.say(kind, 1, 'it', arrays=frames)
      assert '65537 keys' in raw.gone()
      raw.close()


def test_items_that_wait_are_bounded_over_all_clients() -> None:
  with ReplayServer(ANY, most_bytes=2**14) as server, service.connect(server.address) as client:
    client.table('it', **{**SIMPLE, 'rate_limiter': tables.queue(1)})
    refused, sent = '', 0
    while not refused:
      raw = ready(server)  # with a stream of its own
      rows = 500
      item = [(1, 100 + sent, 1.0, 0, 0)]
      raw.insert(
        1, item=item, chunks=[(0, rows, 0, 16 * rows)], parts=[(1, 0, rows)], data=bytes(16 * rows)
      )
      sent += 1
      heard = raw.hear()
      assert heard is not None
      if heard[0] is session_messages.REFUSED:
        refused = heard[1][0][0]
      else:
        raw.say(session_messages.BYE, 'no more')
      raw.close()
      assert sent < 100
    assert '65,536' in refused and "'it'" in refused
    assert server.store.total.bytes <= 2**16 + 2 * 16 * rows
    table = client.table('it')
    for _ in range(sent):  # nothing of it is lost, and nothing is kept of what has been sampled
      table.sample(1, timeout=10)
    table.delete(list(server.tables['it'].contents.slots))
    until(lambda: not server.store.total.bytes)


def test_a_client_may_keep_no_more_of_items_that_wait() -> None:
  with ReplayServer(ANY, most_bytes=2**14) as server, service.connect(server.address) as client:
    client.table('it', **{**SIMPLE, 'rate_limiter': tables.queue(1)})
    raw, number = ready(server), 0
    while server.peers and (number := number + 1) < 100:
      chunks = dict(chunks=[(0, 250, 0, 4000)], parts=[(1, 0, 250)], data=bytes(4000))
      raw.insert(number, released=[number - 1], **chunks)
      heard = raw.hear()
      assert heard is not None
      if heard[0] is session_messages.REFUSED:
        break
    assert 'writers' in heard[1][0][0] and 4 <= number <= 7
    raw.close()


def test_streams_declarations_and_wishes_for_checkpoints_are_bounded(
  monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
  monkeypatch.setattr(inserting, 'STREAMS', 3)
  monkeypatch.setattr(checkpoints, 'SAVES', 2)
  monkeypatch.setattr(checkpoints, 'SAVES_AT_ONCE', 0)
  with ReplayServer(ANY, tmp_path) as server, service.connect(server.address) as client:
    client.table('it', **SIMPLE)
    first = ready(server, client=1)
    for number in range(2, 9):
      raw = ready(server, client=number)
      raw.insert(1)
      raw.answer(replay_messages.ACK)
      raw.close()
    assert len(server.inserting.streams) <= 4 and ('', 1) in server.inserting.streams
    for number in range(3):
      first.say(replay_messages.SAVE, number)
    assert list(first.answer(replay_messages.ANSWER)[0][:2]) == [2, False]
    for _ in range(33):
      first.say(replay_messages.DECLARE, {'tables': ['it'] * 2000})
    assert '65536' in first.gone()
    server.saving.requests.clear()
    monkeypatch.undo()
    first.close()


LEAF = ['leaf', [], []]
NO_DECLARATION: list[tuple[str, dict[str, Any]]] = [
  ('shape 5', {'specs': [['<f4', 5]]}),
  ('[dtype, shape]', {'specs': [['(,)f4,', []]]}),
  ('[dtype, shape]', {'specs': [['O', []]]}),
  ('1073741824', {'specs': [['<f4', [0, 2**62, 2**62]]]}),
  ('shape', {'signatures': [[LEAF, [['x', '<f4', b'\1\2', True]]]]}),
  ('leaves', {'signatures': [[LEAF, 'x']]}),
  ('keys', {'signatures': [[['tuple', [], 'x'], [['x', '<f4', [], True]]]]}),
  ('twice', {'signatures': [[['dict', ['a'] * 2, [LEAF] * 2], [['a', '<f4', [], True]] * 2]]}),
]


def test_a_declaration_that_is_none_ends_its_session_only() -> None:
  with ReplayServer(ANY) as server:
    for text, told in NO_DECLARATION:
      raw = joined(server)
      raw.say(replay_messages.DECLARE, told)
      assert text in (said := raw.gone()), (text, said)
      raw.close()
    assert server.failure is None and not server.counts['unexpected']


def limited(*numbers: Any, **more: Any) -> dict[str, Any]:
  told = dict(sampler='fifo', remover='fifo', rate_limiter=['x', *numbers], max_size=9,
              max_bytes=None, max_times_sampled=0)  # fmt: skip
  return {**told, **more}


INF, NAN = float('inf'), float('nan')
NO_SETTINGS: list[tuple[str, dict[str, Any]]] = [
  ('min_size', limited(1.0, INF, 0.0, 0.0)),
  ('min_size', limited(1.0, NAN, 0.0, 0.0)),
  ('min_size', limited(1.0, 1.5, 0.0, 0.0)),
  ('samples_per_insert', limited(1e-320, 1.0, 0.0, 0.0)),
  ('samples_per_insert', limited(1e308, 9.0, INF, INF)),
  ('min_diff', limited(1.0, 1.0, INF, INF)),
  ('max_diff', limited(1.0, 1.0, -INF, -INF)),
  ('numbers', limited(1.0, 1.0, b'', 0.0)),
  ('settings', limited(1.0, 1.0, 0.0)),
  ('more', limited(1.0, 1.0, 0.0, 9.0, more=b'x')),
  ('max_size=9223372036854775808', limited(1.0, 1.0, -INF, INF, max_size=2**63)),
  ('max_bytes=9223372036854775808', limited(1.0, 1.0, -INF, INF, max_bytes=2**63)),
  (f'max_times_sampled={2**64 - 1}', limited(1.0, 1.0, -INF, INF, max_times_sampled=2**64 - 1)),
]


def test_a_report_of_the_largest_table_can_be_read() -> None:
  largest = dict(max_size=2**63 - 1, max_bytes=2**63 - 1, max_times_sampled=2**63 - 1)
  with ReplayServer(ANY) as server, contextlib.closing(Asker(server.address, None, False)) as asker:
    raw = joined(server)
    raw.say(replay_messages.TABLE, 1, 'it', limited(1.0, 1.0, -INF, INF, **largest))
    assert raw.answer(replay_messages.ANSWER)[0][1] is True
    assert asker.ask()['tables'][0]['max_size'] == 2**63 - 1
    raw.close()


def test_settings_that_are_none_are_refused() -> None:
  with ReplayServer(ANY) as server:
    raw = joined(server)
    for number, (text, told) in enumerate(NO_SETTINGS):
      raw.say(replay_messages.TABLE, number, 'it', told)
      header = raw.answer(replay_messages.ANSWER)[0]
      assert header[1] is False and text in header[2], (text, header)
    raw.say(replay_messages.TABLE, 99, 'it', limited(1.0, 1.0, -INF, INF))
    assert raw.answer(replay_messages.ANSWER)[0][1] is True
    assert server.failure is None and not server.counts['unexpected']
    raw.close()


def lost(raw: Raw) -> int:
  raw.say(session_messages.ASK)
  return raw.answer(session_messages.REPORT)[0][0]['counts'].get('lost', 0)


def put(raw: Raw, number: int) -> None:
  raw.insert(1, item=[(number, 1 + number % 1000, 1.0, 0, 0)])


def test_a_client_cannot_say_how_many_items_are_lost(tmp_path: Path) -> None:
  with ReplayServer(ANY, tmp_path) as server, service.connect(server.address) as client:
    client.table('it', **SIMPLE)
    raw = ready(server, client=7)
    for number in (5, 2**62, 2**64 - 1):  # a stream that was in no checkpoint has lost nothing
      put(raw, number)
      raw.answer(replay_messages.ACK)
    raw.close()
    known = ready(server, client=8), ready(server, client=9)
    for one in known:
      put(one, 3)
      one.answer(replay_messages.ACK)
      one.close()
    address = server.address
  with ReplayServer(address, tmp_path) as server:
    for client_number, number, expected in ((8, 10, 6), (8, 2**40, 6), (9, 2**62, None)):
      raw = ready(server, client=client_number)
      put(raw, number)
      if expected is None:
        assert str(2**62) in raw.gone()
      else:
        raw.answer(replay_messages.ACK)
        assert lost(raw) == expected
      raw.close()
    assert server.counts['lost'] == 6 and not server.counts['unexpected']


def test_streams_are_by_key_and_number(tmp_path: Path) -> None:
  keys, own = tmp_path / 'keys', tmp_path / 'own'
  net_keys.new_keys(keys)
  net_keys.new_client(keys, own)
  kept = tmp_path / 'kept'
  for go_on in (False, True):
    with ReplayServer(ANY, kept, keys=keys) as server:
      if not go_on:
        with service.connect(server.address, keys=keys) as client:
          client.table('it', **SIMPLE)
      first, other = (Raw(server.address, k) for k in (keys, own))
      der = ssl.PEM_cert_to_DER_cert((keys / 'client.pem').read_text())
      first.join(client=7)
      assert first.told['number'] == 2 * go_on
      first.declare()
      for number in (3, 4) if go_on else (1, 2):
        first.insert(number, refs=[0])
        first.answer(replay_messages.ACK)
      other.join(client=7)
      assert other.told['number'] == 0
      other.close()
      first.say(session_messages.PING, None)  # its session goes on
      first.expect(session_messages.PONG)
      assert (net_keys.fingerprint_of(der), 7) in server.inserting.streams
      first.close()
      until(lambda server=server: not server.peers)
    with ReplayServer(ANY, kept) as server, contextlib.closing(Raw(server.address)) as raw:
      raw.join(client=7)  # without a key it is another one as well
      assert raw.told['number'] == 0


def test_no_key_evicts_the_streams_of_another(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(inserting, 'STREAMS', 3)
  keys, own = tmp_path / 'keys', tmp_path / 'own'
  net_keys.new_keys(keys)
  net_keys.new_client(keys, own)
  with ReplayServer(ANY, keys=keys) as server:
    with service.connect(server.address, keys=keys) as client:
      client.table('it', **SIMPLE)
    for directory, numbers in ((keys, [7]), (own, range(10, 16))):
      for number in numbers:
        raw = Raw(server.address, directory)
        raw.join(client=number)
        raw.declare()
        raw.insert(1, refs=[0])
        raw.answer(replay_messages.ACK)
        raw.close()
        until(lambda: not server.peers)
    raw = Raw(server.address, keys)
    raw.join(client=7)
    assert raw.told['number'] == 1 and len(server.inserting.streams) <= 4
    raw.close()


def test_what_no_check_foresaw_ends_its_session_only(monkeypatch: pytest.MonkeyPatch) -> None:
  def fail(*args: Any) -> None:
    raise ZeroDivisionError('of the test')

  with ReplayServer(ANY) as server, service.connect(server.address) as client:
    monkeypatch.setattr(server.inserting, 'declare', fail)
    raw = ready(server)
    assert 'ZeroDivisionError' in raw.gone()
    raw.close()
    assert any('ZeroDivisionError' in line for line in server.listener.lines.events)
    assert client.table('it', **SIMPLE).info().size == 0 and server.failure is None


def test_a_stream_goes_on_over_another_connection() -> None:
  with ReplayServer(ANY) as server, service.connect(server.address) as client:
    table = client.table('it', **SIMPLE)
    raws = []
    for i in range(4):  # the ones before are still there
      raws.append(ready(server, client=77))
      assert raws[-1].told['number'] == i
      for number in range(1, i + 2):  # those that have come, and another one
        raws[-1].insert(number, refs=[0])
        assert raws[-1].acked() == [number]
    assert raws[0].gone()
    assert table.info().inserts == 4 and len(server.peers) == 2
    for raw in raws:
      raw.close()


def test_who_keeps_too_many_bytes_is_refused_and_told_so() -> None:
  with (
    ReplayServer(ANY, most_bytes=2**16) as server,
    service.connect(server.address) as greedy,
    service.connect(server.address) as modest,
  ):
    table = greedy.table('it', **SIMPLE)
    writer = greedy.writer(history=1000, rows_per_chunk=16)
    rng = np.random.default_rng(0)
    with pytest.raises(service.Refused, match=r'65,536 .*--client-bytes'):
      for _ in range(1000):
        writer.append({'x': rng.random(128)})
        writer.create_item(table, 1.0, num_steps=1)
      writer.flush(timeout=30)
    until(lambda: len(server.peers) == 1)
    fill(modest, modest.table('other', **SIMPLE), 5).close(timeout=30)
    assert server.counts['sessions'] == 2  # it did not come back


def told_hello(name: str = replay_messages.SERVICE) -> dict[str, Any]:
  return session_messages.hello(name, session_messages.new_client())


def documents() -> list[Document]:
  """What a client of replay may say, in an order in which it may say it."""
  structure = ['dict', ['x', 'y'], [LEAF, ['named Point', ['a'], [LEAF]]]]
  leaves = [['x', '<i8', [2], False], ['y/a', '<f4', [], True]]
  more, frames = insert(1)
  keys = [np.arange(1, 4, dtype='<i8').tobytes(), np.ones(3, '<f8').tobytes()]
  settings = limited(2.0, 1.0, -5.0, 1e6, sampler='prioritized(0.6)')
  told = {'tables': ['it'], 'specs': [['<i8', [2]]], 'signatures': [SIGNATURE, [structure, leaves]]}
  return [
    (session_messages.PING, [0], []),
    (replay_messages.TABLE, [1, 'it', settings], []),
    (replay_messages.DECLARE, [told], []),
    (replay_messages.INSERT, more, frames),
    (replay_messages.SAMPLE, [2, 'it', 3, 1, True, 0.0, 0], []),
    (replay_messages.SAMPLE, [3, 'it', 60_000, 60_000, False, -1.0, 0], []),
    (replay_messages.CANCEL, [3], []),
    (replay_messages.UPDATE, [4, 'it'], keys),
    (replay_messages.DELETE, [5, 'it'], keys[:1]),
    (replay_messages.INFO, [6, 'it'], []),
    (replay_messages.SAVE, [7], []),
    (session_messages.ASK, [], []),
    (session_messages.BYE, ['enough'], []),
  ]


@pytest.mark.parametrize('count', [1000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_documents_that_are_nearly_right(count: int) -> None:
  with ReplayServer(ANY, most_bytes=2**20) as server, service.connect(server.address) as client:
    table = client.table('other', **SIMPLE)
    before = resident()
    case = spoiled(told_hello, documents)
    good = tell(server.listener, replay_messages.OF_SERVICES, told_hello, case, count)
    assert count / 20 < good < count * 0.97, good
    assert len(server.tables) <= 1024 and server.store.total.bytes < 2**24
    assert resident() - before < 2**27
    fill(client, table, 5).close(timeout=60)
    assert len(table.sample(2, timeout=60).key) == 2
  with parameters.Publisher(ANY) as publisher:
    publisher.publish(1, [('x', np.ones(5))])
    before = resident()
    hello = lambda: told_hello(parameter_messages.SERVICE)  # noqa: E731
    every = lambda: [(session_messages.PING, [None], []), (session_messages.BYE, ['enough'], [])]  # noqa: E731
    kinds = parameters.Parameters.kinds
    good = tell(publisher.listener, kinds, hello, spoiled(hello, every), count // 3)
    assert count / 60 < good < count / 3, good
    assert resident() - before < 2**25
    reader = parameters.Parameters(publisher.address)
    assert reader.get(timeout=30).version == 1
    reader.close()


def resident() -> int:
  text = Path('/proc/self/status').read_text()
  return int(text.partition('RssAnon:')[2].split()[0]) * 1024


def wrong(rng: random.Random) -> bytes:
  """A message that is not as it should be, or is, of a kind drawn at random."""
  number = rng.randrange(1, 5)
  kind = rng.choice([1, 4, 5, 6, *range(16, 26), 32, 66, 80, 200])
  header: list[Any] = [number]
  frames: list[Any] = []
  if kind == replay_messages.INSERT.number:
    header, frames = insert(number)
    if rng.random() < 0.7:
      k = rng.randrange(6)
      data = bytearray(frames[k])
      if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
      frames[k] = bytes(data)
    header.append([len(x) for x in frames])
  elif kind == replay_messages.SAMPLE.number:
    n = rng.choice([0, 1, 3, 2**17])
    header = [number, rng.choice(['it', 'none']), n, 1, number % 2 == 0, rng.choice([-1.0, 0.0, 1e9]), rng.randrange(2)]  # fmt: skip
  elif kind == replay_messages.DECLARE.number:
    header = [rng.choice([{'tables': ['x']}, {'specs': [['<f4', [2**31, 2]]]}, {'specs': [['O', []]]}, {'signatures': [[['leaf', [], []], []]]}, {'signatures': [5]}, {'a': 1}])]  # fmt: skip
  elif kind == replay_messages.TABLE.number:
    header = [number, 'it', rng.choice([{}, {'sampler': 'x'}, {'max_size': 1}])]
  elif kind in (replay_messages.UPDATE.number, replay_messages.DELETE.number):
    frames = [bytes(8 * rng.randrange(3)), bytes(8 * rng.randrange(3))][: rng.randrange(3)]
    header = [number, 'it', [len(x) for x in frames]]
  if rng.random() < 0.5:
    place = rng.randrange(len(header))
    header[place] = rng.choice([None, -1, 2**63, 'x' * rng.randrange(300), [], {}, 1.5, True, b'x'])
  head = msgpack.packb(header)
  if rng.random() < 0.05:
    head = head[: rng.randrange(len(head) + 1)] + os.urandom(rng.randrange(4))
  if rng.random() < 0.05:
    frames.append(os.urandom(rng.randrange(2000)))
  if rng.random() < 0.01:
    return b'x' * 100_000
  body = head + b''.join(frames)
  return PREFIX.pack(len(body), kind | len(head) << 8) + body


@pytest.mark.parametrize('count', [2000, pytest.param(MESSAGES, marks=pytest.mark.slow)])
def test_a_storm(count: int, tmp_path: Path) -> None:
  """Over real connections to a process; what is nearly right first, then what is wrong."""
  log = tmp_path / 'log'
  with Process(
    log, '-m', 'podrace.cli', 'replay', '--listen', ANY, '--client-bytes', str(2**20)
  ) as replay:
    replay.says('listening at')
    address = replay.output.partition('listening at ')[2].split()[0]
    small = lambda: [d for d in documents() if 60_000 not in d[1]]  # noqa: E731  # they take seconds
    nearly, number = spoiled(told_hello, small), 0

    def messages(rng: random.Random) -> Iterator[bytes]:
      before, mutant = nearly(rng)
      yield from map(data_of, before)
      yield mutant
      for _ in range(rng.randrange(6)):
        yield wrong(rng)

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

      told = storm(address, replay_messages.OF_SERVICES, count, told_hello, messages, go_on, memory)
      asker = Asker(address, None, False)
      until(lambda: len(asker.ask()['clients']) == 1)  # the others are silent
      report = asker.ask()
      asker.close()
      counts = report['counts']
      print(told, counts)
      assert told.slowest < 10 and told.megabytes < 64, told
      assert counts['malformed'] > told.connections / 2 and 'unexpected' not in counts
      assert counts['sessions'] == counts['dropped'] + 1
      (good,) = [t for t in report['tables'] if t['name'] == 'good']
      assert good['inserts'] == good['samples'] == number
      writer.close(timeout=30)
    assert replay.process.poll() is None
    replay.signal(signal.SIGTERM)
    assert replay.wait() == 143
