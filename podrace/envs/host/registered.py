"""Gymnasium's environments by id, and errors for a wrong name, module or maker."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import gymnasium
from gymnasium.envs import registration

from podrace.envs.env_names import atari, check_options, nearest, options_error
from podrace.envs.hidden import make_gymnasium
from podrace.envs.options import Value
from podrace.errors import UnknownName, UsageError
from podrace.system.blame import not_made
from podrace.system.importing import import_user_module


def make(name: str, options: Mapping[str, Value]) -> gymnasium.Env:
  """Make one environment by Gymnasium's id, or by `MODULE:ID`, which imports MODULE first.

  Options are arguments of its maker.

  Raises:
    UsageError: if it cannot be made.
    UnknownName: if there is none of this name, or an option is wrong.
  """
  module, _, env_id = name.rpartition(':')
  before = set(gymnasium.registry)
  if module:
    try:
      import_user_module(f'no environment gymnasium:{name}', module)
    except UsageError as error:
      raise UnknownName(str(error)) from error
  try:
    _check(name, options)
    return make_gymnasium(name, **dict[str, Any](options))
  except gymnasium.error.UnregisteredEnv as error:
    if game := atari(name):
      raise UnknownName(f'gymnasium has no environment {name!r}; here it is {game}') from error
    if module:
      raise UnknownName(_of_module(module, env_id, before)) from error
    hint = nearest(name, gymnasium.registry)
    raise UnknownName(
      f'gymnasium has no environment {name!r}{hint}; one that your module registers is '
      f'gymnasium:MODULE:{name}'
    ) from error
  except UnknownName:
    raise
  except (gymnasium.error.Error, ImportError) as error:
    raise UnknownName(f'gymnasium:{name}: {error}') from error
  except Exception as error:
    if options and isinstance(error, ValueError | AssertionError | LookupError | ArithmeticError):
      raise options_error(f'gymnasium:{name}', options, error) from error
    raise not_made(f'gymnasium:{name}', error) from error


def _check(name: str, options: Mapping[str, Value]) -> None:
  """Compare options with the signatures of `gymnasium.make` and of the environment's maker."""
  made_with = set(inspect.signature(gymnasium.make).parameters) - {'kwargs'}
  of_make = {k: v for k, v in options.items() if k in made_with}
  check_options(f'gymnasium:{name}', gymnasium.make, of_make)
  of_maker = {k: v for k, v in options.items() if k not in made_with}
  if ':' not in name:
    of_maker.pop('hide', None)  # podrace's own
  if of_maker and (spec := _spec(name.rpartition(':')[2])) is not None:
    maker = spec.entry_point
    check_options(
      f'gymnasium:{name}',
      registration.load_env_creator(maker) if isinstance(maker, str) else maker,
      of_maker,
    )


def _spec(env_id: str) -> Any:
  """Return the registry's entry for an id; of the newest version if the id names none."""
  if env_id in gymnasium.registry:
    return gymnasium.registry[env_id]
  namespace, name, _ = registration.parse_env_id(env_id)
  version = registration.find_highest_version(namespace, name)
  return gymnasium.registry.get(registration.get_env_id(namespace, name, version))


def _of_module(module: str, env_id: str, before: Iterable[str]) -> str:
  """Return the error message for an id that an imported module has not registered."""
  known = set(gymnasium.registry) - set(before)
  known |= {k for k, spec in gymnasium.registry.items() if _is_of(spec.entry_point, module)}
  if not known:
    return (
      f'gymnasium has no environment {env_id!r}, and module {module!r} registers none: it is to '
      f'call gymnasium.register({env_id!r}, entry_point=...) when it is imported'
    )
  ids = [f'{module}:{x}' for x in sorted(known)]
  hint = nearest(f'{module}:{env_id}', ids) or f'; the module registers {", ".join(ids[:5])}'
  return f'gymnasium has no environment {f"{module}:{env_id}"!r}{hint}'


def _is_of(entry_point: Any, module: str) -> bool:
  """Return whether an entry point is in a module, or in one below it."""
  place = entry_point.partition(':')[0] if isinstance(entry_point, str) else entry_point
  place = place if isinstance(place, str) else getattr(place, '__module__', '') or ''
  return f'{place}.'.startswith(f'{module}.')
