"""Items of a table by key, with their priorities and the state of both selectors."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from podrace.tables import trees
from podrace.tables.chunks import Account, ChunkStore
from podrace.tables.items import END_OF_KEYS, NEW, Draws, Item, Leaf, Signature
from podrace.tables.limiters import Counts
from podrace.tables.selectors import Selector

BRIEF, LEAF_TEXT = 32, 100  # limits of a message: leaves, characters of each


class Contents:
  """Items within bounds, and their counts. Takes Table's arguments. Requires the store's lock."""

  def __init__(
    self,
    name: str,
    store: ChunkStore,
    sampler: Selector,
    remover: Selector,
    max_size: int,
    max_bytes: int | None,
    max_times_sampled: int,
    seed: int | Sequence[int],
  ) -> None:
    if max_bytes is not None and max_bytes < 1:
      raise ValueError(f'table {name!r}: {max_bytes=} must be positive')
    if max_times_sampled < 0:
      raise ValueError(f'table {name!r}: {max_times_sampled=} must be at least 0')
    self.name, self.store, self.sampler, self.remover = name, store, sampler, remover
    self.max_size, self.max_bytes, self.max_times_sampled = max_size, max_bytes, max_times_sampled
    self.counts, self.updates = Counts(), 0
    self.signature: Signature | None = None
    self.account = Account()
    self.slots: dict[int, int] = {}  # by key
    self.items: list[Item | None] = []  # by slot, as are the priorities and times
    self.next_sampled, self.next_removed = sampler.make(), remover.make()
    self._priorities = np.zeros(64)
    self._times = array('q')
    self._free: list[int] = []
    self._most = min(sampler.most, remover.most)
    self._rng = np.random.default_rng(seed)

  # --- checks of items

  def check_priority(self, priority: float) -> float:
    """Return a priority as a float. Raise ValueError if the selectors don't accept it."""
    if not 0 <= priority <= self._most:
      raise ValueError(
        f'table {self.name!r}: priority {priority} is not in [0, {self._most:g}], which '
        f'{self.sampler.name} and {self.remover.name} need'
      )
    return float(priority)

  def check(self, item: Item) -> None:
    """Raise ValueError if an item has a different signature, an invalid key or too many bytes."""
    if not NEW <= item.key < END_OF_KEYS:
      raise ValueError(f'table {self.name!r}: key={item.key} must be above 0 and below 2^62')
    if self.signature is not None and item.signature is not self.signature:
      check_signature = check_columns if item.amends else check_alike
      check_signature(self.name, self.signature, item.signature)
    if self.max_bytes is not None:
      chunks = {chunk for part in item.parts for chunk in part[0]}
      if (needed := sum(chunk.nbytes for chunk in chunks)) > self.max_bytes:
        raise ValueError(
          f'table {self.name!r}: the item needs chunks of {needed} bytes, '
          f'and max_bytes is {self.max_bytes}'
        )
    if not item.amends:
      # Also replaces an equal one after a restore, to use the caller's named tuple types.
      self.signature = item.signature

  # --- inserts and removals

  def insert(self, item: Item) -> None:
    """Insert an item with a new key, and remove items if a bound is exceeded."""
    slot = self._free.pop() if self._free else self._new_slot()
    self.items[slot] = item
    self.slots[item.key] = slot
    self._priorities[slot] = item.priority
    self._times[slot] = 0
    self.hold(item, self.account)
    self.next_sampled.insert(slot, item.priority)
    self.next_removed.insert(slot, item.priority)
    self.counts.inserts += 1
    if len(self.slots) > self.max_size or self.max_bytes is not None:
      self._shrink()

  def _new_slot(self) -> int:
    slot = len(self.items)
    self.items.append(None)
    self._times.append(0)
    if slot == len(self._priorities):
      self._priorities = np.concatenate([self._priorities, np.zeros_like(self._priorities)])
    return slot

  def replace(self, item: Item) -> None:
    """Replace the item that has the same key."""
    slot = self.slots[item.key]
    self._exchange(slot, item)
    self._set_priorities(np.array([slot]), np.array([item.priority]))
    self._shrink()

  def amend(self, item: Item) -> None:
    """Replace the rows of some columns of the item that has the same key. Keep everything else."""
    slot = self.slots[item.key]
    old = self.items[slot]
    assert old is not None
    names = [leaf.name for leaf in item.signature.leaves]
    new = dict(zip(names, item.parts, strict=True))
    leaves = zip(old.signature.leaves, old.parts, strict=True)
    parts = tuple([new.get(leaf.name, part) for leaf, part in leaves])
    self._exchange(slot, Item(item.key, old.priority, old.signature, parts))
    self._shrink()

  def _exchange(self, slot: int, item: Item) -> None:
    old = self.items[slot]
    assert old is not None
    self.hold(item, self.account)
    self.drop(old, self.account)
    self.items[slot] = item

  def _shrink(self) -> None:
    while len(self.slots) > self.max_size or (
      self.max_bytes is not None and self.account.bytes > self.max_bytes and len(self.slots) > 1
    ):
      (slot,), _ = self.next_removed.draw(1, self._rng)
      self._remove(int(slot))

  def _remove(self, slot: int) -> None:
    item = self.items[slot]
    assert item is not None
    self.next_sampled.remove(slot)
    self.next_removed.remove(slot)
    del self.slots[item.key]
    self.items[slot] = None
    self._free.append(slot)
    self.drop(item, self.account)
    self.counts.deletes += 1

  def delete(self, keys: Sequence[int] | np.ndarray) -> int:
    """Remove items by key and return the number of keys that were present."""
    before = self.counts.deletes
    for key in np.asarray(keys).tolist():
      slot = self.slots.get(key)
      if slot is not None:
        self._remove(slot)
    return self.counts.deletes - before

  def hold(self, item: Item, account: Account) -> None:
    """Hold the item's chunks for an account."""
    hold = self.store.hold
    for part in item.parts:
      for chunk in part[0]:
        hold(chunk, account)

  def drop(self, item: Item, account: Account) -> None:
    """Drop an account's hold on the item's chunks."""
    drop = self.store.drop
    for part in item.parts:
      for chunk in part[0]:
        drop(chunk, account)

  # --- sampling and priorities

  def draw(self, draws: Draws, n: int) -> None:
    """Draw `n` more items. If the table sets max_times_sampled, n must be 1."""
    slots, probabilities = self.next_sampled.draw(n, self._rng)
    chosen, times = slots.tolist(), self._times
    sampled = []
    for slot in chosen:
      times[slot] = count = times[slot] + 1
      sampled.append(count)
    self._give(draws, slots, probabilities, sampled)
    self.counts.samples += n
    if self.max_times_sampled and sampled[0] >= self.max_times_sampled:  # implies that n is 1
      self._remove(chosen[0])

  def peek(self, draws: Draws, n: int) -> None:
    """Draw `n` more items without counting them as sampled."""
    slots, probabilities = self.next_sampled.draw(n, self._rng)
    self._give(draws, slots, probabilities, [self._times[slot] for slot in slots.tolist()])

  def _give(
    self, draws: Draws, slots: np.ndarray, probabilities: np.ndarray, times: list[int]
  ) -> None:
    draws.items.extend([self.items[slot] for slot in slots.tolist()])
    size = np.full(len(slots), len(self.slots))
    draws.columns.append((probabilities, size, self._priorities[slots], np.array(times)))

  def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> int:
    """Set priorities [n] as Table.update_priorities. Return the number of keys present."""
    found = [self.slots.get(key, -1) for key in keys.tolist()]
    slots = np.array(found, np.int64)
    known = slots >= 0
    slots, values = slots[known], priorities[known]
    if len(set(found)) < len(found):
      last = {slot: i for i, slot in enumerate(slots.tolist())}
      order = sorted(last.values())
      slots, values = slots[order], values[order]
    self._set_priorities(slots, values)
    self.updates += len(slots)
    return int(known.sum())

  def _set_priorities(self, slots: np.ndarray, priorities: np.ndarray) -> None:
    self._priorities[slots] = priorities
    self.next_sampled.update(slots, priorities)
    self.next_removed.update(slots, priorities)

  # --- checkpoints

  def config(self) -> dict[str, Any]:
    """Return the settings that a checkpoint and its table must share, as Table.config."""
    return dict(
      sampler=self.sampler.name,
      remover=self.remover.name,
      max_size=self.max_size,
      max_bytes=self.max_bytes,
      max_times_sampled=self.max_times_sampled,
    )

  def snapshot(self) -> dict[str, Any]:
    """Return the complete state for a checkpoint, copied or immutable."""
    return dict(
      counts=dataclasses.asdict(self.counts),
      updates=self.updates,
      rng=self._rng.bit_generator.state,
      signature=self.signature,
      items=list(self.items),
      priorities=self._priorities[: len(self.items)].copy(),
      times=np.array(self._times, np.int64),
      free=np.array(self._free, np.int64),
      sampling=self.next_sampled.state(),
      removing=self.next_removed.state(),
    )

  def load(self, state: dict[str, Any]) -> None:
    """Load the state from `snapshot`, with items over this store's chunks."""
    self.counts = Counts(**state['counts'])
    self.updates = state['updates']
    self._rng.bit_generator.state = state['rng']
    self.signature = state['signature']
    self.items = list(state['items'])
    self.slots = {item.key: slot for slot, item in enumerate(self.items) if item is not None}
    self._priorities = np.concatenate([state['priorities'], np.zeros(64)])
    self._times = array('q', state['times'].tolist())
    self._free = state['free'].tolist()
    self.next_sampled.load(state['sampling'])
    self.next_removed.load(state['removing'])
    for item in self.items:
      if item is not None:
        self.hold(item, self.account)


