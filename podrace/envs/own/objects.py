"""Random ABC, Non-stationary ABC and Key-Box: objects whose rewards belong to a lifetime.

Zheng et al. 2020 (arXiv 1912.05500, sections 4.2 to 4.4). The rewards, the key's cost and corner,
the swaps and the 1,000 episodes of Non-stationary ABC are the paper's. Its appendix was not at
hand, so these are ours: a grid of 5 x 5, the start in the middle, the corners of A, B and C, time
limits, and the lengths of the other two lifetimes.
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
  """The agent's place, the time in the episode, and whether objects can be taken."""

  agent: Array  # [2] i32
  time: Array  # [] i32
  has_key: Array  # [] bool; always True in worlds without a key


@dataclasses.dataclass(frozen=True)
class Objects:
  """Walk to one of A, B and C, which gives its reward and ends the episode. A `World`.

  A is in the top right corner, B in the bottom right, C in the bottom left. A task is the reward of
  each, [3] f32: uniform in [-1, 1], [-0.5, 0] and [0, 0.5]. With a `period`, A has 1 or -1, B has
  -0.5, and C the negative of A. A and C swap rewards every `period` episodes. With a `key`, in the
  top left corner, nothing can be taken before it. The key costs 0.1.
  """

  key: bool = False
  period: int = 0  # episodes between swaps; 0: rewards stay
  size: int = 5
  steps: int = 20  # time limit of an episode, which truncates

  def __post_init__(self) -> None:
    if self.size < 3 or self.steps < 1 or self.period < 0:
      raise ValueError(
        'objects need size >= 3, steps >= 1 and period >= 0: '
        f'{self.size=}, {self.steps=}, {self.period=}'
      )

  @cached_property
  def observation_space(self) -> gymnasium.spaces.Box:
    """The agent's place, and whether it has the key if there is one, one-hot."""
    return box(0, 1, (self.size**2 * (1 + self.key),), np.float32)

  @cached_property
  def action_space(self) -> gymnasium.spaces.Discrete:
    """Up, right, down, left; a move out of the grid changes nothing."""
    return discrete(4)

  def task(self, key: Array) -> Array:
    """Draw the rewards [3] f32 at the beginning of a lifetime."""
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
    finds_key = ~state.has_key & jnp.all(agent == 0)
    reward = jnp.sum(jnp.where(taken, self.rewards(task, episode), 0.0)) - KEY_COST * finds_key
    state = ObjectsState(agent, state.time + 1, state.has_key | finds_key)
    late = state.time >= self.steps
    return state, transition(self._observe(state), reward, jnp.any(taken), late)

  def rewards(self, task: Array, episode: Array) -> Array:
    """Return the rewards of A, B and C in an episode, [3] f32."""
    if not self.period:
      return task
    return jnp.where(episode // self.period % 2 == 0, task, task[::-1])

  def _observe(self, state: ObjectsState) -> Array:
    place = state.agent[0] * self.size + state.agent[1]
    with_key = state.has_key & self.key
    return one_hot(place + self.size**2 * with_key, self.observation_space.shape[0])
