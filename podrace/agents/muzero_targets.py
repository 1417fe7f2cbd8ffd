"""Targets of MuZero.

Letters: P positions of a window behind the burn-in, S of them that the model is unrolled from,
U actions of an unroll, N = S * B states, B windows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podrace import returns
from podrace.agents.model_unroll import ends, spread
from podrace.agents.search import Plan
from podrace.types import Array, TimeStep


class MuZeroGoals(NamedTuple):
  """Targets of the model after 0 to U actions from each of N states: [U + 1, N, ...]."""

  plan: Plan
  value: Array  # f32
  reward: Array  # f32 of the action before; unused after 0 actions
  policy_mask: Array  # f32
  value_mask: Array
  reward_mask: Array


def make_goals(
  timesteps: TimeStep, plans: Plan, *, sequence: int, unroll: int, n_step: int, discount: float
) -> MuZeroGoals:
  """Return the targets of a batch of windows.

  Args:
    timesteps: [P + 1, B, ...] behind the burn-in.
    plans: the searches [P, B, ...] from them.
    sequence: S, states of a window that the model is unrolled from.
    unroll: U, actions that it is unrolled for.
    n_step: rewards before a value is bootstrapped from; 0: the search's value is the target.
    discount: the agent's discount.
  """
  values = value_targets(timesteps, plans.value, n_step=n_step, discount=discount)
  plan, value, reward = spread_all((plans, values, timesteps.reward), sequence, unroll)
  end = ends(timesteps, sequence, unroll)
  return MuZeroGoals(
    plan,
    jnp.where(end.within, value, 0.0),
    jnp.where(end.passed, 0.0, reward),
    end.policy_mask,
    end.value_mask,
    end.reward_mask,
  )


def spread_all(tree: Any, sequence: int, unroll: int) -> Any:
  """Return the positions after 0 to U actions from each state: [P, B, ...] as [U + 1, N, ...]."""
  return jax.tree.map(lambda x: spread(x, sequence, unroll), tree)


def value_targets(timesteps: TimeStep, value: Array, *, n_step: int, discount: float) -> Array:
  """Return n-step targets [P - 1, B] of values [P, B] by searches from timesteps [P + 1, B].

  With `n_step` 0 these values are the targets. Such a target does not depend on the actions that
  were taken (Wang et al. 2024, EfficientZero V2, arXiv 2403.00564, has both kinds).
  """
  if not n_step:
    return value
  t = jax.tree.map(lambda x: x[1 : value.shape[0]], timesteps._replace(observation=()))
  one = jax.vmap(returns.n_step_bootstrapped, in_axes=(1, 1, 1, 1, None), out_axes=1)
  going = 1.0 - t.last.astype(jnp.float32)
  return one(t.reward, discount * t.discount, going, value[1:], n_step)


def is_outside(value: Array, support: Array) -> Array:
  """Return 1 for each target [N] that is beyond the ends of the support, else 0."""
  x = returns.rescale(value)
  return ((x < support[0] - 1e-4) | (x > support[-1] + 1e-4)).astype(jnp.float32)


def support_advice(share: float, support: Array | None) -> str:
  """Return advice for the user if at least 1% of the targets are outside the support, else ''."""
  if share < 0.01 or support is None:
    return ''
  low, high = (float(returns.unscale(x)) for x in (support[0], support[-1]))
  return (
    f'{share:.0%} of the targets of values are below {low:.4g} or above {high:.4g}, where the '
    'atoms end, and are cut '
    'off there: widen --agent.network.v-min or --agent.network.v-max'
  )
