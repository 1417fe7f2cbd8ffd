"""Muesli against IMPALA and PPO at equal steps, and without parts of itself: Catch, CartPole, MinAtar, three seeds each.

The seeds are one program under Anakin, as `podrace train --seeds 3` has them. Each agent has its preset's settings, and
schedules run over the steps given here. A score is the mean return of the episodes in training in the
last tenth of the steps. Writes benchmarks/results/muesli.json after each case; other cases keep their results.
"""

from __future__ import annotations

import dataclasses

import common
import numpy as np
from seeds import train

from podrace import configure
from podrace.settings.config import Config
from podrace.settings.presets import PRESETS

SEEDS = 3
TASKS = {  # steps, Muesli's preset, a peer's, and the environment
  'catch': (80_000, 'muesli-catch', 'catch', 'podrace:catch'),
  'cartpole': (200_000, 'muesli-cartpole', 'cartpole', 'gymnax:CartPole-v1'),
  'breakout': (1_000_000, 'muesli-minatar', 'minatar-breakout', 'gymnax:Breakout-MinAtar'),
  'asterix': (1_000_000, 'muesli-minatar', 'minatar-breakout', 'gymnax:Asterix-MinAtar'),
}
VARIANTS: dict[str, dict[str, float]] = {
  'muesli': {},
  'without CMPO': {'cmpo_cost': 0.0},
  'without the model loss': {'model_cost': 0.0},
}
CASES = [f'{task}, {agent}' for task in TASKS for agent in (*VARIANTS, 'impala', 'ppo')]


def config(case: str) -> Config:
  """Returns the settings of a case, TASK, AGENT. A peer without a preset has its defaults."""
  task, name = case.split(', ')
  steps, ours, peer, env = TASKS[task]
  config = PRESETS[ours if name in VARIANTS else peer]()
  if name in VARIANTS:
    agent = dataclasses.replace(config.agent, **VARIANTS[name])
    config = dataclasses.replace(config, agent=agent)
  elif name not in type(config.agent).__name__.lower():
    config = configure(env=env, agent=name)
  return dataclasses.replace(config, env=env, total_steps=steps)


def main() -> None:
  args = common.arguments(__doc__, CASES, steps=(0, 'fewer steps than those of the case'))
  for case in args.cases:
    settings = config(case)
    if args.steps:
      settings = dataclasses.replace(settings, total_steps=args.steps)
    numbers = dict(origin=common.origin(), **train(settings, SEEDS).numbers)
    print(case, np.round(numbers['returns'], 2), f'{numbers["seconds"]:.0f} s', flush=True)
    common.keep('muesli', case, numbers, CASES)


if __name__ == '__main__':
  main()
