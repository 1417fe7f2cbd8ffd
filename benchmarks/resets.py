"""What resets cost: steps/s of a batch of environments, by the share of resets done per step.

`fresh_fraction` 1 resets every environment on every step; less keeps a pool of fresh states (see
`podrace.envs.base`). The adapters' defaults are chosen from what this prints. The policy is random,
so episodes are as short as they get; `episode_steps` is their mean length with the reset step
counted. Of the two rates, `steps_per_cpu_s` (all threads) is the one to compare on a shared machine.
A pool keeps up where `fresh_fraction * episode_steps >= 1`; below, states are used twice.

  python benchmarks/resets.py [--num-envs 64] [--seconds 2] [--envs NAME ...]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

import common
import gymnasium
import jax
import jax.numpy as jnp

import podrace.envs
from podrace.envs.base import batch

FRACTIONS = (1.0, 1 / 4, 1 / 16, 1 / 64)
ENVS = {  # name: steps per compiled call, fractions (craftax compiles for a minute each)
  'gymnax:CartPole-v1': (256, FRACTIONS),
  'gymnax:Breakout-MinAtar': (256, FRACTIONS),
  'jumanji:Snake-v1': (256, FRACTIONS),
  'navix:Navix-DoorKey-8x8-v0': (256, FRACTIONS),
  'brax:inverted_pendulum': (32, FRACTIONS),
  'brax:ant': (32, FRACTIONS),
  'craftax:Craftax-Classic-Symbolic-v1': (8, FRACTIONS),
  'craftax:Craftax-Symbolic-v1': (8, FRACTIONS[:3]),
}


def random_action(space: gymnasium.Space, key: jax.Array, n: int) -> jax.Array:
  """[n, ...] uniform over a Discrete or a Box."""
  shape = (n, *space.shape)
  if isinstance(space, gymnasium.spaces.Discrete):
    return jax.random.randint(key, shape, 0, space.n)
  return jax.random.uniform(key, shape, minval=space.low, maxval=space.high)


def compile_rollout(env: Any, num_envs: int, steps: int) -> tuple[Callable, Any]:
  """A compiled function from state and key to state and number of episodes ended."""
  many = batch(env, num_envs)

  def step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
    act_key, env_key = jax.random.split(key)
    state, timestep = many.step(
      state, random_action(env.action_space, act_key, num_envs), jax.random.split(env_key, num_envs)
    )
    # The observation is used, so that it is computed.
    seen = sum(jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves(timestep.observation))
    return state, (jnp.sum(timestep.last), seen)

  def rollout(state: Any, key: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
    state, (ends, seen) = jax.lax.scan(step, state, jax.random.split(key, steps))
    return state, jnp.sum(ends), jnp.sum(seen)

  state, _ = jax.jit(many.reset)(jax.random.key(0))
  run = jax.jit(rollout, donate_argnums=0).lower(state, jax.random.key(0)).compile()
  return run, state


def measure(name: str, fraction: float, num_envs: int, steps: int, seconds: float) -> dict:
  """One row of the table."""
  env = dataclasses.replace(podrace.envs.make(name), fresh_fraction=fraction)
  start = time.perf_counter()
  run, state = compile_rollout(env, num_envs, steps)
  compiled = time.perf_counter()
  state, ends, _ = jax.block_until_ready(run(state, jax.random.key(1)))  # leave the start behind
  calls, total_ends, start_run, start_cpu = 0, 0, time.perf_counter(), time.process_time()
  while time.perf_counter() - start_run < seconds or calls < 2:
    state, ends, _ = jax.block_until_ready(run(state, jax.random.key(2 + calls)))
    calls, total_ends = calls + 1, total_ends + int(ends)
  wall, cpu = time.perf_counter() - start_run, time.process_time() - start_cpu
  env_steps = calls * steps * num_envs
  return {
    'env': name,
    'fresh_fraction': fraction,
    'steps_per_s': round(env_steps / wall),
    'steps_per_cpu_s': round(env_steps / cpu),
    'episode_steps': round(env_steps / total_ends, 1) if total_ends else None,
    'compile_s': round(compiled - start, 1),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--num-envs', type=int, default=64)
  parser.add_argument('--seconds', type=float, default=2.0, help='of measuring, per row')
  parser.add_argument('--envs', nargs='*', default=tuple(ENVS), choices=tuple(ENVS), metavar='NAME')
  args = parser.parse_args()
  path = common.RESULTS / 'resets.json'
  rows = json.loads(path.read_text())['results'] if path.exists() else []
  rows = [  # the others stay
    row for row in rows if row['env'] not in args.envs or row['num_envs'] != args.num_envs
  ]
  origin = common.origin()
  for name in args.envs:
    steps, fractions = ENVS[name]
    for fraction in fractions:
      rows.append(measure(name, fraction, args.num_envs, steps, args.seconds))
      print(json.dumps(rows[-1]), flush=True)
      rows[-1] |= dict(num_envs=args.num_envs, origin=origin)
      common.record('resets', rows)
    jax.clear_caches()


if __name__ == '__main__':
  main()
