"""What a command needs of its process, and no more of the package: the last words, signals, one at a time."""

from __future__ import annotations

import contextlib
import fcntl
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any


def to_stderr(who: str) -> Callable[[str], None]:
  """Tells whoever reads what a command says; that nobody does any more ends nothing."""

  def say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a pipe without a reader, a closed file
      print(f'{who}: {line}', file=sys.stderr, flush=True)

  return say


@contextlib.contextmanager
def on_signals(handle: Callable[[int, Any], None]) -> Iterator[None]:
  """Has SIGTERM and SIGINT handled so while it is entered, where Python allows that."""
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  before = {s: signal.signal(s, handle) for s in (signal.SIGTERM, signal.SIGINT)}
  try:
    yield
  finally:
    for signum, handler in before.items():
      signal.signal(signum, signal.SIG_DFL if handler is None else handler)  # None: not Python's


def lock(directory: Path) -> IO[str]:
  """A directory that is this process's for as long as the file is open.

  Raises:
    BlockingIOError: if another process has it.
    OSError: if it can't be written to.
  """
  file = (directory / 'lock').open('w')
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BaseException:
    file.close()
    raise
  return file
