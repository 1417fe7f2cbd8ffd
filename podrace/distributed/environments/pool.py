"""The pool of an actor thread with environments on other machines."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from podrace.distributed.environments.environment_messages import Layout
from podrace.distributed.environments.groups import EnvironmentGroup
from podrace.distributed.environments.incoming import GroupStep
from podrace.distributed.environments.shared_listener import SharedNetwork
from podrace.distributed.environments.slots import Slots
from podrace.envs.host.base import PoolArgs, groups_at_once
from podrace.envs.spaces import tree
from podrace.types import Arrival, TimeStep

IDLE_SECONDS = 0.5  # after which a pool without environments returns an empty arrival


class Arrivals:
  """Makes arrivals of the bytes of groups.

  Attributes:
    empty: an arrival of no environments.
  """

  def __init__(self, layout: Layout, observation_space: Any) -> None:
    self.layout, self._space = layout, observation_space
    arrays = [np.zeros((0, *shape), dtype) for dtype, shape in layout.leaves]
    zero: Any = np.zeros(0, np.float32)
    timestep = TimeStep(tree(self._space, iter(arrays)), zero, zero, zero.astype(np.int8))
    ids = np.zeros(0, np.int32)
    self.empty = Arrival(ids, timestep, zero, zero.astype(bool), ids)

  def of(self, steps: list[GroupStep], buffers: Sequence[np.ndarray]) -> Arrival:
    """Return the arrival of all environments of the groups.

    Args:
      steps: of the groups.
      buffers: of `Layout.buffers`; observations of more than one group are copied there.
    """
    if not steps:
      return self.empty
    groups, data = [step.group for step in steps], [step.arrays for step in steps]
    # No copy for one group: its slots and lives stay as they are until it is answered.
    ids, run_id = groups[0].slots, groups[0].run_id
    if len(steps) > 1:
      ids = np.concatenate([g.slots for g in groups])
      run_id = np.concatenate([g.run_id for g in groups])
    records, arrays = self.layout.records(data), self.layout.observations(data, buffers)
    reward, discount, score = records.numbers.T.copy()
    kind: Any = records.kind.astype(np.int8)
    timestep = TimeStep(tree(self._space, iter(arrays)), reward, discount, kind)
    return Arrival(ids, timestep, score, records.flags > 0xFF, run_id)


class RemotePool:
  """A pool of environments on other machines, which may connect and disconnect.

  Owner: the actor thread, which calls `close`. `put`, `expect` and `withdraw` are for the thread
  that serves the network.

  The observations that `recv` returns are valid until its next call.

  Args:
    slots: of the server; the pool is added by `reset` and removed by `close`.
    max_wait: seconds to wait for more environments before acting on the ones that have answered.
    answer: sends the actions of groups, in the thread that serves the network.

  Attributes:
    awaited: number of environments that step.
    acting: timesteps of the last `recv` that are not answered yet.
  """

  watches_itself = True

  def __init__(
    self,
    network: SharedNetwork,
    slots: Slots,
    arrivals: Arrivals,
    max_wait: float,
    answer: Callable[[RemotePool, list[GroupStep], bytes], None],
    args: PoolArgs,
  ) -> None:
    self.num_envs, self.batch_size = args.num_envs, args.batch_size
    self._network, self._slots, self._arrivals = network, slots, arrivals
    self._max_wait, self._answer = max_wait, answer
    self._changed = threading.Condition()
    self.ready: collections.deque[GroupStep] = collections.deque()
    self._count = 0  # environments in `ready`
    self.awaited = 0
    self.acting: list[GroupStep] = []
    # Reused: the kernel takes longer to map new memory than to copy observations into it.
    self._buffers = arrivals.layout.buffers(args.batch_size)
    self._closed = False
    self.waiting = False  # its thread is in `recv`
    self._nudged = False  # to take the network
    self.batches: collections.Counter[int] = collections.Counter()  # sizes of arrivals
    # Only for the thread that serves the network:
    self.free: list[int] = list(range(args.num_envs))
    self.run_id = np.zeros(args.num_envs, np.int64)
    self.used = np.zeros(args.num_envs, bool)

  # --- the thread that serves the network

  def put(self, items: list[GroupStep]) -> None:
    """Hand over checked timesteps."""
    environments = sum(item.group.size for item in items)
    with self._changed:
      self.ready.extend(items)
      self._count += environments
      self.awaited -= environments
      self._changed.notify()

  def expect(self, environments: int) -> None:
    """Add to the number of environments that step, which may be negative."""
    with self._changed:
      self.awaited += environments
      self._changed.notify()

  def withdraw(self, group: EnvironmentGroup) -> bool:
    """Drop the timesteps of a group, unless the actor thread acts for it.

    Returns:
      False if the actor thread acts for it.
    """
    with self._changed:
      if any(item.group is group for item in self.acting):
        return False
      kept = [item for item in self.ready if item.group is not group]
      if len(kept) < len(self.ready):
        self._network.counts['withdrawn'] += group.size
      self.ready = collections.deque(kept)
      self._count = sum(item.group.size for item in kept)
      return True

  # --- the actor thread

  def reset(self) -> None:
    """Take environments from now on."""
    self._network.call(self._slots.add, self)

  def recv(self) -> Arrival:
    """Return the environments that have answered, or none after IDLE_SECONDS.

    It waits `max_wait` for more environments, if more are expected. So of two groups one steps
    while the actor thread acts for the other, and of many groups half do.
    """
    end = time.monotonic() + IDLE_SECONDS
    # Set before the network is tried: the thread that gives it back reads `waiting` afterwards.
    self.waiting = True
    items = None
    if self.ready:  # left over from the last batch; serve the network first, as more may have come
      self._network.turn(0.0)
      items = self._take(end)
    while items is None:
      if not self._network.turn(self._left(end)):  # another thread has it, and fills this pool
        with self._changed:
          if not self._nudged and (left := self._left(end)) > 0:
            self._changed.wait(left)
          self._nudged = False
      items = self._take(end)
    self.waiting = False
    self._network.pass_on()
    return self._arrivals.of(items, self._buffers)

  def _left(self, end: float) -> float:
    """Return the seconds that are left to wait for more environments."""
    if self._closed or (self.ready and self._count >= min(self.batch_size, self.awaited)):
      return 0.0
    ready = self.ready  # only this thread takes from it
    return (ready[0].at + self._max_wait if ready else end) - time.monotonic()

  def _take(self, end: float) -> list[GroupStep] | None:
    """Return the next batch, or None while there is something to wait for."""
    with self._changed:
      if self._left(end) > 0:
        return None
      sizes = [item.group.size for item in self.ready]
      count = groups_at_once(sizes, self.batch_size) if len(sizes) > 1 else len(sizes)
      items = [self.ready.popleft() for _ in range(count)]
      total = sum(item.group.size for item in items)
      self._count -= total
      self.acting = items
    self.batches[total] += 1
    return items

  def nudge(self) -> None:
    """Make the thread that waits here take the network."""
    with self._changed:
      self._nudged = True
      self._changed.notify()

  def send(self, env_id: np.ndarray, action: Any) -> None:
    """Send the actions [n, ...] of all environments of the last `recv`, in its order.

    Raises:
      ValueError: if their number differs.
    """
    dtype, shape = self._arrivals.layout.action
    action = np.ascontiguousarray(action, dtype).reshape(len(env_id), *shape)
    with self._changed:
      items, self.acting = self.acting, []
    if (waiting := sum(item.group.size for item in items)) != len(env_id):
      raise ValueError(f'actions for {len(env_id)} environments, where {waiting} are waiting')
    if items:
      self._network.call(self._answer, self, items, action.tobytes())

  def kill(self) -> None:
    """End the wait of the actor thread, from any thread."""
    with self._changed:
      self._closed = True
      self._changed.notify_all()
    self._network.wake()

  def close(self) -> None:
    """Give the slots back."""
    self.kill()
    with contextlib.suppress(RuntimeError):  # the failure of the network, raised elsewhere
      self._network.call(self._slots.remove, self)
    self._network.pass_on()
