"""Evaluation in environments on the host."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrace.architectures.sebulba.actors import CLOSE_SECONDS
from podrace.architectures.sebulba.pipe import POLL
from podrace.envs.host.answer_timer import AnswerDeadline, AnswerTimer
from podrace.envs.host.base import HostSpec, PoolArgs
from podrace.envs.host.checker import Checker
from podrace.errors import HostError, RunError
from podrace.networks import outside_loops
from podrace.system.process import undone_by_signals
from podrace.system.scheduling import cores
from podrace.system.threads import Worker
from podrace.types import Agent, Array, Arrival, HostEnvironment

HOST_AT_ONCE = 32  # host environments stepped at once
HOST_DEADLINE = 60.0  # seconds within which environments must answer
CHUNK = 1000  # steps per call, short enough to notice signals


def spread_env_ids(episodes: int, num_envs: int) -> np.ndarray:
  """Return ids [episodes] i32 spread evenly over the `num_envs` environments of a run."""
  return ((2 * np.arange(episodes) + 1) * num_envs // (2 * episodes)).astype(np.int32)


def make_host_evaluator(
  agent: Agent,
  spec: HostSpec,
  episodes: int,
  max_steps: int = 1_000_000,
  num_envs: int | None = None,
  deadline: float = HOST_DEADLINE,
) -> Callable[[Any, int], np.ndarray]:
  """Return a function that evaluates parameters in host environments.

  The function takes parameters and a seed, and returns the returns [episodes] of whole games, with
  unclipped rewards. It raises RunError if an episode is too long, or an environment fails or does
  not answer within `deadline` seconds. The other arguments are as of `evaluate.make_evaluator`.
  """

  @functools.partial(jax.jit, donate_argnums=1)
  def act(params: Any, state: Any, timestep: Any, key: Array) -> Any:
    with outside_loops():
      return agent.act(params, state, timestep, key)

  env_ids = spread_env_ids(episodes, num_envs or episodes)

  def evaluate_round(params: Any, start: int, seed: int) -> np.ndarray:
    ids = env_ids[start : start + HOST_AT_ONCE]
    n = len(ids)
    seeds = np.random.SeedSequence([seed, start]).generate_state(n, np.uint32)
    round_key = jax.random.fold_in(jax.random.key(seed), start)
    pool = spec.make(PoolArgs(n, n, seeds, min(n, cores()), deadline))
    watched = WatchedPool(spec.name, pool, deadline)
    play = functools.partial(
      _play_round, act, agent, spec, params, watched, ids, round_key, max_steps
    )
    try:
      returns: np.ndarray = watched.run(play)
      return returns
    except HostError as e:
      raise RunError(f'{spec.name} failed: {e}') from e

  def evaluate(params: Any, seed: int) -> np.ndarray:
    return np.concatenate(
      [evaluate_round(params, i, seed) for i in range(0, episodes, HOST_AT_ONCE)]
    )

  return evaluate


class WatchedPool:
  """Pool used in a thread of its own, which is abandoned if the pool does not answer."""

  def __init__(self, name: str, pool: HostEnvironment, deadline: float) -> None:
    self.num_envs = pool.num_envs
    self._name, self._pool, self._deadline = name, pool, AnswerDeadline(deadline)
    self._timer, self._over = AnswerTimer(pool.num_envs), threading.Event()

  def reset(self) -> None:
    """Reset all environments."""
    with self._timer:
      self._timer.ask(np.arange(self.num_envs))
      self._pool.reset()

  def send(self, env_id: np.ndarray, action: Any) -> None:
    """Send actions to environments `env_id`."""
    with self._timer:
      self._timer.ask(env_id)
      self._pool.send(env_id, action)

  def recv(self) -> Arrival:
    """Return the next arrival."""
    if self._over.is_set():
      raise HostError(f'{self._name}: the pool is closed')
    with self._timer:
      arrival = self._pool.recv()
    self._timer.answered(arrival.env_id)
    return arrival

  def run(self, work: Callable[[], Any]) -> Any:
    """Run `work`, the only user of the pool, in a thread and return its result.

    Raises:
      HostError: if the environments do not answer within the deadline.
    """
    worker = Worker('evaluation', work, at_end=self._pool.close)
    try:
      with undone_by_signals(self._pool.kill):
        while not worker.wait(POLL):
          silence = self._timer.silence
          if not self._pool.watches_itself and self._deadline.passed(0, silence):
            raise HostError(f'{self._name}: environments have not answered for {silence:.0f} s')
    finally:
      self._over.set()
      if not worker.wait(CLOSE_SECONDS):
        self._pool.kill()
    return worker.result()


def _play_round(
  act: Callable[[Any, Any, Any, Array], Any],
  agent: Agent,
  spec: HostSpec,
  params: Any,
  pool: WatchedPool,
  env_id: np.ndarray,
  key: Array,
  max_steps: int,
) -> np.ndarray:
  """Play one episode in each environment of the pool and return their scores [n]."""
  n = pool.num_envs
  check = Checker(spec, n, agent)
  # arrays of their own, because they are donated
  state = jax.jit(agent.initial_state)(jnp.asarray(env_id))
  total, done, run_id = np.zeros(n), np.zeros(n, bool), np.zeros(n, np.int64)
  pool.reset()
  for t in range(max_steps + 1):  # the first arrival follows a reset
    arrival = pool.recv()
    check(arrival)
    restarted = arrival.run_id != run_id
    run_id = arrival.run_id
    total = np.where(restarted & ~done, 0, total) + np.where(done, 0, arrival.score)
    done |= arrival.ended
    if done.all():
      return total
    if t == max_steps:
      break
    output, state = act(params, state, arrival.timestep, jax.random.fold_in(key, t))
    action = np.asarray(output.action)
    check.action(action)
    pool.send(arrival.env_id, action)
  raise RunError(f'{int((~done).sum())} of {n} episodes have not ended in {max_steps} steps')
