"""The cost of resets: steps/s of a batch of environments, by the share of resets computed per step.

`fresh_fraction` 1 resets every environment on every step; less keeps a pool of fresh states (see
`podrace.envs.base`). The adapters' defaults are chosen by these numbers. The policy is random, so episodes are
as short as they get; `episode_steps` is their mean length with the reset step counted. Compare
`steps_per_cpu_s` (all threads) on a shared machine. A pool keeps up where `fresh_fraction * episode_steps >= 1`;
below, states are used twice.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import common
import jax
import jax.numpy as jnp
from environments import random_actions

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


def compile_rollout(env: Any, num_envs: int, steps: int) -> tuple[Any, Any]:
  """Compiles a function from (state, timestep) and key to the same and the number of episodes ended."""
  many = batch(env, num_envs)

  def step(carry: Any, key: jax.Array) -> Any:
    act_key, env_key = jax.random.split(key)
    actions = random_actions(env.action_space, act_key, carry[1])
    state, timestep = many.step(carry[0], actions, jax.random.split(env_key, num_envs))
    # The observation is used, so that it is computed.
    seen = sum(jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves(timestep.observation))
    return (state, timestep), (jnp.sum(timestep.last), seen)

  def rollout(carry: Any, key: jax.Array) -> Any:
    carry, (ends, seen) = jax.lax.scan(step, carry, jax.random.split(key, steps))
    return carry, jnp.sum(ends), jnp.sum(seen)

  carry = jax.jit(many.reset)(jax.random.key(0))
  return jax.jit(rollout, donate_argnums=0).lower(carry, jax.random.key(0)).compile(), carry


def measure(
  name: str, fraction: float, num_envs: int, steps: int, seconds: float
) -> dict[str, Any]:
  """Returns one row of the table."""
  env = dataclasses.replace(podrace.envs.make(name), fresh_fraction=fraction)
  begin = time.perf_counter()
  run, carry = compile_rollout(env, num_envs, steps)
  compile_s = time.perf_counter() - begin
  carry, ends, _ = jax.block_until_ready(run(carry, jax.random.key(1)))  # leave the start behind
  calls, total_ends, begin, begin_cpu = 0, 0, time.perf_counter(), time.process_time()
  while time.perf_counter() - begin < seconds or calls < 2:
    carry, ends, _ = jax.block_until_ready(run(carry, jax.random.key(2 + calls)))
    calls, total_ends = calls + 1, total_ends + int(ends)
  env_steps = calls * steps * num_envs
  return dict(
    env=name, fresh_fraction=fraction, steps_per_s=round(env_steps / (time.perf_counter() - begin)),
    steps_per_cpu_s=round(env_steps / (time.process_time() - begin_cpu)),
    episode_steps=round(env_steps / total_ends, 1) if total_ends else None, compile_s=round(compile_s, 1),
    num_envs=num_envs,
  )  # fmt: skip


def main() -> None:
  args = common.arguments(__doc__, ENVS, num_envs=64, seconds=(2.0, 'of measuring, per row'))
  rows = [  # other rows stay
    row for row in common.known('resets') or ()
    if row['env'] not in args.cases or row['num_envs'] != args.num_envs
  ]  # fmt: skip
  for name in args.cases:
    steps, fractions = ENVS[name]
    for fraction in fractions:
      row = measure(name, fraction, args.num_envs, steps, args.seconds)
      print(row, flush=True)
      rows.append(row | dict(origin=common.origin()))
      common.record('resets', rows)
    jax.clear_caches()


if __name__ == '__main__':
  main()
