"""Search from hidden states, by mctx.

`plan` draws candidate actions for each state, searches, and returns the action to take with the
`Plan` to learn from. `SearchSettings` holds everything that can vary: the model, the dynamics that
the tree is made of (the model's own, or the rules of the environment), the candidates of a state,
and the algorithm (Gumbel or PUCT).

Letters: B states, K candidates of a state, P numbers of a policy output.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mctx

from podrace import distributions
from podrace.distributions import Distribution
from podrace.envs.spaces import MASK
from podrace.envs.states import takes_turns
from podrace.networks import Model, inside_loops
from podrace.networks.planning import decode
from podrace.types import Array

SAMPLED = 16  # candidates among continuous and multi-discrete actions, unless a number is given


class MuZeroParams(NamedTuple):
  """Everything that acting needs."""

  network: Any
  steps: Array  # [] i32 gradient steps so far


class Plan(NamedTuple):
  """Result of the search from each state, [B, ...]. Replay keeps it."""

  weights: Array  # [B, K] f32 the improved policy over the candidates
  candidates: Any  # [B, K, ...] raw samples; () if they are all actions
  value: Array  # [B] f32 of the state
  steps: Array  # [B] i32 gradient steps of the network that searched
  reanalysed: Array  # [B] bool: the search was made after acting, by Reanalyse


class SearchStep(NamedTuple):
  """Result of taking one action in each of B states of a tree."""

  state: Any  # [B, ...] the states after the actions
  reward: Array  # [B] f32
  discount: Array  # [B] f32, 0 where the episode terminated, else 1
  policy: Array  # [B, P] f32 in the states after the actions
  value: Array  # [B] f32 likewise


@dataclasses.dataclass(frozen=True)
class LearnedDynamics:
  """The dynamics of a learned model, over its hidden states."""

  model: Model

  def root(self, hidden: Any, observation: Any) -> Any:
    """Return the states [B, ...] at the root: the hidden states."""
    del observation
    return hidden

  def step(self, params: Any, state: Any, action: Any, key: Array) -> SearchStep:
    """Take actions in hidden states. The model knows neither chance nor the end of an episode."""
    del key
    hidden, outputs = self.model.dynamics(params, state, action)
    policy, value = predict(self.model, params, hidden)
    reward, discount = decode(outputs, self.model.support), jnp.ones_like(value)
    return SearchStep(hidden, reward, discount, policy, value)


@dataclasses.dataclass(frozen=True)
class TrueDynamics:
  """The rules of an environment, over its own states, as in AlphaZero."""

  model: Model  # predicts policies and values
  environment: Any  # its `dynamics` have `state_of(observation)` and `step(state, action, key)`

  def root(self, hidden: Any, observation: Any) -> Any:
    """Return the environment's states, which observations hold."""
    del hidden
    return jax.vmap(self.environment.dynamics.state_of)(observation)

  def step(self, params: Any, state: Any, action: Any, key: Array) -> SearchStep:
    """Take actions in the environment's states. Chance is drawn once for each node of the tree."""
    keys = jax.random.split(key, action.shape[0])
    x = self.model.distribution.to_action(action)
    state, timestep = jax.vmap(self.environment.dynamics.step)(state, x, keys)
    one = jax.tree.map(lambda x: x[None], timestep)
    hidden, _ = self.model.represent(params, (), one)
    policy, value = predict(self.model, params, jax.tree.map(lambda x: x[0], hidden))
    allowed = mask_policy(policy, timestep.observation, self.model.distribution)
    return SearchStep(state, timestep.reward, timestep.discount, allowed, value)


