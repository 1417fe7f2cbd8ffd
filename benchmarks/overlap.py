"""Acting and stepping at the same time, with a device that takes time and no CPU.

The acting program is replaced by a stub whose actions are ready D milliseconds after the call. Like a
device it answers one call after the other. Unrolls are made, and dropped, as there is no learner. Each variant is
compared with min(environments alone, inference alone), where the environments are one pool with all threads, and
inference has the variant's batches. Rounds take the variants in turn; figures are medians. `waiting` are
environments that take time and no CPU either, one pool's after the other's, as on threads that all pools share.
"""

from __future__ import annotations

import collections
import ctypes
import threading
import time
from typing import Any

import common
import jax
import numpy as np
from gymnasium import spaces

from podrace.agents.impala import Impala
from podrace.architectures.sebulba import Actors
from podrace.envs.host import base as host
from podrace.experiments.bench import acting_program, measure_environments, measure_inference
from podrace.networks import ActorCritic
from podrace.replay import on_policy
from podrace.run import build
from podrace.settings.agents import bind
from podrace.topology import split_devices
from podrace.types import Arrival

ENVS = {
  'waiting': 32,
  'ale:pong': 32,
  'envpool:CartPole-v1': 1024,
  'c:cartpole': 1024,
}  # environments of each
STEP_SECONDS = 0.0015  # of all environments `waiting`
VARIANTS = {  # threads and groups
  '1 thread': (1, 1),
  '2 threads': (2, 1),
  '1 thread, 2 groups': (1, 2),
  '1 thread, 3 groups': (1, 3),
}
TIMER_SLACK = 29  # PR_SET_TIMERSLACK: otherwise each sleep takes 50 us longer


def wait_until(moment: float) -> None:
  """Sleeps until a time of `time.perf_counter`."""
  if (left := moment - time.perf_counter()) > 0:
    ctypes.CDLL(None).prctl(TIMER_SLACK, 1)
    time.sleep(left)


class Queue:
  """Does one work after the other. Each takes time, and no CPU."""

  def __init__(self) -> None:
    self._lock, self._free_at = threading.Lock(), 0.0

  def add(self, seconds: float) -> float:
    """Returns the time at which this work will be done."""
    with self._lock:
      self._free_at = max(self._free_at, time.perf_counter()) + seconds
      return self._free_at


class Answer:
  """Actions that a device computes until a time."""

  def __init__(self, action: np.ndarray, ready_at: float) -> None:
    self._action, self._ready_at = action, ready_at

  def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
    wait_until(self._ready_at)
    return self._action


class WaitingPool:
  """Environments that take time and no CPU."""

  watches_itself = True
  threads = Queue()  # of all pools

  def __init__(self, args: host.PoolArgs) -> None:
    n = self.num_envs = self.batch_size = args.num_envs
    self._seconds = STEP_SECONDS * n / ENVS['waiting']
    self._stepper, self._ids = host.Stepper(n), host.everyone(n)
    self._observation, self._reward = np.zeros((n, 4), np.float32), np.zeros(n, np.float32)
    self._no = np.zeros(n, bool)

  def reset(self) -> None:
    self._ready_at = self.threads.add(self._seconds)

  def send(self, env_id: np.ndarray, action: Any) -> None:
    self.reset()

  def recv(self) -> Arrival:
    wait_until(self._ready_at)
    observation, no = self._observation.copy(), self._no
    timestep = self._stepper.timestep(self._ids, observation, self._reward, no, no)
    return Arrival(self._ids, timestep, timestep.reward, no, np.zeros(self.num_envs, np.int32))

  def kill(self) -> None: ...

  def close(self) -> None: ...


WAITING = host.HostSpec('waiting', spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2), WaitingPool)  # fmt: skip


