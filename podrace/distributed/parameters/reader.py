"""Reads parameters from a publisher."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podrace.distributed.net import link, process_metrics, session_messages
from podrace.distributed.net.frame import Kind, WireError, short, split
from podrace.distributed.net.link import Link
from podrace.distributed.parameters.parameter_messages import NEWEST, SERVICE, Published
from podrace.distributed.parameters.publisher import ACTING, MOST_ENVIRONMENTS, log
from podrace.tables.blocking import Closed

_PLAIN = re.compile(r'[<>|][biufc]\d{1,2}')  # numpy's own types; it takes other text for Python


class StaleParameters(TimeoutError):
  """The parameters are older than allowed, and no newer ones came in time."""


class Parameters(link.LinkHandler):
  """The newest parameters of a publisher, kept up to date by a thread of its own.

  Staleness is the time for which the version that is held has not been known to be the newest: since it was
  begun to be sent, or since the publisher last said so.

  Args:
    max_staleness: seconds; `get` waits while it is more. None for no bound.
    role: of this client, as the publisher counts its clients.
    environments: in which it acts; it waits for its session until so many of the run's are free.
    first: the number that the first of them should have.
    measure: the numbers that this process sends of itself; is called by a thread.

  Attributes:
    first: the number that the first of them has in this session, or had in the last one.
    changed: is notified when there is another version, or a session begins or ends.
    fetched: versions whose bytes were sent.

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
  ) -> None:
    if max_staleness is not None and not max_staleness > 0:
      raise ValueError(f'{max_staleness=} must be positive')
    self.address, self.changed = address, threading.Condition()
    self._max_staleness = math.inf if max_staleness is None else max_staleness
    self._role = role
    self._environments, self.first, self._measure = environments, first, measure
    self._held: Published | None = None
    self._known = -1  # the newest version of which it knows
    self._begun_at = 0.0  # when a message began that is coming
    self._fresh_at = time.monotonic()  # when what is held was last known to be the newest
    self.fetched = 0
    keys = None if keys is None else Path(keys)
    self._link = Link(address, keys, insecure, self, self.changed)
    self._link.ping_every = self._max_staleness / 3
    self._link.start()

  @property
  def version(self) -> int:
    """The version that is held, -1 if there is none."""
    held = self._held
    return -1 if held is None else held.version

  @property
  def staleness(self) -> float:
    """In seconds."""
    return time.monotonic() - self._fresh_at

  @property
  def connected(self) -> bool:
    """Whether there is a session."""
    return self._link.session is not None

  def get(self, timeout: float | None = None) -> Published:
    """The newest version that is whole. Waits for the first one, and while it is too stale.

    Raises:
      StaleParameters: if that took longer than `timeout` seconds; it says what is held, and what is known of.
      Closed: if this is.
      Refused: if the publisher does not take this client.
    """
    begun = time.monotonic()
    deadline = math.inf if timeout is None else begun + timeout
    said = False
    with self.changed:
      while (held := self._usable()) is None:
        now = time.monotonic()
        if self._link.waits and timeout is not None:
          deadline = now + timeout  # the publisher is there, and says what for
        if now >= deadline:
          raise StaleParameters(
            f'{self._why()} and {timeout:g} s were not enough to get newer ones'
          )
        if not (said or self._link.waits) and (self._held is not None or now - begun > 2.0):
          said = True
          log.warning('%s; waiting for newer ones', self._why())
        self.changed.wait(min(deadline - now, 1.0))
    if said:
      log.info('parameters of %s are fresh again: version %d', self.address, held.version)
    return held

  def _usable(self) -> Published | None:
    """What is held, if it may be used."""
    if self._link.closed:
      raise Closed(f'the parameters of {self.address} are closed')
    self._link.check()
    return None if self.is_stale else self._held

  @property
  def is_stale(self) -> bool:
    """Whether what is held must not be used: it is too old, or another process has this one's environments."""
    return self.staleness > self._max_staleness or self._link.waits

  def _why(self) -> str:
    if self._held is None:
      what = f'there are no parameters of {self.address} yet'
    else:
      what = (
        f'parameters of {self.address} are stale: version {self.version} is held, the newest known is '
        f'{self._known}, {self.staleness:.1f} s of {self._max_staleness:g} s allowed'
      )
    return f'{what} ({"connected" if self.connected else self._link.why})'

  def close(self) -> None:
    """Ends it; whatever waits raises Closed."""
    self._link.close()

  # --- as a link's handler

  def hello(self) -> dict[str, Any]:
    lent = dict(environments=self._environments, first=self.first) if self._environments else {}
    return {'role': self._role, **lent}

  def joined(self, details: dict[str, Any]) -> None:
    if not self._environments:
      return
    first = details.get('first')
    if type(first) is not int or not 0 <= first <= MOST_ENVIRONMENTS - self._environments:
      raise WireError(f'a welcome whose first environment is {short(first)}')
    self.first = first

  def metrics(self) -> process_metrics.Measures:
    return self._measure()

  def pong(self, details: Any) -> None:
    if type(details) is not int:
      raise WireError('a pong without a version')
    self._known = details
    if details == self.version:
      self._hold(self._held, time.monotonic())

  def memory(self, kind: Kind, fields: Sequence[Any], size: int) -> Any:
    """For a version's bytes, which are kept; they may be the same as those that are held."""
    self._begun_at = time.monotonic()
    version, sha256, leaves = fields
    self._known = version
    held = self._held is not None and self._held.sha256 == sha256
    expected = sum(d.itemsize * math.prod(shape) for _, d, shape in _specs(leaves))
    if size != expected and not (held and not size):
      raise WireError(f'version {version} in {size} bytes, expected {expected}')
    return np.empty(size, np.uint8)

  def handle(self, kind: Kind, fields: Sequence[Any], arrays: list[memoryview]) -> None:
    version, sha256, leaves = fields
    if self._held is not None and self._held.sha256 == sha256:
      new = self._held._replace(version=version)
    else:
      new = Published(version, _arrays(leaves, arrays[0]), sha256)
      self.fetched += 1
    self._hold(new, self._begun_at)

  def _hold(self, new: Published | None, fresh_at: float) -> None:
    with self.changed:
      self._held, self._fresh_at = new, fresh_at
      self.changed.notify_all()


