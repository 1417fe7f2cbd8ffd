"""Faults of agents and environments while Anakin runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrace.envs.spaces import bounds
from podrace.envs.timestep_rules import RULES, choices_of, is_outside
from podrace.errors import RunError
from podrace.system.blame import label, out_of_space
from podrace.types import Trajectory

FAULTS = ('order', 'reward', 'action', 'mask')  # bits of `ActorState.faults`


def find_faults(before: jax.Array, space: Any, trajectory: Trajectory) -> jax.Array:
  """Return the faults that came first in each environment, as bits [B] i32 of FAULTS.

  A fault causes more faults: a NaN action makes NaN rewards, and a NaN reward makes NaN
  parameters and actions. So an environment with faults `before` gets no new ones, and of actions
  and rewards only the first fault counts.
  """
  t = trajectory.timesteps
  after_first = t._replace(step_type=t.step_type[1:])
  order = jnp.any(RULES['order'].is_broken(after_first, t.last[:-1]), 0)
  reward = RULES['reward'].is_broken(t, None)
  action = _outside(space, trajectory.outputs.action)
  reward_before, action_before = (jnp.cumsum(x, 0) > 0 for x in (reward[:-1], action))
  broken = [
    order,
    reward[0] | jnp.any(reward[1:] & ~action_before, 0),
    jnp.any(action & ~reward_before, 0),
  ]
  if (mask := RULES['mask'].is_broken(t, None, choices_of(space))) is not None:
    broken.append(jnp.any(mask, 0))
  bits = sum(
    (x.astype(jnp.int32) << i for i, x in enumerate(broken)), jnp.zeros(order.shape, jnp.int32)
  )
  return jnp.where(before, before, bits)


def _outside(space: Any, action: Any) -> jax.Array:
  """Return which actions [T, B, ...] are out of the space, [T, B] bool."""
  limits = bounds(space)
  if limits is None:  # a Dict or Tuple: its parts have no common bounds
    return jnp.zeros(jax.tree.leaves(action)[0].shape[:2], bool)
  low, high = (jnp.broadcast_to(jnp.asarray(x), action.shape) for x in limits)
  return jnp.any(is_outside(action, low, high), axis=tuple(range(2, action.ndim)))


def count_faults(bits: jax.Array) -> jax.Array:
  """Count the environments, the last axis of `bits`, with each of FAULTS: [..., 4]."""
  return jnp.stack([jnp.sum(bits >> i & 1, -1) for i in range(len(FAULTS))], -1)


def check_faults(counts: np.ndarray, agent: Any, env: Any, action: Callable[[], Any]) -> None:
  """Raise RunError if there are faults.

  Args:
    counts: Environments with each of FAULTS, [4] or [N, 4].
    agent: Agent to name in the message.
    env: Environment to name in the message.
    action: Returns an action that is out of the space, or None.
  """
  for fault, count in zip(FAULTS, np.sum(np.atleast_2d(counts), 0), strict=True):
    if count:
      why = _explain(fault, agent, env, action)
      raise RunError(f'in {count} environment(s), {why}')


def _explain(fault: str, agent: Any, env: Any, action: Callable[[], Any]) -> str:
  if fault == 'action':
    return out_of_space(agent, env.action_space, action())
  return RULES[fault].message(label(env, 'step'))


def first_outside(space: Any, actions: np.ndarray) -> Any:
  """Return the first of actions [B, ...] that is out of the space, or None."""
  outside = np.asarray(_outside(space, actions[None]))[0]
  return actions[np.argmax(outside)].tolist() if outside.any() else None
