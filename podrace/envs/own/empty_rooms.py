"""Empty Rooms: an invisible goal that stays in its place for a lifetime of episodes."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import NamedTuple

import gymnasium
import jax.numpy as jnp
import numpy as np

from podrace.envs.adapters.adapt import box, discrete
from podrace.envs.base import restart, transition
from podrace.envs.own.grids import draw_places, move, one_hot
from podrace.types import Array, TimeStep


class RoomsState(NamedTuple):
  """The agent's place, and the time in the episode."""

  agent: Array  # [2] i32
  time: Array  # [] i32


@dataclasses.dataclass(frozen=True)
class EmptyRooms:
  """Find the goal, which gives 1 and ends the episode; all other rewards are 0. A `World`.

  Zheng et al. 2020 (arXiv 1912.05500, section 4.1): the goal is invisible, fixed in a lifetime of
  200 episodes, and anywhere in the next one. The paper's appendix was not at hand, so these are
  ours: the size, four rooms with a door in the middle of each wall, the start in the top left
  corner, and the time limit.
  """

  size: int = 9  # side, walls included
  steps: int = 80  # time limit of an episode, which truncates

  def __post_init__(self) -> None:
    if self.size < 5 or not self.size % 2 or self.steps < 1:
      raise ValueError(
        f'empty_rooms needs an odd size >= 5 and steps >= 1: {self.size=}, {self.steps=}'
      )

  @cached_property
  def walls(self) -> np.ndarray:
    """[size, size] bool: a cross, with four doors."""
    middle, walls = self.size // 2, np.zeros((self.size, self.size), bool)
    walls[middle], walls[:, middle] = True, True
    for door in (middle // 2, self.size - 1 - middle // 2):
      walls[middle, door] = walls[door, middle] = False
    return walls

  @cached_property
  def observation_space(self) -> gymnasium.spaces.Box:
    """The agent's place, one-hot: [size * size]."""
    return box(0, 1, (self.size**2,), np.float32)

  @cached_property
  def action_space(self) -> gymnasium.spaces.Discrete:
    """Up, right, down, left; a move into a wall or out of the rooms changes nothing."""
    return discrete(4)

  def task(self, key: Array) -> Array:
    """Draw the goal, [2] i32: anywhere but at the start and in walls."""
    free = ~self.walls
    free[0, 0] = False
    return draw_places(jnp.asarray(free), 1, key)[0]

  def reset(self, task: Array, key: Array) -> tuple[RoomsState, TimeStep]:
    """Begin an episode."""
    del task, key
    state = RoomsState(jnp.zeros(2, jnp.int32), jnp.int32(0))
    return state, restart(self._observe(state))

  def step(
    self, task: Array, episode: Array, state: RoomsState, action: Array, key: Array
  ) -> tuple[RoomsState, TimeStep]:
    """Take one action."""
    del episode, key
    agent = move(jnp.asarray(self.walls), state.agent, action)
    state = RoomsState(agent, state.time + 1)
    arrived = jnp.all(agent == task)
    return state, transition(self._observe(state), arrived, arrived, state.time >= self.steps)

  def _observe(self, state: RoomsState) -> Array:
    return one_hot(state.agent[0] * self.size + state.agent[1], self.size**2)
