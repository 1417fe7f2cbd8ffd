"""Logging of commands to standard error."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from podrace.system.output import tell


class StderrHandler(logging.Handler):
  """Prints to standard error, also if its reader is gone."""

  def emit(self, record: logging.LogRecord) -> None:
    """Print a record."""
    tell(self.format(record))


def escape_logs() -> None:
  """Print logs outside of `log_to_stderr` by `tell`: Python's handler does not escape them."""
  logging.lastResort = StderrHandler(logging.WARNING)


@contextlib.contextmanager
def log_to_stderr(name: str, quiet: bool = False) -> Iterator[None]:
  """Print the logs of podrace as `name: message`, with `quiet` warnings and errors only.

  For commands alone: as a library, podrace does not configure logging.
  """
  log, handler = logging.getLogger('podrace'), StderrHandler()
  handler.setFormatter(logging.Formatter(f'{name}: %(message)s'))
  before = log.level, log.propagate
  log.addHandler(handler)
  log.setLevel(logging.WARNING if quiet else logging.INFO)
  log.propagate = False  # else a library that configures the root logger prints logs again
  try:
    yield
  finally:
    log.removeHandler(handler)
    log.setLevel(before[0])
    log.propagate = before[1]
