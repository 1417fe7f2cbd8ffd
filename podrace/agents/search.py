"""Search in a model from hidden states, by mctx, and what is kept of it.

`agent` is one with the fields of MuZero's search: `network`, a `Model`; `search`, `num_candidates`, `discount`,
`greedy` and the others that are read here.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mctx

from podrace import distributions
from podrace.envs.spaces import MASK
from podrace.networks import inside_loops
from podrace.networks.planning import decode
from podrace.types import Array


class Params(NamedTuple):
  """All that acting needs."""

  network: Any
  steps: Array  # [] i32 gradient steps so far


class Plan(NamedTuple):
  """What a search found of each state, [B, ...]; it is also what replay keeps of it."""

  weights: Array  # [B, K] f32 the improved policy over the candidates
  candidates: Any  # [B, K, ...] raw samples; () where they are all actions
  value: Array  # [B] f32 of the state
  steps: Array  # [B] i32 gradient steps that its network had had
  reanalysed: Array  # [B] bool: searched later than it was acted, by Reanalyse


def masked(policy: Array, observation: Any) -> Array:
  """A policy [B, P] without the choices that an observation forbids, if it has a mask."""
  if not isinstance(observation, dict) or MASK not in observation:
    return policy
  allowed = distributions.allowed(observation[MASK])
  return jnp.where(allowed.reshape(policy.shape), policy, distributions.MASKED)


def plan(
  agent: Any, params: Params, hidden: Any, observation: Any, key: Array, simulations: int
) -> tuple[Any, Plan]:
  """Raw samples [B, ...] to act by, and what a search from hidden states [B, ...] found.

  `observation` [B, ...] may have a mask of what is allowed at the root. Below it the rules know that, a learned model
  does not; but its policy has learned from what was allowed. With no simulations it is the policy's prior.
  """
  draw_key, search_key = jax.random.split(key)
  policy, value = predict(agent, params.network, hidden)
  policy = masked(policy, observation)
  candidates, logits = draw(agent, policy, draw_key)
  steps = jnp.broadcast_to(params.steps, value.shape)
  acted = jnp.zeros(value.shape, bool)
  if not simulations:
    kind = agent.network.distribution
    x = kind.mode(policy) if agent.greedy else kind.sample(policy, search_key)
    return x, Plan(jax.nn.softmax(logits), candidates, value, steps, acted)
  if agent.model == 'rules':
    hidden = jax.vmap(agent.environment.dynamics.state_of)(observation)
  root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=(hidden, candidates))
  with jax.numpy_rank_promotion('allow'), inside_loops():
    found = _search(agent, params.network, root, search_key, simulations)
    value = _root_value(agent, found)
  x = chosen(agent, candidates, found.action)
  return x, Plan(found.action_weights, candidates, value, steps, acted)


def _search(
  agent: Any, network: Any, root: mctx.RootFnOutput, key: Array, simulations: int
) -> mctx.PolicyOutput:
  common: dict[str, Any] = dict(
    params=network,
    rng_key=jax.random.key_data(key),  # JAX's check of keys does not see through mctx's loops
    root=root,
    recurrent_fn=functools.partial(expand, agent),
    num_simulations=simulations,
    invalid_actions=root.prior_logits < distributions.MASKED / 2,
    max_depth=agent.max_depth or None,
  )
  if agent.search == 'gumbel':
    transform = mctx.qtransform_completed_by_mix_value
    return mctx.gumbel_muzero_policy(
      **common,
      qtransform=functools.partial(
        transform, value_scale=agent.value_scale, rescale_values=agent.rescale_values
      ),
      max_num_considered_actions=agent.considered_actions,
      gumbel_scale=0.0 if agent.greedy else 1.0,
    )
  return mctx.muzero_policy(
    **common,
    dirichlet_fraction=0.0 if agent.greedy else agent.dirichlet_fraction,
    dirichlet_alpha=agent.dirichlet_alpha,
    temperature=0.0 if agent.greedy else agent.temperature,
  )


def expand(
  agent: Any, network: Any, key: Array, arm: Array, embedding: Any
) -> tuple[mctx.RecurrentFnOutput, Any]:
  """mctx's recurrent function: the state behind an arm [B] of each node."""
  hidden, candidates = embedding
  draw_key, step_key = jax.random.split(key)
  action = chosen(agent, candidates, arm)
  if agent.model == 'rules':
    hidden, reward, going, policy, value = by_rules(agent, network, hidden, action, step_key)
  else:
    hidden, outputs = agent.network.dynamics(network, hidden, action)
    policy, value = predict(agent, network, hidden)
    reward, going = decode(outputs, agent.network.support), jnp.ones_like(value)
  candidates, logits = draw(agent, policy, draw_key)
  output = mctx.RecurrentFnOutput(
    reward=reward, discount=agent.discount * going, prior_logits=logits, value=value
  )
  return output, (hidden, candidates)


