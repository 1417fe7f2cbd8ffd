"""File descriptors: how many this process may have open, and how many of them connections may take.

Each connection is one descriptor. Checkpoints, logs and environments need descriptors too, so
strangers must not take the last one. The descriptors that are left after the first listener are
divided: a quarter for the process itself, an eighth for guests (connections without a session),
the rest for sessions.
"""

from __future__ import annotations

import contextlib
import errno
import resource
import threading
from collections.abc import Callable
from typing import ClassVar

FILES = 2**16  # wanted limit of open files
RESERVED = 1024  # for the process itself, at most
LISTENER = 4  # descriptors of a listener: its socket, its selector, and a pair to wake it
GUESTS = 1024  # connections of a listener without a session, at most
# Errors of `accept` when resources run out.
LACKING = errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM


def raise_limit() -> int:
  """Raise this process's limit of open files to FILES or the hard limit; return the limit."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
  if soft != resource.RLIM_INFINITY and soft < wanted:
    with contextlib.suppress(OSError, ValueError):  # some systems refuse
      resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
  return limit()


def limit() -> int:
  """Return the number of files that this process may have open."""
  soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
  return FILES if soft == resource.RLIM_INFINITY else soft


class Share:
  """A listener's share of the descriptors, from `open` to `close`.

  All listeners of a process share the same descriptors.

  Args:
    sessions: returns the number of sessions of the listener.
  """

  _open: ClassVar[list[Share]] = []  # of this process
  _lock = threading.Lock()

  def __init__(self, sessions: Callable[[], int]) -> None:
    self._sessions, self._before = sessions, 0

  def open(self, descriptor: int) -> None:
    """Begin, with the listening socket's descriptor: all lower descriptors are in use."""
    self._before = descriptor + 1
    with self._lock:
      self._open.append(self)

  def close(self) -> None:
    """Leave the share to the remaining listeners."""
    with self._lock:
      if self in self._open:
        self._open.remove(self)

  @property
  def room(self) -> int:
    """Descriptors left when the first listener began, less LISTENER for each further listener."""
    before = min((share._before for share in self._open), default=0)
    return max(limit() - before - LISTENER * (len(self._open) - 1), 0)

  @property
  def _reserve(self) -> int:
    return min(self.room // 4, RESERVED)

  @property
  def guests(self) -> int:
    """Number of guests that the listener may have, at least 1."""
    return max(min(self.room // 8 // max(len(self._open), 1), GUESTS), 1)

  @property
  def sessions(self) -> int:
    """Number of sessions that all listeners of the process may have together."""
    return max(self.room - self._reserve - self.guests * len(self._open), 1)

  @property
  def is_full(self) -> bool:
    """Whether no further session may begin."""
    return sum(share._sessions() for share in list(self._open)) >= self.sessions

  def is_reserved(self, descriptor: int) -> bool:
    """Return whether a new descriptor is in the part for the process itself."""
    return descriptor >= limit() - self._reserve
