"""This checkout against another one of podrace, such as that before a change: who changes code, runs it.

    git worktree add /tmp/before COMMIT
    .venv/bin/python benchmarks/pairs.py /tmp/before --pairs 5

Each case runs in a process of its own, the two checkouts in turn, so that a machine whose speed drifts is as
slow for both. Quoted is the median of the pairs' ratios, this one's speed over the other's. Both use this virtual
environment.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import common

SECONDS = 5
PPO = """
import sys; sys.path.insert(0, 'benchmarks')
import json, ppo_cartpole as p, common
from podrace import envs
config = dict(p.STEADY, num_envs={num_envs})
env = envs.make('gymnax:CartPole-v1')
run = common.start(common.bind(p.agent(config), env, 0), env, config['num_envs'], config['unroll_length'])
updates = p.STEPS_PER_CALL // config['num_envs'] // config['unroll_length']
run.reset(0)
seconds = [run.seconds(updates) for _ in range(p.CALLS)]
print(json.dumps(dict(rate=p.STEPS_PER_CALL * (p.CALLS - 1) / sum(seconds[1:]))))
"""
PONG = ['pong', '--num-envs', '32', '--unroll-length', '20', '--actor-threads', '2']
CARTPOLE = [
  '--env',
  'envpool:CartPole-v1',
  '--agent',
  'impala',
  '--agent.network.hidden',
  '64',
  '64',
]
CARTPOLE += ['--unroll-length', '20', '--num-envs', '128']
HOST = ['--architecture', 'sebulba', '--replay', 'host', '--agent.buffer.min-size', '1000']
CASES = {
  'ppo_cartpole, 4 environments': PPO.format(num_envs=4),
  'ppo_cartpole, 64 environments': PPO.format(num_envs=64),
  'sebulba, pong': PONG,
  'sebulba, envpool CartPole': CARTPOLE,
  'replay_host, dqn-cartpole': ['dqn-cartpole', *HOST, '--total-steps', '60_000'],
  'replay_host, r2d2-memory': ['r2d2-memory', *HOST, '--total-steps', '60_000'],
}


def run(tree: pathlib.Path, command: list[str]) -> str:
  """The last line that a program of a checkout prints."""
  environ = {**os.environ, 'PYTHONPATH': str(tree)}
  done = subprocess.run(
    [sys.executable, *command], cwd=tree, env=environ, capture_output=True, text=True, check=False
  )
  if done.returncode:
    raise SystemExit(f'{tree}: {command[:4]} ended with {done.returncode}:\n{done.stderr[-2000:]}')
  return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ''


def rate(tree: pathlib.Path, case: str, what: Any) -> float:
  """Steps/s."""
  if isinstance(what, str):
    return json.loads(run(tree, ['-c', what]))['rate']
  if case.startswith('sebulba'):
    told = run(tree, ['-m', 'podrace', 'bench', 'sebulba', *what, '--seconds', str(SECONDS)])
    return json.loads(told)['combined']
  with tempfile.TemporaryDirectory() as folder:
    run(tree, ['-m', 'podrace', 'train', *what, '--run-dir', f'{folder}/run'])
    rows = [
      json.loads(x) for x in pathlib.Path(folder, 'run', 'metrics.jsonl').read_text().splitlines()
    ]
  begun = next(row for row in rows if row['step'] >= rows[-1]['step'] / 4)
  return (rows[-1]['step'] - begun['step']) / (rows[-1]['wall_s'] - begun['wall_s'])


def main() -> None:
  """Measures the cases and records them."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('other', type=pathlib.Path, help='the root of the other checkout')
  parser.add_argument(
    '--this', type=pathlib.Path, default=common.ROOT, help='instead of this checkout'
  )
  parser.add_argument('--pairs', type=int, default=5)
  parser.add_argument('--cases', nargs='+', default=list(CASES), choices=list(CASES))
  args = parser.parse_args()
  found: dict[str, Any] = {}
  for case in args.cases:
    pairs = []
    for i in range(args.pairs):
      trees = [args.this, args.other]
      rates = {tree: rate(tree, case, CASES[case]) for tree in trees[:: 1 - 2 * (i % 2)]}
      pairs.append([rates[tree] for tree in trees])
    ratio = statistics.median(a / b for a, b in pairs)
    found[case] = dict(ratio=ratio, pairs=pairs)
    told = ' '.join(f'{a / b:.3f}' for a, b in pairs)
    print(
      f'{case}: {ratio:.3f} of {statistics.median(b for _, b in pairs):,.0f} steps/s ({told})',
      flush=True,
    )
  other = subprocess.run(
    ['git', 'rev-parse', 'HEAD'], cwd=args.other, capture_output=True, text=True, check=True
  )
  common.record('pairs', dict(other=other.stdout.strip(), cases=found))


if __name__ == '__main__':
  main()