@dataclasses.dataclass(frozen=True)
class Candidates:
  """The actions that a search considers in a state: all of them, or samples of a policy."""

  distribution: Distribution
  sampled: int  # K; 0: all actions, or SAMPLED if they cannot be counted
  temperature: float  # of the policy that samples are drawn from

  @property
  def count(self) -> int:
    """K; 0: all actions."""
    countable = isinstance(self.distribution, distributions.Categorical)
    return self.sampled or (0 if countable else SAMPLED)

  def draw(self, policy: Array, key: Array) -> tuple[Any, Array]:
    """Return candidates [B, K, ...] of policies [B, P], and the logits [B, K] of their priors.

    The candidates are all actions, as (), or K samples of a flattened policy beta. The prior of a
    sample is (beta_hat / beta) pi (Hubert et al. 2021, arXiv 2104.06303, section 4.2), where
    beta_hat is the share of the samples that are equal to it. Of equal samples, the first one has
    that prior and the rest have none.
    """
    if not self.count:
      return (), policy
    kind = self.distribution
    wide, beta = (jnp.repeat(x[:, None], self.count, axis=1) for x in (policy, self._flat(policy)))
    x = kind.sample(beta, key)
    flat = x.reshape(*x.shape[:2], -1)
    same = jnp.all(flat[:, :, None] == flat[:, None], axis=-1)
    share = jnp.mean(same, axis=-1)
    earlier = jnp.any(jnp.tril(same, -1), axis=-1)
    logits = jnp.log(share) - kind.log_prob(beta, x) + kind.log_prob(wide, x)
    return x, jnp.where(earlier, distributions.MASKED, logits)

  def select(self, candidates: Any, arm: Array) -> Any:
    """Return the raw samples [B, ...] of arms [B]."""
    if not self.count:
      return arm.astype(jnp.int32)
    return candidates[jnp.arange(arm.shape[0]), arm]

  def _flat(self, policy: Array) -> Array:
    """Return the policies [B, P] at `temperature`."""
    if isinstance(self.distribution, distributions.Normal):
      mean, log_std = self.distribution.mean_and_log_std(policy)
      return jnp.concatenate([mean, log_std + math.log(self.temperature)], axis=-1)
    return policy / self.temperature


@dataclasses.dataclass(frozen=True)
class Gumbel:
  """Gumbel MuZero's search (Danihelka et al. 2022, ICLR)."""

  considered_actions: int  # largest number of actions at the root
  value_scale: float  # of values against the prior
  rescale_values: bool  # rescale values to 0 to 1 among the actions of a state first

  def search(self, greedy: bool, **common: Any) -> mctx.PolicyOutput:
    """Search; `common` are mctx's arguments."""

    def complete(tree: Any, index: Any) -> Array:
      return mctx.qtransform_completed_by_mix_value(
        tree, index, value_scale=self.value_scale, rescale_values=self.rescale_values
      )

    return mctx.gumbel_muzero_policy(
      **common,
      qtransform=complete,
      max_num_considered_actions=self.considered_actions,
      gumbel_scale=0.0 if greedy else 1.0,
    )

  def root_value(self, output: mctx.PolicyOutput) -> Array:
    """Return the value [B] of the improved policy at the root."""

    def complete(tree: Any) -> Array:
      q = mctx.qtransform_completed_by_mix_value(
        tree, 0, value_scale=1.0, maxvisit_init=1.0, rescale_values=False
      )
      return q / (1.0 + jnp.max(tree.children_visits[0]))

    return jnp.sum(output.action_weights * jax.vmap(complete)(output.search_tree), axis=-1)


@dataclasses.dataclass(frozen=True)
class Puct:
  """MuZero's search (Schrittwieser et al. 2020, arXiv 1911.08265, appendix B)."""

  dirichlet_alpha: float  # of the noise at the root
  dirichlet_fraction: float
  temperature: float  # of the visits that the action is drawn by

  def search(self, greedy: bool, **common: Any) -> mctx.PolicyOutput:
    """Search; `common` are mctx's arguments."""
    return mctx.muzero_policy(
      **common,
      dirichlet_fraction=0.0 if greedy else self.dirichlet_fraction,
      dirichlet_alpha=self.dirichlet_alpha,
      temperature=0.0 if greedy else self.temperature,
    )

  def root_value(self, output: mctx.PolicyOutput) -> Array:
    """Return the mean value [B] over the visits of the root."""
    return output.search_tree.node_values[:, 0]


@dataclasses.dataclass(frozen=True)
class SearchSettings:
  """Everything that a search depends on besides the state."""

  model: Model
  dynamics: LearnedDynamics | TrueDynamics
  candidates: Candidates
  algorithm: Gumbel | Puct
  discount: float
  max_depth: int = 0  # of the tree; 0: no limit
  greedy: bool = False  # no noise


