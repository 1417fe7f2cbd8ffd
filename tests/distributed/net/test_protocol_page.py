"""docs/protocol.md: every kind as it is declared, its examples byte by byte, its limits; and listeners that get them."""

from __future__ import annotations

import dataclasses
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
from podrace.distributed.environments import environment_messages, slots
from podrace.distributed.environments import server as remote_server
from podrace.distributed.net import (
  connecting,
  connections,
  descriptors,
  frame,
  link,
  listener,
  process_metrics,
  session_messages,
  sessions,
  stream,
)
from podrace.distributed.net.frame import PREFIX, Kind, WireError, split
from podrace.distributed.parameters import parameter_messages, reader
from podrace.distributed.parameters.publisher import KEPT, MOST_BYTES, MOST_LEAVES
from podrace.distributed.replay import (
  insert_streams,
  inserting,
  replay_messages,
  sampling,
  served_tables,
  server,
  table_settings,
)
from podrace.envs.host import answer_timer
from podrace.tables.items import TableInfo

PAGE = (ROOT / 'docs' / 'protocol.md').read_text()
WORDS = ' '.join(PAGE.split())
ROWS = {
  name: (int(number), header, arrays)
  for name, number, header, arrays in re.findall(
    r'^\| ([A-Z]+) \| (\d+) \| (.*?) \| (.*?) \|', PAGE, re.MULTILINE
  )
}
DECLARED: dict[str, Kind] = {
  kind.name: kind
  for kinds in (
    environment_messages.OF_CLIENTS,
    environment_messages.OF_LEARNERS,
    replay_messages.OF_CLIENTS,
    replay_messages.OF_SERVICES,
    parameters.Publisher.kinds,
    reader.Parameters.kinds,
  )
  for kind in kinds.values()
}
TYPES = {
  int: 'integer', str: 'string', dict: 'map', list: 'array', bool: 'boolean', float: 'float', object: 'any',
}  # fmt: skip
COUNTS = ('none', 'one', 'two', 'three', 'four', 'five', 'six')
EXAMPLE = re.compile(
  r'^([A-Z]+) (\[[\s\S]*?\])\n((?:  (?:[0-9a-f]{2} *)+(?:# .*)?\n)+)', re.MULTILINE
)


def examples() -> Iterator[tuple[str, list[Any], bytes]]:
  """Name, fields and bytes of each message that the page shows."""
  for name, fields, shown in EXAMPLE.findall(PAGE):
    lines = (line.partition('#')[0] for line in shown.splitlines())
    yield name, json.loads(fields), bytes.fromhex(''.join(lines))


SHOWN = list(examples())


def example(name: str, nth: int = 0) -> bytes:
  return [data for shown, _, data in SHOWN if shown == name][nth]


# --- the kinds --------------------------------------------------------------------------------------


def test_every_kind_is_on_the_page_and_none_else() -> None:
  assert ROWS.keys() == DECLARED.keys() and len(ROWS) == 30
  assert f'version {frame.VERSION}' in PAGE.splitlines()[0]


@pytest.mark.parametrize('name', sorted(DECLARED))
def test_a_kind_is_as_the_page_has_it(name: str) -> None:
  kind = DECLARED[name]
  number, header, arrays = ROWS[name]
  assert number == kind.number
  assert arrays.partition(':')[0] == COUNTS[kind.arrays]
  if kind.layout is not None:
    assert (header, kind.layout.format) == ('u32, u32', '<II')
  else:
    assert header == f'`[{", ".join(TYPES[x] for x in kind.types)}]`'


def test_numbers_mean_one_thing_in_each_direction() -> None:
  numbers = [kind.number for kind in DECLARED.values()]
  assert len(set(numbers)) == len(numbers)
  of_clients = [*environment_messages.OF_CLIENTS.values(), *replay_messages.OF_CLIENTS.values()]
  assert all((kind.number < 64) == (kind in of_clients) for kind in DECLARED.values())


