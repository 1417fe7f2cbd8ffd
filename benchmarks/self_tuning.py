"""Self-tuning against the same agent without it, at equal steps: IMPALA, and PPO on CartPole.

    python benchmarks/self_tuning.py [draw | CASE ...]

The settings are those of `podrace train --env E --agent A`, and of IMPALA also with a poor discount or entropy cost, and
with ten times the metaparameters' learning rate. Each run is five seeds in one program. `area` is the mean of the returns
over the 20 points of the curve, `final` the mean return of the episodes in training in the last tenth of the steps; both
with the 95% interval of Student's t over the seeds. `difference` is on minus off, by seed: equal seeds begin with equal
networks. `steps_per_s` is of all seeds together. Writes benchmarks/results/self_tuning.json after each case; what is not
run keeps what the file has of it. `draw` draws docs/self_tuning.svg from it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import numpy as np
from common import RESULTS, ROOT, machine, origin, record
from scipy import stats
from seeds import train

from podrace.api import configure

SEEDS = 5
DRAWN = ('gymnax:CartPole-v1, impala, defaults', 'gymnax:Breakout-MinAtar, impala, defaults')
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
CASES: dict[str, tuple[str, str, dict[str, Any], float]] = {
  f'{env}, impala, {poor}': (env, 'impala', changes, 1e-3)
  for env in ENVS
  for poor, changes in POOR.items()
  if 'Breakout' not in env or poor != 'entropy cost 0.1'  # the longest
}
CASES |= {
  f'{name}, rate 0.01': (*CASES[name][:3], 1e-2)
  for name in list(CASES)
  if 'Breakout' not in name and 'discount' not in name
}
CASES['gymnax:CartPole-v1, ppo, defaults'] = ('gymnax:CartPole-v1', 'ppo', {}, 1e-3)


def arm(
  env: str, agent: str, changes: dict[str, Any], rate: float, self_tuning: bool
) -> dict[str, Any]:
  config = configure(env=env, agent=agent, total_steps=ENVS[env])
  tuning = dataclasses.replace(config.agent.tuning, learning_rate=rate)
  made = dataclasses.replace(config.agent, **changes, self_tuning=self_tuning, tuning=tuning)
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


def case(env: str, agent: str, changes: dict[str, Any], rate: float) -> dict[str, Any]:
  off, on = (arm(env, agent, changes, rate, flag) for flag in (False, True))
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


def draw(results: dict[str, Any]) -> None:
  """The metaparameters of each seed against the steps, divided by the user's settings."""
  import matplotlib.pyplot as plt

  plt.rcParams['svg.hashsalt'] = 'podrace'  # the same picture gives the same file
  first = results[DRAWN[0]]['on']['curve'][0]
  names = [k for k in first if k.startswith('tuned_') and k != 'tuned_clip_mix']
  figure, axes = plt.subplots(1, len(names), figsize=(2.4 * len(names), 2.8), sharex=False)
  for axis, name in zip(axes, names, strict=True):
    for color, title in zip(('#3b6ea5', '#c8662b'), DRAWN, strict=True):
      curve = results[title]['on']['curve']
      steps = [p['step'] / 1e6 for p in curve]
      for seed in range(SEEDS):
        label = title.partition(',')[0].partition(':')[2] if seed == 0 else None
        axis.plot(steps, [p[name][seed] for p in curve], color=color, lw=1, label=label)
    axis.set_title(name.removeprefix('tuned_').replace('_', ' '), fontsize=10)
    axis.tick_params(labelsize=8)
    axis.spines[['top', 'right']].set_visible(False)
  figure.supxlabel('million steps', fontsize=9)
  axes[0].legend(fontsize=7, frameon=False)
  figure.tight_layout()
  figure.savefig(ROOT / 'docs' / 'self_tuning.svg', facecolor='white', metadata={'Date': None})


def main() -> None:
  path = RESULTS / 'self_tuning.json'
  if sys.argv[1:] == ['draw']:
    return draw(json.loads(path.read_text())['results'])
  names = sys.argv[1:] or list(CASES)
  for name in names:
    known = json.loads(path.read_text())['results'] if path.exists() else {}
    known[name] = case(*CASES[name])
    print(line(name, known[name]), flush=True)
    record('self_tuning', {name: known[name] for name in CASES if name in known})


if __name__ == '__main__':
  main()
