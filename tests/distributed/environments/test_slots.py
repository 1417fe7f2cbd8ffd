"""Slots and timesteps of groups, without a network: pools and peers are stubs."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from podrace.distributed.environments.groups import ClientState, EnvironmentGroup
from podrace.distributed.environments.slots import Slots


class Pool:
  """What Slots and groups need of one."""

  def __init__(self, num_envs: int) -> None:
    self.num_envs = self.batch_size = num_envs
    self.free = list(range(num_envs))
    self.run_id, self.used = np.zeros(num_envs, np.int64), np.zeros(num_envs, bool)
    self.asked = 0
    self.answering: list[Any] = []

  def expect(self, environments: int) -> None:
    self.asked += environments

  def withdraw(self, group: Any) -> bool:
    return group not in self.answering


def group(size: int) -> Any:
  peer: Any = types.SimpleNamespace(state=ClientState({'env': 'test'}))
  return EnvironmentGroup(peer, 0, size)


def filled(*sizes: int) -> tuple[Slots, list[Any]]:
  """Slots of pools of so many environments, and the groups that are started."""
  started: list[Any] = []
  found = Slots(sum(sizes), started.append, lambda: started)
  for size in sizes:
    pool: Any = Pool(size)
    found.add(pool)
  return found, started


def test_a_group_has_slots_of_the_pool_with_most_room() -> None:
  found, started = filled(2, 4)
  assert found.total == found.free == 6 and found.largest_group == 2
  one, two, three = group(2), group(2), group(2)
  for each in (one, two, three):
    found.enter(each)
  assert started == [one, two, three] and found.free == 0
  assert one.pool is found.pools[1] and {p.asked for p in found.pools} == {2, 4}
  assert sorted([*two.slots, *three.slots, *one.slots]) == [0, 0, 1, 1, 2, 3]


def test_a_waiting_group_starts_in_new_lives_of_free_slots() -> None:
  found, started = filled(2)
  one, two = group(2), group(2)
  found.enter(one)
  found.enter(two)
  assert started == [one] and two.state == 'waiting'
  found.leave([one])
  assert started == [one, two] and one.state == 'gone'
  assert two.run_id.tolist() == [1, 1] and found.pools[0].asked == 2  # type: ignore[attr-defined]
  found.leave([two, group(1)])
  assert found.free == 2 and found.pools[0].asked == 0  # type: ignore[attr-defined]


def test_slots_come_back_after_the_answer_to_their_group() -> None:
  found, started = filled(2)
  one, two = group(2), group(2)
  found.enter(one)
  one.state = 'acting'
  found.pools[0].answering.append(one)  # type: ignore[attr-defined]
  found.enter(two)
  found.leave([one])
  assert started == [one]
  found.release(one)
  found.release(one)
  assert started == [one, two] and found.free == 0


def test_a_large_group_is_overtaken_once_per_slot() -> None:
  found, started = filled(4)
  first, large = group(3), group(4)
  found.enter(first)
  found.enter(large)
  for _ in range(4):
    small = group(1)
    found.enter(small)
    assert started[-1] is small
    found.leave([small])
  found.enter(last := group(1))
  assert last not in started and large.state == 'waiting'
  found.leave([first])
  assert started[-1] is large


def test_a_drop_during_a_start_leaves_slots_to_the_next() -> None:
  started: list[Any] = []

  def start(one: Any) -> None:
    started.append(one)
    if len(started) == 1:
      found.leave([one])

  found = Slots(2, start, list)
  pool: Any = Pool(2)
  first, second = group(2), group(2)
  found.enter(first)
  found.enter(second)
  found.add(pool)
  assert started == [first, second] and found.free == 0


def test_a_dropped_client_has_no_other_group_started() -> None:
  started: list[Any] = []

  def start(one: Any) -> None:
    started.append(one)
    found.leave(both)

  found = Slots(4, start, list)
  pool: Any = Pool(4)
  both = [group(2), group(2)]
  for one in both:
    found.enter(one)
  found.add(pool)
  assert started == both[:1] and found.free == 4


def test_thousands_of_drops_are_no_recursion() -> None:
  started: list[Any] = []

  def start(one: Any) -> None:
    started.append(one)
    found.leave([one])

  found = Slots(2, start, list)
  pool: Any = Pool(2)
  for _ in range(1200):  # deeper than Python recurses
    found.enter(group(2))
  found.add(pool)
  assert len(started) == 1200 and found.free == 2


def test_groups_of_a_pool_that_is_gone_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
  found, _ = filled(2, 2)
  groups = [group(2), group(2)]
  for one in groups:
    found.enter(one)
  found.remove(found.pools[0])
  assert sorted(one.state for one in groups) == ['gone', 'stepping'] and found.total == 2
  found.leave(groups)
  assert found.free == 2
  monkeypatch.setattr('podrace.distributed.environments.slots.WAITING', 1)
  assert not found.is_crowded
  found.enter(group(2))
  found.enter(group(2))
  assert found.is_crowded
