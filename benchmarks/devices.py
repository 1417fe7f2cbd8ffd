"""What more devices cost: the same work on 1, 2, 4 and 8 fake CPU devices of one machine.

Fake devices share the machine's cores, so no speed is to be gained: at constant total work the
time per update should stay the same, and what it grows by is what the split costs. The processes
(one for each number of devices) live side by side and take turns.

Two parts of the growth are measured by themselves: `all_reduce`, the update's collectives alone
(same number, same bytes), and `small_batches`, what N runs of 1/N of the environments cost one
after another on one device, over the one run of all. The remainder is waiting for each other.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import common

COUNTS = (1, 2, 4, 8)
TARGET = 0.10  # growth per doubling
SETTINGS = {  # name -> environment, environments in all, unroll length
  'ppo-cartpole': ('gymnax:CartPole-v1', 1024, 128),
  'impala-breakout': ('gymnax:Breakout-MinAtar', 512, 32),
}


def agent(setting: str) -> Any:
  from podrace.agents.impala import Impala
  from podrace.agents.ppo import PPO
  from podrace.networks import ActorCritic

  if setting == 'ppo-cartpole':
    return PPO(network=ActorCritic(hidden=(64, 64), shared=False), anneal_learning_rate=False)
  network = ActorCritic(torso='grid', hidden=(128,), activation='relu', initializer='lecun')
  return Impala(network=network)


# --- a worker: one number of devices ----------------------------------------------------------


def all_reduces(run: Any) -> tuple[Any, int]:
  """(updates -> seconds of an update's gradient all-reduces alone, how many an update has)."""
  import jax
  import jax.numpy as jnp
  from jax import lax
  from jax.sharding import PartitionSpec as P

  from podrace.topology import AXIS

  bound = run.runner.agent
  count = getattr(bound, 'epochs', 1) * getattr(bound, 'minibatches', 1)
  params = jax.tree.map(lambda x: x.copy(), run.state.train.params.network)  # the run donates

  def local(params: Any, updates: Any) -> Any:
    def one(_: Any, params: Any) -> Any:
      varying = lax.pcast(params, AXIS, to='varying')
      return lax.pmean(jax.tree.map(lambda x: x * 1.0001, varying), AXIS)

    return lax.fori_loop(0, updates * count, one, params)

  mapped = jax.shard_map(local, mesh=run.runner.mesh, in_specs=(P(), P()), out_specs=P())
  compiled = jax.jit(mapped).lower(params, jnp.int32(1)).compile()
  return lambda updates: common.timed(lambda: compiled(params, jnp.int32(updates)))[0], count


def work() -> None:
  """Answers `setup` (a setting, a number of environments), `run` and `reduce`."""
  import jax

  from podrace import envs

  run: Any = None
  reduce: Any = None
  for request in common.requests():
    match request['do']:
      case 'setup':
        name, _, unroll = SETTINGS[request['setting']]
        env = envs.make(name)
        bound = common.bind(agent(request['setting']), env, 0)
        run = common.start(bound, env, request['num_envs'], unroll)
        reduce, count = all_reduces(run)
        common.answer(
          devices=jax.device_count(),
          compile_s=run.compile_s,
          all_reduces=run.run.as_text().count(' all-reduce('),
          gradient_steps=count,
        )
      case 'run':
        common.answer(seconds=run.seconds(request['updates']))
      case 'reduce':
        common.answer(seconds=reduce(request['updates']))


# --- the measurement --------------------------------------------------------------------------


def worker(devices: int) -> common.Worker:
  return common.Worker(
    [sys.executable, 'benchmarks/devices.py', '--worker'],
    JAX_NUM_CPU_DEVICES=str(devices),
    JAX_PLATFORMS='cpu',
  )


def measure(setting: str, repeats: int, seconds: float) -> dict[str, Any]:
  """One setting on each number of devices, and on one device with a part of the environments."""
  name, num_envs, unroll = SETTINGS[setting]
  workers = {n: worker(n) for n in COUNTS}
  parts = {n: worker(1) for n in COUNTS[1:]}  # one device with 1/n of the environments
  try:
    setup = {n: w.ask(do='setup', setting=setting, num_envs=num_envs) for n, w in workers.items()}
    for n, w in parts.items():
      w.ask(do='setup', setting=setting, num_envs=num_envs // n)

    def once(updates: int) -> float:
      return workers[1].ask(do='run', updates=updates)['seconds']

    updates = common.updates_for(once, seconds)
    for w in [*workers.values(), *parts.values()]:
      w.ask(do='run', updates=1)
      w.ask(do='reduce', updates=1)
    whole: dict[int, list[float]] = {n: [] for n in workers}
    reduce: dict[int, list[float]] = {n: [] for n in workers}
    part: dict[int, list[float]] = {n: [] for n in parts}
    for _ in range(repeats):
      for n in COUNTS:
        whole[n].append(workers[n].ask(do='run', updates=updates)['seconds'] / updates)
        reduce[n].append(workers[n].ask(do='reduce', updates=updates)['seconds'] / updates)
        if n in parts:
          part[n].append(n * parts[n].ask(do='run', updates=updates)['seconds'] / updates)
  finally:
    for w in [*workers.values(), *parts.values()]:
      w.__exit__()
  median = {n: statistics.median(v) for n, v in whole.items()}
  rows: dict[int, Any] = {}
  for n in COUNTS:
    row = rows[n] = dict(
      update_ms=common.summary([1e3 * s for s in whole[n]]),
      steps_per_s=num_envs * unroll / median[n],
      over_one_device=median[n] / median[1] - 1,
      all_reduce_ms=1e3 * (statistics.median(reduce[n]) - statistics.median(reduce[1])),
      **setup[n],
    )
    if n > 1:
      row['growth_per_doubling'] = median[n] / median[n // 2] - 1
      row['small_batches_ms'] = 1e3 * (statistics.median(part[n]) - median[1])
      grown = 1e3 * (median[n] - median[1])
      row['waiting_ms'] = grown - row['all_reduce_ms'] - row['small_batches_ms']
      print(
        f'{setting}, {n} devices: {1e3 * median[n]:.1f} ms an update, '
        f'{row["growth_per_doubling"]:+.1%} over {n // 2}; of {grown:+.1f} ms over one device '
        f'{row["all_reduce_ms"]:+.1f} all-reduces, {row["small_batches_ms"]:+.1f} smaller '
        f'batches, {row["waiting_ms"]:+.1f} the rest',
        flush=True,
      )
    else:
      print(f'{setting}, 1 device: {1e3 * median[1]:.1f} ms an update', flush=True)
  worst = max(rows[n]['growth_per_doubling'] for n in COUNTS[1:])
  print(f'{setting}: worst growth per doubling {worst:+.1%} (target {TARGET:.0%})', flush=True)
  return dict(
    env=name,
    num_envs=num_envs,
    unroll_length=unroll,
    updates_per_call=updates,
    devices=rows,
    worst_growth_per_doubling=worst,
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('settings', nargs='*', help=f'of {list(SETTINGS)}; none: all')
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--seconds', type=float, default=3.0, help='about how long a run is')
  parser.add_argument('--worker', action='store_true', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.worker:
    work()
    return
  settings = args.settings or list(SETTINGS)
  common.record('devices', {s: measure(s, args.repeats, args.seconds) for s in settings})


if __name__ == '__main__':
  main()
