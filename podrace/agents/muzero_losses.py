"""Targets and losses of MuZero.

Letters: P positions of a window behind the burn-in, U actions of an unroll, N states that the model
is unrolled from.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from podrace import returns
from podrace.agents.model_unroll import ModelGoals, ModelOutputs, number_losses, unroll_weights
from podrace.agents.search import Candidates, Plan
from podrace.networks import LearnedModel, merge_time, split_time
from podrace.networks.planning import outside_support
from podrace.types import Array, TimeStep


def value_targets(timesteps: TimeStep, value: Array, n_step: int, discount: float) -> Array:
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


def model_losses(
  outputs: ModelOutputs,
  goals: ModelGoals,
  candidates: Candidates,
  support: Array | None,
  entropy_cost: float,
) -> dict[str, Array]:
  """Return losses, sums over an unroll, and further metrics of N states, [N] each.

  Args:
    outputs: of the model.
    goals: their targets, of which `targets` is a `Plan`.
    candidates: of the plans.
    support: the model's.
    entropy_cost: of the policies, subtracted from their loss.
  """
  plans, mask, share = goals.targets, goals.policy_mask, unroll_weights(len(outputs.reward))
  cross, entropy = policy_losses(candidates, outputs.policy, plans)
  values = number_losses(outputs.value, plans.value, support)
  rewards = goals.reward_mask[1:] * number_losses(outputs.reward, goals.reward[1:], support)
  return dict(
    policy_loss=jnp.sum(share * mask * (cross - entropy_cost * entropy), axis=0),
    value_loss=jnp.sum(share * goals.value_mask * values, axis=0),
    reward_loss=jnp.sum(share[1:] * rewards, axis=0),
    entropy=mask[0] * entropy[0],
    target_age=plans.steps[0].astype(jnp.float32),
    reanalysed=plans.reanalysed[0].astype(jnp.float32),
    **outside_support(plans.value[0], support),
  )


def policy_losses(candidates: Candidates, policy: Array, plans: Plan) -> tuple[Array, Array]:
  """Return the cross-entropies [U + 1, N] of plans and policies, and the policies' entropies.

  The entropies are exact if the candidates are all actions, else estimated.
  """
  if not candidates.count:
    log_p = jax.nn.log_softmax(policy)
    return -jnp.sum(plans.weights * log_p, axis=-1), -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
  kind, wide = candidates.distribution, jnp.repeat(policy[:, :, None], candidates.count, axis=2)
  log_p = kind.log_prob(wide, plans.candidates)
  return -jnp.sum(plans.weights * log_p, axis=-1), kind.entropy(policy, jax.random.key(0))


def consistency_loss(
  model: LearnedModel, params: Any, outputs: ModelOutputs, goals: ModelGoals, observed: Any
) -> Array:
  """Return the distance [N] of imagined hidden states from observed ones [U + 1, N, ...].

  A distance is 1 less the cosine of the projections (Ye et al. 2021, arXiv 2111.00210, section
  4.1). The first hidden states are not compared, nor the ones behind the end of an episode.
  """

  def project(hidden: Any, online: bool) -> Array:
    later = merge_time(jax.tree.map(lambda x: x[1:], hidden))
    projection = model.project(params, later, online)
    norm = jnp.linalg.norm(projection, axis=-1, keepdims=True)
    return split_time(projection / (norm + 1e-5), len(outputs.reward))

  imagined, real = project(outputs.hidden, True), project(lax.stop_gradient(observed), False)
  distance = 1.0 - jnp.sum(imagined * lax.stop_gradient(real), axis=-1)
  share = unroll_weights(len(outputs.reward))
  return jnp.sum((share * goals.state_mask)[1:] * distance, axis=0)
