"""The page of the protocol of replay and parameters says what the services do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from children import ROOT
from services import ANY
from test_service_security import HELLO, SIGNATURE, Raw, insert, ready
from test_service_tables import SIMPLE

from podrace import service
from podrace.remote import hub
from podrace.remote.wire import HEADER_BYTES, REPORT_BYTES, checksum, unpack
from podrace.service import parameters, router, server, wire
from podrace.service.server import ReplayServer

PAGE = (ROOT / 'docs' / 'protocol.md').read_text().partition('\n# The protocol of replay')[2]
BOUNDS = ('VERSION', 'KEY_BITS', 'DEPTH', 'LEAVES', 'AS_IS', 'PACKED', 'DIFFERENCES')
KINDS = {
  k: v for k, v in vars(wire).items()
  if k.isupper() and type(v) is int and k not in BOUNDS and not k.startswith(('MOST_', 'MESSAGE_'))
  and not k.endswith('_BYTES')
}  # fmt: skip


def test_the_page_has_every_kind_and_its_number() -> None:
  rows = re.findall(r'^\| ([A-Z]+) \| `\[(\d+)[,\]]', PAGE, re.MULTILINE)
  rows += [(name, number) for number, name in re.findall(r'`\[(\d+), [^`]*\]` \(([A-Z]+)\)', PAGE)]
  assert {k: int(v) for k, v in rows} == KINDS and len(rows) == len(KINDS)


# --- headers and frames -----------------------------------------------------------------------------


def _headers() -> dict[str, list[list[str]]]:
  """The fields after the kind, of each way in which a kind may be said."""
  rows = re.findall(r'^\| ([A-Z]+) \| (`\[\d+.*?) \|', PAGE, re.MULTILINE)
  rows += [(name, text) for text, name in re.findall(r'(`\[\d+, [^`]*\]`) \(([A-Z]+)\)', PAGE)]
  found = {}
  for name, text in rows:
    flat = [re.sub(r'\[.*\]', 'told', array) for array in re.findall(r'`\[\d+(.*?)\]`', text)]
    found[name] = [[f.strip() for f in array.split(',')[1:]] for array in flat]
  return found


HEADERS = _headers()
GIVEN: dict[str, Any] = {
  'number': 1, 'name': 'it', 'settings': {}, 'message': 1, 'reason': 'enough', 'table': 'it', 'n': 1,
  'at_least': 1, 'peek': False, 'seconds': 0.0, 'received': 0, 'version': 1, 'start': 0,
}  # fmt: skip
KEYS = [np.arange(1, 4, dtype='<i8').tobytes(), np.ones(3, '<f8').tobytes()]
FRAMES = {'INSERT': insert(1)[1], 'UPDATE': KEYS, 'DELETE': KEYS[:1]}
OF_REPLAY = ['PING', 'BYE', 'ASK', 'HELLO', 'TABLE', 'UPDATE', 'DELETE', 'INFO', 'SAVE', 'DECLARE',
             'INSERT', 'SAMPLE', 'CANCEL']  # fmt: skip
OF_PARAMETERS = ['PING', 'BYE', 'ASK', 'HELLO', 'FETCH']


def test_all_that_clients_say_is_tried() -> None:
  assert {k for k, v in KINDS.items() if v < 64} == {*OF_REPLAY, *OF_PARAMETERS}


class Said:
  """What a client says, and whether it is taken."""

  def __init__(self, where: Any, kind: str, fields: list[str]) -> None:
    self.where, self.kind, self.fields = where, kind, fields

  def header(self, session: int, frames: list[bytes]) -> list[Any]:
    name = wire.REPLAY if isinstance(self.where, ReplayServer) else wire.PARAMETERS
    told = {**HELLO, 'name': name, 'stream': 5, 'nonce': 2} if self.kind == 'HELLO' else {}
    given = {**GIVEN, 'session': session, 'told': told, 'checksum': checksum(frames)}
    return [KINDS[self.kind], *(given[f] for f in self.fields)]

  def is_taken(self, context: zmq.Context[Any], change: Any = None, frames: Any = None) -> bool:
    if isinstance(self.where, ReplayServer):
      raw = ready(context, self.where)
    else:
      raw = Raw(context, self.where.address)
      raw.hello(name=wire.PARAMETERS)
    frames = FRAMES.get(self.kind, []) if frames is None else frames
    header = self.header(raw.session, frames)
    raw.say(*(change(header) if change else header), frames=frames)
    raw.say(wire.ASK)  # what follows something that is none is ignored
    try:
      while True:
        assert raw.socket.poll(10_000)
        heard = unpack(raw.socket.recv_multipart()[0], 2**20)[0]
        if heard in (wire.GONE, wire.REPORT):
          return heard == wire.REPORT
    finally:
      raw.close()


@pytest.fixture(scope='module')
def listening() -> Iterator[dict[str, Any]]:
  with ReplayServer(ANY) as replay, service.Publisher(ANY) as publisher:
    with service.connect(replay.address) as client:
      client.table('it', **SIMPLE)
    publisher.publish(1, [('x', np.ones(5))])
    yield {wire.REPLAY: replay, wire.PARAMETERS: publisher}
    assert not replay.counts['unexpected'] + publisher.counts['unexpected']


@pytest.mark.parametrize(
  ('of', 'kind'), [*((wire.REPLAY, k) for k in OF_REPLAY), *((wire.PARAMETERS, k) for k in OF_PARAMETERS)]
)  # fmt: skip
def test_what_a_client_says_has_the_fields_of_the_page_and_no_others(
  of: str, kind: str, listening: dict[str, Any]
) -> None:
  context = zmq.Context()
  ways = HEADERS[kind]
  if (of, kind) == (wire.PARAMETERS, 'PING'):
    ways, other = ways[:1], ways[1]
    assert not Said(listening[of], kind, other).is_taken(context)
  for fields in ways:
    said, frames = Said(listening[of], kind, fields), FRAMES.get(kind, [])
    assert said.is_taken(context), fields
    assert not said.is_taken(context, lambda h: [*h, 0]) or [*fields, 'received'] in ways
    assert not said.is_taken(context, lambda h: h[:-1]) or fields[:-1] in ways
    for i, name in enumerate(fields, 1):
      wrong = lambda h, i=i: [*h[:i], None, *h[i + 1 :]]  # noqa: E731
      assert not said.is_taken(context, wrong), name
    assert not said.is_taken(context, frames=[*frames, b'12345678'])
    assert not frames or not said.is_taken(context, frames=frames[:-1])
  context.term()


NUMBERS = {'none': 0, 'one': 1, 'two': 2, 'three': 3, 'five': 5, 'six': 6}


def test_what_a_service_says_has_the_fields_and_frames_of_the_page(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  heard = dict[str, tuple[list[Any], int]]()

  def hear(raw: Raw, *kinds: str) -> None:
    for kind in kinds:
      header, *frames = raw.hear(KINDS[kind])
      heard[kind] = header, len(frames)

  with (
    ReplayServer(ANY, tmp_path) as replay,
    service.connect(replay.address) as client,
    zmq.Context() as context,
  ):
    client.table('it', **SIMPLE)
    raw = Raw(context, replay.address)
    raw.say(wire.HELLO, {**HELLO, 'stream': 7})
    hear(raw, 'WELCOME')
    raw.session = heard['WELCOME'][0][1]
    assert heard['WELCOME'][1] == 2  # of replay
    told = {'tables': ['it'], 'specs': [['<i8', [2]]], 'signatures': [SIGNATURE]}
    raw.say(wire.DECLARE, raw.session, told)
    more, frames = insert(1)
    raw.say(wire.INSERT, raw.session, *more, frames=frames)
    raw.say(wire.SAMPLE, raw.session, 1, 'it', 1, 1, False, -1.0, 0)
    raw.say(wire.INFO, raw.session, 2, 'it')
    raw.say(wire.PING, raw.session)
    raw.say(wire.ASK)
    hear(raw, 'ACK', 'SIGNATURE', 'SAMPLES', 'ANSWER', 'PONG', 'REPORT')
    raw.say(wire.SAMPLE, raw.session, 3, 'it', 1, 1, False, -1.0, 9)
    hear(raw, 'GONE')
    other = Raw(context, replay.address)
    other.say(wire.HELLO, {**HELLO, 'stream': 8, 'version': 99})
    hear(other, 'REFUSED')
    with monkeypatch.context() as full:
      full.setattr(router, 'PEERS', 0)
      other.say(wire.HELLO, {**HELLO, 'stream': 8})
      hear(other, 'WAIT')
    other.hello()
    replay.stop()
    hear(other, 'END')
    raw.close()
    other.close()
  with service.Publisher(ANY) as publisher, zmq.Context() as context:
    publisher.publish(1, [('x', np.ones(5))])
    raw = Raw(context, publisher.address)
    raw.hello(name=wire.PARAMETERS)
    hear(raw, 'NEWEST')  # before it asks: which of two answers is the first is not said
    raw.say(wire.FETCH, raw.session, 1, 0)
    hear(raw, 'PIECE')
    raw.close()
  assert heard.keys() == {k for k, v in KINDS.items() if v >= 64}
  for kind, (header, count) in heard.items():
    (fields,) = HEADERS[kind]
    assert len(header) == 1 + len(fields), (kind, fields)
    row = re.search(rf'^\| {kind} \| .*? \| (\w+)', PAGE, re.MULTILINE)
    assert count == NUMBERS.get(row[1] if row else 'none', 2), kind


# --- records and limits -----------------------------------------------------------------------------

U = {'u32': '<u4', 'u64': '<u8', 'i64': '<i8', 'f64': '<f8'}


@pytest.mark.parametrize(
  ('label', 'dtype', 'which'),
  [('chunks', wire.CHUNK, 0), ('items', wire.ITEM, 0), ('parts', wire.PART, 0),
   ('items', wire.DRAWN, 1), ('parts', wire.PART, 1), ('chunks', wire.CHUNK, 1)],
)  # fmt: skip
def test_records_are_those_of_the_page(label: str, dtype: np.dtype, which: int) -> None:
  row = re.findall(rf'^\| \d, {label} \| (.*?) \|', PAGE, re.MULTILINE)[which]
  told = [
    (name.replace(' ', '_'), U[kind]) for kind, name in re.findall(r'([uif]\d\d) ([\w ]+)', row)
  ]
  told = [('spec' if name == '0' else name, kind) for name, kind in told]
  assert dtype.names is not None
  assert told == [(name, dtype[name].str) for name in dtype.names]


@pytest.mark.parametrize(
  ('sentence', 'value'),
  [
    (r"a client's header has at most (N) bytes", HEADER_BYTES),
    (r"a service's\s(N), a frame", REPORT_BYTES),
    (r'a frame (N);', wire.FRAME_BYTES),
    (r'there are (N) clients;', hub.PEERS),
    (r'keys \[n\] i64, priorities \[n\] f64; n at most (N) \|', wire.MESSAGE_KEYS),
    (r'keys \[n\] i64; n at most (N) \|', wire.MESSAGE_KEYS),
    (r'none beyond (N)\.', int(wire.MOST_NUMBER)),
    (r'there are at most (N) tables', server.TABLES),
    (r'at most (N) within each other', wire.DEPTH),
    (r'depth first, 1 to (N):', wire.LEAVES),
    (r'a row at most (N) bytes', wire.FRAME_BYTES),
    (r'leaves of signatures are at most (N) together', server.DECLARATIONS),
    (r'An INSERT has at most (N) items', wire.MESSAGE_ITEMS),
    (r'(N) new chunks', wire.MESSAGE_CHUNKS),
    (r'(N) references', wire.MESSAGE_CHUNKS),
    (r"a stream's newest (N) refused items", server.REFUSED_ITEMS),
    (r'items, 1 to (N), of a table', wire.MOST_ITEMS),
    (r'a client has at most (N) that are not answered', server.REQUESTS),
    (r'is sent (N) bytes and one more', wire.MOST_BYTES),
    (r'and one more, or (N) of them', wire.MOST_UNREAD),
    (r'items of more than (N) bytes', wire.FRAME_BYTES),
    (r'a counter of (N) bits', wire.KEY_BITS),
    (r'bytes from `start`, at most (N);', parameters.PIECE_BYTES),
  ],
)
def test_limits_are_those_of_the_page(sentence: str, value: int) -> None:
  (told,) = re.findall(sentence.replace('(N)', r'(\d[\d,^]*(?<!,))'), PAGE)
  base, _, power = told.replace(',', '').partition('^')
  assert int(base) ** int(power or 1) == value
