"""Requests for samples that wait at a replay service, and the order in which they are served."""

from __future__ import annotations

import collections
import dataclasses
import time

from podrace.distributed.net.listener import Peer
from podrace.distributed.replay import replay_messages
from podrace.distributed.replay.served_tables import ServedTable
from podrace.tables.items import Draws, Signature


class SampleWindow:
  """Flow control: the samples that were sent to a client and that it has not acknowledged.

  Attributes:
    signatures: (number, signature) of each signature that the client knows, by id.
    newest_signature: the largest such number.
    unread: bytes of each answer that is not acknowledged.
    bytes: their sum.
    answered: samples sent in this session.
    sampled: items sent in this session.
    waiting: requests by number.
    parked: requests that left their queue until the client reads.
  """

  def __init__(self) -> None:
    self.signatures: dict[int, tuple[int, Signature]] = {}
    self.newest_signature = 0
    self.unread: collections.deque[int] = collections.deque()
    self.bytes = self.answered = 0
    self.sampled = 0
    self.waiting: dict[int, SampleRequest] = {}
    self.parked: dict[SampleRequest, None] = {}

  @property
  def is_full(self) -> bool:
    """Whether nothing more is sent before the client acknowledges."""
    return (
      self.bytes > replay_messages.MOST_BYTES or len(self.unread) >= replay_messages.MOST_UNREAD
    )


@dataclasses.dataclass(eq=False)
class SampleRequest:
  """A sample for which a client waits; ordered by deadline."""

  peer: Peer
  number: int
  served: ServedTable
  n: int
  at_least: int
  peek: bool
  end: float  # deadline, on time.monotonic's clock
  draws: Draws = dataclasses.field(default_factory=lambda: Draws([], []))
  since: float = dataclasses.field(default_factory=time.monotonic)
  over: bool = False  # answered, refused or dropped

  def __lt__(self, other: SampleRequest) -> bool:
    return self.end < other.end

  def timeout_message(self) -> str:
    """Return the reason why the request was not answered before its deadline."""
    table = self.served.table
    seconds = time.monotonic() - self.since
    why = table.reads.why_not(self.peek)
    return f'sample from table {table.name!r} timed out after {seconds:.3g} s: {why}'


class RequestQueue:
  """The requests for one table: of each client in their order, and the clients in turn.

  So a client with thousands of requests for large samples delays another client by one of them.
  """

  def __init__(self) -> None:
    self._by_peer: collections.OrderedDict[Peer, collections.OrderedDict[SampleRequest, None]] = (
      collections.OrderedDict()
    )
    self._count = 0

  def __len__(self) -> int:
    return self._count

  @property
  def first(self) -> SampleRequest:
    """The request that is served next; the queue must not be empty."""
    return next(iter(next(iter(self._by_peer.values()))))

  def add(self, request: SampleRequest) -> None:
    """Add a request as the last one of its client."""
    self._by_peer.setdefault(request.peer, collections.OrderedDict())[request] = None
    self._count += 1

  def discard(self, request: SampleRequest) -> None:
    """Remove a request, if it is in the queue."""
    requests = self._by_peer.get(request.peer)
    if requests is not None and request in requests:
      del requests[request]
      self._count -= 1
      if not requests:
        del self._by_peer[request.peer]

  def end_turn(self, peer: Peer) -> None:
    """Make a client the last one to be served."""
    if peer in self._by_peer:
      self._by_peer.move_to_end(peer)
