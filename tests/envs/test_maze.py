"""Mazes: every goal can be reached, levels are what they are, unseen ones are others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrace.envs import make
from podrace.envs.own.grids import MOVES
from podrace.envs.own.maze import UNSEEN, Maze


def distance(walls: np.ndarray, start: np.ndarray, goal: np.ndarray) -> int | None:
  """Steps from start to goal by breadth-first search; None if there is no way."""
  front, seen, steps = [tuple(start)], {tuple(start)}, 0
  while front:
    if tuple(goal) in front:
      return steps
    nearby = {(y + dy, x + dx) for y, x in front for dy, dx in MOVES}
    inside = {p for p in nearby if min(p) >= 0 and max(p) < len(walls) and not walls[p]}
    front, steps = sorted(inside - seen), steps + 1
    seen |= inside
  return None


@pytest.mark.parametrize('density', [0.0, 0.3, 0.6])
@pytest.mark.parametrize('size', [3, 7])
def test_every_goal_can_be_reached_in_time(size: int, density: float) -> None:
  maze = Maze(size=size, density=density)
  levels = jax.jit(jax.vmap(maze.level))(jnp.arange(300))
  found = [
    distance(*level) for level in zip(*map(np.asarray, (levels.walls, levels.agent, levels.goal)), strict=True)
  ]  # fmt: skip
  assert all(d is not None and 1 <= d <= 4 * size for d in found)
  if size == 7:
    assert max(d for d in found if d) > (6 if density < 0.5 else 2)


def test_levels_are_always_the_same_and_unseen_ones_are_others() -> None:
  def resets(**options: int | bool) -> set[bytes]:
    keys = jax.random.split(jax.random.key(7), 200)
    _, timesteps = jax.jit(jax.vmap(Maze(**options).reset))(keys)
    return {x.tobytes() for x in np.asarray(timesteps.observation)}

  three, twenty = resets(levels=3), resets(levels=20)
  assert len(three) == 3 and three == resets(levels=3)
  assert three < twenty and len(twenty) == 20
  unseen = resets(levels=3, unseen=True)
  assert len(unseen) > 190 and not unseen & (resets() | twenty)
  assert jnp.iinfo(jnp.int32).max == UNSEEN * 2 - 1


def test_walls_hold_and_the_goal_ends_an_episode() -> None:
  maze = Maze(size=5)
  step = jax.jit(maze.step)
  state = maze.level(jnp.int32(4))._replace(
    walls=jnp.zeros((5, 5), bool).at[0, 1].set(True), agent=jnp.array([0, 0]), goal=jnp.array([1, 1])
  )  # fmt: skip
  key = jax.random.key(0)
  for action, place in ((0, (0, 0)), (1, (0, 0)), (3, (0, 0)), (2, (1, 0))):
    state, timestep = step(state, action, key)
    assert tuple(np.asarray(state.agent)) == place and timestep.reward == 0 and not timestep.last
  planes = np.asarray(timestep.observation)
  assert (
    planes[0, 1, 0] == 1 and planes[1, 1, 1] == 1 and planes[1, 0, 2] == 1 and planes.sum() == 3
  )
  _, timestep = step(state, 1, key)
  assert (timestep.reward, timestep.discount, timestep.last) == (1, 0, True)
  _, timestep = step(state._replace(time=jnp.int32(19)), 0, key)
  assert (timestep.reward, timestep.discount, timestep.last) == (0, 1, True)


def test_it_has_a_name() -> None:
  env = make('podrace:maze,size=9,levels=10,unseen=true,density=0.2')
  assert env.dynamics == Maze(size=9, levels=10, unseen=True, density=0.2)
