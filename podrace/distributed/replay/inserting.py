"""Inserts the items of clients into the tables of a replay service, and acknowledges them."""

from __future__ import annotations

import collections
import json
import logging
from typing import Any

import numpy as np

from podrace.distributed.net.frame import WireError
from podrace.distributed.net.listener import Listener, Peer
from podrace.distributed.net.session_messages import REFUSED
from podrace.distributed.replay import replay_messages
from podrace.distributed.replay.insert_streams import PART_BYTES, InsertStream, TakenItems
from podrace.distributed.replay.served_tables import ServedTable, ServedTables
from podrace.tables.blocking import InFlight, Pending
from podrace.tables.chunks import Account
from podrace.tables.items import Item, Signature

DECLARATIONS = 65536  # of one connection: tables, specs, and leaves of signatures
LOST_A_SECOND = 10**6  # items of one client since a checkpoint, at most
STREAMS = 65536  # remembered; beyond that, the one that was silent for the longest is forgotten
SIGNATURES, SIGNATURE_BYTES = 1024, 2**24  # shared objects, and their size as JSON
DECLARED_BYTES = 2**24  # of the signatures of one connection, as JSON
MESSAGE_UNPACKED = 2**30  # bytes that a check may unpack for one message
HELD = 4  # bytes that may wait for a table's limiter, of all clients, over `most_bytes` of one
HELD_ITEMS = 2**20  # that may wait for a table's limiter, of all clients


ClientId = tuple[str, int]  # key ('' without keys) and number of a client


class HeldItems:
  """The items of all clients that wait for the limiter of one table, the oldest first.

  Attributes:
    items: (pending item, stream, number in the stream).
    parts: of all items: rows of a column, and references to chunks.
    account: of their chunks.
  """

  def __init__(self) -> None:
    self.items: collections.deque[tuple[Pending, InsertStream, int]] = collections.deque()
    self.parts = 0
    self.account = Account()


