"""`podrace reanalyse`: a process that refreshes the targets in replay with newer parameters.

Reanalyse is by Schrittwieser et al. 2021 (arXiv 2104.06294). Windows are read from the replay
service and searched again with the learner's newest parameters. Their targets are written back by
key, and the learner samples them like any window. Reading is ahead of the searches, and writing is
behind them, so network and device work at the same time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrace import tables
from podrace.architectures.sebulba import example_trajectory
from podrace.distributed import learner_client, replay
from podrace.distributed.learner_client import Newest, Patience
from podrace.distributed.net.process_metrics import Meter
from podrace.distributed.parameters import REANALYSING
from podrace.distributed.replay.replay_messages import MOST_ITEMS
from podrace.distributed.run_identity import COMMON, Addresses
from podrace.distributed.run_tables import replay_table
from podrace.errors import UsageError
from podrace.hooks import can_refresh, searches
from podrace.replay.layout import Columns, Layout, named
from podrace.settings.agents import agent_name
from podrace.settings.config import Config
from podrace.settings.resolved import Resolved, resolve
from podrace.system.scheduling import give_way
from podrace.system.threads import Worker
from podrace.types import Array

PREFETCH = 2  # batches that are requested ahead of time
LOG_EVERY = 60.0  # seconds between messages about the rate
log = logging.getLogger('podrace.distributed')


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of `podrace reanalyse`, besides the run's config.

  Attributes:
    addresses: the addresses of the run's processes.
    batch_size: windows that are refreshed together. 0: the learner's batch size.
    patience: the time to work without the learner.
  """

  addresses: Addresses
  batch_size: int = 0
  patience: Patience = Patience()

  def __post_init__(self) -> None:
    if self.batch_size > MOST_ITEMS:
      raise UsageError(f'--batch-size must be at most {MOST_ITEMS}, not {self.batch_size}')


def check_options(config: Config, args: Sequence[str]) -> None:
  """Raise UsageError for options of `train` in `args` on which this process does not depend."""
  learner_client.check_options('reanalyse', config, args, COMMON)


def check_agent(agent: Any) -> None:
  """Raise UsageError for an agent without targets that can be refreshed."""
  if not can_refresh(agent):
    raise UsageError(
      f'{agent_name(agent)} has no targets that can be refreshed; podrace reanalyse is for agents '
      'with replay that have a function `refresh`, such as muzero'
    )


def reanalyse(config: Config, options: Options) -> int:
  """Work until the end of the run, a signal, or the end of `patience`; returns the exit code.

  Raises:
    UsageError: for an impossible config, an agent without targets to refresh, or if the learner has
      another run.
  """
  give_way()  # the learner needs its cores more than newer targets; before JAX starts its threads
  check_agent(config.agent)
  resolved = resolve(learner_client.with_fixed(config))
  learner_client.check_addresses(options.addresses)
  return learner_client.run_to_end(lambda: Reanalysing(resolved, options).run())


