"""Recurrent SAC, D4PG and DQN where velocities are hidden, beside the same agents without a core; and the cost of the core.

The seeds 0 to 4 are one program under Anakin, as `podrace train --seeds 5` has them. A score is the mean return of 100
greedy episodes of the last parameters of a seed. `cost` has steps/s of one seed with and without a core at the same
number of environment steps in a gradient, and needs a quiet machine. Settings were chosen with seeds from 100 on.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import common
import jax
import numpy as np
from seeds import train

from podrace import configure, envs
from podrace.fields import of_part, replace_paths
from podrace.hooks import greedily
from podrace.run.evaluate import make_evaluator
from podrace.settings.config import Config

EPISODES = 100
PENDULUM, CART = 'gymnax:Pendulum-v1,hide=velocity', 'gymnax:CartPole-v1,hide=velocity'
CUE = 'podrace:memory,continuous=true'
CORES = {
  f'{part}.{k}': v for part in ('actor', 'critic') for k, v in (('core', 'gru'), ('core_size', 32))
}
WINDOWS = of_part('buffer', batch_size=32, samples_per_insert=32.0)
CONTROL = CORES | WINDOWS
EPISODE = {'recurrence.start': 'episode', 'recurrence.sequence': 11}
DQN = (
  of_part('network', hidden=(64,), core='gru', core_size=64, head_size=64)
  | of_part('buffer', batch_size=32, samples_per_insert=4.0)
  | {
    'recurrence.start': 'stored',
    'recurrence.sequence': 16,
    'recurrence.burn_in': 8,
    'learning_rate': 5e-4,
  }
)
LONG = {'buffer.capacity': 500_000, 'epsilon_steps': 2000, 'discount': 0.97}  # replay of all
CASES: dict[str, tuple[str, str, int, dict[str, Any]]] = {  # agent, environment, steps, its fields
  'SAC, Pendulum, core': ('sac', PENDULUM, 50_000, CONTROL),
  'SAC, Pendulum, no core': ('sac', PENDULUM, 50_000, {}),
  'D4PG, Pendulum, core': ('d4pg', PENDULUM, 50_000, CONTROL),
  'D4PG, Pendulum, no core': ('d4pg', PENDULUM, 50_000, {}),
  'DQN, CartPole, core': ('dqn', CART, 500_000, DQN | LONG),
  'DQN, CartPole, no core': ('dqn', CART, 500_000, LONG),
  'SAC, memory, core': ('sac', CUE, 50_000, CORES | EPISODE | of_part('buffer', batch_size=32, samples_per_insert=8.0)),
  'SAC, memory, no core': ('sac', CUE, 50_000, {}),
}  # fmt: skip
COST = 'cost'


def config(case: str, steps: int) -> Config:
  """Returns the settings of a case."""
  name, env, total, fields = CASES[case]
  config = configure(env=env, agent=name)
  agent = replace_paths(config.agent, fields)
  return dataclasses.replace(config, agent=agent, total_steps=steps or total)


def score(case: str, steps: int, seeds: int) -> dict[str, Any]:
  """Returns the numbers of a training, and the mean greedy returns of each seed."""
  settings = config(case, steps)
  trained = train(settings, seeds)
  env = envs.make(settings.env)
  play = make_evaluator(greedily(trained.agent), env, EPISODES)
  returns = [float(play(params, jax.random.key(2**20)).mean()) for params in trained.params]
  return dict(origin=common.origin(), greedy=returns, **trained.numbers)


def cost(steps: int) -> dict[str, Any]:
  """Returns steps/s with and without a core: 1,280 steps of the replay in each gradient, or 1,280 transitions."""
  rates: dict[str, Any] = {}
  for name, fields in {
    'core, 64 windows of 20': CORES | of_part('buffer', batch_size=64, samples_per_insert=16.0),
    'no core, 1280 transitions': of_part('buffer', batch_size=1280, samples_per_insert=320.0),
    'no core, 64 transitions': of_part('buffer', batch_size=64, samples_per_insert=16.0),
  }.items():
    settings = configure(env=PENDULUM, agent='sac')
    agent = replace_paths(settings.agent, fields)
    each = []
    for _ in range(3):
      numbers = train(dataclasses.replace(settings, agent=agent, total_steps=steps or 12_000), 1).numbers  # fmt: skip
      each.append(numbers['steps'] / numbers['seconds'])
    rates[name] = common.summary(each)
    print(name, rates[name], flush=True)
  return dict(origin=common.origin(), steps_per_s=rates)


def main() -> None:
  args = common.arguments(
    __doc__, [*CASES, COST], steps=(0, 'fewer steps than those of the case'), seeds=(5, 'seeds from 0 on')
  )  # fmt: skip
  for case in args.cases:
    if case == COST:
      numbers = cost(args.steps)
    else:
      numbers = score(case, args.steps, args.seeds)
      print(case, np.round(numbers['greedy'], 2), f'{numbers["seconds"]:.0f} s', flush=True)
    common.keep('memory', case, numbers, [*CASES, COST])


if __name__ == '__main__':
  main()
