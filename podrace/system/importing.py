"""Modules of the user's: what a name such as module:Class imports, and what is said where that fails.

Importing this does not import jax.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sysconfig
import traceback
import types
from pathlib import Path
from typing import Any

from podrace.errors import UsageError


def attribute(what: str, module: str, name: str) -> Any:
  """`name` of a module of the user's; `what` begins the message if there is none.

  Raises:
    UsageError: if the module can't be imported, or has nothing of that name.
  """
  found = imported(what, module)
  if hasattr(found, name):
    return getattr(found, name)
  file, mine = getattr(found, '__file__', None), Path(*module.split('.')).with_suffix('.py')
  if mine.exists() and (file is None or not mine.samefile(file)):
    raise UsageError(
      f'{what}: module {module!r} is another one here, from {file or "Python itself"}, and not your '
      f'{mine}: give the file another name'
    )
  public = [n for n in vars(found) if not n.startswith('_')]
  near = difflib.get_close_matches(name, public, n=1, cutoff=0.5) or [
    n for n in public if n.lower() == name.lower()
  ]
  hint = f': did you mean {near[0]}?' if near else ''
  raise UsageError(f'{what}: module {module!r} has no {name!r}{hint}')


def imported(what: str, module: str) -> types.ModuleType:
  """A module of the user's.

  Raises:
    UsageError: if it can't be imported, with the lines of the user's that were to blame.
  """
  if module.endswith('.py'):
    plain = module.removesuffix('.py').replace(os.sep, '.')
    raise UsageError(f'{what}: a module is named without .py; write {plain}')
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as e:
    if e.name is None or not f'{module}.'.startswith(f'{e.name}.'):  # it imports what is not there
      raise UsageError(f'{what}: {explain(e)}') from e
    raise UsageError(
      f'{what}: no module {e.name!r}, neither in this directory ({os.getcwd()}) nor installed'
    ) from e
  except Exception as e:
    raise UsageError(f'{what}: {explain(e)}') from e


LIBRARIES = {  # extra -> the modules that it installs, where they are not of its name
  'ale': ('ale_py',),
  'remote': ('cryptography', 'msgpack'),
  'plot': ('matplotlib',),
  'sweep': ('optuna',),
  'video': ('av', 'PIL'),
  'tensorboard': ('tensorboardX',),
}


NO_EXTRAS = ('pandas', 'onnxruntime')  # libraries that no extra of podrace installs


def why_not(what: str, extra: str, error: Exception) -> str:
  """Returns why the import of a library failed: its extra is not installed, or the library itself is to blame.

  Args:
    what: needs the library.
    extra: installs it; or one of NO_EXTRAS.
    error: the import raised it.
  """
  libraries = LIBRARIES.get(extra, (extra,))
  named, package = f"the extra '{extra}'", f"'podrace[{extra}]'"
  if extra in NO_EXTRAS:
    named, package = extra, extra
  if isinstance(error, ModuleNotFoundError) and error.name in libraries:
    return f'{what} needs {named}: pip install {package} ({error})'
  cause = f'{type(error).__name__}: {error}'.splitlines()[0]
  return (
    f'{what} needs {" and ".join(libraries)}, which is installed but cannot be imported: {cause}. It lacks a module, '
    f'or its version does not fit: pip install --upgrade {package}'
  )


def explain(error: Exception) -> str:
  """An exception of the user's code, with the lines of it that led there."""
  if isinstance(error, SyntaxError) and error.filename:
    text = f'\n  {error.text.strip()}' if error.text else ''
    return f'{short(error.filename)}:{error.lineno}: {type(error).__name__}: {error.msg}{text}'
  frames = [f for f in traceback.extract_tb(error.__traceback__) if is_the_users(f.filename)]
  what = f'{type(error).__name__}: {error}'
  if not frames:
    return what
  places = ''.join(f'\n  {short(f.filename)}:{f.lineno}: {f.line}' for f in frames)
  return f'{short(frames[-1].filename)}:{frames[-1].lineno}: {what}{places}'


def is_the_users(file: str) -> bool:
  """Whether a file is neither podrace's nor of a library or Python's own."""
  paths = sysconfig.get_paths()
  libraries = [Path(paths[k]) for k in ('stdlib', 'platstdlib', 'purelib', 'platlib')]
  libraries.append(Path(__file__).parents[1])
  path = Path(file)
  return path.exists() and not any(path.is_relative_to(p) for p in libraries)


def short(path: str) -> str:
  """The path from here, if it is below."""
  found, here = Path(path), Path.cwd()
  return str(found.relative_to(here) if found.is_relative_to(here) else found)
