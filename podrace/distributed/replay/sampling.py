"""Samples that clients of a replay service wait for, and what they have been sent of them."""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
import time
from collections.abc import Sequence
from typing import Any

from podrace.distributed.net.frame import WireError
from podrace.distributed.net.listener import Listener, Peer
from podrace.distributed.replay import replay_messages
from podrace.distributed.replay.sample_frames import sample_frames
from podrace.distributed.replay.served_tables import Entry, Registry
from podrace.distributed.replay.waiting import RequestQueue
from podrace.tables.items import Draws, Signature

REQUESTS = 4096  # samples that one client waits for
SIGNATURES = 1024  # that one client is sent; from then on they are sent with other numbers
SERVE_SECONDS = 0.02  # after which other messages are looked at, before further samples are drawn
UNREAD_BYTES = 2**32  # of samples that all clients together were sent and have not said to have


class Reading:
  """What a client has been sent of samples, and has not yet said to have."""

  def __init__(self) -> None:
    self.signatures: dict[int, tuple[int, Signature]] = {}  # by id, with their numbers
    self.newest_signature = 0
    self.unread: collections.deque[int] = collections.deque()  # bytes of answers
    self.bytes = self.answered = 0
    self.sampled = 0  # items
    self.waiting: dict[int, Request] = {}
    self.parked: dict[Request, None] = {}  # those that wait until this client has read

  @property
  def full(self) -> bool:
    """Whether it is sent no more before it says what it has."""
    return (
      self.bytes > replay_messages.MOST_BYTES or len(self.unread) >= replay_messages.MOST_UNREAD
    )


@dataclasses.dataclass(eq=False)
class Request:
  """A sample that a client waits for."""

  peer: Peer
  number: int
  entry: Entry
  n: int
  least: int
  peek: bool
  end: float
  draws: Draws = dataclasses.field(default_factory=lambda: Draws([], []))
  since: float = dataclasses.field(default_factory=time.monotonic)
  over: bool = False

  def __lt__(self, other: Request) -> bool:
    return self.end < other.end

  @property
  def queue(self) -> RequestQueue:
    """Where it waits."""
    return self.entry.peekers if self.peek else self.entry.readers

  def why_it_waits(self) -> str:
    """What keeps it waiting, after the time that it had."""
    table = self.entry.table
    seconds = time.monotonic() - self.since
    return f'sample from table {table.name!r} timed out after {seconds:.3g} s: {table.reads.why_not(self.peek)}'


