"""Opens tables at replay services, which are used like podrace.tables. Imports no JAX."""

from __future__ import annotations

import itertools
import math
import random
import shlex
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podrace.distributed.net.link import Refused
from podrace.distributed.replay import replay_messages, table_settings
from podrace.distributed.replay.connection import ReplayConnection
from podrace.distributed.replay.item_schema import ItemSchema
from podrace.distributed.replay.remote_table import RemoteTable
from podrace.tables import Writer
from podrace.tables.blocking import deadline_of
from podrace.tables.limiters import RateLimiter
from podrace.tables.selectors import Selector

IN_FLIGHT, DELAY = 1024, 0.5  # defaults of ReplayClient.writer


class ReplayClient:
  """Connections to one replay service, or to its shards; made by `connect`.

  *Owner*: the caller, by `with` or `close`.
  *Ends when*: closed.
  *Raises*: calls that wait raise Closed, or the error that ended a connection.

  Example:
    with connect('tcp://127.0.0.1:5560') as client:
      table = client.table('replay')
      writer = client.writer(history=5)  # a podrace.tables.Writer
      samples = table.sample(256)  # podrace.tables.Samples

  Attributes:
    connections: one for each address.
  """

  def __init__(self, addresses: Sequence[str], keys: Path | None, insecure: bool) -> None:
    if not addresses or len(set(addresses)) < len(addresses):
      raise ValueError(f'expected one address or several, each once, not {list(addresses)}')
    changed = threading.Condition()
    self.connections: list[ReplayConnection] = []
    try:
      for address in addresses:
        self.connections.append(ReplayConnection(address, keys, insecure, changed))
    except BaseException:
      self.close()
      raise
    self._writers = itertools.count(random.getrandbits(16))  # in pods all processes have one pid

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
    """Open a table. Create it with these settings if it does not exist.

    Args:
      name: of the table.
      sampler: as all settings below, see podrace.tables.Table. Leave all out to open only.
      remover: see podrace.tables.Table.
      rate_limiter: see podrace.tables.Table.
      max_size: see podrace.tables.Table.
      max_bytes: see podrace.tables.Table.
      max_times_sampled: see podrace.tables.Table.
      run: name of the only run that may use the table; any run by default.
      contents: description of each column by `item_schema.pack_column`. The service refuses items
        that differ. By default items need only have the columns of the first one.

    Raises:
      ValueError: it does not exist, and there are no settings.
      Refused: it has other settings, or belongs to another run. A ValueError.
    """
    settings: Any = dict(
      sampler=sampler, remover=remover, rate_limiter=rate_limiter, max_size=max_size
    )
    details: dict[str, Any] = {}
    if any(x is not None for x in settings.values()):
      if None in settings.values():
        raise ValueError(f'table {name!r}: {", ".join(settings)} belong together')
      settings.update(max_bytes=max_bytes, max_times_sampled=max_times_sampled)
      details = table_settings.pack_settings(**settings, run=run, contents=contents)
    most = math.inf
    for connection in self.connections:
      call = connection.ask(replay_messages.TABLE, name, details)
      try:
        answer = call.wait(math.inf, f'table {name!r}')
      except ValueError as e:
        raise Refused(str(e)) from None
      connection.tables[name] = answer['settings']
      most = min(most, answer['most'])
    return RemoteTable(name, self.connections, most, ItemSchema(contents) if contents else None)

  def writer(
    self,
    history: int,
    rows_per_chunk: int | None = None,
    max_in_flight: int = IN_FLIGHT,
    delay: float = DELAY,
  ) -> Writer:
    """Make a podrace.tables.Writer to one server. Writers go to the live servers in turn.

    Args:
      history: see podrace.tables.Writer.
      rows_per_chunk: see podrace.tables.Writer.
      max_in_flight: items without acknowledgement above which `create_item` waits; at least 1.
      delay: seconds that an item waits for its last chunks to fill up. Chunks that are sent
        earlier are packed in smaller pieces.
    """
    if max_in_flight < 1:
      raise ValueError(f'{max_in_flight=} must be at least 1, where tables are elsewhere')
    live = [c for c in self.connections if not c.away] or self.connections
    connection = live[next(self._writers) % len(live)]
    return Writer(connection.writer_store(delay), history, rows_per_chunk, max_in_flight)

  def writers(self, history: int) -> list[Writer]:
    """Make a writer for each server, in the order of `RemoteTable.shard_of`, to amend items."""
    return [Writer(c.writer_store(DELAY), history, None, IN_FLIGHT) for c in self.connections]

  def checkpoint(self, timeout: float | None = None) -> list[str]:
    """Make each server write a checkpoint, and return their paths at the servers."""
    deadline = deadline_of(timeout)
    calls = [c.ask(replay_messages.SAVE) for c in self.connections]
    return [call.wait(deadline, 'a checkpoint') for call in calls]

  def wait(self, timeout: float | None) -> None:
    """Wait until all connections have a session; raise TimeoutError naming one that has not."""
    deadline = deadline_of(timeout)
    for connection in self.connections:
      if not connection.wait_until(lambda: not connection.away, deadline):
        address = shlex.quote(str(connection.address))
        raise TimeoutError(
          f'no {replay_messages.SERVICE} at {connection.address} in {timeout:.0f} s: '
          f'{connection.link.why}. Is `podrace replay --listen {address}` running, '
          'with the same keys?'
        )

  def close(self) -> None:
    """End all connections. Waiting calls raise Closed. Flush the writers first."""
    for connection in self.connections:
      connection.close()

  def __enter__(self) -> ReplayClient:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()


def connect(
  addresses: str | Sequence[str],
  keys: Path | None = None,
  insecure: bool = False,
  timeout: float | None = 60.0,
) -> ReplayClient:
  """Connect to the replay service at an address, or to its shards at a list of addresses.

  Example:
    with connect(['tcp://10.0.0.1:5560', 'tcp://10.0.0.2:5560'], keys=Path('keys')) as client:
      samples = client.table('replay').sample(256)

  Args:
    addresses: tcp://HOST:PORT or unix:PATH, each at most once.
    keys: a directory with this client's keys, needed beyond this machine.
    insecure: no keys, beyond this machine.
    timeout: seconds for all services to answer; None waits for ever, and logs the reason.

  Raises:
    TimeoutError: a service has not answered.
    Refused: a service has another version.
    SecurityError: see podrace.distributed.net.keys.
  """
  urls = [addresses] if isinstance(addresses, str) else addresses
  client = ReplayClient(urls, None if keys is None else Path(keys), insecure)
  try:
    client.wait(timeout)
  except BaseException:
    client.close()
    raise
  return client
