"""A token bucket: so much at once, and so much a second over a long time."""

from __future__ import annotations

import time


class TokenBucket:
  """Full at first.

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
