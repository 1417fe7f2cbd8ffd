"""Timing of calls, and agents compiled under Anakin to be timed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import common


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
  """Returns the seconds until all results of `call` are computed, and the results."""
  import jax

  begin = time.perf_counter()
  result = jax.block_until_ready(call())
  return time.perf_counter() - begin, result


def clocked(call: Callable[[], Any]) -> dict[str, float]:
  """Returns the seconds of a call by the clock and on the cores."""
  wall, cpu = time.perf_counter(), time.process_time()
  call()
  return dict(wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu)


def interleave(calls: Mapping[str, Callable[[], Any]], repeats: int = 5) -> dict[str, list[float]]:
  """Returns the seconds of `repeats` runs of each call, in turn, after one that is not counted."""
  for call in calls.values():
    timed(call)
  seconds: dict[str, list[float]] = {name: [] for name in calls}
  for _ in range(repeats):
    for name, call in calls.items():
      seconds[name].append(timed(call)[0])
  return seconds


def updates_for(
  call: Callable[[int], float], seconds: float, least: int = 1, limit: int = 1_000_000
) -> int:
  """Returns how many updates take about `seconds`; `call(n)` runs n of them and returns its seconds."""
  n = least
  while (took := call(n)) < seconds / 4 and n < limit:
    n = min(n * 4, limit)
  return max(least, min(limit, round(n * seconds / took)))


@dataclasses.dataclass
class Run:
  """An agent under Anakin, compiled, with its state. `seconds(n)` makes n updates."""

  runner: Any
  state: Any
  run: Any
  compile_s: dict[str, float]

  @property
  def steps_per_update(self) -> int:
    return self.runner.num_envs * self.runner.unroll_length

  def seconds(self, updates: int) -> float:
    import jax.numpy as jnp

    n = jnp.int32(updates)
    took, self.state = timed(lambda: self.run(self.state, n))
    return took

  def reset(self, seed: int) -> None:
    """Begins anew, from another seed."""
    import jax

    self.state = jax.block_until_ready(self.runner.init(jax.random.split(jax.random.key(seed), 1)))

  def rates(self, repeats: int, seconds: float) -> dict[str, Any]:
    """Returns steps/s of runs of about `seconds`."""
    updates = updates_for(self.seconds, seconds)
    steps = updates * self.steps_per_update
    return dict(
      steps_per_s=common.summary([steps / self.seconds(updates) for _ in range(repeats)]),
      compile_s=self.compile_s,
    )


LAST: dict[str, Run] = {}  # the run that `start` has made last, under 'run'


def start(agent: Any, env: Any, num_envs: int, unroll_length: int, total_updates: int = 0) -> Run:
  """Binds an agent to an environment, compiles a run on all devices, and makes its state."""
  import jax
  import jax.numpy as jnp

  from podrace import hooks, topology
  from podrace.architectures import anakin
  from podrace.settings.agents import bind

  bound = bind(agent, env, total_updates, num_envs)
  replay = hooks.memory(bound, env, num_envs, unroll_length)
  runner = anakin.Anakin(bound, env, replay, topology.learner_mesh(), num_envs, unroll_length)
  keys = jax.random.split(jax.random.key(0), 1)
  begin = time.perf_counter()
  init = runner.init.lower(keys).compile()
  init_s = time.perf_counter() - begin
  state = jax.block_until_ready(init(keys))
  begin = time.perf_counter()
  run = runner.run.lower(state, jnp.int32(1)).compile()
  LAST['run'] = Run(runner, state, run, dict(init=init_s, train=time.perf_counter() - begin))
  return LAST['run']
