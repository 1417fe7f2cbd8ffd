"""Two players and the true rules: search finds wins and blocks, and a trained agent never loses."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shorthand import Capture

import podrace.envs
from podrace import cli
from podrace.agents.muzero import MuZero
from podrace.agents.search import MuZeroParams
from podrace.envs.adapters.pgx import Game, mcts, random_move
from podrace.envs.base import NextStepReset
from podrace.envs.states import rules, with_state
from podrace.hooks import greedily
from podrace.networks import ActorCritic, LearnedModel
from podrace.run.evaluate import make_evaluator
from podrace.settings.agents import bind
from podrace.types import LAST, TimeStep

SELF = 'pgx:tic_tac_toe,opponent=self,state=true'
TINY = LearnedModel(
  torso='mlp', hidden=(16,), latent=8, dynamics_hidden=(16,), head_hidden=(8,), bins=1
)
LINES = [
  *([3 * i, 3 * i + 1, 3 * i + 2] for i in range(3)),
  *([i, i + 3, i + 6] for i in range(3)), [0, 4, 8], [2, 4, 6],
]  # fmt: skip


@functools.cache
def game(name: str = SELF) -> Any:
  env: Any = podrace.envs.make(name)
  return env.dynamics


PROGRAMS: dict[int, Any] = {}  # of each game, by its id


def after(dynamics: Any, moves: list[int], seed: int = 0) -> tuple[Any, TimeStep]:
  """The state and the timestep after moves of both players in turn."""
  new = dynamics, jax.jit(dynamics.reset), jax.jit(dynamics.step)
  _, reset, step = PROGRAMS.setdefault(id(dynamics), new)
  with jax.debug_key_reuse(False):
    state, timestep = reset(jax.random.key(seed))
    for move in moves:
      state, timestep = step(state, jnp.int32(move), jax.random.key(0))
  return state, timestep


# --- each player in turn ----------------------------------------------------------------------------------


def test_rewards_and_boards_are_of_whoever_moves() -> None:
  _, timestep = after(game(), [0, 4])
  board = np.asarray(timestep.observation['board']).reshape(9, 2)
  assert np.flatnonzero(board[:, 0]).tolist() == [0]  # the first player's, who moves again
  assert np.flatnonzero(board[:, 1]).tolist() == [4]
  for moves, reward in (([0, 4, 1, 5, 2], 1), ([0, 4, 1, 5, 8, 3], 1), ([0, 4, 0], -1)):
    timestep = jax.device_get(after(game(), moves)[1])
    assert (timestep.step_type, timestep.reward, timestep.discount) == (LAST, reward, 0)
  timestep = jax.device_get(after(game(), [0, 4, 8, 1, 7, 6, 2, 5, 3])[1])
  assert (timestep.step_type, timestep.reward) == (LAST, 0)


@pytest.mark.parametrize(
  ('agent', 'env', 'message'),
  [
    ('muzero', 'pgx:tic_tac_toe,opponent=self', '--agent.discount -0.997'),
    ('muzero --agent.discount -1', 'pgx:tic_tac_toe', 'discount -1.0'),
    ('muzero --agent.model rules', 'pgx:tic_tac_toe', 'model rules .*state=true'),
    ('muzero --agent.model rules', 'gymnasium:CartPole-v1', 'model rules .*state=true'),
    ('muzero --agent.model rules --agent.network.core gru --agent.sequence 32', 'podrace:catch,state=true', "core 'gru'"),
    ('ppo', 'pgx:tic_tac_toe,opponent=self', 'ppo .*--agent muzero'),
    ('muzero', 'pgx:tic_tac_toe,opponent=mcts,rollouts=0', 'rollouts .*1.*0'),
    ('muzero', 'podrace:catch,state=1', 'state=1 .*int.*bool'),
  ],
)  # fmt: skip
def test_bad_input(agent: str, env: str, message: str, tmp_path: Path, capsys: Capture) -> None:
  with pytest.raises(SystemExit) as left:
    cli.main(
      [
        'train',
        '--devices',
        '1',
        '--agent',
        *agent.split(),
        '--env',
        env,
        '--run-dir',
        str(tmp_path / 'run'),
      ]
    )
  assert left.value.code == 2
  assert re.search(message, capsys.readouterr().err.replace('\n', ' '))


# --- the state in observations ------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'name', ['podrace:catch', 'podrace:maze', 'pgx:connect_four', 'gymnax:CartPole-v1']
)
def test_observations_have_the_state(name: str) -> None:
  env = podrace.envs.make(f'{name},state=true')
  dynamics = rules(env)
  assert dynamics is not None
  with jax.debug_key_reuse(False):
    state, timestep = jax.jit(dynamics.reset)(jax.random.key(3))
    action = jax.tree.map(jnp.asarray, jnp.int32(1))
    state, timestep = jax.jit(dynamics.step)(state, action, jax.random.key(4))
  found = dynamics.state_of(timestep.observation)
  jax.tree.map(np.testing.assert_array_equal, found, state)
  assert jax.tree.structure(found) == jax.tree.structure(state)
  assert env.observation_space.contains(jax.tree.map(np.asarray, timestep.observation))


def test_no_network_sees_the_state() -> None:
  plain, shown = (podrace.envs.make(f'pgx:tic_tac_toe{x}') for x in ('', ',state=true'))
  networks = [
    ActorCritic(hidden=(8,)).bind(e.observation_space, e.action_space) for e in (plain, shown)
  ]
  params = [jax.jit(n.init)(jax.random.key(0)) for n in networks]
  jax.tree.map(np.testing.assert_array_equal, *params)
  with jax.debug_key_reuse(False):
    timesteps = [
      jax.tree.map(lambda x: np.asarray(x)[None], jax.jit(e.reset)(jax.random.key(1))[1])
      for e in (plain, shown)
    ]
  outputs = [
    jax.jit(n.step)(p, (), t)[0] for n, p, t in zip(networks, params, timesteps, strict=True)
  ]
  jax.tree.map(np.testing.assert_array_equal, *outputs)


def test_a_reset_of_its_own_hides_the_rules() -> None:
  with pytest.raises(ValueError, match='state=true'):
    with_state('mine', object())  # type: ignore[arg-type]


# --- search by the rules ---------------------------------------------------------------------------------------


def searcher(simulations: int, env: str = SELF, says: float = 0.0, **settings: Any) -> Any:
  """What an untrained network's search by the rules does at a timestep: the weights of its plan, and the value."""
  settings = dict(simulations=simulations, discount=-1.0, model='rules', value_scale=1.0) | settings
  made = podrace.envs.make(env)
  agent = greedily(bind(MuZero(TINY, **settings), made, 1, 1))

  def moved(path: Any, x: Any) -> Any:  # the bias of the value, which is `says` then
    return x + says if 'value_head' in jax.tree_util.keystr(path) and x.shape == (1,) else x

  network = jax.tree_util.tree_map_with_path(moved, jax.jit(agent.network.init)(jax.random.key(0)))
  params = MuZeroParams(network, jnp.int32(0))

  @jax.jit
  def act(timestep: TimeStep) -> Any:
    one = jax.tree.map(lambda x: x[None], timestep)
    return agent.act(params, agent.initial_state(jnp.zeros(1, jnp.int32)), one, jax.random.key(0))[
      0
    ]

  return act


