"""Random ABC, Non-stationary ABC and Key-Box: objects whose rewards a lifetime keeps, or changes.

Zheng et al. 2020 (arXiv 1912.05500, sections 4.2 to 4.4). The rewards, the key's cost, its corner, the swaps and the
1,000 episodes of Non-stationary ABC are the paper's. Ours, as its appendix was not at hand: a grid of 5 x 5, the
start in the middle, the corners of A, B and C, time limits, and the lengths of the other two lifetimes.
"""

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
from podrace.envs.own.grids import move, one_hot
from podrace.types import Array, TimeStep

KEY_COST = 0.1
LOW, HIGH = np.array([-1.0, -0.5, 0.0]), np.array([1.0, 0.0, 0.5])  # rewards of A, B, C


class ObjectsState(NamedTuple):
  """Where the agent is, since when, and whether objects can be taken."""

  agent: Array  # [2] i32
  time: Array  # [] i32
  has_key: Array  # [] bool; always, where there is no key


@dataclasses.dataclass(frozen=True)
class Objects:
  """Walk to one of A, B and C, which gives its reward and ends the episode. A `World`.

  A is in the top right corner, B in the bottom right one, C in the bottom left one. A task is the reward of each,
  [3] f32: uniform in [-1, 1], [-0.5, 0] and [0, 0.5]. With a `period` it is 1 or -1 for A, -0.5 for B, and the
  contrary of A's for C; A and C swap theirs every `period` episodes. With a `key`, in the top left corner, nothing
  can be taken before it; it costs 0.1.
  """

  key: bool = False
  period: int = 0  # episodes between swaps; 0: rewards stay
  size: int = 5
  steps: int = 20  # after which an episode is truncated

  def __post_init__(self) -> None:
    if self.size < 3 or self.steps < 1 or self.period < 0:
      raise ValueError(
        'objects need size >= 3, steps >= 1 and period >= 0: '
        f'{self.size=}, {self.steps=}, {self.period=}'
      )

  @cached_property
  def observation_space(self) -> gymnasium.spaces.Box:
    """The agent's place, and whether it has the key where there is one, as a row of a table."""
    return box(0, 1, (self.size**2 * (1 + self.key),), np.float32)

  @cached_property
  def action_space(self) -> gymnasium.spaces.Discrete:
    """Up, right, down, left; a move out of the grid changes nothing."""
    return discrete(4)

  def task(self, key: Array) -> Array:
    """The rewards [3] f32 at the beginning of a lifetime."""
    if self.period:
      a = jnp.where(jax.random.bernoulli(key), 1.0, -1.0)
      return jnp.stack([a, jnp.float32(-0.5), -a])
    return jax.random.uniform(key, (3,), minval=jnp.asarray(LOW), maxval=jnp.asarray(HIGH))

  def reset(self, task: Array, key: Array) -> tuple[ObjectsState, TimeStep]:
    """Begin an episode."""
    del task, key
    middle = jnp.full(2, self.size // 2, jnp.int32)
    state = ObjectsState(middle, jnp.int32(0), jnp.bool_(not self.key))
    return state, restart(self._observe(state))

  def step(
    self, task: Array, episode: Array, state: ObjectsState, action: Array, key: Array
  ) -> tuple[ObjectsState, TimeStep]:
    """Take one action."""
    del key
    edge = self.size - 1
    agent = move(jnp.zeros((self.size, self.size), bool), state.agent, action)
    corners = jnp.array([[0, edge], [edge, edge], [edge, 0]])
    at = jnp.all(corners == agent[None], axis=1)
    taken = at & state.has_key
    found = ~state.has_key & jnp.all(agent == 0)
    reward = jnp.sum(jnp.where(taken, self.rewards(task, episode), 0.0)) - KEY_COST * found
    state = ObjectsState(agent, state.time + 1, state.has_key | found)
    late = state.time >= self.steps
    return state, transition(self._observe(state), reward, jnp.any(taken), late)

  def rewards(self, task: Array, episode: Array) -> Array:
    """What A, B and C give in an episode, [3] f32."""
    if not self.period:
      return task
    return jnp.where(episode // self.period % 2 == 0, task, task[::-1])

  def _observe(self, state: ObjectsState) -> Array:
    place = state.agent[0] * self.size + state.agent[1]
    with_key = state.has_key & self.key
    return one_hot(place + self.size**2 * with_key, self.observation_space.shape[0])
