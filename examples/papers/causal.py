"""Causally correct partial models (Rezende et al. 2020, arXiv 2002.02836) on AvoidFuzzyBear.

Stay at home for 0.6, or enter the forest. There a teddy or a grizzly is seen, equally often. Hugging
gives 1 or -0.5, running away 0. A partial model predicts rewards from actions, without bears:

    non-causal   r(enter, a)                  confounded: the data's policy hugs the bears it likes
    causal       p(z | enter), r(enter, z, a)   z is the data's policy in the forest, before its noise

Entering is worth 0.5 at best, so the optimum is 0.6. `exact` enumerates all bears and actions;
`learn` trains both models on data of a policy that hugs teddies, with some noise. Planning takes
expectations in the model. Against the paper: z is binary here, as the policy has two values.

    python examples/papers/causal.py            # or, in this directory:
    podrace train --agent muzero --env python:causal.bear
"""

from __future__ import annotations

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
from podrace.envs.base import NextStepReset, restart, transition
from podrace.types import TimeStep

HOME, TEDDY, GRIZZLY, END = range(4)  # places
STAY, RUN, ENTER, HUG = 0, 0, 1, 1  # actions
HOME_REWARD, HUGS = 0.6, {TEDDY: 1.0, GRIZZLY: -0.5}
NOISE, EPISODES, STEPS = 0.1, 2_000, 1_000


@dataclasses.dataclass(frozen=True)
class Bear:
  """AvoidFuzzyBear. The observation is the place, one-hot."""

  observation_space = gymnasium.spaces.Box(0.0, 1.0, (4,), 'float32')
  action_space = gymnasium.spaces.Discrete(2)

  def reset(self, key: Array) -> tuple[Array, TimeStep]:
    return jnp.int32(HOME), restart(jax.nn.one_hot(HOME, 4))

  def step(self, place: Array, action: Array, key: Array) -> tuple[Array, TimeStep]:
    enters = (place == HOME) & (action == ENTER)
    bear = jnp.where(jax.random.bernoulli(key), TEDDY, GRIZZLY)
    hug = jnp.array([0.0, HUGS[TEDDY], HUGS[GRIZZLY], 0.0])[place] * (action == HUG)
    reward = jnp.where(place == HOME, HOME_REWARD * (action == STAY), hug)
    following = jnp.where(enters, bear, END).astype(jnp.int32)
    return following, transition(jax.nn.one_hot(following, 4), reward, ~enters, False)


def bear() -> NextStepReset:
  return NextStepReset(Bear())


def true_value(enter: float, hug: dict[int, float]) -> float:
  """Returns the value of a policy: its probabilities to enter, and to hug each bear."""
  forest = sum(0.5 * hug[bear] * HUGS[bear] for bear in HUGS)
  return (1 - enter) * HOME_REWARD + enter * forest


def exact(noise: float) -> dict[str, float]:
  """Returns beliefs in the values of entering, by enumeration of bears, z and actions."""
  joint = {  # probability and reward of (z, action); z is to hug, and the action z or its opposite
    (bear == TEDDY, action): (0.5 * (1 - noise if action == (bear == TEDDY) else noise), HUGS[bear] * action)
    for bear, action in itertools.product(HUGS, (RUN, HUG))
  }  # fmt: skip
  hugs = [x for (_, action), x in joint.items() if action == HUG]
  reward_of = {(z, action): r for (z, action), (_, r) in joint.items()}  # z tells the bear
  return {
    'non-causal: hug': sum(p * r for p, r in hugs) / sum(p for p, _ in hugs),
    'causal: hug': sum(0.5 * reward_of[z, HUG] for z in (False, True)),
    'causal: best of each z': sum(
      0.5 * max(reward_of[z, a] for a in (RUN, HUG)) for z in (False, True)
    ),
  }


def episodes(key: Array, number: int) -> tuple[Array, Array, Array]:
  """Returns actions [N, 2], rewards [N, 2] and z [N] of a policy that hugs teddies, with noise."""

  def one(key: Array) -> Any:
    enter_key, bear_key, noise_key, last_key = jax.random.split(key, 4)
    enter = jax.random.bernoulli(enter_key).astype(jnp.int32)
    place, first = Bear().step(jnp.int32(HOME), enter, bear_key)
    z = place == TEDDY  # the intended action
    hug = (z ^ jax.random.bernoulli(noise_key, NOISE)).astype(jnp.int32)
    _, second = Bear().step(place, hug, last_key)
    return jnp.stack([enter, hug]), jnp.stack([first.reward, second.reward * enter]), 1.0 * z

  return jax.vmap(one)(jax.random.split(key, number))


def init(key: Array, hidden: int = 16) -> Any:
  """Returns a model: state h' = tanh(W [h, z, a]), and linear heads for the reward and z."""
  shapes = dict(dynamics=(hidden + 3, hidden), reward=(hidden, 1), z=(hidden, 1))
  keys = jax.random.split(key, len(shapes))
  return {
    name: jax.random.normal(k, shapes[name]) / shapes[name][0] ** 0.5
    for name, k in zip(shapes, keys, strict=True)
  }


def unroll(model: Any, actions: Array, z: Array) -> tuple[Array, Array]:
  """Returns rewards [N, 2] and logits of z [N] for actions [N, 2] and z [N] before the second."""
  h, rewards, logits = jnp.zeros((len(z), len(model['reward']))), [], None
  for action, seen in ((actions[:, 0], jnp.zeros_like(z)), (actions[:, 1], z)):
    inputs = jnp.stack([seen, 1.0 * action, jnp.ones_like(z)], axis=1)
    h = jnp.tanh(jnp.concatenate([h, inputs], axis=1) @ model['dynamics'])
    rewards.append((h @ model['reward'])[:, 0])
    logits = (h @ model['z'])[:, 0] if logits is None else logits
  return jnp.stack(rewards, axis=1), logits


