"""A log in memory: the timesteps of recorded episodes, one after the other."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from podrace.envs.spaces import values


class LogRows(NamedTuple):
  """N timesteps of E episodes. An episode of L steps has L + 1 rows, from FIRST to LAST."""

  observation: Any  # [N, ...] a pytree of arrays, as the observation space declares
  action: np.ndarray  # [N, ...] of each timestep; for LAST, which has none, the episode's first one
  reward: np.ndarray  # [N] f32, for the action of the row before
  discount: np.ndarray  # [N] f32
  step_type: np.ndarray  # [N] i8
  starts: np.ndarray  # [E] i32 the row of each FIRST


@dataclasses.dataclass(frozen=True, eq=False)
class Log:
  """The episodes of a data set, with the spaces that they were recorded in, as JAX has them."""

  name: str  # as the user named it
  observation_space: Any
  action_space: Any
  rows: LogRows
  spaces: Mapping[str, str]  # as the data set has them, see `recorded_spaces.spaces_in`

  @property
  def episodes(self) -> int:
    """Number of episodes."""
    return len(self.rows.starts)

  @property
  def steps(self) -> int:
    """Number of steps, which the resets are not."""
    return len(self.rows.reward) - self.episodes

  @property
  def nbytes(self) -> int:
    """Bytes of all arrays."""
    return sum(x.nbytes for x in self._arrays())

  @functools.cached_property
  def sha256(self) -> str:
    """Hash of the contents, which tells whether a run is resumed with the same data set."""
    sha = hashlib.sha256()
    for x in self._arrays():
      sha.update(f'{x.dtype} {x.shape}\n'.encode())
      sha.update(np.ascontiguousarray(x).data)
    return sha.hexdigest()

  def _arrays(self) -> Iterator[np.ndarray]:
    yield from values(self.observation_space, self.rows.observation)
    yield from self.rows[1:]
