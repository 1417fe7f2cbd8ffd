"""Slots of environments that come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from podrace.distributed.environments.groups import EnvironmentGroup, SlotPool

WAITING = 16384  # groups of all clients that may wait for slots


class Slots:
  """Assigns slots to groups. All slots of a group are of one pool.

  Args:
    limit: number of slots, of all pools together.
    start: called with each group that has got slots.
    groups: returns all groups of all clients.

  Attributes:
    pools: of the actor threads that take environments now.
  """

  def __init__(
    self,
    limit: int,
    start: Callable[[EnvironmentGroup], object],
    groups: Callable[[], Iterable[EnvironmentGroup]],
  ) -> None:
    self._limit, self._start, self._groups = limit, start, groups
    self.pools: list[SlotPool] = []
    self._waiting: list[EnvironmentGroup] = []
    self._assigning = False

  @property
  def total(self) -> int:
    """Number of slots of all pools."""
    return sum(pool.num_envs for pool in self.pools)

  @property
  def free(self) -> int:
    """Number of slots without an environment."""
    return sum(len(pool.free) for pool in self.pools)

  @property
  def largest_group(self) -> int:
    """Size of the largest group that every pool takes; 0 without pools."""
    return min((pool.batch_size for pool in self.pools), default=0)

  @property
  def is_crowded(self) -> bool:
    """Whether no further group may wait."""
    return len(self._waiting) >= WAITING

  def add(self, pool: SlotPool) -> None:
    """Add a pool that takes environments."""
    self.pools.append(pool)
    self._assign()

  def remove(self, pool: SlotPool) -> None:
    """Remove a pool. The clients of its groups keep their sessions, to hear how the run ends."""
    if pool in self.pools:
      self.pools.remove(pool)
    for group in self._groups():
      if group.pool is pool:
        group.state, group.pool = 'gone', None

  def enter(self, group: EnvironmentGroup) -> None:
    """Assign slots to a group, which waits if too few are free."""
    self._waiting.append(group)
    self._assign()

  def leave(self, groups: Iterable[EnvironmentGroup]) -> None:
    """Release the groups of a client that is gone. Their unfinished unrolls are dropped."""
    gone = {group: group.state for group in groups}
    self._waiting = [group for group in self._waiting if group not in gone]
    for group, state in gone.items():
      group.state = 'gone'
      if group.pool is None:
        continue
      if state in ('stepping', 'received'):
        group.pool.expect(-group.size)
        self.release(group)
      elif group.pool.withdraw(group):
        self.release(group)  # otherwise it is released after the actor thread has acted

  def release(self, group: EnvironmentGroup) -> None:
    """Free the slots of a group, if it has any."""
    if group.pool is not None:
      group.pool.free.extend(group.slots.tolist())
      group.pool = None
      self._assign()

  def _assign(self) -> None:
    """Assign free slots to waiting groups."""
    # `_start` may end a session, which comes here again: the loop below sees its free slots.
    if self._assigning:
      return
    self._assigning = True
    try:
      while groups := self._take():
        for group in groups:
          if group.state == 'stepping':  # its client may have been dropped meanwhile
            self._start(group)
    finally:
      self._assigning = False

  def _take(self) -> list[EnvironmentGroup]:
    """Return the waiting groups that fit, with their slots.

    Groups are served in order. If too few slots are free for the first group, smaller groups may
    overtake it, at most as many times as there are slots: by then environments have left and no
    group overtakes it again, so it is never starved.
    """
    waiting: list[EnvironmentGroup] = []
    ready = []
    for group in self._waiting:
      pools = [p for p in self.pools if len(p.free) >= group.size]
      if not pools or (waiting and waiting[0].overtaken >= self._limit):
        waiting.append(group)
        continue
      if waiting:
        waiting[0].overtaken += 1
      pool = max(pools, key=lambda p: len(p.free))
      slots, pool.free = pool.free[: group.size], pool.free[group.size :]
      pool.run_id[slots] += pool.used[slots]  # the slot's environment is a new one
      pool.used[slots] = True
      group.begin(pool, np.array(slots, np.int32))
      ready.append(group)
    self._waiting = waiting
    return ready
