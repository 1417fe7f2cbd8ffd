"""Selectors, which choose the next item of a table to sample or to remove.

The six selectors are Reverb's (Cassirer et al. 2021, arXiv 2102.04736, section 3.3). A `Selector`
is the setting, and `selector.make()` makes the state for one table's items. An item is known here
by its slot, a small integer that the table reuses once it is free.
"""

from __future__ import annotations

import heapq
import sys
from array import array
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

State = dict[str, np.ndarray]  # of a selector, as saved in checkpoints


class Order(Protocol):
  """State of a selector. Callers have checked the priorities and know which slots are present."""

  def insert(self, slot: int, priority: float) -> None:
    """Insert an absent slot."""
    ...

  def remove(self, slot: int) -> None:
    """Remove a present slot."""
    ...

  def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
    """Set the priorities [n] of present slots [n]."""
    ...

  def draw(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw n slots with replacement. There must be at least one slot.

    Returns:
      (slots [n] i64, their probabilities [n] f64).
    """
    ...

  def state(self) -> Callable[[], State]:
    """Capture the current state and return a function that converts it to arrays.

    The capture is quick, because it blocks traffic. The conversion may run later.
    """
    ...

  def load(self, state: State) -> None:
    """Load a state, so that draws continue as in the selector that saved it."""
    ...


class Selector(NamedTuple):
  """Setting of a selector: its name in messages and checkpoints, its factory and its limit."""

  name: str
  make: Callable[[], Order]
  most: float = sys.float_info.max  # largest priority


def uniform() -> Selector:
  """Select every item with equal probability."""
  return Selector('uniform', _Uniform)


def fifo() -> Selector:
  """Select the item that was inserted first."""
  return Selector('fifo', lambda: _Line(oldest=True))


def lifo() -> Selector:
  """Select the item that was inserted last."""
  return Selector('lifo', lambda: _Line(oldest=False))


def prioritized(exponent: float) -> Selector:
  """Select an item with probability proportional to priority ** exponent.

  An item of priority zero is never drawn, whatever the exponent. If all priorities are zero, the
  draw is uniform.

  Raises:
    ValueError: If the exponent is negative or not finite.
  """
  if not 0 <= exponent < float('inf'):
    raise ValueError(f'prioritized({exponent}): the exponent must be at least 0 and finite')
  # A million weights must still have a finite sum.
  most = 1e300 ** min(1.0, 1 / exponent) if exponent else 1e300
  return Selector(f'prioritized({exponent:g})', lambda: _Prioritized(exponent), most)


def min_heap() -> Selector:
  """Select the item with the lowest priority. Ties go to the oldest insert or update."""
  return Selector('min_heap', lambda: _Heap(1.0))


def max_heap() -> Selector:
  """Select the item with the highest priority. Ties go to the oldest insert or update."""
  return Selector('max_heap', lambda: _Heap(-1.0))


class _Uniform:
  """Array of all slots without holes. `_place` is the position of each slot."""

  def __init__(self) -> None:
    self._slots = np.zeros(64, np.int64)
    self._place = array('q')
    self._size = 0

  def insert(self, slot: int, priority: float) -> None:
    del priority
    if self._size == len(self._slots):
      self._slots = np.concatenate([self._slots, np.zeros_like(self._slots)])
    if slot >= len(self._place):
      _reach(self._place, slot)
    self._slots[self._size] = slot
    self._place[slot] = self._size
    self._size += 1

  def remove(self, slot: int) -> None:
    self._size -= 1
    last = int(self._slots[self._size])
    self._slots[self._place[slot]] = last
    self._place[last] = self._place[slot]

  def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
    pass

  def draw(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    chosen = self._slots[rng.integers(0, self._size, n)]
    return chosen, np.full(n, 1 / self._size)

  def state(self) -> Callable[[], State]:
    slots = self._slots[: self._size].copy()
    return lambda: dict(slots=slots)

  def load(self, state: State) -> None:
    for slot in state['slots'].tolist():
      self.insert(slot, 0.0)


class _Line:
  """Doubly linked list in two arrays, indexed by slot + 1. Entry 0 is the head and the tail."""

  def __init__(self, oldest: bool) -> None:
    self._oldest = oldest
    self._next, self._before = array('q', [0]), array('q', [0])

  def insert(self, slot: int, priority: float) -> None:
    del priority
    i, last = slot + 1, self._before[0]
    if i >= len(self._before):
      _reach(self._next, i)
      _reach(self._before, i)
    self._next[last], self._before[i] = i, last
    self._next[i], self._before[0] = 0, i

  def remove(self, slot: int) -> None:
    before, after = self._before[slot + 1], self._next[slot + 1]
    self._next[before], self._before[after] = after, before

  def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
    pass

  def draw(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    del rng
    chosen = (self._next if self._oldest else self._before)[0] - 1
    return _certain(chosen, n)

  def state(self) -> Callable[[], State]:
    following, before = np.array(self._next), np.array(self._before)
    return lambda: dict(next=following, before=before)

  def load(self, state: State) -> None:
    self._next = array('q', state['next'].tolist())
    self._before = array('q', state['before'].tolist())


class _Heap:
  """Heap of (priority, when, slot). An entry is void unless `when` is the newest of its slot."""

  def __init__(self, sign: float) -> None:
    self._sign = sign
    self._heap: list[tuple[float, int, int]] = []
    self._when = array('q')  # by slot; 0 for none
    self._size = self._now = 0

  def insert(self, slot: int, priority: float) -> None:
    _reach(self._when, slot)
    self._size += 1
    self._push(slot, priority)

  def _push(self, slot: int, priority: float) -> None:
    self._now += 1
    self._when[slot] = self._now
    heapq.heappush(self._heap, (self._sign * priority, self._now, slot))
    if len(self._heap) > 2 * self._size + 64:
      self._heap = [entry for entry in self._heap if self._when[entry[2]] == entry[1]]
      heapq.heapify(self._heap)

  def remove(self, slot: int) -> None:
    self._when[slot] = 0
    self._size -= 1

  def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
    for slot, priority in zip(slots.tolist(), priorities.tolist(), strict=True):
      self._push(slot, priority)

  def draw(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    del rng
    while self._when[self._heap[0][2]] != self._heap[0][1]:
      heapq.heappop(self._heap)
    return _certain(self._heap[0][2], n)

  def state(self) -> Callable[[], State]:
    heap, whens, now = list(self._heap), np.array(self._when), self._now

    def arrays() -> State:
      live = [entry for entry in heap if whens[entry[2]] == entry[1]]
      priorities, slots = [entry[0] for entry in live], [entry[2] for entry in live]
      return dict(
        priorities=np.array(priorities, np.float64),
        slots=np.array(slots, np.int64),
        whens=whens,
        now=np.array(now),
      )

    return arrays

  def load(self, state: State) -> None:
    self._when, self._now = array('q', state['whens'].tolist()), int(state['now'])
    slots = state['slots'].tolist()
    self._heap = [
      (priority, self._when[slot], slot)
      for priority, slot in zip(state['priorities'].tolist(), slots, strict=True)
    ]
    heapq.heapify(self._heap)
    self._size = len(slots)


class _Prioritized:
  """Tree of sums over the slots' weights.

  Node i is the sum of nodes 2i and 2i + 1, and slot s is node `_leaves + s`. A draw first refreshes
  the inner nodes for all changes since the last draw. Each is summed anew from its children, so
  rounding errors do not accumulate.
  """

  def __init__(self, exponent: float) -> None:
    self._exponent = exponent
    self._all = _Uniform()  # draws if all priorities are zero
    self._leaves = 64
    self._sums = np.zeros(2 * self._leaves)
    self._changed: list[int] = []

  def insert(self, slot: int, priority: float) -> None:
    self._all.insert(slot, priority)
    while slot >= self._leaves:
      self._grow()
    self._sums[self._leaves + slot] = priority**self._exponent if priority else 0.0
    self._changed.append(slot)

  def remove(self, slot: int) -> None:
    self._all.remove(slot)
    self._sums[self._leaves + slot] = 0.0
    self._changed.append(slot)

  def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
    weights = np.where(priorities == 0, 0.0, priorities**self._exponent)
    self._sums[self._leaves + slots] = weights
    self._changed.extend(slots.tolist())

  def draw(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    self._refresh()
    total = self._sums[1]
    if total == 0:
      return self._all.draw(n, rng)
    left_over, node = rng.random(n) * total, np.ones(n, np.int64)
    while node[0] < self._leaves:  # all are at the same depth
      node *= 2
      left = self._sums[node]
      # Rounding may leave more than the remaining weight. Never enter a subtree of weight 0.
      right = (left_over >= left) & (self._sums[node + 1] > 0)
      left_over -= np.where(right, left, 0.0)
      node += right
    return node - self._leaves, self._sums[node] / total

  def _refresh(self) -> None:
    if len(self._changed) * 4 > self._leaves:
      self._rebuild()
    elif self._changed:
      nodes = np.array(self._changed) + self._leaves
      while nodes[0] > 1:
        nodes = np.unique(nodes >> 1)
        self._sums[nodes] = self._sums[2 * nodes] + self._sums[2 * nodes + 1]
    self._changed.clear()

  def _rebuild(self) -> None:
    first = self._leaves // 2
    while first:
      below = self._sums[2 * first : 4 * first]
      self._sums[first : 2 * first] = below[::2] + below[1::2]
      first //= 2

  def _grow(self) -> None:
    grown = np.zeros(4 * self._leaves)
    grown[2 * self._leaves : 3 * self._leaves] = self._sums[self._leaves :]
    self._sums, self._leaves = grown, 2 * self._leaves
    self._rebuild()

  def state(self) -> Callable[[], State]:
    slots, weights = self._all.state(), self._sums[self._leaves :].copy()
    return lambda: dict(slots(), weights=weights)

  def load(self, state: State) -> None:
    self._all.load(state)
    self._leaves = len(state['weights'])
    self._sums = np.concatenate([np.zeros(self._leaves), state['weights']])
    self._rebuild()


def _certain(slot: int, n: int) -> tuple[np.ndarray, np.ndarray]:
  """Return n draws of the only choice. The case n = 1 is fast, because removers use it."""
  return (np.array([slot]), _ONE) if n == 1 else (np.full(n, slot), np.ones(n))


_ONE = np.ones(1)
_ONE.flags.writeable = False


def _reach(numbers: array[int], index: int) -> None:
  """Grow an array so that it has an entry `index`."""
  if index >= len(numbers):
    numbers.extend([0] * (max(index, 2 * len(numbers)) + 1 - len(numbers)))
