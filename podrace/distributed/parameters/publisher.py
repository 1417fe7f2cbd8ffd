"""Parameters from a learner to whoever acts: by version, when they have changed, whole or not at all.

publisher = Publisher('tcp://127.0.0.1:5561')       # in the learner's process
publisher.publish(version, [('dense/kernel', array), ...])
reader = Parameters('tcp://127.0.0.1:5561', max_staleness=30.0)     # in an acting one
version, leaves, _ = reader.get()

A version is one message. A client that has taken the last one is sent the newest; so slow ones take nothing
from the others, and versions that nobody has had time for are not sent. All clients are sent the
same memory. Versions with the same SHA-256 are not sent again.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from podrace.distributed.net import link, listener, messages, process_metrics
from podrace.distributed.net.announce import Announcement
from podrace.distributed.net.frame import Kind, WireError, packed, short, split
from podrace.distributed.net.link import Link
from podrace.distributed.net.listener import Listen, Listener, Peer, Serving
from podrace.distributed.net.safe_text import label
from podrace.distributed.parameters import leases
from podrace.tables.blocking import Closed

SERVICE = 'podrace parameters'
ACTING, REANALYSING = 'act', 'reanalyse'  # roles of clients
NEWEST = packed(96, 'NEWEST', int, str, list, arrays=1)  # version, SHA-256, leaves; their bytes
MOST_LEAVES, MOST_BYTES = 4096, 2**32 - 2**21
MOST_ENVIRONMENTS = 2**31  # of a run: they have numbers of 32 bits
_PLAIN = re.compile(r'[<>|][biufc]\d{1,2}')  # numpy's own types; it takes other text for Python
KEPT = 4  # versions besides the newest two, for clients that are still being sent them

log = logging.getLogger('podrace.distributed.replay')


class Stale(TimeoutError):
  """The parameters are older than allowed, and no newer ones came in time."""


class Published(NamedTuple):
  """One version."""

  version: int
  leaves: list[tuple[str, np.ndarray]]  # read-only
  sha256: str  # over paths, dtypes, shapes and bytes, in their order


class Version:
  """One version as it is sent: what it is, and the bytes of all leaves one after the other."""

  def __init__(self, number: int, leaves: Sequence[tuple[str, Any]]) -> None:
    arrays = [(path, np.asarray(x)) for path, x in leaves]
    for path, x in arrays:
      if x.dtype.kind not in 'biufcV' or x.dtype.hasobject:
        raise ValueError(f'parameter {path}: {x.dtype} is not made of numbers')
    self.number = number
    self.leaves = [[path, x.dtype.str if x.dtype.kind != 'V' else x.dtype.name, list(x.shape)]
                   for path, x in arrays]  # fmt: skip
    self.data = b''.join([np.ascontiguousarray(x).tobytes() for _, x in arrays])
    self.sha256 = digest(self.leaves, self.data)


def digest(leaves: list[Any], data: Any) -> str:
  """SHA-256 of leaves and of their bytes, in hexadecimal."""
  found = hashlib.sha256()
  for path, dtype, shape in leaves:
    found.update(f'{path}\0{dtype}\0{",".join(map(str, shape))}\0'.encode())
  found.update(data)
  return found.hexdigest()


# --- the learner's end ------------------------------------------------------------------------------


class Reader:
  """What the publisher knows of a client."""

  def __init__(self, role: Any) -> None:
    self.role = role
    self.versions = self.bytes = 0  # that it was sent
    self.has: Version | None = None  # the last one that it was sent
    self.sending = False  # some of that waits until it reads


class Publisher(listener.Handler):
  """Sends versions to clients, while it is open. `publish` may be called from any thread.

  Args:
    environments: of the run, which are lent to the acting processes among its clients, each for its session.
    program: of a learner, what else there is to report; is called by the publisher's thread.

  Attributes:
    address, reachable: with the port that it has; as others can use it.
    peers: its clients.

  Raises:
    SecurityError: see podrace.distributed.net.keys.
  """

  service, largest = SERVICE, messages.GUEST_BYTES
  kinds = messages.of_clients()

  def __init__(
    self,
    address: str,
    keys: Path | None = None,
    insecure: bool = False,
    peer_timeout: float = messages.SILENCE,
    announce: Announcement | None = None,
    environments: int = 0,
    program: Callable[[], dict[str, Any]] = dict,
  ) -> None:
    self._program = program
    self._leases = leases.Leases(environments)
    self._over = False
    self._before = self._newest = Version(-1, [])
    listen = Listen(address, keys, insecure, peer_timeout, announce)
    self.listener = Listener(listen, self, log.log)
    self._serving = Serving(self.listener)
    self._serving.start()
    self.address, self.reachable = self.listener.address, self.listener.reachable
    self.peers = self.listener.peers

  def __enter__(self) -> Publisher:
    return self  # it listens already

  def __exit__(self, *exc: object) -> None:
    self.close()

  @property
  def failure(self) -> str | None:
    """The traceback of what has ended its thread; None if nothing has."""
    return self._serving.failure

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
    if version <= self.number:
      raise ValueError(f'{version=} must be above {self.number}, which is published')
    new = Version(version, leaves)
    if len(new.leaves) > MOST_LEAVES or len(new.data) > MOST_BYTES:
      raise ValueError(
        f'{len(new.leaves)} leaves of {len(new.data):,} bytes are too many, at most {MOST_LEAVES} of '
        f'{MOST_BYTES:,}'
      )
    self._before, self._newest = self._newest, new
    self.listener.call(self._tell)

  @property
  def number(self) -> int:
    """Of the newest version, -1 if there is none."""
    return self._newest.number

  def clients(self, role: str) -> list[process_metrics.Measures]:
    """The clients that said to be this, by the numbers that they sent; those that say nothing act."""
    peers = list(self.peers)
    return [p.metrics for p in peers if p.state is not None and p.state.role == role]

  @property
  def waited_for(self) -> bool:
    """Whether somebody has a session, or waits for one."""
    return bool(self.peers) or any(guest.waits for guest in list(self.listener.guests))

  def finish(self) -> None:
    """The run is over, and its environments are nobody's: those that wait for some get sessions, to hear of it."""
    self._over = True

  def close(self) -> None:
    """Ends it; clients wait for another one at its address."""
    self._serving.stop()

  def _tell(self) -> None:
    self._let_go()
    for peer in list(self.peers):
      self._tell_one(peer)

  def _let_go(self) -> None:
    """Ends connections to those that read too slowly, where more than KEPT old versions wait for them."""
    reading = [p for p in self.peers if p.state.sending]
    old = {p.state.has for p in reading} - {self._before, self._newest}
    unwanted = sorted(old, key=lambda version: version.number)[KEPT:]
    for peer in reading:
      if peer.state.has in unwanted:
        self.listener.tell_gone(peer, 'it reads too slowly, others read older versions')

  def _tell_one(self, peer: Peer) -> None:
    """Sends the newest version, if a client has not been sent it and has read what it was sent."""
    reader, newest = peer.state, self._newest
    if newest.number < 0 or reader.sending or reader.has is newest:
      return
    data = newest.data if reader.has is None or reader.has.sha256 != newest.sha256 else b''
    reader.has = newest
    reader.versions += 1
    reader.bytes += len(data)
    self.listener.counts['bytes'] += len(data)
    self.listener.send(peer, NEWEST, newest.number, newest.sha256, newest.leaves, arrays=(data,))
    reader.sending = not peer.stream.closed and peer.stream.waiting

  # --- as a listener's handler

  def reasons_against(self, details: dict[str, Any]) -> list[str]:
    size, total = leases.asked(details)[0], self._leases.total
    if size <= total:
      return []
    return [f'this process wants to act in {size} environments, the run has {total} (--num-envs)']

  def why_wait(self, details: dict[str, Any]) -> str:
    size, wish = leases.asked(details)
    if not size or self._over or self._leases.find(size, wish):
      return ''
    return (
      f'this process is a spare: others act in the {self._leases.total} environments of the run. '
      f'It acts when {size} are free'
    )

  def welcome(self, peer: Peer, details: dict[str, Any]) -> dict[str, Any]:
    peer.state = Reader(details.get('role', ACTING))
    size, wish = leases.asked(details)
    if not size or self._over:
      self.listener.log(f'{peer.name} joins')
      return dict(first=wish) if size else {}
    lent = self._leases.lend(peer, size, wish)
    self.listener.log(f'{peer.name} joins, with environments {lent.start} to {lent.stop - 1}')
    return dict(first=lent.start)

  def welcomed(self, peer: Peer) -> None:
    self._tell_one(peer)

  def handle(self, peer: Peer, kind: Kind, fields: Sequence[Any], arrays: list[memoryview]) -> None:
    raise WireError(f'a {kind.name}, which clients of parameters do not send')

  def ping(self, peer: Peer, said: Any) -> int:
    return self.number

  def drained(self, peer: Peer) -> None:
    peer.state.sending = False
    self._tell_one(peer)

  def left(self, peer: Peer, reason: str, level: int) -> None:
    peer.state.sending = False
    self._leases.give_back(peer)

  def report(self) -> dict[str, Any]:
    return dict(
      self.listener.report(self._described),
      version=self.number,
      parameter_bytes=len(self._newest.data),
      program=self._program(),
    )

  def _described(self, peer: Peer) -> dict[str, Any]:
    reader, lent = peer.state, self._leases.held.get(peer, range(0))
    return dict(
      role=label(reader.role), first=lent.start, environments=len(lent),
      versions=reader.versions, bytes=reader.bytes,
    )  # fmt: skip


