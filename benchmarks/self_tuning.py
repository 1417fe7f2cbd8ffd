"""Self-tuning against the same agent without it, at equal steps: IMPALA, and PPO on CartPole.

    python benchmarks/self_tuning.py [CASE ...]

The settings are those of `podrace train --env E --agent A`, and of IMPALA also with a poor discount or entropy cost.
Each run is five seeds in one program. `area` is the mean of the returns over the 20 points of the curve, `final` the
mean return of the episodes in training in the last tenth of the steps; both with the 95% interval of Student's t over
the seeds. `difference` is on minus off, by seed: equal seeds begin with equal networks. `steps_per_s` is of all seeds
together. Writes benchmarks/results/self_tuning.json after each case; what is not run keeps what the file has of it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import numpy as np
from common import RESULTS, machine, origin, record
from scipy import stats
from seeds import train

from podrace.api import configure

SEEDS = 5
ENVS = {  # environment -> steps
  'podrace:catch': 500_000,
  'gymnax:CartPole-v1': 1_000_000,
  'gymnax:Breakout-MinAtar': 1_500_000,
}
POOR = {
  'defaults': {},
  'discount 0.9': {'discount': 0.9},
  'entropy cost 0.1': {'entropy_cost': 0.1},
}
CASES = {
  f'{env}, impala, {poor}': (env, 'impala', changes)
  for env in ENVS
  for poor, changes in POOR.items()
  if 'Breakout' not in env or poor != 'entropy cost 0.1'  # the longest
} | {'gymnax:CartPole-v1, ppo, defaults': ('gymnax:CartPole-v1', 'ppo', {})}


def arm(env: str, agent: str, changes: dict[str, Any], self_tuning: bool) -> dict[str, Any]:
  config = configure(env=env, agent=agent, total_steps=ENVS[env])
  made = dataclasses.replace(config.agent, **changes, self_tuning=self_tuning)
  found = train(dataclasses.replace(config, agent=made), SEEDS, 'tuned_').numbers
  returns = np.array([point['returns'] for point in found['curve']])
  return dict(
    area=interval(returns.mean(axis=0)),
    final=interval(np.array(found['returns'])),
    steps_per_s=SEEDS * found['steps'] / found['seconds'],
    compile_s=found['compile_s'],
    steps=found['steps'],
    curve=found['curve'],
  )


def interval(values: np.ndarray) -> dict[str, Any]:
  """The mean with Student's 95% interval."""
  half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
  mean = float(values.mean())
  return dict(mean=mean, low=mean - float(half), high=mean + float(half), by_seed=values.tolist())


def case(env: str, agent: str, changes: dict[str, Any]) -> dict[str, Any]:
  off, on = (arm(env, agent, changes, flag) for flag in (False, True))
  difference = {
    name: interval(np.subtract(on[name]['by_seed'], off[name]['by_seed']))
    for name in ('area', 'final')
  }
  cost = off['steps_per_s'] / on['steps_per_s']
  return dict(**origin(), machine=machine(), off=off, on=on, difference=difference, cost=cost)


def line(name: str, found: dict[str, Any]) -> str:
  def shown(x: dict[str, Any]) -> str:
    return f'{x["mean"]:.2f} [{x["low"]:.2f}, {x["high"]:.2f}]'

  parts = [
    f'{what} {shown(found["off"][what])} -> {shown(found["on"][what])}, {shown(found["difference"][what])}'
    for what in ('area', 'final')
  ]
  return f'{name}: {"; ".join(parts)}; {found["cost"]:.2f} times the time'


def main() -> None:
  names = sys.argv[1:] or list(CASES)
  path = RESULTS / 'self_tuning.json'
  for name in names:
    known = json.loads(path.read_text())['results'] if path.exists() else {}
    known[name] = case(*CASES[name])
    print(line(name, known[name]), flush=True)
    record('self_tuning', {name: known[name] for name in CASES if name in known})


if __name__ == '__main__':
  main()
