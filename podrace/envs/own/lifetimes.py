"""Lifetimes: episodes in a row that share a task, such as a goal that is never shown.

A lifetime is a notion above episodes (Zheng et al. 2020, arXiv 1912.05500; Oh et al. 2020, arXiv 2007.08794). Who
learns about the task in one episode can use it in the next one. The state of the environment holds the task and the
number of the episode; `reset` begins a lifetime, and the step after LAST the next episode of it.
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
  """Episodes in a task. A task is a tree of arrays, `episode` [] i32 the number of the episode in its lifetime.

  `step` returns MID or LAST (`podrace.envs.base.transition`), as that of `Dynamics` does.
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
  """Where a lifetime is."""

  task: Any  # what `World.task` has made
  episode: Array  # [] i32 of this lifetime, from 0
  inner: Any  # the state of the episode
  last: Array  # [] bool: the episode is over, the next step opens another one


@dataclasses.dataclass(frozen=True)
class Lifetimes:
  """An `Environment` of one lifetime after the other, each with a task of its own.

  `episodes` is the length of a lifetime; 0: it never ends. `task` is the number of the one task that all lifetimes
  have; -1: each has another one.
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
    """The task of a lifetime."""
    return self.world.task(key if self.task < 0 else jax.random.key(self.task))

  def begin(self, task: Any, key: Array) -> tuple[LifetimeState, TimeStep]:
    """A lifetime with this task."""
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
    found: tuple[LifetimeState, TimeStep] = select(state.last, opened, stepped)
    return found


def batch(env: Environment, num_envs: int) -> EnvironmentBatch:
  """`podrace.envs.base.batch` for one agent's lifetime: its environments begin it with the same task."""
  if not isinstance(env, Lifetimes):
    return base.batch(env, num_envs)

  def reset(key: Array) -> tuple[Any, TimeStep]:
    task_key, episode_key = jax.random.split(key)
    task = env.new_task(task_key)
    keys = jax.random.split(episode_key, num_envs)
    return jax.vmap(env.begin, in_axes=(None, 0))(task, keys)

  return base.batch(env, num_envs)._replace(reset=reset)
