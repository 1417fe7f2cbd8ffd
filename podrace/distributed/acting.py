"""`podrace act`: a process that acts for a learner in another process."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from podrace import errors
from podrace.architectures.sebulba import (
  ActingProgram,
  ActorFailed,
  Actors,
  Unroll,
  example_trajectory,
  make_program,
)
from podrace.distributed import learner_client, replay
from podrace.distributed.learner_client import Ending, Newest, Patience
from podrace.distributed.net.process_metrics import Measures, Meter
from podrace.distributed.parameters import ACTING
from podrace.distributed.run_identity import COMMON, OF_LOG, Addresses
from podrace.distributed.run_tables import (
  episodes_table,
  replay_table,
  source_tables,
  timed,
  unrolls_table,
)
from podrace.envs.host.episodes import Totals
from podrace.errors import RunError, UsageError
from podrace.hooks import labels_elsewhere, learns_from_replay
from podrace.replay.labels import OFFLINE, TABLE
from podrace.replay.layout import Layout, named
from podrace.replay.streams import Streams
from podrace.settings.agents import agent_name
from podrace.settings.config import Config
from podrace.settings.resolved import Resolved, resolve
from podrace.system.threads import Worker
from podrace.topology import split_devices

log = logging.getLogger('podrace.distributed')
VERSIONS = 10_000  # versions that are kept with their number at the learner
HEEDED = (  # fields of the config on which an acting process depends
  *COMMON,
  *OF_LOG,
  'actor_devices',
  'actor_threads',
  'actor_groups',
  'max_lag',
  'env_batch_size',
  'env_threads',
  'env_deadline',
)


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of `podrace act`, besides the run's config.

  Attributes:
    addresses: the addresses of the run's processes.
    environments: the number of environments of this process. 0: all environments of the run.
    patience: the time to work without the learner.
  """

  addresses: Addresses
  environments: int = 0
  patience: Patience = Patience()


def check_options(config: Config, args: list[str]) -> None:
  """Raise UsageError for options of `train` in `args` on which acting does not depend."""
  if 'max_lag' in learner_client.given_options(args) and learns_from_replay(config.agent):
    raise UsageError(
      f'--max-lag: {agent_name(config.agent)} learns from replay, where --max-staleness bounds the '
      'lag; leave it out'
    )
  learner_client.check_options('act', config, args, HEEDED)


def act(config: Config, options: Options) -> int:
  """Act until the end of the run, a signal, or the end of `patience`; returns the exit code.

  Raises:
    UsageError: for an impossible config, or if the learner has another run; the message names both
      sides.
    RunError: if a thread or its environments fail.
  """
  resolved = resolve(learner_client.with_fixed(config))
  learner_client.check_addresses(options.addresses)
  if options.environments > config.num_envs:
    raise UsageError(
      f'--local-envs {options.environments} is more than the run has: --num-envs {config.num_envs}'
    )
  try:
    return learner_client.run_to_end(lambda ending: act_until_finished(resolved, options, ending))
  except ActorFailed as e:
    raise RunError(f'{config.env}: {e}') from e


def act_until_finished(resolved: Resolved, options: Options, ending: Ending) -> None:
  """Act in the environments that the learner has lent, anew each time that it lends other ones."""
  first = 0
  while True:
    try:
      acting = Acting(resolved, options, first)
      ending.calls(acting.newest.close)
      acting.run()
    except errors.EnvironmentsMoved as e:
      first = e.first
      log.info('the learner has lent other environments, from %d on: they begin anew', first)


def acting_program(resolved: Resolved, num_envs: int, max_lag: int) -> ActingProgram:
  """Return the program of an acting process with `num_envs` environments, numbered from 0."""
  config = resolved.config
  devices = split_devices(config.actor_devices or '0', config.actor_devices or '0', None).actors
  return make_program(
    agent=resolved.agent,
    spec=resolved.env,
    devices=devices,
    destinations=devices[:1],  # from which unrolls are written
    num_envs=num_envs,
    unroll_length=config.unroll_length,
    threads=config.actor_threads,
    groups=config.actor_groups,
    lag='async',
    max_lag=max_lag,
    batch_size=config.env_batch_size,
    env_threads=config.env_threads,
    deadline=config.env_deadline,
    seed=int.from_bytes(os.urandom(4), 'little'),
  )


