"""A process for each setting: `podrace train`, as a person would call it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from podrace.errors import Stopped, UnreadableFile
from podrace.experiments.sweep.settings import Setting
from podrace.run.directory import is_running
from podrace.run.metrics import Line
from podrace.system.child import ChildProcess, python
from podrace.system.files import make_folder, open_append
from podrace.system.files.reading import open_regular, parse_json, read_object
from podrace.system.files.schema import LINE, SUMMARY, check_members
from podrace.system.output import tell
from podrace.system.signals import Stop

POLL = 0.2  # seconds between looks at the trials that go on
GRACE = 60.0  # seconds that a trial has to save and end


class Trial:
  """The process of one setting."""

  def __init__(self, command: list[str], run_dir: Path) -> None:
    self.run_dir, self._read = run_dir, 0
    with open_append(make_folder(run_dir) / 'output.txt') as output:
      words = python('-m', 'podrace', *command, '--run-dir', str(run_dir))
      self._process = ChildProcess(words, stdout=output, stderr=output)

  @property
  def code(self) -> int | None:
    """The exit code, None while it runs."""
    return self._process.poll()

  def new_lines(self) -> Iterator[Line]:
    """Yield the lines of its metrics since the last call."""
    with (
      contextlib.suppress(OSError, UnreadableFile),
      open_regular(self.run_dir / 'metrics.jsonl') as file,
    ):
      file.seek(self._read)
      for text in file:
        if not text.endswith(b'\n'):
          break
        self._read += len(text)
        with contextlib.suppress(ValueError):
          line = parse_json(text, finite=True)
          check_members(line, LINE)
          yield line

  def terminate(self) -> None:
    """Send SIGTERM, at which it saves and ends."""
    self._process.terminate()

  def stop(self) -> None:
    """Let it save and end, and kill it after GRACE seconds."""
    self._process.stop(GRACE)

  def finish(self) -> None:
    """Wait for its end after `terminate`, and kill it after GRACE seconds."""
    self._process.finish(GRACE)


def arguments(given: list[str], setting: Setting) -> list[str]:
  """The command of a setting: the sweep's own options, and the varied ones."""
  varied = [x for name, value in setting.items() for x in (f'--{name}', *str(value).split())]
  return ['train', *given, *varied]


def summary_of(run_dir: Path) -> dict[str, Any] | None:
  """What summary.json holds; None if the run is not finished, or has to write it again."""
  with contextlib.suppress(UnreadableFile):
    return read_object(run_dir / 'summary.json', SUMMARY)
  return None


def _stop(trials: list[Trial]) -> None:
  for trial in trials:
    trial.terminate()
  for trial in trials:
    trial.finish()


def carry_out(
  trials: Iterable[tuple[Path, list[str]]],
  jobs: int,
  ended: Callable[[Path, int], None],
  line: Callable[[Path, Line], bool] = lambda path, line: False,
  say: Callable[[str], None] = tell,
) -> None:
  """Runs trials, `jobs` at a time; those that are finished are not run again.

  One that another process still trains in is waited for: a sweep that was killed leaves its trials behind.

  Args:
    trials: run directory and command of each; the next one is asked for when there is room.
    ended: called with the exit code of each.
    line: called with each new line of metrics; whether the trial is to end.

  Raises:
    Stopped: on a signal; the trials have saved then.
  """
  going: list[Trial] = []
  waiting = iter(trials)
  orphan: tuple[Path, list[str]] | None = None
  with Stop() as stop, contextlib.ExitStack() as stack:
    stack.callback(_stop, going)
    while True:
      if stop.signum:
        raise Stopped(stop.signum)
      while len(going) < jobs and (found := orphan or next(waiting, None)) is not None:
        path, command = found
        if is_running(path):
          if orphan is None:
            say(f'waits for {path}, which is still training: the sweep before was killed')
          orphan = found
          break
        orphan = None
        if summary_of(path) is not None:
          ended(path, 0)
        else:
          going.append(Trial(command, path))
      if not going and orphan is None:
        return
      for trial in list(going):
        code = trial.code
        ends = [line(trial.run_dir, each) for each in trial.new_lines()]
        if any(ends) and code is None:
          trial.stop()
          code = 0
        if code is not None:
          going.remove(trial)
          ended(trial.run_dir, code)
      time.sleep(POLL)
