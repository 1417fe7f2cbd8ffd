"""Environments with noisy observations: the option noise=0.1 of environments in JAX."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from podrace.envs.base import NextStepReset
from podrace.envs.hidden import DynamicsWrapper
from podrace.errors import UnknownName
from podrace.types import Array, Environment, TimeStep


@dataclasses.dataclass(frozen=True, eq=False)
class NoisyObservations(DynamicsWrapper):
  """Dynamics with Gaussian noise on observations, clipped to their space, as in POPGym.

  Morad et al. 2023 (arXiv 2303.01859); the deviations of its noisy CartPole are 0.1, 0.2 and 0.3.
  """

  deviation: float  # of the noise on each number of an observation

  def reset(self, key: Array) -> tuple[Any, TimeStep]:
    """Begin an episode."""
    env_key, noise_key = jax.random.split(key)
    return self._noisy(self.dynamics.reset(env_key), noise_key)

  def step(self, state: Any, action: Any, key: Array) -> tuple[Any, TimeStep]:
    """Take one action."""
    env_key, noise_key = jax.random.split(key)
    return self._noisy(self.dynamics.step(state, action, env_key), noise_key)

  def _noisy(self, stepped: tuple[Any, TimeStep], key: Array) -> tuple[Any, TimeStep]:
    state, timestep = stepped
    space, seen = self.observation_space, timestep.observation
    noise = self.deviation * jax.random.normal(key, seen.shape, seen.dtype)
    noisy = jnp.clip(seen + noise, space.low, space.high)
    return state, timestep._replace(observation=noisy)


def with_noise(name: str, deviation: Any, env: Environment) -> Environment:
  """Return the environment called `name` with noise on its observations.

  Raises:
    UnknownName: if its observations are no floats, or the deviation is no positive number.
  """
  space = env.observation_space
  floats = isinstance(space, gymnasium.spaces.Box) and np.issubdtype(space.dtype, np.floating)
  if not isinstance(env, NextStepReset) or not floats:
    raise UnknownName(
      f'{name} has no option noise, which needs observations of floats and an environment '
      f'wrapped in NextStepReset; its observations are {space}'
    )
  if type(deviation) not in (int, float) or not 0 < deviation < math.inf:
    raise UnknownName(f'{name}: noise is a positive number, such as 0.1, not {deviation!r:.100}')
  return dataclasses.replace(env, dynamics=NoisyObservations(env.dynamics, float(deviation)))
