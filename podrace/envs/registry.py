"""What environments there are, and how a name becomes one; without importing jax or a library.

A name is `LIB:NAME`, optionally followed by options: `LIB:NAME,key=value,key=value`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from podrace.envs import options as values
from podrace.envs.options import Value
from podrace.errors import MissingExtra, UnknownName
from podrace.system.importing import why_not

if TYPE_CHECKING:
  from podrace.types import Environment


@dataclasses.dataclass(frozen=True)
class Library:
  """One source of environments: the module that adapts it, and what it offers.

  The module has `make(name: str, options: Mapping[str, Value]) -> Environment`. The names are
  written down here because importing a library takes seconds; a test compares them with it.
  """

  module: str
  extra: str  # of podrace, that installs it; '' if it is always there
  description: str
  names: tuple[str, ...]
  unsupported: Mapping[str, str] = dataclasses.field(default_factory=dict)  # name -> the reason
  module_of: Callable[[str], str] | None = None
  # ^ of libraries whose names have a module imported: from NAME to the module, '' for none


HIDDEN = 'it has hidden cards, which an opponent that searches by the rules would see'

LIBRARIES: Mapping[str, Library] = {
  'podrace': Library(
    module='podrace.envs.own',
    extra='',
    description='small tasks that tell whether an agent learns at all, and worlds with lifetimes',
    names=(
      'catch',
      'maze',
      'memory',
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
}


def names() -> dict[str, tuple[str, ...]]:
  """Every environment's name, by library, for listing them."""
  return {key: library.names for key, library in LIBRARIES.items()}


def make(name: str) -> Environment:
  """The environment that `LIB:NAME,key=value,...` names; raises UnknownName or MissingExtra."""
  key, env, options = parse(name)
  if key not in LIBRARIES:
    raise UnknownName(
      f'no library {key!r} in environment {name!r}{nearest(key, [*LIBRARIES, *HOST_LIBRARIES])}; '
      f'the libraries are {", ".join(LIBRARIES)}; and {", ".join(HOST_LIBRARIES)} on the host'
    )
  library = LIBRARIES[key]
  if reason := library.unsupported.get(env):
    raise UnknownName(f'{key}:{env} is not supported: {reason}')
  if library.names and env not in library.names:
    raise UnknownName(
      f'{key} has no environment {env!r}{nearest(env, library.names)}; '
      f"'podrace list' names its {len(library.names)}"
    )
  shows_state = read_options(name, {k: options.pop(k) for k in SHOWN if k in options}, SHOWN)
  adapter = adapter_of(library, f"environment '{key}:{env}'")
  try:
    made = adapter.make(env, options)
  except ImportError as error:
    if not library.extra:
      raise
    raise MissingExtra(why_not(f"environment '{key}:{env}'", library.extra, error)) from error
  if shows_state['state']:
    shown: Environment = importlib.import_module('podrace.envs.states').with_state(name, made)
    return shown
  return made


def adapter_of(library: Library, what: str) -> Any:
  """Returns the module that adapts a library.

  Raises:
    MissingExtra: if the library is not installed, or cannot be imported.
  """
  try:
    return importlib.import_module(library.module)
  except Exception as error:  # libraries of the wrong version fail by any exception
    if not library.extra:
      raise
    raise MissingExtra(why_not(what, library.extra, error)) from error


SHOWN: dict[str, Value] = {'state': False}  # an option of all environments in JAX


def parse(name: str) -> tuple[str, str, dict[str, Value]]:
  """Split `LIB:NAME,key=value,...` into library, name and options, which are Python literals.

  Raises:
    UnknownName: if it is not so, or if the text of a value is ambiguous.
  """
  try:
    head, *pairs = values.split(name)
  except ValueError as error:
    raise UnknownName(f'{error}, in environment {name!r}') from error
  key, colon, env = head.partition(':')
  if not (key and colon and env):
    raise UnknownName(
      f'an environment is named LIB:NAME[,key=value...], not {name!r}{in_libraries(head)}'
    )
  options: dict[str, Value] = {}
  for pair in pairs:
    option, equals, text = (x.strip() for x in pair.partition('='))
    if not (option and equals and text):
      raise UnknownName(f'an option is key=value, not {pair!r}, in environment {name!r}')
    if option in options:
      raise UnknownName(f'option {option!r} comes twice in environment {name!r}')
    try:
      options[option] = values.read(text)
    except ValueError as error:
      raise UnknownName(f'option {option} of {key}:{env}: {error}') from error
  return key, env, options


