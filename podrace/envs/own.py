"""Makes the environments that podrace brings itself."""

from __future__ import annotations

from collections.abc import Mapping

from podrace.envs.base import NextStepReset
from podrace.envs.catch import Catch
from podrace.envs.maze import Maze
from podrace.envs.memory import Memory
from podrace.envs.registry import Value, read_options
from podrace.types import Environment

_DYNAMICS = {'catch': Catch, 'maze': Maze, 'memory': Memory}
_DEFAULTS: dict[str, dict[str, Value]] = {
  'catch': {'rows': 10, 'columns': 5},
  'maze': {'size': 7, 'levels': 0, 'unseen': False, 'density': 0.3},
  'memory': {'length': 10},
}


def make(name: str, options: Mapping[str, Value]) -> Environment:
  """`podrace:catch`, `podrace:maze` or `podrace:memory`."""
  fields = read_options(f'podrace:{name}', options, _DEFAULTS[name])
  return NextStepReset(_DYNAMICS[name](**fields))
