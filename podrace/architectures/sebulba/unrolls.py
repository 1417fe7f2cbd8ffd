"""Counters and transfers of the unrolls that one actor thread makes."""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from podrace.architectures.sebulba.pipe import Unroll
from podrace.envs.host.episodes import EpisodeCounter


class UnrollCounters:
  """Counts episodes, seconds and losses while an actor thread makes an unroll.

  Attributes:
    number: the number of the unroll under way.
    restarts: environments that were restarted since the last unroll.
    dropped: steps that were lost since the last unroll.
  """

  def __init__(self, thread: int, num_envs: int, number: int) -> None:
    self._thread = thread
    self.number = number
    self.episodes = EpisodeCounter(num_envs)
    self.restarts = self.dropped = 0
    self._seconds: dict[str, float] = collections.defaultdict(float)  # by activity
    self._since = time.perf_counter()

  def watch(self, activity: str) -> None:
    """Add the time since the last call to `activity`."""
    now = time.perf_counter()
    self._seconds[activity] += now - self._since
    self._since = now

  def finish(
    self, parts: Any, versions: np.ndarray, serial: np.ndarray, snapshot: Any = None
  ) -> Unroll:
    """Return the unroll of these parts with its counts, and begin to count the next unroll."""
    self.watch('transfer')
    unroll = Unroll(
      parts, versions, self._thread, self.episodes.take(), snapshot, dict(self._seconds),
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
