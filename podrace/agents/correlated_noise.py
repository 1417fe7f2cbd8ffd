"""Noise of actions that is correlated in time, for agents with continuous actions.

Independent noise cancels over the steps, so it explores nearby only. Correlated noise explores
far (Lillicrap et al. 2016, arXiv 1509.02971, section 3; Eberhard et al. 2023, "Pink noise is all
you need", ICLR). Here it is an autoregressive process of order 1: the noise of each step has the
standard normal distribution, and the correlation of two steps of an episode is
`noise_correlation` to the power of their distance. So the policy's own distribution of each
action is kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podrace.agents import recurrent
from podrace.types import Array, TimeStep


class NoisyState(NamedTuple):
  """State of acting with correlated noise, [B, ...]."""

  memory: Any  # of the networks; () without a core
  noise: Array  # [B, n] f32 of the step before


def initial_state(agent: Any, env_id: Array) -> Any:
  """Return the state of acting before the first timestep, of an agent with `noise_correlation`."""
  memory = recurrent.initial_state(agent, env_id)
  if agent.greedy or not agent.noise_correlation:
    return memory
  return NoisyState(memory, jnp.zeros((env_id.shape[0], len(agent.actor.distribution.free))))


def draw(agent: Any, state: Any, timestep: TimeStep, key: Array) -> tuple[Any, Array]:
  """Return the memory of the networks, and the noise [B, n] of timesteps [B]."""
  shape = (timestep.step_type.shape[0], len(agent.actor.distribution.free))
  noise = jax.random.normal(key, shape)
  if not isinstance(state, NoisyState):
    return state, noise
  share = jnp.sqrt(1 - agent.noise_correlation**2)
  correlated = agent.noise_correlation * state.noise + share * noise
  return state.memory, jnp.where(timestep.first[:, None], noise, correlated)


def after(state: Any, memory: Any, noise: Array) -> Any:
  """Return the state of acting after an action."""
  return NoisyState(memory, noise) if isinstance(state, NoisyState) else memory
