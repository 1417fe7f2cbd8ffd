"""Errors about code that is the user's: which function, in which file and line, what came of it.

Processes that step environments use it, which have no JAX: it is imported where it is needed.
"""

from __future__ import annotations

import inspect
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from podrace.errors import RunError, UsageError

MOST_LINES = 12  # of the message of somebody else's exception
MOST_LETTERS = 200  # of a description
TRACEBACK = 'PODRACE_TRACEBACK=1 shows the whole traceback'


def inner(owner: Any) -> Any:
  """What a wrapper of ours, such as NextStepReset, has wrapped."""
  while type(owner).__module__.startswith('podrace.') and hasattr(owner, 'dynamics'):
    owner = owner.dynamics
  return owner


def is_ours(owner: Any) -> bool:
  """Whether podrace brought it."""
  return type(inner(owner)).__module__.startswith('podrace.')


def label(owner: Any, name: str) -> str:
  """A method with its place, as `a2c.A2C.act (a2c.py:31)`."""
  owner = inner(owner)
  cls = type(owner)
  return f'{cls.__module__}.{cls.__qualname__}.{name}{_place(owner, name)}'


def _place(owner: Any, name: str) -> str:
  try:
    function = inspect.unwrap(getattr(owner, name))
    path, line = inspect.getsourcefile(function), inspect.getsourcelines(function)[1]
  except (AttributeError, OSError, TypeError):  # it has no source, as what is made by `eval`
    return ''
  return f' ({_short(path or "")}:{line})'


def _short(path: str) -> str:
  """The path from here, if it is below."""
  found, here = Path(path), Path.cwd()
  return str(found.relative_to(here) if found.is_relative_to(here) else found)


def describe(x: Any) -> str:
  """Types and shapes, as `(float32[8, 3], {'loss': float32[]})`."""
  text = _describe(x)
  return text if len(text) <= MOST_LETTERS else f'{text[: MOST_LETTERS - 4]} ...'


def _describe(x: Any) -> str:
  if isinstance(x, Mapping):
    return '{' + ', '.join(f'{k!r}: {_describe(v)}' for k, v in x.items()) + '}'
  if isinstance(x, tuple) and hasattr(x, '_fields'):
    fields = zip(x._fields, x, strict=True)
    return f'{type(x).__name__}({", ".join(f"{k}={_describe(v)}" for k, v in fields)})'
  if isinstance(x, tuple | list):
    open_, close = '()' if isinstance(x, tuple) else '[]'
    return open_ + ', '.join(map(_describe, x)) + close
  if hasattr(x, 'shape') and hasattr(x, 'dtype'):
    return f'{x.dtype}{list(x.shape)}'
  return repr(x) if isinstance(x, bool | int | float | str | None) else type(x).__name__


def refuse(owner: Any, name: str, came: str, expected: str) -> NoReturn:
  """Raises UsageError: the function returned one thing, where another is expected."""
  raise UsageError(f'{label(owner, name)} returned {came}, expected {expected}')


def calling(owner: Any, name: str, given: str, *args: Any) -> Any:
  """What the user's function returns; `given` says what it was called with.

  Raises:
    RunError: if it fails, with those lines of the traceback that are the user's.
  """
  try:
    return getattr(owner, name)(*args)
  except (UsageError, RunError):
    raise
  except Exception as e:
    raise failed(owner, name, given, e) from e


def failed(owner: Any, name: str, given: str, error: BaseException) -> RunError:
  """The error for an exception of the user's function."""
  frames = of_the_user(owner, error)
  return RunError(
    f'{label(owner, name)} failed:\n{_account(frames, error)}\nIt was given {given}.\n{TRACEBACK}.'
  )


def not_made(name: str, error: Exception) -> UsageError:
  """The error for an exception while something of the user's is made."""
  frames = of_the_user(None, error) or of_the_user(None, error.__cause__)
  if not frames:
    return UsageError(f'{name}: {error}')
  return UsageError(f'{name} cannot be made:\n{_account(frames, error)}\n{TRACEBACK}.')


def not_imported(module: str, error: Exception) -> UsageError:
  """The error for an exception while the user's module is imported, from its line: `penv.py:4: ...`."""
  frames, what = of_the_user(None, error), f'{type(error).__name__}: {error}'
  place = (frames[-1].filename, frames[-1].lineno) if frames else None
  text = ''.join(traceback.format_list(frames))
  if isinstance(error, SyntaxError) and error.filename:
    place, what = (error.filename, error.lineno), f'{type(error).__name__}: {error.msg}'
    text += ''.join(traceback.format_exception_only(error)[:-1])
  if place is None:
    return UsageError(f'module {module!r} cannot be imported: {what}')
  return UsageError(f'{_short(place[0])}:{place[1]}: {what}\n{text}{TRACEBACK}.')


def _account(frames: list[traceback.FrameSummary], error: BaseException) -> str:
  """These lines of a traceback, and the exception."""
  where = ''.join(traceback.format_list(frames))
  lines = ''.join(traceback.format_exception_only(error)).strip().splitlines()
  return where + '\n'.join(lines[:MOST_LINES] + (['...'] if len(lines) > MOST_LINES else []))


def of_the_user(owner: Any, error: BaseException | None) -> list[traceback.FrameSummary]:
  """Frames that are neither podrace's nor a library's, but for those of the file of the owner."""
  paths = sysconfig.get_paths()
  libraries = [Path(paths[k]) for k in ('stdlib', 'platstdlib', 'purelib', 'platlib')]
  libraries += [Path(__file__).parent]
  files = (getattr(sys.modules.get(name), '__file__', None) for name in ('jax', 'gymnasium'))
  libraries += [Path(file).parent for file in files if file]
  try:
    own = inspect.getsourcefile(type(inner(owner)))
  except TypeError:
    own = None

  def is_the_users(frame: traceback.FrameSummary) -> bool:
    path = Path(frame.filename)
    return frame.filename == own or (
      path.exists() and not any(path.is_relative_to(p) for p in libraries)
    )

  found = traceback.extract_tb(None if error is None else error.__traceback__)
  return [f for f in found if is_the_users(f)]


def leaves(tree: Any) -> list[tuple[str, Any]]:
  """(path, array) of each leaf, the path as `.params['w']`."""
  import jax

  return [(jax.tree_util.keystr(p), x) for p, x in jax.tree_util.tree_leaves_with_path(tree)]


def same_structure(x: Any, y: Any) -> bool:
  """Whether two trees are alike but for their leaves."""
  import jax

  a, b = (str(jax.tree.structure(tree)) for tree in (x, y))
  return a == b


def first_difference(came: Any, expected: Any) -> tuple[str, str] | None:
  """Where the types of two trees differ: what came, and what was expected; None if nowhere."""
  if not same_structure(came, expected):
    return describe(came), describe(expected)
  for (path, x), (_, y) in zip(leaves(came), leaves(expected), strict=True):
    if (x.shape, x.dtype) != (y.shape, y.dtype):
      return f'{path.lstrip(".")} {describe(x)}'.strip(), describe(y)
  return None