# --- the acting end ---------------------------------------------------------------------------------


class Parameters(link.Handler):
  """The newest parameters of a publisher, kept up to date by a thread of its own.

  Staleness is the time for which the version that is held has not been known to be the newest: since it was
  begun to be sent, or since the publisher last said so.

  Args:
    max_staleness: seconds; `get` waits while it is more. None for no bound.
    role: of this client, as the publisher counts its clients.
    environments: in which it acts; it waits for its session until so many of the run's are free.
    first: the number that the first of them should have.
    measure: the numbers that this process sends of itself; is called by a thread.

  Attributes:
    first: the number that the first of them has in this session, or had in the last one.
    changed: is notified when there is another version, or a session begins or ends.
    fetched: versions whose bytes were sent.

  Raises:
    SecurityError: see podrace.distributed.net.keys.
  """

  service, kinds = SERVICE, messages.of_listeners(NEWEST)

  def __init__(
    self,
    address: str,
    keys: Path | None = None,
    insecure: bool = False,
    max_staleness: float | None = None,
    role: str = ACTING,
    environments: int = 0,
    first: int = 0,
    measure: Callable[[], process_metrics.Measures] = dict,
  ) -> None:
    if max_staleness is not None and not max_staleness > 0:
      raise ValueError(f'{max_staleness=} must be positive')
    self.address, self.changed = address, threading.Condition()
    self._max_staleness = math.inf if max_staleness is None else max_staleness
    self._role = role
    self._environments, self.first, self._measure = environments, first, measure
    self._held: Published | None = None
    self._known = -1  # the newest version of which it knows
    self._begun_at = 0.0  # when a message began that is coming
    self._fresh_at = time.monotonic()  # when what is held was last known to be the newest
    self.fetched = 0
    keys = None if keys is None else Path(keys)
    self._link = Link(address, keys, insecure, self, self.changed)
    self._link.ping_every = self._max_staleness / 3
    self._link.start()

  @property
  def version(self) -> int:
    """The version that is held, -1 if there is none."""
    held = self._held
    return -1 if held is None else held.version

  @property
  def staleness(self) -> float:
    """In seconds."""
    return time.monotonic() - self._fresh_at

  @property
  def connected(self) -> bool:
    """Whether there is a session."""
    return self._link.session is not None

  def get(self, timeout: float | None = None) -> Published:
    """The newest version that is whole. Waits for the first one, and while it is too stale.

    Raises:
      Stale: if that took longer than `timeout` seconds; it says what is held, and what is known of.
      Closed: if this is.
      Refused: if the publisher does not take this client.
    """
    begun = time.monotonic()
    deadline = math.inf if timeout is None else begun + timeout
    said = False
    with self.changed:
      while (held := self._usable()) is None:
        now = time.monotonic()
        if self._link.waits and timeout is not None:
          deadline = now + timeout  # the publisher is there, and says what for
        if now >= deadline:
          raise Stale(f'{self._why()} and {timeout:g} s were not enough to get newer ones')
        if not (said or self._link.waits) and (self._held is not None or now - begun > 2.0):
          said = True
          log.warning('%s; waiting for newer ones', self._why())
        self.changed.wait(min(deadline - now, 1.0))
    if said:
      log.info('parameters of %s are fresh again: version %d', self.address, held.version)
    return held

  def _usable(self) -> Published | None:
    """What is held, if it may be used."""
    if self._link.closed:
      raise Closed(f'the parameters of {self.address} are closed')
    self._link.check()
    return None if self.is_stale else self._held

  @property
  def is_stale(self) -> bool:
    """Whether what is held must not be used: it is too old, or another process has this one's environments."""
    return self.staleness > self._max_staleness or self._link.waits

  def _why(self) -> str:
    if self._held is None:
      what = f'there are no parameters of {self.address} yet'
    else:
      what = (
        f'parameters of {self.address} are stale: version {self.version} is held, the newest known is '
        f'{self._known}, {self.staleness:.1f} s of {self._max_staleness:g} s allowed'
      )
    return f'{what} ({"connected" if self.connected else self._link.why})'

  def close(self) -> None:
    """Ends it; whatever waits raises Closed."""
    self._link.close()

  # --- as a link's handler

  def hello(self) -> dict[str, Any]:
    lent = dict(environments=self._environments, first=self.first) if self._environments else {}
    return {'role': self._role, **lent}

  def joined(self, details: dict[str, Any]) -> None:
    if not self._environments:
      return
    first = details.get('first')
    if type(first) is not int or not 0 <= first <= MOST_ENVIRONMENTS - self._environments:
      raise WireError(f'a welcome whose first environment is {short(first)}')
    self.first = first

  def metrics(self) -> process_metrics.Measures:
    return self._measure()

  def pong(self, details: Any) -> None:
    if type(details) is not int:
      raise WireError('a pong without a version')
    self._known = details
    if details == self.version:
      self._hold(self._held, time.monotonic())

  def memory(self, kind: Kind, fields: Sequence[Any], size: int) -> Any:
    """For a version's bytes, which are kept; they may be the same as those that are held."""
    self._begun_at = time.monotonic()
    version, sha256, leaves = fields
    self._known = version
    held = self._held is not None and self._held.sha256 == sha256
    expected = sum(d.itemsize * math.prod(shape) for _, d, shape in _specs(leaves))
    if size != expected and not (held and not size):
      raise WireError(f'version {version} in {size} bytes, expected {expected}')
    return np.empty(size, np.uint8)

  def handle(self, kind: Kind, fields: Sequence[Any], arrays: list[memoryview]) -> None:
    version, sha256, leaves = fields
    if self._held is not None and self._held.sha256 == sha256:
      new = self._held._replace(version=version)
    else:
      new = Published(version, _arrays(leaves, arrays[0]), sha256)
      self.fetched += 1
    self._hold(new, self._begun_at)

  def _hold(self, new: Published | None, fresh_at: float) -> None:
    with self.changed:
      self._held, self._fresh_at = new, fresh_at
      self.changed.notify_all()


