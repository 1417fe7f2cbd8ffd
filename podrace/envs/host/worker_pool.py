"""Worker processes that step Gymnasium environments."""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from podrace.envs.host import worker as w
from podrace.envs.host.action_log import ActionLog
from podrace.envs.host.answer_timer import LOOK_SECONDS, AnswerClock
from podrace.envs.host.base import PoolArgs
from podrace.envs.host.infos import Infos
from podrace.envs.host.timesteps import EVERY, Stepper, everyone, rows_of
from podrace.envs.host.worker_process import History, WorkerProcess, memory_file, readable
from podrace.envs.spaces import leaves, tree
from podrace.errors import HostError
from podrace.types import Arrival

log = logging.getLogger('podrace.envs')


RESTARTS, WINDOW = 10, 600.0  # most restarts of a pool in WINDOW seconds; see `Restarts`
RESTARTS_BEFORE = 2  # most restarts before an environment has answered a step
# If its pool is saved, an environment is seeded anew at its first reset after SEED_STEPS steps. So
# a resumed run replays at most these and one episode.
SEED_STEPS = 500


class EnvironmentFailed(HostError):
  """An environment raised an exception, or returned values of a wrong form; see `worker`."""


def worker_count(args: PoolArgs) -> int:
  """Return the number of workers.

  If a batch is all environments, it is `args.threads`. Otherwise all workers have the same number
  of environments, and a batch is whole workers. This may need more workers than `args.threads`.
  """
  n, batch = args.num_envs, args.batch_size
  if batch == n:
    return min(n, args.threads)
  fits = [c for c in range(1, n + 1) if n % c == 0 and batch % (n // c) == 0]
  few = [c for c in fits if c <= args.threads]
  return few[-1] if few else fits[0]


class Restarts:
  """Counts the restarts of a pool's workers within WINDOW seconds; the limit is RESTARTS.

  Time without an answer does not count: otherwise a worker that always hangs would be restarted too
  rarely to reach the limit, and for ever.
  """

  def __init__(self) -> None:
    self._now, self._at = 0.0, time.monotonic()
    self._times: collections.deque[float] = collections.deque()

  def add(self, waited: float) -> int:
    """Count a restart after `waited` seconds without an answer. Return the number with it."""
    at = time.monotonic()
    self._now += max(at - self._at - waited, 0)  # waits of two workers may overlap
    self._at = at
    while self._times and self._now - self._times[0] > WINDOW:
      self._times.popleft()
    self._times.append(self._now)
    return len(self._times)


class WorkerPool:
  """A pool of environments in worker processes.

  `maker` is the module of the WorkerEnvironments that a worker makes.

  Owner: an actor thread. Another thread may call `kill`.
  Ends when: `close` is called.
  Raises: HostError from `reset` and `recv`, if an environment fails or restarts too often.
  """

  watches_itself = True

  def __init__(
    self,
    label: str,
    fields: list[w.Field],
    observation_space: Any,
    args: PoolArgs,
    infos: Infos | None = None,
    trial: bool = False,
    maker: str = w.__name__,
    action_space: Any = None,
  ) -> None:
    self._trial, self._args, self._action_space = trial, args, action_space
    self.num_envs, self.batch_size = args.num_envs, args.batch_size
    self._label, self._space, self._deadline = label, observation_space, args.deadline
    count = worker_count(args)
    bounds = [i * args.num_envs // count for i in range(count + 1)]
    self.workers = [WorkerProcess(i, j - i) for i, j in itertools.pairwise(bounds)]
    self._first = np.array([x.first for x in self.workers])
    self._batch = count * args.batch_size // args.num_envs  # workers in an arrival
    length = w.size(fields, args.num_envs)
    self._file = memory_file(length)
    self._memory = mmap.mmap(self._file.fileno(), length)
    self._arrays = w.arrays(self._memory, fields, args.num_envs)
    self._leaves = [self._arrays[n] for n, _ in leaves(observation_space)]
    self._infos = infos or Infos()
    self._infos.open(self._arrays)
    self._shared_settings = dict(
      name=label, fields=fields, bytes=length, num_envs=args.num_envs, trial=trial, maker=maker,
    )  # fmt: skip
    self._arrays[w.SEED][:] = -1
    self._log = self._new_log()
    self._stepper, self._clock = Stepper(args.num_envs), AnswerClock()
    self._run_id = np.zeros(args.num_envs, np.int64)
    self._ready: list[WorkerProcess] = []
    self._restarts = Restarts()
    self._stepped = False  # an environment has answered a step
    self._starting = threading.Lock()
    self._closing = False  # no more processes may start

  def _new_log(self) -> ActionLog | None:
    a = self._args
    return ActionLog(self._label, a.seeds, self._action_space) if a.saves else None

  def _start(self, worker: WorkerProcess, history: Any = None) -> None:
    """Start a worker's process, in place of its old one."""
    with self._starting:
      if self._closing:
        raise HostError(f'{self._label}: the pool is closed')
      if worker.lives:
        worker.end()
      settings = {**self._shared_settings, 'seeds': self._seeds(worker, history)}
      worker.start(settings, self._file.fileno(), self._clock.look(), history)

  def _seeds(self, worker: WorkerProcess, history: Any) -> list[int]:
    """Return the seeds for the first resets of a worker's next life."""
    if self._log is None:
      return [int(s) + 7919 * worker.lives for s in self._args.seeds[worker.ids] % 2**31]
    fresh = worker.lives and history is None
    seeds = self._log.seeded(worker.ids) if fresh else self._log.seeds()[worker.ids]
    return seeds.tolist()

  def reset(self) -> None:
    """Start all processes, and wait for their first timesteps."""
    self._log, self._run_id[:] = self._new_log(), 0
    self._stepper.reset()
    self._start_all(None)

  def _start_all(self, history: Any) -> None:
    for worker in self.workers:
      self._start(worker, history)
    while len(self._ready) < len(self.workers):  # all workers begin to step together
      self._wait()

  @property
  def saves(self) -> bool:
    """Whether the actions are kept from which the environments can be restored."""
    return self._log is not None and self._log.is_kept

  def state(self) -> dict[str, np.ndarray]:
    """Return the actions since each environment was seeded."""
    assert self._log is not None, 'the pool keeps no actions'
    return {**self._log.state(), **self._stepper.state()}

  def restore(
    self, state: Mapping[str, np.ndarray], on_step: Callable[[], None] = lambda: None
  ) -> Arrival:
    """Replay the actions of `state` in new processes, each with a deadline of its own.

    Raises:
      HostError: if that fails.
    """
    log, stepper = self._new_log(), Stepper(self.num_envs)
    assert log is not None, 'the pool keeps no actions'
    log.restore(state)
    stepper.restore(state)
    self._log = log
    try:
      with History(log) as history:
        self._start_all(history)
      arrival = self.recv()
      # The score has the rewards of the timesteps that recv takes for FIRST.
      timestep: Any = arrival.timestep
      arrival = arrival._replace(timestep=timestep._replace(reward=arrival.score))
      if self._run_id.any():
        raise HostError(f'{self._label}: a worker process ended while its actions were replayed')
    except BaseException:
      self._ready = []
      raise
    self._stepper = stepper
    return arrival

  def send(self, env_id: np.ndarray, action: Any) -> None:
    """Send actions [b] to environments `env_id` [b]."""
    rows = rows_of(env_id, self.num_envs)
    self._arrays[w.ACTION][rows] = action
    if self._log is not None:
      self._log.append(env_id, action)
      if np.count_nonzero(opens := self._stepper.opens[rows]):
        self._seed_anew(self._log, env_id[opens])
    requested = [True] * len(self.workers) if rows is EVERY else np.isin(self._first, env_id)
    now = self._clock.look()
    for worker, is_requested in zip(self.workers, requested, strict=True):
      if is_requested:
        worker.go(now, self._deadline)

  def _seed_anew(self, log: ActionLog, env_id: np.ndarray) -> None:
    """Seed the environments whose resets are due for it. The worker resets them in this step."""
    due = log.is_due(env_id, SEED_STEPS)
    self._arrays[w.SEED][env_id] = -1
    self._arrays[w.SEED][env_id[due]] = log.seeded(env_id[due])

  def reset_in_trial(self, seeds: Sequence[int]) -> None:
    """Let the following steps of a trial reset environments with seeds [N]; -1 steps one."""
    self._arrays[w.SEED][:] = seeds

  def recv(self) -> Arrival:
    """Wait for `batch_size` environments, or for all requested ones if there are fewer."""
    requested = sum(x.requested_at is not None for x in self.workers) + len(self._ready)
    while len(self._ready) < min(self._batch, requested):
      self._wait()
    batch, self._ready = self._ready[: self._batch], self._ready[self._batch :]
    batch.sort(key=lambda x: x.first)
    whole = len(batch) == len(self.workers)
    ids = everyone(self.num_envs) if whole else np.concatenate([x.ids for x in batch])
    rows: Any = EVERY if whole else ids
    a = self._arrays
    arrays = [x.copy() if whole else x[rows] for x in self._leaves]  # workers overwrite them
    reward = a[w.REWARD][rows].astype(np.float32)
    timestep: Any = self._stepper.timestep(
      ids, tree(self._space, iter(arrays)), reward, a[w.TERMINATED][rows], a[w.TRUNCATED][rows]
    )
    score = a[w.SCORE][rows].astype(np.float32) if w.SCORE in a else reward
    return Arrival(ids, timestep, score, timestep.last, self._run_id[ids])

  def _wait(self) -> None:
    """Wait at most LOOK_SECONDS for workers to answer. Replace dead and late ones."""
    waiting = {x.answer: x for x in self.workers if x.requested_at is not None}
    left = min(x.due for x in waiting.values()) - self._clock.look()
    # A dead worker's pipe may be held open by processes that it started.
    answered = readable(waiting, min(max(left, 0), LOOK_SECONDS))
    for fd in answered:
      worker = waiting[fd]
      answer = os.read(fd, 1)
      if answer == w.DONE:
        worker.requested_at = None
        self._ready.append(worker)
        self._stepped |= worker.begun
        worker.begun = True
      elif answer == w.BUSY:
        worker.requested_at = self._clock.look()
      elif answer == w.FAILED:
        raise self._failed(*worker.failure())
      else:
        worker.kill()  # it may live on with a closed pipe; if not, its exit code stays
        self._ended(worker, worker.process.returncode)
    if not answered:
      now = self._clock.look()
      for worker in waiting.values():
        if (code := worker.process.poll()) is not None:
          self._ended(worker, code)
        elif now >= worker.due:
          self._restart(worker, f'it did not answer for {worker.limit:g} s')

  def _failed(self, message: str | None, traceback: str) -> HostError:
    if message is None or os.environ.get('PODRACE_TRACEBACK'):
      return EnvironmentFailed(f'{self._label} failed in its worker:\n{traceback}')
    return EnvironmentFailed(message)

  def _ended(self, worker: WorkerProcess, code: int) -> None:
    reason = signal.Signals(-code).name if code < 0 else f'exit code {code}'
    self._restart(worker, f'its process ended by {reason}')

  def _restart(self, worker: WorkerProcess, reason: str) -> None:
    assert worker.requested_at is not None
    if self._trial:
      raise HostError(reason)
    name = f'{self._label}, {threading.current_thread().name}'
    if (count := self._restarts.add(self._clock.look() - worker.requested_at)) > RESTARTS:
      raise HostError(
        f'{name}: its workers had to be restarted more than {RESTARTS} times in {WINDOW / 60:.0f} '
        f'minutes (not counting the time of waiting for answers); the last reason: {reason}'
      )
    if count > RESTARTS_BEFORE and not self._stepped:
      raise HostError(
        f'{name}: no environment has answered its first step, and {RESTARTS_BEFORE} workers were '
        f'restarted; the last reason: {reason}'
      )
    last = worker.first + worker.count - 1
    log.warning(
      '%s: the worker of its environments %d to %d is restarted (%d of at most %d times in %.0f '
      'minutes): %s',
      name, worker.first, last, count, RESTARTS, WINDOW / 60, reason,
    )  # fmt: skip
    self._start(worker)
    self._run_id[worker.ids] += 1
    self._stepper.reopen(worker.ids)

  def kill(self) -> None:
    """Kill all processes, and start none any more."""
    with self._starting:
      self._closing = True
    for worker in self.workers:
      if worker.lives:
        worker.kill()

  @property
  def pids(self) -> list[int]:
    """Process ids of the workers."""
    return [x.process.pid for x in self.workers]

  def close(self) -> None:
    """End all processes and free the shared memory."""
    with contextlib.ExitStack() as stack:
      stack.callback(self._file.close)
      stack.callback(self._infos.close, self._arrays)
      for worker in self.workers:
        if worker.lives:
          stack.callback(worker.end)
