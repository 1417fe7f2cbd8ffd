"""Changes of a run's settings between its lives, in changes.json."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from podrace.errors import UnreadableFile
from podrace.settings.record import Change
from podrace.system.files import write_json
from podrace.system.files.reading import read_object
from podrace.system.files.schema import COUNT, TEXT, Member, needed

FILE = 'changes.json'  # in a run directory, from the first change on
ENTRY = {'step': needed(COUNT), 'date': needed(TEXT), 'settings': needed(Member('an object'))}
SCHEMA = {'changes': needed(Member('a list', each=Member('an object', members=ENTRY)))}


def needs_override(change: Change) -> bool:
  """Return whether a run goes on with a change only on request. More steps are no other run."""
  numbers = isinstance(change.old, int) and isinstance(change.new, int)
  return not (change.path == 'total_steps' and numbers and change.new > change.old)


def note_changes(run_dir: Path, step: int, made: list[Change]) -> None:
  """Record that a run went on at `step` with other settings, once also if it starts again there.

  Earlier changes hold from `step` on if the run resumes from a checkpoint before them.
  """
  before = read_changes(run_dir)
  entries = [{**entry, 'step': min(entry['step'], step)} for entry in before]
  settings = {change.path: [change.old, change.new] for change in made}
  # Without the second condition, that start ended before it recorded the settings.
  if made and (not entries or (entries[-1]['step'], entries[-1]['settings']) != (step, settings)):
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
    entries.append({'step': step, 'date': date, 'settings': settings})
  if entries != before:
    write_json(run_dir / FILE, {'changes': entries})


def last_change(run_dir: Path) -> int:
  """Return the step of the newest change of settings, -1 if there was none."""
  changes = read_changes(run_dir)
  return int(changes[-1]['step']) if changes else -1


def read_changes(run_dir: Path) -> list[dict[str, Any]]:
  """Return all changes of a run's settings, the oldest first.

  Raises:
    UnreadableFile: if the file is damaged.
  """
  record = read_object(run_dir / FILE, SCHEMA)
  entries = [] if record is None else list(record['changes'])
  for entry in entries:
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in entry['settings'].values()):
      raise UnreadableFile(run_dir / FILE, 'has a setting without its old and its new value')
  return entries
