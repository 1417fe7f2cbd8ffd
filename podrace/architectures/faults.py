"""Violations of the contract by an agent or an environment while Anakin runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrace.envs import contract
from podrace.envs.spaces import ALLOWS_NOTHING, ALLOWS_SOME, bounds, without_choice
from podrace.errors import RunError
from podrace.system.blame import label, out_of_space
from podrace.types import LARGEST_REWARD, Trajectory

FAULTS = ('order', 'reward', 'action', 'mask')  # bits of `ActorState.faults`


def faults(before: jax.Array, space: Any, trajectory: Trajectory) -> jax.Array:
  """Return the first FAULTS of each environment, [B] i32 bits.

  Faults cause further faults: a NaN action makes NaN rewards, and a NaN reward makes NaN parameters
  and actions. So an environment with faults `before` gets no more, and of actions and rewards only
  the first fault counts.
  """
  t = trajectory.timesteps
  order = jnp.any(t.last[:-1] != t.first[1:], 0)
  reward = ~(jnp.abs(t.reward) <= LARGEST_REWARD)  # NaN is
  action = _outside(space, trajectory.outputs.action)
  reward_before, action_before = (jnp.cumsum(x, 0) > 0 for x in (reward[:-1], action))
  kinds = [
    order,
    reward[0] | jnp.any(reward[1:] & ~action_before, 0),
    jnp.any(action & ~reward_before, 0),
  ]
  if (stuck := without_choice(t)) is not None:
    kinds.append(jnp.any(stuck, 0))
  bits = sum(
    (x.astype(jnp.int32) << i for i, x in enumerate(kinds)), jnp.zeros(order.shape, jnp.int32)
  )
  return jnp.where(before, before, bits)


def _outside(space: Any, action: Any) -> jax.Array:
  """Return where actions [T, B, ...] are out of the space, [T, B]."""
  limits = bounds(space)
  if limits is None:  # a composite space; its parts are unknown here
    return jnp.zeros(jax.tree.leaves(action)[0].shape[:2], bool)
  low, high = (jnp.broadcast_to(jnp.asarray(x), action.shape) for x in limits)
  outside = ~((action >= low) & (action <= high))  # NaN is
  return jnp.any(outside, axis=tuple(range(2, action.ndim)))


def count_faults(bits: jax.Array) -> jax.Array:
  """Return the number of environments, the last axis of `bits`, with each of FAULTS: [..., 4]."""
  return jnp.stack([jnp.sum(bits >> i & 1, -1) for i in range(len(FAULTS))], -1)


def check_faults(counts: np.ndarray, agent: Any, env: Any, action: Callable[[], Any]) -> None:
  """Raise RunError if there are faults.

  Args:
    counts: [4] or [n, 4] of `count_faults`.
    agent: named in the message.
    env: named in the message.
    action: returns an action that is out of the space, None if it finds none.
  """
  for fault, count in zip(FAULTS, np.sum(np.atleast_2d(counts), 0), strict=True):
    if count:
      why = _explain(fault, agent, env, action)
      raise RunError(f'in {count} environment(s), {why}')


def _explain(fault: str, agent: Any, env: Any, action: Callable[[], Any]) -> str:
  if fault == 'order':
    return contract.out_of_order(env)
  if fault == 'reward':
    return (
      f'{label(env, "step")} returned a reward that is NaN or infinite, or more than '
      f'{LARGEST_REWARD:g} in size, expected a finite one that is smaller'
    )
  if fault == 'mask':
    return f'{label(env, "step")} returned {ALLOWS_NOTHING}, expected {ALLOWS_SOME}'
  return out_of_space(agent, env.action_space, action())


def first_outside(space: Any, actions: np.ndarray) -> Any:
  """Return the first of actions [B, ...] that is out of the space; None if all are in it."""
  outside = np.asarray(_outside(space, actions[None]))[0]
  return actions[np.argmax(outside)].tolist() if outside.any() else None
