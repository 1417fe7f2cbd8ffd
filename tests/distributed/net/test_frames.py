"""Frames: what is declared comes through, whole or in bits; what is not is a WireError, and costs nothing."""

from __future__ import annotations

import random
import socket as sockets
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from podrace.distributed.net.channel import ConnectionClosed, set_no_delay
from podrace.distributed.net.frame import (
  HEADER_BYTES,
  PREFIX,
  WireError,
  fixed,
  flat,
  numbered,
  packed,
  split,
  unpack,
)
from podrace.distributed.net.frame_reader import DIRECT, SCRATCH_BYTES, new_scratch
from podrace.distributed.net.keys import client_context, new_keys, server_context
from podrace.distributed.net.stream import SendQueueFull, Stream

SHORT = packed(7, 'SHORT', int, str)
ONE = packed(8, 'ONE', object, arrays=1)
FIXED = fixed(9, 'FIXED', '<II', arrays=1)
THREE = packed(10, 'THREE', int, arrays=3)
KINDS = numbered(SHORT, ONE, FIXED, THREE)


@pytest.fixture(scope='module', params=['plain', 'TLS'])
def keys(request: Any, tmp_path_factory: Any) -> Path | None:
  if request.param == 'plain':
    return None
  directory = tmp_path_factory.mktemp('keys') / 'keys'
  new_keys(directory)
  return directory


class Pair:
  """Two streams; keeps what comes out at the second."""

  def __init__(
    self, largest: int = 2**26, most_out: int = 10**6, memory: Any = None, keys: Path | None = None
  ) -> None:
    one, two = sockets.socketpair()
    self.heard: list[tuple[str, list[Any], list[bytes]]] = []
    self.got: list[memoryview] = []
    for socket in (one, two):
      set_no_delay(socket)
    nothing = lambda *args: None  # noqa: E731
    contexts = (client_context(keys), server_context(keys)) if keys else (None, None)
    self.one = Stream(one, KINDS, nothing, nothing, largest, most_out, new_scratch(), contexts[0])
    self.two = Stream(
      two, KINDS, self._on, memory or nothing, largest, most_out, new_scratch(), contexts[1], True
    )
    while not (self.one.shaken and self.two.shaken):
      for end in (self.one, self.two):
        if not end.shaken:
          end.shake()

  def _on(self, kind: Any, fields: Any, body: memoryview, sizes: Any) -> None:
    self.got.append(body)
    arrays = [bytes(x) for x in split(body, sizes)] if kind.arrays else []
    self.heard.append((kind.name, list(fields), arrays))

  def pump(self, messages: int) -> None:
    for _ in range(10**5):
      if len(self.heard) >= messages:
        return
      self.one.flush()
      self.two.receive()
    raise AssertionError(f'{len(self.heard)} messages of {messages}')

  def __enter__(self) -> Pair:
    return self

  def __exit__(self, *exc: object) -> None:
    self.one.close()
    self.two.close()