class Acting:
  """An acting process."""

  def __init__(self, resolved: Resolved, options: Options, first: int = 0) -> None:
    config, agent, spec = resolved.config, resolved.agent, resolved.env
    num_envs = options.environments or config.num_envs
    if spec.try_out is not None:
      spec.try_out(config.env_deadline)
    windows = resolved.replay.windows
    try:
      # The lag counts versions. With replay it is bounded in seconds instead.
      max_lag = 2**30 if windows else config.max_lag
      self._program = acting_program(resolved, num_envs, max_lag)
    except ValueError as e:
      if options.environments:
        raise UsageError(f'--local-envs {num_envs}: {e}') from e
      raise
    self._example = example_trajectory(agent, spec, num_envs, config.unroll_length)
    self._layout = Layout(windows, self._example) if windows else None
    self._addresses = options.addresses
    self._meter = ActingMeter()
    self.newest = Newest(
      options.addresses, config, agent, options.patience, ACTING, num_envs, first, self._meter.read
    )
    self._num_envs = config.num_envs  # of all acting processes
    self._versions: dict[int, int] = {}  # version as the actors count -> as the learner counts
    self._actors: Actors | None = None
    self._params: Any = None  # for the actors to begin with
    self._lock = threading.Lock()  # of the three above

  def run(self) -> None:
    """Act until the run is complete, or something fails. Both raise."""
    with contextlib.ExitStack() as stack:
      stack.callback(self.newest.close)
      self._take(self.newest.get())
      first = self.newest.first
      program = self._program = dataclasses.replace(self._program, first=first)
      client, follower = stack.enter_context(self.newest.replay_client(self._addresses, self._take))
      write = self._windows(client, self._layout) if self._layout else self._unrolls(client)
      log.info('compiling the policy for %d environments', program.num_envs)
      program.warm_up()
      actors = self._start()
      stack.callback(actors.close)
      last = first + program.num_envs - 1
      log.info(
        'acting in %d environments, %d to %d of %d', program.num_envs, first, last, self._num_envs
      )
      self._write(follower, actors, write, _EpisodeWriter(client, self.newest.run))

  def _windows(self, client: replay.ReplayClient, layout: Layout) -> Callable[[Unroll], None]:
    """Return a function that writes unrolls as windows, for agents with replay."""
    w = layout.windows
    in_flight = 2 * max(1, w.unroll_length // w.period)  # more would queue old windows
    where = client, layout, self._program.spec.action_space, self.newest.run
    if labels_elsewhere(self._program.agent):
      sources = source_tables(*where)
    else:
      sources = {TABLE: replay_table(*where)}
    streams = Streams(
      layout, sources.get(TABLE),
      lambda history: client.writer(history, max_in_flight=in_flight), sources.get(OFFLINE),
    )  # fmt: skip

    def write(unroll: Unroll) -> None:
      streams.highest = self.newest.highest
      for part in unroll.parts:
        streams.add(part, unroll.serial)

    return write

  def _unrolls(self, client: replay.ReplayClient) -> Callable[[Unroll], None]:
    """Return a function that writes an item for each environment, and waits until it is queued."""
    example, space = self._example, self._program.spec.action_space
    table = unrolls_table(client, self._num_envs, example, space, self.newest.run)
    writer = client.writer(1)
    source, number = np.int64(int.from_bytes(os.urandom(7), 'little')), 0

    def write(unroll: Unroll) -> None:
      nonlocal number
      known = self._versions
      version = np.int64(known.get(unroll.version, min(known.values())))  # or older
      for part in unroll.parts:
        columns = named(jax.tree.map(np.asarray, part))
        for b in range(len(columns['env_id'])):
          row = {k: x[:, b] if timed(k) else x[b, ...] for k, x in columns.items()}
          writer.append(row | dict(source=source, number=np.int64(number), version=version))
          writer.create_item(table, 1.0, {k: c[-1] for k, c in writer.history.items()})
          number += 1
      writer.flush()

    return write

  def _start(self) -> Actors:
    key, actor_key = jax.random.split(jax.random.key(self._program.seed))
    with self._lock:
      self._actors = Actors(self._program, {0: self._params}, key, actor_key)
    return self._actors

  def _write(
    self,
    follower: Worker,
    actors: Actors,
    write: Callable[[Unroll], None],
    episodes: _EpisodeWriter,
  ) -> None:
    """Write unrolls, until the follower ends and closes the client."""

    def is_stale() -> bool:
      return follower.failed or self.newest.is_stale

    while True:
      follower.check()
      self.newest.wait_while_stale()
      for unroll in actors.take(0, is_stale) or ():
        with self._meter.writing():
          write(unroll)
        self._meter.count(unroll, self._program.unroll_length)
        episodes.add(unroll.totals)

  def _take(self, params: Any) -> None:
    """Act with the newest parameters, once there are actors."""
    with self._lock:
      version = 0 if self._actors is None else next(reversed(self._versions)) + 1
      self._versions[version] = self.newest.version
      self._versions.pop(version - VERSIONS, None)
      if self._actors is None:
        self._params = params
      else:
        self._actors.publish(version, params)


class ActingMeter:
  """The measures that an acting process sends."""

  def __init__(self) -> None:
    self._rates, self._restarts, self._dropped = Meter(), 0, 0
    self._lock = threading.Lock()
    self._since = math.inf  # start of the part of a write that is not counted yet

  @contextlib.contextmanager
  def writing(self) -> Iterator[None]:
    """Count the time within as spent on writing."""
    with self._lock:
      self._since = time.monotonic()
    yield
    self._count()
    with self._lock:
      self._since = math.inf

  def _count(self) -> None:
    """Count the time of a write so far."""
    with self._lock:
      now = time.monotonic()
      self._rates.add(write_share=max(now - self._since, 0.0))
      self._since = max(self._since, now)

  def count(self, unroll: Unroll, length: int) -> None:
    """Count an unroll of `length` steps that was written."""
    self._rates.add(steps_per_s=length * len(unroll.serial))
    self._restarts += unroll.restarts
    self._dropped += unroll.dropped

  def read(self) -> Measures:
    """Return the measures since the last call."""
    self._count()
    return {
      **self._rates.read(),
      'env_restarts': self._restarts,
      'dropped_steps': self._dropped,
    }


class _EpisodeWriter:
  """Sends totals of finished episodes to the learner, through a table of their own."""

  def __init__(self, client: replay.ReplayClient, run: str) -> None:
    self._table, self._writer = episodes_table(client, run), client.writer(1)

  def add(self, totals: Totals) -> None:
    """Send totals, if there are episodes in them."""
    if totals.count:
      self._writer.append({'totals': np.array(dataclasses.astuple(totals), np.float64)})
      self._writer.create_item(self._table, 1.0, num_steps=1)
