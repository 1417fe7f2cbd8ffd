"""Replay on the host: the windows of `podrace.replay.windows`, in a table of `podrace.tables`.

Each environment has its own stream of rows, which are written once and compressed. Windows are
slices of a stream. So environments may answer in any order, connect and disconnect, and run on any
host. A sampled window has the same contents as in replay on the device.

One thread writes and samples in the order of the requests, so samples do not depend on timing.
The thread draws AHEAD samples ahead of the learner.
"""

from __future__ import annotations

import dataclasses
import functools
import queue
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from podrace import tables
from podrace.errors import UsageError
from podrace.replay.host_checkpoint import UNCHANGEABLE, check_columns, checksum, write_snapshot
from podrace.replay.host_labels import HostLabels, LabelRequest, Learned
from podrace.replay.host_tables import HostTables, make_tables
from podrace.replay.layout import Columns, Layout
from podrace.replay.requests import POLL, Requests
from podrace.replay.windows import Windows
from podrace.system.files.reading import open_regular, read_npz
from podrace.topology import AXIS, data_size, everyones, own_rows, share
from podrace.types import Array, Trajectory

AHEAD = 2  # samples drawn before the priorities of the current sample are known


# --- the learner's table


class Draw(NamedTuple):
  """A sample on the learner's devices, and the table keys of its windows.

  With multiple processes, `key` has only the windows that this process drew.
  """

  key: np.ndarray
  data: Columns


def weighted(samples: tables.Samples, w: Windows, steps: int) -> Columns:
  """Add importance weights to sampled windows.

  Args:
    samples: n windows and their probabilities, from the table.
    w: the settings of the windows.
    steps: environment steps so far.

  Returns:
    The columns of the windows, and `weight` [n] f32. Without priorities, all weights are 1.
  """
  weight = np.ones(len(samples.key), np.float32)
  if w.prioritised:
    weights = w.buffer.weights(samples.table_size, samples.probability, np.float64(steps))
    weight = weights.astype(np.float32)
  return {**samples.data, 'weight': weight}


