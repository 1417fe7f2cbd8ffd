"""The launcher's end of its watchdog (podrace.launch.supervisor.watchdog), which outlives it."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

from podrace.system.process import python

WATCHDOG = str(Path(__file__).with_name('watchdog.py'))


class Guard:
  """Process groups that end with this process, however it ends. Enter it.

  Args:
    directory: is removed then.
  """

  def __init__(self, directory: Path) -> None:
    self._directory = directory
    self._groups: set[int] = set()

  def __enter__(self) -> Guard:
    self._start()
    return self

  def __exit__(self, *error: object) -> None:
    with contextlib.suppress(BrokenPipeError):
      self._watchdog.communicate()

  def add(self, pid: int) -> None:
    """A group begins."""
    self._groups.add(pid)
    self._send(f'+{pid}\n')

  def remove(self, pid: int) -> None:
    """A group has ended: its number may be another's next."""
    self._groups.discard(pid)
    self._send(f'-{pid}\n')

  def look(self) -> None:
    """Replaces a watchdog that has died."""
    if self._watchdog.poll() is not None:
      self._start()

  def _start(self) -> None:
    self._watchdog = subprocess.Popen(
      python('-IS', WATCHDOG, str(self._directory), *map(str, self._groups)),
      stdin=subprocess.PIPE, encoding='ascii', start_new_session=True,
    )  # fmt: skip

  def _send(self, line: str) -> None:
    assert self._watchdog.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has died, and the next one gets all groups
      self._watchdog.stdin.write(line)
      self._watchdog.stdin.flush()
