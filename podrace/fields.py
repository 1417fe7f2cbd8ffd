"""Values of settings: numbers as users write them, and wrong types, refused where they are made.

Importing this imports nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
from typing import Any

KINDS: dict[str, tuple[type, str]] = {
  'float': (numbers.Real, 'a number'),
  'int': (numbers.Integral, 'a whole number'),
  'bool': (bool, 'True or False'),
  'str': (str, 'a text'),
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
    if not isinstance(value, kind[0]) or (isinstance(value, bool) and kind[0] is not bool):
      raise ValueError(
        f'{field.name.rstrip("_")} of {type(settings).__name__} must be {kind[1]}, not {value!r}'
      )


def whole_number(text: str) -> str:
  """1e7 and 1_000_000 as integers are written; any other text as it is."""
  with contextlib.suppress(ValueError, OverflowError):
    value = float(text)
    if value == int(value) and not text.lstrip('-').isdigit():
      return str(int(value))
  return text