@functools.partial(jax.jit, static_argnums=1)
def learn(key: Array, causal: bool) -> Any:
  """Trains a model. The non-causal one sees no z."""
  data_key, init_key = jax.random.split(key)
  actions, rewards, z = episodes(data_key, EPISODES)
  entered = actions[:, 0] == ENTER
  optimizer, model = optax.adam(1e-2), init(init_key)

  def loss(model: Any) -> Array:
    predicted, logits = unroll(model, actions, z * causal)
    error = (predicted - rewards) ** 2 * jnp.stack([jnp.ones_like(z), 1.0 * entered], axis=1)
    log_loss = optax.sigmoid_binary_cross_entropy(logits, z) * entered
    return jnp.mean(jnp.sum(error, axis=1) + log_loss)

  def step(carry: Any, _: None) -> Any:
    model, opt_state = carry
    updates, opt_state = optimizer.update(jax.grad(loss)(model), opt_state)
    return (optax.apply_updates(model, updates), opt_state), None

  return lax.scan(step, (model, optimizer.init(model)), length=STEPS)[0][0]


def plan(model: Any, causal: bool) -> dict[str, float]:
  """Plans by expectation over the model. Returns its beliefs, and the true value of its plan."""
  z, action = np.array([0.0, 1.0, 0.0, 1.0]), np.array([RUN, RUN, HUG, HUG])
  actions = jnp.stack([jnp.full(4, ENTER), jnp.array(action)], axis=1)
  rewards, logits = unroll(model, actions, jnp.asarray(z * causal, jnp.float32))
  p, enter = float(jax.nn.sigmoid(logits[0])), float(rewards[0, 0])
  value = np.asarray(rewards[:, 1], np.float64).reshape(2, 2)  # [action, z]
  home = float(unroll(model, jnp.zeros((1, 2), jnp.int32), jnp.zeros(1))[0][0, 0])
  weights = np.array([1 - p, p])
  best = value.argmax(0)  # by z; the non-causal model has the same values for both
  forest, always = enter + weights @ value.max(0), enter + weights @ value[HUG]
  truth = true_value(float(forest > home), {GRIZZLY: best[0], TEDDY: best[1]})
  beliefs = {'belief: hug': float(always), 'belief: best plan': float(max(forest, home))}
  return beliefs | {'true value': truth}


def muzero(seeds: list[int], steps: int = 8_000) -> list[float]:
  """Returns the mean return of the last tenth of training of MuZero, by seed; it sees the bear."""
  config = podrace.configure(
    env='python:causal.bear', agent='muzero', seed=seeds[0], seeds=len(seeds), devices=1,
    num_envs=16, unroll_length=8, total_steps=steps, log_every=steps // 10,
  )  # fmt: skip
  small = {f'{part}hidden': (32,) for part in ('', 'dynamics_', 'head_')}
  network, buffer = (getattr(config.agent, x) for x in ('network', 'buffer'))
  agent = dataclasses.replace(
    config.agent,
    simulations=8,
    unroll=2,
    network=dataclasses.replace(network, **small),
    buffer=dataclasses.replace(buffer, batch_size=32, min_size=500, samples_per_insert=8.0),
  )
  config = dataclasses.replace(config, agent=agent)
  with tempfile.TemporaryDirectory() as folder:
    last = podrace.train(config, folder, quiet=True).metrics[-1]
    return last.get('episode_return_by_seed', [last['episode_return']])


def measure(seeds: Iterable[int]) -> dict[str, Any]:
  """Returns the exact numbers, and numbers by method and seed."""
  results: dict[str, Any] = {'exact': exact(NOISE), 'exact, no noise': exact(0.0)}
  for name, causal in (('non-causal', False), ('causal', True)):
    results[name] = [plan(learn(jax.random.key(seed), causal), causal) for seed in seeds]
  return results | {'MuZero': muzero([*seeds])}


def interval(values: Any) -> tuple[float, float]:
  """Returns the mean over seeds, and half of its 95% confidence interval."""
  half = scipy.stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
  return float(np.mean(values)), float(half)


def rows(results: dict[str, Any]) -> dict[str, tuple[float, float]]:
  table = {
    f'{name}, {key}': interval([x[key] for x in results[name]])
    for name in ('non-causal', 'causal')
    for key in results[name][0]
  }
  return table | {'MuZero, return': interval(results['MuZero'])}


def draw(results: dict[str, Any], figure: Any) -> None:
  figure.set_size_inches(7, 3.2)
  table, axes = rows(results), figure.subplots()
  means, halves = np.array([*table.values()]).T
  colors = ['C1' if 'belief' in name else 'C0' for name in table]
  axes.barh([*table], means, xerr=halves, color=colors, capsize=3)
  axes.axvline(HOME_REWARD, color='black', linewidth=1, linestyle='--')
  axes.text(HOME_REWARD, -0.75, ' optimum 0.6', va='center')
  axes.set(xlabel='value (orange: believed, blue: true)', ylim=(len(table) - 0.5, -1.1))


if __name__ == '__main__':
  for name, (mean, half) in rows(measure(range(3))).items():
    print(f'{name}: {mean:.3f} +- {half:.3f}')
