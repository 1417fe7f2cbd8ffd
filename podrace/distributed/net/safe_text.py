"""Text of others, for a log, a terminal or a message: bounded, and without commands to a terminal."""

from __future__ import annotations

import collections
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from podrace.system.output import printable

TEXT, LINES = 500, 60  # characters, and lines, that are kept
STRING = 200  # characters of a name, at most
REASONS = 20  # that are kept, why somebody is refused
LOG_LINES, LOG_SECONDS = 20, 10.0  # lines in so many seconds, at most
LOG_BYTES, LOG_BYTES_A_SECOND = 2**17, 200.0  # at once, and over a long time: 17 MB a day

Say = Callable[[int, str], None]  # as logging.Logger.log: a level, and what there is to say


def plain(text: Any, most: int = TEXT) -> str:
  """One line of bounded length.

  What terminals obey, or what would look like another line, is escaped.
  """
  text = str(text)
  shown = printable(text[:most], lines=False)
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


class TokenBucket:
  """So much at once, and so much a second over a long time; full at first.

  Args:
    most: that it holds.
    rate: that comes in a second.
  """

  def __init__(self, most: float, rate: float) -> None:
    self._most, self._rate = most, rate
    self._left, self._at = most, time.monotonic()

  @property
  def left(self) -> float:
    """What is in it now; less than 0 after more was taken."""
    now = time.monotonic()
    self._left = min(self._left + self._rate * (now - self._at), self._most)
    self._at = now
    return self._left

  def take(self, amount: float) -> None:
    """Takes so much out, whether it is in it or not."""
    self._left = self.left - amount


class Lines:
  """Says lines in a log, unless there was much to say lately.

  Attributes:
    events: the newest lines, said or not.
    counts: of what has happened, by name.
  """

  def __init__(self, say: Say) -> None:
    self.events: collections.deque[str] = collections.deque(maxlen=200)
    self.counts: collections.Counter[str] = collections.Counter()
    self._say = say
    self._said: collections.deque[float] = collections.deque()  # when
    self._unsaid, self._unsaid_since = 0, 0.0
    self._room = TokenBucket(LOG_BYTES, LOG_BYTES_A_SECOND)

  def log(self, line: str, level: int = logging.INFO, always: bool = False) -> None:
    """Says a line; whatever that leads to, it raises nothing."""
    now = time.monotonic()
    line = plain_lines(line)
    self.events.append(line)
    while self._said and now - self._said[0] > LOG_SECONDS:
      self._said.popleft()
    if (len(self._said) >= LOG_LINES or self._room.left < len(line)) and not always:
      self._unsaid_since = self._unsaid_since if self._unsaid else now
      self._unsaid += 1
      return
    self._room.take(len(line))
    self._said.append(now)
    with contextlib.suppress(Exception, SystemExit):  # rich exits where nobody reads any more
      self._say(level, line)

  def tick(self, now: float) -> None:
    """Says how many lines were left out."""
    if self._unsaid and now - self._unsaid_since > LOG_SECONDS:
      self.log(f'({self._unsaid} more lines were left out)', logging.WARNING, always=True)
      self._unsaid = 0
