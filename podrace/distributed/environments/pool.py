"""An actor thread's end of remote environments, and the slots of all such pools: which groups have them."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from podrace.distributed.environments.groups import Group, Item
from podrace.envs.host.base import PoolArgs, groups_at_once
from podrace.envs.spaces import tree
from podrace.types import Arrival, TimeStep

if TYPE_CHECKING:
  from podrace.distributed.environments.server import Server

IDLE = 0.5  # seconds after which a pool without environments lets its thread look around


class RemotePool:
  """A pool whose environments are somewhere else, and may come and go.

  The observations that `recv` returns are there until it is called again.
  """

  watches_itself = True

  def __init__(self, server: Server, args: PoolArgs) -> None:
    self.num_envs, self.batch_size = args.num_envs, args.batch_size
    self._server = server
    self._changed = threading.Condition()
    self._ready: collections.deque[Item] = collections.deque()
    self._count = 0  # environments in `_ready`
    self._asked = 0  # environments whose timesteps are awaited
    self._inferring: list[Item] = []
    # To get so much memory anew for each batch takes the kernel longer than to copy observations into it.
    self._buffers = server.layout.buffers(args.batch_size)
    self._closed = False
    self.waiting = False  # its thread is in `recv`
    self._nudged = False  # to have the network
    self.batches: collections.Counter[int] = collections.Counter()  # sizes of what `recv` returned
    # Of whoever has the network:
    self.free: list[int] = list(range(args.num_envs))
    self.run_id = np.zeros(args.num_envs, np.int64)
    self.used = np.zeros(args.num_envs, bool)

  # --- whoever has the network

  def put(self, items: list[Item]) -> None:
    environments = sum(item.group.size for item in items)
    with self._changed:
      self._ready.extend(items)
      self._count += environments
      self._asked -= environments
      self._changed.notify()

  def expect(self, environments: int) -> None:
    """So many more, or less, are awaited."""
    with self._changed:
      self._asked += environments
      self._changed.notify()

  def withdraw(self, group: Group) -> bool:
    """Takes back what has not been seen of a group; False if it is being answered."""
    with self._changed:
      if any(item.group is group for item in self._inferring):
        return False
      kept = [item for item in self._ready if item.group is not group]
      if len(kept) < len(self._ready):
        self._server.counts['withdrawn'] += group.size
      self._ready = collections.deque(kept)
      self._count = sum(item.group.size for item in kept)
      return True

  # --- the actor thread

  def reset(self) -> None:
    self._server.call(self._server.slots.add, self)

  def recv(self) -> Arrival:
    """Those that are there; waits `max_wait` for more, where more than they are awaited.

    So of two groups one steps while the other is acted for, and of many half.
    """
    end = time.monotonic() + IDLE
    self.waiting = True  # before the network is asked for: who gives it back looks at it after
    items = None
    if self._ready:  # what the last batch had no room for has waited, and more may have come since
      self._server.turn(0.0)
      items = self._taken(end)
    while items is None:
      if not self._server.turn(self._left(end)):  # another thread has it, and feeds this pool
        with self._changed:
          if not self._nudged and (left := self._left(end)) > 0:
            self._changed.wait(left)
          self._nudged = False
      items = self._taken(end)
    self.waiting = False
    self._server.pass_on()
    return self._arrival(items)

  def _left(self, end: float) -> float:
    """Seconds that there is something to wait for."""
    if self._closed or (self._ready and self._count >= min(self.batch_size, self._asked)):
      return 0.0
    ready = self._ready  # of which this thread alone takes
    return (ready[0].at + self._server.max_wait if ready else end) - time.monotonic()

  def _taken(self, end: float) -> list[Item] | None:
    """What is acted on next; None as long as there is something to wait for."""
    with self._changed:
      if self._left(end) > 0:
        return None
      sizes = [item.group.size for item in self._ready]
      count = groups_at_once(sizes, self.batch_size) if len(sizes) > 1 else len(sizes)
      items = [self._ready.popleft() for _ in range(count)]
      total = sum(item.group.size for item in items)
      self._count -= total
      self._inferring = items
    self.batches[total] += 1
    return items

  def nudge(self) -> None:
    """Has the thread that waits here take the network."""
    with self._changed:
      self._nudged = True
      self._changed.notify()

  def _arrival(self, items: list[Item]) -> Arrival:
    if not items:
      return self._server.nothing
    groups, steps = [item.group for item in items], [item.arrays for item in items]
    # A group's are what they are until it is answered.
    ids, run_id = groups[0].slots, groups[0].run_id
    if len(items) > 1:
      ids = np.concatenate([g.slots for g in groups])
      run_id = np.concatenate([g.run_id for g in groups])
    layout = self._server.layout
    records, arrays = layout.records(steps), layout.observations(steps, self._buffers)
    observation = tree(self._server.observation_space, iter(arrays))
    reward, discount, score = records.numbers.T.copy()
    timestep = TimeStep(observation, reward, discount, records.kind.astype(np.int8))  # type: ignore[arg-type]
    return Arrival(ids, timestep, score, records.flags > 0xFF, run_id)

  def send(self, env_id: np.ndarray, action: Any) -> None:
    """Actions for all that the last `recv` returned, in its order."""
    dtype, shape = self._server.layout.action
    action = np.ascontiguousarray(action, dtype).reshape(len(env_id), *shape)
    with self._changed:
      items, self._inferring = self._inferring, []
    if (waiting := sum(item.group.size for item in items)) != len(env_id):
      raise ValueError(f'actions for {len(env_id)} environments, where {waiting} are waiting')
    if items:
      self._server.call(self._server.answer, self, items, action.tobytes())

  def kill(self) -> None:
    with self._changed:
      self._closed = True
      self._changed.notify_all()
    self._server.wake()

  def close(self) -> None:
    self.kill()
    with contextlib.suppress(RuntimeError):  # which is why it ends
      self._server.call(self._server.unpool, self)
    self._server.pass_on()
