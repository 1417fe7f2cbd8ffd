"""A thread for one piece of work, whose failure is raised at its owner."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Worker:
  """Does `work` once, in a thread of its own, from now on."""

  def __init__(self, name: str, work: Callable[[], None]) -> None:
    self._work = work
    self._failure: BaseException | None = None
    self._thread = threading.Thread(target=self._main, name=name, daemon=True)
    self._thread.start()

  def _main(self) -> None:
    try:
      self._work()
    except BaseException as e:
      self._failure = e

  def join(self, timeout: float | None = None) -> bool:
    """Waits for the end of the work, at most `timeout` seconds; whether it has ended.

    Raises:
      what the work raised.
    """
    self._thread.join(timeout)
    self.check()
    return not self._thread.is_alive()

  def check(self) -> None:
    """Raises what the work raised, if it has failed."""
    if self._failure is not None:
      raise self._failure