@functools.cache
def deep() -> Any:
  return searcher(150)


@pytest.mark.parametrize(
  ('moves', 'best', 'value'),
  [
    ([0, 4, 1, 5], {2}, 1),  # wins
    ([0, 4, 1], {2}, 0),  # else it loses at once
    ([4, 0, 8, 1, 2], {5, 6}, -1),  # two lines are open: the other one wins
  ],
)
def test_search_wins_and_blocks(moves: list[int], best: set[int], value: int) -> None:
  """The network is untrained, and says 0 of everything: the rules alone know."""
  _, timestep = after(game(), moves)
  output = deep()(timestep)
  legal = np.asarray(timestep.observation['action_mask'])
  assert legal[int(output.action[0])]
  assert np.all(np.asarray(output.extras.plan.weights[0])[~legal] < 1e-6)
  if value >= 0:
    assert int(output.action[0]) in best
  found = float(output.extras.plan.value[0])
  assert abs(found - value) < 0.55, found
  if value:
    assert np.sign(found) == value


@pytest.mark.slow
def test_nothing_comes_after_the_end() -> None:
  """Of one move that is left, the search's value is that move's reward, however long it searches."""
  _, timestep = after(game(), [0, 4, 8, 1, 7, 6, 2, 5])
  for simulations in (1, 20):
    output = searcher(simulations, says=0.7)(timestep)
    assert int(output.action[0]) == 3
    assert abs(float(output.extras.plan.value[0])) < 1e-5


