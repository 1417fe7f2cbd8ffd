"""A pool of environments on the host that one call steps, and IMPALA in it under Sebulba.

    python examples/own_pool.py

`podrace.types.HostEnvironment` has the functions of a pool. `Stepper` makes FIRST, MID and LAST
from the flags of a library. `podrace/envs/host/envpool.py` is a pool over a library.
"""

from typing import Any

import jax
import numpy as np
from gymnasium import spaces

from podrace.agents.impala import Impala
from podrace.envs.host.base import HostSpec, PoolArgs, Stepper, everyone
from podrace.replay import on_policy
from podrace.run.build import sebulba
from podrace.settings.agents import bind
from podrace.topology import split_devices
from podrace.types import Arrival


class Corridors:
  """Walk to the right end, for a reward of 1; a batch in NumPy, stepped in order."""

  watches_itself = False  # the run ends if `recv` does not return within --env-deadline

  def __init__(self, args: PoolArgs) -> None:
    self.num_envs = self.batch_size = args.num_envs
    self._ids = everyone(args.num_envs)
    self._random = np.random.default_rng(args.seeds)
    self._stepper = Stepper(args.num_envs)
    self._place, self._time = np.zeros((2, args.num_envs), int)

  def reset(self) -> None:
    self._stepper.reset()
    self._over = np.ones(self.num_envs, bool)
    self.send(self._ids, np.zeros(self.num_envs, int))

  def send(self, env_id: np.ndarray, action: Any) -> None:  # always all environments
    fresh = self._random.integers(0, 4, self.num_envs)
    self._place = np.where(self._over, fresh, np.clip(self._place + 2 * action - 1, 0, 8))
    self._time = np.where(self._over, 0, self._time + 1)

  def recv(self) -> Arrival:
    arrived, late = self._place == 8, self._time >= 50
    self._over = arrived | late
    observation = (self._place[:, None] / 8).astype(np.float32)
    timestep = self._stepper.timestep(
      self._ids, observation, arrived.astype(np.float32), terminated=arrived, truncated=late
    )
    never_restarted = np.zeros(self.num_envs, np.int32)
    return Arrival(self._ids, timestep, timestep.reward, timestep.last, never_restarted)

  def close(self) -> None:
    pass

  def kill(self) -> None:
    pass


corridors = HostSpec(
  name='corridors',
  observation_space=spaces.Box(0.0, 1.0, (1,), np.float32),
  action_space=spaces.Discrete(2, dtype=np.int32),
  make=Corridors,
  ordered_only=True,  # no --env-batch-size
)


def train(updates: int = 200) -> float:
  """The mean return of all episodes."""
  agent = bind(Impala(), corridors)
  devices = split_devices('0', '0')
  run = sebulba(agent, corridors, on_policy(), devices, num_envs=8, unroll_length=10, threads=1)
  keys = jax.random.split(jax.random.key(0), 1)
  run.compile()
  state = run.init(jax.random.clone(keys))
  run.start(state, keys)
  try:
    state, _ = run.advance(state, updates, cancelled=lambda: False)
  finally:
    run.close()
  log, _ = run.read_log(state)
  return float(log['return_sum'] / log['episodes'])


if __name__ == '__main__':
  print(f'mean return {train():.2f} of 1')
