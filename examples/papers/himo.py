"""Hindsight modelling of value, HiMo (Guez et al. 2020, arXiv 2002.08329).

    v+(h_t, h_{t+k}) = psi_1(sg h_t, phi(sg h_{t+k}))     sees k steps of the future
    v_m(h_t)         = psi_2(h_t, sg phi_hat(h_t))        predicts the useful part of that future
    L = L_v(v_m) + alpha L_v(v+) + beta (sg phi - phi_hat)^2

`regression` is section 3.2 as its authors released it, where v+ trains h. `HiMo` is IMPALA with these heads: V-trace
uses v_m, the policy sees (h, sg phi_hat). Deviations: no memory, so phi sees the observation; episodes of one bet.

    podrace train --agent himo:HiMo --env python:himo.bet --total-steps 200_000
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Iterable
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.stats
from jax import Array, lax

import podrace
from podrace import distributions, returns
from podrace.envs.base import NextStepReset, restart, transition
from podrace.learner import sgd
from podrace.types import ActorOutput, Sample, TimeStep, TrainState, Trajectory

D1, D2, D, STEPS = 28, 4, 32, 200_000  # parts of x in the regression; steps of the agent
PANELS = 'regression: squared error', 'agent: squared error', 'agent: reward of a bet'
sg = lax.stop_gradient


def init_mlp(key: Array, *sizes: int) -> list[tuple[Array, Array]]:
  """Returns weights and biases, with the initializer of Haiku's Linear."""
  normal, keys = jax.nn.initializers.truncated_normal(1.0), jax.random.split(key, len(sizes) - 1)
  shapes = zip(keys, sizes[:-1], sizes[1:], strict=True)
  return [(normal(k, (n, m)) / n**0.5, jnp.zeros((1, m))) for k, n, m in shapes]


def mlp(layers: list[tuple[Array, Array]], *inputs: Array, final: bool = False) -> Array:
  """Applies layers to inputs [N, n] side by side. `final`: a ReLU behind the last layer, too."""
  x = jnp.concatenate(inputs, axis=-1)
  for i, (w, b) in enumerate(layers):
    x = jax.nn.relu(x @ w + b) if final or i < len(layers) - 1 else x @ w + b
  return x


@dataclasses.dataclass(frozen=True)
class HindsightNetwork:  # perceptrons of observations [N, inputs]
  hidden: int = 16
  phi: int = 3
  inputs: int = D
  actions: int = 1

  def bind(self, observation_space: Any, action_space: Any) -> HindsightNetwork:
    return HindsightNetwork(self.hidden, self.phi, *observation_space.shape, int(action_space.n))

  def init(self, key: Array) -> Any:
    n, seen = self.hidden, self.hidden + self.phi
    shapes = dict(h=(self.inputs, n, n), phi_hat=(n, self.phi), policy=(seen, n, self.actions),
                  v=(seen, n, 1), phi=(self.inputs, n, self.phi), v_plus=(seen, n, 1))  # fmt: skip
    keys = zip(shapes, jax.random.split(key, len(shapes)), strict=True)
    return {name: init_mlp(k, *shapes[name]) for name, k in keys}

  def __call__(self, params: Any, x: Array, future: Array, hindsight: bool, stop: Any = sg) -> Any:
    """Returns logits, v_m, v+, phi, phi_hat. Without hindsight, v_m and policy train phi_hat."""
    h = mlp(params['h'], x, final=True)
    phi, phi_hat = mlp(params['phi'], future), mlp(params['phi_hat'], h)
    seen = h, sg(phi_hat) if hindsight else phi_hat
    v, v_plus = mlp(params['v'], *seen)[:, 0], mlp(params['v_plus'], stop(h), phi)[:, 0]
    return mlp(params['policy'], *seen), v, v_plus, phi, phi_hat


def chain(key: Array) -> Any:
  """Draws x1' = MLP(x) + noise, x2' = heaviside(W x2 + b); returns the function (key, x) -> x'."""
  shapes = [(D2, D2), (1, D2), (D, D), (1, D), (D, D1), (1, D1)]
  w, b, w1, b1, w2, b2 = map(jax.random.normal, jax.random.split(key, len(shapes)), shapes)

  def following(key: Array, x: Array) -> Array:
    x1 = jax.nn.sigmoid(jax.nn.sigmoid(x @ w1 + b1) @ w2 + b2)
    x1 += jax.random.normal(key, x1.shape)
    return jnp.concatenate([x1, jnp.heaviside(x[:, D1:] @ w + b, 0.0)], axis=1)

  return following


