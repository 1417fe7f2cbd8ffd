"""`podrace replay`: podrace.tables behind a socket. Imports no JAX.

One thread has the network and the tables. Items come with the chunks that they are the first to need, packed
by their writer; they are kept and sent on as they came. A call that would wait in the process waits here as
an entry in a queue, so nobody holds up anybody else.

A client's items are numbered. What has come is remembered by the client's stream, which outlives its
connection and is in the checkpoint, at the same moment as the tables: so an item that is sent again is known.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import json
import logging
import math
import shutil
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from podrace import tables
from podrace.net.announce import Announcement
from podrace.net.frame import Kind, WireError
from podrace.net.lines import Say
from podrace.net.listener import Listen, Listener, Peer, Serving
from podrace.net.session import REFUSED, SILENCE
from podrace.net.text import plain_lines
from podrace.process import lock, on_signals
from podrace.service import wire
from podrace.service.contents import Contents, difference
from podrace.tables import checkpoint
from podrace.tables.chunks import Account, Chunk, ChunkStore
from podrace.tables.items import Draws, Item, Signature
from podrace.tables.table import Table
from podrace.tables.waiting import InFlight, Pending

STREAMS = 65536  # remembered; then the one that was heard of longest ago is forgotten
TABLES = 1024
SIGNATURES = 1024  # of which one object each is kept
REQUESTS = 4096  # samples that one client waits for
DECLARATIONS = 65536  # of one connection: tables, specs, and leaves of signatures
MESSAGE_UNPACKED = 2**30  # bytes that the chunks of one message may take, to be looked at
SAVES_AT_ONCE, SAVE_SECONDS = (
  5,
  30.0,
)  # checkpoints that clients ask for: so many, then one in so many seconds
SAVES = 256  # that wait for a checkpoint to be written
SLACK = 2**20  # bytes of a frame beyond what is counted, as of items and packed steps
CHUNK_BYTES = 512  # that a chunk takes besides its rows, about
HELD = 4  # times what one client may keep: what may wait for a table's limiter, of all
HELD_ITEMS = 2**20  # that may wait for a table's limiter, of all clients
KEEP = 2  # checkpoints
REFUSED_ITEMS = 2048  # of a stream, that are refused again if they are sent again

log = logging.getLogger('podrace.service')


class Stream:
  """What one client has written, over all its connections."""

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
    self.name = ''
    self.begin()

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

  def begin(self) -> None:
    """For a new connection, in which everything is said anew."""
    self.tables: list[Table] = []
    self.specs: list[tuple[np.dtype, tuple[int, ...]]] = []
    self.signatures: list[Signature] = []
    self.declared = 0
    self.pieces: dict[int, Chunk] = {}
    self.next_piece = 0


class Reading:
  """What a client's sampling needs: what it has been sent, and what it has not yet said to have."""

  def __init__(self) -> None:
    self.signatures: set[int] = set()
    self.unread: collections.deque[int] = collections.deque()  # bytes of answers
    self.bytes = self.answered = 0
    self.waiting: dict[int, Request] = {}

  @property
  def full(self) -> bool:
    """Whether it is sent no more before it says what it has."""
    return self.bytes > wire.MOST_BYTES or len(self.unread) >= wire.MOST_UNREAD


class Request:
  """A sample that a client waits for."""

  def __init__(
    self, peer: Peer, number: int, table: Table, n: int, least: int, peek: bool, end: float
  ) -> None:
    self.peer, self.number, self.table, self.n, self.least, self.peek, self.end = (
      peer, number, table, n, least, peek, end,
    )  # fmt: skip
    self.draws = Draws([], [])
    self.since = time.monotonic()
    self.over = False


@dataclasses.dataclass
class Client:
  """A peer's state."""

  stream_id: int
  stream: Stream
  reading: Reading
  inserted: int = 0
  sampled: int = 0
  refused: int = 0  # items


