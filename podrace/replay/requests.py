"""A thread that serves requests in their order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from podrace import tables
from podrace.errors import ReplayFailed
from podrace.system.threads import ClosableQueue, Worker

POLL = 0.1  # seconds between checks of a wait for a failure
WAITING = 8  # requests that may wait before `add` blocks
CLOSE_SECONDS = 5.0


class Requests:
  """Requests to a thread, which serves them one after the other.

  Owner: the creator, which calls `start` and `close`.
  Ends when: it is closed, a request fails, or a request uses a closed table.
  Raises: ReplayFailed, from each method but `close` after any of them.
  """

  def __init__(self, name: str) -> None:
    self._name = name
    self._queue = ClosableQueue[Callable[[], Any]](WAITING)
    self._worker: Worker | None = None

  def start(self) -> None:
    """Start the thread."""
    self.check()
    self._worker = Worker(self._name, self._serve, at_end=self._queue.close)

  def _serve(self) -> None:
    while not self._queue.closed:
      try:
        if work := self._queue.get():
          work()
      except tables.Closed:
        return

  def add(self, work: Callable[[], Any]) -> None:
    """Request that the thread calls `work`. Waits while WAITING requests wait."""
    self.check()
    if not self._queue.put(work):
      self.check()

  def wait(self) -> None:
    """Wait until all requests are served, if the thread has been started."""
    if self._worker is None:
      return
    done = threading.Event()
    self.add(done.set)
    while not done.wait(POLL):
      self.check()

  def check(self) -> None:
    """Raise ReplayFailed if a request has failed, or no further request is served."""
    if self._worker is not None and self._worker.failed:
      raise ReplayFailed(self._worker.failure)
    if self._queue.closed:
      raise ReplayFailed(f'the thread {self._name!r} is closed and serves no further requests')

  def close(self) -> None:
    """Drop further requests, and wait for the end of the current one for CLOSE_SECONDS at most."""
    self._queue.close()
    if self._worker is not None:
      self._worker.wait(CLOSE_SECONDS)
