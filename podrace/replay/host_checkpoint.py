"""The directory of a checkpoint of replay on the host."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import numpy as np

from podrace import tables
from podrace.errors import UnreadableFile
from podrace.system import files
from podrace.system.files import sync
from podrace.system.files.reading import open_regular


def write_snapshot(path: Path, taken: tables.Snapshot, streams: dict[str, np.ndarray]) -> None:
  """Write a checkpoint to a new directory, whole or not at all."""
  partial = path.with_name(f'.{path.name}.partial')
  for folder in (partial, path):  # leftovers of an earlier run belong to no checkpoint
    files.remove(folder)
  files.make_folder(path.parent)
  files.new_folder(partial)
  tables.write(taken, partial / 'tables')
  files.write_arrays(partial / 'streams.npz', streams)
  for written in (partial / 'streams.npz', partial):
    sync(written)
  files.move(partial, path)
  for folder in (path.parent, path.parent.parent):  # the first checkpoint also makes the parent
    sync(folder)


def checksum(folder: Path) -> str:
  """Return the checksum of a checkpoint.

  The manifest of the tables includes the checksums of the table files.
  """
  digest = hashlib.sha256()
  try:
    for name in ('tables/manifest.json', 'streams.npz'):
      with open_regular(folder / name) as file:
        for part in iter(functools.partial(file.read, 2**20), b''):
          digest.update(part)
  except (OSError, UnreadableFile) as e:
    raise tables.CheckpointError(f'{folder} is damaged: {e}') from e
  return digest.hexdigest()