def test_every_kind_has_an_example() -> None:
  assert {name for name, _, _ in SHOWN} == DECLARED.keys() and len(SHOWN) == 33


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
  for name in environment_messages.RECORD.names:
    dtype, offset = environment_messages.RECORD.fields[name][:2]
    shown = '' if name == 'zero' else rf'`{name}`'
    kind = {'f': 'f', 'u': 'u'}[dtype.kind] + str(8 * dtype.itemsize)
    assert re.search(
      rf'^\| {offset} \| {dtype.itemsize} \| {kind} \| {shown}', PAGE, re.MULTILINE
    ), name
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
      for said, heard in (('HELLO', 'WELCOME'), ('PING', 'PONG'), ('ENTER', 'START')):
        say(raw.socket, said)
        hear(raw.socket, heard)
      say(raw.socket, 'STEP')
      hear(raw.socket, example('ACTION')[:16])  # and any action
      assert len(raw.socket.recv(4, sockets.MSG_WAITALL)) == 4
      say(raw.socket, example('STEP', 1))
      hear(raw.socket, example('ACTION')[:12] + bytes([1, 0, 0, 0]))
      assert len(raw.socket.recv(4, sockets.MSG_WAITALL)) == 4
      say(raw.socket, 'ASK')
      (report,), _ = raw.expect(session_messages.REPORT)
      say(raw.socket, 'STEP')  # an old one
      assert raw.gone()
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
    shown = PAGE.partition('## The report of a learner')[2].partition('\n# ')[0]
    assert {*report, *report['clients'][0]} == named(shown) - {'clients'} | {'clients'}


def named(text: str) -> set[str]:
  """What the first column of tables names."""
  cells = re.findall(r'^\| (`.*?) \|', text, re.MULTILINE)
  return {name for cell in cells for name in re.findall(r'`(\w+)`', cell)}


