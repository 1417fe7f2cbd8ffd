"""Replay on the host: the windows of `podrace.replay.windows`, in a table of `podrace.tables`.

Each environment has a stream of its own, with rows that are written once and compressed; windows are
slices of it. So environments may come back in any order, come and go, and be anywhere. What a
window holds when it is sampled is what the replay on the device would have held.

One thread writes and samples, in the order in which it is asked: what is learned depends on nobody's
speed. It is ahead of the learner by AHEAD samples.
"""

from __future__ import annotations

import functools
import hashlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from podrace import tables
from podrace.errors import ReplayFailed, UnreadableFile
from podrace.replay.layout import Columns, Layout
from podrace.replay.streams import Streams
from podrace.replay.windows import Windows
from podrace.system import files
from podrace.system.files import sync
from podrace.system.files.reading import open_regular, read_npz
from podrace.system.threads import Worker
from podrace.topology import AXIS, data_size, everyones, own_rows, share
from podrace.types import Array, Trajectory

AHEAD = 2  # samples that are drawn before the priorities of the one at hand are known
POLL = 0.1  # seconds between looks at whether a wait has lost its sense
CACHE_BYTES = 2**26  # of unpacked chunks
CLOSE_SECONDS = 5.0
TABLE = 'windows'


# --- the learner's table ------------------------------------------------------------------------------


class Draw(NamedTuple):
  """A sample on the learner's devices, and the keys that its priorities go to; of several processes, this one's."""

  key: np.ndarray
  data: Columns


def weighted(found: tables.Samples, w: Windows, steps: int) -> Columns:
  """Windows that were sampled after so many environment steps, with their importance weights."""
  weight = np.ones(len(found.key), np.float32)
  if w.prioritised:
    weights = w.buffer.weights(found.table_size, found.probability, np.float64(steps))
    weight = weights.astype(np.float32)
  return {**found.data, 'weight': weight}


def selector(w: Windows) -> tables.selectors.Selector:
  """Which window is sampled next."""
  return tables.prioritized(w.buffer.priority_exponent) if w.prioritised else tables.uniform()


