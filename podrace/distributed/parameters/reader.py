"""Keeps the newest parameters of a publisher in an acting process."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podrace.distributed.net import link, process_metrics, session_messages
from podrace.distributed.net.frame import DTYPE, Kind, WireError, short, split
from podrace.distributed.net.link import Link
from podrace.distributed.parameters.parameter_messages import (
  ACTING,
  MOST_ENVIRONMENTS,
  NEWEST,
  SERVICE,
  Published,
)
from podrace.errors import StaleParameters
from podrace.tables.blocking import Closed

QUIET_SECONDS = 2.0  # of waiting for a first version, before a line is logged

log = logging.getLogger('podrace.distributed.parameters')


class Parameters(link.LinkHandler):
  """The newest parameters of a publisher, kept up to date by a thread.

  Staleness is the time since the held version was last known to be the newest: since its message
  began, or since the publisher last confirmed it.

  *Owner*: the caller, by `close`.
  *Ends when*: closed, or refused by the publisher.
  *Raises*: `get` raises Closed or Refused.

  Example:
    reader = Parameters('tcp://127.0.0.1:5561', max_staleness=30.0)
    version, leaves, _ = reader.get()

  Args:
    address: of the publisher.
    keys: a directory with this client's keys, needed beyond this machine.
    insecure: no keys, beyond this machine.
    max_staleness: seconds; `get` waits while the staleness is above. None for no bound.
    role: ACTING, REANALYSING or LABELLING; the publisher counts readers by role.
    environments: in which this process acts. It waits for its session until as many are free.
    first: preferred number of the first environment.
    measure: returns this process's metrics. Called by a thread.
    record: the record of the run for which this process works, as JSON. A publisher of another run
      refuses it.

  Attributes:
    first: the number of the first environment in this session, or in the last one.
    changed: notified when a version comes, or a session begins or ends.

  Raises:
    SecurityError: see podrace.distributed.net.keys.
  """

  service, kinds = SERVICE, session_messages.of_listeners(NEWEST)

  def __init__(
    self,
    address: str,
    keys: Path | None = None,
    insecure: bool = False,
    max_staleness: float | None = None,
    role: str = ACTING,
    environments: int = 0,
    first: int = 0,
    measure: Callable[[], process_metrics.Measures] = dict,
    record: str = '',
  ) -> None:
    if max_staleness is not None and not max_staleness > 0:
      raise ValueError(f'{max_staleness=} must be positive')
    self.address, self.changed = address, threading.Condition()
    self._max_staleness = math.inf if max_staleness is None else max_staleness
    self._role, self._record = role, record
    self._environments, self.first, self._measure = environments, first, measure
    self._held: Published | None = None
    self._known = -1  # the newest version that the publisher has named
    self._begun_at = 0.0  # when the message began that is coming
    self._fresh_at = time.monotonic()  # when the held version was last known to be the newest
    keys = None if keys is None else Path(keys)
    self.link = Link(address, keys, insecure, self, self.changed)
    self.link.ping_every = self._max_staleness / 3
    self.link.patience = min(self.link.patience, self.link.ping_every)
    self.link.start()

  @property
  def version(self) -> int:
    """The number of the held version, -1 if there is none."""
    held = self._held
    return -1 if held is None else held.version

  @property
  def staleness(self) -> float:
    """The staleness in seconds."""
    return time.monotonic() - self._fresh_at

  @property
  def connected(self) -> bool:
    """Whether there is a session."""
    return self.link.session is not None

  def get(self, timeout: float | None = None) -> Published:
    """Return the newest complete version. Wait for the first one, and while it is too stale.

    Raises:
      StaleParameters: it took longer than `timeout` seconds. Does not count the time in which this
        process waits for environments.
      Closed: the reader is closed.
      Refused: the publisher does not accept this process.
    """
    begun = time.monotonic()
    deadline = math.inf if timeout is None else begun + timeout
    is_logged = False
    with self.changed:
      while (held := self._usable()) is None:
        now = time.monotonic()
        if self.link.waits and timeout is not None:
          deadline = now + timeout  # the publisher answers, and has a reason
        if now >= deadline:
          raise StaleParameters(
            f'{self._why()} and {timeout:g} s were not enough to get newer ones'
          )
        is_late = self._held is not None or now - begun > QUIET_SECONDS
        if is_late and not (is_logged or self.link.waits):
          is_logged = True
          log.warning('%s; waiting for newer ones', self._why())
        self.changed.wait(min(deadline - now, 1.0))
    if is_logged:
      log.info('new parameters of %s: version %d', self.address, held.version)
    return held

  def _usable(self) -> Published | None:
    """Return the held version, if it may be used."""
    if self.link.closed:
      raise Closed(f'the parameters of {self.address} are closed')
    self.link.check()
    return None if self.is_stale else self._held

  @property
  def is_stale(self) -> bool:
    """Whether the held version is too old, or another process has this one's environments."""
    return self.staleness > self._max_staleness or self.link.waits

  def _why(self) -> str:
    if self._held is None:
      state = f'there are no parameters of {self.address} yet'
    else:
      state = (
        f'parameters of {self.address} are stale: version {self.version} is held, the newest known '
        f'is {self._known}, {self.staleness:.1f} s of {self._max_staleness:g} s allowed'
      )
    return f'{state} ({"connected" if self.connected else self.link.why})'

  def close(self) -> None:
    """End the thread. Waiting calls raise Closed."""
    self.link.close()

  # --- the link's handler

  def hello(self) -> dict[str, Any]:
    """Return this process's role, record and request for environments, for HELLO."""
    lease = dict(environments=self._environments, first=self.first) if self._environments else {}
    return {'role': self._role, **({'record': self._record} if self._record else {}), **lease}

  def joined(self, details: dict[str, Any]) -> None:
    """Take the leased environments from WELCOME."""
    if not self._environments:
      return
    first = details.get('first')
    if type(first) is not int or not 0 <= first <= MOST_ENVIRONMENTS - self._environments:
      raise WireError(f'a welcome whose first environment is {short(first)}')
    self.first = first

  def metrics(self) -> process_metrics.Measures:
    """Return this process's metrics, for METRICS."""
    return self._measure()

  def pong(self, details: Any) -> None:
    """Take the newest version from PONG, which may confirm the held one."""
    if type(details) is not int:
      raise WireError('a pong without a version')
    self._known = details
    if details == self.version:
      self._hold(self._held, time.monotonic())

  def memory(self, kind: Kind, fields: Sequence[Any], size: int) -> Any:
    """Make memory for a version's bytes, unless the held version has the same ones."""
    self._begun_at = time.monotonic()
    version, sha256, leaves = fields
    self._known = version
    held = self._held is not None and self._held.sha256 == sha256
    expected = sum(d.itemsize * math.prod(shape) for _, d, shape in _specs(leaves))
    if size != expected and not (held and not size):
      raise WireError(f'version {version} in {size} bytes, expected {expected}')
    return np.empty(size, np.uint8)

  def handle(self, kind: Kind, fields: Sequence[Any], arrays: list[memoryview]) -> None:
    """Take a version."""
    version, sha256, leaves = fields
    if self._held is not None and self._held.sha256 == sha256:
      new = self._held._replace(version=version)
    else:
      new = Published(version, _arrays(leaves, arrays[0]), sha256)
    self._hold(new, self._begun_at)

  def _hold(self, new: Published | None, fresh_at: float) -> None:
    with self.changed:
      self._held, self._fresh_at = new, fresh_at
      self.changed.notify_all()


