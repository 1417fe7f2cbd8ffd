"""Announcements: a file in which a process says where it listens, for those who start others."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from podrace.errors import UsageError
from podrace.system.files import write_whole


@dataclasses.dataclass(frozen=True)
class Announcement:
  """Where to announce an address, and under which name."""

  path: Path
  name: str
  others: tuple[tuple[str, str], ...] = ()  # names and addresses that are announced with it

  def make(self, address: str) -> None:
    """Writes the file, whole or not at all: a JSON object of addresses by name.

    Raises:
      UsageError: if it can't be written.
    """
    try:
      write_whole(self.path, json.dumps({**dict(self.others), self.name: address}) + '\n')
    except OSError as e:
      raise UsageError(f'--announce {self.path} cannot be written: {e.strerror or e}') from e

  def with_other(self, name: str, address: str) -> Announcement:
    """The same, with another address that is known already."""
    return dataclasses.replace(self, others=(*self.others, (name, address)))

  def numbered(self, number: int) -> Announcement:
    """That of one of several processes: a file of its own, FILE.NUMBER."""
    return dataclasses.replace(self, path=self.path.with_name(f'{self.path.name}.{number}'))


def read(path: Path) -> dict[str, str]:
  """The addresses of an announcement, by name; none if it is not there, or is none."""
  try:
    found = json.loads(path.read_bytes())
  except (OSError, ValueError):
    return {}
  texts = isinstance(found, dict) and all(isinstance(x, str) for x in found.values())
  return found if texts else {}
