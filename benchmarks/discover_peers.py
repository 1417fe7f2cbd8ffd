"""Meta-training of LPG's rule against groove's: environment steps/s, and what compiling takes.

    git clone https://github.com/EmptyJackson/groove CHECKOUT
    .venv/bin/python benchmarks/discover_peers.py CHECKOUT [--core 0] [--settings narrow wide] [--peers groove groove-new]

Both sides: the grid worlds that groove calls `small`, which `podrace:grid_worlds` has after it; agents whose policy
and predictions are tables, with plain gradient steps; lives of 250 updates, unrolls of 20, K = 5, a table of values
for each agent (groove's with plain steps, podrace's with Adam). One call is a population from its beginning and some
meta-steps, as groove's own `make_train` is. Counted are the steps of K + 1 unrolls, which both make. They differ where the code does:
- groove's rule is a GRU that is given 5 numbers, podrace's an LSTM that is given 6: a third more work for each unit;
- groove learns its value function after each meta-step, podrace after each unroll; both make K + 1 steps of it;
- groove's gradient stops at what the rule is given, podrace's goes on to the updates before;
- groove keeps what its gradient needs, podrace computes each update again;
- groove makes new agents in each meta-step and takes those that are due, podrace makes none while none is due;
- podrace counts episodes, and checks rewards, losses and the rule for numbers that are not finite;
- walls are placed differently, and groove's observations have the time as well.
groove returns the rule that it began with, so XLA leaves out the gradient if there is a single meta-step: there are more.
What groove evaluates after each meta-step is left out, as podrace has nothing of the kind.

`groove` runs with the versions that it names, `groove-new` with podrace's JAX and a Flax that goes with it. The sides
are processes on one core. They take turns with their calls, and one that has no turn sleeps. `of_core` is by the time
that a process had the core, which other work on the machine changes least. `temp_mib` is what XLA says that the program
needs besides its state. Each is compiled once for each setting, without a cache.

Writes benchmarks/results/discover_peers.json after each setting; what is not run keeps what the file has.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

import common

ALIKE = dict(
  unroll_length=20,
  agent_updates=5,
  predictions=8,
  embedding=16,
  worlds='small',
  mini_batches=1,  # as it recommends: the fewest that fit into memory
)
SETTINGS = {
  'narrow': dict(agents=64, num_envs=16, trajectory=32, meta_steps=3),  # that of docs/discovery.md
  'wide': dict(agents=8, num_envs=64, trajectory=256, meta_steps=3),  # groove's, of 512 agents
}
OURS, PEERS = 'podrace', ('groove', 'groove-new')


def population(config: dict[str, Any]) -> Any:
  """The program of `podrace discover` with these settings."""
  from podrace.agents.lpg import LPG
  from podrace.agents.rules.lpg import Sizes
  from podrace.architectures.discovery.objective import ValueFunction
  from podrace.networks import ActorCritic, PolicyPredictor
  from podrace.run import build
  from podrace.settings.discovery import Discovery

  network = PolicyPredictor(hidden=(), predictions=config['predictions'])
  sizes = {name: config[name] for name in ('predictions', 'trajectory', 'embedding')}
  shape = {name: config[name] for name in ('agents', 'num_envs', 'unroll_length', 'agent_updates')}
  return build.meta_training(
    Discovery(
      agent=LPG(network=network, optimizer='sgd', learning_rate=4.0),
      rule=Sizes(**sizes),
      value=ValueFunction(ActorCritic(hidden=(), initializer='lecun')),
      env='podrace:grid_worlds',
      lifetime=250,
      meta_optimizer='mean',
      devices=1,
      **shape,
    )
  )


def work() -> None:
  """Answers the requests that peer_groove.py answers."""
  import jax
  import jax.numpy as jnp

  init: Any = None
  run: Any = None
  steps, memory = jnp.int32(0), 0.0
  for request in common.requests():
    clock = time.perf_counter(), time.process_time()
    match request['do']:
      case 'versions':
        common.answer(**common.versions())
        continue
      case 'setup':
        steps = jnp.int32(request['config']['meta_steps'])
        program = population(request['config'])
        init = program.init.lower(keys_of(0)).compile()
        run = program.run.lower(program.shapes, steps).compile()
        memory = run.memory_analysis().temp_size_in_bytes / 2**20
      case 'run':
        jax.block_until_ready(run(init(keys_of(request['seed'])), steps))
    took = time.perf_counter() - clock[0], time.process_time() - clock[1]
    common.answer(wall_s=took[0], cpu_s=took[1], temp_mib=memory)


def keys_of(seed: int) -> Any:
  import jax

  return jax.random.split(jax.random.key(seed), 1)


def measured(sides: dict[str, list[str]], setting: dict[str, int], rounds: int) -> dict[str, Any]:
  """Rates and compile times of all sides, and the medians of the rounds' ratios."""
  config = ALIKE | setting
  workers = {name: common.Worker(command) for name, command in sides.items()}
  compiled, seconds = {}, {name: [] for name in sides}
  try:
    for name, worker in workers.items():
      compiled[name] = worker.ask(do='setup', config=config)
      worker.ask(do='run', seed=rounds)  # not counted
      print(name, 'compiled', compiled[name], flush=True)
    for seed in range(rounds):
      for name in list(sides)[:: 1 - 2 * (seed % 2)]:
        seconds[name].append(workers[name].ask(do='run', seed=seed))
  finally:
    for worker in workers.values():
      worker.__exit__()
  return dict(config=config, compile=compiled, **compared(seconds, steps_of(config)))


