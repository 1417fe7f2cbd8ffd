"""Imports of the user's modules by names such as module:Class, and messages about failed imports.

Importing this module does not import JAX.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sysconfig
import traceback
import types
from pathlib import Path
from typing import Any

from podrace.errors import UsageError


def import_attribute(context: str, module: str, name: str) -> Any:
  """Return attribute `name` of a module of the user.

  Args:
    context: the beginning of an error message.
    module: the name of the module.
    name: the name of the attribute.

  Raises:
    UsageError: if the module cannot be imported, or has no such attribute.
  """
  loaded = import_user_module(context, module)
  if hasattr(loaded, name):
    return getattr(loaded, name)
  file, mine = getattr(loaded, '__file__', None), Path(*module.split('.')).with_suffix('.py')
  if mine.exists() and (file is None or not mine.samefile(file)):
    raise UsageError(
      f'{context}: module {module!r} is another one here, from {file or "Python itself"}, and not '
      f'your {mine}: give the file another name'
    )
  public = [n for n in vars(loaded) if not n.startswith('_')]
  near = difflib.get_close_matches(name, public, n=1, cutoff=0.5) or [
    n for n in public if n.lower() == name.lower()
  ]
  hint = f': did you mean {near[0]}?' if near else ''
  raise UsageError(f'{context}: module {module!r} has no {name!r}{hint}')


def import_user_module(context: str, module: str) -> types.ModuleType:
  """Import a module of the user; `context` begins an error message.

  Raises:
    UsageError: if it cannot be imported, with the lines in the user's files that led to the
      failure.
  """
  if module.endswith('.py'):
    plain = module.removesuffix('.py').replace(os.sep, '.')
    raise UsageError(f'{context}: a module is named without .py; write {plain}')
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as e:
    if e.name is None or not f'{module}.'.startswith(f'{e.name}.'):  # a module that it imports
      raise UsageError(f'{context}: {explain(e)}') from e
    raise UsageError(
      f'{context}: no module {e.name!r}, neither in this directory ({os.getcwd()}) nor installed'
    ) from e
  except (Exception, SystemExit) as e:  # of a script that ends by sys.exit
    raise UsageError(f'{context}: {explain(e)}') from e


LIBRARIES = {  # extra -> the modules that it installs, if their names differ from its own
  'ale': ('ale_py',),
  'remote': ('cryptography', 'msgpack'),
  'plot': ('matplotlib',),
  'sweep': ('optuna',),
  'logs': ('h5py', 'minari', 'PIL'),
  'video': ('av', 'PIL'),
  'tensorboard': ('tensorboardX',),
}


NO_EXTRAS = ('pandas', 'onnxruntime')  # libraries that no extra of podrace installs


def why_not(context: str, extra: str, error: Exception) -> str:
  """Return the message about the failed import of a library: it is missing, or does not work.

  Args:
    context: names the part of podrace that needs the library.
    extra: the extra that installs it, or one of NO_EXTRAS.
    error: the exception of the import.
  """
  libraries = LIBRARIES.get(extra, (extra,))
  named, package = f"the extra '{extra}'", f"'podrace[{extra}]'"
  if extra in NO_EXTRAS:
    named, package = extra, extra
  if isinstance(error, ModuleNotFoundError) and error.name in libraries:
    return f'{context} needs {named}: {installer()} {package} ({error})'
  cause = f'{type(error).__name__}: {error}'.splitlines()[0]
  return (
    f'{context} needs {" and ".join(libraries)}, which is installed but cannot be imported: '
    f'{cause}. It lacks a module, or its version does not fit: {installer()} --upgrade {package}'
  )


def explain(error: BaseException) -> str:
  """Return an exception of the user's code, with the lines in the user's files that led to it."""
  if isinstance(error, SyntaxError) and error.filename:
    text = f'\n  {error.text.strip()}' if error.text else ''
    return f'{shorten(error.filename)}:{error.lineno}: {type(error).__name__}: {error.msg}{text}'
  frames = [f for f in traceback.extract_tb(error.__traceback__) if is_user_file(f.filename)]
  text = f'{type(error).__name__}: {error}'
  if not frames:
    return text
  places = ''.join(f'\n  {shorten(f.filename)}:{f.lineno}: {f.line}' for f in frames)
  return f'{shorten(frames[-1].filename)}:{frames[-1].lineno}: {text}{places}'


def is_user_file(file: str) -> bool:
  """Return whether a file belongs to the user, not to podrace, a library or Python."""
  paths = sysconfig.get_paths()
  libraries = [Path(paths[k]) for k in ('stdlib', 'platstdlib', 'purelib', 'platlib')]
  libraries.append(Path(__file__).parents[1])
  path = Path(file)
  return path.exists() and not any(path.is_relative_to(p) for p in libraries)


def shorten(path: str) -> str:
  """Return a path relative to the working directory, if it is below that."""
  full, current = Path(path), Path.cwd()
  return str(full.relative_to(current) if full.is_relative_to(current) else full)


def installer() -> str:
  """Return the command that installs into this environment: environments of uv have no pip."""
  return 'pip install' if importlib.util.find_spec('pip') else 'uv pip install'
