"""Craftax: open worlds to survive in (github.com/MichaelTMatthews/Craftax).

Its flag mixes death with the time limit. So the library's limit is moved out of reach: the flag is
then termination. The same limit truncates here.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from craftax.craftax_env import make_craftax_env_from_name

from podrace.envs.adapters.adapt import (
  TimeLimit,
  allow_rank_promotion,
  as_strong_types,
  box,
  discrete,
  raw_key,
  to_space,
)
from podrace.envs.base import NextStepReset, restart, transition
from podrace.envs.env_names import read_options
from podrace.envs.options import Value
from podrace.types import Array, Environment, TimeStep

_NEVER = 2**31 - 1
# Side of a block in pixels. The library has textures of few sizes.
PIXELS = {'craftax.craftax_classic': 64, 'craftax.craftax': 64}


@allow_rank_promotion
def make(name: str, options: Mapping[str, Value]) -> Environment:
  """Make a craftax environment by its id; options are its params, `max_timesteps` among them."""
  env = make_craftax_env_from_name(name, auto_reset=False)
  params = env.default_params
  scalars = {f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
  scalars = {k: v for k, v in scalars.items() if isinstance(v, bool | int | float)}
  values = read_options(f'craftax:{name}', options, {'fresh_fraction': 0.25, **scalars})
  changed = {k: values[k] for k in scalars if k in options} | {'max_timesteps': _NEVER}
  params = params.replace(**changed)
  seen, _ = jax.eval_shape(lambda key: env.reset_env(raw_key(key), params), jax.random.key(0))
  space = env.observation_space(params)
  dynamics = Craftax(
    env,
    params,
    box(space.low, space.high, seen.shape, np.float32),
    discrete(env.action_space(params).n),
  )
  return NextStepReset(TimeLimit(dynamics, values['max_timesteps']), values['fresh_fraction'])


@dataclasses.dataclass(frozen=True, eq=False)
class Craftax:
  """A craftax environment as Dynamics."""

  env: Any
  params: Any
  observation_space: gymnasium.spaces.Box
  action_space: gymnasium.spaces.Discrete

  @allow_rank_promotion
  def reset(self, key: Array) -> tuple[Any, TimeStep]:
    """Begin an episode."""
    observation, state = self.env.reset_env(raw_key(key), self.params)
    return as_strong_types(state), restart(to_space(self.observation_space, observation))

  @allow_rank_promotion
  def step(self, state: Any, action: Array, key: Array) -> tuple[Any, TimeStep]:
    """Take one action."""
    action = jnp.asarray(action, jnp.int32)
    observation, state, reward, dead, _ = self.env.step_env(
      raw_key(key), state, action, self.params
    )
    observation = to_space(self.observation_space, observation)
    return as_strong_types(state), transition(observation, reward, dead, False)

  def infos(self, state: Any) -> dict[str, Array]:
    """Return the achievements in percent, by the names of the library's own `info`."""
    achievements = importlib.import_module(f'{self._package}.constants').Achievement
    unlocked = 100.0 * state.achievements
    return {f'Achievements/{a.name.lower()}': unlocked[a.value] for a in achievements}

  @property
  def _package(self) -> str:
    return 'craftax.' + type(self.env).__module__.split('.')[1]

  def draw(self, state: Any) -> Array:
    """Return the player's view as a picture, [H, W, 3]."""
    renderer = importlib.import_module(f'{self._package}.renderer')
    return renderer.make_craftax_pixel_renderer(PIXELS[self._package])(state)
