"""A model that is unrolled from each state of a window: its outputs, targets, masks and losses.

Shared by MuZero and Muesli. Letters: P positions of a window, U actions of an unroll, N = roots * B
states that the model is unrolled from.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podrace.networks import merge_time, split_time
from podrace.networks.planning import Model, number_loss, scale_gradient
from podrace.types import Array, TimeStep, Trajectory


class ModelOutputs(NamedTuple):
  """Outputs of the model after 0 to U actions from each of N states: [U + 1, N, ...]."""

  hidden: Any
  policy: Array  # parameters of the action distribution
  value: Array  # [U + 1, N, bins]
  reward: Array  # [U, N, bins] of the actions


class ModelGoals(NamedTuple):
  """Targets of these outputs: [U + 1, N, ...]."""

  targets: Any  # the agent's own; `targets.value` is 0 behind the end of an episode
  reward: Array  # f32 of the action before; unused after 0 actions
  policy_mask: Array  # f32: 1 where the policy is learned
  value_mask: Array  # f32
  reward_mask: Array  # f32 of the action before
  state_mask: Array  # f32: 1 up to the end of the episode


def spread(tree: Any, roots: int, actions: int) -> Any:
  """Return positions [P, B, ...] after 0 to U actions from the first `roots`: [U + 1, N, ...]."""
  return jax.tree.map(
    lambda x: jnp.stack([merge_time(x[k : k + roots]) for k in range(actions + 1)]), tree
  )


def represent(model: Model, network: Any, window: Trajectory, burn_in: int, length: int) -> Any:
  """Return hidden states of the `length` timesteps [length, B, ...] behind the burn-in."""
  state = window.agent_state
  if burn_in:
    early = jax.tree.map(lambda x: x[:burn_in], window.timesteps)
    _, state = model.represent(lax.stop_gradient(network), state, early)
  late = jax.tree.map(lambda x: x[burn_in : burn_in + length], window.timesteps)
  return model.represent(network, state, late)[0]


def unroll_model(model: Model, network: Any, root: Any, actions: Any) -> ModelOutputs:
  """Unroll the model from hidden states [N, ...] by actions [U + 1, N, ...], without the last.

  The gradient into a hidden state is halved at each action (Schrittwieser et al. 2020, arXiv
  1911.08265, appendix G).
  """

  def step(hidden: Any, action: Any) -> Any:
    hidden, reward = model.dynamics(network, scale_gradient(hidden, 0.5), action)
    return hidden, (hidden, reward)

  _, (hidden, reward) = lax.scan(step, root, jax.tree.map(lambda x: x[:-1], actions))
  hidden = jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), root, hidden)
  prediction = split_time(model.predict(network, merge_time(hidden)), reward.shape[0] + 1)
  return ModelOutputs(hidden, prediction.policy, prediction.value, reward)


def make_goals(t: TimeStep, targets: Any, roots: int, actions: int) -> ModelGoals:
  """Return the targets of outputs. This is the only rule about episode ends.

  Behind a termination, value and reward are 0 and there is no policy. Behind a truncation nothing
  is learned. A state that is LAST is not unrolled from.

  Args:
    t: timesteps [P, B, ...].
    targets: a NamedTuple of [P, B, ...] with a field `value`.
    roots: positions that the model is unrolled from.
    actions: U, actions that it is unrolled for.
  """
  last = spread(t.last, roots, actions)
  passed = jnp.cumsum(last, axis=0) - last > 0  # the episode ended before
  truncated = spread(t.last & (t.discount > 0), roots, actions)
  cut = jnp.cumsum(truncated & ~passed, axis=0) > 0
  cut_before = jnp.concatenate([jnp.zeros_like(cut[:1]), cut[:-1]])
  valid, within = ~last[:1], ~passed & ~last
  learned = valid & within, valid & ~cut, valid & ~cut_before, valid & ~passed
  masks = (x.astype(jnp.float32) for x in learned)
  targets = spread(targets, roots, actions)
  targets = targets._replace(value=jnp.where(within, targets.value, 0.0))
  return ModelGoals(targets, jnp.where(passed, 0.0, spread(t.reward, roots, actions)), *masks)


def unroll_weights(actions: int) -> Array:
  """Return the weights [U + 1, 1] of losses after 0 to U actions: 1, then 1/U each."""
  return jnp.ones(actions + 1).at[1:].set(1 / max(actions, 1))[:, None]


def number_losses(outputs: Array, x: Array, support: Array | None) -> Array:
  """Return the losses [U, N] of outputs [U, N, bins] against numbers [U, N]."""
  return number_loss(merge_time(outputs), x.reshape(-1), support).reshape(x.shape)
