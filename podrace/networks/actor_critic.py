"""The actor-critic network: a policy and a value."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from podrace import distributions
from podrace.networks.body import Body
from podrace.networks.cores import remember
from podrace.networks.initializers import orthogonal
from podrace.networks.layers import Dense
from podrace.networks.protocol import PolicyValue, merge_time, split_time
from podrace.types import TimeStep


class _ActorCritic(nn.Module):
  settings: ActorCritic

  def setup(self) -> None:
    s = self.settings
    init = s.kernel_init
    self.torso = s.make_torso()
    if not s.shares_torso:
      self.value_torso = s.make_torso()
    self.rnn = s.make_core()
    small = s.initializer == 'orthogonal'
    size = s.distribution.size
    if s.has_log_std:
      size //= 2
      start = nn.initializers.constant(s.initial_log_std)
      self.log_std = self.param('log_std', start, (size,))
    self.policy_head = Dense(size, kernel_init=orthogonal(0.01) if small else init)
    self.value_head = Dense(1, kernel_init=orthogonal(1.0) if small else init)

  def __call__(self, state: Any, timesteps: TimeStep) -> tuple[PolicyValue, Any]:
    """[T, B, ...]; T is 1 to act."""
    length = timesteps.reward.shape[0]
    merged = merge_time(timesteps.observation)
    observation, mask = self.settings.prepare(merged)
    policy = self.torso(observation)
    value = policy if self.settings.shares_torso else self.value_torso(observation)
    if self.rnn is not None:
      policy, state = remember(self.rnn, state, policy, timesteps)
      value = policy
    logits = self.policy_head(policy)
    if self.settings.has_log_std:
      logits = jnp.concatenate([logits, jnp.broadcast_to(self.log_std, logits.shape)], axis=-1)
    if mask is not None:
      logits = jnp.where(mask.reshape(logits.shape), logits, distributions.MASKED)
    output = PolicyValue(logits, self.value_head(value)[..., 0])
    return split_time(output, length), state


@dataclasses.dataclass(frozen=True)
class ActorCritic(Body):
  """Torso, core and two heads, built from an environment's spaces; a `Network`."""

  MODULE = _ActorCritic

  shared: bool = True  # policy and value share the torso (always so for images and with a core)
  squash: bool = False
  # ^ continuous actions: tanh-Normal, with a standard deviation from the network
  initial_log_std: float = 0.0
  # ^ continuous actions without squash: first log standard deviation, in half ranges of the box

  @functools.cached_property
  def distribution(self) -> distributions.Distribution:
    """The action distribution that goes with this network's policy output."""
    return distributions.for_space(self.action_space, self.squash, self.scaling == 'space')

  @property
  def has_log_std(self) -> bool:
    """Whether log standard deviations are parameters of their own."""
    return type(self.distribution) is distributions.Normal

  @property
  def shares_torso(self) -> bool:
    """Whether policy and value share the torso."""
    return self.shared or self.core != 'none' or self.image_torso != 'mlp'
