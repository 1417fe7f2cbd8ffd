"""Disco103, the released rule, on Catch; and on CartPole and MinAtar Breakout against PPO at equal steps.

    python benchmarks/disco.py CASE ... --rule RULE.npz
    python benchmarks/disco.py 'catch, released' --released LINES

`catch, released` adds the lines that benchmarks/peers/peer_disco_rl.py printed: the released code in the same setting,
that of its notebook: 8 x 8, two environments, 29 steps an update, a replay of 1,024 unrolls, 64 of them in a gradient, a
rate of 0.01, five seeds, one after the other. `caught` is the share of episodes in training that end with a caught ball,
of the 20 updates before. `8 devices` needs JAX_NUM_CPU_DEVICES=8, and has 8 environments, as 2 do not divide: a window is
learned from 8 times in the place of 32. The other cases are three seeds in one program, and a score is the mean return of
the episodes in training in the last tenth of the steps. Writes benchmarks/results/disco.json after each seed of Catch and
each other case; cases that are not run keep their results.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from seeds import train

from podrace.agents.disco import Disco
from podrace.run.build import build
from podrace.settings.config import Config
from podrace.settings.presets import PRESETS

SEEDS, WINDOW, UPDATES, T = 5, 20, 1000, 29
OTHERS = {'cartpole': (200_000, 1e-3), 'minatar-breakout': (200_000, 1e-3)}  # PPO's preset -> steps, Disco's rate  # fmt: skip
CATCH = {  # environments, other settings
  'catch': (2, {}),
  'catch, sebulba': (2, dict(architecture='sebulba', lag='0', actor_threads=1)),
  'catch, 8 devices': (8, {}),
}
RELEASED = 'catch, released'
CASES = [*CATCH, RELEASED, *(f'{name}, {agent}' for name in OTHERS for agent in ('disco', 'ppo'))]


def catch(rule: str, num_envs: int, updates: int, **settings: Any) -> Config:
  """Returns the settings of the release's notebook."""
  agent = Disco(
    rule, learning_rate=1e-2, capacity=1024 * T, batch_size=64, min_size=64 * T, replay_ratio=64 / num_envs
  )  # fmt: skip
  return Config(
    agent=agent, env='podrace:catch,rows=8,columns=8', num_envs=num_envs, unroll_length=T,
    total_steps=updates * num_envs * T, **settings,
  )  # fmt: skip


def run_catch(config: Config, note: Callable[[Any], Any]) -> None:
  """Trains seeds one after the other; `note` gets the results so far after each."""
  runs: list[dict[str, Any]] = []
  for seed in range(SEEDS):
    driver: Any = build(dataclasses.replace(config, seed=seed))
    driver.compile()
    keys = jnp.stack([jax.random.key(seed)])
    state = driver.init(jax.random.clone(keys))
    driver.start(state, keys)
    caught, seconds, began = [], [], time.perf_counter()
    try:
      for window in range(1, config.total_updates // WINDOW + 1):
        done = (window - 1) * WINDOW
        while done < window * WINDOW:
          state, n = driver.advance(state, window * WINDOW - done, lambda: False)
          done += n
        log, state = driver.read_log(state)
        caught.append((1 + float(log['return_sum']) / float(log['episodes'])) / 2)
        seconds.append(time.perf_counter() - began)
    finally:
      driver.close()
    runs.append(dict(seed=seed, caught=caught, seconds=seconds))
    print(seed, 'caught', np.round(caught, 2).tolist(), f'{seconds[-1]:.0f} s', flush=True)
    note(summarize(runs, config.steps_per_update) | dict(devices=jax.device_count()))


def summarize(runs: list[dict[str, Any]], steps_per_update: int) -> dict[str, Any]:
  """Returns the median over the seeds at some updates, and the update from which each has caught 95%."""
  points = len(runs[0]['caught'])
  at = {u: u // WINDOW - 1 for u in (60, 300, 360, 400, 600, 800, 1000) if u // WINDOW <= points}
  median = {u: float(np.median([r['caught'][i] for r in runs])) for u, i in at.items()}
  firsts = [[WINDOW * (i + 1) for i, x in enumerate(r['caught']) if x >= 0.95] for r in runs]
  return dict(
    median_caught=median, updates_to_95_percent=[min(x, default=None) for x in firsts],
    seconds_to_update_400=[r['seconds'][at[400]] for r in runs] if 400 in at else None,
    steps_per_update=steps_per_update, window=WINDOW, runs=runs,
  )  # fmt: skip


def against(rule: str, case: str, steps: int) -> dict[str, Any]:
  """Trains Disco or PPO on an environment of a preset."""
  name, agent = case.split(', ')
  all_steps, rate = OTHERS[name]
  config = dataclasses.replace(PRESETS[name](), total_steps=steps or all_steps)
  if agent == 'disco':
    disco = Disco(rule, learning_rate=rate, replay_ratio=8.0, min_size=64 * T)
    config = dataclasses.replace(config, agent=disco, num_envs=8, unroll_length=T)
  return train(config, 3).numbers


def main() -> None:
  args = common.arguments(__doc__, CASES, rule='', released='', updates=UPDATES, steps=(0, 'fewer steps'))  # fmt: skip
  for case in args.cases:
    if case == RELEASED and not args.released:
      print(f'{case}: needs --released', flush=True)
      continue

    def note(part: Any, case: str = case) -> None:
      about = dict(origin=common.origin(), machine=common.machine())
      common.keep('disco', case, about | part, CASES)

    if case in CATCH:
      num_envs, settings = CATCH[case]
      run_catch(catch(args.rule, num_envs, args.updates, **settings), note)
    elif case == RELEASED:
      lines = Path(args.released).read_text().splitlines()
      note(summarize([json.loads(line) for line in lines], 2 * T))
    else:
      numbers = against(args.rule, case, args.steps)
      print(case, np.round(numbers['returns'], 2), flush=True)
      note(numbers)


if __name__ == '__main__':
  main()
