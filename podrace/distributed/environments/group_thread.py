"""A group of environments that a process steps in a thread of its own. Imports no JAX."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from podrace.distributed.environments.environment_messages import RECORD
from podrace.distributed.net.frame import flat
from podrace.envs.host.base import HostSpec, PoolArgs
from podrace.envs.spaces import values
from podrace.errors import RunError
from podrace.system.threads import Worker
from podrace.types import Arrival

START_SECONDS = 60.0  # to make environments, besides the deadline of a step


class GroupFailed(RunError):
  """An environment failed, or hangs."""


class GroupThread:
  """A thread that steps a group of environments for one session.

  Owner: the EnvironmentClient, which calls `stop` and `join`.

  Args:
    send: sends the bytes of records and observations.
    on_end: called at the end of the thread, which may have failed.

  Attributes:
    worker: the thread, once it has begun.
    seq: turn of the timesteps that are sent next, or were sent last.
    busy_since: time at which the environments began to step; None while they wait for actions.
    watches_itself: whether the pool replaces environments that hang.
  """

  def __init__(
    self,
    index: int,
    session: int,
    spec: HostSpec,
    args: PoolArgs,
    send: Callable[[GroupThread, list[Any]], None],
    on_end: Callable[[], None],
  ) -> None:
    self.index, self.session, self.size = index, session, args.num_envs
    self._spec, self._args, self._send, self._on_end = spec, args, send, on_end
    self.seq = 0
    self.busy_since: float | None = None
    self.watches_itself = False
    self._actions: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
    self.worker: Worker | None = None

  def start(self) -> None:
    """Make the environments, and send their first timesteps."""
    self.busy_since = time.monotonic() + START_SECONDS
    self.worker = Worker(f'group-{self.index}', self._main, self._on_end)

  def act(self, action: np.ndarray) -> None:
    """Step the environments with actions [n, ...]."""
    self.busy_since = time.monotonic()
    self._actions.put(action)

  def stop(self) -> None:
    """End the thread after its step."""
    self._actions.put(None)

  def join(self, seconds: float) -> bool:
    """Wait for the thread; return whether it has ended."""
    return self.worker is None or self.worker.wait(seconds)

  def _main(self) -> None:
    with contextlib.closing(self._spec.make(self._args)) as pool:
      self.watches_itself = pool.watches_itself
      ids = np.arange(self.size, dtype=np.int32)
      pool.reset()
      self._send_arrival(pool.recv(), ids)
      while (action := self._actions.get()) is not None:
        pool.send(ids, action)
        self._send_arrival(pool.recv(), ids)

  def _send_arrival(self, arrival: Arrival, ids: np.ndarray) -> None:
    if not np.array_equal(arrival.env_id, ids):
      raise GroupFailed(f'{self._spec.name} returned {arrival.env_id}, expected all in order')
    timestep = arrival.timestep
    records = np.zeros(self.size, RECORD)
    records['life'] = arrival.run_id
    records['reward'], records['discount'] = timestep.reward, timestep.discount
    records['score'], records['ended'] = arrival.score, arrival.ended
    records['step_type'] = timestep.step_type
    space = self._spec.observation_space
    self._send(self, [flat(x) for x in (records, *values(space, timestep.observation))])
