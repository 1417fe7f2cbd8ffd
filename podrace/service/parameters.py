"""Parameters from a learner to whoever acts: by version, when they have changed, whole or not at all.

publisher = Publisher('tcp://127.0.0.1:5561')       # in the learner's process
publisher.publish(version, [('dense/kernel', array), ...])
reader = Parameters('tcp://127.0.0.1:5561', max_staleness=30.0)     # in an acting one
version, leaves, _ = reader.get()

The publisher tells of a new version; who wants it asks for its pieces, a few at a time, so that slow ones
take nothing from the others. A version that is being read is read to its end, however many are published
meanwhile; the publisher keeps a few such versions. Versions with the same SHA-256 are not sent again.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from podrace.remote.hub import PEER_SECONDS, Listen
from podrace.remote.wire import WireError, checksum, fields
from podrace.service import wire
from podrace.service.link import Link
from podrace.service.router import Peer, Router
from podrace.tables.waiting import Closed

PIECE_BYTES = 2**20
AHEAD = 4  # pieces that are asked for ahead of time
ACTING, REANALYSING = 'act', 'reanalyse'  # roles of clients
MOST_LEAVES, MOST_BYTES = 4096, 2**36
KEPT = 4  # versions besides the newest two, for who is still reading them
READING_SECONDS = 60.0  # since somebody last asked for a piece

log = logging.getLogger('podrace.service')


class Stale(TimeoutError):
  """The parameters are older than allowed, and no newer ones came in time."""


class Published(NamedTuple):
  """One version."""

  version: int
  leaves: list[tuple[str, np.ndarray]]  # read-only
  sha256: str  # over paths, dtypes, shapes and bytes, in their order


class _Version:
  """One version as it is sent: what it is, and the bytes of all leaves one after the other."""

  def __init__(self, version: int, leaves: Sequence[tuple[str, Any]]) -> None:
    arrays = [(path, np.asarray(x)) for path, x in leaves]
    for path, x in arrays:
      if x.dtype.kind not in 'biufcV' or x.dtype.hasobject:
        raise ValueError(f'parameter {path}: {x.dtype} is not made of numbers')
    self.version = version
    self.told = [[path, x.dtype.str if x.dtype.kind != 'V' else x.dtype.name, list(x.shape)]
                 for path, x in arrays]  # fmt: skip
    self.data = b''.join([np.ascontiguousarray(x).tobytes() for _, x in arrays])
    self.sha256 = digest(self.told, self.data)


def digest(told: list[Any], data: Any) -> str:
  """SHA-256 of leaves and of their bytes, in hexadecimal."""
  found = hashlib.sha256()
  for path, dtype, shape in told:
    found.update(f'{path}\0{dtype}\0{",".join(map(str, shape))}\0'.encode())
  found.update(data)
  return found.hexdigest()


# --- the learner's end ------------------------------------------------------------------------------


class _Reader:
  """What the publisher knows of a client."""

  def __init__(self, role: Any) -> None:
    self.role = role
    self.versions = self.bytes = 0  # that it was sent
    self.reading: _Version | None = None
    self.asked_at = 0.0


class Publisher(Router):
  """Tells clients of versions, while it is open. `publish` may be called from any thread.

  Raises:
    SecurityError: see podrace.remote.security.
  """

  service = wire.PARAMETERS

  def __init__(
    self,
    address: str,
    keys: Path | None = None,
    insecure: bool = False,
    peer_timeout: float = PEER_SECONDS,
  ) -> None:
    super().__init__(Listen(address, keys, insecure, peer_timeout), log.log)
    self._versions: list[_Version] = []  # the newest two
    self.start()

  def __enter__(self) -> Publisher:
    return self  # it listens already

  def publish(self, version: int, leaves: Sequence[tuple[str, np.ndarray]]) -> None:
    """Makes a version the newest one.

    Args:
      version: above all that were published before.
      leaves: (path, array), which are copied.

    Raises:
      ValueError: if the version is not above the others, or a leaf is not made of numbers.
      RuntimeError: if the publisher's thread has failed.
    """
    if self.failure:
      raise RuntimeError(f'the publisher at {self.address} has failed:\n{self.failure}')
    if version <= (self._versions[-1].version if self._versions else -1):
      newest = self._versions[-1].version if self._versions else -1
      raise ValueError(f'{version=} must be above {newest}, which is published')
    new = _Version(version, leaves)
    if len(new.told) > MOST_LEAVES or len(new.data) > MOST_BYTES:
      raise ValueError(f'{len(new.told)} leaves of {len(new.data)} bytes are too many')
    self._versions = [*self._versions[-1:], new]
    self.call(self._tell)

  def clients(self, role: str) -> int:
    """How many clients there are that said to be this; those that say nothing act."""
    readers = [peer.state for peer in list(self.peers.values())]
    return sum(reader is not None and reader.role == role for reader in readers)

  def close(self) -> None:
    """Ends it; clients wait for another one at its address."""
    self.stop()

  def _tell(self) -> None:
    self._let_go()
    for peer in list(self.peers.values()):
      self._tell_one(peer)

  def _let_go(self) -> None:
    """Of versions that nobody reads any more, and of all but KEPT; the nearest to their end stay."""
    readers: list[_Reader] = [p.state for p in self.peers.values()]
    for reader in readers:
      if time.monotonic() - reader.asked_at > READING_SECONDS:
        reader.reading = None
    current = {v.version for v in self._versions}
    old = sorted({r.reading.version for r in readers if r.reading is not None} - current)
    for reader in readers:
      if reader.reading is not None and reader.reading.version in old[KEPT:]:
        reader.reading = None

  def _tell_one(self, peer: Peer) -> None:
    if self._versions:
      newest = self._versions[-1]
      told = [newest.sha256, len(newest.data), newest.told]
      self.send(peer.address, wire.NEWEST, peer.session, newest.version, told)

  def welcome(self, peer: Peer, told: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    peer.state = _Reader(told.get('role', ACTING))
    self.call(lambda: self._tell_one(peer))
    return {}, []

  def pong(self, peer: Peer) -> int:
    """The newest version, -1 if there is none."""
    return self._versions[-1].version if self._versions else -1

  def handle(self, peer: Peer, header: list[Any], frames: list[Any]) -> None:
    if header[0] != wire.FETCH:
      raise WireError(f'a header of kind {header[0]}, which clients have not')
    _, version, start = fields(header, int, int, int)
    wire.check_frames(frames, 0, 0)
    reader: _Reader = peer.state
    kept = self._versions if reader.reading is None else [*self._versions, reader.reading]
    found = next((v for v in kept if v.version == version), None)
    if found is None:  # it is gone: the client is told so, and of the newest
      self._tell_one(peer)
      self.send(peer.address, wire.PIECE, peer.session, version, start, checksum([]))
      return
    if start >= len(found.data):
      raise WireError(f'a wish for byte {start} of {len(found.data)}')
    piece = memoryview(found.data)[start : start + PIECE_BYTES]
    reader.reading = found if start + len(piece) < len(found.data) else None
    reader.asked_at = time.monotonic()
    reader.versions += start == 0
    reader.bytes += len(piece)
    self.counts['bytes'] += len(piece)
    self.send(
      peer.address, wire.PIECE, peer.session, version, start, checksum([piece]), frames=[piece]
    )

  def told_of(self, peer: Peer) -> dict[str, Any]:
    return dict(versions=peer.state.versions, bytes=peer.state.bytes)

  def report(self) -> dict[str, Any]:
    newest = self._versions[-1] if self._versions else None
    return dict(
      super().report(),
      version=newest.version if newest else -1,
      parameter_bytes=len(newest.data) if newest else 0,
    )


# --- the acting end ---------------------------------------------------------------------------------


class _Fetch:
  """A version that is being read."""

  def __init__(self, version: int, sha256: str, size: int, told: list[Any]) -> None:
    self.version, self.sha256, self.size, self.told = version, sha256, size, told
    self.data = bytearray(size)
    self.asked = self.have = 0  # bytes
    self.passed_at: float | None = None  # when a newer one was announced


class Parameters(Link):
  """The newest parameters of a publisher, kept up to date by a thread of its own.

  Staleness is the time for which the version that is held has not been known to be the newest: since a newer
  one was announced, or since the publisher was last heard of.

  Args:
    max_staleness: seconds; `get` waits while it is more. None for no bound.
    role: of this client, as the publisher counts its clients.

  Raises:
    SecurityError: see podrace.remote.security.
  """

  service = wire.PARAMETERS

  def __init__(
    self,
    address: str,
    keys: Path | None = None,
    insecure: bool = False,
    max_staleness: float | None = None,
    role: str = ACTING,
  ) -> None:
    if max_staleness is not None and not max_staleness > 0:
      raise ValueError(f'{max_staleness=} must be positive')
    keys = None if keys is None else Path(keys)
    super().__init__(address, keys, insecure, threading.Condition())
    self._max_staleness, self._role = max_staleness, role
    if max_staleness is not None:
      self.ping_every = max_staleness / 3
    self._held: Published | None = None
    self._fetch: _Fetch | None = None
    self._next: tuple[int, str, int, list[Any]] | None = None  # announced since that began
    self._newest = -1  # version that is known of
    self._fresh_at = time.monotonic()  # when what is held was last known to be the newest
    self.fetched = 0  # versions whose bytes were sent
    self._thread.start()

  @property
  def version(self) -> int:
    """The version that is held, -1 if there is none."""
    held = self._held
    return -1 if held is None else held.version

  @property
  def staleness(self) -> float:
    """In seconds."""
    return time.monotonic() - self._fresh_at

  def get(self, timeout: float | None = None) -> Published:
    """The newest version that is whole. Waits for the first one, and while it is too stale.

    Raises:
      Stale: if that took longer than `timeout` seconds; it says what is held, and what is known of.
      Closed: if this is.
    """
    begun = time.monotonic()
    deadline = math.inf if timeout is None else begun + timeout
    told = False
    with self.changed:
      while True:
        if self.closed:
          raise Closed(f'the parameters of {self.address} are closed')
        self.check()
        if self._held is not None and self._is_fresh():
          break
        now = time.monotonic()
        if now >= deadline:
          raise Stale(f'{self._why()} and {timeout:g} s were not enough to get newer ones')
        if not told and (self._held is not None or now - begun > 2.0):
          told = True
          log.warning('%s; waiting for newer ones', self._why())
        self.changed.wait(min(deadline - now, 1.0))
      if told:
        log.info('parameters of %s are fresh again: version %d', self.address, self.version)
      return self._held

  def _is_fresh(self) -> bool:
    return self._max_staleness is None or self.staleness <= self._max_staleness

  def _why(self) -> str:
    if self._held is None:
      what = f'there are no parameters of {self.address} yet'
    else:
      what = (
        f'parameters of {self.address} are stale: version {self.version} is held, the newest known is '
        f'{self._newest}, {self.staleness:.1f} s of {self._max_staleness:g} s allowed'
      )
    return f'{what} ({"connected" if self.session is not None else self.why})'

  # --- the thread

  def hello(self) -> dict[str, Any]:
    return {'role': self._role}

  def lost(self) -> None:
    self._fetch = self._next = None

  def pong(self, told: Any) -> None:
    if type(told) is not int:
      raise WireError('a pong without a version')
    if told == self.version:
      self._fresh()

  def _fresh(self, at: float | None = None) -> None:
    with self.changed:
      self._fresh_at = time.monotonic() if at is None else at
      self.changed.notify_all()

  def handle(self, header: list[Any], frames: list[Any]) -> None:
    if header[0] == wire.NEWEST:
      _, version, told = fields(header, int, int, list)
      self._announced(version, told)
    elif header[0] == wire.PIECE:
      _, version, start, crc = fields(header, int, int, int, int)
      wire.check_frames(frames, min(len(frames), 1), crc)
      if self._fetch is not None and self._fetch.version == version:
        if frames:
          self._arrived(self._fetch, start, frames[0])
        else:  # it is gone
          self._fetch = None
          self._fetch_next()
    else:
      raise WireError(f'a header of kind {header[0]}')

  def _announced(self, version: int, told: list[Any]) -> None:
    try:
      sha256, size, leaves = told
      if type(sha256) is not str or type(size) is not int or not 0 <= size <= MOST_BYTES:
        raise ValueError('sha256 or size')
      if sum(wire.row_bytes(_dtype(d), shape) for _, d, shape in leaves) != size:
        raise ValueError('leaves of another size')
    except (ValueError, TypeError) as e:
      raise WireError(f'an announcement that is none ({e})') from None
    self._newest = version
    if self._held is not None and self._held.sha256 == sha256:
      self._fetch = self._next = None
      self._hold(self._held._replace(version=version))
    elif self._fetch is None or self._fetch.version != version:
      self._next = version, sha256, size, leaves
      if self._fetch is None:
        self._fetch_next()
      elif self._fetch.passed_at is None:
        self._fetch.passed_at = time.monotonic()

  def _fetch_next(self) -> None:
    """Begins with the newest, unless it is what is held."""
    newest, self._next = self._next, None
    if newest is None:
      return
    version, sha256, size, leaves = newest
    if self._held is not None and self._held.sha256 == sha256:
      self._hold(self._held._replace(version=version))
    else:
      self._fetch = _Fetch(version, sha256, size, leaves)
      self._ask()

  def _ask(self) -> None:
    fetch = self._fetch
    assert fetch is not None
    if fetch.size == 0:
      self._complete(fetch)
    while fetch.asked < min(fetch.size, fetch.have + AHEAD * PIECE_BYTES):
      if not self.send(wire.FETCH, self.session, fetch.version, fetch.asked):
        return
      fetch.asked += PIECE_BYTES

  def _arrived(self, fetch: _Fetch, start: int, piece: Any) -> None:
    if start != fetch.have or len(piece) != min(PIECE_BYTES, fetch.size - start):
      raise WireError(f'bytes {start} to {start + len(piece)} of {fetch.size}, after {fetch.have}')
    fetch.data[start : start + len(piece)] = piece
    fetch.have += len(piece)
    if fetch.have == fetch.size:
      self._complete(fetch)
    else:
      self._ask()

  def _complete(self, fetch: _Fetch) -> None:
    if (came := digest(fetch.told, fetch.data)) != fetch.sha256:
      raise WireError(f'version {fetch.version} with SHA-256 {came}, {fetch.sha256} was announced')
    self._fetch = None
    data, at, leaves = memoryview(bytes(fetch.data)), 0, []
    for path, name, shape in fetch.told:
      size = wire.row_bytes(_dtype(name), shape)
      leaves.append((path, np.frombuffer(data[at : at + size], _dtype(name)).reshape(shape)))
      at += size
    self.fetched += 1
    self._hold(Published(fetch.version, leaves, fetch.sha256), fetch.passed_at)
    self._fetch_next()

  def _hold(self, new: Published, fresh_at: float | None = None) -> None:
    self._held = new
    self._fresh(fresh_at)


def _dtype(name: str) -> np.dtype:
  """Of its name; those that numpy lacks, such as bfloat16, are ml_dtypes'."""
  try:
    dtype = np.dtype(name)
  except TypeError:
    import ml_dtypes

    dtype = np.dtype(getattr(ml_dtypes, str(name), None))
  if dtype.hasobject:
    raise ValueError(f'{name!r} is not made of numbers')
  return dtype