def regression_loss(params: Any, x: Array, x_next: Array, r: Array, method: str) -> Any:
  """Returns the loss, and squared errors [n]: of v_m and v+, or of v alone."""
  if method == 'model':  # predicts all of x', and values the prediction
    predicted = mlp(params['model'], x)
    loss = jnp.mean((mlp(params['v'], x, x_next)[:, 0] - r) ** 2)
    loss += 3.0 * jnp.mean((predicted - x_next) ** 2)
    return loss, jnp.mean((mlp(params['v'], x, predicted)[:, 0] - r) ** 2)[None]
  himo = method == 'himo'
  _, v, v_plus, phi, phi_hat = HindsightNetwork()(params, x, x_next, himo, stop=lambda h: h)
  errors = jnp.mean(jnp.stack([v - r, v_plus - r] if himo else [v - r]) ** 2, axis=1)
  return jnp.sum(errors) + 3.0 * himo * jnp.mean((sg(phi) - phi_hat) ** 2), errors


def regression(key: Array, method: str, iterations: int = 8_000) -> Array:
  """Trains in a new chain. Returns errors [n, iterations / 100], smoothed by 0.99."""
  chain_key, init_key, *keys, data_key = jax.random.split(key, 5)
  following, params = chain(chain_key), HindsightNetwork().init(init_key)
  optimizer = optax.adam(4e-3, eps=1e-3)
  if method == 'model':
    params = dict(model=init_mlp(keys[0], D, 16, 16, D), v=init_mlp(keys[1], 2 * D, 16, 16, 16, 1))

  def step(carry: Any, key: Array) -> Any:
    (params, opt_state, smoothed), (x_key, next_key) = carry, jax.random.split(key)
    x = jax.random.normal(x_key, (64, D))
    x_next = following(next_key, x)
    r = jnp.sum(x[:, :D1], 1) * jnp.sum(x_next[:, D1:], 1) / D**0.5
    grads, errors = jax.grad(regression_loss, has_aux=True)(params, x, x_next, r, method)
    updates, opt_state = optimizer.update(grads, opt_state)
    smoothed = jnp.where(jnp.isnan(smoothed), errors, 0.99 * smoothed + 0.01 * errors)
    return (optax.apply_updates(params, updates), opt_state, smoothed), smoothed

  start = params, optimizer.init(params), jnp.full(1 + (method == 'himo'), jnp.nan)
  return lax.scan(step, start, jax.random.split(data_key, iterations))[1][99::100].T


@dataclasses.dataclass(frozen=True)
class HiMo:  # IMPALA with hindsight modelling
  network: HindsightNetwork = HindsightNetwork()
  hindsight: bool = True  # False: the same network as a plain actor-critic
  k: int = 1  # steps of the future that v+ sees
  alpha: float = 1.0  # weight of the loss of v+
  beta: float = 3.0  # weight of the loss of phi_hat
  learning_rate: float = 2e-3
  discount: float = 0.9
  entropy_cost: float = 0.1

  def init(self, key: Array) -> TrainState:
    params = self.network.init(key)
    return TrainState(params, optax.adam(self.learning_rate, eps=1e-3).init(params))

  def initial_state(self, env_id: Array) -> Any:
    return ()

  def act(self, params: Any, state: Any, timestep: TimeStep, key: Array) -> tuple[Any, Any]:
    logits = self.network(params, timestep.observation, timestep.observation, self.hindsight)[0]
    policy = distributions.Categorical(self.network.actions)
    action = policy.sample(logits, key)
    return ActorOutput(action, policy.log_prob(logits, action)), state

  def learn(self, train: TrainState, sample: Sample, key: Array) -> tuple[TrainState, Array, Any]:
    loss = functools.partial(self.loss, trajectory=sample.trajectory, key=key)
    *train, metrics = sgd(loss, optax.adam(self.learning_rate, eps=1e-3), *train)
    return TrainState(*train), jnp.ones_like(sample.weight), metrics

  def loss(self, params: Any, trajectory: Trajectory, key: Array) -> tuple[Array, Any]:
    """Returns L_policy + L_v(v_m) + alpha L_v(v+) + beta L_model, a mean over [T, B]."""
    steps, outputs = trajectory.timesteps, trajectory.outputs
    time = jnp.arange(len(steps.last))[:, None]  # v+ of t sees t + k, or an earlier end
    end = jnp.where(steps.last, time, len(steps.last) - 1)[1:]  # of episode or trajectory
    k = jnp.minimum(time + self.k, jnp.append(lax.cummin(end, 0, reverse=True), end[-1:], 0))
    network = jax.vmap(functools.partial(self.network, params, hindsight=self.hindsight))
    future = jnp.take_along_axis(steps.observation, k[..., None], axis=0)
    logits, value, *hindsight = network(steps.observation, future)
    logits, v_plus, phi, phi_hat = (x[:-1] for x in (logits, *hindsight))
    policy = distributions.Categorical(self.network.actions)
    log_prob, entropy = policy.log_prob(logits, outputs.action), policy.entropy(logits, key)
    estimate = jax.vmap(returns.vtrace, in_axes=1, out_axes=1)(
      steps.reward[1:], self.discount * steps.discount[1:], 1.0 - steps.last[1:],
      *sg((value[:-1], value[1:], jnp.exp(log_prob - outputs.extras))),
    )  # fmt: skip
    terms = dict(
      v_error=(estimate.target - value[:-1]) ** 2,
      plus_error=(estimate.target - v_plus) ** 2,
      model_error=jnp.mean((sg(phi) - phi_hat) ** 2, axis=-1),
      policy_loss=-estimate.advantage * log_prob - self.entropy_cost * entropy,
    )
    mean = {name: jnp.mean(~steps.last[:-1] * x) for name, x in terms.items()}  # not LAST -> FIRST
    hindsight = self.alpha * mean['plus_error'] + self.beta * mean['model_error']
    loss = mean['policy_loss'] + mean['v_error'] + self.hindsight * hindsight
    return loss, dict(loss=loss, **mean)


