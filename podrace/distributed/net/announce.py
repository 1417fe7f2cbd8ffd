"""Announcements: a file with the addresses that a process listens at, for its launcher."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from podrace.errors import UnreadableFile, UsageError
from podrace.system.files import write_whole
from podrace.system.files.reading import RECORD_BYTES, parse_json, read_bytes


@dataclasses.dataclass(frozen=True)
class Announcement:
  """A file to announce an address in.

  Attributes:
    others: names and addresses that are announced with it.
  """

  path: Path
  name: str
  others: tuple[tuple[str, str], ...] = ()

  def make(self, address: str) -> None:
    """Write the file, whole or not at all: a JSON object of addresses by name.

    Raises:
      UsageError: if it cannot be written.
    """
    try:
      write_whole(self.path, json.dumps({**dict(self.others), self.name: address}) + '\n')
    except OSError as e:
      raise UsageError(f'--announce {self.path} cannot be written: {e.strerror or e}') from e

  def with_other(self, name: str, address: str) -> Announcement:
    """Return a copy that also announces an address that is known already."""
    return dataclasses.replace(self, others=(*self.others, (name, address)))

  def numbered(self, number: int) -> Announcement:
    """Return a copy for the process of this number, with the file FILE.NUMBER."""
    return dataclasses.replace(self, path=self.path.with_name(f'{self.path.name}.{number}'))


def read(path: Path) -> dict[str, str]:
  """Return the addresses in an announcement, by name; {} if there is no valid file."""
  try:
    names = parse_json(read_bytes(path, RECORD_BYTES, follow=True))
  except (OSError, ValueError, UnreadableFile):
    return {}
  valid = isinstance(names, dict) and all(isinstance(x, str) for x in names.values())
  return names if valid else {}
