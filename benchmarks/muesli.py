"""Muesli against IMPALA and PPO at equal steps, and without parts of itself: Catch and CartPole, three seeds each.

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

from podrace.config import Config
from podrace.presets import PRESETS

SEEDS = 3
STEPS = {'catch': 80_000, 'cartpole': 200_000}


def config(case: str) -> Config:
  """What is run, by name: ENV, AGENT."""
  env, agent = case.split(', ')
  muesli = PRESETS[f'muesli-{env}']()
  if agent in ('impala', 'ppo'):
    preset = PRESETS[env]()
    if agent not in type(preset.agent).__name__.lower():
      preset = other(env)
    return dataclasses.replace(preset, env=muesli.env, total_steps=STEPS[env])
  part = {
    'muesli': {},
    'without CMPO': {'cmpo_cost': 0.0},
    'without the model loss': {'model_cost': 0.0},
  }
  without = dataclasses.replace(muesli.agent, **part[agent])
  return dataclasses.replace(muesli, agent=without, total_steps=STEPS[env])


def other(env: str) -> Config:
  """The agent that has no preset of its own for an environment, with its defaults."""
  from podrace.agents.impala import Impala
  from podrace.agents.ppo import PPO
  from podrace.defaults import with_defaults

  name = PRESETS[env]().env
  return with_defaults(Config(agent=PPO() if env == 'catch' else Impala(), env=name), name)


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
