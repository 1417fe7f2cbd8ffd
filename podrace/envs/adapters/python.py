"""Users' own environments: `python:module.function`, called with the options."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import gymnasium

from podrace.envs.env_names import check_options
from podrace.envs.options import Value
from podrace.errors import MissingExtra, UnknownName, UsageError
from podrace.system.importing import explain, import_attribute
from podrace.types import Environment


def make(name: str, options: Mapping[str, Value]) -> Environment:
  """Return the Environment that `module.function(**options)` makes.

  Raises:
    UnknownName: if there is no such function, or it does not make an Environment.
  """
  module, _, function = name.rpartition('.')
  if not module:
    hint = f'; write python:{name.replace(":", ".")}' if ':' in name else ''
    raise UnknownName(
      f'your own environment is named python:MODULE.FUNCTION, not python:{name}{hint}'
    )
  try:
    factory = import_attribute(f'no environment python:{name}', module, function)
  except UsageError as error:
    raise UnknownName(str(error)) from error
  if not callable(factory):
    raise UnknownName(
      f'python:{name} is a {type(factory).__name__}, expected a function that makes an environment'
    )
  check_options(f'python:{name}', factory, options)
  try:
    inspect.signature(factory).bind(**options)
  except TypeError as error:
    raise UnknownName(f'python:{name}{inspect.signature(factory)}: {error}') from error
  try:
    env = factory(**options)
  except (UnknownName, MissingExtra, UsageError):
    raise
  except Exception as error:
    raise UnknownName(f'python:{name} failed: {explain(error)}') from error
  if isinstance(env, gymnasium.Env):
    raise UnknownName(
      f'python:{name} is an environment of Gymnasium, and python: takes environments written in '
      f'JAX; register it in your module and name it gymnasium:{module}:ID'
    )
  if isinstance(env, type):
    raise UnknownName(f'python:{name} returned the class {env.__name__}; write {env.__name__}()')
  needed = ('reset', 'step', 'observation_space', 'action_space')
  if lacks := [n for n in needed if not hasattr(env, n)]:
    raise UnknownName(f'python:{name} returned a {type(env).__name__}, without {", ".join(lacks)}')
  for space in needed[2:]:
    if not isinstance(getattr(env, space), gymnasium.spaces.Space):
      came = getattr(env, space)
      raise UnknownName(f'python:{name}: {space} is {came!r}, expected a gymnasium.spaces.Space')
  return env
