"""A stage of a run: a process that reads windows, computes their targets, and writes them.

Windows come from a source, which reads a replay service. `agent.refresh` computes their targets
with the learner's newest parameters, on this process's device. A sink writes them to the service.
Reading is ahead of the computation, and writing is behind it, so network and device work at the
same time. `podrace reanalyse` and `podrace label` are stages with other sources and sinks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from podrace.architectures.sebulba import example_trajectory
from podrace.distributed import learner_client, replay
from podrace.distributed.learner_client import Ending, Newest, Patience
from podrace.distributed.net.process_metrics import Meter
from podrace.distributed.run_identity import COMMON, OF_LOG, Addresses
from podrace.distributed.run_tables import check_sample, window_contents
from podrace.hooks import searches
from podrace.replay.layout import Columns, Layout
from podrace.replay.refresh import Refresh
from podrace.settings.config import Config
from podrace.settings.resolved import Resolved, resolve
from podrace.settings.validation import option_of_replay
from podrace.system.scheduling import give_way
from podrace.system.threads import Worker

PREFETCH = 2  # batches that are requested ahead of time
LOG_EVERY = 60.0  # seconds between messages about the rate
log = logging.getLogger('podrace.distributed')


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of a stage, besides the run's config.

  Attributes:
    addresses: the addresses of the run's processes.
    batch_size: windows that are refreshed together. 0: the learner's batch size.
    patience: the time to work without the learner.
  """

  addresses: Addresses
  batch_size: int = 0
  patience: Patience = Patience()


class Batch(NamedTuple):
  """Windows from a source."""

  key: Any  # [n] keys of the items that they were read from
  data: Columns  # [n, ...]
  logged: Any = None  # [n] bool, whether a window is one of the log; None: not known


class Sink(Protocol):
  """Writes refreshed windows."""

  def write(self, batch: Batch, fresh: Columns, version: int) -> None:
    """Write windows with columns `fresh` [n, L, ...] by parameters `version`; waits for them."""
    ...


class Place(NamedTuple):
  """The place where a stage works: connections and sizes, for its source and its sink."""

  client: replay.ReplayClient
  layout: Layout
  space: Any  # of the actions
  run: str
  batch_size: int
  steps: Callable[[], int]  # the environment steps of the run so far

  @property
  def shapes(self) -> Columns:
    """The shapes of the columns of a batch of windows."""
    return {
      k: jax.ShapeDtypeStruct((self.batch_size, *x.shape[1:]), x.dtype)
      for k, x in self.layout.batch().items()
      if k != 'weight'
    }


class Duty(NamedTuple):
  """The duty of a stage: its source, its sink, and its words.

  Attributes:
    role: the name of the command, and the role under which the learner counts the process.
    check: raises UsageError for an agent that it is not for.
    unit: the thing that it counts, for the names of its metrics.
    done, doing: the verb in messages.
    searches: whether the searches in each window are counted as well.
    connect: returns the source, which yields batches while it is entered, and the sink.
  """

  role: str
  check: Callable[[Any], None]
  unit: str
  done: str
  doing: str
  searches: bool
  connect: Callable[[Place], tuple[contextlib.AbstractContextManager[Iterator[Batch]], Sink]]


def run(duty: Duty, config: Config, args: Sequence[str], options: Options) -> int:
  """Work until the end of the run, a signal, or the end of `patience`; returns the exit code.

  Raises:
    UsageError: for an impossible config, an agent that the stage is not for, options of `train` in
      `args` on which it does not depend, or if the learner has another run.
  """
  learner_client.check_options(duty.role, config, args, (*COMMON, *OF_LOG))
  duty.check(config.agent)
  give_way()  # the learner needs its cores more than newer targets; before JAX starts its threads
  resolved = resolve(learner_client.with_fixed(config))
  learner_client.check_addresses(options.addresses)

  def work(ending: Ending) -> None:
    stage = Stage(duty, resolved, options)
    ending.calls(stage.newest.close)
    stage.run()

  return learner_client.run_to_end(work)


