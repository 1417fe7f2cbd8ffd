"""Navix: MiniGrid's rooms (github.com/epignatelli/navix), which has truncation by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import navix
from navix import observations
from navix.entities import EntityIds
from navix.environments.environment import StepType, Timestep
from navix.rendering.cache import RenderingCache

from podrace.envs.adapters.adapt import (
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
from podrace.errors import UnknownName
from podrace.types import Array, Environment, TimeStep

OBSERVATIONS = (
  'symbolic',
  'symbolic_first_person',
  'categorical',
  'categorical_first_person',
  'rgb',
  'rgb_first_person',
)
HIGHEST = int(EntityIds.PLAYER)  # largest entity; colours and states have fewer values
OUTSIDE = 100  # cells of `categorical_first_person` beyond the grid: the default of navix's `crop`


@allow_rank_promotion
def make(name: str, options: Mapping[str, Value]) -> Environment:
  """Make a room by its id.

  Options: `observation`, one of OBSERVATIONS (first person is the view of MiniGrid's agent, all
  others show the whole grid), and `max_steps`, by default MiniGrid's 4 * height * width.
  """
  steps = navix.make(name, max_steps=None).max_steps
  defaults: dict[str, Value] = {
    'observation': 'symbolic',
    'max_steps': steps,
    'fresh_fraction': 0.25,  # faster than 1, see benchmarks/resets.py
  }
  values = read_options(f'navix:{name}', options, defaults)
  kind = values['observation']
  if kind not in OBSERVATIONS:
    raise UnknownName(f'navix has no observation {kind!r}; it has {", ".join(OBSERVATIONS)}')
  if values['max_steps'] < 1:
    raise UnknownName(f'an episode has at least 1 step, not {values["max_steps"]}')
  env = navix.make(name, max_steps=values['max_steps'], observation_fn=getattr(observations, kind))
  seen = jax.eval_shape(env.reset, raw_key(jax.random.key(0))).observation
  drawn = kind.startswith('rgb')
  lowest = -1 if kind.startswith('categorical') else 0  # a wall
  highest = OUTSIDE if kind == 'categorical_first_person' else 255 if drawn else HIGHEST
  space = box(lowest, highest, seen.shape, seen.dtype)
  locks = name.startswith('Navix-KeyCorridor')
  dynamics = Navix(env, space, discrete(env.action_space.n), drawn, locks)
  return NextStepReset(dynamics, values['fresh_fraction'])


@dataclasses.dataclass(frozen=True, eq=False)
class Navix:
  """A room as Dynamics. Its state is navix's time and state, without pictures unless drawn."""

  env: navix.environments.Environment
  observation_space: gymnasium.spaces.Box
  action_space: gymnasium.spaces.Discrete
  draws: bool
  locks: bool  # locked doors are open when an episode begins, see `_lock`

  @allow_rank_promotion
  def reset(self, key: Array) -> tuple[Any, TimeStep]:
    """Begin an episode."""
    start = self.env.reset(raw_key(key))
    if self.locks:
      state = _lock(start.state)
      start = start.replace(state=state, observation=self.env.observation_fn(state))
    return self._state(start), restart(to_space(self.observation_space, start.observation))

  @allow_rank_promotion
  def step(self, state: Any, action: Array, key: Array) -> tuple[Any, TimeStep]:
    """Take one action."""
    time, inner = state
    before = Timestep(
      t=time,
      observation=jnp.zeros(self.observation_space.shape, self.observation_space.dtype),
      action=jnp.int32(0),
      reward=jnp.float32(0),
      step_type=StepType.TRANSITION,
      state=inner.replace(key=raw_key(key)),
    )
    # `env.step` would reset by itself, and compute that on every step under vmap.
    after = self.env._step(before, jnp.asarray(action, jnp.int32))
    observation = to_space(self.observation_space, after.observation)
    return self._state(after), transition(
      observation, after.reward, after.is_termination(), after.is_truncation()
    )

  def draw(self, state: Any) -> Array:
    """Draw the whole room, [H, W, 3] u8."""
    _, inner = state
    return observations.rgb(inner.replace(cache=RenderingCache.init(inner.grid)))

  def _state(self, timestep: Timestep) -> Any:
    state = timestep.state if self.draws else timestep.state.replace(cache=None)
    return as_strong_types((timestep.t, state))


def _lock(state: Any) -> Any:
  """Close locked doors.

  navix 0.7.4 creates those of KeyCorridor with `open` 2. That lets the agent pass without the key,
  and is the byte 254 in observations.
  """
  doors = state.entities['door']
  return state.replace(entities={**state.entities, 'door': doors.replace(open=doors.open % 2)})
