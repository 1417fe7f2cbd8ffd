"""Modules of users that a run's record names, and their permission. Importing this imports no jax.

A run directory may come from a stranger. Its config.json names modules, and importing a module runs
it. So a record alone may import podrace's modules only, and the user must name all other modules.

Every text of a record is checked. The type of its field declares its role (`podrace.fields.Role`).
A text without a role, as in an agent of a user, may name a module in every possible way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import re
import shlex
import sys
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from podrace.agents import AGENTS
from podrace.envs.env_names import parse
from podrace.envs.libraries import HOST_LIBRARIES, LIBRARIES
from podrace.errors import UnknownName
from podrace.fields import ClassName, item_types, role_of

NATIVE = 'c:'  # begins the name of an environment in C, which counts as a module
CLASS = 'class'  # the key under which a record names a dataclass that is not podrace's
UNMADE = 'repr'  # the only key of a value that a record describes and cannot make again
KIND, TRAIN = 'command', 'train'  # key and default of the command that made a record
KINDS = {
  TRAIN: ('podrace.settings.config', 'Config'),
  'discover': ('podrace.settings.discovery', 'Discovery'),
}

REFERENCE = re.compile(r'([^\s/\\:,=]+):\w')  # MODULE:NAME of a class, or of a Gymnasium id


# --- names ----------------------------------------------------------------------------------------


def of_agent(name: str) -> str | None:
  """Return the module of an agent or a class `module:Class`; None if it is podrace's."""
  module, colon, _ = name.partition(':')
  return module if colon and not _is_within(module, 'podrace') else None


def of_env(name: str) -> list[str]:
  """Return the modules that the names of environments import; blanks separate the names.

  `python:` calls any function of a module, so it also counts for podrace's own and for installed
  modules. The module of an environment in C is its whole name, `c:PATH`. A text within the options
  may name another environment or class, as in `opponent=`.
  """
  modules: list[str] = []
  for part in _parts(name):
    try:
      library, env, options = parse(part)
    except UnknownName:  # making the environment refuses the name
      continue
    known = LIBRARIES.get(library) or HOST_LIBRARIES.get(library)
    if known is not None and known.module_of is not None:
      modules.append(known.module_of(env))
    modules += [m for text in _texts_within(options) for m in of_text(text)]
  return [m for m in dict.fromkeys(modules) if m]


def _texts_within(value: Any) -> Iterator[str]:
  """Yield the texts of an option's value; a tuple, list or dict has texts within."""
  if isinstance(value, str):
    yield value
  elif isinstance(value, dict):
    yield from _texts_within([*value, *value.values()])
  elif isinstance(value, list | tuple):
    for x in value:
      yield from _texts_within(x)


def of_text(text: str) -> list[str]:
  """Return the modules that a text without a role may name, as an environment or MODULE:NAME."""
  modules = of_env(text)
  for part in _parts(text):
    name = REFERENCE.match(part)
    if name and name[1] not in (*LIBRARIES, *HOST_LIBRARIES) and not _is_within(name[1], 'podrace'):
      modules.append(name[1])
  return list(dict.fromkeys(modules))


def _parts(text: str) -> Iterable[str]:
  """Return the text and its words: a setting takes several names, or one with blanks."""
  return dict.fromkeys((text, *text.split()))


# --- records --------------------------------------------------------------------------------------

MOVED = {  # module in records of earlier versions -> its present name
  'podrace.agents.varied': 'podrace.agents.population',
  'podrace.rules.disco': 'podrace.agents.rules.disco',
  'podrace.rules.lpg': 'podrace.agents.rules.lpg',
}


def update_paths(record: dict[str, Any]) -> dict[str, Any]:
  """Return a copy of a config.json's record with the present paths of classes in MOVED."""
  copy = dict(record)
  stack: list[Any] = [copy]  # no recursion: a record may be nested deeply
  while stack:
    value = stack.pop()
    for key, x in value.items() if isinstance(value, dict) else enumerate(value):
      if isinstance(x, dict | list):
        value[key] = x.copy()
        stack.append(value[key])
      elif isinstance(x, str) and key in (CLASS, 'name'):
        module, colon, name = x.partition(':')
        value[key] = f'{MOVED.get(module, module)}{colon}{name}'
  return copy


def named_modules(record: Any) -> dict[str, str]:
  """Return the user modules that a config.json names, each with the setting that names it."""
  modules: dict[str, str] = {}
  for path, text, declared in _texts(record):
    for module in _modules(text, role_of(declared)):
      modules.setdefault(module, f'{path} {text:.200}')
  return modules


def _modules(text: str, role: str) -> list[str]:
  if role == 'class':
    module = of_agent(text)
    return [] if module is None else [module]
  if role == 'environment':
    return of_env(text)
  return [] if role in ('file', 'text', 'choice') else of_text(text)


