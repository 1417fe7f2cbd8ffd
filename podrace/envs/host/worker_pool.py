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
from podrace.envs.host.timesteps import EVERY, Stepper, all_env_ids, rows_of
from podrace.envs.spaces import leaves, tree
from podrace.errors import HostError
from podrace.system.process import python
from podrace.types import Arrival

log = logging.getLogger('podrace.envs')


RESTARTS, WINDOW = 10, 600.0  # so many of a pool in so many seconds, and no more; see `Restarts`

RESTARTS_BEFORE = 2  # any environment has answered a step
TELL_SECONDS = 5.0  # for a worker to tell of its exception


# Not by -m, which would look for libraries in the working directory first. The settings are in a file: a command
# line has room for the seeds of a few thousand environments only.
START = (
  'import json, sys; settings = json.load(open(int(sys.argv[1]), encoding="utf-8")); '
  'sys.path[:] = settings["path"]; '
  'import podrace.envs.host.worker as worker; worker.main(settings)'
)


class EnvironmentFailed(HostError):
  """An environment raised an exception, or returned something else than it should; see `worker`."""


def worker_count(args: PoolArgs) -> int:
  """How many workers: as many as were asked for, if a batch is all of their environments.

  Else as many each, and whole workers in a batch; more than were asked for if nothing else fits.
  """
  n, batch = args.num_envs, args.batch_size
  if batch == n:
    return min(n, args.threads)
  fits = [c for c in range(1, n + 1) if n % c == 0 and batch % (n // c) == 0]
  few = [c for c in fits if c <= args.threads]
  return few[-1] if few else fits[0]


def _readable(descriptors: Iterable[int], seconds: float) -> list[int]:
  """Those that can be read or were closed, once one is, or none after so long.

  `select` knows none from 1,024 on.
  """
  poll = select.poll()
  for fd in descriptors:
    poll.register(fd, select.POLLIN)
  return [fd for fd, _ in poll.poll(seconds * 1000)]


def memory_file(length: int) -> Any:
  """A file of so many bytes to share with workers: in memory on Linux, elsewhere for temporary files.

  All of it is there: in one with holes the first write fails by a signal where there is no room left.

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
  """Those of a pool's workers, of which there may be RESTARTS in WINDOW seconds.

  Seconds that its answer was waited for don't count: a worker that hangs every time would be found
  out too seldom, and be restarted for ever.
  """

  def __init__(self) -> None:
    self._now, self._at = 0.0, time.monotonic()
    self._times: collections.deque[float] = collections.deque()

  def add(self, waited: float) -> int:
    """Accounts for one after so many seconds without an answer; how many there are with it."""
    at = time.monotonic()
    self._now += max(at - self._at - waited, 0)  # several may have been waited for at once
    self._at = at
    while self._times and self._now - self._times[0] > WINDOW:
      self._times.popleft()
    self._times.append(self._now)
    return len(self._times)


def _path() -> list[str]:
  """Where a worker looks for modules: where this process does, and at last where podrace is."""
  return list(dict.fromkeys([*map(os.path.abspath, sys.path), str(Path(w.__file__).parents[3])]))


class WorkerProcess:
  """One process and its end of the pipes."""

  def __init__(self, first: int, count: int) -> None:
    self.first, self.count = first, count
    self.ids = np.arange(first, first + count, dtype=np.int32)
    self.asked: float | None = None  # when, by the pool's clock; None: it owes no answer
    self.limit = START_SECONDS
    self.begun = False  # its process has reset its environments
    self.lives = 0

  def start(self, settings: dict[str, Any], memory: int, now: float) -> None:
    """Starts the process anew; it owes the first timesteps."""
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
        start_new_session=True,  # a Ctrl-C in the terminal is for the run, which ends its workers
      )
    os.close(ask_read)
    os.close(answer_write)
    self.lives += 1
    self.begun = False
    self.go(now, START_SECONDS)

  def go(self, now: float, limit: float) -> None:
    """Has it step, for which it has so many seconds."""
    self.asked, self.limit = now, limit
    with contextlib.suppress(BrokenPipeError):  # it is dead, which the answer's pipe will tell
      os.write(self.ask, w.GO)

  @property
  def due(self) -> float:
    """When its answer is due."""
    assert self.asked is not None
    return self.asked + self.limit

  def failure(self) -> tuple[str | None, str]:
    """What it answers with: a message for the user, and the traceback or what there is of it in TELL_SECONDS."""
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
    """Kills the process and what it started, which is in its group, and waits for it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # they are all gone
      os.killpg(self.process.pid, signal.SIGKILL)
    self.process.wait()

  def end(self) -> None:
    """Kill the process and close its pipes."""
    self.kill()
    os.close(self.ask)
    os.close(self.answer)


class WorkerPool:
  """A pool of environments in worker processes."""

  watches_itself = True

  def __init__(
    self,
    label: str,
    fields: list[w.Field],
    observation_space: Any,
    args: PoolArgs,
    infos: Infos | None = None,
    trial: bool = False,
  ) -> None:
    self._trial = trial
    self.num_envs, self.batch_size = args.num_envs, args.batch_size
    self._label, self._space, self._deadline = label, observation_space, args.deadline
    count = worker_count(args)
    bounds = [i * args.num_envs // count for i in range(count + 1)]
    self._workers = [WorkerProcess(i, j - i) for i, j in itertools.pairwise(bounds)]
    self._first = np.array([x.first for x in self._workers])
    self._batch = count * args.batch_size // args.num_envs  # in workers
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
    )  # fmt: skip
    self._stepper, self._clock = Stepper(args.num_envs), AnswerClock()
    self._run_id = np.zeros(args.num_envs, np.int64)
    self._ready: list[WorkerProcess] = []
    self._restarts = Restarts()
    self._stepped = False  # some environment has
    self._starting = threading.Lock()
    self._closing = False  # no process is started any more

  def _start(self, worker: WorkerProcess) -> None:
    """Starts a worker's process, in place of the one that it has."""
    with self._starting:
      if self._closing:
        raise HostError(f'{self._label}: the pool is closed')
      if worker.lives:
        worker.end()
      worker.start(self._shared_settings, self._file.fileno(), self._clock.look())

  def reset(self) -> None:
    """Start all processes, and wait for their first timesteps."""
    for worker in self._workers:
      self._start(worker)
    while len(self._ready) < len(self._workers):  # so that none is ahead by its start
      self._wait()

  def send(self, env_id: np.ndarray, action: Any) -> None:
    """Send actions [b] to environments `env_id` [b]."""
    rows = rows_of(env_id, self.num_envs)
    self._arrays[w.ACTION][rows] = action
    asked = [True] * len(self._workers) if rows is EVERY else np.isin(self._first, env_id)
    now = self._clock.look()
    for worker, is_asked in zip(self._workers, asked, strict=True):
      if is_asked:
        worker.go(now, self._deadline)

  def recv(self) -> Arrival:
    """Waits for `batch_size` environments, or for all that were asked, if they are fewer."""
    asked = sum(x.asked is not None for x in self._workers) + len(self._ready)
    while len(self._ready) < min(self._batch, asked):
      self._wait()
    batch, self._ready = self._ready[: self._batch], self._ready[self._batch :]
    batch.sort(key=lambda x: x.first)
    whole = len(batch) == len(self._workers)
    ids = all_env_ids(self.num_envs) if whole else np.concatenate([x.ids for x in batch])
    rows: Any = EVERY if whole else ids
    a = self._arrays
    arrays = [x.copy() if whole else x[rows] for x in self._leaves]  # workers write on
    reward = a[w.REWARD][rows].astype(np.float32)
    timestep: Any = self._stepper.timestep(
      ids, tree(self._space, iter(arrays)), reward, a[w.TERMINATED][rows], a[w.TRUNCATED][rows]
    )
    return Arrival(ids, timestep, reward, timestep.last, self._run_id[ids])

  def _wait(self) -> None:
    """For some worker to answer or be replaced; for LOOK_SECONDS at most."""
    waiting = {x.answer: x for x in self._workers if x.asked is not None}
    left = min(x.due for x in waiting.values()) - self._clock.look()
    # Its pipe may be held open by what it started, so that nobody tells of its death.
    readable = _readable(waiting, min(max(left, 0), LOOK_SECONDS))
    for fd in readable:
      worker = waiting[fd]
      answer = os.read(fd, 1)
      if answer == w.DONE:
        worker.asked = None
        self._ready.append(worker)
        self._stepped |= worker.begun
        worker.begun = True
      elif answer == w.FAILED:
        raise self._failed(*worker.failure())
      else:
        worker.kill()  # it may have closed its pipe and live on; if not, its exit code stays
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
    assert worker.asked is not None
    if self._trial:
      raise HostError(reason)
    whose = f'{self._label}, {threading.current_thread().name}'
    if (count := self._restarts.add(self._clock.look() - worker.asked)) > RESTARTS:
      raise HostError(
        f'{whose}: its workers had to be restarted more than {RESTARTS} times in {WINDOW / 60:.0f} '
        'minutes (in which the time that those that hung were waited for is not counted); the last '
        f'reason: {reason}'
      )
    if count > RESTARTS_BEFORE and not self._stepped:
      raise HostError(
        f'{whose}: no environment has answered its first step, and {RESTARTS_BEFORE} workers were restarted; '
        f'the last reason: {reason}'
      )
    last = worker.first + worker.count - 1
    log.warning(
      '%s: the worker of its environments %d to %d is restarted (%d of at most %d times in %.0f minutes): %s',
      whose, worker.first, last, count, RESTARTS, WINDOW / 60, reason,
    )  # fmt: skip
    self._start(worker)
    self._run_id[worker.ids] += 1
    self._stepper.reopen(worker.ids)

  def kill(self) -> None:
    """Kill all processes, and start none any more."""
    with self._starting:
      self._closing = True
    for worker in self._workers:
      if worker.lives:
        worker.kill()

  @property
  def pids(self) -> list[int]:
    """The workers' process ids."""
    return [x.process.pid for x in self._workers]

  def close(self) -> None:
    """End all processes and free the shared memory."""
    for worker in self._workers:
      if worker.lives:
        worker.end()
    self._infos.close(self._arrays)
    self._file.close()
