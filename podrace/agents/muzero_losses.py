"""Losses of MuZero. Letters: U actions of an unroll, N states, P numbers of a policy output."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from podrace.agents.search import Plan
from podrace.distributions import Distribution
from podrace.networks import LearnedModel, merge_time, split_time
from podrace.networks.planning import number_loss
from podrace.types import Array


def number_losses(outputs: Array, x: Array, support: Array | None) -> Array:
  """Return the losses [U, N] of outputs [U, N, bins] against numbers [U, N]."""
  return split_time(number_loss(merge_time(outputs), x.reshape(-1), support), x.shape[0])


def policy_losses(
  distribution: Distribution, policy: Array, plans: Plan, num_candidates: int
) -> tuple[Array, Array]:
  """Return the cross-entropies [U + 1, N] of plans and policies, and the policies' entropies.

  Args:
    distribution: the family of the policies.
    policy: the outputs [U + 1, N, P] of the model.
    plans: the targets.
    num_candidates: of each plan; 0: all actions. The entropy is then exact, else estimated.
  """
  if not num_candidates:
    log_p = jax.nn.log_softmax(policy)
    return -jnp.sum(plans.weights * log_p, axis=-1), -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
  wide = jnp.repeat(policy[:, :, None], num_candidates, axis=2)
  log_p = distribution.log_prob(wide, plans.candidates)
  entropy = distribution.entropy(policy, jax.random.key(0))
  return -jnp.sum(plans.weights * log_p, axis=-1), entropy


def consistency_losses(model: LearnedModel, params: Any, hidden: Any, observed: Any) -> Array:
  """Return the distances [U, N] of imagined hidden states from observed ones.

  A distance is 1 less the cosine of the projections (Ye et al. 2021, arXiv 2111.00210, section
  4.1). `hidden` and `observed` are [U + 1, N, ...]. The first ones are not compared.
  """

  def project(x: Any, online: bool) -> Array:
    length = jax.tree.leaves(x)[0].shape[0]
    projection = model.project(params, merge_time(x), online)
    norm = jnp.linalg.norm(projection, axis=-1, keepdims=True)
    return split_time(projection / (norm + 1e-5), length)

  imagined = project(jax.tree.map(lambda x: x[1:], hidden), True)
  real = project(lax.stop_gradient(jax.tree.map(lambda x: x[1:], observed)), False)
  return 1.0 - jnp.sum(imagined * lax.stop_gradient(real), axis=-1)


def mean_metrics(parts: dict[str, Array], entropy: Array, plans: Plan) -> dict[str, Array]:
  """Return means of losses and values [N], of an entropy [N], and of the plans' origin."""
  age, share = plans.steps[0].astype(jnp.float32), plans.reanalysed[0].astype(jnp.float32)
  metrics = dict(**parts, entropy=entropy, target_age=age, reanalysed=share)
  return {name: jnp.mean(x) for name, x in metrics.items()}
