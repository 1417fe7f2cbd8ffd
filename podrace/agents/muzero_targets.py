"""Targets of MuZero: goals, values and their support."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from podrace import returns
from podrace.agents.model_unroll import ends, spread
from podrace.agents.search import Plan
from podrace.types import Array, TimeStep, Trajectory


class Unrolls(Protocol):
  """The settings of a model's unroll: sequences of `sequence` states, from each of which `ahead` actions follow."""

  @property
  def sequence(self) -> int: ...
  @property
  def ahead(self) -> int: ...


class Goals(NamedTuple):
  """What the model should say, after 0 to U actions from each of N states: [U + 1, N, ...]."""

  plan: Plan
  value: Array  # f32
  reward: Array  # f32 of the action before; unused where there is none
  policy_mask: Array  # f32
  value_mask: Array
  reward_mask: Array


def streams(window: Trajectory, rows: Array) -> Trajectory:
  """Some of a batch."""
  return Trajectory(
    *jax.tree.map(lambda x: x[:, rows], (window.timesteps, window.outputs)),
    *jax.tree.map(lambda x: x[rows], (window.agent_state, window.env_id)),
  )


def spread_all(agent: Unrolls, tree: Any) -> Any:
  """Of positions [P, B, ...], those after 0 to U actions from each state: [U + 1, sequence * B, ...]."""
  return jax.tree.map(lambda x: spread(x, agent.sequence, agent.ahead), tree)


def goals_of(agent: Unrolls, timesteps: TimeStep, plans: Plan) -> Goals:
  """What the model should say; timesteps are those behind the burn-in."""
  value = value_targets(agent, timesteps, plans.value)
  plan, value, reward = spread_all(agent, (plans, value, timesteps.reward))
  end = ends(timesteps, agent.sequence, agent.ahead)
  return Goals(
    plan,
    jnp.where(end.within, value, 0.0),
    jnp.where(end.passed, 0.0, reward),
    end.policy_mask,
    end.value_mask,
    end.reward_mask,
  )


def unfit(share: float, support: Array | None) -> str:
  """What to tell the user if a share of 1% and more of the targets is outside of the support; else ''."""
  if share < 0.01 or support is None:
    return ''
  low, high = (float(returns.unscale(x)) for x in (support[0], support[-1]))
  return (
    f'{share:.0%} of the targets of values are below {low:.4g} or above {high:.4g}, where the atoms end, and are cut '
    'off there: widen --agent.network.v-min or --agent.network.v-max'
  )


def outside(value: Array, support: Array) -> Array:
  """Where targets [N] are more or less than the support can hold: 1, else 0."""
  x = returns.rescale(value)
  return ((x < support[0] - 1e-4) | (x > support[-1] + 1e-4)).astype(jnp.float32)


def value_targets(agent: Any, timesteps: TimeStep, value: Array) -> Array:
  """n-step targets [positions - 1, B] from timesteps and searches' values [positions, B]; these, if n is 0.

  With 0 a target does not depend on what was done (Wang et al. 2024, EfficientZero V2, arXiv 2403.00564, has both).
  """
  if not agent.n_step:
    return value
  t = jax.tree.map(lambda x: x[1 : agent.positions], timesteps._replace(observation=()))
  one = jax.vmap(returns.n_step_bootstrapped, in_axes=(1, 1, 1, 1, None), out_axes=1)
  going = 1.0 - t.last.astype(jnp.float32)
  return one(t.reward, agent.discount * t.discount, going, value[1:], agent.n_step)
