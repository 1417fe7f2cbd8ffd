"""Random grid worlds, one per lifetime, in which rules of learning are trained."""

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
from podrace.envs.own.grids import draw_places, move, one_hot
from podrace.types import Array, TimeStep

SMALLEST = 4  # sides of a grid are from SMALLEST to `GridWorlds.size`


class GridTask(NamedTuple):
  """A world with N objects."""

  walls: Array  # [size, size] bool; cells beyond a smaller grid are walls
  start: Array  # [2] i32
  places: Array  # [N, 2] i32
  exists: Array  # [N] bool: a world may have fewer objects
  reward: Array  # [N] f32 for taking the object
  termination: Array  # [N] f32 probability that taking the object ends the episode
  respawn: Array  # [N] f32 probability in each step that a taken object comes back
  steps: Array  # [] i32 time limit of an episode, which truncates


class GridState(NamedTuple):
  """State of a world."""

  agent: Array  # [2] i32
  present: Array  # [N] bool: the object can be taken
  time: Array  # [] i32


@dataclasses.dataclass(frozen=True)
class GridWorlds:
  """Walk over objects to take them, for their rewards. A `World`.

  The family is that of LPG's tabular grid worlds (Oh et al. 2020, arXiv 2007.08794): the state is
  one-hot, and types of objects have a reward and probabilities to end the episode and to come back.
  The ranges follow the short lives of an open implementation (EmptyJackson/groove, "small"): a side
  of 4 to 6, and 1 to 3 objects. The first object has a reward in [0, 1], the rest in [-1, 1].
  Probabilities of an end are in [0.01, 1] and of a return in [0.001, 0.1], both log-uniform.
  Episodes have 20 to 100 steps. Random walls are ours. They may shut an object in.
  """

  size: int = 6  # the longest side
  objects: int = 3  # N, the largest number of objects
  density: float = 0.2  # share of walls

  def __post_init__(self) -> None:
    if self.size < SMALLEST or not 1 <= self.objects <= 6 or not 0 <= self.density <= 0.5:
      raise ValueError(
        f'grid_worlds needs size >= {SMALLEST}, 1 to 6 objects and a density from 0 to 0.5: '
        f'{self.size=}, {self.objects=}, {self.density=}'
      )

  @cached_property
  def observation_space(self) -> gymnasium.spaces.Box:
    """The agent's place and the present objects, one-hot: [size * size * 2**objects]."""
    return box(0, 1, (self.size**2 * 2**self.objects,), np.float32)

  @cached_property
  def action_space(self) -> gymnasium.spaces.Discrete:
    """Up, right, down, left; a move into a wall or out of the grid changes nothing."""
    return discrete(4)

  def task(self, key: Array) -> GridTask:
    """Draw a task."""
    keys = iter(jax.random.split(key, 8))
    n, size = self.objects, self.size
    side = jax.random.randint(next(keys), (), SMALLEST, size + 1)
    row, column = jnp.mgrid[:size, :size]
    inside = (row < side) & (column < side)
    walls = jax.random.uniform(next(keys), inside.shape) < self.density
    free = inside & ~walls
    # If fewer cells are free than the start and the objects need, walls are removed.
    chosen = draw_places(jnp.where(jnp.sum(free) > n, free, inside), n + 1, next(keys))
    rows, columns = chosen[:, 0], chosen[:, 1]
    low = jnp.full(n, -1.0).at[0].set(0.0)
    return GridTask(
      walls=(~free).at[rows, columns].set(False),
      start=chosen[0],
      places=chosen[1:],
      exists=jnp.arange(n) < jax.random.randint(next(keys), (), 1, n + 1),
      reward=jax.random.uniform(next(keys), (n,), minval=low, maxval=jnp.ones(n)),
      termination=_log_uniform(next(keys), (n,), 1e-2, 1.0),
      respawn=_log_uniform(next(keys), (n,), 1e-3, 1e-1),
      steps=jnp.round(_log_uniform(next(keys), (), 20, 100)).astype(jnp.int32),
    )

  def reset(self, task: GridTask, key: Array) -> tuple[GridState, TimeStep]:
    """Begin an episode."""
    del key
    state = GridState(task.start, task.exists, jnp.int32(0))
    return state, restart(self._observe(state))

  def step(
    self, task: GridTask, episode: Array, state: GridState, action: Array, key: Array
  ) -> tuple[GridState, TimeStep]:
    """Take one action."""
    del episode
    end_key, respawn_key = jax.random.split(key)
    agent = move(task.walls, state.agent, action)
    taken = state.present & jnp.all(task.places == agent[None], axis=1)
    ended = jnp.any(taken & jax.random.bernoulli(end_key, task.termination))
    back = task.exists & jax.random.bernoulli(respawn_key, task.respawn)
    present = (state.present & ~taken) | (~state.present & back)
    state = GridState(agent, present, state.time + 1)
    reward = jnp.sum(jnp.where(taken, task.reward, 0.0))
    return state, transition(self._observe(state), reward, ended, state.time >= task.steps)

  def _observe(self, state: GridState) -> Array:
    place = state.agent[0] * self.size + state.agent[1]
    which = jnp.sum(state.present * 2 ** jnp.arange(self.objects))
    return one_hot(place + self.size**2 * which, self.observation_space.shape[0])


def _log_uniform(key: Array, shape: tuple[int, ...], low: float, high: float) -> Array:
  """Draw f32 numbers with uniform logarithms."""
  bounds = jnp.log(jnp.array([low, high], jnp.float32))
  return jnp.exp(jax.random.uniform(key, shape, minval=bounds[0], maxval=bounds[1]))