class SlowDevice:
  """The acting programs on a device that takes `seconds` for each step, one after the other."""

  def __init__(self, programs: Any, actions: int, seconds: float) -> None:
    self._programs, self._actions, self._seconds = programs, actions, seconds
    self._queue = Queue()
    self._parts: Any = None

  def __getattr__(self, name: str) -> Any:
    return getattr(self._programs, name)

  def step(self, params: Any, carry: Any, keys: Any, numbers: Any, observation: Any) -> Any:
    """Returns actions that do not depend on anything, in time."""
    action = np.arange(numbers.shape[1], dtype=np.int32) % self._actions
    return carry, Answer(action, self._queue.add(self._seconds))

  def finish(self, *args: Any) -> Any:
    """Returns the same trajectory each time: the unroll stays on the device."""
    if self._parts is None:
      self._parts = self._programs.finish(*args)
    return self._parts


class Variant:
  """The actors of a setting, of which each measurement makes new ones."""

  def __init__(self, env: str, num_envs: int, threads: int, groups: int) -> None:
    num_envs = num_envs // (threads * groups) * threads * groups
    spec = WAITING if env == 'waiting' else host.make(env)
    agent = bind(Impala(network=ActorCritic(hidden=(4,))), spec, 100)  # is only compiled
    driver = build.sebulba(
      agent, spec, on_policy(), split_devices('0', '0'), num_envs, 20,
      threads=threads, groups=groups, lag='async', max_lag=2**20,
    )  # fmt: skip
    driver.compile()
    self.program = acting_program(driver)
    self._programs, self._actions = self.program.programs, int(self.program.spec.action_space.n)
    self._keys = jax.vmap(jax.random.key)(np.array([0], np.uint32))
    self._state = driver.init(jax.random.clone(self._keys))

  def environments(self, seconds: float) -> float:
    """Returns steps/s of the environments alone."""
    return measure_environments(self.program, self._state, self._keys, seconds)

  def take(self, device_seconds: float) -> None:
    """Replaces the acting program."""
    device = SlowDevice(self._programs, self._actions, device_seconds)
    self.program.__dict__['programs'] = device  # in place of the cached property

  def inference(self, seconds: float) -> float:
    """Returns steps/s of the device alone."""
    return measure_inference(self.program, self._state, seconds)

  def combined(self, seconds: float) -> float:
    """Returns steps/s of the actors."""
    state, key = self._state, jax.random.split(self._keys[0], 3)[1]
    actors = Actors(self.program, {0: state.train.params}, state.key, key)
    steps = self.program.envs_per_group * self.program.unroll_length
    try:
      for _ in range(3):
        actors.take(0, lambda: False)
      start, count = time.perf_counter(), 0
      while (now := time.perf_counter()) < start + seconds:
        count += len(actors.take(0, lambda: False) or ())
      return count * steps / (now - start)
    finally:
      actors.close()


def measure(env: str, num_envs: int, milliseconds: list[float], rounds: int, seconds: float) -> Any:
  """Returns rates and ratios by milliseconds and variant."""
  variants = {name: Variant(env, num_envs, *sizes) for name, sizes in VARIANTS.items()}
  rates: Any = collections.defaultdict(lambda: collections.defaultdict(list))
  for _ in range(rounds):
    for ms in milliseconds:
      alone = variants['1 thread'].environments(seconds)
      for name, variant in variants.items():
        variant.take(ms / 1000)
        inference, combined = variant.inference(seconds / 2), variant.combined(seconds)
        one = rates[f'{ms:g} ms', name]
        values = dict(environment=alone, inference=inference, combined=combined, ratio=combined / min(alone, inference))  # fmt: skip
        for key, value in values.items():
          one[key].append(value)
  result: dict[str, Any] = collections.defaultdict(dict)
  for (ms, name), one in rates.items():
    result[ms][name] = common.summaries(one)
    shown = {k: round(v['median'], 3 if k == 'ratio' else 0) for k, v in result[ms][name].items()}
    print(f'{env}, {ms}, {name}: {shown}', flush=True)
  return dict(num_envs=num_envs, **result)


def main() -> None:
  args = common.arguments(__doc__, ENVS, milliseconds=[0.5, 1.0, 2.0], rounds=3, seconds=3.0)
  for env in args.cases:
    result = measure(env, ENVS[env], args.milliseconds, args.rounds, args.seconds)
    common.keep('overlap', env, result, ENVS)


if __name__ == '__main__':
  main()
