"""Parameters: whole, newest, known to be fresh."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import bare
import ml_dtypes
import numpy as np
import pytest
from children import until
from proxy import Proxy
from services import ANY, Program

from podrace import tables
from podrace.distributed import parameters
from podrace.distributed.net import session_messages
from podrace.distributed.parameters import parameter_messages, reader
from podrace.distributed.parameters.publisher import ParameterVersion


def leaves(value: float, size: int = 1000) -> list[tuple[str, np.ndarray]]:
  return [('a', np.full((size, 2), value, np.float32)), ('b/c', np.full((), value, np.int64))]


def test_versions_come_whole_and_only_when_they_have_changed() -> None:
  with parameters.Publisher(ANY) as publisher:
    reader = parameters.Parameters(publisher.address)
    with pytest.raises(parameters.StaleParameters, match=publisher.address):
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
    sent = publisher.listener.counts
    assert sent['bytes'] == 6 * 8 + 2 * 2
    publisher.publish(4, got.leaves)
    until(lambda: reader.version == 4)
    assert sent['bytes'] == 6 * 8 + 2 * 2 and reader.get().sha256 == got.sha256
    publisher.publish(9, leaves(9))
    until(lambda: reader.version == 9)
    assert sent['bytes'] == 6 * 8 + 2 * 2 + sum(x.nbytes for _, x in leaves(9))
    for version in (9, 8, -1):
      with pytest.raises(ValueError, match='9'):
        publisher.publish(version, leaves(1))
    with pytest.raises(ValueError, match='x'):
      publisher.publish(10, [('x', np.array(['text']))])
    late = parameters.Parameters(publisher.address)
    assert late.get(timeout=30).version == 9
    late.close()
    reader.close()
    with pytest.raises(tables.Closed):
      reader.get()


def test_many_pieces_and_versions_are_never_torn(tmp_path: Path) -> None:
  with parameters.Publisher(ANY) as publisher:
    readers = [Program(tmp_path / f'{i}', 'read', publisher.address, 30) for i in range(3)]
    publisher.publish(0, leaves(0, 600_000))
    until(lambda: all(r.said() for r in readers))
    for version in range(1, 31):
      publisher.publish(version, leaves(version, 600_000))
      until(lambda v=version: max(r.said()[-1][0] for r in readers) >= v - 2)
    assert [r.wait() for r in readers] == [0, 0, 0], readers[0].output
    seen = [line[0] for line in readers[0].said()]
    assert seen == sorted(set(seen)) and seen[-1] == 30
    assert not publisher.failure


def test_versions_come_although_newer_ones_are_published_faster() -> None:
  with parameters.Publisher(ANY) as publisher, Proxy(publisher.address) as proxy:
    reader = parameters.Parameters(proxy.address)
    until(lambda: reader.connected)
    proxy.down = False
    for number in range(1, 11):
      publisher.publish(number, leaves(number, 2_000_000))  # more than kernels hold on the way
      until(lambda: publisher.listener.counts['bytes'] >= 16_000_008)
    proxy.down = True
    until(lambda: reader.version >= 1)  # to its end, however many are published meanwhile
    assert (reader.get().leaves[0][1] == reader.get().version).all()
    until(lambda: reader.version == 10)
    size = sum(x.nbytes for _, x in leaves(1, 2_000_000))
    assert publisher.listener.counts['bytes'] == 2 * size  # the versions between were not sent
    reader.close()


def test_versions_that_are_read_are_kept_but_not_too_many() -> None:
  with parameters.Publisher(ANY) as publisher:
    ends = []
    for version in range(8):  # each is being sent to a client of its own, that does not read
      publisher.publish(version, leaves(version, 3_000_000))  # more than a kernel holds
      ends.append(bare.connect(publisher.address, reader.Parameters.kinds))
      ends[-1].hello(parameter_messages.SERVICE)
      until(lambda n=version: publisher.listener.counts['bytes'] >= (n + 1) * 24_000_000)
    until(lambda: len(publisher.peers) == 6)
    assert sorted(p.state.last.number for p in publisher.peers) == [0, 1, 2, 3, 6, 7]
    for version, end in enumerate(ends):
      with end:
        if version not in (4, 5):
          (number, *_), (data,) = end.expect(parameter_messages.NEWEST, 60)
          assert number == version and len(data) == 24_000_008


class Noticing(parameters.Parameters):
  """Knows of the version that is on its way."""

  under_way = -1

  def memory(self, kind: Any, fields: Any, size: int) -> Any:
    self.under_way = fields[0]
    return super().memory(kind, fields, size)


def test_a_cut_on_the_way_is_outlived() -> None:
  with parameters.Publisher(ANY) as publisher, Proxy(publisher.address) as proxy:
    reader = Noticing(proxy.address)
    for version in range(8):
      publisher.publish(version, leaves(version, 2_000_000))  # 16 MB
      until(lambda v=version: reader.under_way == v)
      proxy.reset()
      until(lambda v=version: reader.version == v)
      assert (reader.get().leaves[0][1] == version).all()
    reader.close()


def test_staleness_is_bounded_and_said(caplog: pytest.LogCaptureFixture) -> None:
  with parameters.Publisher(ANY, peer_timeout=2.0) as publisher, Proxy(publisher.address) as proxy:
    reader = parameters.Parameters(proxy.address, max_staleness=1.5)
    publisher.publish(1, leaves(1))
    assert reader.get(timeout=30).version == 1
    begun = time.monotonic()
    until(lambda: time.monotonic() - reader.staleness > begun + 1.5)  # it has asked since
    assert reader.get(timeout=0).version == 1  # nothing newer: it is fresh
    proxy.up = proxy.down = False
    until(lambda: reader.staleness > 1.5)
    with pytest.raises(parameters.StaleParameters, match='version 1'):
      reader.get(timeout=0.2)
    assert any('version 1' in r.getMessage() for r in caplog.records)
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
  with pytest.raises(ValueError, match='max_staleness'):
    parameters.Parameters(publisher.address, max_staleness=0.0)


def test_a_reader_confirms_its_version_often_enough() -> None:
  with contextlib.closing(parameters.Parameters('tcp://127.0.0.1:9', max_staleness=0.15)) as reader:
    assert reader.link.patience <= reader.link.ping_every == pytest.approx(0.05)


def test_a_publisher_that_comes_back_goes_on() -> None:
  publisher = parameters.Publisher(ANY)
  address = publisher.address
  reader = parameters.Parameters(address)
  publisher.publish(7, leaves(7))
  assert reader.get(timeout=30).version == 7
  publisher.close()
  until(lambda: not reader.connected)
  assert reader.get().version == 7  # without a bound
  with parameters.Publisher(address) as publisher:
    publisher.publish(5, leaves(5))  # a learner that resumed from an earlier checkpoint
    until(lambda: reader.version == 5)
  reader.close()


def _lie(lie: str, version: ParameterVersion) -> tuple[list[Any], bytes]:
  """What is not as it must be: the fields of NEWEST, and its bytes."""
  leaves, data = version.leaves, version.data
  if lie == 'bytes':
    data = data[:-1]
  elif lie == 'none':
    data = b''
  elif lie == 'shape':
    leaves = [['x', '<f4', [-1, 2]]]
  elif lie == 'type':
    leaves = [['x', '|O', [1]]]
  elif lie == 'leaf':
    leaves = [7]
  return [1, version.sha256, leaves], data


@pytest.mark.parametrize('lie', ['bytes', 'none', 'shape', 'type', 'leaf'])
def test_what_is_not_as_announced_is_never_seen(lie: str) -> None:
  """A publisher that lies once, and then tells the truth over a new connection."""
  publisher = bare.Accepting(session_messages.of_clients())
  reader = parameters.Parameters(publisher.address)
  version = ParameterVersion(1, leaves(1, 10))
  with publisher.welcome() as end:
    fields, data = _lie(lie, version)
    end.say(parameter_messages.NEWEST, *fields, arrays=(data,))
    assert end.is_closed()
  assert reader.version == -1
  with publisher.welcome() as end:
    end.say(parameter_messages.NEWEST, 1, version.sha256, version.leaves, arrays=(version.data,))
    assert (reader.get(timeout=20).leaves[0][1] == 1).all()
    reader.close()
  publisher.close()


def test_a_client_that_sends_arrays_is_dropped() -> None:
  with parameters.Publisher(ANY) as publisher:
    with bare.connect(publisher.address, reader.Parameters.kinds) as end:
      end.hello(parameter_messages.SERVICE)
      until(lambda: bool(publisher.peers))
      end.say(parameter_messages.NEWEST, 1, '', [], arrays=(b'x',))
      assert end.is_closed() and not publisher.peers
    assert publisher.listener.counts['malformed'] == 1
