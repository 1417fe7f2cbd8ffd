"""Compilation of C files on first use, into the user's cache directory."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from podrace.errors import UsageError
from podrace.system.files import make_user_folder

HERE = Path(__file__).parent  # of podrace_env.h
# Without -ffast-math, and without fused multiply-adds, which compilers use differently.
FLAGS = ('-O3', '-shared', '-fPIC', '-ffp-contract=off', '-pthread')
LINKED = ('-lm',)
SECONDS = 300.0  # for the compiler
LINES = 12  # of the compiler's message
STEM = 100  # bytes of a file's name in the name of its library, which has at most 255


def compile_library(source: Path, name: str) -> Path:
  """Return the shared library of a C file, compiled unless the cache has it.

  The key of the cache is a hash of the file after preprocessing, so it covers the headers, and of
  the compiler's version and options. A library's name ends with a hash of its bytes, so that a
  damaged one is compiled again.

  Args:
    source: the C file.
    name: of the environment, for messages.

  Raises:
    UsageError: if there is no compiler, or it fails; the message is the compiler's.
  """
  file = str(source.absolute())  # a relative path may begin with a dash
  text = _run(name, ('-E', '-P', f'-I{HERE}', file))
  options = _version(name), compiler(), FLAGS, LINKED
  key = hashlib.sha256(repr(options).encode() + text).hexdigest()[:32]
  folder, stem = _cache_directory(), f'{_shorten(source.stem)}-{key}-'
  for library in folder.iterdir():
    if library.name.startswith(stem) and library.name == _library_name(stem, library):
      return library
  with tempfile.TemporaryDirectory(dir=folder) as draft:
    path = Path(draft) / 'library.so'
    _run(name, (*FLAGS, f'-I{HERE}', file, '-o', str(path), *LINKED))
    library = folder / _library_name(stem, path)
    path.rename(library)  # in place of a damaged one
  return library


def _shorten(stem: str) -> str:
  return os.fsencode(stem)[:STEM].decode(errors='ignore')


def _library_name(stem: str, library: Path) -> str:
  """Return the name of a library in the cache: `stem`, and a hash of its bytes."""
  try:
    with library.open('rb') as file:
      return f'{stem}{hashlib.file_digest(file, "sha256").hexdigest()[:32]}.so'
  except OSError:  # it cannot be read, or is no file: as good as damaged
    return ''


def compiler() -> list[str]:
  """Return the compiler's command line: CC, or `cc`.

  Raises:
    UsageError: if CC has an open quote.
  """
  try:
    return shlex.split(os.environ.get('CC', '')) or ['cc']
  except ValueError as error:
    raise UsageError(f'CC is {os.environ["CC"]!r}, expected a command: {error}') from error


def _version(name: str) -> bytes:
  return _run(name, ('--version',))


def _run(name: str, arguments: tuple[str, ...]) -> bytes:
  """Run the compiler and return its output."""
  words = compiler()
  if shutil.which(words[0]) is None:
    raise UsageError(
      f'{name}: no C compiler: {words[0]!r} is not on PATH. Install gcc or clang, or set CC. The '
      'pool of threads is compiled too, so a library .so needs one as well'
    )
  try:
    done = subprocess.run(
      [*words, *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS,
      env={**os.environ, 'LC_ALL': 'C'}, check=False,
    )  # fmt: skip
  except (OSError, subprocess.TimeoutExpired) as error:
    raise UsageError(f'{name}: the compiler failed: {error}') from error
  if done.returncode:
    lines = done.stderr.decode(errors='replace').splitlines()
    more = [f'... and {len(lines) - LINES} lines more'] if len(lines) > LINES else []
    raise UsageError('\n'.join([f'{name} does not compile:', *lines[:LINES], *more]))
  return done.stdout


@functools.cache
def _cache_directory() -> Path:
  """Return this user's directory of libraries, below ~/.cache.

  A directory that cannot be made, or that another user may write to, is not used. Then the
  libraries are in a temporary directory, which ends with the process.
  """
  with contextlib.suppress(OSError, RuntimeError):  # the latter without a home directory
    home = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
    kept = make_user_folder(Path(home) / 'podrace' / 'native', 0o700)
    status = kept.stat()
    if status.st_uid == os.getuid() and not status.st_mode & 0o022 and os.access(kept, os.W_OK):
      return kept
  temporary = tempfile.TemporaryDirectory(prefix='podrace-')
  _TEMPORARY.append(temporary)
  return Path(temporary.name)


_TEMPORARY: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends
