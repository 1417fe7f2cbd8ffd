"""Worker processes that step Gymnasium environments."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import logging
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from podrace.envs.host import worker as w
from podrace.envs.host.answer_timer import LOOK_SECONDS, START_SECONDS, AnswerClock
from podrace.envs.host.base import PoolArgs
from podrace.envs.host.infos import Infos
from podrace.envs.host.timesteps import EVERY, Stepper, everyone, rows_of
from podrace.envs.spaces import leaves, tree
from podrace.errors import HostError
from podrace.system.child import python
from podrace.types import Arrival

log = logging.getLogger('podrace.envs')


RESTARTS, WINDOW = 10, 600.0  # most restarts of a pool in WINDOW seconds; see `Restarts`
RESTARTS_BEFORE = 2  # most restarts before an environment has answered a step
TELL_SECONDS = 5.0  # time for a worker to send its exception

# Not `-m`, which looks for libraries in the working directory first. The settings are in a file,
# because a command line has room for the seeds of a few thousand environments only.
START = (
  'import json, sys; settings = json.load(open(int(sys.argv[1]), encoding="utf-8")); '
  'sys.path[:] = settings["path"]; '
  'import podrace.envs.host.worker as worker; worker.main(settings)'
)


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


def _readable(descriptors: Iterable[int], seconds: float) -> list[int]:
  """Return the descriptors that can be read or were closed, after at most `seconds`.

  `select.select` does not work with descriptors from 1,024 on.
  """
  poll = select.poll()
  for fd in descriptors:
    poll.register(fd, select.POLLIN)
  return [fd for fd, _ in poll.poll(seconds * 1000)]


def memory_file(length: int) -> Any:
  """Return a file of `length` bytes to share with workers, in memory on Linux.

  All of it is allocated: a write to a hole ends in a signal if there is no room left.

  Raises:
    OSError: if there is no room for it.
  """
  if hasattr(os, 'memfd_create'):
    file: Any = os.fdopen(os.memfd_create('podrace'), 'w+b')
  else:
    file = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
  try:
    if hasattr(os, 'posix_fallocate'):
      os.posix_fallocate(file.fileno(), 0, length)
    else:
      file.truncate(length)
  except BaseException:
    file.close()
    raise
  return file


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


def _path() -> list[str]:
  """Return the module path of a worker: this process's, and then podrace's directory."""
  return list(dict.fromkeys([*map(os.path.abspath, sys.path), str(Path(w.__file__).parents[3])]))


class WorkerProcess:
  """One process and its pipes.

  Owner: a WorkerPool, which calls `kill` or `end`.
  """

  def __init__(self, first: int, count: int) -> None:
    self.first, self.count = first, count
    self.ids = np.arange(first, first + count, dtype=np.int32)
    self.requested_at: float | None = (
      None  # time of the request, by the pool's clock; None: no answer due
    )
    self.limit = START_SECONDS
    self.begun = False  # the process has reset its environments
    self.lives = 0

  def start(self, settings: dict[str, Any], memory: int, now: float) -> None:
    """Start a new process, which resets its environments."""
    ask_read, self.ask = os.pipe()
    self.answer, answer_write = os.pipe()
    settings = {
      **settings,
      'memory': memory,
      'ask': ask_read,
      'answer': answer_write,
      'start': self.first,
    }
    settings['parent'] = os.getpid()
    settings['path'] = _path()
    settings['seeds'] = [
      int(s) + 7919 * self.lives for s in settings['seeds'][self.first :][: self.count]
    ]
    text = json.dumps(settings).encode()
    with memory_file(len(text)) as file:
      file.write(text)
      file.seek(0)
      self.process = subprocess.Popen(
        python('-c', START, str(file.fileno())),
        pass_fds=(memory, ask_read, answer_write, file.fileno()),
        stdin=subprocess.DEVNULL,
        stdout=2,  # standard output is for results
        start_new_session=True,  # a Ctrl-C in the terminal reaches only the run
      )
    os.close(ask_read)
    os.close(answer_write)
    self.lives += 1
    self.begun = False
    self.go(now, START_SECONDS)

  def go(self, now: float, limit: float) -> None:
    """Request a step, which has `limit` seconds."""
    self.requested_at, self.limit = now, limit
    with contextlib.suppress(BrokenPipeError):  # dead; the answer's pipe will show it
      os.write(self.ask, w.GO)

  @property
  def due(self) -> float:
    """Time when the answer is due."""
    assert self.requested_at is not None
    return self.requested_at + self.limit

  def failure(self) -> tuple[str | None, str]:
    """Return a message for the user or None, and the traceback that came in TELL_SECONDS."""
    text, end = b'', time.monotonic() + TELL_SECONDS
    while len(text) < 8 or len(text) < 8 + int.from_bytes(text[:8]):
      if not _readable([self.answer], max(end - time.monotonic(), 0)):
        break
      if not (more := os.read(self.answer, 65536)):
        break
      text += more
    try:
      message, shown = json.loads(text[8:])
    except ValueError:
      return None, text[8:].decode(errors='replace')
    return message, shown

  def kill(self) -> None:
    """Kill the process and its process group, and wait for the process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is gone
      os.killpg(self.process.pid, signal.SIGKILL)
    self.process.wait()

  def end(self) -> None:
    """Kill the process and close its pipes."""
    self.kill()
    os.close(self.ask)
    os.close(self.answer)


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
  ) -> None:
    self._trial = trial
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
      name=label, fields=fields, bytes=length,
      num_envs=args.num_envs, seeds=(args.seeds % 2**31).tolist(), trial=trial,
      maker=maker,
    )  # fmt: skip
    self._stepper, self._clock = Stepper(args.num_envs), AnswerClock()
    self._run_id = np.zeros(args.num_envs, np.int64)
    self._ready: list[WorkerProcess] = []
    self._restarts = Restarts()
    self._stepped = False  # an environment has answered a step
    self._starting = threading.Lock()
    self._closing = False  # no more processes may start

  def _start(self, worker: WorkerProcess) -> None:
    """Start a worker's process, in place of its old one."""
    with self._starting:
      if self._closing:
        raise HostError(f'{self._label}: the pool is closed')
      if worker.lives:
        worker.end()
      worker.start(self._shared_settings, self._file.fileno(), self._clock.look())

  def reset(self) -> None:
    """Start all processes, and wait for their first timesteps."""
    for worker in self.workers:
      self._start(worker)
    while len(self._ready) < len(self.workers):  # all workers begin to step together
      self._wait()

  def send(self, env_id: np.ndarray, action: Any) -> None:
    """Send actions [b] to environments `env_id` [b]."""
    rows = rows_of(env_id, self.num_envs)
    self._arrays[w.ACTION][rows] = action
    requested = [True] * len(self.workers) if rows is EVERY else np.isin(self._first, env_id)
    now = self._clock.look()
    for worker, is_requested in zip(self.workers, requested, strict=True):
      if is_requested:
        worker.go(now, self._deadline)

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
    readable = _readable(waiting, min(max(left, 0), LOOK_SECONDS))
    for fd in readable:
      worker = waiting[fd]
      answer = os.read(fd, 1)
      if answer == w.DONE:
        worker.requested_at = None
        self._ready.append(worker)
        self._stepped |= worker.begun
        worker.begun = True
      elif answer == w.FAILED:
        raise self._failed(*worker.failure())
      else:
        worker.kill()  # it may live on with a closed pipe; if not, its exit code stays
        self._ended(worker, worker.process.returncode)
    if not readable:
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
    for worker in self.workers:
      if worker.lives:
        worker.end()
    self._infos.close(self._arrays)
    self._file.close()
