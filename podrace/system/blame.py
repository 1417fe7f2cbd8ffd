"""Errors about the user's code: the function, its file and line, and the value it returned.

Processes that step environments use this module and have no JAX, so functions import it.
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
from podrace.system.importing import is_user_file, shorten

MOST_LINES = 12  # lines of the message of a user's exception
MOST_LETTERS = 200  # characters of a description
TRACEBACK = 'PODRACE_TRACEBACK=1 shows the whole traceback'


class UserCodeFailed(UsageError):
  """A function of the user raised an exception."""


def inner(owner: Any) -> Any:
  """Return the object within wrappers of podrace, such as NextStepReset."""
  while type(owner).__module__.startswith('podrace.') and hasattr(owner, 'dynamics'):
    if inspect.ismethod(owner.dynamics):  # of a model to plan with, which wraps nothing
      break
    owner = owner.dynamics
  return owner


def is_ours(owner: Any) -> bool:
  """Return whether an object's class, within wrappers, is podrace's."""
  return type(inner(owner)).__module__.startswith('podrace.')


def label(owner: Any, name: str) -> str:
  """Return the name of a method with its place, as `a2c.A2C.act (a2c.py:31)`."""
  owner = inner(owner)
  cls = type(owner)
  return f'{cls.__module__}.{cls.__qualname__}.{name}{_place(owner, name)}'


def _place(owner: Any, name: str) -> str:
  try:
    function = inspect.unwrap(getattr(owner, name))
    path, line = inspect.getsourcefile(function), inspect.getsourcelines(function)[1]
  except (AttributeError, OSError, TypeError):  # it has no source, as a function made by `eval`
    return ''
  return f' ({shorten(path or "")}:{line})'


def describe(x: Any) -> str:
  """Return types and shapes, as `(float32[8, 3], {'loss': float32[]})`."""
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
  """Raise UsageError: method `name` of `owner` returned `came` in place of `expected`."""
  raise UsageError(f'{label(owner, name)} returned {came}, expected {expected}')


def out_of_space(agent: Any, space: Any, action: Any = None) -> str:
  """Return the message about an agent's action outside the space."""
  came = 'an action' if action is None else f'the action {action}'
  advice = ''
  if hasattr(space, 'low') and 'nan' not in str(action):  # a Box
    advice = ': clip or squash it, as `to_action` of podrace.distributions does'
  return f'{label(agent, "act")} returned {came}, expected one in {space}{advice}'


def calling(owner: Any, name: str, given: str, *args: Any) -> Any:
  """Call method `name` of the user's `owner`; returns its result.

  Args:
    owner: has the method.
    name: the name of the method.
    given: describes the arguments, for the message.
    *args: the arguments.

  Raises:
    UserCodeFailed: if the method fails, with the lines of the traceback in the user's files.
  """
  try:
    return getattr(owner, name)(*args)
  except UsageError:
    raise
  except Exception as e:
    raise failed(owner, name, given, e) from e


def failed(owner: Any, name: str, given: str, error: BaseException) -> UserCodeFailed:
  """Return the error for an exception of the user's method; arguments as of `calling`."""
  frames = of_the_user(owner, error)
  return UserCodeFailed(
    f'{label(owner, name)} failed:\n{_account(frames, error)}\nIt was given {given}.\n{TRACEBACK}.'
  )


def not_made(name: str, error: Exception) -> UsageError:
  """Return the error for an exception in a constructor of the user."""
  frames = of_the_user(None, error) or of_the_user(None, error.__cause__)
  if not frames:
    return UsageError(f'{name}: {error}')
  return UsageError(f'{name} cannot be made:\n{_account(frames, error)}\n{TRACEBACK}.')


def account(error: BaseException) -> str:
  """Return the lines of a traceback in the user's files, the exception, and how to see the rest."""
  return f'{_account(of_the_user(None, error), error)}\n{TRACEBACK}.'


def _account(frames: list[traceback.FrameSummary], error: BaseException) -> str:
  """Return lines of a traceback, and the exception."""
  where = ''.join(traceback.format_list(frames))
  lines = ''.join(traceback.format_exception_only(error)).strip().splitlines()
  return where + '\n'.join(lines[:MOST_LINES] + (['...'] if len(lines) > MOST_LINES else []))


def of_the_user(owner: Any, error: BaseException | None) -> list[traceback.FrameSummary]:
  """Return the frames outside podrace and libraries, or in the file of the owner's class."""
  files = (getattr(sys.modules.get(name), '__file__', None) for name in ('jax', 'gymnasium'))
  libraries = [Path(file).parent for file in files if file]
  try:
    own = inspect.getsourcefile(type(inner(owner)))
  except TypeError:
    own = None

  def is_of_user(file: str) -> bool:
    return file == own or (
      is_user_file(file) and not any(Path(file).is_relative_to(p) for p in libraries)
    )

  frames = traceback.extract_tb(None if error is None else error.__traceback__)
  return [f for f in frames if is_of_user(f.filename)]


def leaves(tree: Any) -> list[tuple[str, Any]]:
  """Return the path, as `.params['w']`, and the array of each leaf."""
  import jax

  return [(jax.tree_util.keystr(p), x) for p, x in jax.tree_util.tree_leaves_with_path(tree)]


def same_structure(x: Any, y: Any) -> bool:
  """Return whether two trees differ in their leaves only."""
  import jax

  a, b = (str(jax.tree.structure(tree)) for tree in (x, y))
  return a == b


def first_difference(came: Any, expected: Any) -> tuple[str, str] | None:
  """Describe the first difference in types between two trees, on both sides.

  None if there is none.
  """
  if not same_structure(came, expected):
    if missing := _absent(expected, came):
      return f'in which {", ".join(missing)} is missing', 'one that has it'
    if added := _absent(came, expected):
      return f'with {", ".join(added)}', 'one without it'
    return describe(came), describe(expected)
  for (path, x), (_, y) in zip(leaves(came), leaves(expected), strict=True):
    if _type(x) != _type(y):
      return f'{path.lstrip(".")} {describe(x)}'.strip(), describe(y)
  return None


def _type(x: Any) -> tuple[Any, Any]:
  """Return the shape and the dtype of an array, or of a number of Python as JAX takes it."""
  import jax.numpy as jnp

  return jnp.shape(x), x.dtype if hasattr(x, 'dtype') else jnp.result_type(x)


def _absent(tree: Any, other: Any) -> list[str]:
  """Return the paths of the outermost parts that only the first tree has, at most three."""
  import jax

  paths, other_paths = (
    [p for p, _ in jax.tree_util.tree_leaves_with_path(t)] for t in (tree, other)
  )
  known = {path[:n] for path in other_paths for n in range(len(path) + 1)}
  lost = [
    p[:n]
    for p in paths
    for n in range(1, len(p) + 1)
    if p[:n] not in known and p[: n - 1] in known | {()}
  ]
  return [jax.tree_util.keystr(p).lstrip('.') for p in dict.fromkeys(lost)][:3]


def check_arrays(owner: Any, name: str, result: Any, expected: str) -> None:
  """Refuse a result of a method with leaves that are no arrays."""
  import jax

  for path, x in leaves(result):
    if not isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float):
      refuse(owner, name, f'{path.lstrip(".")} {describe(x)}'.strip(), expected)
