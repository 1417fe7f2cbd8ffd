"""Files that are whole or not there, also after a power cut."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any


def sync(path: Path) -> None:
  """Has a file, or which names there are in a directory, outlive a power cut."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def open_new(path: Path, mode: str = 'w') -> IO[Any]:
  """A new file to write, in the place of what is there; a symbolic link is removed, not followed."""
  path.unlink(missing_ok=True)
  return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), mode)


def write_whole(path: Path, content: str | bytes) -> None:
  """Writes a file whole or not at all."""
  draft = path.with_name(path.name + '.new')
  with open_new(draft, 'w' if isinstance(content, str) else 'wb') as file:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())
  os.replace(draft, path)
  sync(path.parent)
