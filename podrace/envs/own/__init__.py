"""The environments that are part of podrace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podrace.envs.base import NextStepReset
from podrace.envs.env_names import at_least, read_options
from podrace.envs.options import Value
from podrace.envs.own.autoencode import Autoencode
from podrace.envs.own.catch import Catch
from podrace.envs.own.count_recall import CountRecall
from podrace.envs.own.empty_rooms import EmptyRooms
from podrace.envs.own.grasp import Grasp
from podrace.envs.own.grid_worlds import GridWorlds
from podrace.envs.own.higher_lower import HigherLower
from podrace.envs.own.lifetimes import Lifetimes
from podrace.envs.own.maze import Maze
from podrace.envs.own.memory import MemoryTask
from podrace.envs.own.objects import Objects
from podrace.envs.own.repeat_previous import RepeatPrevious
from podrace.types import Environment

_CARDS: dict[str, Any] = {
  'repeat_previous': RepeatPrevious,
  'count_recall': CountRecall,
  'autoencode': Autoencode,
  'higher_lower': HigherLower,
}
_DYNAMICS: dict[str, Any] = {
  'catch': Catch,
  'grasp': Grasp,
  'maze': Maze,
  'memory': MemoryTask,
  **_CARDS,
}
_WORLDS: dict[str, Any] = {
  'empty_rooms': EmptyRooms,
  'random_abc': Objects,
  'nonstationary_abc': Objects,
  'key_box': lambda **fields: Objects(key=True, **fields),
  'grid_worlds': GridWorlds,
}
_DEFAULTS: dict[str, dict[str, Value]] = {
  'catch': {'rows': 10, 'columns': 5},
  'grasp': {'objects': 'train', 'distractors': 0, 'slip': 0.0, 'steps': 10},
  'maze': {'size': 7, 'levels': 0, 'unseen': False, 'density': 0.3},
  'memory': {'length': 10, 'continuous': False},
  **{name: {'difficulty': 'easy'} for name in _CARDS},
  'empty_rooms': {'size': 9, 'steps': 80, 'episodes': 200},
  'random_abc': {'size': 5, 'steps': 20, 'episodes': 50},
  'nonstationary_abc': {'size': 5, 'steps': 20, 'period': 250, 'episodes': 1000},
  'key_box': {'size': 5, 'steps': 40, 'episodes': 200},
  'grid_worlds': {'size': 6, 'objects': 3, 'density': 0.2, 'episodes': 0},
}
_TASK: dict[str, Value] = {'task': -1}  # an option of all worlds with lifetimes


def make(name: str, options: Mapping[str, Value]) -> Environment:
  """Make `podrace:NAME`: a task, or a world with lifetimes."""
  if name in _DYNAMICS:
    fields = read_options(f'podrace:{name}', options, _DEFAULTS[name])
    return NextStepReset(_DYNAMICS[name](**fields))
  fields = read_options(f'podrace:{name}', options, _DEFAULTS[name] | _TASK)
  at_least(f'podrace:{name}', {'period': 1, **fields}, period=1)
  episodes, task = fields.pop('episodes'), fields.pop('task')
  return Lifetimes(_WORLDS[name](**fields), episodes, task)
