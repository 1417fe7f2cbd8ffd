"""A socket that wakes a supervisor's loop when a child ends or a signal comes."""

from __future__ import annotations

import contextlib
import math
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from podrace.system.process import on_signals
from podrace.system.signals import ONCE_SECONDS


@contextlib.contextmanager
def wake_on_signals(handle: Callable[[int], None]) -> Iterator[socket.socket]:
  """Yield a socket that can be read after SIGCHLD, SIGTERM, SIGINT and SIGHUP.

  Args:
    handle: called with SIGTERM, SIGINT and SIGHUP. Equal ones within ONCE_SECONDS are one.
  """
  latest: dict[int, float] = {}

  def handle_once(signum: int, frame: Any) -> None:
    now = time.monotonic()
    if now - latest.get(signum, -math.inf) >= ONCE_SECONDS:
      latest[signum] = now
      handle(signum)

  wake, other = socket.socketpair()
  wake.setblocking(False)
  other.setblocking(False)
  before: Any = signal.signal(signal.SIGCHLD, lambda *_: None)
  wakeup = signal.set_wakeup_fd(other.fileno(), warn_on_full_buffer=False)
  try:
    with on_signals(handle_once):
      yield wake
  finally:
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGCHLD, before)
    wake.close()
    other.close()
