"""NAME: walk to the right end, as a start for an environment of your own in JAX.

Its parts are explained in docs/own.md. `podrace train --env python:FILE.make` trains in it.
"""

import dataclasses
from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp

from podrace.envs.base import NextStepReset, restart, transition


class NAMEState(NamedTuple):
  """The state of one environment."""

  place: jax.Array  # [] i32
  time: jax.Array  # [] i32


@dataclasses.dataclass(frozen=True)
class NAME:
  """Walk to the right end. It terminates there with reward 1; 50 steps are too many."""

  length: int = 8
  observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,), 'float32')
  action_space = gymnasium.spaces.Discrete(2)

  def observe(self, place):
    """Return the observation of a place."""
    return (place / self.length).astype(jnp.float32)[None]

  def reset(self, key):
    """Return the first state and time step of an episode."""
    place = jax.random.randint(key, (), 0, self.length // 2)
    return NAMEState(place, jnp.int32(0)), restart(self.observe(place))

  def step(self, state, action, key):
    """Return the next state and time step."""
    place = jnp.clip(state.place + 2 * action - 1, 0, self.length)
    arrived, late = place == self.length, state.time + 1 >= 50
    timestep = transition(self.observe(place), reward=arrived, terminated=arrived, truncated=late)
    return NAMEState(place, state.time + 1), timestep


def make(length=8):
  """Return the environment, as `python:FILE.make` makes it."""
  return NextStepReset(NAME(length))