class ReplayServer:
  """Tables behind a socket, while it is entered.

  Args:
    address: to listen at.
    dir: where checkpoints are kept; the newest is read at the start. None for no checkpoints.
    tables: settings by name (`wire.packed_settings`), made at the start; clients may have others made.
      While it is open no other service may keep its own there.
    checkpoint_every: seconds; 0 for on demand and at the end only.
    most_bytes: of the steps that one client's writers keep.
    say: gets what is worth a line, and its level.

  Raises:
    CheckpointError: if the newest checkpoint is damaged, or its tables are not as given; if another
      service has `dir`, or it is no directory that can be written to.
    ValueError: if a number can't be.
    SecurityError: see podrace.net.keys.
  """

  service, kinds = wire.SERVICE, wire.OF_CLIENTS

  def __init__(
    self,
    address: str,
    dir: Path | None = None,
    keys: Path | None = None,
    insecure: bool = False,
    tables: dict[str, dict[str, Any]] | None = None,
    checkpoint_every: float = 0.0,
    most_bytes: int = 2**30,
    peer_timeout: float = SILENCE,
    say: Say = log.log,
    announce: Announcement | None = None,
  ) -> None:
    self.listener = Listener(Listen(address, keys, insecure, peer_timeout, announce), self, say)
    self.log, self.counts, self.send = self.listener.log, self.listener.counts, self.listener.send
    self._serving: Serving | None = None
    if not 0 <= checkpoint_every < math.inf:
      raise ValueError(f'--checkpoint-every must be 0 or more seconds, not {checkpoint_every}')
    if checkpoint_every and dir is None:
      raise ValueError(
        f'--checkpoint-every {checkpoint_every:g} needs --dir, where checkpoints are kept'
      )
    if most_bytes < 1:
      raise ValueError(f'--client-bytes must be at least 1, not {most_bytes}')
    self.dir, self.checkpoint_every, self.most_bytes = dir, checkpoint_every, most_bytes
    self.store = ChunkStore(cache_bytes=0)
    self.tables: dict[str, Table] = {}
    self.settings: dict[str, dict[str, Any]] = {}
    self._streams: collections.OrderedDict[int, Stream] = collections.OrderedDict()
    self._signatures: collections.OrderedDict[str, Signature] = collections.OrderedDict()
    self._sampled_signatures: dict[int, tuple[int, Signature]] = {}  # by id
    self._held: dict[str, collections.deque[tuple[Pending, Stream, int]]] = {}
    self._held_accounts: dict[str, Account] = {}
    self._flight = InFlight(self.store.lock)  # of all clients, who do the waiting themselves
    self._signature_numbers = itertools.count(1)
    self._readers: dict[str, collections.deque[Request]] = {}
    self._peekers: dict[str, collections.deque[Request]] = {}
    self._deadlines: list[tuple[float, int, Request]] = []
    self._order = itertools.count()
    self._touched: set[str] = set()
    self._saver: threading.Thread | None = None
    self._save_wanted: list[tuple[Peer, int]] = []
    self._saved_at = time.monotonic()
    self._saves_left, self._saves_at = float(SAVES_AT_ONCE), self._saved_at
    self._not_saved = ''  # why the last checkpoint was not written
    self._refusing: set[tuple[str, str]] = set()  # tables and clients of which it knows
    self._contents: dict[str, Contents] = {}  # of tables that were made with it
    self._lock: IO[str] | None = None
    self.saved: list[Path] = []
    for name, details in (tables or {}).items():
      self._make(name, details)
    if dir is not None:
      self._lock = locked(dir)
      try:
        self._restore(dir)
      except BaseException:
        self._lock.close()
        raise

  # --- tables --------------------------------------------------------------------------------------

  def _make(self, name: str, details: dict[str, Any]) -> Table:
    if wire.CONTENTS in details:
      Contents(details[wire.CONTENTS])  # which can raise, before anything is made
    table = wire.make_table(name, self.store, details)
    self.tables[name], self.settings[name] = table, dict(details)
    self._held[name] = collections.deque()
    self._readers[name], self._peekers[name] = collections.deque(), collections.deque()
    self._held_accounts[name] = Account()
    self._expect(name)
    return table

  def _expect(self, name: str) -> None:
    """Has a table take such items only as its settings say, if they do."""
    if wire.CONTENTS in self.settings[name]:
      self._contents[name] = contents = Contents(self.settings[name][wire.CONTENTS])
      table = self.tables[name].contents
      table.signature = table.signature or contents.signature

  def _restore(self, dir: Path) -> None:
    """The newest checkpoint, if there is one."""
    for partial in dir.glob('.*.partial-*'):  # of a process that was killed while it wrote
      shutil.rmtree(partial, ignore_errors=True)
      self.log(f'removed {partial}, which was half-written')
    self.saved = sorted(p for p in dir.iterdir() if p.name.isdigit())
    self._number = int(self.saved[-1].name) if self.saved else 0
    if not self.saved:
      return
    newest = self.saved[-1]
    try:
      extra = checkpoint.extra_of(newest)
    except tables.CheckpointError as e:
      before = f'to begin with {self.saved[-2]}' if self.saved[1:] else 'to begin without one'
      raise tables.CheckpointError(f'{e}; {before}, move {newest} elsewhere') from e
    if not isinstance(extra, dict) or 'streams' not in extra:
      raise tables.CheckpointError(f'checkpoint {newest} is not of a replay service')
    for name, details in extra['tables'].items():
      if name not in self.tables:
        self._make(name, details)
      elif reasons := wire.settings_differences(name, details, self.settings[name]):
        raise tables.CheckpointError(
          f'checkpoint {newest} has other settings than --table: ' + '; '.join(reasons)
        )
      else:
        self.settings[name] = details  # of the run, too
    for name in self.tables.keys() - extra['tables'].keys():
      raise tables.CheckpointError(
        f'checkpoint {newest} has tables {sorted(extra["tables"])}, and no {name!r}: '
        'clients can have new tables made, --table only those of the checkpoint'
      )
    tables.restore(self.store, newest)
    for name in self.tables:
      self._expect(name)
    waited = dict(extra.get('waited', ()))
    for stream_id, number, missing in extra['streams']:
      self._streams[stream_id] = Stream(number, set(missing), set(waited.get(stream_id, ())))
    items = sum(map(len, self.tables.values()))
    self.log(f'restored {newest}: {len(self.tables)} tables, {items:,} items')

  def reasons_against(self, details: dict[str, Any]) -> list[str]:
    if not details['client']:
      raise WireError('a hello of client 0, which none is')
    return []

  def welcome(self, peer: Peer, details: dict[str, Any]) -> dict[str, Any]:
    stream_id = details['client']
    known = self._streams.get(stream_id)
    if known is not None and known.peer is not None:
      self.listener.drop(known.peer, 'its stream goes on over another connection')
    stream = self._streams.pop(stream_id, None) or Stream()
    self._streams[stream_id] = stream  # as the newest
    stream.peer, stream.name = peer, peer.name
    while len(self._streams) > STREAMS:
      oldest = next((i for i, s in self._streams.items() if s.peer is None), None)
      if oldest is None:
        break
      del self._streams[oldest]
    peer.state = Client(stream_id, stream, Reading())
    self.log(f'{peer.name} joins')
    return dict(
      most_items=wire.MOST_ITEMS,
      most_bytes=self.most_bytes,
      largest=self.largest,
      number=stream.number,
      sizes=self._sizes(),
      waiting=np.array(sorted(stream.waiting), '<u8').tobytes(),
      missing=np.array(sorted(stream.missing), '<u8').tobytes(),
    )

  def welcomed(self, peer: Peer) -> None:
    pass

  def why_wait(self, details: dict[str, Any]) -> str:
    return ''

  def drained(self, peer: Peer) -> None:
    pass

  def forgive(self, seconds: float) -> None:
    pass

  def tick(self, now: float) -> None:
    pass

  def memory(self, peer: Peer, kind: Kind, fields: Sequence[Any], size: int) -> None:
    return None

  def left(self, peer: Peer, reason: str, level: int) -> None:
    client: Client = peer.state
    for request in client.reading.waiting.values():
      self._forget(request)
    client.reading.waiting.clear()
    stream = client.stream
    if stream.peer is peer:
      stream.peer = None
      with self.store.lock:
        for chunk in stream.pieces.values():
          self.store.drop(chunk, stream.account)
      stream.begin()
    if peer.finished or not stream.number:
      self._streams.pop(client.stream_id, None)

  def _sizes(self) -> dict[str, int]:
    """Of tables, so that clients of several servers can sample in proportion."""
    return {name: len(table) for name, table in itertools.islice(self.tables.items(), 256)}

  # --- what clients say ----------------------------------------------------------------------------

  def handle(self, peer: Peer, kind: Kind, fields: Sequence[Any], arrays: list[memoryview]) -> None:
    if kind is wire.INSERT:
      self._insert(peer, fields[0], arrays)
    elif kind is wire.SAMPLE:
      self._sample(peer, *fields)
    elif kind is wire.DECLARE:
      self._declare(peer.state.stream, fields[0])
    elif kind is wire.CANCEL:
      if request := peer.state.reading.waiting.get(fields[0]):
        self._answer(request, f'cancelled by {peer.name}')
    else:
      self._request(peer, kind, fields[0], fields[1:], arrays)

  def _request(
    self, peer: Peer, kind: Kind, number: int, args: Sequence[Any], arrays: list[memoryview]
  ) -> None:
    """What is answered at once, or by an error that is the client's to raise."""
    try:
      if kind is wire.SAVE:
        self._want_save(peer, number)
        return
      does: dict[Kind, Any] = {
        wire.TABLE: self._table,
        wire.UPDATE: self._update,
        wire.DELETE: self._delete,
        wire.INFO: self._info,
      }
      answer = does[kind](*args, *arrays)
    except ValueError as e:
      self.send(peer, wire.ANSWER, number, False, plain_lines(e))
    else:
      self.send(peer, wire.ANSWER, number, True, answer)

  def _want_save(self, peer: Peer, number: int) -> None:
    """Lets a client know when a checkpoint is written."""
    if self.dir is None:
      raise ValueError(f'{self.address} has no --dir, so it keeps no checkpoints')
    if len(self._save_wanted) >= SAVES:
      raise ValueError(f'{SAVES} others wait for a checkpoint already')
    self._save_wanted.append((peer, number))
    self._save_for_clients()

  def _table(self, name: str, details: dict[str, Any]) -> dict[str, Any]:
    table = self.tables.get(name)
    if table is None:
      if not details:
        raise ValueError(
          f'{self.address} has no table {name!r}; it has {sorted(self.tables)}. '
          'Give settings, with which it would be made'
        )
      if len(self.tables) >= TABLES or not 0 < len(name) <= 200:
        raise ValueError(f'{name!r} is no name for a table, or there are {TABLES} already')
      table = self._make(name, details)
      self.log(f'made table {name!r}: {json.dumps(details)}')
    elif details and (reasons := self._differences(name, details)):
      self.log('\n  '.join(['refused:', *reasons]), logging.WARNING)
      raise ValueError('\n  '.join(['the server refused:', *reasons]))
    most = min(table.contents.sampler.most, table.contents.remover.most)
    return dict(settings=self.settings[name], most=most)

  def _differences(self, name: str, details: dict[str, Any]) -> list[str]:
    """A line for each setting that is another one; contents are taken over where there were none."""
    there, asked = self.settings[name], details.get(wire.CONTENTS)
    reasons = wire.settings_differences(name, there, details)
    if asked is None or reasons or asked == there.get(wire.CONTENTS):
      return reasons
    signature, wanted = self.tables[name].contents.signature, Contents(asked).signature
    if wire.CONTENTS in there:
      return [f'table {name!r}: {difference(there[wire.CONTENTS], asked)}']
    if signature is not None and signature.leaves != wanted.leaves:
      return [f'table {name!r} has items of other columns than the contents that are asked for']
    self.settings[name] = {**there, wire.CONTENTS: asked}
    self._expect(name)
    return []

  def _named(self, name: str) -> Table:
    if name not in self.tables:
      raise ValueError(f'{self.address} has no table {name!r}; it has {sorted(self.tables)}')
    return self.tables[name]

  def _update(self, name: str, keys: memoryview, priorities: memoryview) -> int:
    found = self._keys(keys)
    self.counts['updated'] += len(found)
    return self._named(name).update_priorities(found, wire.records(priorities, '<f8'))

  def _delete(self, name: str, keys: memoryview) -> int:
    table = self._named(name)
    self._touched.add(name)
    return table.delete(self._keys(keys))

  @staticmethod
  def _keys(frame: Any) -> np.ndarray:
    keys = wire.records(frame, '<i8')
    if len(keys) > wire.MESSAGE_KEYS:
      raise WireError(f'{len(keys)} keys in a message, at most {wire.MESSAGE_KEYS}')
    return keys

  def _info(self, name: str) -> dict[str, Any]:
    table = self._named(name)
    return dict(
      dataclasses.asdict(table.info()),
      why_no_sample=table.why_no_sample(),
      why_no_insert=table.inserts.why_not(),
    )

  # --- writing -------------------------------------------------------------------------------------

  def _declare(self, stream: Stream, details: dict[str, Any]) -> None:
    """What the numbers in this connection's INSERTs will mean."""
    if details.keys() - {'tables', 'specs', 'signatures'} or not all(
      isinstance(x, list) for x in details.values()
    ):
      raise WireError('a declaration of something else than lists of tables, specs and signatures')
    for name in details.get('tables', []):
      if not isinstance(name, str) or name not in self.tables:
        raise WireError(f'a declaration of a table {str(name)[:60]!r}, which there is not')
      stream.tables.append(self.tables[name])
    for spec in details.get('specs', []):
      stream.specs.append(wire.read_spec(spec))
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

  def _insert(self, peer: Peer, message: int, frames: list[memoryview]) -> None:
    if not message:
      raise WireError('an insert with message 0, which is that of ACKs of items that waited')
    client: Client = peer.state
    stream = client.stream
    self._take_pieces(stream, wire.records(frames[0], wire.CHUNK), frames[5])
    if stream.kept_bytes > self.most_bytes:
      self._refuse(peer, f'its writers keep {stream.kept_bytes:,} bytes of steps', self.most_bytes)
      return
    done, waiting, groups = self._take_items(stream, frames)
    refused: list[int] = []
    reason = ''
    for table, items in groups:
      self._touched.add(table.name)
      items, outcomes = self._checked(table, items)
      outcomes += table.inserts.submit_all(
        [item for _, item in items[len(outcomes) :]], self._flight
      )
      for (number, _), outcome in zip(items, outcomes, strict=True):
        if outcome is None:
          done.append(number)
        elif isinstance(outcome, Pending):
          stream.waiting[number] = outcome
          self._held[table.name].append((outcome, stream, number))
          self._account(outcome, stream, table.name, self.store.hold)
          waiting.append(number)
        else:
          refused.append(number)
          stream.refuse(number)
          reason = reason or str(outcome)
          self._tell_refused(table, peer, outcome)
    client.refused += len(refused)
    if len(stream.waiting) > wire.MOST_ITEMS:
      raise WireError(f'items beyond the {wire.MOST_ITEMS} that may wait')
    self._release(stream, wire.records(frames[4], '<u8'))
    client.inserted += len(done) + len(waiting)
    self.counts['items'] += len(done) + len(waiting)
    self.counts['refused items'] += len(refused)
    for table, _ in groups:
      held, bytes_held = self._held[table.name], self._held_accounts[table.name].bytes
      if len(held) > HELD_ITEMS or bytes_held > HELD * self.most_bytes:
        what = f'{len(held):,} items of {bytes_held:,} bytes wait for table {table.name!r}'
        self._refuse(peer, what, HELD * self.most_bytes)
        return
    why = groups[-1][0].inserts.why_not() if waiting and groups else ''
    self._ack(peer, message, reason or why, done, waiting, refused)

  def _checked(self, table: Table, items: list[Any]) -> tuple[list[Any], list[Any]]:
    """The items, those first that are not what the table must hold; and why these are not."""
    contents = self._contents.get(table.name)
    if contents is None:
      return items, []
    good, bad, reasons = [], [], list[Any]()
    most = contents.unpacked + MESSAGE_UNPACKED
    for one in items:
      try:
        if contents.unpacked > most:
          raise ValueError(f'a message of more than {MESSAGE_UNPACKED:,} bytes unpacked')
        contents.check(one[1])
        good.append(one)
      except ValueError as e:
        bad.append(one)
        reasons.append(ValueError(f'table {table.name!r}: {e}'))
    return bad + good, reasons

  def _tell_refused(self, table: Table, peer: Peer, reason: ValueError) -> None:
    """Of each client and table the first time: the others are counted, and their writers get them."""
    if (table.name, peer.name) not in self._refusing and len(self._refusing) < STREAMS:
      self._refusing.add((table.name, peer.name))
      self.log(f'refused an item of {peer.name} (others are counted): {reason}', logging.WARNING)

  def _refuse(self, peer: Peer, what: str, allowed: int) -> None:
    """Ends the session of a client with which too much is kept."""
    details = (
      f'{what}, of which {allowed:,} are allowed: shorten history or max_in_flight, or start the '
      'service with more --client-bytes'
    )
    self.listener.drop(peer, details)
    self.send(peer, REFUSED, [details])  # in another session it would be the same

  def _account(self, pending: Pending, stream: Stream, name: str, do: Any) -> None:
    """Counts (or not any more) an item that waits as its client's and among the table's."""
    with self.store.lock:
      for part in pending.item.parts:
        for chunk in part[0]:
          do(chunk, stream.account)
          do(chunk, self._held_accounts[name])

  def _ack(self, peer: Peer, message: int, why: str, *numbers: list[int]) -> None:
    """Items that are in, that wait, and that are refused; `why` is the first refusal's or wait's."""
    arrays = [np.array(x, '<u8') for x in numbers]
    self.send(peer, wire.ACK, message, why[:1000], arrays=arrays)

  def _take_pieces(self, stream: Stream, details: np.ndarray, data: memoryview) -> None:
    """New chunks of a stream; each is held for it until it says otherwise."""
    if len(details) > wire.MESSAGE_CHUNKS:
      raise WireError(f'{len(details)} chunks in a message, at most {wire.MESSAGE_CHUNKS}')
    if int(details['bytes'].astype(np.int64).sum()) != len(data):
      raise WireError(f'{len(data)} bytes of chunks, which differ from what is said of them')
    self.counts['pieces'] += len(details)
    start, store, made = 0, self.store, []
    for spec, rows, how, size in details.tolist():
      if spec >= len(stream.specs) or not rows:
        raise WireError(f'a chunk of {rows} rows of spec {spec}')
      dtype, shape = stream.specs[spec]
      own = data[start : start + size]
      start += size
      wire.check_chunk(own, how, rows * wire.row_bytes(dtype, shape))
      if (
        how != wire.AS_IS
        and rows > 1
        and rows * wire.row_bytes(dtype, shape) > wire.UNPACKED_CHUNK_BYTES
      ):
        raise WireError(
          f'a packed chunk of {rows} rows with more than {wire.UNPACKED_CHUNK_BYTES:,} bytes'
        )
      kept = bytes(own)
      if how == wire.AS_IS:
        chunk = store.chunk(np.frombuffer(kept, dtype).reshape(rows, *shape), rows)
      else:
        chunk = store.packed_chunk(kept, how == wire.DIFFERENCES, dtype, shape, rows)
      made.append(chunk)
    with store.lock:
      for chunk in made:
        store.hold(chunk, stream.account)
        stream.pieces[stream.next_piece] = chunk
        stream.next_piece += 1

  def _take_items(self, stream: Stream, frames: list[Any]) -> Any:
    """(done, waiting, [(table, [(number, item)])]): items that came before, and the new ones."""
    details = wire.records(frames[1], wire.ITEM)
    if len(details) > wire.MESSAGE_ITEMS:
      raise WireError(f'{len(details)} items in a message, at most {wire.MESSAGE_ITEMS}')
    parts, refs = wire.records(frames[2], wire.PART), wire.records(frames[3], '<u8')
    if len(refs) > wire.MESSAGE_CHUNKS:
      raise WireError(f'{len(refs)} references to chunks, at most {wire.MESSAGE_CHUNKS}')
    if int(parts['chunks'].sum()) != len(refs):
      raise WireError(f'{len(refs)} chunks for parts of {int(parts["chunks"].sum())}')
    if len(details) and (int(details['table'].max()) >= len(stream.tables)
                      or int(details['signature'].max()) >= len(stream.signatures)):  # fmt: skip
      raise WireError('an item of a table or signature that was not declared')
    if len(details) and (details['key'] == 0).any():
      raise WireError('an item without a key')
    needed = sum(len(stream.signatures[s].leaves) for s in details['signature'].tolist())
    if needed != len(parts):
      raise WireError(f'{len(parts)} parts, expected {needed}')
    done: list[int] = []
    waiting: list[int] = []
    groups: list[tuple[Table, list[Any]]] = []
    found: set[int] = set()
    newest, lost, unheard = stream.number, 0, stream.unheard
    part_rows, numbers = iter(parts.tolist()), iter(refs.tolist())
    for number, key, priority, table_number, s in details.tolist():
      signature = stream.signatures[s]
      own = tuple([self._part(stream, leaf, next(part_rows), numbers) for leaf in signature.leaves])
      if number > newest:  # those in between were in an earlier process, after its last checkpoint
        lost += number - newest - 1 + len(unheard - found)
        newest, unheard = number, set()
      elif number in stream.missing and number not in found:
        found.add(number)
      else:  # it has come before
        self.counts['repeated'] += 1
        (waiting if number in stream.waiting else done).append(number)
        continue
      table = stream.tables[table_number]
      if not groups or groups[-1][0] is not table:
        groups.append((table, []))
      groups[-1][1].append((number, Item(abs(key), priority, signature, own, amends=key < 0)))
    stream.number = newest
    stream.missing -= found
    stream.unheard = unheard - found
    if lost:
      self.counts['lost'] = min(self.counts['lost'] + lost, 2**63)  # else it can't be sent
      self.log(f'{lost} items of {stream.name} are lost with an earlier process', logging.WARNING)
    return done, waiting, groups

  def _part(self, stream: Stream, leaf: Any, details: Any, numbers: Any) -> Any:
    count, offset, rows = details
    try:
      chunks = tuple([stream.pieces[next(numbers)] for _ in range(count)])
    except KeyError as e:
      raise WireError(f'a part over chunk {e}, which there is not') from None
    total = 0
    for chunk in chunks:
      if chunk.dtype != leaf.dtype or chunk.shape != leaf.shape:
        raise WireError(f'a chunk of {chunk.dtype}{list(chunk.shape)} in {leaf}')
      total += chunk.length
    if not chunks or not rows or offset + rows > total or offset >= chunks[0].length:
      raise WireError(f'rows {offset} to {offset + rows} of {total} in {leaf}')
    if leaf.single and rows != 1:
      raise WireError(f'{rows} rows in {leaf}, which is single')
    return chunks, offset, rows

  def _release(self, stream: Stream, numbers: np.ndarray) -> None:
    with self.store.lock:
      for number in numbers.tolist():
        chunk = stream.pieces.pop(number, None)
        if chunk is None:
          raise WireError(f'a chunk {number} that is released, which there is not')
        self.store.drop(chunk, stream.account)

  # --- sampling ------------------------------------------------------------------------------------

  def _sample(
    self,
    peer: Peer,
    number: int,
    name: str,
    n: int,
    least: int,
    peek: bool,
    seconds: float,
    received: int,
  ) -> None:
    reading: Reading = peer.state.reading
    if not 1 <= least <= n <= wire.MOST_ITEMS or name not in self.tables or math.isnan(seconds):
      raise WireError(f'a wish for {least} to {n} samples of {name[:60]!r} within {seconds} s')
    if number in reading.waiting or len(reading.waiting) >= REQUESTS:
      raise WireError(f'sample {number}, which waits, or is one too many')
    self._read(reading, received)
    end = math.inf if seconds < 0 else time.monotonic() + seconds
    request = Request(peer, number, self.tables[name], n, least, peek, end)
    reading.waiting[number] = request
    self._queue(request).append(request)
    request.table.readers(1, peek)
    if end < math.inf:
      heapq.heappush(self._deadlines, (end, next(self._order), request))
      waiting = sum(map(len, (*self._readers.values(), *self._peekers.values())))
      if len(self._deadlines) > 1000 + 2 * waiting:
        self._deadlines = [d for d in self._deadlines if not d[2].over]
        heapq.heapify(self._deadlines)
    self._touched.add(name)
    self._settle(name)

  def _read(self, reading: Reading, received: int) -> None:
    """A client has so many of the samples that it was sent in this session."""
    if received > reading.answered:
      raise WireError(f'{received} samples that have come, of {reading.answered}')
    if reading.answered - len(reading.unread) < received:
      self._touched.update(r.table.name for r in reading.waiting.values())
    while reading.answered - len(reading.unread) < received:
      reading.bytes -= reading.unread.popleft()

  def ping(self, peer: Peer, said: Any) -> dict[str, int]:
    if said is not None:  # a client that never samples need not tell
      if type(said) is not int or said < 0:
        raise WireError('a PING without the number of samples that have come')
      self._read(peer.state.reading, said)
    return self._sizes()

  def turned(self) -> None:
    while self._touched:
      self._settle(self._touched.pop())
    now = time.monotonic()
    while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].over):
      request = heapq.heappop(self._deadlines)[2]
      if not request.over:
        waited = f'timed out after {now - request.since:.3g} s'
        what = f'sample from table {request.table.name!r}'
        table = request.table
        why = table.why_no_peek() if request.peek else table.why_no_sample()
        self._answer(request, f'{what} {waited}: {why}')
    if self.checkpoint_every and now - self._saved_at > self.checkpoint_every:
      self._save()
    self._save_for_clients()

  def wait(self) -> float:
    if not self._deadlines:
      return 1.0
    return self._deadlines[0][0] - time.monotonic()

  def _settle(self, name: str) -> None:
    """Serves who waits for a table, in their order, then tells whose items have gone in."""
    self._serve(self.tables[name], self._readers[name])
    self._serve(self.tables[name], self._peekers[name])
    held = self._held[name]
    admitted: dict[Stream, list[int]] = {}
    while held and held[0][0].done:
      pending, stream, number = held.popleft()
      self._account(pending, stream, name, self.store.drop)
      stream.waiting.pop(number, None)
      admitted.setdefault(stream, []).append(number)
    for stream, numbers in admitted.items():
      if stream.peer is not None:
        self._ack(stream.peer, 0, '', numbers, [], [])

  def _serve(self, table: Table, readers: collections.deque[Request]) -> None:
    """Answers requests in their order, until one must wait; passes over clients that do not read."""
    while readers:
      request = readers[0]
      if self._serves_not(request):
        if len(readers) == 1:
          break
        readers.rotate(-1)
        if all(map(self._serves_not, readers)):
          break
        continue
      table.draw(request.draws, request.n, request.peek)
      if len(request.draws.items) < request.least:
        break
      self._answer(request, '')

  def _serves_not(self, request: Request) -> bool:
    """Whether it does not read what it has asked for: nothing is drawn for it."""
    return request.peer.state.reading.full or request.peer.gone

  def _forget(self, request: Request) -> None:
    request.over = True
    request.table.readers(-1, request.peek)
    self._queue(request).remove(request)

  def _queue(self, request: Request) -> collections.deque[Request]:
    """Where it waits: a peek does not wait for the limiter, nor for samples that do."""
    return (self._peekers if request.peek else self._readers)[request.table.name]

  def _answer(self, request: Request, reason: str) -> None:
    """Sends what was drawn, and why it is not more."""
    self._forget(request)
    peer, draws, table = request.peer, request.draws, request.table
    client: Client = peer.state
    del client.reading.waiting[request.number]
    if not draws.items:
      client.reading.answered += 1
      client.reading.unread.append(0)
      self.send(peer, wire.SAMPLES, request.number, 0, reason, len(table), arrays=[b''] * 5)
      return
    try:
      frames = wire.sample_frames(draws)
    except ValueError as e:
      why = f'sample from table {table.name!r}: {e}'
      self.send(peer, wire.ANSWER, request.number, False, why)
      return
    number = self._signature_number(peer, draws.items[0].signature)
    size = sum(memoryview(f).nbytes for f in frames)
    client.reading.answered += 1
    client.reading.unread.append(size)
    client.reading.bytes += size
    client.sampled += len(draws.items)
    self.counts['samples'] += len(draws.items)
    self.send(peer, wire.SAMPLES, request.number, number, reason, len(table), arrays=frames)

  def _signature_number(self, peer: Peer, signature: Signature) -> int:
    """By which a client knows a signature; it is sent now, if it was not before."""
    known = self._sampled_signatures
    if id(signature) not in known:
      if len(known) >= SIGNATURES:  # from now on they are sent with other numbers
        known.clear()
        for other in self.peers:
          other.state.reading.signatures.clear()
      known[id(signature)] = next(self._signature_numbers), signature
    number, _ = known[id(signature)]
    reading: Reading = peer.state.reading
    if number not in reading.signatures:
      reading.signatures.add(number)
      self.send(peer, wire.SIGNATURE, number, wire.packed_signature(signature))
    return number

  # --- checkpoints ---------------------------------------------------------------------------------

  def _save(self) -> None:
    """Begins a checkpoint of this moment, if none is being written; who has asked hears of it."""
    if self.dir is None or (self._saver is not None and self._saver.is_alive()):
      return
    self._saved_at = time.monotonic()
    wanted, self._save_wanted = self._save_wanted, []
    self._number += 1
    path = self.dir / f'{self._number:08}'
    self._not_saved = f'{path} is not complete'

    def write(taken: checkpoint.Snapshot) -> None:
      try:
        details = checkpoint.write(taken, path)
      except BaseException as e:  # whatever it is, and be it a want of memory: it is no checkpoint
        why = why_not(path, e)
        self.listener.call(lambda: self._saved(path, (False, why), why, wanted))
        return
      line = (
        f'checkpoint {path}: {details["bytes"]:,.0f} bytes in {details["seconds"]:.2f} s, which held up '
        f'traffic for {details["blocked_s"] * 1e3:.1f} ms'
      )
      self.listener.call(lambda: self._saved(path, (True, str(path)), line, wanted))

    try:
      saver = threading.Thread(target=write, args=(self._snapshot(),), name='checkpoint')
      saver.start()
    except Exception as e:  # no memory, or no more threads: perhaps there are the next time
      why = why_not(path, e)
      self._saved(path, (False, why), why, wanted)
    else:
      self._saver = saver

  def _save_for_clients(self) -> None:
    """A checkpoint for all who wait for one, unless clients have had too many lately; then `turned` makes it."""
    if not self._save_wanted or (self._saver is not None and self._saver.is_alive()):
      return
    now = time.monotonic()
    more = (now - self._saves_at) / SAVE_SECONDS
    self._saves_left, self._saves_at = min(SAVES_AT_ONCE, self._saves_left + more), now
    if self._saves_left >= 1:
      self._saves_left -= 1
      self._save()

  def _snapshot(self) -> checkpoint.Snapshot:
    """Tables and streams, at one moment."""
    streams = [[i, s.number, sorted({*s.waiting, *s.missing})] for i, s in self._streams.items()]
    waited = [[i, sorted({*s.waiting, *s.unheard})] for i, s in self._streams.items()]
    extra = dict(tables=self.settings, streams=streams, waited=[w for w in waited if w[1]])
    return checkpoint.snapshot(self.store, json.loads(json.dumps(extra)))

  def _saved(
    self, path: Path, answer: tuple[bool, str], line: str, wanted: list[tuple[Peer, int]]
  ) -> None:
    self.log(line, logging.INFO if answer[0] else logging.ERROR, always=True)
    self._not_saved = '' if answer[0] else line
    if answer[0]:
      self.counts['checkpoints'] += 1
      self.saved.append(path)
      while len(self.saved) > KEEP:
        shutil.rmtree(self.saved.pop(0), ignore_errors=True)
    for peer, number in wanted:
      if peer in self.peers:
        self.send(peer, wire.ANSWER, number, *answer)
    if self._saver is not None:
      self._saver.join()  # it has nothing more to do
    self._save_for_clients()  # who have asked meanwhile

  def leave(self) -> None:
    """The last checkpoint, also after a failure of the thread; whether it is there is said by itself."""
    if self._saver is not None:
      self._saver.join()
    self._save()
    if self._saver is not None:
      self._saver.join()
    self.listener.do_calls()  # who waits for a checkpoint hears of it
    if self._not_saved:
      raise tables.CheckpointError(f'the last checkpoint was not written: {self._not_saved}')

  # --- its life ------------------------------------------------------------------------------------

  @property
  def largest(self) -> int:
    """Bytes of a frame: the steps that a client may keep, or the chunks of one message; and a little more."""
    return min(
      wire.FRAME_BYTES, self.most_bytes + wire.MESSAGE_CHUNKS * wire.CHUNK.itemsize + SLACK
    )

  @property
  def address(self) -> str:
    """Where it listens."""
    return self.listener.address

  @property
  def peers(self) -> dict[Peer, None]:
    """Clients with a session."""
    return self.listener.peers

  @property
  def failure(self) -> str | None:
    """The traceback of what has ended its thread; None if nothing has."""
    return None if self._serving is None else self._serving.failure

  @property
  def ended(self) -> threading.Event:
    """Set when its thread has ended; it must have been started."""
    assert self._serving is not None
    return self._serving.ended

  def start(self) -> None:
    """Listens, from now on."""
    try:
      self._serving = Serving(self.listener, self.wait, self.leave)
    except BaseException:
      self._unlock()
      raise

  def __enter__(self) -> ReplayServer:
    self.start()
    return self

  def __exit__(self, *exc: object) -> None:
    self.stop()

  def ask_to_stop(self) -> None:
    """Has its thread come to its end."""
    if self._serving is not None:
      self._serving.ask_to_stop()

  def stop(self) -> None:
    """Ends it, after a last checkpoint."""
    if self._serving is not None:
      self._serving.stop()
    self._unlock()

  def _unlock(self) -> None:
    if self._lock is not None:
      self._lock.close()

  # --- what there is to tell -----------------------------------------------------------------------

  def _described(self, peer: Peer) -> dict[str, Any]:
    client: Client = peer.state
    return dict(
      inserted=client.inserted,
      sampled=client.sampled,
      refused=client.refused,
      waiting_inserts=len(client.stream.waiting),
      waiting_samples=len(client.reading.waiting),
      kept_bytes=client.stream.kept_bytes,
      unread_bytes=client.reading.bytes,
    )

  def report(self) -> dict[str, Any]:
    shown = [dataclasses.asdict(t.info()) for t in itertools.islice(self.tables.values(), 64)]
    return dict(self.listener.report(self._described), tables=shown, bytes=self.store.total.bytes,
                checkpoints=[str(p) for p in self.saved])  # fmt: skip


