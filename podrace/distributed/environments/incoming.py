"""Timesteps that have come from clients: their checks, and their way to the actor threads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from podrace.distributed.environments import environment_messages
from podrace.distributed.environments.environment_messages import Layout, Records, WireError
from podrace.distributed.environments.groups import EnvironmentGroup, SlotPool, within_episodes
from podrace.distributed.net.frame import Buffer
from podrace.distributed.net.listener import Listener
from podrace.types import LARGEST_REWARD

BATCH_BYTES = 2**21  # timesteps that are checked together; a single STEP may be larger


class GroupStep(NamedTuple):
  """A STEP of a group, on its way to an actor thread.

  Attributes:
    arrays: bytes of the records, and of each array of observations.
    at: time at which it came.
  """

  group: EnvironmentGroup
  arrays: list[Any]
  at: float


class IncomingSteps:
  """Timesteps that have come and are unchecked.

  They are checked together: most checks cost as much for one group as for many.

  Args:
    layout: of the bytes of a STEP.
    listener: ends sessions of clients that send invalid timesteps.
  """

  def __init__(self, layout: Layout, listener: Listener) -> None:
    self._layout, self._listener = layout, listener
    self._steps: list[GroupStep] = []
    self._bytes = 0

  def __len__(self) -> int:
    return len(self._steps)

  def add(self, group: EnvironmentGroup, body: Buffer) -> None:
    """Add a STEP of a group."""
    now = time.monotonic()
    if group.seq:
      group.client.stepping.add(now - group.since)
    group.state, group.since = 'received', now
    if self._bytes + len(body) > BATCH_BYTES:
      self.check()
    self._steps.append(GroupStep(group, self._layout.arrays(body, group.size), now))
    self._bytes += len(body)

  def check(self) -> None:
    """Check all timesteps that have come, and hand them to the actor threads."""
    steps, self._steps, self._bytes = self._steps, [], 0
    if steps:
      self._accept(steps)

  def _accept(self, steps: list[GroupStep]) -> None:
    steps = [step for step in steps if step.group.state == 'received']  # the session may be over
    if not steps:
      return
    arrays = [step.arrays for step in steps]
    try:
      records = self._layout.records(arrays)
      if not (np.abs(records.numbers) <= LARGEST_REWARD).all():  # false for NaN
        raise environment_messages.not_bounded(
          'a reward, score or discount', records.numbers, LARGEST_REWARD
        )
      self._layout.check_observations(arrays)
      self._layout.check_masks(arrays, records)
      within = within_episodes([step.group for step in steps], records)
    except Exception as e:
      self._accept_each(steps, e)
      return
    start = 0
    for step, is_within in zip(steps, within, strict=True):
      group = step.group
      stop = start + group.size
      if is_within:
        group.kind = group.mids
      elif group.state == 'received':  # an earlier group may have ended this session
        self._accept_ends(group, Records(records.words[start:stop]))
      start = stop
    self._pass_on([step for step in steps if step.group.state == 'received'])

  def _accept_each(self, steps: Sequence[GroupStep], e: Exception) -> None:
    """Check each group alone, to find the client that caused an error."""
    if len(steps) == 1:
      self._listener.blame(steps[0].group.peer, e)
      return
    if not isinstance(e, WireError):
      self._listener.unexpected(e)
    for step in steps:
      self._accept([step])

  def _accept_ends(self, group: EnvironmentGroup, records: Records) -> None:
    try:
      restarts = group.accept(records)
    except Exception as e:
      self._listener.blame(group.peer, e)
      return
    if restarts is not None and group.pool is not None:
      group.pool.run_id[group.slots] += restarts
      group.run_id = group.pool.run_id[group.slots]
      group.client.restarts += int(restarts.sum())

  def _pass_on(self, steps: list[GroupStep]) -> None:
    pools: dict[SlotPool, list[GroupStep]] = {}
    for step in steps:
      group = step.group
      group.state = 'acting'
      group.client.frames += group.size
      self._listener.counts['frames'] += group.size
      assert group.pool is not None
      pools.setdefault(group.pool, []).append(step)
    for pool, of_pool in pools.items():
      pool.put(of_pool)