def test_chance_is_drawn_in_the_tree() -> None:
  """Against a random opponent the rules have its answers, and the value is between a loss and a win."""
  _, timestep = after(game('pgx:tic_tac_toe,state=true'), [])
  output = searcher(64, 'pgx:tic_tac_toe,state=true', discount=1.0)(timestep)
  assert -1 <= float(output.extras.plan.value[0]) <= 1
  assert float(output.extras.plan.value[0]) > 0.1


# --- opponents ------------------------------------------------------------------------------------------------


@functools.cache
def minimax(board: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
  """What a board (0 free, 1 the mover's, 2 the other's) is worth to the mover, and its best moves."""
  if any(all(board[i] == 2 for i in line) for line in LINES):
    return -1, ()
  free = [i for i in range(9) if not board[i]]
  if not free:
    return 0, ()
  turned = {0: 0, 1: 2, 2: 1}
  worth = {
    i: -minimax(tuple(turned[1 if j == i else x] for j, x in enumerate(board)))[0] for i in free
  }
  best = max(worth.values())
  return best, tuple(i for i in free if worth[i] == best)


@functools.cache
def perfect_moves() -> np.ndarray:
  """[3 ** 9, 9] bool: the best moves of every board."""
  found = np.zeros((3**9, 9), bool)
  for number in range(3**9):
    board = tuple(number // 3**i % 3 for i in range(9))
    if board.count(1) - board.count(2) in (0, -1, 1):
      found[number, list(minimax(board)[1])] = True
  return found


def perfect(state: Any, observation: Any, key: Any) -> Any:
  board = observation['board'].reshape(9, 2).astype(jnp.int32)
  number = jnp.sum((board[:, 0] + 2 * board[:, 1]) * 3 ** jnp.arange(9))
  best = jnp.asarray(perfect_moves())[number]
  best = jnp.where(jnp.any(best), best, state.legal_action_mask)
  return jax.random.categorical(key, jnp.where(best, 0.0, -1e9))


def against(opponent: Any, name: str = 'tic_tac_toe') -> NextStepReset:
  base = game(f'pgx:{name}')
  return NextStepReset(Game(base.env, base.observation_space, base.action_space, opponent))


@dataclasses.dataclass(frozen=True)
class Player:
  """An agent that moves as an opponent does, from the state that it is shown."""

  move: Any
  dynamics: Any

  def initial_state(self, env_id: Any) -> Any:
    return ()

  def act(self, params: Any, state: Any, timestep: TimeStep, key: Any) -> Any:
    from podrace.types import ActorOutput

    states = jax.vmap(self.dynamics.state_of)(timestep.observation)
    keys = jax.random.split(key, timestep.reward.shape[0])
    moves = jax.vmap(self.move)(states, timestep.observation, keys)
    return ActorOutput(moves.astype(jnp.int32)), state


def returns_of(move: Any, opponent: Any, games: int) -> np.ndarray:
  env = with_state('game', against(opponent))
  with jax.debug_key_reuse(False):
    found: np.ndarray = make_evaluator(Player(move, env.dynamics), env, games)(  # type: ignore[arg-type,attr-defined]
      (), jax.random.key(0)
    )
  return found


@pytest.mark.slow
def test_perfect_play_is_never_beaten() -> None:
  """The yardstick itself: it loses to nobody, draws with itself, and beats random play most of the time."""
  assert returns_of(perfect, random_move, 256).min() >= 0
  assert returns_of(random_move, perfect, 256).max() <= 0
  assert not returns_of(perfect, perfect, 64).any()


@pytest.mark.slow
def test_tree_search_with_rollouts_plays_well() -> None:
  move = mcts(game('pgx:tic_tac_toe').env, 60)
  assert returns_of(move, random_move, 64).mean() > 0.85
  assert returns_of(move, perfect, 64).mean() > -0.5
  assert returns_of(random_move, perfect, 64).mean() < -0.7


@pytest.fixture(scope='module')
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
  path = tmp_path_factory.mktemp('runs') / 'first'
  with pytest.raises(SystemExit, match='0'):
    cli.main([
    'train', 'muzero-tictactoe', '--devices', '1', '--eval-every', '0', '--eval-episodes', '32', '--eval-env', '',
    '--agent.simulations', '4', '--total-steps', '2_000', '--agent.buffer.min-size', '500', '--run-dir', str(path),
  ])  # fmt: skip
  return path


@pytest.mark.slow
def test_a_run_as_opponent(
  short_run: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
  """An agent plays elsewhere than it has learned, and against itself."""

  def evaluate(env: str) -> Any:
    with pytest.raises(SystemExit) as left:
      cli.main(['eval', str(short_run), '--greedy', '--episodes', '32', '--env', env])
    if left.value.code:
      raise left.value
    return json.loads(capsys.readouterr().out.splitlines()[-1])

  found = evaluate(f'pgx:tic_tac_toe,opponent={short_run},state=true')
  assert found['episodes'] == 32 and -1 <= found['episode_return_mean'] <= 1
  assert found['episode_return_mean'] < 1
  for env, message in (
    ('pgx:tic_tac_toe', 'has another observation space .*; give --env pgx:tic_tac_toe,state=true'),
    ('pgx:connect_four,state=true', 'has another observation space'),
    (
      f'pgx:connect_four,opponent={short_run},state=true',
      'has learned pgx:tic_tac_toe,.*, not pgx:connect_four',
    ),
    (f'pgx:tic_tac_toe,opponent={tmp_path},state=true', 'is not a run directory'),
  ):
    with pytest.raises(SystemExit) as left:
      evaluate(env)
    assert left.value.code == 2
    assert re.search(message, capsys.readouterr().err), message
  (short_run / 'summary.json').rename(tmp_path / 'summary.json')
  try:
    with pytest.raises(SystemExit):
      evaluate(f'pgx:tic_tac_toe,opponent={short_run},state=true')
  finally:
    (tmp_path / 'summary.json').rename(short_run / 'summary.json')
  assert 'end' in capsys.readouterr().err


# --- it learns -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_never_loses(tmp_path: Path) -> None:
  """The preset with a search, in 1,000 games each against perfect and against random play.

  Random play loses 93% of its games against perfect play, and 29% against itself.
  """
  from podrace.run.directory import load_config
  from podrace.run.saved_params import restore_params
  from podrace.settings.resolved import resolve

  run_dir = tmp_path / 'run'
  with pytest.raises(SystemExit, match='0'):
    cli.main(['train', 'muzero-tictactoe', '--devices', '1', '--run-dir', str(run_dir)])
  resolved = resolve(load_config(run_dir))
  _, params, _ = restore_params(resolved, run_dir)
  agent = greedily(dataclasses.replace(resolved.agent, simulations=64))
  for opponent in (perfect, random_move):
    env = with_state('game', against(opponent))
    with jax.debug_key_reuse(False):
      found = make_evaluator(agent, env, 1000)(params, jax.random.key(0))
    assert not (found < 0).any(), (opponent, float((found < 0).mean()))
  assert found.mean() > 0.9  # against random play
