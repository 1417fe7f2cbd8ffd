"""Cost of saving environments on the host: steps/s with and without keeping actions, and a checkpoint's size and time.

    .venv/bin/python benchmarks/host_state.py

A pool is stepped alone with random actions, in turn with and without what `SavedPool.state` needs. Quote the median of
the pairs' ratios. Then its state is written as in a checkpoint, and a new pool returns to it.
"""

from __future__ import annotations

import io
import statistics
import time
from typing import Any

import common
import numpy as np

from podrace.envs.host import ale, base
from podrace.envs.host.base import PoolArgs
from podrace.system.files import save_arrays

CASES = {
  'gymnasium:CartPole-v1': 16,
  'gymnasium:Pendulum-v1': 16,
  'envpool:CartPole-v1': 64,
  'ale:pong': 32,
  'ale:breakout': 32,
  'ale:breakout,sticky=0.25': 32,
}


class Stepped:
  """A pool that is stepped with random actions."""

  def __init__(self, name: str, num_envs: int, threads: int, saves: bool) -> None:
    self.spec, self.n = base.make(name), num_envs
    seeds = np.arange(num_envs, dtype=np.uint32)
    self.pool: Any = self.spec.make(PoolArgs(num_envs, num_envs, seeds, threads, 60.0, saves))
    space: Any = self.spec.action_space
    random = np.random.default_rng(0)
    if hasattr(space, 'n'):
      self.actions: Any = random.integers(0, int(space.n), (256, num_envs)).astype(space.dtype)
    else:
      shape = (256, num_envs, *space.shape)
      self.actions = random.uniform(space.low, space.high, shape).astype(space.dtype)
    self.steps = 0

  def begin(self) -> Stepped:
    """Resets the environments."""
    self.pool.reset()
    self.ids = self.pool.recv().env_id
    return self

  def rate(self, seconds: float) -> float:
    """Returns steps/s, with a state taken every 20 steps, as at the end of an unroll."""
    begun, count = time.perf_counter(), 0
    while (taken := time.perf_counter() - begun) < seconds:
      for _ in range(20):
        self.pool.send(self.ids, self.actions[self.steps % 256])
        self.pool.recv()
        self.steps += 1
        count += 1
      if self.pool.saves:
        self.pool.state()
    return count * self.n / taken


def seed_steps(name: str) -> float:
  """Returns how many steps take as long as seeding one game."""
  env = ale.vector(name.removeprefix('ale:').partition(',')[0], ale.DEFAULTS, 2, 2, 1)
  env.reset(seed=np.arange(2))
  begun = time.perf_counter()
  for _ in range(500):
    env.step(np.zeros(2, np.int32))
  step = (time.perf_counter() - begun) / 1000
  begun = time.perf_counter()
  for i in range(20):
    env.reset(seed=np.array([i]), options={'reset_mask': np.array([True, False])})
  env.close()
  return (time.perf_counter() - begun) / 20 / step


def measure(name: str, seconds: float, pairs: int, threads: int) -> dict[str, Any]:
  """Returns the figures of one kind of environment."""
  n = CASES[name]
  pools = {saves: Stepped(name, n, threads, saves).begin() for saves in (False, True)}
  for pool in pools.values():
    pool.rate(seconds / 2)
  rates = [
    {saves: pools[saves].rate(seconds) for saves in (False, True)[:: 1 - 2 * (i % 2)]}
    for i in range(pairs)
  ]
  state, file = pools[True].pool.state(), io.BytesIO()
  begun = time.perf_counter()
  save_arrays(file, state)
  written = time.perf_counter() - begun
  again = Stepped(name, n, threads, saves=True)
  begun = time.perf_counter()
  again.pool.restore(state)
  restored = time.perf_counter() - begun
  for pool in (*pools.values(), again):
    pool.pool.close()
  return dict(
    environments=n,
    threads=threads,
    plain=statistics.median(r[False] for r in rates),
    saved=statistics.median(r[True] for r in rates),
    ratio=statistics.median(r[True] / r[False] for r in rates),
    ratios=[r[True] / r[False] for r in rates],
    bytes=len(file.getvalue()),
    write_s=written,
    restore_s=restored,
    steps=pools[True].steps,
    seed_steps=seed_steps(name) if name.startswith('ale:') else None,
    replayed=int((state['count'] - state['start']).max()),
  )


def main() -> None:
  """Measures the cases."""
  args = common.arguments(__doc__, CASES, seconds=3.0, pairs=5, threads=1)
  for case in args.cases:
    result = measure(case, args.seconds, args.pairs, args.threads)
    print(f'{case}: {result}', flush=True)
    common.keep('host_state', case, result, CASES)


if __name__ == '__main__':
  main()
