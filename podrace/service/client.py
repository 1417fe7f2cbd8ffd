"""Tables that are elsewhere, with the surface of podrace.tables' own. Imports no JAX.

client = connect('tcp://127.0.0.1:5560')
table = client.table('replay')
writer = client.writer(history=5)         # a podrace.tables.Writer
samples = table.sample(256)               # podrace.tables.Samples
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podrace.net.frame import Kind, WireError, check_fields, short
from podrace.net.link import Link, Refused
from podrace.net.session import PING
from podrace.net.text import plain_lines
from podrace.service import wire
from podrace.service.samples import read_samples
from podrace.service.writing import Sending, SentChunk, WriterStore, pieces_of
from podrace.tables import Writer, trees
from podrace.tables.chunks import ChunkStore
from podrace.tables.items import Item, Samples, Signature, TableInfo
from podrace.tables.limiters import RateLimiter
from podrace.tables.selectors import Selector
from podrace.tables.waiting import (
  REPORT_AFTER,
  Closed,
  InFlight,
  Pending,
  RateLimited,
  Wait,
  deadline_of,
)

TURN = 0.05  # seconds between looks at the clock
OUTSTANDING = 4  # INSERTs that are not yet acknowledged
FRAME_SLACK = 2**16  # bytes of an INSERT besides the chunks of one item
FEW = 64  # items that wait for others while an INSERT is not yet acknowledged, or for
SPACING = 0.02  # seconds since the last one
RELEASE_SECONDS = 1.0  # after which chunks that nobody needs are let go without a further item
GRACE = 5.0  # seconds beyond its deadline that a service has to say that it is over
INFO_SECONDS = 60.0  # that a service has to say how a table does
REMEMBERED = 2**18  # keys, of which shard they are
PING_SECONDS = 1.0  # between questions for the sizes of tables, at most

log = logging.getLogger('podrace.service')


class Asked:
  """A question, and its answer when there is one."""

  def __init__(
    self,
    connection: Connection,
    kind: Kind,
    args: tuple[Any, ...],
    arrays: list[Any],
    again: bool = False,
  ) -> None:
    self.connection, self.kind, self.args, self.arrays = connection, kind, args, arrays
    self.again = again  # it was answered in an earlier session
    self.number = 0
    self.cancelled = False
    self.end = math.inf  # on time.monotonic's clock, of a SAMPLE
    self.done = False
    self.good: bool = False
    self.value: Any = None

  def wait(self, deadline: float, what: str) -> Any:
    """The answer; raises ValueError if it is a refusal, RateLimited if there is none in time."""
    connection = self.connection
    with connection.changed:
      while not self.done:
        connection.check_open()
        if (left := deadline - time.monotonic()) <= 0:
          connection.forget(self)
          raise RateLimited(f'{what} at {connection.address}: no answer; {connection.state()}')
        connection.changed.wait(min(left, 3600.0))
    if not self.good:
      raise ValueError(self.value)
    return self.value


def _sizes(details: Any) -> dict[str, int]:
  """Of tables, as WELCOME and PONG tell them."""
  if type(details) is not dict or any(type(n) is not int or n < 0 for n in details.values()):
    raise WireError(f'{short(details)}, expected sizes of tables')
  return details


class Connection:
  """One server's; the handler of a link."""

  service, kinds = wire.SERVICE, wire.OF_SERVICES

  def __init__(
    self, address: str, keys: Path | None, insecure: bool, changed: threading.Condition
  ) -> None:
    self.address, self.changed = address, changed
    self._link = Link(address, keys, insecure, self, changed)
    self._link.ping_every = PING_SECONDS
    self.check, self.wait_joined, self.wake = (
      self._link.check, self._link.wait_joined, self._link.wake,
    )  # fmt: skip
    self.close, self._send = self._link.close, self._link.send
    self.tables: dict[str, dict[str, Any]] = {}  # settings of those in use
    self.sizes: dict[str, int] = {}
    self.released: deque[SentChunk] = deque()
    self.why_held = ''
    self._stores: list[weakref.ref[WriterStore]] = []
    self._asked: dict[int, Asked] = {}
    self._to_ask: deque[Asked] = deque()
    self._numbers = itertools.count(1)
    self._number = 0  # of the newest item
    self._sent: dict[int, Sending] = {}  # by number
    self._again: deque[Sending] = deque()
    self._inserted_at = 0.0
    self._largest = wire.FRAME_BYTES
    self._begin()
    self._link.start()

  @property
  def session(self) -> int | None:
    """As of its link."""
    return self._link.session

  @property
  def why(self) -> str:
    """There is no session."""
    return self._link.why

  @property
  def closed(self) -> bool:
    """It was closed by this end."""
    return self._link.closed

  def _begin(self) -> None:
    """What is of one session only."""
    self._declared: dict[Any, int] = {}
    self._known: dict[int, tuple[int, Signature]] = {}  # signatures by id
    self._next_piece = 0
    self._outstanding = 0
    self._messages = 0
    self._samples_received = self._unsaid = 0  # and bytes of those that the server does not know of
    self._unsaid_samples = 0
    self._signatures: dict[int, Signature] = {}

  # --- from any thread -----------------------------------------------------------------------------

  @property
  def idle(self) -> bool:
    """Whether an item would be sent at once."""
    return not self._outstanding and time.monotonic() > self._inserted_at + SPACING

  def state(self) -> str:
    """For messages: whether there is a connection."""
    return f'there is no connection: {self.why}' if self.session is None else 'it is connected'

  def check_open(self) -> None:
    """Raises Closed, or what has ended the link."""
    if self.closed:
      raise Closed(f'the client of {self.address} is closed')
    self.check()

  def ask(self, kind: Kind, *args: Any, arrays: Sequence[Any] = (), end: float = math.inf) -> Asked:
    """Asks, now and again whenever a session begins before there is an answer."""
    asked = Asked(self, kind, args, list(arrays))
    asked.end = end
    with self.changed:
      self.check_open()
      asked.number = next(self._numbers)
      self._asked[asked.number] = asked
      self._to_ask.append(asked)
    self.wake()
    return asked

  def forget(self, asked: Asked) -> None:
    """Nobody waits for the answer any more."""
    with self.changed:
      if self._asked.pop(asked.number, None) is None:
        return
      unsent = asked in self._to_ask
      self._to_ask = deque(a for a in self._to_ask if a.number != asked.number)
      if asked.kind is wire.SAMPLE and not unsent and self.session is not None:
        self.cancel(asked)

  def cancel(self, asked: Asked) -> None:
    """Has a sample answered with what has been drawn."""
    cancel = Asked(self, wire.CANCEL, (), [])
    cancel.number, asked.cancelled = asked.number, True
    with self.changed:
      self._to_ask.append(cancel)
    self.wake()

  def store(self, delay: float) -> WriterStore:
    """A new writer's."""
    store = WriterStore(self, delay)
    with self.changed:
      self._stores = [*(r for r in self._stores if r() is not None), weakref.ref(store)]
    return store

  # --- the thread ----------------------------------------------------------------------------------

  def hello(self) -> dict[str, Any]:
    return {}

  def memory(self, kind: Kind, fields: Sequence[Any], size: int) -> Any:
    """For samples, which are unpacked in another thread."""
    return np.empty(size, np.uint8) if kind is wire.SAMPLES else None

  def ended(self, complete: bool, reason: str) -> bool:
    return False

  def ping(self) -> int:
    self._unsaid = self._unsaid_samples = 0
    return self._samples_received

  def joined(self, details: dict[str, Any]) -> None:
    expected = dict(number=int, largest=int, waiting=bytes, missing=bytes)
    check_fields('welcome', [details.get(name) for name in expected], tuple(expected.values()))
    newest, self._largest = details['number'], details['largest']
    waiting, missing = (
      set(wire.records(details[name], '<u8').tolist()) for name in ('waiting', 'missing')
    )
    self._begin()
    self.sizes = _sizes(details.get('sizes'))
    self.released.clear()  # with the session in which they were sent
    again, done = deque[Sending](), []
    for number, sending in sorted(self._sent.items()):
      if number > newest or number in missing:
        again.append(sending)
      elif number not in waiting:
        done.append(number)
    self._finish(done)
    self._again = again
    with self.changed:
      self._to_ask = deque(self._asked.values())
      for asked in self._asked.values():
        if asked.cancelled:
          self.cancel(asked)
      for name, settings in self.tables.items():  # it may be a new process
        asked = Asked(self, wire.TABLE, (name, settings), [], again=True)
        asked.number = next(self._numbers)
        self._asked[asked.number] = asked
        self._to_ask.appendleft(asked)

  def lost(self, reason: str) -> None:
    for ref in self._stores:
      if store := ref():
        store.notify()

  def pong(self, details: Any) -> None:
    sizes = _sizes(details)
    with self.changed:
      if sizes != self.sizes:  # a sample may do better elsewhere
        self.sizes = sizes
        self.changed.notify_all()

  def turned(self) -> None:
    if self.session is None:
      return
    while (asked := self._next_to_ask()) is not None:
      self._send_asked(asked)
    while self._send_items():
      pass
    if self._unsaid > wire.MOST_BYTES // 4 or self._unsaid_samples >= wire.MOST_UNREAD // 4:
      self._send(PING, self.ping())

  def _next_to_ask(self) -> Asked | None:
    with self.changed:
      return self._to_ask.popleft() if self._to_ask else None

  def _send_asked(self, asked: Asked) -> None:
    if asked.kind is wire.CANCEL:
      self._send(wire.CANCEL, asked.number)
    elif asked.kind is wire.SAMPLE:
      left = max(asked.end - time.monotonic(), 0.0) if asked.end < math.inf else -1.0
      self._unsaid = self._unsaid_samples = 0
      self._send(wire.SAMPLE, asked.number, *asked.args, left, self._samples_received)
    else:
      self._send(asked.kind, asked.number, *asked.args, arrays=asked.arrays)

  # --- what the server says

  def handle(self, kind: Kind, fields: Sequence[Any], arrays: list[memoryview]) -> None:
    if kind is wire.ACK:
      self._acknowledged(*fields, *arrays)
    elif kind is wire.SAMPLES:
      number, signature, reason, size = fields
      self._sampled(number, signature, reason, size, arrays)
    elif kind is wire.SIGNATURE:
      number, signature = fields
      self._signatures[number] = wire.read_signature(signature)
    else:
      self._answered(*fields)

  def _sampled(
    self, number: int, signature: int, reason: str, size: int, arrays: list[memoryview]
  ) -> None:
    self._samples_received += 1
    self._unsaid += sum(map(len, arrays))
    self._unsaid_samples += 1
    if signature and signature not in self._signatures:
      raise WireError(f'samples with a signature {signature}, which was not sent')
    with self.changed:
      asked = self._asked.pop(number, None)
      if asked is not None:
        self.sizes[asked.args[0]] = size
        found = self._signatures[signature] if signature else None
        asked.value, asked.good, asked.done = (found, arrays, reason), True, True
        self.changed.notify_all()

  def _answered(self, number: int, good: bool, value: Any) -> None:
    value = value if good else plain_lines(value)
    with self.changed:
      asked = self._asked.pop(number, None)
      if asked is not None:
        asked.value, asked.good, asked.done = value, good, True
        self.changed.notify_all()
    if asked is not None and asked.again and not good:
      raise Refused(str(value))

  def _acknowledged(self, message: int, why: str, *numbers: memoryview) -> None:
    done, waiting, refused = (wire.records(x, '<u8').tolist() for x in numbers)
    if message:
      self._outstanding -= 1
    if waiting:
      self.why_held = why
    self._finish(done)
    if refused:
      self._finish(refused, why)

  def _finish(self, numbers: list[int], refusal: str | None = None) -> None:
    by_store: dict[WriterStore, list[Sending]] = {}
    for number in numbers:
      sending = self._sent.pop(number, None)
      if sending is not None:
        by_store.setdefault(sending.store, []).append(sending)
    for store, sendings in by_store.items():
      store.finish(sendings, refusal)

  # --- what writers have to say

  def _send_items(self) -> bool:
    """Sends one INSERT, if it is time; whether it was."""
    if self._outstanding >= OUTSTANDING:
      return False
    stores = [store for ref in self._stores if (store := ref()) is not None]
    forced = any(store.forced for store in stores)
    queued = sum(len(store.queue) for store in stores)
    now = time.monotonic()
    early = bool(self._outstanding) or now < self._inserted_at + SPACING
    if early and not forced and not self._again and queued < FEW:
      self._link.patience = SPACING if queued else TURN
      return False
    self._link.patience = TURN
    batch: list[Sending] = []
    size = 0
    while self._again and len(batch) < wire.MESSAGE_ITEMS and size < wire.MESSAGE_BYTES:
      batch.append(self._again.popleft())
      size += batch[-1].bytes
    room = min(wire.MESSAGE_ITEMS, len(batch) + wire.MOST_ITEMS - len(self._sent))
    for store in stores:
      if store.queue and len(batch) < room and size < wire.MESSAGE_BYTES:
        taken = store.take(room - len(batch), wire.MESSAGE_BYTES - size, now)
        batch += taken
        size += sum(sending.bytes for sending in taken)
    if not batch and not (self.released and now - self._inserted_at > RELEASE_SECONDS):
      return False
    self._inserted_at = now
    self._insert(self._fitting(batch))
    return True

  def _fitting(self, batch: list[Sending]) -> list[Sending]:
    """The items that a frame of the service has room for; the others are refused, here already."""
    if sum(sending.bytes for sending in batch) < self._largest // 2:
      return batch
    found = []
    for sending in batch:
      if (size := sending.bytes) > self._largest - FRAME_SLACK:
        why = (
          f'an item of {size:,} bytes for table {sending.table.name!r} at {self.address}, which takes frames of '
          f'{self._largest:,}: make it shorter, or start the service with more --client-bytes'
        )
        self._sent.pop(sending.number, None)
        sending.store.finish([sending], why)
      else:
        found.append(sending)
    return found

  def _insert(self, batch: list[Sending]) -> None:
    new: dict[str, list[Any]] = {'tables': [], 'specs': [], 'signatures': []}
    items, parts, refs = [], [], []
    pieces: list[Any] = []
    data: list[bytes] = []
    session = self._link.number
    for sending in batch:
      item = sending.item
      if not sending.number:
        self._number += 1
        sending.number = self._number
        self._sent[sending.number] = sending
      known = self._known.get(id(item.signature))
      signature = known[0] if known else self._declare_signature(item.signature, new)
      table = self._declare('tables', sending.table.name, sending.table.name, new)
      key = -item.key if item.amends else item.key
      items.append((sending.number, key, item.priority, table, signature))
      sending.store.complete(item)
      for leaf, part in zip(item.signature.leaves, item.parts, strict=True):
        needed, offset = pieces_of(part)
        parts.append((len(needed), offset, part[2]))
        for piece in needed:
          if piece.session != session:
            piece.session, piece.number = session, self._next_piece
            self._next_piece += 1
            spec = self._declare('specs', (leaf.dtype, leaf.shape), None, new)
            pieces.append((spec, piece.rows, piece.how, len(piece.data)))
            data.append(piece.data)
          refs.append(piece.number)
    if any(new.values()) and not self._send(wire.DECLARE, new):
      return
    arrays = [
      np.array(pieces, '<u4').reshape(-1, 4),
      np.array(items, wire.ITEM),
      np.array(parts, '<u4').reshape(-1, 3),
      np.array(refs, '<u8'),
      np.array(self._released_numbers(), '<u8'),
      b''.join(data),
    ]
    self._messages += 1
    self._outstanding += 1
    self._send(wire.INSERT, self._messages, arrays=arrays)

  def _released_numbers(self) -> list[int]:
    found = []
    while self.released:
      chunk = self.released.popleft()
      found += [p.number for p in chunk.pieces if p.session == self._link.number]
    return found

  def _declare(self, what: str, key: Any, details: Any, new: dict[str, list[Any]]) -> int:
    number = self._declared.get((what, key))
    if number is None:
      number = self._declared[what, key] = self._declared.get(what, 0)
      self._declared[what] = number + 1
      new[what].append(details if details is not None else [key[0].str, list(key[1])])
    return number

  def _declare_signature(self, signature: Signature, new: dict[str, list[Any]]) -> int:
    """Writers have signatures of their own, most of them equal; looked up by identity first."""
    number = self._declare('signatures', signature, wire.packed_signature(signature), new)
    if len(self._known) > 1000:
      self._known.clear()
    self._known[id(signature)] = number, signature
    return number


