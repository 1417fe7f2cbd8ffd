"""The end of a service, whose network is served by one thread at a time.

A message that differs from docs/protocol.md ends the client's session, never the listener.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podrace.distributed.net import address as addresses
from podrace.distributed.net import descriptors, process_metrics, session_messages
from podrace.distributed.net.announce import Announcement
from podrace.distributed.net.channel import ConnectionClosed
from podrace.distributed.net.connections import ENDING_SECONDS, Peer
from podrace.distributed.net.loop import READ, Loop
from podrace.distributed.net.safe_text import Lines, Say
from podrace.distributed.net.sessions import ServiceHandler, Sessions
from podrace.system.threads import Worker

TICK = 0.2  # seconds between checks of deadlines
LEAST_SILENCE = 0.5  # seconds, as deadlines are checked every TICK
PAUSE = 1.0  # seconds between checks after which the process was stopped, or busy
REPORTED = 1000  # clients in a report, at most
FEW_FILES = 4096  # limit of open files below which there is a warning


@dataclasses.dataclass(frozen=True)
class Listen:
  """Where to listen, and to which clients.

  Attributes:
    peer_timeout: seconds of silence after which a client is dropped.
    announce: file to announce the address in.
  """

  address: str
  keys: Path | None = None
  insecure: bool = False
  peer_timeout: float = session_messages.SILENCE
  announce: Announcement | None = None

  def __post_init__(self) -> None:
    addresses.check_address(self.address, self.keys, self.insecure, '--listen', listens=True)
    if not LEAST_SILENCE <= self.peer_timeout < math.inf:
      raise ValueError(
        f'--peer-timeout must be at least {LEAST_SILENCE} seconds, not {self.peer_timeout}'
      )


class Listener:
  """Listens from `open` to `close`.

  Owner: the service, which calls `close`, or Serving.

  Args:
    say: receives the level and the text of each line to log.

  Attributes:
    peers: clients with a session, oldest first.
    guests: connections without a session, longest silent first.
    address: with the port.
    counts: of events, by name.
    send, drop, cut, tell_gone, blame, unexpected: see Sessions. For the thread that serves.
    wake, later, call, do_calls: see Loop.

  Raises:
    SecurityError: for invalid keys; of `open` also for the address.
    UsageError: of `open`, if the address cannot be announced.
  """

  def __init__(self, listen: Listen, handler: ServiceHandler, say: Say) -> None:
    self.listen, self.handler, self.address = listen, handler, listen.address
    self.lines = lines = Lines(say)
    self.log, self.counts = lines.log, lines.counts
    self._loop = loop = Loop()
    self.wake, self.later = loop.wake, loop.later
    self.call, self.do_calls = loop.call, loop.do_calls
    self.sessions = sessions = Sessions(handler, loop, listen.keys, listen.peer_timeout, lines)
    self.send, self.drop, self.cut = sessions.send, sessions.drop, sessions.cut
    self.tell_gone = sessions.tell_gone
    self.blame, self.unexpected = sessions.blame, sessions.unexpected
    self._connections = sessions.connections
    self.peers, self.guests = sessions.peers, sessions.connections.guests
    self._unread: dict[Peer, None] = {}  # with frames that are read, but not handled
    self._ticked = time.monotonic()

  def open(self) -> None:
    """Start to listen."""
    files = descriptors.raise_limit()
    try:
      self.address = self._connections.open(self.listen.address)
      if files < FEW_FILES:
        self.log(
          f'this process may have {files:,} files open, enough for '
          f'{self._connections.share.sessions:,} clients: `ulimit -n {descriptors.FILES}` before '
          'it is started allows more',
          logging.WARNING, always=True,
        )  # fmt: skip
      if self.listen.announce is not None:
        self.listen.announce.make(self.reachable)
    except BaseException:
      self.close()
      raise
    self._ticked = time.monotonic()

  def close(self) -> None:
    """End all connections at once, without the goodbye of `end`. No thread may serve any more."""
    self.sessions.close()
    self._loop.close()

  @property
  def reachable(self) -> str:
    """The address for clients."""
    return addresses.reachable(self.address)

  def turn(self, seconds: float) -> None:
    """Wait up to `seconds` for messages, and handle them."""
    self._poll(seconds)
    self._check_deadlines()

  def _poll(self, seconds: float) -> None:
    unread, self._unread = self._unread, {}
    ready = self._loop.wait(0.0 if unread else seconds)
    self.do_calls()  # first, as they may be older than the messages
    for key, events in ready:
      if type(key.data) is Peer:
        unread.pop(key.data, None)
        self.serve(key.data, events)
      else:
        self._connections.accept()
    for peer in unread:
      self.serve(peer, READ)
    self.do_calls()
    self.handler.turned()

  def serve(self, peer: Peer, events: int) -> None:
    """Read from and write to the socket of a client, as `events` allow."""
    try:
      if self._connections.serve(peer, events):
        self.sessions.written(peer)
    except ConnectionClosed:
      self.sessions.lost(peer)
    except Exception as e:
      self.blame(peer, e)
    if peer.stream.reader.unread:
      self._unread[peer] = None

  def _check_deadlines(self) -> None:
    """Check deadlines every TICK seconds."""
    now = time.monotonic()
    if (passed := now - self._ticked) <= TICK:
      return
    if passed > PAUSE:  # no message was read in this time
      self.sessions.forgive(passed, now)
    self.sessions.tick(now)
    self.handler.tick(now)
    self.lines.tick(now)
    self._ticked = time.monotonic()

  def end(self, complete: bool, reason: str, seconds: float) -> None:
    """Tell all clients the reason of the end, and wait up to `seconds` for them to leave."""
    self.sessions.end(complete, reason)
    until = time.monotonic() + seconds
    while self.peers and (left := until - time.monotonic()) > 0:
      self._poll(left)

  def report(self, describe: Callable[[Peer], dict[str, Any]]) -> dict[str, Any]:
    """Return the common part of a report; `describe` returns further entries of a client."""
    now = time.monotonic()
    clients = [
      dict(
        name=p.name,
        seconds=round(now - p.since, 3),
        last_seen_s=round(now - p.last_seen, 3),
        **describe(p),
        metrics=p.metrics,
      )
      for p in list(self.peers)[:REPORTED]
    ]
    return dict(
      service=self.handler.service,
      counts=dict(self.counts),
      clients=clients,
      more_clients=max(len(self.peers) - REPORTED, 0),
      resident_mb=process_metrics.resident_mb(),
    )


class Serving:
  """A thread that serves a listener.

  Owner: the service, which calls `start` and `stop`.
  Ends when: `ask_to_stop` or `stop` is called, or an exception ends it: see `failure`.

  Args:
    wait: returns the seconds until the handler's `turned` is due without messages.
    before_end: called by the thread at the end, before clients hear of it.

  Attributes:
    ended: set at the end of the thread.
  """

  def __init__(
    self,
    listener: Listener,
    wait: Callable[[], float] = lambda: TICK,
    before_end: Callable[[], None] = lambda: None,
  ) -> None:
    self._listener, self._wait, self._before_end = listener, wait, before_end
    self._stop = threading.Event()
    self.ended = threading.Event()
    self.worker: Worker | None = None

  def start(self) -> None:
    """Start to listen."""
    self._listener.open()
    self.worker = Worker(self._listener.handler.service, self._main, self.ended.set)

  @property
  def failure(self) -> str | None:
    """Traceback of the exception that ended the thread, or None."""
    return (self.worker and self.worker.failure) or None

  def ask_to_stop(self) -> None:
    """Have the thread end; `ended` is set then."""
    self._stop.set()
    self._listener.wake()

  def stop(self) -> None:
    """End the thread, and wait for it. From any thread; repeated calls do no harm."""
    self.ask_to_stop()
    if self.worker is not None:
      self.worker.wait()
      self._listener.close()

  def _main(self) -> None:
    listener = self._listener
    with contextlib.ExitStack() as last:  # each step, even if another one fails
      goodbye = f'{listener.handler.service} has ended'
      last.callback(listener.end, False, goodbye, ENDING_SECONDS)
      last.callback(self._before_end)
      try:
        while not self._stop.is_set():
          listener.turn(min(self._wait(), TICK))
      except BaseException:
        listener.log(f'the service failed:\n{traceback.format_exc()}', logging.ERROR, always=True)
        raise
