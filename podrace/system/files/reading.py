"""Reading of files that another user may have written: of bounded size, and checked before use."""

from __future__ import annotations

import contextlib
import io
import json
import lzma
import math
import os
import stat
import struct
import sys
import tokenize
import tomllib
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podrace.errors import UnreadableFile
from podrace.system.files import describe
from podrace.system.files.schema import Member, check_members

RECORD_BYTES = 2**22  # largest JSON file of a run directory or a policy
DEPTH = 64  # of nested JSON
_OF_HEADERS = (MemoryError, TypeError, tokenize.TokenError)  # NumPy's, for headers of .npy


def open_regular(path: Path | str, follow: bool = False) -> io.BufferedReader:
  """Open a regular file to read its bytes. Never waits, and never opens a device.

  Args:
    path: of the file.
    follow: whether `path` may be a symbolic link: only where the user named the file.

  Raises:
    FileNotFoundError: if there is no file.
    UnreadableFile: if it is no regular file, or cannot be opened.
  """
  flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
  try:
    _check_regular(path, os.stat(path, follow_symlinks=follow))  # opening a device may have effects
    descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
  except FileNotFoundError:
    raise
  except NotADirectoryError as e:
    raise FileNotFoundError(e.errno, e.strerror, str(path)) from e
  except UnreadableFile:
    raise
  except (OSError, ValueError) as e:  # ValueError: the path has a NUL
    raise UnreadableFile(path, f'cannot be read: {getattr(e, "strerror", None) or e}') from e
  file = os.fdopen(descriptor, 'rb')
  try:
    _check_regular(path, os.fstat(descriptor))
  except UnreadableFile:
    file.close()
    raise
  return file


def _check_regular(path: Path | str, status: os.stat_result) -> None:
  if not stat.S_ISREG(status.st_mode):
    raise UnreadableFile(path, f'is {describe(status.st_mode)}, no regular file')


def read_bytes(path: Path | str, limit: int, follow: bool = False) -> bytes:
  """Return the content of a regular file of at most `limit` bytes; raises as `open_regular`."""
  with open_regular(path, follow) as file:
    if (size := os.fstat(file.fileno()).st_size) > limit:
      raise UnreadableFile(path, f'has {size:,} bytes, expected at most {limit:,}')
    try:
      data = file.read(limit + 1)
    except OSError as e:
      raise UnreadableFile(path, f'cannot be read: {e.strerror}') from e
  if len(data) > limit:  # of /proc, or growing
    raise UnreadableFile(path, f'has more than {limit:,} bytes')
  return data


def read_json(path: Path | str, limit: int = RECORD_BYTES) -> Any:
  """Return the value in a JSON file, None if there is no file.

  Raises:
    UnreadableFile: as `read_bytes`, and if the content is not JSON.
  """
  try:
    data = read_bytes(path, limit)
  except FileNotFoundError:
    return None
  try:
    return parse_json(data)
  except ValueError as e:
    raise UnreadableFile(path, str(e)) from e


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  members = dict(pairs)
  if len(members) < len(pairs):
    raise ValueError('a name occurs twice in an object')
  return members


_DECODER = json.JSONDecoder(object_pairs_hook=_distinct)


def parse_json(data: bytes, finite: bool = False) -> Any:
  """Return the value of JSON in UTF-8, nested at most DEPTH deep.

  Args:
    data: the text.
    finite: refuse NaN and infinite numbers. Whole numbers beyond the floats are always refused.

  Raises:
    ValueError: with the reason.
  """
  try:
    value = _DECODER.decode(data.decode())
  except RecursionError:
    raise ValueError(f'is nested deeper than {DEPTH}') from None
  except ValueError as e:  # also of bytes that are no UTF-8
    raise ValueError(f'is not JSON: {e}') from e
  _check_values(value, finite)
  return value


def _check_values(value: Any, finite: bool) -> None:
  """Raise ValueError for values that are nested too deep, and numbers that are too large."""
  left = [(value, 1)]
  while left:
    x, depth = left.pop()
    if isinstance(x, dict | list):
      if depth > DEPTH:
        raise ValueError(f'is nested deeper than {DEPTH}')
      left.extend((child, depth + 1) for child in (x.values() if isinstance(x, dict) else x))
    elif isinstance(x, int | float) and not _is_in_range(x, finite):
      raise ValueError('has a number that is too large or not finite')


