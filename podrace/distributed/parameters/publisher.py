"""Publishes a learner's parameters to acting processes, version by version.

A version is one message, so a reader has all of it or nothing. A reader that has taken its last
message is sent the newest version. So a slow reader delays no other one, and skips versions. All
readers are sent the same memory. The bytes of a version are not sent again if its SHA-256 is that
of the last one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podrace.distributed.net import listener, process_metrics, session_messages
from podrace.distributed.net.announce import Announcement
from podrace.distributed.net.frame import Kind, WireError, short
from podrace.distributed.net.listener import Listen, Listener, Peer, Serving
from podrace.distributed.net.safe_text import label
from podrace.distributed.parameters import leases
from podrace.distributed.parameters.parameter_messages import ACTING, NEWEST, SERVICE, digest

MOST_LEAVES, MOST_BYTES = 4096, 2**32 - 2**21
KEPT = 4  # versions besides the newest two, for readers to which they are still being sent

log = logging.getLogger('podrace.distributed.parameters')


class ParameterVersion:
  """A version as it is sent.

  Attributes:
    leaves: [path, dtype, shape] of each.
    data: the bytes of all leaves one after the other.
  """

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


class ReaderState:
  """The state of a reader's session.

  Attributes:
    versions, bytes: that it was sent.
    last: the last version that it was sent.
    sending: a part of that version waits until the reader reads.
  """

  def __init__(self, role: Any) -> None:
    self.role = role
    self.versions = self.bytes = 0
    self.last: ParameterVersion | None = None
    self.sending = False


class Publisher(listener.ServiceHandler):
  """Sends versions to readers. `publish` may be called from any thread.

  *Owner*: the caller, by `with` or `close`. A thread serves from construction on.
  *Ends when*: closed, or the thread fails.
  *Raises*: `publish` raises RuntimeError if the thread has failed.

  Example:
    with Publisher('tcp://127.0.0.1:5561') as publisher:  # in the learner's process
      publisher.publish(1, [('dense/kernel', array)])
    reader = Parameters('tcp://127.0.0.1:5561', max_staleness=30.0)  # in an acting process
    version, leaves, _ = reader.get()

  Args:
    address: to listen at.
    keys: a directory with the learner's keys, needed beyond this machine.
    insecure: no keys, beyond this machine.
    peer_timeout: seconds of silence after which a reader's session ends.
    announce: how the address is announced.
    environments: of the run. Each acting process leases some for its session.
    program: returns the learner's part of a report. Called by the publisher's thread.
    differences: returns a line for each setting in which a reader's record is of another run.

  Attributes:
    address: with the port that was chosen.
    reachable: the address for other machines.
    peers: readers with a session.

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
    differences: Callable[[str], list[str]] = lambda record: [],
  ) -> None:
    self._program, self._differences = program, differences
    self.leases = leases.Leases(environments)
    self._over = False
    self._before = self._newest = ParameterVersion(-1, [])
    listen = Listen(address, keys, insecure, peer_timeout, announce)
    self.listener = Listener(listen, self, log.log)
    self._serving = Serving(self.listener)
    self._serving.start()
    self.address, self.reachable = self.listener.address, self.listener.reachable
    self.peers = self.listener.peers

  def __enter__(self) -> Publisher:
    return self  # listening already

  def __exit__(self, *exc: object) -> None:
    self.close()

  @property
  def failure(self) -> str | None:
    """The traceback of the exception that ended the thread, or None."""
    return self._serving.failure

  def publish(self, version: int, leaves: Sequence[tuple[str, np.ndarray]]) -> None:
    """Publish a new version.

    Args:
      version: a number above all published ones.
      leaves: (path, array). The arrays are copied.

    Raises:
      ValueError: the version is not above the last one, or a leaf is not made of numbers.
      RuntimeError: the publisher's thread has failed.
    """
    if self.failure:
      raise RuntimeError(f'the publisher at {self.address} has failed:\n{self.failure}')
    if version <= self.number:
      raise ValueError(f'{version=} must be above {self.number}, which is published')
    new = ParameterVersion(version, leaves)
    if len(new.leaves) > MOST_LEAVES or len(new.data) > MOST_BYTES:
      raise ValueError(
        f'{len(new.leaves)} leaves of {len(new.data):,} bytes are too many, at most {MOST_LEAVES} '
        f'of {MOST_BYTES:,}'
      )
    self._before, self._newest = self._newest, new
    self.listener.call(self._send_newest)

  @property
  def number(self) -> int:
    """The number of the newest version, -1 if there is none."""
    return self._newest.number

  def clients(self, role: str) -> list[process_metrics.Measures]:
    """Return the metrics of each reader with this role; readers act by default."""
    return [p.metrics for p in list(self.peers) if p.state.role == role]

  @property
  def waited_for(self) -> bool:
    """Whether a reader has a session, or waits for one."""
    return bool(self.peers) or any(guest.waits for guest in list(self.listener.guests))

  def finish(self) -> None:
    """End the run: processes that wait for environments get sessions, in which they hear of it."""
    self._over = True

  def close(self) -> None:
    """Stop serving. Readers wait for another publisher at its address."""
    self._serving.stop()

  def _send_newest(self) -> None:
    self._drop_slow_readers()
    for peer in list(self.peers):
      self._send_newest_to(peer)

  def _drop_slow_readers(self) -> None:
    """End sessions of slow readers, so that at most KEPT old versions are in memory."""
    reading = [p for p in self.peers if p.state.sending]
    old = {p.state.last for p in reading} - {self._before, self._newest}
    unwanted = sorted(old, key=lambda version: version.number)[KEPT:]
    for peer in reading:
      if peer.state.last in unwanted:
        self.listener.tell_gone(peer, 'it reads too slowly, others read older versions')

  def _send_newest_to(self, peer: Peer) -> None:
    """Send the newest version, unless the reader was sent it, or has not read the last one."""
    reader, newest = peer.state, self._newest
    if newest.number < 0 or reader.sending or reader.last is newest:
      return
    data = newest.data if reader.last is None or reader.last.sha256 != newest.sha256 else b''
    reader.last = newest
    reader.versions += 1
    reader.bytes += len(data)
    self.listener.counts['bytes'] += len(data)
    self.listener.send(peer, NEWEST, newest.number, newest.sha256, newest.leaves, arrays=(data,))
    reader.sending = not peer.stream.closed and peer.stream.waiting

  # --- the listener's handler

  def reasons_against(self, details: dict[str, Any]) -> list[str]:
    """Refuse a process of another run, or that requests more environments than the run has.

    It is refused also if it would wait: a spare with other settings could not take over.
    """
    size, total = leases.read_request(details)[0], self.leases.total
    if size > total:
      return [f'this process wants to act in {size} environments, the run has {total} (--num-envs)']
    if not isinstance(there := details.get('record', ''), str):
      return [f'its record is {short(there)}, expected a text']
    return self._differences(there) if there else []

  def why_wait(self, details: dict[str, Any]) -> str:
    """Return why a process must wait for a session, or ''."""
    size, wish = leases.read_request(details)
    if not size or self._over or self.leases.find(size, wish):
      return ''
    return (
      f'this process is a spare: others act in the {self.leases.total} environments of the run. '
      f'It acts when {size} are free'
    )

  def welcome(self, peer: Peer, details: dict[str, Any]) -> dict[str, Any]:
    """Begin a session, with a lease of environments if it was requested."""
    peer.state = ReaderState(details.get('role', ACTING))
    size, wish = leases.read_request(details)
    if not size or self._over:
      self.listener.log(f'{peer.name} joins')
      return dict(first=wish) if size else {}
    lent = self.leases.lend(peer, size, wish)
    self.listener.log(f'{peer.name} joins, with environments {lent.start} to {lent.stop - 1}')
    return dict(first=lent.start)

  def welcomed(self, peer: Peer) -> None:
    """Send the newest version to a new reader."""
    self._send_newest_to(peer)

  def handle(self, peer: Peer, kind: Kind, fields: Sequence[Any], arrays: list[memoryview]) -> None:
    """Refuse any message."""
    raise WireError(f'a {kind.name}, which clients of parameters do not send')

  def ping(self, peer: Peer, said: Any) -> int:
    """Return the newest version, for PONG."""
    return self.number

  def drained(self, peer: Peer) -> None:
    """Send the next version to a reader that has read the last one."""
    peer.state.sending = False
    self._send_newest_to(peer)

  def left(self, peer: Peer, reason: str, level: int) -> None:
    """End a session and its lease."""
    peer.state.sending = False
    self.leases.give_back(peer)

  def report(self) -> dict[str, Any]:
    """Return the details of REPORT."""
    return dict(
      self.listener.report(self._reader_report),
      version=self.number,
      parameter_bytes=len(self._newest.data),
      program=self._program(),
    )

  def _reader_report(self, peer: Peer) -> dict[str, Any]:
    reader, lease = peer.state, self.leases.held.get(peer, range(0))
    return dict(
      role=label(reader.role),
      first=lease.start,
      environments=len(lease),
      versions=reader.versions,
      bytes=reader.bytes,
    )
