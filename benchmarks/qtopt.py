"""QT-Opt: decisions of the cross-entropy method a second, Pendulum against SAC, and podrace:grasp online.

acting: decisions a second of CEM with the paper's settings, beside the bare matrix products of its network for as many
samples, measured in turn in one process; `ratio` is products' time by decisions' time. pendulum: `qtopt-pendulum` and
`sac-pendulum` for the same steps, greedy returns of 100 episodes. grasp: see benchmarks/grasp.py, case online.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import common

NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
  'pendulum': ('gymnax:Pendulum-v1', {}),
  'grasp': ('podrace:grasp', {'hidden': (128,)}),
}
BATCHES = (32, 256)
ROUNDS, CALLS = 15, 10


def in_turn(functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
  """Returns the median seconds of a call of each function, over rounds in which all are called."""
  import jax

  for f in functions.values():
    jax.block_until_ready(f())
  seconds: dict[str, list[float]] = {name: [] for name in functions}
  for _ in range(ROUNDS):
    for name, f in functions.items():
      begun = time.perf_counter()
      for _ in range(CALLS):
        result = f()
      jax.block_until_ready(result)
      seconds[name].append((time.perf_counter() - begun) / CALLS)
  return {name: statistics.median(x) for name, x in seconds.items()}


def acting(name: str, batch: int) -> dict[str, float]:
  import jax
  import jax.numpy as jnp

  from podrace.agents.qtopt import QTOpt
  from podrace.envs import make
  from podrace.networks import ActionValue
  from podrace.settings.agents import bind

  env, settings = NETWORKS[name]
  agent = bind(QTOpt(network=ActionValue(**settings)), make(env))
  params = jax.jit(agent.network.init)(jax.random.key(0))
  observation = jax.tree.map(lambda x: jnp.repeat(x, batch, 0), agent.network.example().observation)
  shape = (batch * agent.cem.samples, agent.layout.continuous)
  layers = [params.get('torso', {}).get('Mlp_0', {}).get('Dense_0'), params['state']]
  later = [params['action'], *params['mlp'].values(), params['output']]

  def chain(x: Any, layers: list[Any]) -> Any:
    for layer in layers:
      x = x @ layer['kernel'] if layer else x
    return x

  @jax.jit
  def products(x: Any, actions: Any) -> Any:
    return chain(x, layers), [chain(a, later) for a in actions]

  flat = observation.reshape(batch, -1).astype(jnp.float32)
  actions = jax.random.uniform(jax.random.key(1), (agent.cem.iterations, *shape))
  decide = jax.jit(lambda key: agent.best(params, agent.network.embed(params, observation), key))
  key = jax.random.key(2)
  seconds = in_turn({'decisions': lambda: decide(key), 'products': lambda: products(flat, actions)})
  return {
    'decisions_per_s': batch / seconds['decisions'],
    'products_per_s': batch / seconds['products'],
    'ratio': seconds['products'] / seconds['decisions'],
  }


def pendulum(preset: str, seed: int) -> dict[str, float]:
  run_dir = common.ROOT / 'runs' / 'qtopt' / f'{preset}-{seed}'
  if not (run_dir / 'summary.json').exists():
    common.podrace('train', preset, '--run-dir', run_dir, '--seed', seed)
  greedy = common.evaluate_run(run_dir, '--episodes', 100, '--greedy')
  return {'return': greedy['episode_return_mean'], 'wall_s': common.summary_of(run_dir)['wall_s']}


def main() -> None:
  args = common.arguments(__doc__, ('acting', 'pendulum'), seeds=[0, 1, 2, 3, 4])
  results = common.known('qtopt')
  if 'acting' in args.cases:
    results['acting'] = {f'{n}, {b}': acting(n, b) for n in NETWORKS for b in BATCHES}
    print(results['acting'], flush=True)
  if 'pendulum' in args.cases:
    for preset in ('qtopt-pendulum', 'sac-pendulum'):
      each = {}
      for seed in args.seeds:
        each[seed] = pendulum(preset, seed)
        print(preset, seed, each[seed], flush=True)
      results[preset] = {'mean': statistics.mean(x['return'] for x in each.values()), 'seeds': each}
  if min(args.seeds) < 100:
    common.record('qtopt', results)


if __name__ == '__main__':
  main()
