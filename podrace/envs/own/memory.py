"""Memory: the smallest task that needs memory; shows whether recurrence works."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from podrace.envs.adapters.adapt import box, discrete
from podrace.envs.base import restart, transition
from podrace.types import Array, TimeStep


class MemoryState(NamedTuple):
  """The cue, and the time in the episode. All [] i32."""

  cue: Array  # 0 or 1, the correct action
  time: Array


@dataclasses.dataclass(frozen=True)
class MemoryTask:
  """Show a cue once; `length` steps later the action must be equal to it.

  The idea is the T-maze's (Bakker 2001), without the maze. The first observation shows the cue. The
  query comes `length` steps later. The action at the query ends the episode with reward 1 if it is
  the cue, else -1. All other actions change nothing and have reward 0.

  The observation at the query does not depend on the cue, which is fair. So the expected return of
  a policy that sees only the newest observation is exactly 0. A policy with memory can get 1.
  """

  length: int = 10  # steps from the cue to the query
  continuous: bool = False  # an action is a number within [-1, 1]; its sign is the answer

  def __post_init__(self) -> None:
    if self.length < 1:
      raise ValueError(f'memory needs length >= 1: {self.length=}')

  @cached_property
  def observation_space(self) -> gymnasium.spaces.Box:
    """The cue (-1 or 1 at first, then 0), the share of time left, and a flag of the query."""
    return box(-1, 1, (3,), np.float32)

  @cached_property
  def action_space(self) -> gymnasium.Space:
    """Space of the actions of one environment."""
    return box(-1, 1, (1,), np.float32) if self.continuous else discrete(2)

  @property
  def longest_episode(self) -> int:
    """Steps of the longest episode."""
    return self.length + 1

  def reset(self, key: Array) -> tuple[MemoryState, TimeStep]:
    """Begin an episode."""
    state = MemoryState(jax.random.randint(key, (), 0, 2, jnp.int32), jnp.int32(0))
    return state, restart(self._observe(state))

  def step(self, state: MemoryState, action: Array, key: Array) -> tuple[MemoryState, TimeStep]:
    """Take one action."""
    del key
    answered = state.time >= self.length
    answer = action[0] > 0 if self.continuous else action
    reward = jnp.where(answered, jnp.where(answer == state.cue, 1.0, -1.0), 0.0)
    state = MemoryState(state.cue, state.time + 1)
    return state, transition(self._observe(state), reward, answered, False)

  def _observe(self, state: MemoryState) -> Array:
    cue = jnp.where(state.time == 0, 2 * state.cue - 1, 0)
    left = jnp.maximum(0, 1 - state.time / self.length)
    return jnp.stack([cue, left, state.time == self.length]).astype(jnp.float32)
