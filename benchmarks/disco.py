"""Disco103, the released rule, on Catch; and on CartPole and MinAtar Breakout against PPO at equal steps.

    python benchmarks/disco.py RULE.npz [CASE ...]

Without cases, it runs Catch. `catch, released=LINES` adds what benchmarks/peers/peer_disco_rl.py printed: the released code in the
same setting. Its setting is that of the released code's notebook: 8 x 8, two environments, 29 steps an
update, a replay of 1,024 unrolls, 64 of them in a gradient, a rate of 0.01, five seeds, one after the other. `caught` is
the share of episodes in training that end with a caught ball, of the 20 updates before. `8 devices` needs
JAX_NUM_CPU_DEVICES=8, and has 8 environments, as 2 do not divide: a window is learned from 8 times in the place of 32.
The others are three seeds in one program, and a score is the mean return of the episodes in training in the last tenth
of the steps. Writes benchmarks/results/disco.json after each case; what is not run keeps what the file has of it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import RESULTS, machine, origin, record
from seeds import train

from podrace import topology
from podrace.agents.disco import Disco
from podrace.architectures.anakin import Anakin
from podrace.envs import make
from podrace.run.build import build
from podrace.settings.agents import bind
from podrace.settings.config import Config
from podrace.settings.presets import PRESETS

SEEDS = 5
WINDOW, UPDATES = 20, 1000
T = 29
OTHERS = {  # preset of PPO -> steps, learning rate of Disco
  'cartpole': (200_000, 1e-3),
  'minatar-breakout': (200_000, 1e-3),
}
RELEASED = 'catch, released'
CASES = ['catch', RELEASED, 'catch, sebulba', 'catch, 8 devices'] + [
  f'{name}, {agent}' for name in OTHERS for agent in ('disco', 'ppo')
]


def catch(rule: str, num_envs: int = 2, **settings: Any) -> Config:
  agent = Disco(
    rule, learning_rate=1e-2, capacity=1024 * T, batch_size=64, min_size=64 * T, replay_ratio=64 / num_envs
  )  # fmt: skip
  return Config(
    agent=agent, env='podrace:catch,rows=8,columns=8', num_envs=num_envs, unroll_length=T,
    total_steps=UPDATES * num_envs * T, **settings,
  )  # fmt: skip


def on_anakin(
  config: Config, devices: int = 1, note: Callable[[Any], None] = lambda found: None
) -> dict[str, Any]:
  """Seeds of a configuration, one after the other; `note` is given what is known after each."""
  env = make(config.env)
  agent = bind(config.agent, env, config.total_updates, config.num_envs)
  replay = agent.memory(config.num_envs, config.unroll_length)
  mesh = topology.learner_mesh(devices)
  program = Anakin(agent, env, replay, mesh, config.num_envs, config.unroll_length, 1)
  began = time.perf_counter()
  step = program.run.lower(program.shapes, jnp.int32(1)).compile()
  compile_s, runs = time.perf_counter() - began, []
  for seed in range(SEEDS):
    state, caught, seconds = program.init(jnp.stack([jax.random.key(seed)])), [], []
    began = time.perf_counter()
    for _ in range(UPDATES // WINDOW):
      log, state = program.read_log(step(state, jnp.int32(WINDOW)))
      caught.append(share(float(log['return_sum']), float(log['episodes'])))
      seconds.append(time.perf_counter() - began)
    runs.append(dict(seed=seed, caught=caught, seconds=seconds))
    print(seed, 'caught', np.round(caught, 2).tolist(), f'{seconds[-1]:.0f} s', flush=True)
    found = summary(runs, config) | dict(compile_s=compile_s, devices=devices)
    note(found)
  return found


def on_sebulba(config: Config) -> dict[str, Any]:
  """The same, with the environments' steps and the learner in threads of their own."""
  runs = []
  for seed in range(SEEDS):
    driver: Any = build(dataclasses.replace(config, seed=seed))
    driver.compile()
    keys = jnp.stack([jax.random.key(seed)])
    state, caught, seconds = driver.init(jax.random.clone(keys)), [], []
    driver.start(state, keys)
    began = time.perf_counter()
    try:
      for _ in range(UPDATES // WINDOW):
        done = 0
        while done < WINDOW:
          state, n = driver.advance(state, WINDOW - done, lambda: False)
          done += n
        log, state = driver.read_log(state)
        caught.append(share(float(log['return_sum']), float(log['episodes'])))
        seconds.append(time.perf_counter() - began)
    finally:
      driver.close()
    runs.append(dict(seed=seed, caught=caught, seconds=seconds))
    print(seed, 'caught', np.round(caught, 2).tolist(), f'{seconds[-1]:.0f} s', flush=True)
  return summary(runs, config)


def share(return_sum: float, episodes: float) -> float:
  return (1 + return_sum / episodes) / 2


def summary(runs: list[dict[str, Any]], config: Config) -> dict[str, Any]:
  """The median over the seeds, at the updates that are spoken of; and when each has caught 95%."""
  at = {u: u // WINDOW - 1 for u in (60, 300, 360, 400, 600, 800, 1000)}
  median = {
    u: float(np.median([r['caught'][i] for r in runs]))
    for u, i in at.items()
    if i < len(runs[0]['caught'])
  }
  to_400 = [r['seconds'][at[400]] for r in runs]
  caught_95 = [
    next((WINDOW * (i + 1) for i, x in enumerate(r['caught']) if x >= 0.95), None) for r in runs
  ]
  return dict(
    median_caught=median, updates_to_95_percent=caught_95, seconds_to_update_400=to_400, steps_per_update=config.steps_per_update,
    window=WINDOW, runs=runs,
  )  # fmt: skip


def against(rule: str, case: str) -> dict[str, Any]:
  name, agent = case.split(', ')
  steps, rate = OTHERS[name]
  config = dataclasses.replace(PRESETS[name](), total_steps=steps)
  if agent == 'disco':
    disco = Disco(rule, learning_rate=rate, replay_ratio=8.0, min_size=64 * T)
    config = dataclasses.replace(config, agent=disco, num_envs=8, unroll_length=T)
  return train(config, 3).numbers


def run(rule: str, case: str, note: Callable[[Any], None]) -> dict[str, Any]:
  found = dict(origin=origin(), machine=machine())
  if case == 'catch':
    return found | on_anakin(catch(rule), note=lambda part: note(found | part))
  if case == 'catch, sebulba':
    return found | on_sebulba(catch(rule, architecture='sebulba', lag='0', actor_threads=1))
  if case == 'catch, 8 devices':
    return found | on_anakin(catch(rule, 8), devices=8, note=lambda part: note(found | part))
  return found | against(rule, case)


def peer(lines: Path) -> dict[str, Any]:
  """What the released code did, of each of its seeds."""
  runs = [json.loads(line) for line in lines.read_text().splitlines()]
  return dict(origin=origin(), machine=machine(), **summary(runs, catch('')))


def main() -> None:
  if len(sys.argv) < 2:
    sys.exit((__doc__ or '').strip())
  rule, *names = sys.argv[1:]
  names = names or ['catch']
  given = dict(n.partition('=')[::2] for n in names)  # case -> a file, or nothing
  names = list(given)
  if unknown := set(names) - set(CASES):
    sys.exit(f'no case {", ".join(sorted(unknown))}, only {"; ".join(CASES)}')
  path = RESULTS / 'disco.json'
  known = json.loads(path.read_text())['results'] if path.exists() else {}

  def note(part: Any) -> None:
    known[case] = part
    record('disco', {name: known[name] for name in CASES if name in known})

  for case in names:
    known[case] = peer(Path(given[case])) if case == RELEASED else run(rule, case, note)
    print(case, known[case].get('median_caught') or np.round(known[case]['returns'], 2), flush=True)
    record('disco', {name: known[name] for name in CASES if name in known})


if __name__ == '__main__':
  main()
