"""Gossip against all-reduce: Catch and MinAtar Breakout with 8 replicas, in equal steps.

The preset `catch` with fewer steps than its 2,000,000: IMPALA, 64 environments, which are 8 on each of 8 devices. The
devices are fake ones of a CPU, so this compares how the two learn, not their speed. Both have the same settings, which
were chosen for all-reduce, and the same seeds; learning rates are the preset's, three and thirty times that. All seeds
of a case are one program. Breakout is the preset `minatar-breakout`, PPO with 64 environments, alike, with its own
learning rate and 400,000 steps of 10,000,000.

A run has converged if the mean return of the episodes in its last tenth is at least 0.9 on Catch, where 1 is the most,
and 5 on Breakout, ten times that of chance. That is the return of acting, where each replica acts by its own
parameters, and it samples its actions. Intervals are of 95%: of shares Wilson's (1927), of means the bootstrap over
seeds. Writes benchmarks/results/gossip.json after each case; other cases keep their results.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['JAX_NUM_CPU_DEVICES'] = '8'

import common
import numpy as np
import seeds as trainer
from scipy.stats import binomtest

from podrace.experiments import statistics
from podrace.settings.presets import PRESETS

DEVICES, SEEDS = 8, 30
CONVERGED = {'catch': 0.9, 'minatar-breakout': 5.0}
ARMS: dict[str, dict[str, Any]] = {
  'all-reduce': dict(agree='all-reduce'),
  'exponential': dict(agree='gossip'),
  'ring': dict(agree='gossip', gossip_graph='ring'),
  'exponential, stale': dict(agree='gossip', gossip_staleness=1),
}
CASES = {  # preset, arm, learning rate, steps
  'all-reduce, 0.001': ('catch', 'all-reduce', 1e-3, 600_000),
  'exponential, 0.001': ('catch', 'exponential', 1e-3, 600_000),
  'all-reduce, 0.003': ('catch', 'all-reduce', 3e-3, 300_000),
  'exponential, 0.003': ('catch', 'exponential', 3e-3, 300_000),
  'ring, 0.003': ('catch', 'ring', 3e-3, 300_000),
  'exponential, stale, 0.003': ('catch', 'exponential, stale', 3e-3, 300_000),
  'all-reduce, 0.03': ('catch', 'all-reduce', 3e-2, 300_000),
  'exponential, 0.03': ('catch', 'exponential', 3e-2, 300_000),
  'minatar-breakout, all-reduce, 0.005': ('minatar-breakout', 'all-reduce', 5e-3, 400_000),
  'minatar-breakout, exponential, 0.005': ('minatar-breakout', 'exponential', 5e-3, 400_000),
}


def describe(numbers: dict[str, Any], bound: float) -> dict[str, Any]:
  """Returns shares, returns, and both curves as means over seeds."""
  returns = np.array(numbers['returns'])
  converged, n = int(np.sum(returns >= bound)), len(returns)
  every = np.array([p['returns'] for p in numbers['curve']])  # [points, seeds]
  steps = [p['step'] for p in numbers['curve']]
  distance = [p['consensus_distance'] for p in numbers['curve'] if 'consensus_distance' in p]
  return dict(
    steps=numbers['steps'], seeds=n, converged=converged, share=converged / n, share_interval=tuple(binomtest(converged, n).proportion_ci(method='wilson')),
    return_mean=float(returns.mean()), return_interval=statistics.interval(statistics.mean, [returns]),
    returns=returns.round(4).tolist(),
    curve=[dict(step=s, mean=float(r.mean()), lowest=float(r.min())) for s, r in zip(steps, every, strict=True)],
    return_over_run=float(every.mean()),  # early learning counts as well
    return_over_run_interval=statistics.interval(statistics.mean, [every.mean(0)]),
    consensus_distance=[float(np.mean(d)) for d in distance],
    seconds=round(numbers['seconds'], 1), compile_s=round(numbers['compile_s'], 1),
  )  # fmt: skip


def main() -> None:
  args = common.arguments(__doc__, CASES, seeds=SEEDS, steps=(0, 'fewer steps than those of the case'))  # fmt: skip
  for title in args.cases:
    name, arm, rate, steps = CASES[title]
    preset = PRESETS[name]()
    config = dataclasses.replace(
      preset, agent=dataclasses.replace(preset.agent, learning_rate=rate), devices=DEVICES,
      total_steps=args.steps or steps, **ARMS[arm],
    )  # fmt: skip
    numbers = trainer.train(config, args.seeds, 'consensus').numbers
    case = describe(numbers, CONVERGED[name]) | common.origin()
    shown = ('share', 'return_mean', 'return_interval', 'return_over_run', 'seconds', 'compile_s')
    print(f'{title}:', {k: case[k] for k in shown}, case['consensus_distance'][::4], flush=True)
    common.keep('gossip', title, case, CASES)


if __name__ == '__main__':
  main()
