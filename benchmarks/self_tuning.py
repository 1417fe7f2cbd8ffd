"""Self-tuning against the same agent without it, at equal steps: IMPALA, and PPO on CartPole.

    python benchmarks/self_tuning.py [CASE ...]
    python benchmarks/self_tuning.py --draw  # docs/self_tuning.svg of what there is

The settings are those of `podrace train --env E --agent A`, and of IMPALA also with a poor discount or entropy cost, and
with ten times the metaparameters' learning rate. Each run is five seeds in one program. `area` is the mean of the returns
over the 20 points of the curve, `final` the mean return of the episodes in training in the last tenth of the steps; both
with the 95% interval of Student's t over the seeds. `difference` is on minus off, by seed: equal seeds begin with equal
networks. `steps_per_s` there is of all seeds together, on a machine with other load. `cost` is of one seed, with and
without in turn: `times` is how many times as long it takes. Writes benchmarks/results/self_tuning.json after each case; what is not
run keeps what the file has of it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from typing import Any

import numpy as np
from common import (
  RESULTS,
  ROOT,
  bind,
  interleave,
  machine,
  origin,
  record,
  start,
  summary,
  updates_for,
)
from scipy import stats
from seeds import train

from podrace import envs
from podrace.api import configure

SEEDS = 5
DRAWN = {
  'gymnax:CartPole-v1, impala, defaults': 'CartPole',
  'gymnax:Breakout-MinAtar, impala, defaults': 'Breakout',
}
SHOWN = ('discount', 'lambda', 'policy_cost', 'value_cost', 'entropy_cost')
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

COSTS = {f'{env}, impala, cost': (env, 'impala') for env in ENVS}
COSTS['gymnax:CartPole-v1, ppo, cost'] = ('gymnax:CartPole-v1', 'ppo')


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
  return dict(**origin(), machine=machine(), off=off, on=on, difference=difference)


def cost(env: str, agent: str) -> dict[str, Any]:
  """Seconds of as many updates with self-tuning and without, in turn, of one seed."""
  config = configure(env=env, agent=agent)
  made = envs.make(env)
  agents = {
    name: bind(dataclasses.replace(config.agent, self_tuning=flag), made, config.total_updates)
    for name, flag in (('off', False), ('on', True))
  }
  runs = {n: start(a, made, config.num_envs, config.unroll_length) for n, a in agents.items()}
  updates = updates_for(runs['off'].seconds, 2.0)
  seconds = interleave(
    {name: functools.partial(run.seconds, updates) for name, run in runs.items()}, 9
  )
  steps = updates * config.steps_per_update
  ratios = [on / off for on, off in zip(seconds['on'], seconds['off'], strict=True)]
  return dict(
    **origin(),
    machine=machine(),
    steps_per_s={name: steps / min(x) for name, x in seconds.items()},
    compile_s={name: run.compile_s['train'] for name, run in runs.items()},
    times=summary(ratios),
  )


def line(name: str, found: dict[str, Any]) -> str:
  if 'times' in found:
    return f'{name}: {found["times"]["median"]:.2f} times the time'

  def shown(x: dict[str, Any]) -> str:
    return f'{x["mean"]:.2f} [{x["low"]:.2f}, {x["high"]:.2f}]'

  parts = [
    f'{what} {shown(found["off"][what])} -> {shown(found["on"][what])}, {shown(found["difference"][what])}'
    for what in ('area', 'final')
  ]
  return f'{name}: {"; ".join(parts)}'


def draw(results: dict[str, Any]) -> None:
  """The metaparameters against the steps: a line for each seed."""
  import matplotlib
  import matplotlib.pyplot as plt

  known = {name: results[name]['on']['curve'] for name in DRAWN if name in results}
  with matplotlib.rc_context({'svg.hashsalt': 'podrace', 'font.size': 9}):
    figure, axes = plt.subplots(1, len(SHOWN), figsize=(11, 2.8), layout='constrained')
    for axis, name in zip(axes, SHOWN, strict=True):
      for i, (title, curve) in enumerate(known.items()):
        steps = [point['step'] / 1e6 for point in curve]
        values = np.array([point[f'tuned_{name}'] for point in curve])
        lines = axis.plot(steps, values, color=f'C{i}', linewidth=1)
        lines[0].set_label(DRAWN[title])
      axis.set_title(name.replace('_', ' '))
      axis.spines[['top', 'right']].set_visible(False)
    axes[2].set_xlabel('million environment steps')
    axes[0].legend(frameon=False)
    figure.savefig(ROOT / 'docs' / 'self_tuning.svg', metadata={'Date': None})
    plt.close(figure)


def main() -> None:
  path = RESULTS / 'self_tuning.json'
  names = [name for name in sys.argv[1:] if name != '--draw']
  for name in names or ([] if '--draw' in sys.argv else (*CASES, *COSTS)):
    known = json.loads(path.read_text())['results'] if path.exists() else {}
    known[name] = cost(*COSTS[name]) if name in COSTS else case(*CASES[name])
    print(line(name, known[name]), flush=True)
    record('self_tuning', {name: known[name] for name in (*CASES, *COSTS) if name in known})
  draw(json.loads(path.read_text())['results'])


if __name__ == '__main__':
  main()
