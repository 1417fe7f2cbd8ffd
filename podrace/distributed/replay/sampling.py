"""Answers sample requests of a replay service's clients."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Sequence
from typing import Any

from podrace.distributed.net.frame import WireError
from podrace.distributed.net.listener import Listener, Peer
from podrace.distributed.replay import replay_messages
from podrace.distributed.replay.sample_frames import sample_frames
from podrace.distributed.replay.sample_requests import RequestQueue, SampleRequest, SampleWindow
from podrace.distributed.replay.served_tables import ServedTable, ServedTables
from podrace.tables.items import Draws, Signature

SIGNATURES = 1024  # that one client knows; after that their numbering begins anew
SERVE_SECONDS = 0.02  # of drawing samples, before the thread looks at other messages
UNREAD_BYTES = 2**32  # of samples that all clients together have not acknowledged


class Sampling:
  """Serves sample requests. A request that must wait is queued, so it never blocks the thread."""

  def __init__(self, served: ServedTables, listener: Listener) -> None:
    self._served, self._listener = served, listener
    # By table and `peek`: a peek waits neither for the limiter nor for samples that do.
    self._queues: dict[tuple[ServedTable, bool], RequestQueue] = {}
    self._deadlines: list[SampleRequest] = []  # a heap
    self.unread_bytes = 0  # of all clients
    self._unfinished: set[ServedTable] = set()  # tables of which more can be served

  def queue(self, served: ServedTable, peek: bool) -> RequestQueue:
    """Return the requests that wait for a table, either peeks or all except peeks."""
    return self._queues.setdefault((served, peek), RequestQueue())

  # --- messages of clients

  def sample(self, peer: Peer, fields: Sequence[Any]) -> None:
    """Take a SAMPLE, and answer it if it need not wait."""
    number, name, n, least, peek, seconds, received = fields
    window: SampleWindow = peer.state.window
    served = self._served.by_name.get(name)
    if not 1 <= least <= n <= replay_messages.MOST_ITEMS or served is None or math.isnan(seconds):
      raise WireError(f'a wish for {least} to {n} samples of {name[:60]!r} within {seconds} s')
    if number in window.waiting or len(window.waiting) >= replay_messages.MOST_REQUESTS:
      raise WireError(f'sample {number}, which waits, or is one too many')
    self.acknowledge(window, received)
    end = math.inf if seconds < 0 else time.monotonic() + seconds
    request = SampleRequest(peer, number, served, n, least, peek, end)
    window.waiting[number] = request
    queue = self.queue(served, peek)
    queue.add(request)
    served.table.reads.wait_more(1, peek)
    if end < math.inf:
      self._put_deadline(request)
    self._serve(queue)
    self._served.touched.add(served)  # items that waited may go in

  def _put_deadline(self, request: SampleRequest) -> None:
    heapq.heappush(self._deadlines, request)
    if len(self._deadlines) > 1000 + 2 * sum(map(len, self._queues.values())):
      self._deadlines = [r for r in self._deadlines if not r.over]
      heapq.heapify(self._deadlines)

  def acknowledge(self, window: SampleWindow, count: int) -> None:
    """Take note that a client has received `count` samples in this session."""
    if count > window.answered:
      raise WireError(f'{count} samples that have come, of {window.answered}')
    while window.answered - len(window.unread) < count:
      size = window.unread.popleft()
      window.bytes -= size
      self.unread_bytes -= size
    if window.parked and not window.is_full:
      parked, window.parked = window.parked, {}
      for request in parked:
        self._queue_of(request).add(request)
        self._served.touched.add(request.served)

  def cancel(self, peer: Peer, number: int) -> None:
    """Answer a request with the items drawn so far."""
    if request := peer.state.window.waiting.get(number):
      self._answer(request, f'cancelled by {peer.name}')

  def left(self, peer: Peer) -> None:
    """Drop the requests and unread samples of a client at the end of its session."""
    window: SampleWindow = peer.state.window
    for request in [*window.waiting.values()]:
      self._forget(request)
    self.unread_bytes -= window.bytes
    window.bytes = 0
    window.unread.clear()

  # --- answers

  def seconds(self) -> float:
    """Return the seconds until a request times out, or 0 if more can be served."""
    if self._unfinished:
      return 0.0
    return self._deadlines[0].end - time.monotonic() if self._deadlines else 1.0

  def expire(self) -> None:
    """Answer the requests that are past their deadline."""
    now = time.monotonic()
    while self._deadlines and (self._deadlines[0].end <= now or self._deadlines[0].over):
      request = heapq.heappop(self._deadlines)
      if not request.over:
        self._answer(request, request.timeout_message())

  def take_unfinished(self) -> set[ServedTable]:
    """Return, and forget, the tables at which SERVE_SECONDS were not enough."""
    unfinished, self._unfinished = self._unfinished, set()
    return unfinished

  def serve(self, served: ServedTable) -> None:
    """Answer the requests that a table can serve now."""
    for peek in (False, True):
      if queue := self._queues.get((served, peek)):
        self._serve(queue)

  def _serve(self, queue: RequestQueue) -> None:
    """Answer requests, one of each client in turn, until one must wait, or for SERVE_SECONDS.

    Requests of clients that do not read leave the queue until they do.
    """
    end = time.monotonic() + SERVE_SECONDS
    while queue:
      request = queue.first
      window: SampleWindow = request.peer.state.window
      if window.is_full or request.peer.gone:
        queue.discard(request)
        window.parked[request] = None
        continue
      if why := self._too_many_parts(request):
        self._refuse(request, why)
        queue.end_turn(request.peer)
        continue
      request.served.table.reads.draw(request.draws, request.n, request.peek)
      if len(request.draws.items) < request.at_least:
        break
      self._answer(request, '')
      queue.end_turn(request.peer)
      if queue and time.monotonic() > end:
        self._unfinished.add(request.served)
        break

  def _too_many_parts(self, request: SampleRequest) -> str:
    """Return why a sample would be too large for a message, before anything is drawn, or ''."""
    signature = request.served.table.contents.signature
    leaves = 1 if signature is None else len(signature.leaves)
    if (parts := request.n * leaves) <= replay_messages.MESSAGE_PARTS:
      return ''
    return (
      f'{request.n} items of {leaves} columns each have {parts:,} parts, of which a sample has at '
      f'most {replay_messages.MESSAGE_PARTS:,}: ask for fewer at a time'
    )

  def _refuse(self, request: SampleRequest, why: str) -> None:
    self._forget(request)
    why = f'sample from table {request.served.name!r}: {why}'
    self._listener.send(request.peer, replay_messages.ANSWER, request.number, False, why)

  def _queue_of(self, request: SampleRequest) -> RequestQueue:
    return self.queue(request.served, request.peek)

  def _forget(self, request: SampleRequest) -> None:
    if request.over:
      return
    request.over = True
    request.draws = Draws([], [])  # as the deadline keeps the request
    request.served.table.reads.wait_more(-1, request.peek)
    window: SampleWindow = request.peer.state.window
    self._queue_of(request).discard(request)
    window.parked.pop(request, None)
    del window.waiting[request.number]

  def _answer(self, request: SampleRequest, reason: str) -> None:
    """Send the items that were drawn, and the reason why there are not more."""
    peer, items, table = request.peer, request.draws.items, request.served.table
    window: SampleWindow = peer.state.window
    signature, frames = 0, [b''] * 5
    if items:
      try:
        frames = sample_frames(request.draws)
      except (ValueError, MemoryError) as e:
        self._refuse(request, str(e) or 'there is no memory for its message')
        return
      signature = self._signature_number(peer, items[0].signature)
      if request.over:  # the session ended, as it had too much to read
        return
    self._forget(request)
    size = sum(memoryview(f).nbytes for f in frames)
    window.answered += 1
    window.unread.append(size)
    window.bytes += size
    self.unread_bytes += size
    window.sampled += len(items)
    self._listener.counts['samples'] += len(items)
    fields = request.number, signature, reason, len(table)
    if self._listener.send(peer, replay_messages.SAMPLES, *fields, arrays=frames):
      self._bound_unread()

  def _bound_unread(self) -> None:
    """End the session of the slowest reader if all clients together read too little."""
    if self.unread_bytes <= UNREAD_BYTES:
      return
    peer = max(self._listener.peers, key=lambda peer: peer.state.window.bytes)
    size = peer.state.window.bytes
    self._listener.cut(
      peer, f'has {size:,} bytes of samples unread, of {self.unread_bytes:,} of all clients'
    )

  def _signature_number(self, peer: Peer, signature: Signature) -> int:
    """Return the number by which a client knows a signature, which is sent first if it is new."""
    window: SampleWindow = peer.state.window
    known = window.signatures
    if id(signature) not in known:
      if len(known) >= SIGNATURES:
        known.clear()
      window.newest_signature += 1
      known[id(signature)] = window.newest_signature, signature
      packed = replay_messages.pack_signature(signature)
      self._listener.send(peer, replay_messages.SIGNATURE, window.newest_signature, packed)
    return known[id(signature)][0]
