"""What an agent or an environment does against the contract while a run is under way under Anakin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrace.envs.spaces import bounds
from podrace.envs.timestep_rules import RULES
from podrace.errors import RunError
from podrace.system.blame import label, out_of_space
from podrace.types import Trajectory

FAULTS = ('order', 'reward', 'action', 'mask')  # bits of `ActorState.faults`


def find_faults(before: jax.Array, space: Any, trajectory: Trajectory) -> jax.Array:
  """Which of FAULTS there were first in each environment, [B] i32 bits.

  A fault makes others: a NaN action makes NaN rewards, and a NaN reward makes NaN parameters and actions. So
  nothing is added where there were faults `before`, and of actions and rewards the first one counts.
  """
  t = trajectory.timesteps
  after_first = t._replace(step_type=t.step_type[1:])
  order = jnp.any(RULES['order'].is_broken(after_first, t.last[:-1]), 0)
  reward = RULES['reward'].is_broken(t, None)
  action = _outside(space, trajectory.outputs.action)
  reward_before, action_before = (jnp.cumsum(x, 0) > 0 for x in (reward[:-1], action))
  found = [
    order,
    reward[0] | jnp.any(reward[1:] & ~action_before, 0),
    jnp.any(action & ~reward_before, 0),
  ]
  if (mask := RULES['mask'].is_broken(t, None)) is not None:
    found.append(jnp.any(mask, 0))
  bits = sum(
    (x.astype(jnp.int32) << i for i, x in enumerate(found)), jnp.zeros(order.shape, jnp.int32)
  )
  return jnp.where(before, before, bits)


def _outside(space: Any, action: Any) -> jax.Array:
  """Which of actions [T, B, ...] are out of the space, [T, B]."""
  limits = bounds(space)
  if limits is None:  # a space of several, whose parts nobody here knows
    return jnp.zeros(jax.tree.leaves(action)[0].shape[:2], bool)
  low, high = (jnp.broadcast_to(jnp.asarray(x), action.shape) for x in limits)
  outside = ~((action >= low) & (action <= high))  # NaN is
  return jnp.any(outside, axis=tuple(range(2, action.ndim)))


def count_faults(bits: jax.Array) -> jax.Array:
  """How many environments, the last axis of `bits`, have each of FAULTS: [..., 4]."""
  return jnp.stack([jnp.sum(bits >> i & 1, -1) for i in range(len(FAULTS))], -1)


def check_faults(counts: np.ndarray, agent: Any, env: Any, action: Callable[[], Any]) -> None:
  """Raises RunError if there are any; `action` gives one that is out of the space, None if it finds none."""
  for fault, count in zip(FAULTS, np.sum(np.atleast_2d(counts), 0), strict=True):
    if count:
      why = _explain(fault, agent, env, action)
      raise RunError(f'in {count} environment(s), {why}')


def _explain(fault: str, agent: Any, env: Any, action: Callable[[], Any]) -> str:
  if fault == 'action':
    return out_of_space(agent, env.action_space, action())
  return RULES[fault].message(label(env, 'step'))


def first_outside(space: Any, actions: np.ndarray) -> Any:
  """The first of actions [B, ...] that is out of the space; None if all are in it."""
  outside = np.asarray(_outside(space, actions[None]))[0]
  return actions[np.argmax(outside)].tolist() if outside.any() else None
