"""Items on their way into a replay service's tables: streams of clients, acknowledgements, refusals."""

from __future__ import annotations

import collections
import json
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from podrace.net.frame import WireError
from podrace.net.listener import Listener, Peer
from podrace.net.session import REFUSED
from podrace.service import wire
from podrace.service.registry import Entry, Registry
from podrace.tables.chunks import Account, Chunk, ChunkStore, Part
from podrace.tables.items import Item, Leaf, Signature
from podrace.tables.waiting import InFlight, Pending

DECLARATIONS = 65536  # of one connection: tables, specs, and leaves of signatures
CHUNK_BYTES = 512  # that a chunk takes besides its rows, about
REFUSED_ITEMS = 2048  # of a stream, that are refused again if they are sent again
STREAMS = 65536  # remembered; then the one that was heard of longest ago is forgotten
SIGNATURES = 1024  # of which one object each is kept
MESSAGE_UNPACKED = 2**30  # bytes that the chunks of one message may take, to be looked at
HELD = 4  # times what one client may keep: what may wait for a table's limiter, of all
HELD_ITEMS = 2**20  # that may wait for a table's limiter, of all clients


class Stream:
  """What one client has written, over all its connections.

  Its items are numbered. Which have come is remembered, and in the checkpoint, at the same moment as the
  tables: so an item that is sent again is known.
  """

  def __init__(
    self, number: int = 0, missing: set[int] | None = None, unheard: set[int] | None = None
  ) -> None:
    self.number = number  # of the newest item that has come
    # Older ones that are not in: a restart has lost them, or they were refused, which the client may not have heard.
    self.missing = missing or set()
    # Of those, which waited in the checkpoint: the client sends them again before any newer one, or it has heard
    # that they are in, and they are lost.
    self.unheard = unheard or set()
    self.refused: list[int] = []  # of those, the newest last (an empty deque has 760 bytes)
    self.waiting: dict[int, Pending] = {}  # by number, for a limiter
    self.account = Account()
    self.peer: Peer | None = None
    self.begin()

  def begin(self) -> None:
    """For a new connection, in which everything is said anew."""
    self.tables: list[Entry] = []
    self.specs: list[tuple[np.dtype, tuple[int, ...]]] = []
    self.signatures: list[Signature] = []
    self.declared = 0
    self.pieces: dict[int, Chunk] = {}
    self.next_piece = 0
    self.inserted = self.refusals = 0  # items

  @property
  def kept_bytes(self) -> int:
    """Of what its writers keep, and of its items that wait."""
    return self.account.bytes + CHUNK_BYTES * len(self.pieces)

  def refuse(self, number: int) -> None:
    """An item is not in: who has not heard it asks again, and is refused again."""
    self.missing.add(number)
    self.refused.append(number)
    if len(self.refused) > REFUSED_ITEMS:
      self.missing.discard(self.refused.pop(0))

  # --- chunks

  def take_chunks(self, store: ChunkStore, details: np.ndarray, data: memoryview) -> None:
    """New chunks; each is held until the client says otherwise."""
    if len(details) > wire.MESSAGE_CHUNKS:
      raise WireError(f'{len(details)} chunks in a message, at most {wire.MESSAGE_CHUNKS}')
    if int(details['bytes'].astype(np.int64).sum()) != len(data):
      raise WireError(f'{len(data)} bytes of chunks, which differ from what is said of them')
    start, made = 0, []
    for spec, rows, how, size in details.tolist():
      if spec >= len(self.specs) or not rows:
        raise WireError(f'a chunk of {rows} rows of spec {spec}')
      own = bytes(data[start : start + size])
      made.append(wire.make_chunk(store, own, how, rows, *self.specs[spec]))
      start += size
    with store.lock:
      for chunk in made:
        store.hold(chunk, self.account)
        self.pieces[self.next_piece] = chunk
        self.next_piece += 1

  def release(self, store: ChunkStore, numbers: np.ndarray) -> None:
    """Chunks that the client needs no longer."""
    with store.lock:
      for number in numbers.tolist():
        chunk = self.pieces.pop(number, None)
        if chunk is None:
          raise WireError(f'a chunk {number} that is released, which there is not')
        store.drop(chunk, self.account)

  # --- items

  def take_items(
    self, details: np.ndarray, parts: np.ndarray, refs: np.ndarray
  ) -> tuple[list[int], list[int], list[tuple[Entry, list[tuple[int, Item]]]], int]:
    """Items that came before and are in or wait, by number; the new ones; and how many are lost."""
    self._check_items(details, parts, refs)
    rows, numbers = iter(parts.tolist()), iter(refs.tolist())
    found = [
      tuple([self._part(leaf, next(rows), numbers) for leaf in self.signatures[s].leaves])
      for s in details['signature'].tolist()
    ]
    done: list[int] = []
    waiting: list[int] = []
    groups: list[tuple[Entry, list[tuple[int, Item]]]] = []
    lost = 0
    for (number, key, priority, table, s), own in zip(details.tolist(), found, strict=True):
      if number > self.number:
        # Those in between were in an earlier process, after its last checkpoint.
        lost += number - self.number - 1 + len(self.unheard)
        self.number, self.unheard = number, set()
      elif number in self.missing:
        self.missing.discard(number)
        self.unheard.discard(number)
      else:  # it has come before
        (waiting if number in self.waiting else done).append(number)
        continue
      entry = self.tables[table]
      if not groups or groups[-1][0] is not entry:
        groups.append((entry, []))
      item = Item(abs(key), priority, self.signatures[s], own, amends=key < 0)
      groups[-1][1].append((number, item))
    return done, waiting, groups, lost

  def _check_items(self, details: np.ndarray, parts: np.ndarray, refs: np.ndarray) -> None:
    if len(details) > wire.MESSAGE_ITEMS:
      raise WireError(f'{len(details)} items in a message, at most {wire.MESSAGE_ITEMS}')
    if len(refs) > wire.MESSAGE_CHUNKS:
      raise WireError(f'{len(refs)} references to chunks, at most {wire.MESSAGE_CHUNKS}')
    if int(parts['chunks'].sum()) != len(refs):
      raise WireError(f'{len(refs)} chunks for parts of {int(parts["chunks"].sum())}')
    if len(details) and (int(details['table'].max()) >= len(self.tables)
                      or int(details['signature'].max()) >= len(self.signatures)):  # fmt: skip
      raise WireError('an item of a table or signature that was not declared')
    if len(details) and (details['key'] == 0).any():
      raise WireError('an item without a key')
    needed = sum(len(self.signatures[s].leaves) for s in details['signature'].tolist())
    if needed != len(parts):
      raise WireError(f'{len(parts)} parts, expected {needed}')

  def _part(self, leaf: Leaf, details: list[int], numbers: Iterator[int]) -> Part:
    count, offset, rows = details
    try:
      chunks = tuple([self.pieces[next(numbers)] for _ in range(count)])
    except KeyError as e:
      raise WireError(f'a part over chunk {e}, which there is not') from None
    wire.check_part(leaf, chunks, offset, rows)
    return chunks, offset, rows


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
    streams: by client, those heard of longest ago first.
  """

  def __init__(self, registry: Registry, listener: Listener, most_bytes: int) -> None:
    self._registry, self._listener, self._most_bytes = registry, listener, most_bytes
    self._store = registry.store
    self.streams: collections.OrderedDict[int, Stream] = collections.OrderedDict()
    self._signatures: collections.OrderedDict[str, Signature] = collections.OrderedDict()
    self._flight = InFlight(self._store.lock)  # of all clients, who do the waiting themselves
    self._refusing: set[tuple[str, str]] = set()  # tables and clients of which refusals were logged

  # --- streams

  def join(self, peer: Peer) -> Stream:
    """The stream of a client, which goes on over a new connection."""
    known = self.streams.get(peer.client)
    if known is not None and known.peer is not None:
      self._listener.drop(known.peer, 'its stream goes on over another connection')
    stream = self.streams.pop(peer.client, None) or Stream()
    self.streams[peer.client] = stream  # as the newest
    stream.peer = peer
    while len(self.streams) > STREAMS:
      oldest = next((i for i, s in self.streams.items() if s.peer is None), None)
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
      self.streams.pop(peer.client, None)

  def snapshot(self) -> dict[str, Any]:
    """All streams, for a checkpoint."""
    numbers = [[i, s.number, sorted({*s.waiting, *s.missing})] for i, s in self.streams.items()]
    waited = [[i, sorted({*s.waiting, *s.unheard})] for i, s in self.streams.items()]
    return dict(streams=numbers, waited=[w for w in waited if w[1]])

  def restore(self, saved: dict[str, Any]) -> None:
    """What `snapshot` gave."""
    waited = dict(saved.get('waited', ()))
    for client, number, missing in saved['streams']:
      self.streams[client] = Stream(number, set(missing), set(waited.get(client, ())))

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
    stream.specs += map(wire.read_spec, details.get('specs', []))
    for one in details.get('signatures', []):
      stream.signatures.append(self._signature(one))
      stream.declared += len(stream.signatures[-1].leaves)
    stream.declared += sum(map(len, details.values()))
    if stream.declared > DECLARATIONS:
      raise WireError(f'more than {DECLARATIONS} tables, specs and leaves of signatures')

  def _signature(self, details: Any) -> Signature:
    """One object for each signature, whoever tells it: tables compare by identity first."""
    signature = wire.read_signature(details)
    text = json.dumps(wire.packed_signature(signature))
    signature = self._signatures.pop(text, signature)
    self._signatures[text] = signature
    if len(self._signatures) > SIGNATURES:
      self._signatures.popitem(last=False)
    return signature

  def insert(self, peer: Peer, message: int, arrays: list[memoryview]) -> None:
    """Chunks, and items over them and over those that came before; they are acknowledged."""
    if not message:
      raise WireError('an insert with message 0, which is that of ACKs of items that waited')
    stream, counts = peer.state.stream, self._listener.counts
    chunks, details, parts, refs, released = map(wire.records, arrays, wire.INSERTED)
    stream.take_chunks(self._store, chunks, arrays[5])
    counts['pieces'] += len(chunks)
    if stream.kept_bytes > self._most_bytes:
      what = f'its writers keep {stream.kept_bytes:,} bytes of steps'
      self._refuse(peer, what, self._most_bytes)
      return
    done, waiting, groups, lost = stream.take_items(details, parts, refs)
    counts['repeated'] += len(done) + len(waiting)
    if lost:
      counts['lost'] = min(counts['lost'] + lost, 2**63)  # else it can't be sent
      what = f'{lost} items of {peer.name} are lost with an earlier process'
      self._listener.log(what, logging.WARNING)
    outcome = Outcome(done, waiting, {})
    for entry, items in groups:
      self._put(peer, entry, items, outcome)
    if len(stream.waiting) > wire.MOST_ITEMS:
      raise WireError(f'items beyond the {wire.MOST_ITEMS} that may wait')
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
      admitted.setdefault(stream, []).append(number)
    for stream, numbers in admitted.items():
      if stream.peer is not None:
        self._ack(stream.peer, 0, '', numbers, [], [])

  # --- what clients hear

  def _ack(self, peer: Peer, message: int, why: str, *numbers: list[int]) -> None:
    """Items that are in, that wait, and that are refused; `why` is the first refusal's or wait's."""
    arrays = [np.array(x, '<u8') for x in numbers]
    self._listener.send(peer, wire.ACK, message, why[:1000], arrays=arrays)

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
      count, size = len(entry.held), entry.account.bytes
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
