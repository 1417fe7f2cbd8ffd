"""A client of the learner's server: its groups of environments, and what is checked of their timesteps."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from podrace.distributed.environments import environment_messages
from podrace.distributed.environments.environment_messages import WireError
from podrace.distributed.net.frame import Buffer
from podrace.distributed.net.listener import Listener, Peer
from podrace.distributed.net.safe_text import label
from podrace.envs.timestep_rules import RULES, exceeds
from podrace.types import FIRST, LARGEST_REWARD, LAST, MID, TimeStep

if TYPE_CHECKING:
  from podrace.distributed.environments.pool import RemotePool

TOGETHER = 2**21  # bytes of timesteps that are looked at together, unless a single one has more
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
    # Life, discount, flags within an episode.
    self.within: np.ndarray = np.full((size, 3), (0, ONE, MID), np.uint32)
    self._buffers: list[np.ndarray] = []

  def buffer(self, size: int) -> np.ndarray:
    """Memory for the STEP that is awaited. That of the last one may be in use still, not that before."""
    while len(self._buffers) < 2:
      self._buffers.append(np.empty(size, np.uint8))
    return self._buffers[self.seq % 2]

  def accept(self, records: environment_messages.Records) -> np.ndarray | None:
    """Takes what the environments say; how often each [n] was restarted, None if none was.

    Raises:
      WireError: if it can't be.
    """
    kind: Any = records.kind
    life = records.life
    numbers: Any = records.numbers
    timestep = TimeStep(None, numbers[:, 0], numbers[:, 1], kind)
    for name in ('step_type', 'discount_range', 'first_reward'):
      if np.count_nonzero(RULES[name].is_broken(timestep, None)):
        raise WireError(RULES[name].came)
    if (records.flags & ~np.uint32(0xFF | ENDED)).any():
      raise WireError('an end or a zero that is none')
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
      opens |= (self.kind == FIRST) & (kind == FIRST)  # an episode that was over at once
      if np.count_nonzero(RULES['order'].is_broken(timestep, opens)):
        raise WireError(RULES['order'].came)
    self.life, self.kind, self.over = life.copy(), kind, bool(kind.max() == LAST)
    self.within[:, 0] = life
    return restarts


class Item(NamedTuple):
  """A group's timesteps, on their way to an actor thread."""

  group: Group
  arrays: list[Any]  # the bytes of records, and of each array of observations
  at: float  # when they came


def within_episodes(items: list[Item], records: environment_messages.Records) -> list[bool]:
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


class Incoming:
  """Timesteps that have come and are not looked at yet.

  They are looked at together, as most of what there is to check costs as much for many.

  Args:
    layout: of their bytes.
    listener: ends sessions of clients whose timesteps are wrong.
  """

  def __init__(self, layout: environment_messages.Layout, listener: Listener) -> None:
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
      if np.count_nonzero(exceeds(records.numbers, LARGEST_REWARD)):
        raise environment_messages.not_bounded(
          'a reward, score or discount', records.numbers, LARGEST_REWARD
        )
      self._layout.check_observations(steps)
      self._layout.check_masks(steps, records)
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
        self._accept_ends(group, environment_messages.Records(records.words[start:stop]))
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

  def _accept_ends(self, group: Group, records: environment_messages.Records) -> None:
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
