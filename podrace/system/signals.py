"""Signals of a run, which saves and ends."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podrace.errors import Stopped
from podrace.system.importing import is_user_file
from podrace.system.process import on_signals
from podrace.system.threads import Worker

GRACE_SECONDS = 20.0  # in which a call must end after a signal, before the run ends without it
PACKAGE = Path(__file__).parents[1]
SLOW_SECONDS = 60.0  # after which a warning has the place of a call, and again after twice the time


class Stop:
  """Receives SIGTERM, SIGINT and SIGHUP while it is entered. A later Ctrl-C interrupts at once.

  Owner: the run, in the main thread, which enters it.
  Ends when: it is left.

  Attributes:
    signum: the last signal, 0 for none.
  """

  def __init__(self) -> None:
    self.signum = 0
    self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # reentrant, as handlers put into it
    self._entered = contextlib.ExitStack()

  def __enter__(self) -> Stop:
    self._entered.enter_context(on_signals(self._handle))
    return self

  def __exit__(self, *exc: object) -> None:
    self._entered.close()

  def _handle(self, signum: int, frame: Any) -> None:
    again = bool(self.signum)
    if again and signum == signal.SIGINT:
      self._say('ended at once, without saving; the last checkpoint counts, if there is one')
      raise KeyboardInterrupt
    self.signum = signum
    self._wake.put(None)
    if not again:
      name = signal.Signals(signum).name
      self._say(
        f'{name}: finishing what is under way, then saving; Ctrl-C now ends at once, without saving'
      )

  def _say(self, text: str) -> None:
    with contextlib.suppress(OSError):  # not print, which the signal may have interrupted
      os.write(2, f'\npodrace: {text}\n'.encode())

  def during(
    self,
    work: Callable[[], Any],
    name: str,
    warn: Callable[[str], None],
    grace: float = 0.0,
  ) -> Any:
    """Run `work`, which cannot be interrupted, in its own thread; returns its result.

    Args:
      work: the work.
      name: names the work in warnings.
      warn: called with a warning while the work takes long.
      grace: seconds that it may go on after a signal.

    Raises:
      Stopped: if a signal came and `work` did not end in time. Its thread goes on.
    """
    ended = threading.Event()

    def at_end() -> None:
      ended.set()
      self._wake.put(None)

    worker = Worker(name, work, at_end)
    began, slow, deadline = time.monotonic(), SLOW_SECONDS, math.inf
    while not ended.is_set():
      now = time.monotonic()
      if self.signum:
        deadline = min(deadline, now + grace)
        if now >= deadline:
          unsaved = f'{name} did not end within {grace:g} s and is not saved' if grace else ''
          raise Stopped(self.signum, unsaved)
      if now - began >= slow:
        where = _whereabouts(worker)
        warn(f'{name} has taken {now - began:.0f} s so far, {where}; Ctrl-C ends it')
        slow *= 2
      with contextlib.suppress(queue.Empty):
        self._wake.get(timeout=max(0.0, min(began + slow, deadline) - now))
    return worker.result()


def _whereabouts(worker: Worker) -> str:
  """Return the innermost Python line of a worker in the user's files, else in podrace's."""
  frame = sys._current_frames().get(worker.ident)  # documented, in spite of its underscore
  lines = [] if frame is None else traceback.extract_stack(frame)
  of_user = [line for line in lines if is_user_file(line.filename)]
  of_podrace = [line for line in lines if Path(line.filename).is_relative_to(PACKAGE)]
  at = (of_user or of_podrace)[-1:]
  if not at:
    return 'ending'
  name = at[0].name if of_user else 'podrace'
  return f'in {name} ({at[0].filename}:{at[0].lineno})'
