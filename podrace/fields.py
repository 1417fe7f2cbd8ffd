"""Values of settings: the roles of texts, numbers as users write them, and wrong types, refused where they are made.

Importing this imports nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
import types
import typing
from typing import Annotated, Any, Literal


@dataclasses.dataclass(frozen=True)
class Role:
  """The meaning of a text, in `Annotated`. Each text of a setting has one, see `podrace.own_code`."""

  name: str


EnvName = Annotated[str, Role('environment')]  # LIB:NAME, or several with blanks between them
ClassName = Annotated[str, Role('class')]  # MODULE:CLASS, or one of podrace's agents
FilePath = Annotated[str, Role('file')]  # a file or a run directory, which is read as data
PlainText = Annotated[str, Role('text')]  # names nothing that could be imported or opened

TEXTS = ('EnvName', 'ClassName', 'FilePath', 'PlainText')  # the types of texts that have a role

KINDS: dict[str, tuple[type, str]] = {
  'float': (numbers.Real, 'a number'),
  'int': (numbers.Integral, 'a whole number'),
  'bool': (bool, 'True or False'),
  **dict.fromkeys(('str', *TEXTS), (str, 'a text')),
}


def check_types(settings: Any) -> None:
  """Raises ValueError for the first field whose value is of another type than it declares.

  Fields of other types than float, int, bool and str are not looked at, nor are arrays.
  """
  for field in dataclasses.fields(settings):
    declared = field.type if isinstance(field.type, str) else getattr(field.type, '__name__', '')
    kind = KINDS.get(declared.removeprefix('Annotated[').partition(',')[0])
    value = getattr(settings, field.name)
    if kind is None or hasattr(value, 'dtype'):
      continue
    if not _is(value, kind[0]):
      raise ValueError(
        f'{field.name.rstrip("_")} of {type(settings).__name__} must be {kind[1]}, not {value!r}'
      )


def _is(value: Any, kind: type) -> bool:
  return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def role_of(declared: Any) -> str:
  """Return the name of the role that a type declares; 'choice' of a Literal, '' where there is none."""
  if typing.get_origin(declared) is Literal:
    return 'choice'
  roles = [x for x in getattr(declared, '__metadata__', ()) if isinstance(x, Role)]
  return roles[0].name if roles else ''


def item_types(declared: Any, count: int) -> list[Any]:
  """Return the type of each of `count` items of a value of the type `declared`; None where it is not known."""
  of = typing.get_args(declared) if typing.get_origin(declared) is tuple else ()
  if len(of) == 2 and of[1] is Ellipsis:
    return [of[0]] * count
  return list(of) if len(of) == count else [None] * count


def expected(value: Any, declared: Any) -> str:
  """Return which type was expected in the place of a value from JSON; '' if it is of the type `declared`.

  Types that JSON does not have, such as arrays and classes of users, are not compared.
  """
  origin, args = typing.get_origin(declared), typing.get_args(declared)
  if origin is Annotated:
    return expected(value, args[0])
  if origin is Literal:
    fits = any(type(value) is type(x) and value == x for x in args)
    return '' if fits else f'one of {", ".join(map(str, args))}'
  if origin in (typing.Union, types.UnionType):
    wrong = [expected(value, x) for x in args]
    return '' if '' in wrong else ' or '.join(wrong)
  if origin is tuple:
    if not isinstance(value, list) or (args[-1] is not Ellipsis and len(value) != len(args)):
      return 'a list' if args[-1] is Ellipsis else f'a list of {len(args)}'
    each = zip(value, item_types(declared, len(value)), strict=True)
    return next((f'a list, each of it {x}' for v, t in each if (x := expected(v, t))), '')
  if declared is type(None):
    return '' if value is None else 'null'
  kind = KINDS.get(declared.__name__) if isinstance(declared, type) else None
  if kind is not None:
    return '' if _is(value, kind[0]) else kind[1]
  return 'an object' if dataclasses.is_dataclass(declared) and not isinstance(value, dict) else ''


def whole_number(text: str) -> str:
  """1e7 and 1_000_000 as integers are written; any other text as it is."""
  with contextlib.suppress(ValueError, OverflowError):
    value = float(text)
    if value == int(value) and not text.lstrip('-').isdigit():
      return str(int(value))
  return text
