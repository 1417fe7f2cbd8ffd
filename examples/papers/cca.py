"""Counterfactual credit assignment (Mesnard et al. 2021, arXiv 2011.09464), on its two small tasks.

cca_agent.py has the equations, cca_tasks.py the tasks. Deviations from the paper:

- The independence loss is the mutual information of action and Phi, the mean of log h(A | X, Phi) - log pi(A | X).
  `divergence='kl'` is the paper's KL(pi || h). With h stopped, and noise larger than the effect of an action, its
  gradient shrinks all of Phi alike, also the noise that Phi is there for.
- V and h learn ten times as fast as the policy and Phi, as they must follow them.
- The policy has no memory, as the tasks need none. h adds its output to the logits of the policy.
- The bandit has 5 contexts. Key-to-door is a conveyor, with the apples of Meulemans et al. 2023 (arXiv 2306.16803).

    python examples/papers/cca.py

or, in its directory, with unrolls that hold whole episodes:

    podrace train --agent cca:CCA --env python:cca.key_to_door,length=23 --num-envs 64 --unroll-length 23
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from cca_agent import CCA
from cca_tasks import bandit, key_to_door
from jax import Array, lax
from jax.flatten_util import ravel_pytree

import podrace
from podrace.types import TimeStep, TrainState, Trajectory, take_batch

LENGTH = 23
TASKS: dict[str, Any] = {  # environment, sizes of a run, updates
  'bandit': (bandit(), dict(env='python:cca.bandit', num_envs=256, unroll_length=2), 1500),
  'key-to-door': (
    key_to_door(LENGTH),
    dict(env=f'python:cca.key_to_door,length={LENGTH}', num_envs=64, unroll_length=LENGTH),
    8100,
  ),
}
OFF, KL = 'CCA, independence off', "CCA, the paper's KL"
LEARNERS: dict[str, dict[str, Any]] = {
  'CCA': {},
  'advantage': dict(credit='advantage'),
  'REINFORCE': dict(credit='reinforce'),
  'HCA': dict(credit='hca'),
  OFF: dict(independence=0.0),
  KL: dict(divergence='kl'),
}
COLORS = {name: f'C{i}' for i, name in enumerate(LEARNERS)}


class Probe:
  """Keeps `score(train)` of each seed at each line of a run."""

  exact = False  # a resumed run would lack the lines before

  def __init__(self, score: Callable[[TrainState], Array]) -> None:
    self.score, self.lines = jax.jit(partial(lax.map, score)), []

  def __call__(self, line: Any) -> None:
    """`transform` does the work."""

  def transform(self, train: TrainState, line: Any) -> TrainState:
    self.lines.append(np.asarray(self.score(train)).tolist())
    return train


def run(task: str, seeds: Sequence[int], score: Any, lines: int = 15, **settings: Any) -> Any:
  """Train and return the scores by line and seed, the seeds in one program."""
  env, sizes, updates = TASKS[task]
  agent = CCA(**settings)
  bound = dataclasses.replace(
    agent, network=agent.network.bind(env.observation_space, env.action_space)
  )
  probe = Probe(partial(score, bound, env))
  steps = updates * sizes['num_envs'] * sizes['unroll_length']
  many = dict(seed=seeds[0], seeds=len(seeds), total_steps=steps, log_every=steps // lines)
  config = podrace.configure(agent=agent, devices=1, **many, **sizes)
  with tempfile.TemporaryDirectory() as folder:
    podrace.train(config, f'{folder}/run', [probe], quiet=True)
  return probe.lines


def policy_score(agent: CCA, env: Any, train: TrainState) -> Array:
  """Return the exact score of the policy."""
  x = env.dynamics.decisive()
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


def measure(seeds: Sequence[int]) -> dict[str, Any]:
  """Return gradient moments under a fixed policy, and the scores of learning, by line and seed."""
  fixed = {
    name: run('bandit', seeds, gradient_moments, 1, policy_cost=0.0, **LEARNERS[name])[-1]
    for name in ('CCA', OFF, KL)
  }
  learners = {'bandit': ('CCA', 'advantage', 'REINFORCE', OFF), 'key-to-door': tuple(LEARNERS)[:4]}
  curves = {
    task: {name: run(task, seeds, policy_score, **LEARNERS[name]) for name in names}
    for task, names in learners.items()
  }
  return {'gradient': fixed, **curves}


def interval(values: Any) -> tuple[Any, Any]:
  """Return the mean over the last axis, and half the width of its 95% interval."""
  values = np.asarray(values)
  n = values.shape[-1]
  half = scipy.stats.t.ppf(0.975, n - 1) * values.std(-1, ddof=1) / np.sqrt(n)
  return values.mean(-1), half


def draw(results: dict[str, Any], figure: Any) -> None:
  figure.set_size_inches(12, 3.6)
  gradient, *axes = figure.subplots(1, 3, width_ratios=[1.1, 1, 1])
  for name, (variance, share) in table(results).items():
    (x, dx), (y, dy) = variance, share
    gradient.errorbar(x, y, dy, dx, 'o', color=COLORS[name], capsize=3, label=name)
  gradient.axhline(1, color='gray', linewidth=0.8, linestyle=':')
  gradient.set(
    xscale='log',
    xlabel="variance of the gradient / the advantage's",
    ylabel='share of the exact gradient',
  )
  labels = 'expected reward', 'probability of the treasure'
  for axis, (task, label) in zip(axes, zip(TASKS, labels, strict=True), strict=True):
    _, sizes, updates = TASKS[task]
    for name, lines in results[task].items():
      mean, half = interval(lines)
      x = np.arange(1, len(mean) + 1) / len(mean) * updates * sizes['num_envs'] / 1000
      axis.plot(x, mean, color=COLORS[name], label=name)
      axis.fill_between(x, mean - half, mean + half, color=COLORS[name], alpha=0.2, linewidth=0)
    axis.set(title=task, xlabel='thousand episodes', ylabel=label)
  gradient.set_title('bandit, fixed policy')
  for axis in (gradient, *axes):
    axis.spines[['top', 'right']].set_visible(False)
  entries = [
    x for axis in (*axes, gradient) for x in zip(*axis.get_legend_handles_labels(), strict=True)
  ]
  handles = {label: handle for handle, label in reversed(entries)}
  figure.legend(handles.values(), handles, loc='outside lower center', ncols=6, frameon=False)


def table(results: dict[str, Any]) -> dict[str, Any]:
  """Return mean and interval of relative variance and share, by estimator."""
  of_cca, rows = np.array(results['gradient']['CCA']), {}
  for i, name in enumerate(('CCA', 'advantage', 'REINFORCE')):
    rows[name] = of_cca[:, i, 0] / of_cca[:, 1, 0], of_cca[:, i, 1]
  for name in (OFF, KL):
    run = np.array(results['gradient'][name])
    rows[name] = run[:, 0, 0] / run[:, 1, 0], run[:, 0, 1]
  return {name: tuple(map(interval, row)) for name, row in rows.items()}


def main() -> None:
  results = measure(range(3))
  for name, ((variance, dv), (share, ds)) in table(results).items():
    print(f'{name:24} variance {variance:.3f} +- {dv:.3f}, share {share:.2f} +- {ds:.2f}')
  for task in TASKS:
    for name, lines in results[task].items():
      mean, half = interval(lines[-1])
      print(f'{task:12} {name:24} {mean:.3f} +- {half:.3f}')


if __name__ == '__main__':
  from cca import main  # a run records its agent under the name of this module

  main()
