"""Orbax without its surprises: paths that it cannot misread, and its warnings in podrace's log."""

from __future__ import annotations

import logging
import os
import weakref
from pathlib import Path
from typing import ClassVar

from podrace.errors import UsageError

MISREAD = '*?[]\\'  # characters that etils takes for a pattern, and tensorstore for a separator
DESCRIPTORS = '/proc/self/fd'
log = logging.getLogger('podrace.run.checkpoint')


class PlainPath:
  r"""A path to a directory that does not contain its name: `/proc/self/fd/N`.

  Orbax finds files by patterns that begin with the directory, and tensorstore reads a backslash as
  a separator. So a run directory `hidden=[64,64]` or `a\b` would be misread. A system without
  /proc/self/fd has no such path. There a directory with one of these characters is refused.

  Owner: the object that passes the path on. It calls `close` when no library uses it any more.
  Ends when: it is closed or collected.

  Raises:
    OSError: if the directory cannot be opened.
    UsageError: if its path would be misread.
  """

  _open: ClassVar[weakref.WeakSet[PlainPath]] = weakref.WeakSet()

  def __init__(self, directory: Path) -> None:
    self._directory = directory
    self._descriptor = _descriptor(directory)
    self._closer = weakref.finalize(self, os.close, self._descriptor)
    self._closer.atexit = False  # threads of the libraries may still write
    self.path = Path(DESCRIPTORS) / str(self._descriptor)
    if not (self.path.exists() and self.path.samefile(directory)):
      self.path = directory
      if wrong := sorted(set(MISREAD).intersection(str(directory))):
        self.close()
        raise UsageError(
          f'{directory}: on this system no checkpoint can be written or read below a path with '
          f'{" ".join(wrong)}; use another --run-dir'
        )
    PlainPath._open.add(self)

  def renew(self) -> None:
    """Lead to the directory that has the name now, if it was removed and made again."""
    descriptor = _descriptor(self._directory)
    os.dup2(descriptor, self._descriptor, inheritable=False)
    os.close(descriptor)

  def close(self) -> None:
    """Close the directory's descriptor."""
    PlainPath._open.discard(self)  # another file may have its number from now on
    self._closer()

  @classmethod
  def named(cls, text: str) -> str:
    """Return `text` with the directories' own names in place of the paths of open objects."""
    for plain in list(cls._open):
      text = text.replace(f'{plain.path}/', f'{plain._directory}/')
    return text


def _descriptor(directory: Path) -> int:
  return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _pass_on(record: logging.LogRecord) -> bool:
  """Log a warning of orbax in podrace's log; returns False to keep it out of absl's."""
  if record.levelno < logging.WARNING or f'{os.sep}orbax{os.sep}' not in record.pathname:
    return True
  lines = record.getMessage().strip().splitlines() or ['']
  level = logging.DEBUG if record.exc_info else record.levelno  # an exception is raised as well
  log.log(level, 'the checkpoint library: %s', PlainPath.named(lines[0]))
  return False


def pass_warnings_on() -> None:
  """Have the warnings and errors of orbax reach podrace's log, one line each."""
  logging.getLogger('absl').addFilter(_pass_on)  # a second time changes nothing
