"""Batches for a learner from a replay service."""

from __future__ import annotations

import collections
import functools
import logging
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
from podrace.replay.labels import LOGGED, without_ids
from podrace.replay.layout import Columns, unnamed
from podrace.replay.windows import Windows
from podrace.system.threads import ClosableQueue, Worker
from podrace.topology import AXIS, TRAJECTORY_SPECS, own_rows, share
from podrace.types import Array, Trajectory

log = logging.getLogger('podrace.distributed')
PREFETCH = 2  # batches that are requested, and batches that are unpacked, ahead of time
SOURCES = 4096  # processes of which the newest row is remembered
POLL = 0.1  # seconds between calls of a learner's `cancelled()`, which no event announces


class Sampled:
  """Batches of windows, for agents with replay.

  Each of several learner processes has its own rows of them.
  """

  def __init__(self, table: Any, w: Windows, mesh: Mesh) -> None:
    self.table, self.size, self.ahead = table, share(w.buffer.batch_size), PREFETCH
    self.prioritised = w.prioritised
    self._windows, self._sharding = w, NamedSharding(mesh, P(AXIS))
    self.steps = 0  # environment steps up to the update at hand
    self._samples = 0

  def batches(self, samples: tables.Samples) -> Iterator[Draw]:
    """Yield the batch of a sample, on the learner's devices."""
    self._samples += len(samples.key)
    rows = weighted(samples, self._windows, self.steps)
    yield Draw(samples.key, jax.make_array_from_process_local_data(self._sharding, rows))

  def counts(self) -> dict[str, int]:
    """Return counts for the log."""
    return {'replay_samples': self._samples}


class Once:
  """Batches of rows that have not come before.

  A service that was killed begins again from a checkpoint, and may send a row again. It is
  recognized by its source and number, which only grows. Each of several learner processes remembers
  its own rows.

  Args:
    size: rows of a batch.
  """

  def __init__(self, size: int) -> None:
    self._size = size
    self._newest: collections.OrderedDict[int, int] = collections.OrderedDict()
    self._kept: Columns = {}  # rows too few for a batch
    self.taken = self.repeated = 0

  def batches(self, data: Columns) -> Iterator[Columns]:
    """Yield batches of all rows so far, without repeated rows. Keep the rest for the next call."""
    ids = zip(data['source'].tolist(), data['number'].tolist(), strict=True)
    new = [self._is_new(*each) for each in ids]
    rows = {k: x[new] for k, x in data.items()}
    if self._kept:
      rows = {k: np.concatenate([self._kept[k], x]) for k, x in rows.items()}
    n = self._size
    while len(rows['number']) >= n:
      batch, rows = {k: x[:n] for k, x in rows.items()}, {k: x[n:] for k, x in rows.items()}
      yield batch
    self._kept = rows

  def _is_new(self, source: int, number: int) -> bool:
    self.taken += 1
    newest = self._newest.pop(source, -1)
    self._newest[source] = max(newest, number)
    while len(self._newest) > SOURCES:
      self._newest.popitem(last=False)
    self.repeated += number <= newest
    return number > newest


class Queued:
  """Batches of unrolls, for agents without replay; `key` has the versions that acted, [n].

  Each unroll is learned from once.
  """

  prioritised, ahead = False, 1

  def __init__(self, table: Any, example: Trajectory, mesh: Mesh) -> None:
    self.table, self.size = table, share(example.env_id.shape[0])
    self._example, self._once = example, Once(self.size)
    self._shardings: Any = jax.tree.map(
      lambda spec: NamedSharding(mesh, spec), TRAJECTORY_SPECS, is_leaf=lambda x: isinstance(x, P)
    )

  def batches(self, samples: tables.Samples) -> Iterator[Draw]:
    """Yield batches as `Sampled.batches`. Repeated unrolls make their number other than one."""
    for batch in self._once.batches(samples.data):
      trajectory = self._trajectory(batch)
      yield Draw(
        batch['version'], jax.make_array_from_process_local_data(self._shardings, trajectory)
      )

  def _trajectory(self, rows: Columns) -> Trajectory:
    return unnamed(
      self._example, {k: np.moveaxis(x, 0, 1) if timed(k) else x for k, x in rows.items()}
    )

  def counts(self) -> dict[str, int]:
    """Return counts for the log."""
    return {'unrolls_taken': self._once.taken, 'unrolls_repeated': self._once.repeated}


