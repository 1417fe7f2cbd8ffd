"""A thread's sockets: waiting for them, and doing meanwhile what other threads want done."""

from __future__ import annotations

import collections
import contextlib
import selectors
import socket as sockets
from collections.abc import Callable

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Loop:
  """The sockets of one thread at a time, each with its owner; any thread may `wake`, `later` and `call`.

  Attributes:
    add, change: wait for a socket from now on, or for other events of it; with the events, and its owner.
    remove: waits no longer for a socket, which is open still.
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
    """Sockets that are ready, by their keys' `data`, and what for; waits until there are some, for so long at most."""
    ready = self._selector.select(max(seconds, 0.0))
    if self._woken:
      with contextlib.suppress(BlockingIOError):  # it is on its way, and ends the next wait
        self._read.recv(64)
        self._woken = False  # before the calls are done: who comes later wakes it again
      ready = [one for one in ready if one[0].data is not None]
    return ready

  def wake(self) -> None:
    """Ends the wait, or the next one."""
    if not self._woken:
      self._woken = True
      with contextlib.suppress(OSError):  # it is awake, or closed
        self._write.send(b'.')

  def later(self, do: Callable[[], None]) -> None:
    """As `call`, without waking the thread."""
    self._calls.append(do)

  def call(self, do: Callable[[], None]) -> None:
    """Has something done by the thread."""
    self._calls.append(do)
    self.wake()

  def do_calls(self) -> None:
    """Does what others want done."""
    while self._calls:
      self._calls.popleft()()

  def close(self) -> None:
    """Closes what is its own; sockets are their owners'."""
    for x in (self._selector, self._read, self._write):
      x.close()
