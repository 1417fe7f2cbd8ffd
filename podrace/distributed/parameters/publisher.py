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

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podrace.distributed.net import listener, process_metrics, session_messages
from podrace.distributed.net.announce import Announcement
from podrace.distributed.net.frame import Kind, WireError
from podrace.distributed.net.listener import Listen, Listener, Peer, Serving
from podrace.distributed.net.safe_text import label
from podrace.distributed.parameters import leases
from podrace.distributed.parameters.parameter_messages import NEWEST, SERVICE, digest

ACTING, REANALYSING = 'act', 'reanalyse'  # roles of clients
MOST_LEAVES, MOST_BYTES = 4096, 2**32 - 2**21
MOST_ENVIRONMENTS = 2**31  # of a run: they have numbers of 32 bits
KEPT = 4  # versions besides the newest two, for clients that are still being sent them

log = logging.getLogger('podrace.distributed.replay')


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


# --- the learner's end ------------------------------------------------------------------------------


class Reader:
  """What the publisher knows of a client."""

  def __init__(self, role: Any) -> None:
    self.role = role
    self.versions = self.bytes = 0  # that it was sent
    self.has: Version | None = None  # the last one that it was sent
    self.sending = False  # some of that waits until it reads


class Publisher(listener.ServiceHandler):
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

  service, largest = SERVICE, session_messages.GUEST_BYTES
  kinds = session_messages.of_clients()

  def __init__(
    self,
    address: str,
    keys: Path | None = None,
    insecure: bool = False,
    peer_timeout: float = session_messages.SILENCE,
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
