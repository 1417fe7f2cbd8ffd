"""The agent of cca.py: a policy gradient with counterfactual, forward or no baseline, or with hindsight.

A baseline that knows the luck of the episode, but nothing of the action (Mesnard et al. 2021, theorem 2):

    sum_t grad log pi(A_t | X_t) (G_t - V(X_t, Phi_t)),   Phi_t independent of A_t given X_t

A recurrent network that runs backwards over the episode computes Phi_t. These losses train the rest:

    hindsight     (G_t - V(X_t, Phi_t))^2                      V and Phi
    classifier    -log h(A_t | X_t, Phi_t)                     h; Phi is stopped
    independence  log h(A_t | X_t, Phi_t) - log pi(A_t | X_t)  Phi; pi and h are stopped
    value         (G_t - V(X_t))^2                             the baseline of `advantage`

`credit` selects the estimator: `cca`, `advantage` (G_t - V(X_t)), `reinforce` (G_t), or `hca`, the state-conditional
one of Harutyunyan et al. 2019 (arXiv 1912.02503): the reward of the step less its mean, and for each later reward
h(a | X_t, X_k) / pi(a | X_t) - 1 as the credit of each action a. An unroll must hold whole episodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from podrace import returns
from podrace.learner import sgd
from podrace.networks import ActorCritic
from podrace.types import ActorOutput, Sample, TimeStep, TrainState, Trajectory, take_batch


class Pair(nn.Module):
  """A function of x and y [..., n], with leading axes that broadcast. It is 0 at the beginning."""

  size: int
  outputs: int

  @nn.compact
  def __call__(self, x: Array, y: Array) -> Array:
    hidden = nn.relu(nn.Dense(self.size)(x) + nn.Dense(self.size, use_bias=False)(y))
    hidden = nn.relu(nn.Dense(self.size)(hidden))
    return nn.Dense(self.outputs, kernel_init=nn.initializers.zeros)(hidden)


class Models(nn.Module):
  """The models of hindsight: Phi, V(x, phi) and h(a | x, y)."""

  actions: int
  size: int
  features: int

  def setup(self) -> None:
    self.cell, self.head = nn.GRUCell(self.size), nn.Dense(self.features)
    self.baseline, self.classifier = Pair(self.size, 1), Pair(self.size, self.actions)

  def phi(self, transitions: Array, mask: Array) -> Array:
    """Return Phi [T, B, features] of transitions [T, B, n]: a GRU from the end of each episode backwards."""

    def step(self: Models, state: Array, now: Any) -> tuple[Array, Array]:
      transition, mask = now
      state = mask[:, None] * self.cell(state, transition)[0]
      return state, state

    start = jnp.broadcast_to(0 * transitions[0, :, :1], (transitions.shape[1], self.size))
    scan = nn.scan(step, variable_broadcast='params', split_rngs={'params': False}, reverse=True)
    return self.head(scan(self, start, (transitions, mask))[1])

  def value(self, x: Array, phi: Array) -> Array:
    return self.baseline(x, phi)[..., 0]

  def log_h(self, log_pi: Array, x: Array, y: Array) -> Array:
    return jax.nn.log_softmax(log_pi + self.classifier(x, y))


@dataclasses.dataclass(frozen=True)
class CCA:
  network: ActorCritic = ActorCritic(hidden=(32, 32), shared=False)
  credit: Literal['cca', 'advantage', 'reinforce', 'hca'] = 'cca'
  independence: float = 10.0  # weight of the loss that makes Phi independent of the action
  divergence: Literal['information', 'kl'] = 'information'
  policy_cost: float = 1.0  # 0: the policy stays as it is
  entropy_cost: float = 0.02
  early_entropy_cost: float = 0.0  # more of it at the start; falls to 0 at half of the run
  total_updates: int = 0  # of the run, which sets it
  learning_rate: float = 3e-4
  model_rate: float = 3e-3  # of V and h, which follow the policy and Phi
  anneal: bool = False  # both rates fall to 0 over the run
  discount: float = 1.0
  size: int = 32  # units of the models of hindsight
  features: int = 2  # numbers in Phi
  greedy: bool = False

  @property
  def models(self) -> Models:
    return Models(self.network.distribution.size, self.size, self.features)

  def optimizer(self) -> optax.GradientTransformation:
    def scale(path: Any, update: Array) -> Array:
      name = jax.tree_util.keystr(path)
      follows = any(part in name for part in ('value', 'baseline', 'classifier'))
      return -(self.model_rate if follows else self.learning_rate) * update

    def scale_all(updates: Any, params: Any) -> Any:
      return jax.tree_util.tree_map_with_path(scale, updates)

    steps = [optax.flatten(optax.scale_by_adam()), optax.stateless(scale_all)]
    if self.anneal:
      steps.append(optax.scale_by_schedule(optax.linear_schedule(1.0, 0.0, self.total_updates)))
    return optax.chain(*steps)

  def init(self, key: Array) -> TrainState:
    policy_key, models_key = jax.random.split(key)
    x = self.network.example().observation[None]
    log_pi = jnp.zeros([1, 1, self.network.distribution.size])

    def call_all(models: Models) -> Any:
      seen = jnp.concatenate([x, log_pi, log_pi[..., :1], x], -1)
      phi = models.phi(seen, jnp.ones([1, 1]))
      return models.value(x, phi), models.log_h(log_pi, x, x if self.credit == 'hca' else phi)

    models = self.models.init(models_key, method=call_all)
    policy = self.network.init(policy_key)
    return TrainState(policy, (models, self.optimizer().init((policy, models))))

  def initial_state(self, env_id: Array) -> Any:
    return self.network.initial_state(env_id.shape[0])

  def act(self, params: Any, state: Any, timestep: TimeStep, key: Array) -> tuple[ActorOutput, Any]:
    output, state = self.network.step(params, state, timestep)
    policy = self.network.distribution
    best = policy.mode(output.policy)
    return ActorOutput(best if self.greedy else policy.sample(output.policy, key)), state

  def learn(self, train: TrainState, sample: Sample, key: Array) -> tuple[TrainState, Array, Any]:
    models, opt_state = train.rest
    early = jnp.maximum(0.0, 1.0 - 2.0 * opt_state[0].count / max(self.total_updates, 1))
    cost = self.entropy_cost + early * self.early_entropy_cost
    agent = dataclasses.replace(self, entropy_cost=cost)

    def loss(learned: Any) -> tuple[Array, Any]:
      losses = agent.losses(*learned, sample.trajectory)
      return (total := sum(losses.values())), dict(losses, loss=total)

    learned = train.params, models
    (policy, models), opt_state, metrics = sgd(loss, self.optimizer(), learned, opt_state)
    return TrainState(policy, (models, opt_state)), jnp.ones_like(sample.weight), metrics

  def losses(self, policy: Any, models: Any, trajectory: Trajectory) -> dict[str, Array]:
    """Return the losses; their sum is minimised."""
    steps = trajectory.timesteps
    x, r_t, mask = steps.observation[:-1], steps.reward[1:], 1.0 - steps.last[:-1]
    output, _ = self.network.unroll(policy, trajectory.agent_state, steps)
    log_pi = jax.nn.log_softmax(output.policy[:-1])
    pi, fixed = jnp.exp(log_pi), lax.stop_gradient(log_pi)
    taken = jax.nn.one_hot(trajectory.outputs.action, pi.shape[-1])
    decay_t = self.discount * (1.0 - steps.last[1:])
    g = jax.vmap(returns.discounted_sum, in_axes=1, out_axes=1)(r_t, decay_t)

    def mean(values: Array) -> Array:
      return jnp.mean(mask * values)

    def model(params: Any, method: str, *inputs: Array) -> Array:
      return self.models.apply(params, *inputs, method=method)

    target = r_t if self.credit == 'hca' else g
    error, later = target - output.value[:-1], 0.0
    losses = dict(value=mean(error**2))
    if self.credit == 'cca':
      seen = jnp.concatenate([x, taken, r_t[..., None], steps.observation[1:]], -1)
      phi = model(models, 'phi', mask[..., None] * seen, mask)
      error = g - model(models, 'value', x, phi)
      log_h = model(models, 'log_h', fixed, x, lax.stop_gradient(phi))
      log_h_of_phi = model(lax.stop_gradient(models), 'log_h', fixed, x, phi)
      weight, ratio = taken, log_h_of_phi - fixed
      if self.divergence == 'kl':
        weight, ratio = jnp.exp(fixed), -ratio
      losses |= dict(hindsight=mean(error**2), classifier=-mean(jnp.sum(taken * log_h, -1)))
      losses['independence'] = self.independence * mean(jnp.sum(weight * ratio, -1))
    elif self.credit == 'hca':  # axes t, k, B, A
      pairs = fixed[:, None], x[:, None], x[None]
      log_h = model(models, 'log_h', *pairs)
      follows = after(steps.first[:-1]) * mask[None]
      losses['classifier'] = -jnp.mean(follows * jnp.sum(taken[:, None] * log_h, -1))
      ratio = jnp.exp(lax.stop_gradient(log_h) - pairs[0])
      lag = jnp.subtract.outer(jnp.arange(len(mask)), jnp.arange(len(mask))).T  # k - t
      follows *= self.discount ** jnp.maximum(lag, 0)[..., None]
      later = jnp.einsum('tkb,tkba,kb->tba', follows, ratio - 1.0, r_t)
    advantage = lax.stop_gradient(g if self.credit == 'reinforce' else error)
    gain = jnp.sum(taken * log_pi, -1) * advantage + jnp.sum(pi * later, -1)
    entropy = -jnp.sum(pi * log_pi, -1)
    losses['policy'] = -self.policy_cost * mean(gain + self.entropy_cost * entropy)
    return losses


def after(first: Array) -> Array:
  """Return whether k follows t in the same episode, [t, k, B], of first [T, B]."""
  episode, n = jnp.cumsum(first, axis=0), len(first)
  return jnp.triu(jnp.ones([n, n]), 1)[..., None] * (episode[:, None] == episode[None])


def policy_score(agent: CCA, env: Any, train: TrainState) -> Array:
  """Return the exact score of the policy."""
  x = jnp.asarray(env.dynamics.decisive)
  zeros = jnp.zeros(len(x))
  output, _ = agent.network.step(train.params, (), TimeStep(x, zeros, zeros, zeros))
  return env.dynamics.score(jax.nn.softmax(output.policy))


def gradient_moments(agent: CCA, env: Any, train: TrainState, episodes: int = 2048) -> Array:
  """Return variance and share of the exact gradient, of each estimator [3, 2], on the same bandit episodes."""
  keys = jax.random.split(jax.random.key(0), (3, episodes))
  state, first = jax.vmap(env.reset)(keys[0])
  outputs, _ = agent.act(train.params, (), first, keys[1, 0])
  _, last = jax.vmap(env.step)(state, outputs.action, keys[2])
  timesteps = jax.tree.map(lambda *x: jnp.stack(x), first, last)
  each = jnp.arange(episodes)
  trajectory = Trajectory(timesteps, jax.tree.map(lambda x: x[None], outputs), (), each)

  def loss(policy: Any, credit: str, i: Array) -> Array:
    plain = dataclasses.replace(agent, credit=credit, policy_cost=1.0, entropy_cost=0.0)
    return plain.losses(policy, train.rest[0], take_batch(trajectory, i[None]))['policy']

  def gradient(f: Callable[[Any], Array]) -> Array:
    return ravel_pytree(jax.grad(f)(train.params))[0]

  exact = gradient(lambda policy: -policy_score(agent, env, TrainState(policy, ())))
  moments = []
  for credit in ('cca', 'advantage', 'reinforce'):
    samples = jax.vmap(lambda i: gradient(lambda policy: loss(policy, credit, i)))(each)
    share = jnp.mean(samples, 0) @ exact / (exact @ exact)
    moments.append(jnp.stack([jnp.sum(jnp.var(samples, 0)), share]))
  return jnp.stack(moments)
