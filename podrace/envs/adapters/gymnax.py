"""Gymnax: classic control, MinAtar, bsuite and small tasks (github.com/RobertTLange/gymnax).

`step_env` never resets and its flag is termination alone; `is_truncated` is the time limit. That
holds for every family in gymnax 1.0. In the tasks of `_LIMIT_IS_TASK` the observation tells the
time and nothing but the limit ends the episode: there the limit is part of the task, so
reaching it is termination.

MinAtar's own rules, which published results use, differ from gymnax's: an action repeats with
probability 0.1, and there is no time limit, except that Freeway ends after 2,500 steps. They are
`sticky=0.1,max_steps_in_episode=0`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from podrace.envs.adapters import drawings
from podrace.envs.adapters.adapt import (
  allow_rank_promotion,
  as_strong_types,
  box,
  discrete,
  to_space,
)
from podrace.envs.adapters.seaquest import few_places
from podrace.envs.adapters.sticky import StickyActions
from podrace.envs.base import NextStepReset, restart, transition
from podrace.envs.env_names import at_least, options_error, read_options
from podrace.envs.options import Value
from podrace.errors import UnknownName
from podrace.system.deferred import import_without
from podrace.types import Array, Environment, TimeStep

gymnax: Any = import_without('gymnax', 'matplotlib', 'seaborn')  # it imports them to draw
Discrete = gymnax.environments.spaces.Discrete

_LIMIT_IS_TASK = (
  'DiscountingChain-bsuite',
  'MetaMaze-misc',
  'PointRobot-misc',
  'BernoulliBandit-misc',
  'GaussianBandit-misc',
)
_BOUNDS_TOO_NARROW = (
  'MemoryChain-bsuite',
  'UmbrellaChain-bsuite',
  'MetaMaze-misc',
  'GaussianBandit-misc',
)  # observations leave the box that gymnax declares

DRAWINGS = {'CartPole-v1': drawings.cart_pole, 'Pendulum-v1': drawings.pendulum}


@allow_rank_promotion
def make(name: str, options: Mapping[str, Value]) -> Environment:
  """Make a gymnax environment by its id; options are scalars of its constructor and its params."""
  factory = type(gymnax.make(name)[0])
  built = _scalars({k: p.default for k, p in inspect.signature(factory).parameters.items()})
  params = gymnax.make(name)[1]
  scalars = _scalars({f.name: getattr(params, f.name) for f in dataclasses.fields(params)})
  minatar = name.endswith('-MinAtar')
  ours: dict[str, Value] = {'fresh_fraction': 1.0} | ({'sticky': 0.0} if minatar else {})
  values = read_options(f'gymnax:{name}', options, {**ours, **built, **scalars})
  if 'max_steps_in_episode' in options:
    at_least(f'gymnax:{name}', values, max_steps_in_episode=0 if minatar else 1)
  if minatar and not 0 <= values['sticky'] < 1:
    raise UnknownName(
      f'gymnax:{name}: sticky is a probability, from 0 to below 1, not {values["sticky"]}'
    )
  try:
    env, params = gymnax.make(name, **{k: values[k] for k in built})
    changed = {k: values[k] for k in scalars if k in options}
    if name == 'Seaquest-MinAtar' and changed.keys() <= {'max_steps_in_episode'}:
      env = few_places()(**{k: values[k] for k in built})
    params = params.replace(**changed)
    dynamics: Any = Gymnax(
      name, env, params, _observation_space(name, env, params), _action_space(env, params)
    )
  except UnknownName:
    raise
  except Exception as error:
    if not options:
      raise
    raise options_error(f'gymnax:{name}', options, error) from error
  if minatar and values['sticky']:
    dynamics = StickyActions(dynamics, values['sticky'])
  return NextStepReset(dynamics, values['fresh_fraction'])


def _scalars(values: Mapping[str, Any]) -> dict[str, Value]:
  return {k: v for k, v in values.items() if isinstance(v, bool | int | float | str)}


def _observation_space(name: str, env: Any, params: Any) -> gymnasium.Space:
  """Return the declared space in the shape and type of actual observations, which may differ."""
  declared = env.observation_space(params)
  if isinstance(declared, Discrete):
    return discrete(declared.n)
  actual, _ = jax.eval_shape(lambda key: env.reset_env(key, params), jax.random.key(0))
  low, high = declared.low, declared.high
  if name in _BOUNDS_TOO_NARROW:
    low, high = -np.inf, np.inf
  return box(low, high, actual.shape, actual.dtype)


def _action_space(env: Any, params: Any) -> gymnasium.Space:
  declared = env.action_space(params)
  if isinstance(declared, Discrete):
    return discrete(declared.n)
  return box(declared.low, declared.high, declared.shape, np.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class Gymnax:
  """A gymnax environment as Dynamics."""

  name: str
  env: Any  # gymnax.environments.environment.Environment
  params: Any
  observation_space: gymnasium.Space
  action_space: gymnasium.Space

  @allow_rank_promotion
  def reset(self, key: Array) -> tuple[Any, TimeStep]:
    """Begin an episode."""
    observation, state = self.env.reset_env(key, self.params)
    return as_strong_types(state), restart(to_space(self.observation_space, observation))

  @allow_rank_promotion
  def step(self, state: Any, action: Array, key: Array) -> tuple[Any, TimeStep]:
    """Take one action."""
    action = jnp.asarray(action, self.action_space.dtype)
    observation, state, reward, terminated, _ = self.env.step_env(key, state, action, self.params)
    if self.params.max_steps_in_episode == 0:
      terminated, truncated = terminated | self._is_over(state), False
    else:
      truncated = self.env.is_truncated(state, self.params)
    if self.name in _LIMIT_IS_TASK:
      terminated, truncated = terminated | truncated, False
    observation = to_space(self.observation_space, observation)
    return as_strong_types(state), transition(observation, reward, terminated, truncated)

  def _is_over(self, state: Any) -> Any:
    """Return whether a game of MinAtar without a time limit ends by its own clock."""
    if self.name != 'Freeway-MinAtar':
      return False
    return self.env.is_truncated(state, self.env.default_params)

  @property
  def longest_episode(self) -> int | None:
    """Steps of the longest episode; None if there is no limit."""
    steps = getattr(self.params, 'max_steps_in_episode', None)
    if steps == 0 and self.name == 'Freeway-MinAtar':
      steps = self.env.default_params.max_steps_in_episode
    return int(steps) if steps else None

  @property
  def draw(self) -> Callable[[Any], np.ndarray] | None:
    """Function from a state to its picture, or None if there is none for this environment."""
    drawing = DRAWINGS.get(self.name)
    return None if drawing is None else lambda state: drawing(state, self.params)
