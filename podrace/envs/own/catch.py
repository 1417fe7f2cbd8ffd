"""Catch: the smallest task that needs vision; half a minute on a laptop."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from podrace.envs.adapters.adapt import box, discrete
from podrace.envs.base import restart, transition
from podrace.types import Array, TimeStep


class CatchState(NamedTuple):
  """Positions. All [] i32."""

  ball_row: Array
  ball_column: Array
  paddle: Array  # its column; it stays in the bottom row


@dataclasses.dataclass(frozen=True)
class Catch:
  """A ball falls from a random column of the top row; be under it (Osband et al. 2020, bsuite).

  The actions move the paddle left, not at all, or right. After `rows - 1` steps the ball is in
  the bottom row and the episode terminates. The reward is 1 if the paddle is there, else -1. All
  other rewards are 0. The paddle starts in the middle, so the best policy always gets 1.
  """

  rows: int = 10
  columns: int = 5

  def __post_init__(self) -> None:
    if self.rows < 2 or self.columns < 1:
      raise ValueError(f'catch needs rows >= 2 and columns >= 1: {self.rows=}, {self.columns=}')

  @cached_property
  def observation_space(self) -> gymnasium.spaces.Box:
    """The board: 1 at the ball and at the paddle."""
    return box(0, 1, (self.rows, self.columns), np.float32)

  @cached_property
  def action_space(self) -> gymnasium.spaces.Discrete:
    """Space of the actions of one environment."""
    return discrete(3)

  def reset(self, key: Array) -> tuple[CatchState, TimeStep]:
    """Begin an episode."""
    column = jax.random.randint(key, (), 0, self.columns, jnp.int32)
    state = CatchState(jnp.int32(0), column, jnp.int32(self.columns // 2))
    return state, restart(self._board(state))

  def step(self, state: CatchState, action: Array, key: Array) -> tuple[CatchState, TimeStep]:
    """Take one action."""
    del key
    move = jnp.asarray(action, jnp.int32) - 1
    paddle = jnp.clip(state.paddle + move, 0, self.columns - 1)
    state = CatchState(state.ball_row + 1, state.ball_column, paddle)
    landed = state.ball_row >= self.rows - 1
    reward = jnp.where(landed, jnp.where(paddle == state.ball_column, 1.0, -1.0), 0.0)
    return state, transition(self._board(state), reward, landed, False)

  def _board(self, state: CatchState) -> Array:
    row, column = jnp.arange(self.rows)[:, None], jnp.arange(self.columns)[None]
    ball = (row == state.ball_row) & (column == state.ball_column)
    paddle = (row == self.rows - 1) & (column == state.paddle)
    return (ball | paddle).astype(jnp.float32)  # no scatter, which is a kernel of its own
