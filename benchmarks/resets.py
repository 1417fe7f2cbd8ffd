"""The cost of resets: steps/s of a batch of environments, by the share of resets computed per step.

`fresh_fraction` 1 resets every environment on every step; less keeps a pool of fresh states (see `podrace.envs.base`).
The adapters' defaults are chosen by these numbers. The policy is random, so episodes are as short as they get;
`episode_steps` is their mean length with the reset step counted. Compare `steps_per_cpu_s` (all threads) on a shared
machine. A pool keeps up where `fresh_fraction * episode_steps >= 1`; below, states are used twice.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import common
from environments import Rollout

from podrace import envs

FRACTIONS = (1.0, 1 / 4, 1 / 16, 1 / 64)
ENVS = {  # name: steps per compiled call, fractions (craftax compiles for a minute each)
  'gymnax:CartPole-v1': (256, FRACTIONS),
  'gymnax:Breakout-MinAtar': (256, FRACTIONS),
  'jumanji:Snake-v1': (256, FRACTIONS),
  'navix:Navix-DoorKey-8x8-v0': (256, FRACTIONS),
  'brax:inverted_pendulum': (32, FRACTIONS),
  'brax:ant': (32, FRACTIONS),
  'craftax:Craftax-Classic-Symbolic-v1': (8, FRACTIONS),
  'craftax:Craftax-Symbolic-v1': (8, FRACTIONS[:3]),
}


def measure(
  name: str, fraction: float, num_envs: int, steps: int, seconds: float
) -> dict[str, Any]:
  """Returns one row of the table."""
  rollout = Rollout(dataclasses.replace(envs.make(name), fresh_fraction=fraction), num_envs, steps)
  rollout.seconds(1)  # leave the start behind
  before, wall, cpu, calls = rollout.ends, 0.0, time.process_time(), 0
  while wall < seconds or calls < 2:
    wall, calls = wall + rollout.seconds(1), calls + 1
  cpu, ends, env_steps = time.process_time() - cpu, rollout.ends - before, calls * steps * num_envs
  return dict(
    env=name, fresh_fraction=fraction, steps_per_s=round(env_steps / wall), steps_per_cpu_s=round(env_steps / cpu),
    episode_steps=round(env_steps / ends, 1) if ends else None, compile_s=round(rollout.compile_s, 1),
    num_envs=num_envs,
  )  # fmt: skip


def main() -> None:
  args = common.arguments(__doc__, ENVS, num_envs=64, seconds=(2.0, 'of measuring, per row'))
  rows = [  # other rows stay
    row for row in common.known('resets') or ()
    if row['env'] not in args.cases or row['num_envs'] != args.num_envs
  ]  # fmt: skip
  for name in args.cases:
    steps, fractions = ENVS[name]
    for fraction in fractions:
      row = measure(name, fraction, args.num_envs, steps, args.seconds)
      print(row, flush=True)
      rows.append(row | dict(origin=common.origin()))
      common.record('resets', rows)


if __name__ == '__main__':
  main()
