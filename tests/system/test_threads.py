"""Queues between threads: closing them ends waits at once, and what is in them can still be taken."""

from __future__ import annotations

import pytest

from podrace.system.threads import ClosableQueue, Worker


def test_closing_ends_a_wait_for_an_element() -> None:
  elements: ClosableQueue[int] = ClosableQueue(1)
  worker = Worker('reader', elements.get)
  elements.close()
  assert worker.result() is None


def test_closing_ends_a_wait_for_room_and_keeps_elements() -> None:
  elements: ClosableQueue[int] = ClosableQueue(1)
  assert elements.put(1)
  worker = Worker('writer', lambda: elements.put(2))
  elements.close()
  assert worker.result() is False and elements.closed
  assert [elements.get(), elements.get()] == [1, None]


def test_waits_end_after_their_timeout() -> None:
  elements: ClosableQueue[int] = ClosableQueue(1)
  assert elements.get(0.0) is None
  assert elements.put(1) and not elements.put(2, 0.0)


def test_a_failure_is_raised_at_the_owner() -> None:
  worker = Worker('work', lambda: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    worker.join()
  assert worker.failed and 'ZeroDivisionError' in worker.failure
