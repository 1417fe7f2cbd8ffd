"""A thread for one piece of work, whose failure is raised at its owner."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from typing import Any


class Worker:
  """Does `work` once, in a thread of its own, from now on.

  Args:
    name: of the thread.
    at_end: called in that thread when the work has ended, or failed.
  """

  def __init__(
    self, name: str, work: Callable[[], Any], at_end: Callable[[], None] = lambda: None
  ) -> None:
    self._work, self._at_end = work, at_end
    self._result: Any = None
    self._failure: BaseException | None = None
    self._thread = threading.Thread(target=self._main, name=name, daemon=True)
    self._thread.start()

  def _main(self) -> None:
    try:
      self._result = self._work()
    except BaseException as e:
      self._failure = e
    finally:
      self._at_end()

  @property
  def alive(self) -> bool:
    return self._thread.is_alive()

  @property
  def ident(self) -> int:
    """The thread's, as `sys._current_frames` has it."""
    return self._thread.ident or 0

  def join(self, timeout: float | None = None) -> bool:
    """Waits for the end of the work, at most `timeout` seconds; whether it has ended.

    Raises:
      what the work raised.
    """
    ended = self.wait(timeout)
    self.check()
    return ended

  def wait(self, timeout: float | None = None) -> bool:
    """As `join`, but raises nothing."""
    self._thread.join(timeout)
    return not self.alive

  def result(self) -> Any:
    """What the work returned; waits for it.

    Raises:
      what the work raised.
    """
    self.join()
    return self._result

  @property
  def failed(self) -> bool:
    return self._failure is not None

  @property
  def failure(self) -> str:
    """The traceback of what the work raised; '' if it has not failed."""
    return '' if self._failure is None else ''.join(traceback.format_exception(self._failure))

  def message(self, *plain: type[Exception]) -> str:
    """As `failure`; of what is `plain` the message only, unless PODRACE_TRACEBACK is set."""
    if isinstance(self._failure, plain) and not os.environ.get('PODRACE_TRACEBACK'):
      return str(self._failure)
    return self.failure

  def check(self) -> None:
    """Raises what the work raised, if it has failed."""
    if self._failure is not None:
      raise self._failure
