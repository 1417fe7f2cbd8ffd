"""Worlds with lifetimes: what a task keeps across episodes, when it changes, and what each world gives."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrace import cli
from podrace.envs import contract, make
from podrace.envs.own import lifetimes
from podrace.envs.own.empty_rooms import EmptyRooms
from podrace.envs.own.grid_worlds import GridState, GridTask, GridWorlds
from podrace.envs.own.lifetimes import Lifetimes, LifetimeState
from podrace.envs.own.objects import HIGH, LOW, Objects
from podrace.types import FIRST, LAST

UP, RIGHT, DOWN, LEFT = range(4)
EPISODE = jnp.int32(0)
KEY = functools.partial(jax.random.key, 0)


def tasks(world: Any, count: int) -> Any:
  """[count, ...] of a world."""
  run = contract.quick_jit(jax.vmap(world.task))
  return jax.tree.map(np.asarray, run(jax.random.split(jax.random.key(0), count)))


def states(env: Any, steps: int, num_envs: int = 4, seed: int = 0) -> tuple[LifetimeState, Any]:
  """States and timesteps [steps, num_envs] at random."""
  run = random_steps(env, steps, num_envs)
  found: tuple[LifetimeState, Any] = jax.tree.map(np.asarray, run(jax.random.key(seed)))
  return found


@functools.lru_cache(maxsize=1)
def random_steps(env: Any, steps: int, num_envs: int) -> Any:
  """A compiled function from a key to `states`."""

  @contract.quick_jit
  def run(key: Any) -> Any:
    many = lifetimes.batch(env, num_envs)
    first_key, steps_key = jax.random.split(key)

    def step(state: Any, key: Any) -> Any:
      act_key, env_key = jax.random.split(key)
      action = contract.random_action(env.action_space, act_key, num_envs)
      state, timestep = many.step(state, action, jax.random.split(env_key, num_envs))
      return state, (state, timestep)

    state, _ = many.reset(first_key)
    return jax.lax.scan(step, state, jax.random.split(steps_key, steps))[1]

  return run


@pytest.mark.parametrize(
  'name', ['random_abc', 'nonstationary_abc,period=2,episodes=3', 'key_box,steps=12', 'grid_worlds']
)
def test_the_contract(name: str) -> None:
  contract.check(make(f'podrace:{name}'), jax.random.key(0), steps=110, num_envs=4)


# --- lifetimes ------------------------------------------------------------------------------------------


def test_a_task_lasts_for_a_lifetime_of_so_many_episodes() -> None:
  life, timestep = states(Lifetimes(EmptyRooms(size=7, steps=4), episodes=3), 60)
  begins = timestep.step_type == FIRST
  assert begins.sum() > 40
  for i in range(4):
    numbers, goals = life.episode[begins[:, i], i], life.task[begins[:, i], i]
    np.testing.assert_array_equal(numbers, np.arange(1, len(numbers) + 1) % 3)
    lives = [goals[2:5], goals[5:8], goals[8:11]]
    assert all((x == x[0]).all() for x in lives)
    assert len({tuple(x[0]) for x in lives}) > 1
  changes = np.any(life.task[1:] != life.task[:-1], axis=-1)
  assert not np.any(changes & ~((life.episode[1:] == 0) & begins[1:]))


def test_a_lifetime_may_have_no_end() -> None:
  life, timestep = states(Lifetimes(EmptyRooms(size=5, steps=2), episodes=0), 60)
  assert (life.task == life.task[:1]).all()
  assert life.episode[-1].min() == (timestep.step_type == FIRST).sum(0).min() == 20


def test_environments_of_one_agent_share_a_lifetime() -> None:
  env = Lifetimes(EmptyRooms(), episodes=2)
  reset = jax.jit(lifetimes.batch(env, 6).reset)
  goals = [np.asarray(reset(jax.random.key(s))[0].task) for s in range(5)]
  assert all((x == x[0]).all() for x in goals) and len({tuple(x[0]) for x in goals}) > 2
  plain = make('podrace:catch')
  for x in jax.tree.leaves(jax.eval_shape(lifetimes.batch(plain, 3).reset, KEY())):
    assert x.shape[0] == 3


def test_a_numbered_task_is_always_the_same() -> None:
  for env, expected in ((make('podrace:empty_rooms,task=3,steps=2,episodes=1'), 1), (make('podrace:empty_rooms,steps=2,episodes=1'), 5)):  # fmt: skip
    found = {tuple(x) for s in (0, 1) for x in states(env, 30, seed=s)[0].task.reshape(-1, 2)}
    assert (len(found) == 1) == (expected == 1) and len(found) >= expected


# --- Empty Rooms ------------------------------------------------------------------------------------------


def reachable(walls: np.ndarray, start: tuple[int, int]) -> set[tuple[int, int]]:
  """By a search in plain Python."""
  found, front = {start}, [start]
  while front:
    y, x = front.pop()
    for dy, dx in ((-1, 0), (0, 1), (1, 0), (0, -1)):
      to = (y + dy, x + dx)
      inside = min(to) >= 0 and max(to) < len(walls)
      if inside and not walls[to] and to not in found:
        found.add(to)
        front.append(to)
  return found


@pytest.mark.parametrize('size', [5, 9])
def test_all_rooms_can_be_entered_and_goals_are_everywhere(size: int) -> None:
  world = EmptyRooms(size=size)
  free = {tuple(x) for x in np.argwhere(~world.walls)}
  assert reachable(world.walls, (0, 0)) == free
  assert len(free) == size**2 - (2 * size - 1) + 4
  goals = tasks(world, 2_000)
  assert {tuple(x) for x in goals} == free - {(0, 0)}


def test_the_goal_is_not_shown() -> None:
  world = EmptyRooms(size=5, steps=3)
  step = jax.jit(world.step)
  state, first = world.reset(jnp.array([0, 1]), KEY())
  other, same = world.reset(jnp.array([4, 4]), KEY())
  np.testing.assert_array_equal(first.observation, same.observation)
  assert np.flatnonzero(first.observation).tolist() == [0]
  _, arrived = step(jnp.array([0, 1]), EPISODE, state, RIGHT, KEY())
  _, passed = step(jnp.array([4, 4]), EPISODE, other, RIGHT, KEY())
  assert (arrived.reward, arrived.discount, arrived.step_type) == (1, 0, LAST)
  assert (passed.reward, passed.discount, passed.last) == (0, 1, False)
  np.testing.assert_array_equal(arrived.observation, passed.observation)
  _, late = step(jnp.array([4, 4]), EPISODE, other._replace(time=jnp.int32(2)), UP, KEY())
  assert (late.reward, late.discount, late.step_type) == (0, 1, LAST)


# --- objects ----------------------------------------------------------------------------------------------


@functools.cache
def compiled(world: Objects) -> tuple[Any, Any]:
  return jax.jit(world.reset), jax.jit(world.step)


def walk(world: Objects, task: Any, actions: list[int], episode: int = 0) -> Any:
  reset, step = compiled(world)
  state, timestep = reset(task, KEY())
  found = [timestep]
  for action in actions:
    state, timestep = step(task, jnp.int32(episode), state, action, KEY())
    found.append(timestep)
  return found


def test_rewards_are_in_their_ranges() -> None:
  found = tasks(Objects(), 3_000)
  low, high = np.min(found, axis=0), np.max(found, axis=0)
  np.testing.assert_allclose(low, LOW, atol=0.01)
  np.testing.assert_allclose(high, HIGH, atol=0.01)


@pytest.mark.parametrize(
  ('actions', 'index'), [([UP, UP, RIGHT, RIGHT], 0), ([DOWN, DOWN, RIGHT, RIGHT], 1), ([LEFT, LEFT, DOWN, DOWN], 2)]
)  # fmt: skip
def test_each_object_gives_its_own(actions: list[int], index: int) -> None:
  task = jnp.array([0.7, -0.2, 0.3])
  *before, timestep = walk(Objects(), task, actions)
  assert (timestep.reward, timestep.discount, timestep.step_type) == (task[index], 0, LAST)
  assert not any(t.last or t.reward for t in before)


def test_a_and_c_swap() -> None:
  world = Objects(period=5)
  assert {tuple(x) for x in tasks(world, 64)} == {(1.0, -0.5, -1.0), (-1.0, -0.5, 1.0)}
  for episode, a in ((0, 1), (4, 1), (5, -1), (9, -1), (10, 1)):
    *_, timestep = walk(world, jnp.array([1.0, -0.5, -1.0]), [UP, UP, RIGHT, RIGHT], episode)
    assert timestep.reward == a
    *_, timestep = walk(world, jnp.array([1.0, -0.5, -1.0]), [DOWN, DOWN, RIGHT, RIGHT], episode)
    assert timestep.reward == -0.5


def test_boxes_open_with_the_key_alone() -> None:
  world, task = Objects(key=True, steps=40), jnp.array([0.7, -0.2, 0.3])
  to_a = [UP, UP, RIGHT, RIGHT]
  found = walk(world, task, [*to_a, LEFT, LEFT, LEFT, LEFT, LEFT, RIGHT, RIGHT, RIGHT, RIGHT])
  rewards = [round(float(t.reward), 3) for t in found]
  assert rewards == [0.0] * 8 + [-0.1] + [0.0] * 4 + [0.7]
  assert [bool(t.last) for t in found] == [False] * 13 + [True]
  rows = [int(np.flatnonzero(t.observation)[0]) for t in found]
  assert rows[4] == 4 and rows[-1] == 25 + 4  # the same place, without and with the key


def test_an_episode_is_cut() -> None:
  *before, last = walk(Objects(steps=4), jnp.zeros(3), [UP, DOWN, UP, DOWN])
  assert (last.step_type, last.discount) == (LAST, 1) and not before[-1].last


# --- grid worlds ------------------------------------------------------------------------------------------


def test_grid_worlds_are_as_they_say() -> None:
  world = GridWorlds()
  t: GridTask = tasks(world, 400)
  sides = {(~w).any(0).sum() for w in t.walls} | {(~w).any(1).sum() for w in t.walls}
  assert sides <= {3, 4, 5, 6} and {4, 5, 6} <= sides
  assert set(t.exists.sum(1)) == {1, 2, 3} and t.exists[:, 0].all()
  assert (t.reward[:, 0] >= 0).all() and t.reward[:, 1:].min() < -0.9 < 0.9 < t.reward.max()
  for x, low, high in ((t.termination, 0.01, 1), (t.respawn, 0.001, 0.1), (t.steps, 20, 100)):
    assert low * 0.999 <= x.min() < low * 1.3 and high * 0.8 < x.max() <= high * 1.001
  assert abs(np.median(t.termination) - 0.1) < 0.02  # even in its logarithm
  for i in range(400):
    chosen = [tuple(t.start[i]), *map(tuple, t.places[i])]
    assert len(set(chosen)) == 4 and not any(t.walls[i][place] for place in chosen)


def test_a_crowded_grid_world_has_room_for_its_objects() -> None:
  world = GridWorlds(size=4, objects=6, density=0.5)
  t: GridTask = tasks(world, 300)
  rows, columns = np.moveaxis(np.concatenate([t.start[:, None], t.places], 1), 2, 0)
  assert not t.walls[np.arange(300)[:, None], rows, columns].any()
  assert all(len(set(zip(*p, strict=True))) == 7 for p in zip(rows, columns, strict=True))


def test_objects_are_taken_once_and_come_back() -> None:
  world = GridWorlds(size=4, objects=2)
  task = GridTask(
    walls=jnp.zeros((4, 4), bool).at[1, 1].set(True), start=jnp.array([0, 0]),
    places=jnp.array([[0, 1], [0, 2]]), exists=jnp.ones(2, bool), reward=jnp.array([0.5, -1.0]),
    termination=jnp.array([0.0, 1.0]), respawn=jnp.zeros(2), steps=jnp.int32(6),
  )  # fmt: skip
  step = jax.jit(world.step)

  def run(task: GridTask, actions: list[int]) -> Any:
    state, timestep = world.reset(task, KEY())
    found = [(state, timestep)]
    for i, action in enumerate(actions):
      state, timestep = step(task, EPISODE, state, action, jax.random.key(i))
      found.append((state, timestep))
    return found

  found = run(task, [RIGHT, DOWN, LEFT, RIGHT, RIGHT, RIGHT])
  assert [float(t.reward) for _, t in found] == [0, 0.5, 0, 0, 0, -1.0, 0]
  assert [int(t.step_type) for _, t in found] == [0, 1, 1, 1, 1, 2, 2]
  assert found[5][1].discount == 0
  assert (np.asarray(found[2][0].agent) == [0, 1]).all()  # a wall is below
  rows = [int(np.flatnonzero(t.observation)[0]) for _, t in found]
  assert rows[0] == 48 and rows[1] == 32 + 1 and rows[2] == 33
  back = run(task._replace(respawn=jnp.array([1.0, 0.0])), [RIGHT, LEFT, RIGHT])
  assert [float(t.reward) for _, t in back] == [0, 0.5, 0, 0.5]
  gone = run(
    task._replace(exists=jnp.array([False, True]), respawn=jnp.ones(2)), [RIGHT, LEFT, RIGHT]
  )
  assert not any(float(t.reward) for _, t in gone)
  cut = run(task, [DOWN] * 6)[-1][1]
  assert (cut.step_type, cut.discount) == (LAST, 1)


def test_a_returned_object_ends_episodes_as_often() -> None:
  world = GridWorlds(size=4, objects=1)
  task = GridTask(
    jnp.zeros((4, 4), bool), jnp.array([0, 0]), jnp.array([[0, 1]]), jnp.ones(1, bool), jnp.ones(1),
    jnp.array([0.25]), jnp.zeros(1), jnp.int32(9),
  )  # fmt: skip
  state = GridState(jnp.array([0, 0]), jnp.ones(1, bool), jnp.int32(0))
  keys = jax.random.split(jax.random.key(0), 4_000)
  step = jax.vmap(lambda key: world.step(task, EPISODE, state, jnp.int32(RIGHT), key))
  _, timestep = contract.quick_jit(step)(keys)
  assert abs(np.mean(timestep.last) - 0.25) < 0.03
  assert (timestep.discount == 1 - timestep.last).all()


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    ('empty_rooms,size=8', 'size=8'),
    ('empty_rooms,steps=0', 'steps=0'),
    ('random_abc,size=2', 'size=2'),
    ('random_abc,period=3', "'period'"),
    ('nonstationary_abc,period=0', 'period'),
    ('key_box,episodes=-1', 'episodes=-1'),
    ('grid_worlds,task=-2', 'task=-2'),
    ('grid_worlds,objects=7', 'objects=7'),
    ('grid_worlds,size=3', 'size=3'),
    ('grid_worlds,state=true', 'state=true'),
  ],
)
def test_options_that_cannot_be(name: str, message: str, capsys: Any, tmp_path: Any) -> None:
  with pytest.raises(SystemExit) as left:
    cli.main(['train', '--env', f'podrace:{name}', '--run-dir', str(tmp_path / 'run')])
  assert left.value.code == 2
  assert message in ' '.join(capsys.readouterr().err.split())
