"""Items on their way into a replay service's tables: streams of clients, acknowledgements, refusals."""

from __future__ import annotations

import collections
import json
import logging
from typing import Any, NamedTuple

import numpy as np

from podrace.distributed.net.frame import WireError
from podrace.distributed.net.listener import Listener, Peer
from podrace.distributed.net.session_messages import REFUSED
from podrace.distributed.replay import replay_messages
from podrace.distributed.replay.served_tables import Entry, Registry
from podrace.distributed.replay.streams import PART_BYTES, Stream
from podrace.tables.blocking import InFlight, Pending
from podrace.tables.items import Item, Signature

DECLARATIONS = 65536  # of one connection: tables, specs, and leaves of signatures
LOST_A_SECOND = 10**6  # items that one client can have inserted after a checkpoint, at most
STREAMS = 65536  # remembered; then the one that was heard of longest ago is forgotten
SIGNATURES, SIGNATURE_BYTES = 1024, 2**24  # of which one object each is kept, as JSON
DECLARED_BYTES = 2**24  # of the signatures of one connection, as JSON
MESSAGE_UNPACKED = 2**30  # bytes that the chunks of one message may take, to be looked at
HELD = 4  # times what one client may keep: what may wait for a table's limiter, of all
HELD_ITEMS = 2**20  # that may wait for a table's limiter, of all clients


Client = tuple[str, int]  # its key, '' without keys, and its number


class Outcome(NamedTuple):
  """What becomes of the items of a message, by their numbers."""

  done: list[int]
  waiting: list[int]
  refused: dict[int, str]  # and why


