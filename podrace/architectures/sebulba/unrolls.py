"""Counters and transfers of the unrolls that one group of environments makes."""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from podrace.architectures.sebulba.pipe import Unroll
from podrace.envs.host.episodes import EpisodeCounter


class Stopwatch:
  """Divides the time of an actor thread over its groups' activities, each second once."""

  def __init__(self) -> None:
    self._since = time.perf_counter()

  def lap(self) -> float:
    """Return the seconds since the last call."""
    now = time.perf_counter()
    seconds, self._since = now - self._since, now
    return seconds


class UnrollCounters:
  """Counts episodes, seconds and losses while a group makes an unroll.

  Args:
    group: its number, counted in this process.
    num_envs: of the group.
    number: of the first unroll.
    stopwatch: of the thread, for all its groups.

  Attributes:
    number: the number of the unroll under way.
    restarts: environments that were restarted since the last unroll.
    dropped: steps that were lost since the last unroll.
  """

  def __init__(self, group: int, num_envs: int, number: int, stopwatch: Stopwatch) -> None:
    self._group, self._stopwatch = group, stopwatch
    self.number = number
    self.episodes = EpisodeCounter(num_envs)
    self.restarts = self.dropped = 0
    self._seconds: dict[str, float] = collections.defaultdict(float)  # by activity

  def watch(self, activity: str) -> None:
    """Add the thread's time since its last call to `activity`."""
    self._seconds[activity] += self._stopwatch.lap()

  def finish(
    self, parts: Any, versions: np.ndarray, serial: np.ndarray, snapshot: Any = None
  ) -> Unroll:
    """Return the unroll of these parts with its counts, and begin to count the next unroll."""
    self.watch('transfer')
    unroll = Unroll(
      parts, versions, self._group, self.episodes.take(), snapshot, dict(self._seconds),
      self.restarts, self.dropped, serial,
    )  # fmt: skip
    self._seconds.clear()
    self.restarts = self.dropped = 0
    self.number += 1
    return unroll


def move_parts(
  parts: Sequence[Any], device: jax.Device, destinations: Sequence[jax.Device]
) -> tuple[Any, ...]:
  """Move each part of a trajectory from `device` to its learner device."""
  return tuple(
    part if target == device else jax.device_put(part, target)
    for part, target in zip(parts, destinations, strict=True)
  )
