"""Slots of environments that come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from podrace.distributed.environments.groups import Group
from podrace.distributed.environments.pool import RemotePool

WAITING = 16384  # groups without slots, of all clients


class Slots:
  """Gives slots to groups, each time those of one pool.

  Args:
    most: how many there are at most, of all pools together.
    start: is called with each group that has got some.

  Attributes:
    pools: those of actor threads that take environments now.
  """

  def __init__(self, most: int, start: Callable[[Group], object]) -> None:
    self._most, self._start = most, start
    self.pools: list[RemotePool] = []
    self._waiting: list[Group] = []
    self._assigning = False

  @property
  def total(self) -> int:
    return sum(pool.num_envs for pool in self.pools)

  @property
  def free(self) -> int:
    return sum(len(pool.free) for pool in self.pools)

  @property
  def largest_group(self) -> int:
    """That any pool takes; 0 if there is none."""
    return min((pool.batch_size for pool in self.pools), default=0)

  @property
  def crowded(self) -> bool:
    """Whether no more groups may wait."""
    return len(self._waiting) >= WAITING

  def add(self, pool: RemotePool) -> None:
    """One more pool that takes environments."""
    self.pools.append(pool)
    self._assign()

  def remove(self, pool: RemotePool, groups: Iterable[Group]) -> None:
    """A pool takes none any more. Clients of its groups keep their sessions, to hear how the run ends."""
    if pool in self.pools:
      self.pools.remove(pool)
    for group in groups:
      if group.pool is pool:
        group.state, group.pool = 'gone', None

  def enter(self, group: Group) -> None:
    """A group wants slots, and waits for them if need be."""
    self._waiting.append(group)
    self._assign()

  def leave(self, groups: Iterable[Group]) -> None:
    """A client is gone. Unrolls that its environments had begun are dropped with it."""
    gone = {group: group.state for group in groups}
    self._waiting = [group for group in self._waiting if group not in gone]
    for group, state in gone.items():
      group.state = 'gone'
      if group.pool is None:
        continue
      if state in ('asked', 'come'):
        group.pool.expect(-group.size)
        self.release(group)
      elif group.pool.withdraw(group):
        self.release(group)  # else when it is answered

  def release(self, group: Group) -> None:
    """Others may have its slots, if it has some."""
    if group.pool is not None:
      group.pool.free.extend(group.slots.tolist())
      group.pool = None
      self._assign()

  def _assign(self) -> None:
    """Gives slots to the groups that wait, where there are enough."""
    if self._assigning:  # a client is gone that was to hear of it; its slots are seen to below
      return
    self._assigning = True
    try:
      while groups := self._give():
        for group in groups:
          if group.state == 'asked':  # else its client has been dropped, as one that does not read
            self._start(group)
    finally:
      self._assigning = False

  def _give(self) -> list[Group]:
    """Those for which there were enough, and which do not wait any more.

    They are served as they came; but what is too little for the first goes to others. Where these were as many
    as there are slots, some have come and gone meanwhile: then nobody overtakes it any more.
    """
    waiting: list[Group] = []
    begun = []
    for group in self._waiting:
      pools = [p for p in self.pools if len(p.free) >= group.size]
      if not pools or (waiting and waiting[0].overtaken >= self._most):
        waiting.append(group)
        continue
      if waiting:
        waiting[0].overtaken += 1
      pool = max(pools, key=lambda p: len(p.free))
      slots, pool.free = pool.free[: group.size], pool.free[group.size :]
      pool.run_id[slots] += pool.used[slots]  # another life than the one before
      pool.used[slots] = True
      group.begin(pool, np.array(slots, np.int32))
      begun.append(group)
    self._waiting = waiting
    return begun
