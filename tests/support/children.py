"""Processes of their own that tests start, and waiting for what they do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
DEADLINE = 600.0  # seconds; ends a hang, and decides nothing: what is waited for takes a few on an idle machine
STARTED: list[Any] = []  # processes of the running test: conftest ends those that it leaves


def until(condition: Callable[[], Any], deadline: float = DEADLINE) -> Any:
  """What `condition` gives once that is true; fails if it isn't in time.

  For what has no event to wait on: other processes, files, counters.
  """
  end = time.monotonic() + deadline
  while not (value := condition()):
    assert time.monotonic() < end, f'not in {deadline} s: {condition}'
    time.sleep(0.002)
  return value


def unchanged(value: Callable[[], Any], seconds: float) -> Any:
  """What `value` gives once it has been the same for `seconds`."""
  last, since = value(), time.monotonic()

  def is_still() -> bool:
    nonlocal last, since
    if (now := value()) != last:
      last, since = now, time.monotonic()
    return time.monotonic() >= since + seconds

  until(is_still)
  return last


def pause(process: subprocess.Popen[Any], seconds: float) -> None:
  """Waits, for a fault that lasts; fails if the process ends meanwhile."""
  with contextlib.suppress(subprocess.TimeoutExpired):
    raise AssertionError(f'{process.args} ended with {process.wait(seconds)}')


def environment() -> dict[str, str]:
  """Ours, in which podrace and the tests' modules are found."""
  path = os.pathsep.join(map(str, (ROOT, SUPPORT)))
  return {**os.environ, 'PYTHONPATH': path}


def hide_library(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
  """Have imports of a library fail until the test's end, as if it were not installed."""

  class Hidden:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
      if name.partition('.')[0] == library:
        raise ModuleNotFoundError(f'No module named {library!r}', name=library)

  for name in list(sys.modules):
    if name.partition('.')[0] == library or name == f'podrace.envs.adapters.{library}':
      monkeypatch.delitem(sys.modules, name)
  monkeypatch.setattr(sys, 'meta_path', [Hidden, *sys.meta_path])


def alive(pid: int) -> bool:
  """Whether there is such a process, and not only what is left of it."""
  try:
    state = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]
  except (FileNotFoundError, ProcessLookupError):
    return False
  return state != 'Z'


class Process:
  """A Python program whose output is in a file; killed where its block ends, if it still goes."""

  def __init__(self, log: Path, *command: str) -> None:
    self.log = log
    with log.open('a') as file:
      self.process = subprocess.Popen(
        [sys.executable, *command], stdout=file, stderr=file, env=environment()
      )
    STARTED.append(self)

  @property
  def output(self) -> str:
    return self.log.read_text()

  def says(self, text: str, times: int = 1) -> None:
    """Returns when the output has `text`, so often; fails if the process ends without."""
    until(lambda: self.output.count(text) >= times or self.process.poll() is not None)
    assert self.output.count(text) >= times, self.output

  def signal(self, signum: int) -> None:
    self.process.send_signal(signum)

  def kill(self) -> None:
    """SIGKILL, and wait."""
    self.process.kill()
    self.process.wait()

  def wait(self, deadline: float = DEADLINE) -> int:
    """The exit code, as a shell would have it."""
    code = self.process.wait(deadline)
    return code if code >= 0 else 128 - code

  def __enter__(self) -> Any:
    return self

  def __exit__(self, *exc: object) -> None:
    if self.process.poll() is None:
      self.signal(signal.SIGCONT)
      self.kill()
