"""Parameters: whole, newest, known to be fresh."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zmq
from children import until
from proxy import Proxy
from services import ANY, Program

from podrace import service, tables
from podrace.remote.wire import checksum, pack, unpack
from podrace.service import parameters, wire


def leaves(value: float, size: int = 1000) -> list[tuple[str, np.ndarray]]:
  return [('a', np.full((size, 2), value, np.float32)), ('b/c', np.full((), value, np.int64))]


def test_versions_come_whole_and_only_when_they_have_changed() -> None:
  with service.Publisher(ANY) as publisher:
    reader = service.Parameters(publisher.address)
    with pytest.raises(service.Stale, match=r'there are no parameters of .* yet'):
      reader.get(timeout=0.3)
    assert reader.version == -1
    array = np.arange(6, dtype=np.float64).reshape(2, 3)
    publisher.publish(3, [('x', array), ('h', np.ones(2, ml_dtypes.bfloat16)), ('none', array[:0])])
    array[:] = -1  # it was copied
    got = reader.get(timeout=30)
    assert got.version == 3 and [p for p, _ in got.leaves] == ['x', 'h', 'none']
    np.testing.assert_array_equal(got.leaves[0][1], np.arange(6).reshape(2, 3))
    assert got.leaves[1][1].dtype == ml_dtypes.bfloat16 and got.leaves[2][1].shape == (0, 3)
    assert not got.leaves[0][1].flags.writeable
    publisher.publish(4, got.leaves)
    until(lambda: reader.version == 4)
    assert reader.fetched == 1 and reader.get().sha256 == got.sha256  # nothing was sent
    publisher.publish(9, leaves(9))
    until(lambda: reader.version == 9)
    assert reader.fetched == 2
    for version in (9, 8, -1):
      with pytest.raises(ValueError, match='must be above 9'):
        publisher.publish(version, leaves(1))
    with pytest.raises(ValueError, match='not made of numbers'):
      publisher.publish(10, [('x', np.array(['text']))])
    late = service.Parameters(publisher.address)
    assert late.get(timeout=30).version == 9
    late.close()
    reader.close()
    with pytest.raises(tables.Closed):
      reader.get()


def test_many_pieces_and_versions_are_never_torn(tmp_path: Path) -> None:
  with service.Publisher(ANY) as publisher:
    readers = [Program(tmp_path / f'{i}', 'read', publisher.address, 60) for i in range(3)]
    publisher.publish(0, leaves(0, 600_000))  # five pieces
    until(lambda: all(r.said() for r in readers))
    for version in range(1, 61):
      publisher.publish(version, leaves(version, 600_000))
      until(lambda v=version: max(r.said()[-1][0] for r in readers) >= v - 2)
    assert [r.wait() for r in readers] == [0, 0, 0], readers[0].output
    seen = [line[0] for line in readers[0].said()]
    assert seen == sorted(set(seen)) and seen[-1] == 60
    assert publisher.failure is None


class Hurried(service.Publisher):
  """Publishes another version whenever a piece of one is asked for."""

  def handle(self, peer: Any, header: list[Any], frames: list[Any]) -> None:
    self.publish(self._versions[-1].version + 1, leaves(self._versions[-1].version + 1, 2_000_000))
    super().handle(peer, header, frames)


def test_versions_come_although_newer_ones_are_published_faster() -> None:
  with Hurried(ANY) as publisher:
    reader = service.Parameters(publisher.address)
    publisher.publish(1, leaves(1, 2_000_000))  # 16 pieces
    for above in (0, 1):
      until(lambda v=above: reader.version > v)
    found = reader.get()
    assert (found.leaves[0][1] == found.version).all()
    assert publisher._versions[-1].version >= found.version + 10  # newer ones were published
    reader.close()


def test_versions_that_are_read_are_kept_but_not_too_many() -> None:
  with service.Publisher(ANY) as publisher:
    publisher.publish(0, leaves(0))
    context, readers = zmq.Context(), []
    for version in range(1, 9):  # each is read, but for its last piece, by a reader of its own
      publisher.publish(version, leaves(version, 200_000))  # two pieces
      reader = context.socket(zmq.DEALER)
      reader.connect(publisher.address)
      told = {'name': wire.PARAMETERS, 'version': wire.VERSION, 'nonce': 1, 'host': 'raw', 'podrace': '0',
              'pid': 1}  # fmt: skip
      reader.send(pack(wire.HELLO, told))
      session = unpack(reader.recv_multipart()[0])[1]
      readers.append((version, session, reader))
      reader.send(pack(wire.FETCH, session, version, 0))
      while unpack(reader.recv_multipart()[0])[0] != wire.PIECE:
        pass
    held = {p.state.reading.version for p in publisher.peers.values() if p.state.reading}
    assert held == {1, 2, 3, 4, 7, 8}
    for version, session, reader in readers:
      reader.send(pack(wire.FETCH, session, version, 2**20))
      while unpack((heard := reader.recv_multipart())[0])[0] != wire.PIECE:
        pass
      assert len(heard) == (2 if version in held else 1), version
      reader.close(0)
    context.term()


def under_way(reader: service.Parameters) -> bool:
  fetch = reader._fetch
  return fetch is not None and fetch.have > 0


def test_a_cut_on_the_way_is_outlived() -> None:
  with service.Publisher(ANY) as publisher:
    proxy = Proxy(int(publisher.address.rpartition(':')[2]))
    reader = service.Parameters(proxy.address)
    try:
      for version in range(8):
        publisher.publish(version, leaves(version, 2_000_000))  # 16 pieces
        until(lambda v=version: under_way(reader) or reader.version == v)
        proxy.reset()
        until(lambda v=version: reader.version == v)
        assert (reader.get().leaves[0][1] == version).all()
    finally:
      reader.close()
      proxy.close()


def test_staleness_is_bounded_and_said(caplog: pytest.LogCaptureFixture) -> None:
  with service.Publisher(ANY, peer_timeout=2.0) as publisher:
    address = publisher.address
    proxy = Proxy(int(address.rpartition(':')[2]))
    reader = service.Parameters(proxy.address, max_staleness=1.5)
    publisher.publish(1, leaves(1))
    assert reader.get(timeout=30).version == 1
    begun = time.monotonic()
    until(lambda: time.monotonic() - reader.staleness > begun + 1.5)  # it has asked since
    assert reader.get(timeout=0).version == 1  # nothing newer: it is fresh
    proxy.up = proxy.down = False
    until(lambda: reader.staleness > 1.5)
    with caplog.at_level(logging.WARNING), pytest.raises(service.Stale, match='version 1 is held'):
      reader.get(timeout=0.2)
    assert any('are stale' in r.getMessage() for r in caplog.records)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(reader.get(timeout=60)), daemon=True)
    thread.start()
    publisher.publish(2, leaves(2))
    thread.join(0.2)
    assert thread.is_alive() and not found
    proxy.up = proxy.down = True
    thread.join(30)
    assert found[0].version in (1, 2)
    until(lambda: reader.version == 2)
    reader.close()
    proxy.close()
  with pytest.raises(ValueError, match='max_staleness'):
    service.Parameters(address, max_staleness=0.0)


def test_a_publisher_that_comes_back_goes_on() -> None:
  publisher = service.Publisher(ANY)
  address = publisher.address
  reader = service.Parameters(address)
  publisher.publish(7, leaves(7))
  assert reader.get(timeout=30).version == 7
  publisher.close()
  until(lambda: reader.session is None)
  assert reader.get().version == 7  # without a bound
  with service.Publisher(address) as publisher:
    publisher.publish(5, leaves(5))  # a learner that resumed from an earlier checkpoint
    until(lambda: reader.version == 5)
  reader.close()


@pytest.mark.parametrize('lie', ['bytes', 'hash', 'place', 'size', 'checksum'])
def test_what_is_not_as_announced_is_never_seen(lie: str) -> None:
  """A publisher that lies once, and then tells the truth over a new connection."""
  context = zmq.Context()
  router = context.socket(zmq.ROUTER)
  router.linger = 0
  router.bind(ANY)
  reader = service.Parameters(router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip('\0'))
  version = parameters._Version(1, leaves(1, 10))
  session, lies, sessions = 5, True, 0
  while reader.version < 1:
    assert router.poll(20_000)
    address, header, *_ = router.recv_multipart()
    kind, *rest = unpack(header)
    if kind == wire.HELLO:
      sessions += 1
      told = {'nonce': rest[0]['nonce'], 'silence': 5.0}
      router.send_multipart([address, pack(wire.WELCOME, session, told)])
      sha256 = '0' * 64 if lie == 'hash' and lies else version.sha256
      size = len(version.data) + (lie == 'size' and lies)
      router.send_multipart([address, pack(wire.NEWEST, session, 1, [sha256, size, version.told])])
      lies = lies and lie != 'size'
    elif kind == wire.FETCH:
      data = bytearray(version.data)
      if lies and lie == 'bytes':
        data[3] ^= 1
      crc = checksum([data]) + (lies and lie == 'checksum')
      start = rest[2] + (lies and lie == 'place')
      router.send_multipart([address, pack(wire.PIECE, session, 1, start, crc), data])
      lies = False
  assert sessions == 2 and (reader.get().leaves[0][1] == 1).all()
  reader.close()
  router.close()
  context.term()