class Reanalysing:
  """A reanalysing process."""

  def __init__(self, resolved: Resolved, options: Options) -> None:
    config, agent, spec = resolved.config, resolved.agent, resolved.env
    windows = resolved.replay.windows
    assert windows is not None  # as `check_agent` has accepted it
    example = example_trajectory(agent, spec, config.num_envs, config.unroll_length)
    self._layout, self._space = Layout(windows, example), spec.action_space
    self._batch_size = options.batch_size or windows.buffer.batch_size
    self._rate = Rate(searches(agent, windows.length))
    self._refresh: Any = jax.jit(Refresh(agent, self._layout))
    self._key = jax.random.key(int.from_bytes(os.urandom(4), 'little'))
    self._addresses, self._give_up = options.addresses, options.patience.give_up or None
    measure = self._rate.meter.read
    self._newest = Newest(
      options.addresses, config, agent, options.patience, REANALYSING, measure=measure
    )
    self._params: Any = None

  def run(self) -> None:
    """Work until the run is complete, or something fails. Both raise."""
    with contextlib.ExitStack() as stack:
      stack.callback(self._newest.close)
      self._params = self._newest.get()
      a = self._addresses
      log.info('connecting to the replay service at %s', ', '.join(a.replay))
      client = replay.connect(a.replay, a.keys, a.insecure, timeout=self._give_up)
      stack.callback(client.close)
      table = replay_table(client, self._layout, self._space, self._newest.run)
      self._compile()
      watcher = Worker('parameters', self._watch, lambda: self._hang_up(client))
      stack.callback(lambda: log.info('%s', self._rate))
      log.info('reanalysing %d windows at a time', self._batch_size)
      try:
        self._work(table, Targets(client, table, self._layout.windows.length), watcher)
      except tables.Closed:
        watcher.check()  # its failure closed the client
        raise

  def _compile(self) -> None:
    """Compile before the first windows arrive, which would else be old when written back."""
    shapes = {
      k: jax.ShapeDtypeStruct((self._batch_size, *x.shape[1:]), x.dtype)
      for k, x in self._layout.batch().items()
      if k != 'weight'
    }
    self._refresh = self._refresh.lower(self._params, shapes, self._key).compile()

  def _work(self, table: Any, targets: Targets, watcher: Worker) -> None:
    """Refresh batches, and write each while the next one is searched."""
    before: tuple[np.ndarray, Columns] | None = None
    with table.sampler(self._batch_size, PREFETCH, peek=True) as samples:
      while True:
        watcher.check()
        self._newest.wait_while_stale()
        sample = next(samples)
        self._key, key = jax.random.split(self._key)
        fresh = self._refresh(self._params, sample.data, key)
        if before is not None:
          targets.write(*before)
          self._rate.add(len(before[0]))
        before = sample.key, fresh

  def _watch(self) -> None:
    def take(params: Any) -> None:
      self._params = params

    self._newest.follow(take)

  def _hang_up(self, client: replay.ReplayClient) -> None:
    try:
      client.close()
    finally:
      self._newest.close()


class Refresh:
  """A function, to be compiled, that returns the columns of items which an agent refreshes."""

  def __init__(self, agent: Any, layout: Layout) -> None:
    self._agent, self._layout = agent, layout

  def __call__(self, params: Any, data: Columns, key: Array) -> Columns:
    """Return the refreshed columns [n, L, ...] of items with columns `data` [n, L, ...]."""
    window = self._layout.trajectory(data)
    fresh = self._agent.refresh(params, window, key)
    old, new = named(window.outputs), named(fresh.outputs)
    changed = {k: x for k, x in new.items() if x is not old[k]}  # the rest are the same tracers
    return {k: jnp.moveaxis(x, 1, 0) for k, x in changed.items()}


class Targets:
  """Writes columns of windows back to the items that they were sampled from.

  Args:
    client: the client of the service.
    table: the table of the items.
    length: the number of rows of each column of a window.
  """

  def __init__(self, client: replay.ReplayClient, table: Any, length: int) -> None:
    self._table, self._length = table, length
    self._writers = client.writers(history=length)

  def write(self, keys: np.ndarray, columns: Columns) -> None:
    """Amend the items of keys [n] with columns [n, L, ...]; waits until these are computed."""
    rows = {k: np.asarray(x) for k, x in columns.items()}
    for i, key in enumerate(keys.tolist()):
      writer = self._writers[self._table.shard_of(key)]
      writer.extend({k: x[i] for k, x in rows.items()})
      slices = {k: column[-self._length :] for k, column in writer.history.items()}
      writer.amend_item(self._table, key, slices)


class Rate:
  """Counts windows, and logs their rate every LOG_EVERY seconds.

  Args:
    searches: the number of searches of each window.

  Attributes:
    meter: the rates since it was last read.
  """

  def __init__(self, searches: int) -> None:
    self._searches, self._windows = searches, 0
    self.meter = Meter()
    self._first = 0  # windows of the first batch, at which the clock begins
    self._begun = self._logged = time.monotonic()

  def add(self, windows: int) -> None:
    """Count windows that have been written."""
    if not self._windows:
      self._begun, self._first = time.monotonic(), windows
    self._windows += windows
    self.meter.add(windows_per_s=windows, searches_per_s=windows * self._searches)
    if time.monotonic() - self._logged > LOG_EVERY:
      self._logged = time.monotonic()
      log.info('%s', self)

  def __str__(self) -> str:
    rate = (self._windows - self._first) / max(time.monotonic() - self._begun, 1e-3)
    return (
      f'reanalysed {self._windows:,} windows: {rate:,.1f} windows/s, '
      f'{rate * self._searches:,.0f} searches/s'
    )
