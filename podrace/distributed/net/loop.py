"""The sockets of a thread, and the calls that other threads want it to make."""

from __future__ import annotations

import collections
import contextlib
import selectors
import socket as sockets
from collections.abc import Callable

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Loop:
  """The sockets of one thread at a time. Any thread may `wake`, `later` and `call`.

  Attributes:
    add, change: wait for a socket, or for other events of it. Arguments: socket, events, owner.
    remove: stop waiting for a socket, which stays open.
  """

  def __init__(self) -> None:
    self._selector = s = selectors.DefaultSelector()
    self.add, self.change, self.remove = s.register, s.modify, s.unregister
    self._calls: collections.deque[Callable[[], None]] = collections.deque()
    self._read, self._write = sockets.socketpair()
    self._read.setblocking(False)
    self._write.setblocking(False)
    self._woken = False
    self.add(self._read, READ)

  def wait(self, seconds: float) -> list[tuple[selectors.SelectorKey, int]]:
    """Wait up to `seconds` for ready sockets.

    Returns:
      Keys and events; `data` of a key is the owner.
    """
    ready = self._selector.select(max(seconds, 0.0))
    sockets = [item for item in ready if item[0].data is not None]
    if len(sockets) < len(ready):
      self._read.recv(64)
      self._woken = False  # before the calls, so that a later `wake` is not lost
    return sockets

  def wake(self) -> None:
    """End the wait, or the next one."""
    if not self._woken:
      self._woken = True
      with contextlib.suppress(OSError):  # the thread is awake, or the loop closed
        self._write.send(b'.')

  def later(self, do: Callable[[], None]) -> None:
    """Add a call without waking the thread."""
    self._calls.append(do)

  def call(self, do: Callable[[], None]) -> None:
    """Have the thread make a call."""
    self._calls.append(do)
    self.wake()

  def do_calls(self) -> None:
    """Make the calls that were added."""
    while self._calls:
      self._calls.popleft()()

  def close(self) -> None:
    """Close the loop. Its sockets belong to their owners."""
    for x in (self._selector, self._read, self._write):
      x.close()
