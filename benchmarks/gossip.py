"""Gossip against all-reduce: Catch and MinAtar Breakout with 8 replicas, in equal steps.

The preset `catch` with fewer steps than its 2,000,000: IMPALA, 64 environments, which are 8 on each of 8 devices. The devices are
fake ones of a CPU, so this says how the two learn, and nothing about speed. Both have the same settings, which were chosen for
all-reduce, and the same seeds; learning rates are the preset's, three and thirty times that. All seeds of a case are one program.
Breakout is the preset `minatar-breakout`, PPO with 64 environments, alike, with its own learning rate and 400,000 steps of
10,000,000.

A run has converged if the mean return of the episodes in its last tenth is at least 0.9 on Catch, where 1 is the most, and 5 on
Breakout, ten times that of chance. That is the return of acting, where each replica acts by its own parameters, and it samples
its actions. Intervals are of 95%: of shares Wilson's (1927), of means the bootstrap over seeds. Writes
benchmarks/results/gossip.json after each case; with `--missing` only those that it does not have yet.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from typing import Any

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['JAX_NUM_CPU_DEVICES'] = '8'

import common
import numpy as np
import seeds as trainer

from podrace.experiments import curves
from podrace.settings.config import Config
from podrace.settings.presets import PRESETS

DEVICES, SEEDS = 8, 30
CONVERGED = {'catch': 0.9, 'minatar-breakout': 5.0}
ARMS: dict[str, dict[str, Any]] = {
  'all-reduce': dict(agree='all-reduce'),
  'exponential': dict(agree='gossip'),
  'ring': dict(agree='gossip', gossip_graph='ring'),
  'exponential, stale': dict(agree='gossip', gossip_staleness=1),
}
CASES = (  # preset, arm, learning rate, steps
  ('catch', 'all-reduce', 1e-3, 600_000),
  ('catch', 'exponential', 1e-3, 600_000),
  ('catch', 'all-reduce', 3e-3, 300_000),
  ('catch', 'exponential', 3e-3, 300_000),
  ('catch', 'ring', 3e-3, 300_000),
  ('catch', 'exponential, stale', 3e-3, 300_000),
  ('catch', 'all-reduce', 3e-2, 300_000),
  ('catch', 'exponential', 3e-2, 300_000),
  ('minatar-breakout', 'all-reduce', 5e-3, 400_000),
  ('minatar-breakout', 'exponential', 5e-3, 400_000),
)


def title(name: str, arm: str, rate: float) -> str:
  """Of a case in the file."""
  return f'{arm}, {rate:g}' if name == 'catch' else f'{name}, {arm}, {rate:g}'


def config(name: str, arm: str, rate: float, steps: int) -> Config:
  preset = PRESETS[name]()
  agent = dataclasses.replace(preset.agent, learning_rate=rate)
  return dataclasses.replace(preset, agent=agent, total_steps=steps, devices=DEVICES, **ARMS[arm])


def wilson(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
  """The interval of a share."""
  p, scale = successes / n, 1 + z * z / n
  half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / scale
  middle = (p + z * z / (2 * n)) / scale
  return middle - half, middle + half


def described(numbers: dict[str, Any], bound: float) -> dict[str, Any]:
  """What came of a case: shares, returns, and both curves as means over seeds."""
  returns = np.array(numbers['returns'])
  converged = int(np.sum(returns >= bound))
  every = np.array([p['returns'] for p in numbers['curve']])  # [points, seeds]
  distance = [p['consensus_distance'] for p in numbers['curve'] if 'consensus_distance' in p]
  return dict(
    steps=numbers['steps'],
    seeds=len(returns),
    converged=converged,
    share=converged / len(returns),
    share_interval=wilson(converged, len(returns)),
    return_mean=float(returns.mean()),
    return_interval=curves.bootstrap_interval([returns], np.mean),
    returns=returns.round(4).tolist(),
    curve=[
      dict(step=p['step'], mean=float(np.mean(r)), lowest=float(np.min(r)))
      for p, r in zip(numbers['curve'], every, strict=True)
    ],
    # The area under the curve: early learning counts as well.
    return_over_run=float(every.mean()),
    return_over_run_interval=curves.bootstrap_interval([every.mean(0)], np.mean),
    consensus_distance=[float(np.mean(d)) for d in distance],
    seconds=round(numbers['seconds'], 1),
    compile_s=round(numbers['compile_s'], 1),
  )


def before() -> dict[str, Any]:
  """The cases of the file, each with the run that it is from."""
  document = json.loads((common.RESULTS / 'gossip.json').read_text())
  origin = {name: document[name] for name in ('date', 'command', 'commit')}
  return {name: origin | case for name, case in document['results'].items()}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--seeds', type=int, default=SEEDS)
  parser.add_argument('--missing', action='store_true')
  args = parser.parse_args()
  found = before() if args.missing else {}
  for name, arm, rate, steps in CASES:
    known = title(name, arm, rate)
    if known in found:
      continue
    numbers = trainer.train(config(name, arm, rate, steps), args.seeds, 'consensus').numbers
    case = found[known] = described(numbers, CONVERGED[name]) | common.origin()
    shown = ('share', 'return_mean', 'return_interval', 'return_over_run', 'seconds', 'compile_s')
    print(f'{known}:', {k: case[k] for k in shown}, case['consensus_distance'][::4], flush=True)
    common.record('gossip', found)


if __name__ == '__main__':
  main()