def steps_of(config: dict[str, int]) -> int:
  """Environment steps of a call."""
  alike = config['agents'] * config['num_envs'] * config['unroll_length']
  return alike * (config['agent_updates'] + 1) * config['meta_steps']


def compared(seconds: dict[str, list[dict[str, float]]], steps: int) -> dict[str, Any]:
  """By the clock and by the time on the core: steps/s of each side, and podrace's against each other one."""
  found = {}
  for unit, name in dict(of_clock='wall_s', of_core='cpu_s').items():
    rates = {side: [steps / s[name] for s in each] for side, each in seconds.items()}
    pairs = {
      side: [a / b for a, b in zip(rates[OURS], rates[side], strict=True)]
      for side in rates
      if side != OURS
    }
    found[unit] = dict(
      steps_per_s={side: common.summary(r) for side, r in rates.items()},
      ratio={side: common.summary(r) for side, r in pairs.items()},
    )
  return found


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('checkout', type=pathlib.Path, nargs='?', help="groove's")
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--core', type=int, default=0, help='that all sides run on')
  parser.add_argument('--settings', nargs='+', choices=SETTINGS, default=list(SETTINGS))
  parser.add_argument('--peers', nargs='+', choices=PEERS, default=list(PEERS))
  parser.add_argument('--worker', action='store_true', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if not args.worker and args.checkout is None:
    parser.error('the checkout of groove is missing')
  return args


def main() -> None:
  args = arguments()
  if args.worker:
    work()
    return
  pinned = ['taskset', '-c', str(args.core)]
  theirs = ['benchmarks/peers/peer_groove.py', str(args.checkout.resolve())]
  sides = {OURS: [*pinned, sys.executable, 'benchmarks/discover_peers.py', '--worker']}
  sides |= {name: [*pinned, common.peer(name), *theirs] for name in args.peers}
  path = common.RESULTS / 'discover_peers.json'
  results = json.loads(path.read_text())['results'] if path.exists() else {}
  versions = peer_versions(sides, args.checkout)
  for name in args.settings:
    print(name, flush=True)
    found = measured(sides, SETTINGS[name], args.rounds)
    for side, ratio in found['of_core']['ratio'].items():
      print(f'{name}: {ratio["median"]:.2f} times the steps/s of {side}', flush=True)
    results[name] = dict(
      **common.origin(), machine=common.machine(), peer_versions=versions, results=found
    )
    common.record('discover_peers', results)


def peer_versions(sides: dict[str, list[str]], checkout: pathlib.Path) -> dict[str, Any]:
  git = ['git', '-C', str(checkout), 'rev-parse', 'HEAD']
  commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
  found: dict[str, Any] = {'commit': commit}
  for side, command in sides.items():
    if side != OURS:
      with common.Worker(command) as worker:
        found[side] = worker.ask(do='versions')
  return found


if __name__ == '__main__':
  main()
