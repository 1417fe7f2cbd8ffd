"""Errors about code that is the user's: which function, in which file and line, what came of it.

Processes that step environments use it, which have no JAX: it is imported where it is needed.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from podrace.errors import UsageError
from podrace.system.importing import is_the_users, short

MOST_LINES = 12  # of the message of somebody else's exception
MOST_LETTERS = 200  # of a description
TRACEBACK = 'PODRACE_TRACEBACK=1 shows the whole traceback'


class Failed(UsageError):
  """A function of the user's raised an exception."""


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
  return f' ({short(path or "")}:{line})'


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


def out_of_space(agent: Any, space: Any, action: Any = None) -> str:
  """What to say of an agent whose action is not in the space."""
  came = 'an action' if action is None else f'the action {action}'
  advice = ''
  if hasattr(space, 'low') and 'nan' not in str(action):  # a Box
    advice = ': clip or squash it, as `to_action` of podrace.distributions does'
  return f'{label(agent, "act")} returned {came}, expected one in {space}{advice}'


def calling(owner: Any, name: str, given: str, *args: Any) -> Any:
  """What the user's function returns; `given` says what it was called with.

  Raises:
    Failed: if it fails, with those lines of the traceback that are the user's.
  """
  try:
    return getattr(owner, name)(*args)
  except UsageError:
    raise
  except Exception as e:
    raise failed(owner, name, given, e) from e


def failed(owner: Any, name: str, given: str, error: BaseException) -> Failed:
  """The error for an exception of the user's function."""
  frames = of_the_user(owner, error)
  return Failed(
    f'{label(owner, name)} failed:\n{_account(frames, error)}\nIt was given {given}.\n{TRACEBACK}.'
  )


def not_made(name: str, error: Exception) -> UsageError:
  """The error for an exception while something of the user's is made."""
  frames = of_the_user(None, error) or of_the_user(None, error.__cause__)
  if not frames:
    return UsageError(f'{name}: {error}')
  return UsageError(f'{name} cannot be made:\n{_account(frames, error)}\n{TRACEBACK}.')


def _account(frames: list[traceback.FrameSummary], error: BaseException) -> str:
  """These lines of a traceback, and the exception."""
  where = ''.join(traceback.format_list(frames))
  lines = ''.join(traceback.format_exception_only(error)).strip().splitlines()
  return where + '\n'.join(lines[:MOST_LINES] + (['...'] if len(lines) > MOST_LINES else []))


def of_the_user(owner: Any, error: BaseException | None) -> list[traceback.FrameSummary]:
  """Frames that are neither podrace's nor a library's, but for those of the file of the owner."""
  files = (getattr(sys.modules.get(name), '__file__', None) for name in ('jax', 'gymnasium'))
  libraries = [Path(file).parent for file in files if file]
  try:
    own = inspect.getsourcefile(type(inner(owner)))
  except TypeError:
    own = None

  def is_ours(file: str) -> bool:
    return file == own or (
      is_the_users(file) and not any(Path(file).is_relative_to(p) for p in libraries)
    )

  found = traceback.extract_tb(None if error is None else error.__traceback__)
  return [f for f in found if is_ours(f.filename)]


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
    if missing := _absent(expected, came):
      return f'in which {", ".join(missing)} is missing', 'one that has it'
    if added := _absent(came, expected):
      return f'with {", ".join(added)}', 'one without it'
    return describe(came), describe(expected)
  for (path, x), (_, y) in zip(leaves(came), leaves(expected), strict=True):
    if (x.shape, x.dtype) != (y.shape, y.dtype):
      return f'{path.lstrip(".")} {describe(x)}'.strip(), describe(y)
  return None


def _absent(tree: Any, other: Any) -> list[str]:
  """The outermost parts of a tree that another one has not, at most three."""
  import jax

  paths, others = ([p for p, _ in jax.tree_util.tree_leaves_with_path(t)] for t in (tree, other))
  known = {path[:n] for path in others for n in range(len(path) + 1)}
  lost = [
    p[:n]
    for p in paths
    for n in range(1, len(p) + 1)
    if p[:n] not in known and p[: n - 1] in known | {()}
  ]
  found = [jax.tree_util.keystr(p).lstrip('.') for p in dict.fromkeys(lost)]
  return found[:3]


def check_arrays(owner: Any, name: str, found: Any, expected: str) -> None:
  """Refuses what is no array in what a function returned."""
  import jax

  for path, x in leaves(found):
    if not isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float):
      refuse(owner, name, f'{path.lstrip(".")} {describe(x)}'.strip(), expected)
