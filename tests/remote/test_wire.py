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
from peers import spec

from podrace.remote import wire
from podrace.remote.wire import WireError

PAGE = (Path(__file__).parents[2] / 'docs' / 'protocol.md').read_text()


def test_the_page_has_every_kind_and_its_number() -> None:
  environments = PAGE[: PAGE.index('\n## Versions and limits')]
  rows = dict(re.findall(r'^\| ([A-Z]+) \| `\[(\d+)', environments, re.MULTILINE))
  ours = {
    k: v for k, v in vars(wire).items() if k.isupper() and type(v) is int and k not in
    ('VERSION', 'HEADER_BYTES', 'REPORT_BYTES', 'GROUPS', 'DEPTH', 'TEXT', 'LINES', 'REASONS', 'CONNECT_MS')
  }  # fmt: skip
  assert {k: int(v) for k, v in rows.items()} == ours
  assert f'version {wire.VERSION}' in PAGE.splitlines()[0]


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
  back, (y,) = layout.step(frames, 3, wire.checksum(frames))
  np.testing.assert_array_equal(x, y)
  assert not back.words.flags.owndata and not y.flags.owndata
  action = np.array([1, 2, 3], np.int32).tobytes()
  np.testing.assert_array_equal(layout.actions([action], 3, wire.checksum([action])), [1, 2, 3])
  with pytest.raises(WireError, match='another checksum'):
    layout.actions([action], 3, 0)


def test_the_text_of_others_is_bounded_and_obeyed_by_no_terminal() -> None:
  assert wire.plain('caf\u00e9 \x1b[2J\n\u202e x') == 'caf\u00e9 \\x1b[2J\\n\\u202e x'
  assert wire.plain('x' * 600) == 'x' * 500 + '... (100 more)'
  lines = wire.plain_lines('\n'.join(f'{i}\t' for i in range(100))).split('\n')
  assert lines == [f'{i}\\t' for i in range(40, 100)]  # the end of a traceback says what it was
  reasons = wire.plain_reasons(['a\nb', 5, *['y' * 10**6] * 500])
  assert reasons[:2] == ['a\\nb', '5'] and reasons[-1] == 'and 482 more'
  assert len(wire.pack(wire.REFUSED, reasons)) < wire.HEADER_BYTES
