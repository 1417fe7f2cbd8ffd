"""The network of LPG's agents: a policy, and a prediction without a meaning."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from flax import linen as nn

from podrace import distributions
from podrace.networks.body import Body
from podrace.networks.cores import remember
from podrace.networks.layers import Dense
from podrace.networks.protocol import merge_time, split_time
from podrace.types import Array, TimeStep


class PolicyPrediction(NamedTuple):
  """Outputs of the network for timesteps [T, B]."""

  policy: Array  # [T, B, A] f32 logits
  y: Array  # [T, B, Y] f32 logits


class _PolicyPredictor(nn.Module):
  settings: PolicyPredictor

  def setup(self) -> None:
    s = self.settings
    small = nn.initializers.truncated_normal(0.01)
    self.torso = s.make_torso()
    self.rnn = s.make_core()
    self.policy_head = Dense(s.distribution.size, kernel_init=small)
    self.y_head = Dense(s.predictions, kernel_init=small)

  def __call__(self, state: Any, timesteps: TimeStep) -> tuple[PolicyPrediction, Any]:
    length = timesteps.reward.shape[0]
    observation, mask = self.settings.prepare(merge_time(timesteps.observation))
    x = self.torso(observation)
    x, state = remember(self.rnn, state, x, timesteps)
    policy = self.policy_head(x)
    if mask is not None:
      policy = jnp.where(mask.reshape(policy.shape), policy, distributions.MASKED)
    return split_time(PolicyPrediction(policy, self.y_head(x)), length), state


@dataclasses.dataclass(frozen=True)
class PolicyPredictor(Body):
  """Torso, core and two heads, built from an environment's spaces."""

  MODULE, DISCRETE = _PolicyPredictor, True

  hidden: tuple[int, ...] = (64, 64)
  # ^ layer widths of the MLP behind the torso; none: a table over one-hot observations
  activation: Literal['tanh', 'relu'] = 'relu'  # activation of the layers
  initializer: Literal['orthogonal', 'lecun'] = 'lecun'  # initialiser of the kernels
  predictions: int = 30  # numbers of y: as many as the rule's
