"""Lines for a log of what others do: bounded in number and size, whatever they do."""

from __future__ import annotations

import collections
import contextlib
import logging
import time
from collections.abc import Callable

from podrace.net.bucket import TokenBucket
from podrace.net.text import plain_lines

LINES, LINE_SECONDS = 20, 10.0  # lines in so many seconds, at most
LOG_BYTES, LOG_BYTES_A_SECOND = 2**17, 200.0  # at once, and over a long time: 17 MB a day

Say = Callable[[int, str], None]  # as logging.Logger.log: a level, and what there is to say


class Lines:
  """Says lines, unless there was much to say lately.

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
    while self._said and now - self._said[0] > LINE_SECONDS:
      self._said.popleft()
    if (len(self._said) >= LINES or self._room.left < len(line)) and not always:
      self._unsaid_since = self._unsaid_since if self._unsaid else now
      self._unsaid += 1
      return
    self._room.take(len(line))
    self._said.append(now)
    with contextlib.suppress(Exception, SystemExit):  # rich exits where nobody reads any more
      self._say(level, line)

  def tick(self, now: float) -> None:
    """Says how many lines were left out."""
    if self._unsaid and now - self._unsaid_since > LINE_SECONDS:
      self.log(f'({self._unsaid} more lines were left out)', logging.WARNING, always=True)
      self._unsaid = 0
