"""The cost of replay on the host for a run under Sebulba, against replay on the device.

The same presets with either, in turn, twice; steps/s while learning, and bytes for each step in replay. Writes
results/replay_host.json after each preset.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import common
import jax
import numpy as np

from podrace.architectures.sebulba import HostReplaySource
from podrace.run.build import build_sebulba
from podrace.settings.presets import PRESETS
from podrace.settings.resolved import resolve

MIN_SIZE = 1_000  # so that learning begins at once
CASES = ('dqn-cartpole', 'r2d2-memory', 'dqn-pong')


def rate(preset: str, replay: Any, seconds: float) -> dict[str, float]:
  """Returns steps/s while learning, and bytes for each step in replay."""
  config = PRESETS[preset]()
  buffer = dataclasses.replace(config.agent.buffer, min_size=MIN_SIZE, capacity=20_000)
  agent = dataclasses.replace(config.agent, buffer=buffer)
  env = config.env.partition(',')[0]  # frames of the usual size
  config = dataclasses.replace(
    config, env=env, agent=agent, architecture='sebulba', replay=replay, lag='1'
  )
  driver = build_sebulba(resolve(config))
  driver.compile()
  keys = jax.vmap(jax.random.key)(np.array([0], np.uint32))
  state = driver.init(jax.random.clone(keys))
  driver.start(state, keys)
  try:
    state, _ = driver.advance(state, -(-MIN_SIZE // config.steps_per_update) + 10, lambda: False)
    begin, updates = time.perf_counter(), 0
    while time.perf_counter() < begin + seconds:
      state, made = driver.advance(state, 4, lambda: False)
      updates += made
    elapsed = time.perf_counter() - begin
    if isinstance(source := driver.source, HostReplaySource):
      steps = source.replay.metrics()['replay_windows'] * driver.windows.period
      size = source.replay.table.store.total.bytes
    else:
      size = sum(x.nbytes for x in jax.tree.leaves(state.memory))
      steps = state.memory.timesteps.reward.size
  finally:
    driver.close()
  return dict(steps_per_s=updates * config.steps_per_update / elapsed, bytes_per_step=size / steps)


def main() -> None:
  args = common.arguments(__doc__, CASES, seconds=15.0, repeats=2)
  for preset in args.cases:
    runs: dict[str, list[dict[str, float]]] = {'device': [], 'host': []}
    for _ in range(args.repeats):
      for replay, rows in runs.items():
        rows.append(rate(preset, replay, args.seconds))
    median = {
      replay: {k: statistics.median(r[k] for r in rows) for k in rows[0]}
      for replay, rows in runs.items()
    }
    ratio = median['host']['steps_per_s'] / median['device']['steps_per_s']
    print(preset, median, f'{ratio:.2f}', flush=True)
    common.keep('replay_host', preset, dict(median, host_over_device=ratio, runs=runs), CASES)


if __name__ == '__main__':
  main()
