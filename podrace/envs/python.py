"""Anybody's environments: `python:module.function`, called with the options."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping

import gymnasium

from podrace.envs.registry import UnknownName, Value
from podrace.types import Environment


def make(name: str, options: Mapping[str, Value]) -> Environment:
  """What `module.function(**options)` returns, which must be an Environment."""
  module, _, attribute = name.rpartition('.')
  if not module:
    raise UnknownName(f'your own environment is named python:MODULE.FUNCTION, not python:{name}')
  try:
    factory = getattr(importlib.import_module(module), attribute)
  except (ModuleNotFoundError, AttributeError) as error:
    raise UnknownName(f'no environment python:{name}: {error}') from error
  try:
    inspect.signature(factory).bind(**options)
  except TypeError as error:
    raise UnknownName(f'python:{name}{inspect.signature(factory)}: {error}') from error
  env = factory(**options)
  if isinstance(env, gymnasium.Env):
    raise UnknownName(
      f'python:{name} is an environment of Gymnasium, and python: takes those written in JAX; register it in your '
      f'module and name it gymnasium:{module}:ID'
    )
  if isinstance(env, type):
    raise UnknownName(f'python:{name} returned the class {env.__name__}; write {env.__name__}()')
  needed = ('reset', 'step', 'observation_space', 'action_space')
  if lacks := [n for n in needed if not hasattr(env, n)]:
    raise UnknownName(f'python:{name} returned a {type(env).__name__}, without {", ".join(lacks)}')
  return env
