"""Which environments of a pool have not answered, and for how long."""

from __future__ import annotations

import time

import numpy as np

from podrace.envs.host.timesteps import rows_of

LOOK_SECONDS = 1.0  # between looks at who is late, at most; more of a pause does not count
AGAIN_SECONDS = 10.0  # that who is late is still given
START_SECONDS = 120.0  # for a worker to import its libraries and reset

POLL = 0.1  # seconds away from the pool that count in full


class AnswerTimer:
  """How long a pool's environments take to answer the thread that is in the pool while this is entered."""

  def __init__(self, num_envs: int) -> None:
    self._asked_at = np.full(num_envs, np.inf)  # when each environment was; inf: no answer is due
    self._inside, self._left = False, 0.0  # whether the thread is in its pool; when it left that

  def __enter__(self) -> None:
    # They may have answered while the thread was away: little of that time counts.
    if (away := time.monotonic() - self._left) > POLL:
      self._asked_at += away - POLL
    self._inside = True

  def __exit__(self, *exc: object) -> None:
    self._inside, self._left = False, time.monotonic()

  def ask(self, env_id: np.ndarray) -> None:
    """Answers of these are due from now on."""
    self._asked_at[rows_of(env_id, len(self._asked_at))] = time.monotonic()

  def answered(self, env_id: np.ndarray) -> None:
    """Stop the clocks of environments that answered."""
    self._asked_at[rows_of(env_id, len(self._asked_at))] = np.inf

  @property
  def silence(self) -> float:
    """Seconds since the oldest answer became due; they stand still while the thread is away."""
    now = time.monotonic() if self._inside else self._left
    return max(now - float(self._asked_at.min()), 0.0)


class AnswerClock:
  """Seconds that who looks at it has been there; of a pause between two looks, little counts.

  A process that was stopped and goes on (SIGSTOP, a frozen container) finds that much time has
  passed, in which nobody else may have run either.
  """

  def __init__(self) -> None:
    self._now, self._at = 0.0, time.monotonic()

  def look(self) -> float:
    """The time by this clock, from 0."""
    at = time.monotonic()
    self._now += min(at - self._at, 2 * LOOK_SECONDS)
    self._at = at
    return self._now


class AnswerDeadline:
  """Who has been silent for more than `seconds`; who seems so is looked at twice."""

  def __init__(self, seconds: float) -> None:
    self._seconds, self._clock = seconds, AnswerClock()
    self._late: dict[int, float] = {}  # since when, by the clock

  def passed(self, who: int, silence: float) -> bool:
    """Whether it is too late for `who`, silent for so many seconds; to be asked again and again."""
    now = self._clock.look()
    if silence <= self._seconds:
      self._late.pop(who, None)
      return False
    return now - self._late.setdefault(who, now) >= min(self._seconds, AGAIN_SECONDS)
