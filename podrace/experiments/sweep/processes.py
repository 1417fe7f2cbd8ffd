"""One `podrace train` process for each setting."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from podrace.errors import Stopped, UnreadableFile
from podrace.experiments.sweep.settings import Setting, option_words
from podrace.run.directory import is_running
from podrace.run.metrics import Line
from podrace.system.child import ChildProcess, python
from podrace.system.files import make_folder, open_append
from podrace.system.files.reading import open_regular, parse_json, read_object
from podrace.system.files.schema import LINE, SUMMARY, check_members
from podrace.system.output import tell
from podrace.system.signals import Stop

POLL = 0.2  # seconds between looks at the running trials
GRACE = 60.0  # seconds within which a trial must save and end


class Trial:
  """A running process that trains one setting, or one program of a suite.

  Owner: the sweep, which calls `terminate` and `finish`.
  Ends when: the run ends, or after `terminate`.

  Attributes:
    ends_by: time at which it is killed, once it is to end.
  """

  def __init__(self, command: list[str], run_dir: Path) -> None:
    self.command, self.run_dir = command, run_dir
    self._read, self.ends_by = 0, math.inf
    with open_append(make_folder(run_dir) / 'output.txt') as output:
      words = python('-m', 'podrace', *command)
      self._process = ChildProcess(words, stdout=output, stderr=output)

  @property
  def code(self) -> int | None:
    """Exit code, or None while the process runs."""
    return self._process.poll()

  def new_lines(self) -> Iterator[Line]:
    """Yield the metrics lines since the last call."""
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

  def finish(self, grace: float = GRACE) -> None:
    """Wait for its end after `terminate`, and kill it after `grace` seconds."""
    self._process.finish(grace)


def make_arguments(options: list[str], setting: Setting, run_dir: Path | None = None) -> list[str]:
  """Return the command of a setting: the sweep's own options, then the varied ones."""
  varied = [word for name, value in setting.items() for word in option_words(name, value)]
  return ['train', *options, *varied, *(['--run-dir', str(run_dir)] if run_dir else [])]


def read_summary(run_dir: Path) -> dict[str, Any] | None:
  """Return summary.json, or None if the run is unfinished or the file is damaged."""
  with contextlib.suppress(UnreadableFile):
    return read_object(run_dir / 'summary.json', SUMMARY)
  return None


def make_result(run_dir: Path, setting: Setting, code: int) -> dict[str, Any]:
  """Return the result of a trial: its setting, score, scores by seed, state and run."""
  summary = read_summary(run_dir) or {}
  score = summary.get('episode_return')
  scores = summary.get('episode_return_by_seed') or [score]
  state = 'finished' if summary else 'pruned' if code == 0 else f'failed, exit code {code}'
  return {
    'settings': setting, 'score': score, 'scores': scores, 'state': state, 'run': str(run_dir),
  }  # fmt: skip


def _stop_trials(trials: list[Trial]) -> None:
  for trial in trials:
    trial.terminate()
  for trial in trials:
    trial.finish()


def run_trials(
  trials: Iterable[tuple[Path, list[str]]],
  jobs: int,
  ended: Callable[[Path, int], None],
  line: Callable[[Path, Line], bool] = lambda path, line: False,
  say: Callable[[str], None] = tell,
  finished: Callable[[Path], bool] = lambda path: read_summary(path) is not None,
) -> None:
  """Run trials, `jobs` at a time. Finished trials are not run again.

  A killed sweep leaves running trials behind. A trial that another process still runs is waited
  for, also if that process has the run directory only after the trial has begun here.

  Args:
    trials: run directory and command of each trial, read when a process is free.
    jobs: number of processes.
    ended: receives the run directory and exit code of each trial.
    line: receives each new line of metrics. Returns whether the trial is to end.
    say: receives progress messages.
    finished: returns whether a trial is finished.

  Raises:
    Stopped: on a signal, after the trials have saved.
  """
  running: list[Trial] = []
  waiting = _WaitingTrials(trials, say)

  def end(trial: Trial, code: int) -> None:
    if code and not finished(trial.run_dir) and is_running(trial.run_dir):
      waiting.again.append((trial.run_dir, trial.command))
    else:
      ended(trial.run_dir, code)

  with Stop() as stop, contextlib.ExitStack() as stack:
    stack.callback(_stop_trials, running)
    while True:
      if stop.signum:
        raise Stopped(stop.signum)
      while len(running) < jobs and (trial := waiting.take()) is not None:
        path, command = trial
        if finished(path):
          ended(path, 0)
        else:
          running.append(Trial(command, path))
      if not running and waiting.orphan is None:
        return
      _update_trials(running, end, line)
      time.sleep(POLL)


class _WaitingTrials:
  """Trials that do not run yet, each a run directory and a command.

  Attributes:
    again: trials whose run directory was in use when they began.
    orphan: the next trial, if another process still runs it.
  """

  def __init__(self, trials: Iterable[tuple[Path, list[str]]], say: Callable[[str], None]) -> None:
    self._trials, self._say = iter(trials), say
    self.again: list[tuple[Path, list[str]]] = []
    self.orphan: tuple[Path, list[str]] | None = None

  def take(self) -> tuple[Path, list[str]] | None:
    """Return the next trial; None if there is none, or another process runs it."""
    trial = self.orphan or next(self._trials, None) or (self.again.pop(0) if self.again else None)
    if trial is not None and is_running(trial[0]):
      if self.orphan is None:
        self._say(f'waits for {trial[0]}, which is still training: the sweep before was killed')
      self.orphan = trial
      return None
    self.orphan = None
    return trial


def _update_trials(
  running: list[Trial], end: Callable[[Trial, int], None], line: Callable[[Path, Line], bool]
) -> None:
  """Hand on new lines, stop trials that are to end, and remove trials that have ended."""
  for trial in list(running):
    code = trial.code
    ends = [line(trial.run_dir, each) for each in trial.new_lines()]
    if any(ends) and code is None and trial.ends_by == math.inf:
      trial.terminate()
      trial.ends_by = time.monotonic() + GRACE
    if time.monotonic() > trial.ends_by:
      trial.finish(0.0)
    if code is not None:
      running.remove(trial)
      end(trial, code if trial.ends_by == math.inf else 0)
