"""Timesteps on their way from clients to actor threads: what is checked of them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from podrace.net.frame import Buffer
from podrace.net.listener import Listener
from podrace.remote.groups import Group, Item, within_episodes
from podrace.remote.pool import RemotePool
from podrace.remote.wire import Layout, Records, WireError

TOGETHER = 2**21  # bytes of timesteps that are looked at together, unless a single one has more


class Incoming:
  """Timesteps that have come and are not looked at yet.

  They are looked at together, as most of what there is to check costs as much for many.

  Args:
    layout: of their bytes.
    listener: ends sessions of clients whose timesteps are wrong.
  """

  def __init__(self, layout: Layout, listener: Listener) -> None:
    self._layout, self._listener = layout, listener
    self._items: list[Item] = []
    self._bytes = 0

  def add(self, group: Group, body: Buffer) -> None:
    """A group's timesteps have come."""
    now = time.monotonic()
    if group.seq:
      group.client.stepping.add(now - group.since)
    group.state, group.since = 'come', now
    if self._bytes + len(body) > TOGETHER:
      self.look()
    self._items.append(Item(group, self._layout.arrays(body, group.size), now))
    self._bytes += len(body)

  def look(self) -> None:
    """Checks those that have come, and hands them to the actor threads."""
    items, self._items, self._bytes = self._items, [], 0
    if items:
      self._accept(items)

  def _accept(self, items: list[Item]) -> None:
    items = [item for item in items if item.group.state == 'come']  # else dropped since
    if not items:
      return
    steps = [item.arrays for item in items]
    try:
      records = self._layout.records(steps)
      if not np.isfinite(records.numbers).all():
        raise WireError('a reward, score or discount that is NaN or infinite')
      self._layout.check_observations(steps)
      within = within_episodes(items, records)
    except Exception as e:
      self._accept_each(items, e)
      return
    start = 0
    for item, is_within in zip(items, within, strict=True):
      group = item.group
      stop = start + group.size
      if is_within:
        group.kind = group.mids
      elif group.state == 'come':  # else dropped for another one's
        self._accept_ends(group, Records(records.words[start:stop]))
      start = stop
    self._pass_on([item for item in items if item.group.state == 'come'])

  def _accept_each(self, items: Sequence[Item], e: Exception) -> None:
    """Finds out whose timesteps have led to an error."""
    if len(items) == 1:
      self._listener.blame(items[0].group.peer, e)
      return
    if not isinstance(e, WireError):
      self._listener.unexpected(e)
    for item in items:
      self._accept([item])

  def _accept_ends(self, group: Group, records: Records) -> None:
    try:
      restarts = group.accept(records)
    except Exception as e:
      self._listener.blame(group.peer, e)
      return
    if restarts is not None and group.pool is not None:
      group.pool.run_id[group.slots] += restarts
      group.run_id = group.pool.run_id[group.slots]
      group.client.restarts += int(restarts.sum())

  def _pass_on(self, items: list[Item]) -> None:
    pools: dict[RemotePool, list[Item]] = {}
    for item in items:
      group = item.group
      group.state = 'thinking'
      group.client.frames += group.size
      self._listener.counts['frames'] += group.size
      assert group.pool is not None
      pools.setdefault(group.pool, []).append(item)
    for pool, those in pools.items():
      pool.put(those)
