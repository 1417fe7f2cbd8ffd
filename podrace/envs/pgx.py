"""Board games of pgx (Koyama et al. 2023, arXiv 2303.17503) for one agent, against an opponent by name.

A step is the agent's move and the opponent's answer. pgx draws at random who begins. The reward is 1 for a game won,
-1 for one lost; a move against the rules loses. Observations are from the agent's side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import pgx
from pgx.core import Env

from podrace.distributions import MASKED
from podrace.envs.adapt import box, discrete, foreign, raw, strong, to_space
from podrace.envs.base import NextStepReset, restart, select, transition
from podrace.envs.registry import UnknownName, Value, nearest, read_options
from podrace.types import Array, Environment, TimeStep

AGENT = 0  # pgx's number of the player that learns
OPPONENTS = ('random',)


@foreign
def make(name: str, options: Mapping[str, Value]) -> Environment:
  """A game by its pgx id; the option is the opponent."""
  values = read_options(f'pgx:{name}', options, {'opponent': 'random'})
  opponent = values['opponent']
  if opponent not in OPPONENTS:
    raise UnknownName(
      f'pgx:{name} has no opponent {opponent!r}{nearest(opponent, OPPONENTS)}; there is '
      f'{", ".join(OPPONENTS)}'
    )
  env = pgx.make(name)
  shape = tuple(env.observation_shape)
  dtype = jax.eval_shape(env.init, jax.random.key(0)).observation.dtype
  observation_space = gymnasium.spaces.Dict(
    action_mask=box(False, True, (env.num_actions,), bool), board=box(0, 1, shape, dtype)
  )
  return NextStepReset(Game(env, observation_space, discrete(env.num_actions)))


@dataclasses.dataclass(frozen=True, eq=False)
class Game:
  """A game of two as Dynamics of one."""

  env: Env
  observation_space: gymnasium.Space
  action_space: gymnasium.Space

  @foreign
  def reset(self, key: Array) -> tuple[Any, TimeStep]:
    init_key, answer_key = jax.random.split(key)
    state = strong(self.env.init(raw(init_key)))
    answered = self._answer(state, answer_key)
    state = select(state.current_player == AGENT, state, answered)
    return state, restart(self._observe(state))

  @foreign
  def step(self, state: Any, action: Array, key: Array) -> tuple[Any, TimeStep]:
    own_key, answer_key = jax.random.split(key)
    moved = strong(self.env.step(state, action, raw(own_key)))
    over = moved.terminated | moved.truncated
    after = select(over, moved, self._answer(moved, answer_key))
    reward = moved.rewards[AGENT] + jnp.where(over, 0.0, after.rewards[AGENT])
    return after, transition(self._observe(after), reward, after.terminated, after.truncated)

  def _answer(self, state: Any, key: Array) -> Any:
    """The state after a move of the opponent, uniform over what the rules allow."""
    move_key, step_key = jax.random.split(key)
    logits = jnp.where(state.legal_action_mask, 0.0, MASKED)
    move = jax.random.categorical(move_key, logits)
    return strong(self.env.step(state, move, raw(step_key)))

  def _observe(self, state: Any) -> Any:
    """The board as the agent sees it, and where it may move."""
    board = self.env.observe(state, jnp.int32(AGENT))
    return to_space(
      self.observation_space, {'action_mask': state.legal_action_mask, 'board': board}
    )
