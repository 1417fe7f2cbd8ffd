"""The cores that this process may use, and its priority."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

NICE = 19  # the most that there is


def cores() -> int:
  """How many cores this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def give_way() -> None:
  """Has other processes go first where cores are short; for what may be late. Threads from now on do so, too.

  Linux may weigh sessions, each as a whole, and only then the processes in one. So a session of this process's own
  gives way as well.
  """
  try:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
  except (AttributeError, OSError):  # not Linux, or a sandbox
    os.nice(NICE)
  if os.getsid(0) == os.getpid():
    with contextlib.suppress(OSError):  # the kernel does not weigh sessions
      Path('/proc/self/autogroup').write_text(f'{NICE}\n', encoding='ascii')
