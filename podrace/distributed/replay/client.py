"""Tables that are elsewhere, with the surface of podrace.tables' own. Imports no JAX.

client = connect('tcp://127.0.0.1:5560')
table = client.table('replay')
writer = client.writer(history=5)         # a podrace.tables.Writer
samples = table.sample(256)               # podrace.tables.Samples
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podrace.distributed.net.link import Refused
from podrace.distributed.replay import replay_messages
from podrace.distributed.replay.connection import Connection
from podrace.distributed.replay.item_schema import Contents
from podrace.distributed.replay.remote_table import RemoteTable
from podrace.tables import Writer
from podrace.tables.blocking import deadline_of
from podrace.tables.limiters import RateLimiter
from podrace.tables.selectors import Selector

IN_FLIGHT, DELAY = 1024, 0.5  # of a writer's items and their chunks, see Client.writer


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
      contents: what its items must hold, column by column (podrace.distributed.replay.item_schema.column); the service refuses
        others. By default items need only be like the first one.

    Raises:
      ValueError: if there is none and no settings are given; Refused, which is one, if it has other
        settings than those given, or is of another run.
    """
    given: Any = dict(
      sampler=sampler, remover=remover, rate_limiter=rate_limiter, max_size=max_size
    )
    details: dict[str, Any] = {}
    if any(x is not None for x in given.values()):
      if None in given.values():
        raise ValueError(f'table {name!r}: {", ".join(given)} belong together')
      given.update(max_bytes=max_bytes, max_times_sampled=max_times_sampled)
      details = replay_messages.packed_settings(**given, run=run, contents=contents)
    most = math.inf
    for connection in self.connections:
      asked = connection.ask(replay_messages.TABLE, name, details)
      try:
        answer = asked.wait(math.inf, f'table {name!r}')
      except ValueError as e:
        raise Refused(str(e)) from None
      connection.tables[name] = answer['settings']
      most = min(most, answer['most'])
    return RemoteTable(name, self.connections, most, Contents(contents) if contents else None)

  def writer(
    self,
    history: int,
    rows_per_chunk: int | None = None,
    max_in_flight: int = IN_FLIGHT,
    delay: float = DELAY,
  ) -> Writer:
    """A podrace.tables.Writer; each writes to one server, in turn to those that are there.

    Args:
      history, rows_per_chunk: as there.
      max_in_flight: items that may not yet be in their tables before `create_item` waits; at least 1.
      delay: seconds for which an item waits until its chunks are full. What is sent
        before that is packed in smaller pieces.
    """
    if max_in_flight < 1:
      raise ValueError(f'{max_in_flight=} must be at least 1, where tables are elsewhere')
    live = [c for c in self.connections if not c.away] or self.connections
    connection = live[next(self._writers) % len(live)]
    return Writer(connection.writer_store(delay), history, rows_per_chunk, max_in_flight)

  def writers(self, history: int) -> list[Writer]:
    """A writer for each server, in the order of `RemoteTable.shard_of`; to amend items that were sampled."""
    return [Writer(c.writer_store(DELAY), history, None, IN_FLIGHT) for c in self.connections]

  def checkpoint(self, timeout: float | None = None) -> list[str]:
    """Has each server write a checkpoint; their paths there, when they are written."""
    deadline = deadline_of(timeout)
    asked = [c.ask(replay_messages.SAVE) for c in self.connections]
    return [one.wait(deadline, 'a checkpoint') for one in asked]

  def wait(self, timeout: float | None) -> None:
    """For all servers to be there.

    Raises:
      TimeoutError: naming those that are not.
    """
    deadline = deadline_of(timeout)
    for connection in self.connections:
      if not connection.wait_until(lambda: not connection.away, deadline):
        raise TimeoutError(
          f'no {replay_messages.SERVICE} at {connection.address} in {timeout:.0f} s: {connection.link.why}. '
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
    SecurityError: see podrace.distributed.net.keys.
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
