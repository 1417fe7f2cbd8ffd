"""Between actors and the learner: unrolls one way, versions of parameters the other way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from podrace.envs.host.episodes import Totals
from podrace.errors import RunError
from podrace.types import TimeStep, Trajectory

Lag = Literal['0', '1', 'async']
POLL = 0.1  # seconds between looks at whether a wait has lost its sense


class ActorFailed(RunError):
  """An actor thread ended with an exception; the message has its traceback."""


class Closed(Exception):
  """The run is over: what an actor thread's waits end with."""


class Snapshot(NamedTuple):
  """A thread between two unrolls, where its environments can give their state."""

  agent_state: Any  # [N, ...]
  timestep: TimeStep  # [N, ...] what is to be answered next
  env_state: Any
  episodes: dict[str, Any]  # EpisodeCounter.state()


class Unroll(NamedTuple):
  """One thread's trajectory, on its way."""

  parts: tuple[Trajectory, ...]  # on this process's learner devices
  versions: np.ndarray  # [N] of the parameters that acted, in the first step of each environment
  thread: int
  totals: Totals  # episodes that ended in it
  snapshot: Snapshot | None
  seconds: dict[str, float]  # where the thread's time went
  restarts: int  # of environments, while it was made
  dropped: int  # steps that were lost with them
  serial: np.ndarray  # [N] which of its unrolls this is, of each environment; lost ones count

  @property
  def version(self) -> int:
    """The oldest."""
    return int(self.versions.min())


class Pipe:
  """Unrolls one way, versions of parameters the other way, and the end of the run both ways.

  For each unroll a thread calls `reserve`, `params` and `put`, in that order.
  """

  def __init__(
    self, threads: int, lag: Lag, max_lag: int, ordered: bool = True, in_turn: bool = False
  ) -> None:
    self._lag, self._max_lag, self._threads, self._ordered = lag, max_lag, threads, ordered
    self._in_turn = in_turn or lag != 'async'  # each batch has the next unroll of every thread
    # With up to c queued unrolls and one under way, and the oldest learned from first, each
    # is learned from at most c + 1 updates after its parameters were the newest.
    self._capacity = min(max_lag, 3) - 1
    self._changed = threading.Condition()
    self._unrolls: list[Unroll] = []  # in the order of their arrival
    self._params: dict[int, dict[jax.Device, Any]] = {}  # version -> on each actor device
    self._first: int | None = None  # version; what would be older is acted with it
    self._reserved: set[int] = set()  # threads
    self._acting: dict[int, int] = {}  # thread -> version of its unroll under way
    self._closed = False

  def publish(self, version: int, params: dict[jax.Device, Any]) -> None:
    """Makes a version the newest; the one before is kept."""
    with self._changed:
      self._first = version if self._first is None else self._first
      self._params[version] = params
      for old in [v for v in self._params if v < version - 1]:
        del self._params[old]
      self._changed.notify_all()

  def reserve(self, thread: int) -> int:
    """Waits for a place for a thread's next unroll: the oldest version that may be put there.

    A thread in lockstep has places of its own. Threads whose environments come in any order share
    those of one batch, which the update under way is followed by.

    Raises:
      Closed: if the run ends before.
    """
    with self._changed:
      while not self._closed:
        if self._has_place(thread):
          self._reserved.add(thread)
          return max(self._params, default=0) + 1 - self._max_lag
        self._changed.wait(POLL)
    raise Closed

  def _has_place(self, thread: int) -> bool:
    if self._lag != 'async':  # parameters are waited for instead
      return True
    if self._ordered:
      return sum(u.thread == thread for u in self._unrolls) <= self._capacity
    return len(self._unrolls) + len(self._reserved) < self._threads

  def release(self, thread: int) -> None:
    """Gives the place back."""
    with self._changed:
      self._reserved.discard(thread)
      self._changed.notify_all()

  def params(self, thread: int, number: int, device: jax.Device) -> tuple[int, Any]:
    """(version, parameters) for a thread's `number`-th unroll; waits for them.

    Raises:
      Closed: if the run ends before.
      LookupError: if that version is gone; another one would be another lag.
    """
    with self._changed:
      while not self._closed:
        newest = max(self._params, default=-1)
        version = newest if self._lag == 'async' else number - int(self._lag)
        version = max(version, self._first or 0)
        if version < newest and version not in self._params:
          raise LookupError(
            f'unroll {number} of actor thread {thread} is to be acted with version {version} of '
            f'the parameters, of which there are {sorted(self._params)}'
          )
        if version in self._params:
          self._acting[thread] = version
          return version, self._params[version][device]
        self._changed.wait(POLL)
    raise Closed

  def put(self, unroll: Unroll) -> None:
    """Hands over an unroll, in the place that is reserved."""
    with self._changed:
      self._unrolls.append(unroll)
      self._reserved.discard(unroll.thread)
      self._acting.pop(unroll.thread, None)
      self._changed.notify_all()

  def take(self, update: int, give_up: Callable[[], bool]) -> list[Unroll] | None:
    """One batch for the learner at version `update`; None if `give_up` says so before.

    As many unrolls as there are threads: the next one of each, in the threads' order; 'async', if
    replay doesn't need them in turn, the oldest that there are.
    """
    with self._changed:
      while True:
        stop = give_up()
        if (batch := self._ready(update)) is not None:
          break
        if stop:
          return None
        self._changed.wait(POLL)
      chosen = {id(u) for u in batch}
      self._unrolls = [u for u in self._unrolls if id(u) not in chosen]
      self._changed.notify_all()
      return batch

  def _ready(self, update: int) -> list[Unroll] | None:
    if self._in_turn:
      next_of = {u.thread: u for u in reversed(self._unrolls)}
      return [next_of[t] for t in range(self._threads)] if len(next_of) == self._threads else None
    if len(self._unrolls) < self._threads:
      return None
    if not self._ordered:
      return self._unrolls[: self._threads]
    batch = sorted(self._unrolls, key=lambda u: u.version)[: self._threads]  # stable
    too_old = update - self._max_lag  # for any later update; it must be learned from now
    if any(version <= too_old for version in self._acting.values()):
      return None
    return batch

  @property
  def closed(self) -> bool:
    return self._closed

  def close(self) -> None:
    with self._changed:
      self._closed = True
      self._changed.notify_all()
