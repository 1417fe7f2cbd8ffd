"""Draws samples from the shards of a replay service."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from podrace.distributed.net.frame import WireError
from podrace.distributed.replay import replay_messages
from podrace.distributed.replay.connection import Asked, Connection
from podrace.distributed.replay.sample_frames import read_samples
from podrace.errors import RunError
from podrace.tables.blocking import REPORT_AFTER, Closed, RateLimited, Wait
from podrace.tables.items import Samples

GRACE = 5.0  # seconds beyond its deadline that a service has to say that it is over


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
    return len(self.asked.value[1][0]) // replay_messages.DRAWN.itemsize


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
        asked = connection.ask(replay_messages.SAMPLE, *args, end=self._deadline)
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
