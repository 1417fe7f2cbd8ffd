"""Sticky actions: the environment repeats the previous action with a probability.

Machado et al. 2018 (Revisiting the Arcade Learning Environment, arXiv 1709.06009), section 5.2.
MinAtar (Young and Tian 2019, arXiv 1903.03176) has them with a probability of 0.1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from podrace.envs.base import Dynamics
from podrace.types import Array, TimeStep


@dataclasses.dataclass(frozen=True, eq=False)
class StickyActions:
  """Dynamics with sticky actions, for discrete actions of which 0 does nothing.

  The state is (state, the action that the environment took before).

  Args:
    dynamics: the environment.
    probability: of repeating, from 0 to below 1. An episode begins with action 0.
  """

  dynamics: Dynamics
  probability: float

  @property
  def observation_space(self) -> gymnasium.Space:
    """Space of the environment's observations."""
    return self.dynamics.observation_space

  @property
  def action_space(self) -> gymnasium.Space:
    """Space of the environment's actions."""
    return self.dynamics.action_space

  def reset(self, key: Array) -> tuple[Any, TimeStep]:
    """Begin an episode."""
    state, timestep = self.dynamics.reset(key)
    return (state, jnp.zeros([], self.action_space.dtype)), timestep

  def step(self, state: Any, action: Array, key: Array) -> tuple[Any, TimeStep]:
    """Take `action`, or the previous one."""
    state, previous = state
    sticky_key, env_key = jax.random.split(key)
    repeats = jax.random.bernoulli(sticky_key, self.probability)
    taken = jnp.where(repeats, previous, jnp.asarray(action, previous.dtype))
    state, timestep = self.dynamics.step(state, taken, env_key)
    return (state, taken), timestep

  @property
  def draw(self) -> Callable[[Any], np.ndarray] | None:
    """Function from a state to its picture, or None if there is none for this environment."""
    drawing = getattr(self.dynamics, 'draw', None)
    return None if drawing is None else lambda state: drawing(state[0])
