"""This checkout against another one of podrace, such as the one before a change.

    git worktree add /tmp/before COMMIT
    .venv/bin/python benchmarks/pairs.py --other /tmp/before --pairs 5

Each case runs in a process of its own, the two checkouts in turn, so that a machine whose speed drifts is as slow for
both. Quote the median of the pairs' ratios, this one's speed over the other's. Both use this virtual environment.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import common

PPO = ['--env', 'gymnax:CartPole-v1', '--agent', 'ppo', '--agent.epochs', '4', '--agent.minibatches', '4',
       '--unroll-length', '128', '--quiet', '--num-envs']  # fmt: skip
CARTPOLE = ['--env', 'envpool:CartPole-v1', '--agent', 'impala', '--agent.network.hidden', '64', '64',
            '--unroll-length', '20', '--num-envs', '128']  # fmt: skip
HOST = ['--architecture', 'sebulba', '--replay', 'host', '--agent.buffer.min-size', '1000']
CASES = {
  'ppo_cartpole, 4 environments': [*PPO, '4', '--total-steps', '1_500_000'],
  'ppo_cartpole, 64 environments': [*PPO, '64', '--total-steps', '4_000_000'],
  'sebulba, pong': ['pong', '--num-envs', '32', '--unroll-length', '20', '--actor-threads', '2'],
  'sebulba, envpool CartPole': CARTPOLE,
  'replay_host, dqn-cartpole': ['dqn-cartpole', *HOST, '--total-steps', '60_000'],
  'replay_host, r2d2-memory': ['r2d2-memory', *HOST, '--total-steps', '60_000'],
}


def run(tree: pathlib.Path, *command: Any) -> str:
  """Runs Python in a checkout, and returns the last line that it prints."""
  done = subprocess.run(
    [sys.executable, *map(str, command)], cwd=tree, env={**os.environ, 'PYTHONPATH': str(tree)},
    capture_output=True, text=True, check=False,
  )  # fmt: skip
  if done.returncode:
    raise SystemExit(f'{tree}: {command[:4]} ended with {done.returncode}:\n{done.stderr[-2000:]}')
  return done.stdout.strip().rpartition('\n')[2]


def steady_rate(run_dir: pathlib.Path) -> float:
  """Returns the steps/s of a run without its first quarter."""
  rows = common.metrics(run_dir)
  begun = next(row for row in rows if row['step'] >= rows[-1]['step'] / 4)
  return (rows[-1]['step'] - begun['step']) / (rows[-1]['wall_s'] - begun['wall_s'])


def rate(tree: pathlib.Path, case: str, seconds: float, steps: int) -> float:
  """Returns the steps/s of a case in a checkout."""
  args = CASES[case]
  if case.startswith('sebulba'):
    bench = ('-m', 'podrace', 'bench', 'sebulba', *args, '--seconds', seconds)
    return json.loads(run(tree, *bench))['combined']
  with tempfile.TemporaryDirectory() as folder:
    fewer = ('--total-steps', steps) if steps else ()
    run(tree, '-m', 'podrace', 'train', *args, *fewer, '--run-dir', f'{folder}/run')
    return steady_rate(pathlib.Path(folder, 'run'))


def main() -> None:
  args = common.arguments(
    __doc__, CASES, other='', this=str(common.ROOT), pairs=5, seconds=5.0, steps=0, name='pairs'
  )
  if not args.other:
    sys.exit('--other: the root of the other checkout is missing')
  trees, cases = [pathlib.Path(args.this), pathlib.Path(args.other)], {}
  for case in args.cases:
    pairs = []
    for i in range(args.pairs):
      rates = {
        tree: rate(tree, case, args.seconds, args.steps) for tree in trees[:: 1 - 2 * (i % 2)]
      }
      pairs.append([rates[tree] for tree in trees])
    ratio, others = common.pair_ratio(*zip(*pairs, strict=True)), [b for _, b in pairs]
    cases[case] = dict(ratio=ratio, pairs=pairs)
    each = ' '.join(f'{a / b:.3f}' for a, b in pairs)
    print(f'{case}: {ratio:.3f} of {statistics.median(others):,.0f} steps/s ({each})', flush=True)
  common.record(args.name, dict(other=common.head(trees[1]), cases=cases))


if __name__ == '__main__':
  main()
