"""Shared by the processes that work for a learner elsewhere: options, its parameters, their end."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax

from podrace.distributed import parameters
from podrace.distributed.net.address import check_address
from podrace.distributed.net.process_metrics import Measures, resident_mb
from podrace.distributed.net.safe_text import plain
from podrace.distributed.run_identity import (
  FINISHED,
  RECORD,
  Addresses,
  from_leaves,
  other_run,
  read_record,
  record,
)
from podrace.errors import UsageError
from podrace.fields import flag
from podrace.settings.config import Config
from podrace.system.process import on_signals

log = logging.getLogger('podrace.distributed')
FIXED = {'architecture': 'sebulba', 'lag': 'async', 'replay': 'service'}  # of all these processes


class Signalled(BaseException):
  """Ends whatever is waited for."""


class Finished(Exception):
  """The run is complete."""


class Moved(Exception):
  """The learner has lent this process other environments, from number `first` on, than it acts in."""

  def __init__(self, first: int) -> None:
    super().__init__(first)
    self.first = first


@dataclasses.dataclass(frozen=True)
class Patience:
  """How long a process does without its learner."""

  max_staleness: float = 60.0  # seconds that parameters may be out of date
  give_up: float = 0.0  # seconds without a learner, after them, until it ends; 0: never

  def __post_init__(self) -> None:
    if not 0 < self.max_staleness < math.inf:
      raise UsageError(f'--max-staleness must be more than 0, not {self.max_staleness}')
    if not 0 <= self.give_up < math.inf:
      raise UsageError(f'--give-up-after must be 0 or more, not {self.give_up}')


def given_options(args: Sequence[str]) -> list[str]:
  """The fields of `Config`, or other options, that are given in `args`."""
  return [a.partition('=')[0].removeprefix('--').replace('-', '_') for a in args if a[:2] == '--']


def check_options(command: str, config: Config, args: Sequence[str], heeded: Sequence[str]) -> None:
  """Raises UsageError for options of `train` in `args` that this command does not heed."""
  fields = {f.name for f in dataclasses.fields(Config)}
  for name in given_options(args):
    if name in FIXED:
      if (value := getattr(config, name)) != FIXED[name]:
        raise UsageError(
          f'--{name} {value}: podrace {command} always has --{name} {FIXED[name]}; leave it out'
        )
    elif name in fields and name not in heeded:
      raise UsageError(
        f'--{flag(name)} is for podrace train only: nothing of podrace {command} depends on it; leave it out'
      )


def fixed(config: Config) -> Config:
  """The config as these processes have it, whatever the preset is for."""
  return dataclasses.replace(config, **FIXED)  # type: ignore[arg-type]


def check_addresses(addresses: Addresses) -> None:
  """Raises SecurityError for addresses and keys that can't be connected with."""
  a = addresses
  check_address(a.parameters, a.keys, a.insecure, '--params')
  for address in a.replay:
    check_address(address, a.keys, a.insecure, '--connect-replay')


def until_the_end(work: Callable[[], None]) -> int:
  """Works until the run is complete, a signal comes or it has waited too long; the exit code."""
  found = 0

  def on_signal(signum: int, frame: Any) -> None:
    nonlocal found
    if not found:
      found = signum
      raise Signalled

  with contextlib.suppress(Signalled), on_signals(on_signal):
    try:
      work()
    except Finished:
      log.info('the run is complete')
    except TimeoutError as e:
      log.error('giving up: %s', e)
      return 1
  return 128 + found if found else 0


class Newest:
  """The learner's newest parameters; of its run and no other.

  Args:
    addresses: where the learner publishes them.
    config: of this process, to be compared with the learner's.
    agent: makes parameters of the same shapes.
    patience: how long to do without newer ones.
    role: of this process, as the learner counts it.
    environments, first: that it acts in, see `parameters.Parameters`.
    measure: numbers of this process, besides those that all have.
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
    )
    self.run = ''  # the name of the learner's, once it is known
    self.version = -1  # of the last ones that were returned
    self.first = first  # the number of the first environment that the learner had lent by then

  @property
  def is_stale(self) -> bool:
    """Whether those that there are must not be used."""
    return self._reader.is_stale

  def measures(self) -> Measures:
    """The numbers that this process sends."""
    staleness = round(self._reader.staleness, 3)
    return {**self._measure(), 'staleness_s': staleness, 'resident_mb': resident_mb()}

  def wait_while_stale(self) -> None:
    """Returns at once if those that there are may be used."""
    self._reader.get()

  def get(self) -> Any:
    """The newest, on a device; waits while those that there are are too old.

    Raises:
      UsageError: if they are of another run.
      Finished: if the run is complete.
      TimeoutError: if that took longer than it may.
      Closed: if this is.
    """
    found = self._reader.get(self._give_up)
    self.first = self._reader.first
    return self._read(found)

  def _read(self, found: parameters.Published) -> Any:
    leaves = dict(found.leaves)
    self._check(*read_record(leaves.pop(RECORD, None)))
    if leaves.pop(FINISHED, None) is not None:
      raise Finished
    self.version = found.version
    shapes = jax.eval_shape(lambda key: self._agent.init(key).params, jax.random.key(0))
    return jax.tree.map(jax.numpy.asarray, from_leaves(shapes, leaves))

  def _check(self, run: str, theirs: dict[str, Any]) -> None:
    try:
      different = other_run(theirs, self._record)
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
    """Has each newer version taken, until there will be none: it raises why, as `get`.

    Raises:
      Moved: if this process is to act in other environments from now on.
    """
    while True:
      found = self._reader.get(self._give_up)
      if found.version != self.version:
        take(self._read(found))
      if self._reader.first != self.first:
        raise Moved(self._reader.first)
      with self._reader.changed:
        if self._reader.version == self.version:
          self._reader.changed.wait(1.0)

  def close(self) -> None:
    """Ends whatever waits for them."""
    self._reader.close()
