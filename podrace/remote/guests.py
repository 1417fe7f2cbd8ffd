"""Connections without a session: bounded, and cut when they say nothing.

ZeroMQ keeps a connection that has finished its handshake for as long as the peer likes, and each is an open
file. It has no call to cut one. But its monitor tells each connection's file, and a socket that is shut
down is one whose peer has left.
"""

from __future__ import annotations

import collections
import socket as sockets
import time
from typing import Any

import zmq

MOST = 1024  # connections without a session; then those go that were heard of longest ago
SILENT_SECONDS = 10.0  # that a connection may take to say something
TALKING_SECONDS = 300.0  # that one may be silent which has said something


class Guests:
  """Open connections that are no client's, by their file; for one thread.

  Attributes:
    cut: how many were cut so far.
  """

  def __init__(self) -> None:
    self.cut = 0
    self._until: collections.OrderedDict[int, float] = collections.OrderedDict()  # oldest first
    self._ends: dict[int, Any] = {}

  def __contains__(self, file: int) -> bool:
    return file in self._until

  def __len__(self) -> int:
    return len(self._until)

  def came(self, file: int, seconds: float | None = None) -> None:
    """A connection may be silent for so long from now on."""
    self.left(file)
    self._until[file] = time.monotonic() + (SILENT_SECONDS if seconds is None else seconds)
    self._ends[file] = _ends(file)
    while len(self._until) > MOST:
      self._shut(next(iter(self._until)))

  def spoke(self, raw: Any) -> None:
    """Something has come over a connection; `raw` is a frame of it."""
    try:
      file = raw.get(zmq.SRCFD)
    except zmq.ZMQError:
      return
    if file in self._until:
      self._until[file] = time.monotonic() + TALKING_SECONDS
      self._until.move_to_end(file)

  def left(self, file: int) -> None:
    """A connection is closed, or a client's from now on."""
    self._until.pop(file, None)
    self._ends.pop(file, None)

  def look(self, now: float) -> None:
    """Cuts those that have been silent for too long."""
    for file in [f for f, until in self._until.items() if until < now]:
      self._shut(file)

  def _shut(self, file: int) -> None:
    ends = self._ends[file]
    self.left(file)
    if ends is None or _ends(file) != ends:  # ZeroMQ has closed it, and the file may be another's
      return
    self.cut += 1
    own = sockets.socket(fileno=file)
    try:
      own.shutdown(sockets.SHUT_RDWR)
    except OSError:  # the peer has just left
      pass
    finally:
      own.detach()  # ZeroMQ sees that it has ended, and closes it


def _ends(file: int) -> Any:
  """Both ends' addresses, which tell whether a file is still the same connection; None if it is none."""
  try:
    own = sockets.socket(fileno=file)
  except OSError:
    return None
  try:
    return own.family, own.getsockname(), own.getpeername()
  except OSError:
    return None
  finally:
    own.detach()
