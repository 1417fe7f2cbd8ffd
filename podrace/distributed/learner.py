"""A learner with actors and replay in separate processes."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from podrace.architectures.protocol import Part
from podrace.architectures.sebulba import Batch, LearningProgram, State
from podrace.distributed import replay as service
from podrace.distributed.batches import Feed, Labelled, Queued, Sampled
from podrace.distributed.net.process_metrics import Measures, resident_mb
from podrace.distributed.publishing import Publishing
from podrace.distributed.run_identity import HIGHEST, Addresses, check, run_name
from podrace.distributed.run_tables import (
  check_sample,
  episodes_table,
  label_contents,
  replay_table,
  train_table,
  unroll_contents,
  unrolls_table,
  window_contents,
)
from podrace.envs.host.base import HostSpec
from podrace.envs.host.episodes import Totals
from podrace.hooks import labels_elsewhere
from podrace.replay.labels import OFFLINE, TABLE, TRAIN
from podrace.replay.layout import Layout
from podrace.settings.config import Config
from podrace.settings.validation import option_of_replay
from podrace.topology import everyones, from_first, per_device
from podrace.types import Array

PUBLISH_SECONDS = 0.25  # between versions of the parameters
UNROLLS_PUBLISH_SECONDS = 0.05  # likewise without replay, which makes the policy's lag matter less
WAIT_SECONDS = 10.0  # for experience in one call: between calls the run looks after itself
log = logging.getLogger('podrace.distributed')


class DistributedSource:
  """A `Source` of experience that acting processes made.

  With replay, an update has the number of samples that `samples_per_insert` makes of its steps. The
  limiter of the service ensures that these steps have been made. Without replay, an update has a
  batch of unrolls.

  Each of several learner processes takes its own rows of every batch from the service. The number
  of batches depends on the update alone, so it is the same for all.

  Owner: the run, which calls `open`, `start` and `close`.
  Raises: ReplayFailed from `take`, if a thread has failed.

  Args:
    learning: the program that learns.
    spec: the environments, for the space of their actions.
    addresses: the addresses of the run's processes.
    config: the run's config.
    run_dir: the run's directory, which has its name.
  """

  snapshots = ()
  saved_replay = None  # the service has checkpoints of its own

  def __init__(
    self,
    learning: LearningProgram,
    spec: HostSpec,
    addresses: Addresses,
    config: Config,
    run_dir: Path,
  ) -> None:
    self._learning, self._spec, self._addresses, self._config = learning, spec, addresses, config
    self._run_dir = run_dir
    check(addresses, listens=jax.process_index() == 0)  # before programs are compiled
    self._windows, mesh = learning.windows, learning.mesh
    size = self._windows.buffer.batch_size if self._windows else 0
    self._labelled = labels_elsewhere(learning.agent)
    name = option_of_replay(learning.agent, 'batch_size') if size else '--num-envs'
    per_device(mesh, size or config.num_envs, name.removeprefix('--'))
    check_sample(name, size or config.num_envs, self._contents())
    self._client: service.ReplayClient | None = None
    self._publishing: Publishing | None = None
    self._feed: Feed | None = None
    self._episodes = Totals()
    self.parts = {'statistics': Part(self._save_statistics, self._restore_statistics)}
    self._waited = False  # for the first experience, which is logged once
    self._lags: list[np.ndarray] = []  # of unrolls or labels, in updates, since the last `read`
    self._steps = 0  # environment steps so far
    self._taken = 0  # batches of the update at hand
    self._first_highest = 1.0  # priority, when this process begins
    self._cancelled: Callable[[], bool] = lambda: False

  def _contents(self) -> list[Any]:
    """Return the columns of the items of a batch."""
    replay, space = self._learning.replay, self._spec.action_space
    if not isinstance(replay, Layout):
      return unroll_contents(self._learning.example, space)
    return label_contents(replay, space) if self._labelled else window_contents(replay, space)

  def open(self) -> None:
    """Listen for acting processes, and connect to the replay service."""
    first = jax.process_index() == 0
    run = from_first(run_name(self._run_dir) if first else '')
    # Acting processes may wait for the publisher, so it listens before the service is waited for.
    every = PUBLISH_SECONDS if self._windows else UNROLLS_PUBLISH_SECONDS
    self._publishing = Publishing(self._addresses, self._config, every, run, self._program)
    a = self._addresses
    self._client = service.connect(a.replay, a.keys, a.insecure, timeout=None)
    # Here a signal ends the wait: a service may go away while its tables are requested.
    space, mesh, replay = self._spec.action_space, self._learning.mesh, self._learning.replay
    if isinstance(replay, Layout) and self._labelled:
      table = train_table(self._client, replay, space, run)
      self._source: Sampled | Queued | Labelled = Labelled(table, replay.windows, mesh)
    elif isinstance(replay, Layout):
      table = replay_table(self._client, replay, space, run)
      self._source = Sampled(table, replay.windows, mesh)
    else:
      example = self._learning.example
      table = unrolls_table(self._client, self._config.num_envs, example, space, run)
      self._source = Queued(table, example, mesh)
    self._episodes_table = episodes_table(self._client, run) if first else None

  def _program(self) -> dict[str, Any]:
    """Return the part of `podrace top` that is not about acting processes."""
    missing = self._publishing.missing if self._publishing and self._labelled else None
    return {
      'steps': self._steps,
      'replay': replay_reports(self._client),
      **({} if missing is None else {'missing': missing}),
    }

  def start(self, state: State, key: Array) -> None:
    """Publish the parameters, and start to read batches."""
    assert self._publishing is not None, 'start before open'  # which makes the tables
    update = int(jax.device_get(state.update))
    self._publishing.publish(update, state.train.params, *self._highest())
    self._count_steps(update)
    self._feed = Feed(self._source, self._episodes_table, self._first_highest)

  def _highest(self) -> list[tuple[str, np.ndarray]]:
    """Return the highest priority so far, which acting processes give to new windows."""
    if not (self._windows and self._windows.prioritised):
      return []
    highest = self._feed.highest if self._feed else self._first_highest
    return [(HIGHEST, np.array(highest, np.float64))]

  def publish(self, update: int, params: Any) -> None:
    """Publish the parameters, if the last version is old enough."""
    assert self._publishing is not None
    self._publishing.publish_now_and_then(update, params, *self._highest())

  def _check(self) -> None:
    """Raise ReplayFailed if a thread has failed."""
    assert self._feed is not None and self._publishing is not None
    self._feed.check()
    self._publishing.check()

  def take(self, update: int, give_up: Callable[[], bool]) -> Batch | None:
    """Return the next batch of the `update`-th update.

    Returns None if `give_up()` becomes true before. A single process returns None also if an update
    has not begun after WAIT_SECONDS. Several must make equal updates, so they wait on.
    """
    publishing = self._publishing
    assert publishing is not None

    def cancelled() -> bool:
      publishing.warn_if_alone()
      return give_up() or publishing.failed

    self._cancelled, self._steps = cancelled, update * self._config.steps_per_update
    self._check()
    bounded = jax.process_count() == 1 and not self._taken
    deadline = time.monotonic() + WAIT_SECONDS if bounded else math.inf
    take = self._take_sample if self._windows else self._take_unrolls
    batch = take(update, lambda: cancelled() or time.monotonic() > deadline)
    if batch is None and not give_up():
      self._check()
    return batch

  def _take_sample(self, update: int, cancelled: Callable[[], bool]) -> Batch | None:
    assert self._feed is not None and self._windows is not None
    w = self._windows
    self._count_steps(update)
    if update < w.schedule.ready:  # no batch is due, but the steps must have been made
      if not self._waited:
        self._waited = True
        log.info('waiting until the replay service has %d steps (min_size)', w.buffer.min_size)
      return Batch(None) if self._feed.wait_for_first(cancelled) else None
    due = int(w.schedule.due(update - w.schedule.ready))
    if not due:
      return Batch(None)
    draw, i = self._feed.take(cancelled), self._taken
    if draw is None:
      return None
    self._taken = (i + 1) % due
    if self._labelled:
      self._lags.append(np.maximum(update - draw.key, 0))
    return Batch(draw.data, draw.key, i, not self._taken)

  def _take_unrolls(self, update: int, cancelled: Callable[[], bool]) -> Batch | None:
    assert self._feed is not None
    draw = self._feed.take(cancelled)
    if draw is None:
      return None
    # Below 0 after a restart from an older checkpoint: the unroll is of the life that was lost.
    self._lags.append(np.maximum(update - draw.key, 0))
    return Batch((draw.data,))

  def learned(self, batch: Batch, priority: Any, params: Any) -> None:
    """Set the priorities of a batch that was learned from."""
    assert self._feed is not None
    if self._windows:
      self._feed.update(batch.key, priority, self._cancelled)

  def _count_steps(self, update: int) -> None:
    """Set the number of environment steps with the update at hand."""
    if isinstance(self._source, Sampled) and (w := self._windows):
      learned = max(update, w.schedule.ready)  # before that there are no batches
      self._source.steps = (learned + 1) * w.num_envs * w.unroll_length

  def read(self) -> tuple[Totals, dict[str, Any]]:
    """Return the totals of episodes, and the metrics, since the last call."""
    assert self._feed is not None and self._publishing is not None
    episodes, self._episodes = self._episodes + self._feed.episodes(), Totals()
    reports = replay_reports(self._client)
    if self._labelled:
      of_replay = label_metrics(reports)
    else:
      of_replay = replay_metrics(reports, self._source.table.name)
      of_replay |= {'replay_windows': self._source.table.last_size} if self._windows else {}
    return episodes, {
      **self._publishing.metrics(),
      'learner_resident_mb': resident_mb(),
      **of_replay,
      **self._counts(),
    }

  def _counts(self) -> dict[str, float]:
    """Return the counts of batches of all learner processes, and the lag of policy or labels."""
    assert self._feed is not None
    lags, self._lags = np.concatenate([np.zeros(0), *self._lags]), []
    counts = self._feed.counts()
    online = self._source.read() if isinstance(self._source, Labelled) else (0, 0)
    every = everyones(
      [lags.max(initial=0), self._feed.highest, lags.sum(), len(lags), *online, *counts.values()]
    )
    self._feed.highest = max(self._feed.highest, float(every[:, 1].max()))
    lag_sum, unrolls, acted, learned, *sums = every[:, 2:].sum(0).tolist()
    metrics: dict[str, float] = dict(zip(counts, map(int, sums), strict=True))
    if learned:
      metrics['labels_online'] = acted / learned
    if unrolls:
      name = 'labels_age' if self._labelled else 'policy_lag'
      metrics |= {f'{name}_mean': lag_sum / unrolls, f'{name}_max': float(every[:, 0].max())}
    return metrics

  def _save_statistics(self) -> dict[str, Any]:
    if self._feed is not None:
      self._episodes += self._feed.episodes()
    highest = self._feed.highest if self._feed else self._first_highest
    return {'episodes': dataclasses.asdict(self._episodes), 'highest': highest}

  def _restore_statistics(self, saved: dict[str, Any]) -> None:
    self._episodes = Totals(**saved.get('episodes', {}))
    self._first_highest = saved.get('highest', 1.0)

  def finish(self, state: State) -> None:
    """Publish that the run is complete, and wait for the acting processes to leave."""
    assert self._publishing is not None
    self._publishing.finish(int(jax.device_get(state.update)), state.train.params)

  def close(self) -> None:
    """End the threads and the connections."""
    with contextlib.ExitStack() as stack:  # the last is closed first
      for part in (self._publishing, self._client, self._feed):
        if part:
          stack.callback(part.close)


Reports = list[dict[str, Any]]


def replay_reports(client: service.ReplayClient | None) -> Reports:
  """Return the newest reports of all connected shards, and request newer ones, which come later."""
  connections = [] if client is None else client.connections
  for connection in connections:
    connection.ask_report()
  return [report for c in connections if (report := c.report) is not None]


def replay_metrics(reports: Reports, *tables: str) -> Measures:
  """Return metrics of the service's memory and of `tables`; none without reports."""
  if not reports:
    return {}
  names = ('inserts', 'waiting_inserts', 'waiting_samplers')
  return {
    'replay_resident_mb': sum(report['resident_mb'] for report in reports),
    'replay_mb': sum(report['bytes'] for report in reports) / 1e6,
    **{f'replay_{name}': _total(reports, tables, name) for name in names},
  }


def label_metrics(reports: Reports) -> Measures:
  """Return metrics of the service if a stage labels windows; none without reports."""
  if not reports:
    return {}
  sources = TABLE, OFFLINE
  made, learned, waiting = (_total(reports, (TRAIN,), k) for k in ('inserts', 'samples', 'size'))
  return {
    **replay_metrics(reports, *sources),
    'replay_windows': _total(reports, sources, 'size'),
    'replay_samples': _total(reports, sources, 'samples'),
    'labels_waiting': waiting,
    'labels_per_example': made / max(learned, 1),
  }


def _total(reports: Reports, tables: tuple[str, ...], name: str) -> int:
  """Return the sum of a number over `tables` of all shards."""
  return sum(t[name] for report in reports for t in report['tables'] if t['name'] in tables)
