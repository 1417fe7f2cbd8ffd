"""Muesli against IMPALA and PPO at equal steps, and without parts of itself: Catch, CartPole, MinAtar, three seeds each.

    python benchmarks/muesli.py [CASE ...]

The seeds are one program under Anakin, as `podrace train --seeds 3` has them. Each agent has its preset's settings, and
what is annealed is annealed over the steps given here. A score is the mean return of the episodes in training in the
last tenth of the steps. Writes benchmarks/results/muesli.json after each; what is not run keeps what the file has of it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import numpy as np
from common import RESULTS, origin, record
from seeds import train

from podrace.settings.config import Config
from podrace.settings.presets import PRESETS

SEEDS = 3
STEPS = {'catch': 80_000, 'cartpole': 200_000, 'breakout': 1_000_000, 'asterix': 1_000_000}
# Muesli's preset, a peer's, and the environment.
PAIRS = {
  'catch': ('muesli-catch', 'catch', 'podrace:catch'),
  'cartpole': ('muesli-cartpole', 'cartpole', 'gymnax:CartPole-v1'),
  'breakout': ('muesli-minatar', 'minatar-breakout', 'gymnax:Breakout-MinAtar'),
  'asterix': ('muesli-minatar', 'minatar-breakout', 'gymnax:Asterix-MinAtar'),
}


def config(case: str) -> Config:
  """What is run, by name: ENV, AGENT."""
  task, agent = case.split(', ')
  ours, peer, env = PAIRS[task]
  if agent in ('impala', 'ppo'):
    config = PRESETS[peer]()
    if agent not in type(config.agent).__name__.lower():
      config = defaults(agent, env)
    return dataclasses.replace(config, env=env, total_steps=STEPS[task])
  muesli = PRESETS[ours]()
  part = {
    'muesli': {},
    'without CMPO': {'cmpo_cost': 0.0},
    'without the model loss': {'model_cost': 0.0},
  }
  without = dataclasses.replace(muesli.agent, **part[agent])
  return dataclasses.replace(muesli, agent=without, env=env, total_steps=STEPS[task])


def defaults(agent: str, env: str) -> Config:
  """An agent that has no preset for an environment, with its defaults for it."""
  from podrace.agents.impala import Impala
  from podrace.agents.ppo import PPO
  from podrace.settings.defaults import with_defaults

  return with_defaults(Config(agent=PPO() if agent == 'ppo' else Impala(), env=env), env)


def run(case: str) -> dict[str, Any]:
  """Trains three seeds; their curves, and the last tenth's return of each."""
  return dict(origin=origin(), **train(config(case), SEEDS).numbers)


AGENTS = ('muesli', 'without CMPO', 'without the model loss', 'impala', 'ppo')
CASES = [f'{env}, {agent}' for env in STEPS for agent in AGENTS]


def main() -> None:
  names = sys.argv[1:] or CASES
  if unknown := set(names) - set(CASES):
    sys.exit(f'no case {", ".join(sorted(unknown))}, only {"; ".join(CASES)}')
  path = RESULTS / 'muesli.json'
  known = json.loads(path.read_text())['results'] if path.exists() else {}
  for case in names:
    known[case] = run(case)
    print(case, np.round(known[case]['returns'], 2), f'{known[case]["seconds"]:.0f} s', flush=True)
    record('muesli', {name: known[name] for name in CASES if name in known})


if __name__ == '__main__':
  main()
