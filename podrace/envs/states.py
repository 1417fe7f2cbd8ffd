"""Environments that show their state, so that an agent can try out actions by the true rules."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import gymnasium
import jax
import numpy as np

from podrace.envs.adapters.adapt import box
from podrace.envs.base import NextStepReset
from podrace.envs.hidden import DynamicsWrapper
from podrace.envs.spaces import STATE
from podrace.errors import UnknownName
from podrace.types import Array, Environment, TimeStep


@dataclasses.dataclass(frozen=True, eq=False)
class WithState(DynamicsWrapper):
  """Dynamics that put the state into observations, as a tuple of arrays.

  An observation that is no dict becomes the entry `observation` of one.
  """

  @functools.cached_property
  def observation_space(self) -> gymnasium.spaces.Dict:
    """Space of the observations of one environment."""
    inner = self.dynamics.observation_space
    parts = dict(inner) if isinstance(inner, gymnasium.spaces.Dict) else {'observation': inner}
    state = gymnasium.spaces.Tuple([_any_value(x) for x in jax.tree.leaves(self._shapes)])
    return gymnasium.spaces.Dict({**parts, STATE: state})

  @functools.cached_property
  def _shapes(self) -> Any:
    return jax.eval_shape(lambda key: self.dynamics.reset(key)[0], jax.random.key(0))

  def reset(self, key: Array) -> tuple[Any, TimeStep]:
    """Begin an episode, with the state in the observation."""
    return self._shown(*self.dynamics.reset(key))

  def step(self, state: Any, action: Any, key: Array) -> tuple[Any, TimeStep]:
    """Take one action, with the state in the observation."""
    return self._shown(*self.dynamics.step(state, action, key))

  def state_of(self, observation: Any) -> Any:
    """Return the state in an observation."""
    shapes, treedef = jax.tree.flatten(self._shapes)
    arrays = map(_from_plain, shapes, observation[STATE])
    return jax.tree.unflatten(treedef, arrays)

  def _shown(self, state: Any, timestep: TimeStep) -> tuple[Any, TimeStep]:
    observation = timestep.observation
    parts = observation if isinstance(observation, dict) else {'observation': observation}
    shown = tuple(_plain(x) for x in jax.tree.leaves(state))
    return state, timestep._replace(observation={**parts, STATE: shown})


def with_state(name: str, env: Environment) -> Environment:
  """Return the environment called `name`, with its state in its observations.

  Raises:
    UnknownName: if it is not wrapped in NextStepReset, so that its rules are unknown.
  """
  if not isinstance(env, NextStepReset):
    raise UnknownName(f'{name}: state=true needs an environment that is wrapped in NextStepReset')
  return dataclasses.replace(env, dynamics=WithState(env.dynamics))


def rules(env: Any) -> WithState | None:
  """Return the rules of an environment that shows its state, or None."""
  dynamics = getattr(env, 'dynamics', None)
  return dynamics if isinstance(dynamics, WithState) else None


def takes_turns(env: Any) -> bool:
  """Return whether two players take turns, so that a reward belongs to the moving player."""
  while env is not None:
    if getattr(env, 'takes_turns', False):
      return True
    env = getattr(env, 'jax', None) or getattr(env, 'dynamics', None)  # a HostSpec has its own
  return False


def _is_key(x: Any) -> bool:
  return bool(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key))


def _plain(x: Array) -> Array:
  return jax.random.key_data(x) if _is_key(x) else x


def _from_plain(shape: Any, x: Array) -> Array:
  return jax.random.wrap_key_data(x) if _is_key(shape) else x


def _any_value(shape: Any) -> gymnasium.Space:
  """Return a Box of all values of a shape and dtype."""
  plain = jax.eval_shape(_plain, shape)
  if plain.dtype == np.bool_:
    return box(False, True, plain.shape, plain.dtype)
  if np.issubdtype(plain.dtype, np.integer):
    bounds = np.iinfo(plain.dtype)
    return box(bounds.min, bounds.max, plain.shape, plain.dtype)
  return box(-np.inf, np.inf, plain.shape, plain.dtype)