# --- tables -----------------------------------------------------------------------------------------


class RemoteTable:
  """A table at one server, or its shards at several; as podrace.tables.Table to who uses it.

  Of several, each sample is drawn from the servers that are there, in proportion to their sizes; priorities
  and deletes go to the shard that a key was sampled from, or to all. Keys of a shard that is away are
  passed over, as those that are gone.
  """

  def __init__(
    self,
    name: str,
    connections: Sequence[Connection],
    most: float,
    report: Callable[[str], None] = log.warning,
  ) -> None:
    self.name, self._connections, self._most, self.report = name, connections, most, report
    self._rng = np.random.default_rng()
    self._homes: dict[int, Connection] = {}  # of keys that were sampled
    self._older: dict[int, Connection] = {}

  def __len__(self) -> int:
    return self.info().size

  @property
  def last_size(self) -> int:
    """How many items there are, as far as is known: at once, also while servers are away."""
    return sum(c.sizes.get(self.name, 0) for c in self._connections)

  # --- for writers

  def takes_from(self, store: ChunkStore) -> bool:
    """Whether items over chunks of this store can be inserted."""
    return isinstance(store, WriterStore) and store.connection in self._connections

  def check_priority(self, priority: float) -> float:
    """A priority that the selectors can bear; raises ValueError for any other."""
    if not 0 <= priority <= self._most:
      raise ValueError(
        f'table {self.name!r}: priority {priority} is not in [0, {self._most:g}], which its '
        'selectors need'
      )
    return float(priority)

  def submit(self, item: Item, writer: InFlight) -> Pending:
    """Queues an item, for the server of its writer."""
    return item.parts[0][0][0].store.submit(self, item, writer)  # type: ignore[attr-defined]

  def wait_for(self, pending: Pending, most: int, wait: Wait) -> None:
    """As podrace.tables.Table.wait_for, or raises Closed if the client is."""
    assert isinstance(pending, Sending)
    pending.store.wait_for(pending, most, wait)

  # --- sampling

  def sample(
    self, n: int, at_least: int | None = None, timeout: float | None = None, peek: bool = False
  ) -> Samples:
    """As podrace.tables.Table.sample. While no server is there it waits for one, too.

    Raises:
      RateLimited: if fewer than `at_least` could be sampled in that time.
      Closed: if the client is.
    """
    drawing = self._draw(n, at_least, timeout, peek)
    drawing.wait()
    return drawing.read()

  def sampler(
    self,
    n: int,
    prefetch: int = 2,
    at_least: int | None = None,
    timeout: float | None = None,
    peek: bool = False,
  ) -> Sampler:
    """Batches of n items, `prefetch` of which are asked for ahead of time.

    What was sampled ahead and not taken when it is closed counts as sampled, unless it was a peek.
    """
    if prefetch < 1:
      raise ValueError(f'{prefetch=} must be at least 1')
    return Sampler(lambda: self._draw(n, at_least, timeout, peek), prefetch)

  def _draw(self, n: int, at_least: int | None, timeout: float | None, peek: bool) -> Drawing:
    least = n if at_least is None else at_least
    if not 1 <= least <= n <= wire.MOST_ITEMS:
      raise ValueError(
        f'table {self.name!r}: {at_least=} of {n=}, expected 1 <= at_least <= n <= {wire.MOST_ITEMS}'
      )
    return Drawing(self, n, least, deadline_of(timeout), peek)

  def remember(self, keys: np.ndarray, home: Connection) -> None:
    """Which server keys are at; those of some samples ago are forgotten."""
    if len(self._homes) > REMEMBERED:
      self._older, self._homes = self._homes, {}
    self._homes.update(zip(keys.tolist(), itertools.repeat(home)))

  # --- by key

  def shard_of(self, key: int) -> int:
    """The number of the server from which a key was sampled lately.

    Raises:
      KeyError: if there are several, and it was sampled too long ago.
    """
    if len(self._connections) == 1:
      return 0
    home = self._homes.get(key) or self._older[key]
    return list(self._connections).index(home)

  def update_priorities(
    self, keys: Sequence[int] | np.ndarray, priorities: Sequence[float] | np.ndarray
  ) -> int:
    """As podrace.tables.Table.update_priorities."""
    names, values = np.asarray(keys), np.asarray(priorities, np.float64)
    if names.shape != values.shape or names.ndim != 1:
      raise ValueError(f'expected keys [n] and priorities [n], got {names.shape}, {values.shape}')
    wrong = ~((values >= 0) & (values <= self._most))
    if wrong.any():
      self.check_priority(float(values[wrong][0]))
    return self._by_key(wire.UPDATE, names, values)

  def delete(self, keys: Sequence[int] | np.ndarray) -> int:
    """As podrace.tables.Table.delete."""
    return self._by_key(wire.DELETE, np.asarray(keys), None)

  def _by_key(self, kind: Kind, keys: np.ndarray, values: np.ndarray | None) -> int:
    asked = []
    for connection, chosen in self._split(keys):
      columns = [keys[chosen].astype('<i8')]
      if values is not None:
        columns.append(values[chosen].astype('<f8'))
      for start in range(0, len(columns[0]), wire.MESSAGE_KEYS):
        arrays = [column[start : start + wire.MESSAGE_KEYS] for column in columns]
        asked.append(connection.ask(kind, self.name, arrays=arrays))
    return sum(self._answers(asked))

  def _split(self, keys: np.ndarray) -> Iterator[tuple[Connection, Any]]:
    """(server, which of the keys it may have)."""
    if len(self._connections) == 1:
      yield self._connections[0], slice(None)
      return
    older, homes = self._older, self._homes
    found = [homes.get(k) or older.get(k) for k in keys.tolist()]
    for connection in self._live():
      chosen = np.array([home is None or home is connection for home in found], bool)
      if chosen.any():
        yield connection, chosen

  def _live(self) -> list[Connection]:
    """The servers that are there; all, if none is."""
    return [c for c in self._connections if c.session is not None] or list(self._connections)

  def _answers(self, asked: list[Asked], deadline: float = math.inf) -> list[Any]:
    """Of several servers those that answer in time; a single one is waited for until then."""
    found = []
    for one in asked:
      with one.connection.changed:
        while not one.done:
          one.connection.check_open()
          left = deadline - time.monotonic()
          if left <= 0 or (len(self._connections) > 1 and one.connection.session is None):
            one.connection.forget(one)
            break
          one.connection.changed.wait(min(left, 3600.0))
      if one.done:
        found.append(one.wait(math.inf, ''))
    return found

  def info(self, timeout: float = INFO_SECONDS) -> TableInfo:
    """How it does; of several shards the sum over those that are there.

    Raises:
      RateLimited: if no server answers in that time.
    """
    asked = [c.ask(wire.INFO, self.name) for c in self._live()]
    every = self._answers(asked, deadline_of(timeout))
    if not every:
      states = '; '.join(f'{c.address}: {c.state()}' for c in self._connections)
      raise RateLimited(f'info of table {self.name!r}: no answer in {timeout:g} s; {states}')
    for details in every:
      for k in ('why_no_sample', 'why_no_insert'):
        details.pop(k)
    total = dict(every[0])
    for details in every[1:]:
      for k, v in details.items():
        if k == 'seconds':
          total[k] = {s: total[k][s] + v[s] for s in v}
        elif type(v) is int and total[k] is not None:
          total[k] += v
    return TableInfo(**total)

  def why_no_sample(self) -> str:
    """What keeps a sampler waiting, as the servers that are there say within a second."""
    said = []
    for connection in self._connections:
      if connection.session is None:
        said.append(f'{connection.address} is away ({connection.why})')
        continue
      asked = connection.ask(wire.INFO, self.name)
      try:
        said.append(asked.wait(time.monotonic() + 1.0, 'info')['why_no_sample'])
      except (RateLimited, ValueError):
        said.append(f'{connection.address} does not answer')
    return '; '.join(said)