class Stage:
  """A process that refreshes windows of replay with the learner's newest parameters.

  Owner: the work of the process, which calls `run`.
  Ends when: the run is complete, or something fails. Both raise from `run`.
  """

  def __init__(self, duty: Duty, resolved: Resolved, options: Options) -> None:
    config, agent, spec = resolved.config, resolved.agent, resolved.env
    windows = resolved.replay.windows
    assert windows is not None  # as the command has accepted the agent
    example = example_trajectory(agent, spec, config.num_envs, config.unroll_length)
    self._duty, self._layout, self._space = duty, Layout(windows, example), spec.action_space
    self._batch_size = n = options.batch_size or windows.buffer.batch_size
    name = '--batch-size' if options.batch_size else option_of_replay(agent, 'batch_size')
    check_sample(name, n, window_contents(self._layout, self._space))
    self._rate = Rate(duty, searches(agent, windows.length) if duty.searches else 0)
    self._refresh: Any = jax.jit(Refresh(agent, self._layout))
    self._key = jax.random.key(int.from_bytes(os.urandom(4), 'little'))
    self._addresses = options.addresses
    self._steps_per_update = config.steps_per_update
    measure = self._rate.meter.read
    self.newest = Newest(
      options.addresses, config, agent, options.patience, duty.role, measure=measure
    )
    self._params: tuple[int, Any] = (-1, None)  # and their version, which is the first

  def run(self) -> None:
    """Work until the run is complete, or something fails. Both raise."""
    with contextlib.ExitStack() as stack:
      stack.callback(self.newest.close)
      self._take(self.newest.get())
      client, follower = stack.enter_context(self.newest.replay_client(self._addresses, self._take))
      place = Place(
        client, self._layout, self._space, self.newest.run, self._batch_size, self._steps
      )
      source, sink = self._duty.connect(place)
      # Compile before the first windows arrive, which would else be old when written.
      log.info('compiling for %d windows at a time', self._batch_size)
      refresh = self._refresh.lower(self._params[1], place.shapes, self._key).compile()
      stack.callback(lambda: log.info('%s', self._rate))
      log.info('%s %d windows at a time', self._duty.doing, self._batch_size)
      self._work(source, refresh, sink, follower)

  def _work(self, source: Any, refresh: Any, sink: Sink, follower: Worker) -> None:
    """Refresh batches, and write each while the next one is refreshed."""
    before: tuple[Batch, Columns, int] | None = None
    with source as batches:
      while True:
        follower.check()
        self.newest.wait_while_stale()
        batch = next(batches)
        self._key, key = jax.random.split(self._key)
        version, params = self._params
        fresh = refresh(params, batch.data, key)
        if before is not None:
          sink.write(*before)
          self._rate.add(len(before[0].key))
        before = batch, fresh, version

  def _steps(self) -> int:
    return max(self._params[0], 0) * self._steps_per_update

  def _take(self, params: Any) -> None:
    self._params = self.newest.version, params


class Rate:
  """Counts windows, and logs their rate every LOG_EVERY seconds.

  Args:
    duty: names the windows.
    searches: the number of searches of each window. 0: none are made.

  Attributes:
    meter: the rates since it was last read.
  """

  def __init__(self, duty: Duty, searches: int) -> None:
    self._duty, self._searches, self._windows = duty, searches, 0
    self.meter = Meter()
    self._first = 0  # windows of the first batch, at which the clock begins
    self._begun = self._logged = time.monotonic()

  def add(self, windows: int) -> None:
    """Count windows that have been written."""
    if not self._windows:
      self._begun, self._first = time.monotonic(), windows
    self._windows += windows
    counts = {f'{self._duty.unit}_per_s': windows}
    if self._searches:
      counts['searches_per_s'] = windows * self._searches
    self.meter.add(**counts)
    if time.monotonic() - self._logged > LOG_EVERY:
      self._logged = time.monotonic()
      log.info('%s', self)

  def __str__(self) -> str:
    rate = (self._windows - self._first) / max(time.monotonic() - self._begun, 1e-3)
    text = f'{self._duty.done} {self._windows:,} windows: {rate:,.1f} {self._duty.unit}/s'
    return text + (f', {rate * self._searches:,.0f} searches/s' if self._searches else '')
