"""A model that is unrolled from each state of a window: its inputs, outputs and masks.

Letters: P positions of a window, U actions of an unroll, N = roots * B states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podrace.networks import merge_time
from podrace.networks.planning import Model, scale_gradient
from podrace.types import Array, TimeStep


class Ends(NamedTuple):
  """Masks of states after 0 to U actions from each of N states, [U + 1, N] each."""

  policy_mask: Array  # f32: 1 where the policy is learned
  value_mask: Array  # f32
  reward_mask: Array  # f32 of the action before
  within: Array  # bool: the episode goes on there; elsewhere the value is 0
  passed: Array  # bool: it ended before; the reward is 0


def spread(x: Array, roots: int, actions: int) -> Array:
  """Return positions [P, B, ...] after 0 to U actions from the first `roots`: [U + 1, N, ...]."""
  return jnp.stack([merge_time(x[k : k + roots]) for k in range(actions + 1)])


def ends(t: TimeStep, roots: int, actions: int) -> Ends:
  """Return the masks of timesteps [P, B]. This is the only rule about episode ends.

  Behind a termination, value and reward are 0 and there is no policy. Behind a truncation nothing
  is learned. A state that is LAST is not unrolled from.
  """
  last = spread(t.last, roots, actions)
  passed = jnp.cumsum(last, axis=0) - last > 0
  truncated = spread(t.last & (t.discount > 0), roots, actions)
  cut = jnp.cumsum(truncated & ~passed, axis=0) > 0
  cut_before = jnp.concatenate([jnp.zeros_like(cut[:1]), cut[:-1]])
  valid, within = ~last[:1], ~passed & ~last
  policy, value, reward = (
    x.astype(jnp.float32) for x in (valid & within, valid & ~cut, valid & ~cut_before)
  )
  return Ends(policy, value, reward, within, passed)


def imagine(model: Model, network: Any, root: Any, actions: Any) -> tuple[Any, Array]:
  """Unroll the model from hidden states [N, ...] by actions [U, N, ...].

  The gradient into a hidden state is halved at each action (Schrittwieser et al. 2020, arXiv
  1911.08265, appendix G).

  Returns:
    The hidden states [U + 1, N, ...], and the rewards [U, N, bins] of the actions.
  """

  def step(hidden: Any, action: Any) -> Any:
    hidden, reward = model.dynamics(network, scale_gradient(hidden, 0.5), action)
    return hidden, (hidden, reward)

  _, (hidden, reward) = lax.scan(step, root, actions)
  return jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), root, hidden), reward
