"""What a command needs of its process, and no more of the package: the last words, signals, one at a time."""

from __future__ import annotations

import atexit
import contextlib
import errno
import faulthandler
import fcntl
import logging
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

from podrace.output import flush_standard, tell

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)  # errors of flock
NICE = 19  # the most that there is


class _ToStderr(logging.Handler):
  """Tells whoever reads; that nobody does any more ends nothing."""

  def emit(self, record: logging.LogRecord) -> None:
    tell(self.format(record))


def escape_logs() -> None:
  """Have `tell` print what is logged where no command says how: Python's own handler prints text as it is."""
  logging.lastResort = _ToStderr(logging.WARNING)


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
      Path('/proc/self/autogroup').write_text(f'{NICE}\n')


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
  try:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would wait
    descriptor = os.open(directory / 'lock', flags, 0o666)
  except OSError as e:
    if e.errno == errno.ELOOP:
      raise OSError(e.errno, 'lock is a symbolic link there, which is not followed') from e
    raise
  file = os.fdopen(descriptor, 'r')
  try:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
      raise OSError(errno.EINVAL, 'lock is no regular file there')
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


def linked_folders(directory: Path) -> list[str]:
  """The names in a directory that are symbolic links to other directories."""
  return sorted(p.name for p in directory.iterdir() if p.is_symlink() and p.is_dir())
