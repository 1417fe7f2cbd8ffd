"""The end of a life of a run: its record in end.json."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from podrace.errors import CheckpointError, RunError, Stopped, UnreadableFile, UsageError
from podrace.system.files import write_whole
from podrace.system.files.reading import read_object
from podrace.system.files.schema import TEXT

RUNNING, FINISHED, STOPPED, FAILED = 'running', 'finished', 'stopped', 'failed'
KILLED = 'killed'  # no record of its end: SIGKILL, out of memory, a power cut
BROKEN = 'broken'  # one of its files can't be read
UNKNOWN = 'unknown'  # not finished, and without locks nothing says whether it is running
STATES = (RUNNING, FINISHED, STOPPED, FAILED, KILLED, BROKEN, UNKNOWN)
END = 'end.json'  # in a run directory without a summary


@contextlib.contextmanager
def note_end(
  path: Path,
  is_ours: Callable[[], bool] = lambda: True,
  has_begun: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
  """Record how a life of a run ended, if an exception leaves the context.

  A refusal before training (UsageError) changes nothing.

  Args:
    path: the run directory.
    is_ours: returns whether the directory is still the run's. Else nothing is written.
    has_begun: returns whether training has begun.
  """
  try:
    before = read_end(path)
  except UnreadableFile:  # it is replaced below
    before = {}
  (path / END).unlink(missing_ok=True)

  def note(state: str, why: str) -> None:
    with contextlib.suppress(
      OSError
    ):  # such as a full disk: the first failure is the one to report
      if is_ours():
        write_whole(path / END, json.dumps({'state': state, 'why': why}) + '\n')

  try:
    yield
  except Stopped as e:
    note(STOPPED, str(e))
    raise
  except UsageError as e:
    if has_begun():
      note(FAILED, summarize_failure(e))
    elif before:
      note(before.get('state', FAILED), before.get('why', ''))
    raise
  except KeyboardInterrupt:
    note(STOPPED, 'SIGINT: ended at once')
    raise
  except Exception as e:
    note(FAILED, summarize_failure(e))
    raise


def summarize_failure(error: Exception) -> str:
  """Return one line about the first cause of a failure."""
  ours = RunError | UsageError | CheckpointError
  while isinstance(error.__cause__, Exception) and not isinstance(error, CheckpointError):
    error = error.__cause__
  lines = [x for x in str(error).splitlines() if x.strip()]
  if not lines:
    return repr(error)
  text, kind = lines[-1].strip(), type(error).__name__
  return text if isinstance(error, ours) or text.startswith(kind) else f'{kind}: {text}'


def read_end(path: Path) -> dict[str, Any]:
  """Return the record of the run's last life, {} if there is none."""
  end = read_object(path / END, {'state': TEXT, 'why': TEXT}) or {}
  if end.get('state', KILLED) not in (STOPPED, FAILED, KILLED):
    raise UnreadableFile(path / END, f'has a state other than {STOPPED}, {FAILED} or {KILLED}')
  return end
