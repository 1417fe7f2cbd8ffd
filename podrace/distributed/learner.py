"""A learner whose actors and replay are other processes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from podrace.architectures.protocol import Extra
from podrace.architectures.sebulba import (
  Batch,
  LearningProgram,
  State,
)
from podrace.distributed import replay
from podrace.distributed import replay as service
from podrace.distributed.batches import Feed, Queued, Sampled
from podrace.distributed.net.process_metrics import Measures, resident_mb
from podrace.distributed.publishing import Publishing
from podrace.distributed.run_identity import Addresses, check, run_name
from podrace.distributed.run_tables import episodes_table, replay_table, unrolls_table
from podrace.envs.host.base import HostSpec
from podrace.envs.host.episodes import Totals
from podrace.replay.layout import Layout
from podrace.settings.config import (
  Config,
)
from podrace.topology import data_size, everyones, from_first
from podrace.types import Array

PUBLISH_SECONDS = 0.25  # between versions of the parameters
UNROLLS_PUBLISH_SECONDS = 0.05  # likewise, where no replay makes the policy's lag matter less
log = logging.getLogger('podrace.distributed')


class DistributedSource:
  """Batches of experience that other processes made; a `Source`.

  With replay the `update`-th update has the samples that `samples_per_insert` makes of its steps: the
  service's limiter sees to it that as many steps have been made, and none is counted before it lets
  something be sampled. Without, it has a batch of unrolls.

  Of several learner processes each takes its own rows of every batch from the service. How many batches there are
  depends on the update alone, so it is the same for all.
  """

  snapshots = ()

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
    check(addresses, listens=jax.process_index() == 0)  # is refused before it is compiled for
    self._windows, mesh = learning.windows, learning.mesh
    size = self._windows.buffer.batch_size if self._windows else 0
    if size % data_size(mesh):
      raise ValueError(f'batch_size {size} does not divide over {data_size(mesh)} learner devices')
    self._client: service.Client | None = None
    self._publishing: Publishing | None = None
    self._feed: Feed | None = None
    self._episodes = Totals()
    self._waited = False  # for the first experience, which was logged
    self._lags: list[np.ndarray] = []  # of unrolls, in updates, since the log was last read
    self._steps = 0  # of the environments, so far
    self._taken = 0  # batches of the update at hand
    self._give_up: Callable[[], bool] = lambda: False

  def open(self) -> None:
    first = jax.process_index() == 0
    run = from_first(run_name(self._run_dir) if first else '')
    # Acting processes may wait for the publisher, so it listens before the service is waited for.
    every = PUBLISH_SECONDS if self._windows else UNROLLS_PUBLISH_SECONDS
    self._publishing = Publishing(self._addresses, self._config, every, run, self._program)
    a = self._addresses
    self._client = service.connect(a.replay, a.keys, a.insecure, timeout=None)
    # Here, where a signal ends the wait: a service may go away while it is asked for its tables.
    space, mesh, replay = self._spec.action_space, self._learning.mesh, self._learning.replay
    if isinstance(replay, Layout):
      table = replay_table(self._client, replay, space, run)
      self._source: Sampled | Queued = Sampled(table, replay.windows, mesh)
    else:
      example = self._learning.example
      table = unrolls_table(self._client, self._config.num_envs, example, space, run)
      self._source = Queued(table, example, mesh)
    self._episodes_table = episodes_table(self._client, run) if first else None

  def _program(self) -> dict[str, Any]:
    """What `podrace top` shows besides the acting processes."""
    return dict(steps=self._steps, replay=replay_reports(self._client))

  def start(self, state: State, key: Array, statistics: dict[str, Any]) -> None:
    assert self._publishing is not None, 'start before open'  # which has made the tables
    self._episodes = Totals(**statistics.get('episodes', {}))
    update = int(jax.device_get(state.update))
    self._publishing.publish(update, state.train.params)
    self._count_steps(update)
    self._feed = Feed(self._source, self._episodes_table)

  def publish(self, update: int, params: Any) -> None:
    """Publishes the parameters, if the last version is old enough."""
    assert self._publishing is not None
    self._publishing.publish_now_and_then(update, params)

  def _check(self) -> None:
    """Raises ReplayFailed if a thread has failed."""
    assert self._feed is not None and self._publishing is not None
    self._feed.check()
    self._publishing.check()

  def take(self, update: int, give_up: Callable[[], bool]) -> Batch | None:
    publishing = self._publishing
    assert publishing is not None

    def waits() -> bool:
      publishing.warn_if_alone()
      return give_up() or publishing.failed

    self._give_up, self._steps = waits, update * self._config.steps_per_update
    self._check()
    take = self._take_sample if self._windows else self._take_unrolls
    batch = take(update)
    if batch is None and not give_up():
      self._check()
    return batch

  def _take_sample(self, update: int) -> Batch | None:
    assert self._feed is not None and self._windows is not None
    w = self._windows
    self._count_steps(update)
    if update < w.schedule.ready:  # nothing is due, but the steps must have been made
      if not self._waited:
        self._waited = True
        log.info('waiting until the replay service has %d steps (min_size)', w.buffer.min_size)
      return Batch(None) if self._feed.wait_for_first(self._give_up) else None
    due = int(w.schedule.due(update - w.schedule.ready))
    if not due:
      return Batch(None)
    draw, i = self._feed.take(self._give_up), self._taken
    if draw is None:
      return None
    self._taken = (i + 1) % due
    return Batch(draw.data, draw.key, i, not self._taken)

  def _take_unrolls(self, update: int) -> Batch | None:
    assert self._feed is not None
    draw = self._feed.take(self._give_up)
    if draw is None:
      return None
    self._lags.append(np.maximum(update - draw.key, 0))  # below 0: of a life that was lost
    return Batch((draw.data,))

  def learned(self, batch: Batch, priority: Any) -> None:
    assert self._feed is not None
    if self._windows:
      self._feed.update(batch.key, priority, self._give_up)

  def _count_steps(self, update: int) -> None:
    """Sets how many steps of the environments there are with the update at hand."""
    if isinstance(self._source, Sampled) and (w := self._windows):
      learned = max(update, w.schedule.ready)  # no batch is of less
      self._source.steps = (learned + 1) * w.num_envs * w.unroll_length

  def read(self) -> tuple[Totals, dict[str, Any]]:
    assert self._feed is not None and self._publishing is not None
    episodes, self._episodes = self._episodes + self._feed.episodes(), Totals()
    return episodes, {
      **self._publishing.metrics(),
      'learner_resident_mb': resident_mb(),
      **replay_metrics(replay_reports(self._client), self._source.table.name),
      **({'replay_windows': self._source.table.last_size} if self._windows else {}),
      **self._counts(),
    }

  def _counts(self) -> dict[str, float]:
    """What all learner processes have taken, and how old it was."""
    assert self._feed is not None
    lags, self._lags = np.concatenate([np.zeros(0), *self._lags]), []
    counts = self._feed.counts()
    every = everyones([lags.max(initial=0), lags.sum(), len(lags), *counts.values()])
    lag_sum, unrolls, *sums = every[:, 1:].sum(0).tolist()
    found: dict[str, float] = dict(zip(counts, map(int, sums), strict=True))
    if unrolls:
      found |= dict(policy_lag_mean=lag_sum / unrolls, policy_lag_max=float(every[:, 0].max()))
    return found

  def statistics(self) -> dict[str, Any]:
    if self._feed is not None:
      self._episodes += self._feed.episodes()
    return {'episodes': dataclasses.asdict(self._episodes)}

  def save(self, path: Path) -> Extra | None:
    return None  # the service has checkpoints of its own

  def restore(self, path: Path, record: dict[str, Any] | None) -> None:
    pass

  def finished(self, state: State) -> None:
    """Publishes that the run is complete, and waits for the acting processes to leave."""
    assert self._publishing is not None
    self._publishing.finish(int(jax.device_get(state.update)), state.train.params)

  def close(self) -> None:
    if self._feed:
      self._feed.close()
    if self._client:
      self._client.close()
    if self._publishing:
      self._publishing.close()


Reports = list[dict[str, Any]]


def replay_reports(client: replay.Client | None) -> Reports:
  """The newest reports of all shards that are there; newer ones are asked for, and come later."""
  connections = [] if client is None else client.connections
  for connection in connections:
    connection.ask_report()
  return [report for c in connections if (report := c.report) is not None]


def replay_metrics(reports: Reports, table: str) -> Measures:
  """For the log: of the service's memory, and of the table that is learned from; none if nothing is known."""
  if not reports:
    return {}
  tables = [t for report in reports for t in report['tables'] if t['name'] == table]
  names = ('inserts', 'waiting_inserts', 'waiting_samplers')
  return {
    'replay_resident_mb': sum(report['resident_mb'] for report in reports),
    'replay_mb': sum(report['bytes'] for report in reports) / 1e6,
    **{f'replay_{name}': sum(t[name] for t in tables) for name in names},
  }
