"""Blocking calls on a table: conditions, deadlines, cancellation and reports of long waits."""

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
REPORT_AFTER = 10.0  # seconds before a waiting call is reported


class Interrupted(Exception):
  """Base of the errors that end a call.

  `taken` holds the samples that the call had drawn already. They count as sampled. None if the
  call had drawn nothing.
  """

  taken: Samples | None = None


class Closed(Interrupted):
  """Error of a call on a table that was closed before or during the call."""


class RateLimited(Interrupted, TimeoutError):
  """Error of a call that reached its timeout. The message names the condition it waited for."""


class Cancelled(Interrupted):
  """Error of a call that was waiting when `Table.cancel` was called."""


class Pending:
  """Item that the limiter holds back. Its writer's `waiting` lists it until it is finished."""

  __slots__ = ('done', 'item', 'table', 'writer')

  def __init__(self, item: Item, table: Any, writer: InFlight) -> None:
    self.item, self.table, self.writer, self.done = item, table, writer, False
    writer.waiting[self] = None

  def finish(self) -> None:
    """Mark the item as no longer waiting and wake its writer. Requires the lock."""
    self.done = True
    del self.writer.waiting[self]
    self.writer.fewer.notify_all()


class InFlight:
  """Waiting items of one writer, over all tables. Changes require the tables' lock."""

  def __init__(self, lock: Lock) -> None:
    self.waiting: dict[Pending, None] = {}  # oldest first
    self.fewer = Condition(lock)  # type: ignore[arg-type]
    self.cancels = 0  # number of cancellations
    self.refusals: list[Exception] = []  # errors yet to be raised

  def refuse(self, error: Exception) -> None:
    """Queue an error for one of the writer's next calls to raise. Requires the lock.

    An error with the same message as a queued one is ignored.
    """
    if str(error) not in map(str, self.refusals):
      self.refusals.append(error)


def deadline_of(timeout: float | None) -> float:
  """Return the deadline of a timeout, on time.monotonic's clock. None gives infinity."""
  return math.inf if timeout is None else time.monotonic() + timeout


class Clock:
  """Stopwatch that divides its lifetime among states."""

  def __init__(self) -> None:
    self._seconds = dict.fromkeys(
      (RUNNING, SAMPLING, INSERTING, SLEEPING, WAITING_FOR_INSERTS, WAITING_FOR_SAMPLES), 0.0
    )
    self._since, self._state = time.perf_counter(), SLEEPING

  def switch(self, state: str) -> str:
    """Enter `state` and return the previous state."""
    now, before = time.perf_counter(), self._state
    self._seconds[before] += now - self._since
    self._since, self._state = now, state
    return before

  def split(self) -> dict[str, float]:
    """Return the seconds spent in each state."""
    self.switch(self._state)
    return dict(self._seconds)


class Working:
  """Context manager that holds the lock and counts the time as work in one state of the clock.

  Time spent in `Desk.rest` is not counted as work. The object keeps no state per call, so all
  threads share it.
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
  """Lock, clock and wait queues of one table, with reports of long waits.

  Args:
    name: Name of the table.
    lock: Lock of the table's store.
    report_after: Seconds before a waiting call is reported. The interval doubles after each
      report.
    report: Function that receives the message.
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
    self.inserts: deque[Pending] = deque()  # held back by the limiter, oldest first
    self.samplers = 0  # calls that wait for the limiter or for an item
    self.peekers = 0  # samplers that wait for an item only
    self.readable = Condition(lock)  # type: ignore[arg-type]
    self.report_after, self._report = report_after, report
    self.clock = Clock()
    self.running, self.sampling = Working(self, RUNNING), Working(self, SAMPLING)
    self.inserting = Working(self, INSERTING)

  def wait_more(self, more: int, peek: bool) -> None:
    """Add `more` to the number of waiting samplers. A negative number removes samplers."""
    self.samplers += more
    self.peekers += more * peek

  def check_open(self) -> None:
    """Check that the table is open.

    Raises:
      Closed: If the table is closed.
    """
    if self.closed:
      raise Closed(f'table {self.name!r} is closed')

  def idle(self) -> str:
    """Return the clock's state while no call works on the table."""
    if self.samplers:
      return WAITING_FOR_INSERTS
    return WAITING_FOR_SAMPLES if self.inserts else SLEEPING

  def rest(self, work: Callable[[], Any]) -> None:
    """Call `work`, which releases the lock. Its time is not counted as work on the table."""
    before = self.clock.switch(self.idle())
    try:
      work()
    finally:
      self.clock.switch(before)

  def report(self, message: str) -> None:
    """Send a report with the lock released, because the receiver may query the table or be slow.

    A failure of the receiver is logged.
    """

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
  """State of one blocking call: its deadline, cancellation and reports, over all its conditions.

  Args:
    deadline: Time on time.monotonic's clock.
    cancels: Function that returns the number of cancellations up to now.
    before: Number of cancellations before the call. Default: the number at construction.
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
    """Whether a cancellation has arrived since the call began."""
    return self._count_cancels() != self._before

  def seconds(self, now: float, report_after: float) -> float:
    """Return the seconds until the next report or the deadline."""
    if not self._interval:
      self._interval, self._next = report_after, self.begun + report_after
    return min(self.deadline, self._next) - now

  def report_is_due(self, now: float) -> bool:
    """Return whether to report now. If true, double the interval and schedule the next report."""
    if now < self._next:
      return False
    self._interval *= 2
    self._next = now + self._interval
    return True

  def on(self, desk: Desk, condition: Condition, what: str, why: Callable[[], str]) -> None:
    """Wait until `condition` is notified. Requires the lock and releases it during the wait.

    The call may return early, for example after a report, so the caller must check again.

    Raises:
      RateLimited: If the deadline has passed.
      Cancelled: If the call has been cancelled.
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
      return  # the lock was released: the caller checks again
    desk.rest(lambda: condition.wait(seconds))
