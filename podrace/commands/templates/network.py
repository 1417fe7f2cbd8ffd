"""NAME: a perceptron in Flax, as a start for a network of your own.

Its parts are explained in docs/own.md. `podrace train --agent FILE:Agent` trains IMPALA with it.
"""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from podrace import distributions
from podrace.agents.impala import Impala
from podrace.networks import PolicyValue, unroll_merged
from podrace.types import TimeStep


@dataclasses.dataclass(frozen=True)
class NAME:
  """Settings; each is a flag, as --agent.network.width."""

  width: int = 64
  observation_space: Any = None  # set by `bind`
  action_space: Any = None

  def bind(self, observation_space, action_space):
    """Return the network for the spaces of an environment."""
    if not observation_space.shape:  # a Dict has one space for each array
      raise ValueError(f'this network takes one array, not {observation_space}')
    return dataclasses.replace(self, observation_space=observation_space, action_space=action_space)

  @property
  def distribution(self):
    """The distribution of actions."""
    return distributions.for_space(self.action_space)

  @property
  def module(self):
    """The Flax module."""
    outputs = self.distribution.size + 1  # the policy's numbers, and the value
    return nn.Sequential([nn.Dense(self.width), nn.relu, nn.Dense(outputs)])

  def example(self):
    """Return a time step to start the recurrent state from."""
    zeros = jnp.zeros([1, *self.observation_space.shape])
    return TimeStep(zeros, jnp.zeros([1]), jnp.ones([1]), jnp.zeros([1], jnp.int8))

  def init(self, key):
    """Return the parameters."""
    return self.module.init(key, jnp.zeros([1, math.prod(self.observation_space.shape)]))

  def initial_state(self, batch_size):
    """Return the recurrent state at the start of an episode."""
    return ()  # a recurrent network has arrays [batch_size, ...]

  def step(self, params, state, timestep):
    """Return policy and value for one time step of a batch, and the next state."""
    x = timestep.observation.reshape(timestep.reward.shape[0], -1).astype(jnp.float32)
    out = self.module.apply(params, x)
    return PolicyValue(out[:, :-1], out[:, -1]), state

  def unroll(self, params, state, timesteps):
    """Return policies and values for time steps [T, B, ...], and the next state."""
    return unroll_merged(self, params, state, timesteps)


@dataclasses.dataclass(frozen=True)
class Agent(Impala):
  """IMPALA with this network."""

  network: NAME = NAME()
  learning_rate: float = 3e-3
