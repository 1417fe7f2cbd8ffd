"""What replay on the host costs a run under Sebulba, against replay on the device.

    .venv/bin/python benchmarks/replay_host.py [SECONDS]

The same presets with either, in turn, twice; steps/s while learning, and the size of what is remembered. Writes
results/replay_host.json.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np
from common import record

from podrace.architectures.sebulba import HostReplaySource
from podrace.run.build import build_sebulba
from podrace.settings.config import Config
from podrace.settings.presets import PRESETS
from podrace.settings.resolved import resolve

MIN_SIZE = 1_000  # so that learning begins at once
REPEATS = 2
CASES = ('dqn-cartpole', 'r2d2-memory', 'dqn-pong')


def config(preset: str, replay: Any) -> Config:
  """A preset under Sebulba."""
  found = PRESETS[preset]()
  buffer = dataclasses.replace(found.agent.buffer, min_size=MIN_SIZE, capacity=20_000)
  agent = dataclasses.replace(found.agent, buffer=buffer)
  return dataclasses.replace(found, agent=agent, architecture='sebulba', replay=replay, lag='1')


def rate(config: Config, seconds: float) -> dict[str, float]:
  """Steps/s while learning, and bytes for each step that is remembered."""
  driver = build_sebulba(resolve(config))
  driver.compile()
  keys = jax.vmap(jax.random.key)(np.array([0], np.uint32))
  state = driver.init(jax.random.clone(keys))
  driver.start(state, keys)
  try:
    state, _ = driver.advance(state, -(-MIN_SIZE // config.steps_per_update) + 10, lambda: False)
    start, updates = time.perf_counter(), 0
    while time.perf_counter() < start + seconds:
      state, made = driver.advance(state, 4, lambda: False)
      updates += made
    elapsed = time.perf_counter() - start
    source = driver.source
    if not isinstance(source, HostReplaySource):
      arrays = jax.tree.leaves(state.memory)
      size, steps = sum(x.nbytes for x in arrays), state.memory.timesteps.reward.size
    else:
      source.replay.wait()
      w = driver.windows
      size, steps = source.replay.store.total.bytes, len(source.replay.table) * w.period
  finally:
    driver.close()
  return {
    'steps_per_s': updates * config.steps_per_update / elapsed,
    'bytes_per_step': size / steps,
  }


def main() -> None:
  """Measures all cases."""
  seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 15.0
  found: dict[str, Any] = {}
  for preset in CASES:
    runs: dict[str, list[dict[str, float]]] = {'device': [], 'host': []}
    for _ in range(REPEATS):
      for replay, results in runs.items():
        results.append(rate(config(preset, replay), seconds))
    median = {
      replay: {k: statistics.median(r[k] for r in results) for k in results[0]}
      for replay, results in runs.items()
    }
    ratio = median['host']['steps_per_s'] / median['device']['steps_per_s']
    found[preset] = {**median, 'host_over_device': ratio, 'runs': runs}
    print(preset, {k: v for k, v in found[preset].items() if k != 'runs'}, flush=True)
  record('replay_host', found)


if __name__ == '__main__':
  main()
