"""Imports of libraries that import more than they need.

Some environments import plotting libraries for pictures that a training run never draws. Importing
Matplotlib and Seaborn takes seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any


class Deferred(types.ModuleType):
  """A module, or an attribute of one, that is imported when it is used."""

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Call the attribute."""
    return _import(self.__name__)(*args, **kwargs)

  def __getattr__(self, name: str) -> Any:
    """Return an attribute; while `without` is active, a deferred one."""
    if name.startswith('__'):
      raise AttributeError(name)
    if sys.modules.get(self.__name__.partition('.')[0]) in _ACTIVE:
      return Deferred(f'{self.__name__}.{name}')
    return getattr(_import(self.__name__), name)


_ACTIVE: list[types.ModuleType] = []  # top-level modules that are deferred now


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Finds modules of packages as `Deferred`."""

  def __init__(self, packages: Sequence[str]) -> None:
    self.packages = packages

  def find_spec(
    self, fullname: str, path: Any = None, target: Any = None
  ) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a deferred module; None for all other modules."""
    if fullname.partition('.')[0] not in self.packages:
      return None
    return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

  def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
    """Return a `Deferred`."""
    module = Deferred(spec.name)
    if '.' not in spec.name:
      _ACTIVE.append(module)
    return module

  def exec_module(self, module: types.ModuleType) -> None:
    """Do nothing."""


def import_without(name: str, *packages: str) -> types.ModuleType:
  """Import a module, but not `packages` that it imports; these are imported when they are used.

  Packages that are imported already stay as they are. If the module needs one of them while it is
  imported, it is imported again with all of them.
  """
  before = set(sys.modules)
  if name in before:
    return sys.modules[name]
  with contextlib.suppress(Exception), _deferring([p for p in packages if p not in before]):
    return importlib.import_module(name)
  for key in set(sys.modules) - before:
    if key.partition('.')[0] == name.partition('.')[0]:
      del sys.modules[key]
  return importlib.import_module(name)


@contextlib.contextmanager
def _deferring(packages: Sequence[str]) -> Iterator[None]:
  finder = _Finder(packages)
  sys.meta_path.insert(0, finder)
  try:
    yield
  finally:
    sys.meta_path.remove(finder)
    _ACTIVE.clear()
    for key in [k for k, module in sys.modules.items() if isinstance(module, Deferred)]:
      del sys.modules[key]


def _import(name: str) -> Any:
  """Return the module `name`, or the attribute of the module before its last dot."""
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError:
    package, _, attribute = name.rpartition('.')
    if not package:
      raise
    return getattr(_import(package), attribute)
