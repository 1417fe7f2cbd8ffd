"""Clients of a learner's server and their groups of environments."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np

from podrace.distributed.environments.environment_messages import Records, WireError
from podrace.distributed.environments.shared_listener import Waits
from podrace.distributed.net.listener import Peer
from podrace.distributed.net.safe_text import label
from podrace.envs.timestep_rules import RULES
from podrace.types import FIRST, LAST, MID, TimeStep

MAX_RESTARTS = 1000  # of an environment between two timesteps; a larger difference counts as one
LATENCY_SAMPLES = 1024  # kept for each client
WITH_SLOTS = 'stepping', 'received', 'acting'  # states of groups that have slots
ONE_BITS = 0x3F800000  # the bits of 1.0 as float32
ENDED = 0x100  # the bit of `ended` in the flags of a record


class Latencies:
  """The newest durations in seconds, and their percentiles."""

  def __init__(self) -> None:
    self._samples = np.zeros(LATENCY_SAMPLES)
    self._count = 0
    self._percentiles, self._computed_at = (0.0, 0.0), -math.inf

  def add(self, seconds: float) -> None:
    """Add a duration."""
    self._samples[self._count % LATENCY_SAMPLES] = seconds
    self._count += 1

  def milliseconds(self) -> tuple[float, float]:
    """Return p50 and p99, at most one second old: sorting takes time from the actor threads."""
    now = time.monotonic()
    if self._count and now > self._computed_at + 1.0:
      samples = np.sort(self._samples[: self._count])
      p50, p99 = (float(samples[int(q * (len(samples) - 1) + 0.5)]) * 1000 for q in (0.5, 0.99))
      self._percentiles, self._computed_at = (round(p50, 3), round(p99, 3)), now
    return self._percentiles


class SlotPool(Waits, Protocol):
  """The pool of an actor thread, as seen by groups and slots.

  Attributes:
    free: slots without an environment.
    run_id: [num_envs] i64, the life of each slot's environment.
    used: [num_envs] bool, whether a slot ever had an environment.
  """

  num_envs: int
  batch_size: int
  free: list[int]
  run_id: np.ndarray
  used: np.ndarray

  def expect(self, environments: int) -> None:
    """Add to the number of environments that step, which may be negative."""

  def put(self, items: list[Any]) -> None:
    """Hand over checked timesteps."""

  def withdraw(self, group: EnvironmentGroup) -> bool:
    """Drop the timesteps of a group, unless the actor thread acts for it."""
    ...


class ClientState:
  """The server's record of a client."""

  def __init__(self, details: dict[str, Any]) -> None:
    self.env = label(details['env'])
    self.groups: dict[int, EnvironmentGroup] = {}
    self.environments = 0
    self.must_wait = False  # for slots
    self.frames = self.restarts = 0
    self.answering, self.stepping = Latencies(), Latencies()


class EnvironmentGroup:
  """Environments of a client that step together.

  Attributes:
    state: `waiting` for slots; `stepping` at the client; `received`, its timesteps are unchecked;
      `acting`, the actor thread has its timesteps; `gone`.
    overtaken: number of groups that got slots while this one was first in the queue.
    seq: turn of the STEP that is awaited, or came last.
    since: time at which the state began.
  """

  def __init__(self, peer: Peer, index: int, size: int) -> None:
    self.peer, self.index, self.size = peer, index, size
    self.client: ClientState = peer.state
    self.state: Literal['waiting', 'stepping', 'received', 'acting', 'gone'] = 'waiting'
    self.pool: SlotPool | None = None
    self.overtaken = 0
    self.slots, self.run_id = np.zeros(0, np.int32), np.zeros(0, np.int64)  # both [n]
    self.seq = 0
    self.since = time.monotonic()

  def begin(self, pool: SlotPool, slots: np.ndarray) -> None:
    """Take slots [n] of a pool. Memory is allocated only here, as many groups may wait."""
    size = self.size
    self.pool, self.slots, self.run_id = pool, slots, pool.run_id[slots]
    pool.expect(size)
    self.state, self.since = 'stepping', time.monotonic()
    self.life: np.ndarray = np.zeros(size, np.uint32)
    self.kind: np.ndarray = np.full(size, LAST, np.uint32)  # the last step types
    self.has_last = True  # whether any of `kind` is LAST
    self.mids = np.full(size, MID, np.uint32)
    # Life, discount and flags of records within an episode.
    self.within: np.ndarray = np.full((size, 3), (0, ONE_BITS, MID), np.uint32)
    self._buffers: list[np.ndarray] = []

  def buffer(self, size: int) -> np.ndarray:
    """Return memory for the next STEP; the last STEP may still be in use, the one before is not."""
    if not self._buffers:
      self._buffers = [np.empty(size, np.uint8) for _ in range(2)]
    return self._buffers[self.seq % 2]

  def accept(self, records: Records) -> np.ndarray | None:
    """Check the order of episodes and remember the records.

    Returns:
      The number of restarts [n] u32 of each environment, None if there were none.

    Raises:
      WireError: if the records are invalid.
    """
    kind, life = records.kind, records.life
    timestep = _check_values(records)
    changed = bool(self.seq) and not np.array_equal(life, self.life)
    restarts: np.ndarray | None = None
    if changed:
      restarts = life - self.life  # u32 wraps around
      restarts[restarts > MAX_RESTARTS] = 1
    if changed or not kind.all() or self.has_last:  # else no episode begins, and none has to
      opens = self.kind == LAST
      if restarts is not None:
        opens |= restarts > 0
      opens |= (self.kind == FIRST) & (kind == FIRST)  # an episode that was over at once
      if np.count_nonzero(RULES['order'].is_broken(timestep, opens)):
        raise WireError(RULES['order'].came)
    self.life, self.kind, self.has_last = life.copy(), kind, bool(kind.max() == LAST)
    self.within[:, 0] = life
    return restarts


def _check_values(records: Records) -> TimeStep:
  numbers: Any = records.numbers
  kind: Any = records.kind
  timestep = TimeStep(None, numbers[:, 0], numbers[:, 1], kind)
  for name in ('step_type', 'discount_range', 'first_reward'):
    if np.count_nonzero(RULES[name].is_broken(timestep, None)):
      raise WireError(RULES[name].came)
  if (records.flags & ~np.uint32(0xFF | ENDED)).any():
    raise WireError('an end or a zero that is none')
  if (records.flags == MID | ENDED).any():
    raise WireError('a game that is over within an episode')
  return timestep


def within_episodes(groups: Sequence[EnvironmentGroup], records: Records) -> list[bool]:
  """Return for each group whether no episode begins or ends and nothing restarted: the usual case.

  Args:
    groups: that have sent timesteps.
    records: of all groups, one after the other.
  """
  if len(groups) == 1:
    (group,) = groups
    return [not group.has_last and bool((records.words[:, ::2] == group.within).all())]
  unchanged = records.words[:, ::2] == np.concatenate([g.within for g in groups])
  if unchanged.all():
    return [not g.has_last for g in groups]
  starts = np.cumsum([0, *(g.size for g in groups[:-1])])
  each = np.logical_and.reduceat(unchanged.all(1), starts)
  return [bool(x) and not g.has_last for x, g in zip(each, groups, strict=True)]
