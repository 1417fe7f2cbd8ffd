"""Maze: small random mazes, to measure how well an agent does in unseen levels."""

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
from podrace.envs.own.grids import MOVES, move
from podrace.types import Array, TimeStep

UNSEEN = 2**30  # number of the first unseen level


class MazeState(NamedTuple):
  """A level, and the agent's place in it."""

  walls: Array  # [size, size] bool
  goal: Array  # [2] i32
  agent: Array  # [2] i32
  time: Array  # [] i32


@dataclasses.dataclass(frozen=True)
class Maze:
  """Walk to the goal, which gives 1 and ends the episode; all other rewards are 0.

  A level has random walls, a goal, and a start from which the goal can be reached. Episodes draw
  from `levels` fixed levels; 0: each episode has a new level. With `unseen`, all levels differ from
  every training level (the split of Cobbe et al. 2020, Procgen, arXiv 1912.01588). An episode is
  truncated after `4 * size` steps.
  """

  size: int = 7
  levels: int = 0
  unseen: bool = False
  density: float = 0.3  # share of walls

  def __post_init__(self) -> None:
    if self.size < 3 or not 0 <= self.levels <= UNSEEN or not 0 <= self.density < 0.7:
      raise ValueError(
        f'maze needs size >= 3, levels >= 0 and a density from 0 to below 0.7: {self.size=}, '
        f'{self.levels=}, {self.density=}'
      )

  @cached_property
  def observation_space(self) -> gymnasium.spaces.Box:
    """Three planes [size, size, 3]: walls, the goal, the agent."""
    return box(0, 1, (self.size, self.size, 3), np.float32)

  @cached_property
  def action_space(self) -> gymnasium.spaces.Discrete:
    """Up, right, down, left; a move into a wall or out of the maze changes nothing."""
    return discrete(4)

  def reset(self, key: Array) -> tuple[MazeState, TimeStep]:
    """Begin an episode."""
    if self.unseen or not self.levels:
      level = jax.random.randint(key, (), 0, UNSEEN, jnp.int32) + (UNSEEN if self.unseen else 0)
    else:
      level = jax.random.randint(key, (), 0, self.levels, jnp.int32)
    state = self.level(level)
    return state, restart(self._planes(state))

  def level(self, number: Array) -> MazeState:
    """Return the level of that number, always the same."""
    wall_key, start_key, goal_key = jax.random.split(
      jax.random.fold_in(jax.random.key(0), number), 3
    )
    walls = jax.random.uniform(wall_key, (self.size, self.size)) < self.density
    start = self._any(jnp.ones_like(walls), start_key)
    walls = walls.at[tuple(start)].set(False)
    reached = self._reached(walls, start)
    targets = reached.at[tuple(start)].set(False)
    # If the start is walled in, the goal is one step away.
    near = start + jnp.where(start[0] > 0, -1, 1) * jnp.array([1, 0])
    goal = jnp.where(jnp.any(targets), self._any(targets, goal_key), near)
    return MazeState(walls.at[tuple(goal)].set(False), goal, start, jnp.int32(0))

  def _any(self, cells: Array, key: Array) -> Array:
    """Draw a place [2] among `cells`."""
    noise = jax.random.uniform(key, cells.shape)
    index = jnp.argmax(jnp.where(cells, noise, -1.0))
    return jnp.stack(jnp.unravel_index(index, cells.shape)).astype(jnp.int32)

  def _reached(self, walls: Array, start: Array) -> Array:
    """Return the cells that can be reached from `start`."""

    def wider(cells: Array, _: None) -> tuple[Array, None]:
      padded = jnp.pad(cells, 1)
      near = [padded[1 + y : 1 + y + self.size, 1 + x : 1 + x + self.size] for y, x in MOVES]
      return (cells | near[0] | near[1] | near[2] | near[3]) & ~walls, None

    begin = jnp.zeros_like(walls).at[tuple(start)].set(True)
    steps = min(self.size**2 // 2, 4 * self.size)  # steps of an episode
    return jax.lax.scan(wider, begin, None, steps)[0]

  def step(self, state: MazeState, action: Array, key: Array) -> tuple[MazeState, TimeStep]:
    """Take one action."""
    del key
    agent = move(state.walls, state.agent, action)
    state = state._replace(agent=agent, time=state.time + 1)
    arrived = jnp.all(agent == state.goal)
    late = state.time >= 4 * self.size
    return state, transition(self._planes(state), arrived, arrived, late)

  def _planes(self, state: MazeState) -> Array:
    empty = jnp.zeros_like(state.walls)
    places = [empty.at[tuple(place)].set(True) for place in (state.goal, state.agent)]
    return jnp.stack([state.walls, *places], -1).astype(jnp.float32)
