"""Environments with a planted mistake, for collapse.py: `python:planted_envs.planted,mistake=NAME`."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp

from podrace.envs.base import NextStepReset, restart, transition

MISTAKES = ('one-step', 'constant', 'endless')


class PlantedState(NamedTuple):
  """The state of an episode."""

  seen: jax.Array  # [4] f32
  time: jax.Array  # [] i32


@dataclasses.dataclass(frozen=True)
class Planted:
  """Random observations; reward 1 for the action that the sign of the first number names.

  Args:
    mistake: one of MISTAKES: every step terminates, the reward is always 1, or no episode
      ends.
  """

  mistake: str
  observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), 'float32')
  action_space = gymnasium.spaces.Discrete(2)

  def reset(self, key: jax.Array) -> Any:
    """Begins an episode."""
    seen = jax.random.uniform(key, (4,), minval=-1.0, maxval=1.0)
    return PlantedState(seen, jnp.int32(0)), restart(seen)

  def step(self, state: PlantedState, action: jax.Array, key: jax.Array) -> Any:
    """Makes a step."""
    time, seen = state.time + 1, jax.random.uniform(key, (4,), minval=-1.0, maxval=1.0)
    right = (action == (state.seen[0] > 0)).astype(jnp.float32)
    reward = jnp.float32(1) if self.mistake == 'constant' else right
    over = time >= (1 if self.mistake == 'one-step' else 8)
    over &= self.mistake != 'endless'
    timestep = transition(seen, reward=reward, terminated=over, truncated=jnp.bool_(False))
    return PlantedState(seen, time), timestep


def planted(mistake: str) -> NextStepReset:
  """Returns the environment with this mistake."""
  return NextStepReset(Planted(mistake))
