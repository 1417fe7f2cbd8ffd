"""The format, against docs/protocol.md and against nonsense."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from gymnasium import spaces
from peers import Learner, Raw, spec

from podrace.envs.host import base as host
from podrace.remote import hub, server, wire
from podrace.remote.wire import WireError
from podrace.types import FIRST

PAGE = (Path(__file__).parents[2] / 'docs' / 'protocol.md').read_text()


REMOTE = PAGE[: PAGE.index('\n# The protocol of replay')]
HEADERS = {  # by name: the kind's number, and the fields after it
  name: (int(number), fields.replace('`', '').split(', ')[1:])
  for name, fields, number in re.findall(
    r'^\| ([A-Z]+) \| `\[((\d+)[^]]*)\]`', REMOTE, re.MULTILINE
  )
}
TYPES = {
  'told': dict, 'session': int, 'group': int, 'N': int, 'number': int, 'checksum': int, 'reason': str,
  'reasons': list, 'complete': bool, 'report': dict,
}  # fmt: skip
WORDS = ' '.join(REMOTE.split())


def named(text: str) -> set[str]:
  return set(re.findall(r'`(\w+)`', text))


def test_the_page_has_every_kind_and_its_number() -> None:
  rows = {name: number for name, (number, _) in HEADERS.items()}
  ours = {
    k: v for k, v in vars(wire).items() if k.isupper() and type(v) is int and k not in
    ('VERSION', 'HEADER_BYTES', 'REPORT_BYTES', 'GROUPS', 'DEPTH', 'TEXT', 'LINES', 'REASONS', 'CONNECT_MS', 'STRING', 'NUMBER')
  }  # fmt: skip
  assert rows == ours and len(rows) == 15
  assert f'version {wire.VERSION}' in PAGE.splitlines()[0]


def test_a_client_says_what_the_page_has_and_nothing_else() -> None:
  """Each header with its fields is answered; with one more, one less or one of another type it is not."""
  answers = {'HELLO': wire.WELCOME, 'ENTER': wire.START, 'STEP': wire.ACTION, 'PING': wire.PONG,
             'BYE': wire.GONE, 'ASK': wire.REPORT}  # fmt: skip
  assert list(answers) == [name for name, (number, _) in HEADERS.items() if number < 64]
  with Learner(peer_timeout=60.0) as learner:
    for name, answer in answers.items():
      kind, names = HEADERS[name]
      for case in ['right', 'more', 'frame', *range(len(names))]:
        with Raw(learner.address) as raw:
          raw.hello()
          if name == 'STEP':
            raw.enter(1)
          frames = raw.frames(1, FIRST) if name == 'STEP' else []
          values: dict[str, Any] = {'told': raw.told(), 'session': raw.session, 'group': 0, 'N': 1,
                                    'number': 0, 'checksum': wire.checksum(frames), 'reason': 'x'}  # fmt: skip
          header = [kind, *(values[x] for x in names)]
          if case == 'more':
            header.append(0)
          elif case == 'frame':
            frames = [*frames, b'']
          elif case != 'right':
            header[1 + case] = None
          raw.say(*header, frames=frames)
          if name == 'BYE' and case == 'right':  # which has no answer
            raw.say(wire.PING, raw.session)
          if case == 'right':
            raw.expect(answer)
            continue
          told = raw.expect(wire.GONE)[0][2]
          if case == 'more':
            assert (
              f'{len(names) + 1} fields in a header of kind {kind}, expected {len(names)}' in told
            )
          elif case == 'frame':
            assert 'frames after' in told and 'expected' in told
          else:
            assert f'expected {TYPES[names[case]].__name__}' in told, (name, case, told)


def test_a_learner_says_what_the_page_has() -> None:
  heard: dict[int, list[Any]] = {}
  with Learner() as learner, Raw(learner.address) as raw, Raw(learner.address, spec((9,))) as wrong:

    def hear(raw: Raw, kind: int) -> list[Any]:
      while kind not in heard:
        header = raw.hear()[0]
        heard[header[0]] = header
      return heard[kind]

    raw.say(wire.HELLO, raw.told())
    raw.session = hear(raw, wire.WELCOME)[1]
    raw.say(wire.ENTER, raw.session, 0, 2)
    hear(raw, wire.START)
    raw.step(2, 0, FIRST)
    hear(raw, wire.ACTION)
    raw.say(wire.PING, raw.session)
    hear(raw, wire.PONG)
    raw.say(wire.ASK)
    report = hear(raw, wire.REPORT)[1]
    wrong.say(wire.HELLO, wrong.told())
    hear(wrong, wire.REFUSED)
    wrong.say(wire.PING, 5)
    hear(wrong, wire.GONE)
    for pool in learner.pools:
      pool.close()
    raw.say(wire.HELLO, raw.told(nonce=1))
    hear(raw, wire.WAIT)
    learner.server.finished()
    hear(raw, wire.END)
  assert len(heard) == 9
  for name, (number, names) in HEADERS.items():
    if number >= 64:
      assert [type(x) for x in heard[number][1:]] == [TYPES[x] for x in names], name
  welcome = REMOTE.partition('- **WELCOME**')[2].partition('- **')[0]
  assert set(heard[wire.WELCOME][2]) == named(welcome) - {'session', 'told'}
  assert heard[wire.WELCOME][1] < 2**56
  shown = REMOTE.partition('**Report.**')[2].partition('\n## ')[0]
  assert set(report) | set(report['clients'][0]) == named(shown)
  counts = re.search(r'from string to integer: ([^;]*);', ' '.join(shown.split()))
  source = ''.join(Path(module.__file__).read_text() for module in (hub, server))
  assert counts and set(counts[1].split(', ')) == set(re.findall(r"counts\['([^']+)'\]", source))


def test_a_hello_has_what_the_page_has() -> None:
  keys = re.findall(r'^\| ((?:`\w+`(?:, )?)+) \| (?:string|integer|map)', REMOTE, re.MULTILINE)
  hello = named(' '.join(keys[: keys.index('`schema`') + 1]))
  with Learner() as learner, Raw(learner.address) as raw:
    assert {*raw.told(), 'before'} == hello  # which may be left out
    for name in raw.told():
      with Raw(learner.address) as one:
        one.say(wire.HELLO, {k: v for k, v in one.told().items() if k != name})
        wanted = wire.REFUSED if name == 'schema' else wire.GONE
        assert name in str(one.expect(wanted))


def test_the_page_has_the_limits_that_are_kept() -> None:
  for told in (
    f"A header has at most {wire.HEADER_BYTES:,} bytes, REPORT's {wire.REPORT_BYTES:,}, and at most "
    f'{wire.DEPTH} arrays and maps within each other',
    f'Strings have at most {wire.STRING} characters',
    f'integers are below 2^{wire.NUMBER.bit_length() - 1}.',
    f'`group` is 0 to {wire.GROUPS - 1},',
    f'at most {wire.REASONS + 1} strings of about {wire.TEXT} characters',
    f'its first {wire.STRING} characters',
    f'at most {wire.STRING + 20} and {wire.STRING} characters, in ASCII',
    f'an array of at most {server.REPORTED:,} maps',
    f'p50 and p99 of the last {server.SAMPLES:,};',
    f"largest array of all the learner's slots together, and {server.SLACK:,};",
    f'at most {hub.PEERS:,} sessions, and {server.WAITING:,} groups that wait',
    f'at most {server.ENVIRONMENTS:,} environments',
    f'N records of {wire.RECORD.itemsize} bytes',
  ):
    assert told in WORDS, told
  assert hub.REPORT_SECONDS == 0.5 and 'as old as half a second' in WORDS
  assert host.START_SECONDS == 120 and 'and two minutes more' in WORDS


def test_the_example_headers_are_these_bytes() -> None:
  header = bytes.fromhex('9503cd01020000cefb3e4c21')
  assert wire.pack(wire.STEP, 258, 0, 0, 0xFB3E4C21) == header and len(header) == 12
  assert re.search(r'95 03 cd 01 02 00 00 ce fb 3e 4c 21', PAGE)
  assert wire.unpack(header) == [3, 258, 0, 0, 0xFB3E4C21]
  record = np.zeros(1, wire.RECORD)
  record['discount'] = 1
  shown = '00 00 00 00   00 00 00 00   00 00 80 3f   00 00 00 00   00 00 00 00'
  assert shown in PAGE and record.tobytes() == bytes.fromhex(shown)


def test_the_page_has_every_field_of_a_record() -> None:
  for name, (dtype, offset) in wire.RECORD.fields.items():
    if name != 'zero':
      assert re.search(rf'^\| {offset} \| {dtype.itemsize} \| \w+ \| `{name}`', PAGE, re.MULTILINE)


def test_the_example_schema_is_ours() -> None:
  assert wire.schema(spec().observation_space, spec().action_space) == {
    'observation': [['observation', '<f4', [4], 'Box', [-np.inf, -np.inf, np.inf, np.inf]]],
    'action': ['action', '<i4', [], 'Discrete', [0, 5]],
  }


def test_schemas_of_trees_survive_the_wire() -> None:
  tree = spaces.Dict(
    b=spaces.Tuple([spaces.Discrete(4, dtype=np.int32), spaces.MultiBinary(3)]),
    a=spaces.Box(0, 255, (6, 6), np.uint8),
  )
  one = wire.schema(tree, spaces.MultiDiscrete([3, 4], dtype=np.int32))
  assert wire.unpack(wire.pack(1, one))[1] == one
  paths = [x[0] for x in one['observation']]
  assert paths == ['observation/b/0', 'observation/b/1', 'observation/a']  # as the space has them
  assert wire.differences(one, one) == []


@pytest.mark.parametrize(
  'theirs', [None, 1, [], {}, {'observation': 3, 'action': 4}, {'observation': [], 'action': []}]
)
def test_what_is_no_schema_differs(theirs: Any) -> None:
  (line,) = wire.differences(wire.schema(spec().observation_space, spec().action_space), theirs)
  assert 'sent no schema' in line


def test_missing_and_further_arrays_differ() -> None:
  one = wire.schema(spec().observation_space, spec().action_space)
  further = {**one, 'observation': [*one['observation'], ['observation/x', '<f4', [], 'Box', []]]}
  (line,) = wire.differences(one, further)
  assert line.startswith('observation/x: the learner has none')


def test_headers_of_nonsense_are_errors_and_nothing_else() -> None:
  rng = random.Random(0)
  good = [wire.pack(wire.STEP, 1, 2, 3, 4), wire.pack(wire.HELLO, {'a': [1, {'b': 2.5}]})]
  errors = 0
  for _ in range(20_000):
    data = bytearray(rng.choice(good) if rng.random() < 0.7 else rng.randbytes(rng.randrange(40)))
    for _ in range(rng.randrange(4)):
      if data:
        data[rng.randrange(len(data))] = rng.randrange(256)
    try:
      header = wire.unpack(bytes(data[: rng.randrange(len(data) + 1)]))
    except WireError:
      errors += 1
      continue
    assert isinstance(header, list) and type(header[0]) is int
  assert errors > 5000


@pytest.mark.parametrize(
  'data',
  [b'\xdd\xff\xff\xff\xff', b'\xdf\xff\xff\xff\xff', b'\xc6\xff\xff\xff\xff', b'\x91' * 60_000,
   b'\x92\x04' + b'\x91' * 999 + b'\x90', b'\x92\x04' + b'\x81\xa1a' * 200 + b'\x90', msgpack.packb({1: 2}), msgpack.packb([]), msgpack.packb([True]), msgpack.packb([1.0])],
)  # fmt: skip
def test_hostile_headers(data: bytes) -> None:
  with pytest.raises(WireError):
    wire.unpack(data)


def test_frames_go_there_and_back_without_a_copy() -> None:
  layout = wire.Layout(wire.schema(spec().observation_space, spec().action_space))
  records, x = np.zeros(3, wire.RECORD), np.arange(12, dtype=np.float32).reshape(3, 4)
  frames = [records.tobytes(), x.tobytes()]
  layout.check(frames, 3, wire.checksum(frames))
  buffers = layout.buffers(8)
  back, (y,) = layout.records([frames]), layout.observations([frames], buffers)
  np.testing.assert_array_equal(x, y)
  assert not back.words.flags.owndata and not y.flags.owndata
  (both,) = layout.observations([frames, frames], buffers)  # those of several STEPs are copied
  np.testing.assert_array_equal(both, np.concatenate([x, x]))
  assert np.shares_memory(both, buffers[0]) and not np.shares_memory(y, buffers[0])
  action = np.array([1, 2, 3], np.int32).tobytes()
  np.testing.assert_array_equal(layout.actions([action], 3, wire.checksum([action])), [1, 2, 3])
  with pytest.raises(WireError, match='another checksum'):
    layout.actions([action], 3, 0)


def test_the_text_of_others_is_bounded_and_obeyed_by_no_terminal() -> None:
  assert wire.plain('caf\u00e9 \x1b[2J\n\u202e x') == 'caf\u00e9 \\x1b[2J\\n\\u202e x'
  assert wire.plain('x' * 600) == 'x' * 500 + '... (100 more)'
  assert wire.plain('\x00' * 400) == '\\x00' * 125 + '...'  # as long as it is shown
  assert (
    wire.label('caf\u00e9\x1b') == 'caf\\xe9\\x1b' and len(wire.label('\U000e0001' * 200)) == 200
  )
  lines = wire.plain_lines('\n'.join(f'{i}\t' for i in range(100))).split('\n')
  assert lines == [f'{i}\\t' for i in range(40, 100)]  # the end of a traceback says what it was
  reasons = wire.plain_reasons(['a\nb', 5, *['y' * 10**6] * 500])
  assert reasons[:2] == ['a\\nb', '5'] and reasons[-1] == 'and 482 more'
  assert len(wire.pack(wire.REFUSED, reasons)) < wire.HEADER_BYTES