def by_rules(
  agent: Any, network: Any, state: Any, action: Any, key: Array
) -> tuple[Any, Array, Array, Array, Array]:
  """The environment's states behind actions [B] in others [B], rewards, what goes on there, policy and value.

  What happens by chance is drawn once for each node of the tree.
  """
  keys = jax.random.split(key, action.shape[0])
  x = agent.network.distribution.to_action(action)
  state, timestep = jax.vmap(agent.environment.dynamics.step)(state, x, keys)
  one = jax.tree.map(lambda x: x[None], timestep)
  hidden, _ = agent.network.represent(network, (), one)
  policy, value = predict(agent, network, jax.tree.map(lambda x: x[0], hidden))
  return state, timestep.reward, timestep.discount, masked(policy, timestep.observation), value


def predict(agent: Any, network: Any, hidden: Any) -> tuple[Array, Array]:
  """The policy [B, P] and the value [B]."""
  found = agent.network.predict(network, hidden)
  return found.policy, decode(found.value, agent.network.support)


def draw(agent: Any, policy: Array, key: Array) -> tuple[Any, Array]:
  """Candidates [B, K, ...] of policies [B, P], and the logits of their priors [B, K].

  All actions, as (); or K samples of a flattened policy beta, with the prior (beta_hat / beta) pi (Hubert et al.
  2021, arXiv 2104.06303, section 4.2), where beta_hat is how often a sample came. Of equal samples the first one has
  it, and the others have no prior.
  """
  n = agent.num_candidates
  if not n:
    return (), policy
  kind = agent.network.distribution
  wide, beta = (jnp.repeat(x[:, None], n, axis=1) for x in (policy, flattened(agent, policy)))
  x = kind.sample(beta, key)
  flat = x.reshape(*x.shape[:2], -1)
  same = jnp.all(flat[:, :, None] == flat[:, None], axis=-1)
  share = jnp.mean(same, axis=-1)
  earlier = jnp.any(jnp.tril(same, -1), axis=-1)
  logits = jnp.log(share) - kind.log_prob(beta, x) + kind.log_prob(wide, x)
  return x, jnp.where(earlier, distributions.MASKED, logits)


def by_chance(agent: Any, x: Any, observation: Any, key: Array) -> Any:
  """Raw samples [B, ...], of which a share of `epsilon` is uniform over what is allowed, or a Normal's."""
  kind, n = agent.network.distribution, x.shape[0]
  draw_key, pick_key = jax.random.split(key)
  other = kind.sample(masked(jnp.zeros((n, kind.size)), observation), draw_key)
  picked = jax.random.bernoulli(pick_key, agent.epsilon, (n,))
  return jnp.where(picked.reshape((n,) + (1,) * (x.ndim - 1)), other, x)


def flattened(agent: Any, policy: Array) -> Array:
  """The policy [B, P] at `sampled_temperature`."""
  kind, t = agent.network.distribution, agent.sampled_temperature
  if isinstance(kind, distributions.Normal):
    mean, log_std = kind.mean_and_log_std(policy)
    return jnp.concatenate([mean, log_std + math.log(t)], axis=-1)
  return policy / t


def chosen(agent: Any, candidates: Any, arm: Array) -> Any:
  """The raw samples [B, ...] of arms [B]."""
  if not agent.num_candidates:
    return arm.astype(jnp.int32)
  return candidates[jnp.arange(arm.shape[0]), arm]


def _root_value(agent: Any, found: mctx.PolicyOutput) -> Array:
  """The value [B] of the root: of the improved policy (gumbel), or the mean of what was visited."""
  if agent.search == 'puct':
    return found.search_tree.node_values[:, 0]

  def completed(tree: Any) -> Array:
    q = mctx.qtransform_completed_by_mix_value(
      tree, 0, value_scale=1.0, maxvisit_init=1.0, rescale_values=False
    )
    return q / (1.0 + jnp.max(tree.children_visits[0]))

  return jnp.sum(found.action_weights * jax.vmap(completed)(found.search_tree), axis=-1)