def _arrays(leaves: list[Any], data: memoryview) -> list[tuple[str, np.ndarray]]:
  """Return (path, read-only array) of the leaves over a version's bytes."""
  specs = _specs(leaves)
  parts = split(data.toreadonly(), [d.itemsize * math.prod(shape) for _, d, shape in specs])
  try:
    return [(p, np.frombuffer(x, d).reshape(s)) for (p, d, s), x in zip(specs, parts, strict=True)]
  except ValueError as e:  # too many dimensions, or a 0 beside a length beyond NumPy's integers
    raise WireError(f'leaves of shapes that cannot be ({e})') from None


def _specs(leaves: list[Any]) -> list[tuple[str, np.dtype, list[int]]]:
  """Return (path, dtype, shape) of leaves; raise WireError if they are malformed."""
  specs = []
  try:
    for path, name, shape in leaves:
      if type(shape) is not list or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f'a shape {str(shape)[:60]}')
      specs.append((str(path), _dtype(name), shape))
  except (ValueError, TypeError) as e:
    raise WireError(f'leaves that are none ({e})') from None
  return specs


def _dtype(name: Any) -> np.dtype:
  """Return a dtype of NumPy or ml_dtypes by name. Raise ValueError or TypeError."""
  if type(name) is str and DTYPE.fullmatch(name):
    return np.dtype(name)
  import ml_dtypes

  scalar = getattr(ml_dtypes, str(name), None)
  if not (isinstance(scalar, type) and issubclass(scalar, np.generic)):
    raise ValueError(f'{short(name)} is not made of numbers')
  return np.dtype(scalar)
