"""Text of peers for a log or a terminal: bounded, and without terminal commands."""

from __future__ import annotations

import collections
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from podrace.system.output import printable

TEXT, LINES = 500, 60  # characters of a line and lines of a text, at most
STRING = 200  # characters of a name, at most
REASONS = 20  # of a refusal, at most
LOG_LINES, LOG_SECONDS = 20, 10.0  # at most LOG_LINES lines within LOG_SECONDS
LOG_BYTES, LOG_BYTES_A_SECOND = 2**17, 200.0  # at once, and in the long run: 17 MB a day

Say = Callable[[int, str], None]  # level and text, as logging.Logger.log


def plain(text: Any, limit: int = TEXT) -> str:
  """Return one line of at most about `limit` characters.

  Terminal commands and line breaks are escaped.
  """
  text = str(text)
  shown = printable(text[:limit], lines=False)
  more = f' ({len(text) - limit:,} more)' if len(text) > limit else ''
  return f'{shown[:limit]}...{more}' if more or len(shown) > limit else shown


def label(text: Any) -> str:
  """Return a name as `plain`, in ASCII: so the bytes of a list of names are bounded too."""
  shown = plain(str(text)[:STRING]).encode('ascii', 'backslashreplace').decode()
  return shown if len(shown) <= STRING else f'{shown[: STRING - 3]}...'


def plain_lines(text: Any) -> str:
  """Return the last LINES lines of a text, each as `plain`."""
  return '\n'.join(plain(line, 2 * TEXT) for line in str(text).split('\n')[-LINES:])


def plain_reasons(reasons: Sequence[Any]) -> list[str]:
  """Return the first REASONS reasons of a refusal, each as `plain`, and the number of the rest."""
  more = [f'and {len(reasons) - REASONS:,} more'] if len(reasons) > REASONS else []
  return [*(plain(x) for x in reasons[:REASONS]), *more]


class TokenBucket:
  """A bucket of tokens, full at first.

  Args:
    capacity: tokens that it holds.
    rate: tokens that come in a second.
  """

  def __init__(self, capacity: float, rate: float) -> None:
    self._capacity, self._rate = capacity, rate
    self._left, self._at = capacity, time.monotonic()

  @property
  def left(self) -> float:
    """Number of tokens; negative if too many were taken."""
    now = time.monotonic()
    self._left = min(self._left + self._rate * (now - self._at), self._capacity)
    self._at = now
    return self._left

  def take(self, amount: float) -> None:
    """Take tokens, even if there are fewer."""
    self._left = self.left - amount


class Lines:
  """A log with bounded lines and bytes in a time.

  Attributes:
    events: the newest lines, logged or not.
    counts: of events, by name.
  """

  def __init__(self, say: Say) -> None:
    self.events: collections.deque[str] = collections.deque(maxlen=200)
    self.counts: collections.Counter[str] = collections.Counter()
    self._say = say
    self._times: collections.deque[float] = collections.deque()  # of the logged lines
    self._omitted, self._omitted_since = 0, 0.0
    self._room = TokenBucket(LOG_BYTES, LOG_BYTES_A_SECOND)

  def log(self, line: str, level: int = logging.INFO, always: bool = False) -> None:
    """Log a line. It raises nothing, even if the log fails."""
    now = time.monotonic()
    line = plain_lines(line)
    self.events.append(line)
    while self._times and now - self._times[0] > LOG_SECONDS:
      self._times.popleft()
    if (len(self._times) >= LOG_LINES or self._room.left < len(line)) and not always:
      self._omitted_since = self._omitted_since if self._omitted else now
      self._omitted += 1
      return
    self._room.take(len(line))
    self._times.append(now)
    with contextlib.suppress(Exception, SystemExit):  # rich exits if its output is closed
      self._say(level, line)

  def tick(self, now: float) -> None:
    """Log the number of omitted lines."""
    if self._omitted and now - self._omitted_since > LOG_SECONDS:
      self.log(f'({self._omitted} more lines were left out)', logging.WARNING, always=True)
      self._omitted = 0
