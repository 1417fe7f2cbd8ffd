"""Finished unrolls of one actor thread, on their way to the learner's devices."""

from __future__ import annotations

import collections
import time
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from podrace.architectures.sebulba.pipe import Pipe, Snapshot, Unroll
from podrace.envs.host.episodes import EpisodeCounter
from podrace.topology import host_device
from podrace.types import HostEnvironment

if TYPE_CHECKING:
  from podrace.architectures.sebulba.acting import ActingProgram


class Watch:
  """Seconds by what they were spent on."""

  def __init__(self) -> None:
    self._seconds: dict[str, float] = collections.defaultdict(float)
    self._since = time.perf_counter()

  def __call__(self, what: str) -> None:
    """The time since the last call was spent on `what`."""
    now = time.perf_counter()
    self._seconds[what] += now - self._since
    self._since = now

  def take(self) -> dict[str, float]:
    seconds, self._seconds = dict(self._seconds), collections.defaultdict(float)
    return seconds


class Shipping:
  """Makes an `Unroll` of a trajectory, and of what is counted while it is made."""

  def __init__(
    self,
    acting: ActingProgram,
    index: int,
    device: jax.Device,
    pool: HostEnvironment,
    pipe: Pipe,
    number: int,
  ) -> None:
    self._acting, self._index, self._device = acting, index, device
    self._pool, self.pipe = pool, pipe
    self.num_envs = pool.num_envs
    self.number = number  # of the unroll under way
    self.episodes = EpisodeCounter(pool.num_envs)
    self.watch = Watch()
    self.restarts = self.dropped = 0  # environments; steps that were lost

  def unroll(
    self,
    parts: Any,
    versions: np.ndarray,
    serial: np.ndarray,
    agent_state: Any = None,
    timestep: Any = None,
  ) -> Unroll:
    """Moves the parts to their devices; the rest is there where the thread can be saved."""
    snapshot = self._snapshot(agent_state, timestep) if self._acting.saves_actors else None
    parts = self._ship(parts)
    self.watch('transfer')
    unroll = Unroll(
      parts, versions, self._index, self.episodes.take(), snapshot, self.watch.take(),
      self.restarts, self.dropped, serial,
    )  # fmt: skip
    self.restarts = self.dropped = 0
    self.number += 1
    return unroll

  def _snapshot(self, agent_state: Any, timestep: Any) -> Snapshot:
    env_state = self._pool.state  # type: ignore[attr-defined]
    episodes = jax.device_put(self.episodes.state(), host_device())
    return Snapshot(agent_state, jax.device_put(timestep, self._device), env_state, episodes)

  def _ship(self, parts: Any) -> tuple[Any, ...]:
    return tuple(
      part if device == self._device else jax.device_put(part, device)
      for part, device in zip(parts, self._acting.destinations, strict=True)
    )
