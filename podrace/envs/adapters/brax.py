"""Brax: physics (github.com/google/brax).

Brax knows time only in its EpisodeWrapper, which is not used here. `state.done` of the bare
environment is termination. The limit, brax's usual 1000 steps, truncates.

Left out: swimmer, which brax 0.14 writes with a form of `jnp.clip` that JAX no longer has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import brax.envs
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from podrace.envs.adapters.adapt import (
  TimeLimit,
  allow_rank_promotion,
  as_strong_types,
  box,
  to_space,
)
from podrace.envs.base import NextStepReset, restart, transition
from podrace.envs.env_names import read_options
from podrace.envs.options import Value
from podrace.errors import UnknownName
from podrace.types import Array, Environment, TimeStep

BACKENDS = ('generalized', 'positional', 'spring', 'mjx')
_SOME_BACKENDS: Mapping[str, tuple[str, ...]] = {
  'fast': (),  # a stub of brax's own tests, which simulates nothing
}


@allow_rank_promotion
def make(name: str, options: Mapping[str, Value]) -> Environment:
  """Make a brax environment by its name; options are the backend and the time limit."""
  defaults: dict[str, Value] = {'episode_length': 1000, 'fresh_fraction': 1.0}
  backends = _SOME_BACKENDS.get(name, BACKENDS)
  if backends:
    defaults['backend'] = 'generalized'
  values = read_options(f'brax:{name}', options, defaults)
  if backends and values['backend'] not in backends:
    raise UnknownName(
      f'brax:{name} has no backend {values["backend"]!r}; it has {", ".join(backends)}'
    )
  env = brax.envs.get_environment(name, **{k: values[k] for k in ('backend',) if k in values})
  observation = jax.eval_shape(env.reset, jax.random.key(0)).obs
  dynamics = Brax(
    env,
    box(-np.inf, np.inf, observation.shape, np.float32),
    box(-1, 1, (env.action_size,), np.float32),
  )
  return NextStepReset(TimeLimit(dynamics, values['episode_length']), values['fresh_fraction'])


@dataclasses.dataclass(frozen=True, eq=False)
class Brax:
  """A brax environment as Dynamics; its state is the physics alone, without metrics and info."""

  env: brax.envs.Env
  observation_space: gymnasium.spaces.Box
  action_space: gymnasium.spaces.Box

  @allow_rank_promotion
  def reset(self, key: Array) -> tuple[Any, TimeStep]:
    """Begin an episode."""
    state = self.env.reset(key)
    return as_strong_types(state.pipeline_state), restart(
      to_space(self.observation_space, state.obs)
    )

  @allow_rank_promotion
  def step(self, state: Any, action: Array, key: Array) -> tuple[Any, TimeStep]:
    """Take one action."""
    del key  # brax is deterministic
    zero = jnp.float32(0)
    before = brax.envs.State(state, jnp.zeros(self.observation_space.shape), zero, zero)
    after = self.env.step(before, jnp.asarray(action, jnp.float32))
    observation = to_space(self.observation_space, after.obs)
    timestep = transition(observation, after.reward, after.done > 0.5, False)
    return as_strong_types(after.pipeline_state), timestep