class Labelled:
  """Batches of labelled windows; `key` has the versions that labelled them, [n].

  Each label is learned from once.
  """

  prioritised, ahead = False, 1

  def __init__(self, table: Any, w: Windows, mesh: Mesh) -> None:
    self.table, self.size = table, share(w.buffer.batch_size)
    self._once, self._sharding = Once(self.size), NamedSharding(mesh, P(AXIS))
    self._online = self._learned = 0  # since they were last read

  def batches(self, samples: tables.Samples) -> Iterator[Draw]:
    """Yield batches as `Queued.batches`."""
    for batch in self._once.batches(samples.data):
      self._online += int((~batch[LOGGED]).sum())
      self._learned += self.size
      version, rows = without_ids(batch)
      yield Draw(version, jax.make_array_from_process_local_data(self._sharding, rows))

  def counts(self) -> dict[str, int]:
    """Return counts for the log."""
    return {'labels_taken': self._once.taken, 'labels_repeated': self._once.repeated}

  def read(self) -> tuple[int, int]:
    """Return the online labels, and all, of the batches since the last call."""
    online, learned = self._online, self._learned
    self._online, self._learned = self._online - online, self._learned - learned
    return online, learned


class Feed:
  """Batches for the learner, and priorities from it, by threads of their own.

  Owner: the learner's source, which calls `close` before it closes the client.
  Ends when: it is closed, or a thread fails, which `check` raises.

  Args:
    source: makes the batches.
    episodes: the table of finished episodes, None if this process does not read it.
    highest: the highest priority before.

  Attributes:
    highest: the highest priority so far.
  """

  def __init__(
    self, source: Sampled | Queued | Labelled, episodes: Any, highest: float = 1.0
  ) -> None:
    self._source, self._table, self._episodes = source, source.table, episodes
    self._drawn: ClosableQueue[Draw] = ClosableQueue(source.ahead)
    self._learned: ClosableQueue[tuple[np.ndarray, Array]] = ClosableQueue(PREFETCH)
    self._lock = threading.Lock()
    self._totals = Totals()
    self._closed = self._has_failed = False
    self._next: Draw | None = None  # drawn and not yet taken
    self.highest = highest
    works = [self._sample, self._prioritise, *([self._listen] if episodes is not None else [])]
    self._workers = [
      Worker(work.__name__, functools.partial(self._run, work), self._close_after_failure)
      for work in works
    ]

  def wait_for_first(self, cancelled: Callable[[], bool]) -> bool:
    """Wait for a batch, which `take` returns next; returns False where `take` would return None."""
    self._next = self.take(cancelled)
    return self._next is not None

  def take(self, cancelled: Callable[[], bool]) -> Draw | None:
    """Return the next batch, None once `cancelled()` or after a failure: see `check`."""
    if self._next is not None:
      first, self._next = self._next, None
      return first
    while True:
      closed = self._drawn.closed  # before a look at the queue: the last batch precedes the failure
      if (draw := self._drawn.get(POLL)) is not None:
        return draw
      if closed or cancelled():
        return None

  def update(self, key: np.ndarray, priority: Array, cancelled: Callable[[], bool]) -> None:
    """Set new priorities [n], which may still be being computed. Sets none once `cancelled()`."""
    while self._source.prioritised and not self._learned.closed:
      if self._learned.put((key, priority), POLL) or cancelled():
        return

  def episodes(self) -> Totals:
    """Return the totals of the episodes since the last call."""
    with self._lock:
      totals, self._totals = self._totals, Totals()
    return totals

  def counts(self) -> dict[str, int]:
    """Return counts for the log."""
    return self._source.counts()

  def close(self) -> None:
    """End the threads, of which one may wait for the client until that is closed, too."""
    self._closed = True
    self._drawn.close()
    self._learned.close()

  def check(self) -> None:
    """Raise ReplayFailed if a thread has failed."""
    for worker in self._workers:
      if worker.failed:
        raise ReplayFailed(worker.message(RunError))

  def _run(self, work: Callable[[], None]) -> None:
    try:
      work()
    except BaseException as e:
      if not (self._closed and isinstance(e, tables.Closed)):  # by the owner, else it would wait
        self._has_failed = True
        raise

  def _close_after_failure(self) -> None:
    """End waits of the learner; called when the failure can be seen by `check`."""
    if self._has_failed:
      self._drawn.close()
      self._learned.close()

  def _sample(self) -> None:
    with self._table.sampler(self._source.size, self._source.ahead) as samples:
      while not self._drawn.closed:
        for draw in self._source.batches(next(samples)):
          if not self._drawn.put(draw):
            break

  def _prioritise(self) -> None:
    while (learned := self._learned.get()) is not None and not self._closed:
      key, priority = learned
      values = own_rows(priority).astype(np.float64)
      if np.isfinite(values).all():  # else neither is the loss, which ends the run
        self._table.update_priorities(key, values)
        self.highest = max(self.highest, float(values.max()))

  def _listen(self) -> None:
    while not self._closed:
      try:
        samples = self._episodes.sample(1000, at_least=1, timeout=1.0)
      except tables.RateLimited as e:
        if e.taken is None:
          continue
        samples = e.taken
      count, return_sum, square, length = samples.data['totals'].sum((0, 1)).tolist()
      with self._lock:
        self._totals += Totals(int(count), return_sum, square, int(length))
