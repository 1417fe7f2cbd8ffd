"""The shards of a table: the live servers, their sizes, and the shard of each sampled key."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from podrace.distributed.replay import replay_messages
from podrace.distributed.replay.connection import ReplayConnection, ServiceCall
from podrace.tables.blocking import RateLimited

REMEMBERED = 2**18  # sampled keys of which the shard is remembered
HELD_SECONDS = 10.0  # in which a server that holds samples back is not asked again

log = logging.getLogger('podrace.distributed.replay')


class Shards:
  """The connections to the servers of one table.

  Attributes:
    name: of the table.
    connections: one for each server.
    report: gets a line if a call waits long.
  """

  def __init__(self, name: str, connections: Sequence[ReplayConnection]) -> None:
    self.name, self.connections = name, connections
    self.report = log.warning
    self._rng = np.random.default_rng()
    # Two generations: once the newer one has REMEMBERED keys, the older one is dropped.
    self._homes: dict[int, ReplayConnection] = {}
    self._older: dict[int, ReplayConnection] = {}
    self._held: dict[ReplayConnection, float] = {}  # until when a server is not asked

  def size_at(self, connection: ReplayConnection) -> int:
    """Return the latest known number of items at a server, without waiting."""
    return connection.sizes.get(self.name, 0)

  def live(self) -> list[ReplayConnection]:
    """Return the connections that have a session, or all if none has."""
    return [c for c in self.connections if not c.away] or list(self.connections)

  def divide(self, n: int) -> list[tuple[ReplayConnection, int, float]]:
    """Divide n items at random among the live servers, in proportion to their sizes.

    Returns:
      (connection, items, share of all items) of each server that gets any.
    """
    now = time.monotonic()
    live = self.live()
    live = [c for c in live if self._held.get(c, 0.0) < now] or live
    sizes = np.array([self.size_at(c) for c in live], np.float64)
    share = sizes / sizes.sum() if sizes.sum() else np.full(len(live), 1 / len(live))
    counts = self._rng.multinomial(n, share) if len(live) > 1 else np.array([n])
    parts = zip(live, counts.tolist(), share.tolist(), strict=True)
    return [part for part in parts if part[1]]

  def hold(self, connection: ReplayConnection) -> None:
    """Leave out a server for a while: its rate limiter holds samples back, or it is frozen."""
    self._held[connection] = time.monotonic() + HELD_SECONDS

  def remember(self, keys: np.ndarray, home: ReplayConnection) -> None:
    """Record the server of keys, and forget keys that were sampled long ago."""
    if len(self._homes) > REMEMBERED:
      self._older, self._homes = self._homes, {}
    self._homes.update(zip(keys.tolist(), itertools.repeat(home)))

  def index_of(self, key: int) -> int:
    """Return the number of the server from which a key was sampled.

    Raises:
      KeyError: there is more than one server, and the key was sampled too long ago.
    """
    if len(self.connections) == 1:
      return 0
    home = self._homes.get(key) or self._older[key]
    return list(self.connections).index(home)

  def split(self, keys: np.ndarray) -> Iterator[tuple[ReplayConnection, Any]]:
    """Yield (connection, index of the keys that may be at its server); all if unknown."""
    if len(self.connections) == 1:
      yield self.connections[0], slice(None)
      return
    older, newer = self._older, self._homes
    homes = [newer.get(k) or older.get(k) for k in keys.tolist()]
    for connection in self.live():
      chosen = np.array([home is None or home is connection for home in homes], bool)
      if chosen.any():
        yield connection, chosen

  def wait_for(self, calls: list[ServiceCall], deadline: float = math.inf) -> list[Any]:
    """Wait for calls and return their values.

    A single server is waited for until the deadline. Of more, a server that goes away is left out.
    """
    values = []
    may_skip = len(self.connections) > 1
    for call in calls:
      connection = call.connection
      connection.wait_until(lambda: call.done or (may_skip and connection.away), deadline)
      if call.done:
        values.append(call.result())
      else:
        connection.forget(call)
    return values

  def why_no_sample(self) -> str:
    """Return why a sampler waits, as each server answers within a second."""
    reasons = []
    for connection in self.connections:
      if connection.away:
        reasons.append(f'{connection.address} is away ({connection.link.why})')
        continue
      call = connection.ask(replay_messages.INFO, self.name)
      try:
        reasons.append(call.wait(time.monotonic() + 1.0, 'info')['why_no_sample'])
      except (RateLimited, ValueError):
        reasons.append(f'{connection.address} does not answer')
    return '; '.join(reasons)
