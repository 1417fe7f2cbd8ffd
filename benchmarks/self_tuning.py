"""Self-tuning against the same agent without it, at equal steps: IMPALA, and PPO on CartPole.

The settings are those of `podrace train --env E --agent A`, and of IMPALA also with a poor discount or entropy cost, and
with ten times the metaparameters' learning rate. Each run is five seeds in one program. `area` is the mean of the returns
over the 20 points of the curve, `final` the mean return of the episodes in training in the last tenth of the steps; both
with the 95% interval of Student's t over the seeds. `difference` is on minus off, by seed: equal seeds begin with equal
networks. `steps_per_s` there is of all seeds together, on a machine with other load. `cost` is of one seed, with and
without in turn: `times` is how many times as long it takes. Writes benchmarks/results/self_tuning.json after each case;
other cases keep their results. Draws docs/self_tuning.svg; --draw does nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import common
import numpy as np
import timing
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
ENVS = {'podrace:catch': 500_000, 'gymnax:CartPole-v1': 1_000_000, 'gymnax:Breakout-MinAtar': 1_500_000}  # fmt: skip
POOR = {'defaults': {}, 'discount 0.9': {'discount': 0.9}, 'entropy cost 0.1': {'entropy_cost': 0.1}}  # fmt: skip
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


def interval(values: np.ndarray) -> dict[str, Any]:
  """Returns the mean with Student's 95% interval."""
  half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
  mean = float(values.mean())
  return dict(mean=mean, low=mean - float(half), high=mean + float(half), by_seed=values.tolist())


def case(
  env: str, agent: str, changes: dict[str, Any], rate: float, *, steps: int = 0
) -> dict[str, Any]:
  """Trains without self-tuning and with it."""
  config = configure(env=env, agent=agent, total_steps=steps or ENVS[env])
  tuning = dataclasses.replace(config.agent.tuning, learning_rate=rate)
  arms: dict[str, Any] = {}
  for arm, flag in (('off', False), ('on', True)):
    made = dataclasses.replace(config.agent, **changes, self_tuning=flag, tuning=tuning)
    numbers = train(dataclasses.replace(config, agent=made), SEEDS, 'tuned_').numbers
    returns = np.array([point['returns'] for point in numbers['curve']])
    arms[arm] = dict(
      area=interval(returns.mean(axis=0)), final=interval(np.array(numbers['returns'])),
      steps_per_s=SEEDS * numbers['steps'] / numbers['seconds'],
      **{k: numbers[k] for k in ('compile_s', 'steps', 'curve')},
    )  # fmt: skip
  difference = {
    part: interval(np.subtract(arms['on'][part]['by_seed'], arms['off'][part]['by_seed']))
    for part in ('area', 'final')
  }
  return dict(arms, difference=difference)


def cost(env: str, agent: str, seconds: float) -> dict[str, Any]:
  """Times as many updates with self-tuning and without, in turn, of one seed."""
  config = configure(env=env, agent=agent)
  made, runs = envs.make(env), {}
  for arm, flag in (('off', False), ('on', True)):
    tuned = dataclasses.replace(config.agent, self_tuning=flag)
    runs[arm] = timing.start(tuned, made, config.num_envs, config.unroll_length, config.total_updates)  # fmt: skip
  updates = timing.updates_for(runs['off'].seconds, seconds)
  calls = {arm: functools.partial(run.seconds, updates) for arm, run in runs.items()}
  took = timing.interleave(calls, 9)
  ratios = [on / off for on, off in zip(took['on'], took['off'], strict=True)]
  return dict(
    steps_per_s={arm: updates * config.steps_per_update / min(x) for arm, x in took.items()},
    compile_s={arm: run.compile_s['train'] for arm, run in runs.items()},
    times=common.summary(ratios),
  )


def draw(results: dict[str, Any]) -> None:
  """Draws the metaparameters against the steps: a line for each seed."""
  plt = common.pyplot(**{'font.size': 9})
  figure, axes = plt.subplots(1, len(SHOWN), figsize=(11, 2.8), layout='constrained')
  for axis, name in zip(axes, SHOWN, strict=True):
    for i, title in enumerate(x for x in DRAWN if x in results):
      curve = results[title]['on']['curve']
      values = np.array([point[f'tuned_{name}'] for point in curve])
      lines = axis.plot([p['step'] / 1e6 for p in curve], values, color=f'C{i}', linewidth=1)
      lines[0].set_label(DRAWN[title])
    axis.set_title(name.replace('_', ' '))
  axes[2].set_xlabel('million environment steps')
  axes[0].legend(frameon=False)
  figure.savefig(common.ROOT / 'docs' / 'self_tuning.svg', metadata={'Date': None})


def main() -> None:
  args = common.arguments(__doc__, [*CASES, *COSTS], draw=False, steps=(0, 'fewer steps'), seconds=2.0)  # fmt: skip
  for name in () if args.draw else args.cases:
    result = cost(*COSTS[name], args.seconds) if name in COSTS else case(*CASES[name], steps=args.steps)  # fmt: skip
    shown = result.get('times') or {k: x['mean'] for k, x in result['difference'].items()}
    print(
      f'{name}: {"times the time" if "times" in result else "on minus off"} {shown}', flush=True
    )
    result = dict(**common.origin(), machine=common.machine(), **result)
    common.keep('self_tuning', name, result, (*CASES, *COSTS))
  draw(common.known('self_tuning'))


if __name__ == '__main__':
  main()