def parse_toml(data: bytes) -> dict[str, Any]:
  """Return the tables of TOML in UTF-8; raises ValueError with the reason."""
  try:
    tables = tomllib.loads(data.decode())
  except RecursionError:
    raise ValueError('is nested too deep') from None
  _check_values(tables, finite=False)
  return tables


def _is_in_range(x: float, finite: bool) -> bool:
  return abs(x) <= sys.float_info.max or (not finite and isinstance(x, float))


def read_object(path: Path | str, schema: Mapping[str, Member]) -> dict[str, Any] | None:
  """Return the JSON object in a file, with declared members checked; None if there is no file.

  Raises:
    UnreadableFile: as `read_json`, and if a member is not as declared.
  """
  value = read_json(path)
  if value is None and not os.path.lexists(path):
    return None
  try:
    check_members(value, schema)
  except ValueError as e:
    raise UnreadableFile(path, str(e)) from e
  members: dict[str, Any] = value
  return members


def size_of(root: str) -> int:
  """Return the bytes of all files in a folder. Links are not followed."""
  total, folders = 0, [root]
  while folders:
    with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
      for entry in entries:
        with contextlib.suppress(OSError):
          if entry.is_dir(follow_symlinks=False):
            folders.append(entry.path)
          else:
            total += entry.stat(follow_symlinks=False).st_size
  return total


# --- arrays --------------------------------------------------------------------------------------

MEMBERS = 2**21  # arrays of an .npz: a replay has some of each environment
HEADER = 10_000  # bytes of an array's header


def read_npz(source: bytes | io.BufferedReader, limit: int | None = None) -> dict[str, Any]:
  """Return the arrays of an .npz of numbers. The size of each is checked before it is unpacked.

  Args:
    source: the content, or a file opened by `open_regular`.
    limit: bytes of all arrays. None: as many as the file has, which must not be compressed.

  Raises:
    ValueError: with the reason.
  """
  import numpy as np  # not at the top, as JSON is read without it

  try:
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    with zipfile.ZipFile(file) as archive:
      infos = archive.infolist()
      names = [info.filename.removesuffix('.npy') for info in infos]
      size = file.seek(0, os.SEEK_END)
      _check_archive(infos, names, size if limit is None else limit, packed=limit is not None)
      return {name: _array(archive, x, np) for name, x in zip(names, infos, strict=True)}
  except (zipfile.BadZipFile, zlib.error, lzma.LZMAError) as e:
    raise ValueError(f'it is no intact .npz: {e}') from e
  except (OSError, EOFError, KeyError, RuntimeError, struct.error, SyntaxError, *_OF_HEADERS) as e:
    # RuntimeError: a member is encrypted, or NotImplementedError: packed by an unknown method
    raise ValueError(f'it is no intact .npz: {type(e).__name__}: {e}') from e


def _check_archive(
  infos: list[zipfile.ZipInfo], names: list[str], limit: int, packed: bool
) -> None:
  if len(infos) > MEMBERS:
    raise ValueError(f'it has {len(infos):,} arrays, expected at most {MEMBERS:,}')
  if len(set(names)) < len(names):
    raise ValueError('two of its arrays have one name')
  if not packed and any(info.compress_type != zipfile.ZIP_STORED for info in infos):
    raise ValueError('it is compressed')
  if (size := sum(info.file_size for info in infos)) > limit:
    raise ValueError(f'it unpacks to {size:,} bytes, expected at most {limit:,}')


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, np: Any) -> Any:
  """Return a member. The sizes in its header and in the archive must agree."""
  with archive.open(info) as file:
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
      raise ValueError(f'{info.filename} has a header of version {version}')
    read = getattr(np.lib.format, f'read_array_header_{version[0]}_0')
    shape, fortran, dtype = read(file, max_header_size=HEADER)
    if dtype.hasobject or dtype.names is not None:
      raise ValueError(f'{info.filename} is of {dtype}, expected numbers')
    left, needed = info.file_size - file.tell(), math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or needed != left:
      raise ValueError(f'{info.filename} has {left:,} bytes of data, its header tells {needed:,}')
    flat = np.frombuffer(bytearray(file.read()), dtype)
  return flat.reshape(shape, order='F' if fortran else 'C')
