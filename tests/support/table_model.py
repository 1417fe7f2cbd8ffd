"""What a table does, as plainly as possible: the oracle of the property tests."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from typing import Any


@dataclasses.dataclass
class Entry:
  priority: float
  payload: Any
  inserted: int
  touched: int
  times: int = 0


@dataclasses.dataclass
class Limits:
  """The rate limiter's rules, written down once more."""

  spi: float
  min_size: int
  low: float
  high: float


def removals(table: Any) -> deque[list[int]]:
  """For each item that comes in, or replaces or amends one, the keys that the table's remover chooses for it.

  In the order in which it does: randomness is followed, and so are the bytes that chunks turn out to have.
  """
  chosen: deque[list[int]] = deque()
  contents = table.contents
  draw = table.contents.next_removed.draw

  def counted(call: Any) -> Any:
    def counting(item: Any) -> None:
      chosen.append([])
      call(item)

    return counting

  def recorded(n: int, rng: Any) -> Any:
    full = contents.max_bytes is not None and contents.account.bytes > contents.max_bytes
    assert len(table) > contents.max_size or (full and len(table) > 1), 'there is room for all'
    slots, probabilities = draw(n, rng)
    chosen[-1] += [contents.items[slot].key for slot in slots.tolist()]
    return slots, probabilities

  table.contents.next_removed.draw = recorded
  contents.insert = counted(contents.insert)
  contents.replace = counted(contents.replace)
  contents.amend = counted(contents.amend)
  return chosen


class Model:
  def __init__(
    self,
    sampler: str,
    remover: str,
    limits: Limits,
    max_size: int,
    max_times: int,
    exponent: float,
    removed: deque[list[int]],
  ) -> None:
    self.removed = removed  # by the table
    self.sampler, self.remover, self.limits = sampler, remover, limits
    self.max_size, self.max_times, self.exponent = max_size, max_times, exponent
    self.entries: dict[int, Entry] = {}
    self.inserts = self.samples = self.deletes = self.now = 0
    self.waiting: list[tuple[int, float, Any]] = []

  def may_sample(self) -> bool:
    there = self.inserts - self.deletes >= self.limits.min_size
    return there and self.inserts * self.limits.spi - self.samples - 1 >= self.limits.low

  def may_insert(self) -> bool:
    if self.inserts + 1 - self.deletes <= self.limits.min_size:
      return True
    return (self.inserts + 1) * self.limits.spi - self.samples <= self.limits.high

  def probabilities(self, selector: str) -> dict[int, float]:
    """The probability of each key that may be chosen."""
    entries = self.entries
    if selector == 'prioritized':
      weights = {k: e.priority**self.exponent for k, e in entries.items() if e.priority}
      if weights:
        return {k: w / math.fsum(weights.values()) for k, w in weights.items()}
    if selector in ('uniform', 'prioritized'):
      return dict.fromkeys(entries, 1 / len(entries))
    best = {
      'fifo': lambda k: entries[k].inserted,
      'lifo': lambda k: -entries[k].inserted,
      'min_heap': lambda k: (entries[k].priority, entries[k].touched),
      'max_heap': lambda k: (-entries[k].priority, entries[k].touched),
    }[selector]
    return {min(entries, key=best): 1.0}

  def insert(self, key: int, priority: float, payload: Any) -> None:
    """Inserts, or queues."""
    if key in self.entries:
      self.replace(key, priority, payload)
    else:
      self.waiting.append((key, priority, payload))
    self.admit()

  def replace(self, key: int, priority: float, payload: Any) -> None:
    self.update(key, priority)
    self.entries[key].payload = payload
    self.shrink()

  def amend(self, key: int, payload: Any) -> None:
    if key in self.entries:
      self.entries[key].payload = payload
      self.shrink()
    self.admit()

  def shrink(self) -> None:
    for gone in self.removed.popleft():
      allowed = self.probabilities(self.remover)
      assert gone in allowed, f'{gone} was removed, and not one of {allowed}'
      del self.entries[gone]
      self.deletes += 1

  def admit(self) -> None:
    while self.waiting:
      key, priority, payload = self.waiting[0]
      if key in self.entries:
        self.replace(key, priority, payload)
      elif self.may_insert():
        self.now += 1
        self.entries[key] = Entry(priority, payload, self.now, self.now)
        self.shrink()
        self.inserts += 1
      else:
        return
      self.waiting.pop(0)

  def update(self, key: int, priority: float) -> None:
    if key in self.entries:
      self.now += 1
      self.entries[key].priority, self.entries[key].touched = priority, self.now

  def delete(self, key: int) -> None:
    if key in self.entries:
      del self.entries[key]
      self.deletes += 1

  def peek(self, key: int) -> tuple[float, int, float, int, Any]:
    """As `sample`, of a key that was only looked at."""
    entry = self.entries[key]
    probability = self.probabilities(self.sampler)[key]
    return probability, len(self.entries), entry.priority, entry.times, entry.payload

  def sample(self, key: int) -> tuple[float, int, float, int, Any]:
    """(probability, table size, priority, times sampled, payload) of a key that was sampled."""
    assert self.may_sample()
    entry = self.entries[key]
    probability = self.probabilities(self.sampler)[key]
    entry.times += 1
    self.samples += 1
    found = probability, len(self.entries), entry.priority, entry.times, entry.payload
    if self.max_times and entry.times >= self.max_times:
      del self.entries[key]
      self.deletes += 1
    return found
