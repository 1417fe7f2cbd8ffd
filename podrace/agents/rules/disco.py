"""The rule of DiscoRL (Oh et al. 2025, Nature).

From a trajectory and the agent's predictions in it, a rule makes targets of the policy and of two
predictions, y and z, with no meaning but the one that the rule gives them. One LSTM runs backwards
over the trajectory, as returns do. A second one takes a step with each update, over the lifetime of
an agent. A rule depends neither on the number of actions nor on observations.

Everything is a pure function of `params`, the arrays of the file under their names there, and of
`state`. `targets` and `remember` are two functions because a mean over devices belongs between
them; `update` is both. Names of arrays are those of google-deepmind/disco_rl's released weights.
Sizes may differ.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from podrace.agents.rules.layers import (
  RuleParams,
  backwards,
  dense,
  embed,
  embedding,
  initial,
  lstm,
  with_biases,
)
from podrace.agents.value_based import select_action
from podrace.types import Array

SOURCE = 'https://raw.githubusercontent.com/google-deepmind/disco_rl/main/disco_rl/update_rules/weights/disco_103.npz'
HIDDEN = 'lstm/~/meta_lstm/~unroll'  # of the LSTM over the lifetime
REGULARISERS = {  # metrics of an agent that learns by it -> the release's weights in meta-training
  'y_entropy': -1e-3,
  'z_entropy': -1e-3,
  'policy_target_square': 1e-3,
  'y_target_square': 1e-3,
  'z_target_square': 1e-3,
  'target_divergence': 1e-2,
}
BASE = 23  # numbers that describe a step, without the numbers pooled over the actions
EACH = 9  # numbers that describe an action in a step


class Predicted(NamedTuple):
  """An agent's predictions at timesteps, as inputs of a rule."""

  policy: Array  # [T+1, B, A] f32 logits
  y: Array  # [T+1, B, Y] f32 logits
  z: Array  # [T+1, B, A, Y] f32 logits


class DiscoInputs(NamedTuple):
  """Inputs of a rule, from a trajectory of T steps."""

  online: Predicted
  target: Predicted  # by parameters that follow the online ones slowly
  behaviour: Array  # [T, B, A] f32 logits that the actions were drawn by
  action: Array  # [T, B] i32
  reward: Array  # [T, B] f32
  last: Array  # [T, B] bool: the episode ends with the step
  value: Array  # [T+1, B] f32
  advantage: Array  # [T, B] f32 of the action
  scaled_advantage: Array  # [T, B] f32 the same, of a mean of 0 and a variance of 1
  q: Array  # [T, B, A] f32 values of actions
  advantages: Array  # [T, B, A] f32 of all actions
  scaled_advantages: Array  # [T, B, A] f32


class DiscoRuleState(NamedTuple):
  """A rule's memory of an agent's lifetime, [M] each."""

  hidden: Array
  cell: Array


class DiscoTargets(NamedTuple):
  """Where the predictions should move: logits, of which the loss is a KL divergence."""

  policy: Array  # [T, B, A] f32
  y: Array  # [T, B, Y] f32
  z: Array  # [T, B, Y] f32 of the action that was taken


# --- shapes ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Widths of a rule's layers; the defaults are Disco103's."""

  predictions: int = 600  # numbers of the prediction y (Y)
  trajectory: int = 256  # units of the LSTM over a trajectory
  lifetime: int = 128  # units of the LSTM over the lifetime (M)
  embedding: int = 16  # units of a prediction before it becomes one number
  channels: int = 16  # channels of an action before the mean of all actions is added
  pooled: int = 2  # channels of the mean over actions
  policy: int = 16  # units of an action before it becomes its target
  lifetime_embedding: int = 16  # units of a prediction, in the inputs of the LSTM over the lifetime
  lifetime_channels: int = 16  # channels of an action, in the inputs of the LSTM over the lifetime
  lifetime_pooled: int = 2
  # ^ channels of the mean over actions, in the inputs of the LSTM over the lifetime
  summary: int = 16  # numbers of the summary of an update

  def shapes(self) -> dict[str, tuple[int, ...]]:
    """The shape of each array, by its name in the file."""
    rows, h = BASE + 2 * self.pooled, self.trajectory
    lifetime_rows = BASE + 2 * self.lifetime_pooled + 2
    both = 2 * (h + self.pooled)
    linear = {
      'lstm/linear': (self.lifetime, h),
      'lstm/linear_1': (h, 1),
      'lstm/linear_2': (h, self.predictions),
      'lstm/linear_3': (h, self.predictions),
      'lstm/linear_4': (self.policy, 1),
      'lstm/lstm/linear': (rows + h, 4 * h),
      **_embeddings('lstm', self.predictions, self.embedding),
      **_pooling('lstm', self.channels, self.pooled),
      'lstm/sequential_1/conv1_d': (1, both, self.policy),
      f'{HIDDEN}/lstm/linear': (self.summary + self.lifetime, 4 * self.lifetime),
      **_embeddings(HIDDEN, self.predictions, self.lifetime_embedding),
      f'{HIDDEN}/mlp_2/~/linear_0': (lifetime_rows, self.summary),
      **_pooling(HIDDEN, self.lifetime_channels, self.lifetime_pooled),
    }
    return with_biases(linear)

  @classmethod
  def of(cls, params: RuleParams) -> Self:
    """Return the widths of a rule."""
    return cls(**{field: params[name].shape[axis] for field, (name, axis) in WIDTHS.items()})


