"""The launcher's end of its watchdog, podrace.launch.supervisor.watchdog."""

from __future__ import annotations

import subprocess
from pathlib import Path

from podrace.system.child import ChildProcess, python

WATCHDOG = str(Path(__file__).with_name('watchdog.py'))


class Guard:
  """Ends process groups when this process ends, also if it is killed.

  Owner: the process that enters it.
  Ends when: it is left. Its groups must have ended by then.

  Args:
    directory: is removed at the end.
  """

  def __init__(self, directory: Path) -> None:
    self._directory = directory
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
    self._watchdog = ChildProcess(words, stdin=subprocess.PIPE)
