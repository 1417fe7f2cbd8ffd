"""Sebulba against stable-baselines3's PPO and sample-factory's APPO, and the learner against PyTorch.

CartPole: Gymnasium's environment on both sides, 64 environments, unrolls of 32, 4 epochs of 4 minibatches,
2 x 64 tanh, separate networks. SB3 is measured with both of its vector environments and the faster one counts.
Pong: 16 environments, unrolls of 64, 4 epochs of 4 minibatches, the Nature network; the peers through their own
wrappers, podrace through ale-py's. sample-factory runs asynchronously with one worker and with two, and the faster
one counts. The learner: one update of the shallow IMPALA network from 640 frames; PyTorch in both memory
layouts, the faster one counts.

The sides take turns, each in a process of its own. The peers have virtual environments of their own
(build/bench-torch, build/bench-sf), which the first run makes.
"""

from __future__ import annotations

from collections.abc import Iterator
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
PARTS = {  # podrace's side and which of its rates, peers' virtual environments
  'learner': (sebulba.PONG, 'learner', ['torch']),
  'cartpole': (CARTPOLE, 'combined', ['torch', 'sf']),
  'pong': (PONG, 'combined', ['torch', 'sf']),
}
PINNED = ('torch', 'stable-baselines3', 'sample-factory', 'gymnasium', 'ale-py', 'numpy')


def theirs(part: str, seconds: float) -> Iterator[tuple[str, float]]:
  """Yields the rates of the peers, each with its settings."""

  def measure(peer: str, script: str, *args: Any) -> Any:
    return common.last_json([common.peer(peer), f'benchmarks/peers/{script}', *map(str, args)])

  if part == 'learner':
    for layout in ('contiguous', 'channels_last'):
      result = measure('torch', 'peer_torch.py', FRAMES, seconds, layout)
      yield f'torch {layout}', result['frames_per_s']
    return
  sizes = (64, 32, 4, 4) if part == 'cartpole' else (16, 64, 4, 4)
  for vector in ('dummy', 'subproc') if part == 'cartpole' else ('subproc',):
    longer = seconds if part == 'cartpole' else 3 * seconds
    result = measure('torch', 'peer_sb3.py', part, *sizes, longer, vector)
    yield f'stable-baselines3 {vector}', result['steps_per_s']
  for workers in (1, 2):
    result = measure('sf', 'peer_sf.py', part, *sizes, SF_SECONDS, workers)
    yield f'sample-factory, {workers} workers', result['rate']


def main() -> None:
  args = common.arguments(__doc__, PARTS, repeats=3, seconds=5.0)
  for part in args.cases:
    flags, key, peers = PARTS[part]
    ours: list[float] = []
    rates: dict[str, list[float]] = {}
    for _ in range(args.repeats):
      ours.append(sebulba.bench(flags, args.seconds)[key])
      for name, rate in theirs(part, args.seconds):
        rates.setdefault(name, []).append(rate)
    result = common.against_fastest(part, ours, rates) | dict(
      repeats=args.repeats, seconds=args.seconds, origin=common.origin(),
      peer_versions={peer: common.pins(common.peer(peer), *PINNED) for peer in peers},
    )  # fmt: skip
    common.keep('sebulba_peers', part, result)


if __name__ == '__main__':
  main()
