"""Meta-training of LPG's rule against groove's: environment steps/s, and compile time.

    git clone https://github.com/EmptyJackson/groove CHECKOUT
    .venv/bin/python benchmarks/discover_peers.py [narrow] [wide] --checkout CHECKOUT [--core 0] [--peers groove groove-new]

Both sides: the grid worlds that groove calls `small`, which `podrace:grid_worlds` has after it; agents whose policy and
predictions are tables, with plain gradient steps; lives of 250 updates, unrolls of 20, K = 5, a table of values for each
agent (groove's with plain steps, podrace's with Adam). One call is a population from its beginning and some meta-steps, as
groove's own `make_train` is. The steps of K + 1 unrolls are counted, which both make. They differ where the code does:
- groove's rule is a GRU of 5 inputs, podrace's an LSTM of 6: a third more work for each unit;
- groove learns its value function after each meta-step, podrace after each unroll; both make K + 1 steps of it;
- groove's gradient stops at the inputs of the rule, podrace's goes on to the updates before;
- groove keeps the values that its gradient needs, podrace computes each update again;
- groove makes new agents in each meta-step and takes those that are due, podrace makes none while none is due;
- podrace counts episodes, and checks rewards, losses and the rule for numbers that are not finite;
- walls are placed differently, and groove's observations have the time as well.
groove returns the rule that it began with, so XLA leaves out the gradient if there is a single meta-step: there are more.
groove's evaluation after each meta-step is left out, as podrace has nothing of the kind.

`groove` runs with the versions that it names, `groove-new` with podrace's JAX and a Flax that goes with it. The sides are
processes on one core. They take turns with their calls, and one that has no turn sleeps. `of_core` is by the time that a
process had the core, which other work on the machine changes least. `temp_mib` is the program's need besides its state, by
XLA. Each is compiled once for each setting, without a cache. Settings that are not run keep their results.
"""

from __future__ import annotations

import contextlib
import pathlib
import sys
from typing import Any

import common
import timing

ALIKE = dict(
  unroll_length=20, agent_updates=5, predictions=8, embedding=16, worlds='small',
  mini_batches=1,  # as groove recommends: the fewest that fit into memory
)  # fmt: skip
SETTINGS = {
  'narrow': dict(agents=64, num_envs=16, trajectory=32, meta_steps=3),  # that of docs/discovery.md
  'wide': dict(agents=8, num_envs=64, trajectory=256, meta_steps=3),  # groove's, of 512 agents
}
OURS, PEERS = 'podrace', ['groove', 'groove-new']


def population(config: dict[str, Any]) -> Any:
  """Returns the program of `podrace discover` with these settings."""
  from podrace.agents.lpg import LPG
  from podrace.agents.rules.lpg import Sizes
  from podrace.architectures.discovery.objective import ValueFunction
  from podrace.networks import ActorCritic, PolicyPredictor
  from podrace.run import build
  from podrace.settings.discovery import Discovery

  network = PolicyPredictor(hidden=(), predictions=config['predictions'])
  sizes = {name: config[name] for name in ('predictions', 'trajectory', 'embedding')}
  shape = {name: config[name] for name in ('agents', 'num_envs', 'unroll_length', 'agent_updates')}
  return build.meta_training(Discovery(
    agent=LPG(network=network, optimizer='sgd', learning_rate=4.0), rule=Sizes(**sizes),
    value=ValueFunction(ActorCritic(hidden=(), initializer='lecun')), env='podrace:grid_worlds', lifetime=250,
    meta_optimizer='mean', devices=1, **shape,
  ))  # fmt: skip


class OurSide:
  """Answers the same requests as peer_groove.py."""

  def setup(self, config: dict[str, Any]) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    def build() -> None:
      self.steps, program = jnp.int32(config['meta_steps']), population(config)
      self.init = program.init.lower(jax.random.split(jax.random.key(0), 1)).compile()
      self.program = program.run.lower(program.shapes, self.steps).compile()

    took = timing.clocked(build)
    return took | dict(temp_mib=self.program.memory_analysis().temp_size_in_bytes / 2**20)

  def run(self, seed: int) -> dict[str, Any]:
    import jax

    keys = jax.random.split(jax.random.key(seed), 1)
    return timing.clocked(lambda: jax.block_until_ready(self.program(self.init(keys), self.steps)))


def measure(sides: dict[str, list[str]], setting: dict[str, int], rounds: int) -> dict[str, Any]:
  """Returns rates and compile times of all sides, and the medians of the rounds' ratios."""
  config: dict[str, Any] = ALIKE | setting
  compiled: dict[str, Any] = {}
  seconds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
  with contextlib.ExitStack() as stack:
    workers = {name: stack.enter_context(common.Worker(command)) for name, command in sides.items()}
    for name, worker in workers.items():
      compiled[name] = worker.ask(do='setup', config=config)
      worker.ask(do='run', seed=rounds)  # not counted
      print(name, 'compiled', compiled[name], flush=True)
    for seed in range(rounds):
      for name in list(sides)[:: 1 - 2 * (seed % 2)]:
        seconds[name].append(workers[name].ask(do='run', seed=seed))
  steps = config['agents'] * config['num_envs'] * config['unroll_length']
  steps *= (config['agent_updates'] + 1) * config['meta_steps']
  result: dict[str, Any] = dict(config=config, compile=compiled)
  for unit, key in dict(of_clock='wall_s', of_core='cpu_s').items():
    rates = {side: [steps / s[key] for s in each] for side, each in seconds.items()}
    pairs = {k: [a / b for a, b in zip(rates[OURS], r, strict=True)] for k, r in rates.items() if k != OURS}  # fmt: skip
    result[unit] = dict(steps_per_s=common.summaries(rates), ratio=common.summaries(pairs))
  return result


def main() -> None:
  args = common.arguments(
    __doc__, SETTINGS, checkout=('', "groove's"), rounds=5, core=(0, 'that all sides run on'), peers=PEERS,
  )  # fmt: skip
  if args.worker is not None:
    side = OurSide()
    common.serve(setup=side.setup, run=side.run)
    return
  if not args.checkout:
    sys.exit('--checkout: the checkout of groove is missing')
  checkout = pathlib.Path(args.checkout).resolve()
  pinned = ['taskset', '-c', str(args.core)]
  theirs = ['benchmarks/peers/peer_groove.py', str(checkout)]
  sides = {OURS: [*pinned, sys.executable, 'benchmarks/discover_peers.py', '--worker']}
  sides |= {name: [*pinned, common.peer(name), *theirs] for name in args.peers}
  versions: dict[str, Any] = {'commit': common.head(checkout)}
  for name in args.peers:
    with common.Worker(sides[name]) as worker:
      versions[name] = worker.ask(do='versions')
  for name in args.cases:
    result = measure(sides, SETTINGS[name], args.rounds)
    print(name, {side: r['median'] for side, r in result['of_core']['ratio'].items()}, flush=True)
    about = dict(**common.origin(), machine=common.machine(), peer_versions=versions)
    common.keep('discover_peers', name, about | dict(results=result))


if __name__ == '__main__':
  main()
