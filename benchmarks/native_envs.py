"""Environments in C: alone in batches of 1,024 beside other libraries, and trained by PPO and IMPALA.

`alone` steps each pool through its Python interface with random actions, in one process per case, and
gives steps a second. `trained` is `podrace bench sebulba`: the environments, inference and the learner
alone, and the run itself, with a network of two layers of 64. `pufferlib` needs its own virtual
environment and a compiler; if it does not install, the result has the reason.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import common

BATCH = 1024
ALONE = {
  'c:cartpole': 1, 'c:cartpole, 2 threads': 2, 'c:breakout': 1, 'c:breakout, 2 threads': 2, 'c:grid': 1,
  'c:grid, 2 threads': 2, 'c:cartpole,isolate=true, 2 threads': 2, 'envpool:CartPole-v1': 1,
  'envpool:CartPole-v1, 2 threads': 2, 'gymnasium:CartPole-v1, 2 threads': 2, 'gymnax:CartPole-v1': 0,
}  # fmt: skip
MLP = ['--agent.network.hidden', '64', '64', '--num-envs', '1024', '--env', 'c:cartpole']
TRAINED = {
  'ppo': ['--agent', 'ppo', *MLP, '--unroll-length', '32'],
  'ppo, 1 actor thread': ['--agent', 'ppo', *MLP, '--unroll-length', '32', '--actor-threads', '1'],
  'impala': ['--agent', 'impala', *MLP, '--unroll-length', '20'],
  'impala, 1 actor thread': ['--agent', 'impala', *MLP, '--unroll-length', '20', '--actor-threads', '1'],
}  # fmt: skip
RATES = ('environment', 'inference', 'learner', 'combined', 'parallel')
PUFFER = """
import json, sys, time
import numpy as np
from pufferlib.ocean.cartpole.cartpole import Cartpole
env = Cartpole(num_envs=1024)
env.reset(seed=0)
actions = np.random.default_rng(0).integers(0, 2, (64, *env.actions.shape)).astype(env.actions.dtype)
start, steps = time.monotonic(), 0
while time.monotonic() < start + float(sys.argv[1]):
  for action in actions:
    env.step(action)
  steps += 1024 * len(actions)
print(json.dumps(dict(rate=steps / (time.monotonic() - start))))
"""


def step_host(name: str, threads: int, seconds: float) -> float:
  """Returns the steps a second of a pool on the host."""
  import numpy as np

  from podrace.envs.host import base

  spec = base.make(name)
  pool = spec.make(base.PoolArgs(BATCH, BATCH, np.arange(BATCH, dtype=np.uint32), threads, 60.0))
  space = spec.action_space
  actions = np.random.default_rng(0).integers(0, int(space.n), (64, BATCH)).astype(np.int32)
  pool.reset()
  arrival, steps, start = pool.recv(), 0, time.monotonic()
  while time.monotonic() < start + seconds:
    for action in actions:
      pool.send(arrival.env_id, action)
      arrival = pool.recv()
    steps += BATCH * len(actions)
  rate = steps / (time.monotonic() - start)
  pool.close()
  return rate


def step_jax(name: str, seconds: float) -> float:
  """Returns the steps a second of a batch in JAX, in a compiled loop of 64 steps."""
  import jax

  from podrace import envs
  from podrace.envs.base import batch

  env = envs.make(name)
  many = batch(env, BATCH)

  @jax.jit
  def run(state: Any, key: Any) -> tuple[Any, Any]:
    def step(state: Any, key: Any) -> tuple[Any, Any]:
      act_key, env_key = jax.random.split(key)
      action = jax.random.randint(act_key, (BATCH,), 0, int(env.action_space.n))
      state, timestep = many.step(state, action, jax.random.split(env_key, BATCH))
      return state, timestep.reward.sum()

    return jax.lax.scan(step, state, jax.random.split(key, 64))

  reset_key, key = jax.random.split(jax.random.key(0))
  state, _ = jax.jit(many.reset)(reset_key)
  state, _ = jax.block_until_ready(run(state, jax.random.fold_in(key, 0)))
  steps, start = 0, time.monotonic()
  while time.monotonic() < start + seconds:
    state, _ = jax.block_until_ready(run(state, jax.random.fold_in(key, 1 + steps)))
    steps += BATCH * 64
  return steps / (time.monotonic() - start)


def worker(case: str, seconds: str) -> None:
  """In a process: measures one case."""
  name, threads = case.partition(', ')[0], ALONE[case]
  rate = step_host(name, threads, float(seconds)) if threads else step_jax(name, float(seconds))
  common.answer(rate=rate)


def alone(repeats: int, seconds: float) -> dict[str, Any]:
  """Returns summaries of the rates of all cases, measured in turn."""
  rates: dict[str, list[float]] = {case: [] for case in ALONE}
  for _ in range(repeats):
    for case in ALONE:
      command = [sys.executable, __file__, '--worker', case, str(seconds)]
      rates[case].append(common.last_json(command)['rate'])
      print(f'{case}: {rates[case][-1]:,.0f} steps/s', flush=True)
  return common.summaries(rates)


def pufferlib(repeats: int, seconds: float) -> dict[str, Any]:
  """Returns a summary of the rate of PufferLib's CartPole, or the reason why there is none."""
  try:
    python = common.peer('pufferlib')
    rates = [common.last_json([python, '-c', PUFFER, str(seconds)])['rate'] for _ in range(repeats)]
  except (RuntimeError, subprocess.CalledProcessError) as error:
    return dict(reason=str(error).strip().splitlines()[-1])
  return dict(rate=common.summaries({'cartpole': rates})['cartpole'])


def trained(args: list[str], repeats: int, seconds: float) -> dict[str, Any]:
  """Returns the medians of `podrace bench sebulba`."""
  command = [*common.PODRACE, 'bench', 'sebulba', *args, '--seconds', str(seconds)]
  runs = [common.last_json(command) for _ in range(repeats)]
  over = common.columns(runs, 'combined_over_parallel', 'combined_over_environment')
  medians = {k: one['median'] for k, one in over.items()}
  return dict(args=args, rates=common.columns(runs, *RATES), **medians, origin=common.origin())


def main() -> None:
  args = common.arguments(__doc__, ['alone', 'pufferlib', *TRAINED], repeats=3, seconds=5.0)
  if args.worker:
    worker(*args.worker)
    return
  for case in args.cases:
    if case == 'alone':
      result = alone(args.repeats, args.seconds)
    elif case == 'pufferlib':
      result = pufferlib(args.repeats, args.seconds)
      print(f'pufferlib: {result}', flush=True)
    else:
      result = trained(TRAINED[case], args.repeats, args.seconds)
      print(f'{case}:', {k: round(r['median']) for k, r in result['rates'].items()}, flush=True)
    common.keep('native_envs', case, result, ['alone', 'pufferlib', *TRAINED])


if __name__ == '__main__':
  main()
