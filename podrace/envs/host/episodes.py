"""Returns and lengths of the episodes of host environments."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from podrace.envs.host.timesteps import EVERY, rows_of
from podrace.types import FIRST, Arrival


@dataclasses.dataclass
class Totals:
  """Sums over finished episodes."""

  count: int = 0
  return_sum: float = 0.0
  return_square: float = 0.0
  length_sum: int = 0

  @property
  def return_deviation(self) -> float:
    """Sum of squared differences from the mean, in float64."""
    return self.return_square - self.return_sum * (self.return_sum / max(self.count, 1))

  def __add__(self, other: Totals) -> Totals:
    return Totals(
      self.count + other.count,
      self.return_sum + other.return_sum,
      self.return_square + other.return_square,
      self.length_sum + other.length_sum,
    )


class EpisodeCounter:
  """Counts every finished episode of a pool once, with unclipped returns."""

  def __init__(self, num_envs: int) -> None:
    self.episode_return = np.zeros(num_envs, np.float64)
    self.episode_length = np.zeros(num_envs, np.int64)
    self.run_id = np.zeros(num_envs, np.int64)
    self._over = np.ones(num_envs, bool)  # the next arrival opens a game
    self._finished = Totals()

  def add(self, arrival: Arrival) -> np.ndarray:
    """Count an arrival. Return how often each of its environments was restarted before it, [b]."""
    rows = rows_of(arrival.env_id, len(self._over))
    restarts: np.ndarray = arrival.run_id - self.run_id[rows]
    opens = self._over[rows]
    if np.count_nonzero(restarts):
      opens = np.logical_or(opens, restarts)
      self.run_id[rows] = arrival.run_id
    returns, lengths = self.episode_return[rows], self.episode_length[rows]  # views if EVERY
    returns += arrival.score
    lengths += arrival.timestep.step_type != FIRST  # of a life or of a game
    if np.count_nonzero(opens):
      returns[opens] = 0
      lengths[opens] = 0
    self._over[rows] = arrival.ended
    if rows is not EVERY:
      self.episode_return[rows], self.episode_length[rows] = returns, lengths
    if count := int(np.count_nonzero(arrival.ended)):
      done = returns[arrival.ended]
      length = int(lengths[arrival.ended].sum())
      self._finished += Totals(count, float(done.sum()), float(np.dot(done, done)), length)
    return restarts

  def take(self) -> Totals:
    """Return the sums over episodes that finished since the last call."""
    finished, self._finished = self._finished, Totals()
    return finished

  def state(self) -> dict[str, np.ndarray]:
    """Return the episodes under way. Returns of f64 are split into two f32, as JAX has no f64."""
    high = self.episode_return.astype(np.float32)
    return dict(
      return_high=high,
      return_low=(self.episode_return - high).astype(np.float32),
      length=self.episode_length.astype(np.int32),
      over=self._over.copy(),
    )

  def restore(self, state: Mapping[str, Any]) -> None:
    """Restore a state that `state` returned."""
    high, low = (np.asarray(state[k], np.float64) for k in ('return_high', 'return_low'))
    self.episode_return = high + low
    self.episode_length = np.array(state['length'], np.int64)
    self._over = np.array(state['over'], bool)
