"""Calls that wait: for what, for how long, and how they end."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from threading import Condition
from typing import Any

from podrace.tables.chunks import Lock
from podrace.tables.items import Item, Samples

log = logging.getLogger('podrace.tables')

SLEEPING, RUNNING, SAMPLING, INSERTING = 'sleeping', 'running', 'sampling', 'inserting'
WAITING_FOR_INSERTS, WAITING_FOR_SAMPLES = 'waiting_for_inserts', 'waiting_for_samples'
REPORT_AFTER = 10.0  # seconds after which a call that still waits is reported


class Closed(Exception):
  """The table was closed, before or during the call; `taken` as of RateLimited."""

  taken: Samples | None = None


class RateLimited(TimeoutError):
  """A call waited as long as it was allowed to; the message says for what.

  `taken` are samples that a call had already been given, and that count; None if there are none.
  """

  taken: Samples | None = None


class Cancelled(Exception):
  """A call waited when `Table.cancel` was called; `taken` as of RateLimited."""

  taken: Samples | None = None


class Pending:
  """An item that the limiter holds back, and is among those of its `writer` while it is."""

  __slots__ = ('done', 'item', 'table', 'writer')

  def __init__(self, item: Item, table: Any, writer: InFlight) -> None:
    self.item, self.table, self.writer, self.done = item, table, writer, False
    writer.waiting[self] = None

  def finish(self) -> None:
    """It waits no longer; under the lock."""
    self.done = True
    del self.writer.waiting[self]
    self.writer.fewer.notify_all()


class InFlight:
  """The items of one writer that wait, over all tables; changed under their lock."""

  def __init__(self, lock: Lock) -> None:
    self.waiting: dict[Pending, None] = {}  # the oldest first
    self.fewer = Condition(lock)  # type: ignore[arg-type]
    self.cancels = 0  # so many times has waiting for one of them been cancelled
    self.refusals: list[Exception] = []  # of some of them, which its writer has still to raise

  def refuse(self, error: Exception) -> None:
    """One of the next calls of the writer raises it; the same one only once. Under the lock."""
    if str(error) not in map(str, self.refusals):
      self.refusals.append(error)


def deadline_of(timeout: float | None) -> float:
  """On time.monotonic's clock; None is never."""
  return math.inf if timeout is None else time.monotonic() + timeout


class Clock:
  """Divides the time since it was made among what was done in it."""

  def __init__(self) -> None:
    self._seconds = dict.fromkeys(
      (RUNNING, SAMPLING, INSERTING, SLEEPING, WAITING_FOR_INSERTS, WAITING_FOR_SAMPLES), 0.0
    )
    self._since, self._state = time.perf_counter(), SLEEPING

  def switch(self, state: str) -> str:
    """From now on, it is `state`; returns what it was."""
    now, before = time.perf_counter(), self._state
    self._seconds[before] += now - self._since
    self._since, self._state = now, state
    return before

  def split(self) -> dict[str, float]:
    """Seconds by what was done."""
    self.switch(self._state)
    return dict(self._seconds)


class Working:
  """Takes the lock, and counts the time until it is given back (or waited with) as work `on` something.

  One object serves all threads, as it has no state of its own.
  """

  __slots__ = ('_desk', '_lock', '_on', '_switch')

  def __init__(self, desk: Desk, on: str) -> None:
    self._desk, self._on, self._lock, self._switch = desk, on, desk.lock, desk.clock.switch

  def __enter__(self) -> None:
    self._lock.acquire()
    self._switch(self._on)

  def __exit__(self, *error: object) -> None:
    self._switch(self._desk.idle())
    self._lock.release()


class Desk:
  """Where the calls of a table work and wait: its lock, how its time is spent, reports of long waits.

  Args:
    name: of the table.
    lock: of its store.
    report_after: seconds after which a call that still waits is reported, and again at intervals
      that double.
    report: is given the line.
  """

  def __init__(
    self,
    name: str,
    lock: Lock,
    report_after: float,
    report: Callable[[str], None],
  ) -> None:
    if not report_after > 0:
      raise ValueError(f'table {name!r}: {report_after=} must be positive')
    self.name, self.lock, self.closed = name, lock, False
    self.inserts: deque[Pending] = deque()  # items that the limiter holds back, the oldest first
    self.samplers = 0  # calls that wait for the limiter, or for an item
    self.peekers = 0  # those of them that wait for an item only
    self.readable = Condition(lock)  # type: ignore[arg-type]
    self.report_after, self._report = report_after, report
    self.clock = Clock()
    self.running, self.sampling = Working(self, RUNNING), Working(self, SAMPLING)
    self.inserting = Working(self, INSERTING)

  def wait_more(self, more: int, peek: bool) -> None:
    """So many more calls wait to sample, or less."""
    self.samplers += more
    self.peekers += more * peek

  def check_open(self) -> None:
    """Raises Closed if the table is."""
    if self.closed:
      raise Closed(f'table {self.name!r} is closed')

  def idle(self) -> str:
    """What the table does while no call works on it."""
    if self.samplers:
      return WAITING_FOR_INSERTS
    return WAITING_FOR_SAMPLES if self.inserts else SLEEPING

  def rest(self, work: Callable[[], Any]) -> None:
    """Calls what lets go of the lock for a while, and isn't counted as work on the table."""
    before = self.clock.switch(self.idle())
    try:
      work()
    finally:
      self.clock.switch(before)

  def report(self, message: str) -> None:
    """Reports, without the lock: the receiver may ask the table, or take long. If it fails, that is logged."""

    def unlocked() -> None:
      self.lock.release()
      try:
        self._report(message)
      except Exception:
        log.exception('a report failed: %s', message)
      finally:
        self.lock.acquire()

    self.rest(unlocked)


class Wait:
  """One call's waiting, on however many things one after the other: until its deadline, with reports.

  Args:
    deadline: on time.monotonic's clock.
    cancels: how many times has such waiting been cancelled.
    before: so many of them were before the call; by default those until now.
  """

  def __init__(
    self, deadline: float, cancels: Callable[[], int] = int, before: int | None = None
  ) -> None:
    self.deadline, self.begun = deadline, time.monotonic()
    self._count_cancels = cancels
    self._before = cancels() if before is None else before
    self._next = self._interval = 0.0

  @property
  def is_cancelled(self) -> bool:
    return self._count_cancels() != self._before

  def seconds(self, now: float, report_after: float) -> float:
    """How long to wait until there is something to report or to raise."""
    if not self._interval:
      self._interval, self._next = report_after, self.begun + report_after
    return min(self.deadline, self._next) - now

  def report_is_due(self, now: float) -> bool:
    """Whether to report now; if so, the next one is due in twice the time."""
    if now < self._next:
      return False
    self._interval *= 2
    self._next = now + self._interval
    return True

  def on(self, desk: Desk, condition: Condition, what: str, why: Callable[[], str]) -> None:
    """Until something has changed; under the lock, which is free in the meantime.

    Raises:
      RateLimited: if the deadline has passed.
      Cancelled: if the waiting has been.
    """
    now = time.monotonic()

    def message(waited: str) -> str:
      return f'{what} table {desk.name!r} {waited} {now - self.begun:.3g} s: {why()}'

    if self.is_cancelled:
      raise Cancelled(message('was cancelled after'))
    if now >= self.deadline:
      raise RateLimited(message('timed out after'))
    seconds = self.seconds(now, desk.report_after)
    if self.report_is_due(now):
      desk.report(message('has waited for'))
      return  # things may have changed: the caller looks again
    desk.rest(lambda: condition.wait(seconds))
