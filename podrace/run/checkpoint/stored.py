"""One checkpoint on disk, read and verified without orbax's manager."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from podrace.errors import CheckpointError, UsageError
from podrace.run.checkpoint.arrays import PART, Arrays, StoredArrays, fingerprint, merge
from podrace.run.checkpoint.library import PlainPath
from podrace.system.files import create_folder
from podrace.system.files.reading import read_json
from podrace.system.files.schema import COUNT, POSITIVE, TEXT, Member, check_members

META_BYTES = 2**26
DRAFT = '.orbax-checkpoint-tmp'  # in the name of a checkpoint that is not whole
INDEX = ('manifest.ocdbt', 'd')  # the names that make up the index of an item
OBJECT = Member('an object', null=True)
META = {
  'step': COUNT, 'update': COUNT, 'mesh': POSITIVE, 'model': POSITIVE, 'steps_per_update': POSITIVE,
  'shapes': TEXT, 'machine': OBJECT, 'fingerprints': OBJECT, 'replay': OBJECT, 'log_sha256': TEXT,
  'log_share': TEXT, 'random': OBJECT,
}  # fmt: skip
Trees = dict[str, Any]  # by item
SUMS = '0.log.sums.'  # begins the names of the sums of metrics
log = logging.getLogger('podrace.run.checkpoint')


class StoredCheckpoint:
  """The checkpoint at `step` in a directory.

  Args:
    directory: of all checkpoints, for messages.
    plain: the same directory by a path that no library misreads.
    step: names the checkpoint.
  """

  def __init__(self, directory: Path, plain: Path, step: int) -> None:
    self._directory, self._plain, self._step = directory, plain, step

  def meta(self) -> dict[str, Any]:
    """Return the meta.

    Raises:
      CheckpointError: if it cannot be read, or if its checksum is wrong.
      UsageError: if an older podrace made it, which this one cannot continue.
    """
    try:
      meta = _read_meta(self._directory / str(self._step))
    except (OSError, ValueError) as e:
      raise self._unreadable(e) from e
    if meta != signed(meta):
      raise self._damaged()
    if 'fingerprints' not in meta:
      raise UsageError(
        f'checkpoint {self._step} in {self._directory} was made by an older podrace, which can go '
        'on with it; this one needs another --run-dir'
      )
    try:
      check_members(meta, META)
    except ValueError as e:
      raise self._unreadable(e) from e
    return meta

  def sums(self) -> list[str] | None:
    """Return the names of the metrics with sums in the state; None if they cannot be read."""
    try:
      names = StoredArrays(self._plain / str(self._step) / 'rest').names
    except Exception:  # `read` reports it
      return None
    return sorted(name.removeprefix(SUMS) for name in names if name.startswith(SUMS)) or None

  def read(self, shapes: Trees, meta: dict[str, Any]) -> Trees:
    """Read trees of the given shapes and shardings, and compare their checksums with the meta.

    A checkpoint of an older podrace may lack the index over the arrays. Then a temporary index is
    made.

    Raises:
      CheckpointError: if the checkpoint is damaged, or of other shapes.
    """
    try:
      return self._read_in(self._plain / str(self._step), shapes, meta)
    except CheckpointError as e:
      try:
        with _merged(self._directory, self._step, shapes) as folder:
          trees = self._read_in(folder, shapes, meta)
      except Exception:
        raise e from None
    log.warning(
      'checkpoint %d in %s has no index of its own arrays, as an older podrace left it out; they '
      'were read from its folders %s*',
      *(self._step, self._directory, PART),
    )
    return trees

  def _read_in(self, folder: Path, shapes: Trees, meta: dict[str, Any]) -> Trees:
    trees = {}
    for item, tree in shapes.items():
      try:
        trees[item] = StoredArrays(folder / item).read(tree)
      except Exception as e:
        raise self._unreadable(e, f', {item}') from e
      if fingerprint(trees[item]) != meta['fingerprints'].get(item):
        raise self._damaged()
    return trees

  def verify_draft(self, meta: dict[str, Any], arrays: dict[str, Arrays]) -> None:
    """Read a draft back, which has no final name yet, and compare meta and checksums.

    Raises:
      CheckpointError: if anything is missing or differs.
    """
    try:
      (draft,) = self._directory.glob(f'{self._step}{DRAFT}*')
      folder = self._plain / draft.name
      if _read_meta(folder) != json.loads(json.dumps(meta)):
        raise ValueError('its meta differs')
      for item, expected in arrays.items():
        if StoredArrays(folder / item).check(expected) not in (None, meta['fingerprints'][item]):
          raise ValueError(f'the checksum of {item} differs')
    except Exception as e:
      raise self._unreadable(e, ' was written, but cannot be read back') from e

  def _unreadable(self, error: Exception, problem: str = '') -> CheckpointError:
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return self._failure(f'{problem}: {PlainPath.named(reason[0])[:300]}')

  def _damaged(self) -> CheckpointError:
    return self._failure(': its checksum is wrong')

  def _failure(self, problem: str) -> CheckpointError:
    return CheckpointError(f'checkpoint {self._step} in {self._directory}{problem}')


@contextlib.contextmanager
def _merged(directory: Path, step: int, items: Iterable[str]) -> Iterator[Path]:
  """Index the arrays of an older podrace's checkpoint anew, without writing to `directory`.

  With one of MISREAD in the directory's path, orbax left out the index over the folders
  `ocdbt.process_*`, and a backslash led the folders to another directory.

  Yields:
    A folder with the items as links, which is removed with the context.

  Raises:
    OSError, ValueError: if the checkpoint has an index, or if a folder is missing or unreadable.
  """
  source = directory / str(step)
  if all((source / item / INDEX[0]).exists() for item in items):
    raise ValueError(f'{source} has an index')
  elsewhere = Path(str(directory).replace('\\', '/')) / f'{step}{DRAFT}'
  with (
    tempfile.TemporaryDirectory(prefix='podrace-') as root,
    contextlib.closing(PlainPath(Path(root))) as plain,
  ):
    for item in items:
      target = create_folder(Path(root, item))
      folders = [f for f in (source / item, elsewhere / f'{item}{DRAFT}') if f.is_dir()]
      for entry in (entry for folder in folders for entry in folder.iterdir()):
        link = target / entry.name
        if entry.name not in INDEX and not link.is_symlink():
          link.symlink_to(entry)
      merge(plain.path / item)
    yield plain.path


def _read_meta(folder: Path) -> dict[str, Any]:
  meta = read_json(folder / 'meta' / 'metadata', META_BYTES)
  if not isinstance(meta, dict):
    raise ValueError('its meta is missing, or is no object')
  return meta


def signed(meta: dict[str, Any]) -> dict[str, Any]:
  """Return `meta` with a hash over its other entries."""
  rest = {k: v for k, v in meta.items() if k != 'sha256'}
  text = json.dumps(rest, sort_keys=True)
  return {**rest, 'sha256': hashlib.sha256(text.encode()).hexdigest()}
