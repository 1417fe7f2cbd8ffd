"""Environments by name, without importing jax or a library.

A name is `LIB:NAME`, optionally followed by options: `LIB:NAME,key=value,key=value`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from podrace.envs.env_names import SHOWN, nearest, parse, read_options
from podrace.envs.libraries import HOST_LIBRARIES, LIBRARIES, Library
from podrace.errors import MissingExtra, UnknownName
from podrace.system.importing import why_not

if TYPE_CHECKING:
  from podrace.types import Environment


def names() -> dict[str, tuple[str, ...]]:
  """Return the names of all environments, by library."""
  return {key: library.names for key, library in LIBRARIES.items()}


def make(name: str) -> Environment:
  """Make the environment that `LIB:NAME,key=value,...` names.

  Raises:
    UnknownName: if there is none of this name, or an option is wrong.
    MissingExtra: if its library is not installed.
  """
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
  kept = _hidden(key, env, options)
  adapter = load_adapter(library, f"environment '{key}:{env}'")
  try:
    made = adapter.make(env, options)
  except ImportError as error:
    if not library.extra:
      raise
    raise MissingExtra(why_not(f"environment '{key}:{env}'", library.extra, error)) from error
  if kept is not None:
    made = importlib.import_module('podrace.envs.hidden').without_velocities(made, kept)
  if shows_state['state']:
    shown: Environment = importlib.import_module('podrace.envs.states').with_state(name, made)
    return shown
  return made


def _hidden(key: str, env: str, options: dict[str, Any]) -> tuple[int, ...] | None:
  """Take the option `hide` off `options`; return the indices to keep, None for all."""
  if 'hide' not in options:
    return None
  kept: tuple[int, ...] = importlib.import_module('podrace.envs.hidden').read(key, env, options)
  return kept


def load_adapter(library: Library, what: str) -> Any:
  """Return the module that adapts a library.

  Raises:
    MissingExtra: if the library is not installed, or cannot be imported.
  """
  try:
    return importlib.import_module(library.module)
  except Exception as error:  # libraries of the wrong version fail by any exception
    if not library.extra:
      raise
    raise MissingExtra(why_not(what, library.extra, error)) from error
