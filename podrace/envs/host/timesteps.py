"""Steps of a batch of host environments as TimeSteps."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from podrace.types import MID, TimeStep

EVERY = slice(None)  # of arrays [num_envs, ...]


@functools.cache
def all_env_ids(num_envs: int) -> np.ndarray:
  """The ids of all environments in order, to be read only.

  It is always the same array: pools that hand it out save who is given it a comparison.
  """
  ids = np.arange(num_envs, dtype=np.int32)
  ids.flags.writeable = False
  return ids


def rows_of(env_id: np.ndarray, num_envs: int) -> Any:
  """What picks environments env_id of arrays [num_envs, ...]: EVERY, which copies nothing, where
  it is all of them, in order."""
  ids = all_env_ids(num_envs)
  whole = env_id is ids or (len(env_id) == num_envs and not np.count_nonzero(env_id != ids))
  return EVERY if whole else env_id


class Stepper:
  """Makes timesteps of what a library with next-step resets returns: flags, not step types."""

  def __init__(self, num_envs: int) -> None:
    self._opens = np.ones(num_envs, bool)  # the next arrival is FIRST
    self._over = np.zeros(num_envs, bool)  # the last one was FIRST and over at once
    self._any_over = False  # of these

  def reset(self) -> None:
    """Let every environment begin with FIRST."""
    self.reopen(all_env_ids(len(self._opens)))

  def reopen(self, env_id: np.ndarray) -> None:
    """These were restarted: their next arrival is FIRST."""
    self._opens[env_id] = True
    self._over[env_id] = False

  def timestep(
    self,
    env_id: np.ndarray,
    observation: Any,
    reward: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
  ) -> TimeStep:
    """Where both flags are set, termination wins (discount 0).

    What is over with its first timestep (a life that is lost while it begins) is followed by
    another FIRST, whose discount is 0: nothing is bootstrapped from it.
    """
    rows = rows_of(env_id, len(self._opens))
    over = terminated | truncated
    first: Any
    if rows is EVERY:  # a few operations on small arrays are most of what a pool in C++ costs here
      first, self._opens = self._opens, over
    else:
      first = self._opens[rows]
      self._opens[rows] = over
    last = over & ~first
    final = terminated & last
    if self._any_over:
      final |= self._over[rows]
    at_once = over & first
    if self._any_over or np.count_nonzero(at_once):
      self._over[rows] = at_once
      self._any_over = bool(np.count_nonzero(self._over))
    kind: Any = MID + last.view(np.int8) - first.view(np.int8)  # FIRST, MID, LAST: 0, 1, 2
    learned: Any = np.where(first, 0, reward).astype(np.float32, copy=False)
    discount: Any = (~final).astype(np.float32)
    return TimeStep(observation, learned, discount, kind)