def _texts(record: Any) -> Iterator[tuple[str, str, Any]]:
  """Yield the path, the text and the declared type, or None, of every text of a record."""
  kind = record.get(KIND, TRAIN) if isinstance(record, dict) else None
  root = _dataclass(*KINDS[kind]) if isinstance(kind, str) and kind in KINDS else None
  # No recursion: a stranger may nest the record deeply.
  stack: list[tuple[str, Any, Any]] = [('', record, root)]
  while stack:
    path, value, declared = stack.pop()
    if isinstance(value, str):
      yield path, value, declared
    elif isinstance(value, list):
      each = zip(value, item_types(declared, len(value)), strict=True)
      stack += reversed([(path, x, t) for x, t in each])
    elif isinstance(value, dict) and value.keys() != {UNMADE}:  # nothing imports such a text
      types = _field_types(value, declared, 'name' if path == 'agent' else CLASS)
      below = f'{path}.' if path else ''
      stack += reversed([(f'{below}{k}', x, types.get(k)) for k, x in value.items()])


def _field_types(value: dict[str, Any], declared: Any, key: str) -> dict[str, Any]:
  """Return the declared types of an object's fields, if its class is podrace's.

  Args:
    value: the object's record.
    declared: the type of the field that holds the object.
    key: the key that names the object's class.
  """
  cls, name = declared, value.get(CLASS, value.get(key))
  if isinstance(name, str):
    module, _, attribute = name.partition(':')
    ours = _is_within(module, 'podrace')
    cls = _dataclass(*AGENTS.get(name, (module, attribute))) if ours or name in AGENTS else None
  types = typing.get_type_hints(cls, include_extras=True) if dataclasses.is_dataclass(cls) else {}
  return {**types, CLASS: ClassName, **({key: ClassName} if key in value else {})}


def _dataclass(module: str, name: str) -> Any:
  """Return a dataclass of podrace; None if no dataclass has that name."""
  with contextlib.suppress(Exception):  # a record may have any name
    cls = getattr(importlib.import_module(module), name)
    return cls if isinstance(cls, type) and dataclasses.is_dataclass(cls) else None
  return None


def refused_modules(record: Any, allowed: Iterable[str]) -> dict[str, str]:
  """Return the items of `named_modules` that are not within an allowed package."""
  packages = list(allowed)
  return {
    m: x for m, x in named_modules(record).items() if not any(_permits(p, m) for p in packages)
  }


def _permits(allowed: str, module: str) -> bool:
  """Return whether an allowed package permits a module. A file in C permits only itself."""
  return allowed == module or (not is_native(module) and _is_within(module, allowed))


def is_native(module: str) -> bool:
  """Return whether the name of a module is that of a file in C, which is no Python."""
  return module.startswith(NATIVE)


def _is_within(module: str, package: str) -> bool:
  return module == package or module.startswith(f'{package}.')


def options(modules: Iterable[str]) -> str:
  """Return the options that allow these modules on the command line."""
  return ' '.join(f'--allow-code {shlex.quote(m)}' for m in modules)


ALLOWED: set[str] = set()  # modules that `allow` has allowed in this process


def allow(modules: Iterable[str]) -> None:
  """Allow runs that are read for a setting, `init_from` or an opponent, to name these modules.

  A command does so for its --allow-code and --agent. In Python, call this before `configure`.
  """
  ALLOWED.update(modules)


# --- the search path ------------------------------------------------------------------------------


def look_here(modules: Iterable[str | None]) -> None:
  """Let Python find the user's modules in the working directory, after all installed modules."""
  here = os.getcwd()
  if any(m and not is_native(m) for m in modules) and here not in sys.path:
    sys.path.append(here)


def leave_here() -> None:
  """Take the working directory out of the search path of this process and its children.

  `python -m podrace...` searches there before the libraries. So does an empty entry of PYTHONPATH,
  as in `:/lib`, which children inherit.
  """
  _drop_empty_entries()
  spec = getattr(sys.modules.get('__main__'), '__spec__', None)
  if spec is None or not spec.name.startswith('podrace') or sys.flags.safe_path:
    return
  with contextlib.suppress(OSError):
    if sys.path and os.path.realpath(sys.path[0]) == os.path.realpath(os.getcwd()):
      del sys.path[0]


def _drop_empty_entries() -> None:
  """Remove empty entries from PYTHONPATH, and from `sys.path` the directory that they mean."""
  entries = os.environ.get('PYTHONPATH', '').split(os.pathsep)
  folders = [entry for entry in entries if entry]
  if len(folders) == len(entries):
    return
  os.environ['PYTHONPATH'] = os.pathsep.join(folders)
  with contextlib.suppress(OSError):
    here = os.path.realpath(os.getcwd())
    needed = [*folders, str(Path(__file__).parents[2])]  # the last holds podrace itself
    if here not in map(os.path.realpath, needed):
      sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != here]
