"""Environments that hide velocities, as tasks for agents with memory: the option hide=velocity.

Importing this does not import jax, since the workers of Gymnasium's environments import it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from podrace.envs.options import Value
from podrace.errors import UnknownName

CONTROL: Mapping[str, int] = {  # observations begin with the positions: how many
  'Pendulum-v1': 2,
  'Acrobot-v1': 4,
  'MountainCar-v0': 1,
  'MountainCarContinuous-v0': 1,
}
CART = {'CartPole-v1': (0, 2)}
_FIRST: Mapping[str, Mapping[str, int]] = {
  'gymnax': CONTROL,
  'gymnasium': CONTROL,
  'brax': {
    'ant': 13,
    'halfcheetah': 8,
    'hopper': 5,
    'inverted_pendulum': 2,
    'inverted_double_pendulum': 5,
    'walker2d': 8,
  },
}
POSITIONS: Mapping[str, Mapping[str, tuple[int, ...]]] = {
  library: {name: tuple(range(n)) for name, n in known.items()} | (CART if known is CONTROL else {})
  for library, known in _FIRST.items()
}  # library -> name -> where observations have positions, and no velocities


def read(library: str, name: str, options: dict[str, Value]) -> tuple[int, ...]:
  """Take the option `hide` off `options`, and return the indices of an observation that are left.

  Raises:
    UnknownName: if the environment has nothing to hide, or the value is no such thing.
  """
  value = options.pop('hide')
  if value != 'velocity':
    raise UnknownName(f'{library}:{name}: hide is velocity, not {value!r:.100}')
  known = POSITIONS.get(library, {})
  if name not in known:
    names = [f'{key}:{n}' for key, names in POSITIONS.items() for n in names]
    raise UnknownName(f'{library}:{name} has no option hide=velocity; {", ".join(names)} have it')
  return known[name]


@dataclasses.dataclass(frozen=True, eq=False)
class DynamicsWrapper:
  """Base of dynamics around other dynamics: spaces and infos are the inner ones."""

  dynamics: Any  # podrace.envs.base.Dynamics

  @property
  def observation_space(self) -> Any:
    """Space of the observations of one environment."""
    return self.dynamics.observation_space

  @property
  def action_space(self) -> Any:
    """Space of the actions of one environment."""
    return self.dynamics.action_space

  def infos(self, state: Any) -> dict[str, Any]:
    """Return numbers to log about the episode that ends in `state`."""
    from podrace.envs.base import infos

    return infos(self.dynamics, state)


@dataclasses.dataclass(frozen=True, eq=False)
class PositionsOnly(DynamicsWrapper):
  """Dynamics that leave velocities out of observations, which are vectors."""

  kept: tuple[int, ...]

  @functools.cached_property
  def observation_space(self) -> gymnasium.spaces.Box:
    """Space of the observations of one environment."""
    return part_of(self.dynamics.observation_space, self.kept)

  def reset(self, key: Any) -> Any:
    """Begin an episode."""
    return self._hidden(*self.dynamics.reset(key))

  def step(self, state: Any, action: Any, key: Any) -> Any:
    """Take one action."""
    return self._hidden(*self.dynamics.step(state, action, key))

  def _hidden(self, state: Any, timestep: Any) -> Any:
    return state, timestep._replace(observation=timestep.observation[np.array(self.kept)])


def part_of(space: Any, kept: tuple[int, ...]) -> gymnasium.spaces.Box:
  """Return the box of some numbers of a vector."""
  where = np.array(kept)
  return gymnasium.spaces.Box(space.low[where], space.high[where], dtype=space.dtype)


def without_velocities(kept: tuple[int, ...], env: Any) -> Any:
  """Return an environment in JAX, wrapped in NextStepReset, with these parts of observations."""
  return dataclasses.replace(env, dynamics=PositionsOnly(env.dynamics, kept))


def make_gymnasium(name: str, /, **options: Any) -> gymnasium.Env:
  """Return `gymnasium.make` of a name and options, of which `hide` is podrace's.

  Environments of the user's modules, MODULE:ID, may have an option of that name themselves.
  """
  if ':' in name or 'hide' not in options:
    return gymnasium.make(name, **options)
  kept = read('gymnasium', name, options)
  env = gymnasium.make(name, **options)
  space, where = part_of(env.observation_space, kept), np.array(kept)
  return gymnasium.wrappers.TransformObservation(env, lambda x: x[where], space)