class Part:
  """What one server was asked for, of a sample."""

  def __init__(self, asked: Asked, n: int, least: int, share: float) -> None:
    self.asked, self.n, self.least, self.share = asked, n, least, share
    self.cancelled = False  # what it has not drawn is of no use, or asked for elsewhere

  @property
  def count(self) -> int:
    """How many items have come."""
    if not self.asked.done or not self.asked.good or self.asked.value[0] is None:
      return 0
    return len(self.asked.value[1][0]) // wire.DRAWN.itemsize

  def cancel(self) -> None:
    self.cancelled = True
    self.asked.connection.cancel(self.asked)


class Drawing:
  """A sample that has been asked for."""

  def __init__(self, table: RemoteTable, n: int, least: int, deadline: float, peek: bool) -> None:
    self._table, self._least, self._deadline, self._peek = table, least, deadline, peek
    self._changed = table._connections[0].changed
    self._begun = time.monotonic()
    self._late = ''  # who has not said in time that it won't be
    self._parts = self._ask(n, least)

  def _ask(self, n: int, least: int) -> list[Part]:
    """Divides n items among the servers that are there, in proportion to their sizes."""
    table = self._table
    live = table._live()
    sizes = np.array([c.sizes.get(table.name, 0) for c in live], np.float64)
    share = sizes / sizes.sum() if sizes.sum() else np.full(len(live), 1 / len(live))
    counts = table._rng.multinomial(n, share) if len(live) > 1 else np.array([n])
    return [
      Part(self._ask_one(c, k, math.ceil(least * k / n)), k, math.ceil(least * k / n), float(s))
      for c, k, s in zip(live, counts.tolist(), share, strict=True)
      if k
    ]

  def _ask_one(self, connection: Connection, n: int, least: int) -> Asked:
    return connection.ask(wire.SAMPLE, self._table.name, n, least, self._peek, end=self._deadline)

  def cancel(self) -> None:
    """It is of no more use."""
    for part in self._parts:
      part.asked.connection.forget(part.asked)

  def wait(self) -> None:
    """Until all of it is there, or won't be; raises Closed if the client is."""
    try:
      self._wait()
    except BaseException:
      self.cancel()
      raise

  def read(self) -> Samples:
    """Unpacks what has come; raises RateLimited if it is less than was asked for."""
    found, shares, reasons = [], [], [self._late] if self._late else []
    for part in self._parts:
      if not part.asked.good:
        raise ValueError(part.asked.value)
      signature, frames, reason = part.asked.value
      if signature is not None:
        samples = read_samples(signature, frames)
        found.append(samples)
        shares.append(part.share)
        if len(self._table._connections) > 1:
          self._table.remember(samples.key, part.asked.connection)
      if reason and not part.cancelled:
        reasons.append(reason)
    taken = None
    if found:
      taken = found[0]
      if len(self._table._connections) > 1:
        total = sum(c.sizes.get(self._table.name, 0) for c in self._table._live())
        taken = merge(found, shares, total)
    if sum(part.count for part in self._parts) < self._least:
      error = RateLimited('; '.join(reasons))
      error.taken = taken
      raise error
    assert taken is not None
    return taken

  def _wait(self) -> None:
    interval = REPORT_AFTER
    report = self._begun + interval
    while True:
      with self._changed:
        while not self._over():
          now = time.monotonic()
          limit = self._limit()
          if now >= limit:
            self._late = self._message(now, 'timed out after')
            self.cancel()
            self._parts = [p for p in self._parts if p.asked.done]
            return
          if now >= report:
            break
          self._changed.wait(min(limit, report) - now)
        else:
          return
      interval *= 2
      report = time.monotonic() + interval
      self._table.report(
        f'{self._message(time.monotonic(), "has waited for")} {self._table.why_no_sample()}'
      )

  def _message(self, now: float, what: str) -> str:
    where = f'sample from table {self._table.name!r} {what} {now - self._begun:.3g} s:'
    return where + ''.join(
      f' {p.asked.connection.address}: {p.asked.connection.state()};'
      for p in self._parts
      if not p.asked.done
    )

  def _limit(self) -> float:
    """When to give up: a server that is there says itself when the time is over."""
    away = any(not p.asked.done and p.asked.connection.session is None for p in self._parts)
    return self._deadline + (0 if away else GRACE)

  def _over(self) -> bool:
    """Whether all parts are there.

    What is asked of a server that is gone, or of an empty one while others have items, is asked of
    those; and what has come may be enough.
    """
    for part in list(self._parts):
      connection = part.asked.connection
      if part.asked.done:
        if part.cancelled and part.count < part.n:
          n, least, part.n = part.n - part.count, part.least - part.count, part.count
          self._ask_elsewhere(n, least)
        continue
      connection.check_open()
      live = self._table._live()
      if connection.session is None and connection not in live:
        connection.forget(part.asked)
        self._parts.remove(part)
        self._ask_elsewhere(part.n, part.least)
      elif not part.cancelled and (self._is_enough() or self._is_elsewhere(connection, live)):
        part.cancel()
    return all(part.asked.done for part in self._parts)

  def _is_enough(self) -> bool:
    return sum(part.count for part in self._parts) >= self._least

  def _is_elsewhere(self, connection: Connection, live: list[Connection]) -> bool:
    """Whether only others have items."""
    sizes = {c: c.sizes.get(self._table.name, 0) for c in live}
    return not sizes.get(connection, 0) and any(sizes.values())

  def _ask_elsewhere(self, n: int, least: int) -> None:
    if not self._is_enough():
      self._parts += self._ask(n, min(max(least, 1), n))


