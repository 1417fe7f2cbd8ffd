"""Batches for a learner whose experience comes from a service."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from podrace import tables
from podrace.distributed.run_tables import timed
from podrace.envs.host.episodes import Totals
from podrace.errors import ReplayFailed, RunError
from podrace.replay.host import Draw, weighted
from podrace.replay.layout import Columns, unnamed
from podrace.replay.windows import Windows
from podrace.system.threads import Worker
from podrace.topology import AXIS, TRAJECTORY_SPECS, own_rows, share
from podrace.types import Array, Trajectory

log = logging.getLogger('podrace.distributed')
PREFETCH = 2  # batches that are asked for, and that are unpacked, ahead of time
SOURCES = 4096  # acting processes of which is known what the learner has had
POLL = 0.1  # seconds between looks at whether a wait has lost its sense


class Sampled:
  """Batches of windows, for agents with replay; of several learner processes, this one's rows of them."""

  def __init__(self, table: Any, w: Windows, mesh: Mesh) -> None:
    self.table, self.size, self.ahead = table, share(w.buffer.batch_size), PREFETCH
    self.prioritised = w.prioritised
    self._windows, self._sharding = w, NamedSharding(mesh, P(AXIS))
    self.steps = 0  # of the environments, up to the update at hand
    self._samples = 0

  def batches(self, samples: tables.Samples) -> Iterator[Draw]:
    """What is learned from, on the learner's devices."""
    self._samples += len(samples.key)
    rows = weighted(samples, self._windows, self.steps)
    yield Draw(samples.key, jax.make_array_from_process_local_data(self._sharding, rows))

  def counts(self) -> dict[str, int]:
    """For the log."""
    return {'replay_samples': self._samples}


class Queued:
  """Batches of unrolls, for agents without replay; a batch's `key` are the versions that acted, [n].

  Each unroll comes once. A service that was killed begins again from a checkpoint and does not know who has
  had what since: so it is known here, by its source and number. Each of several learner processes knows of its own rows.
  """

  prioritised, ahead = False, 1

  def __init__(self, table: Any, example: Trajectory, mesh: Mesh) -> None:
    self.table, self.size = table, share(example.env_id.shape[0])
    self._example = example
    self._shardings: Any = jax.tree.map(
      lambda spec: NamedSharding(mesh, spec), TRAJECTORY_SPECS, is_leaf=lambda x: isinstance(x, P)
    )
    self._newest: collections.OrderedDict[int, int] = collections.OrderedDict()
    self._kept: Columns = {}  # rows that do not make a batch yet
    self._taken = self._repeated = 0

  def batches(self, samples: tables.Samples) -> Iterator[Draw]:
    """As `Sampled.batches`; none, or several, where unrolls were repeated."""
    new = [self._is_new(*ids) for ids in zip(
      samples.data['source'].tolist(), samples.data['number'].tolist(), strict=True
    )]  # fmt: skip
    rows = {k: x[new] for k, x in samples.data.items()}
    if self._kept:
      rows = {k: np.concatenate([self._kept[k], x]) for k, x in rows.items()}
    n = self.size
    while len(rows['number']) >= n:
      batch, rows = {k: x[:n] for k, x in rows.items()}, {k: x[n:] for k, x in rows.items()}
      trajectory = self._trajectory(batch)
      yield Draw(
        batch['version'], jax.make_array_from_process_local_data(self._shardings, trajectory)
      )
    self._kept = rows

  def _is_new(self, source: int, number: int) -> bool:
    self._taken += 1
    newest = self._newest.pop(source, -1)
    self._newest[source] = max(newest, number)
    while len(self._newest) > SOURCES:
      self._newest.popitem(last=False)
    self._repeated += number <= newest
    return number > newest

  def _trajectory(self, rows: Columns) -> Trajectory:
    return unnamed(
      self._example, {k: np.moveaxis(x, 0, 1) if timed(k) else x for k, x in rows.items()}
    )

  def counts(self) -> dict[str, int]:
    """For the log."""
    return {'unrolls_taken': self._taken, 'unrolls_repeated': self._repeated}


class Feed:
  """Batches for the learner, and priorities from it, by threads of their own.

  Args:
    source: what batches are made of.
    episodes: the table of those that are finished; None if they are not read here.
  """

  def __init__(self, source: Sampled | Queued, episodes: Any) -> None:
    self._source, self._table, self._episodes = source, source.table, episodes
    self._drawn: queue.Queue[Draw] = queue.Queue(source.ahead)
    self._learned: queue.Queue[tuple[np.ndarray, Array]] = queue.Queue(PREFETCH)
    self._lock = threading.Lock()
    self._totals = Totals()
    self._closed = False
    self._next: Draw | None = None  # drawn and not yet given away
    works = [self._sample, self._prioritise, *([self._listen] if episodes is not None else [])]
    self._workers = [
      Worker(work.__name__, functools.partial(self._until_closed, work)) for work in works
    ]

  def begun(self, give_up: Callable[[], bool]) -> bool:
    """Waits until there is a batch, which `take` returns next; False where that would return None."""
    self._next = self.take(give_up)
    return self._next is not None

  def take(self, give_up: Callable[[], bool]) -> Draw | None:
    """The next batch; None if `give_up` says so before, or if there will be none: see `check`."""
    if self._next is not None:
      found, self._next = self._next, None
      return found
    while True:
      failed = self._failed  # before a look at the queue, for its last one comes before the failure
      try:
        return self._drawn.get(timeout=POLL)
      except queue.Empty:
        if failed or give_up():
          return None

  def update(self, key: np.ndarray, priority: Array, give_up: Callable[[], bool]) -> None:
    """New priorities [n], which may still be being computed; none are set if `give_up` says so."""
    while self._source.prioritised and not self._failed:
      with contextlib.suppress(queue.Full):
        self._learned.put((key, priority), timeout=POLL)
        return
      if give_up():
        return

  def episodes(self) -> Totals:
    """Those that came since the last time."""
    with self._lock:
      totals, self._totals = self._totals, Totals()
    return totals

  def counts(self) -> dict[str, int]:
    """What was taken, for the log."""
    return self._source.counts()

  def close(self) -> None:
    """Has the threads end with the client, which is closed next."""
    self._closed = True

  def check(self) -> None:
    """Raises ReplayFailed if a thread has failed."""
    for worker in self._workers:
      if worker.failed:
        raise ReplayFailed(worker.message(RunError))

  @property
  def _failed(self) -> bool:
    return any(worker.failed for worker in self._workers)

  def _until_closed(self, work: Callable[[], None]) -> None:
    with contextlib.suppress(tables.Closed):
      work()

  def _sample(self) -> None:
    with self._table.sampler(self._source.size, self._source.ahead) as samples:
      while not self._closed:
        for found in self._source.batches(next(samples)):
          while not self._closed:
            with contextlib.suppress(queue.Full):
              self._drawn.put(found, timeout=POLL)
              break

  def _prioritise(self) -> None:
    while not self._closed:
      try:
        key, priority = self._learned.get(timeout=POLL)
      except queue.Empty:
        continue
      values = own_rows(priority).astype(np.float64)
      if np.isfinite(values).all():  # else neither is the loss, which ends the run
        self._table.update_priorities(key, values)

  def _listen(self) -> None:
    while not self._closed:
      try:
        found = self._episodes.sample(1000, at_least=1, timeout=1.0)
      except tables.RateLimited as e:
        if e.taken is None:
          continue
        found = e.taken
      count, return_sum, square, length = found.data['totals'].sum((0, 1)).tolist()
      with self._lock:
        self._totals += Totals(int(count), return_sum, square, int(length))
