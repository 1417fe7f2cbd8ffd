"""File descriptors: how many this process may have open, and how many of them connections may take.

Each connection is one descriptor. Checkpoints, logs and environments need some as well, so connections that nobody
asked for must not take the last one. What the process may have open beyond its first listener is divided: a quarter is
kept for the process itself, an eighth is for guests (connections without a session) of all listeners, and the rest is
for sessions.
"""

from __future__ import annotations

import contextlib
import errno
import resource
import threading
from collections.abc import Callable
from typing import ClassVar

FILES = 2**16  # that may be open, if that is permitted
RESERVED = 1024  # for the process itself, at most
LISTENER = (
  4  # descriptors of a listener itself: its socket, its selector, and two by which it is woken
)
GUESTS = 1024  # connections of a listener without a session, at most
LACKING = (
  errno.EMFILE,
  errno.ENFILE,
  errno.ENOBUFS,
  errno.ENOMEM,
)  # of `accept`, where resources run out


def raise_limit() -> int:
  """Raises this process's limit of open files to FILES, or as far as it may; returns the limit."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
  if soft != resource.RLIM_INFINITY and soft < wanted:
    with contextlib.suppress(OSError, ValueError):  # not even that is permitted
      resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
  return limit()


def limit() -> int:
  """Returns how many files this process may have open."""
  soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
  return FILES if soft == resource.RLIM_INFINITY else soft


class Share:
  """One listener's share of the descriptors, from `open` to `close`. Listeners of a process divide what there is.

  Args:
    sessions: returns how many sessions the listener has.
  """

  _open: ClassVar[list[Share]] = []  # of this process
  _lock = threading.Lock()

  def __init__(self, sessions: Callable[[], int]) -> None:
    self._sessions, self._before = sessions, 0

  def open(self, descriptor: int) -> None:
    """Begins. `descriptor` is the listening socket's: the kernel gives the lowest, so all below it are in use."""
    self._before = descriptor + 1
    with self._lock:
      self._open.append(self)

  def close(self) -> None:
    """Leaves the share to the other listeners."""
    with self._lock:
      if self in self._open:
        self._open.remove(self)

  @property
  def _room(self) -> int:
    """Descriptors that were left when the first listener began, less those of the other listeners themselves."""
    before = min((share._before for share in self._open), default=0)
    return max(limit() - before - LISTENER * (len(self._open) - 1), 0)

  @property
  def _reserve(self) -> int:
    return min(self._room // 4, RESERVED)

  @property
  def guests(self) -> int:
    """Connections without a session that the listener may have, at least 1."""
    return max(min(self._room // 8 // max(len(self._open), 1), GUESTS), 1)

  @property
  def sessions(self) -> int:
    """Sessions that all listeners of the process may have together."""
    return max(self._room - self._reserve - self.guests * len(self._open), 1)

  @property
  def is_full(self) -> bool:
    """Whether no further session may begin."""
    return sum(share._sessions() for share in list(self._open)) >= self.sessions

  def is_reserved(self, descriptor: int) -> bool:
    """Whether a new descriptor is one of those for the process itself: so many others are in use."""
    return descriptor >= limit() - self._reserve