class Inserting:
  """The part of a replay service that takes the items of all clients.

  Args:
    served: the tables.
    listener: sends acknowledgements.
    most_bytes: of the steps that one client's writers keep.

  Attributes:
    streams: by client, the one that was silent for the longest first.
    held: the waiting items by table.
    signature_bytes: of the shared signatures, as JSON.
  """

  def __init__(self, served: ServedTables, listener: Listener, most_bytes: int) -> None:
    self._served, self._listener, self._most_bytes = served, listener, most_bytes
    self._store = served.store
    self.streams: collections.OrderedDict[ClientId, InsertStream] = collections.OrderedDict()
    self.held: dict[ServedTable, HeldItems] = collections.defaultdict(HeldItems)
    self._signatures: collections.OrderedDict[str, Signature] = collections.OrderedDict()
    self.signature_bytes = 0
    self._in_flight = InFlight(self._store.lock)  # of all clients; they wait for themselves
    self._logged: set[tuple[str, str]] = set()  # tables and clients of which a refusal was logged

  def join(self, peer: Peer) -> InsertStream:
    """Return the stream of a client, which continues over its new connection."""
    client = peer.key, peer.client
    stream = self.streams.pop(client, None) or InsertStream()
    self.streams[client] = stream  # as the newest
    stream.peer = peer
    while len(self.streams) > STREAMS:
      away = [i for i, s in self.streams.items() if s.peer is None]
      # A stream of the same key first, so that no key can push out the streams of another one.
      oldest = next((i for i in away if i[0] == peer.key), away[0] if away else None)
      if oldest is None:
        break
      del self.streams[oldest]
    return stream

  def left(self, peer: Peer) -> None:
    """Forget the declarations and chunks of a session that is over."""
    stream: InsertStream = peer.state.stream
    if stream.peer is peer:
      stream.peer = None
      with self._store.lock:
        for chunk in stream.pieces.values():
          self._store.drop(chunk, stream.account)
      stream.begin_session()
    if peer.finished or not stream.number:
      self.streams.pop((peer.key, peer.client), None)

  def snapshot(self) -> dict[str, Any]:
    """Return all streams as JSON, for a checkpoint."""
    numbers = [
      [i, s.number, sorted({*s.waiting, *s.missing}), key] for (key, i), s in self.streams.items()
    ]
    waited = [[i, sorted({*s.waiting, *s.unheard}), key] for (key, i), s in self.streams.items()]
    return dict(streams=numbers, waited=[w for w in waited if w[1]])

  def restore(self, saved: dict[str, Any], seconds: float) -> None:
    """Restore streams from a `snapshot` of `seconds` ago. Older checkpoints have no keys."""
    most = int(LOST_A_SECOND * max(seconds, 1.0))
    waited = {((*key, '')[0], client): numbers for client, numbers, *key in saved.get('waited', ())}
    for client, number, missing, *key in saved['streams']:
      name = (*key, '')[0], client
      self.streams[name] = InsertStream(number, set(missing), set(waited.get(name, ())), most)

  # --- messages of clients

  def declare(self, stream: InsertStream, details: dict[str, Any]) -> None:
    """Take a DECLARE: the tables, specs and signatures that INSERTs name by number."""
    if details.keys() - {'tables', 'specs', 'signatures'} or not all(
      isinstance(x, list) for x in details.values()
    ):
      raise WireError('a declaration of something else than lists of tables, specs and signatures')
    for name in details.get('tables', []):
      if not isinstance(name, str) or name not in self._served.by_name:
        raise WireError(f'a declaration of a table {str(name)[:60]!r}, which there is not')
      stream.tables.append(self._served.by_name[name])
    stream.specs += map(replay_messages.read_spec, details.get('specs', []))
    for packed in details.get('signatures', []):
      signature, size = self._share_signature(packed)
      stream.signatures.append(signature)
      stream.declared += len(signature.leaves)
      stream.declared_bytes += size
      if stream.declared_bytes > DECLARED_BYTES:
        raise WireError(f'signatures of more than {DECLARED_BYTES:,} bytes')
    stream.declared += sum(map(len, details.values()))
    if stream.declared > DECLARATIONS:
      raise WireError(f'more than {DECLARATIONS} tables, specs and leaves of signatures')

  def _share_signature(self, details: Any) -> tuple[Signature, int]:
    """Read a signature.

    Returns:
      The one object for all equal signatures, because tables compare by identity first, and the
      bytes of its JSON.
    """
    signature = replay_messages.read_signature(details)
    text = json.dumps(replay_messages.pack_signature(signature))
    if (known := self._signatures.pop(text, None)) is None:
      self.signature_bytes += len(text)
    self._signatures[text] = signature = known or signature
    while len(self._signatures) > SIGNATURES or self.signature_bytes > SIGNATURE_BYTES:
      self.signature_bytes -= len(self._signatures.popitem(last=False)[0])
    return signature, len(text)

  def insert(self, peer: Peer, message: int, arrays: list[memoryview]) -> None:
    """Take an INSERT: chunks, and items over new and earlier chunks. Acknowledge the items."""
    if not message:
      raise WireError('an insert with message 0, which is that of ACKs of items that waited')
    stream, counts = peer.state.stream, self._listener.counts
    chunks, details, parts, refs, released = map(
      replay_messages.read_records, arrays, replay_messages.INSERTED
    )
    stream.take_chunks(self._store, chunks, arrays[5])
    counts['pieces'] += len(chunks)
    if stream.kept_bytes > self._most_bytes:
      excess = f'its writers keep {stream.kept_bytes:,} bytes of steps'
      self._refuse_client(peer, excess, self._most_bytes)
      return
    done, waiting, groups, lost = taken = stream.take_items(details, parts, refs)
    counts['repeated'] += len(done) + len(waiting)
    if lost:
      counts['lost'] += lost
      line = f'{lost} items of {peer.name} are lost with an earlier process'
      self._listener.log(line, logging.WARNING)
    refused: dict[int, str] = {}
    try:
      for served, items in groups:
        refused |= self._put(peer, served, items, taken)
    except BaseException:  # such as a MemoryError: the client sends the items again
      stream.missing.update(*([n for n, _ in items] for _, items in groups))
      stream.missing.difference_update(done, waiting)
      raise
    if len(stream.waiting) > replay_messages.MOST_ITEMS:
      raise WireError(f'items beyond the {replay_messages.MOST_ITEMS} that may wait')
    stream.release(self._store, released)
    stream.inserted += len(done) + len(waiting)
    counts['items'] += len(done) + len(waiting)
    if not self._refuse_excess(peer, groups):
      why = groups[-1][0].table.inserts.why_not() if waiting and groups else ''
      why = next(iter(refused.values()), why)
      self._ack(peer, message, why, done, waiting, [*refused])

  def _put(
    self, peer: Peer, served: ServedTable, items: list[tuple[int, Item]], taken: TakenItems
  ) -> dict[int, str]:
    """Submit items to their table, and add their numbers to `taken.done` or `taken.waiting`.

    Returns:
      The reason of each refused item by its number.
    """
    stream, held = peer.state.stream, self.held[served]
    refused = {}
    self._served.touched.add(served)
    for number, result in self._submit(served, items):
      if result is None:
        taken.done.append(number)
      elif isinstance(result, Pending):
        stream.waiting[number] = result
        held.items.append((result, stream, number))
        parts = _count_parts(result.item)
        stream.waiting_parts += parts
        held.parts += parts
        with self._store.lock:
          for account in (stream.account, held.account):
            served.table.contents.hold(result.item, account)
        taken.waiting.append(number)
      else:
        refused[number] = str(result)
        stream.refuse(number)
        self._log_refusal(served, peer, result)
    return refused

  def _submit(
    self, served: ServedTable, items: list[tuple[int, Item]]
  ) -> list[tuple[int, Pending | ValueError | None]]:
    """Submit the items that the schema allows.

    Returns:
      (number, result) of each item, refused ones first. The result is None for an inserted item, or
      the waiting item, or the reason of the refusal.
    """
    valid, results = items, list[tuple[int, Pending | ValueError | None]]()
    if (schema := served.schema) is not None:
      valid, most = [], schema.unpacked + MESSAGE_UNPACKED
      for number, item in items:
        try:
          if schema.unpacked > most:
            raise ValueError(f'a message of more than {MESSAGE_UNPACKED:,} bytes unpacked')
          schema.check(item)
          valid.append((number, item))
        except ValueError as e:
          results.append((number, ValueError(f'table {served.name!r}: {e}')))
    submitted = served.table.inserts.submit_all([item for _, item in valid], self._in_flight)
    return results + [(number, x) for (number, _), x in zip(valid, submitted, strict=True)]

  def admit(self, served: ServedTable) -> None:
    """Acknowledge the waiting items that a table has inserted since."""
    held = self.held[served]
    admitted: dict[InsertStream, list[int]] = {}
    while held.items and held.items[0][0].done:
      pending, stream, number = held.items.popleft()
      with self._store.lock:
        for account in (stream.account, held.account):
          served.table.contents.drop(pending.item, account)
      stream.waiting.pop(number, None)
      parts = _count_parts(pending.item)
      stream.waiting_parts -= parts
      held.parts -= parts
      admitted.setdefault(stream, []).append(number)
    for stream, numbers in admitted.items():
      if stream.peer is not None:
        self._ack(stream.peer, 0, '', numbers, [], [])

  def _ack(self, peer: Peer, message: int, why: str, *numbers: list[int]) -> None:
    """Send the numbers of inserted, waiting and refused items. `why` is the first reason."""
    arrays = [np.array(x, '<u8') for x in numbers]
    self._listener.send(peer, replay_messages.ACK, message, why[:1000], arrays=arrays)

  def _log_refusal(self, served: ServedTable, peer: Peer, reason: ValueError) -> None:
    """Count a refused item, and log the first one of each table and client."""
    peer.state.stream.refusals += 1
    self._listener.counts['refused items'] += 1
    if (served.name, peer.name) not in self._logged and len(self._logged) < STREAMS:
      self._logged.add((served.name, peer.name))
      self._listener.log(
        f'refused an item of {peer.name} (others are counted): {reason}', logging.WARNING
      )

  def _refuse_excess(self, peer: Peer, groups: list[tuple[ServedTable, list[Any]]]) -> bool:
    """Refuse a client if too much waits for a table of its items; return whether it did."""
    for served, _ in groups:
      held = self.held[served]
      count, size = len(held.items), held.account.bytes + PART_BYTES * held.parts
      if count > HELD_ITEMS or size > HELD * self._most_bytes:
        excess = f'{count:,} items of {size:,} bytes wait for table {served.name!r}'
        self._refuse_client(peer, excess, HELD * self._most_bytes)
        return True
    return False

  def _refuse_client(self, peer: Peer, excess: str, allowed: int) -> None:
    """End the session of a client and tell it not to begin another one."""
    details = (
      f'{excess}, of which {allowed:,} are allowed: shorten history or max_in_flight, or start the '
      'service with more --client-bytes'
    )
    self._listener.drop(peer, details)
    self._listener.send(peer, REFUSED, [details])  # a new session would end in the same way


def _count_parts(item: Item) -> int:
  """Count the parts of an item and their references to chunks."""
  return sum([1 + len(part[0]) for part in item.parts])
