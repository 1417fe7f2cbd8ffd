"""The time in which a client has no session."""

from __future__ import annotations

import logging
import time
from random import random

from podrace.net.address import unix_path

BACKOFF = (
  0.05,
  2.0,
)  # seconds between attempts, at first and at most; drawn between half of it and all
NEAR = 0.1  # the most of a Unix socket, where an attempt costs next to nothing
REMIND = 30.0  # seconds between messages that there is no session
ALONE = 2.0  # seconds after which there is one at all

# Why there is no session, as far as is known.
NOTHING_KNOWN = 'it has not answered yet'
NOBODY = 'nobody listens there'
SAYS_NOTHING = 'the connection stands, and it does not answer'

log = logging.getLogger('podrace.net')


class Outage:
  """Why there is no session, what is said of it, when it is tried again, and when it has been too long.

  Args:
    what: the service, for messages.
    give_up: seconds after which `check` raises; 0 for never.

  Attributes:
    why: there is no session, as far as is known.
    due: when the next attempt is, on time.monotonic's clock.
  """

  def __init__(self, what: str, address: str, give_up: float) -> None:
    self._what, self._address, self._give_up = what, address, give_up
    self.why = NOTHING_KNOWN
    self._pause, self._most = BACKOFF[0], NEAR if unix_path(address) else BACKOFF[1]
    self._since = self.due = time.monotonic()
    self._said, self._said_at = '', 0.0

  def failed(self, reason: str) -> None:
    """An attempt had no success."""
    self.why = reason
    self.due = time.monotonic() + self._pause * (0.5 + 0.5 * random())
    self._pause = min(2 * self._pause, self._most)

  def begin(self, reason: str) -> None:
    """A session is over. All clients lose a service together, so the next attempt waits as well."""
    self._since = time.monotonic()
    self.failed(reason)
    self._remind(f'the session with {self._what} at {self._address} is over: {reason}')

  def stands(self) -> None:
    """A connection is made; if more is known already, that stays."""
    if self.why in (NOTHING_KNOWN, NOBODY):
      self.why = SAYS_NOTHING

  def wait(self, reason: str) -> None:
    """The service is there, and says why there is no session."""
    self.why, self._since = reason, time.monotonic()
    self._remind(f'waiting: {reason}')

  def end(self) -> None:
    """A session begins."""
    if self._said:
      log.info('%s at %s is back', self._what, self._address)
    self._pause, self._said, self.why = BACKOFF[0], '', NOTHING_KNOWN

  def check(self, now: float) -> None:
    """Raises TimeoutError if it has been too long."""
    alone = now - self._since
    if alone > ALONE:
      self._remind(f'no {self._what} answers at {self._address} ({self.why}); trying again')
    if self._give_up and alone > self._give_up:
      raise TimeoutError(
        f'no {self._what} at {self._address} for {self._give_up:.0f} s: {self.why}'
      )

  def _remind(self, message: str) -> None:
    """Says what is being waited for, when it begins and every half minute."""
    now = time.monotonic()
    if message != self._said or now - self._said_at > REMIND:
      self._said, self._said_at = message, now
      log.warning('%s', message)
