"""docs/protocol.md lists every kind as it is declared, and its bytes are those that are sent."""

from __future__ import annotations

import re

import msgpack
import pytest
from children import ROOT
from peers import spec

from podrace.net import frame, listener, session
from podrace.net.frame import PREFIX, Kind
from podrace.remote import wire as remote_wire
from podrace.service import parameters, server
from podrace.service import wire as service_wire

PAGE = (ROOT / 'docs' / 'protocol.md').read_text()
ROWS = {
  name: (int(number), header, arrays)
  for name, number, header, arrays in re.findall(
    r'^\| ([A-Z]+) \| (\d+) \| (.*?) \| (.*?) \|', PAGE, re.MULTILINE
  )
}
DECLARED: dict[str, Kind] = {
  kind.name: kind
  for kinds in (
    remote_wire.OF_CLIENTS,
    remote_wire.OF_LEARNERS,
    service_wire.OF_CLIENTS,
    service_wire.OF_SERVICES,
    parameters.Publisher.kinds,
    parameters.Parameters.kinds,
  )
  for kind in kinds.values()
}
TYPES = {
  int: 'integer', str: 'string', dict: 'map', list: 'array', bool: 'boolean', float: 'float', object: 'any',
}  # fmt: skip
COUNTS = ('none', 'one', 'two', 'three', 'four', 'five', 'six')


def test_every_kind_is_on_the_page_and_none_else() -> None:
  assert ROWS.keys() == DECLARED.keys() and len(ROWS) == 29
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
  assert all(
    (n < 64) == (DECLARED[k] in _said_by_clients()) for k, n in zip(DECLARED, numbers, strict=True)
  )


def _said_by_clients() -> list[Kind]:
  return [*remote_wire.OF_CLIENTS.values(), *service_wire.OF_CLIENTS.values()]


def _bytes(line: str) -> bytes:
  return bytes.fromhex(''.join(re.findall(r'\b[0-9a-f]{2}\b', line)))


def test_the_examples_are_what_is_sent() -> None:
  step, first, enter = (
    re.search(rf'^({start}.*)$', PAGE, re.MULTILINE)[1]  # type: ignore[index]
    for start in ('2c 00 00 00', '00 00 00 00   00 00 00 00   00 00 80 3f', '03 00 00 00')
  )
  sent = b''.join(map(bytes, remote_wire.STEP.pack((1, 258), (bytes(20), bytes(16)))))
  assert sent.startswith(_bytes(step)) and len(sent) == 8 + 8 + 36
  record = remote_wire.np.zeros(1, remote_wire.RECORD)
  record['discount'] = 1
  assert record.tobytes() == _bytes(first)
  assert b''.join(remote_wire.ENTER.pack((0, 4))) == _bytes(enter)
  size, word = PREFIX.unpack(sent[:8])
  assert (size, word & 0xFF, word >> 8) == (44, 3, 8)


def test_the_hello_of_the_page_is_one() -> None:
  text = re.search(r'```\n(\[\{"name": "podrace".*?)\n```', PAGE, re.DOTALL)
  assert text is not None
  inf = float('inf')
  (hello,) = eval(text[1].replace('-Infinity', '-inf').replace('Infinity', 'inf'), {'inf': inf})
  session.check_hello(hello)
  assert hello['version'] == frame.VERSION
  kind = spec()
  assert hello['schema'] == remote_wire.schema(kind.observation_space, kind.action_space)
  assert msgpack.unpackb(msgpack.packb([hello])) == [hello]


@pytest.mark.parametrize(
  'text',
  [
    f'A header has at most {frame.HEADER_BYTES:,} bytes',
    f'at most {frame.DEPTH} arrays and maps within each other',
    f'A frame has at most {session.GUEST_BYTES:,} bytes after the first eight',
    f'A listener has at most {listener.PEERS:,} sessions, and {listener.GUESTS:,} connections without one',
    f'is closed after {listener.SILENT_SECONDS:.0f} seconds',
    f'silent for {listener.TALKING_SECONDS / 60:.0f} minutes is closed',
    f'at most {listener.BACKLOG} frames, then it is dropped',
    f'{service_wire.MESSAGE_ITEMS} items, 2^20 new chunks and 2^20 references',
    f"a stream's newest {server.REFUSED_ITEMS:,} refused items",
    f'at most {server.REQUESTS:,} that are not answered',
  ],
)
def test_limits_are_those_of_the_page(text: str) -> None:
  assert text in ' '.join(PAGE.split())


def test_powers_of_two_are_those_of_the_page() -> None:
  assert service_wire.MESSAGE_CHUNKS == 2**20 == service_wire.MESSAGE_BYTES
  assert parameters.MOST_BYTES == 2**32 - 2**21 and service_wire.FRAME_BYTES == 2**30
  assert service_wire.UNPACKED_CHUNK_BYTES == 2**26 and service_wire.MOST_BYTES == 2**28
  assert service_wire.MOST_UNREAD == 128 and parameters.KEPT == 4
