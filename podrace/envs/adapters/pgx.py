"""Board games of pgx (Koyama et al. 2023, arXiv 2303.17503), against an opponent or in self-play.

With an opponent, a step is the agent's move and the opponent's answer, and pgx draws at random
which player begins. The reward is 1 for a won game and -1 for a lost one. A move against the rules
loses. Observations are from the agent's side.

With `opponent=self` a step is one move, by both players in turn. Observation and reward belong to
the moving player. The value of the next state is the opponent's, with the sign reversed: learn
with a discount of -1.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import pgx
from jax import lax
from pgx.core import Env

from podrace.distributions import MASKED
from podrace.envs.adapters.adapt import (
  allow_rank_promotion,
  as_strong_types,
  box,
  discrete,
  raw_key,
  to_space,
)
from podrace.envs.base import NextStepReset, restart, select, transition
from podrace.envs.env_names import at_least, nearest, read_options
from podrace.envs.libraries import OPPONENT_LOADERS
from podrace.envs.options import Value
from podrace.errors import UnknownName, UsageError
from podrace.types import Array, Environment, TimeStep

AGENT = 0  # pgx's number of the player that learns
OPPONENTS = ('random', 'mcts', 'self')
EXPLORATION = 4.0  # of mcts: with the paper's 1.25 one unlucky rollout can rule out a move
Move = Callable[[Any, Any, Array], Array]  # (state, its player's observation, key) -> action


@allow_rank_promotion
def make(name: str, options: Mapping[str, Value]) -> Environment:
  """Make a game by its pgx id; options: opponent, its checkpoint, rollouts of `mcts` per move."""
  values = read_options(
    f'pgx:{name}', options, {'opponent': 'random', 'rollouts': 100, 'checkpoint': 'newest'}
  )
  at_least(f'pgx:{name}', values, rollouts=1)
  env = pgx.make(name)
  shape = tuple(env.observation_shape)
  dtype = jax.eval_shape(env.init, jax.random.key(0)).observation.dtype
  observation_space = gymnasium.spaces.Dict(
    action_mask=box(False, True, (env.num_actions,), bool), board=box(0, 1, shape, dtype)
  )
  opponent = _opponent(name, env, values)
  return NextStepReset(Game(env, observation_space, discrete(env.num_actions), opponent))


def _opponent(name: str, env: Env, values: Mapping[str, Any]) -> Move | None:
  """Return the move function of an opponent, or None for self-play."""
  opponent = values['opponent']
  if opponent in OPPONENTS:
    return {'random': random_move, 'mcts': mcts(env, values['rollouts']), 'self': None}[opponent]
  if not Path(opponent).is_dir():
    raise UnknownName(
      f'pgx:{name} has no opponent {opponent!r}{nearest(opponent, OPPONENTS)}; there is '
      f'{", ".join(OPPONENTS)}, or the directory of a run of this game'
    )
  if not OPPONENT_LOADERS:
    raise UsageError(f'opponent {opponent} is the directory of a run: `import podrace.run` first')
  (load,) = OPPONENT_LOADERS
  move: Move = load(Path(opponent), name, values['checkpoint'])
  return move


def random_move(state: Any, observation: Any, key: Array) -> Array:
  """Draw a legal move, uniformly."""
  return jax.random.categorical(key, jnp.where(state.legal_action_mask, 0.0, MASKED))


def mcts(env: Env, rollouts: int) -> Move:
  """Return a move function by Monte-Carlo tree search with the rules of the game.

  The prior is uniform, and each new node is evaluated by a random rollout.
  """
  import mctx

  def worth(state: Any, key: Array) -> Array:
    """Return the result of a random continuation for the player to move."""
    player = state.current_player

    def move(carry: Any) -> Any:
      state, total, key = carry
      own, rest = jax.random.split(key)
      state = as_strong_types(env.step(state, random_move(state, (), own)))
      return state, total + state.rewards[player], rest

    start = state, jnp.float32(0), key
    return lax.while_loop(lambda x: ~(x[0].terminated | x[0].truncated), move, start)[1]

  def expand(params: Any, key: Array, action: Array, state: Any) -> Any:
    mover = state.current_player
    after = jax.vmap(lambda s, a: as_strong_types(env.step(s, a)))(state, action)
    over = after.terminated | after.truncated
    # A finished node may be visited again: discount 0 cancels its value.
    value = jax.vmap(worth)(after, jax.random.split(key, action.shape[0]))
    output = mctx.RecurrentFnOutput(
      reward=jnp.take_along_axis(after.rewards, mover[:, None], axis=1)[:, 0],
      discount=jnp.where(over, 0.0, -1.0),
      prior_logits=jnp.where(after.legal_action_mask, 0.0, MASKED),
      value=value,
    )
    return output, after

  def move(state: Any, observation: Any, key: Array) -> Array:
    one = jax.tree.map(lambda x: x[None], state)
    logits = jnp.where(one.legal_action_mask, 0.0, MASKED)
    root = mctx.RootFnOutput(prior_logits=logits, value=jnp.zeros(1), embedding=one)
    output = mctx.muzero_policy(
      (), raw_key(key), root, expand, rollouts, invalid_actions=~one.legal_action_mask,
      qtransform=functools.partial(mctx.qtransform_by_min_max, min_value=-1.0, max_value=1.0),
      dirichlet_fraction=0.0, temperature=0.0, pb_c_init=EXPLORATION,
    )  # fmt: skip
    return output.action[0]

  return move


@dataclasses.dataclass(frozen=True, eq=False)
class Game:
  """A game of two players as Dynamics of one; without an opponent, of both in turn."""

  env: Env
  observation_space: gymnasium.Space
  action_space: gymnasium.Space
  opponent: Move | None = random_move

  @property
  def takes_turns(self) -> bool:
    """Whether two players take turns, so that a reward belongs to the moving player."""
    return self.opponent is None

  @allow_rank_promotion
  def reset(self, key: Array) -> tuple[Any, TimeStep]:
    """Begin an episode."""
    init_key, answer_key = jax.random.split(key)
    state = as_strong_types(self.env.init(raw_key(init_key)))
    if self.opponent:
      answered = self._answer(state, answer_key)
      state = select(state.current_player == AGENT, state, answered)
    return state, restart(self._observe(state))

  @allow_rank_promotion
  def step(self, state: Any, action: Array, key: Array) -> tuple[Any, TimeStep]:
    """Take one action."""
    own_key, answer_key = jax.random.split(key)
    moved = as_strong_types(self.env.step(state, action, raw_key(own_key)))
    if not self.opponent:
      reward = moved.rewards[state.current_player]
      return moved, transition(self._observe(moved), reward, moved.terminated, moved.truncated)
    over = moved.terminated | moved.truncated
    after = select(over, moved, self._answer(moved, answer_key))
    reward = moved.rewards[AGENT] + jnp.where(over, 0.0, after.rewards[AGENT])
    return after, transition(self._observe(after), reward, after.terminated, after.truncated)

  def _answer(self, state: Any, key: Array) -> Any:
    """Return the state after a move of the opponent."""
    assert self.opponent is not None
    move_key, step_key = jax.random.split(key)
    move = self.opponent(state, self._seen(state, state.current_player), move_key)
    return as_strong_types(self.env.step(state, move, raw_key(step_key)))

  def _observe(self, state: Any) -> Any:
    """Return the board from the agent's side, and the legal moves."""
    return self._seen(state, state.current_player if self.takes_turns else jnp.int32(AGENT))

  def _seen(self, state: Any, player: Array) -> Any:
    board = self.env.observe(state, player)
    return to_space(
      self.observation_space, {'action_mask': state.legal_action_mask, 'board': board}
    )
