"""A client of the learner's server: its groups of environments, and what is checked of their timesteps."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from podrace.net.listener import Peer
from podrace.net.text import label
from podrace.remote import wire
from podrace.remote.wire import WireError
from podrace.types import FIRST, LAST, MID

if TYPE_CHECKING:
  from podrace.remote.pool import RemotePool

RESTARTS = 1000  # of an environment between two timesteps, at most; what says more is no count
SAMPLES = 1024  # of latencies, for each client
STEPPING = 'asked', 'come', 'thinking'  # states of groups that have slots
ONE = 0x3F800000  # the bits of 1.0
ENDED = 0x100  # of a record's flags: `ended`


class Latencies:
  """The last seconds of something, and their percentiles."""

  def __init__(self) -> None:
    self._last = np.zeros(SAMPLES)
    self._count = 0
    self._known, self._known_at = (0.0, 0.0), -math.inf

  def add(self, seconds: float) -> None:
    self._last[self._count % SAMPLES] = seconds
    self._count += 1

  def milliseconds(self) -> tuple[float, float]:
    """p50 and p99, of a second ago at most: whoever asks takes time from those who act."""
    now = time.monotonic()
    if self._count and now > self._known_at + 1.0:
      known = np.sort(self._last[: self._count])
      p50, p99 = (float(known[int(q * (len(known) - 1) + 0.5)]) * 1000 for q in (0.5, 0.99))
      self._known, self._known_at = (round(p50, 3), round(p99, 3)), now
    return self._known


class Client:
  """What the server knows of a peer."""

  def __init__(self, details: dict[str, Any]) -> None:
    self.env = label(details['env'])
    self.groups: dict[int, Group] = {}
    self.environments = 0
    self.must_wait = False  # of slots that are taken
    self.frames = self.restarts = 0
    self.answering, self.stepping = Latencies(), Latencies()


class Group:
  """Environments of a client that step together. ASKED: their timesteps are awaited; COME: they are there, not looked at."""

  def __init__(self, peer: Peer, index: int, size: int) -> None:
    self.peer, self.index, self.size = peer, index, size
    self.client: Client = peer.state
    self.state: Literal['waiting', 'asked', 'come', 'thinking', 'gone'] = 'waiting'
    self.pool: RemotePool | None = None
    self.overtaken = 0  # so often, while it was the first of those that wait
    self.slots, self.run_id = np.zeros(0, np.int32), np.zeros(0, np.int64)  # both [n]
    self.seq = 0  # of the STEP that is awaited or was the last
    self.since = time.monotonic()  # when its state began

  def begin(self, pool: RemotePool, slots: np.ndarray) -> None:
    """It has slots [n] of a pool; before, it takes no memory to speak of."""
    size = self.size
    self.pool, self.slots, self.run_id = pool, slots, pool.run_id[slots]
    pool.expect(size)
    self.state, self.since = 'asked', time.monotonic()
    self.life: np.ndarray = np.zeros(size, np.uint32)
    self.kind: np.ndarray = np.full(size, LAST, np.uint32)  # the last step types
    self.over = True  # some of them are LAST
    self.mids = np.full(size, MID, np.uint32)
    self.within: np.ndarray = np.full(
      (size, 3), (0, ONE, MID), np.uint32
    )  # life, discount, flags within an episode
    self._buffers: list[np.ndarray] = []

  def buffer(self, size: int) -> np.ndarray:
    """Memory for the STEP that is awaited. That of the last one may be in use still, not that before."""
    while len(self._buffers) < 2:
      self._buffers.append(np.empty(size, np.uint8))
    return self._buffers[self.seq % 2]

  def accept(self, records: wire.Records) -> np.ndarray | None:
    """Takes what the environments say; how often each [n] was restarted, None if none was.

    Raises:
      WireError: if it can't be.
    """
    kind, life = records.kind, records.life
    if kind.max() > LAST or (records.flags & ~np.uint32(0xFF | ENDED)).any():
      raise WireError('a step type, an end or a zero that is none')
    discount = records.numbers[:, 1]
    if discount.min() < 0 or discount.max() > 1:
      raise WireError('a discount that is not between 0 and 1')
    if records.numbers[kind == FIRST, 0].any():
      raise WireError('a reward with the first timestep of an episode')
    if (records.flags == MID | ENDED).any():
      raise WireError('a game that is over within an episode')
    changed = bool(self.seq) and not np.array_equal(life, self.life)
    restarts: np.ndarray | None = None
    if changed:
      restarts = life - self.life  # of u32, which wraps
      restarts[restarts > RESTARTS] = 1
    if changed or not kind.all() or self.over:  # else nothing begins, nor should
      opens = self.kind == LAST
      if restarts is not None:
        opens |= restarts > 0
      if (kind[opens] != FIRST).any() or ((kind == FIRST) & (self.kind > FIRST) & ~opens).any():
        raise WireError('an episode that begins without its first timestep, or within another')
    self.life, self.kind, self.over = life.copy(), kind, bool(kind.max() == LAST)
    self.within[:, 0] = life
    return restarts


class Item(NamedTuple):
  """A group's timesteps, on their way to an actor thread."""

  group: Group
  arrays: list[Any]  # the bytes of records, and of each array of observations
  at: float  # when they came


def within_episodes(items: list[Item], records: wire.Records) -> list[bool]:
  """Of each whether nothing begins, ends or was restarted in it, as is so most of the time."""
  groups = [item.group for item in items]
  one = len(groups) == 1
  expected = groups[0].within if one else np.concatenate([g.within for g in groups])
  as_before = records.words[:, ::2] == expected
  if one or as_before.all():
    return [not g.over and (not one or bool(as_before.all())) for g in groups]
  starts = np.cumsum([0, *(g.size for g in groups[:-1])])
  each = np.logical_and.reduceat(as_before.all(1), starts)
  return [bool(x) and not g.over for x, g in zip(each, groups, strict=True)]
