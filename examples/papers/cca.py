"""Counterfactual credit assignment (Mesnard et al. 2021, arXiv 2011.09464), on its two small tasks.

cca_agent.py has the equations. A task knows the exact `score` of a policy, of its probabilities at the observations
`decisive`. Deviations from the paper:

- The independence loss is the mutual information of action and Phi, the mean of log h(A | X, Phi) - log pi(A | X).
  `divergence='kl'` is the paper's KL(pi || h). With h stopped, and noise larger than the effect of an action, its
  gradient shrinks all of Phi alike, also the noise that Phi is there for.
- V and h learn ten times as fast as the policy and Phi, as they must follow them.
- The policy has no memory, as the tasks need none. h adds its output to the logits of the policy.
- The bandit has 5 contexts. Key-to-door is a conveyor, with the apples of Meulemans et al. 2023 (arXiv 2306.16803).

    python examples/papers/cca.py

or, in its directory, with unrolls that hold whole episodes:

    podrace train --agent cca:CCA --env python:cca.key_to_door --num-envs 64 --unroll-length 23
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from cca_agent import CCA, gradient_moments, policy_score
from jax import Array, lax

import podrace
from podrace.envs.base import NextStepReset, restart, transition
from podrace.types import TimeStep, TrainState

CHOICES, FEATURES, GAP = 5, 16, 0.1  # of the bandit: actions, size of the feedback, best - next
LEFT, RIGHT, NOTHING, KEY, DOOR = range(5)  # cells; an apple's cell is the action that picks it
PICK_LEFT, PICK_RIGHT, PICK_KEY, OPEN = range(4)


class Bandit:
  """One action. The reward is minus its squared distance from the context, plus noise of 10 gaps.

  The feedback u[context] + v[action] + w noise shows the noise, but mixed with the action.
  """

  observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (CHOICES + FEATURES,), 'float32')
  action_space = gymnasium.spaces.Discrete(CHOICES)
  decisive = np.eye(CHOICES, CHOICES + FEATURES)

  def observe(self, context: Array, feedback: Array) -> Array:
    return jnp.concatenate([jax.nn.one_hot(context, CHOICES), feedback])

  def reset(self, key: Array) -> tuple[Any, TimeStep]:
    context = jax.random.randint(key, (), 0, CHOICES)
    return context, restart(self.observe(context, jnp.zeros(FEATURES)))

  def step(self, context: Any, action: Array, key: Array) -> tuple[Any, TimeStep]:
    normal = np.random.default_rng(0).normal(size=(2 * CHOICES + 1, FEATURES))
    u, v, w = jnp.split(jnp.float32(normal), [CHOICES, 2 * CHOICES])
    noise = 10 * GAP * jax.random.normal(key)
    observation = self.observe(context, u[context] + v[action] + w[0] * noise)
    reward = noise - GAP * (context - action) ** 2
    return context, transition(observation, reward, jnp.bool_(True), jnp.bool_(False))

  def score(self, probability: Array) -> Array:
    """Return the expected reward; 0 is best."""
    place = jnp.arange(CHOICES)
    return jnp.sum(probability * -GAP * (place[:, None] - place[None]) ** 2) / CHOICES


@dataclasses.dataclass(frozen=True)
class KeyToDoor:
  """A key, then apples of a random value, then a door with a small treasure for the key.

  The conveyor of Meulemans et al. 2023 (arXiv 2306.16803): each action moves it by a cell.
  """

  length: int = 23
  observation_space = gymnasium.spaces.Box(0.0, 1.0, (7,), 'float32')
  action_space = gymnasium.spaces.Discrete(4)

  def observe(self, place: Any, cell: Any, has_key: Any) -> Array:
    return jnp.concatenate([jnp.stack([place / self.length, has_key]), jax.nn.one_hot(cell, 5)])

  def reset(self, key: Array) -> tuple[Any, TimeStep]:
    state = jnp.int32(0), jnp.int32(KEY), jnp.bool_(False)
    return (*state, jnp.bool_(False)), restart(self.observe(*state))

  def step(self, state: Any, action: Array, key: Array) -> tuple[Any, TimeStep]:
    place, cell, has_key, _ = state
    cell_key, apple_key = jax.random.split(key)
    apple = jnp.where(jax.random.bernoulli(apple_key), 0.9, 0.1)
    picks = (cell <= RIGHT) & (action == cell)
    opens = (cell == DOOR) & (action == OPEN) & has_key
    reward = 23 / self.length * (apple * picks + 0.2 * opens)
    has_key = has_key | ((cell == KEY) & (action == PICK_KEY))
    place = place + 1
    cell = jax.random.choice(cell_key, 3, p=jnp.array([0.4, 0.4, 0.2])).astype(jnp.int32)
    cell = jnp.where(place == self.length - 2, DOOR, cell)
    over = place == self.length - 1
    timestep = transition(self.observe(place, cell, has_key), reward, over, jnp.bool_(False))
    return (place, cell, has_key, opens), timestep

  def infos(self, state: Any) -> dict[str, Array]:
    return {'treasure': state[3]}

  @property
  def decisive(self) -> Array:
    door = self.observe(self.length - 2, DOOR, True)
    return jnp.stack([self.observe(0, KEY, False), door])

  def score(self, probability: Array) -> Array:
    """Return the probability of the treasure."""
    return probability[0, PICK_KEY] * probability[1, OPEN]


def bandit() -> NextStepReset:
  return NextStepReset(Bandit())


def key_to_door(length: int = 23) -> NextStepReset:
  if length < 3:
    raise ValueError(f'length {length}: the key, an apple and the door need at least 3 steps')
  return NextStepReset(KeyToDoor(length))


TASKS: dict[str, Any] = {  # environment, sizes of a run, updates, settings of CCA
  'bandit': (bandit(), dict(env='python:cca.bandit', num_envs=256, unroll_length=2), 1500, {}),
  'key-to-door': (
    key_to_door(),
    dict(env='python:cca.key_to_door', num_envs=64, unroll_length=23),
    8100,
    dict(independence=100.0, early_entropy_cost=0.05, anneal=True),
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


class Probe:
  """Keeps `score(train)` of each seed at each line of a run."""

  exact = False  # a resumed run would lack the lines before

  def __init__(self, score: Callable[[TrainState], Array]) -> None:
    self.score, self.lines = jax.jit(partial(lax.map, score)), []

  def __call__(self, line: Any) -> None: ...

  def transform(self, train: TrainState, line: Any) -> TrainState:
    self.lines.append(np.asarray(self.score(train)).tolist())
    return train


def run(task: str, seeds: Sequence[int], score: Any, lines: int = 15, **settings: Any) -> Any:
  """Train and return the scores by line and seed, the seeds in one program."""
  env, sizes, updates, own = TASKS[task]
  agent = CCA(**settings if 'credit' in settings else own | settings)
  network = agent.network.bind(env.observation_space, env.action_space)
  probe = Probe(partial(score, dataclasses.replace(agent, network=network), env))
  steps = updates * sizes['num_envs'] * sizes['unroll_length']
  many = dict(seed=seeds[0], seeds=len(seeds), total_steps=steps, log_every=steps // lines)
  config = podrace.configure(agent=agent, devices=1, **many, **sizes)
  with tempfile.TemporaryDirectory() as folder:
    podrace.train(config, f'{folder}/run', [probe], quiet=True)
  return probe.lines


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
  colors = {name: f'C{i}' for i, name in enumerate(LEARNERS)}
  gradient, *axes = figure.subplots(1, 3, width_ratios=[1.1, 1, 1])
  for name, ((x, dx), (y, dy)) in table(results).items():
    gradient.errorbar(x, y, dy, dx, 'o', color=colors[name], capsize=3, label=name)
  gradient.axhline(1, color='gray', linewidth=0.8, linestyle=':')
  gradient.set(title='bandit, fixed policy', xscale='log', ylabel='share of the exact gradient')
  gradient.set_xlabel("variance of the gradient / the advantage's")
  labels = 'expected reward', 'probability of the treasure'
  for axis, (task, label) in zip(axes, zip(TASKS, labels, strict=True), strict=True):
    _, sizes, updates, _ = TASKS[task]
    for name, lines in results[task].items():
      mean, half = interval(lines)
      x = np.arange(1, len(mean) + 1) / len(mean) * updates * sizes['num_envs'] / 1000
      axis.plot(x, mean, color=colors[name], label=name)
      axis.fill_between(x, mean - half, mean + half, color=colors[name], alpha=0.2, linewidth=0)
    axis.set(title=task, xlabel='thousand episodes', ylabel=label)
  for axis in (gradient, *axes):
    axis.legend(frameon=False, fontsize='small')


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
