"""The network of agents that learn by a rule: policy, free predictions, and action values."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from podrace import distributions
from podrace.networks.body import Body
from podrace.networks.cores import remember
from podrace.networks.layers import Dense, product
from podrace.networks.protocol import merge_time, split_time
from podrace.types import Array, TimeStep


class Predictions(NamedTuple):
  """Outputs of the network for timesteps [T, B]."""

  policy: Array  # [T, B, A] f32 logits
  y: Array  # [T, B, Y] f32 logits
  z: Array  # [T, B, A, Y] f32 logits of each action; [T, B, Y] of one
  q: Array  # [T, B, A, bins] or [T, B, bins] f32 logits over `Predictor.support`
  next_policy: Array  # [T, B, A, A] or [T, B, A] f32 logits of the policy one step later


class _Predictor(nn.Module):
  settings: Predictor

  def setup(self) -> None:
    s = self.settings
    actions, small = s.distribution.size, nn.initializers.truncated_normal(0.01)
    self.torso = s.make_torso(hidden=s.hidden[:-1])
    # Linear, as in google-deepmind/disco_rl.
    self.features = [Dense(n, kernel_init=s.kernel_init) for n in s.hidden[-1:]]
    self.rnn = s.make_core()
    self.policy_head = Dense(actions, kernel_init=small)
    self.y_head = Dense(s.predictions, kernel_init=small)
    self.root = Dense(s.model_size, kernel_init=s.kernel_init)
    self.model = Dense(4 * s.model_size, kernel_init=s.kernel_init)
    begin = nn.initializers.truncated_normal(1 / math.sqrt(actions + s.model_size))
    self.code = self.param('code', begin, (actions, 4 * s.model_size))
    self.z_head, self.q_head = self._head(s.predictions), self._head(s.bins)
    self.next_head = self._head(actions)

  def _head(self, size: int) -> nn.Module:
    s = self.settings
    return nn.Sequential([s.mlp(s.head_hidden), Dense(size, kernel_init=s.kernel_init)])

  def __call__(
    self, state: Any, timesteps: TimeStep, action: Array | None = None
  ) -> tuple[Predictions, Any]:
    length = timesteps.reward.shape[0]
    observation, mask = self.settings.prepare(merge_time(timesteps.observation))
    x = self.torso(observation)
    for layer in self.features:
      x = layer(x)
    x, state = remember(self.rnn, state, x, timesteps)
    policy = self.policy_head(x)
    if mask is not None:
      policy = jnp.where(mask.reshape(policy.shape), policy, distributions.MASKED)
    cell = self.root(x)
    gates = self.model(jnp.tanh(cell))
    if action is None:  # all actions: each adds its row of `code` to the gates
      after = after_action(gates[:, None] + self.code[None], cell[:, None])
    else:
      code = jax.nn.one_hot(action.reshape(-1), self.code.shape[0])
      after = after_action(gates + product(code, self.code), cell)
    z, q, following = (
      head(after.reshape(-1, after.shape[-1])).reshape(*after.shape[:-1], -1)
      for head in (self.z_head, self.q_head, self.next_head)
    )
    return split_time(Predictions(policy, self.y_head(x), z, q, following), length), state


def after_action(gates: Array, cell: Array) -> Array:
  """Return the hidden state after an LSTM step, from gates [..., 4 M] and a cell [..., M]."""
  i, f, g, o = jnp.split(gates, 4, axis=-1)
  cell = nn.sigmoid(f + 1.0) * cell + nn.sigmoid(i) * jnp.tanh(g)
  return nn.sigmoid(o) * jnp.tanh(cell)


@dataclasses.dataclass(frozen=True)
class Predictor(Body):
  """Torso, core, and heads. Heads of single actions follow a step of a model (Oh et al. 2025)."""

  MODULE, DISCRETE = _Predictor, True

  hidden: tuple[int, ...] = (512, 512)  # layer widths of the MLP behind the torso
  activation: Literal['tanh', 'relu'] = 'relu'  # activation of the layers
  initializer: Literal['orthogonal', 'lecun'] = 'lecun'  # initialiser of the kernels
  predictions: int = 600  # numbers of y, and of z for each action: as many as the rule's
  model_size: int = 128  # units of the model's LSTM
  head_hidden: tuple[int, ...] = (128,)
  # ^ layer widths before each output of an action, each its own
  bins: int = 601  # atoms of a value, evenly spaced in its rescaled form
  max_value: float = 300.0
  # ^ largest atom of a value in its rescaled form; the smallest is -max_value

  @property
  def support(self) -> Array:
    """[bins] rescaled returns (`returns.rescale`)."""
    return jnp.linspace(-self.max_value, self.max_value, self.bins)

  def unroll_taken(
    self, params: Any, state: Any, timesteps: TimeStep, action: Array
  ) -> Predictions:
    """Unroll for the actions [T, B] only, at a fraction of the cost."""
    predictions: Predictions = self.module.apply({'params': params}, state, timesteps, action)[0]
    return predictions
