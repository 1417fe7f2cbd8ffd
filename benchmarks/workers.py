"""Gymnasium environments in processes: podrace's workers against AsyncVectorEnv, in steps/s.

Both return observations that stay as they are (AsyncVectorEnv copies by default; workers always do), are
given random actions that were drawn before, and take turns. AsyncVectorEnv has a process for each environment;
so it has here, and `SyncVectorEnv` in this process is what no process at all would do.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import common
import gymnasium
import numpy as np

from podrace.envs.host.base import PoolArgs, make

SETTINGS = {  # environment, how many of them
  'CartPole-v1, 8': ('CartPole-v1', 8),
  'CartPole-v1, 64': ('CartPole-v1', 64),
  'Acrobot-v1, 16': ('Acrobot-v1', 16),
}
DRAWN = 256  # batches of actions


def actions(env: str, n: int) -> np.ndarray:
  one = gymnasium.make(env)
  count = int(one.action_space.n)  # type: ignore[attr-defined]
  one.close()
  return np.random.default_rng(0).integers(0, count, (DRAWN, n))


def rate(step: Callable[[np.ndarray], Any], drawn: np.ndarray, seconds: float) -> float:
  """Steps/s of all environments, of which one batch is made before it is timed."""
  step(drawn[0])
  start, steps = time.perf_counter(), 0
  while (took := time.perf_counter() - start) < seconds:
    step(drawn[steps % DRAWN])
    steps += 1
  return steps * drawn.shape[1] / took


def workers(env: str, n: int, seconds: float) -> float:
  seeds = np.arange(n, dtype=np.uint32)
  pool = make(f'gymnasium:{env}').make(PoolArgs(n, n, seeds, common.machine()['cores'], 60.0))
  try:
    pool.reset()
    ids = pool.recv().env_id

    def step(action: np.ndarray) -> None:
      pool.send(ids, action)
      pool.recv()

    return rate(step, actions(env, n), seconds)
  finally:
    pool.close()


def vector(kind: Any, env: str, n: int, seconds: float) -> float:
  envs = kind([lambda: gymnasium.make(env)] * n)
  try:
    envs.reset(seed=0)
    return rate(envs.step, actions(env, n), seconds)
  finally:
    envs.close()


SIDES: dict[str, Callable[[str, int, float], float]] = {
  'workers': workers,
  'async': lambda *a: vector(gymnasium.vector.AsyncVectorEnv, *a),
  'sync': lambda *a: vector(gymnasium.vector.SyncVectorEnv, *a),
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--seconds', type=float, default=3.0)
  args = parser.parse_args()
  results: dict[str, Any] = {}
  for name, (env, n) in SETTINGS.items():
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(args.repeats):
      for side, measure in SIDES.items():
        rates[side].append(measure(env, n, args.seconds))
    middle = {side: statistics.median(r) for side, r in rates.items()}
    results[name] = dict(
      env=env,
      num_envs=n,
      rates={side: common.summary(r) for side, r in rates.items()},
      workers_over_async=middle['workers'] / middle['async'],
    )
    told = ', '.join(f'{side} {r:,.0f}' for side, r in middle.items())
    print(f'{name}: {told}; {results[name]["workers_over_async"]:.2f}x', flush=True)
    common.record('workers', results)


if __name__ == '__main__':
  main()
