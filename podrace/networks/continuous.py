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
from podrace.networks.body import Body
from podrace.networks.layers import Dense, flat
from podrace.networks.protocol import merge_time, split_time
from podrace.networks.torsos import Mlp
from podrace.types import Array, TimeStep


class _Actor(nn.Module):
  settings: Actor

  @nn.compact
  def __call__(self, state: Any, timesteps: TimeStep) -> tuple[Array, Any]:
    s, length = self.settings, timesteps.reward.shape[0]
    x = s.make_torso()(s.prepare(merge_time(timesteps.observation))[0])
    size = s.distribution.size // (2 if s.deterministic else 1)
    return split_time(Dense(size, kernel_init=s.kernel_init)(x), length), state


@dataclasses.dataclass(frozen=True)
class Actor(Body):
  """A policy over a bounded box: parameters of a tanh-Normal, or raw actions before tanh."""

  MODULE = _Actor

  hidden: tuple[int, ...] = (256, 256)
  activation: Literal['tanh', 'relu'] = 'relu'
  initializer: Literal['orthogonal', 'lecun'] = 'lecun'
  deterministic: Annotated[bool, tyro.conf.Suppress] = False  # the agent's choice

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.core != 'none':
      raise ValueError(f'an actor of continuous actions has no memory, not the core {self.core!r}')

  @functools.cached_property
  def distribution(self) -> distributions.TanhNormal:
    """The action distribution of the policy output."""
    return distributions.squashed(self.action_space)


class _Critic(nn.Module):
  settings: Critic

  @nn.compact
  def __call__(self, observation: Any, action: Array) -> Array:
    """Observations [B, ...] and actions [B, n] in [-1, 1] -> [critics, B, atoms]."""
    s = self.settings
    features = [flat(x) for x in jax.tree.leaves(s.prepare(observation)[0])]
    x = jnp.concatenate([*features, action], axis=-1)
    outputs = []
    for _ in range(s.critics):
      y = Mlp(s.hidden, s.activate, s.kernel_init)(x)
      outputs.append(Dense(s.atoms, kernel_init=s.kernel_init)(y))
    return jnp.stack(outputs)


@dataclasses.dataclass(frozen=True)
class Critic(Body):
  """Values of continuous actions: several critics, or the distribution of returns."""

  MODULE = _Critic

  hidden: tuple[int, ...] = (256, 256)
  activation: Literal['tanh', 'relu'] = 'relu'
  initializer: Literal['orthogonal', 'lecun'] = 'lecun'
  critics: Annotated[int, tyro.conf.Suppress] = 1  # the agent's choice
  atoms: Annotated[int, tyro.conf.Suppress] = 1

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.core != 'none' or self.torso not in ('auto', 'mlp'):
      raise ValueError(f'a critic is an MLP: {self.core=} {self.torso=}')

  @functools.cached_property
  def distribution(self) -> distributions.TanhNormal:
    """The action distribution, which maps actions to [-1, 1]."""
    return distributions.squashed(self.action_space)

  def init(self, key: Array) -> Any:
    """Return the first state of training."""
    action = jnp.zeros((1, math.prod(self.action_space.shape)))
    return self.module.init(key, self.example().observation, action)['params']

  def value(self, params: Any, observation: Any, action: Array) -> Array:
    """[critics, B, atoms] of observations [B, ...] and actions [B, n] in [-1, 1]."""
    values: Any = self.module.apply({'params': params}, observation, action)
    return values
