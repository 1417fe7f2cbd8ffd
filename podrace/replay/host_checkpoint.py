"""The directory of a checkpoint of replay on the host."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from podrace import tables
from podrace.errors import UnreadableFile, UsageError
from podrace.replay.layout import Layout, is_single
from podrace.system import files
from podrace.system.files import sync
from podrace.system.files.reading import open_regular

UNCHANGEABLE = "can't change in a run: give them as they were, or begin another with --init-from"


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


def check_columns(path: Path, layout: Layout, table: tables.Table) -> None:
  """Raise UsageError if the items of a restored table have other columns than windows have now."""
  signature = table.contents.signature
  if signature is None:  # no window was complete
    return
  now = {
    name: (x.dtype, x.shape[1 if is_single(name) or name == 'env_id' else 2 :])
    for name, x in layout.batch().items()
    if name != 'weight'
  }
  saved = {leaf.name: (leaf.dtype, leaf.shape) for leaf in signature.leaves}
  different = [
    f'{name}: {_describe(saved.get(name))} -> {_describe(now.get(name))}'
    for name in sorted({*saved, *now})
    if saved.get(name) != now.get(name)
  ]
  if different:
    raise UsageError(
      f'{path} holds windows of other columns, which {UNCHANGEABLE}:\n  ' + '\n  '.join(different)
    )


def _describe(column: Any) -> str:
  return 'none' if column is None else f'{column[0]}{list(column[1])}'
