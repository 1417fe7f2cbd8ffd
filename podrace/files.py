"""Files that are whole or not there, also after a power cut."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
  """Has a file, or which names there are in a directory, outlive a power cut."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
  """Writes a file whole or not at all."""
  draft = path.with_name(path.name + '.new')
  draft.write_text(text)
  sync(draft)
  os.replace(draft, path)
  sync(path.parent)
