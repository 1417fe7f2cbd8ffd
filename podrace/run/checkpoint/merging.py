"""The index of an older podrace's checkpoint, made anew."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from podrace.run.checkpoint.arrays import merge
from podrace.run.checkpoint.library import PlainPath
from podrace.system import files

INDEX = ('manifest.ocdbt', 'd')  # the names that make up the index of an item


DRAFT = '.orbax-checkpoint-tmp'  # in the name of a checkpoint that is not whole


@contextlib.contextmanager
def merged(directory: Path, step: int, items: Iterable[str]) -> Iterator[Path]:
  """Index the arrays of an older podrace's checkpoint anew, without writing to `directory`.

  With one of MISREAD in the directory's path, orbax left out the index over the folders
  `ocdbt.process_*`, and a backslash led the folders to another directory.

  Yields:
    A directory with the checkpoint `step` as links, which is removed with the context.

  Raises:
    OSError, ValueError: if the checkpoint has an index, or if a folder is missing or unreadable.
  """
  source = directory / str(step)
  if all((source / item / INDEX[0]).exists() for item in items):
    raise ValueError(f'{source} has an index')
  elsewhere = Path(str(directory).replace('\\', '/')) / f'{step}{DRAFT}'
  with contextlib.ExitStack() as stack:
    root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix='podrace-')))
    plain = stack.enter_context(contextlib.closing(PlainPath(root)))
    target = root / str(step)
    files.create_folder(target)
    for entry in source.iterdir():
      if entry.name not in items:
        (target / entry.name).symlink_to(entry)
    for item in items:
      files.create_folder(target / item)
      folders = [f for f in (source / item, elsewhere / f'{item}{DRAFT}') if f.is_dir()]
      for entry in (entry for folder in folders for entry in folder.iterdir()):
        link = target / item / entry.name
        if entry.name not in INDEX and not link.is_symlink():
          link.symlink_to(entry)
      merge(plain.path / str(step) / item)
    yield plain.path