def _embeddings(prefix: str, predictions: int, size: int) -> dict[str, tuple[int, ...]]:
  return {
    **embedding(f'{prefix}/mlp', predictions, size),
    **embedding(f'{prefix}/mlp_1', predictions, size),
  }


def _pooling(prefix: str, channels: int, pooled: int) -> dict[str, tuple[int, ...]]:
  return {
    f'{prefix}/sequential/conv1_d': (1, 2 * EACH, channels),
    f'{prefix}/sequential/conv1_d_1': (1, 2 * channels, pooled),
  }


WIDTHS = {  # field of Sizes -> the array and its axis that say it
  'predictions': ('lstm/linear_2/w', 1),
  'trajectory': ('lstm/linear/w', 1),
  'lifetime': ('lstm/linear/w', 0),
  'embedding': ('lstm/mlp/~/linear_0/w', 1),
  'channels': ('lstm/sequential/conv1_d/w', 2),
  'pooled': ('lstm/sequential/conv1_d_1/w', 2),
  'policy': ('lstm/sequential_1/conv1_d/w', 2),
  'lifetime_embedding': (f'{HIDDEN}/mlp/~/linear_0/w', 1),
  'lifetime_channels': (f'{HIDDEN}/sequential/conv1_d/w', 2),
  'lifetime_pooled': (f'{HIDDEN}/sequential/conv1_d_1/w', 2),
  'summary': (f'{HIDDEN}/mlp_2/~/linear_0/w', 1),
}


def init(key: Array, sizes: Sizes) -> dict[str, Array]:
  """A rule before it is trained: Disco103's initial weights, of any sizes."""
  wide = {'lstm/linear/w': 1.0, **{f'lstm/linear_{i}/w': 0.3 for i in (1, 2, 3, 4)}}
  return initial(key, sizes.shapes(), wide)


# --- the network ----------------------------------------------------------------------------------


def initial_state(lifetime: int) -> DiscoRuleState:
  """Return the memory of a new agent; `lifetime` is that of `Sizes`."""
  return DiscoRuleState(jnp.zeros(lifetime), jnp.zeros(lifetime))


def update(
  params: RuleParams, state: DiscoRuleState, inputs: DiscoInputs
) -> tuple[DiscoTargets, DiscoRuleState]:
  """One step of a rule."""
  goals, summary = targets(params, state, inputs)
  return goals, remember(params, state, summary)


def targets(
  params: RuleParams, state: DiscoRuleState, inputs: DiscoInputs
) -> tuple[DiscoTargets, Array]:
  """Targets of a trajectory, and its summary [summary], to be averaged over the devices."""
  rows, actions = describe(params, 'lstm', inputs)
  x = backwards(params, 'lstm/lstm/linear', rows, inputs.last)
  x = x * dense(params, 'lstm/linear', state.hidden[None])[None]
  y, z = dense(params, 'lstm/linear_2', x), dense(params, 'lstm/linear_3', x)
  goals = DiscoTargets(policy_target(params, x, actions), y, z)
  rows, _ = describe(params, HIDDEN, inputs)
  parts = [
    rows,
    dense(params, 'lstm/linear_1', x),
    embed(params, f'{HIDDEN}/mlp', jax.nn.softmax(y)),
  ]
  summary = dense(params, f'{HIDDEN}/mlp_2/~/linear_0', jnp.concatenate(parts, axis=-1))
  return goals, jnp.mean(summary, axis=(0, 1))