@dataclasses.dataclass(frozen=True)
class Bet:  # see x, bet on the sign of sum(x1) sum(2 x2' - 1) / sqrt(D), be paid, and see x'
  following: Any  # of `chain`
  observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (D,), 'float32')
  action_space = gymnasium.spaces.Discrete(2)

  def reset(self, key: Array) -> tuple[Array, TimeStep]:
    x = jax.random.normal(key, (D,))
    return x, restart(x)

  def step(self, x: Array, action: Array, key: Array) -> tuple[Array, TimeStep]:
    x_next = self.following(key, x[None])[0]
    reward = (2.0 * action - 1.0) * jnp.sum(x[:D1]) * jnp.sum(2.0 * x_next[D1:] - 1.0) / D**0.5
    return x_next, transition(x_next, reward, terminated=True, truncated=False)


def bet(instance: int = 0) -> NextStepReset:
  return NextStepReset(Bet(chain(jax.random.key(instance))))


def measure(seeds: Iterable[int]) -> dict[str, Any]:
  """Returns curves [S, n] by panel and name. Each seed of the regression has its own chain."""
  error, agent, reward = {}, collections.defaultdict(list), collections.defaultdict(list)
  for method, names in dict(direct=['v'], himo=['v_m', 'v+'], model=['model-based']).items():
    run = jax.jit(jax.vmap(lambda seed: regression(jax.random.key(seed), method)))
    curves = np.float64(run(jnp.array([*seeds]))).round(5)
    error |= {name: curves[:, i].tolist() for i, name in enumerate(names)}
  for seed, (v, himo) in itertools.product(seeds, (('v', False), ('v_m', True))):
    config = podrace.configure(
      env='python:himo.bet', agent=HiMo(hindsight=himo), seed=seed, devices=1, num_envs=64,
      unroll_length=8, total_steps=STEPS, log_every=STEPS // 40,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
      lines = podrace.train(config, folder, quiet=True).metrics
    reward['IMPALA with HiMo' if himo else 'IMPALA'].append([x['episode_return'] for x in lines])
    for name, metric in ((v, 'v_error'), ('v+', 'plus_error'))[: 1 + himo]:
      agent[name].append([2 * x[metric] for x in lines])  # half of the steps are masked
  return dict(zip(PANELS, (error, agent, reward), strict=True))


def interval(values: Any) -> tuple[Any, Any]:
  n = len(values)  # seeds; returns their mean, and half of its 95% confidence interval
  return np.mean(values, 0), scipy.stats.t.ppf(0.975, n - 1) * np.std(values, 0, ddof=1) / n**0.5


def draw(results: dict[str, Any], figure: Any) -> None:
  figure.set_size_inches(10, 3.4)
  for axes, panel in zip(figure.subplots(1, 3), PANELS, strict=True):
    unit, end = ('environment steps', STEPS) if 'agent' in panel else ('iterations', 8_000)
    axes.set(xlabel=f'{unit} / 1,000', ylabel=panel, xlim=(0, end / 1e3))
    for i, (name, values) in enumerate(results[panel].items()):
      mean, half = interval(values)
      time = np.linspace(0, end / 1e3, len(mean) + 1)[1:]
      axes.plot(time, mean, f'C{i}', label=name)
      axes.fill_between(time, mean - half, mean + half, color=f'C{i}', alpha=0.2, linewidth=0)
    axes.set_ylim(0, None if 'agent' in panel else 0.3)  # 0.3: as in the paper
    axes.legend(frameon=False)


if __name__ == '__main__':
  for panel, curves in measure(range(3)).items():
    for name, values in curves.items():
      print(f'{panel}, {name}', *interval([x[-1] for x in values]))