def test_messages_of_all_kinds_and_sizes_come_through_in_order(keys: Path | None) -> None:
  rng = np.random.default_rng(0)
  sent: list[Any] = []
  with Pair(keys=keys) as pair:
    for size in (0, 1, 100, DIRECT - 1, DIRECT, SCRATCH_BYTES - 30, SCRATCH_BYTES, 3_000_000):
      data = rng.bytes(size)
      for kind, fields, arrays in (
        (SHORT, [size, 'x' * (size // 10)], []),
        (FIXED, [size, 2], [data]),
        (ONE, [{'a': size}], [data]),
        (THREE, [size], [data, b'', flat(np.arange(5))]),
      ):
        pair.one.send(kind, *fields, arrays=arrays)
        sent.append((kind.name, fields, [bytes(memoryview(x).cast('B')) for x in arrays]))
    pair.pump(len(sent))
    assert pair.heard == sent and not pair.one.waiting


def test_frames_come_through_however_they_are_cut() -> None:
  data = b''.join(
    b''.join(map(bytes, kind.pack(fields, arrays)))
    for kind, fields, arrays in (
      (SHORT, [5, 'five'], []),
      (FIXED, [1, 2], [bytes(range(200))]),
      (THREE, [9], [b'a' * DIRECT, b'b', b'']),
      (ONE, [None], [b'z' * 3]),
    )
  )
  rng = random.Random(0)
  for most in (1, 7, 300, 70_000):
    with Pair() as pair:
      at = 0
      while at < len(data):
        n = rng.randint(1, most)
        pair.one.socket.send(data[at : at + n])
        pair.two.receive()
        at += n
        if most == 1 and 400 < at < len(data) - 200:  # the large one byte by byte takes long
          n = len(data) - 200 - at
          at += pair.one.socket.send(data[at : at + min(n, 10_000)])
          pair.two.receive()
      pair.pump(4)
      assert [x[0] for x in pair.heard] == ['SHORT', 'FIXED', 'THREE', 'ONE']
      assert pair.heard[2][2] == [b'a' * DIRECT, b'b', b'']


@pytest.mark.parametrize('size', [50, DIRECT + 5, 2_000_000])
def test_arrays_are_received_where_the_handler_wants_them(size: int, keys: Path | None) -> None:
  mine = np.zeros(size, np.uint8)
  asked = []

  def memory(kind: Any, fields: Any, n: int) -> Any:
    asked.append((kind, list(fields), n))
    return mine

  data = np.random.default_rng(0).bytes(size)
  with Pair(memory=memory, keys=keys) as pair:
    pair.one.send(FIXED, 3, 4, arrays=(data,))
    pair.pump(1)
    assert asked == [(FIXED, [3, 4], size)] and mine.tobytes() == data
    assert np.shares_memory(np.frombuffer(pair.got[0], np.uint8), mine)


def frame(payload: bytes, kind: int, head: int, size: int | None = None) -> bytes:
  return PREFIX.pack(len(payload) if size is None else size, kind | head << 8) + payload


@pytest.mark.parametrize(
  ('data', 'expected'),
  [
    (frame(b'', 200, 0), 'kind 200'),
    (frame(b'', 200, 0, size=2**25), 'kind 200'),
    (frame(b'', 7, 5, size=3), '3 bytes .* 5'),
    (frame(b'', 7, 0, size=2**26 + 1), '67108865 .* 67108864'),
    (frame(b'\xc1', 7, 1), 'msgpack'),
    (frame(msgpack.packb({}), 7, 1), 'list'),
    (frame(msgpack.packb([1]), 7, 2), '1 .*SHORT.* 2'),
    (frame(msgpack.packb([-1, 'x']), 7, 4), '-1 .*SHORT.* int'),
    (frame(msgpack.packb([True, 'x']), 7, 4), 'True .*SHORT.* int'),
    (frame(msgpack.packb([2**63, 'x']), 7, 12), 'SHORT.* int'),
    (frame(msgpack.packb([1, 'x']) + b'more', 7, 4), '4 bytes'),
    (frame(b'1234567', 9, 7), '7 bytes.* 8'),
    (frame(msgpack.packb([1, 1]) + b'abc', 10, 3), '3 arrays'),
    (frame(msgpack.packb([1, [1, 1, 2]]) + b'abc', 10, 6), '3 bytes'),
    (frame(msgpack.packb([1, [4, 0, -1]]) + b'abc', 10, 6), '3 arrays'),
    (frame(msgpack.packb([[]]), 8, 2) + b'GET / HTTP/1.1', 'frame'),
  ],
)
def test_what_is_no_frame_is_refused(data: bytes, expected: str) -> None:
  with Pair() as pair:
    pair.one.socket.send(data)
    with pytest.raises(WireError, match=expected):
      pair.two.receive()


def test_deep_and_large_headers_are_refused() -> None:
  deep: Any = []
  for _ in range(400):
    deep = [deep]
  with pytest.raises(WireError, match='within'):
    unpack(msgpack.packb(deep))
  with pytest.raises(WireError, match=str(HEADER_BYTES)):
    unpack(msgpack.packb(['x' * HEADER_BYTES]))


@pytest.mark.parametrize('key', [b'key', 1, None, 1.5])
def test_a_map_with_other_keys_than_strings_is_refused(key: Any) -> None:
  for header in ([{key: 1}], [1, [{'a': {key: 1}}]]):
    with pytest.raises(WireError):
      unpack(msgpack.packb(header))
  with pytest.raises(WireError, match="b'a'"):
    unpack(msgpack.packb([{'b': {b'a': 1}}]))
  assert unpack(msgpack.packb([{'a': {'': b'a'}}])) == [{'a': {'': b'a'}}]


def test_a_declared_size_takes_no_memory_until_bytes_come() -> None:
  with Pair(largest=2**31) as pair:
    before = resident()
    pair.one.socket.send(frame(bytes(70_000), 9, 8, size=2**30))
    pair.two.receive()
    assert pair.two.reader.large is not None and pair.two.reader.large.into.nbytes == 2**30 - 8
    assert resident() - before < 2**24


def resident() -> int:
  with open('/proc/self/statm') as file:
    return int(file.read().split()[1]) * 4096


def test_a_peer_that_does_not_read_fills_a_bounded_queue(keys: Path | None) -> None:
  with Pair(most_out=10, keys=keys) as pair:
    sent = 0
    with pytest.raises(SendQueueFull):
      for _ in range(10**4):
        pair.one.send(FIXED, 1, 2, arrays=(bytes(10**6),))
        sent += 1
    pair.pump(sent)
    assert len(pair.heard) == sent and not pair.one.waiting
    assert pair.one.send(SHORT, 1, 'again')


def test_the_other_end_is_gone(keys: Path | None) -> None:
  with Pair(keys=keys) as pair:
    pair.one.send(SHORT, 1, 'last words')
    pair.one.close()
    pair.two.receive()
    assert pair.heard == [('SHORT', [1, 'last words'], [])]
    with pytest.raises(ConnectionClosed, match='closed'):
      pair.two.receive()
    with pytest.raises(ConnectionClosed):
      for _ in range(10):
        pair.two.send(SHORT, 1, 'x')
    with pytest.raises(ConnectionClosed):
      pair.one.send(SHORT, 1, 'x')


def test_nothing_follows_the_last_message() -> None:
  with Pair() as pair:
    pair.one.send_packed(SHORT.pack([1, 'bye']), last=True)
    with pytest.raises(ConnectionClosed):
      pair.one.send(SHORT, 2, 'late')
    pair.one.close()
    pair.two.receive()
    assert [fields for _, fields, _ in pair.heard] == [[1, 'bye']]


def test_kinds_have_different_numbers() -> None:
  with pytest.raises(ValueError, match='7'):
    numbered(SHORT, packed(7, 'OTHER'))
  with pytest.raises(ValueError, match='256'):
    numbered(packed(256, 'OTHER'))


def test_random_bytes_raise_nothing_else() -> None:
  rng = random.Random(1)
  good = b''.join(map(bytes, THREE.pack([1], [b'a' * 10, b'b', b''])))
  for _ in range(3000):
    data = bytearray(good * 2) if rng.random() < 0.7 else bytearray(rng.randbytes(40))
    for _ in range(rng.randint(1, 4)):
      data[rng.randrange(len(data))] = rng.randrange(256)
    with Pair(largest=2**20) as pair:
      pair.one.socket.send(data[: rng.randint(1, len(data))])
      try:
        pair.two.receive()
      except WireError:
        continue