def locked(dir: Path) -> IO[str]:
  """A directory that is this service's for as long as the file is open; it is made if it is missing.

  Raises:
    CheckpointError: if another one has it, or it can't be written to.
  """
  try:
    dir.mkdir(parents=True, exist_ok=True)
    return lock(dir)
  except BlockingIOError as e:
    raise tables.CheckpointError(
      f'--dir {dir} is in use by another replay service, whose checkpoints would be lost: '
      f'end that one, or give another --dir ({e.strerror})'
    ) from e
  except OSError as e:
    raise tables.CheckpointError(f'--dir {dir} cannot be written to: {e.strerror}') from e


def why_not(path: Path, error: BaseException) -> str:
  """Why there is no checkpoint; with the traceback, where nobody has foreseen it."""
  if isinstance(error, tables.CheckpointError | ValueError | OSError):
    return str(error)
  trace = ''.join(traceback.format_exception(error))
  return f'checkpoint {path} could not be written: {error!r}\n{trace}'


# --- the command ------------------------------------------------------------------------------------


def parse_tables(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
  """Settings by name, of what `--table` was given.

  Raises:
    ValueError: saying what is expected.
  """
  found: dict[str, dict[str, Any]] = {}
  for text in texts:
    name, settings = _parse_table(text)
    if name in found:
      raise ValueError(f'--table {text}: there is a table {name!r} already')
    found[name] = settings
  return found


def _parse_table(text: str) -> tuple[str, dict[str, Any]]:
  needed = ['name', 'sampler', 'remover', 'rate', 'max_size']
  known = [*needed, 'max_bytes', 'max_times_sampled']
  given: dict[str, str] = {}
  for part in text.split(','):
    key, _, value = part.partition('=')
    if key not in known or not value or key in given:
      raise ValueError(f'--table {text}: {part!r}, expected {", ".join(known)}, each =VALUE')
    given[key] = value
  if lacking := [k for k in needed if k not in given]:
    raise ValueError(f'--table {text}: needs {", ".join(lacking)}')
  numbers = {k: v for k, v in given.items() if k.startswith('max_')}
  for key, value in numbers.items():
    if not value.isdigit():
      raise ValueError(f'--table {text}: {key} takes a whole number, not {value!r}')
  sizes: dict[str, Any] = {k: int(v) for k, v in numbers.items()}
  try:
    settings = wire.packed_settings(
      sampler=wire.selector(given['sampler']),
      remover=wire.selector(given['remover']),
      rate_limiter=_limiter(given['rate']),
      **sizes,
    )
  except ValueError as e:
    raise ValueError(f'--table {text}: {e}') from None
  return given['name'], settings


def _limiter(text: str) -> tables.RateLimiter:
  name, *numbers = text.split(':')
  if name in ('min_size', 'queue', 'stack') and len(numbers) == 1:
    return getattr(tables, name)(int(numbers[0]))
  if name == 'sample_to_insert' and len(numbers) == 3:
    ratio, least, error = numbers
    return tables.sample_to_insert_ratio(float(ratio), int(least), float(error))
  raise ValueError(
    f'rate={text}, expected min_size:N, sample_to_insert:RATIO:MIN_SIZE:ERROR, queue:N or stack:N'
  )


def run(address: str, **options: Any) -> int:
  """`podrace replay`: serves until a signal; the exit code."""
  found = 0

  def on_signal(signum: int, frame: Any) -> None:
    nonlocal found
    found = signum
    server.ask_to_stop()

  try:
    server = ReplayServer(address, **options)
  except tables.CheckpointError as e:
    log.error('%s', e)
    return 2
  with on_signals(on_signal), server:
    log.info('listening at %s', server.address)
    server.ended.wait()
  return 1 if server.failure else 128 + found
