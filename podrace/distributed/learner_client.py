"""The common part of processes that work for a learner: options, parameters and exit codes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from podrace import tables
from podrace.distributed import parameters, replay
from podrace.distributed.net.address import check_address
from podrace.distributed.net.frame import short
from podrace.distributed.net.process_metrics import Measures, resident_mb
from podrace.distributed.net.safe_text import plain
from podrace.distributed.run_identity import (
  FINISHED,
  HIGHEST,
  RECORD,
  Addresses,
  describe_differences,
  from_leaves,
  read_record,
  record,
)
from podrace.errors import EnvironmentsMoved, RunFinished, UsageError
from podrace.fields import flag
from podrace.settings.config import Config
from podrace.system.process import on_signals
from podrace.system.signals import GRACE_SECONDS
from podrace.system.threads import Worker

log = logging.getLogger('podrace.distributed')
RECORD_BYTES = 2**15  # of a record in HELLO; a larger one is compared with the first parameters
# Settings of all these processes.
FIXED = {'architecture': 'sebulba', 'lag': 'async', 'replay': 'service'}


@dataclasses.dataclass(frozen=True)
class Patience:
  """The time that a process works without its learner.

  Attributes:
    max_staleness: seconds that parameters may be out of date.
    give_up: seconds without a learner, after `max_staleness`, until the process ends. 0: never.
  """

  max_staleness: float = 60.0
  give_up: float = 0.0

  def __post_init__(self) -> None:
    if not 0 < self.max_staleness < math.inf:
      raise UsageError(f'--max-staleness must be more than 0, not {self.max_staleness}')
    if not 0 <= self.give_up < math.inf:
      raise UsageError(f'--give-up-after must be 0 or more, not {self.give_up}')


def given_options(args: Sequence[str]) -> list[str]:
  """Return the names of the options in `args`, as fields of `Config` are written."""
  return [a.partition('=')[0].removeprefix('--').replace('-', '_') for a in args if a[:2] == '--']


def check_options(command: str, config: Config, args: Sequence[str], heeded: Sequence[str]) -> None:
  """Raise UsageError for options of `train` in `args` on which this command does not depend."""
  fields = {f.name for f in dataclasses.fields(Config)}
  for name in given_options(args):
    if name in FIXED:
      if (value := getattr(config, name)) != FIXED[name]:
        raise UsageError(
          f'--{name} {value}: podrace {command} always has --{name} {FIXED[name]}; leave it out'
        )
    elif name in fields and name not in heeded:
      raise UsageError(
        f'--{flag(name)} is for podrace train only: nothing of podrace {command} depends on it; '
        'leave it out'
      )


def with_fixed(config: Config) -> Config:
  """Return the config with the settings that all these processes have."""
  return dataclasses.replace(config, **FIXED)  # type: ignore[arg-type]


def check_addresses(addresses: Addresses) -> None:
  """Raise SecurityError for addresses and keys with which no connection can be made."""
  a = addresses
  check_address(a.parameters, a.keys, a.insecure, '--params')
  for address in a.replay:
    check_address(address, a.keys, a.insecure, '--connect-replay')


class Ending:
  """The end of a process's work at a signal, from any thread."""

  def __init__(self) -> None:
    self._lock, self._has_begun = threading.Lock(), False
    self._end: Callable[[], None] = lambda: None

  def calls(self, end: Callable[[], None]) -> None:
    """Set the function that ends the work's waits. Call it at once if the end has begun."""
    with self._lock:
      self._end = end
      has_begun = self._has_begun
    if has_begun:
      end()

  def begin(self) -> None:
    """End the work's waits, now and from now on."""
    with self._lock:
      self._has_begun = True
      end = self._end
    end()


def run_to_end(work: Callable[[Ending], None]) -> int:
  """Call `work` in a thread, which raises at its end; returns the exit code.

  The end is that of the run, a signal, or a TimeoutError after too long a wait. The main thread
  waits for signals alone: an exception of a handler could leave a lock locked, or get lost.
  """
  ending = Ending()
  events: queue.SimpleQueue[int] = queue.SimpleQueue()  # reentrant, as handlers put into it
  with on_signals(lambda signum, _: events.put(signum)):
    worker = Worker('work', lambda: work(ending), lambda: events.put(0))
    if received := events.get():
      ending.begin()
      with contextlib.suppress(queue.Empty):  # of the work's end, or of another signal
        events.get(timeout=GRACE_SECONDS)
      return 128 + received
  try:
    worker.check()
  except RunFinished:
    log.info('the run is complete')
  except TimeoutError as e:
    log.error('giving up: %s', e)
    return 1
  return 0


