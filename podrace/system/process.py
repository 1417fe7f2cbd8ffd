"""The end of this process: signal handlers, clean-up and exit codes.

`podrace.__main__` imports this module first, so it imports little.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from podrace.system import files
from podrace.system.output import flush_standard

ONCE_SECONDS = 1.0  # in which equal signals are one, as `timeout` signals a process and its group
SHOW_CURSOR = b'\x1b[?25h'  # rich hides it while it shows something live


def tell_of_faults() -> None:
  """Print Python's stack at a segmentation fault, before that ends the process."""
  if not faulthandler.is_enabled():
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # there is no stderr
      faulthandler.enable()


@contextlib.contextmanager
def on_signals(handle: Callable[[int, Any], None]) -> Iterator[None]:
  """Handle SIGTERM, SIGINT and SIGHUP by `handle` while it is entered.

  Equal signals within ONCE_SECONDS are one. Does nothing outside the main thread.

  SIGHUP stays ignored if it is ignored, as under nohup.
  """
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  latest: dict[int, float] = {}

  def handle_once(signum: int, frame: Any) -> None:
    now = time.monotonic()
    if now - latest.get(signum, -math.inf) >= ONCE_SECONDS:
      latest[signum] = now
      handle(signum, frame)

  own = handle if handle is end_at_once else handle_once  # `_watch_signals` looks for the former
  before = {s: signal.signal(s, own) for s in _handled()}
  try:
    yield
  finally:
    for signum, handler in before.items():
      signal.signal(signum, signal.SIG_DFL if handler is None else handler)  # None: not Python's


def _handled() -> list[signal.Signals]:
  signals = [signal.SIGTERM, signal.SIGINT]
  if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
    signals.append(signal.SIGHUP)
  return signals


def end_on_signals() -> None:
  """End this process at SIGTERM, SIGINT and SIGHUP from now on, also while the main thread is in C.

  Python runs handlers between two instructions of the main thread, and one call of a compiler takes
  minutes. So a thread reads the numbers of signals. It ends the process unless another handler is
  set, such as that of a run.
  """
  for signum in _handled():
    signal.signal(signum, end_at_once)
  if _watching.is_set():
    return
  _watching.set()
  came, wake = os.pipe()
  os.set_blocking(wake, False)
  signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
  threading.Thread(target=_watch_signals, args=(came,), name='signals', daemon=True).start()
  os.register_at_fork(after_in_child=_default_signals)


def _watch_signals(came: int) -> None:
  while numbers := os.read(came, 64):
    for signum in numbers:
      if signal.getsignal(signum) is end_at_once:
        end_at_once(signum, None)


def _default_signals() -> None:
  """Undo `end_on_signals` in a fork of this process, for the program that it becomes."""
  signal.set_wakeup_fd(-1)  # else a signal to the fork would end this process
  for signum in _handled():
    if signal.getsignal(signum) is end_at_once:
      default = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
      signal.signal(signum, default)


_watching = threading.Event()
_ending, _is_ending = threading.RLock(), threading.Event()
_undo: list[Callable[[], None]] = []  # called by `end_at_once`


@contextlib.contextmanager
def undone_by_signals(undo: Callable[[], None]) -> Iterator[None]:
  """Let `end_at_once` call `undo` while it is entered."""
  _undo.append(undo)
  try:
    yield
  finally:
    _undo.remove(undo)


@contextlib.contextmanager
def scratch_directory(prefix: str, parent: Path | None = None) -> Iterator[Path]:
  """Yield a new directory, and remove it at the end, also if a signal ends the process."""
  path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
  remove = functools.partial(files.remove, path)
  with undone_by_signals(remove):
    try:
      yield path
    finally:
      remove()


def end_at_once(signum: int, frame: Any) -> None:
  """End the process as a signal handler, with nothing to save.

  Code that is running may catch an exception.
  """
  _ending.acquire()  # the second of two threads waits here for the end
  if _is_ending.is_set():  # by the handler of the signal before
    return
  _is_ending.set()
  name = signal.Signals(signum).name
  with contextlib.suppress(OSError):  # not print, which the signal may have interrupted
    os.write(2, f'\npodrace: {name}: ended at once; there was nothing to save\n'.encode())
    if os.isatty(1):
      os.write(1, SHOW_CURSOR)
  for undo in _undo[::-1]:
    with contextlib.suppress(Exception):
      undo()
  os._exit(128 + signum)


def leave(code: int) -> NoReturn:
  """End the process as Python does, but do not take the interpreter apart.

  Threads of podrace and of JAX may be in C++ at this time. If Python ends a thread there, the
  process aborts, and a complete run would end with 134. Results are written, so further prints,
  such as prints of exit handlers of environments, go to standard error.

  Python has no public way to do its first two steps alone, so this calls two private functions.
  They exist in all versions from 3.11 to 3.14, and a test runs them.
  """
  flush_standard()
  with contextlib.suppress(OSError):
    os.dup2(2, 1)
  threading._shutdown()  # type: ignore[attr-defined]  # joins threads that are not daemons
  atexit._run_exitfuncs()
  flush_standard()
  os._exit(code)
