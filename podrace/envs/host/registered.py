"""Gymnasium's environments by their ids: made, or what is wrong with the name, the module or the maker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import gymnasium

from podrace.blame import not_made
from podrace.envs.registry import UnknownName, Value, atari, nearest, refused
from podrace.errors import UsageError
from podrace.imports import imported


def make(name: str, options: Mapping[str, Value]) -> gymnasium.Env:
  """One environment by Gymnasium's id, `MODULE:ID` to import one's own; options go to its maker.

  Raises:
    UsageError, UnknownName: if there is none of that name, or it can't be made.
  """
  module, _, env_id = name.rpartition(':')
  before = set(gymnasium.registry)
  if module:
    try:
      imported(f'no environment gymnasium:{name}', module)
    except UsageError as error:
      raise UnknownName(str(error)) from error
  try:
    return gymnasium.make(name, **dict[str, Any](options))
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
  except (gymnasium.error.Error, ImportError) as error:
    raise UnknownName(f'gymnasium:{name}: {error}') from error
  except Exception as error:
    if options and isinstance(error, ValueError | AssertionError | LookupError | ArithmeticError):
      raise refused(f'gymnasium:{name}', options, error) from error
    raise not_made(f'gymnasium:{name}', error) from error


def _of_module(module: str, env_id: str, before: Iterable[str]) -> str:
  """What to say of an id that is not registered though its module can be imported."""
  known = set(gymnasium.registry) - set(before)
  known |= {k for k, spec in gymnasium.registry.items() if _is_of(spec.entry_point, module)}
  if not known:
    return (
      f'gymnasium has no environment {env_id!r}, and module {module!r} registers none: it is to call '
      f'gymnasium.register({env_id!r}, entry_point=...) when it is imported'
    )
  ids = [f'{module}:{x}' for x in sorted(known)]
  hint = nearest(f'{module}:{env_id}', ids) or f'; the module registers {", ".join(ids[:5])}'
  return f'gymnasium has no environment {f"{module}:{env_id}"!r}{hint}'


def _is_of(entry_point: Any, module: str) -> bool:
  """Whether what makes an environment is of a module, or of one below it."""
  place = entry_point.partition(':')[0] if isinstance(entry_point, str) else entry_point
  place = place if isinstance(place, str) else getattr(place, '__module__', '') or ''
  return f'{place}.'.startswith(f'{module}.')
