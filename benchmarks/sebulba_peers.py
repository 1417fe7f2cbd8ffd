"""Sebulba against stable-baselines3's PPO and sample-factory's APPO, and the learner against PyTorch.

CartPole: Gymnasium's environment on both sides, 64 environments, unrolls of 32, 4 epochs of 4 minibatches,
2 x 64 tanh, separate networks. SB3 is measured with both of its vector environments and the
faster one counts. Pong: 16 environments, unrolls of 64, 4 epochs of 4 minibatches, the Nature network;
the peers through their own wrappers, podrace through ale-py's. sample-factory runs asynchronously with one
worker and with two, and the faster one counts. The learner: one update of the shallow IMPALA
network from 640 frames; PyTorch in both memory layouts, the faster one counts.

The sides take turns, each in a process of its own. The peers have virtual environments of their own
(build/bench-torch, build/bench-sf), which the first run makes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

import common
import sebulba

PPO = ['--agent', 'ppo', '--agent.epochs', '4', '--agent.minibatches', '4']
CARTPOLE = ['--env', 'gymnasium:CartPole-v1', *PPO, '--agent.network.hidden', '64', '64',
            '--num-envs', '64', '--unroll-length', '32', '--actor-threads', '1', '--agent.learning-rate', '1e-3']  # fmt: skip
PONG = ['--env', 'ale:pong', *PPO, '--agent.network.torso', 'nature', '--agent.network.hidden',
        '512', '--agent.network.activation', 'relu', '--num-envs', '16', '--unroll-length', '64']  # fmt: skip
FRAMES = 32 * 20  # of an update, as in `sebulba.PONG`
SF_SECONDS = 40  # its log has a rate every 5 s, over the last 10

# Their virtual environments.
PEERS = dict(learner=['torch'], cartpole=['torch', 'sf'], pong=['torch', 'sf'])
PINNED = ('torch', 'stable-baselines3', 'sample-factory', 'gymnasium', 'ale-py', 'numpy')


def ours(args: list[str], seconds: float) -> dict[str, Any]:
  command = [sys.executable, '-m', 'podrace.cli', 'bench', 'sebulba', *args]
  return common.last_json([*command, '--seconds', str(seconds)])


def theirs(script: str, *args: Any, peer: str = 'torch') -> dict[str, Any]:
  return common.last_json([common.peer(peer), f'benchmarks/peers/{script}', *map(str, args)])


def compare(name: str, ours: list[float], theirs: dict[str, list[float]]) -> dict[str, Any]:
  fastest = max(theirs, key=lambda k: statistics.median(theirs[k]))
  ratio = statistics.median(ours) / statistics.median(theirs[fastest])
  print(
    f'{name}: podrace {statistics.median(ours):,.0f}, {fastest} '
    f'{statistics.median(theirs[fastest]):,.0f} steps/s; {ratio:.2f}x', flush=True,
  )  # fmt: skip
  return dict(
    podrace=common.summary(ours),
    peers={k: common.summary(v) for k, v in theirs.items()},
    ratio_to_fastest=ratio,
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('parts', nargs='*', help='cartpole, pong, learner; none: all')
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--seconds', type=float, default=5.0)
  args = parser.parse_args()
  parts = args.parts or ['learner', 'cartpole', 'pong']
  path = common.RESULTS / 'sebulba_peers.json'
  results: dict[str, Any] = json.loads(path.read_text())['results'] if path.exists() else {}
  mine: list[float] = []
  others: dict[str, list[float]] = {}

  def add(name: str, rate: float) -> None:
    others.setdefault(name, []).append(rate)

  for part in parts:
    mine, others = [], {}
    for _ in range(args.repeats):
      if part == 'learner':
        mine.append(ours(sebulba.PONG, args.seconds)['learner'])
        for layout in ('contiguous', 'channels_last'):
          add(
            f'torch {layout}', theirs('peer_torch.py', FRAMES, args.seconds, layout)['frames_per_s']
          )
      elif part == 'cartpole':
        mine.append(ours(CARTPOLE, args.seconds)['combined'])
        for vector in ('dummy', 'subproc'):
          r = theirs('peer_sb3.py', 'cartpole', 64, 32, 4, 4, args.seconds, vector)
          add(f'stable-baselines3 {vector}', r['steps_per_s'])
        for workers in (1, 2):
          r = theirs('peer_sf.py', 'cartpole', 64, 32, 4, 4, SF_SECONDS, workers, peer='sf')
          add(f'sample-factory, {workers} workers', r['rate'])
      else:
        mine.append(ours(PONG, args.seconds)['combined'])
        r = theirs('peer_sb3.py', 'pong', 16, 64, 4, 4, 3 * args.seconds, 'subproc')
        add('stable-baselines3 subproc', r['steps_per_s'])
        for workers in (1, 2):
          r = theirs('peer_sf.py', 'pong', 16, 64, 4, 4, SF_SECONDS, workers, peer='sf')
          add(f'sample-factory, {workers} workers', r['rate'])
    results[part] = dict(
      compare(part, mine, others),
      repeats=args.repeats,
      seconds=args.seconds,
      peer_versions={peer: common.pins(common.peer(peer), *PINNED) for peer in PEERS[part]},
      origin=common.origin(),
    )
    common.record('sebulba_peers', results)


if __name__ == '__main__':
  main()
