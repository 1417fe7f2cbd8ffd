"""Writing of files and directories: completely or not at all, and never through a link.

All writing in the package goes through this module, and a test reads the source for exceptions.
Another user may have put a name into a run directory, so a symbolic link, a FIFO or a device there
is replaced or refused. Links in the path of a directory that the user names are followed.

Text is UTF-8 in every locale.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from podrace.errors import RunError, UsageError

if TYPE_CHECKING:
  import numpy as np

UTF8 = 'utf-8'
LEVELS = 100  # of directories below a run directory: deeper ones cannot be removed
WANDB = 'wandb'  # a directory of Weights & Biases
LATEST = 'latest-run'  # a link there, which Weights & Biases makes for each life of a run
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)  # errors of flock
# errors of a path that the user has to change
WRONG_PATHS = {
  errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EROFS,
  errno.ELOOP, errno.ENAMETOOLONG, *NO_LOCKS,
}  # fmt: skip


class NotOwn(OSError, UsageError):
  """A name to which podrace writes is that of a link, a device or another kind of file."""

  def __init__(self, path: Path, problem: str) -> None:
    super().__init__(errno.ELOOP, f'{path} {problem}')

  @classmethod
  def of_kind(cls, path: Path, mode: int, expected: str = 'a regular file') -> NotOwn:
    """Return the error for a file of the kind in `mode`."""
    return cls(path, f'is {describe(mode)}, expected {expected}: remove it')

  def __str__(self) -> str:
    return str(self.strerror)


def path_error(message: str, error: OSError) -> UsageError | RunError:
  """Return the error for a path: UsageError if the path is wrong, RunError if it is, say, full."""
  return (UsageError if error.errno in WRONG_PATHS else RunError)(message)


def describe(mode: int) -> str:
  """Return a noun for the kind of file in a mode."""
  kinds = {
    stat.S_IFLNK: 'a symbolic link', stat.S_IFDIR: 'a directory', stat.S_IFIFO: 'a FIFO',
    stat.S_IFSOCK: 'a socket', stat.S_IFCHR: 'a device', stat.S_IFBLK: 'a device',
    stat.S_IFREG: 'a file',
  }  # fmt: skip
  return kinds.get(stat.S_IFMT(mode), 'no regular file')


def sync(path: Path) -> None:
  """Write a file, or the names in a directory, to the disk, so that they outlive a power cut.

  Raises:
    OSError: with the name of `path`.
  """
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  except OSError as e:
    raise OSError(e.errno, e.strerror, str(path)) from e
  finally:
    os.close(descriptor)


# --- files -------------------------------------------------------------------------------------


def open_new(path: Path, mode: str = 'w') -> IO[Any]:
  """Open a new file to write, in the place of a file or a link of that name.

  Raises:
    OSError: if a directory has the name, or the file cannot be made.
  """
  path.unlink(missing_ok=True)
  return create(path, mode)


def create(path: Path, mode: str = 'w', permissions: int = 0o666) -> IO[Any]:
  """Open a new file to write.

  Raises:
    FileExistsError: if the name exists, also as a dangling link.
  """
  flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
  return _wrapped(os.open(path, flags, permissions), mode)


def open_append(path: Path, mode: str = 'a', buffering: int = -1) -> IO[Any]:
  """Open a file to add to it. Creates it if it does not exist.

  Raises:
    NotOwn: if it is a link, a hard link of another file, or no regular file.
    OSError: if it cannot be opened.
  """
  file = _open_regular(path, os.O_WRONLY | os.O_APPEND, mode, buffering)
  if os.fstat(file.fileno()).st_nlink > 1:
    file.close()
    raise NotOwn(path, 'is a hard link: the file has other names, too. Put a copy in its place')
  return file


def open_lock(path: Path) -> IO[str]:
  """Open a file for `flock`, or create it; raises as `open_append`."""
  return _open_regular(path, os.O_RDWR, 'r+')


def write_whole(path: Path, content: str | bytes) -> None:
  """Write a file completely or not at all.

  Raises:
    OSError: with the name of the file, also if the disk is full.
    UsageError: if a text has a letter that UTF-8 lacks, as of a file's name in another encoding.
  """
  draft = path.with_name(path.name + '.new')
  try:
    data = content.encode(UTF8) if isinstance(content, str) else content
  except UnicodeEncodeError as e:
    near = e.object[max(0, e.start - 40) : e.end]
    raise UsageError(
      f'{path} cannot be written: expected UTF-8, not the last letter of {near!r}: rename it'
    ) from e
  try:
    with open_new(draft, 'wb') as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
    os.replace(draft, path)
  except BaseException as e:
    with contextlib.suppress(OSError):
      draft.unlink()
    if isinstance(e, OSError):
      raise OSError(e.errno, e.strerror, str(path)) from e
    raise
  sync(path.parent)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
  """Write a new .npz file."""
  with open_new(path, 'wb') as file:
    save_arrays(file, arrays)


def save_arrays(file: IO[bytes], arrays: Mapping[str, np.ndarray]) -> None:
  """Write arrays to an open file as .npz, without pickle."""
  import numpy as np

  np.savez(file, allow_pickle=False, **arrays)


def _open_regular(path: Path, flags: int, mode: str, buffering: int = -1) -> Any:
  """Open a regular file, or create it; never waits for the other end of a FIFO."""
  try:
    descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
  except OSError as e:
    if e.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):
      raise NotOwn.of_kind(path, path.lstat().st_mode) from e
    raise
  kind = os.fstat(descriptor).st_mode
  if not stat.S_ISREG(kind):
    os.close(descriptor)
    raise NotOwn.of_kind(path, kind)
  os.set_blocking(descriptor, True)
  return _wrapped(descriptor, mode, buffering)


def _wrapped(descriptor: int, mode: str, buffering: int = -1) -> Any:
  return os.fdopen(descriptor, mode, buffering, encoding=None if 'b' in mode else UTF8)


# --- directories -------------------------------------------------------------------------------


def make_user_folder(path: Path, permissions: int = 0o777) -> Path:
  """Make a directory that the user names, and its parents, if missing. Links are followed."""
  path.mkdir(permissions, parents=True, exist_ok=True)
  return path


def make_folder(path: Path, permissions: int = 0o777) -> Path:
  """Make a directory, if missing; its parent must exist.

  Raises:
    NotOwn: if its name is that of a link or of a file.
  """
  with contextlib.suppress(FileExistsError):
    path.mkdir(permissions)
  kind = path.lstat().st_mode
  if not stat.S_ISDIR(kind):
    raise NotOwn.of_kind(path, kind, 'a directory')
  return path


def create_folder(path: Path) -> Path:
  """Make a directory; its parent must exist. Raises FileExistsError if its name exists."""
  path.mkdir()
  return path


def new_folder(path: Path) -> Path:
  """Make an empty directory in the place of a file or directory of its name."""
  remove(path)
  return create_folder(path)


def move(path: Path, to: Path) -> None:
  """Rename a file or a directory.

  Raises:
    FileExistsError: if the new name exists, also as a link.
  """
  if os.path.lexists(to):
    raise FileExistsError(errno.EEXIST, 'there is something of that name already', str(to))
  path.rename(to)


def remove(path: Path) -> None:
  """Remove a file, a link or a directory with its content, if it exists. Links are not followed."""
  try:
    path.unlink(missing_ok=True)
  except (IsADirectoryError, PermissionError):  # the latter on other systems than Linux
    shutil.rmtree(path, ignore_errors=True)


def check_folder(directory: Path, name: str, links: bool = False) -> None:
  """Refuse a directory in which writing or reading would follow a link, or wait for ever.

  Args:
    directory: may be a link itself, and may be missing.
    name: the option that names it, for the message.
    links: whether links to directories are allowed, for a directory that is only read.

  Raises:
    UsageError: if it has a link to a directory, a FIFO or a device, at any depth, or more than
      LEVELS.
  """
  strange = sorted(_strange(directory, links))
  if strange:
    raise UsageError(
      f'{name} {directory}: {", ".join(strange[:5])}{" and more" if strange[5:] else ""}; podrace '
      'does not write or read there. Remove it, move what it leads to in its place, or make the '
      'whole directory a link'
    )


def _strange(directory: Path, links: bool) -> Iterator[str]:
  """Describe each entry that `check_folder` refuses.

  An entry that vanishes meanwhile is ignored.
  """
  folders = [str(directory)]
  while folders:
    folder = folders.pop()
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
      for entry in entries:
        name = os.path.relpath(entry.path, directory)
        with contextlib.suppress(OSError):
          kind = entry.stat(follow_symlinks=False).st_mode
          if stat.S_ISDIR(kind):
            if name.count(os.sep) > LEVELS:
              yield f'{name[:99]}... there has too many levels'
            else:
              folders.append(entry.path)
            continue
          if entry.name == LATEST and os.path.basename(folder) == WANDB:
            continue
          kind = entry.stat().st_mode
          if stat.S_ISDIR(kind):
            if not links:
              yield f'{name} there is a symbolic link to a directory elsewhere'
          elif not (stat.S_ISREG(kind) or stat.S_ISSOCK(kind)):
            yield f'{name} there is {describe(kind)}'


def number(x: Any) -> float | None:
  """Return `x` as a float, None if it is not finite: JSON has finite numbers only."""
  return float(x) if math.isfinite(x) else None


def write_json(path: Path, value: Any) -> None:
  """Write a JSON file completely or not at all, also if the power is cut."""
  write_whole(path, json.dumps(value, indent=2) + '\n')
