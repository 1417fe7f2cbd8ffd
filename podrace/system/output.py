"""Messages to whoever reads them. That nobody does, or not any longer, ends nothing."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any, TextIO

STANDARD = (0, 1, 2)  # input, output, errors
INVISIBLE = '\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0'  # letters and marks without a picture


class Lasting:
  """A stream of text whose failures are of no account: the reader is gone, the terminal, the disk is full.

  It is a file as far as `print` and rich need one. None is a stream without a reader.
  """

  def __init__(self, file: TextIO | None) -> None:
    self._file = file

  def write(self, text: str) -> int:
    with self._failing():
      if self._file is not None:
        self._file.write(text)
    return len(text)

  def flush(self) -> None:
    with self._failing():
      if self._file is not None:
        self._file.flush()

  def isatty(self) -> bool:
    with contextlib.suppress(OSError, ValueError):
      return self._file is not None and self._file.isatty()
    return False

  def __getattr__(self, name: str) -> Any:
    return getattr(self._file, name)

  @contextlib.contextmanager
  def _failing(self) -> Any:
    try:
      yield
    except (OSError, ValueError):  # ValueError: it is closed
      _to_nobody(self._file)


def _to_nobody(file: TextIO | None) -> None:
  """Has a standard stream's descriptor go nowhere: what it holds back would fail again at the exit."""
  with contextlib.suppress(OSError, ValueError, AttributeError):
    descriptor = file.fileno()  # type: ignore[union-attr]
    if descriptor in STANDARD:
      null = os.open(os.devnull, os.O_RDWR)
      os.dup2(null, descriptor)
      os.close(null)


def printable(text: str, lines: bool = True) -> str:
  r"""Return `text` with everything escaped that a terminal obeys, or that no reader sees.

  That is control characters, direction marks, characters of no width and lone surrogates. Text of other users, such as
  names in a run directory, could else move the cursor, change colours or look like other text.

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
  """Print as `print` does, but `printable` and in the stream's encoding: the only way to a terminal but for rich."""
  stream = sys.stdout if file is None else file
  text = printable(sep.join(map(str, words)))
  with contextlib.suppress(AttributeError, LookupError, TypeError):  # the stream names no encoding
    text = text.encode(stream.encoding, 'backslashreplace').decode(stream.encoding)
  print(text, end=end, file=stream, flush=flush)


def print_json(value: Any) -> None:
  """Print a value to `results` as one line of JSON in ASCII."""
  print_text(json.dumps(value).replace('\x7f', '\\u007f'), file=results())


def tell(text: str) -> None:
  """A line on stderr."""
  print_text(text, file=Lasting(sys.stderr), flush=True)


def tell_exception(kind: type[BaseException], error: BaseException, trace: Any) -> None:
  """Print a traceback, as `sys.excepthook` does."""
  tell(''.join(traceback.format_exception(kind, error, trace)).rstrip('\n'))


def open_standard() -> None:
  """Opens the standard streams that the process was started without.

  Else the next file that is opened gets the number of one, and what libraries print goes into it.
  """
  for descriptor in STANDARD:
    try:
      os.fstat(descriptor)
    except OSError:
      os.open(os.devnull, os.O_RDWR)  # which takes the lowest number that is free
  for name in ('stdout', 'stderr'):
    if getattr(sys, name) is None:
      setattr(sys, name, open(os.devnull, 'w', encoding='utf-8'))  # noqa: SIM115 (as long as the process)


def flush_standard() -> bool:
  """Writes what is held back, for the last time; whether somebody took what was on stdout."""
  taken = True
  for stream in (sys.stdout, sys.stderr):
    try:
      stream.flush()
    except (OSError, ValueError):
      taken = taken and stream is not sys.stdout
      _to_nobody(stream)
  return taken


_results: TextIO | None = None  # standard output, within `results_alone`


def results() -> TextIO:
  """Returns standard output, for the results of a command."""
  return _results or sys.stdout


@contextlib.contextmanager
def results_alone() -> Iterator[None]:
  """Has standard output hold `results` only. Other prints, in Python or in C, go to stderr.

  For what runs code of the user's: environments and their libraries print.
  """
  global _results
  if _results is not None:
    yield
    return
  out, kept = sys.stdout, os.dup(1)
  with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
    out.flush()
  _results, sys.stdout = _unredirected(out, kept), sys.stderr
  os.dup2(2, 1)
  try:
    yield
  finally:
    with contextlib.suppress(
      OSError, ValueError
    ):  # prints to sys.__stdout__ may wait in its buffer
      out.flush()
    os.dup2(kept, 1)
    os.close(kept)
    _results, sys.stdout = None, out


def _unredirected(out: TextIO, kept: int) -> TextIO:
  """A stream that goes to `kept` if `out` goes to descriptor 1, else `out`."""
  with contextlib.suppress(OSError, ValueError, AttributeError):  # it is not a file
    if out.fileno() == 1:
      return open(kept, 'w', encoding=out.encoding, errors=out.errors, buffering=1, closefd=False)
  return out
