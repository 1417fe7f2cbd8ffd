"""The processor, the cores that this process may use, and its priority."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from pathlib import Path

NICE = 19  # the lowest priority


def cores() -> int:
  """Return the number of cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def processor() -> str:
  """Return the model of the CPU and a hash of its features, on which compiled programs depend."""
  try:
    text = Path('/proc/cpuinfo').read_text(encoding='utf-8', errors='replace')
  except OSError:  # not Linux
    return platform.processor()
  entries = {tuple(x.strip() for x in line.partition(':')[::2]) for line in text.splitlines()}
  model = ', '.join(sorted(value for name, value in entries if name == 'model name'))
  kept = sorted(entry for entry in entries if entry[0] in ('model name', 'flags', 'Features'))
  return f'{model or platform.machine()} {hashlib.sha256(repr(kept).encode()).hexdigest()[:8]}'


def give_way() -> None:
  """Give this process and its future threads the lowest priority.

  Linux may weigh sessions first and then the processes in each. So a session that this process
  leads gets the lowest priority as well.
  """
  try:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
  except (AttributeError, OSError):  # not Linux, or a sandbox
    os.nice(NICE)
  if os.getsid(0) == os.getpid():
    with contextlib.suppress(OSError):  # the kernel does not weigh sessions
      Path('/proc/self/autogroup').write_text(f'{NICE}\n', encoding='ascii')