def plan(
  settings: SearchSettings,
  params: MuZeroParams,
  hidden: Any,
  observation: Any,
  key: Array,
  simulations: int,
) -> tuple[Any, Plan]:
  """Search from hidden states.

  Args:
    settings: the model, its dynamics, the candidates and the algorithm.
    params: the parameters of the model.
    hidden: the hidden states [B, ...] at the root.
    observation: the observations [B, ...] at the root. Their mask, if any, says which actions are
      allowed there. Below the root the true dynamics know that. A learned model does not, but its
      policy has learned from allowed actions only.
    key: the key of candidates, noise and sampling.
    simulations: of each search; 0: the plan is the prior of the policy.

  Returns:
    The raw samples [B, ...] to act by, and the plans to learn from.
  """
  draw_key, search_key = jax.random.split(key)
  policy, value = predict(settings.model, params.network, hidden)
  policy = mask_policy(policy, observation, settings.model.distribution)
  candidates, logits = settings.candidates.draw(policy, draw_key)
  steps = jnp.broadcast_to(params.steps, value.shape)
  acted = jnp.zeros(value.shape, bool)
  if not simulations:
    kind = settings.model.distribution
    x = kind.mode(policy) if settings.greedy else kind.sample(policy, search_key)
    return x, Plan(jax.nn.softmax(logits), candidates, value, steps, acted)
  state = settings.dynamics.root(hidden, observation)
  root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=(state, candidates))
  with jax.numpy_rank_promotion('allow'), inside_loops():
    output = _search(settings, params.network, root, search_key, simulations)
    value = settings.algorithm.root_value(output)
  x = settings.candidates.select(candidates, output.action)
  return x, Plan(output.action_weights, candidates, value, steps, acted)


def _search(
  settings: SearchSettings, params: Any, root: mctx.RootFnOutput, key: Array, simulations: int
) -> mctx.PolicyOutput:
  def expand(
    params: Any, key: Array, arm: Array, embedding: Any
  ) -> tuple[mctx.RecurrentFnOutput, Any]:
    """Take the arm [B] of each node: mctx's recurrent function."""
    state, candidates = embedding
    draw_key, step_key = jax.random.split(key)
    action = settings.candidates.select(candidates, arm)
    step = settings.dynamics.step(params, state, action, step_key)
    candidates, logits = settings.candidates.draw(step.policy, draw_key)
    output = mctx.RecurrentFnOutput(
      reward=step.reward,
      discount=settings.discount * step.discount,
      prior_logits=logits,
      value=step.value,
    )
    return output, (step.state, candidates)

  return settings.algorithm.search(
    settings.greedy,
    params=params,
    rng_key=jax.random.key_data(key),  # JAX's check of keys does not see through mctx's loops
    root=root,
    recurrent_fn=expand,
    num_simulations=simulations,
    invalid_actions=root.prior_logits < distributions.MASKED / 2,
    max_depth=settings.max_depth or None,
  )


def predict(model: Model, params: Any, hidden: Any) -> tuple[Array, Array]:
  """Return the policies [B, P] and the values [B] of hidden states [B, ...]."""
  prediction = model.predict(params, hidden)
  return prediction.policy, decode(prediction.value, model.support)


def mask_policy(policy: Array, observation: Any, kind: Distribution) -> Array:
  """Return policies [B, P] without the choices that observations forbid, if they have a mask."""
  if not isinstance(observation, dict) or MASK not in observation:
    return policy
  allowed = distributions.allowed(observation[MASK], kind)
  return jnp.where(allowed.reshape(policy.shape), policy, distributions.MASKED)


def explore(
  distribution: Distribution, x: Any, observation: Any, key: Array, epsilon: float
) -> Any:
  """Replace a share `epsilon` of raw samples [B, ...] by random ones.

  They are uniform over the actions that observations [B, ...] allow, or standard normal.
  """
  draw_key, pick_key = jax.random.split(key)
  uniform = mask_policy(jnp.zeros((x.shape[0], distribution.size)), observation, distribution)
  random = distribution.sample(uniform, draw_key)
  picked = jax.random.bernoulli(pick_key, epsilon, x.shape[:1])
  return jnp.where(picked.reshape(x.shape[:1] + (1,) * (x.ndim - 1)), random, x)


def check_discount(discount: float, environment: Any) -> None:
  """Raise ValueError if the discount's sign does not fit the number of players."""
  turns = takes_turns(environment)
  if turns and discount > 0:
    raise ValueError(
      f'discount {discount}: two players take turns in this environment, so what is good for one '
      f'of them is bad for the other; give --agent.discount -{discount:g}'
    )
  if discount < 0 and not turns:
    raise ValueError(
      f'discount {discount} is for two players that take turns, as in '
      'pgx:tic_tac_toe,opponent=self; here it must be at least 0'
    )