class Inserting:
  """What clients write.

  Args:
    most_bytes: of the steps that one client's writers keep.

  Attributes:
    streams: by key and number of the client, those heard of longest ago first.
  """

  def __init__(self, registry: Registry, listener: Listener, most_bytes: int) -> None:
    self._registry, self._listener, self._most_bytes = registry, listener, most_bytes
    self._store = registry.store
    self.streams: collections.OrderedDict[Client, Stream] = collections.OrderedDict()
    self._signatures: collections.OrderedDict[str, Signature] = collections.OrderedDict()
    self._signature_bytes = 0
    self._flight = InFlight(self._store.lock)  # of all clients, who do the waiting themselves
    self._refusing: set[tuple[str, str]] = set()  # tables and clients of which refusals were logged

  # --- streams

  def join(self, peer: Peer) -> Stream:
    """The stream of a client, which goes on over a new connection."""
    name = peer.key, peer.client
    known = self.streams.get(name)
    if known is not None and known.peer is not None:
      self._listener.drop(known.peer, 'its stream goes on over another connection')
    stream = self.streams.pop(name, None) or Stream()
    self.streams[name] = stream  # as the newest
    stream.peer = peer
    while len(self.streams) > STREAMS:
      away = [i for i, s in self.streams.items() if s.peer is None]
      # Its own first, so that no key has those of another one forgotten.
      oldest = next((i for i in away if i[0] == peer.key), away[0] if away else None)
      if oldest is None:
        break
      del self.streams[oldest]
    return stream

  def left(self, peer: Peer) -> None:
    """A session is over: what it declared and kept is forgotten."""
    stream: Stream = peer.state.stream
    if stream.peer is peer:
      stream.peer = None
      with self._store.lock:
        for chunk in stream.pieces.values():
          self._store.drop(chunk, stream.account)
      stream.begin()
    if peer.finished or not stream.number:
      self.streams.pop((peer.key, peer.client), None)

  def snapshot(self) -> dict[str, Any]:
    """All streams, for a checkpoint."""
    numbers = [
      [i, s.number, sorted({*s.waiting, *s.missing}), key] for (key, i), s in self.streams.items()
    ]
    waited = [[i, sorted({*s.waiting, *s.unheard}), key] for (key, i), s in self.streams.items()]
    return dict(streams=numbers, waited=[w for w in waited if w[1]])

  def restore(self, saved: dict[str, Any], seconds: float) -> None:
    """Takes over what `snapshot` gave, so many seconds ago. In older checkpoints streams are of no key."""
    most = int(LOST_A_SECOND * max(seconds, 1.0))
    waited = {((*key, '')[0], client): numbers for client, numbers, *key in saved.get('waited', ())}
    for client, number, missing, *key in saved['streams']:
      name = (*key, '')[0], client
      self.streams[name] = Stream(number, set(missing), set(waited.get(name, ())), most)

  # --- what clients say

  def declare(self, stream: Stream, details: dict[str, Any]) -> None:
    """What the numbers in this connection's INSERTs will mean."""
    if details.keys() - {'tables', 'specs', 'signatures'} or not all(
      isinstance(x, list) for x in details.values()
    ):
      raise WireError('a declaration of something else than lists of tables, specs and signatures')
    for name in details.get('tables', []):
      if not isinstance(name, str) or name not in self._registry.entries:
        raise WireError(f'a declaration of a table {str(name)[:60]!r}, which there is not')
      stream.tables.append(self._registry.entries[name])
    stream.specs += map(replay_messages.read_spec, details.get('specs', []))
    for one in details.get('signatures', []):
      signature, size = self._signature(one)
      stream.signatures.append(signature)
      stream.declared += len(signature.leaves)
      stream.declared_bytes += size
      if stream.declared_bytes > DECLARED_BYTES:
        raise WireError(f'signatures of more than {DECLARED_BYTES:,} bytes')
    stream.declared += sum(map(len, details.values()))
    if stream.declared > DECLARATIONS:
      raise WireError(f'more than {DECLARATIONS} tables, specs and leaves of signatures')

  def _signature(self, details: Any) -> tuple[Signature, int]:
    """One object for each signature, whoever tells it: tables compare by identity first; and its bytes as JSON."""
    signature = replay_messages.read_signature(details)
    text = json.dumps(replay_messages.packed_signature(signature))
    if (known := self._signatures.pop(text, None)) is None:
      self._signature_bytes += len(text)
    self._signatures[text] = signature = known or signature
    while len(self._signatures) > SIGNATURES or self._signature_bytes > SIGNATURE_BYTES:
      self._signature_bytes -= len(self._signatures.popitem(last=False)[0])
    return signature, len(text)

  def insert(self, peer: Peer, message: int, arrays: list[memoryview]) -> None:
    """Chunks, and items over them and over those that came before; they are acknowledged."""
    if not message:
      raise WireError('an insert with message 0, which is that of ACKs of items that waited')
    stream, counts = peer.state.stream, self._listener.counts
    chunks, details, parts, refs, released = map(
      replay_messages.records, arrays, replay_messages.INSERTED
    )
    stream.take_chunks(self._store, chunks, arrays[5])
    counts['pieces'] += len(chunks)
    if stream.kept_bytes > self._most_bytes:
      what = f'its writers keep {stream.kept_bytes:,} bytes of steps'
      self._refuse(peer, what, self._most_bytes)
      return
    done, waiting, groups, lost = stream.take_items(details, parts, refs)
    counts['repeated'] += len(done) + len(waiting)
    if lost:
      counts['lost'] += lost
      what = f'{lost} items of {peer.name} are lost with an earlier process'
      self._listener.log(what, logging.WARNING)
    outcome = Outcome(done, waiting, {})
    for entry, items in groups:
      self._put(peer, entry, items, outcome)
    if len(stream.waiting) > replay_messages.MOST_ITEMS:
      raise WireError(f'items beyond the {replay_messages.MOST_ITEMS} that may wait')
    stream.release(self._store, released)
    stream.inserted += len(done) + len(waiting)
    counts['items'] += len(done) + len(waiting)
    if not self._too_many(peer, groups):
      why = groups[-1][0].table.inserts.why_not() if waiting and groups else ''
      why = next(iter(outcome.refused.values()), why)
      self._ack(peer, message, why, done, waiting, [*outcome.refused])

  def _put(self, peer: Peer, entry: Entry, items: list[tuple[int, Item]], outcome: Outcome) -> None:
    """Hands items to their table."""
    stream = peer.state.stream
    self._registry.touched.add(entry)
    for number, found in self._submit(entry, items):
      if found is None:
        outcome.done.append(number)
      elif isinstance(found, Pending):
        stream.waiting[number] = found
        entry.held.append((found, stream, number))
        parts = _count_parts(found.item)
        stream.waiting_parts += parts
        entry.held_parts += parts
        with self._store.lock:
          for account in (stream.account, entry.account):
            entry.table.contents.hold(found.item, account)
        outcome.waiting.append(number)
      else:
        outcome.refused[number] = str(found)
        stream.refuse(number)
        self._tell_refused(entry, peer, found)

  def _submit(
    self, entry: Entry, items: list[tuple[int, Item]]
  ) -> list[tuple[int, Pending | ValueError | None]]:
    """Items' numbers, and what becomes of them: those first that are not what the table must hold."""
    good, outcomes = items, list[tuple[int, Pending | ValueError | None]]()
    if (contents := entry.contents) is not None:
      good, most = [], contents.unpacked + MESSAGE_UNPACKED
      for number, item in items:
        try:
          if contents.unpacked > most:
            raise ValueError(f'a message of more than {MESSAGE_UNPACKED:,} bytes unpacked')
          contents.check(item)
          good.append((number, item))
        except ValueError as e:
          outcomes.append((number, ValueError(f'table {entry.name!r}: {e}')))
    found = entry.table.inserts.submit_all([item for _, item in good], self._flight)
    return outcomes + [(number, x) for (number, _), x in zip(good, found, strict=True)]

  def admit(self, entry: Entry) -> None:
    """Tells whose items have gone in that waited for a table."""
    admitted: dict[Stream, list[int]] = {}
    while entry.held and entry.held[0][0].done:
      pending, stream, number = entry.held.popleft()
      with self._store.lock:
        for account in (stream.account, entry.account):
          entry.table.contents.drop(pending.item, account)
      stream.waiting.pop(number, None)
      parts = _count_parts(pending.item)
      stream.waiting_parts -= parts
      entry.held_parts -= parts
      admitted.setdefault(stream, []).append(number)
    for stream, numbers in admitted.items():
      if stream.peer is not None:
        self._ack(stream.peer, 0, '', numbers, [], [])

  # --- what clients hear

  def _ack(self, peer: Peer, message: int, why: str, *numbers: list[int]) -> None:
    """Items that are in, that wait, and that are refused; `why` is the first refusal's or wait's."""
    arrays = [np.array(x, '<u8') for x in numbers]
    self._listener.send(peer, replay_messages.ACK, message, why[:1000], arrays=arrays)

  def _tell_refused(self, entry: Entry, peer: Peer, reason: ValueError) -> None:
    """Of each client and table the first time: the others are counted, and their writers get them."""
    peer.state.stream.refusals += 1
    self._listener.counts['refused items'] += 1
    if (entry.name, peer.name) not in self._refusing and len(self._refusing) < STREAMS:
      self._refusing.add((entry.name, peer.name))
      self._listener.log(
        f'refused an item of {peer.name} (others are counted): {reason}', logging.WARNING
      )

  def _too_many(self, peer: Peer, groups: list[tuple[Entry, list[Any]]]) -> bool:
    """Whether too much waits for one of the tables, and a client has been refused for it."""
    for entry, _ in groups:
      count, size = len(entry.held), entry.account.bytes + PART_BYTES * entry.held_parts
      if count > HELD_ITEMS or size > HELD * self._most_bytes:
        what = f'{count:,} items of {size:,} bytes wait for table {entry.name!r}'
        self._refuse(peer, what, HELD * self._most_bytes)
        return True
    return False

  def _refuse(self, peer: Peer, what: str, allowed: int) -> None:
    """Ends the session of a client with which too much is kept."""
    details = (
      f'{what}, of which {allowed:,} are allowed: shorten history or max_in_flight, or start the '
      'service with more --client-bytes'
    )
    self._listener.drop(peer, details)
    self._listener.send(peer, REFUSED, [details])  # in another session it would be the same


def _count_parts(item: Item) -> int:
  """The parts of an item and their references to chunks."""
  return sum([1 + len(part[0]) for part in item.parts])
