"""The socket at which a listener accepts connections."""

from __future__ import annotations

import contextlib
import socket as sockets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from podrace.net import address as addresses
from podrace.net.bucket import TokenBucket
from podrace.net.loop import Loop

AT_ONCE = 16  # connections that are accepted before others are served
GREETING_SHARE = 0.1  # of the time, that new connections may take
GREETING_SECONDS = 1.0  # at once


class Acceptor:
  """Accepts connections, without blocking.

  New ones have a bounded share of the time, for others have a right to the rest. While it is used up they wait in the
  kernel.

  Attributes:
    address: with the port that it has.
    accepting: new connections do not wait.

  Raises:
    SecurityError: if the address can't be listened at.
  """

  def __init__(self, address: str, loop: Loop) -> None:
    self._socket, self.address = addresses.listen(address)
    self._loop, self._seconds = loop, TokenBucket(GREETING_SECONDS, GREETING_SHARE)
    self.accepting = False
    self.resume()

  def accept(self) -> Iterator[tuple[sockets.socket, Any]]:
    """Some of the connections that have come, and where from; raises OSError, as where files run out."""
    with contextlib.suppress(BlockingIOError):
      for _ in range(AT_ONCE):
        yield self._socket.accept()

  @contextlib.contextmanager
  def timed(self) -> Iterator[None]:
    """Counts the time that a new connection takes."""
    begun = time.monotonic()
    try:
      yield
    finally:
      self._seconds.take(time.monotonic() - begun)
      if self.accepting and self._seconds.left < 0:
        self.accepting = False
        self._loop.remove(self._socket)

  def resume(self) -> None:
    """Accepts connections again, if there is time for them."""
    if not self.accepting and self._seconds.left > 0:
      self.accepting = True
      self._loop.add(self._socket, self)

  def close(self) -> None:
    """For good; once it is closed the path may be another process's."""
    if self._socket.fileno() < 0:
      return
    if self.accepting:
      self._loop.remove(self._socket)
    self._socket.close()
    if (path := addresses.unix_path(self.address)) is not None:
      with contextlib.suppress(OSError):
        Path(path).unlink()
