"""Where a run's numbers go: metrics.jsonl always, the terminal, and other sinks on request."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from podrace.errors import UnreadableFile, UsageError
from podrace.system.files import open_append, write_whole
from podrace.system.files.reading import RECORD_BYTES, parse_json, read_bytes
from podrace.system.files.schema import LINE, check_members, is_number

Line = dict[str, Any]

FILE_BYTES = 2**32  # largest metrics.jsonl of a run that goes on
SHOWN_BYTES, SHOWN_LINES = 2**27, 500_000  # largest of one that is shown: a few seconds
SHOWN_NAMES, SHOWN_VALUES = (
  1000,
  2**24,
)  # of one that is shown: names, and numbers of all lines together

log = logging.getLogger('podrace.run.metrics')


class Sink(Protocol):
  """Takes the lines of metrics.jsonl."""

  def write(self, line: Line) -> None: ...
  def close(self) -> None: ...


class JsonLines:
  """metrics.jsonl: one object a line, each step once, also across interruptions."""

  def __init__(self, path: Path, resumed_at: int) -> None:
    """Drops what an interrupted run wrote after the checkpoint that it goes on from."""
    kept = [line for line in read(path) if line['step'] <= resumed_at]
    write_whole(path, ''.join(json.dumps(line) + '\n' for line in kept))
    self._file = open_append(path)
    self._steps = [line['step'] for line in kept]
    self._synced = len(kept)

  def write(self, line: Line) -> None:
    self._file.write(json.dumps(line, allow_nan=False) + '\n')
    self._file.flush()
    self._steps.append(line['step'])

  def sync(self) -> None:
    """Returns when the lines are on disk."""
    written = len(self._steps)
    os.fsync(self._file.fileno())
    self._synced = written

  def on_disk(self) -> tuple[int, int]:
    """The number of lines that outlive a power cut, and the step of the last of them."""
    return self._synced, self._steps[self._synced - 1] if self._synced else 0

  def up_to(self, step: int) -> int:
    """The number of lines up to `step`."""
    return sum(s <= step for s in self._steps)

  def close(self) -> None:
    self._file.close()


def read(path: Path, shown: bool = False) -> list[Line]:
  """The lines of a metrics.jsonl, but for what a kill or a power cut left behind the last whole one.

  Args:
    path: of the file.
    shown: it may be another user's, and is read to be shown: a very large one is refused, and the lines have
      their numbers and lists of numbers only.

  Raises:
    UsageError: if it is no regular file, too long, or a line before the last whole one is damaged.
  """
  try:
    # A run that goes on puts a file of its own in the place of a link: it only reads there.
    data = read_bytes(path, SHOWN_BYTES if shown else FILE_BYTES, follow=not shown)
  except FileNotFoundError:
    return []
  if shown and (count := data.count(b'\n')) > SHOWN_LINES:
    raise UnreadableFile(path, f'has {count:,} lines, expected at most {SHOWN_LINES:,}')
  whole = data.split(b'\n')[:-1]  # no newline behind it: the run died while writing it
  found = _parse_shown(path, whole) if shown else [_parse(line) for line in whole]
  last = len(found)
  while last and isinstance(found[last - 1], str):
    last -= 1
  if last < len(found):
    log.warning('%s, line %d, %s: it and what follows is left out', path, last + 1, found[last])
  for number, line in enumerate(found[:last], start=1):
    if isinstance(line, str):
      raise UsageError(f'{path}, line {number}, {line}: mend or remove it')
  return cast(list[Line], found[:last])


def _parse(line: bytes) -> Line | str:
  """A line, or what is wrong with it."""
  try:
    found = parse_json(line, finite=True)
  except ValueError as e:
    return str(e)
  if not isinstance(found, dict) or not isinstance(found.get('step'), int):
    return 'is no line of metrics: it has no step'
  try:
    check_members(found, LINE)
  except ValueError as e:
    return f'is no line of metrics: it {e}'
  return cast(Line, found)


def _parse_shown(path: Path, whole: Sequence[bytes]) -> list[Line | str]:
  """Parse each line, with its numbers and lists of numbers only.

  Raises:
    UnreadableFile: if a line is longer than a record, or there are more than SHOWN_NAMES or SHOWN_VALUES.
  """
  found: list[Line | str] = []
  names: dict[str, str] = {}  # all lines share the text of a name
  values = 0
  for number, text in enumerate(whole, start=1):
    if len(text) > RECORD_BYTES:
      raise UnreadableFile(
        path, f'has {len(text):,} bytes in line {number}, expected at most {RECORD_BYTES:,}'
      )
    line = _parse(text)
    if isinstance(line, str):
      found.append(line)
      continue
    kept = {names.setdefault(name, name): x for name, x in line.items() if _is_shown(x)}
    values += sum(len(x) if isinstance(x, list) else 1 for x in kept.values())
    if len(names) > SHOWN_NAMES:
      raise UnreadableFile(path, f'has more than {SHOWN_NAMES:,} names of metrics')
    if values > SHOWN_VALUES:
      raise UnreadableFile(path, f'has more than {SHOWN_VALUES:,} numbers')
    found.append(kept)
  return found


def _is_shown(x: Any) -> bool:
  if isinstance(x, list):
    return all(v is None or is_number(v) for v in x)
  return is_number(x)
