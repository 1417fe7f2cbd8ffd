"""A table whose items are at one replay service, or at several as shards; and samples of it."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from podrace.distributed.net.frame import Kind
from podrace.distributed.replay import replay_messages
from podrace.distributed.replay.connection import Asked, Connection
from podrace.distributed.replay.drawing import Drawing, Sampler
from podrace.distributed.replay.item_schema import Contents
from podrace.distributed.replay.writer_store import Sending, WriterStore
from podrace.tables.blocking import (
  InFlight,
  Pending,
  RateLimited,
  Wait,
  deadline_of,
)
from podrace.tables.chunks import ChunkStore
from podrace.tables.items import Item, Samples, TableInfo

INFO_SECONDS = 60.0  # that a service has to say how a table does
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
    return isinstance(store, WriterStore) and store.session in self._connections

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
    if not 1 <= least <= n <= replay_messages.MOST_ITEMS:
      raise ValueError(
        f'table {self.name!r}: {at_least=} of {n=}, expected 1 <= at_least <= n <= {replay_messages.MOST_ITEMS}'
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
    return self._by_key(replay_messages.UPDATE, names, values)

  def delete(self, keys: Sequence[int] | np.ndarray) -> int:
    """As podrace.tables.Table.delete."""
    return self._by_key(replay_messages.DELETE, np.asarray(keys), None)

  def _by_key(self, kind: Kind, keys: np.ndarray, values: np.ndarray | None) -> int:
    asked = []
    for connection, chosen in self._split(keys):
      columns = [keys[chosen].astype('<i8')]
      if values is not None:
        columns.append(values[chosen].astype('<f8'))
      for start in range(0, len(columns[0]), replay_messages.MESSAGE_KEYS):
        arrays = [column[start : start + replay_messages.MESSAGE_KEYS] for column in columns]
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
    asked = [c.ask(replay_messages.INFO, self.name) for c in self._live()]
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
      asked = connection.ask(replay_messages.INFO, self.name)
      try:
        said.append(asked.wait(time.monotonic() + 1.0, 'info')['why_no_sample'])
      except (RateLimited, ValueError):
        said.append(f'{connection.address} does not answer')
    return '; '.join(said)
