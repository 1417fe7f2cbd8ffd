"""A table of a replay service, or its shards at several services."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence

import numpy as np

from podrace.distributed.net.frame import Kind
from podrace.distributed.replay import replay_messages
from podrace.distributed.replay.connection import ReplayConnection
from podrace.distributed.replay.item_schema import ItemSchema
from podrace.distributed.replay.sampler import Sampler, ShardedSample
from podrace.distributed.replay.shards import Shards
from podrace.distributed.replay.writer_store import Sending, WriterStore
from podrace.tables.blocking import InFlight, Pending, RateLimited, Wait, deadline_of
from podrace.tables.chunks import ChunkStore
from podrace.tables.contents import read_updates
from podrace.tables.items import Item, Samples, TableInfo

INFO_SECONDS = 60.0  # for a service to answer INFO


class RemoteTable:
  """A table at one server, or its shards at several servers. It is used like podrace.tables.Table.

  Each sample is drawn from the live servers in proportion to their sizes. Priorities and deletes go
  to the shard that a key was sampled from, or to all if it is not known. Keys of a shard that is
  away are skipped like keys that have been removed.

  Example:
    table = client.table('replay')
    samples = table.sample(256, timeout=10.0)
    table.update_priorities(samples.key, priorities)

  Args:
    connections: one for each shard.
    max_priority: the largest priority that the selectors allow.
    schema: the columns of the items, or None if it is not known.
  """

  def __init__(
    self,
    name: str,
    connections: Sequence[ReplayConnection],
    max_priority: float,
    schema: ItemSchema | None = None,
  ) -> None:
    self.name, self.schema = name, schema
    self._shards = Shards(name, connections)
    self.max_priority = max_priority
    self.report = self._shards.report

  def __len__(self) -> int:
    return self.info().size

  @property
  def last_size(self) -> int:
    """The latest known number of items, without waiting. Counts servers that are away."""
    return sum(map(self._shards.size_at, self._shards.connections))

  # --- for writers

  def takes_from(self, store: ChunkStore) -> bool:
    """Return whether items over chunks of this store can be inserted."""
    return isinstance(store, WriterStore) and store.session in self._shards.connections

  def check_priority(self, priority: float) -> float:
    """Return the priority, or raise ValueError if the selectors do not allow it."""
    if not 0 <= priority <= self.max_priority:
      raise ValueError(
        f'table {self.name!r}: priority {priority} is not in [0, {self.max_priority:g}], which '
        'its selectors need'
      )
    return float(priority)

  def submit(self, item: Item, writer: InFlight) -> Pending:
    """Queue an item for the server of its writer."""
    return item.parts[0][0][0].store.submit(self, item, writer)  # type: ignore[attr-defined]

  def wait_for(self, pending: Pending, most: int, wait: Wait) -> None:
    """Wait as podrace.tables.inserts.Inserts.wait_for. Raise Closed if the client is closed."""
    assert isinstance(pending, Sending)
    pending.store.wait_for(pending, most, wait)

  # --- sampling

  def sample(
    self, n: int, at_least: int | None = None, timeout: float | None = None, peek: bool = False
  ) -> Samples:
    """Sample as podrace.tables.Table.sample. While no server is live, wait for one.

    Raises:
      RateLimited: fewer than `at_least` items could be sampled in `timeout` seconds.
      Closed: the client is closed.
    """
    sample = self._draw(n, at_least, timeout, peek)
    sample.wait()
    return sample.read()

  def sampler(
    self,
    n: int,
    prefetch: int = 2,
    at_least: int | None = None,
    timeout: float | None = None,
    peek: bool = False,
  ) -> Sampler:
    """Make an iterator over batches of n items that keeps `prefetch` requests on their way.

    Batches that were drawn and not taken before it is closed count as sampled, unless `peek`.
    `timeout` is how many seconds `next` waits for a batch.
    """
    if prefetch < 1:
      raise ValueError(f'{prefetch=} must be at least 1')
    return Sampler(lambda: self._draw(n, at_least, None, peek), prefetch, timeout)

  def _draw(self, n: int, at_least: int | None, timeout: float | None, peek: bool) -> ShardedSample:
    n, peek = operator.index(n), bool(peek)
    least = n if at_least is None else operator.index(at_least)
    if not 1 <= least <= n <= replay_messages.MOST_ITEMS:
      raise ValueError(
        f'table {self.name!r}: {at_least=} of {n=}, expected 1 <= at_least <= n <= '
        f'{replay_messages.MOST_ITEMS}'
      )
    return ShardedSample(self._shards, self.schema, n, least, deadline_of(timeout), peek)

  # --- by key

  def shard_of(self, key: int) -> int:
    """Return the number of the server from which a key was sampled lately.

    Raises:
      KeyError: there are several servers, and the key was sampled too long ago.
    """
    return self._shards.index_of(key)

  def update_priorities(
    self, keys: Sequence[int] | np.ndarray, priorities: Sequence[float] | np.ndarray
  ) -> int:
    """Set priorities [n] of keys [n]; return how many keys were in the table."""
    updates = read_updates(keys, priorities, self.check_priority)
    return self._send_keys(replay_messages.UPDATE, *updates)

  def delete(self, keys: Sequence[int] | np.ndarray) -> int:
    """Remove the items of keys [n]; return how many keys were in the table."""
    return self._send_keys(replay_messages.DELETE, np.asarray(keys), None)

  def _send_keys(self, kind: Kind, keys: np.ndarray, values: np.ndarray | None) -> int:
    calls = []
    for connection, chosen in self._shards.split(keys):
      columns = [keys[chosen].astype('<i8')]
      if values is not None:
        columns.append(values[chosen].astype('<f8'))
      for start in range(0, len(columns[0]), replay_messages.MESSAGE_KEYS):
        arrays = [column[start : start + replay_messages.MESSAGE_KEYS] for column in columns]
        calls.append(connection.ask(kind, self.name, arrays=arrays))
    return sum(self._shards.wait_for(calls))

  def info(self, timeout: float = INFO_SECONDS) -> TableInfo:
    """Return statistics of the table, summed over the live shards.

    Raises:
      RateLimited: no server has answered in `timeout` seconds.
    """
    calls = [c.ask(replay_messages.INFO, self.name) for c in self._shards.live()]
    answers = self._shards.wait_for(calls, deadline_of(timeout))
    if not answers:
      states = '; '.join(f'{c.address}: {c.state()}' for c in self._shards.connections)
      raise RateLimited(f'info of table {self.name!r}: no answer in {timeout:g} s; {states}')
    total = {field.name: answers[0][field.name] for field in dataclasses.fields(TableInfo)}
    for details in answers[1:]:
      for k, x in total.items():
        if k == 'seconds':
          total[k] = {s: x[s] + more for s, more in details[k].items()}
        elif type(x) is int and details[k] is not None:
          total[k] += details[k]
    return TableInfo(**total)
