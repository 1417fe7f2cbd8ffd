"""Time that environments of a pool take to answer."""

from __future__ import annotations

import time

import numpy as np

from podrace.envs.host.timesteps import rows_of

LOOK_SECONDS = 1.0  # longest time between two looks at a clock; a longer pause does not count
AGAIN_SECONDS = 10.0  # grace time after a missed deadline
START_SECONDS = 120.0  # for a worker to import its libraries and reset

POLL = 0.1  # seconds away from the pool that count in full


class AnswerTimer:
  """Time that a pool's environments take to answer.

  A context manager: enter it while the thread is in the pool.
  """

  def __init__(self, num_envs: int) -> None:
    self._asked_at = np.full(num_envs, np.inf)  # inf: no answer is due
    self._inside, self._left = False, 0.0  # the thread is in its pool; time when it left it

  def __enter__(self) -> None:
    # Environments may have answered while the thread was away: only POLL of that time counts.
    if (away := time.monotonic() - self._left) > POLL:
      self._asked_at += away - POLL
    self._inside = True

  def __exit__(self, *exc: object) -> None:
    self._inside, self._left = False, time.monotonic()

  def ask(self, env_id: np.ndarray) -> None:
    """Start the clocks of these environments."""
    self._asked_at[rows_of(env_id, len(self._asked_at))] = time.monotonic()

  def answered(self, env_id: np.ndarray) -> None:
    """Stop the clocks of environments that answered."""
    self._asked_at[rows_of(env_id, len(self._asked_at))] = np.inf

  @property
  def silence(self) -> float:
    """Seconds since the oldest answer became due. They do not count while the thread is away."""
    now = time.monotonic() if self._inside else self._left
    return max(now - float(self._asked_at.min()), 0.0)


class AnswerClock:
  """Time that its reader was running: of a pause between two looks, at most 2 LOOK_SECONDS count.

  A process that was stopped (SIGSTOP, a frozen container) finds that much time has passed, in which
  the environments may have been stopped too.
  """

  def __init__(self) -> None:
    self._now, self._at = 0.0, time.monotonic()

  def look(self) -> float:
    """Return the time of this clock, from 0, in seconds."""
    at = time.monotonic()
    self._now += min(at - self._at, 2 * LOOK_SECONDS)
    self._at = at
    return self._now


class AnswerDeadline:
  """Detects a worker that has not answered for `seconds`, by two looks."""

  def __init__(self, seconds: float) -> None:
    self._seconds, self._clock = seconds, AnswerClock()
    self._late: dict[int, float] = {}  # worker -> time when it was first late

  def passed(self, worker: int, silence: float) -> bool:
    """Return whether a worker, silent for `silence` seconds, is late. Call it repeatedly."""
    now = self._clock.look()
    if silence <= self._seconds:
      self._late.pop(worker, None)
      return False
    return now - self._late.setdefault(worker, now) >= min(self._seconds, AGAIN_SECONDS)