def _arrays(leaves: list[Any], data: memoryview) -> list[tuple[str, np.ndarray]]:
  """Read-only arrays over a version's bytes."""
  specs = _specs(leaves)
  parts = split(data.toreadonly(), [d.itemsize * math.prod(shape) for _, d, shape in specs])
  try:
    return [(p, np.frombuffer(x, d).reshape(s)) for (p, d, s), x in zip(specs, parts, strict=True)]
  except (
    ValueError
  ) as e:  # more dimensions than numpy has, or a length beyond its numbers next to a 0
    raise WireError(f'leaves of shapes that cannot be ({e})') from None


def _specs(leaves: list[Any]) -> list[tuple[str, np.dtype, list[int]]]:
  """Paths, types and shapes of leaves; raises WireError if they are none."""
  found = []
  try:
    for path, name, shape in leaves:
      if type(shape) is not list or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f'a shape {str(shape)[:60]}')
      found.append((str(path), _dtype(name), shape))
  except (ValueError, TypeError) as e:
    raise WireError(f'leaves that are none ({e})') from None
  return found


def _dtype(name: Any) -> np.dtype:
  """Of its name; those that numpy lacks, such as bfloat16, are ml_dtypes'. Raises ValueError or TypeError for no name."""
  if type(name) is str and _PLAIN.fullmatch(name):
    return np.dtype(name)
  import ml_dtypes

  found = getattr(ml_dtypes, str(name), None)
  if not (isinstance(found, type) and issubclass(found, np.generic)):
    raise ValueError(f'{short(name)} is not made of numbers')
  return np.dtype(found)
