"""`podrace reanalyse`: a process that refreshes the targets in replay, by newer parameters.

Reanalyse (Schrittwieser et al. 2021, arXiv 2104.06294) in processes of its own. Windows are read from the replay
service, searched anew with the learner's newest parameters, and their targets are written back by key. The
learner samples them as any others. Reading is ahead of the searches, and writing is behind them, so that the network
and the device work at the same time.
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
from podrace.distributed.parameters.publisher import REANALYSING
from podrace.distributed.replay.replay_messages import MOST_ITEMS
from podrace.distributed.run_identity import COMMON, Addresses
from podrace.distributed.run_tables import replay_table
from podrace.envs.host import base as host
from podrace.errors import UsageError
from podrace.hooks import can_refresh, memory, searches
from podrace.replay.layout import Columns, Layout, named
from podrace.settings.agents import agent_name, bind_run
from podrace.settings.config import Config
from podrace.settings.validation import validate
from podrace.system.scheduling import give_way
from podrace.system.threads import Worker
from podrace.types import Array

PREFETCH = 2  # batches that are asked for ahead of time
LOG_EVERY = 60.0  # seconds between lines about the rate
log = logging.getLogger('podrace.distributed')


@dataclasses.dataclass(frozen=True)
class Options:
  """Of `podrace reanalyse`, besides the run's config."""

  addresses: Addresses
  batch_size: int = 0  # windows that are refreshed together; 0: as many as the learner's batch has
  patience: Patience = Patience()

  def __post_init__(self) -> None:
    if self.batch_size > MOST_ITEMS:
      raise UsageError(f'--batch-size must be at most {MOST_ITEMS}, not {self.batch_size}')


def check_options(config: Config, args: Sequence[str]) -> None:
  """Raises UsageError for options of `train` in `args` that this process would not heed."""
  learner_client.check_options('reanalyse', config, args, COMMON)


def check_agent(agent: Any) -> None:
  """Raises UsageError for an agent whose targets can't be refreshed."""
  if not can_refresh(agent):
    raise UsageError(
      f'{agent_name(agent)} has no targets that can be refreshed; podrace reanalyse is for agents with replay that '
      'have a function `refresh`, such as muzero'
    )


def reanalyse(config: Config, options: Options) -> int:
  """`podrace reanalyse`: works until the run is complete, a signal comes or it gives up; the exit code.

  Raises:
    UsageError: if the config can't be; if the agent has nothing to refresh; if the learner's run is another one.
  """
  give_way()  # the learner needs its cores more than newer targets; before JAX starts its threads
  check_agent(config.agent)
  config = learner_client.fixed(config)
  validate(config)
  learner_client.check_addresses(options.addresses)
  return learner_client.until_the_end(lambda: Reanalysing(config, options).run())


class Reanalysing:
  """One reanalysing process."""

  def __init__(self, config: Config, options: Options) -> None:
    spec = host.make(config.env)
    agent = bind_run(config, spec)
    windows = memory(agent, spec, config.num_envs, config.unroll_length).windows
    assert windows is not None  # else it would not have been refreshed
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
    """Works until the run is complete, or something is wrong; either ends with an exception."""
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
        watcher.check()  # it closed the client
        raise

  def _compile(self) -> None:
    """Before the first windows are there, so that none of them is old when it comes back."""
    shapes = {
      k: jax.ShapeDtypeStruct((self._batch_size, *x.shape[1:]), x.dtype)
      for k, x in self._layout.batch().items()
      if k != 'weight'
    }
    self._refresh = self._refresh.lower(self._params, shapes, self._key).compile()

  def _work(self, table: Any, targets: Targets, watcher: Worker) -> None:
    """Refreshes batch after batch, and writes each while the next one is being searched."""
    before: tuple[np.ndarray, Columns] | None = None
    with table.sampler(self._batch_size, PREFETCH, peek=True) as samples:
      while True:
        watcher.check()
        self._newest.wait_while_stale()
        found = next(samples)
        self._key, key = jax.random.split(self._key)
        fresh = self._refresh(self._params, found.data, key)
        if before is not None:
          targets.write(*before)
          self._rate.add(len(before[0]))
        before = found.key, fresh

  def _watch(self) -> None:
    def take(params: Any) -> None:
      self._params = params

    self._newest.follow(take)

  def _hang_up(self, client: replay.Client) -> None:
    try:
      client.close()
    finally:
      self._newest.close()


class Refresh:
  """The columns that an agent refreshes, of a table's items [n, L, ...]; to be compiled."""

  def __init__(self, agent: Any, layout: Layout) -> None:
    self._agent, self._layout = agent, layout

  def __call__(self, params: Any, data: Columns, key: Array) -> Columns:
    window = self._layout.trajectory(data)
    fresh = self._agent.refresh(params, window, key)
    old, new = named(window.outputs), named(fresh.outputs)
    changed = {k: x for k, x in new.items() if x is not old[k]}  # the others are the same tracers
    return {k: jnp.moveaxis(x, 1, 0) for k, x in changed.items()}


class Targets:
  """Writes columns of windows to where they were sampled from.

  Args:
    client: of the service.
    table: has the items.
    length: rows of each column of a window.
  """

  def __init__(self, client: replay.Client, table: Any, length: int) -> None:
    self._table, self._length = table, length
    self._writers = client.writers(history=length)

  def write(self, keys: np.ndarray, columns: Columns) -> None:
    """Amends the items of keys [n] with columns [n, L, ...]; waits until they are computed."""
    rows = {k: np.asarray(x) for k, x in columns.items()}
    for i, key in enumerate(keys.tolist()):
      writer = self._writers[self._table.shard_of(key)]
      writer.extend({k: x[i] for k, x in rows.items()})
      slices = {k: column[-self._length :] for k, column in writer.history.items()}
      writer.amend_item(self._table, key, slices)


class Rate:
  """Counts windows, and logs now and then how many there are in a second.

  Args:
    searches: of each window.

  Attributes:
    meter: what there was since it was last read.
  """

  def __init__(self, searches: int) -> None:
    self._searches, self._windows = searches, 0
    self.meter = Meter()
    self._first = 0  # windows of the first batch, with which the clock begins
    self._begun = self._logged = time.monotonic()

  def add(self, windows: int) -> None:
    """So many more have been written."""
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