class Newest:
  """The newest parameters of one learner's run.

  Owner: the process's work, which calls `close`, as its `Ending` does.
  Ends when: it is closed. Calls that wait then raise `tables.Closed`.

  Args:
    addresses: the address at which the learner publishes.
    config: the configuration of this process, which must agree with the learner's.
    agent: makes parameters of the same shapes.
    patience: the time to work without newer parameters.
    role: the role under which the learner counts this process.
    environments: the number of environments in which it acts, see `parameters.Parameters`.
    first: the number of the first of these environments.
    measure: returns measures of this process, besides the ones that all processes have.

  Attributes:
    run: the name of the learner's run, '' until it is known.
    version: the version of the parameters returned last, -1 for none.
    first: the number of the first environment that the learner had lent by then.
    highest: the highest priority so far, of new windows for which acting computes none.
  """

  def __init__(
    self,
    addresses: Addresses,
    config: Config,
    agent: Any,
    patience: Patience,
    role: str,
    environments: int = 0,
    first: int = 0,
    measure: Callable[[], Measures] = dict,
  ) -> None:
    a, self._measure = addresses, measure
    self._record, self._agent, self._address = record(config), agent, a.parameters
    self._give_up = patience.give_up or None
    log.info('waiting for parameters of %s', a.parameters)
    self._reader = parameters.Parameters(
      a.parameters,
      a.keys,
      a.insecure,
      patience.max_staleness,
      role,
      environments,
      first,
      self.measures,
      text if len(text := json.dumps(self._record)) < RECORD_BYTES else '',
    )
    self.run, self.version, self.first, self.highest = '', -1, first, 1.0

  @property
  def is_stale(self) -> bool:
    """Whether the parameters are too old to be used."""
    return self._reader.is_stale

  def measures(self) -> Measures:
    """Return the measures that this process sends."""
    staleness = round(self._reader.staleness, 3)
    return {**self._measure(), 'staleness_s': staleness, 'resident_mb': resident_mb()}

  def wait_while_stale(self) -> None:
    """Wait while the parameters are too old to be used."""
    self._reader.get()

  def get(self) -> Any:
    """Return the newest parameters, on a device; waits while they are too old to be used.

    Raises:
      UsageError: if they are of another run.
      RunFinished: if the run is complete.
      TimeoutError: after `patience`.
      Closed: if this object is closed.
    """
    published = self._reader.get(self._give_up)
    self.first = self._reader.first
    return self._read(published)

  def _read(self, published: parameters.Published) -> Any:
    leaves = dict(published.leaves)
    self._check(*read_record(leaves.pop(RECORD, None)))
    if leaves.pop(FINISHED, None) is not None:
      raise RunFinished
    self.highest = _read_highest(leaves.pop(HIGHEST, None))
    self.version = published.version
    shapes = jax.eval_shape(lambda key: self._agent.init(key).params, jax.random.key(0))
    return jax.tree.map(jax.numpy.asarray, from_leaves(shapes, leaves))

  def _check(self, run: str, learner_record: dict[str, Any]) -> None:
    try:
      different = describe_differences(learner_record, self._record)
    except RecursionError:
      different = ['its record has too many lists within each other']
    if different:
      raise UsageError('\n  '.join(['the learner has another run:', *different]))
    if self.run not in ('', run):
      raise UsageError(
        f'the learner at {self._address} has run {plain(run)!r} now, this process works for run '
        f'{self.run!r}: start it again to work for the other'
      )
    self.run = run

  def follow(self, take: Callable[[Any], None]) -> NoReturn:
    """Call `take` with each newer version. Raises at the end, as `get`.

    Raises:
      EnvironmentsMoved: if this process is to act in other environments from now on.
    """
    while True:
      published = self._reader.get(self._give_up)
      if published.version != self.version:
        take(self._read(published))
      if self._reader.first != self.first:
        raise EnvironmentsMoved(self._reader.first)
      with self._reader.changed:
        if self._reader.version == self.version:
          self._reader.changed.wait(1.0)

  @contextlib.contextmanager
  def replay_client(
    self, addresses: Addresses, take: Callable[[Any], None]
  ) -> Iterator[tuple[replay.ReplayClient, Worker]]:
    """Connect to the replay service, and call `take` with each newer version in a thread.

    The thread ends with the run, and closes the client: no call waits for a service that is gone.

    Yields:
      The client, and the thread. Its exception takes the place of `Closed` within the context.
    """
    a = addresses
    log.info('connecting to the replay service at %s', ', '.join(a.replay))
    client = replay.ReplayClient(a.replay, a.keys, a.insecure)
    with contextlib.closing(client):
      follower = Worker('parameters', lambda: self.follow(take), lambda: self._hang_up(client))
      try:
        client.wait(self._give_up)
        yield client, follower
      except tables.Closed:
        follower.check()
        raise

  def _hang_up(self, client: replay.ReplayClient) -> None:
    try:
      client.close()
    finally:
      self.close()

  def close(self) -> None:
    """End all calls that wait."""
    self._reader.close()


def _read_highest(published: np.ndarray | None) -> float:
  """Return the published highest priority, 1 without one; raise UsageError for no such number."""
  if published is None:
    return 1.0
  is_number = published.shape == () and published.dtype == np.float64
  if not (is_number and 0 <= published < math.inf):
    raise UsageError(f'the learner publishes {short(published)} as the highest priority')
  return float(published)