class HostReplay:
  """One learner's replay: the table, and the thread that writes to it and samples from it.

  The thread adds unrolls, draws samples and sets priorities in the order of the requests.

  With multiple processes, each process keeps the windows of its own environments and draws its
  rows of each batch from them. The probability and weight of a window are relative to the windows
  of its process, as they are relative to one device in replay on the device.

  Args:
    layout: columns of the trajectories.
    mesh: the learner's mesh. A batch is split over its devices.
    seed: seed of sampling.
    labels: computes the targets of the agent, if a stage does. Samples are then labelled windows.

  Owner:
    The creator, which calls `start` and `close`.

  Ends when:
    `close` is called, or a request fails.

  Raises:
    ValueError: the batch size does not divide over the learner devices.
    ReplayFailed: from each method, after the thread has failed.
  """

  def __init__(
    self, layout: Layout, mesh: Mesh, seed: int, labels: HostLabels | None = None
  ) -> None:
    w = layout.windows
    w.buffer.batch_per_device(data_size(mesh))  # or it raises
    self._windows, self._seed, self._layout, self.labels = w, seed, layout, labels
    self._batch_size = share(w.buffer.batch_size)
    self._sharding = NamedSharding(mesh, P(AXIS))
    self._begun: int | None = None  # index of the update in which learning began
    self._at = 0  # index of the current update
    self._steps = 0  # environment steps up to the end of the current update
    self._requests = Requests('replay')
    self._drawn: queue.SimpleQueue[Draw] = queue.SimpleQueue()
    self._use(make_tables(layout, seed, labels))

  def _use(self, made: HostTables) -> None:
    self.sources, self.streams, self.store = made.sources, made.streams, made.store
    self.table = next(iter(made.sources.values()))  # of environments that act, if there are any
    if self.labels:
      self.labels.train = made.train

  @property
  def steps_per_update(self) -> int:
    """Environment steps of an update."""
    return self._windows.num_envs * self._windows.unroll_length

  def start(self) -> None:
    """Start the thread, which then serves the requests."""
    self._requests.start()

  # --- for the learner's thread

  def add(self, trajectories: Sequence[Trajectory], serial: np.ndarray) -> None:
    """Request that the unroll of one actor thread is stored, one part per learner device.

    `serial` has the unroll number of each environment, over all parts. See `Streams.add`.
    """
    each = np.split(serial, len(trajectories))

    def work() -> None:
      for trajectory, of_part in zip(trajectories, each, strict=True):
        self.streams.add(trajectory, of_part)

    self._requests.add(work)

  def times(self, update: int) -> int:
    """Return the number of samples to learn from in an update.

    The numbers are the ones of `Schedule.times`, but learning begins only when every process has
    a window. Call this after all unrolls of the update have been added.
    """
    w = self._windows
    self._at, self._steps = update, (update + 1) * self.steps_per_update
    if self._begun is None:
      if self._steps < w.buffer.min_size:
        return 0
      self.wait()
      if not everyones([len(table) for table in self.sources.values()]).all():
        return 0
      self._begun = update
    return self.due(update)

  def due(self, update: int) -> int:
    """Return the result of `times` for an update, as far as is known now."""
    return 0 if self._begun is None else int(self._windows.schedule.due(update - self._begun))

  def samples(self, count: int, prepare: Callable[[int], None] | None = None) -> Iterator[Draw]:
    """Yield `count` samples of the current update, of which AHEAD may already be drawn.

    Call `update` with the priorities of each sample before the next sample is taken. With
    `prepare`, no sample is drawn ahead, and `prepare(i)` is called before the i-th is drawn.
    """
    draw = functools.partial(self._draw, self._at, self._steps)
    requested = 0
    for i in range(count):
      while requested < min(count, i + (1 if prepare else AHEAD)):
        if prepare:
          prepare(requested)
        self._requests.add(draw)
        requested += 1
      yield self._next()

  def label(self, request: LabelRequest) -> None:
    """Request a batch of labels."""
    assert self.labels is not None
    self._requests.add(functools.partial(self.labels.label, self.sources, request))

  def update(self, key: np.ndarray, priority: Array) -> None:
    """Request that new priorities of a batch are set.

    Args:
      key: table keys of the windows that this process drew.
      priority: priorities of the whole batch. The device may still be computing them.
    """
    if self._windows.prioritised:
      self._requests.add(lambda: self._update(key, own_rows(priority).astype(np.float64)))

  def metrics(self) -> dict[str, float]:
    """Return the counts of windows, inserts and samples of all processes, which all call this."""
    self.wait()
    counts = [table.contents.counts for table in self.sources.values()]
    numbers: dict[str, float] = {
      'replay_windows': sum(map(len, self.sources.values())),
      'replay_inserts': sum(c.inserts for c in counts),
      'replay_samples': sum(c.samples for c in counts),
    }
    sums = everyones(list(numbers.values())).sum(0).astype(int).tolist()
    numbers = dict(zip(numbers, sums, strict=True))
    return numbers | self.labels.metrics() if self.labels else numbers

  def close(self) -> None:
    """End the thread, and wait for it a few seconds at most."""
    for table in self.store.tables.values():
      table.close()
    self._requests.close()

  def _next(self) -> Draw:
    while True:
      try:
        return self._drawn.get(timeout=POLL)
      except queue.Empty:
        self.check()

  def check(self) -> None:
    """Raise ReplayFailed if the thread has failed."""
    self._requests.check()

  def wait(self) -> None:
    """Wait until the thread has served all requests."""
    self._requests.wait()

  # --- for the replay thread

  def _draw(self, update: int, steps: int) -> None:
    if self.labels:
      key, rows = self.labels.draw(update)
    else:
      samples = self.table.sample(self._batch_size)
      key, rows = samples.key, weighted(samples, self._windows, steps)
    self._drawn.put(Draw(key, jax.make_array_from_process_local_data(self._sharding, rows)))

  def _update(self, key: np.ndarray, priority: np.ndarray) -> None:
    if np.isfinite(priority).all():  # otherwise the loss is not finite either, and the run ends
      self.table.update_priorities(key, priority)
      self.streams.highest = max(self.streams.highest, float(priority.max()))

  # --- checkpoints

  def save(self, path: Path, streams: bool) -> Callable[[], dict[str, Any]]:
    """Take a snapshot, which a returned function writes.

    The snapshot holds references. Rows never change, so replay may continue during the writing.

    Args:
      path: the new directory.
      streams: whether to save the streams, because the environments will resume where they are.

    Returns:
      A function for any thread. It writes the whole directory or nothing, and returns the
      `record` for `restore`. It raises tables.CheckpointError or OSError if writing fails.
    """
    self.wait()
    taken = tables.snapshot(self.store)
    history = self.streams.snapshot() if streams else dict
    record: dict[str, Any] = dict(begun=self._begun, highest=self.streams.highest)
    if self.labels:
      record['labels'] = dataclasses.asdict(self.labels.learned)

    def write() -> dict[str, Any]:
      write_snapshot(path, taken, history())
      return dict(record, sha256=checksum(path))

    return write

  def restore(self, path: Path, record: dict[str, Any], streams: bool = True) -> None:
    """Restore a snapshot that `save` wrote.

    Args:
      path: the directory of the snapshot.
      record: the result of the function that wrote the snapshot.
      streams: whether the environments resume where they were.

    Raises:
      tables.CheckpointError: the directory is missing or damaged.
      UsageError: its tables have other settings or columns.

    After either error replay is unchanged.
    """
    if not path.is_dir():
      raise tables.CheckpointError(f'{path} is not there')
    if (sha256 := checksum(path)) != record['sha256']:
      raise tables.CheckpointError(f'{path}: its checksum is {sha256}, expected {record["sha256"]}')
    made = make_tables(self._layout, self._seed, self.labels)
    try:
      tables.restore(made.store, path / 'tables')
    except tables.OtherTables as e:
      raise UsageError(f'{e}, which {UNCHANGEABLE}') from e
    for table in made.sources.values():
      check_columns(path, self._layout, table)
    try:
      if streams:
        with open_regular(path / 'streams.npz') as file:
          made.streams.restore(read_npz(file))
    except (ValueError, TypeError) as e:
      raise tables.CheckpointError(f'{path} is damaged: {e}') from e
    made.streams.highest = record['highest']
    self._begun = record['begun']
    self._use(made)
    if self.labels:
      self.labels.go_on(Learned(**record['labels']))
