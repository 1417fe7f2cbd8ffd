"""A TCP proxy that does what networks do."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any


def _direction(name: str) -> Any:
  """A property: whether data passes in a direction."""
  return property(lambda self: self._open[name].is_set(), lambda self, on: self._set(name, on))


class Proxy:
  """Forwards TCP connections; can hold back either direction, delay both, and reset all.

  `to` is a port of `host`, or an address.
  """

  def __init__(self, to: int | str, host: str = '127.0.0.1') -> None:
    port = to if isinstance(to, int) else int(to.rpartition(':')[2])
    self._to = (host, port)
    self._listener = socket.create_server((host, 0))
    self.address = f'tcp://{host}:{self._listener.getsockname()[1]}'
    self._open = {'up': threading.Event(), 'down': threading.Event()}
    self._passing: dict[str, list[threading.Lock]] = {'up': [], 'down': []}  # held while data does
    self.up = self.down = True  # towards the learner; towards the client
    self.delay = 0.0
    self._pairs: list[tuple[socket.socket, socket.socket]] = []
    self._stop = threading.Event()
    self._threads = [threading.Thread(target=self._accept, daemon=True)]
    self._threads[0].start()

  def _accept(self) -> None:
    while not self._stop.is_set():
      if not select.select([self._listener], [], [], 0.05)[0]:
        continue
      near, _ = self._listener.accept()
      try:
        far = socket.create_connection(self._to, 5)
      except OSError:
        near.close()
        continue
      self._pairs.append((near, far))
      for a, b, name in ((near, far, 'up'), (far, near, 'down')):
        thread = threading.Thread(target=self._forward, args=(a, b, name), daemon=True)
        thread.start()
        self._threads.append(thread)

  up, down = _direction('up'), _direction('down')

  def __enter__(self) -> Proxy:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()

  def _set(self, name: str, value: bool) -> None:
    if value:
      self._open[name].set()
      return
    self._open[name].clear()
    for lock in self._passing[name]:  # nothing passes from here on, but what was delayed
      with lock:
        pass

  def _forward(self, a: socket.socket, b: socket.socket, name: str) -> None:
    passes, passing, ended = self._open[name], threading.Lock(), False
    self._passing[name].append(passing)
    held: list[tuple[float, bytes]] = []
    with contextlib.suppress(OSError, ValueError):
      while not self._stop.is_set() and not (ended and not held):
        if passes.wait(0.01) and not ended and select.select([a], [], [], 0.01)[0]:
          with passing:
            if not passes.is_set():
              continue
            data = a.recv(65536)
            ended = not data
            if held or self.delay:
              held.append((time.monotonic() + self.delay, data))
            else:
              b.sendall(data)
        while held and held[0][0] <= time.monotonic():
          b.sendall(held.pop(0)[1])
        if ended and held:
          self._stop.wait(max(0.0, held[0][0] - time.monotonic()))  # until the next is due
    for s in (a, b):
      with contextlib.suppress(OSError):
        s.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(ValueError):  # the other direction has ended before, or it was reset
      self._pairs.remove((a, b) if name == 'up' else (b, a))

  def reset(self) -> None:
    """All connections, as a router that has forgotten them would."""
    self.reset_some(lambda: True)

  def reset_some(self, chosen: Callable[[], bool]) -> int:
    """Those connections for which `chosen` says so; how many."""
    count = 0
    for pair in [p for p in self._pairs if chosen()]:
      try:
        self._pairs.remove(pair)
      except ValueError:  # it has ended meanwhile
        continue
      count += 1
      for s in pair:
        with contextlib.suppress(OSError):
          s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
          s.close()
    return count

  def close(self) -> None:
    self._stop.set()
    for thread in self._threads:
      thread.join(10)
    self.reset()
    self._listener.close()
