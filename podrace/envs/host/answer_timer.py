"""Which environments of a pool have not answered, and for how long."""

from __future__ import annotations

import time

import numpy as np

from podrace.envs.host.base import rows_of

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
    self._asked_at[rows_of(env_id, len(self._asked_at))] = np.inf

  @property
  def silence(self) -> float:
    """Seconds since the oldest answer became due; they stand still while the thread is away."""
    now = time.monotonic() if self._inside else self._left
    return max(now - float(self._asked_at.min()), 0.0)
