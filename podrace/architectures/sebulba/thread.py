"""An actor thread: its groups of environments take turns."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import jax

from podrace.architectures.sebulba.group import ActorGroup
from podrace.architectures.sebulba.pipe import ActorFailed, Closed, Pipe
from podrace.errors import HostError, RunError, UsageError
from podrace.system.threads import Worker


class ActorThread:
  """Serves its groups in turn until the run ends: the device acts for one while the rest step.

  The order of turns changes no result: each group has its own environments, keys and unrolls. Of
  three or more groups, the device has the next one's timesteps before the thread waits for the
  actions of one, so that neither device nor environments wait for the thread. Of two that would
  leave no environments to step.

  Args:
    index: of this thread, counted in this process.
    device: on which it acts.
    groups: The thread closes their pools.
    pipe: to the learner.

  Owner: `Actors`, which calls `close`.
  Ends when: the pipe is closed, or an exception is raised, which `check` raises again.
  """

  def __init__(
    self, index: int, device: jax.Device, groups: Sequence[ActorGroup], pipe: Pipe
  ) -> None:
    self.index, self.device, self.groups, self._pipe = index, device, groups, pipe
    self.worker: Worker | None = None

  def start(self) -> None:
    """Begin to act."""
    self.worker = Worker(f'actor-{self.index}', self._main, at_end=self._close_pools)

  def close(self, deadline: float) -> None:
    """Wait for the thread's end until a time. Pools that are stuck are killed."""
    if self.worker is not None and not self.worker.wait(max(deadline - time.monotonic(), 0)):
      with contextlib.ExitStack() as stack:
        for group in self.groups:
          stack.callback(group.pool.kill)

  def check(self) -> None:
    """Raise ActorFailed if the thread failed. Errors for the user have no traceback."""
    if self.worker is not None and self.worker.failed:
      raise ActorFailed(self.worker.message(HostError, RunError, UsageError))

  def _main(self) -> None:
    with contextlib.suppress(Closed), jax.default_device(self.device):
      self._act()

  def _act(self) -> None:
    for group in self.groups:
      group.reset()
    for group in self.groups:
      group.begin()
    ahead = int(len(self.groups) > 2)
    while True:
      for i, group in enumerate(self.groups):
        group.turn()
        self.groups[i - ahead].send()
      if all(group.is_between for group in self.groups):
        self._pipe.wait_to_begin({g.index: g.counters.number for g in self.groups})

  def _close_pools(self) -> None:
    with contextlib.ExitStack() as stack:
      for group in self.groups:
        stack.callback(group.pool.close)
