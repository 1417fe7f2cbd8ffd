"""Lifetimes: episodes in a row that share a task, such as a goal that is never shown.

A lifetime spans episodes (Zheng et al. 2020, arXiv 1912.05500; Oh et al. 2020, arXiv 2007.08794).
An agent can use in one episode the things that it learned about the task in the episodes before.
`reset` begins a lifetime. The step after LAST begins the next episode, or the next lifetime.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, Protocol

import gymnasium
import jax
import jax.numpy as jnp

from podrace.envs import base
from podrace.envs.base import EnvironmentBatch, select
from podrace.types import Array, Environment, TimeStep


class World(Protocol):
  """Episodes of a task.

  A task is a tree of arrays. `episode` is the number [] i32 of the episode in its lifetime. `step`
  returns MID or LAST (see `podrace.envs.base.transition`), like the `step` of `Dynamics`.
  """

  @property
  def observation_space(self) -> gymnasium.Space:
    """Space of the observations of one environment."""

  @property
  def action_space(self) -> gymnasium.Space:
    """Space of the actions of one environment."""

  def task(self, key: Array) -> Any:
    """Draw a task."""

  def reset(self, task: Any, key: Array) -> tuple[Any, TimeStep]:
    """Begin an episode."""

  def step(
    self, task: Any, episode: Array, state: Any, action: Array, key: Array
  ) -> tuple[Any, TimeStep]:
    """Take one action."""


class LifetimeState(NamedTuple):
  """State of a lifetime."""

  task: Any  # result of `World.task`
  episode: Array  # [] i32 of this lifetime, from 0
  inner: Any  # the state of the episode
  last: Array  # [] bool: the episode is over, the next step opens another one


@dataclasses.dataclass(frozen=True)
class Lifetimes:
  """An `Environment` of consecutive lifetimes, each with its own task.

  `episodes` is the length of a lifetime; 0: it never ends. `task` is the number of the task that
  all lifetimes share; -1: each lifetime draws one.
  """

  world: World
  episodes: int
  task: int = -1

  def __post_init__(self) -> None:
    if self.episodes < 0 or self.task < -1:
      raise ValueError(
        f'lifetimes need episodes >= 0 and a task >= -1: {self.episodes=}, {self.task=}'
      )

  @property
  def observation_space(self) -> gymnasium.Space:
    """Space of the observations of one environment."""
    return self.world.observation_space

  @property
  def action_space(self) -> gymnasium.Space:
    """Space of the actions of one environment."""
    return self.world.action_space

  def new_task(self, key: Array) -> Any:
    """Return the task of a lifetime."""
    return self.world.task(key if self.task < 0 else jax.random.key(self.task))

  def begin(self, task: Any, key: Array) -> tuple[LifetimeState, TimeStep]:
    """Begin a lifetime with this task."""
    inner, timestep = self.world.reset(task, key)
    return LifetimeState(task, jnp.int32(0), inner, jnp.bool_(False)), timestep

  def reset(self, key: Array) -> tuple[LifetimeState, TimeStep]:
    """Begin an episode."""
    task_key, episode_key = jax.random.split(key)
    return self.begin(self.new_task(task_key), episode_key)

  def step(self, state: LifetimeState, action: Array, key: Array) -> tuple[LifetimeState, TimeStep]:
    """Take one action."""
    step_key, life_key, episode_key = jax.random.split(key, 3)
    inner, timestep = self.world.step(state.task, state.episode, state.inner, action, step_key)
    stepped = state._replace(inner=inner, last=timestep.last), timestep
    next_episode = state.episode + 1
    begun, _ = self.begin(self.new_task(life_key), jax.random.clone(episode_key))
    goes_on = next_episode < (self.episodes or math.inf)
    task = select(goes_on, state.task, begun.task)
    inner, first = self.world.reset(task, episode_key)
    opened = (
      LifetimeState(task, jnp.where(goes_on, next_episode, 0), inner, jnp.bool_(False)),
      first,
    )
    result: tuple[LifetimeState, TimeStep] = select(state.last, opened, stepped)
    return result


def batch(env: Environment, num_envs: int) -> EnvironmentBatch:
  """Return `podrace.envs.base.batch`, with one task for the first lifetimes of all environments."""
  if not isinstance(env, Lifetimes):
    return base.batch(env, num_envs)

  def reset(key: Array) -> tuple[Any, TimeStep]:
    task_key, episode_key = jax.random.split(key)
    task = env.new_task(task_key)
    keys = jax.random.split(episode_key, num_envs)
    return jax.vmap(env.begin, in_axes=(None, 0))(task, keys)

  return base.batch(env, num_envs)._replace(reset=reset)
