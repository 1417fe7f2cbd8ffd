"""Changes of a run's settings between its lives, in changes.json."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any, NamedTuple

from podrace.settings.record import changes
from podrace.system.files import write_json
from podrace.system.files.reading import read_object
from podrace.system.files.schema import COUNT, TEXT, Member, needed

FILE = 'changes.json'  # in a run directory, from the first change on
ENTRY = {'step': needed(COUNT), 'date': needed(TEXT), 'settings': needed(Member('an object'))}
SCHEMA = {'changes': needed(Member('a list', each=Member('an object', members=ENTRY)))}


class Change(NamedTuple):
  """A setting that differs between two records, by its path; None for a missing value."""

  path: str
  old: Any
  new: Any

  def __str__(self) -> str:
    return f'{self.path}: {json.dumps(self.old)} -> {json.dumps(self.new)}'

  @property
  def needs_override(self) -> bool:
    """Whether a run goes on with it only on request. More steps are no other run."""
    numbers = isinstance(self.old, int) and isinstance(self.new, int)
    return not (self.path == 'total_steps' and numbers and self.new > self.old)


def compare(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
  """Return the settings in which two records differ."""
  return [Change(*change) for change in changes(old, new)]


def note_changes(run_dir: Path, step: int, made: list[Change]) -> None:
  """Record that a run went on at `step` with other settings."""
  if not made:
    return
  date = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
  settings = {change.path: [change.old, change.new] for change in made}
  entries = [*read_changes(run_dir), {'step': step, 'date': date, 'settings': settings}]
  write_json(run_dir / FILE, {'changes': entries})


def read_changes(run_dir: Path) -> list[dict[str, Any]]:
  """Return all changes of a run's settings, the oldest first.

  Raises:
    UnreadableFile: if the file is damaged.
  """
  record = read_object(run_dir / FILE, SCHEMA)
  return [] if record is None else list(record['changes'])
