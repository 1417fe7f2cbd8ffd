"""The tasks of cca.py: a bandit with feedback that shows the noise, and key-to-door with noisy apples.

Both know the exact score of a policy: `score` of its probabilities at the observations `decisive`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from podrace.envs.base import NextStepReset, restart, transition
from podrace.types import TimeStep

LEFT, RIGHT, NOTHING, KEY, DOOR = range(5)  # cells; an apple's cell is the action that picks it
PICK_LEFT, PICK_RIGHT, PICK_KEY, OPEN = range(4)


@dataclasses.dataclass(frozen=True)
class Bandit:
  """One action. The reward is minus its squared distance from the context, plus noise.

  The feedback u[context] + v[action] + w noise shows the noise, but mixed with the action.
  """

  noise: float = 10.0  # standard deviation, in gaps between the best action and the next
  choices: int = 5
  gap = 0.1
  features = 16

  @property
  def observation_space(self) -> gymnasium.Space:
    shape = (self.choices + self.features,)
    return gymnasium.spaces.Box(-np.inf, np.inf, shape, 'float32')

  @property
  def action_space(self) -> gymnasium.Space:
    return gymnasium.spaces.Discrete(self.choices)

  def observe(self, context: Array, feedback: Array) -> Array:
    return jnp.concatenate([jax.nn.one_hot(context, self.choices), feedback])

  def reset(self, key: Array) -> tuple[Any, TimeStep]:
    context = jax.random.randint(key, (), 0, self.choices)
    return context, restart(self.observe(context, jnp.zeros(self.features)))

  def step(self, context: Any, action: Array, key: Array) -> tuple[Any, TimeStep]:
    normal = np.random.default_rng(0).normal(size=(2 * self.choices + 1, self.features))
    u, v, w = jnp.split(jnp.float32(normal), [self.choices, 2 * self.choices])
    noise = self.gap * self.noise * jax.random.normal(key)
    observation = self.observe(context, u[context] + v[action] + w[0] * noise)
    reward = noise - self.gap * (context - action) ** 2
    return context, transition(observation, reward, jnp.bool_(True), jnp.bool_(False))

  def decisive(self) -> Array:
    return jnp.eye(self.choices, self.choices + self.features)

  def score(self, probability: Array) -> Array:
    """Return the expected reward; 0 is best."""
    place = jnp.arange(self.choices)
    mean = -self.gap * (place[:, None] - place[None]) ** 2
    return jnp.sum(probability * mean) / self.choices


@dataclasses.dataclass(frozen=True)
class KeyToDoor:
  """A key, then apples of a random value, then a door with a small treasure for the key.

  The conveyor of Meulemans et al. 2023 (arXiv 2306.16803): each action moves it by a cell.
  """

  length: int = 23
  observation_space = gymnasium.spaces.Box(0.0, 1.0, (7,), 'float32')
  action_space = gymnasium.spaces.Discrete(4)

  def observe(self, place: Array, cell: Array, has_key: Array) -> Array:
    numbers = jnp.stack([place / self.length, has_key.astype(jnp.float32)])
    return jnp.concatenate([numbers, jax.nn.one_hot(cell, 5)])

  def reset(self, key: Array) -> tuple[Any, TimeStep]:
    state = jnp.int32(0), jnp.int32(KEY), jnp.bool_(False)
    return (*state, jnp.bool_(False)), restart(self.observe(*state))

  def step(self, state: Any, action: Array, key: Array) -> tuple[Any, TimeStep]:
    place, cell, has_key, _ = state
    cell_key, apple_key = jax.random.split(key)
    apple = jnp.where(jax.random.bernoulli(apple_key), 0.9, 0.1)
    picks = (cell <= RIGHT) & (action == cell)
    opens = (cell == DOOR) & (action == OPEN) & has_key
    reward = 23 / self.length * (apple * picks + 0.2 * opens)
    has_key = has_key | ((cell == KEY) & (action == PICK_KEY))
    place = place + 1
    cell = jax.random.choice(cell_key, 3, p=jnp.array([0.4, 0.4, 0.2])).astype(jnp.int32)
    cell = jnp.where(place == self.length - 2, DOOR, cell)
    over = place == self.length - 1
    timestep = transition(self.observe(place, cell, has_key), reward, over, jnp.bool_(False))
    return (place, cell, has_key, opens), timestep

  def infos(self, state: Any) -> dict[str, Array]:
    return {'treasure': state[3]}

  def decisive(self) -> Array:
    start = self.observe(jnp.int32(0), jnp.int32(KEY), jnp.bool_(False))
    door = self.observe(jnp.int32(self.length - 2), jnp.int32(DOOR), jnp.bool_(True))
    return jnp.stack([start, door])

  def score(self, probability: Array) -> Array:
    """Return the probability of the treasure."""
    return probability[0, PICK_KEY] * probability[1, OPEN]


def bandit(noise: float = 10.0, choices: int = 5) -> NextStepReset:
  return NextStepReset(Bandit(noise, choices))


def key_to_door(length: int = 23) -> NextStepReset:
  if length < 3:
    raise ValueError(f'length {length}: the key, an apple and the door need at least 3 steps')
  return NextStepReset(KeyToDoor(length))
