"""A table whose items are at one replay service, or at several as shards; and samples of it."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from podrace.distributed.net.frame import Kind, WireError
from podrace.distributed.replay import messages
from podrace.distributed.replay.connection import Asked, Connection
from podrace.distributed.replay.item_schema import Contents
from podrace.distributed.replay.sample_frames import read_samples
from podrace.distributed.replay.writer_store import Sending, WriterStore
from podrace.errors import RunError
from podrace.tables.blocking import (
  REPORT_AFTER,
  Closed,
  InFlight,
  Pending,
  RateLimited,
  Wait,
  deadline_of,
)
from podrace.tables.chunks import ChunkStore
from podrace.tables.items import Item, Samples, TableInfo

INFO_SECONDS = 60.0  # that a service has to say how a table does
GRACE = 5.0  # seconds beyond its deadline that a service has to say that it is over
REMEMBERED = 2**18  # keys, of which shard they are

log = logging.getLogger('podrace.distributed.replay')


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
    contents: Contents | None = None,
  ) -> None:
    self.name, self._connections, self._most = name, connections, most
    self.contents = contents  # what its items hold, if that is known
    self.report = log.warning  # gets what waits and why
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
    if not 1 <= least <= n <= messages.MOST_ITEMS:
      raise ValueError(
        f'table {self.name!r}: {at_least=} of {n=}, expected 1 <= at_least <= n <= {messages.MOST_ITEMS}'
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
    return self._by_key(messages.UPDATE, names, values)

  def delete(self, keys: Sequence[int] | np.ndarray) -> int:
    """As podrace.tables.Table.delete."""
    return self._by_key(messages.DELETE, np.asarray(keys), None)

  def _by_key(self, kind: Kind, keys: np.ndarray, values: np.ndarray | None) -> int:
    asked = []
    for connection, chosen in self._split(keys):
      columns = [keys[chosen].astype('<i8')]
      if values is not None:
        columns.append(values[chosen].astype('<f8'))
      for start in range(0, len(columns[0]), messages.MESSAGE_KEYS):
        arrays = [column[start : start + messages.MESSAGE_KEYS] for column in columns]
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
    return [c for c in self._connections if not c.away] or list(self._connections)

  def _answers(self, asked: list[Asked], deadline: float = math.inf) -> list[Any]:
    """Of several servers those that answer in time; a single one is waited for until then."""
    found = []
    for one in asked:
      connection, several = one.connection, len(self._connections) > 1
      connection.wait_until(lambda: one.done or (several and connection.away), deadline)
      if one.done:
        found.append(one.result())
      else:
        connection.forget(one)
    return found

  def info(self, timeout: float = INFO_SECONDS) -> TableInfo:
    """How it does; of several shards the sum over those that are there.

    Raises:
      RateLimited: if no server answers in that time.
    """
    asked = [c.ask(messages.INFO, self.name) for c in self._live()]
    every = self._answers(asked, deadline_of(timeout))
    if not every:
      states = '; '.join(f'{c.address}: {c.state()}' for c in self._connections)
      raise RateLimited(f'info of table {self.name!r}: no answer in {timeout:g} s; {states}')
    total = {field.name: every[0][field.name] for field in dataclasses.fields(TableInfo)}
    for details in every[1:]:
      for k, x in total.items():
        if k == 'seconds':
          total[k] = {s: x[s] + more for s, more in details[k].items()}
        elif type(x) is int and details[k] is not None:
          total[k] += details[k]
    return TableInfo(**total)

  def why_no_sample(self) -> str:
    """What keeps a sampler waiting, as the servers that are there say within a second."""
    said = []
    for connection in self._connections:
      if connection.away:
        said.append(f'{connection.address} is away ({connection.link.why})')
        continue
      asked = connection.ask(messages.INFO, self.name)
      try:
        said.append(asked.wait(time.monotonic() + 1.0, 'info')['why_no_sample'])
      except (RateLimited, ValueError):
        said.append(f'{connection.address} does not answer')
    return '; '.join(said)


@dataclasses.dataclass(eq=False)
class Part:
  """What one server was asked for, of a sample; once it is cancelled, the rest is of no use or asked for elsewhere."""

  asked: Asked
  n: int
  least: int
  share: float  # of all items, that are there

  @property
  def count(self) -> int:
    """How many items have come."""
    if not self.asked.done or not self.asked.good or self.asked.value[0] is None:
      return 0
    return len(self.asked.value[1][0]) // messages.DRAWN.itemsize


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
    parts = []
    for connection, k, s in zip(live, counts.tolist(), share.tolist(), strict=True):
      if k:
        some = math.ceil(least * k / n)
        args = table.name, k, some, self._peek
        asked = connection.ask(messages.SAMPLE, *args, end=self._deadline)
        parts.append(Part(asked, k, some, s))
    return parts

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
    answers = [(part, *part.asked.result()) for part in self._parts]
    there = [(part, signature, arrays) for part, signature, arrays, _ in answers if signature]
    taken = self._unpack(there) if there else None
    if taken is not None and len(self._table._connections) > 1:
      taken = self._of_all(taken, [part for part, _, _ in there])
    if taken is None or len(taken.key) < self._least:
      reasons = [reason for part, *_, reason in answers if reason and not part.asked.cancelled]
      error = RateLimited('; '.join([self._late, *reasons] if self._late else reasons))
      error.taken = taken
      raise error
    return taken

  def _unpack(self, there: list[tuple[Part, Any, Any]]) -> Samples:
    """What several servers have sent, as `Samples`.

    Raises:
      RunError: if it is no sample of this table. The servers are named.
    """
    try:
      taken = read_samples([one[1:] for one in there])
      if self._table.contents is not None:
        self._table.contents.check_samples(taken, there[0][1])
    except WireError as e:
      where = ', '.join(part.asked.connection.address for part, *_ in there)
      raise RunError(
        f'table {self._table.name!r} at {where} sent samples that are none: {e}'
      ) from e
    return taken

  def _of_all(self, taken: Samples, parts: list[Part]) -> Samples:
    """Samples of several servers as of one table, of which `share` is at each."""
    table, counts = self._table, [part.count for part in parts]
    for part, keys in zip(parts, np.split(taken.key, np.cumsum(counts)[:-1]), strict=True):
      table.remember(keys, part.asked.connection)
    total = sum(c.sizes.get(table.name, 0) for c in table._live())
    share = np.repeat([part.share for part in parts], counts)
    size = np.full(len(taken.key), total)
    return taken._replace(probability=taken.probability * share, table_size=size)

  def _wait(self) -> None:
    wait = Wait(math.inf)  # for when to report; `_limit` may change
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
          seconds = wait.seconds(now, REPORT_AFTER)
          if wait.report_is_due(now):
            break
          self._changed.wait(min(limit - now, seconds))
        else:
          return
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
    away = any(not p.asked.done and p.asked.connection.away for p in self._parts)
    return self._deadline + (0 if away else GRACE)

  def _over(self) -> bool:
    """Whether all parts are there.

    What is asked of a server that is gone, or of an empty one while others have items, is asked of
    those; and what has come may be enough.
    """
    for part in list(self._parts):
      connection = part.asked.connection
      if part.asked.done:
        if part.asked.cancelled and part.count < part.n:
          n, least, part.n = part.n - part.count, part.least - part.count, part.count
          self._ask_elsewhere(n, least)
        continue
      connection.check_open()
      live = self._table._live()
      if connection.away and connection not in live:
        connection.forget(part.asked)
        self._parts.remove(part)
        self._ask_elsewhere(part.n, part.least)
      elif not part.asked.cancelled and (self._is_enough() or self._is_elsewhere(connection, live)):
        connection.cancel(part.asked)
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
