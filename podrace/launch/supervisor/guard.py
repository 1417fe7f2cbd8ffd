"""The launcher's end of its watchdog, podrace.launch.supervisor.watchdog."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from podrace.launch.supervisor.watchdog import GRACE
from podrace.system.child import ChildProcess, python
from podrace.system.files import make_folder, open_lock
from podrace.system.locks import try_lock
from podrace.system.output import print_text

WATCHDOG = str(Path(__file__).with_name('watchdog.py'))
TICK = 0.1  # seconds between looks at a lock of another process


class Guard:
  """Ends process groups when this process ends, also if it is killed.

  Owner: the process that enters it.
  Ends when: it is left. Its groups must have ended by then.

  Args:
    directory: is removed at the end.
    locks: descriptors that the watchdog inherits, so that their locks last until all groups ended.
  """

  def __init__(self, directory: Path, locks: tuple[int, ...] = ()) -> None:
    self._directory, self._locks = directory, locks
    self._groups: set[int] = set()

  def __enter__(self) -> Guard:
    self._start()
    return self

  def __exit__(self, *error: object) -> None:
    self._watchdog.close_input()
    self._watchdog.wait()

  def add(self, pid: int) -> None:
    """Add a group, that of a process which leads its session."""
    self._groups.add(pid)
    self._watchdog.send(b'+%d\n' % pid)  # a watchdog that has died is replaced, and gets all groups

  def remove(self, pid: int) -> None:
    """Remove a group that has ended, as another process may get its number."""
    self._groups.discard(pid)
    self._watchdog.send(b'-%d\n' % pid)

  def look(self) -> None:
    """Replace a watchdog that has died."""
    if self._watchdog.poll() is not None:
      self._start()

  def _start(self) -> None:
    words = python('-IS', WATCHDOG, str(self._directory), *map(str, self._groups))
    self._watchdog = ChildProcess(words, stdin=subprocess.PIPE, pass_fds=self._locks)


@contextlib.contextmanager
def wait_for_lock(path: Path) -> Iterator[tuple[int, ...] | None]:
  """Lock a file; yields its descriptors, None if another process keeps it for too long.

  Processes may still be saving after their supervisor was killed or its machine was cut off. They,
  or their watchdog, inherit the file and so keep the lock until they have ended.
  """
  if not path.parent.is_dir():
    yield ()
    return
  with open_lock(make_folder(path.parent) / path.name) as file:
    end = time.monotonic() + 2 * GRACE
    reported = False
    while not try_lock(file):
      if time.monotonic() > end:
        print_text(f'podrace launch: the one before has not ended in {2 * GRACE:.0f} s', flush=True)
        yield None
        return
      if not reported:
        print_text('podrace launch: waits for the end of the one before', flush=True)
        reported = True
      time.sleep(TICK)
    yield (file.fileno(),)
