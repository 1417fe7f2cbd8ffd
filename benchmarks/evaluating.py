"""What `--eval-every` costs: training rates with 1% of the steps evaluated and without, in turn, under both architectures.

Rates are steps per second of wall time; both sides share the same cores. `whole` is that of the whole run without its
compilation, but with the compilation of the evaluations, which happens once. `steady` is that from the second
evaluation on, when all is compiled.
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
  episodes = (
    20  # fewer than by default, each of 500 steps at most; a run has at least four evaluations
  )
  for name in ('sebulba', 'anakin'):
    config = podrace.configure('cartpole', architecture=name)
    probe = _train(config)
    every = episodes * 500 * 100
    steps = max(int(args.seconds * probe['whole']), 4 * every)
    config = dataclasses.replace(config, total_steps=steps)
    with_evaluations = dataclasses.replace(config, eval_every=every, eval_episodes=episodes)
    pairs = [
      (_train(config, 2 * every), _train(with_evaluations, 2 * every)) for _ in range(args.pairs)
    ]
    found[name] = {'steps': steps, 'eval_every': every, 'eval_episodes': episodes, 'pairs': pairs}
    for rate in ('whole', 'steady'):
      ratios = [b[rate] / a[rate] for a, b in pairs]
      found[name][rate] = {'ratios': ratios, 'median': statistics.median(ratios)}
      print(name, rate, json.dumps(ratios), found[name][rate]['median'], flush=True)
  common.record('evaluating', found)


def _train(config: podrace.Config, steady_from: int = 0) -> dict[str, Any]:
  """Trains once: the rates, of which `steady` begins at a step; its returns; the seconds of evaluations."""
  with tempfile.TemporaryDirectory() as folder:
    result = podrace.train(config, folder, quiet=True)
    evaluations = result.evaluations
    after = result.summary['wall_s'] - result.summary['compile_s']
    first, last = next(x for x in result.metrics if x['step'] >= steady_from), result.metrics[-1]
    seconds = last['wall_s'] - first['wall_s']
    return {
      'whole': result.summary['step'] / after,
      'steady': (last['step'] - first['step']) / seconds if seconds else 0.0, 'wall_s': result.summary['wall_s'],
      'compile_s': result.summary['compile_s'], 'evaluations': len(evaluations),
      'eval_s': sum(line['eval_s'] for line in evaluations), 'episode_return': result.summary['episode_return'],
    }  # fmt: skip


if __name__ == '__main__':
  main()
