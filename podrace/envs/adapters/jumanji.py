"""Jumanji: combinatorial problems, puzzles and games (github.com/instadeepai/jumanji).

Jumanji ends an episode at its `time_limit` with discount 0, like a termination. So the library is
given a limit that is one step longer than ours, which truncates. One step is enough, and keeps
the bounds and arrays that the library derives from the limit.

Left out: environments with one reward per agent (Connector, LevelBasedForaging,
SearchAndRescue), and Sokoban, which downloads its levels when it is made.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import gymnasium
import jax.numpy as jnp
import jumanji
import numpy as np
from jumanji import specs

from podrace.envs.adapters.adapt import (
  TimeLimit,
  allow_rank_promotion,
  as_strong_types,
  box,
  discrete,
  raw_key,
  to_space,
)
from podrace.envs.base import Dynamics, NextStepReset, restart, transition
from podrace.envs.env_names import read_options
from podrace.envs.options import Value
from podrace.envs.spaces import MASK
from podrace.envs.timestep_rules import choices_of
from podrace.types import Array, Environment, TimeStep

# Episodes of fewer than four steps (one wrong move ends them) would use a pool's states twice. All
# environments without a time limit count as such.
_ENDS_AT_ONCE = ('Cleaner-v0',)


@allow_rank_promotion
def make(name: str, options: Mapping[str, Value]) -> Environment:
  """Make a jumanji environment by its id; the option is its time limit, if it has one."""
  env = jumanji.make(name)
  defaults: dict[str, Value] = {'fresh_fraction': 1.0}
  if hasattr(env, 'time_limit'):
    defaults['time_limit'] = int(env.time_limit)
    if name not in _ENDS_AT_ONCE:
      defaults['fresh_fraction'] = 0.25
  values = read_options(f'jumanji:{name}', options, defaults)
  dynamics: Dynamics
  if 'time_limit' in values:
    dynamics = TimeLimit(
      _dynamics(name, jumanji.make(name, time_limit=values['time_limit'] + 1)),
      values['time_limit'],
    )
  else:
    dynamics = _dynamics(name, env)
  return NextStepReset(dynamics, values['fresh_fraction'])


def _dynamics(name: str, env: jumanji.Environment) -> Jumanji:
  space = observation_space(env.observation_spec)
  if name == 'TSP-v1':  # before the first city the position is -1, which its spec leaves out
    space['position'] = box(-1, space['position'].n - 1, (), np.int32)
  mask = space.get(MASK) if isinstance(space, gymnasium.spaces.Dict) else None
  actions: Any = env.action_spec
  parts: tuple[int, ...] = ()
  if isinstance(actions, specs.MultiDiscreteArray) and mask is not None:
    numbers = tuple(int(n) for n in np.ravel(actions.num_values))
    if mask.shape == numbers and math.prod(numbers) != sum(numbers):
      actions, parts = specs.DiscreteArray(math.prod(numbers)), numbers
  return Jumanji(env, space, action_space(actions, mask), parts)


def observation_space(spec: Any) -> Any:
  """Return the space of a spec; a spec with fields becomes a Dict."""
  if isinstance(spec, specs.DiscreteArray):
    return discrete(spec.num_values)
  if isinstance(spec, specs.BoundedArray):
    return box(spec.minimum, spec.maximum, spec.shape, spec.dtype)
  if isinstance(spec, specs.Array):
    return _unbounded(spec)
  fields = {k: observation_space(v) for k, v in spec._specs.items()}
  count = fields.get('step_count')
  if isinstance(count, gymnasium.spaces.Discrete):  # it is a number, not a category
    fields['step_count'] = box(0, int(count.n) - 1, (), np.int32)
  return gymnasium.spaces.Dict(fields)


def action_space(spec: Any, mask: Any = None) -> gymnasium.Space:
  """Return a Discrete, a MultiDiscrete (also for bounded integers from 0) or a Box.

  A `mask` with a row for each integer says how many there are: MultiCVRP's bound is one too large.
  """
  if isinstance(spec, specs.DiscreteArray):
    return discrete(spec.num_values)
  if isinstance(spec, specs.MultiDiscreteArray):
    return gymnasium.spaces.MultiDiscrete(np.asarray(spec.num_values), dtype=np.int32)
  if np.issubdtype(spec.dtype, np.integer):
    has_rows = mask is not None and mask.shape[:-1] == spec.shape
    largest = mask.shape[-1] - 1 if has_rows else np.asarray(spec.maximum, np.int32)
    numbers = np.broadcast_to(largest + 1, spec.shape)
    return gymnasium.spaces.MultiDiscrete(numbers, dtype=np.int32)
  return box(spec.minimum, spec.maximum, spec.shape, np.float32)


def _unbounded(spec: specs.Array) -> gymnasium.spaces.Box:
  if np.issubdtype(spec.dtype, np.integer):
    info = np.iinfo(spec.dtype)
    return box(info.min, info.max, spec.shape, spec.dtype)
  return box(-np.inf, np.inf, spec.shape, spec.dtype)


def _as_dict(space: gymnasium.Space, observation: Any) -> Any:
  """Convert nested named tuples and dataclasses to dicts."""
  if not isinstance(space, gymnasium.spaces.Dict):
    return observation
  return {k: _as_dict(sub, getattr(observation, k)) for k, sub in space.spaces.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class Jumanji:
  """A jumanji environment as Dynamics; its observation keeps `action_mask` where it has one."""

  env: jumanji.Environment
  observation_space: gymnasium.Space
  action_space: gymnasium.Space
  parts: tuple[int, ...] = ()  # choices of each part of an action that the mask judges as a whole

  @allow_rank_promotion
  def reset(self, key: Array) -> tuple[Any, TimeStep]:
    """Begin an episode."""
    state, timestep = self.env.reset(raw_key(key))
    return as_strong_types(state), restart(self._observe(timestep.observation))

  @allow_rank_promotion
  def step(self, state: Any, action: Array, key: Array) -> tuple[Any, TimeStep]:
    """Take one action."""
    if hasattr(state, 'key'):  # a search that steps twice from a state must not foresee chance
      state = dataclasses.replace(state, key=raw_key(key))
    if self.parts:
      action = jnp.stack(jnp.unravel_index(action, self.parts))
    state, timestep = self.env.step(state, jnp.asarray(action, self.env.action_spec.dtype))
    terminated = timestep.last() & (timestep.discount == 0)
    observation = self._observe(timestep.observation)
    return as_strong_types(state), transition(
      observation, timestep.reward, terminated, timestep.last() & ~terminated
    )

  def _observe(self, observation: Any) -> Any:
    observation = _as_dict(self.observation_space, observation)
    if isinstance(observation, dict) and MASK in observation:
      # A trapped snake is allowed nothing. All actions end the episode, so all are allowed. Of
      # several agents each has a row.
      mask = observation[MASK]
      choices = choices_of(self.action_space)
      each = mask.ndim > 1 and len(choices) > 1 and mask.size == sum(choices)
      observation = {
        **observation,
        MASK: mask | ~jnp.any(mask, -1 if each else None, keepdims=True),
      }
    return to_space(self.observation_space, observation)