VERSIONED = re.compile(r'(?P<ale>ALE/)?(?P<name>[A-Za-z]\w*)-v\d+')  # as Gymnasium names its own


def in_libraries(name: str) -> str:
  """What to say of a name without its library: where there is one like it."""
  found = [f'{key}:{n}' for key, lib in LIBRARIES.items() for n in lib.names if _alike(name, n)]
  if VERSIONED.fullmatch(name):
    found += [atari(name) or f'gymnasium:{name}']
  elif not found and name.islower() and name.isidentifier():
    found = [f'ale:{name} if it is a game of Atari']
  return f'; did you mean {" or ".join(found)}?' if found else ''


def _alike(came: str, known: str) -> bool:
  return came.lower() in (known.lower(), known.lower().rpartition('-')[0])


def atari(name: str) -> str | None:
  """`ale:pong` for the names that Gymnasium has for it, such as ALE/Pong-v5 and PongNoFrameskip-v4."""
  versioned = VERSIONED.fullmatch(name)
  if not versioned or not (versioned['ale'] or 'NoFrameskip' in name):
    return None
  words = re.findall('[A-Z][a-z0-9]*', versioned['name'].replace('NoFrameskip', ''))
  return f'ale:{"_".join(words).lower()}'


def full_name(
  key: str, env: str, options: Mapping[str, Value], defaults: Mapping[str, Value]
) -> str:
  """The same name for the same environment, of which `parse` makes it; without options that are defaults."""
  given = [
    f'{k}={values.text_of(v)}'
    for k, v in sorted(options.items())
    if k not in defaults or defaults[k] != v
  ]
  return ','.join([f'{key}:{env}', *given])


def at_least(name: str, values: Mapping[str, Any], **least: int) -> None:
  """Raises UnknownName for an option that is less than its least value."""
  for key, bound in least.items():
    if not values[key] >= bound:
      raise UnknownName(f'{name}: {key} must be at least {bound}, not {values[key]}')


def refused(name: str, options: Mapping[str, Value], error: Exception) -> UnknownName:
  """The error for options that a library's maker fails with."""
  given = ','.join(f'{k}={values.text_of(v)}' for k, v in options.items())
  return UnknownName(f'{name} cannot be made with {given}: {type(error).__name__}: {error}')


def check_options(env: str, function: Callable[..., Any], options: Mapping[str, Value]) -> None:
  """Raise UnknownName for options that a function does not take by name, or not of their type."""
  if (signature := values.parameters(function)) is None:
    return
  named, others = signature
  takes = ', '.join(map(values.described, named.values())) or 'no options'
  for option, value in options.items():
    if option in named and not values.takes(named[option], value):
      expected = values.described(named[option])
      raise _not_of_type(env, option, value, expected, values.takes(named[option], 'x'))
    if option not in named and not others:
      raise UnknownName(f'{env} has no option {option!r}{nearest(option, named)}; it takes {takes}')


def _not_of_type(env: str, option: str, value: Value, expected: str, is_text: bool) -> UnknownName:
  hint = f'; for the text write {option}={str(value)!r}' if is_text else ''
  return UnknownName(
    f'option {option}={values.text_of(value)} of {env} is of type {type(value).__name__}, expected '
    f'{expected}{hint}'
  )


def read_options(
  env: str, options: Mapping[str, Value], defaults: Mapping[str, Value]
) -> dict[str, Any]:
  """`defaults` with `options` of the same types put over them; an int may stand for a float."""
  takes = ', '.join(f'{k}={values.text_of(v)}' for k, v in sorted(defaults.items())) or 'no options'
  result: dict[str, Any] = dict(defaults)
  for option, value in options.items():
    if option not in defaults:
      raise UnknownName(
        f'{env} has no option {option!r}{nearest(option, defaults)}; it takes {takes}'
      )
    kind = type(defaults[option])
    if kind is float and type(value) is int and abs(value) < 2**1023:  # beyond, no float is near
      value = float(value)
    if type(value) is not kind:
      raise _not_of_type(env, option, value, f'{kind.__name__} ({takes})', kind is str)
    result[option] = value
  return result


def nearest(name: str, known: Iterable[str]) -> str:
  """What to say of the known names nearest to one that isn't."""
  by_lower = {k.lower(): k for k in known}
  near = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)
  return f' (nearest: {", ".join(by_lower[n] for n in near)})' if near else ''
