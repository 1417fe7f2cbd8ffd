"""docs/protocol.md and its generated tables: examples byte by byte, limits, and listeners that get the examples."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import socket as sockets
from collections.abc import Iterator
from typing import Any

import bare
import msgpack
import numpy as np
import pytest
from children import ROOT
from peers import Learner, Raw, spec

from podrace import tables, types
from podrace.distributed import parameters
from podrace.distributed.environments import environment_messages, groups
from podrace.distributed.environments.client import EnvironmentClient
from podrace.distributed.environments.server import Server
from podrace.distributed.net import (
  connections,
  frame,
  process_metrics,
  session_messages,
)
from podrace.distributed.net.frame import PREFIX, Kind, WireError, split
from podrace.distributed.parameters import parameter_messages, reader
from podrace.distributed.replay import (
  item_schema,
  replay_messages,
  server,
  table_settings,
)
from podrace.distributed.replay.connection import ReplayConnection
from podrace.tables.items import END_OF_KEYS, TableInfo

PAGE = (ROOT / 'docs' / 'protocol.md').read_text()
WORDS = ' '.join(PAGE.split())
TABLES = (ROOT / 'examples' / 'protocol_messages.md').read_text()
DECLARED: dict[str, Kind] = {  # of the messages that each end takes
  kind.name: kind
  for kinds in (
    *(handler.kinds for handler in (Server, server.ReplayServer, parameters.Publisher)),
    *(handler.kinds for handler in (EnvironmentClient, ReplayConnection, reader.Parameters)),
  )
  for kind in kinds.values()
}
EXAMPLE = re.compile(
  r'^([A-Z]+) (\[[\s\S]*?\])\n((?:  (?:[0-9a-f]{2} *)+(?:# .*)?\n)+)', re.MULTILINE
)


def examples() -> Iterator[tuple[str, list[Any], bytes]]:
  """Name, fields and bytes of each message that the pages show."""
  for name, fields, shown in EXAMPLE.findall(TABLES + PAGE):
    lines = (line.partition('#')[0] for line in shown.splitlines())
    yield name, json.loads(fields), bytes.fromhex(''.join(lines))


SHOWN = list(examples())


def example(name: str, nth: int = 0) -> bytes:
  return [data for shown, _, data in SHOWN if shown == name][nth]


# --- the kinds --------------------------------------------------------------------------------------


def test_the_tables_are_fresh() -> None:
  path = ROOT / 'tools' / 'protocol_messages.py'
  module = importlib.util.spec_from_file_location(path.stem, path)
  assert module and module.loader
  tool = importlib.util.module_from_spec(module)
  module.loader.exec_module(tool)
  assert tool.text() == TABLES, 'run python tools/protocol_messages.py'


def test_every_kind_is_in_the_tables_and_none_else() -> None:
  rows = re.findall(r'^\| ([A-Z]+) \| (\d+) \| (client|listener) \|', TABLES, re.MULTILINE)
  assert {name: int(number) for name, number, _ in rows} == {
    kind.name: kind.number for kind in DECLARED.values()
  }
  assert len(rows) == 30 and all((int(n) < 64) == (by == 'client') for _, n, by in rows)
  assert {k.layout.format for k in DECLARED.values() if k.layout is not None} == {'<II'}
  assert f'version {frame.VERSION}' in PAGE.splitlines()[0]


@pytest.mark.parametrize('name', sorted(DECLARED))
def test_a_kind_names_each_field_and_array(name: str) -> None:
  kind = DECLARED[name]
  fields, _, arrays = kind.about.partition('; ')
  count = len(kind.types) if kind.layout is None else 2
  if name in ('PING', 'PONG'):
    assert count == 1
  else:
    assert len(re.findall(r'[^,]+', fields)) == count
  assert bool(arrays) == bool(kind.arrays)
  if kind.arrays > 1:
    assert arrays.count(', ') + 1 == kind.arrays


def test_numbers_mean_one_thing_in_each_direction() -> None:
  numbers = [kind.number for kind in DECLARED.values()]
  assert len(set(numbers)) == len(numbers)
  of_clients = [*Server.kinds.values(), *server.ReplayServer.kinds.values()]
  assert all((kind.number < 64) == (kind in of_clients) for kind in DECLARED.values())


def test_every_kind_has_an_example() -> None:
  assert {name for name, _, _ in SHOWN} == DECLARED.keys() and len(SHOWN) == 34


@pytest.mark.parametrize('at', range(len(SHOWN)), ids=lambda i: SHOWN[i][0])
def test_an_example_is_what_is_sent(at: int) -> None:
  name, shown, data = SHOWN[at]
  kind = DECLARED[name]
  size, word = PREFIX.unpack(data[:8])
  head = word >> 8
  assert (size, word & 0xFF) == (len(data) - 8, kind.number)
  fields, sizes = kind.header(data[8 : 8 + head], size - head)
  assert [*fields, *([list(sizes)] if kind.arrays > 1 else [])] == shown
  arrays = split(data[8 + head :], sizes) if kind.arrays else []
  assert b''.join(map(bytes, kind.pack(fields, arrays))) == data


WRONG: dict[type, list[Any]] = {  # by the type of a field
  int: [None, -1, 2**63, 1.0, True, 'x'], str: [None, 1, b'x'], dict: [None, [], {1: 2}], list: [None, {}, 'x'],
  bool: [None, 0, 1], float: [None, 1], object: [],
}  # fmt: skip


@pytest.mark.parametrize('at', range(len(SHOWN)), ids=lambda i: SHOWN[i][0])
def test_an_example_with_other_fields_is_none(at: int) -> None:
  """One more, one less, another type, bytes behind the header or fewer than it says."""
  name, shown, data = SHOWN[at]
  kind, body = DECLARED[name], len(data) - 8 - (PREFIX.unpack(data[:8])[1] >> 8)

  def refused(header: bytes, size: int = body) -> None:
    with pytest.raises(WireError):
      kind.header(header, size)

  if kind.layout is not None:
    refused(bytes(kind.layout.size - 1))
    refused(bytes(kind.layout.size + 1))
    return
  refused(msgpack.packb([*shown, 0]))
  refused(msgpack.packb(shown[:-1]) if shown else b'')
  for i, type_ in enumerate(kind.types):
    for wrong in WRONG[type_]:
      refused(msgpack.packb([*shown[:i], wrong, *shown[i + 1 :]]))
  if kind.arrays != 1:
    refused(msgpack.packb(shown), body + 1)


def test_offsets_are_those_of_records_and_steps() -> None:
  record = environment_messages.RECORD
  shown = re.findall(r'^\| `(\w+)` \| ([uf])(\d+) \|', PAGE, re.MULTILINE)
  assert [(name, kind + str(int(bits) // 8)) for name, kind, bits in shown] == [
    (name, record[name].str[1:]) for name in record.names or ()
  ]
  data = example('STEP')
  assert len(data) == 16 + 20 + 2 and PREFIX.unpack(data[:8])[0] == 8 + 1 * (20 + 2)
  data = example('ACTION')
  assert len(data) == 16 + 4 and PREFIX.unpack(data[:8])[0] == 8 + 1 * 4


# --- listeners that get the examples ----------------------------------------------------------------


def say(socket: sockets.socket, *names: str | bytes) -> None:
  for name in names:
    socket.sendall(name if isinstance(name, bytes) else example(name))


def hear(socket: sockets.socket, expected: str | bytes) -> bytes:
  """As many bytes as expected, which they must be."""
  wanted = expected if isinstance(expected, bytes) else example(expected)
  data = b''
  socket.settimeout(10)
  while len(data) < len(wanted) and (more := socket.recv(len(wanted) - len(data))):
    data += more
  assert data == wanted, expected
  return data


def test_a_learner_answers_the_examples_as_the_page_does() -> None:
  mine = dataclasses.replace(spec((2,), 3, np.uint8), name='mine')
  with Learner(mine, peer_timeout=10.0) as one:
    with Raw(one.address) as raw:
      say(raw.socket, 'HELLO')
      hear(raw.socket, 'WELCOME')
      say(raw.socket, 'PING')
      hear(raw.socket, 'PONG')
      say(raw.socket, 'ENTER')
      hear(raw.socket, 'START')
      say(raw.socket, 'STEP')
      hear(raw.socket, example('ACTION')[:16])  # and any action
      assert len(raw.socket.recv(4, sockets.MSG_WAITALL)) == 4
      say(raw.socket, example('STEP', 1))
      hear(raw.socket, example('ACTION')[:12] + bytes([1, 0, 0, 0]))
      assert len(raw.socket.recv(4, sockets.MSG_WAITALL)) == 4
      say(raw.socket, 'ASK')
      (report,), _ = raw.expect(session_messages.REPORT)
      say(raw.socket, 'STEP')  # an old one
      assert raw.gone().startswith('you sent ')
    with Raw(one.address) as raw:
      say(raw.socket, 'HELLO')
      hear(raw.socket, 'WELCOME')
      for pool in one.pools:
        pool.close()
      with Raw(one.address) as late:
        say(late.socket, example('HELLO').replace(b'client\x07', b'client\x08'))
        hear(late.socket, 'WAIT')
        one.server.network.finish()
        hear(raw.socket, 'END')
        hear(late.socket, 'END')
      say(raw.socket, 'BYE')
    assert sent(report) == entries('every service') | entries('learner')
    clients = entries('client of every service') | entries('client of a learner')
    assert sent(report['clients'][0]) == clients


def entries(of: str) -> dict[str, str]:
  """Entries of a map of a report and their types, as the tables have them."""
  (row,) = re.findall(rf'^\| {of} \| (.*) \|$', TABLES.partition('# Reports')[2], re.MULTILINE)
  return dict(re.findall(r'`(\w+)`: (\w+)', row))


NAMES = {int: 'integer', str: 'string', dict: 'map', list: 'array', float: 'float'}


def sent(details: dict[str, Any]) -> dict[str, str]:
  """Entries of a map that a service has sent, and their types."""
  return {k: 'integer' if x is None else NAMES[type(x)] for k, x in details.items()}


def named(text: str) -> set[str]:
  """Names in the first column of tables."""
  cells = re.findall(r'^\| (`.*?) \|', text, re.MULTILINE)
  return {name for cell in cells for name in re.findall(r'`(\w+)`', cell)}


SETTINGS: dict[str, Any] = dict(
  sampler=tables.uniform(),
  remover=tables.fifo(),
  rate_limiter=tables.min_size(1),
  max_size=10,
)


def test_a_replay_service_answers_the_examples_as_the_page_does() -> None:
  told = table_settings.pack_settings(**SETTINGS)
  with server.ReplayServer(bare.ANY, tables={'t': told}) as service:
    one = bare.connect(service.address, replay_messages.OF_SERVICES)
    welcome = one.hello(replay_messages.SERVICE, 7)
    keys = named(PAGE.partition('| HELLO and WELCOME have')[2].partition('\n\n')[0])
    assert set(welcome) == keys | {'silence', 'number'}
    say(one.socket, 'TABLE')
    assert one.expect(replay_messages.ANSWER)[0][:2] == [1, True]
    say(one.socket, 'DECLARE', 'INSERT')
    hear(one.socket, 'ACK')
    say(one.socket, 'SAMPLE')
    hear(one.socket, 'SIGNATURE')
    hear(one.socket, 'SAMPLES')
    say(one.socket, 'UPDATE')
    hear(one.socket, 'ANSWER')
    say(one.socket, 'CANCEL', 'INFO')
    (_, good, info), _ = one.expect(replay_messages.ANSWER)
    shown = entries('INFO')
    assert good and sent(info) == shown
    assert set(shown) - {'why_no_sample', 'why_no_insert'} == set(TableInfo.__dataclass_fields__)
    say(one.socket, 'ASK')
    (report,), _ = one.expect(session_messages.REPORT)
    say(one.socket, 'DELETE', 'SAVE')
    assert one.expect(replay_messages.ANSWER)[0] == [4, True, 1]
    assert one.expect(replay_messages.ANSWER)[0][:2] == [6, False]  # without --dir
    one.close()
  assert sent(report) == entries('every service') | entries('replay service')
  assert sent(report['tables'][0]) == entries('table of the replay service')
  clients = entries('client of every service') | entries('client of the replay service')
  assert sent(report['clients'][0]) == clients


def test_the_settings_of_the_page_make_a_table() -> None:
  text = re.search(r'^\{"sampler".*?\}$', PAGE, re.DOTALL | re.MULTILINE)
  assert text is not None
  settings = json.loads(text[0])
  shown = named(PAGE.partition('| setting | type |')[2].partition('\n\n')[0])
  assert set(settings) | {table_settings.RUN, table_settings.CONTENTS} == shown
  with server.ReplayServer(bare.ANY) as service:
    one = bare.connect(service.address, replay_messages.OF_SERVICES)
    one.hello(replay_messages.SERVICE, 7)
    one.say(replay_messages.TABLE, 1, 't', settings)
    assert one.expect(replay_messages.ANSWER)[0][2]['settings'] == settings
    one.close()


def test_parameters_are_published_as_the_page_has_it() -> None:
  with parameters.Publisher(bare.ANY, environments=32) as publisher:
    publisher.publish(3, [('w', np.array([1, 2], '<f4'))])
    other = bare.connect(publisher.address, reader.Parameters.kinds)
    assert other.hello(parameter_messages.SERVICE, environments=16)['first'] == 0
    one = bare.connect(publisher.address, reader.Parameters.kinds)
    say(one.socket, example('HELLO', 1))
    hear(one.socket, example('WELCOME', 1))
    hear(one.socket, 'NEWEST')
    say(one.socket, 'METRICS', 'ASK')
    (report,), _ = one.expect(session_messages.REPORT)
    assert report['clients'][-1]['metrics'] == {'steps_per_s': 1234.5, 'env_restarts': 0}
    one.close()
    other.close()
  assert sent(report) == entries('every service') | entries('parameters')
  clients = entries('client of every service') | entries('client of parameters')
  assert sent(report['clients'][0]) == clients
  assert {x['first'] for x in report['clients']} == {0, 16}
  assert {x['environments'] for x in report['clients']} == {16}


def test_the_hello_of_the_page_is_one() -> None:
  (hello,) = next(fields for name, fields, _ in SHOWN if name == 'HELLO')
  session_messages.check_hello(hello)
  assert hello['version'] == frame.VERSION
  kind = spec((2,), 3, np.uint8)
  assert hello['schema'] == environment_messages.schema(kind.observation_space, kind.action_space)
  assert msgpack.unpackb(msgpack.packb([hello])) == [hello]
  keys = named(PAGE.partition('**HELLO** is')[2].partition('\n\nWhen a client')[0])
  assert keys == {*hello, 'role', 'environments', 'first', 'record'}


# --- limits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'text',
  [
    f'{", ".join(f"`{name}`" for name in [*process_metrics.LOGGED][:-1])} and `{[*process_metrics.LOGGED][-1]}`',
    f'cut after {connections.SILENT_SECONDS:.0f} s, or {connections.TALKING_SECONDS:.0f} s after a WAIT',
    f'group is 0 to {environment_messages.GROUPS - 1};',
    f'If it is 1 to {groups.MAX_RESTARTS:,} larger',
  ],
)
def test_limits_are_those_of_the_page(text: str) -> None:
  assert text in WORDS


def test_powers_are_those_of_the_page() -> None:
  assert types.LARGEST_OBSERVATION == 1e9 and types.LARGEST_REWARD == 1e12
  assert table_settings.MOST_NUMBER == 10**15 and item_schema.CHUNK_BYTES == 2**20
  assert frame.NUMBER == 2**63 and END_OF_KEYS == 2**62 and replay_messages.KEY_BITS == 20
  assert PREFIX.size == 8
