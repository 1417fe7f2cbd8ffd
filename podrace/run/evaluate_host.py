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
from podrace.system.process import cores, undone_by_signals
from podrace.system.threads import Worker
from podrace.types import Agent, Array, Arrival, HostEnvironment

HOST_AT_ONCE = 32  # likewise, on the host
HOST_DEADLINE = 60.0  # seconds that they may take to answer
CHUNK = 1000  # steps per call, so that a signal is noticed


def spread(episodes: int, num_envs: int) -> np.ndarray:
  """Ids [episodes] i32 of environments of a run, evenly over all `num_envs` that it has."""
  return ((2 * np.arange(episodes) + 1) * num_envs // (2 * episodes)).astype(np.int32)


def host_evaluator(
  agent: Agent,
  spec: HostSpec,
  episodes: int,
  max_steps: int = 1_000_000,
  num_envs: int | None = None,
  deadline: float = HOST_DEADLINE,
) -> Callable[[Any, int], np.ndarray]:
  """As `evaluator`, from parameters and a seed, of environments on the host; whole games, with unclipped rewards.

  Raises, when called:
    RunError: if an episode is still going after `max_steps`, or an environment fails.
  """

  @functools.partial(jax.jit, donate_argnums=1)
  def act(params: Any, state: Any, timestep: Any, key: Array) -> Any:
    with outside_loops():
      return agent.act(params, state, timestep, key)

  every = spread(episodes, num_envs or episodes)

  def some(params: Any, start: int, seed: int) -> np.ndarray:
    ids = every[start : start + HOST_AT_ONCE]
    n = len(ids)
    seeds = np.random.SeedSequence([seed, start]).generate_state(n, np.uint32)
    round_key = jax.random.fold_in(jax.random.key(seed), start)
    pool = spec.make(PoolArgs(n, n, seeds, min(n, cores()), deadline))
    watched = _Watched(spec.name, pool, deadline)
    play = functools.partial(
      _host_round, act, agent, spec, params, watched, ids, round_key, max_steps
    )
    try:
      return watched.during(play)
    except HostError as e:
      raise RunError(f'{spec.name} failed: {e}') from e

  def evaluate(params: Any, seed: int) -> np.ndarray:
    return np.concatenate([some(params, i, seed) for i in range(0, episodes, HOST_AT_ONCE)])

  return evaluate


class _Watched:
  """A pool in a thread of its own, which can be left if it does not answer."""

  def __init__(self, name: str, pool: HostEnvironment, deadline: float) -> None:
    self.num_envs = pool.num_envs
    self._name, self._pool, self._deadline = name, pool, AnswerDeadline(deadline)
    self._timer, self._over = AnswerTimer(pool.num_envs), threading.Event()

  def reset(self) -> None:
    with self._timer:
      self._timer.ask(np.arange(self.num_envs))
      self._pool.reset()

  def send(self, env_id: np.ndarray, action: Any) -> None:
    with self._timer:
      self._timer.ask(env_id)
      self._pool.send(env_id, action)

  def recv(self) -> Arrival:
    if self._over.is_set():
      raise HostError(f'{self._name}: the pool is closed')
    with self._timer:
      arrival = self._pool.recv()
    self._timer.answered(arrival.env_id)
    return arrival

  def during(self, work: Callable[[], np.ndarray]) -> np.ndarray:
    """What `work` returns, which is the pool's only use.

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
    found: np.ndarray = worker.result()
    return found


def _host_round(
  act: Callable[[Any, Any, Any, Array], Any],
  agent: Agent,
  spec: HostSpec,
  params: Any,
  pool: _Watched,
  env_id: np.ndarray,
  key: Array,
  max_steps: int,
) -> np.ndarray:
  n = pool.num_envs
  check = Checker(spec, n, agent)
  state = jax.jit(agent.initial_state)(jnp.asarray(env_id))  # each array its own: it is donated
  total, done, run_id = np.zeros(n), np.zeros(n, bool), np.zeros(n, np.int64)
  pool.reset()
  for t in range(max_steps + 1):  # the first arrival is no step
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
