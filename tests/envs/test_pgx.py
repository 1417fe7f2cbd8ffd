"""Board games: rewards from the agent's side, who begins, and what the opponent may do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podrace.envs
from podrace.envs import UnknownName
from podrace.envs.libraries import LIBRARIES
from podrace.types import FIRST, LAST, TimeStep

GAMES = 64
LINES = [
  *([3 * i, 3 * i + 1, 3 * i + 2] for i in range(3)),
  *([i, i + 3, i + 6] for i in range(3)), [0, 4, 8], [2, 4, 6],
]  # fmt: skip


@pytest.fixture(scope='module')
def games() -> TimeStep:
  """Tic-tac-toe, [8, GAMES]: the agent takes its first allowed place, always."""
  env = podrace.envs.make('pgx:tic_tac_toe')

  def run(key: Any) -> TimeStep:
    def step(carry: Any, key: Any) -> Any:
      state, timestep = carry
      action = jnp.argmax(timestep.observation['action_mask']).astype(jnp.int32)
      state, timestep = env.step(state, action, key)
      return (state, timestep), timestep

    reset_key, step_key = jax.random.split(key)
    first = env.reset(reset_key)
    _, rest = jax.lax.scan(step, first, jax.random.split(step_key, 7))
    return jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), first[1], rest)

  with jax.debug_key_reuse(False):
    play = jax.jit(jax.vmap(run, out_axes=1))
    return jax.device_get(play(jax.random.split(jax.random.key(0), GAMES)))


def stones(games: TimeStep, t: int, b: int, whose: int) -> set[int]:
  board = np.asarray(games.observation['board'][t, b]).reshape(9, 2)
  return set(np.flatnonzero(board[:, whose]).tolist())


def test_who_begins_is_drawn(games: TimeStep) -> None:
  theirs = [len(stones(games, 0, b, 1)) for b in range(GAMES)]
  assert set(theirs) == {0, 1} and 0.25 < np.mean(theirs) < 0.75
  assert all(not stones(games, 0, b, 0) for b in range(GAMES))


def test_rewards_are_the_agents(games: TimeStep) -> None:
  """1 for a line of its own, -1 for one of the opponent's; games end there, and with nine stones."""
  seen = set()
  for t in range(8):
    for b in range(GAMES):
      own, theirs = stones(games, t, b, 0), stones(games, t, b, 1)
      won, lost = (any(set(line) <= x for line in LINES) for x in (own, theirs))
      over = won or lost or len(own | theirs) == 9
      assert not own & theirs
      assert games.reward[t, b] == int(won) - int(lost)
      assert (games.step_type[t, b] == LAST) == over == (games.discount[t, b] == 0)
      seen.add((won, lost))
  assert {(True, False), (False, True)} <= seen


def test_the_opponent_keeps_to_the_rules(games: TimeStep) -> None:
  """Each step adds a stone of each side, but for the last one; free places are those allowed."""
  moves = set()
  for b in range(GAMES):
    for t in range(1, 8):
      own, theirs = stones(games, t, b, 0), stones(games, t, b, 1)
      if games.step_type[t, b] == FIRST:
        continue
      before = stones(games, t - 1, b, 0), stones(games, t - 1, b, 1)
      assert before[0] < own and before[1] <= theirs
      assert len(own - before[0]) == 1 and len(theirs - before[1]) <= 1
      moves |= theirs - before[1]
      if games.step_type[t, b] != LAST:
        allowed = np.flatnonzero(games.observation['action_mask'][t, b])
        assert set(allowed.tolist()) == set(range(9)) - own - theirs
  assert moves == set(range(1, 9))  # the agent takes the first place as soon as it may


def test_opponents_have_names() -> None:
  with pytest.raises(UnknownName, match=r"'randm' .nearest: random"):
    podrace.envs.make('pgx:tic_tac_toe,opponent=randm')


def test_each_game_is_played_or_refused_with_a_reason() -> None:
  import pgx

  library = LIBRARIES['pgx']
  assert sorted([*library.names, *library.unsupported]) == sorted(pgx.available_envs())
  assert {'othello', 'hex', 'chess', 'shogi', 'go_9x9', 'go_19x19'} <= set(library.names)
  for name, reason in library.unsupported.items():
    with pytest.raises(UnknownName, match=f'^pgx:{name} .*{reason}'):
      podrace.envs.make(f'pgx:{name}')


@pytest.mark.parametrize(
  'name',
  [
    name if name == 'othello' else pytest.param(name, marks=pytest.mark.slow)
    for name in LIBRARIES['pgx'].names
  ],
)
def test_two_sides_move_in_turn_within_the_spaces(name: str) -> None:
  """Of every game, played at random by both sides: rewards, boards, masks and players."""
  env: Any = podrace.envs.make(f'pgx:{name},opponent=self')
  board = env.observation_space['board']

  def play(key: Any) -> Any:
    def step(carry: Any, key: Any) -> Any:
      state, t = carry
      move_key, step_key = jax.random.split(key)
      mask = t.observation['action_mask']
      action = jax.random.categorical(move_key, jnp.where(mask, 0.0, -1e9)).astype(jnp.int32)
      state, t = env.step(state, action, step_key)
      x = t.observation['board'].astype(jnp.float32)
      player = state.inner.current_player
      return (state, t), (t.step_type, t.reward, mask.any(), x.min(), x.max(), player)

    first = env.reset(key)
    return jax.lax.scan(step, first, jax.random.split(key, 80))[1]

  with jax.debug_key_reuse(False):
    found = jax.jit(jax.vmap(play))(jax.random.split(jax.random.key(0), 4))
  kind, reward, allowed, low, high, player = map(np.asarray, found)
  assert board.dtype in (np.bool_, np.float32)
  assert (low >= 0).all() and (high <= 1).all() and allowed[kind != FIRST].all()
  assert np.isin(reward, [-1, 0, 1]).all() and not reward[kind == 1].any()
  middle = (kind[:, :-1] == 1) & (kind[:, 1:] == 1)
  assert middle.any() and (player[:, 1:] != player[:, :-1])[middle].all()
