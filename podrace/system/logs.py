"""Logging of commands to standard error."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from podrace.system.output import tell


class StderrHandler(logging.Handler):
  """Tells whoever reads; that nobody does any more ends nothing."""

  def emit(self, record: logging.LogRecord) -> None:
    tell(self.format(record))


def escape_logs() -> None:
  """Have `tell` print what is logged where no command says how: Python's own handler prints text as it is."""
  logging.lastResort = StderrHandler(logging.WARNING)


@contextlib.contextmanager
def log_to_stderr(who: str, quiet: bool = False) -> Iterator[None]:
  """Has a command tell what podrace logs, as `who: message`; if it is quiet, only what is wrong.

  For commands: as a library podrace logs, and configures nothing.
  """
  log, handler = logging.getLogger('podrace'), StderrHandler()
  handler.setFormatter(logging.Formatter(f'{who}: %(message)s'))
  before = log.level, log.propagate
  log.addHandler(handler)
  log.setLevel(logging.WARNING if quiet else logging.INFO)
  log.propagate = False  # else libraries that configure the root's would tell it again
  try:
    yield
  finally:
    log.removeHandler(handler)
    log.setLevel(before[0])
    log.propagate = before[1]