def remember(params: RuleParams, state: DiscoRuleState, summary: Array) -> DiscoRuleState:
  """The state after an update of this summary [summary]."""
  name = f'{HIDDEN}/lstm/linear'
  gates = dense(params, name, jnp.concatenate([summary, state.hidden])[None])
  return DiscoRuleState(*lstm(gates[0], state.cell))


def describe(params: RuleParams, prefix: str, inputs: DiscoInputs) -> tuple[Array, Array]:
  """Each step as numbers [T, B, N], and each action in it as [T, B, A, C].

  Probabilities and values are data; a meta-gradient goes through y and z alone.
  """
  t, b, num_actions = inputs.behaviour.shape
  pi, pi_target, mu = lax.stop_gradient(
    tuple(jax.nn.softmax(x) for x in (inputs.online.policy, inputs.target.policy, inputs.behaviour))
  )
  value, advantage, scaled, q, advantages, scaled_all = lax.stop_gradient((
    signed_log(inputs.value), signed_log(inputs.advantage), inputs.scaled_advantage,
    signed_log(inputs.q), signed_log(inputs.advantages), inputs.scaled_advantages,
  ))  # fmt: skip
  y, y_target = (embed(params, f'{prefix}/mlp', jax.nn.softmax(p.y)) for p in inputs[:2])
  z, z_target = (embed(params, f'{prefix}/mlp_1', jax.nn.softmax(p.z))[..., 0] for p in inputs[:2])
  taken = functools.partial(select_action, action=inputs.action)

  code = jax.nn.one_hot(inputs.action, num_actions)
  each = (pi[:-1], mu, pi_target[:-1], z[:-1], z_target[:-1], q, advantages, scaled_all, code)
  actions = pool(params, f'{prefix}/sequential/conv1_d', jnp.stack(each, axis=-1))
  actions = pool(params, f'{prefix}/sequential/conv1_d_1', actions)

  def of_actions(z: Array) -> list[Array]:
    return [taken(z[:-1]), pair(jnp.sum(z * pi, axis=-1)), pair(jnp.max(z, axis=-1))]

  parts = [
    taken(pi[:-1]), taken(mu), signed_log(inputs.reward), 1.0 - inputs.last, pair(value),
    advantage, scaled, taken(pi_target[:-1]), pair(y[..., 0]), pair(y_target[..., 0]),
    *of_actions(z), *of_actions(z_target), jnp.mean(actions, axis=2), taken(actions),
  ]  # fmt: skip
  return jnp.concatenate([x.reshape(t, b, -1) for x in parts], axis=-1), actions


def policy_target(params: RuleParams, x: Array, actions: Array) -> Array:
  """Logits [T, B, A] from steps [T, B, H] and actions [T, B, A, C]."""
  t, b, num_actions, _ = actions.shape
  steps = jnp.broadcast_to(x[:, :, None], (t, b, num_actions, x.shape[-1]))
  features = pool(params, 'lstm/sequential_1/conv1_d', jnp.concatenate([steps, actions], axis=-1))
  return dense(params, 'lstm/linear_4', features)[..., 0]


def pool(params: RuleParams, name: str, x: Array) -> Array:
  """A layer for each action [T, B, A, N] that sees the mean of all of them as well."""
  w, size = params[f'{name}/w'][0], x.shape[-1]
  mean = jnp.mean(x, axis=2)
  own = (x.reshape(-1, size) @ w[:size]).reshape(*x.shape[:-1], -1)
  others = mean.reshape(-1, size) @ w[size:] + params[f'{name}/b'][None]
  return jax.nn.relu(own + others.reshape(*mean.shape[:-1], 1, -1))


def pair(x: Array) -> Array:
  """Numbers [T+1, B] before and after each of T steps, [T, B, 2]."""
  return jnp.stack([x[:-1], x[1:]], axis=-1)


def signed_log(x: Array) -> Array:
  """Return sign(x) * log(1 + |x|)."""
  return jnp.sign(x) * jnp.log1p(jnp.abs(x))
