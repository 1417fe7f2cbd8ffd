"""Random-policy steps/s of each environment, bare and under the runner.

Bare: a jitted scan over `batch(env, n).step` with uniformly random actions, the ceiling for any agent.
Under the runner: Anakin with an agent that acts uniformly at random and learns nothing, but is given the
whole trajectory. Resets are part of the cost, as often as they happen.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import common
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import timing
from jax import lax

from podrace import envs
from podrace.envs.base import batch
from podrace.topology import AXIS
from podrace.types import ActorOutput, TrainState

UNROLL = 64
SIZES = [64, 1024]
ENVIRONMENTS = (
  'podrace:catch', 'podrace:memory', 'gymnax:CartPole-v1', 'gymnax:Pendulum-v1', 'gymnax:MountainCar-v0',
  'gymnax:Acrobot-v1', 'gymnax:Asterix-MinAtar', 'gymnax:Breakout-MinAtar', 'gymnax:Freeway-MinAtar',
  'gymnax:Seaquest-MinAtar', 'gymnax:SpaceInvaders-MinAtar', 'brax:inverted_pendulum', 'brax:ant', 'jumanji:Snake-v1',
  'navix:Navix-Empty-8x8-v0', 'navix:Navix-DoorKey-8x8-v0', 'craftax:Craftax-Classic-Symbolic-v1',
  'craftax:Craftax-Symbolic-v1',
)  # fmt: skip


def random_actions(space: Any, key: Any, timestep: Any) -> Any:
  """Returns actions [n, ...] uniform over a gymnasium space, among the actions that a mask allows."""
  n, seen = timestep.reward.shape[0], timestep.observation
  if isinstance(seen, dict) and 'action_mask' in seen and seen['action_mask'].ndim == 2:
    return jax.random.categorical(key, jnp.log(seen['action_mask'].astype(jnp.float32)))
  match space:
    case gymnasium.spaces.Discrete():
      start = int(space.start)
      return jax.random.randint(key, (n,), start, start + int(space.n), jnp.int32)
    case gymnasium.spaces.Box():
      low, high = np.maximum(space.low, -1e3)[None], np.minimum(space.high, 1e3)[None]
      return jax.random.uniform(key, (n, *space.shape), minval=low, maxval=high)
  raise ValueError(f'no random actions for {space}')


@dataclasses.dataclass(frozen=True)
class RandomAgent:
  """Acts uniformly at random; `learn` only keeps the trajectory from being optimised away."""

  action_space: Any = None

  def init(self, key: Any) -> Any:
    return TrainState((), ())

  def initial_state(self, env_id: Any) -> Any:
    return ()

  def act(self, params: Any, state: Any, timestep: Any, key: Any) -> Any:
    return ActorOutput(random_actions(self.action_space, key, timestep)), state

  def learn(self, train: Any, sample: Any, key: Any) -> Any:
    trajectory = lax.optimization_barrier(sample.trajectory)
    loss = lax.pmean(trajectory.timesteps.reward[0, 0], AXIS)
    return train, jnp.ones_like(sample.weight), dict(loss=loss)


class Rollout:
  """A compiled scan of random steps of a batch of environments, with its state. `seconds(n)` makes n scans."""

  def __init__(self, env: Any, num_envs: int, length: int = UNROLL) -> None:
    many = batch(env, num_envs)

    def step(carry: Any, keys: Any) -> Any:
      state, timestep, total, ends = carry
      action_key, env_keys = keys
      actions = random_actions(env.action_space, action_key, timestep)
      state, timestep = many.step(state, actions, env_keys)
      seen = (jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves(timestep.observation))
      total = (
        total + timestep.reward + 1e-9 * sum(seen)
      )  # the observation is used, so it is computed
      return (state, timestep, total, ends + jnp.sum(timestep.last)), None

    def scan(i: Any, carry: Any) -> Any:
      action_key, env_key = jax.random.split(jax.random.fold_in(jax.random.key(1), i))
      env_keys = jax.random.split(env_key, (length, num_envs))  # outside of the loop, as the runner
      return lax.scan(step, carry, (jax.random.split(action_key, length), env_keys))[0]

    def begin(key: Any) -> Any:
      return *many.reset(key), jnp.zeros([num_envs]), jnp.int32(0)

    begun = time.perf_counter()
    self.carry = jax.jit(begin)(jax.random.key(0))
    run = jax.jit(lambda carry, n: lax.fori_loop(0, n, scan, carry), donate_argnums=0)
    self.run = run.lower(self.carry, jnp.int32(1)).compile()
    self.compile_s = time.perf_counter() - begun

  @property
  def ends(self) -> int:
    """The number of episodes that have ended so far."""
    return int(self.carry[-1])

  def seconds(self, scans: int) -> float:
    took, self.carry = timing.timed(lambda: self.run(self.carry, jnp.int32(scans)))
    return took


def measure(name: str, num_envs: int, repeats: int, seconds: float) -> dict[str, Any]:
  """Returns steps/s of one environment, bare and under the runner in turn."""
  env = envs.make(name)
  ceiling = Rollout(env, num_envs)
  run = timing.start(RandomAgent(env.action_space), env, num_envs, UNROLL)
  updates = timing.updates_for(ceiling.seconds, seconds)
  run.seconds(updates)
  took = [(ceiling.seconds(updates), run.seconds(updates)) for _ in range(repeats)]
  alone, runner = zip(*took, strict=True)
  steps = updates * run.steps_per_update
  seconds_of = {'bare': alone, 'runner': runner}
  rates = {
    f'{k}_steps_per_s': common.summary([steps / s for s in v]) for k, v in seconds_of.items()
  }
  return dict(rates, runner_overhead=common.pair_ratio(runner, alone) - 1, compile_s=run.compile_s)


def main() -> None:
  args = common.arguments(__doc__, ENVIRONMENTS, envs=SIZES, repeats=3, seconds=1.0)
  results: dict[str, Any] = {}
  for name in args.cases:
    for n in args.envs:
      try:
        r = measure(name, n, args.repeats, args.seconds)
        alone, runner = (r[f'{k}_steps_per_s']['median'] for k in ('bare', 'runner'))
        text = f'bare {alone:,.0f} steps/s, under the runner {runner:,.0f}'
      except Exception as error:  # a library that is missing or broken must not end the rest
        text = f'{type(error).__name__}: {error}'
        r = dict(error=text)
      results.setdefault(name, {})[n] = r
      print(f'{name} x {n}: {text}', flush=True)
      jax.clear_caches()
  common.record('environments', dict(unroll_length=UNROLL, environments=results))


if __name__ == '__main__':
  main()
