"""Locks on directories and files, between processes."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import IO

from podrace.system.files import NO_LOCKS, open_lock

LOOKS, LOOK_SECONDS = 10, 0.05  # attempts to lock: a reader may look at the lock, for a moment


def lock(directory: Path) -> IO[str]:
  """Lock a directory until the returned file is closed; see `is_locked`.

  Raises:
    BlockingIOError: if another process has locked it.
    OSError: if it cannot be written to, or its file system has no locks.
  """
  file = open_lock(directory / 'lock')
  try:
    for _ in range(LOOKS):
      if try_lock(file):
        return file
      time.sleep(LOOK_SECONDS)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BaseException as e:
    file.close()
    if isinstance(e, OSError) and e.errno in NO_LOCKS:
      raise OSError(
        e.errno,
        f'its file system has no locks (flock: {e.strerror}), so two runs could write there at '
        'once; take a directory on another file system',
      ) from e
    raise
  return file


def is_locked(directory: Path, file: IO[str]) -> bool:
  """Return whether `file` still locks the directory, which may have been removed or replaced."""
  locked = os.fstat(file.fileno())
  try:
    current = (directory / 'lock').stat()
  except (FileNotFoundError, NotADirectoryError):
    return False
  return (current.st_dev, current.st_ino) == (locked.st_dev, locked.st_ino)


def try_lock(file: IO[str]) -> bool:
  """Lock a file that was opened by `open_lock`; returns False if another process has it."""
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  return True