def merge(found: list[Samples], shares: list[float], total: int) -> Samples:
  """Samples of several servers as of one table of `total` items; `shares` were drawn from each."""
  lists: list[list[Any]] = [trees.leaves(s.data) for s in found]
  lengths = [trees.leaves(s.lengths) for s in found]
  structure = trees.structure_of(found[0].data)
  data = [_stack(column) for column in zip(*lists, strict=True)]
  return Samples(
    data=trees.build(structure, data),
    lengths=trees.build(structure, [np.concatenate(c) for c in zip(*lengths, strict=True)]),
    key=np.concatenate([s.key for s in found]),
    probability=np.concatenate([s.probability * k for s, k in zip(found, shares, strict=True)]),
    table_size=np.full(sum(len(s.key) for s in found), total),
    priority=np.concatenate([s.priority for s in found]),
    times_sampled=np.concatenate([s.times_sampled for s in found]),
  )


def _stack(columns: Sequence[np.ndarray]) -> np.ndarray:
  """Columns [n, L, ...] one after the other, the shorter ones followed by zeros."""
  if columns[0].ndim < 2 or len({c.shape[1:] for c in columns}) == 1:
    return np.concatenate(columns)
  longest = max(c.shape[1] for c in columns)
  out = np.zeros((sum(map(len, columns)), longest, *columns[0].shape[2:]), columns[0].dtype)
  at = 0
  for c in columns:
    out[at : at + len(c), : c.shape[1]] = c
    at += len(c)
  return out


