"""What happens to files as events, for processes of tests that wait for a file of another process. Linux has it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

CLOSE_WRITE, MOVED_TO, CREATE = 0x8, 0x80, 0x100


def changes(path: str) -> Iterator[None]:
  """Yields at once, and then whenever a file has been written or made in the directory of `path`, which it makes."""
  os.makedirs(os.path.dirname(path), exist_ok=True)
  libc = ctypes.CDLL(None, use_errno=True)
  fd = libc.inotify_init()
  if (
    libc.inotify_add_watch(fd, os.fsencode(os.path.dirname(path)), CLOSE_WRITE | MOVED_TO | CREATE)
    < 0
  ):
    raise OSError(ctypes.get_errno(), f'{os.path.dirname(path)} cannot be watched')
  try:
    while True:
      yield
      os.read(fd, 65536)
  finally:
    os.close(fd)