def _arrays(leaves: list[Any], data: memoryview) -> list[tuple[str, np.ndarray]]:
  """Read-only arrays over a version's bytes."""
  specs = _specs(leaves)
  parts = split(data.toreadonly(), [d.itemsize * math.prod(shape) for _, d, shape in specs])
  try:
    return [(p, np.frombuffer(x, d).reshape(s)) for (p, d, s), x in zip(specs, parts, strict=True)]
  except (
    ValueError
  ) as e:  # more dimensions than numpy has, or a length beyond its numbers next to a 0
    raise WireError(f'leaves of shapes that cannot be ({e})') from None


def _specs(leaves: list[Any]) -> list[tuple[str, np.dtype, list[int]]]:
  """Paths, types and shapes of leaves; raises WireError if they are none."""
  found = []
  try:
    for path, name, shape in leaves:
      if type(shape) is not list or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f'a shape {str(shape)[:60]}')
      found.append((str(path), _dtype(name), shape))
  except (ValueError, TypeError) as e:
    raise WireError(f'leaves that are none ({e})') from None
  return found


def _dtype(name: Any) -> np.dtype:
  """Of its name; those that numpy lacks, such as bfloat16, are ml_dtypes'. Raises ValueError or TypeError for no name."""
  if type(name) is str and _PLAIN.fullmatch(name):
    return np.dtype(name)
  import ml_dtypes

  found = getattr(ml_dtypes, str(name), None)
  if not (isinstance(found, type) and issubclass(found, np.generic)):
    raise ValueError(f'{short(name)} is not made of numbers')
  return np.dtype(found)
