"""Pools of environments on the host are restored to the bit, or say why not."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import gymnasium
import jax
import numpy as np
import pytest
from shorthand import slow_after

from podrace.envs.host import action_log, ale, base, worker_pool
from podrace.envs.host.action_log import ActionLog, nth_seed
from podrace.envs.host.base import PoolArgs, SavedPool
from podrace.errors import HostError

NAMES = [
  'gymnasium:CartPole-v1',
  pytest.param('gymnasium:Pendulum-v1', marks=pytest.mark.slow),
  'gymnasium:host_envs:Masked-v0',
  'envpool:CartPole-v1',
  'ale:breakout',
  pytest.param('ale:breakout,sticky=0.25,episodic_life=True', marks=pytest.mark.slow),
]


class Played:
  """A pool, and the actions that it is sent: the same in each run of a test."""

  def __init__(self, name: str, num_envs: int = 3, first_seed: int = 7) -> None:
    self.spec, self.n, self.random = base.make(name), num_envs, np.random.default_rng(0)
    seeds = np.arange(first_seed, first_seed + num_envs, dtype=np.uint32)
    self.args = PoolArgs(num_envs, num_envs, seeds, 2, 60.0, saves=True)
    self.pool: Any = self.spec.make(self.args)

  def begin(self) -> Any:
    self.pool.reset()
    self.arrival = self.pool.recv()
    return self

  def play(self, steps: int) -> list[Any]:
    """The arrivals, as lists of arrays."""
    return [self.step(self.action()) for _ in range(steps)]

  def action(self) -> np.ndarray:
    space = self.spec.action_space
    observation = self.arrival.timestep.observation
    if isinstance(observation, dict):
      return np.argmax(observation['action_mask'], axis=1).astype(np.int32)
    if isinstance(space, gymnasium.spaces.Discrete):
      return self.random.integers(0, int(space.n), self.n).astype(np.int32)
    return self.random.uniform(space.low, space.high, (self.n, *space.shape)).astype(space.dtype)

  def step(self, action: np.ndarray) -> list[np.ndarray]:
    self.pool.send(self.arrival.env_id, action)
    self.arrival = self.pool.recv()
    a, t = self.arrival, self.arrival.timestep
    observation = t.observation
    parts = observation.values() if isinstance(observation, dict) else [observation]
    return [np.array(x) for x in (*parts, t.reward, t.discount, t.step_type, a.score, a.ended)]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
  """Environments are seeded anew after a few steps or resets."""
  monkeypatch.setattr(worker_pool, 'SEED_STEPS', 30)
  monkeypatch.setattr(ale, 'SEED_STEPS', 150)
  monkeypatch.setattr(ale, 'SEED_RESETS', 2)


def assert_restored(name: str, before: int, after: int) -> dict[str, np.ndarray]:
  one = Played(name).begin()
  one.play(before)
  while 'CartPole' in name and before and not one.arrival.timestep.last.any():
    one.play(1)  # a FIRST is due
  assert isinstance(one.pool, SavedPool) and one.pool.saves
  state, last = one.pool.state(), jax.tree.map(np.array, one.arrival.timestep)
  copies = {k: x.copy() for k, x in state.items()}
  random = one.random.bit_generator.state
  expected = one.play(after)
  for name_, x in copies.items():  # it did not change while the pool went on
    np.testing.assert_array_equal(state[name_], x)
  one.pool.close()
  other = Played(name, first_seed=100)
  other.random.bit_generator.state = random
  try:
    steps = itertools.count()
    other.arrival = other.pool.restore(state, lambda: next(steps))
    if 'gymnasium' not in name:  # replayed in the pool's own thread
      replayed = state['count'].max() - state['start'].min()
      assert replayed <= next(steps) <= replayed + 1  # and the first reset
    came = other.arrival.timestep
    jax.tree.map(np.testing.assert_array_equal, came[:2], last[:2])  # observation and reward
    for step, (came, wanted) in enumerate(zip(other.play(after), expected, strict=True)):
      for x, y in zip(came, wanted, strict=True):
        np.testing.assert_array_equal(x, y, f'at step {step}')
  finally:
    other.pool.close()
  return state


@pytest.mark.parametrize('name', NAMES)
def test_a_pool_that_is_restored_goes_on_to_the_bit(name: str, soon: None) -> None:
  state = assert_restored(name, 260, 60)
  if 'ale' not in name:
    return
  remembers = 'sticky' in name
  assert (state['resets'] == 0).all() or not remembers
  assert (state['start'] > 0).all() or remembers


def test_environments_are_seeded_anew_and_only_these_actions_are_replayed(soon: None) -> None:
  state = assert_restored('gymnasium:CartPole-v1', 260, 60)
  assert (state['seeding'] >= 3).all()
  replayed = state['count'] - state['start']
  assert (replayed >= 0).all() and (replayed < 30 + 500).all() and replayed.max() < 150
  assert state['actions0'].dtype == np.uint8 and len(state['actions0']) <= 260


def test_a_pool_is_restored_before_its_first_step() -> None:
  assert_restored('gymnasium:CartPole-v1', 0, 40)


def test_a_worker_that_died_is_seeded_otherwise_and_the_pool_is_restored() -> None:
  one = Played('gymnasium:CartPole-v1').begin()
  one.play(20)
  one.pool.workers[1].process.kill()
  one.play(40)
  state = one.pool.state()
  assert state['seeding'].max() == 1 and state['count'].min() == state['count'].max()
  random, expected = one.random.bit_generator.state, one.play(40)
  one.pool.close()
  other = Played('gymnasium:CartPole-v1')
  other.random.bit_generator.state = random
  other.arrival = other.pool.restore(state)
  came = other.play(40)
  other.pool.close()
  for x, y in zip(came, expected, strict=True):
    np.testing.assert_array_equal(x[0], y[0])


@pytest.mark.parametrize(
  'name', slow_after(2, 'gymnasium:CartPole-v1', 'envpool:CartPole-v1', 'ale:pong')
)
def test_a_state_of_another_pool_is_refused_and_the_pool_begins_anew(name: str) -> None:
  one = Played(name).begin()
  one.play(5)
  state = one.pool.state()
  wrong = [
    {k: x for k, x in state.items() if k != 'start'},
    {**state, 'count': state['count'] + 1000},
    {**state, 'start': state['start'] - 1},
    {**state, 'seed': state['seed'].astype(np.int32)},
    {**state, 'actions0': state['actions0'].astype(np.float64)},
    {**state, 'actions0': state['actions0'][:, :2]},
    {**state, 'actionsx': state['actions0']},
  ]
  for broken in wrong[:-1]:
    with pytest.raises(HostError, match='saved state'):
      one.pool.restore(broken)
  one.pool.close()
  other = Played(name)
  with pytest.raises(HostError):
    other.pool.restore(wrong[1])
  assert (other.begin().arrival.timestep.step_type == 0).all()
  assert len(other.play(3)) == 3
  other.pool.close()


@pytest.mark.parametrize(
  'name', slow_after(2, 'gymnasium:CartPole-v1', 'envpool:CartPole-v1', 'ale:pong')
)
def test_a_pool_that_was_restored_can_be_reset(name: str) -> None:
  one = Played(name).begin()
  one.play(5)
  state = one.pool.state()
  one.pool.close()
  other = Played(name)
  other.pool.restore(state)
  other.begin()
  other.play(3)
  assert (other.pool.state()['count'] == 3).all()
  other.pool.close()


def test_pools_keep_no_actions_unless_they_are_saved() -> None:
  for name in ('gymnasium:CartPole-v1', 'envpool:CartPole-v1', 'ale:pong'):
    spec = base.make(name)
    pool: Any = spec.make(PoolArgs(2, 2, np.zeros(2, np.uint32), 1, 60.0))
    assert not pool.saves
    pool.close()


# --- the log ---------------------------------------------------------------------------------------


def test_actions_of_environments_at_different_rows() -> None:
  """Against lists, over many arrays of actions, with environments that are seeded or reset anew."""
  random, n = np.random.default_rng(1), 4
  log = ActionLog('test', np.arange(n, dtype=np.uint32), gymnasium.spaces.Discrete(7))
  kept: list[list[int]] = [[] for _ in range(n)]
  for t in range(3000):
    ids = (
      np.arange(n) if t < 700 or random.random() < 0.5 else np.flatnonzero(random.random(n) < 0.6)
    )
    action = random.integers(0, 7, len(ids))
    log.append(ids.astype(np.int32), action)
    for i, a in zip(ids, action, strict=True):
      kept[i].append(int(a))
    if random.random() < 0.01:
      i = random.integers(n, size=1)
      log.seeded(i) if random.random() < 0.5 else log.reset(i)
      kept[i[0]].clear()
  state = log.state()
  again = ActionLog('test', np.zeros(n, np.uint32), gymnasium.spaces.Discrete(7))
  again.restore(state)
  rows = again.rows()
  for i in range(n):
    start, count = again.start[i] - rows.first, again.count[i] - rows.first
    assert rows.actions[start:count, i].tolist() == kept[i]
  assert (again.seeds() == log.seeds()).all()


def test_actions_outside_of_their_space_are_refused() -> None:
  log = ActionLog('test', np.zeros(2, np.uint32), gymnasium.spaces.Discrete(7))
  log.append(np.arange(2, dtype=np.int32), np.array([6, 7]))
  again = ActionLog('test', np.zeros(2, np.uint32), gymnasium.spaces.Discrete(7))
  with pytest.raises(HostError):
    again.restore(log.state())


def test_actions_that_take_too_much_memory_are_not_kept(
  monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
  monkeypatch.setattr(action_log, 'BYTES', 40_000)
  log = ActionLog('test', np.zeros(4, np.uint32), gymnasium.spaces.Box(0, 1, (2,), np.float32))
  with caplog.at_level(logging.WARNING):
    for _ in range(2000):
      log.append(np.arange(4, dtype=np.int32), np.zeros((4, 2), np.float32))
  assert not log.is_kept and len(caplog.records) == 1


def test_seeds_differ_between_environments_and_seedings() -> None:
  seeds = {nth_seed(s, k) for s in range(200) for k in range(200)}
  assert len(seeds) > 39_900 and all(0 <= s < 2**31 for s in seeds)
  assert nth_seed(5, 0) == 5


# --- determinism ------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['Sequence', 'Tiring', 'Normalized'])
def test_an_environment_that_a_seed_does_not_repeat_is_reported(
  name: str, caplog: pytest.LogCaptureFixture
) -> None:
  """It observes the number of its instance, or something outlives the reset."""
  spec = base.make(f'gymnasium:host_envs:{name}-v0')
  with caplog.at_level(logging.WARNING):
    assert spec.try_out is not None
    spec.try_out(60.0)
    for saves, warnings in ((False, 0), (True, 1), (True, 1)):  # once, where states are kept
      pool: Any = spec.make(PoolArgs(2, 2, np.zeros(2, np.uint32), 1, 60.0, saves))
      assert not pool.saves
      pool.close()
      assert caplog.text.count('anew') == warnings
  caplog.clear()
  spec = base.make('gymnasium:host_envs:Masked-v0')
  assert spec.try_out is not None
  spec.try_out(60.0)
  assert not caplog.text


@pytest.mark.parametrize(
  ('game', 'remembers'),
  [('ice_hockey', True), ('crossbow', True), ('pong', False), ('breakout', False)],
)
def test_games_that_remember_the_games_before(game: str, remembers: bool) -> None:
  assert ale.remembers(game) == remembers
