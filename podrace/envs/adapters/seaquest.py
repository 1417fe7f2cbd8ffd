"""Gymnax's Seaquest with fewer places in its lists of fish, submarines, bullets and divers.

gymnax keeps 100 places in each of five lists. Most of a step's time goes into moving and comparing
empty places, so with 32 places a step takes a fifth of the time. The rules are gymnax's, and so is
each number: with the default parameters no list needs more than 31 places. At most one enemy
appears in a step, and it crosses the board in 30 steps at the highest speed, which comes before
the highest rate of enemies.
"""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType
from typing import Any

PLACES = 32
GAME = 'gymnax.environments.minatar.seaquest'
HELPERS = 'gymnax.environments.minatar.seaquest_helpers'


@functools.cache
def few_places() -> Any:
  """Return gymnax's class of Seaquest, made anew with `PLACES` in place of its constant."""
  helpers, game = _copy(HELPERS), _copy(GAME)
  for name, x in vars(game).items():
    if getattr(x, '__module__', None) == HELPERS:
      setattr(game, name, getattr(helpers, name))
  for module in (helpers, game):
    if not hasattr(module, 'MAX_ENTITIES'):
      raise AttributeError(f'{module.__name__} has no MAX_ENTITIES: this gymnax is another one')
    module.MAX_ENTITIES = PLACES  # type: ignore[attr-defined]
  return game.MinSeaquest


def _copy(name: str) -> ModuleType:
  """Execute a module once more, apart from the one that is imported."""
  spec = importlib.util.find_spec(name)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module
