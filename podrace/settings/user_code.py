"""Code that is not podrace's: which modules a run's record names, and who allows them.

A run directory may come from somebody else. Its config.json names modules, and importing a module runs it. So only
podrace's own are imported on the record's word; all others the user has to name. Importing this does not import jax.

Every text of a record is looked at. The type of its field declares what it may name (`podrace.fields.Role`). A text
without a declared role, as in an agent or an option of somebody's own, may name a module in each way that there is.
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

CLASS = 'class'  # where a record names a dataclass of somebody's own, in the place of ours
KIND, TRAIN = (
  'command',
  'train',
)  # what a record has of the command that made it, unless it was train
KINDS = {
  TRAIN: ('podrace.settings.config', 'Config'),
  'discover': ('podrace.settings.discovery', 'Discovery'),
}

REFERENCE = re.compile(r'([^\s/\\:,=]+):\w')  # MODULE:NAME, of a class or of an id of Gymnasium


# --- names ----------------------------------------------------------------------------------------


def of_agent(name: str) -> str | None:
  """The module of an agent or a class that is called `module:Class`; None if it is podrace's."""
  module, colon, _ = name.partition(':')
  return module if colon and not _is_within(module, 'podrace') else None


def of_env(name: str) -> list[str]:
  """Return the modules that the name of an environment has imported, or of several with blanks between them.

  `python:` calls any function of a module, so podrace's own and installed modules are no exception there. Texts
  among the options may name an environment or a class again, as in `opponent=`, `env_id=`.
  """
  found: list[str] = []
  for part in _parts(name):
    try:
      library, env, options = parse(part)
    except UnknownName:  # which is refused where it is to be made
      continue
    known = LIBRARIES.get(library) or HOST_LIBRARIES.get(library)
    if known is not None and known.module_of is not None:
      found.append(known.module_of(env))
    found += [m for x in options.values() if isinstance(x, str) for m in of_text(x)]
  return [m for m in dict.fromkeys(found) if m]


def of_text(text: str) -> list[str]:
  """Return the modules that a text without a declared role may name: as an environment, or as MODULE:NAME."""
  found = of_env(text)
  for part in _parts(text):
    name = REFERENCE.match(part)
    if name and name[1] not in (*LIBRARIES, *HOST_LIBRARIES) and not _is_within(name[1], 'podrace'):
      found.append(name[1])
  return list(dict.fromkeys(found))


def _parts(text: str) -> Iterable[str]:
  """The text, and what blanks separate in it: some settings take several names, and others one with blanks."""
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
  left: list[Any] = [copy]  # no recursion: a record may be nested deeply
  while left:
    value = left.pop()
    for key, x in value.items() if isinstance(value, dict) else enumerate(value):
      if isinstance(x, dict | list):
        value[key] = x.copy()
        left.append(value[key])
      elif isinstance(x, str) and key in (CLASS, 'name'):
        module, colon, name = x.partition(':')
        value[key] = f'{MOVED.get(module, module)}{colon}{name}'
  return copy


def named(record: Any) -> dict[str, str]:
  """Return the modules that a config.json names and that are not podrace's, each with the setting that names it."""
  found: dict[str, str] = {}
  for path, text, declared in _texts(record):
    for module in _modules(text, role_of(declared)):
      found.setdefault(module, f'{path} {text:.200}')
  return found


def _modules(text: str, role: str) -> list[str]:
  if role == 'class':
    module = of_agent(text)
    return [] if module is None else [module]
  if role == 'environment':
    return of_env(text)
  return [] if role in ('file', 'text', 'choice') else of_text(text)


def _texts(record: Any) -> Iterator[tuple[str, str, Any]]:
  """Every text of a record: its path, itself, and its declared type, None where there is none."""
  kind = record.get(KIND, TRAIN) if isinstance(record, dict) else None
  root = _dataclass(*KINDS[kind]) if isinstance(kind, str) and kind in KINDS else None
  left: list[tuple[str, Any, Any]] = [
    ('', record, root)
  ]  # no recursion: a stranger may nest it deeply
  while left:
    path, value, declared = left.pop()
    if isinstance(value, str):
      yield path, value, declared
    elif isinstance(value, list):
      each = zip(value, item_types(declared, len(value)), strict=True)
      left += reversed([(path, x, t) for x, t in each])
    elif isinstance(value, dict):
      types = _field_types(value, declared, 'name' if path == 'agent' else CLASS)
      below = f'{path}.' if path else ''
      left += reversed([(f'{below}{k}', x, types.get(k)) for k, x in value.items()])


def _field_types(value: dict[str, Any], declared: Any, key: str) -> dict[str, Any]:
  """The declared types of an object's fields, those of podrace's classes; `key` names its class."""
  cls, name = declared, value.get(CLASS, value.get(key))
  if isinstance(name, str):
    module, _, attribute = name.partition(':')
    ours = _is_within(module, 'podrace')
    cls = _dataclass(*AGENTS.get(name, (module, attribute))) if ours or name in AGENTS else None
  types = typing.get_type_hints(cls, include_extras=True) if dataclasses.is_dataclass(cls) else {}
  return {**types, CLASS: ClassName, **({key: ClassName} if key in value else {})}


def _dataclass(module: str, name: str) -> Any:
  """A dataclass of podrace's; None if there is none of that name."""
  with contextlib.suppress(Exception):  # a record may have any name
    found = getattr(importlib.import_module(module), name)
    return found if isinstance(found, type) and dataclasses.is_dataclass(found) else None
  return None


def refused(record: Any, allowed: Iterable[str]) -> dict[str, str]:
  """Those of `named` that are neither allowed nor within a package that is."""
  packages = list(allowed)
  return {m: x for m, x in named(record).items() if not any(_is_within(m, p) for p in packages)}


def _is_within(module: str, package: str) -> bool:
  return module == package or module.startswith(f'{package}.')


def options(modules: Iterable[str]) -> str:
  """What to give for these modules on the command line."""
  return ' '.join(f'--allow-code {shlex.quote(m)}' for m in modules)


# --- where modules are looked for -----------------------------------------------------------------


def look_here(modules: Iterable[str | None]) -> None:
  """Has modules that the user named be found in the working directory, after all that is installed."""
  here = os.getcwd()
  if any(modules) and here not in sys.path:
    sys.path.append(here)


def leave_here() -> None:
  """Has this process and its children look for no module in the working directory.

  `python -m podrace...` looks there before the libraries. So does an empty entry of PYTHONPATH, as in `:/lib`, which
  children inherit.
  """
  _drop_empty_entries()
  spec = getattr(sys.modules.get('__main__'), '__spec__', None)
  if spec is None or not spec.name.startswith('podrace') or sys.flags.safe_path:
    return
  with contextlib.suppress(OSError):
    if sys.path and os.path.realpath(sys.path[0]) == os.path.realpath(os.getcwd()):
      del sys.path[0]


def _drop_empty_entries() -> None:
  """Takes empty entries out of PYTHONPATH, and the working directory that they stand for out of `sys.path`."""
  entries = os.environ.get('PYTHONPATH', '').split(os.pathsep)
  named = [entry for entry in entries if entry]
  if len(named) == len(entries):
    return
  os.environ['PYTHONPATH'] = os.pathsep.join(named)
  with contextlib.suppress(OSError):
    here = os.path.realpath(os.getcwd())
    needed = [*named, str(Path(__file__).parents[2])]  # the last has podrace itself
    if here not in map(os.path.realpath, needed):
      sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != here]
