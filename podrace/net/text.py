"""Text of others, for a log, a terminal or a message: of bounded length, and without commands to a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TEXT, LINES = 500, 60  # characters, and lines, that are kept
STRING = 200  # characters of a name, at most
REASONS = 20  # that are kept, why somebody is refused


def plain(text: Any, most: int = TEXT) -> str:
  """One line of bounded length.

  What terminals obey, or what would look like another line, is escaped.
  """
  text = str(text)
  shown = ''.join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:most])
  more = f' ({len(text) - most:,} more)' if len(text) > most else ''
  return f'{shown[:most]}...{more}' if more or len(shown) > most else shown


def label(text: Any) -> str:
  """A name, as `plain`; in ASCII, so that lists of names have bounded bytes."""
  shown = plain(str(text)[:STRING]).encode('ascii', 'backslashreplace').decode()
  return shown if len(shown) <= STRING else f'{shown[: STRING - 3]}...'


def plain_lines(text: Any) -> str:
  """As `plain`, of what may have several lines; of too many, the last ones."""
  return '\n'.join(plain(line, 2 * TEXT) for line in str(text).split('\n')[-LINES:])


def plain_reasons(reasons: Sequence[Any]) -> list[str]:
  """Reasons of a refusal, in bounded lines, and of those not too many."""
  more = [f'and {len(reasons) - REASONS:,} more'] if len(reasons) > REASONS else []
  return [*(plain(x) for x in reasons[:REASONS]), *more]
