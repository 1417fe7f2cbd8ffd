"""Standard output and standard error; the process goes on if their reader is gone."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any, TextIO

from podrace.errors import RunError

STANDARD = (0, 1, 2)  # input, output, errors
INVISIBLE = '\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0'  # letters and marks without a picture


class Lasting:
  """A text stream that ignores a closed pipe or terminal, and a full disk.

  It has the methods of a file that `print` and rich call.

  Args:
    file: the stream, None for one without a reader.
  """

  def __init__(self, file: TextIO | None) -> None:
    self._file = file

  def write(self, text: str) -> int:
    """Write text, if the stream works; returns its length."""
    with self._failing():
      if self._file is not None:
        self._write(self._file, text)
    return len(text)

  def _write(self, file: TextIO, text: str) -> None:
    try:
      file.write(text)
    except UnicodeEncodeError:  # a letter that the stream's encoding lacks
      encoding = file.encoding or 'ascii'
      file.write(text.encode(encoding, 'backslashreplace').decode(encoding))

  def flush(self) -> None:
    """Write buffered text, if the stream works."""
    with self._failing():
      if self._file is not None:
        self._file.flush()

  def isatty(self) -> bool:
    """Return whether the stream is a terminal."""
    with contextlib.suppress(OSError, ValueError):
      return self._file is not None and self._file.isatty()
    return False

  @property
  def is_live(self) -> bool:
    """Whether the stream is a terminal that can replace a line, unlike that of Emacs' shell."""
    return self.isatty() and os.environ.get('TERM', '').lower() not in ('dumb', 'unknown')

  def __getattr__(self, name: str) -> Any:
    return getattr(self._file, name)

  @contextlib.contextmanager
  def _failing(self) -> Any:
    try:
      yield
    except (OSError, ValueError):  # ValueError: it is closed
      _redirect_to_null(self._file)


def _redirect_to_null(file: TextIO | None) -> None:
  """Redirect a standard stream to the null device, as its buffer would fail again at the exit."""
  with contextlib.suppress(OSError, ValueError, AttributeError):
    descriptor = file.fileno()  # type: ignore[union-attr]
    if descriptor in STANDARD:
      null = os.open(os.devnull, os.O_RDWR)
      os.dup2(null, descriptor)
      os.close(null)


def printable(text: str, lines: bool = True) -> str:
  r"""Return `text` with control characters and invisible characters escaped.

  These are also direction marks, characters of no width and lone surrogates. Text of other users,
  such as names in a run directory, could otherwise move the cursor, change colours or look like
  different text.

  Args:
    text: any text.
    lines: keep newlines and tabs.
  """
  if text.isascii() and text.isprintable():
    return text
  kept = '\n\t' if lines else ''
  return ''.join(
    c if c in kept or (c.isprintable() and c not in INVISIBLE) else ascii(c)[1:-1] for c in text
  )


def print_text(
  *words: Any, sep: str = ' ', end: str = '\n', file: Any = None, flush: bool = False
) -> None:
  """Print as `print` does, but `printable` and in the stream's encoding.

  All text to a terminal is printed so, or by rich. The line and its end are one write also where
  the stream has no buffer (PYTHONUNBUFFERED), so that lines of several threads do not mix.

  Raises:
    BrokenPipeError: if the reader has closed its end.
    RunError: if the stream cannot be written, as on a full disk.
  """
  stream = sys.stdout if file is None else file
  if stream is None:  # the process has no standard output
    return
  text = printable(sep.join(map(str, words)))
  with contextlib.suppress(AttributeError, LookupError, TypeError):  # the stream names no encoding
    text = text.encode(stream.encoding, 'backslashreplace').decode(stream.encoding)
  try:
    stream.write(text + end)
    if flush:
      stream.flush()
  except BrokenPipeError:
    raise
  except OSError as e:
    raise unwritten(e, 'standard output' if stream is results() else 'standard error') from e


def unwritten(error: OSError, name: str = 'standard output') -> RunError:
  """Return the error of a standard stream that cannot be written."""
  return RunError(f'{name} cannot be written: {error.strerror}')


def print_json(value: Any, file: Any = None) -> None:
  """Print a value to a stream, by default `results`, as one line of JSON in ASCII."""
  print_text(json.dumps(value).replace('\x7f', '\\u007f'), file=file or results())


def lasting_results() -> Lasting:
  """Return `results` for the commands that go on, and succeed, if nothing reads them."""
  return Lasting(results())


def tell(text: str) -> None:
  """Print a line to standard error."""
  print_text(text, file=Lasting(sys.stderr), flush=True)


def tell_exception(kind: type[BaseException], error: BaseException, trace: Any) -> None:
  """Print a traceback, as `sys.excepthook` does."""
  tell(''.join(traceback.format_exception(kind, error, trace)).rstrip('\n'))


def open_standard() -> None:
  """Open the standard streams that the process was started without.

  Otherwise the next file gets the number of a standard stream, and output of libraries goes into
  that file.
  """
  for descriptor in STANDARD:
    try:
      os.fstat(descriptor)
    except OSError:
      os.open(os.devnull, os.O_RDWR)  # which takes the lowest number that is free
  for name, mode in (('stdin', 'r'), ('stdout', 'w'), ('stderr', 'w')):
    if getattr(sys, name) is None:
      setattr(sys, name, open(os.devnull, mode, encoding='utf-8'))  # noqa: SIM115 (as long as the process)


def flush_standard() -> OSError | ValueError | None:
  """Write buffered output for the last time; returns the error of standard output, if any."""
  error = None
  for stream in (sys.stdout, sys.stderr):
    try:
      stream.flush()
    except (OSError, ValueError) as e:
      error = e if stream is sys.stdout else error
      _redirect_to_null(stream)
  return error


_results: TextIO | None = None  # standard output, within `results_alone`


def results() -> TextIO:
  """Return standard output, for the results of a command."""
  return _results or sys.stdout


@contextlib.contextmanager
def results_alone() -> Iterator[None]:
  """Reserve standard output for `results`, and redirect other prints to standard error.

  Prints of C are redirected as well. This is for commands that run the user's code, as environments
  and their libraries print.
  """
  global _results
  if _results is not None:
    yield
    return
  out, kept = sys.stdout, os.dup(1)
  with contextlib.suppress(OSError, ValueError):  # its reader is gone
    out.flush()
  _results, sys.stdout = _unredirected(out, kept), sys.stderr
  os.dup2(2, 1)
  try:
    yield
  finally:
    with contextlib.suppress(OSError, ValueError):
      out.flush()  # prints to sys.__stdout__ may wait in its buffer
    os.dup2(kept, 1)
    os.close(kept)
    _results, sys.stdout = None, out


def _unredirected(out: TextIO, kept: int) -> TextIO:
  """Return a stream to descriptor `kept` if `out` goes to descriptor 1, else `out`."""
  with contextlib.suppress(OSError, ValueError, AttributeError):  # it is not a file
    if out.fileno() == 1:
      return open(kept, 'w', encoding=out.encoding, errors=out.errors, buffering=1, closefd=False)
  return out
