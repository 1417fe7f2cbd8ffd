"""Environments by name, without importing jax or a library.

A name is `LIB:NAME`, optionally followed by options: `LIB:NAME,key=value,key=value`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
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
  wrappers = _wrappers(name, options)
  adapter = load_adapter(library, f"environment '{key}:{env}'")
  try:
    made = adapter.make(env, options)
  except ImportError as error:
    if not library.extra:
      raise
    raise MissingExtra(why_not(f"environment '{key}:{env}'", library.extra, error)) from error
  return functools.reduce(lambda env, wrap: wrap(env), wrappers, made)


def _wrappers(name: str, options: dict[str, Any]) -> list[Callable[[Any], Any]]:
  """Take the options `hide`, `noise` and `state` off `options`; return their wrappers in order."""
  shows_state = read_options(name, {k: options.pop(k) for k in SHOWN if k in options}, SHOWN)
  key, env, _ = parse(name)
  wrappers: list[Callable[[Any], Any]] = []
  ours = {} if key == 'python' else options  # a function may take options of these names itself
  if 'hide' in ours:
    hidden = importlib.import_module('podrace.envs.hidden')
    wrappers.append(functools.partial(hidden.without_velocities, hidden.read(key, env, options)))
  if 'noise' in ours:
    noise = importlib.import_module('podrace.envs.noise')
    wrappers.append(functools.partial(noise.with_noise, f'{key}:{env}', options.pop('noise')))
  if shows_state['state']:
    states = importlib.import_module('podrace.envs.states')
    wrappers.append(functools.partial(states.with_state, name))
  return wrappers


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