def read_updates(
  keys: Any, priorities: Any, check: Callable[[float], object]
) -> tuple[np.ndarray, np.ndarray]:
  """Return the arguments of `update_priorities` as arrays, keys [n] and priorities [n].

  Raises:
    ValueError: If their shapes differ, or `check` raises it for the least or largest priority.
  """
  names, values = np.asarray(keys), np.asarray(priorities, np.float64)
  if names.shape != values.shape or names.ndim != 1:
    raise ValueError(f'expected keys [n] and priorities [n], got {names.shape}, {values.shape}')
  for extreme in (values.min(initial=0.0), values.max(initial=0.0)):
    check(float(extreme))
  return names, values


def check_alike(name: str, known: Signature, signature: Signature) -> None:
  """Check that a signature equals the signature of a table's items.

  Raises:
    ValueError: If the signatures differ.
  """
  same = trees.to_json(signature.structure) == trees.to_json(known.structure)
  if not same or signature.leaves != known.leaves:
    raise ValueError(
      f'table {name!r}: items are ({_brief(known.leaves)}), got ({_brief(signature.leaves)})'
    )


def check_columns(name: str, known: Signature, signature: Signature) -> None:
  """Check that a table's items have the columns of a signature.

  Raises:
    ValueError: If the items lack a column.
  """
  leaves = set(known.leaves)
  if other := [leaf for leaf in signature.leaves if leaf not in leaves]:
    raise ValueError(
      f'table {name!r}: items are ({_brief(known.leaves)}), and have no ({_brief(other)})'
    )


def _brief(leaves: Sequence[Leaf]) -> str:
  """Describe leaves in a message of bounded length."""
  more = [f'and {len(leaves) - BRIEF} more'] if len(leaves) > BRIEF else []
  return ', '.join([*(str(leaf)[:LEAF_TEXT] for leaf in leaves[:BRIEF]), *more])
