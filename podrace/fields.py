"""Values of settings and of records: the roles of texts, numbers as users write them; types and ranges.

Importing this imports nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
import types
import typing
from collections.abc import Mapping
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


# --- JSON objects -----------------------------------------------------------------------------------

LARGEST = 1e100  # magnitude of a number in JSON, so that sums and squares stay finite
STEPS = 2**63 - 1  # largest count
JSON_KINDS: dict[str, tuple[type, ...]] = {
  'a text': (str,),
  'a whole number': (int,),
  'a number': (int, float),
  'a list': (list,),
  'an object': (dict,),
  'true or false': (bool,),
}


@dataclasses.dataclass(frozen=True)
class Member:
  """The declaration of one member of a JSON object.

  Attributes:
    kind: a key of JSON_KINDS.
    low: the least number.
    high: the largest number.
    needed: it must be there.
    null: it may be null.
    each: the declaration of each element of a list.
  """

  kind: str
  low: float = -LARGEST
  high: float = LARGEST
  needed: bool = False
  null: bool = False
  each: Member | None = None

  def difference(self, value: Any) -> str:
    """Return what `value` should be, empty if it is that."""
    if value is None and self.null:
      return ''
    if not isinstance(value, JSON_KINDS[self.kind]) or (
      isinstance(value, bool) and self.kind != 'true or false'
    ):
      return self.kind
    if isinstance(value, int | float) and not self.low <= value <= self.high:  # NaN is not
      return f'{self.kind} from {self.low:g} to {self.high:g}'
    if self.each is not None and isinstance(value, list):
      for element in value:
        if wrong := self.each.difference(element):
          return f'{self.kind}, each element {wrong}'
    return ''


COUNT = Member('a whole number', 0, STEPS)
POSITIVE = Member('a whole number', 1, STEPS)
NUMBER = Member('a number', null=True)
TEXT = Member('a text')


def check_members(value: Any, schema: Mapping[str, Member]) -> None:
  """Check an object's declared members; others may be anything.

  Raises:
    ValueError: with the reason, which has no member's value: that may be long.
  """
  if not isinstance(value, dict):
    raise ValueError('is no object')
  for name, member in schema.items():
    if name not in value:
      if member.needed:
        raise ValueError(f'has no {name}')
    elif wrong := member.difference(value[name]):
      kind = type(value[name]).__name__
      shown = 'out of range' if wrong.startswith(f'{member.kind} from') else f'of type {kind}'
      raise ValueError(f'has a {name} {shown}, expected {wrong}')


def needed(member: Member) -> Member:
  """Return the declaration of a member that must be there."""
  return dataclasses.replace(member, needed=True)


def is_step(name: str) -> bool:
  """Return whether a file's name is a number of steps: int() takes more, and fails for some digits."""
  return name.isascii() and name.isdigit() and int(name) <= STEPS


def is_number(x: Any) -> bool:
  """Return whether JSON's `x` is a number of which means and pictures can be made."""
  return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) <= LARGEST


# --- the files of a run directory ---------------------------------------------------------------------

_RATE = Member('a number', 0, LARGEST, null=True)
_EACH = Member('a list', each=NUMBER)
SUMMARY = {
  'step': COUNT,
  'episode_return': NUMBER,
  'episode_return_by_seed': _EACH,
  'steps_per_s': _RATE,
  'compile_s': NUMBER,
  'ended': TEXT,
}
LINE = {
  'step': needed(COUNT),
  'wall_s': NUMBER,
  'steps_per_s': _RATE,
  'episode_return': NUMBER,
  'episode_return_mean': NUMBER,
  'episode_length': NUMBER,
  'episodes': _RATE,
  'gradient_steps': _RATE,
  'env_restarts': _RATE,
  'dropped_steps': _RATE,
  'episode_return_by_seed': _EACH,
  'episodes_by_seed': Member('a list', each=_RATE),
}  # of metrics.jsonl and eval.jsonl
