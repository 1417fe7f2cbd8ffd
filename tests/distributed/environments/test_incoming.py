"""Timesteps that are checked together, and the network that threads share: peers, pools and listener are stubs."""

from __future__ import annotations

import collections
import types
from typing import Any

import numpy as np
import peers
import pytest
from children import until

from podrace.distributed.environments import environment_messages, shared_listener
from podrace.distributed.environments.groups import ClientState, EnvironmentGroup
from podrace.distributed.environments.incoming import IncomingSteps
from podrace.distributed.environments.shared_listener import SharedNetwork
from podrace.types import FIRST, LAST, MID

KIND = peers.spec()
LAYOUT = environment_messages.Layout(
  environment_messages.schema(KIND.observation_space, KIND.action_space)
)


class Pool:
  """What comes for an actor thread."""

  def __init__(self, num_envs: int) -> None:
    self.run_id = np.zeros(num_envs, np.int64)
    self.come: list[Any] = []
    self.waiting, self.nudged = False, 0

  def expect(self, environments: int) -> None:
    pass

  def put(self, items: list[Any]) -> None:
    self.come.append([item.group for item in items])

  def nudge(self) -> None:
    self.nudged += 1


class Listener:
  """What ends sessions; that of groups it is given."""

  def __init__(self) -> None:
    self.counts: collections.Counter[str] = collections.Counter()
    self.blamed: list[tuple[Any, str]] = []
    self.surprises: list[Exception] = []

  def blame(self, peer: Any, error: Exception) -> None:
    self.blamed.append((peer, str(error)))
    for one in peer.groups:
      one.state = 'gone'

  def unexpected(self, error: Exception) -> None:
    self.surprises.append(error)


class Peer:
  """A client with one group."""

  def __init__(self) -> None:
    self.state = ClientState({'env': 'test'})
    self.groups: list[Any] = []


def groups(pool: Any, count: int) -> list[Any]:
  found: list[Any] = []
  for i in range(count):
    peer: Any = Peer()
    peer.groups.append(EnvironmentGroup(peer, 0, 2))
    peer.groups[0].begin(pool, np.arange(2 * i, 2 * i + 2))
    found += peer.groups
  return found


def body(kind: int = MID, value: float = 0.0, **fields: Any) -> bytes:
  records = np.zeros(2, environment_messages.RECORD)
  records['step_type'], records['discount'] = kind, 1.0
  for name, x in fields.items():
    records[name] = x
  return records.tobytes() + np.full((2, 4), value, np.float32).tobytes()


def step(incoming: IncomingSteps, group: Any, data: bytes) -> None:
  group.seq += 1
  group.state = 'stepping'
  incoming.add(group, data)


def test_good_steps_of_a_turn_are_handed_on_together() -> None:
  pool: Any = Pool(8)
  listener: Any = Listener()
  incoming = IncomingSteps(LAYOUT, listener)
  good, nan, much, again = every = groups(pool, 4)
  for one in every:
    incoming.add(one, body(FIRST))
  incoming.check()
  assert pool.come == [every] and not listener.blamed and listener.counts['frames'] == 8
  for one, data in (
    (good, body()),
    (nan, body(value=np.nan)),
    (much, body(LAST, discount=[0.0, 2.0])),
    (again, body(MID, life=[0, 1])),
  ):
    step(incoming, one, data)
  incoming.check()
  incoming.check()
  reasons = dict(listener.blamed)
  assert reasons.keys() == {nan.peer, much.peer, again.peer}
  assert 'NaN' in reasons[nan.peer] and 'discount' in reasons[much.peer]
  assert 'first timestep' in reasons[again.peer]
  assert pool.come[1:] == [[good]] and good.state == 'acting' and not listener.surprises


def test_restarts_are_other_lives_of_their_slots() -> None:
  pool: Any = Pool(2)
  listener: Any = Listener()
  incoming = IncomingSteps(LAYOUT, listener)
  (one,) = groups(pool, 1)
  incoming.add(one, body(FIRST))
  incoming.check()
  step(incoming, one, body([MID, FIRST], life=[0, 3]))
  incoming.check()
  assert pool.run_id.tolist() == one.run_id.tolist() == [0, 3] and one.client.restarts == 3


def test_whose_client_is_gone_meanwhile_is_passed_over() -> None:
  pool: Any = Pool(4)
  listener: Any = Listener()
  incoming = IncomingSteps(LAYOUT, listener)
  gone, there = groups(pool, 2)
  incoming.add(gone, body(value=np.inf))
  incoming.add(there, body(FIRST))
  gone.state = 'gone'
  incoming.check()
  assert pool.come == [[there]] and not listener.blamed


class Turning:
  """A listener that only counts its turns."""

  def __init__(self) -> None:
    self.calls: collections.deque[Any] = collections.deque()
    self.ended: list[Any] = []
    self.said: list[str] = []
    self.turns, self.closed = 0, False
    self.counts: collections.Counter[str] = collections.Counter()
    self.later = self.calls.append

  def open(self) -> None:
    pass

  def do_calls(self) -> None:
    while self.calls:
      self.calls.popleft()()

  def turn(self, wait: float) -> None:
    self.turns += 1
    self.do_calls()

  def wake(self) -> None:
    pass

  def log(self, line: str, *args: Any, **more: Any) -> None:
    self.said.append(line)

  def end(self, *how: Any) -> None:
    self.ended.append(how)

  def close(self) -> None:
    self.closed = True


def test_a_call_is_left_to_the_leader_of_the_network() -> None:
  listener: Any = Turning()
  shared, did = SharedNetwork(listener, []), []
  shared.call(did.append, 'at once')
  with shared.lead:
    shared.call(did.append, 'later')
    assert did == ['at once'] and not shared.turn(0.0)
  assert shared.turn(0.0) and did == ['at once', 'later']


def test_its_own_thread_gives_the_network_to_a_waiting_pool() -> None:
  listener: Any = Turning()
  busy: Any = Pool(1)
  idle: Any = Pool(1)
  idle.waiting = True
  shared = SharedNetwork(listener, [busy, idle])
  shared.open()
  until(lambda: listener.turns > 1 and idle.nudged > 1)
  shared.finish()
  turns = listener.turns
  assert not shared.turn(0.0) and listener.turns == turns  # nobody is served any more
  shared.close()
  ((is_complete, _, seconds),) = listener.ended
  assert is_complete and seconds == shared_listener.GOODBYE_SECONDS and listener.closed
  assert not busy.nudged


def test_a_failure_is_raised_in_the_next_thread() -> None:
  listener: Any = Turning()
  shared = SharedNetwork(listener, [])
  with pytest.raises(RuntimeError, match='ZeroDivisionError'):
    shared.call(lambda: 1 / 0)
  for _ in range(2):
    with pytest.raises(RuntimeError, match='ZeroDivisionError'):
      shared.turn(0.0)
  assert len(listener.said) == 1 and 'ZeroDivisionError' in str(shared.failure)
  shared.open()
  shared.close()
  assert not listener.ended and listener.closed


def test_a_thread_that_keeps_the_network_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
  listener: Any = Turning()
  shared = SharedNetwork(listener, [])
  monkeypatch.setattr(shared, 'lead', types.SimpleNamespace(acquire=lambda **how: False))
  with pytest.raises(RuntimeError, match='network'):
    shared.close()
  assert not listener.closed
