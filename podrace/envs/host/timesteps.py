"""Steps of a batch of host environments as TimeSteps."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from podrace.errors import HostError
from podrace.types import MID, TimeStep

EVERY = slice(None)  # of arrays [num_envs, ...]


@functools.cache
def everyone(num_envs: int) -> np.ndarray:
  """Return the ids of all environments in order, a read-only array.

  Each call returns the same array. So `rows_of` recognizes it without comparing elements.
  """
  ids = np.arange(num_envs, dtype=np.int32)
  ids.flags.writeable = False
  return ids


def rows_of(env_id: np.ndarray, num_envs: int) -> Any:
  """Return the index of environments `env_id` in arrays [num_envs, ...].

  If they are all in order, it is EVERY, which makes a view instead of a copy.
  """
  ids = everyone(num_envs)
  whole = env_id is ids or (len(env_id) == num_envs and not np.count_nonzero(env_id != ids))
  return EVERY if whole else env_id


class Stepper:
  """Makes timesteps of flags from a library with next-step resets."""

  def __init__(self, num_envs: int) -> None:
    self._opens = np.ones(num_envs, bool)  # the next arrival is FIRST
    self._over = np.zeros(num_envs, bool)  # the last arrival was FIRST and the end at once
    self._any_over = False  # some element of `_over` is set

  @property
  def opens(self) -> np.ndarray:
    """Whether the next arrival of an environment is FIRST, [num_envs]. Not to be written."""
    return self._opens

  def reset(self) -> None:
    """Let every environment begin with FIRST."""
    self.reopen(everyone(len(self._opens)))

  def reopen(self, env_id: np.ndarray) -> None:
    """Note that environments were restarted: their next arrival is FIRST."""
    self._opens[env_id] = True
    self._over[env_id] = False

  def state(self) -> dict[str, np.ndarray]:
    """Return the arrays that decide the next timesteps."""
    return dict(opens=self._opens.copy(), over=self._over.copy())

  def restore(self, state: Mapping[str, np.ndarray]) -> None:
    """Restore a state that `state` returned.

    Raises:
      HostError: if it is of other environments. The stepper is unchanged.
    """
    for name in ('opens', 'over'):
      x = state.get(name, np.zeros(0))
      if x.dtype != bool or x.shape != self._opens.shape:
        raise HostError(
          f'a saved state has {name} {x.dtype}{list(x.shape)}, expected bool{[len(self._opens)]}'
        )
    self._opens, self._over = state['opens'].copy(), state['over'].copy()
    self._any_over = bool(self._over.any())

  def timestep(
    self,
    env_id: np.ndarray,
    observation: Any,
    reward: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
  ) -> TimeStep:
    """Return the timestep of a step's results. Termination wins over truncation (discount 0).

    An episode may be over with its first timestep, for example by a life lost at once. Then
    another FIRST follows, with discount 0, so that nothing is bootstrapped from it.
    """
    rows = rows_of(env_id, len(self._opens))
    over = terminated | truncated
    first: Any
    if rows is EVERY:  # saves operations on small arrays, the main cost of a pool in C++
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
