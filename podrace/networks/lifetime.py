"""Networks of agents that learn over lifetimes: a policy for each, and a memory across episodes."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from podrace import distributions
from podrace.networks.body import Body
from podrace.networks.cores import Core
from podrace.networks.layers import Dense
from podrace.networks.protocol import merge_time, split_time
from podrace.types import Array, TimeStep


class _Policy(nn.Module):
  settings: Policy

  @nn.compact
  def __call__(self, state: Any, timesteps: TimeStep) -> tuple[Array, Any]:
    s, length = self.settings, timesteps.reward.shape[0]
    observation, mask = s.prepare(merge_time(timesteps.observation))
    x, small = s.make_torso()(observation), nn.initializers.truncated_normal(0.01)
    x = x @ self.param('kernel', small, (x.shape[-1], s.distribution.size))
    if mask is not None:
      x = jnp.where(mask.reshape(x.shape), x, distributions.MASKED)
    return split_time(x, length), state


@dataclasses.dataclass(frozen=True)
class Policy(Body):
  """Logits [T, B, A] of discrete actions; without hidden layers a table of one-hot observations.

  The last layer has no bias: a table's rows share nothing.
  """

  MODULE, DISCRETE = _Policy, True

  hidden: tuple[int, ...] = ()  # layer widths of the MLP behind the torso

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.core != 'none':
      raise ValueError(
        f'the policy of a lifetime has no memory of its own, not the core {self.core!r}'
      )


class _LifetimeNetwork(nn.Module):
  settings: LifetimeNetwork

  @nn.compact
  def __call__(
    self, state: Any, timesteps: TimeStep, action: Array | None = None, begins: Array | None = None
  ) -> tuple[Array, Any]:
    s, t = self.settings, timesteps
    length = t.reward.shape[0]
    code = jnp.zeros((*t.reward.shape, s.distribution.size))
    if action is not None:  # the action before FIRST was ignored
      code = jax.nn.one_hot(action, s.distribution.size) * (1.0 - t.first)[..., None]
    x = split_time(s.make_torso()(s.prepare(merge_time(t.observation))[0]), length)
    numbers = jnp.stack([t.reward, 1.0 - t.discount, 1.0 * t.first, 1.0 * t.last], axis=-1)
    x = jnp.concatenate([x, code, numbers], axis=-1)
    if s.core != 'none':
      first = jnp.zeros_like(t.first) if begins is None else begins
      remembered, state = Core(s.core, s.core_size)(state, x, first)
      x = jnp.concatenate([x, remembered], axis=-1)
    small = nn.initializers.truncated_normal(0.01)
    return split_time(Dense(1, kernel_init=small)(merge_time(x))[..., 0], length), state


@dataclasses.dataclass(frozen=True)
class LifetimeNetwork(Body):
  """One number for each timestep [T, B], from the lifetime before it, across episodes.

  Its inputs are the observation, the action before it, the reward, and whether the episode ended.
  Its core is reset where a lifetime begins, not where an episode does. The last layer sees the
  newest step besides the core's output. Without a core it sees the newest step only.
  """

  MODULE = _LifetimeNetwork

  hidden: tuple[int, ...] = (32,)  # layer widths of the MLP behind the torso
  activation: Literal['tanh', 'relu'] = 'relu'  # activation of the layers
  core: Literal['none', 'gru', 'lstm'] = 'lstm'  # recurrent core, for tasks that need memory
  core_size: int = 32  # units of the recurrent core

  def recall(
    self, params: Any, state: Any, timesteps: TimeStep, action: Array, begins: Array
  ) -> tuple[Array, Any]:
    """Return numbers [T, B] f32, and the state after them.

    `action` [T, B] i32 are the actions before the timesteps, and `begins` [T, B] is true where a
    lifetime begins.
    """
    outputs: tuple[Array, Any] = self.module.apply(
      {'params': params}, state, timesteps, action, begins
    )
    return outputs
