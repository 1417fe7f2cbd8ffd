"""The network of LPG's agents: a policy, and a prediction without a meaning."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from flax import linen as nn

from podrace import distributions
from podrace.networks.body import Body
from podrace.networks.cores import Core
from podrace.networks.layers import Dense
from podrace.networks.predictor import check_discrete
from podrace.networks.protocol import merge_time, split_time
from podrace.types import Array, TimeStep


class PolicyPrediction(NamedTuple):
  """Outputs of the network for timesteps [T, B]."""

  policy: Array  # [T, B, A] f32 logits
  y: Array  # [T, B, Y] f32 logits


class _PolicyPredictor(nn.Module):
  settings: PolicyPredictor

  def setup(self) -> None:
    """Make the layers."""
    s = self.settings
    small = nn.initializers.truncated_normal(0.01)
    self.torso = s.make_torso()
    if s.core != 'none':
      self.rnn = Core(s.core, s.core_size)
    self.policy_head = Dense(s.distribution.size, kernel_init=small)
    self.y_head = Dense(s.predictions, kernel_init=small)

  def __call__(self, state: Any, timesteps: TimeStep) -> tuple[PolicyPrediction, Any]:
    length = timesteps.reward.shape[0]
    observation, mask = self.settings.prepare(merge_time(timesteps.observation))
    x = self.torso(observation)
    if self.settings.core != 'none':
      x, state = self.rnn(state, split_time(x, length), timesteps.first)
      x = merge_time(x)
    policy = self.policy_head(x)
    if mask is not None:
      policy = jnp.where(mask.reshape(policy.shape), policy, distributions.MASKED)
    return split_time(PolicyPrediction(policy, self.y_head(x)), length), state


@dataclasses.dataclass(frozen=True)
class PolicyPredictor(Body):
  """Torso, core and two heads, built from an environment's spaces."""

  hidden: tuple[int, ...] = (64, 64)  # none: predictions are a table over one-hot observations
  activation: Literal['tanh', 'relu'] = 'relu'
  initializer: Literal['orthogonal', 'lecun'] = 'lecun'
  predictions: int = 30  # numbers of y: as many as the rule's

  @functools.cached_property
  def module(self) -> nn.Module:
    """The flax module."""
    return _PolicyPredictor(self)

  def bind(self, observation_space: Any, action_space: Any) -> Any:
    """Return the network for these spaces."""
    check_discrete(action_space)
    return super().bind(observation_space, action_space)
