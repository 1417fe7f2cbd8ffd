"""Sticky actions: the environment repeats the previous action with a probability.

Machado et al. 2018 (Revisiting the Arcade Learning Environment, arXiv 1709.06009), section 5.2.
MinAtar (Young and Tian 2019, arXiv 1903.03176) has them with a probability of 0.1.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from podrace.envs.hidden import DynamicsWrapper
from podrace.types import Array, TimeStep


@dataclasses.dataclass(frozen=True, eq=False)
class StickyActions(DynamicsWrapper):
  """Dynamics with sticky actions, for discrete actions of which 0 does nothing.

  The state is (state, the action that the environment took before).

  Args:
    dynamics: the environment.
    probability: of repeating, from 0 to below 1. An episode begins with action 0.
  """

  probability: float

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

  def infos(self, state: Any) -> dict[str, Array]:
    """Return numbers to log about the episode that ends in `state`."""
    return super().infos(state[0])