SETTINGS: dict[str, Any] = dict(
  sampler=tables.uniform(), remover=tables.fifo(), rate_limiter=tables.min_size(1), max_size=10
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
    shown = named(PAGE.partition('**INFO** is a map')[2].partition('\n## ')[0])
    assert good and set(info) == shown
    assert shown - {'why_no_sample', 'why_no_insert'} == set(TableInfo.__dataclass_fields__)
    say(one.socket, 'ASK')
    (report,), _ = one.expect(session_messages.REPORT)
    say(one.socket, 'DELETE', 'SAVE')
    assert one.expect(replay_messages.ANSWER)[0] == [4, True, 1]
    assert one.expect(replay_messages.ANSWER)[0][:2] == [6, False]  # without --dir
    one.close()
  shown_text = PAGE.partition('## The report of a replay service')[2].partition('\n# ')[0]
  assert set(report) == named(shown_text)
  assert set(report['clients'][0]) == set(
    re.findall(r'`(\w+)`', shown_text.partition('A client has')[2])
  )


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
  of_report, _, of_program = PAGE.rpartition('**REPORT**')[2].partition('\n\n')
  shown = set(re.findall(r'`(\w+)`', of_report))
  assert {*report, *report['clients'][0]} == shown
  assert {x['first'] for x in report['clients']} == {0, 16}
  assert {x['environments'] for x in report['clients']} == {16}
  mine = {'program', 'steps', 'replay', *replay_messages.OF_REPORT}
  assert set(re.findall(r'`(\w+)`', of_program)) == mine


def test_the_hello_of_the_page_is_one() -> None:
  (hello,) = next(fields for name, fields, _ in SHOWN if name == 'HELLO')
  session_messages.check_hello(hello)
  assert hello['version'] == frame.VERSION
  kind = spec((2,), 3, np.uint8)
  assert hello['schema'] == environment_messages.schema(kind.observation_space, kind.action_space)
  assert msgpack.unpackb(msgpack.packb([hello])) == [hello]
  keys = named(PAGE.partition('**HELLO** asks')[2].partition('\n\n**WELCOME')[0])
  assert keys == {*hello, 'role', 'environments', 'first'}


# --- limits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'text',
  [
    f'| `size`, to a listener, without a session | {session_messages.GUEST_BYTES:,} |',
    f'| `size`, to the listener of parameters | {parameters.Publisher.largest:,} |',
    f'| `head` | {frame.HEADER_BYTES:,} |',
    f'| arrays and maps within each other, in a header | {frame.DEPTH} |',
    f'at most {session_messages.STRING} characters. Other keys',
    f'| after it was connected, for TLS and HELLO or ASK | {connections.SILENT_SECONDS:.0f} |',
    f'to WAIT, or has asked | {connections.TALKING_SECONDS:.0f} |',
    f'`silence`, {session_messages.SILENCE:.0f} by default',
    f'| between WAIT and the next HELLO | {link.HELLO_SECONDS:.0f}; {connecting.UNIX_RETRY_SECONDS} over a Unix socket |',
    f"| between METRICS, of podrace's own clients | {link.METRICS_SECONDS:.0f} |",
    f'a map of at most {process_metrics.MAX_METRICS} numbers',
    f'{", ".join(f"`{name}`" for name in [*process_metrics.LOGGED][:-1])} and `{[*process_metrics.LOGGED][-1]}`',
    f'if the client does not close it first | {connections.ENDING_SECONDS:.0f} |',
    f'{connecting.BACKOFF[0]}, doubled each time, at most {connecting.BACKOFF[1]:.0f}, over a Unix socket {connecting.UNIX_RETRY_SECONDS};',
    f'looks at its clock every {listener.TICK} s',
    f'| sessions of a listener | {sessions.PEERS:,};',
    f'| connections without a session | {descriptors.GUESTS:,};',
    f'has not read, with a session | {sessions.BACKLOG}, and 2^24 bytes',
    f'| {connections.MESSAGES}, or {connections.MESSAGE_SECONDS * 1000:.0f} ms; without a session {connections.GUEST_MESSAGES} |',
    f'| the same, without a session | {connections.GUEST_BACKLOG} |',
    f'group is 0 to {environment_messages.GROUPS - 1};',
    f'| environments of a client | {remote_server.ENVIRONMENTS:,} |',
    f'of all clients | {slots.WAITING:,};',
    f'| array of maps | at most {listener.REPORTED:,} |',
    f'at most {session_messages.STRING + 20} and {session_messages.STRING} characters, in ASCII',
    f'| array of maps, integer | at most {listener.REPORTED:,},',
    f'{replay_messages.MESSAGE_ITEMS} items, 2^20 new chunks and 2^20 references',
    f'n is at most {replay_messages.MESSAGE_KEYS:,} |',
    f"a stream's newest {insert_streams.REFUSED_ITEMS:,} refused items",
    f'at most {sampling.REQUESTS:,} that are not answered',
    f'`n` <= {replay_messages.MOST_ITEMS:,} items',
    f'or {replay_messages.MOST_UNREAD} answers',
    f'at most {inserting.DECLARATIONS:,} together in a session',
    f'There are at most {served_tables.TABLES:,} tables',
    f'of each, at most {MOST_LEAVES:,}.',
    f'| {replay_messages.DEPTH} within each other;',
    f'| 1 to {replay_messages.LEAVES:,}; a name has at most {replay_messages.NAME_CHARACTERS:,} characters |',
    f'{replay_messages.NODES:,} of them together; `named NAME` and a key have at most {replay_messages.KEY_CHARACTERS} ',
  ],
)
def test_limits_are_those_of_the_page(text: str) -> None:
  assert text in WORDS


def test_powers_of_two_are_those_of_the_page() -> None:
  assert replay_messages.MESSAGE_CHUNKS == 2**20 == replay_messages.MESSAGE_BYTES
  assert replay_messages.ROWS == 2**20
  assert replay_messages.MESSAGE_PARTS == 2**19 and sampling.UNREAD_BYTES == 2**32
  assert stream.ANSWER_BYTES == 2**24 == inserting.DECLARED_BYTES
  assert served_tables.SETTINGS_BYTES == 2**26
  assert types.LARGEST_OBSERVATION == 1e9 and types.LARGEST_REWARD == 1e12
  assert MOST_BYTES == 2**32 - 2**21 and replay_messages.FRAME_BYTES == 2**30
  assert replay_messages.UNPACKED_CHUNK_BYTES == 2**26 and replay_messages.MOST_BYTES == 2**28
  assert KEPT == 4 and connecting.LARGEST == 2**32 - 1 and frame.NUMBER == 2**63
  assert replay_messages.CHUNK.itemsize * replay_messages.MESSAGE_CHUNKS == 2**24
  assert server.SLACK == 2**20 and table_settings.MOST_NUMBER == 10**15
  assert answer_timer.START_SECONDS == 120 and PREFIX.size == 8
