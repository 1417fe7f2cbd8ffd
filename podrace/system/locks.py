"""Locks on directories and files, between processes."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import IO

from podrace.system.files import open_lock

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)  # errors of flock


def lock(directory: Path) -> IO[str]:
  """A directory that is this process's for as long as the file is open; see `is_locked`.

  Raises:
    BlockingIOError: if another process has it.
    OSError: if it can't be written to.
  """
  file = open_lock(directory / 'lock')
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BaseException as e:
    file.close()
    if isinstance(e, OSError) and e.errno in NO_LOCKS:
      raise OSError(
        e.errno,
        f'its file system has no locks (flock: {e.strerror}), so two runs could write there at once; '
        'take a directory on another file system',
      ) from e
    raise
  return file


def is_locked(directory: Path, file: IO[str]) -> bool:
  """Whether a directory is still the one of which `lock` gave this file: not removed, nor replaced."""
  ours = os.fstat(file.fileno())
  try:
    there = (directory / 'lock').stat()
  except (FileNotFoundError, NotADirectoryError):
    return False
  return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def try_lock(file: IO[str]) -> bool:
  """Lock a file that was opened by `open_lock`; returns False if another process has it."""
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  return True
