"""Draws samples from the shards of a table."""

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
from podrace.distributed.replay.connection import ReplayConnection, ServiceCall
from podrace.distributed.replay.item_schema import ItemSchema
from podrace.distributed.replay.sample_reader import read_samples
from podrace.distributed.replay.shards import Shards
from podrace.errors import RunError
from podrace.tables.blocking import REPORT_AFTER, Closed, RateLimited, Wait, deadline_of
from podrace.tables.items import Samples

HELD_AFTER = 1.0  # seconds after which a part is drawn at another server that has items
GRACE = 5.0  # seconds after its deadline in which a service must answer that the time is over


@dataclasses.dataclass(eq=False)
class ShardRequest:
  """The part of a sample that one server draws.

  Once its call is cancelled, the items that it has not drawn are not needed or are drawn elsewhere.
  """

  call: ServiceCall
  n: int
  at_least: int
  share: float  # of all items that are at this server
  begun: float = dataclasses.field(default_factory=time.monotonic)

  @property
  def count(self) -> int:
    """The number of items that have come."""
    if not self.call.done or not self.call.accepted or self.call.value[0] is None:
      return 0
    return len(self.call.value[1][0]) // replay_messages.DRAWN.itemsize


class ShardedSample:
  """A sample on its way from the shards of a table.

  Args:
    schema: the columns that samples must have; None for any.
    deadline: on time.monotonic's clock.
  """

  def __init__(
    self,
    shards: Shards,
    schema: ItemSchema | None,
    n: int,
    at_least: int,
    deadline: float,
    peek: bool,
  ) -> None:
    self._shards, self._schema = shards, schema
    self._at_least, self._deadline, self._peek = at_least, deadline, peek
    self._changed = shards.connections[0].changed
    self._grace = GRACE
    self._begun = time.monotonic()
    self._timeout = ''  # the message of a server that did not answer in time
    self._parts: list[ShardRequest] = []
    try:
      self._request(n, at_least)
    except BaseException:
      self.cancel()
      raise

  def _request(self, n: int, at_least: int) -> None:
    """Request n items of the live servers, in proportion to their sizes."""
    for connection, k, share in self._shards.divide(n):
      least = math.ceil(at_least * k / n)
      args = self._shards.name, k, least, self._peek
      call = connection.ask(replay_messages.SAMPLE, *args, end=self._deadline)
      self._parts.append(ShardRequest(call, k, least, share))

  def cancel(self) -> None:
    """Drop the requests."""
    for part in self._parts:
      part.call.connection.forget(part.call)

  def wait(self, timeout: float | None = None) -> None:
    """Wait until all parts have been answered or the time is over.

    Args:
      timeout: seconds from now. Default: until the deadline, which the servers know.

    Raises:
      Closed: the client is closed.
    """
    if timeout is not None:
      self._deadline, self._grace = deadline_of(timeout), 0.0
    try:
      self._wait()
    except BaseException:
      self.cancel()
      raise

  def read(self) -> Samples:
    """Unpack the items that have come.

    Raises:
      RateLimited: there are fewer than `at_least`; its `taken` has them.
      RunError: a server sent samples that do not belong to this table.
    """
    answers = [(part, *part.call.result()) for part in self._parts]
    full = [(part, signature, arrays) for part, signature, arrays, _ in answers if signature]
    samples = self._unpack(full) if full else None
    if samples is not None and len(self._shards.connections) > 1:
      samples = self._merge_statistics(samples, [part for part, _, _ in full])
    if samples is None or len(samples.key) < self._at_least:
      reasons = [reason for part, *_, reason in answers if reason and not part.call.cancelled]
      error = RateLimited('; '.join([self._timeout, *reasons] if self._timeout else reasons))
      error.taken = samples
      raise error
    return samples

  def _unpack(self, answers: list[tuple[ShardRequest, Any, Any]]) -> Samples:
    try:
      samples = read_samples([answer[1:] for answer in answers])
      if self._schema is not None:
        self._schema.check_samples(samples, answers[0][1])
    except WireError as e:
      where = ', '.join(part.call.connection.address for part, *_ in answers)
      raise RunError(
        f'table {self._shards.name!r} at {where} sent samples that are none: {e}'
      ) from e
    return samples

  def _merge_statistics(self, samples: Samples, parts: list[ShardRequest]) -> Samples:
    """Return the samples with probabilities and sizes as if the shards were one table."""
    shards, counts = self._shards, [part.count for part in parts]
    for part, keys in zip(parts, np.split(samples.key, np.cumsum(counts)[:-1]), strict=True):
      shards.remember(keys, part.call.connection)
    total = sum(map(shards.size_at, shards.live()))
    share = np.repeat([part.share for part in parts], counts)
    size = np.full(len(samples.key), total)
    return samples._replace(probability=samples.probability * share, table_size=size)

  def _wait(self) -> None:
    wait = Wait(math.inf)  # for the times of reports only, because `_limit` may change
    while True:
      with self._changed:
        while not self._update_parts():
          now = time.monotonic()
          limit = self._limit()
          if now >= limit:
            self._timeout = self._message(now, 'timed out after')
            self.cancel()
            self._parts = [p for p in self._parts if p.call.done]
            return
          seconds = wait.seconds(now, REPORT_AFTER)
          if wait.report_is_due(now):
            break
          self._changed.wait(min(limit - now, seconds, self._until_held(now)))
        else:
          return
      self._shards.report(
        f'{self._message(time.monotonic(), "has waited for")} {self._shards.why_no_sample()}'
      )

  def _until_held(self, now: float) -> float:
    """Return the seconds until a part that still waits may be drawn elsewhere."""
    waits = [p.begun + HELD_AFTER - now for p in self._parts if not p.call.done]
    return min((x for x in waits if x > 0), default=math.inf)

  def _message(self, now: float, waited: str) -> str:
    where = f'sample from table {self._shards.name!r} {waited} {now - self._begun:.3g} s:'
    return where + ''.join(
      f' {p.call.connection.address}: {p.call.connection.state()};'
      for p in self._parts
      if not p.call.done
    )

  def _limit(self) -> float:
    """Return the time to give up at. A live server answers at the deadline by itself."""
    away = any(not p.call.done and p.call.connection.away for p in self._parts)
    return self._deadline + (0 if away else self._grace)

  def _update_parts(self) -> bool:
    """Move requests between servers; return whether all of them have been answered.

    A request to a server that is away, that is empty while another has items, or that has waited
    long while another has answered, goes to the rest. Requests are cancelled once enough items
    have come.
    """
    for part in list(self._parts):
      connection = part.call.connection
      if part.call.done:
        if part.call.cancelled and part.count < part.n:
          n, least, part.n = part.n - part.count, part.at_least - part.count, part.count
          self._request_elsewhere(n, least)
        continue
      connection.check_open()
      live = self._shards.live()
      if connection.away and connection not in live:
        connection.forget(part.call)
        self._parts.remove(part)
        self._request_elsewhere(part.n, part.at_least)
      elif not part.call.cancelled and (
        self._is_enough() or self._is_elsewhere(connection, live) or self._is_held(part)
      ):
        connection.cancel(part.call)
    return all(part.call.done for part in self._parts)

  def _is_enough(self) -> bool:
    return sum(part.count for part in self._parts) >= self._at_least

  def _is_elsewhere(self, connection: ReplayConnection, live: list[ReplayConnection]) -> bool:
    """Return whether this server is empty and another one is not."""
    sizes = {c: self._shards.size_at(c) for c in live}
    return not sizes.get(connection, 0) and any(sizes.values())

  def _is_held(self, part: ShardRequest) -> bool:
    """Return whether a server has held back its part while another one has drawn items."""
    connection = part.call.connection
    others = any(p.count and p.call.connection is not connection for p in self._parts)
    if time.monotonic() < part.begun + HELD_AFTER or not others:
      return False
    self._shards.hold(connection)
    return True

  def _request_elsewhere(self, n: int, at_least: int) -> None:
    if not self._is_enough():
      self._request(n, min(max(at_least, 1), n))


class Sampler:
  """An iterator over samples that are requested ahead of time. For one thread at a time.

  Args:
    draw: requests a sample, without a deadline.
    prefetch: the number of requests on their way.
    timeout: seconds that `__next__` waits; None: no limit.
  """

  def __init__(
    self, draw: Callable[[], ShardedSample], prefetch: int, timeout: float | None = None
  ) -> None:
    self._draw, self._prefetch, self._timeout = draw, prefetch, timeout
    self._pending: deque[ShardedSample] = deque()
    self._closed = False

  def __iter__(self) -> Sampler:
    return self

  def __next__(self) -> Samples:
    if self._closed:
      raise Closed('the sampler is closed')
    while len(self._pending) < self._prefetch:
      self._pending.append(self._draw())
    sample = self._pending.popleft()
    sample.wait(self._timeout)
    self._pending.append(self._draw())  # on its way while this one is unpacked
    return sample.read()

  def close(self) -> None:
    """Cancel the requests that have been made ahead."""
    self._closed = True
    for sample in self._pending:
      sample.cancel()
    self._pending.clear()

  def __enter__(self) -> Sampler:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()
