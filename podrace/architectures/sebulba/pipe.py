"""Between actors and the learner: unrolls one way, versions of parameters the other way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from podrace.envs.host.episodes import Totals
from podrace.errors import RunError
from podrace.types import TimeStep, Trajectory

Lag = Literal['0', '1', 'async']
POLL = 0.1  # seconds between calls of `cancelled` during a wait


class ActorFailed(RunError):
  """An actor thread ended with an exception; the message has its traceback."""


class Closed(Exception):
  """The run is over. It ends the waits of actor threads."""


class Snapshot(NamedTuple):
  """The state of a group between two unrolls."""

  agent_state: Any  # [N, ...]
  timestep: TimeStep  # [N, ...] to be answered next
  env_state: Any
  episodes: dict[str, Any]  # EpisodeCounter.state()


class Unroll(NamedTuple):
  """One group's trajectory, on its way to the learner."""

  parts: tuple[Trajectory, ...]  # on this process's learner devices
  versions: np.ndarray  # [N] of the parameters in the first step of each environment
  group: int
  totals: Totals  # episodes that ended in it
  snapshot: Any  # a Snapshot, an ActorState, or None
  seconds: dict[str, float]  # of the thread for this group, by activity
  restarts: int  # of environments, while it was made
  dropped: int  # steps that these restarts lost
  serial: np.ndarray  # [N] number of the unroll, counted for each environment, with lost unrolls

  @property
  def version(self) -> int:
    """The oldest version of the parameters in this unroll."""
    return int(self.versions.min())


class Pipe:
  """A queue of unrolls to the learner, and the versions of parameters for actors.

  For each unroll a group calls `reserve`, `params` and `put`, in that order. The first two may
  wait; a thread with several groups asks `may_begin` before, and serves the other groups meanwhile.
  `close` ends all waits.
  """

  def __init__(
    self, groups: int, lag: Lag, max_lag: int, ordered: bool = True, in_turn: bool = False
  ) -> None:
    self._lag, self._max_lag, self._groups, self._ordered = lag, max_lag, groups, ordered
    self._in_turn = in_turn or lag != 'async'  # each batch has the next unroll of every group
    # With up to c queued unrolls and one under way, and the oldest used first, each unroll is used
    # at most c + 1 updates after its parameters were the newest.
    self._capacity = min(max_lag, 3) - 1
    self._changed = threading.Condition()
    self._unrolls: list[Unroll] = []  # in the order of their arrival
    self._params: dict[int, dict[jax.Device, Any]] = {}  # version -> on each actor device
    self._first: int | None = None  # the oldest version to act with
    self._reserved: set[int] = set()  # groups
    self._acting: dict[int, int] = {}  # group -> version of its unroll under way
    self._closed = False

  def publish(self, version: int, params: dict[jax.Device, Any]) -> None:
    """Publish the newest version. The version before is kept."""
    with self._changed:
      self._first = version if self._first is None else self._first
      self._params[version] = params
      for old in [v for v in self._params if v < version - 1]:
        del self._params[old]
      self._changed.notify_all()

  def reserve(self, group: int) -> int:
    """Wait for a place for a group's next unroll; returns the oldest version to put there.

    A group in lockstep has its own places. Groups with environments in any order share the places
    of one batch, the next after the update under way.

    Raises:
      Closed: if the run ends before.
    """
    with self._changed:
      while not self._closed:
        if self._has_place(group):
          self._reserved.add(group)
          return max(self._params, default=0) + 1 - self._max_lag
        self._changed.wait(POLL)
    raise Closed

  def _has_place(self, group: int) -> bool:
    if self._lag != 'async':  # `params` waits instead
      return True
    if self._ordered:
      return sum(u.group == group for u in self._unrolls) <= self._capacity
    return len(self._unrolls) + len(self._reserved) < self._groups

  def release(self, group: int) -> None:
    """Give the place back."""
    with self._changed:
      self._reserved.discard(group)
      self._changed.notify_all()

  def params(self, group: int, number: int, device: jax.Device) -> tuple[int, Any]:
    """Wait for the parameters of a group's `number`-th unroll; returns (version, parameters).

    Raises:
      Closed: if the run ends before.
      LookupError: if that version is gone. Another version would be another lag.
    """
    with self._changed:
      while not self._closed:
        if (version := self._version(group, number)) is not None:
          self._acting[group] = version
          return version, self._params[version][device]
        self._changed.wait(POLL)
    raise Closed

  def _version(self, group: int, number: int) -> int | None:
    """Return the version for a group's `number`-th unroll; None if it is not published yet."""
    newest = max(self._params, default=-1)
    version = newest if self._lag == 'async' else number - int(self._lag)
    version = max(version, self._first or 0)
    if version < newest and version not in self._params:
      raise LookupError(
        f'unroll {number} of group {group} of environments is to be acted with version {version} '
        f'of the parameters, of which there are {sorted(self._params)}'
      )
    return version if version in self._params else None

  def may_begin(self, group: int, number: int) -> bool:
    """Return whether `reserve` and `params` of a group's `number`-th unroll would not wait."""
    with self._changed:
      return self._has_place(group) and self._version(group, number) is not None

  def wait_to_begin(self, numbers: Mapping[int, int]) -> None:
    """Wait until one of these groups may begin its unroll.

    Args:
      numbers: from the group to the number of its next unroll.

    Raises:
      Closed: if the run ends before.
    """
    with self._changed:
      while not self._closed:
        if any(self.may_begin(group, number) for group, number in numbers.items()):
          return
        self._changed.wait(POLL)
    raise Closed

  def put(self, unroll: Unroll) -> None:
    """Put an unroll into the reserved place."""
    with self._changed:
      self._unrolls.append(unroll)
      self._reserved.discard(unroll.group)
      self._acting.pop(unroll.group, None)
      self._changed.notify_all()

  def take(self, update: int, cancelled: Callable[[], bool]) -> list[Unroll] | None:
    """Take one batch for the learner at version `update`; None if `cancelled()` becomes true.

    A batch has as many unrolls as there are groups: the next unroll of each, in the order of
    groups. With 'async', unless replay needs them in turn, it has the oldest unrolls.
    """
    with self._changed:
      while True:
        stop = cancelled()
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
      next_of = {u.group: u for u in reversed(self._unrolls)}
      return [next_of[g] for g in range(self._groups)] if len(next_of) == self._groups else None
    if len(self._unrolls) < self._groups:
      return None
    if not self._ordered:
      return self._unrolls[: self._groups]
    batch = sorted(self._unrolls, key=lambda u: u.version)[: self._groups]  # stable
    too_old = update - self._max_lag  # for any later update, so it must be used now
    if any(version <= too_old for version in self._acting.values()):
      return None
    return batch

  @property
  def closed(self) -> bool:
    """Whether the run is over."""
    return self._closed

  def close(self) -> None:
    """End all waits with `Closed`."""
    with self._changed:
      self._closed = True
      self._changed.notify_all()
