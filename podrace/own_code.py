"""Code that is not podrace's: which modules a run's record names, and who allows them.

A run directory may come from somebody else. Its config.json names modules, and importing a module runs it. So only
podrace's own are imported on the record's word; all others the user has to name. Importing this does not import jax.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from podrace.envs.registry import UnknownName, parse

CLASS = 'class'  # where a record names a dataclass of somebody's own, in the place of ours


def of_agent(name: str) -> str | None:
  """The module of an agent or a class that is called `module:Class`; None if it is podrace's."""
  module, colon, _ = name.partition(':')
  return module if colon and not _is_within(module, 'podrace') else None


def of_env(name: str) -> str | None:
  """The module that an environment's name has imported; None if it is a library's that podrace knows.

  `python:` calls any function of a module, so podrace's own and installed modules are no exception there.
  """
  try:
    library, env, _ = parse(name)
  except UnknownName:  # which is refused where it is to be made
    return None
  if library == 'python':
    return env.rpartition('.')[0] or None
  if library == 'gymnasium' and ':' in env:
    module = env.rpartition(':')[0]
    return None if _is_within(module, 'podrace') else module
  return None


def named(record: Any) -> dict[str, str]:
  """The modules that a config.json names and that are not podrace's, each with what names it."""
  if not isinstance(record, dict):
    return {}
  agent = record.get('agent')
  found = list(_classes(record))
  if isinstance(agent, dict) and isinstance(agent.get('name'), str):
    found.insert(0, (of_agent(agent['name']), f'agent {agent["name"]}'))
  if isinstance(record.get('env'), str):
    found += [(of_env(env), f'env {env}') for env in record['env'].split()]
  return {module: what for module, what in reversed(found) if module is not None}


def _classes(record: dict[str, Any]) -> Iterator[tuple[str | None, str]]:
  for value in record.values():
    if isinstance(value, dict):
      if CLASS in value:
        name = str(value[CLASS])
        yield of_agent(f'{name}:'), f'class {name}'
      yield from _classes(value)


def refused(record: Any, allowed: Iterable[str]) -> dict[str, str]:
  """Those of `named` that are neither allowed nor within a package that is."""
  packages = list(allowed)
  return {m: x for m, x in named(record).items() if not any(_is_within(m, p) for p in packages)}


def _is_within(module: str, package: str) -> bool:
  return module == package or module.startswith(f'{package}.')


def options(modules: Iterable[str]) -> str:
  """What to give for these modules on the command line."""
  return ' '.join(f'--allow-code {m}' for m in modules)


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
    needed = [*named, os.path.dirname(os.path.dirname(__file__))]  # the last has podrace itself
    if here not in map(os.path.realpath, needed):
      sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != here]