class HostReplay:
  """One learner's replay: the table, and the thread that writes to it and samples from it.

  It does what it is asked, in that order: unrolls are added, samples drawn, priorities set. Of a run of several
  processes each has the windows of its own environments, and draws its rows of each batch from them: the chance of a
  window and its weight are those within them, as they are within a device for replay there.

  Args:
    layout: of the trajectories.
    mesh: the learner's, over whose devices a batch is split.
    seed: of sampling.
  """

  def __init__(self, layout: Layout, mesh: Mesh, seed: int) -> None:
    w = layout.windows
    if w.buffer.batch_size % data_size(mesh):
      raise ValueError(
        f'batch_size {w.buffer.batch_size} does not divide over {data_size(mesh)} learner devices'
      )
    self._windows, self._seed, self._layout = w, seed, layout
    self._batch_size = share(w.buffer.batch_size)
    self._sharding = NamedSharding(mesh, P(AXIS))
    self._begun: int | None = None  # the update in which learning began
    self._steps = 0  # of the environments, up to the update at hand
    self._orders: queue.Queue[Callable[[], Any]] = queue.Queue(maxsize=8)
    self._drawn: queue.SimpleQueue[Draw] = queue.SimpleQueue()
    self._closed = False
    self._worker: Worker | None = None
    self._make_table()

  def _make_table(self) -> None:
    w = self._windows
    self.store = tables.ChunkStore(CACHE_BYTES)
    self.table = tables.Table(
      TABLE,
      self.store,
      sampler=selector(w),
      remover=tables.fifo(),
      rate_limiter=tables.min_size(1),  # how often is `times`
      max_size=-(-share(w.buffer.capacity) // w.period),
      seed=(self._seed, jax.process_index()),
    )
    self._streams = Streams(
      self._layout, self.table, lambda history: tables.Writer(self.store, history)
    )

  def start(self) -> None:
    """Begins to do what it is asked."""
    self._worker = Worker('replay', self._main)

  # --- for the learner's thread

  def add(self, trajectories: Sequence[Trajectory], serial: np.ndarray) -> None:
    """One thread's unroll, in parts for each learner device; see `Streams.add`."""
    each = np.split(serial, len(trajectories))

    def work() -> None:
      for trajectory, of_part in zip(trajectories, each, strict=True):
        self._streams.add(trajectory, of_part)

    self._order(work)

  def times(self, update: int) -> int:
    """How many samples are learned from in an update, of which all unrolls have been added.

    As `Schedule.times`, from where there is a window to be learned from, in all processes.
    """
    w = self._windows
    self._steps = (update + 1) * w.num_envs * w.unroll_length
    if self._begun is None:
      if self._steps < w.buffer.min_size:
        return 0
      self._wait()
      if not everyones([len(self.table)]).all():
        return 0
      self._begun = update
    return int(w.schedule.due(update - self._begun))

  def samples(self, count: int) -> Iterator[Draw]:
    """So many of the update at hand; `update` comes before the next is asked for."""
    draw = functools.partial(self._draw, self._steps)
    asked = 0
    for i in range(count):
      while asked < min(count, i + AHEAD):
        self._order(draw)
        asked += 1
      yield self._next()

  def update(self, key: np.ndarray, priority: Array) -> None:
    """New priorities of a batch, of which this process drew `key`; they may still be being computed."""
    if self._windows.prioritised:
      self._order(lambda: self._update(key, own_rows(priority).astype(np.float64)))

  def metrics(self) -> dict[str, float]:
    """For the log: of all processes, which must all ask."""
    self._wait()
    counts = self.table.contents.counts
    numbers = {
      'replay_windows': len(self.table),
      'replay_inserts': counts.inserts,
      'replay_samples': counts.samples,
    }
    sums = everyones(list(numbers.values())).sum(0).astype(int).tolist()
    return dict(zip(numbers, sums, strict=True))

  def close(self) -> None:
    """Ends the thread."""
    self._closed = True
    self.table.close()
    if self._worker is not None:
      self._worker.wait(CLOSE_SECONDS)

  def _order(self, work: Callable[[], None]) -> None:
    while True:
      self.check()
      try:
        return self._orders.put(work, timeout=POLL)
      except queue.Full:
        pass

  def _next(self) -> Draw:
    while True:
      try:
        return self._drawn.get(timeout=POLL)
      except queue.Empty:
        self.check()

  def _wait(self) -> None:
    """Until all that was asked is done."""
    if self._worker is None:
      return
    done = threading.Event()
    self._order(done.set)
    while not done.wait(POLL):
      self.check()

  def check(self) -> None:
    """Raises ReplayFailed if the thread has failed."""
    if self._worker is not None and self._worker.failed:
      raise ReplayFailed(self._worker.failure)

  # --- its own thread

  def _main(self) -> None:
    while not self._closed:
      try:
        self._orders.get(timeout=POLL)()
      except queue.Empty:
        pass
      except tables.Closed:
        return

  def _draw(self, steps: int) -> None:
    found = self.table.sample(self._batch_size)
    rows = weighted(found, self._windows, steps)
    self._drawn.put(Draw(found.key, jax.make_array_from_process_local_data(self._sharding, rows)))

  def _update(self, key: np.ndarray, priority: np.ndarray) -> None:
    if np.isfinite(priority).all():  # else neither is the loss, which ends the run
      self.table.update_priorities(key, priority)
      self._streams.highest = max(self._streams.highest, float(priority.max()))

  # --- checkpoints

  def save(self, path: Path, streams: bool) -> Callable[[], dict[str, Any]]:
    """Takes a snapshot, of references; what writes it, in any thread, and returns `restore`'s `record`.

    It writes a new directory, whole or not at all. Rows are never changed, so the replay may go on meanwhile.

    Args:
      path: of the directory.
      streams: the environments will go on where they are, and so shall their streams.

    Raises, when it is written:
      tables.CheckpointError, OSError: if it can't be.
    """
    self._wait()
    taken = tables.snapshot(self.store)
    history = self._history() if streams else dict
    record = dict(begun=self._begun, highest=self._streams.highest)

    def write() -> dict[str, Any]:
      _write(path, taken, history())
      return dict(record, sha256=_sha256(path))

    return write

  def restore(self, path: Path, record: dict[str, Any]) -> None:
    """Reads what `save` wrote.

    Raises:
      tables.CheckpointError: if it is damaged, or of other settings; nothing has been changed then.
    """
    if not path.is_dir():
      raise tables.CheckpointError(f'{path} is not there')
    if (found := _sha256(path)) != record['sha256']:
      raise tables.CheckpointError(f'{path}: its checksum is {found}, expected {record["sha256"]}')
    self._make_table()
    tables.restore(self.store, path / 'tables')
    try:
      with open_regular(path / 'streams.npz') as file:
        self._relive(read_npz(file))
    except (ValueError, TypeError) as e:
      raise tables.CheckpointError(f'{path} is damaged: {e}') from e
    self._begun, self._streams.highest = record['begun'], record['highest']

  def _history(self) -> Callable[[], dict[str, np.ndarray]]:
    """The rows of all streams that windows may still be made of, read when it is called."""
    found, readers = {}, {}
    for env, stream in self._streams.by_env.items():
      found[f'{env}'] = np.array([stream.serial, stream.timesteps])
      columns = stream.writer.history.items()
      readers[env] = stream.writer.reader({k: c[:] for k, c in columns})

    def rows() -> dict[str, np.ndarray]:
      return found | {f'{env}/{k}': x for env, read in readers.items() for k, x in read().items()}

    return rows

  def _relive(self, history: dict[str, np.ndarray]) -> None:
    for name, numbers in history.items():
      if '/' in name:
        continue
      stream = self._streams.stream(int(name))
      stream.serial, stream.timesteps = numbers.tolist()
      prefix = f'{name}/'
      rows = {k.removeprefix(prefix): x for k, x in history.items() if k.startswith(prefix)}
      stream.writer.extend(rows)


def _write(path: Path, taken: tables.Snapshot, streams: dict[str, np.ndarray]) -> None:
  """Writes a checkpoint to a new directory, whole or not at all."""
  partial = path.with_name(f'.{path.name}.partial')
  for folder in (partial, path):  # what an earlier life left there is no part of any checkpoint
    files.remove(folder)
  files.make_folder(path.parent)
  files.new_folder(partial)
  tables.write(taken, partial / 'tables')
  files.write_arrays(partial / 'streams.npz', streams)
  for written in (partial / 'streams.npz', partial):
    sync(written)
  files.move(partial, path)
  for folder in (path.parent, path.parent.parent):  # the first one made the parent, too
    sync(folder)


def _sha256(folder: Path) -> str:
  """Of all that is in a checkpoint; the tables' manifest has the checksums of their files."""
  digest = hashlib.sha256()
  try:
    for name in ('tables/manifest.json', 'streams.npz'):
      with open_regular(folder / name) as file:
        for part in iter(functools.partial(file.read, 2**20), b''):
          digest.update(part)
  except (OSError, UnreadableFile) as e:
    raise tables.CheckpointError(f'{folder} is damaged: {e}') from e
  return digest.hexdigest()
