"""What `--eval-every` costs: training rates with 1% of the steps evaluated and without, in turn, under both architectures.

The rate is that of the whole run in steps per second of wall time, without compilation; both sides share the same cores.
The evaluations' own compilation is in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
from typing import Any

import common

import podrace


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--pairs', type=int, default=5)
  parser.add_argument('--seconds', type=float, default=30.0)
  args = parser.parse_args()
  found: dict[str, Any] = {}
  for name in ('anakin', 'sebulba'):
    config = podrace.configure('cartpole', architecture=name)
    probe = _train(config)
    steps = int(args.seconds * probe['rate'])
    config = dataclasses.replace(config, total_steps=steps)
    episodes = 20  # of 500 steps at most: 10,000 steps
    every = episodes * 500 * 100
    with_evaluations = dataclasses.replace(config, eval_every=every, eval_episodes=episodes)
    pairs = [(_train(config), _train(with_evaluations)) for _ in range(args.pairs)]
    ratios = [b['rate'] / a['rate'] for a, b in pairs]
    found[name] = {
      'steps': steps, 'eval_every': every, 'eval_episodes': episodes, 'pairs': pairs, 'ratios': ratios,
      'median': statistics.median(ratios),
    }  # fmt: skip
    print(name, json.dumps(found[name]['ratios']), found[name]['median'], flush=True)
  common.record('evaluating', found)


def _train(config: podrace.Config) -> dict[str, Any]:
  """Trains once: the run's steps per second of wall time without compilation, its returns, the seconds of evaluations."""
  with tempfile.TemporaryDirectory() as folder:
    result = podrace.train(config, folder, quiet=True)
    evaluations = result.evaluations
    after = result.summary['wall_s'] - result.summary['compile_s']
    return {
      'rate': result.summary['step'] / after, 'wall_s': result.summary['wall_s'],
      'compile_s': result.summary['compile_s'], 'evaluations': len(evaluations),
      'eval_s': sum(line['eval_s'] for line in evaluations), 'episode_return': result.summary['episode_return'],
    }  # fmt: skip


if __name__ == '__main__':
  main()
