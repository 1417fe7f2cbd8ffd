"""What a command needs of its process, and no more of the package: the last words, signals, one at a time."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

from podrace.files import open_lock
from podrace.output import flush_standard, tell

NICE = 19  # the most that there is


class _ToStderr(logging.Handler):
  """Tells whoever reads; that nobody does any more ends nothing."""

  def emit(self, record: logging.LogRecord) -> None:
    tell(self.format(record))


def python(*arguments: str) -> tuple[str, ...]:
  """Return the command line of a child interpreter; `arguments` are options of Python, then its program.

  With -P the child does not import from its working directory, which may be somebody else's.
  """
  return sys.executable, '-P', *arguments


def cores() -> int:
  """How many cores this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


@contextlib.contextmanager
def log_to_stderr(who: str, quiet: bool = False) -> Iterator[None]:
  """Has a command tell what podrace logs, as `who: message`; if it is quiet, only what is wrong.

  For commands: as a library podrace logs, and configures nothing.
  """
  log, handler = logging.getLogger('podrace'), _ToStderr()
  handler.setFormatter(logging.Formatter(f'{who}: %(message)s'))
  before = log.level, log.propagate
  log.addHandler(handler)
  log.setLevel(logging.WARNING if quiet else logging.INFO)
  log.propagate = False  # else libraries that configure the root's would tell it again
  try:
    yield
  finally:
    log.removeHandler(handler)
    log.setLevel(before[0])
    log.propagate = before[1]


def tell_of_faults() -> None:
  """Has a segmentation fault print Python's stack before it ends the process."""
  if not faulthandler.is_enabled():
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # there is no stderr
      faulthandler.enable()


@contextlib.contextmanager
def on_signals(handle: Callable[[int, Any], None]) -> Iterator[None]:
  """Has SIGTERM, SIGINT and SIGHUP handled so while it is entered, where Python allows that.

  SIGHUP stays ignored where it is, as under nohup.
  """
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  signals = [signal.SIGTERM, signal.SIGINT]
  if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
    signals.append(signal.SIGHUP)
  before = {s: signal.signal(s, handle) for s in signals}
  try:
    yield
  finally:
    for signum, handler in before.items():
      signal.signal(signum, signal.SIG_DFL if handler is None else handler)  # None: not Python's


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


def end_at_once(signum: int, frame: Any) -> None:
  """A handler for when there is nothing to save. No exception, which whoever is called may swallow."""
  name = signal.Signals(signum).name
  with contextlib.suppress(OSError):  # print is not for handlers: it may be what was interrupted
    os.write(2, f'\npodrace: {name}: ended at once; there was nothing to save\n'.encode())
  os._exit(128 + signum)


def leave(code: int) -> NoReturn:
  """Ends the process as Python does, but leaves the interpreter as it is.

  Threads of ours and of JAX may be in C++ then. Where Python ends one there, the process aborts: a run that was
  complete would end with 134.
  """
  threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
  atexit._run_exitfuncs()
  flush_standard()
  os._exit(code)


def lock(directory: Path) -> IO[str]:
  """A directory that is this process's for as long as the file is open; see `is_locked`.

  Raises:
    BlockingIOError: if another process has it.
    OSError: if it can't be written to.
  """
  file = open_lock(directory / 'lock')
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BaseException:
    file.close()
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
