"""Policies over continuous actions, and values of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import tyro
from flax import linen as nn

from podrace import distributions
from podrace.networks.layers import Dense, flat
from podrace.networks.protocol import merge_time, split_time
from podrace.networks.recurrent_body import RecurrentBody
from podrace.types import Array, TimeStep


class _Actor(nn.Module):
  settings: Actor

  @nn.compact
  def __call__(self, state: Any, timesteps: TimeStep, previous: Any = None) -> tuple[Array, Any]:
    s, length = self.settings, timesteps.reward.shape[0]
    observation = s.prepare(merge_time(timesteps.observation))[0]
    if s.core == 'none':
      x = s.make_torso()(observation)
    else:
      x = s.make_torso(hidden=())(observation)
      x, state = s.remember(s.make_core(), state, x, timesteps, previous)
      x = s.mlp(s.hidden)(x)
    size = s.distribution.size // (2 if s.deterministic else 1)
    return split_time(Dense(size, kernel_init=s.kernel_init)(x), length), state


@dataclasses.dataclass(frozen=True)
class Actor(RecurrentBody):
  """A policy over a bounded box: parameters of a tanh-Normal, or raw actions before tanh.

  A core stands before the MLP, behind the convolutions.
  """

  MODULE = _Actor

  hidden: tuple[int, ...] = (256, 256)
  activation: Literal['tanh', 'relu'] = 'relu'
  initializer: Literal['orthogonal', 'lecun'] = 'lecun'
  deterministic: Annotated[bool, tyro.conf.Suppress] = False  # the agent's choice

  @functools.cached_property
  def distribution(self) -> distributions.TanhNormal:
    """The action distribution of the policy output."""
    return distributions.squashed(self.action_space)


class _Critic(nn.Module):
  settings: Critic

  @nn.compact
  def __call__(self, seen: Any, action: Array) -> Array:
    """Inputs [B, ...], see `Critic.value`, and actions [B, n] in [-1, 1] -> [critics, B, atoms]."""
    s = self.settings
    features = s.flatten(seen) if s.core == 'none' else [seen]
    x = jnp.concatenate([*features, action], axis=-1)
    outputs = []
    for _ in range(s.critics):
      outputs.append(Dense(s.atoms, kernel_init=s.kernel_init)(s.mlp(s.hidden)(x)))
    return jnp.stack(outputs)


class _CriticMemory(nn.Module):
  settings: Critic

  @nn.compact
  def __call__(self, state: Any, timesteps: TimeStep, previous: Any = None) -> tuple[Array, Any]:
    """[T, B, ...] -> features [T, B, F] of the experience up to each timestep."""
    s = self.settings
    x = jnp.concatenate(s.flatten(merge_time(timesteps.observation)), axis=-1)
    x, state = s.remember(s.make_core(), state, x, timesteps, previous)
    return split_time(x, timesteps.reward.shape[0]), state


@dataclasses.dataclass(frozen=True)
class Critic(RecurrentBody):
  """Values of continuous actions: several critics, or the distribution of returns.

  With a core, `unroll` returns features of the experience, which `value` takes in place of
  observations. All critics share the core. The parameters are then those of `memory` and `values`.
  """

  MODULE = _Critic

  hidden: tuple[int, ...] = (256, 256)
  activation: Literal['tanh', 'relu'] = 'relu'
  initializer: Literal['orthogonal', 'lecun'] = 'lecun'
  critics: Annotated[int, tyro.conf.Suppress] = 1  # the agent's choice
  atoms: Annotated[int, tyro.conf.Suppress] = 1

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.torso not in ('auto', 'mlp'):
      raise ValueError(f'a critic is an MLP: {self.torso=}')

  @functools.cached_property
  def distribution(self) -> distributions.TanhNormal:
    """The action distribution, which maps actions to [-1, 1]."""
    return distributions.squashed(self.action_space)

  def init(self, key: Array) -> Any:
    """Return the first parameters."""
    action = jnp.zeros((1, math.prod(self.action_space.shape)))
    example = self.example()
    if self.core == 'none':
      return self.module.init(key, example.observation, action)['params']
    memory_key, values_key = jax.random.split(key)
    timesteps = jax.tree.map(lambda x: x[None], example)
    memory = _CriticMemory(self).init(memory_key, self.initial_state(1), timesteps)['params']
    features, _ = self.unroll({'memory': memory}, self.initial_state(1), timesteps)
    return {'memory': memory, 'values': self.module.init(values_key, features[0], action)['params']}

  def unroll(
    self,
    params: Any,
    state: Any,
    timesteps: TimeStep,
    key: Any = None,
    per_row: bool = False,
    previous: Any = None,
  ) -> Any:
    """Return features [T, B, F] for `value`, and the state after them. Needs a core."""
    del key, per_row
    return _CriticMemory(self).apply({'params': params['memory']}, state, timesteps, previous)

  def flatten(self, observation: Any) -> list[Array]:
    """Return the parts of observations [B, ...] as floats [B, n]."""
    return [flat(x) for x in jax.tree.leaves(self.prepare(observation)[0])]

  def value(self, params: Any, seen: Any, action: Array) -> Array:
    """Return values [critics, B, atoms].

    Args:
      params: the parameters.
      seen: observations [B, ...]; with a core, features [B, F] from `unroll`.
      action: [B, n] in [-1, 1].
    """
    of_values = params if self.core == 'none' else params['values']
    values: Any = self.module.apply({'params': of_values}, seen, action)
    return values
