"""Random-policy steps/s of each environment, bare and under the runner.

Bare: a jitted scan over `batch(env, n).step` with uniformly random actions; the ceiling for any
agent. Under the runner: Anakin with an agent that acts uniformly at random and learns nothing, but
is given the whole trajectory. The overhead is the second over the first. Action masks are ignored,
as a random policy without a network would; resets are part of the cost, as often as they happen.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from typing import Any

import common

UNROLL = 64
SIZES = (64, 1024)
ENVIRONMENTS = {  # name -> how many environments
  'podrace:catch': SIZES,
  'podrace:memory': SIZES,
  'gymnax:CartPole-v1': SIZES,
  'gymnax:Pendulum-v1': SIZES,
  'gymnax:MountainCar-v0': SIZES,
  'gymnax:Acrobot-v1': SIZES,
  'gymnax:Asterix-MinAtar': SIZES,
  'gymnax:Breakout-MinAtar': SIZES,
  'gymnax:Freeway-MinAtar': SIZES,
  'gymnax:Seaquest-MinAtar': SIZES,
  'gymnax:SpaceInvaders-MinAtar': SIZES,
  'brax:inverted_pendulum': SIZES,
  'brax:ant': SIZES,
  'jumanji:Snake-v1': SIZES,
  'navix:Navix-Empty-8x8-v0': SIZES,
  'navix:Navix-DoorKey-8x8-v0': SIZES,
  'craftax:Craftax-Classic-Symbolic-v1': SIZES,
  'craftax:Craftax-Symbolic-v1': SIZES,
}


def random_actions(space: Any, key: Any, n: int) -> Any:
  """[n, ...] uniform over a gymnasium space."""
  import gymnasium
  import jax
  import jax.numpy as jnp
  import numpy as np

  match space:
    case gymnasium.spaces.Discrete():
      start = int(space.start)
      return jax.random.randint(key, (n,), start, start + int(space.n), jnp.int32)
    case gymnasium.spaces.MultiDiscrete():
      top = jnp.asarray(space.nvec, jnp.int32)[None]
      return jax.random.randint(key, (n, *space.shape), 0, top, jnp.int32)
    case gymnasium.spaces.Box():
      low, high = np.maximum(space.low, -1e3)[None], np.minimum(space.high, 1e3)[None]
      return jax.random.uniform(key, (n, *space.shape), minval=low, maxval=high)
  raise ValueError(f'no random actions for {space}')


@dataclasses.dataclass(frozen=True)
class RandomAgent:
  """Acts uniformly at random; `learn` only keeps the trajectory from being optimised away."""

  action_space: Any

  def init(self, key: Any) -> Any:
    del key
    from podrace.types import TrainState

    return TrainState((), ())

  def initial_state(self, env_id: Any) -> Any:
    return ()

  def act(self, params: Any, state: Any, timestep: Any, key: Any) -> Any:
    from podrace.types import ActorOutput

    n = timestep.reward.shape[0]
    return ActorOutput(random_actions(self.action_space, key, n)), state

  def learn(self, train: Any, sample: Any, key: Any) -> Any:
    import jax.numpy as jnp
    from jax import lax

    from podrace.topology import AXIS

    trajectory = lax.optimization_barrier(sample.trajectory)
    loss = lax.pmean(trajectory.timesteps.reward[0, 0], AXIS)
    return train, jnp.ones_like(sample.weight), dict(loss=loss)


def bare(env: Any, num_envs: int) -> Any:
  """updates -> the end of as many scans of UNROLL random steps, compiled."""
  import jax
  import jax.numpy as jnp
  from jax import lax

  from podrace.envs.base import batch

  many = batch(env, num_envs)

  def step(carry: Any, keys: Any) -> Any:
    state, timestep, total = carry
    action_key, env_keys = keys
    actions = random_actions(env.action_space, action_key, num_envs)
    state, timestep = many.step(state, actions, env_keys)
    return (state, timestep, total + timestep.reward), None

  def scan(i: Any, carry: Any) -> Any:
    action_key, env_key = jax.random.split(jax.random.fold_in(jax.random.key(1), i))
    env_keys = jax.random.split(env_key, (UNROLL, num_envs))  # outside of the loop, as the runner
    return lax.scan(step, carry, (jax.random.split(action_key, UNROLL), env_keys))[0]

  def run(carry: Any, updates: Any) -> Any:
    return lax.fori_loop(0, updates, scan, carry)

  carry = jax.jit(lambda key: (*many.reset(key), jnp.zeros([num_envs])))(jax.random.key(0))
  compiled = jax.jit(run, donate_argnums=0).lower(carry, jnp.int32(1)).compile()

  def call(updates: int) -> float:
    nonlocal carry
    took, carry = common.timed(lambda: compiled(carry, jnp.int32(updates)))
    return took

  return call


def measure(name: str, num_envs: int, repeats: int, seconds: float) -> dict[str, Any]:
  """One environment, bare and under the runner in turn."""
  from podrace import envs

  env = envs.make(name)
  ceiling = bare(env, num_envs)
  run = common.start(RandomAgent(env.action_space), env, num_envs, UNROLL)
  updates = common.updates_for(ceiling, seconds)
  run.seconds(updates)
  took: dict[str, list[float]] = {'bare': [], 'runner': []}
  for _ in range(repeats):
    took['bare'].append(ceiling(updates))
    took['runner'].append(run.seconds(updates))
  steps = updates * run.steps_per_update
  ratio = statistics.median(took['runner']) / statistics.median(took['bare'])
  space = env.observation_space
  return dict(
    observation=str(space) if not getattr(space, 'shape', None) else list(space.shape),
    observation_size=math.prod(space.shape) if getattr(space, 'shape', None) else None,
    bare_steps_per_s=common.summary([steps / s for s in took['bare']]),
    runner_steps_per_s=common.summary([steps / s for s in took['runner']]),
    runner_overhead=ratio - 1,
    compile_s=run.compile_s,
  )


def measure_all(
  names: Any, sizes: Any = None, repeats: int = 3, seconds: float = 1.0
) -> dict[str, Any]:
  """Each environment at each size; what can't be made or run is reported, not hidden."""
  import jax

  results: dict[str, Any] = {}
  for name in names:
    for num_envs in sizes or ENVIRONMENTS[name]:
      try:
        r = measure(name, num_envs, repeats, seconds)
      except Exception as error:  # a library that is missing or broken must not hide the others
        results.setdefault(name, {})[num_envs] = dict(error=f'{type(error).__name__}: {error}')
        print(f'{name} x {num_envs}: {type(error).__name__}: {error}', flush=True)
        continue
      results.setdefault(name, {})[num_envs] = r
      print(
        f'{name} x {num_envs}: bare {r["bare_steps_per_s"]["median"]:,.0f} steps/s, under the '
        f'runner {r["runner_steps_per_s"]["median"]:,.0f} ({r["runner_overhead"]:+.0%} time)',
        flush=True,
      )
      jax.clear_caches()
  return results


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('names', nargs='*', help='LIB:NAME ...; none: all')
  parser.add_argument('--envs', type=int, nargs='*', help=f'how many of each (default {SIZES})')
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--seconds', type=float, default=1.0, help='about how long a run is')
  args = parser.parse_args()
  names = args.names or list(ENVIRONMENTS)
  sizes = args.envs or SIZES
  results = measure_all(names, sizes, args.repeats, args.seconds)
  common.record('environments', dict(unroll_length=UNROLL, environments=results))


if __name__ == '__main__':
  main()
