"""Threads that report to their owner, and queues between them."""

from __future__ import annotations

import collections
import os
import threading
import traceback
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar('T')


class Worker:
  """A thread for one piece of work that raises its failure at its owner.

  Owner: the creator, which calls `check`, `join` or `result`.
  Ends when: the work returns or raises. The process does not wait for it.

  Args:
    name: of the thread.
    work: called once, at once.
    at_end: called in the thread when the work has returned or raised.
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
    try:
      self._at_end()
    except BaseException as e:
      self._failure = self._failure or e

  @property
  def alive(self) -> bool:
    """Whether the thread runs."""
    return self._thread.is_alive()

  @property
  def ident(self) -> int:
    """The identifier of the thread, as `sys._current_frames` has it."""
    return self._thread.ident or 0

  def join(self, timeout: float | None = None) -> bool:
    """Wait for the end of the work, at most `timeout` seconds; returns whether it has ended.

    Raises:
      BaseException: the exception of the work.
    """
    ended = self.wait(timeout)
    self.check()
    return ended

  def wait(self, timeout: float | None = None) -> bool:
    """Wait as `join`, but raise nothing."""
    self._thread.join(timeout)
    return not self.alive

  def result(self) -> Any:
    """Wait for the end of the work, and return its result.

    Raises:
      BaseException: the exception of the work.
    """
    self.join()
    return self._result

  @property
  def failed(self) -> bool:
    """Whether the work raised an exception."""
    return self._failure is not None

  @property
  def failure(self) -> str:
    """The traceback of the work's exception; '' if it has not failed."""
    return '' if self._failure is None else ''.join(traceback.format_exception(self._failure))

  def message(self, *plain: type[Exception]) -> str:
    """Return `failure`, or the message alone of `plain` exceptions without PODRACE_TRACEBACK."""
    if isinstance(self._failure, plain) and not os.environ.get('PODRACE_TRACEBACK'):
      return str(self._failure)
    return self.failure

  def check(self) -> None:
    """Raise the exception of the work, if it has failed."""
    if self._failure is not None:
      raise self._failure


class ClosableQueue(Generic[T]):
  """A bounded queue between threads. Closing it ends all waits at once.

  Args:
    size: the largest number of elements.
  """

  def __init__(self, size: int) -> None:
    self._size, self._elements = size, collections.deque[T]()
    self._changed = threading.Condition()
    self._is_closed = False

  @property
  def closed(self) -> bool:
    """Whether it takes no more elements."""
    return self._is_closed

  def close(self) -> None:
    """Refuse further elements. The ones in the queue can still be taken."""
    with self._changed:
      self._is_closed = True
      self._changed.notify_all()

  def put(self, element: T, timeout: float | None = None) -> bool:
    """Add an element; returns False if the queue is closed, or stays full for `timeout` seconds."""
    with self._changed:
      self._changed.wait_for(lambda: self._is_closed or len(self._elements) < self._size, timeout)
      if self._is_closed or len(self._elements) >= self._size:
        return False
      self._elements.append(element)
      self._changed.notify_all()
      return True

  def get(self, timeout: float | None = None) -> T | None:
    """Take the oldest element.

    Returns None if there is none when the queue closes or after `timeout` seconds.
    """
    with self._changed:
      self._changed.wait_for(lambda: self._is_closed or bool(self._elements), timeout)
      if not self._elements:
        return None
      self._changed.notify_all()
      return self._elements.popleft()
