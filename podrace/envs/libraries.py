"""The libraries of environments that podrace has adapters for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Library:
  """One library of environments: its adapter module, and its names.

  The module has `make(name: str, options: Mapping[str, Value]) -> Environment`. The names are
  written down here because importing a library takes seconds. A test compares them with it.
  """

  module: str
  extra: str  # podrace's extra that installs the library; '' if it is always installed
  description: str
  names: tuple[str, ...]
  unsupported: Mapping[str, str] = dataclasses.field(default_factory=dict)  # name -> the reason
  module_of: Callable[[str], str] | None = None  # name -> the user's module, '' if none


HIDDEN = 'it has hidden cards, which an opponent that searches by the rules would see'


LIBRARIES: Mapping[str, Library] = {
  'podrace': Library(
    module='podrace.envs.own',
    extra='',
    description='small tasks that tell whether an agent learns at all, and worlds with lifetimes',
    names=(
      'catch',
      'grasp',
      'maze',
      'memory',
      'repeat_previous',
      'count_recall',
      'autoencode',
      'higher_lower',
      'empty_rooms',
      'random_abc',
      'nonstationary_abc',
      'key_box',
      'grid_worlds',
    ),
  ),
  'gymnax': Library(
    module='podrace.envs.adapters.gymnax',
    extra='gymnax',
    description='classic control, MinAtar, bsuite and small tasks',
    names=(
      'CartPole-v1',
      'Pendulum-v1',
      'Acrobot-v1',
      'MountainCar-v0',
      'MountainCarContinuous-v0',
      'Asterix-MinAtar',
      'Breakout-MinAtar',
      'Freeway-MinAtar',
      'Seaquest-MinAtar',
      'SpaceInvaders-MinAtar',
      'Catch-bsuite',
      'DeepSea-bsuite',
      'MemoryChain-bsuite',
      'UmbrellaChain-bsuite',
      'DiscountingChain-bsuite',
      'SimpleBandit-bsuite',
      'FourRooms-misc',
      'MetaMaze-misc',
      'PointRobot-misc',
      'BernoulliBandit-misc',
      'GaussianBandit-misc',
      'Reacher-misc',
      'Swimmer-misc',
      'Pong-misc',
      'FrozenLake-misc',
    ),
    unsupported={'MNISTBandit-bsuite': 'it downloads its images'},
  ),
  'brax': Library(
    module='podrace.envs.adapters.brax',
    extra='brax',
    description='physics: locomotion, pendulums, reaching',
    names=(
      'ant',
      'fast',
      'halfcheetah',
      'hopper',
      'humanoid',
      'humanoidstandup',
      'inverted_pendulum',
      'inverted_double_pendulum',
      'pusher',
      'reacher',
      'walker2d',
    ),
    unsupported={'swimmer': 'Brax 0.14 calls jnp.clip with an argument that JAX no longer takes'},
  ),
  'jumanji': Library(
    module='podrace.envs.adapters.jumanji',
    extra='jumanji',
    description='combinatorial problems, puzzles and games',
    names=(
      'Game2048-v1',
      'GraphColoring-v1',
      'Minesweeper-v0',
      'RubiksCube-v0',
      'RubiksCube-partly-scrambled-v0',
      'Sudoku-v0',
      'Sudoku-very-easy-v0',
      'BinPack-v2',
      'FlatPack-v0',
      'JobShop-v0',
      'Knapsack-v1',
      'Tetris-v0',
      'Cleaner-v0',
      'MMST-v0',
      'CVRP-v1',
      'MultiCVRP-v0',
      'Maze-v0',
      'RobotWarehouse-v0',
      'Snake-v1',
      'TSP-v1',
      'PacMan-v1',
      'SlidingTilePuzzle-v0',
    ),
    unsupported={
      **dict.fromkeys(
        ('Connector-v3', 'LevelBasedForaging-v0', 'SearchAndRescue-v0'),
        'it has a reward for each of several agents, and here one agent acts',
      ),
      'Sokoban-v0': 'it downloads its levels',
    },
  ),
  'navix': Library(
    module='podrace.envs.adapters.navix',
    extra='navix',
    description='MiniGrid rooms',
    names=(
      'Navix-Empty-5x5-v0',
      'Navix-Empty-6x6-v0',
      'Navix-Empty-8x8-v0',
      'Navix-Empty-16x16-v0',
      'Navix-Empty-Random-5x5-v0',
      'Navix-Empty-Random-6x6-v0',
      'Navix-Empty-Random-8x8-v0',
      'Navix-Empty-Random-16x16-v0',
      'Navix-DoorKey-5x5-v0',
      'Navix-DoorKey-6x6-v0',
      'Navix-DoorKey-8x8-v0',
      'Navix-DoorKey-16x16-v0',
      'Navix-DoorKey-Random-5x5-v0',
      'Navix-DoorKey-Random-6x6-v0',
      'Navix-DoorKey-Random-8x8-v0',
      'Navix-DoorKey-Random-16x16-v0',
      'Navix-FourRooms-v0',
      'Navix-KeyCorridorS3R1-v0',
      'Navix-KeyCorridorS3R2-v0',
      'Navix-KeyCorridorS3R3-v0',
      'Navix-KeyCorridorS4R3-v0',
      'Navix-KeyCorridorS5R3-v0',
      'Navix-KeyCorridorS6R3-v0',
      'Navix-LavaGapS5-v0',
      'Navix-LavaGapS6-v0',
      'Navix-LavaGapS7-v0',
      'Navix-SimpleCrossingS9N1-v0',
      'Navix-SimpleCrossingS9N2-v0',
      'Navix-SimpleCrossingS9N3-v0',
      'Navix-SimpleCrossingS11N5-v0',
      'Navix-Dynamic-Obstacles-5x5-v0',
      'Navix-Dynamic-Obstacles-5x5-Random-v0',
      'Navix-Dynamic-Obstacles-6x6-v0',
      'Navix-Dynamic-Obstacles-6x6-Random-v0',
      'Navix-Dynamic-Obstacles-8x8-v0',
      'Navix-Dynamic-Obstacles-16x16-v0',
      'Navix-DistShift1-v0',
      'Navix-DistShift2-v0',
      'Navix-GoToDoor-5x5-v0',
      'Navix-GoToDoor-6x6-v0',
      'Navix-GoToDoor-8x8-v0',
    ),
  ),
  'craftax': Library(
    module='podrace.envs.adapters.craftax',
    extra='craftax',
    description='open worlds to survive in: gather, craft, fight',
    names=(
      'Craftax-Symbolic-v1',
      'Craftax-Pixels-v1',
      'Craftax-Classic-Symbolic-v1',
      'Craftax-Classic-Pixels-v1',
    ),
  ),
  'pgx': Library(
    module='podrace.envs.adapters.pgx',
    extra='pgx',
    description='board games for two, against an opponent: opponent=random, mcts, self, or a run',
    names=(
      'tic_tac_toe',
      'connect_four',
      'othello',
      'hex',
      'animal_shogi',
      'gardner_chess',
      'chess',
      'shogi',
      'go_9x9',
      'go_19x19',
    ),
    unsupported={
      **dict.fromkeys(('kuhn_poker', 'leduc_holdem'), HIDDEN),
      'backgammon': 'a player moves several times in a turn, and here the two sides move in turn',
      'sparrow_mahjong': 'it is for three players, and games are of two here',
      '2048': 'it is for one player, and games are of two here; take jumanji:Game2048-v1',
      **{
        f'minatar-{game}': f'it is for one player; take gymnax:{name}-MinAtar'
        for game, name in (
          ('asterix', 'Asterix'),
          ('breakout', 'Breakout'),
          ('freeway', 'Freeway'),
          ('seaquest', 'Seaquest'),
          ('space_invaders', 'SpaceInvaders'),
        )
      },
    },
  ),
  'python': Library(
    module='podrace.envs.adapters.python',
    extra='',
    description='your own: python:module.function',
    names=(),
    module_of=lambda name: name.rpartition('.')[0],
  ),
}


NATIVE_EXAMPLES = ('cartpole', 'breakout', 'grid')  # environments in C of podrace itself

HOST_LIBRARIES: Mapping[str, Library] = {
  'ale': Library(
    module='podrace.envs.host.ale',
    extra='ale',
    description='Atari 2600, 108 games, in C++ threads; the ROMs come with it',
    names=(),
  ),
  'envpool': Library(
    module='podrace.envs.host.envpool',
    extra='envpool',
    description='Atari, classic control, MuJoCo and more in C++ threads',
    names=(),
  ),
  'gymnasium': Library(
    module='podrace.envs.host.gymnasium',
    extra='',
    description='any Gymnasium environment, in worker processes',
    names=(),
    module_of=lambda name: name.rpartition(':')[0],
  ),
  'c': Library(
    module='podrace.envs.native.environment',
    extra='',
    description='your own in C, in native threads: a .c file or a .so',
    names=(),
    module_of=lambda name: '' if name in NATIVE_EXAMPLES else f'c:{name}',
  ),
}

# Loads a trained opponent: (directory of its run, game) -> its move.
# Set by podrace/run/__init__.py, because runs are above environments in the order of imports.
OPPONENT_LOADERS: list[Callable[[Path, str, str], Any]] = []