class Sampler:
  """Samples that are asked for ahead of time; an iterator, for one thread at a time."""

  def __init__(self, draw: Callable[[], Drawing], prefetch: int) -> None:
    self._draw, self._ahead = draw, prefetch
    self._drawings: deque[Drawing] = deque()
    self._closed = False

  def __iter__(self) -> Sampler:
    return self

  def __next__(self) -> Samples:
    if self._closed:
      raise Closed('the sampler is closed')
    while len(self._drawings) < self._ahead:
      self._drawings.append(self._draw())
    drawing = self._drawings.popleft()
    drawing.wait()
    self._drawings.append(self._draw())  # on its way while this one is unpacked
    return drawing.read()

  def close(self) -> None:
    """Takes back what has been asked for."""
    self._closed = True
    for drawing in self._drawings:
      drawing.cancel()
    self._drawings.clear()

  def __enter__(self) -> Sampler:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()


# --- the client -------------------------------------------------------------------------------------


class Client:
  """Connections to one replay service, or to several as shards; see `connect`."""

  def __init__(self, addresses: Sequence[str], keys: Path | None, insecure: bool) -> None:
    changed = threading.Condition()
    self.connections: list[Connection] = []
    try:
      for address in addresses:
        self.connections.append(Connection(address, keys, insecure, changed))
    except BaseException:
      self.close()
      raise
    self._writers = itertools.count(os.getpid())

  def table(
    self,
    name: str,
    *,
    sampler: Selector | None = None,
    remover: Selector | None = None,
    rate_limiter: RateLimiter | None = None,
    max_size: int | None = None,
    max_bytes: int | None = None,
    max_times_sampled: int = 0,
    run: str = '',
    contents: list[Any] | None = None,
  ) -> RemoteTable:
    """The table of this name. With settings it is made if there is none, with those.

    Args:
      name, sampler, remover, rate_limiter, max_size, max_bytes, max_times_sampled: as of podrace.tables.Table.
      run: of which the table is, and of no other; none by default.
      contents: what its items must hold, column by column (podrace.service.contents.column); the service refuses
        others. By default items need only be like the first one.

    Raises:
      ValueError: if there is none and no settings are given; Refused, which is one, if it has other
        settings than those given, or is of another run.
    """
    given = sampler, remover, rate_limiter, max_size
    details: dict[str, Any] = {}
    if any(x is not None for x in given):
      if sampler is None or remover is None or rate_limiter is None or max_size is None:
        raise ValueError(
          f'table {name!r}: sampler, remover, rate_limiter and max_size belong together'
        )
      details = wire.packed_settings(
        sampler=sampler,
        remover=remover,
        rate_limiter=rate_limiter,
        max_size=max_size,
        max_bytes=max_bytes,
        max_times_sampled=max_times_sampled,
        run=run,
        contents=contents,
      )
    most = math.inf
    for connection in self.connections:
      asked = connection.ask(wire.TABLE, name, details)
      try:
        answer = asked.wait(math.inf, f'table {name!r}')
      except ValueError as e:
        raise Refused(str(e)) from None
      connection.tables[name] = answer['settings']
      most = min(most, answer['most'])
    return RemoteTable(name, self.connections, most)

  def writer(
    self,
    history: int,
    rows_per_chunk: int | None = None,
    max_in_flight: int = 1024,
    delay: float = 0.5,
  ) -> Writer:
    """A podrace.tables.Writer; each writes to one server, in turn to those that are there.

    Args:
      history, rows_per_chunk: as there.
      max_in_flight: items that may not yet be in their tables before `create_item` waits; at least 1.
      delay: seconds for which an item waits until its chunks are full. What is sent
        before that is packed in smaller pieces.
    """
    live = [c for c in self.connections if c.session is not None] or self.connections
    connection = live[next(self._writers) % len(live)]
    return _writer(connection, history, rows_per_chunk, max_in_flight, delay)

  def writers(
    self,
    history: int,
    rows_per_chunk: int | None = None,
    max_in_flight: int = 1024,
    delay: float = 0.5,
  ) -> list[Writer]:
    """A writer for each server, in the order of `RemoteTable.shard_of`; to amend items that were sampled."""
    return [
      _writer(connection, history, rows_per_chunk, max_in_flight, delay)
      for connection in self.connections
    ]

  def checkpoint(self, timeout: float | None = None) -> list[str]:
    """Has each server write a checkpoint; their paths there, when they are written."""
    deadline = deadline_of(timeout)
    asked = [c.ask(wire.SAVE) for c in self.connections]
    return [one.wait(deadline, 'a checkpoint') for one in asked]

  def wait(self, timeout: float | None) -> None:
    """For all servers to be there.

    Raises:
      TimeoutError: naming those that are not.
    """
    deadline = deadline_of(timeout)
    for connection in self.connections:
      if not connection.wait_joined(deadline):
        raise TimeoutError(
          f'no {wire.SERVICE} at {connection.address} in {timeout:.0f} s: {connection.why}. '
          f'Is `podrace replay --listen {connection.address}` running, with the same keys?'
        )

  def close(self) -> None:
    """Ends all connections; what waits raises Closed. Flush the writers first."""
    for connection in self.connections:
      connection.close()

  def __enter__(self) -> Client:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()


def _writer(
  connection: Connection, history: int, rows: int | None, max_in_flight: int, delay: float
) -> Writer:
  if max_in_flight < 1:
    raise ValueError(f'{max_in_flight=} must be at least 1, where tables are elsewhere')
  return Writer(connection.store(delay), history, rows, max_in_flight)


def connect(
  addresses: str | Sequence[str],
  keys: Path | None = None,
  insecure: bool = False,
  timeout: float | None = 60.0,
) -> Client:
  """A client of the replay service at an address, or at several addresses as shards.

  Args:
    addresses: tcp://HOST:PORT or unix:PATH; each once.
    keys: a directory with this client's keys, needed beyond this machine.
    insecure: no keys, beyond this machine.
    timeout: seconds for all of them to answer; None waits for ever, and logs what for.

  Raises:
    TimeoutError: naming who has not answered.
    Refused: if one of them is another version.
    SecurityError: see podrace.net.keys.
  """
  every = [addresses] if isinstance(addresses, str) else list(addresses)
  if not every or len(set(every)) < len(every):
    raise ValueError(f'expected one address or several, each once, not {every}')
  client = Client(every, None if keys is None else Path(keys), insecure)
  try:
    client.wait(timeout)
  except BaseException:
    client.close()
    raise
  return client