class Sampling:
  """What clients read. A call that would wait in the process waits here in a queue, so nobody holds up anybody else."""

  def __init__(self, registry: Registry, listener: Listener) -> None:
    self._registry, self._listener = registry, listener
    self._deadlines: list[Request] = []  # a heap
    self._unread_bytes = 0  # of all clients
    self._unfinished: set[Entry] = set()  # tables of which more can be served

  # --- what clients say

  def sample(self, peer: Peer, fields: Sequence[Any]) -> None:
    """A client wants `least` to `n` items, as the fields of SAMPLE say, and has received so many samples."""
    number, name, n, least, peek, seconds, received = fields
    reading: Reading = peer.state.reading
    entry = self._registry.entries.get(name)
    if not 1 <= least <= n <= replay_messages.MOST_ITEMS or entry is None or math.isnan(seconds):
      raise WireError(f'a wish for {least} to {n} samples of {name[:60]!r} within {seconds} s')
    if number in reading.waiting or len(reading.waiting) >= REQUESTS:
      raise WireError(f'sample {number}, which waits, or is one too many')
    self.received(reading, received)
    end = math.inf if seconds < 0 else time.monotonic() + seconds
    request = Request(peer, number, entry, n, least, peek, end)
    reading.waiting[number] = request
    request.queue.add(request)
    entry.table.reads.wait_more(1, peek)
    if end < math.inf:
      self._put_deadline(request)
    self.serve(request.queue)
    self._registry.touched.add(entry)  # items that waited may go in

  def _put_deadline(self, request: Request) -> None:
    heapq.heappush(self._deadlines, request)
    entries = self._registry.entries.values()
    if len(self._deadlines) > 1000 + 2 * sum(len(e.readers) + len(e.peekers) for e in entries):
      self._deadlines = [r for r in self._deadlines if not r.over]
      heapq.heapify(self._deadlines)

  def received(self, reading: Reading, count: int) -> None:
    """A client has so many of the samples that it was sent in this session."""
    if count > reading.answered:
      raise WireError(f'{count} samples that have come, of {reading.answered}')
    while reading.answered - len(reading.unread) < count:
      size = reading.unread.popleft()
      reading.bytes -= size
      self._unread_bytes -= size
    if reading.parked and not reading.full:
      parked, reading.parked = reading.parked, {}
      for request in parked:
        request.queue.add(request)
        self._registry.touched.add(request.entry)

  def cancel(self, peer: Peer, number: int) -> None:
    """A client is content with what has been drawn."""
    if request := peer.state.reading.waiting.get(number):
      self._answer(request, f'cancelled by {peer.name}')

  def left(self, peer: Peer) -> None:
    """Nobody waits for a client's samples any more."""
    waiting: dict[int, Request] = peer.state.reading.waiting
    for request in [*waiting.values()]:
      self._forget(request)
    reading: Reading = peer.state.reading
    self._unread_bytes -= reading.bytes
    reading.bytes = 0
    reading.unread.clear()

  # --- answers

  def seconds(self) -> float:
    """Until there is something to do: a request has waited as long as it may, or more can be served."""
    if self._unfinished:
      return 0.0
    return self._deadlines[0].end - time.monotonic() if self._deadlines else 1.0

  def expire(self) -> None:
    """Answers those that have waited as long as they may."""
    now = time.monotonic()
    while self._deadlines and (self._deadlines[0].end <= now or self._deadlines[0].over):
      request = heapq.heappop(self._deadlines)
      if not request.over:
        self._answer(request, request.why_it_waits())

  def take_unfinished(self) -> set[Entry]:
    """Tables of which more could be served when the time of `serve` was over."""
    unfinished, self._unfinished = self._unfinished, set()
    return unfinished

  def serve(self, requests: RequestQueue) -> None:
    """Answers requests, one of each client in turn, until one must wait, or for SERVE_SECONDS.

    Requests of clients that do not read leave the queue until they do.
    """
    end = time.monotonic() + SERVE_SECONDS
    while requests:
      request = requests.first
      reading: Reading = request.peer.state.reading
      if reading.full or request.peer.gone:
        requests.discard(request)
        reading.parked[request] = None
        continue
      if why := self._too_many_parts(request):
        self._refuse(request, why)
        requests.end_turn(request.peer)
        continue
      request.entry.table.reads.draw(request.draws, request.n, request.peek)
      if len(request.draws.items) < request.least:
        break
      self._answer(request, '')
      requests.end_turn(request.peer)
      if requests and time.monotonic() > end:
        self._unfinished.add(request.entry)
        break

  def _too_many_parts(self, request: Request) -> str:
    """Why a sample would be larger than a message may be; looked at before anything is drawn."""
    signature = request.entry.table.contents.signature
    leaves = 1 if signature is None else len(signature.leaves)
    if (parts := request.n * leaves) <= replay_messages.MESSAGE_PARTS:
      return ''
    return (
      f'{request.n} items of {leaves} columns each have {parts:,} parts, of which a sample has at most '
      f'{replay_messages.MESSAGE_PARTS:,}: ask for fewer at a time'
    )

  def _refuse(self, request: Request, why: str) -> None:
    self._forget(request)
    table = request.entry.table.name
    why = f'sample from table {table!r}: {why}'
    self._listener.send(request.peer, replay_messages.ANSWER, request.number, False, why)

  def _forget(self, request: Request) -> None:
    if request.over:
      return
    request.over = True
    request.entry.table.reads.wait_more(-1, request.peek)
    reading: Reading = request.peer.state.reading
    request.queue.discard(request)
    reading.parked.pop(request, None)
    del reading.waiting[request.number]

  def _answer(self, request: Request, reason: str) -> None:
    """Sends what was drawn, and why it is not more."""
    peer, items, table = request.peer, request.draws.items, request.entry.table
    reading: Reading = peer.state.reading
    signature, frames = 0, [b''] * 5
    if items:
      try:
        frames = sample_frames(request.draws)
      except ValueError as e:
        self._refuse(request, str(e))
        return
      signature = self._signature_number(peer, items[0].signature)
    self._forget(request)
    size = sum(memoryview(f).nbytes for f in frames)
    reading.answered += 1
    reading.unread.append(size)
    reading.bytes += size
    self._unread_bytes += size
    reading.sampled += len(items)
    self._listener.counts['samples'] += len(items)
    fields = request.number, signature, reason, len(table)
    if self._listener.send(peer, replay_messages.SAMPLES, *fields, arrays=frames):
      self._bound_unread()

  def _bound_unread(self) -> None:
    """Ends the session of the client that has read the least, where all clients together read too little."""
    if self._unread_bytes <= UNREAD_BYTES:
      return
    peer = max(self._listener.peers, key=lambda peer: peer.state.reading.bytes)
    size = peer.state.reading.bytes
    self._listener.cut(
      peer, f'has {size:,} bytes of samples unread, of {self._unread_bytes:,} of all clients'
    )

  def _signature_number(self, peer: Peer, signature: Signature) -> int:
    """By which a client knows a signature; it is sent now, if it was not before."""
    reading: Reading = peer.state.reading
    known = reading.signatures
    if id(signature) not in known:
      if len(known) >= SIGNATURES:
        known.clear()
      reading.newest_signature += 1
      known[id(signature)] = reading.newest_signature, signature
      packed = replay_messages.packed_signature(signature)
      self._listener.send(peer, replay_messages.SIGNATURE, reading.newest_signature, packed)
    return known[id(signature)][0]
