"""A socket that wakes a supervisor's loop when a child ends or a signal comes."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

from podrace.system.process import on_signals


@contextlib.contextmanager
def wake_on_signals(handle: Callable[[int], None]) -> Iterator[socket.socket]:
  """Yield a socket that can be read after SIGCHLD, SIGTERM, SIGINT and SIGHUP.

  Args:
    handle: called with SIGTERM, SIGINT and SIGHUP. See `on_signals`.
  """
  wake, other = socket.socketpair()
  wake.setblocking(False)
  other.setblocking(False)
  before: Any = signal.signal(signal.SIGCHLD, lambda *_: None)
  wakeup = signal.set_wakeup_fd(other.fileno(), warn_on_full_buffer=False)
  try:
    with on_signals(lambda signum, _: handle(signum)):
      yield wake
  finally:
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGCHLD, before)
    wake.close()
    other.close()
