"""The lines of metrics.jsonl: write, read and check them."""

from __future__ import annotations

import contextlib
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

FILE_BYTES = 2**32  # largest metrics.jsonl of a run that is resumed
SHOWN_BYTES, SHOWN_LINES = 2**27, 500_000  # largest file for display: read in a few seconds
SHOWN_NAMES, SHOWN_VALUES = 1000, 2**24  # most names, and most numbers, for display

log = logging.getLogger('podrace.run.metrics')


class Sink(Protocol):
  """Destination of metrics lines."""

  def write(self, line: Line) -> None:
    """Write one line."""

  def close(self) -> None:
    """Flush and release the destination."""


class JsonLines:
  """metrics.jsonl: one JSON object per line, each step once, also across interruptions."""

  def __init__(self, path: Path, resumed_at: int) -> None:
    """Open the file, and drop lines after the checkpoint at step `resumed_at`."""
    kept = [line for line in read(path) if line['step'] <= resumed_at]
    write_whole(path, ''.join(json.dumps(line) + '\n' for line in kept))
    self._file = open_append(path)
    self._steps = [line['step'] for line in kept]
    self._synced = len(kept)

  def write(self, line: Line) -> None:
    """Append a line and flush it to the operating system."""
    self._file.write(json.dumps(line, allow_nan=False) + '\n')
    self._file.flush()
    self._steps.append(line['step'])

  def sync(self) -> None:
    """Return when all lines are on disk."""
    written = len(self._steps)
    os.fsync(self._file.fileno())
    self._synced = written

  def on_disk(self) -> tuple[int, int]:
    """Return the number of lines that survive a power cut, and the step of the last of them."""
    synced = self._synced  # another thread may write
    return synced, self._steps[synced - 1] if synced else 0

  def has(self, step: int) -> bool:
    """Return whether there is a line of `step`."""
    return step in self._steps[-1:]

  def up_to(self, step: int) -> int:
    """Return the number of lines up to `step`."""
    return sum(s <= step for s in self._steps)

  def close(self) -> None:
    """Close the file. A line that could not be written has raised before."""
    with contextlib.suppress(OSError):  # Python tries to write it again
      self._file.close()


def read(path: Path, shown: bool = False) -> list[Line]:
  """Read the lines of a metrics.jsonl, without a tail that a kill or power cut left incomplete.

  Args:
    path: path of the file.
    shown: whether the file is read for display and may belong to another user. Then a very large
      file is refused, and lines keep only their numbers and lists of numbers.

  Raises:
    UsageError: if the path is not a regular file, the file is too long, or a line before the last
      complete one is damaged.
  """
  try:
    # A resumed run replaces a link by a file of its own, so following the link only reads.
    data = read_bytes(path, SHOWN_BYTES if shown else FILE_BYTES, follow=not shown)
  except FileNotFoundError:
    return []
  if shown and (count := data.count(b'\n')) > SHOWN_LINES:
    raise UnreadableFile(path, f'has {count:,} lines, expected at most {SHOWN_LINES:,}')
  # a line without a newline is incomplete: the run died while writing it
  whole = data.split(b'\n')[:-1]
  parsed = _parse_shown(path, whole) if shown else [_parse(line) for line in whole]
  end = len(parsed)
  while end and isinstance(parsed[end - 1], str):
    end -= 1
  if end < len(parsed):
    log.warning('%s, line %d, %s: it and what follows is left out', path, end + 1, parsed[end])
  for number, line in enumerate(parsed[:end], start=1):
    if isinstance(line, str):
      raise UsageError(f'{path}, line {number}, {line}: fix or remove the line')
  return cast(list[Line], parsed[:end])


def _parse(text: bytes) -> Line | str:
  """Return a parsed line, or a message if it is damaged."""
  try:
    line = parse_json(text, finite=True)
  except ValueError as e:
    return str(e)
  if not isinstance(line, dict) or not isinstance(line.get('step'), int):
    return 'is no line of metrics: it has no step'
  try:
    check_members(line, LINE)
  except ValueError as e:
    return f'is no line of metrics: it {e}'
  return cast(Line, line)


def _parse_shown(path: Path, texts: Sequence[bytes]) -> list[Line | str]:
  """Parse each line and keep only its numbers and lists of numbers.

  Raises:
    UnreadableFile: if a line is longer than RECORD_BYTES, or the file has more than SHOWN_NAMES
      names or SHOWN_VALUES numbers.
  """
  parsed: list[Line | str] = []
  names: dict[str, str] = {}  # shares the text of each name between lines
  values = 0
  for number, text in enumerate(texts, start=1):
    if len(text) > RECORD_BYTES:
      raise UnreadableFile(
        path, f'has {len(text):,} bytes in line {number}, expected at most {RECORD_BYTES:,}'
      )
    line = _parse(text)
    if isinstance(line, str):
      parsed.append(line)
      continue
    kept = {names.setdefault(name, name): x for name, x in line.items() if _is_shown(x)}
    values += sum(len(x) if isinstance(x, list) else 1 for x in kept.values())
    if len(names) > SHOWN_NAMES:
      raise UnreadableFile(path, f'has more than {SHOWN_NAMES:,} names of metrics')
    if values > SHOWN_VALUES:
      raise UnreadableFile(path, f'has more than {SHOWN_VALUES:,} numbers')
    parsed.append(kept)
  return parsed


def _is_shown(x: Any) -> bool:
  if isinstance(x, list):
    return all(v is None or is_number(v) for v in x)
  return is_number(x)
